"""SIGHUP, SIGTERM, a second SIGTERM, and what is left afterwards."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from end_to_end.conftest import Written
from end_to_end.processes import GatewayProcess, Process, eventually, keys_made, started

TO_THE_END: Any = {"ignore_eos": True}
"""Engines stop where `max_tokens` says, not where the text might end."""
MESSAGES: Any = [{"role": "user", "content": "A word that is never logged: canary-in-the-prompt."}]


def client(gateway: GatewayProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def test_a_reload_takes_a_new_key_and_a_broken_file_changes_nothing(written: Written, tmp_path: Path) -> None:
    config = tmp_path / "fairshare.yaml"
    good = written.config.read_text()
    config.write_text(good)
    with started(lambda: GatewayProcess(config)) as gateway:
        key, entry = keys_made("--team", "late")
        with client(gateway, key) as late:
            with pytest.raises(openai.AuthenticationError):
                late.models.list()
            config.write_text(good + f"  - {{name: late, keys: [{entry}]}}\n")
            gateway.reload()
            assert [model.id for model in late.models.list()] == ["small"]
            config.write_text(good.replace("capacity: 8", "capacity: many"))
            gateway.reload()
            assert gateway.pool()["capacity"] == 8
            assert [model.id for model in late.models.list()] == ["small"]
        errors = [json.loads(line)["message"] for line in gateway.err if '"level": "error"' in line]
        assert len(errors) == 2
        assert "pools[0].capacity: must be a whole number" in errors[0]
        assert errors[1] == "The configuration was not reloaded; the one from before stays in force."


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_leaves_nothing(written: Written) -> None:
    with started(lambda: GatewayProcess(written.config)) as gateway:
        with (
            client(gateway, written.keys["search"]) as openai_client,
            openai_client.chat.completions.create(
                model="small",
                messages=MESSAGES,
                max_tokens=700,
                extra_body=TO_THE_END,
                stream=True,
                stream_options={"include_usage": True},
            ) as stream,
        ):
            next(stream)
            gateway.signal(signal.SIGTERM)
            gateway.line(gateway.err, "Draining")
            eventually(lambda: httpx.get(f"{gateway.admin_url}/readyz").status_code == 503, "not ready")
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{gateway.url}/v1/models")
            *_, last = stream
        assert last.usage is not None
        assert last.usage.completion_tokens == 700
        assert gateway.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.admin_url}/healthz")
        assert "Traceback" not in "".join(gateway.err)
        assert "canary" not in "".join(gateway.err)
        assert written.keys["search"] not in "".join(gateway.err)
    assert all(engine.is_idle for engine in written.engines)


def test_a_second_sigterm_ends_at_once_and_the_engines_are_told(written: Written) -> None:
    async def main(gateway: GatewayProcess) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=written.keys["search"], max_retries=0
        ) as openai_client:
            requests = [
                asyncio.create_task(
                    openai_client.chat.completions.create(
                        model="small", messages=MESSAGES, max_tokens=3000, extra_body=TO_THE_END
                    )
                )
                for _ in range(12)
            ]
            await asyncio.to_thread(eventually, lambda: gateway.pool()["held"] >= 4, "four are held")
            gateway.signal(signal.SIGTERM)
            await asyncio.to_thread(gateway.line, gateway.err, "Draining")
            gateway.signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.wait) == 0
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
            assert all(isinstance(outcome, openai.APIError) for outcome in outcomes)

    with started(lambda: GatewayProcess(written.config)) as gateway:
        asyncio.run(main(gateway))
    eventually(lambda: all(engine.is_idle for engine in written.engines), "the engines are idle")


def test_a_configuration_that_cannot_be_used_is_a_sentence_and_exit_code_1(tmp_path: Path) -> None:
    config = tmp_path / "fairshare.yaml"
    config.write_text("pools: []\n")
    with started(lambda: Process("serve", "-c", str(config))) as gateway:
        assert gateway.wait() == 1
        assert gateway.err == [f"fairshare: {config}:1: pools: there must be at least one pool, found an empty list\n"]
