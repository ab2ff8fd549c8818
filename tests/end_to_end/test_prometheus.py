"""A real Prometheus scrapes a gateway with two workers under load: the dashboard's queries and the alerts evaluate."""

import json
import re
from pathlib import Path
from typing import Any

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import load, site
from support.prometheus import DASHBOARD, Prometheus, prometheus

QUIET = {
    "Failures by reason",
    "Recalls",
}
"""Panels that may show nothing while all is well."""


def expressions() -> list[tuple[str, str]]:
    """Every panel's title with each of its expressions, as Grafana asks them with everything chosen."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], re.sub(r"\$(job|pool)", ".+", target["expr"]).replace("$__rate_interval", "1m"))
        for panel in panels
        for target in panel.get("targets", ())
    ]


def scraped(server: Prometheus) -> bool:
    return len(server.query('count_over_time(up{job="fairshare"}[1m]) > 3')) > 0


def test_the_dashboard_and_the_alerts_of_a_gateway_under_load_evaluate_and_an_engine_that_dies_is_told(
    tmp_path: Path,
) -> None:
    with started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "2")) as engine:
        here = site(tmp_path, engine)
        with (
            started(lambda: GatewayProcess(here.config, workers=2)) as gateway,
            prometheus(tmp_path, {"fairshare": gateway.admin_url.removeprefix("http://")}) as server,
        ):
            with (
                load([gateway.url], here.keys["search"], clients=6) as flood,
                load([gateway.url], here.keys["ads"], clients=1) as modest,
            ):
                eventually(lambda: flood.completed > 5 and modest.completed > 5, "load")
                eventually(lambda: scraped(server), "scrapes under load")
                empty = {title for title, expression in expressions() if not server.query(expression)}
                assert empty <= QUIET, empty
                eventually(lambda: all(rule["lastEvaluation"] > "2" for rule in server.rules()), "alerts evaluated")
            assert {rule["health"] for rule in server.rules()} == {"ok"}, server.rules()
            # Nothing of this site is amiss for as long as it takes an alert to fire at once.
            assert not [rule["name"] for rule in server.rules() if rule["state"] == "firing"]
            engine.end()

            def told() -> bool:
                states = {rule["name"]: rule for rule in server.rules()}
                return states["FairshareNoHealthyEngine"]["state"] == "pending"

            eventually(told, "the alert about engines")
            alerts = next(rule for rule in server.rules() if rule["name"] == "FairshareNoHealthyEngine")["alerts"]
            said = [alert["annotations"]["summary"] for alert in alerts]
            assert said == ["No engine of pool chat is healthy; its requests are answered no_instance or wait."]
