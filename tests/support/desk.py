"""One dispatch queue on a table: events by hand, decisions as short sentences, time that stands still until moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairshare import Pool, ServiceClass
from fairshare.core.apportion import Share
from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
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

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
WEIGHTED = BorrowOrder.WEIGHTED


class Time:
    """The clock of the pools on the table, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A pool and its queue. Every event returns what was decided:

    `own A1` (sent within share), `borrow A1`, `hold A1`, `recall A1`, `refuse A1`; ` @e1` follows where there are
    several instances, ` in pool` where a request was sent to another pool.
    """

    def __init__(
        self,
        capacity: int,
        shares: Mapping[str, Share],
        *,
        seats: int | None = None,
        instances: Sequence[Instance] | None = None,
        mode: Mode = Mode.HOLD,
        half_life: float = 0.0,
        fallback: Desk | None = None,
        name: str = "chat",
        **options: Any,
    ) -> None:
        """`seats`: of the one instance, twice C by default; `options`: of `HoldOptions`."""
        self.name = name
        self.time = fallback.time if fallback else Time()
        self.fallback = fallback
        self.pool = Pool(name, capacity, shares, half_life, clock=self.time)
        if instances is None:
            instances = [Instance(id="e0", part_slots=capacity, seats=2 * capacity if seats is None else seats)]
        self.queue = make_queue(
            self.pool,
            mode,
            options=HoldOptions(**options),
            instances=instances,
            fallback=fallback.queue if fallback else None,
        )
        self.several = len(instances) > 1
        self.sends: dict[str, Send] = {}
        """The last `Send` of each request."""
        self.helds: dict[str, Held] = {}
        self.refusals: dict[str, Refused] = {}
        self.recalls: dict[str, Recall] = {}
        self.numbers: dict[str, int] = {}

    def submit(
        self, team: str, count: int = 1, *, of: ServiceClass = INTERACTIVE, name: str | None = None, **fields: Any
    ) -> list[str]:
        """`count` requests of a team arrive one after the other: A1, A2, ..."""
        said: list[str] = []
        for _ in range(count):
            number = self.numbers[team] = self.numbers.get(team, 0) + 1
            request = Request(id=name or f"{team}{number}", team=team, service_class=of, **fields)
            said += self.note(self.queue.submitted(request))
        return said

    def release(self, *ids: str, cost: float = 0.0) -> list[str]:
        said: list[str] = []
        for request_id in ids:
            said += self.note(self.queue.released(request_id, cost))
        return said

    def first_byte(self, *ids: str) -> None:
        for request_id in ids:
            assert self.queue.first_byte(request_id) == []

    def cancel(self, request_id: str) -> list[str]:
        return self.note(self.queue.cancelled(request_id))

    def aborted(self, request_id: str) -> list[str]:
        return self.note(self.queue.aborted(request_id))

    def wait(self, seconds: float) -> list[str]:
        """Time passes; the queue is woken at each of its deadlines."""
        said: list[str] = []
        end = self.time.now + seconds
        while (due := self.queue.next_deadline()) is not None and due <= end:
            self.time.now = max(self.time.now, due)
            said += self.note(self.queue.tick())
        self.time.now = end
        return said

    def set_capacity(self, capacity: int) -> list[str]:
        self.pool.set_capacity(capacity)
        return self.note(self.queue.capacity_changed())

    def set_shares(self, shares: Mapping[str, Share]) -> list[str]:
        self.pool.set_shares(shares)
        return self.note(self.queue.capacity_changed())

    def redispatch(self, mode: Mode = Mode.HOLD, *, fallback: Desk | None = None, **options: Any) -> list[str]:
        """A reload changed how the pool dispatches."""
        self.queue = changed_queue(
            self.queue, mode, options=HoldOptions(**options), fallback=fallback.queue if fallback else None
        )
        return self.note(self.queue.capacity_changed())

    def instance(self, instance_id: str, part_slots: int, **fields: Any) -> list[str]:
        return self.note(self.queue.instance_changed(Instance(id=instance_id, part_slots=part_slots, **fields)))

    def note(self, decisions: Sequence[Decision]) -> list[str]:
        said: list[str] = []
        for decision in decisions:
            match decision:
                case Send():
                    self.sends[decision.request_id] = decision
                    word = "borrow" if decision.grant.borrowing else "own"
                    where = f" @{decision.instance_id}" if self.several else ""
                    where += f" in {decision.pool}" if decision.pool != self.name else ""
                    said.append(f"{word} {decision.request_id}{where}")
                case Held():
                    self.helds[decision.request_id] = decision
                    said.append(f"hold {decision.request_id}")
                case Recall():
                    self.recalls[decision.request_id] = decision
                    said.append(f"recall {decision.request_id}")
                case Refused():
                    self.refusals[decision.request_id] = decision
                    said.append(f"refuse {decision.request_id}")
        return said

    def held(self, team: str | None = None) -> int:
        """Requests that wait, of a team or of all."""
        stat = self.queue.snapshot()
        return sum(each.held for each in stat.teams if team in (None, each.team))

    def in_flight(self, team: str) -> int:
        return next((stat.in_flight for stat in self.pool.snapshot() if stat.team == team), 0)


def own(team: str, first: int, last: int) -> list[str]:
    """`own A1`, ..., `own A4` for ("A", 1, 4)."""
    return [f"own {team}{number}" for number in range(first, last + 1)]


def borrow(team: str, first: int, last: int) -> list[str]:
    return [f"borrow {team}{number}" for number in range(first, last + 1)]


def hold(team: str, first: int, last: int) -> list[str]:
    return [f"hold {team}{number}" for number in range(first, last + 1)]
