"""What must be true after every step, and at the end when all is quiet again."""

# The checks look into the machines: what only they know must hold too.
# pyright: reportPrivateUsage=false

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fairshare.core.pool import Pool
from fairshare.replicas.lease import Role as LeaseRole
from replicas.simulated.world import BrokenPromise

if TYPE_CHECKING:
    from replicas.simulated.node import Node
    from replicas.simulated.world import World


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenPromise(what)


def check(world: "World", stepped: "Node") -> None:
    """After every step of a process, which has changed nothing of any other."""
    deciding: list[Node] = []
    for node in world.nodes:
        keeper, owner = node.member._keeper, node.member._owner
        if keeper.role is LeaseRole.OWNER and keeper.decides(node.clock()):
            row = world.database.row
            if row.owner != node.name or row.ends_at <= world.database.clock():
                raise BrokenPromise(
                    f"{node.name} may decide in epoch {keeper.epoch}, but the lease in force is {row}",
                )
            if owner is not None:
                deciding.append(node)
                if not owner.is_gathering and owner.epoch > world.epoch:
                    world.epoch = owner.epoch
                    world.epochs += 1
                    world.inherited = {node.name, *(session.peer for session in owner.sessions)}
                    world.note(node, "decides in epoch", owner.epoch, "and knows", sorted(world.inherited))
                elif owner.epoch == world.epoch:
                    new = {session.peer for session in owner.sessions} - world.inherited
                    if new:
                        world.inherited |= new - _late(world)
    if len(deciding) > 1:
        raise BrokenPromise(f"{[node.name for node in deciding]} decide at the same time")
    found = world.within_share_slots()
    capacity = sum(world.most_slots.values())
    if found["owner"] > capacity:
        raise BrokenPromise(
            f"{found['owner']} within-share slots were given by owners, the pools have {capacity} ({found})"
        )
    if stepped.alone_slots > stepped.part_slots:
        raise BrokenPromise(
            f"{stepped.name} gave {stepped.alone_slots} within-share slots alone, of {stepped.part_slots}"
        )
    if deciding == [stepped] and (owner := stepped.member._owner) is not None and not owner.is_gathering:
        _check_owner(world, owner)


def _late(world: "World") -> set[str]:
    """Replicas that still run something of an epoch whose end they did not announce in time."""
    return {
        node.name
        for node in world.nodes
        for call in node.calls.values()
        if call.place == "sent"
        and not call.degraded
        and 0 < call.epoch < world.epoch
        and node.name not in world.inherited
    }


def _check_owner(world: "World", owner: object) -> None:
    from fairshare.replicas.owner import Owner

    assert isinstance(owner, Owner)
    for name, queue in owner.queues.items():
        now = queue.pool.begin()
        lost = sum(
            each.slots
            for of_replica in owner._lost.values()
            for each in of_replica
            if each.pool == name and each.until > now
        )
        if queue.pool.phantom_slots != lost:
            raise BrokenPromise(f"{queue.pool.phantom_slots} phantoms in pool {name}, {lost} are lost")
    for session in owner.sessions:
        if session.peer in owner._lost:
            raise BrokenPromise(f"{session.peer} has announced itself and still has phantoms")
    if world.plan.half_life_seconds is None:
        # Without decay usage only changes by being charged: if no sum has changed, what was right is right.
        sums = (owner, sum(owner._counted.values()), *(_scaled_usage(queue.pool) for queue in owner.queues.values()))
        if sums == world.checked_sums:
            return
        world.checked_sums = sums
        expected: defaultdict[str, float] = defaultdict(float)
        for node in (*world.nodes, *world.past):
            for team, cost_units in node.charged_up_to(owner._counted.get(node.name, 0)).items():
                expected[team] += cost_units
        charged: Counter[str] = Counter()
        for queue in owner.queues.values():
            for team, cost_units in queue.pool.usage()[0].items():
                charged[team] += cost_units  # type: ignore[assignment]
        for team in expected.keys() | charged.keys():
            if abs(expected[team] - charged[team]) >= 1e-6:
                raise BrokenPromise(
                    f"{team} was charged {charged[team]:.6f} cost units, its requests that are counted consumed"
                    f" {expected[team]:.6f}"
                )


def _scaled_usage(pool: Pool) -> float:
    return sum(state.scaled_usage for state in pool._states.values())


def check_end(world: "World") -> None:
    """When all faults are over, the load has ended and the longest request could have ended."""
    owners = [node for node in world.nodes if node.member.owns]
    _must(len(owners) == 1, f"{[node.name for node in owners]} own in the end; there must be one")
    for node in world.nodes:
        _must(not node.calls, f"{node.name} still has {sorted(node.calls)}, which nobody will end")
        replica = node.member._replica
        _must(not replica._mine, f"the replica machine of {node.name} still has {sorted(replica._mine)}")
        _must(not replica.unsaved_charges, f"{node.name} still keeps {replica.unsaved_charges} charges")
    owner = owners[0].member._owner
    assert owner is not None
    for node in world.nodes:
        _must(
            node.name == owners[0].name or any(session.peer == node.name for session in owner.sessions),
            f"{node.name} is not among the replicas of the owner {owners[0].name}",
        )
        _must(
            owner._counted.get(node.name, 0) == len(node.charged),
            f"{len(node.charged)} requests of {node.name} have ended, {owner._counted.get(node.name, 0)} are counted",
        )
    _must(not owner._entries, f"the owner still has {sorted(owner._entries)}")
    for name, queue in owner.queues.items():
        _must(queue.pool.live_slots == 0, f"{queue.pool.live_slots} slots of pool {name} are in flight for ever")
        _must(queue.pool.phantom_slots == 0, f"{queue.pool.phantom_slots} phantoms of pool {name} do not end")
        stat = queue.snapshot()
        _must(stat.held == 0, f"{stat.held} requests are held in pool {name} for ever")
        for instance in stat.instances:
            _must(
                instance.in_flight_slots == 0 and instance.aborting_slots == 0,
                f"instance {instance.id} has {instance.in_flight_slots} slots in flight and"
                f" {instance.aborting_slots} being aborted for ever",
            )
        for stat in queue.pool.snapshot():
            _must(stat.in_flight == 0, f"team {stat.team} has {stat.in_flight} slots of pool {name} in flight for ever")
    answered = world.served + world.cancelled + world.crashed + sum(world.refused.values())
    _must(answered == world.submitted, f"{world.submitted} requests came, {answered} have ended")
