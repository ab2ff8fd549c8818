"""What the admin port shows of two workers, as of one gateway: real processes, each of which knows its own requests."""

from pathlib import Path
from typing import Any

import httpx

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import load, site


def test_requests_explanations_and_history_are_those_of_all_workers(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "16", "--step-ms", "5")
    with started(lambda: EngineProcess(*options)) as engine:
        here = site(tmp_path, engine)
        with started(lambda: GatewayProcess(here.config, workers=2)) as gateway:

            def asked(path: str, **query: str) -> Any:
                return httpx.get(f"{gateway.admin_url}{path}", params=query, trust_env=False).raise_for_status().json()

            with load([gateway.url], here.keys["search"], clients=12) as flood:
                eventually(lambda: flood.completed > 30, "load")
                # The one that does not own the pool asks its owner, so that either may be asked.
                eventually(lambda: asked("/api/v1/state")["pools"][0]["in_flight"] >= 8, "the state shows the load")
                eventually(
                    lambda: max(asked("/api/v1/history", pool="chat")["total"]["within"], default=0.0) >= 3.0,
                    "the history shows the load",
                )
            assert not flood.failures
            eventually(lambda: gateway.pool()["in_flight"] == 0, "all has ended")

            rows = asked("/api/v1/requests", most="200")
            assert len(rows) == min(200, flood.completed)
            assert [row["at"] for row in rows] == sorted((row["at"] for row in rows), reverse=True)
            told = [asked("/api/v1/explain", of=row["id"]) for row in rows[:20]]
            assert all(explanation["name"] == row["id"] for explanation, row in zip(told, rows, strict=False))
            assert all(any("capacity" in step["numbers"] for step in each["steps"]) for each in told)

            (lately,) = [step for step in asked("/api/v1/explain", of="search")["steps"] if step["what"] == "lately"]
            assert lately["numbers"]["sent"] == flood.completed
            assert "went to engines from this machine" in lately["sentence"]
            own = httpx.get(
                f"{gateway.admin_url}/api/v1/team/requests",
                headers={"Authorization": f"Bearer {here.keys['ads']}"},
                trust_env=False,
            )
            assert own.json() == []
