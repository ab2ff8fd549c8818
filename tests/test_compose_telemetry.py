"""The gateway as a whole, with an access log and traces."""

import asyncio
import json
from pathlib import Path

from fairshare.config import Settings
from gateway.rig import run
from gateway.test_tracing import collector
from test_compose import engines, pool, running, settings, until


def with_telemetry(first: str, access_log: Path, port: int) -> Settings:
    rest = f"admin: 127.0.0.1:0\naccess_log: {access_log}\ntracing: {{endpoint: 'http://127.0.0.1:{port}/v1/traces'}}"
    return settings(first, rest=rest)


def test_each_request_is_a_line_and_a_span_of_the_same_id_when_the_gateway_has_ended(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "access.log"
        with collector() as told:
            async with engines(1) as (engine,):
                async with running(with_telemetry(pool(engine), path, told.server_port)) as gateway:
                    await until(lambda: gateway.gateway.not_ready() is None)
                    ids = [(await gateway.ask(team)).headers["x-request-id"] for team in ("red", "blue")]
                sent = [asked.headers["traceparent"] for asked in engine.completions]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["id"] for line in lines] == ids
        assert [line["team"] for line in lines] == ["red", "blue"]
        assert [line["completion_tokens"] for line in lines] == [5, 5]
        assert [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in told.spans] == sent
        assert len(asyncio.all_tasks()) == 1

    run(main)


def test_a_reload_leaves_both_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        with collector() as told:
            async with engines(1) as (engine,):
                first = pool(engine)
                async with running(with_telemetry(first, tmp_path / "access.log", told.server_port)) as gateway:
                    await until(lambda: gateway.gateway.not_ready() is None)
                    await gateway.gateway.reload(settings(first))
                    await gateway.ask()
        assert len((tmp_path / "access.log").read_text().splitlines()) == 1
        assert len(told.spans) == 1

    run(main)
