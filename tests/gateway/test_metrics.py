"""What Prometheus is told."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.metrics import MACHINE_METRICS, METRICS, Metrics
from fairshare.gateway.options import Address, AdminSpec, GatewaySpec, PoolSpec, TeamSpec
from fairshare.gateway.ports import Counters, Outcome, RequestRecord
from fairshare.gateway.status import FindingStatus, PoolStatus
from gateway.statuses import instance_status, pool_status_of, team_status

ADDRESS = Address("127.0.0.1", 0)


def spec(*teams: str) -> GatewaySpec:
    pool = PoolSpec(name="chat", capacity=16, half_life_seconds=0.0, shares={}, models={"tiny": "tiny"}, instances=())
    return GatewaySpec(
        listen=ADDRESS,
        admin=AdminSpec(address=ADDRESS),
        pools=(pool,),
        teams=tuple(TeamSpec(name=team) for team in teams),
    )


def metrics_of(*pools: PoolStatus, counters: Counters | None = None) -> Metrics:
    metrics = Metrics(lambda: pools, lambda: counters or Counters())
    metrics.configure(spec("search", "ads"))
    return metrics


def record(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "id": "r",
        "endpoint": "/v1/chat/completions",
        "team": "search",
        "pool": "chat",
        "standing": Standing.WITHIN_SHARE,
        "arrived_at": 0.0,
        "sent_seconds": 0.01,
        "total_seconds": 1.0,
        "outcome": Outcome.COMPLETED,
        "status": 200,
    }
    return RequestRecord(**(defaults | fields))


def samples(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(b"".join(metrics.exposition()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get(name, {}).get(tuple(sorted(labels.items())))


def test_a_finished_request_counts_once_under_its_names() -> None:
    metrics = metrics_of()
    metrics.finished(record())
    metrics.finished(record(service_class=ServiceClass.BATCH, standing=Standing.BORROWING, status=400))
    requests = samples(metrics)["fairshare_requests_total"]
    assert requests == {
        (
            ("class", "interactive"),
            ("code", "200"),
            ("pool", "chat"),
            ("standing", "within-share"),
            ("team", "search"),
        ): 1.0,
        (
            ("class", "batch"),
            ("code", "400"),
            ("pool", "chat"),
            ("standing", "borrowing"),
            ("team", "search"),
        ): 1.0,
    }


def test_what_was_refused_or_broke_counts_as_failed_with_its_reason() -> None:
    metrics = metrics_of()
    metrics.finished(record(outcome=Outcome.REFUSED, reason="queue_full", status=429, sent_seconds=None))
    metrics.finished(record(outcome=Outcome.FAILED, reason="engine_aborted"))
    metrics.finished(record(status=503))
    metrics.finished(record(status=400))
    metrics.finished(record(outcome=Outcome.CANCELLED, reason="client_left", status=0))
    metrics.finished(record())
    assert samples(metrics)["fairshare_requests_failed_total"] == {
        (("pool", "chat"), ("reason", "queue_full")): 1.0,
        (("pool", "chat"), ("reason", "engine_aborted")): 1.0,
        (("pool", "chat"), ("reason", "engine_error")): 1.0,
        (("pool", "chat"), ("reason", "internal_error")): 0.0,
    }


def test_tokens_and_costs_add_up_by_team() -> None:
    metrics = metrics_of()
    for _ in range(2):
        metrics.finished(record(prompt_tokens=10, cached_tokens=4, completion_tokens=5, cost_units=16.4))
    assert value(metrics, "fairshare_tokens_total", pool="chat", team="search", kind="prompt") == 20
    assert value(metrics, "fairshare_tokens_total", pool="chat", team="search", kind="cached") == 8
    assert value(metrics, "fairshare_tokens_total", pool="chat", team="search", kind="completion") == 10
    assert value(metrics, "fairshare_cost_units_total", pool="chat", team="search") == 32.8


def test_waits_are_counted_in_buckets_for_what_was_sent_only() -> None:
    metrics = metrics_of()
    metrics.finished(record(held_seconds=0.0, added_seconds=0.0002))
    metrics.finished(record(held_seconds=0.3, added_seconds=0.0002))
    metrics.finished(record(held_seconds=1000.0, added_seconds=2.0))
    metrics.finished(record(held_seconds=9.0, sent_seconds=None, outcome=Outcome.REFUSED, reason="held_too_long"))
    assert value(metrics, "fairshare_held_seconds_bucket", pool="chat", le="0.25") == 1
    assert value(metrics, "fairshare_held_seconds_bucket", pool="chat", le="0.5") == 2
    assert value(metrics, "fairshare_held_seconds_bucket", pool="chat", le="300.0") == 2
    assert value(metrics, "fairshare_held_seconds_bucket", pool="chat", le="+Inf") == 3
    assert value(metrics, "fairshare_held_seconds_sum", pool="chat") == 1000.3
    assert value(metrics, "fairshare_added_seconds_bucket", pool="chat", le="0.00025") == 2
    assert value(metrics, "fairshare_added_seconds_count", pool="chat") == 3


def test_first_bytes_and_whole_requests_are_counted_in_buckets_and_an_answer_that_never_began_in_one_only() -> None:
    metrics = metrics_of()
    metrics.finished(record(first_byte_seconds=0.2, total_seconds=3.0))
    metrics.finished(record(first_byte_seconds=None, total_seconds=700.0, outcome=Outcome.FAILED, status=504))
    metrics.finished(record(sent_seconds=None, total_seconds=9.0, outcome=Outcome.REFUSED, reason="queue_full"))
    assert value(metrics, "fairshare_first_byte_seconds_bucket", pool="chat", le="0.1") == 0
    assert value(metrics, "fairshare_first_byte_seconds_bucket", pool="chat", le="0.2") == 1
    assert value(metrics, "fairshare_first_byte_seconds_count", pool="chat") == 1
    assert value(metrics, "fairshare_total_seconds_bucket", pool="chat", le="2.0") == 0
    assert value(metrics, "fairshare_total_seconds_bucket", pool="chat", le="5.0") == 1
    assert value(metrics, "fairshare_total_seconds_bucket", pool="chat", le="1800.0") == 2
    assert value(metrics, "fairshare_total_seconds_sum", pool="chat") == 703.0


def test_what_engines_say_is_shown_as_they_say_it_and_what_they_do_not_say_is_absent() -> None:
    pool = pool_status_of(
        "chat",
        instances=[
            instance_status("http://a:1", running=7, waiting=2, kv_usage=0.5, preemptions=3),
            instance_status("http://b:1", running=None, waiting=None, kv_usage=None, preemptions=None),
        ],
    )
    found = samples(metrics_of(pool))
    first = (("engine", "http://a:1"), ("pool", "chat"))
    assert found["fairshare_instance_running"] == {first: 7.0}
    assert found["fairshare_instance_waiting"] == {first: 2.0}
    assert found["fairshare_instance_kv_usage"] == {first: 0.5}
    assert found["fairshare_instance_preemptions_total"] == {first: 3.0}


def test_findings_are_counted_by_id_and_severity() -> None:
    def finding(id: str, severity: str, instance: str | None) -> FindingStatus:
        return FindingStatus(id=id, severity=severity, instance=instance, sentence="It is.", why="", fix="")

    pool = pool_status_of(
        "chat",
        finding_details=[
            finding("engine-queue", "warning", "http://a:1"),
            finding("engine-queue", "warning", "http://b:1"),
            finding("priority-ignored", "error", "http://a:1"),
        ],
    )
    assert samples(metrics_of(pool))["fairshare_findings"] == {
        (("id", "engine-queue"), ("pool", "chat"), ("severity", "warning")): 2.0,
        (("id", "priority-ignored"), ("pool", "chat"), ("severity", "error")): 1.0,
    }


def test_a_value_on_a_bucket_bound_belongs_to_that_bucket() -> None:
    metrics = metrics_of()
    metrics.finished(record(held_seconds=0.25))
    assert value(metrics, "fairshare_held_seconds_bucket", pool="chat", le="0.25") == 1


def test_100000_made_up_names_add_one_series_at_most() -> None:
    metrics = metrics_of()
    metrics.finished(record(team="made-up", pool="made-up", status=777, outcome=Outcome.COMPLETED))
    before = len(b"".join(metrics.exposition()).splitlines())
    for number in range(100_000):
        metrics.finished(record(team=f"t{number}", pool=f"p{number}", status=600 + number))
    assert len(b"".join(metrics.exposition()).splitlines()) == before
    assert samples(metrics)["fairshare_requests_total"] == {
        (("class", "interactive"), ("code", ""), ("pool", ""), ("standing", "within-share"), ("team", "")): 100_001.0
    }


def test_gauges_show_the_pools_at_the_time_of_the_scrape() -> None:
    pool = pool_status_of(
        "chat",
        capacity=12,
        recalls=3,
        recalled_slot_seconds=1.5,
        teams=[
            team_status(
                "search", reserved=9, in_flight=10, borrowing=1, held=4, oldest_held_seconds=1.5, usage=2.5, phantoms=2
            ),
            team_status("stranger", in_flight=1),
        ],
        instances=[instance_status("http://a:1"), instance_status("http://b:1", healthy=False)],
    )
    metrics = metrics_of(pool, counters=Counters(open_connections=5, connections_refused_total=1, bad_requests_total=2))
    found = samples(metrics)
    search = (("pool", "chat"), ("team", "search"))
    assert found["fairshare_capacity"] == {(("pool", "chat"),): 12.0}
    assert found["fairshare_reserved"] == {search: 9.0}
    assert found["fairshare_in_flight"] == {search: 10.0}
    assert found["fairshare_borrowing"] == {search: 1.0}
    assert found["fairshare_held"] == {search: 4.0}
    assert found["fairshare_configured_capacity"] == {(("pool", "chat"),): 16.0}
    assert found["fairshare_oldest_held_seconds"] == {search: 1.5}
    assert found["fairshare_usage"] == {search: 2.5}
    assert found["fairshare_phantoms"] == {search: 2.0}
    assert found["fairshare_recalls_total"] == {(("pool", "chat"),): 3.0}
    assert found["fairshare_recalled_slot_seconds_total"] == {(("pool", "chat"),): 1.5}
    assert found["fairshare_instance_up"] == {
        (("engine", "http://a:1"), ("pool", "chat")): 1.0,
        (("engine", "http://b:1"), ("pool", "chat")): 0.0,
    }
    assert found["fairshare_connections"] == {(): 5.0}
    assert found["fairshare_connections_refused_total"] == {(): 1.0}
    assert found["fairshare_bad_requests_total"] == {(): 2.0}


def test_every_metric_of_the_table_is_in_a_scrape_and_no_other() -> None:
    text = b"".join(metrics_of().exposition()).decode()
    shown = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert sorted(shown) == sorted(metric.name for metric in METRICS if metric not in MACHINE_METRICS)


def test_a_scrape_comes_one_metric_at_a_time_so_that_requests_are_served_in_between() -> None:
    parts = list(metrics_of().exposition())
    assert len(parts) > 20
    assert all(part.count(b"# TYPE ") == 1 for part in parts)
