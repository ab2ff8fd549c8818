"""A pool and its fallback under a seeded load of every kind of event; what was decided, in a form to compare."""

import random

from fairshare import Pool, ServiceClass
from fairshare.core.decisions import BorrowOrder, Decision, HoldOptions, Instance, Mode, Recall, Request, Send
from fairshare.core.hold import HoldQueue
from fairshare.core.priority import Standing

OTHER_EVENTS = ("cancel", "capacity", "shares", "instance", "seats", "phantoms", "adopt", "reconfigure", "tick")


class TwoPools:
    """Pools of 1 to 12 slots, 1 to 5 teams and a stranger, two instances each; everything is drawn from the seed."""

    def __init__(self, seed: int, *, long_way: bool = False) -> None:
        """`long_way`: no event takes a short way."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self._long_way = long_way
        self.names = [f"team{number}" for number in range(self.rng.randint(1, 5))]
        self._queues: list[HoldQueue] = []
        self._homes: dict[str, HoldQueue] = {}
        self.sent: list[str] = []
        self.log: list[object] = []
        self.count = 0
        for name in ("spare", "pool")[self.rng.randint(0, 1) :]:
            self._add_queue(name)

    def _add_queue(self, name: str) -> None:
        capacity = self.rng.randint(1, 12)
        pool = Pool(name, capacity, self._shares(), 30.0, clock=lambda: self.now)
        self._queues.append(
            HoldQueue(
                pool,
                options=self._options(),
                instances=[
                    Instance(id=f"{name} a", part_slots=(capacity + 1) // 2, seats=capacity),
                    Instance(id=f"{name} b", part_slots=capacity // 2 or 1, seats=None),
                ],
                fallback=self._queues[0] if self._queues else None,
            )
        )

    def _shares(self) -> dict[str, str]:
        weights = [self.rng.randint(1, 6) for _ in self.names]
        return {name: f"{weight}/{sum(weights)}" for name, weight in zip(self.names, weights, strict=True)}

    def _options(self) -> HoldOptions:
        return HoldOptions(
            borrow_order=self.rng.choice(list(BorrowOrder)),
            longest_wait_seconds=40.0,
            max_held=12,
            max_held_per_team=5,
            max_held_bytes=700,
            recall_waste=0.02,
        )

    def _ready(self, queue: HoldQueue) -> HoldQueue:
        if self._long_way:  # said twice: a short way that asks for only one of them is found too
            queue._calm = False
            queue._changed.add("nobody")
        return queue

    def _take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            seen: object = decision
            if isinstance(decision, Send):
                self.sent.append(decision.request_id)
                seen = (decision.request_id, decision.instance_id, decision.priority, decision.held_seconds)
            elif isinstance(decision, Recall):
                self.sent.remove(decision.request_id)
            self.log.append(seen)
            if isinstance(decision, Recall):
                self._take(self._ready(self._homes[decision.request_id]).aborted(decision.request_id))

    def _request(self, queue: HoldQueue) -> Request:
        rng = self.rng
        self.count += 1
        self._homes[str(self.count)] = queue
        instances = [instance.id for instance in queue.instances()]
        return Request(
            id=str(self.count),
            team=rng.choice([*self.names, "stranger"]),
            service_class=rng.choice(list(ServiceClass)),
            slots=rng.choice([1, 1, 1, 1, 3]),
            recallable=rng.random() < 0.8,
            body_bytes=rng.choice([0, 60, 150]),
            preferred_instances=rng.sample(instances, rng.choice([0, 0, 1, 2])),
            state_instance=rng.choice(instances) if rng.random() < 0.1 else None,
        )

    def event(self) -> None:
        """One random event, and what can be seen after it."""
        rng, what = self.rng, self.rng.random()
        self.now += rng.choice([0.0, 0.02, 1.0, 1.0, 7.0])
        sent = rng.choice(self.sent) if self.sent and what < 0.42 else None
        queue = rng.choice(self._queues) if sent is None else self._homes[sent]
        for other in self._queues:  # as their timers would; what is due in this queue, the event itself has to see
            due = other.next_deadline()
            if other is not queue and (other._changed or (due is not None and due <= self.now)):
                self._take(self._ready(other).tick())
        self._ready(queue)
        if sent is not None and sent in self.sent and what < 0.35:
            self.sent.remove(sent)
            self._take(queue.released(sent, rng.random() * 9))
        elif sent is not None:
            self._take(queue.first_byte(sent))
        elif what < 0.92:
            self._take(queue.submitted(self._request(queue)))
        else:
            self._other_event(rng.choice(OTHER_EVENTS), queue)
        for each in self._queues:
            each._changed.discard("nobody")
        for each in self._queues:
            self.log.append((each.next_deadline(), each.snapshot(), each.pool.snapshot()))

    def _other_event(self, what: str, queue: HoldQueue) -> None:
        rng = self.rng
        match what:
            case "cancel":
                self._take(queue.cancelled(str(rng.randint(1, self.count + 1))))
            case "capacity":
                queue.pool.set_capacity(rng.randint(1, 12))
                self._take(queue.capacity_changed())
            case "shares":
                queue.pool.set_shares(self._shares())
                self._take(queue.capacity_changed())
            case "instance":
                instance = rng.choice(queue.instances())
                part_slots, seats, accepting = rng.randint(0, 6), rng.choice([None, 8]), rng.random() < 0.8
                changed = Instance(id=instance.id, part_slots=part_slots, seats=seats, accepting=accepting)
                self._take(queue.instance_changed(changed))
            case "seats":
                self._take(queue.running_seen(rng.choice(queue.instances()).id, rng.randint(0, 12)))
            case "phantoms":
                until = self.now + rng.choice([2.0, 30.0])
                queue.pool.add_phantoms(rng.choice(self.names), rng.randint(1, 3), until=until)
                self._take(queue.tick())
            case "adopt":
                request, standing = self._request(queue), rng.choice(list(Standing))
                where, began = rng.choice(queue.instances()).id, rng.random() < 0.5
                self._take(queue.adopted(request, instance_id=where, priority=0, standing=standing, began=began))
                self.sent.append(request.id)
            case "reconfigure":
                fallback = self._queues[0] if queue is not self._queues[0] and rng.random() < 0.7 else None
                queue.reconfigure(rng.choice([Mode.HOLD, Mode.HOLD, Mode.PASS]), self._options(), fallback)
                self._take(queue.capacity_changed())
            case _:
                self._take(queue.tick())
