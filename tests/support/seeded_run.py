"""One hold queue under a seeded load of every kind of event; what it decided, in words that can be compared."""

import random

from fairshare import Pool, ServiceClass
from fairshare.core.decisions import BorrowOrder, Decision, HoldOptions, Instance, Recall, Request, Send
from fairshare.core.hold import HoldQueue


class SeededRun:
    """A pool of 1 to 12 slots, 1 to 5 teams and a stranger, two instances; everything is drawn from the seed."""

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
            options=HoldOptions(
                borrow_order=self.rng.choice(list(BorrowOrder)),
                longest_wait_seconds=40.0,
                max_held=12,
                max_held_per_team=5,
                max_held_bytes=700,
                recall_waste=0.02,
            ),
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
                body_bytes=rng.choice([0, 60, 150]),
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
