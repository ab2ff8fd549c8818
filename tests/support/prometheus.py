"""The real Prometheus of Debian (`make system-deps`): its promtool, and a server on loopback gone afterwards."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "fairshare.json"

_END_SECONDS = 30.0


def _program(name: str) -> str:
    """Where it is; without it the test is left out and says so; on CI that is an error."""
    found = shutil.which(name)
    if found is not None:
        return found
    sentence = f"there is no {name}; `make system-deps` installs it"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_program("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=60)


class Prometheus:
    """A running server."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        return self._ask("query", query=expression)["result"]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{what}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrapes `targets` (job → `host:port`) every second, and evaluates our alerts as often."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        [
            _program("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--log.level=info",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if "Server is ready to receive web requests" in line:
                break
        listening = re.search(r'msg="Listening on" address=(127\.0\.0\.1:[1-9]\d*)', said)
        assert listening, said
        with httpx.Client(base_url=f"http://{listening[1]}") as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        process.communicate(timeout=_END_SECONDS)
