"""The gateway in front of a real vLLM: what it changes, what it must not, and that it cleans up."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from end_to_end.processes import GatewayProcess, eventually, keys_made, started
from real_vllm.client import completion, http_client, stream
from real_vllm.test_vllm_facts import RUNNING, WAITING, is_idle, one_free_seat_at_a_time
from real_vllm.vllm_server import VllmServer, gauge, until

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: 2
    half_life: 0
    dispatch: {mode}
    shares: {{owner: 1/2, other: 1/2}}
    models: {{small: tiny}}
    instances: [{{url: "{engine}", max_num_seqs: 4}}]
teams:
  - name: owner
    keys: [{owner}]
  - name: other
    keys: [{other}]
  - name: guest
    keys: [{guest}]
"""


class Site:
    """A running gateway, and the keys of its teams."""

    def __init__(self, gateway: GatewayProcess, keys: dict[str, str], config: Path) -> None:
        self.gateway = gateway
        self.keys = keys
        self.config = config

    def headers(self, team: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[team]}"}

    def openai(self, team: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=self.keys[team], max_retries=0)

    @property
    def is_empty(self) -> bool:
        pool = self.gateway.pool()
        return pool["in_flight"] == 0 and pool["held"] == 0


def written(directory: Path, engine: VllmServer, mode: str) -> tuple[Path, dict[str, str]]:
    made = {team: keys_made("--team", team) for team in ("owner", "other", "guest")}
    config = directory / "fairshare.yaml"
    entries = {team: entry for team, (_, entry) in made.items()}
    config.write_text(CONFIG.format(engine=engine.url, mode=mode, **entries))
    return config, {team: key for team, (key, _) in made.items()}


@pytest.fixture(scope="module")
def hold(priority_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    config, keys = written(tmp_path_factory.mktemp("hold"), priority_server, "hold")
    with started(lambda: GatewayProcess(config)) as gateway:
        yield Site(gateway, keys, config)


@pytest.fixture(scope="module")
def passing(priority_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    config, keys = written(tmp_path_factory.mktemp("pass"), priority_server, "pass")
    with started(lambda: GatewayProcess(config)) as gateway:
        yield Site(gateway, keys, config)


def test_the_official_client_is_served_and_the_team_is_charged_what_the_engine_counted(hold: Site) -> None:
    client = hold.openai("owner")
    messages: Any = [{"role": "user", "content": "def main("}]
    extra = {"ignore_eos": True}
    before = hold.gateway.team("owner")["usage"]
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=30, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30

    events = list(
        client.chat.completions.create(
            model="small",
            messages=messages,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
    )
    usage = events[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 40
    # The usage that the client did not ask for is charged all the same, and not shown.
    silent = list(
        client.chat.completions.create(model="small", messages=messages, max_tokens=50, stream=True, extra_body=extra)
    )
    assert all(event.usage is None and event.choices for event in silent)

    eventually(lambda: hold.is_empty, "the last request is over")
    charged = hold.gateway.team("owner")["usage"] - before
    cached = sum(
        (seen.prompt_tokens_details.cached_tokens or 0) if seen.prompt_tokens_details else 0
        for seen in (answer.usage, usage)
    )
    prompts = 3 * answer.usage.prompt_tokens
    # Of the third request only what was cached of its prompt is not known to the client.
    most = prompts - 0.9 * cached + 2 * (30 + 40 + 50)
    assert most - 0.9 * answer.usage.prompt_tokens <= charged <= most


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_frees_the_engine_and_the_slot_within_a_second(
    hold: Site, priority_server: VllmServer, streaming: bool
) -> None:
    async def scenario() -> None:
        async with http_client() as client:
            await is_idle(client, priority_server)
            async with http_client() as leaver:
                body = completion(1500, model="small", stream=streaming)
                task = asyncio.create_task(
                    leaver.post(f"{hold.gateway.url}/v1/completions", json=body, headers=hold.headers("owner"))
                )
                await until(client, priority_server.url, RUNNING, 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(client, priority_server.url, RUNNING, 0, within_seconds=1.0)

    before = hold.gateway.team("owner")["usage"]
    asyncio.run(scenario())
    eventually(lambda: hold.is_empty, "the slot is free")
    assert hold.gateway.team("owner")["usage"] > before


def test_a_held_request_whose_client_leaves_never_reaches_the_engine(hold: Site, priority_server: VllmServer) -> None:
    url = f"{hold.gateway.url}/v1/completions"

    async def scenario() -> None:
        async with http_client() as client:
            await is_idle(client, priority_server)
            body = completion(400, model="small")
            running = [
                asyncio.create_task(client.post(url, json=body, headers=hold.headers("owner"))) for _ in range(2)
            ]
            await until(client, priority_server.url, RUNNING, 2)
            async with http_client() as leaver:
                held = asyncio.create_task(leaver.post(url, json=body, headers=hold.headers("owner")))
                await asyncio.to_thread(eventually, lambda: hold.gateway.pool()["held"] == 1, "it is held")
                held.cancel()
                await asyncio.gather(held, return_exceptions=True)
            await asyncio.to_thread(eventually, lambda: hold.gateway.pool()["held"] == 0, "it is gone")
            assert await gauge(client, priority_server.url, WAITING) == 0
            assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]

    asyncio.run(scenario())
    eventually(lambda: hold.is_empty, "everything is over")


def test_an_owner_is_served_at_once_beside_borrowers_who_fill_the_pool(hold: Site, priority_server: VllmServer) -> None:
    url = f"{hold.gateway.url}/v1/completions"

    async def scenario() -> tuple[float, float]:
        async with http_client() as client:
            await is_idle(client, priority_server)
            borrowers = [
                asyncio.create_task(stream(client, url, completion(500, model="small"), headers=hold.headers("guest")))
                for _ in range(4)
            ]
            await until(client, priority_server.url, RUNNING, 2)
            owner = await stream(client, url, completion(4, model="small"), headers=hold.headers("owner"))
            return owner.last_at, min(task.last_at for task in await asyncio.gather(*borrowers))

    owner_done_at, first_borrower_done_at = asyncio.run(scenario())
    assert owner_done_at < first_borrower_done_at


def test_a_client_s_own_priority_does_not_survive_in_body_or_header(passing: Site, priority_server: VllmServer) -> None:
    order: list[str] = []
    url = f"{passing.gateway.url}/v1/completions"

    async def scenario() -> None:
        async with http_client() as client:

            async def send(team: str, more: dict[str, Any], headers: dict[str, str]) -> None:
                body = completion(4, model="small", **more)
                await stream(client, url, body, headers=headers | passing.headers(team))
                order.append(team)

            async with one_free_seat_at_a_time(client, priority_server):
                guest = asyncio.create_task(send("guest", {"priority": -2000}, {"X-Vllm-Priority": "-2000"}))
                await until(client, priority_server.url, WAITING, 1)
                owner = asyncio.create_task(send("owner", {}, {}))
                await until(client, priority_server.url, WAITING, 2)
                await asyncio.gather(guest, owner)

    asyncio.run(scenario())
    assert order == ["owner", "guest"]


def test_the_engine_s_own_errors_come_through_unchanged(hold: Site, priority_server: VllmServer) -> None:
    too_long = completion(1, prompt="word " * 5000)
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        direct = client.post(f"{priority_server.url}/v1/completions", json=too_long)
        for streaming in (False, True):
            relayed = client.post(
                f"{hold.gateway.url}/v1/completions",
                json=too_long | {"model": "small", "stream": streaming},
                headers=hold.headers("owner"),
            )
            assert (relayed.status_code, relayed.json()) == (400, direct.json())
    eventually(lambda: hold.is_empty, "the slot is free")


def doctor(config: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "fairshare", "doctor", "-c", str(config), "--probe"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stderr == ""
    return result.returncode, result.stdout


def test_the_doctor_s_probe_sees_that_the_engine_orders_by_priority(hold: Site, priority_server: VllmServer) -> None:
    code, said = doctor(hold.config)
    assert code == 0, said
    assert "policy probed: priority" in said
    assert "4 seats" in said
    assert "policy-unverified" not in said


def test_the_doctor_s_probe_sees_that_an_engine_ignores_priority(fcfs_server: VllmServer, tmp_path: Path) -> None:
    config, _ = written(tmp_path, fcfs_server, "hold")
    code, said = doctor(config)
    assert code == 1, said
    assert "priority-ignored" in said
    assert "--scheduling-policy priority" in said


@pytest.mark.parametrize("server", ["priority_server", "fcfs_server"])
def test_the_probe_leaves_nothing_behind(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    engine: VllmServer = request.getfixturevalue(server)
    config, _ = written(tmp_path, engine, "hold")
    doctor(config)

    async def scenario() -> None:
        async with http_client() as client:
            await until(client, engine.url, RUNNING, 0, within_seconds=2.0)
            await until(client, engine.url, WAITING, 0, within_seconds=2.0)

    asyncio.run(scenario())
