"""The dashboard of Grafana asks for what there is; tests/end_to_end/test_prometheus.py asks a real Prometheus."""

import json
import re
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from fairshare.gateway.metrics import METRICS
from support.prometheus import DASHBOARD
from support.promql import OF_TARGETS, labels_in, labels_of, series_in

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
TARGETS: list[dict[str, Any]] = [target for panel in PANELS for target in panel.get("targets", ())]


def test_every_expression_asks_for_metrics_and_labels_that_exist() -> None:
    assert len(TARGETS) > 40
    for target in TARGETS:
        assert series_in(target["expr"])
        assert labels_in(target["expr"]) <= labels_of(target["expr"]), target["expr"]


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {series.metric for target in TARGETS for series in series_in(target["expr"])}
    assert shown == {metric.name for metric in METRICS}


def test_a_legend_names_labels_that_its_expression_leaves() -> None:
    for target in TARGETS:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        outermost = re.search(r"\bby \(([^)]*)\)", target["expr"])
        left = set() if outermost is None else {label.strip() for label in outermost[1].split(",")}
        assert named <= left, target["expr"]


def test_what_may_be_chosen_is_used_and_nothing_else_is_asked_for() -> None:
    chosen = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(BOARD))) - {"__rate_interval", "__all"}
    assert used == chosen
    for variable in BOARD["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        if asked is not None:
            assert asked[2] in labels_of(asked[1]) | OF_TARGETS
            assert series_in(asked[1])


def lost(given: Any, kept: Any, place: str = "") -> Iterator[str]:
    """What Grafana's types do not know, and what means something else to them."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from lost(value, kept[key], f"{place}/{key}") if key in kept else [f"{place}/{key}"]
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from lost(value, kept[index], f"{place}/{index}")
    elif given != kept:
        yield place


def through_grafana(board: dict[str, Any]) -> list[str]:
    register_default_plugins()
    kept = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board)))
    return list(lost(board, kept))


def test_grafana_s_own_types_know_everything_in_it() -> None:
    # What the data source Prometheus makes of variables and annotations is not among these types.
    of_prometheus = {
        "/templating/list/1/definition",
        "/templating/list/2/definition",
        "/annotations/list/0/titleFormat",
        "/annotations/list/0/textFormat",
        "/annotations/list/0/step",
    }
    assert set(through_grafana(BOARD)) == of_prometheus
    panel = next(panel for panel in PANELS if panel["type"] == "timeseries")
    wrong = {**panel, "fieldConfig": {"defaults": {"custom": {"lineWidths": 1}}}, "targets": [{"expression": "up"}]}
    assert "/panels/0/targets/0/expression" in through_grafana({**BOARD, "panels": [wrong]})
    assert "/panels/0/fieldConfig/defaults/custom/lineWidths" in through_grafana({**BOARD, "panels": [wrong]})


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_it_depends_on_no_plugin_and_no_other_server() -> None:
    assert {panel["type"] for panel in PANELS} <= {"row", "stat", "timeseries"}
    assert "://" not in DASHBOARD.read_text()
