"""Where one owner per pool ends: the real machines in virtual time, one core that decides for all.

    python bench/owner_limit.py --wake-us 40 --frame-us 24 --decision-us 18 --charge-us 4    # costs of bench-replicas

Requests come to the replicas at random times and run for a moment; the owner's core takes whatever has arrived, is busy
for as long as that costs (so much to be woken, for each frame and for each message), and answers. How long requests
wait for their decision follows from the load. `asked`: requests that take two slots, about each of which the owner is
asked. `asked, one frame each`: the same if a replica that waits for an answer said nothing more until it came. `lent`:
requests of one slot, most of which use a slot that was lent.
"""

import argparse
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from fairshare.core.decisions import Decision, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.replicas.messages import Estate, Message, Released, Submitted
from fairshare.replicas.owner import Owner, OwnerOptions, Session
from fairshare.replicas.replica import Replica, ReplicaOptions

REPLICAS = 16
TEAMS = 20
CAPACITY_SLOTS = 100_000
LINK_SECONDS = 30e-6
"""From one process to another, beside what it costs them."""
RUN_SECONDS = 0.05
"""How long a request runs at its engine, on average."""
TICK_SECONDS = 0.01
"""How often each replica looks at the time."""
RATES = (5_000, 10_000, 20_000, 30_000, 40_000, 60_000, 100_000)
GIVE_UP_SECONDS = 0.05
"""Longer waits than this, and growing: the owner is overrun."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the owner's core is busy with, in seconds."""

    wake: float
    """To find out that there is something to do, when it slept."""
    frame: float
    """One read, and one written."""
    decision: float
    """An acquire and its release, without the frames in which they come: half of it for each."""
    charge: float
    """The charge of a request about which it was not asked."""

    def of(self, messages: Sequence[Message]) -> float:
        """A frame of these and its answer."""
        charges = sum(isinstance(message, Released) and not message.id for message in messages)
        return self.frame + charges * self.charge + (len(messages) - charges) * self.decision / 2


@dataclass(frozen=True, slots=True)
class Found:
    """What one rate led to."""

    rate: float
    """Requests a second, of all replicas."""
    load: float
    """The part of its time that the owner's core was busy."""
    asked: float
    """The part of the requests about which it was asked."""
    p50_seconds: float
    p99_seconds: float


class World:
    """One rate of requests, in virtual time."""

    def __init__(self, rate: float, slots: int, costs: Costs, *, one_frame_each: bool = False, seed: int = 1) -> None:
        """`one_frame_each`: a replica that waits for an answer says nothing until it comes. None does so yet."""
        self.now = 0.0
        self.rate, self.slots, self.costs = rate, slots, costs
        self.one_frame_each = one_frame_each
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        shares = {f"team{number}": f"1/{TEAMS}" for number in range(TEAMS)}
        pool = Pool("chat", CAPACITY_SLOTS, shares, None, lambda: self.now)
        instance = Instance(id="engine", part_slots=CAPACITY_SLOTS, seats=2 * CAPACITY_SLOTS)
        self.owner = Owner(
            epoch=1,
            queues={"chat": make_queue(pool, Mode.HOLD, instances=[instance])},
            estate=Estate({}, {}),
            options=OwnerOptions(longest_request_seconds=60.0),
            now=0.0,
            decides_until=lambda: 1e9,
        )
        self.nodes = [Node(self, f"r{number}") for number in range(REPLICAS)]
        self.arrived: list[tuple[Node, Sequence[Message]]] = []
        self.is_busy = False
        self.busy_until = 0.0
        self.busy_seconds = 0.0
        self.asked = 0
        self.waits: list[float] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def arrives(self, node: "Node", messages: Sequence[Message]) -> None:
        """A frame is in the owner's socket."""
        self.arrived.append((node, messages))
        if not self.is_busy:
            self.turn(self.costs.wake)

    def turn(self, seconds: float = 0.0) -> None:
        """One turn of the owner's event loop: everything that is there is read, decided and answered."""
        frames, self.arrived = self.arrived, []
        self.is_busy = bool(frames)
        if not frames:
            return
        seconds += sum(self.costs.of(messages) for _, messages in frames)
        self.busy_until = self.now + seconds
        self.busy_seconds += seconds
        for node, messages in frames:
            self.owner.received(node.session, messages, self.now)
        answers = [(node, node.session.outbox) for node in self.nodes if node.session.outbox]
        for node, answer in answers:
            node.session.outbox = []
            self.after(seconds + LINK_SECONDS, lambda node=node, answer=answer: node.hears(answer))
        self.after(seconds, self.turn)

    def run(self, seconds: float) -> Found:
        for node in self.nodes:
            node.begins()
        warm_seconds = 0.5 * seconds
        measured = False
        while self._events and self.now < seconds:
            self.now, _, do = heapq.heappop(self._events)
            do()
            if not measured and self.now > warm_seconds:
                measured = True
                self.busy_seconds, self.asked = max(0.0, self.busy_until - self.now), 0
                self.waits.clear()
        still_waiting = (self.now - at for node in self.nodes for at in node.submitted.values())
        waits = sorted([*self.waits, *still_waiting])
        busy_seconds = self.busy_seconds - max(0.0, self.busy_until - self.now)
        return Found(
            rate=self.rate,
            load=busy_seconds / (self.now - warm_seconds),
            asked=self.asked / len(waits),
            p50_seconds=waits[len(waits) // 2],
            p99_seconds=waits[int(len(waits) * 0.99)],
        )


class Node:
    """A replica, its clients and its part of the engine."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.session = Session(name, 1)
        self.replica = Replica(
            replica=name,
            pools=("chat",),
            local=lambda _: {},
            options=ReplicaOptions(),
            clock=lambda: world.now,
            soon=self.soon,
        )
        self.number = 0
        self.submitted: dict[str, float] = {}
        self.flushes = False
        self.waits = False
        """For the answer to a frame."""

    def begins(self) -> None:
        self.world.arrives(self, self.replica.connected())
        self.world.after(self.world.rng.expovariate(self.world.rate / REPLICAS), self.arrives)
        self.world.after(self.world.rng.uniform(0.0, TICK_SECONDS), self.ticks)

    def ticks(self) -> None:
        self.carry_out(self.replica.tick())
        self.world.after(TICK_SECONDS, self.ticks)

    def arrives(self) -> None:
        world = self.world
        world.after(world.rng.expovariate(world.rate / REPLICAS), self.arrives)
        self.number += 1
        request = Request(f"{self.number}", f"team{world.rng.randrange(TEAMS)}", slots=world.slots)
        self.submitted[request.id] = world.now
        decisions = self.replica.submitted("chat", request)
        world.asked += not decisions
        self.carry_out(decisions)

    def hears(self, messages: Sequence[Message]) -> None:
        self.waits = False
        self.carry_out(self.replica.received(messages))
        self.soon()

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                request_id = decision.request_id
                self.world.waits.append(self.world.now - self.submitted.pop(request_id))
                self.world.after(
                    self.world.rng.expovariate(1.0 / RUN_SECONDS),
                    lambda request_id=request_id: self.carry_out(self.replica.released(request_id, 1.0)),
                )

    def soon(self) -> None:
        """Something is to be said at the end of this turn; here a turn is a moment."""
        if not self.flushes:
            self.flushes = True
            self.world.after(0.0, self.flush)

    def flush(self) -> None:
        self.flushes = False
        if self.waits and self.world.one_frame_each:
            return
        if messages := self.replica.take_outbox():
            self.waits = any(isinstance(message, Submitted) for message in messages)
            self.world.after(LINK_SECONDS, lambda: self.world.arrives(self, messages))


def simulated(costs: Costs, rates: Sequence[int] = RATES, requests: int = 15_000) -> dict[str, list[Found]]:
    """For requests of each kind, rate after rate, up to the one that overruns the owner."""
    found: dict[str, list[Found]] = {}
    for kind, slots, one_frame_each in (("asked", 2, False), ("asked, one frame each", 2, True), ("lent", 1, False)):
        found[kind] = []
        for rate in rates:
            world = World(rate, slots, costs, one_frame_each=one_frame_each)
            found[kind].append(world.run(max(0.6, requests / rate)))
            if found[kind][-1].p99_seconds > GIVE_UP_SECONDS:
                break
    return found


def table(found: dict[str, list[Found]]) -> list[str]:
    """As Markdown."""
    lines = [
        "| requests/s | | asked about | load of the owner's core | wait for the decision, p50 | p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, rows in found.items():
        for row in rows:
            if row.p99_seconds > GIVE_UP_SECONDS:
                lines.append(f"| {row.rate:,} | {kind} | {row.asked:.0%} | overrun | | |")
            else:
                waits = f"{row.p50_seconds * 1e3:.2f} ms | {row.p99_seconds * 1e3:.2f} ms"
                lines.append(f"| {row.rate:,} | {kind} | {row.asked:.0%} | {row.load:.0%} | {waits} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wake-us", type=float, required=True, help="what it costs to wake the owner, microseconds")
    parser.add_argument("--frame-us", type=float, required=True, help="what a frame costs it")
    parser.add_argument("--decision-us", type=float, required=True, help="an acquire and its release, without frames")
    parser.add_argument("--charge-us", type=float, required=True, help="a charge, nothing asked")
    given = parser.parse_args()
    in_us = (given.wake_us, given.frame_us, given.decision_us, given.charge_us)
    print("\n".join(table(simulated(Costs(*(us * 1e-6 for us in in_us))))))


if __name__ == "__main__":
    main()
