"""A random walk over two pools, one the fallback of the other, with everything checked after every step.

The walk keeps its own plain books of what every request is doing (they are what is compared with) and asks the queues
only for their decisions and snapshots, and for the right by which a request was sent.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from fairshare import Pool, ServiceClass
from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
    Held,
    HoldOptions,
    Instance,
    Recall,
    RefusalReason,
    Refused,
    Request,
    Send,
)
from fairshare.core.hold import HoldQueue
from fairshare.core.team_queue import SendKind
from support.desk import Time


class State(Enum):
    """What a request is doing."""

    NEW = "new"
    HELD = "held"
    SENT = "sent"
    OVER = "over"


@dataclass(eq=False)
class Item:
    """One request in the walk's books."""

    request: Request
    home: Side
    state: State = State.NEW
    side: Side | None = None
    """Where it runs."""
    instance: str = ""
    kind: SendKind = SendKind.OWNER
    borrowing: bool = False
    began: bool = False
    sent_at: float = 0.0


@dataclass(eq=False)
class Side:
    """A pool, its queue and what the walk knows of them."""

    pool: Pool
    queue: HoldQueue
    options: HoldOptions
    fallback: Side | None
    accepting: dict[str, bool] = field(default_factory=dict[str, bool])
    aborting: list[Item] = field(default_factory=list[Item])
    """Recalled here, not yet reported as aborted; the instance is in `aborting_at`."""
    aborting_at: list[str] = field(default_factory=list[str])
    grace: list[tuple[float, str, int]] = field(default_factory=list[tuple[float, str, int]])
    """Reported as aborted: until when, where, slots."""
    most_capacity: int = 0
    shrunk: bool = False
    """Capacity was cut or shares moved: what was stamped before may be more than C now."""
    wasted: float = 0.0


class Walk:
    """Random events and the checks; `random.Random(seed)` says everything that happens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.time = Time()
        self.items: dict[str, Item] = {}
        self.count = 0
        self.log: list[str] = []
        self.teams = [f"t{number}" for number in range(rng.choice([1, 2, 3, 6]))]
        self.widths = rng.choice([[1], [1], [1, 1, 2], [1, 4]])
        self.spare = self._side("spare", None)
        self.chat = self._side("chat", self.spare)
        self.sides = [self.chat, self.spare]

    def _side(self, name: str, fallback: Side | None) -> Side:
        rng = self.rng
        options = HoldOptions(
            borrow_order=rng.choice(list(BorrowOrder)),
            batch_every=rng.choice([0, 2, 10]),
            recall=rng.random() < 0.8,
            recall_waste=rng.choice([0.0, 0.1, 1.0]),
            abort_grace_seconds=rng.choice([0.0, 0.05, 3.0]),
            max_held=rng.choice([5, 1000]),
            max_held_per_team=rng.choice([3, 1000]),
            max_held_bytes=rng.choice([50, 100_000]),
            longest_wait_seconds=rng.choice([20.0, 300.0]),
        )
        capacity = rng.choice([1, 2, 5, 8])
        pool = Pool(name, capacity, self._shares(), rng.choice([0.0, 60.0]), clock=self.time)
        side = Side(pool=pool, queue=None, options=options, fallback=fallback)  # pyright: ignore[reportArgumentType]
        first = [self._instance(f"{name} {number}") for number in range(rng.choice([0, 1, 2]))]
        side.accepting = {instance.id: instance.accepting for instance in first}
        side.most_capacity = capacity
        side.queue = HoldQueue(
            pool, options=options, instances=first, fallback=fallback.queue if fallback is not None else None
        )
        return side

    def _shares(self) -> dict[str, Fraction]:
        weights = [self.rng.choice([0, 1, 1, 2, 5]) for _ in self.teams]
        total = sum(weights) + self.rng.choice([0, 0, 1])
        return {team: Fraction(weight, max(1, total)) for team, weight in zip(self.teams, weights, strict=True)}

    def _instance(self, name: str) -> Instance:
        return Instance(
            id=name,
            part_slots=self.rng.choice([0, 1, 2, 4, 8]),
            seats=self.rng.choice([None, 2, 4, 16]),
            accepting=self.rng.random() < 0.8,
        )

    # What happens

    def step(self) -> None:
        """One random event, and all checks."""
        does = self.rng.choices(
            [
                *[self.submit, self.release, self.begin, self.cancel, self.report_abort, self.wait, self.change_pool],
                *[self.change_instance, self.phantoms, self.nonsense, self.reassign],
            ],
            [12, 8, 2, 1, 3, 4, 1, 1, 1, 1, 1],
        )
        does[0]()
        self.check()

    def _pick(self, *states: State) -> Item | None:
        known = [item for item in self.items.values() if item.state in states]
        return self.rng.choice(known) if known else None

    def submit(self) -> None:
        rng, side = self.rng, self.rng.choice(self.sides)
        self.count += 1
        request = Request(
            id=f"r{self.count}",
            team=rng.choice([*self.teams, "stranger"]),
            service_class=rng.choice(list(ServiceClass)),
            slots=rng.choice(self.widths),
            body_bytes=rng.choice([0, 10]),
            recallable=rng.random() < 0.9,
            preferred_instances=rng.sample(sorted(side.accepting), min(1, len(side.accepting))),
        )
        self.items[request.id] = Item(request, side)
        self.carry_out(side.queue.submitted(request), f"submit {request.id} {request.team} x{request.slots}")
        assert self.items[request.id].state is not State.NEW, "a request that arrives is sent, held or refused"

    def release(self) -> None:
        item = self._pick(State.SENT)
        if item is None:
            return
        item.state = State.OVER
        cost = self.rng.choice([0.0, 1.0, 50.0, math.nan])
        self.carry_out(item.home.queue.released(item.request.id, cost), f"release {item.request.id} {cost}")

    def begin(self) -> None:
        item = self._pick(State.SENT)
        if item is not None:
            item.began = True
            self.carry_out(item.home.queue.first_byte(item.request.id), f"first byte {item.request.id}")

    def cancel(self) -> None:
        item = self._pick(State.HELD, State.SENT)
        if item is None:
            return
        if item.state is State.HELD:
            item.state = State.OVER
        self.carry_out(item.home.queue.cancelled(item.request.id), f"cancel {item.request.id}")

    def report_abort(self) -> None:
        side = self.rng.choice(self.sides)
        # Of a request that is being aborted in both pools at once, `aborted` does not say in which.
        if side.aborting and sum(side.aborting[0] in each.aborting for each in self.sides) == 1:
            self._aborted(side, 0)

    def _aborted(self, side: Side, number: int) -> None:
        item, where = side.aborting.pop(number), side.aborting_at.pop(number)
        side.grace.append((self.time.now + side.options.abort_grace_seconds, where, item.request.slots))
        self.carry_out(item.home.queue.aborted(item.request.id), f"aborted {item.request.id}")

    def wait(self, seconds: float | None = None) -> None:
        end = self.time.now + (self.rng.choice([0.01, 0.5, 3.0, 30.0]) if seconds is None else seconds)
        for _ in range(1000):
            due = [(at, n) for n, side in enumerate(self.sides) if (at := side.queue.next_deadline()) is not None]
            at, n = min(due, default=(math.inf, 0))
            if at > end:
                break
            self.time.now = max(self.time.now, at)
            self.carry_out(self.sides[n].queue.tick(), f"tick {n}")
        else:
            raise AssertionError("ticks do not make the queue's deadline go away")
        self.time.now = end

    def change_pool(self) -> None:
        side, rng = self.rng.choice(self.sides), self.rng
        what = rng.choice(["capacity", "shares", "half-life"])
        if what == "capacity":
            capacity = rng.choice([0, 1, 2, 5, 8])
            turns_taken = side.queue.snapshot().turns_taken  # of the old capacity; the new one may have no turns
            side.shrunk = side.shrunk or capacity < side.pool.set_capacity(capacity) or turns_taken > 0
            side.most_capacity = max(side.most_capacity, capacity)
        elif what == "shares":
            side.pool.set_shares(self._shares())
            side.shrunk = True
        else:
            side.pool.set_half_life(rng.choice([0.0, 60.0, 1e-3]))
        self.carry_out(side.queue.capacity_changed(), f"new {what} {side.pool.name}")

    def change_instance(self) -> None:
        side, rng = self.rng.choice(self.sides), self.rng
        what = rng.choice(["change", "change", "change", "remove", "seen"])
        name = f"{side.pool.name} {rng.randint(0, 2)}"
        if what == "change":
            instance = self._instance(name)
            side.accepting[name] = instance.accepting
            self.carry_out(side.queue.instance_changed(instance), f"{instance}")
        elif what == "remove":
            side.accepting.pop(name, None)
            self.carry_out(side.queue.instance_removed(name), f"remove {name}")
        else:
            self.carry_out(side.queue.running_seen(name, rng.randint(0, 20)), f"seen {name}")

    def phantoms(self) -> None:
        side, rng = self.rng.choice(self.sides), self.rng
        team = rng.choice(self.teams)
        if rng.random() < 0.7:
            side.pool.add_phantoms(team, rng.randint(1, 3), until=self.time.now + rng.choice([1.0, 40.0]))
        else:
            side.pool.drop_phantom(team)
        self.carry_out(side.queue.tick(), f"phantoms {team}")

    def nonsense(self) -> None:
        """What does not exist, or is over, or is not asked for at this time, changes nothing that is seen."""
        over = self._pick(State.OVER)
        held = self._pick(State.HELD)
        side = self.rng.choice(self.sides)
        for request_id in ["nobody", *([over.request.id] if over else [])]:
            for event in (side.queue.first_byte, side.queue.cancelled):
                self.carry_out(event(request_id), f"{event.__name__} {request_id}")
            self.carry_out(side.queue.released(request_id, 1.0), f"released {request_id}")
        if held is not None:
            self.carry_out(held.home.queue.released(held.request.id, 1.0), "released while held")
            self.carry_out(held.home.queue.first_byte(held.request.id), "first byte while held")

    def reassign(self) -> None:
        item = self._pick(State.SENT)
        if item is None or item.side is None:
            return
        where = item.home.queue.reassigned(item.request.id, frozenset())
        self.log.append(f"reassigned {item.request.id} {where}")
        if where is not None:
            assert where != item.instance
            assert item.side.accepting[where]
            item.instance = where

    # Decisions

    def carry_out(self, decisions: Sequence[Decision], event: str) -> None:
        self.log.append(event)
        recalled: set[str] = set()
        seats_needed = 0
        for decision in decisions:
            item = self.items[decision.request_id]
            match decision:
                case Send():
                    self.sent(item, decision)
                    if not item.borrowing and decision.request_id not in recalled:
                        seats_needed += item.request.slots
                case Held():
                    assert item.state is State.NEW, f"{decision} of a request that is {item.state}"
                    item.state = State.HELD
                case Recall():
                    recalled.add(decision.request_id)
                    self.recalled(item, decision)
                case Refused():
                    assert item.state in (State.NEW, State.HELD)
                    assert (item.state is State.HELD) == (decision.reason is RefusalReason.HELD_TOO_LONG)
                    assert decision.retry_after_seconds >= 1.0
                    item.state = State.OVER
            self.log.append(f"  {type(decision).__name__} {decision.request_id}")
        assert len(recalled) <= seats_needed, "a recall is for an owner that was not taken back itself"

    def sent(self, item: Item, send: Send) -> None:
        assert item.state in (State.NEW, State.HELD), f"{send} of a request that is {item.state}"
        side = next(side for side in self.sides if side.pool.name == send.pool)
        assert side in (item.home, item.home.fallback)
        assert side.accepting[send.instance_id], "an instance that accepts nothing got a request"
        assert send.grant.slots == item.request.slots
        assert send.priority == send.grant.priority
        item.borrowing = send.grant.borrowing
        lowest = 10 if item.borrowing else 0
        assert send.priority is not None
        assert send.priority in range(lowest, 102 if item.borrowing else 2)
        assert send.priority % 10 == item.request.service_class
        item.state, item.side, item.instance, item.began = State.SENT, side, send.instance_id, False
        item.kind = item.home.queue._entries[item.request.id].kind
        item.sent_at = self.time.now
        if side is not item.home:
            assert not any(other.state is State.HELD and other.home is side for other in self.items.values())

    def recalled(self, item: Item, recall: Recall) -> None:
        side = item.side
        assert item.state is State.SENT
        assert side is not None
        assert side.options.recall
        assert item.request.recallable
        assert not item.began
        assert recall.instance_id == item.instance
        assert recall.wasted_slot_seconds == item.request.slots * (self.time.now - item.sent_at)
        item.state, item.side = State.HELD, None
        in_flight = sum(other.request.slots for other in self.running(side, item.request.team))
        turn = sum(o.request.slots for o in self.running(side, item.request.team) if o.kind is SendKind.TURN)
        whole = math.floor(side.pool.exact_shares.get(item.request.team, Fraction(0)) * side.pool.capacity)
        assert in_flight - turn >= whole, "a team was taken below its own"
        side.aborting.append(item)
        side.aborting_at.append(recall.instance_id)
        side.wasted += recall.wasted_slot_seconds

    # Checks

    def running(self, side: Side, team: str | None = None) -> list[Item]:
        return [
            item
            for item in self.items.values()
            if item.state is State.SENT and item.side is side and team in (None, item.request.team)
        ]

    def waiting(self, side: Side) -> list[Item]:
        return [item for item in self.items.values() if item.state is State.HELD and item.home is side]

    def check(self) -> None:
        for side in self.sides:
            self.check_books(side)
            self.check_promises(side)

    def check_books(self, side: Side) -> None:
        """The queue counts what the walk counts."""
        running, waiting, stat = self.running(side), self.waiting(side), side.queue.snapshot()
        side.grace = [entry for entry in side.grace if entry[0] > self.time.now]
        assert side.pool.live_slots == sum(item.request.slots for item in running)
        by_team: Counter[str] = Counter()
        at: Counter[str] = Counter()
        for item in running:
            by_team[item.request.team] += item.request.slots
            at[item.instance] += item.request.slots
        for team in side.pool.snapshot():
            assert team.in_flight == by_team[team.team]
        aborting: Counter[str] = Counter()
        for item, where in zip(side.aborting, side.aborting_at, strict=True):
            aborting[where] += item.request.slots
        for _, where, slots in side.grace:
            aborting[where] += slots
        assert {i.id: i.in_flight_slots for i in stat.instances if i.in_flight_slots} == dict(at)
        assert {i.id: i.aborting_slots for i in stat.instances if i.aborting_slots} == dict(aborting)
        assert {i.id for i in stat.instances if i.accepting} == {name for name, yes in side.accepting.items() if yes}
        assert stat.held == len(waiting)
        assert stat.held_bytes == sum(item.request.body_bytes for item in waiting)
        held: defaultdict[str, list[Request]] = defaultdict(list)
        for item in waiting:
            held[item.request.team].append(item.request)
        assert {team.team: (team.held, team.held_slots, team.held_bytes) for team in stat.teams} == {
            team: (len(each), sum(r.slots for r in each), sum(r.body_bytes for r in each))
            for team, each in held.items()
        }
        assert set(side.queue._entries) == {
            item.request.id
            for item in self.items.values()
            if item.home is side and item.state in (State.HELD, State.SENT)
        }

    def check_promises(self, side: Side) -> None:
        pool, stat = side.pool, side.queue.snapshot()
        capacity, accepting = pool.capacity, {name for name, yes in side.accepting.items() if yes}
        running, waiting = self.running(side), self.waiting(side)
        owns = {team: share * capacity for team, share in pool.exact_shares.items()}
        turns = [item for item in running if item.kind is SendKind.TURN]
        turn_slots = math.ceil(sum(owns.values(), Fraction(0))) - sum(map(math.floor, owns.values()))
        assert (stat.turn_slots, stat.turns_taken) == (turn_slots, len(turns))
        assert len({item.request.team for item in turns}) == len(turns), "a team has two turns"
        phantoms = {team.team: team.phantoms for team in pool.snapshot()}
        # What a team's phantoms have above its whole slots, one of them may have by its turn.
        phantom_turns = sum(
            sum(i.request.slots for i in self.running(side, team) if i.kind is SendKind.OWNER) + phantoms[team]
            > own // 1
            for team, own in owns.items()
            if phantoms[team] and own % 1 and not any(turn.request.team == team for turn in turns)
        )
        if accepting:
            for item in waiting:
                team, own = item.request.team, owns.get(item.request.team, Fraction(0))
                counted = sum(i.request.slots for i in self.running(side, team) if i.kind is not SendKind.TURN)
                free = math.floor(own) - counted - phantoms.get(team, 0)
                assert item.request.slots > free, f"{item.request.id} is held beside {free} whole slots of its team"
                if own % 1 and len(turns) + phantom_turns < turn_slots and not side.queue._turn_debt_slot_seconds:
                    assert any(turn.request.team == team for turn in turns), f"{item.request.id} is held beside a turn"
            taken = sum(item.request.slots for item in running if item.instance in accepting)
            taken += sum(
                i.request.slots for i, where in zip(side.aborting, side.aborting_at, strict=True) if where in accepting
            )
            taken += sum(slots for _, where, slots in side.grace if where in accepting)
            if taken < capacity:
                assert not waiting, f"{len(waiting)} are held beside {capacity - taken} free slots"
                self.check_guests(side, capacity)
        if not side.shrunk:
            narrow = sum(item.request.slots == 1 and not item.borrowing for item in running)
            assert narrow <= capacity, f"{narrow} within-share slots of {capacity}"
        allowed = side.options.recall_waste * side.most_capacity * (300.0 + self.time.now)
        assert side.wasted <= allowed + 1e-6
        if waiting:
            due = side.queue.next_deadline()
            assert due is not None
            assert due <= self.time.now + side.options.longest_wait_seconds

    def check_guests(self, side: Side, capacity: int) -> None:
        """Nothing waits next door beside room that the fallback's `try_acquire` would give."""
        home = next((home for home in self.sides if home.fallback is side), None)
        if home is None or any(item.request.slots > 1 for item in self.waiting(home)):
            return
        if side.pool.live_slots + side.pool.phantom_slots < capacity:
            assert not self.waiting(home), "guests are held beside free room of their fallback"

    # The end

    def drain(self) -> None:
        """Everything ends; then nothing may be left."""
        for item in list(self.items.values()):
            if item.state is State.HELD:
                item.state = State.OVER
                self.carry_out(item.home.queue.cancelled(item.request.id), f"cancel {item.request.id}")
        while (item := self._pick(State.SENT)) is not None:
            item.state = State.OVER
            self.carry_out(item.home.queue.released(item.request.id, 1.0), f"release {item.request.id}")
        for side in self.sides:
            while side.aborting:
                self._aborted(side, 0)
        self.wait(100.0)
        self.check()
        for side in self.sides:
            queue, stat = side.queue, side.queue.snapshot()
            assert (side.pool.live_slots, side.pool.phantom_slots, stat.held, stat.held_bytes) == (0, 0, 0, 0)
            assert (stat.turns_taken, stat.teams) == (0, ())
            assert all((i.in_flight_slots, i.aborting_slots) == (0, 0) for i in stat.instances)
            assert {i.id for i in stat.instances} == set(side.accepting)
            assert not queue._entries
            assert not queue._aborting
            assert not queue._abort_ends
            for heap in (queue._turn_waiters, queue._borrowers, queue._wide_owed, queue._wide_due, queue._above):
                assert not heap.priorities
            assert set(queue._teams) <= set(self.teams), "a made-up name left something behind"
            for team in queue._teams.values():
                assert not team.recallable
                assert (team.turn_slots, team.wide_slots, team.state.in_flight_slots) == (0, 0, 0)
                assert team.state.scaled_provisional == 0.0
