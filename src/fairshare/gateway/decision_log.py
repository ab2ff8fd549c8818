"""What was decided about the last requests: plain tuples in bounded rings, read only when somebody asks why.

The data path appends one small tuple per decision and formats nothing; what it costs is in docs/performance.md. The
records of requests that have ended are kept as they are (they exist anyway).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Protocol

from fairshare.clock import Clock
from fairshare.core.decisions import Held, Recall, Refused, Request, Send
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.options import PoolSpec
from fairshare.gateway.ports import RequestRecord

MOST_REQUESTS = 20_000
"""Requests that have ended; about 8 MB."""

DECISIONS_PER_REQUEST = 2
"""Most requests need one, those that are held two; about 14 MB for all of them."""

MOST_RANKED = 100
"""Teams of a pool whose usage is kept with each request that borrows: 0.8 µs and 900 bytes for so many."""


@dataclass(frozen=True, slots=True)
class SentEntry:
    """A request went to an engine. Counts are those right after it, with it among them."""

    at: float
    """On the pools' clock."""
    request_id: str
    """As its client saw it."""
    key_id: str
    team: str
    pool: str
    """Whose capacity it uses."""
    home: str
    """Where it was asked for."""
    slots: int
    service_class: ServiceClass
    standing: Standing
    priority: int | None
    held_seconds: float
    instance_id: str
    team_in_flight_slots: int
    reserved_slots: int
    pool_in_flight_slots: int
    capacity_slots: int
    ranked_by: tuple[Mapping[str, Fraction], tuple[float, ...]] | None
    """Of a borrower: what its rank was worked out from (`Pool.ranked_by`). None: another process did that, or there are
    more than `MOST_RANKED` teams."""


@dataclass(frozen=True, slots=True)
class HeldEntry:
    """A request waits in the gateway."""

    at: float
    request_id: str
    key_id: str
    team: str
    pool: str
    slots: int
    service_class: ServiceClass
    team_held: int
    """Requests of its team that were held, with this one."""
    team_in_flight_slots: int
    whole_slots: int
    """What its team owns in whole slots."""
    pool_in_flight_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True)
class RecalledEntry:
    """A request was taken back from its engine."""

    at: float
    request_id: str
    key_id: str
    team: str
    pool: str
    instance_id: str
    wasted_slot_seconds: float


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    """A request was not served."""

    at: float
    request_id: str
    key_id: str
    team: str
    pool: str
    reason: str
    found: float
    limit: float


class Home(Protocol):
    """The pool that a request was asked of (`DrivenPool`)."""

    @property
    def spec(self) -> PoolSpec: ...


class Decided(Protocol):
    """A request that something was decided about (`Driven`)."""

    request: Request

    @property
    def id(self) -> str:
        """As its client saw it."""
        ...

    @property
    def key_id(self) -> str: ...

    @property
    def home(self) -> Home: ...


Entry = SentEntry | HeldEntry | RecalledEntry | RefusedEntry

_KINDS: tuple[Callable[..., Entry], ...] = (SentEntry, HeldEntry, RecalledEntry, RefusedEntry)
_SENT, _HELD, _RECALLED, _REFUSED = range(4)
_AT, _ID, _KEY, _TEAM, _POOL, _HOME = range(1, 7)
_STANDING = 9


class DecisionLog:
    """The last decisions and records of one gateway process (a `Recorder`). Lives on the event loop's thread."""

    def __init__(self, clock: Clock, *, most_requests: int = MOST_REQUESTS) -> None:
        self._clock = clock
        """The pools' clock."""
        self._decisions: deque[tuple[Any, ...]] = deque(maxlen=DECISIONS_PER_REQUEST * most_requests)
        self._records: deque[RequestRecord] = deque(maxlen=most_requests)
        self._recalls: dict[tuple[str, str], int] = {}

    # ------------------------------------------------------------------ from the data path

    def sent(self, decided: Decided, send: Send, pool: Pool) -> None:
        """`pool`: whose capacity it uses."""
        request = decided.request
        state = send.grant.state
        ranked_by = None
        if state is None:  # decided by the replica that owns the pool
            state = pool.state(request.team)
        elif send.standing is Standing.BORROWING:
            ranked_by = pool.ranked_by(MOST_RANKED)
        self._decisions.append(
            (
                _SENT,
                self._clock(),
                decided.id,
                decided.key_id,
                request.team,
                send.pool,
                decided.home.spec.name,
                request.slots,
                request.service_class,
                send.standing,
                send.priority,
                send.held_seconds,
                send.instance_id,
                state.in_flight_slots,
                state.reserved,
                pool.live_slots,
                pool.capacity,
                ranked_by,
            )
        )

    def held(self, decided: Decided, held: Held) -> None:
        request = decided.request
        self._decisions.append(
            (
                _HELD,
                self._clock(),
                decided.id,
                decided.key_id,
                request.team,
                decided.home.spec.name,
                request.slots,
                request.service_class,
                held.team_held,
                held.team_in_flight_slots,
                held.reserved_slots,
                held.pool_in_flight_slots,
                held.capacity_slots,
            )
        )

    def recalled(self, decided: Decided, recall: Recall) -> None:
        request = decided.request
        place = (decided.home.spec.name, request.team)
        self._recalls[place] = self._recalls.get(place, 0) + 1
        self._decisions.append(
            (
                _RECALLED,
                self._clock(),
                decided.id,
                decided.key_id,
                request.team,
                decided.home.spec.name,
                recall.instance_id,
                recall.wasted_slot_seconds,
            )
        )

    def refused(self, decided: Decided, refused: Refused) -> None:
        request = decided.request
        self._decisions.append(
            (
                _REFUSED,
                self._clock(),
                decided.id,
                decided.key_id,
                request.team,
                decided.home.spec.name,
                refused.reason,
                refused.found,
                refused.limit,
            )
        )

    def finished(self, record: RequestRecord) -> None:
        self._records.append(record)

    # ------------------------------------------------------------------ questions

    @property
    def recalls(self) -> dict[tuple[str, str], int]:
        """How many requests of (pool, team) were taken back since the start."""
        return self._recalls

    def records(self, *, most: int, wanted: Callable[[RequestRecord], bool] = lambda _: True) -> list[RequestRecord]:
        """The requests that have ended, the last one first."""
        return list(islice((record for record in reversed(self._records) if wanted(record)), most))

    def record(self, request_id: str, wanted: Callable[[RequestRecord], bool] = lambda _: True) -> RequestRecord | None:
        """The last one with this id."""
        return next((record for record in reversed(self._records) if record.id == request_id and wanted(record)), None)

    def sent_between(self, pool: str, since: float, until: float) -> dict[tuple[str, Standing], int]:
        """How many requests of each team went to engines of a pool after `since` and before `until` (pools' clock)."""
        counts: dict[tuple[str, Standing], int] = {}
        for decision in self._back_to(since):
            if decision[0] == _SENT and decision[_POOL] == pool and decision[_AT] < until:
                who = (decision[_TEAM], decision[_STANDING])
                counts[who] = counts.get(who, 0) + 1
        return counts

    def of_team(self, team: str, home: str, *, since: float) -> list[Entry]:
        """What was decided about a team's requests in a pool since then (pools' clock), the last first."""
        return [
            _entry(decision)
            for decision in self._back_to(since)
            if decision[_TEAM] == team and decision[_HOME if decision[0] == _SENT else _POOL] == home
        ]

    def _back_to(self, since: float) -> Iterator[tuple[Any, ...]]:
        for decision in reversed(self._decisions):
            if decision[_AT] < since:
                return
            yield decision

    def last(self, most: int) -> list[Entry]:
        """The last decisions, the newest first."""
        return [_entry(decision) for decision in islice(reversed(self._decisions), most)]

    def of_request(self, request_id: str, wanted: Callable[[Entry], bool] = lambda _: True) -> list[Entry]:
        """What was decided about a request, in order."""
        found = [_entry(decision) for decision in self._decisions if decision[_ID] == request_id]
        return [entry for entry in found if wanted(entry)]

    @property
    def began_at(self) -> float:
        """When the oldest decision was made that is still known (pools' clock)."""
        return _entry(self._decisions[0]).at if self._decisions else self._clock()


def _entry(decision: tuple[Any, ...]) -> Entry:
    kind: int = decision[0]
    return _KINDS[kind](*decision[1:])
