"""The short ways of the hold queue decide exactly as the long way does."""

import random
from typing import Any

import pytest

from fairshare import Pool, ServiceClass
from fairshare.core.decisions import Decision, HoldOptions, Instance, Recall, Request, Send
from fairshare.core.hold import HoldQueue


class LongWay(HoldQueue):
    """Every event takes the general way."""

    def _is_simple(self, team: Any) -> bool:
        return False

    def _only_waits(self, team: Any, request: Request) -> bool:
        return False


class Run:
    """One queue under a seeded load; what it decided, in words that can be compared."""

    def __init__(self, kind: type[HoldQueue], seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        capacity = self.rng.randint(1, 12)
        self.names = [f"team{number}" for number in range(self.rng.randint(1, 5))]
        weights = [self.rng.randint(1, 6) for _ in self.names]
        shares = {name: f"{weight}/{sum(weights)}" for name, weight in zip(self.names, weights, strict=True)}
        self.pool = Pool("pool", capacity, shares, 30.0, clock=lambda: self.now)
        self.queue = kind(
            self.pool,
            options=HoldOptions(longest_wait_seconds=40.0, max_held=12, max_held_per_team=5),
            instances=[
                Instance(id="a", part_slots=(capacity + 1) // 2, seats=capacity),
                Instance(id="b", part_slots=capacity // 2 or 1, seats=None),
            ],
        )
        self.sent: list[str] = []
        self.log: list[object] = []
        self.count = 0

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                self.sent.append(decision.request_id)
                seen: object = (decision.request_id, decision.instance_id, decision.priority, decision.held_seconds)
            elif isinstance(decision, Recall):
                self.sent.remove(decision.request_id)
                seen = decision
                self.log.append(seen)
                self.take(self.queue.aborted(decision.request_id))
                continue
            else:
                seen = decision
            self.log.append(seen)

    def event(self) -> None:
        rng = self.rng
        self.now += rng.choice([0.0, 0.02, 1.0, 1.0, 7.0])
        what = rng.random()
        if what < 0.5:
            self.count += 1
            request = Request(
                id=str(self.count),
                team=rng.choice([*self.names, "stranger"]),
                service_class=rng.choice(list(ServiceClass)),
                slots=rng.choice([1, 1, 1, 1, 3]),
                recallable=rng.random() < 0.8,
            )
            self.take(self.queue.submitted(request))
        elif what < 0.85 and self.sent:
            self.take(self.queue.released(self.sent.pop(rng.randrange(len(self.sent))), rng.random() * 9))
        elif what < 0.92 and self.sent:
            self.take(self.queue.first_byte(rng.choice(self.sent)))
        elif what < 0.96:
            self.take(self.queue.cancelled(str(rng.randint(1, self.count + 1))))
        elif what < 0.98:
            self.pool.set_capacity(rng.randint(1, 12))
            self.take(self.queue.capacity_changed())
        else:
            self.take(self.queue.tick())
        self.log.append((self.queue.next_deadline(), self.queue.snapshot(), self.pool.snapshot()))


@pytest.mark.parametrize("seed", range(150))
def test_the_short_ways_decide_as_the_long_way_does(seed: int) -> None:
    short, long = Run(HoldQueue, seed), Run(LongWay, seed)
    for _ in range(120):
        short.event()
        long.event()
        assert short.log == long.log
        short.log.clear()
        long.log.clear()


def test_a_request_that_waited_too_long_is_gone_before_the_short_way_of_a_release() -> None:
    now = 0.0
    pool = Pool("pool", 2, {"red": "1/2", "blue": "1/2"}, None, clock=lambda: now)
    queue = HoldQueue(
        pool,
        options=HoldOptions(longest_wait_seconds=200.0),
        instances=[Instance(id="a", part_slots=2, seats=2)],
    )
    for number in range(3):
        queue.submitted(Request(id=str(number), team="red"))
    now = 250.0
    assert [type(decision).__name__ for decision in queue.released("0", 1.0)] == ["Refused"]
    assert queue.released("1", 1.0) == []
    assert queue.snapshot().held == 0
