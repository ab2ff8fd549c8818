"""What several workers show, put together."""

from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from fairshare.gateway.merged import Totals, deciding_workers, merged_metrics, merged_pools


def shown(*families: Metric) -> str:
    class Families:
        def collect(self) -> list[Metric]:
            return list(families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())  # pyright: ignore
    return generate_latest(registry).decode()


def counter(name: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, "Help.", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, "Help.", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, fast: int, slow: int) -> Metric:
    family = HistogramMetricFamily(name, "Help.", labels=["pool"])
    family.add_metric(["chat"], [("0.1", fast), ("+Inf", fast + slow)], fast * 0.05 + slow * 2.0)
    return family


def values(exposition: bytes) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def test_counters_histograms_and_gauges_of_processes_add_up_and_a_pool_is_as_its_owner_sees_it() -> None:
    one = shown(
        counter("fairshare_requests_total", {"pool": "chat", "code": "200"}, 5),
        counter("fairshare_requests_total", {"pool": "chat", "code": "429"}, 1),
        histogram("fairshare_held_seconds", 3, 1),
        gauge("fairshare_connections", {}, 10),
        gauge("fairshare_in_flight", {"pool": "chat", "team": "ads"}, 7),
        gauge("fairshare_in_flight", {"pool": "code", "team": "ads"}, 1),
        gauge("fairshare_store_up", {}, 1),
        counter("fairshare_recalls_total", {"pool": "chat"}, 4),
    )
    two = shown(
        counter("fairshare_requests_total", {"pool": "chat", "code": "200"}, 2),
        histogram("fairshare_held_seconds", 1, 1),
        gauge("fairshare_connections", {}, 20),
        gauge("fairshare_in_flight", {"pool": "chat", "team": "ads"}, 3),
        gauge("fairshare_in_flight", {"pool": "code", "team": "ads"}, 2),
        gauge("fairshare_store_up", {}, 0),
        counter("fairshare_recalls_total", {"pool": "chat"}, 9),
    )
    merged = values(
        merged_metrics({"one": one, "two": two}, deciding={"chat": "one", "code": "two"}, ended=Totals(), own=())
    )
    assert merged["fairshare_requests_total", "code=200,pool=chat"] == 7
    assert merged["fairshare_requests_total", "code=429,pool=chat"] == 1
    assert merged["fairshare_held_seconds_bucket", "le=0.1,pool=chat"] == 4
    assert merged["fairshare_held_seconds_bucket", "le=+Inf,pool=chat"] == 6
    assert merged["fairshare_held_seconds_count", "pool=chat"] == 6
    assert merged["fairshare_held_seconds_sum", "pool=chat"] == pytest.approx(4.2)
    assert merged["fairshare_connections", ""] == 30
    assert merged["fairshare_in_flight", "pool=chat,team=ads"] == 7
    assert merged["fairshare_in_flight", "pool=code,team=ads"] == 2
    assert merged["fairshare_store_up", ""] == 0
    assert merged["fairshare_recalls_total", "pool=chat"] == 4


def test_what_a_worker_had_counted_stays_when_it_has_ended_and_its_gauges_do_not() -> None:
    ended = Totals()
    for _ in range(2):
        ended.add(
            shown(
                counter("fairshare_requests_total", {"pool": "chat", "code": "200"}, 5),
                gauge("fairshare_connections", {}, 10),
                counter("fairshare_recalls_total", {"pool": "chat"}, 4),
            )
        )
    alive = shown(counter("fairshare_requests_total", {"pool": "chat", "code": "200"}, 1))
    for expositions, count in (({"new": alive}, 11), ({}, 10)):
        merged = values(merged_metrics(expositions, deciding={}, ended=ended))
        assert merged == {("fairshare_requests_total", "code=200,pool=chat"): count}


def test_metrics_of_the_machine_itself_come_along() -> None:
    merged = merged_metrics({}, deciding={}, ended=Totals(), own=[gauge("fairshare_workers", {}, 2)])
    assert values(merged) == {("fairshare_workers", ""): 2}


def pool(name: str, role: str | None, **other: Any) -> dict[str, Any]:
    return {"name": name, "replication": None if role is None else {"role": role}, **other}


def test_a_pool_is_shown_as_its_owner_knows_it_else_as_one_that_asks_the_owner() -> None:
    by_worker = {
        "one": [pool("chat", "degraded", held=1), pool("code", "owner", held=2)],
        "two": [pool("chat", "follower", held=3), pool("code", "follower", held=4)],
        "three": [pool("chat", "owner", held=5), pool("new", None, held=6)],
    }
    assert deciding_workers(by_worker) == {"chat": "three", "code": "one", "new": "three"}
    assert [(each["name"], each["held"]) for each in merged_pools(by_worker)] == [("chat", 5), ("code", 2), ("new", 6)]
    del by_worker["three"]
    assert [(each["name"], each["held"]) for each in merged_pools(by_worker)] == [("chat", 3), ("code", 2)]
