"""What the workers of one machine show, put together as if they were one process. Pure.

Counters and histograms are added up, those of workers that have ended too, so that they never fall. Gauges of a pool
are those of the replica that decides for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from fairshare.gateway.metrics import METRICS, Across

PoolJson = dict[str, Any]
"""One pool as the API shows it."""

_ACROSS = {spec.name: spec.across for spec in METRICS}
_ROLES = ("owner", "taking", "follower", "degraded")
"""What a replica may be to a pool, the one that knows most first (`ReplicationStatus.role`)."""


class Totals:
    """What workers that have ended had counted."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, exposition: str) -> None:
        """A worker has ended; this is what it showed last."""
        for family in text_string_to_metric_families(exposition):
            if family.type in ("counter", "histogram") and _across(family) is Across.SUM:
                self._families[family.name] = _summed(family, [self._families.get(family.name), family])

    def families(self) -> Iterable[Metric]:
        return self._families.values()


def merged_metrics(
    expositions: Mapping[str, str], *, deciding: Mapping[str, str], ended: Totals, own: Iterable[Metric] = ()
) -> bytes:
    """One exposition of the whole machine.

    Args:
        expositions: worker → what it shows.
        deciding: pool → the worker whose view of it counts (`deciding_workers`).
        ended: what workers counted that are no more.
        own: what is added to it.
    """
    by_name: dict[str, list[tuple[str, Metric]]] = {}
    for worker, text in expositions.items():
        for family in text_string_to_metric_families(text):
            by_name.setdefault(family.name, []).append((worker, family))
    past = {family.name: family for family in ended.families()}
    for name in past.keys() - by_name.keys():
        by_name[name] = []
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Families([*(_merged(found, deciding, past.get(name)) for name, found in sorted(by_name.items())), *own])
    )
    return generate_latest(registry)


def merged_pools(by_worker: Mapping[str, Sequence[PoolJson]]) -> list[PoolJson]:
    """Every pool as the worker shows it that knows it best, in the order of the first worker."""
    deciding = deciding_workers(by_worker)
    views = {(worker, pool["name"]): pool for worker, pools in by_worker.items() for pool in pools}
    return [views[worker, pool] for pool, worker in deciding.items()]


def deciding_workers(by_worker: Mapping[str, Sequence[PoolJson]]) -> dict[str, str]:
    """Pool → the worker that knows it best: its owner, else one that asks the owner, else any."""
    best: dict[str, tuple[int, str]] = {}
    for worker, pools in by_worker.items():
        for pool in pools:
            replication: PoolJson | None = pool.get("replication")
            role = "" if replication is None else str(replication["role"])
            place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
            known = best.get(pool["name"])
            if known is None or place < known[0]:
                best[pool["name"]] = (place, worker)
    return {name: worker for name, (_, worker) in best.items()}


def _merged(found: Sequence[tuple[str, Metric]], deciding: Mapping[str, str], past: Metric | None) -> Metric:
    first = found[0][1] if found else past
    assert first is not None
    match _across(first):
        case Across.SUM:
            return _summed(first, [past, *(family for _, family in found)])
        case Across.LEAST:
            return _combined(first, [family for _, family in found], min)
        case Across.OWNER:
            merged = Metric(first.name, first.documentation, first.type)
            merged.samples = [
                sample
                for worker, family in found
                for sample in family.samples
                if deciding.get(sample.labels.get("pool", ""), worker) == worker
            ]
            return merged


def _summed(like: Metric, families: Iterable[Metric | None]) -> Metric:
    return _combined(like, [family for family in families if family is not None], add)


def _combined(like: Metric, families: Iterable[Metric], combine: Callable[[float, float], float]) -> Metric:
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        for sample in family.samples:
            series = (sample.name, tuple(sample.labels.items()))
            values[series] = combine(values[series], sample.value) if series in values else sample.value
    merged = Metric(like.name, like.documentation, like.type)
    merged.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return merged


def _across(family: Metric) -> Across:
    # The text of a counter's family has lost the `_total` of its name.
    return _ACROSS.get(family.name) or _ACROSS.get(f"{family.name}_total") or Across.SUM


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
