"""The gateway policies that are compared: what the product does, and what others do.

All take the same events and return the same decisions (`fairshare.core.decisions`), so the world that carries them
out does not know which one it drives.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
    Held,
    HoldOptions,
    Instance,
    Mode,
    RefusalReason,
    Refused,
    Request,
    Send,
)
from fairshare.core.dispatch import make_queue
from fairshare.core.hold import HoldQueue
from fairshare.core.instances import InstanceTable
from fairshare.core.pool import Grant, Pool
from fairshare.core.priority import Standing
from fairshare.simulator import measures

CAP_FACTOR = 2.0
"""`fifo-caps` lets a team have this many times its share of C in flight, as operators do who cap each team."""

ESTIMATE_MEMORY_REQUESTS = 16
"""What must know an answer's length before its end expects the mean of about this many of the team's last ones."""

RATE_WINDOW_SECONDS = 60.0

RETRY_SECONDS = 1.0
"""After which clients try again where there is no engine."""


class PolicyName(StrEnum):
    """What a run can be compared with."""

    FCFS = "fcfs"
    """No gateway: everything goes to the engine, which serves in order of arrival."""
    PASS = "pass"
    """`dispatch: pass`: standing and rank on arrival, the engine's queue orders (the seed's rule)."""
    HOLD = "hold"
    """`dispatch: hold` with recall switched off."""
    HOLD_RECALL = "hold+recall"
    """`dispatch: hold` as it is by default."""
    HOLD_WEIGHTED = "hold+weighted"
    """`hold+recall` with `borrow_order: weighted`."""
    STATIC = "static"
    """Static partition: a team never has more in flight than its part of C."""
    VTC = "vtc"
    """Virtual token counters at the gateway: the backlogged team with the least service goes next."""
    WEIGHTED_VTC = "weighted-vtc"
    """VTC with service divided by share."""
    RATE_LIMIT = "rate-limit"
    """Tokens per minute per team, in proportion to shares; 429 until the team's next minute, as LiteLLM does."""
    FIFO_CAPS = "fifo-caps"
    """C in flight, first come first served, no team above a cap."""


UNHELD = frozenset({PolicyName.FCFS, PolicyName.PASS, PolicyName.RATE_LIMIT})
"""Policies that send everything they accept at once; all others keep C slots in flight."""


HELD = frozenset({PolicyName.HOLD, PolicyName.HOLD_RECALL, PolicyName.HOLD_WEIGHTED})
"""Policies that are `dispatch: hold`."""


class GatewayPolicy(Protocol):
    """What the world needs of a policy; `fairshare.core`'s dispatch queues are such policies as they are."""

    def submitted(self, request: Request) -> list[Decision]: ...
    def first_byte(self, request_id: str) -> list[Decision]: ...
    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]: ...
    def aborted(self, request_id: str) -> list[Decision]: ...
    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None: ...
    def capacity_changed(self) -> list[Decision]: ...
    def instance_changed(self, instance: Instance) -> list[Decision]: ...
    def tick(self) -> list[Decision]: ...
    def next_deadline(self) -> float | None: ...


def hold_options(name: PolicyName, options: HoldOptions) -> HoldOptions:
    """What one of `HELD` makes of the plan's options."""
    match name:
        case PolicyName.HOLD:
            return replace(options, recall=False)
        case PolicyName.HOLD_WEIGHTED:
            return replace(options, borrow_order=BorrowOrder.WEIGHTED)
        case _:
            return options


def make_policy(
    name: PolicyName,
    pool: Pool,
    options: HoldOptions,
    instances: Iterable[Instance],
    tokens_per_minute: float,
    fallback: GatewayPolicy | None = None,
) -> GatewayPolicy:
    """A policy for one pool. `fallback` counts for `hold` only; `tokens_per_minute` for `rate-limit` only."""
    instances = tuple(instances)
    hold_fallback = fallback if isinstance(fallback, HoldQueue) else None
    match name:
        case PolicyName.FCFS:
            return Through(pool, instances)
        case PolicyName.PASS:
            return make_queue(pool, Mode.PASS, instances=instances, fallback=hold_fallback)
        case PolicyName.HOLD | PolicyName.HOLD_RECALL | PolicyName.HOLD_WEIGHTED:
            options = hold_options(name, options)
            return make_queue(pool, Mode.HOLD, options=options, instances=instances, fallback=hold_fallback)
        case PolicyName.STATIC:
            return StaticPartition(pool, instances)
        case PolicyName.VTC:
            return TokenCounters(pool, instances, weighted=False)
        case PolicyName.WEIGHTED_VTC:
            return TokenCounters(pool, instances, weighted=True)
        case PolicyName.RATE_LIMIT:
            return RateLimited(pool, instances, tokens_per_minute)
        case PolicyName.FIFO_CAPS:
            return CappedFifo(pool, instances)


@dataclass(slots=True, eq=False)
class _Dispatched:
    """A request that a baseline has sent."""

    request: Request
    instance_id: str
    charged: float = 0.0
    """What VTC charged for it when it left."""


class _Baseline(ABC):
    """What baselines share: they count what they sent, choose the emptiest instance, and never take anything back."""

    def __init__(self, pool: Pool, instances: Iterable[Instance]) -> None:
        self._pool = pool
        self._instances = InstanceTable(instances)
        self._dispatched: dict[str, _Dispatched] = {}
        self._held_since: dict[str, float] = {}
        self._in_flight: dict[str, int] = {}

    @abstractmethod
    def submitted(self, request: Request) -> list[Decision]:
        """A request arrived."""

    def _freed(self, ended: _Dispatched, consumed_cost_units: float) -> list[Decision]:
        """A request has ended; what may go now."""
        return []

    def first_byte(self, request_id: str) -> list[Decision]:
        return []

    def aborted(self, request_id: str) -> list[Decision]:
        return []

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        dispatched = self._dispatched.pop(request_id, None)
        if dispatched is None:
            return []
        request = dispatched.request
        self._in_flight[request.team] -= request.slots
        self._instances.take_off(self._instances[dispatched.instance_id], request.team, request.slots)
        return self._freed(dispatched, consumed_cost_units)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        dispatched = self._dispatched[request_id]
        request = dispatched.request
        emptiest = self._instances.emptiest_by_seats(excluding | {dispatched.instance_id})
        if emptiest is None:
            return None
        self._instances.take_off(self._instances[dispatched.instance_id], request.team, request.slots)
        self._instances.place(emptiest, request.team, request.slots)
        dispatched.instance_id = emptiest.id
        return emptiest.id

    def capacity_changed(self) -> list[Decision]:
        return []

    def instance_changed(self, instance: Instance) -> list[Decision]:
        self._instances.changed(instance)
        return self.capacity_changed()

    def tick(self) -> list[Decision]:
        return []

    def next_deadline(self) -> float | None:
        return None

    def _send(self, request: Request, now: float) -> Send:
        emptiest = self._instances.emptiest_by_seats()
        assert emptiest is not None, "nothing is sent while no engine is there"
        self._dispatched[request.id] = _Dispatched(request, emptiest.id)
        self._in_flight[request.team] = self._in_flight.get(request.team, 0) + request.slots
        self._instances.place(emptiest, request.team, request.slots)
        return Send(
            request_id=request.id,
            pool=self._pool.name,
            instance_id=emptiest.id,
            grant=Grant(request.team, 0, False, False, request.slots),
            priority=None,
            standing=Standing.WITHIN_SHARE,
            held_seconds=now - self._held_since.pop(request.id, now),
        )

    def _held(self, request: Request, now: float, team_held: int) -> Held:
        self._held_since[request.id] = now
        return Held(
            request_id=request.id,
            team_held=team_held,
            team_in_flight_slots=self._in_flight.get(request.team, 0),
            reserved_slots=0,
            pool_in_flight_slots=self._instances.placed_slots,
            capacity_slots=self._pool.capacity,
        )


class _MeanOutputs:
    """Of each team the mean length of its last answers: a gateway sees a length at the answer's end."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def of(self, request: Request) -> float:
        """Expected tokens of all answers to a request."""
        return self._tokens.get(request.team, 0.0) * request.slots

    def ended(self, request: Request, consumed_cost_units: float) -> float:
        """Note a request's answers; returns their tokens. 0 if it was broken off, which says nothing of lengths."""
        prompt = measures.service(request.estimated_tokens, 0)
        tokens = max(0.0, consumed_cost_units - prompt) / measures.COMPLETION_WEIGHT
        if tokens:
            mean = self._tokens.get(request.team, tokens / request.slots)
            self._tokens[request.team] = mean + (tokens / request.slots - mean) / ESTIMATE_MEMORY_REQUESTS
        return tokens


class Through(_Baseline):
    """Everything goes to an engine at once, without a priority; where none is left, clients try again."""

    def submitted(self, request: Request) -> list[Decision]:
        now = self._pool.begin()
        if self._instances.any_accepting:
            return [self._send(request, now)]
        return [
            Refused(
                request_id=request.id,
                reason=RefusalReason.NO_INSTANCE,
                found=0,
                limit=0,
                retry_after_seconds=RETRY_SECONDS,
            )
        ]


class StaticPartition(_Baseline):
    """Each team has its part of C, at least one slot, and never more, whoever is idle."""

    def __init__(self, pool: Pool, instances: Iterable[Instance]) -> None:
        super().__init__(pool, instances)
        self._waiting: dict[str, deque[Request]] = {}

    def submitted(self, request: Request) -> list[Decision]:
        now = self._pool.begin()
        waiting = self._waiting.setdefault(request.team, deque())
        waiting.append(request)
        sent = self._fill(request.team, now)
        return sent or [self._held(request, now, len(waiting))]

    def capacity_changed(self) -> list[Decision]:
        now = self._pool.begin()
        return [decision for team in self._waiting for decision in self._fill(team, now)]

    def _freed(self, ended: _Dispatched, consumed_cost_units: float) -> list[Decision]:
        return self._fill(ended.request.team, self._pool.begin())

    def _fill(self, team: str, now: float) -> list[Decision]:
        part_slots = max(1, self._pool.state(team).reserved)
        waiting = self._waiting.get(team)
        sent: list[Decision] = []
        while waiting and self._in_flight.get(team, 0) < part_slots and self._instances.any_accepting:
            sent.append(self._send(waiting.popleft(), now))
        return sent


class CappedFifo(_Baseline):
    """At most C slots in flight, first come first served over all teams, skipping teams at their cap."""

    def __init__(self, pool: Pool, instances: Iterable[Instance]) -> None:
        super().__init__(pool, instances)
        self._arrivals: OrderedDict[str, Request] = OrderedDict()

    def submitted(self, request: Request) -> list[Decision]:
        now = self._pool.begin()
        self._arrivals[request.id] = request
        sent = self._fill(now)
        return sent or [self._held(request, now, len(self._arrivals))]

    def capacity_changed(self) -> list[Decision]:
        return self._fill(self._pool.begin())

    def _freed(self, ended: _Dispatched, consumed_cost_units: float) -> list[Decision]:
        return self._fill(self._pool.begin())

    def _fill(self, now: float) -> list[Decision]:
        sent: list[Decision] = []
        shares = self._pool.exact_shares
        while self._instances.placed_slots < self._pool.capacity and self._instances.any_accepting:
            for request in self._arrivals.values():
                cap_slots = max(1, math.ceil(CAP_FACTOR * shares.get(request.team, Fraction(0)) * self._pool.capacity))
                if self._in_flight.get(request.team, 0) < cap_slots:
                    break
            else:
                break
            del self._arrivals[request.id]
            sent.append(self._send(request, now))
        return sent


class TokenCounters(_Baseline):
    """Virtual token counters (VTC) at a gateway: C slots in flight; the least served backlogged team goes next.

    As in the paper, a team that comes back is lifted to the least counter of the backlogged ones, so that idling earns
    no hoard. Inside an engine VTC counts each token as it is made; a gateway sees them at the end, so the expected
    answer (the team's mean) is charged when a request leaves, and corrected when it has ended.
    """

    def __init__(self, pool: Pool, instances: Iterable[Instance], *, weighted: bool) -> None:
        super().__init__(pool, instances)
        self._weighted = weighted
        self._waiting: dict[str, deque[Request]] = {}
        self._counters: dict[str, float] = {}
        self._outputs = _MeanOutputs()
        self._last_left = 0.0
        """Counter of the team whose queue was the last to run empty."""

    def submitted(self, request: Request) -> list[Decision]:
        now = self._pool.begin()
        waiting = self._waiting.setdefault(request.team, deque())
        if not waiting:
            backlogged = [self._counters[team] for team, queue in self._waiting.items() if queue]
            lift = min(backlogged) if backlogged else self._last_left
            self._counters[request.team] = max(self._counters.get(request.team, 0.0), lift)
        waiting.append(request)
        sent = self._fill(now)
        return sent or [self._held(request, now, len(waiting))]

    def capacity_changed(self) -> list[Decision]:
        return self._fill(self._pool.begin())

    def _freed(self, ended: _Dispatched, consumed_cost_units: float) -> list[Decision]:
        request = ended.request
        self._counters[request.team] += (consumed_cost_units - ended.charged) / self._weight(request.team)
        self._outputs.ended(request, consumed_cost_units)
        return self._fill(self._pool.begin())

    def _weight(self, team: str) -> float:
        # Teams without a share get as good as nothing while anybody else waits.
        return max(1e-9, self._pool.state(team).share) if self._weighted else 1.0

    def _fill(self, now: float) -> list[Decision]:
        sent: list[Decision] = []
        while self._instances.placed_slots < self._pool.capacity and self._instances.any_accepting:
            backlogged = [team for team, queue in self._waiting.items() if queue]
            if not backlogged:
                break
            team = min(backlogged, key=self._counters.__getitem__)
            request = self._waiting[team].popleft()
            if not self._waiting[team]:
                self._last_left = self._counters[team]
            send = self._send(request, now)
            expected = measures.service(request.estimated_tokens, self._outputs.of(request))
            self._dispatched[request.id].charged = expected
            self._counters[team] += expected / self._weight(team)
            sent.append(send)
        return sent


@dataclass(slots=True, eq=False)
class _Window:
    """A minute of one team."""

    opened_at: float
    tokens: float = 0.0
    requests: int = 0


class RateLimited(Through):
    """Tokens per minute per team, the rest straight to the engine: what LiteLLM's `tpm_limit` does (1.108).

    A team's minute begins with its first request after the last one ran out. A request counts with what it is expected
    to take when it arrives, and with what it took when it has ended; one that would go beyond the limit gets 429 until
    the team's next minute. Kinder than LiteLLM: a request is expected to take what the team's requests took on
    average, not `max_tokens`; clients come again as soon as the minute is over; one that is larger than the limit
    by itself gets a minute of its own.
    """

    def __init__(self, pool: Pool, instances: Iterable[Instance], tokens_per_minute: float) -> None:
        super().__init__(pool, instances)
        self._tokens_per_minute = tokens_per_minute
        self._outputs = _MeanOutputs()
        self._windows: dict[str, _Window] = {}
        self._counted: dict[str, tuple[_Window, float]] = {}
        """Of each request that runs: where it counts, and with how many tokens."""

    def submitted(self, request: Request) -> list[Decision]:
        now = self._pool.begin()
        window = self._windows.get(request.team)
        if window is None or now >= window.opened_at + RATE_WINDOW_SECONDS:
            window = self._windows[request.team] = _Window(now)
        expected = request.estimated_tokens + self._outputs.of(request)
        limit = self._pool.state(request.team).share * self._tokens_per_minute
        if window.requests and window.tokens + expected > limit:
            return [
                Refused(
                    request_id=request.id,
                    reason=RefusalReason.TEAM_QUEUE_FULL,
                    found=window.tokens,
                    limit=limit,
                    retry_after_seconds=window.opened_at + RATE_WINDOW_SECONDS - now,
                )
            ]
        window.tokens += expected
        window.requests += 1
        self._counted[request.id] = (window, expected)
        return super().submitted(request)

    def _freed(self, ended: _Dispatched, consumed_cost_units: float) -> list[Decision]:
        window, expected = self._counted.pop(ended.request.id)
        window.tokens += ended.request.estimated_tokens + self._outputs.ended(ended.request, consumed_cost_units)
        window.tokens -= expected
        return []


def parse_policies(names: Sequence[str]) -> tuple[PolicyName, ...]:
    """Names to policies; `all` is every one. Raises ValueError for an unknown one."""
    if list(names) == ["all"]:
        return tuple(PolicyName)
    known = {policy.value: policy for policy in PolicyName}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no policy {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names)
