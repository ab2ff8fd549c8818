"""A model of one process: its clock, its requests and their engines, and the real machines of `fairshare.replicas`."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from fairshare.core.decisions import (
    Decision,
    DispatchQueue,
    Held,
    HoldOptions,
    Instance,
    Recall,
    Refused,
    Request,
    Send,
)
from fairshare.core.hold import HoldQueue
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass, Standing
from fairshare.replicas.member import LeftBehind, Member, StoreCall
from fairshare.replicas.messages import Estate, OnLink
from fairshare.replicas.replica import ReplicaState
from replicas.simulated.network import Link

if TYPE_CHECKING:
    from replicas.simulated.world import World

LONGEST_WAIT_SECONDS = 15.0


class Call:
    """One request of one client."""

    def __init__(self, request: Request, pool: str, seconds: float) -> None:
        self.request = request
        self.pool = pool
        self.seconds = seconds
        """How long its engine needs."""
        self.place = "held"
        self.attempt = 0
        """Counts sendings, so that what was planned for an earlier one is void."""
        self.began = False
        self.standing = Standing.BORROWING
        self.is_guest = False
        """Whether another pool than its own serves it."""
        self.degraded = False
        """Whether a replica without an owner sent it."""
        self.epoch = 0
        """Whose decision it was, if not."""
        self.instance_id = ""


class Node:
    """One life of one process. It is its own shell: the `Ports` of its member."""

    def __init__(self, world: "World", place: int, life: int) -> None:
        self.world = world
        self.place = place
        """Which machine, over all its lives."""
        self.name = f"r{place}.{life}"
        self.rng: random.Random = world.rng
        self.rate = 1.0 + world.rng.uniform(-world.plan.clock_drift, world.plan.clock_drift)
        self._offset_seconds = world.rng.uniform(0.0, 1e4)
        self._from = world.timeline.now
        self.is_alive = True
        self.is_paused = False
        self.is_draining = False
        self.reaches_store = True
        self.capacities = dict(world.capacities)
        """C of each pool, as this process knows it."""
        self.calls: dict[str, Call] = {}
        self.charged: list[tuple[str, float]] = []
        """(team, cost units) of its requests that ended, in the order in which they did."""
        self.alone_slots = 0
        """Within-share grants that it sent without an owner and that are live, as of its last step."""
        self.given_slots: Mapping[int, int] = {}
        """The same of those that an owner decided: epoch → grants."""
        self.part_slots = 0
        """The most that it may give within share without an owner."""
        self._summed = (0, Counter[str]())
        self._deferred: deque[Callable[[], None]] = deque()
        self._links: dict[str, list[Link]] = {}
        self._to_do: deque[Decision] = deque()
        self._carrying_out = False
        self._flushes = False
        self._tick_at = float("inf")
        self._ticks = 0
        self.member = Member(
            lease="a",
            replica=self.name,
            address=self.name,
            settings=self.new_queues("a", 1),
            ports=self,
            options=world.plan.options,
        )
        self._arm()

    # ------------------------------------------------------------------ what the world does to it

    def does(self, do: Callable[[], None]) -> None:
        """Everything that happens in the process goes through here: it may be stopped or dead."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._deferred.append(do)
            return
        do()
        self._arm()
        self._count_slots()
        self.world.happened(self)

    def _count_slots(self) -> None:
        alone, given = 0, Counter[int]()
        for call in self.calls.values():
            # Not guests: whether one is within share is decided by whole slots, without turns.
            if call.place == "sent" and call.standing is Standing.WITHIN_SHARE and not call.is_guest:
                if call.degraded:
                    alone += 1
                else:
                    given[call.epoch] += 1
        self.alone_slots, self.given_slots = alone, given

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        # As an event loop does it: first what came meanwhile, in order, then the timers.
        while self._deferred and self.is_alive and not self.is_paused:
            self.does(self._deferred.popleft())
        self._arm()

    def die(self) -> None:
        self.is_alive = False
        for links in self._links.values():
            for link in links:
                link.cut()

    def drain(self) -> None:
        self.is_draining = True
        self.does(self.member.drain)

    def linked(self, link: Link, peer: str) -> None:
        # As the gateway does it: what is lost with one link is begun anew on the other.
        def begins() -> None:
            links = self._links.setdefault(peer, [])
            links.append(link)
            if len(links) == 1:
                self.member.connected(peer)

        self.does(begins)

    def unlinked(self, link: Link, peer: str) -> None:
        links = self._links.get(peer, [])
        if link in links:
            links.remove(link)
            self.member.disconnected(peer)
            if links:
                self.member.connected(peer)

    def heard(self, link: Link, peer: str, message: OnLink) -> None:
        self.world.note(self, "hears", peer, message)
        self.member.received(peer, message)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ ports

    def clock(self) -> float:
        return self._offset_seconds + (self.world.timeline.now - self._from) * self.rate

    def send(self, peer: str, message: OnLink) -> None:
        links = self._links.get(peer)
        if links:
            links[0].send(self, message)

    def decided(self, decisions: list[Decision]) -> None:
        self.carry_out(decisions)

    def soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            self.world.timeline.after(0.0, lambda: self.does(self._flush))

    def call(self, call: StoreCall) -> None:
        self.world.note(self, "asks the store", call)

        def answered(answer: object) -> None:
            def takes() -> None:
                self.world.note(self, "is answered", answer)
                self.member.answered(call, answer)  # type: ignore[arg-type]
                if isinstance(answer, LeftBehind):
                    self._check_restored(answer)

            self.does(takes)

        if self.reaches_store:
            self.world.database.call(call, answered, lambda: self.is_paused)
        else:
            self.world.timeline.after(2.0, lambda: answered(None))

    def _check_restored(self, left: LeftBehind) -> None:
        """Usage is what was saved, decayed, and what this replica itself has to add."""
        owner = self.member._owner  # pyright: ignore[reportPrivateUsage]
        if owner is None:
            return
        counted = msgspec.msgpack.decode(left.state, type=Estate).counted.get(self.name, 0) if left.state else 0
        expected: defaultdict[str, float] = defaultdict(float)
        for team, cost_units in self.charged[counted:]:
            expected[team] += cost_units
        half_life = self.world.plan.half_life_seconds
        for by_team in left.usage.values():
            for team, (cost_units, age_seconds) in by_team.items():
                expected[team] += cost_units * (0.5 ** (age_seconds / half_life) if half_life else 1.0)
        restored: defaultdict[str, float] = defaultdict(float)
        for queue in owner.queues.values():
            for team, cost_units in queue.pool.usage()[0].items():
                restored[team] += cost_units
        for team in expected.keys() | restored.keys():
            assert abs(expected[team] - restored[team]) < 1e-6, (
                f"{team} has {restored[team]:.6f} cost units after the failover, not {expected[team]:.6f}"
            )

    def owner_is(self, lease: str, owner: str, address: str) -> None:
        pass  # everybody is linked to everybody anyway

    def resize(self, name: str, capacity: int) -> None:
        """A pool grew or shrank, as this process finds out."""

        def resizes() -> None:
            self.capacities[name] = capacity
            queue = self.member.queue(name)
            replica = self.member._replica  # pyright: ignore[reportPrivateUsage]
            if replica.deciding(name) is not None:
                parts = replica.replicas if replica.state is ReplicaState.DEGRADED else 1
                queue.pool.set_capacity(max(1, capacity // parts))
            decisions: list[Decision] = []
            for instance in self._instances(name):
                decisions += queue.instance_changed(instance)
            self.carry_out(decisions + queue.capacity_changed())

        self.does(resizes)

    def _instances(self, name: str) -> list[Instance]:
        capacity = self.capacities[name]
        return [Instance(id=f"{name}.{i}", part_slots=capacity // 2, seats=max(1, capacity // 2)) for i in (1, 2)]

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        plan = self.world.plan
        queues: dict[str, DispatchQueue] = {}
        for name, capacity in self.capacities.items():
            pool = Pool(name, max(1, capacity // parts), plan.shares, plan.half_life_seconds, clock=self.clock)
            fallback = queues.get(plan.fallbacks.get(name, ""))
            queues[name] = HoldQueue(
                pool,
                options=HoldOptions(longest_wait_seconds=LONGEST_WAIT_SECONDS, abort_grace_seconds=0.05),
                instances=self._instances(name),
                fallback=fallback,  # type: ignore[arg-type]
            )
        return queues

    # ------------------------------------------------------------------ its clients, engines and driver

    def arrive(self, pool: str, team: str, seconds: float, service_class: ServiceClass) -> None:
        def submits() -> None:
            number = self.world.next_number()
            request = Request(
                id=f"q{number}",
                team=team,
                service_class=service_class,
                recallable=self.rng.random() < 0.7,
                body_bytes=10,
            )
            call = self.calls[request.id] = Call(request, pool, seconds)
            self.world.submitted += 1
            if self.rng.random() < 0.1:
                self.world.timeline.after(self.rng.expovariate(0.5), lambda: self.does(lambda: self._leaves(call)))
            self.world.note(self, "gets", request.id, "of", team)
            self.carry_out(self.member.queue(pool).submitted(request))

        self.does(submits)

    def carry_out(self, decisions: list[Decision]) -> None:
        self._to_do += decisions
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._to_do:
                self._do(self._to_do.popleft())
        finally:
            self._carrying_out = False

    def _do(self, decision: Decision) -> None:
        self.world.note(self, "carries out", decision)
        call = self.calls.get(decision.request_id)
        assert call is not None, f"{decision} is about a request that has ended"
        match decision:
            case Send():
                assert call.place == "held", f"{call.request.id} is sent twice"
                call.place, call.began = "sent", False
                call.attempt += 1
                call.standing, call.instance_id = decision.standing, decision.instance_id
                replica = self.member._replica  # pyright: ignore[reportPrivateUsage]
                # A grant of the replica's own pool: an owner's is a remote one.
                call.degraded = decision.grant._pool is not None  # pyright: ignore[reportPrivateUsage]
                call.epoch = replica.epoch
                call.is_guest = decision.pool != call.pool
                assert call.degraded or call.epoch >= self.world.epoch, (
                    f"{call.request.id} is sent by epoch {call.epoch}, but {self.world.epoch} has begun to decide"
                )
                if call.degraded:
                    part = sum(max(1, slots // replica.replicas) for slots in self.world.most_slots.values())
                    self.part_slots = max(self.part_slots, part)
                if self.rng.random() < 0.03:
                    other = self.member.queue(call.pool).reassigned(call.request.id, frozenset((call.instance_id,)))
                    call.instance_id = other or call.instance_id
                self._plan(call)
            case Recall():
                assert call.place == "sent", f"{call.request.id} is recalled as it is {call.place}"
                assert not call.began, f"{call.request.id} is recalled after its first byte"
                call.place = "held"
                self.world.timeline.after(
                    self.rng.uniform(0.0, 0.1),
                    lambda: self.does(
                        lambda: self.carry_out(self.member.queue(call.pool).aborted(call.request.id)),
                    ),
                )
            case Refused():
                assert call.place == "held", f"{call.request.id} is refused as it is {call.place}"
                del self.calls[call.request.id]
                self.world.refused[decision.reason] += 1
            case Held():
                pass

    def _plan(self, call: Call) -> None:
        attempt = call.attempt

        def begins() -> None:
            if call.place == "sent" and call.attempt == attempt and not call.began:
                call.began = True
                self.carry_out(self.member.queue(call.pool).first_byte(call.request.id))

        def ends() -> None:
            if call.place == "sent" and call.attempt == attempt:
                self._ends(call, call.seconds)

        self.world.timeline.after(call.seconds * 0.3, lambda: self.does(begins))
        self.world.timeline.after(call.seconds, lambda: self.does(ends))

    def _ends(self, call: Call, cost_units: float) -> None:
        call.place = "ended"
        del self.calls[call.request.id]
        self.charged.append((call.request.team, cost_units))
        self.world.served += 1
        self.world.note(self, "ends", call.request.id)
        self.carry_out(self.member.queue(call.pool).released(call.request.id, cost_units))

    def charged_up_to(self, number: int) -> Mapping[str, float]:
        """Team → what its first `number` requests that ended here consumed."""
        count, sums = self._summed
        if number < count:
            count, sums = 0, Counter[str]()
        for team, cost_units in self.charged[count:number]:
            sums[team] += cost_units  # type: ignore[assignment]
        self._summed = (max(count, min(number, len(self.charged))), sums)
        return sums

    def _leaves(self, call: Call) -> None:
        """Its client does."""
        if call.place == "sent":
            self._ends(call, call.seconds / 2)
        elif call.place == "held" and call.request.id in self.calls:
            call.place = "ended"
            del self.calls[call.request.id]
            self.world.cancelled += 1
            self.carry_out(self.member.queue(call.pool).cancelled(call.request.id))

    # ------------------------------------------------------------------ time

    def _flush(self) -> None:
        self._flushes = False
        self.member.flush()

    def _arm(self) -> None:
        due = self.member.next_deadline()
        if due == float("inf"):
            return
        at = max(self.world.timeline.now + 0.001, self.world.timeline.now + (due - self.clock()) / self.rate + 1e-6)
        if at < self._tick_at - 1e-9:
            self._tick_at = at
            self.world.timeline.at(at, lambda: self._timer(at))

    def _timer(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = float("inf")
            self.does(self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        # A timer every millisecond of the whole run would be a machine that spins.
        assert self._ticks < 1_000 + 100 * self.world.timeline.now, f"{self.name} ticks without end"
        self.member.tick()
