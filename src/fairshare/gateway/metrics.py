"""Prometheus metrics. Counting a finished request is a few dictionary updates; text is made on a scrape only.

Labels are bounded: pools and teams that are configured, our own codes and reasons, and HTTP statuses. Whatever else
turns up counts under an empty label, so that made-up names can never grow a series.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.exchange import ENGINE_ERROR
from fairshare.gateway.options import GatewaySpec
from fairshare.gateway.ports import Counters, LedgerCounts, Outcome, RequestRecord
from fairshare.gateway.status import PoolStatus
from fairshare.wire.problems import INTERNAL_ERROR

CONTENT_TYPE = CONTENT_TYPE_LATEST

HELD_BUCKETS_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ADDED_BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0)
FIRST_BYTE_BUCKETS_SECONDS = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOTAL_BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Across(Enum):
    """How a metric of several workers is put together."""

    SUM = "sum"
    LEAST = "least"
    OWNER = "owner"
    """The one of the replica that decides for the pool."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table of metrics."""

    name: str
    """As a scrape shows it, `_total` included."""
    kind: str
    labels: tuple[str, ...]
    help: str
    across: Across = Across.SUM


REQUESTS = MetricSpec(
    "fairshare_requests_total",
    "counter",
    ("pool", "team", "class", "standing", "code"),
    "Finished requests. code: the HTTP status that the client got, 0 if it left before.",
)
FAILED = MetricSpec(
    "fairshare_requests_failed_total",
    "counter",
    ("pool", "reason"),
    "Requests that were refused or broke, streams that broke or carried the engine's error among them.",
)
TOKENS = MetricSpec(
    "fairshare_tokens_total",
    "counter",
    ("pool", "team", "kind"),
    "Tokens of finished requests. kind: prompt (cached ones among them), cached, completion.",
)
COST_UNITS = MetricSpec(
    "fairshare_cost_units_total", "counter", ("pool", "team"), "What teams were charged, without decay."
)
HELD_SECONDS = MetricSpec(
    "fairshare_held_seconds",
    "histogram",
    ("pool",),
    "How long requests that went to an engine waited in the dispatch queue.",
)
ADDED_SECONDS = MetricSpec(
    "fairshare_added_seconds",
    "histogram",
    ("pool",),
    "What fairshare itself added before a request went to an engine, without waiting in the queue.",
)
FIRST_BYTE_SECONDS = MetricSpec(
    "fairshare_first_byte_seconds",
    "histogram",
    ("pool",),
    "From a request's arrival until the first byte of the engine's answer went to the client.",
)
TOTAL_SECONDS = MetricSpec(
    "fairshare_total_seconds",
    "histogram",
    ("pool",),
    "From a request's arrival until it ended, of those that went to an engine.",
)
CAPACITY = MetricSpec(
    "fairshare_capacity", "gauge", ("pool",), "C now: the slots that the healthy engines sustain.", across=Across.OWNER
)
CONFIGURED_CAPACITY = MetricSpec(
    "fairshare_configured_capacity",
    "gauge",
    ("pool",),
    "C when every configured engine is healthy.",
    across=Across.OWNER,
)
RESERVED = MetricSpec(
    "fairshare_reserved", "gauge", ("pool", "team"), "Within-share slots of a team.", across=Across.OWNER
)
IN_FLIGHT = MetricSpec(
    "fairshare_in_flight",
    "gauge",
    ("pool", "team"),
    "Slots in flight at engines, without phantoms.",
    across=Across.OWNER,
)
BORROWING = MetricSpec(
    "fairshare_borrowing", "gauge", ("pool", "team"), "Slots in flight that borrow.", across=Across.OWNER
)
PHANTOMS = MetricSpec(
    "fairshare_phantoms", "gauge", ("pool", "team"), "Slots counted in flight without a grant.", across=Across.OWNER
)
HELD = MetricSpec(
    "fairshare_held", "gauge", ("pool", "team"), "Requests waiting in the dispatch queue.", across=Across.OWNER
)
OLDEST_HELD = MetricSpec(
    "fairshare_oldest_held_seconds",
    "gauge",
    ("pool", "team"),
    "How long the request that waits longest in the dispatch queue has waited; 0: none waits.",
    across=Across.OWNER,
)
USAGE = MetricSpec("fairshare_usage", "gauge", ("pool", "team"), "Decayed usage, cost units.", across=Across.OWNER)
RECALLS = MetricSpec(
    "fairshare_recalls_total", "counter", ("pool",), "Requests taken back from an engine.", across=Across.OWNER
)
RECALLED = MetricSpec(
    "fairshare_recalled_slot_seconds_total",
    "counter",
    ("pool",),
    "Engine time that recalls threw away; charged to nobody.",
    across=Across.OWNER,
)
INSTANCE_UP = MetricSpec(
    "fairshare_instance_up", "gauge", ("pool", "engine"), "1: the engine is healthy.", across=Across.OWNER
)
INSTANCE_RUNNING = MetricSpec(
    "fairshare_instance_running",
    "gauge",
    ("pool", "engine"),
    "Requests that the engine says it runs, whoever sent them.",
    across=Across.OWNER,
)
INSTANCE_WAITING = MetricSpec(
    "fairshare_instance_waiting",
    "gauge",
    ("pool", "engine"),
    "Requests that wait inside the engine.",
    across=Across.OWNER,
)
INSTANCE_KV_USAGE = MetricSpec(
    "fairshare_instance_kv_usage",
    "gauge",
    ("pool", "engine"),
    "How full the engine's KV cache is, 0 to 1.",
    across=Across.OWNER,
)
INSTANCE_PREEMPTIONS = MetricSpec(
    "fairshare_instance_preemptions_total",
    "counter",
    ("pool", "engine"),
    "Requests that the engine has evicted since it started, because its KV cache was full.",
    across=Across.OWNER,
)
FINDINGS = MetricSpec(
    "fairshare_findings",
    "gauge",
    ("pool", "id", "severity"),
    "What an operator should know, by its id; how many instances, if it is about instances.",
    across=Across.OWNER,
)
CONNECTIONS = MetricSpec("fairshare_connections", "gauge", (), "Clients connected to the data port.")
CONNECTIONS_REFUSED = MetricSpec(
    "fairshare_connections_refused_total",
    "counter",
    (),
    "Connections that got a 503 because max_connections were open, or as many as open files allow.",
)
DESCRIPTORS_EXHAUSTED = MetricSpec(
    "fairshare_descriptors_exhausted_total",
    "counter",
    (),
    "Requests that got a 503 because the process may not open another file.",
)
BAD_REQUESTS = MetricSpec(
    "fairshare_bad_requests_total",
    "counter",
    (),
    "Connections closed because what came was not HTTP/1.1, or its head was too long or too slow.",
)
UPSTREAM_CONNECTIONS = MetricSpec(
    "fairshare_upstream_connections", "gauge", (), "Connections to engines, in use and idle."
)
STORE_UP = MetricSpec(
    "fairshare_store_up", "gauge", (), "1: the last write to the store succeeded.", across=Across.LEAST
)
LEDGER_PENDING = MetricSpec("fairshare_ledger_pending", "gauge", (), "Records of requests that wait to be written.")
LEDGER_WRITTEN = MetricSpec("fairshare_ledger_written_total", "counter", (), "Records that the store has.")
LEDGER_DROPPED = MetricSpec(
    "fairshare_ledger_dropped_total", "counter", (), "Records that were lost because the store was away for too long."
)
OWNER = MetricSpec(
    "fairshare_owner", "gauge", ("pool",), "1: this replica decides for the pool; 0: another one does, or nobody."
)
EPOCH = MetricSpec(
    "fairshare_lease_epoch", "gauge", ("pool",), "Number of the pool's lease; grows with every owner.", Across.OWNER
)
DEGRADED = MetricSpec(
    "fairshare_degraded", "gauge", ("pool",), "1: this replica reaches no owner and decides alone, or refuses."
)
DEGRADED_REQUESTS = MetricSpec(
    "fairshare_degraded_requests_total", "counter", ("pool",), "Requests that this replica sent without an owner."
)
UNSAVED_CHARGES = MetricSpec(
    "fairshare_unsaved_charges", "gauge", ("pool",), "Ended requests whose charge no owner has saved yet."
)
WORKERS = MetricSpec("fairshare_workers", "gauge", (), "Workers of this machine that serve (`serve --workers`).")
WORKER_DEATHS = MetricSpec(
    "fairshare_worker_deaths_total", "counter", (), "Workers of this machine that ended without being told to."
)

MACHINE_METRICS = (WORKERS, WORKER_DEATHS)
"""Those that only the parent of several workers shows."""

METRICS: tuple[MetricSpec, ...] = (
    REQUESTS,
    FAILED,
    TOKENS,
    COST_UNITS,
    HELD_SECONDS,
    ADDED_SECONDS,
    FIRST_BYTE_SECONDS,
    TOTAL_SECONDS,
    CAPACITY,
    CONFIGURED_CAPACITY,
    RESERVED,
    IN_FLIGHT,
    BORROWING,
    PHANTOMS,
    HELD,
    OLDEST_HELD,
    USAGE,
    RECALLS,
    RECALLED,
    INSTANCE_UP,
    INSTANCE_RUNNING,
    INSTANCE_WAITING,
    INSTANCE_KV_USAGE,
    INSTANCE_PREEMPTIONS,
    FINDINGS,
    CONNECTIONS,
    CONNECTIONS_REFUSED,
    DESCRIPTORS_EXHAUSTED,
    BAD_REQUESTS,
    UPSTREAM_CONNECTIONS,
    STORE_UP,
    LEDGER_PENDING,
    LEDGER_WRITTEN,
    LEDGER_DROPPED,
    OWNER,
    EPOCH,
    DEGRADED,
    DEGRADED_REQUESTS,
    UNSAVED_CHARGES,
    *MACHINE_METRICS,
)
"""Every metric, for the scrape, the reference page and its test."""

_COMPLETED = Outcome.COMPLETED
_CODES = {status: str(status) for status in (0, *range(100, 600))}
_CLASSES = tuple(each.name.lower() for each in ServiceClass)


class _Histogram:
    """Counts of values by bucket, cumulative only when it is shown."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        shown: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            shown.append((bound, total))
        return shown


class _Consumed:
    """What the finished requests of one team in one pool consumed."""

    __slots__ = ("cached_tokens", "completion_tokens", "cost_units", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.cost_units = 0.0


class _Waits:
    """How long the requests of one pool were held, what fairshare added, and how long they took."""

    __slots__ = ("added", "first_byte", "held", "total")

    def __init__(self) -> None:
        self.held = _Histogram(HELD_BUCKETS_SECONDS)
        self.added = _Histogram(ADDED_BUCKETS_SECONDS)
        self.first_byte = _Histogram(FIRST_BYTE_BUCKETS_SECONDS)
        self.total = _Histogram(TOTAL_BUCKETS_SECONDS)

    def observe(self, record: RequestRecord) -> None:
        """A request that was sent has ended. Written out four times: calls would cost more than what they do."""
        held, added, total = self.held, self.added, self.total
        seconds = record.held_seconds
        if seconds:
            held.counts[bisect_left(HELD_BUCKETS_SECONDS, seconds)] += 1
            held.sum += seconds
        else:
            held.counts[0] += 1
        seconds = record.added_seconds
        added.counts[bisect_left(ADDED_BUCKETS_SECONDS, seconds)] += 1
        added.sum += seconds
        seconds = record.total_seconds
        total.counts[bisect_left(TOTAL_BUCKETS_SECONDS, seconds)] += 1
        total.sum += seconds
        first_byte_seconds = record.first_byte_seconds
        if first_byte_seconds is not None:
            first_byte = self.first_byte
            first_byte.counts[bisect_left(FIRST_BYTE_BUCKETS_SECONDS, first_byte_seconds)] += 1
            first_byte.sum += first_byte_seconds


class _Series:
    """Where finished requests with the same labels are counted."""

    __slots__ = ("consumed", "count", "waits")

    def __init__(self) -> None:
        self.count = 0
        self.waits: _Waits | None = None
        """Of their pool; None: none of them was sent yet."""
        self.consumed = _Consumed()
        """By their team in their pool, once one was sent."""


class Metrics:
    """Counts finished requests (a `Recorder`) and shows them, with the state of the pools, to Prometheus.

    Lives on the event loop's thread.
    """

    def __init__(
        self,
        pools: Callable[[], Iterable[PoolStatus]],
        counters: Callable[[], Counters],
        ledger: Callable[[], LedgerCounts | None] = lambda: None,
    ) -> None:
        self._read_pools = pools
        self._read_ledger = ledger
        self._read_counters = counters
        self._pools: frozenset[str] = frozenset()
        self._teams: frozenset[str] = frozenset()
        self._requests: dict[tuple[str, str, str, str, str], _Series] = {}
        self._series_of: dict[tuple[str, str, ServiceClass, Standing | None, int], _Series] = {}
        """The series of requests as their records say it; only of names that may be labels, so that it is bounded."""
        self._failed: dict[tuple[str, str], int] = {}
        self._consumed: dict[tuple[str, str], _Consumed] = {}
        self._waits: dict[str, _Waits] = {}

    def configure(self, spec: GatewaySpec, accounts: Iterable[str] = ()) -> None:
        """The names that may be labels from now on. What was counted under other names stays until the restart.

        `accounts`: teams beyond those of the configuration.
        """
        self._series_of.clear()
        self._pools = frozenset(pool.name for pool in spec.pools)
        self._teams = frozenset(team.name for team in spec.teams).union(accounts, *(pool.shares for pool in spec.pools))
        for pool in self._pools:
            # A series that begins at 1 shows no increase, and the first fault of ours is one to hear of.
            self._failed.setdefault((pool, INTERNAL_ERROR.code), 0)

    def finished(self, record: RequestRecord) -> None:
        said = (record.pool, record.team, record.service_class, record.standing, record.status)
        series = self._series_of.get(said) or self._series(*said)
        series.count += 1
        if record.outcome is not _COMPLETED or record.status >= 500:
            reason = _failure(record)
            if reason:
                failure = (record.pool if record.pool in self._pools else "", reason)
                self._failed[failure] = self._failed.get(failure, 0) + 1
        if record.sent_seconds is not None:
            waits = series.waits or self._first_sent(record, series)
            waits.observe(record)
            consumed = series.consumed
            consumed.prompt_tokens += record.prompt_tokens
            if record.cached_tokens:
                consumed.cached_tokens += record.cached_tokens
            consumed.completion_tokens += record.completion_tokens
            consumed.cost_units += record.cost_units

    def _labels(self, pool: str, team: str) -> tuple[str, str]:
        return pool if pool in self._pools else "", team if team in self._teams else ""

    def _series(
        self, pool: str, team: str, service_class: ServiceClass, standing: Standing | None, status: int
    ) -> _Series:
        names, code = self._labels(pool, team), _CODES.get(status, "")
        labels = (*names, _CLASSES[service_class], "" if standing is None else standing.value, code)
        series = self._requests.setdefault(labels, _Series())
        if names == (pool, team) and code:
            self._series_of[pool, team, service_class, standing, status] = series
        return series

    def _first_sent(self, record: RequestRecord, series: _Series) -> _Waits:
        """The first request of a series was sent: it counts with the others of its pool and its team from now on."""
        pool, team = self._labels(record.pool, record.team)
        series.consumed = self._consumed.setdefault((pool, team), _Consumed())
        series.waits = self._waits.setdefault(pool, _Waits())
        return series.waits

    def exposition(self) -> Iterator[bytes]:
        """What a scrape answers, in `CONTENT_TYPE`, a metric at a time: requests can be served in between."""
        for metric in self.collect():
            yield generate_latest(_Only(metric))

    def collect(self) -> Iterator[Metric]:
        yield _counter(REQUESTS, [(labels, series.count) for labels, series in self._requests.items()])
        yield _counter(FAILED, self._failed.items())
        yield _counter(TOKENS, self._tokens())
        yield _counter(COST_UNITS, [(labels, consumed.cost_units) for labels, consumed in self._consumed.items()])
        yield _histogram(HELD_SECONDS, {pool: waits.held for pool, waits in self._waits.items()})
        yield _histogram(ADDED_SECONDS, {pool: waits.added for pool, waits in self._waits.items()})
        yield _histogram(FIRST_BYTE_SECONDS, {pool: waits.first_byte for pool, waits in self._waits.items()})
        yield _histogram(TOTAL_SECONDS, {pool: waits.total for pool, waits in self._waits.items()})
        pools = list(self._read_pools())
        yield from _pool_metrics(pools, self._teams)
        yield from _replica_metrics(pools)
        counters = self._read_counters()
        yield _gauge(CONNECTIONS, [((), counters.open_connections)])
        yield _counter(CONNECTIONS_REFUSED, [((), counters.connections_refused_total)])
        yield _counter(DESCRIPTORS_EXHAUSTED, [((), counters.descriptors_exhausted_total)])
        yield _counter(BAD_REQUESTS, [((), counters.bad_requests_total)])
        yield _gauge(UPSTREAM_CONNECTIONS, [((), counters.upstream_connections)])
        ledgers = [ledger for ledger in (self._read_ledger(),) if ledger is not None]
        yield _gauge(STORE_UP, [((), int(ledger.store_is_up)) for ledger in ledgers])
        yield _gauge(LEDGER_PENDING, [((), ledger.pending) for ledger in ledgers])
        yield _counter(LEDGER_WRITTEN, [((), ledger.written_total) for ledger in ledgers])
        yield _counter(LEDGER_DROPPED, [((), ledger.dropped_total) for ledger in ledgers])

    def _tokens(self) -> Iterator[tuple[tuple[str, ...], float]]:
        for labels, consumed in self._consumed.items():
            yield (*labels, "prompt"), consumed.prompt_tokens
            yield (*labels, "cached"), consumed.cached_tokens
            yield (*labels, "completion"), consumed.completion_tokens


class _Only(Collector):
    """One metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _failure(record: RequestRecord) -> str:
    """Why a request counts as failed; empty: it does not."""
    match record.outcome:
        case Outcome.COMPLETED:
            # The engine's own failure, passed on as it came.
            return ENGINE_ERROR if record.status >= 500 else ""
        case Outcome.REFUSED | Outcome.FAILED:
            return record.reason
        case Outcome.CANCELLED:
            return ""


def _pool_metrics(pools: Sequence[PoolStatus], teams: frozenset[str]) -> Iterator[Metric]:
    by_team = [(pool.name, status) for pool in pools for status in pool.teams if status.team in teams]
    yield _gauge(CAPACITY, [((pool.name,), pool.capacity) for pool in pools])
    yield _gauge(CONFIGURED_CAPACITY, [((pool.name,), pool.configured_capacity) for pool in pools])
    yield _gauge(RESERVED, [((pool, team.team), team.reserved) for pool, team in by_team])
    yield _gauge(IN_FLIGHT, [((pool, team.team), team.in_flight) for pool, team in by_team])
    yield _gauge(BORROWING, [((pool, team.team), team.borrowing) for pool, team in by_team])
    yield _gauge(PHANTOMS, [((pool, team.team), team.phantoms) for pool, team in by_team])
    yield _gauge(HELD, [((pool, team.team), team.held) for pool, team in by_team])
    yield _gauge(OLDEST_HELD, [((pool, team.team), team.oldest_held_seconds) for pool, team in by_team])
    yield _gauge(USAGE, [((pool, team.team), team.usage) for pool, team in by_team])
    yield _counter(RECALLS, [((pool.name,), pool.recalls) for pool in pools])
    yield _counter(RECALLED, [((pool.name,), pool.recalled_slot_seconds) for pool in pools])
    instances = [((pool.name, instance.id), instance) for pool in pools for instance in pool.instances]
    yield _gauge(INSTANCE_UP, [(labels, int(each.healthy)) for labels, each in instances])
    # What an engine has not said is no sample: 0 would say that it is idle.
    yield _gauge(INSTANCE_RUNNING, [(at, each.running) for at, each in instances if each.running is not None])
    yield _gauge(INSTANCE_WAITING, [(at, each.waiting) for at, each in instances if each.waiting is not None])
    yield _gauge(INSTANCE_KV_USAGE, [(at, each.kv_usage) for at, each in instances if each.kv_usage is not None])
    yield _counter(
        INSTANCE_PREEMPTIONS, [(at, each.preemptions) for at, each in instances if each.preemptions is not None]
    )
    findings = Counter((pool.name, found.id, str(found.severity)) for pool in pools for found in pool.finding_details)
    yield _gauge(FINDINGS, findings.items())


def _replica_metrics(pools: Sequence[PoolStatus]) -> Iterator[Metric]:
    shared = [(pool.name, pool.replication) for pool in pools if pool.replication is not None]
    yield _gauge(OWNER, [((pool,), int(replica.role == "owner")) for pool, replica in shared])
    yield _gauge(EPOCH, [((pool,), replica.epoch) for pool, replica in shared])
    yield _gauge(DEGRADED, [((pool,), int(replica.role in ("degraded", "no_owner"))) for pool, replica in shared])
    yield _counter(DEGRADED_REQUESTS, [((pool,), replica.degraded_grants) for pool, replica in shared])
    yield _gauge(UNSAVED_CHARGES, [((pool,), replica.unsaved_charges) for pool, replica in shared])


Samples = Iterable[tuple[tuple[str, ...], float]]


def _counter(spec: MetricSpec, samples: Samples) -> Metric:
    family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _gauge(spec: MetricSpec, samples: Samples) -> Metric:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(spec: MetricSpec, by_pool: dict[str, _Histogram]) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    for pool, histogram in by_pool.items():
        family.add_metric((pool,), histogram.buckets(), histogram.sum)
    return family
