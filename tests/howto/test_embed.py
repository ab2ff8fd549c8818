"""docs/howto/embed.md: its code blocks run, one after the other in one module, as they stand there."""

import asyncio
from typing import Any

import httpx
import pytest

from fairshare.engine.scheduler import Policy, SchedulerConfig
from fairshare.engine.server import EngineServer, EngineSettings
from howto.pages import blocks

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def page() -> dict[str, Any]:
    module: dict[str, Any] = {}
    for block in blocks("embed.md", "python"):
        exec(compile(block, "embed.md", "exec"), module)
    return module


def test_the_three_lines_stamp_and_charge(page: dict[str, Any]) -> None:
    assert page["answer"]("ads", lambda priority: (f"priority {priority}", 321)) == "priority 0"
    assert round(page["pool"].usage()[0]["ads"]) == 321


def test_the_admission_charges_what_was_consumed(page: dict[str, Any]) -> None:
    async def main() -> None:
        admission = page["Admission"](page["chat"])

        async def ask(priority: int) -> tuple[str, dict[str, int]]:
            return f"priority {priority}", {"prompt": 10, "completion": 5}

        assert await page["serve"](admission, "search", ask) == "priority 0"
        assert round(admission.pool.usage()[0]["search"]) == 20

    asyncio.run(main())


def test_the_middleware_serves_and_charges_on_the_stand_in_engine(page: dict[str, Any]) -> None:
    async def main() -> None:
        scheduler = SchedulerConfig(policy=Policy.PRIORITY, step_seconds=1e-4, token_seconds=0.0)
        async with EngineServer(EngineSettings(model_names=("tiny",), scheduler=scheduler)) as engine:
            page["ENGINE"] = engine.url
            transport = httpx.ASGITransport(page["app"])
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                answer = await client.post("/v1/chat/completions", json=BODY, headers={"x-team": "search"})
        assert answer.status_code == 200
        assert answer.headers["x-fairshare-standing"] == "within-share"
        assert answer.headers["x-fairshare-priority"] == "0"

    asyncio.run(main())
