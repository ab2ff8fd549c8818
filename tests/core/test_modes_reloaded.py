"""Reloads between all modes and fallbacks at any moment: every request is decided once, and all counts stay right."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

import pytest

from fairshare import Pool
from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
    DispatchQueue,
    Held,
    HoldOptions,
    Instance,
    Mode,
    Recall,
    Refused,
    Request,
    Send,
)
from fairshare.core.dispatch import changed_queue, make_queue
from support.desk import Time

TEAMS = ["A", "B", "D"]


@dataclass(eq=False)
class Item:
    """One request: where it is submitted, and whether it is `new`, `held`, `sent` or `over`."""

    request: Request
    home: str
    state: str = "new"
    pool: str = ""
    instance: str = ""
    began: bool = False


class Site:
    """Two pools, of which `chat` may fall back on `spare`, under a seeded load of events and reloads."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.time = Time()
        self.items: dict[str, Item] = {}
        self.aborting: list[Item] = []
        self.accepting: dict[str, dict[str, bool]] = {}
        self.queues: dict[str, DispatchQueue] = {}
        for name in ("spare", "chat"):
            pool = Pool(name, self.rng.choice([1, 2, 5]), self.shares(), 60.0, clock=self.time)
            instances = [Instance(id=f"{name}{n}", part_slots=2, seats=self.rng.choice([None, 2, 4])) for n in (1, 2)]
            self.accepting[name] = {instance.id: True for instance in instances}
            self.queues[name] = make_queue(pool, self.rng.choice(list(Mode)), instances=instances)

    def shares(self) -> dict[str, Fraction]:
        weights = [self.rng.choice([0, 1, 2, 5]) for _ in TEAMS]
        return {team: Fraction(weight, max(1, sum(weights))) for team, weight in zip(TEAMS, weights, strict=True)}

    # What happens

    def step(self) -> None:
        events = [self.submit, self.end, self.begin, self.leave, self.abort, self.wait, self.reload, self.change]
        self.rng.choices(events, [10, 7, 2, 2, 3, 3, 2, 2])[0]()
        self.check()

    def pick(self, *states: str) -> Item | None:
        found = [item for item in self.items.values() if item.state in states]
        return self.rng.choice(found) if found else None

    def submit(self) -> None:
        request = Request(
            id=f"r{len(self.items)}",
            team=self.rng.choice([*TEAMS, "stranger"]),
            slots=self.rng.choice([1, 1, 1, 3]),
            body_bytes=10,
        )
        item = self.items[request.id] = Item(request, self.rng.choice(list(self.queues)))
        self.carry_out(self.queues[item.home].submitted(request))
        assert item.state != "new", "a request that arrives is sent, held or refused"

    def end(self) -> None:
        if item := self.pick("sent"):
            item.state = "over"
            self.carry_out(self.queues[item.home].released(item.request.id, 5.0))

    def begin(self) -> None:
        if item := self.pick("sent"):
            item.began = True
            self.carry_out(self.queues[item.home].first_byte(item.request.id))

    def leave(self) -> None:
        if item := self.pick("held"):
            item.state = "over"
            self.carry_out(self.queues[item.home].cancelled(item.request.id))

    def abort(self) -> None:
        if self.aborting:
            item = self.aborting.pop(self.rng.randrange(len(self.aborting)))
            self.carry_out(self.queues[item.home].aborted(item.request.id))

    def wait(self, seconds: float | None = None) -> None:
        self.time.now += self.rng.choice([0.01, 1.0, 30.0]) if seconds is None else seconds
        for queue in self.queues.values():
            self.carry_out(queue.tick())

    def reload(self) -> None:
        """Another mode, other options; `chat` falls back on `spare`, or no longer. A fallback never observes."""
        rng, spare = self.rng, self.queues["spare"]
        name = rng.choice(list(self.queues))
        options = HoldOptions(
            borrow_order=rng.choice(list(BorrowOrder)), recall=rng.random() < 0.7, max_held=6, longest_wait_seconds=50.0
        )
        mode = rng.choice(list(Mode))
        fallback = None
        if name == "chat" and mode is not Mode.OBSERVE and spare.mode is not Mode.OBSERVE and rng.random() < 0.7:
            fallback = spare
        if name == "spare" and mode is Mode.OBSERVE:
            mode = Mode.HOLD
        self.queues[name] = changed_queue(self.queues[name], mode, options=options, fallback=fallback)
        self.carry_out(self.queues[name].capacity_changed())

    def change(self) -> None:
        name = self.rng.choice(list(self.queues))
        queue = self.queues[name]
        if self.rng.random() < 0.5:
            queue.pool.set_capacity(self.rng.choice([0, 1, 2, 5]))
            queue.pool.set_shares(self.shares())
            self.carry_out(queue.capacity_changed())
        else:
            instance = Instance(id=f"{name}{self.rng.choice([1, 2])}", part_slots=2, accepting=self.rng.random() < 0.7)
            self.accepting[name][instance.id] = instance.accepting
            self.carry_out(queue.instance_changed(instance))

    # What is decided, and what must be true then

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            item = self.items[decision.request_id]
            match decision:
                case Send():
                    assert item.state in ("new", "held")
                    assert self.accepting[decision.pool][decision.instance_id]
                    item.state, item.pool, item.instance = "sent", decision.pool, decision.instance_id
                    item.began = False
                case Held():
                    assert item.state == "new"
                    item.state = "held"
                case Recall():
                    assert item.state == "sent"
                    assert not item.began
                    assert decision.instance_id == item.instance
                    item.state = "held"
                    self.aborting.append(item)
                case Refused():
                    # One whose client leaves when it has waited too long is refused as well.
                    assert item.state != "sent"
                    item.state = "over"

    def check(self) -> None:
        for name, queue in self.queues.items():
            running = [item for item in self.items.values() if item.state == "sent" and item.pool == name]
            assert queue.pool.live_slots == sum(item.request.slots for item in running)
            for stat in queue.pool.snapshot():
                assert stat.in_flight == sum(i.request.slots for i in running if i.request.team == stat.team)
            for instance in queue.snapshot().instances:
                at = [item.request.slots for item in running if item.instance == instance.id]
                assert instance.in_flight_slots == sum(at)
            held = [item for item in self.items.values() if item.state == "held" and item.home == name]
            if queue.mode is not Mode.OBSERVE:  # it shows what `hold` would hold
                assert queue.snapshot().held == len(held)
            being_recalled = any(item in held for item in self.aborting)
            if queue.mode is not Mode.HOLD and any(self.accepting[name].values()) and not being_recalled:
                assert not held, f"{len(held)} wait in {queue.mode}"

    def drain(self) -> None:
        while self.pick("sent", "held") or self.aborting:
            self.end()
            self.leave()
            self.abort()
        self.wait(10.0)
        for name, queue in self.queues.items():
            stat = queue.snapshot()
            assert (queue.pool.live_slots, stat.held, stat.held_bytes, stat.turns_taken, stat.teams) == (0, 0, 0, 0, ())
            assert [(i.in_flight_slots, i.aborting_slots) for i in stat.instances] == [(0, 0)] * 2, name
            assert all((team.in_flight, team.borrowing) == (0, 0) for team in queue.pool.snapshot())


@pytest.mark.parametrize("seed", range(60))
def test_every_request_is_decided_once_and_nothing_is_left(seed: int) -> None:
    site = Site(seed)
    for _ in range(100):
        site.step()
    site.drain()
