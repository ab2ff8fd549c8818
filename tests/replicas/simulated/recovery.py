"""How long nobody decides for all, by the length of the lease: the owner is killed, or hands over.

`PYTHONPATH=tests .venv/bin/python -m replicas.simulated.recovery` prints the table of docs/decisions/0007-replicas.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fairshare.replicas.lease import LeaseOptions
from replicas.simulated.node import Node
from replicas.simulated.world import Plan, World

RUNS = 20


def unowned_seconds(seed: int, lease_seconds: float, end: Callable[[World, Node], None]) -> float:
    """From the end of the first owner until the next one decides, having heard all replicas or waited for them."""
    plan = Plan(load_seconds=20.0 + 2 * lease_seconds, faults=0)
    lease = LeaseOptions(lease_seconds=lease_seconds, renew_every_seconds=lease_seconds / 5)
    world = World(seed, replace(plan, options=replace(plan.options, lease=lease)))
    ended_at = began_at = 0.0

    def ends() -> None:
        nonlocal ended_at
        owner = world.owner
        assert owner is not None
        ended_at = world.timeline.now
        end(world, owner)

    def looks() -> None:
        nonlocal began_at
        if world.epochs > 1:
            began_at = world.timeline.now
        else:
            world.timeline.after(0.005, looks)

    at = 10.0 + world.rng.uniform(0.0, lease_seconds)
    world.timeline.at(at, ends)
    world.timeline.at(at, looks)
    world.run()
    assert began_at, "nobody took over"
    return began_at - ended_at


def row(name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"| {name} | {ordered[len(ordered) // 2]:.2f} | {ordered[-1]:.2f} |"


def main() -> None:
    print("| lease, seconds | without an owner: median | most |\n| --- | --- | --- |")
    for lease_seconds in (3.0, 5.0, 10.0, 20.0):
        killed = [
            unowned_seconds(seed, lease_seconds, lambda world, owner: world.crash(owner, back_after_seconds=30.0))
            for seed in range(RUNS)
        ]
        print(row(f"{lease_seconds:g}, owner killed", killed), flush=True)
    handed = [unowned_seconds(seed, 5.0, lambda world, owner: world.drain(owner)) for seed in range(RUNS)]
    print(row("5, owner hands over", handed))


if __name__ == "__main__":
    main()
