"""The alerts ask Prometheus for what there is, fire when they should and only then, and the runbook has each."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairshare.core.decisions import HoldOptions
from fairshare.gateway.exchange import ENGINE_ERROR
from fairshare.gateway.ledger import MAX_PENDING
from fairshare.wire.problems import PROBLEMS
from support.prometheus import ALERTS, promtool
from support.promql import alternatives, labels_in, labels_of, series_in

DOCS = ALERTS.parents[2] / "docs"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}


@dataclass(frozen=True)
class Case:
    """What Prometheus sees, once a minute from minute 0 on."""

    alert: str
    fires: bool
    series: dict[str, str]
    """Without `job` and the target's `instance`, which all of them have; values in promtool's notation."""
    at: str
    labels: tuple[tuple[str, str], ...] = ()
    """Of the alert that fires, beyond `severity`, `job` and what it is about."""


CHAT = 'pool="chat"'
SEARCH = 'pool="chat",team="search"'
A = 'pool="chat",engine="http://a:1"'
B = 'pool="chat",engine="http://b:1"'


def fires(alert: str, at: str, series: dict[str, str], **labels: str) -> Case:
    return Case(alert, True, series, at, tuple(labels.items()))


def stays(alert: str, at: str, series: dict[str, str]) -> Case:
    return Case(alert, False, series, at)


GATEWAY = "gw:8081"
IN_POOL = {"pool": "chat"}
AT_GATEWAY = {"instance": GATEWAY}

CASES = [
    fires("FairshareDown", "2m", {"up": "1 0 0 0"}, instance=GATEWAY),
    stays("FairshareDown", "1m", {"up": "1 0 0 0"}),
    stays("FairshareDown", "5m", {"up": "1x5"}),
    fires(
        "FairshareNoHealthyEngine",
        "3m",
        {f"fairshare_instance_up{{{A}}}": "1 0x5", f"fairshare_instance_up{{{B}}}": "0x6"},
        **IN_POOL,
        **AT_GATEWAY,
    ),
    stays(
        "FairshareNoHealthyEngine",
        "5m",
        {f"fairshare_instance_up{{{A}}}": "0x6", f"fairshare_instance_up{{{B}}}": "1x6"},
    ),
    fires(
        "FairshareOwnerHeld",
        "3m",
        {
            f"fairshare_held{{{SEARCH}}}": "0 4x9",
            f"fairshare_in_flight{{{SEARCH}}}": "6x9",
            f"fairshare_phantoms{{{SEARCH}}}": "0x9",
            f"fairshare_reserved{{{SEARCH}}}": "8x9",
        },
        pool="chat",
        team="search",
        **AT_GATEWAY,
    ),
    # The last slot of its reservation may be one that it holds in turn; phantoms take slots, too.
    stays(
        "FairshareOwnerHeld",
        "9m",
        {
            f"fairshare_held{{{SEARCH}}}": "4x9",
            f"fairshare_in_flight{{{SEARCH}}}": "6x9",
            f"fairshare_phantoms{{{SEARCH}}}": "1x9",
            f"fairshare_reserved{{{SEARCH}}}": "8x9",
        },
    ),
    # Another replica owns the pool, and knows better.
    stays(
        "FairshareOwnerHeld",
        "9m",
        {
            f"fairshare_held{{{SEARCH}}}": "4x9",
            f"fairshare_in_flight{{{SEARCH}}}": "0x9",
            f"fairshare_phantoms{{{SEARCH}}}": "0x9",
            f"fairshare_reserved{{{SEARCH}}}": "8x9",
            f"fairshare_owner{{{CHAT}}}": "0x9",
        },
    ),
    fires(
        "FairshareInternalError",
        "4m",
        {f'fairshare_requests_failed_total{{{CHAT},reason="internal_error"}}': "0 0 1x9"},
        **IN_POOL,
    ),
    stays(
        "FairshareInternalError",
        "15m",
        {
            f'fairshare_requests_failed_total{{{CHAT},reason="internal_error"}}': "0 0 1x20",
            f'fairshare_requests_failed_total{{{CHAT},reason="queue_full"}}': "0+9x20",
        },
    ),
    fires(
        "FairshareFinding",
        "6m",
        {f'fairshare_findings{{{CHAT},id="priority-ignored",severity="error"}}': "2x9"},
        pool="chat",
        id="priority-ignored",
    ),
    stays(
        "FairshareFinding",
        "9m",
        {
            f'fairshare_findings{{{CHAT},id="engine-queue",severity="warning"}}': "1x9",
            f'fairshare_findings{{{CHAT},id="replica-degraded",severity="error"}}': "1x9",
        },
    ),
    fires(
        "FairshareEngineDown",
        "7m",
        {f"fairshare_instance_up{{{A}}}": "1 0x9", f"fairshare_instance_up{{{B}}}": "1x9"},
        pool="chat",
        engine="http://a:1",
    ),
    stays("FairshareEngineDown", "7m", {f"fairshare_instance_up{{{A}}}": "1 0 0 0 1 0x9"}),
    fires(
        "FairshareCapacityReduced",
        "11m",
        {f"fairshare_capacity{{{CHAT}}}": "11x20", f"fairshare_configured_capacity{{{CHAT}}}": "16x20"},
        **IN_POOL,
    ),
    stays(
        "FairshareCapacityReduced",
        "15m",
        {f"fairshare_capacity{{{CHAT}}}": "12x20", f"fairshare_configured_capacity{{{CHAT}}}": "16x20"},
    ),
    fires(
        "FairshareEngineOverloaded",
        "11m",
        {f'fairshare_findings{{{CHAT},id="kv-full",severity="warning"}}': "1x20"},
        pool="chat",
        id="kv-full",
    ),
    stays(
        "FairshareEngineOverloaded",
        "15m",
        {f'fairshare_findings{{{CHAT},id="versions-differ",severity="warning"}}': "1x20"},
    ),
    fires(
        "FairshareEnginesFail",
        "11m",
        {
            f'fairshare_requests_failed_total{{{CHAT},reason="engine_error"}}': "0+2x20",
            f'fairshare_requests_failed_total{{{CHAT},reason="upstream_timeout"}}': "0+1x20",
            f'fairshare_requests_total{{{SEARCH},code="200"}}': "0+40x20",
        },
        **IN_POOL,
    ),
    stays(
        "FairshareEnginesFail",
        "15m",
        {
            f'fairshare_requests_failed_total{{{CHAT},reason="engine_error"}}': "0+2x20",
            f'fairshare_requests_failed_total{{{CHAT},reason="queue_full"}}': "0+30x20",
            f'fairshare_requests_total{{{SEARCH},code="200"}}': "0+100x20",
        },
    ),
    fires(
        "FairshareLongWait",
        "6m",
        {f"fairshare_oldest_held_seconds{{{SEARCH}}}": "150x9"},
        pool="chat",
        team="search",
    ),
    stays("FairshareLongWait", "8m", {f"fairshare_oldest_held_seconds{{{SEARCH}}}": "150 150 150 3 150x9"}),
    fires(
        "FairshareRefusing",
        "8m",
        {f'fairshare_requests_failed_total{{{CHAT},reason="queue_full"}}': "0+1x20"},
        pool="chat",
        reason="queue_full",
    ),
    # What a key or a budget refuses is no lack of room.
    stays(
        "FairshareRefusing",
        "15m",
        {f'fairshare_requests_failed_total{{{CHAT},reason="budget_exhausted"}}': "0+9x20"},
    ),
    fires(
        "FairshareRecallWaste",
        "35m",
        {f"fairshare_recalled_slot_seconds_total{{{CHAT}}}": "0+90x40", f"fairshare_capacity{{{CHAT}}}": "16x40"},
        **IN_POOL,
    ),
    stays(
        "FairshareRecallWaste",
        "40m",
        {f"fairshare_recalled_slot_seconds_total{{{CHAT}}}": "0+60x40", f"fairshare_capacity{{{CHAT}}}": "16x40"},
    ),
    fires(
        "FairshareSlow",
        "15m",
        {
            f'fairshare_added_seconds_bucket{{{CHAT},le="0.025"}}': "0+98x20",
            f'fairshare_added_seconds_bucket{{{CHAT},le="0.1"}}': "0+100x20",
            f'fairshare_added_seconds_bucket{{{CHAT},le="+Inf"}}': "0+100x20",
        },
        **IN_POOL,
    ),
    stays(
        "FairshareSlow",
        "20m",
        {
            f'fairshare_added_seconds_bucket{{{CHAT},le="0.025"}}': "0+995x20",
            f'fairshare_added_seconds_bucket{{{CHAT},le="0.1"}}': "0+1000x20",
            f'fairshare_added_seconds_bucket{{{CHAT},le="+Inf"}}': "0+1000x20",
        },
    ),
    fires(
        "FairshareConnectionsRefused",
        "4m",
        {"fairshare_connections_refused_total": "0 0 5x9", "fairshare_descriptors_exhausted_total": "0x9"},
        **AT_GATEWAY,
    ),
    fires(
        "FairshareConnectionsRefused",
        "4m",
        {"fairshare_connections_refused_total": "0x9", "fairshare_descriptors_exhausted_total": "0 0 5x9"},
        **AT_GATEWAY,
    ),
    stays(
        "FairshareConnectionsRefused",
        "9m",
        {"fairshare_connections_refused_total": "5x9", "fairshare_descriptors_exhausted_total": "1x9"},
    ),
    fires("FairshareStoreDown", "4m", {"fairshare_store_up": "1 0x9"}, **AT_GATEWAY),
    stays("FairshareStoreDown", "9m", {"fairshare_store_up": "1 0 1 0 1 0 1 0 1 0"}),
    fires("FairshareLedgerBehind", "3m", {"fairshare_ledger_pending": "0 30000x9"}, **AT_GATEWAY),
    stays("FairshareLedgerBehind", "9m", {"fairshare_ledger_pending": "20000x9"}),
    fires("FairshareLedgerLost", "3m", {"fairshare_ledger_dropped_total": "0 0 7x9"}, **AT_GATEWAY),
    stays("FairshareLedgerLost", "9m", {"fairshare_ledger_dropped_total": "7x9"}),
    fires("FairshareDegraded", "3m", {f"fairshare_degraded{{{CHAT}}}": "0 1x9"}, **IN_POOL),
    stays("FairshareDegraded", "9m", {f"fairshare_degraded{{{CHAT}}}": "0 1 0 1 0 1 0 1 0 1"}),
    fires("FairshareNoOwner", "3m", {f"fairshare_owner{{{CHAT}}}": "1 0x9"}, **IN_POOL),
    stays("FairshareNoOwner", "9m", {f"fairshare_owner{{{CHAT}}}": "1 0 1x9"}),
    # Alone, without replicas, there is nothing to own.
    stays("FairshareNoOwner", "9m", {"up": "1x9"}),
    fires("FairshareTwoOwners", "3m", {f"fairshare_owner{{{CHAT}}}": "1 2x9"}, **IN_POOL),
    stays("FairshareTwoOwners", "9m", {f"fairshare_owner{{{CHAT}}}": "1 2 1x9"}),
    fires("FairshareOwnerChanges", "9m", {f"fairshare_lease_epoch{{{CHAT}}}": "1 2 3 4 5x9"}, **IN_POOL),
    stays("FairshareOwnerChanges", "9m", {f"fairshare_lease_epoch{{{CHAT}}}": "1 2 3 4x9"}),
    fires(
        "FairsharePhantoms",
        "7m",
        {
            f"fairshare_phantoms{{{SEARCH}}}": "0 3x9",
            f'fairshare_phantoms{{{CHAT},team="ads"}}': "0 2x9",
            f"fairshare_capacity{{{CHAT}}}": "16x9",
        },
        **IN_POOL,
    ),
    stays(
        "FairsharePhantoms", "9m", {f"fairshare_phantoms{{{SEARCH}}}": "4x9", f"fairshare_capacity{{{CHAT}}}": "16x9"}
    ),
    fires("FairshareChargesUnsaved", "11m", {f"fairshare_unsaved_charges{{{CHAT}}}": "1200x20"}, **IN_POOL),
    stays("FairshareChargesUnsaved", "20m", {f"fairshare_unsaved_charges{{{CHAT}}}": "900x20"}),
    fires("FairshareWorkersDie", "3m", {"fairshare_worker_deaths_total": "0 0 1x9"}, **AT_GATEWAY),
    stays("FairshareWorkersDie", "9m", {"fairshare_worker_deaths_total": "3x9"}),
]


def targeted(series: str) -> str:
    """A series as it is after the scrape."""
    name, _, rest = series.partition("{")
    labels = [f'job="fairshare",instance="{GATEWAY}"', *([rest.removesuffix("}")] if rest else [])]
    return f"{name}{{{','.join(labels)}}}"


def as_promtool_wants(case: Case) -> dict[str, Any]:
    labels = {"alertname": case.alert, "alertstate": "firing", "job": "fairshare", **dict(case.labels)}
    labels["severity"] = RULES[case.alert]["labels"]["severity"]
    written = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    expected = [{"labels": f"ALERTS{{{written}}}", "value": 1}] if case.fires else []
    return {
        "interval": "1m",
        "input_series": [{"series": targeted(series), "values": values} for series, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}',
                "eval_time": case.at,
                "exp_samples": expected,
            }
        ],
    }


def promtool_says(folder: Path, *cases: Case) -> tuple[int, str]:
    """What promtool says of the cases."""
    content = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [as_promtool_wants(c) for c in cases]}
    path = folder / "cases.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    told = promtool("test", "rules", str(path))
    return told.returncode, told.stdout + told.stderr


def test_prometheus_understands_the_rules() -> None:
    told = promtool("check", "rules", str(ALERTS))
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"{len(RULES)} rules found" in told.stdout


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.alert == alert]
    assert {case.fires for case in cases} == {True, False}, "a case in which it fires, and one in which it does not"
    code, text = promtool_says(tmp_path, *cases)
    assert code == 0, text


def test_a_case_that_expects_the_wrong_thing_is_seen(tmp_path: Path) -> None:
    assert promtool_says(tmp_path, stays("FairshareStoreDown", "4m", {"fairshare_store_up": "1 0x9"}))[0] != 0
    assert (
        promtool_says(tmp_path, fires("FairshareStoreDown", "4m", {"fairshare_store_up": "1x9"}, **AT_GATEWAY))[0] != 0
    )


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_metrics_labels_and_values_that_exist(alert: str) -> None:
    expression = RULES[alert]["expr"]
    assert labels_in(expression) <= labels_of(expression)
    reasons = {problem.code for problem in PROBLEMS} | {ENGINE_ERROR}
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "reference" / "findings.md").read_text(), re.MULTILINE)
    known_ids = {word for cell in rows for word in re.findall(r"`([^`]+)`", cell)}
    for series in series_in(expression):
        assert set(alternatives(series, "reason")) <= reasons
        assert set(alternatives(series, "id")) <= known_ids


@pytest.mark.parametrize("alert", RULES)
def test_what_an_alert_says_names_labels_that_it_has(alert: str) -> None:
    rule = RULES[alert]
    used = set(re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"]))
    has = {name for case in CASES if case.alert == alert and case.fires for name, _ in case.labels}
    assert used <= has
    assert rule["labels"]["severity"] in {"critical", "warning"}


def test_every_alert_is_in_the_runbook_and_nothing_else_is() -> None:
    headings = re.findall(r"^### (.+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert headings == list(RULES)
    for alert, rule in RULES.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{alert.lower()}"


def test_the_runbook_names_metrics_that_exist() -> None:
    assert series_in((DOCS / "runbook.md").read_text())


def test_the_bounds_that_alerts_share_with_the_code_are_the_ones_of_the_code() -> None:
    assert RULES["FairshareLedgerBehind"]["expr"].endswith(f"> {MAX_PENDING // 2}")
    assert HoldOptions().longest_wait_seconds == 300.0
    assert "> 120" in RULES["FairshareLongWait"]["expr"]
    assert HoldOptions().recall_waste == 0.1
    assert "> 0.08 *" in RULES["FairshareRecallWaste"]["expr"]
