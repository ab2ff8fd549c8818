"""What goes into a dispatch queue and what comes out of it: plain records, no behaviour.

A shell (the gateway, the simulator) turns what happened into events and carries the decisions out.
Points in time are on the pool's clock, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from fairshare.core.priority import ServiceClass, Standing

if TYPE_CHECKING:
    from fairshare.core.pool import Grant, Pool


class Mode(StrEnum):
    """When a request's standing is decided."""

    HOLD = "hold"
    """Late binding: requests wait in the queue and are stamped when they leave it."""

    PASS = "pass"
    """Every request goes to an engine at once, with the standing it has on arrival."""

    OBSERVE = "observe"
    """Every request goes to an engine at once without any priority; shows what `hold` would have done."""


class BorrowOrder(StrEnum):
    """Which team's request uses idle capacity next."""

    LEVEL_FAIRSHARE = "level_fairshare"
    """The team with the best exact LF, so that usage evens out as in Slurm."""

    WEIGHTED = "weighted"
    """Start tags with weight share x LF, LF bounded to [1/2, 2]: nobody is without idle capacity for days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOptions:
    """How a `hold` queue behaves; the defaults are what the gateway uses."""

    borrow_order: BorrowOrder = BorrowOrder.LEVEL_FAIRSHARE
    batch_every: int = 10
    """Every n-th request of a team is its oldest batch request, if one waits; 0: interactive always first."""
    recall: bool = True
    recall_waste: float = 0.1
    """The part of the pool's slot-seconds that recalls may throw away, over five minutes."""
    abort_grace_seconds: float = 0.05
    """How long a recalled request's seat still counts as taken after the engine's connection is closed."""
    max_held: int = 10_000
    max_held_per_team: int = 2_000
    max_held_bytes: int = 1 << 30
    longest_wait_seconds: float = 300.0


@dataclass(slots=True, eq=False)
class Request:
    """One request as a dispatch queue sees it."""

    id: str
    """Unique among the requests of all pools that are not finished."""
    team: str
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    slots: int = 1
    """Running sequences it takes at the engine: `n` x number of prompts. At least 1."""
    estimated_tokens: int = 0
    """For display only (`TeamStat.in_flight_tokens`); never a basis of fairness."""
    body_bytes: int = 0
    """Bytes kept for it while it is held."""
    recallable: bool = True
    """Whether it may be sent a second time: its body is kept and it has no state or tools at the engine."""
    preferred_instances: Sequence[str] = ()
    """Instances that likely hold the prompt's prefix, best first. Decides only between near equals."""
    state_instance: str | None = None
    """The instance that holds the state it goes on from: elsewhere it would fail, so it goes there while that accepts
    requests, also when it has no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine process, as a dispatch queue sees it."""

    id: str
    part_slots: int
    """Its part of the pool's C."""
    seats: int | None = None
    """What it could run at most (`max_num_seqs`). None: unknown; the largest `num_requests_running` seen counts."""
    accepting: bool = True
    """False: unhealthy or draining. It gets nothing new; what it runs keeps its standing."""


class RefusalReason(StrEnum):
    """Why a request is not served."""

    QUEUE_FULL = "queue_full"
    """The pool holds `max_held` requests."""

    TEAM_QUEUE_FULL = "team_queue_full"
    """The team holds `max_held_per_team` requests."""

    HELD_BYTES_FULL = "held_bytes_full"
    """The bodies that the pool holds reach `max_held_bytes`."""

    HELD_TOO_LONG = "held_too_long"
    """It waited `longest_wait_seconds`."""

    NO_INSTANCE = "no_instance"
    """No instance of the pool accepts requests."""

    NO_OWNER = "no_owner"
    """No replica has owned the pool for longer than replicas may go on alone."""


@dataclass(slots=True)
class Send:
    """Send the request to an engine now."""

    request_id: str
    pool: str
    """The pool whose capacity it uses: the queue's own, or its fallback's."""
    instance_id: str
    grant: "Grant"
    priority: int | None
    """What to tell the engine; None (observe): nothing."""
    standing: Standing
    held_seconds: float
    degraded: bool = False
    """A replica that reaches no owner of the pool decided it alone."""


@dataclass(slots=True, kw_only=True)
class Held:
    """The request waits in the queue."""

    request_id: str
    team_held: int
    """Requests of its team that are held, with this one."""
    team_in_flight_slots: int
    reserved_slots: int
    pool_in_flight_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Abort the request at its engine (nothing of it has reached the client) and keep its body: it is held again.

    Report `aborted(request_id)` when the engine's connection is closed.
    """

    request_id: str
    instance_id: str
    wasted_slot_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request is not served; tell its client so."""

    request_id: str
    reason: RefusalReason
    found: int | float
    """What was found (requests, bytes or seconds, as the reason says)."""
    limit: int | float
    retry_after_seconds: float


Decision = Send | Held | Recall | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamQueueStat:
    """What a queue holds of one team."""

    team: str
    held: int
    held_slots: int
    held_bytes: int
    oldest_held_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStat:
    """What a queue knows of one instance."""

    id: str
    part_slots: int
    seats: int
    """What it could run at most, as far as known."""
    in_flight_slots: int
    aborting_slots: int
    """Slots of recalled requests whose seat may still be taken."""
    accepting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStat:
    """A snapshot of a dispatch queue. In `observe` the counters say what `hold` would have done."""

    mode: Mode
    held: int
    held_bytes: int
    teams: tuple[TeamQueueStat, ...]
    instances: tuple[InstanceStat, ...]
    recalls_total: int
    recalled_slot_seconds_total: float
    """Engine time that recalls threw away; charged to nobody."""
    turn_slots: int
    turns_taken: int


class DispatchQueue(Protocol):
    """Events in, decisions out; one implementation per `Mode`.

    Every call reads the pool's clock once and returns the decisions that follow, in the order to carry them out.
    Not thread-safe: one shell drives it.
    """

    @property
    def pool(self) -> "Pool": ...

    @property
    def mode(self) -> Mode: ...

    def submitted(self, request: Request) -> list[Decision]:
        """A request arrived. The decisions say what becomes of it (`Send`, `Held` or `Refused`)."""
        ...

    def first_byte(self, request_id: str) -> list[Decision]:
        """The client received the first byte of its answer: from now on the request cannot be recalled."""
        ...

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        """The engine has finished with a dispatched request (well or not); charges what it consumed. Idempotent."""
        ...

    def cancelled(self, request_id: str) -> list[Decision]:
        """The client of a held request left. For a dispatched one: nothing yet; abort it, then report `released`."""
        ...

    def aborted(self, request_id: str) -> list[Decision]:
        """The engine's connection of a recalled request is closed."""
        ...

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        """A dispatched request could not reach its instance: move its grant to another. None: there is no other."""
        ...

    def adopted(
        self, request: Request, *, instance_id: str, priority: int | None, standing: Standing, began: bool
    ) -> list[Decision]:
        """Count a request that runs at an engine already, with what was decided elsewhere (another owner, or none)."""
        ...

    def capacity_changed(self) -> list[Decision]:
        """The pool's C, shares or half-life were changed (`Pool.set_capacity`, `set_shares`, `set_half_life`)."""
        ...

    def instance_changed(self, instance: Instance) -> list[Decision]:
        """An instance is new, or its record changed."""
        ...

    def instance_removed(self, instance_id: str) -> list[Decision]:
        """An instance is gone for good; what was sent there is still to be released."""
        ...

    def running_seen(self, instance_id: str, running: int) -> list[Decision]:
        """An instance reported `num_requests_running`; teaches its seats where they are unknown."""
        ...

    def tick(self) -> list[Decision]:
        """Time passed: call at `next_deadline()`."""
        ...

    def next_deadline(self) -> float | None:
        """When `tick` has something to do (pool clock, seconds); None: nothing waits for time."""
        ...

    def snapshot(self) -> QueueStat:
        """What is held and where things run, now."""
        ...
