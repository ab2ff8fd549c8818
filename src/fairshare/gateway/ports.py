"""What the data path tells the rest of the gateway: one record per request, and a few counters."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.identity import Identity
from fairshare.wire.trace_context import Trace
from fairshare.wire.usage import CostWeights


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    """The client got the engine's whole answer, and it was no server error (5xx)."""

    REFUSED = "refused"
    """fairshare answered itself, before anything was sent to an engine."""

    FAILED = "failed"
    """It was sent to an engine and broke: unreachable, reset, too slow, or an error inside the engine's stream."""

    CANCELLED = "cancelled"
    """The client left before its answer was complete."""


class RequestRecord(msgspec.Struct, gc=False):
    """One request: made at its end, and not changed any more when recorders get it.

    Every request that was read whole enough to have a path ends in exactly one of these.

    Names (team, pool, model, instance) are configured names or empty: nothing a client made up is in them.
    """

    id: str
    """The request id that the client saw (`x-request-id`)."""
    endpoint: str
    """The endpoint's path as the table of endpoints has it; empty: no such path."""
    arrived_at: float
    """When its head was complete. Wall clock, seconds since 1970-01-01 UTC."""
    key_id: str = ""
    team: str = ""
    pool: str = ""
    """The pool of the model, whose share it was judged by."""
    served_by: str = ""
    """The pool whose capacity it used: its own, or the fallback. Empty: it was never sent."""
    instance_id: str = ""
    """The last instance it was sent to."""
    model: str = ""
    """The model as the client named it, if it is configured."""
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    standing: Standing | None = None
    priority: int | None = None
    """What the engine was told; None: nothing (never sent, or `observe`)."""
    slots: int = 0
    """Running sequences it took; 0: an endpoint that takes none."""
    stream: bool = False

    sent_seconds: float | None = None
    """From arrival until it was last sent to an engine; None: never."""
    first_byte_seconds: float | None = None
    """From arrival until the first byte of an engine's answer went to the client; None: no byte did."""
    total_seconds: float = 0.0
    """From arrival until the engine had finished, or the request had ended otherwise."""
    held_seconds: float = 0.0
    """How long it waited in the dispatch queue, all waits together."""
    added_seconds: float = 0.0
    """From the last byte of its body until it was sent, without `held_seconds`: what fairshare itself cost."""

    status: int = 0
    """The HTTP status that the client was sent; 0: none, it left before."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens`."""
    completion_tokens: int = 0
    cost_units: float = 0.0
    """What the team was charged."""
    estimated: bool = False
    """True: the engine's own count never came (the answer was cut), the tokens are an estimate."""
    finish_reason: str = ""
    """Why the engine says that it stopped, one of `FINISH_REASONS` in `fairshare.wire.usage`; empty: it did not say."""
    degraded: bool = False
    """It was sent without the pool's owner: this replica reached none and decided alone."""
    trace: Trace | None = None
    """Its place in a trace; None: no traces are made."""

    outcome: Outcome = Outcome.COMPLETED
    reason: str = ""
    """Why it was refused or failed: the code of the error (the table in `fairshare.wire.problems`), or
    `client_left`, `client_stalled`, `engine_error` (status 5xx, or an error inside its answer). Empty: it completed."""
    detail: str = ""
    """What exactly was found, for the log; never anything of a prompt."""
    recalls: int = 0
    """How often it was taken back from an engine and held again."""
    wasted_slot_seconds: float = 0.0
    """Engine time that those recalls threw away; charged to nobody."""
    retries: int = 0
    """How often it was sent again because an instance could not be reached."""


class Recorder(Protocol):
    """Takes the records of finished requests: metrics, the ledger, the access log."""

    def finished(self, record: RequestRecord) -> None:
        """A request ended. Called on the event loop: must not block and must not raise."""
        ...


class Tracer(Protocol):
    """Gives requests their place in a trace."""

    def begin(self, forwarded: bytes) -> tuple[Trace, bytes]:
        """A request has arrived with these header lines for its engine: its span, and the lines with that in them."""
        ...


class Reservation(Protocol):
    """What an admitted request holds of limits and budgets until it ends."""

    def end(self, tokens: float) -> None:
        """It has ended, exactly once, and took so many tokens (prompt and completion)."""
        ...


class Admission(Protocol):
    """Limits and budgets: whether a request may go on. Decides at once, on the event loop."""

    def admit(
        self,
        identity: Identity,
        *,
        model: str,
        prompt_tokens: int,
        max_tokens: int | None,
        slots: int,
        cost: CostWeights | None,
    ) -> Reservation:
        """Let a request in. `max_tokens`: of each slot. `cost`: what its pool charges; None: it is charged nothing.

        Raises:
            RequestProblem: a limit or budget is in the way.
        """
        ...


class Recorders:
    """Hands every record to several recorders."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def finished(self, record: RequestRecord) -> None:
        for recorder in self._recorders:
            recorder.finished(record)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """How the account of requests fares."""

    store_is_up: bool
    pending: int
    written_total: int
    dropped_total: int


@dataclass(slots=True)
class Counters:
    """What the data port counts beside records. Totals since start, except the gauges."""

    connections_total: int = 0
    connections_refused_total: int = 0
    """Connections that got a 503 because `max_connections` were open, or as many as open files allow."""
    descriptors_exhausted_total: int = 0
    """Requests that got a 503 because the process may not open another file."""
    bad_requests_total: int = 0
    """Connections closed because what came was not HTTP/1.1, or its head was too long or too slow."""
    open_connections: int = 0
    """Gauge: clients connected now."""
    open_requests: int = 0
    """Gauge: requests that have arrived and not ended."""
    upstream_connections: int = 0
    """Gauge: connections to engines, in use and idle."""
    upstream_connects_total: int = 0


@dataclass(slots=True)
class CoarseTime:
    """The pools' clock as the last sweep read it: fit for timeouts of seconds, and free to read for every chunk."""

    now: float
