"""What a real vLLM does: the facts that the gateway and the stand-in engine rely on.

Each test here would fail on a vLLM that changed its mind, so that we hear of it before a user does.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from real_vllm.client import Streamed, chat, completion, http_client, several, stream
from real_vllm.vllm_server import VllmServer, gauge, until

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATED = "vllm:generation_tokens_total"


async def is_idle(client: httpx.AsyncClient, server: VllmServer) -> None:
    await until(client, server.url, RUNNING, 0.0)
    await until(client, server.url, WAITING, 0.0)


@asynccontextmanager
async def one_free_seat_at_a_time(client: httpx.AsyncClient, server: VllmServer) -> AsyncIterator[None]:
    """All seats are taken, and one of them comes free well before the others: what waits runs one after the other."""
    await is_idle(client, server)
    url = f"{server.url}/v1/completions"
    long = asyncio.create_task(client.post(url, json=several(450, n=server.max_num_seqs - 1, priority=-1000)))
    short = asyncio.create_task(client.post(url, json=completion(300, priority=-1000)))
    await until(client, server.url, RUNNING, server.max_num_seqs)
    try:
        yield
    finally:
        long.cancel()
        await asyncio.gather(long, short, return_exceptions=True)
        await is_idle(client, server)


async def order_of_start(
    server: VllmServer,
    requests: list[tuple[str, Callable[[httpx.AsyncClient], Awaitable[Any]]]],
) -> list[str]:
    """Sends the named requests one after the other to an engine without a free seat; returns the order they end in."""
    order: list[str] = []

    async with http_client() as client:

        async def send(name: str, request: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> None:
            await request(client)
            order.append(name)

        async with one_free_seat_at_a_time(client, server):
            tasks: list[asyncio.Task[None]] = []
            for position, (name, request) in enumerate(requests, 1):
                tasks.append(asyncio.create_task(send(name, request)))
                await until(client, server.url, WAITING, position)
            await asyncio.gather(*tasks)
    return order


def completions(server: VllmServer, *, headers: dict[str, str] | None = None, **more: Any):
    async def send(client: httpx.AsyncClient) -> Streamed:
        return await stream(client, f"{server.url}/v1/completions", completion(4, **more), headers)

    return send


def messages(server: VllmServer, *, headers: dict[str, str] | None = None, **more: Any):
    async def send(client: httpx.AsyncClient) -> None:
        response = await client.post(f"{server.url}/v1/messages", json=chat(4, **more), headers=headers)
        assert response.status_code == 200, response.text

    return send


def test_what_waits_starts_by_priority_and_then_by_arrival(priority_server: VllmServer) -> None:
    names = ["5", "3", "9", "0", "-4", "3b"]
    sent = [(name, completions(priority_server, priority=int(name.rstrip("b")))) for name in names]
    assert asyncio.run(order_of_start(priority_server, sent)) == ["-4", "0", "3", "3b", "5", "9"]


def test_the_header_sets_the_priority_and_wins_over_the_body(priority_server: VllmServer) -> None:
    def with_header(value: str, **more: Any):
        return completions(priority_server, headers={"X-Vllm-Priority": value}, **more)

    sent = [
        ("header 50", with_header("50")),
        ("body 0, header 90", with_header("90", priority=0)),
        ("body 70, header 10", with_header("10", priority=70)),
        ("body 30, bad header", with_header("urgent", priority=30)),
    ]
    assert asyncio.run(order_of_start(priority_server, sent)) == [
        "body 70, header 10",
        "body 30, bad header",
        "header 50",
        "body 0, header 90",
    ]


def test_messages_knows_only_the_header(priority_server: VllmServer) -> None:
    sent = [
        ("header 50", messages(priority_server, headers={"X-Vllm-Priority": "50"})),
        ("body -5", messages(priority_server, priority=-5)),
        ("header -7", messages(priority_server, headers={"X-Vllm-Priority": "-7"})),
        ("body bad", messages(priority_server, priority="bad")),
    ]
    # A body's priority is ignored, so those two run at 0, in their order of arrival.
    assert asyncio.run(order_of_start(priority_server, sent)) == ["header -7", "body -5", "body bad", "header 50"]


def test_a_server_with_the_default_policy_answers_200_and_ignores_priority(fcfs_server: VllmServer) -> None:
    sent = [
        ("lazy", completions(fcfs_server, priority=100)),
        ("middle", completions(fcfs_server, priority=50, headers={"X-Vllm-Priority": "50"})),
        ("urgent", completions(fcfs_server, priority=0, headers={"X-Vllm-Priority": "0"})),
    ]
    assert asyncio.run(order_of_start(fcfs_server, sent)) == ["lazy", "middle", "urgent"]


def test_a_waiting_request_never_takes_a_running_one_s_seat(priority_server: VllmServer) -> None:
    async def scenario() -> tuple[float, float, float]:
        async with http_client() as client:
            await is_idle(client, priority_server)
            before = await gauge(client, priority_server.url, PREEMPTIONS)
            url = f"{priority_server.url}/v1/completions"
            lazy = [asyncio.create_task(stream(client, url, completion(150, priority=9))) for _ in range(4)]
            await until(client, priority_server.url, RUNNING, 4)
            urgent = await stream(client, url, completion(4, priority=-100))
            ends = [task.last_at for task in await asyncio.gather(*lazy)]
            return urgent.first_at, min(ends), await gauge(client, priority_server.url, PREEMPTIONS) - before

    urgent_first_at, lazy_first_end_at, preemptions = asyncio.run(scenario())
    # The engine's last token and the next request's first may come within one step of each other.
    assert urgent_first_at > lazy_first_end_at - 0.1
    assert preemptions == 0


def test_a_queued_stream_has_its_head_at_once_and_nothing_of_its_body_until_it_runs(
    priority_server: VllmServer,
) -> None:
    # So a head does not tell that a request has begun, and one that has only its head can still be taken back.
    async def scenario() -> None:
        async with http_client() as client, one_free_seat_at_a_time(client, priority_server):
            for path, body in (("completions", completion(4)), ("chat/completions", chat(4))):
                url = f"{priority_server.url}/v1/{path}"
                async with client.stream("POST", url, json=body | {"stream": True, "priority": 5}) as response:
                    assert response.status_code == 200
                    await until(client, priority_server.url, WAITING, 1)
                    first = asyncio.create_task(anext(response.aiter_bytes()))
                    await asyncio.sleep(0.1)
                    assert not first.done()
                    assert await gauge(client, priority_server.url, WAITING) == 1
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)

    asyncio.run(scenario())


def test_under_kv_pressure_the_worst_priority_is_preempted_first_and_its_stream_resumes_unharmed(
    priority_server: VllmServer,
) -> None:
    # 4 x 800 tokens do not fit in 2048, nor do 3 x 800: somebody has to give way, twice.
    priorities = {"A": 0, "B": 5, "C": 9, "D": 0}

    async def scenario() -> tuple[dict[str, Streamed], str, float]:
        async with http_client() as client:
            await is_idle(client, priority_server)
            url = f"{priority_server.url}/v1/completions"
            undisturbed = await stream(client, url, completion(800))
            before = await gauge(client, priority_server.url, PREEMPTIONS)
            streams = await asyncio.gather(
                *(stream(client, url, completion(800, priority=priority)) for priority in priorities.values())
            )
            preempted = await gauge(client, priority_server.url, PREEMPTIONS) - before
            return dict(zip(priorities, streams, strict=True)), undisturbed.text, preempted

    streams, undisturbed_text, preempted = asyncio.run(scenario())
    ended = {name: streamed.last_at for name, streamed in streams.items()}
    assert preempted >= 2
    assert max(ended["A"], ended["D"]) < ended["B"] < ended["C"]
    assert {streamed.text for streamed in streams.values()} == {undisturbed_text}
    assert all(streamed.ended_with_done for streamed in streams.values())


def test_one_request_takes_as_many_seats_as_it_has_sequences(priority_server: VllmServer) -> None:
    async def scenario() -> None:
        async with http_client() as client:
            await is_idle(client, priority_server)
            for body in (several(60, n=6), completion(60, prompt=["a", "b", "c", "d", "e", "f"])):
                task = asyncio.create_task(client.post(f"{priority_server.url}/v1/completions", json=body))
                await until(client, priority_server.url, RUNNING, 4)
                await until(client, priority_server.url, WAITING, 2)
                assert len((await task).json()["choices"]) == 6
                await is_idle(client, priority_server)

    asyncio.run(scenario())


def test_a_client_that_leaves_is_aborted_within_a_second_running_or_queued_streaming_or_not(
    priority_server: VllmServer,
) -> None:
    url = f"{priority_server.url}/v1/completions"

    async def leave(client: httpx.AsyncClient, body: dict[str, Any], *, metric: str) -> float:
        before = await gauge(client, priority_server.url, metric)
        async with http_client() as leaver:
            task = asyncio.create_task(leaver.post(url, json=body))
            await until(client, priority_server.url, metric, before + 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return await until(client, priority_server.url, metric, before, within_seconds=1.0)

    async def scenario() -> None:
        async with http_client() as client:
            await is_idle(client, priority_server)
            await leave(client, completion(1500), metric=RUNNING)
            await leave(client, completion(1500, stream=True), metric=RUNNING)
            generated = await gauge(client, priority_server.url, GENERATED)
            async with one_free_seat_at_a_time(client, priority_server):
                await leave(client, completion(1500, priority=7), metric=WAITING)
                await leave(client, completion(1500, priority=7, stream=True), metric=WAITING)
            # What ran here was the filler of the seats, and nothing of the requests that left.
            assert await gauge(client, priority_server.url, GENERATED) - generated < 1500

    asyncio.run(scenario())


def test_a_stream_s_usage_is_one_last_event_without_choices_and_only_when_asked_for(
    priority_server: VllmServer,
) -> None:
    async def scenario() -> tuple[Streamed, Streamed, Streamed]:
        async with http_client() as client:
            url = f"{priority_server.url}/v1/chat/completions"
            long_prompt = [{"role": "user", "content": "the same words again and again " * 20}]

            async def ask(**more: Any) -> Streamed:
                return await stream(client, url, chat(5, messages=long_prompt, **more))

            return (
                await ask(),
                await ask(stream_options={"include_usage": True}),
                await ask(stream_options={"include_usage": True, "continuous_usage_stats": True}),
            )

    plain, asked, continuous = asyncio.run(scenario())
    assert all(event.get("usage") is None for event in plain.events)
    assert all(event["choices"] for event in plain.events)

    *tokens, last = asked.events
    assert asked.ended_with_done
    assert last["choices"] == []
    assert all(event.get("usage") is None for event in tokens)
    usage = last["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]

    *tokens, last = continuous.events
    assert last["choices"] == []
    counts = [event["usage"]["completion_tokens"] for event in tokens]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert all("prompt_tokens_details" not in event["usage"] for event in tokens)
    assert "prompt_tokens_details" in last["usage"]


def test_the_metrics_that_the_gateway_reads_are_there(priority_server: VllmServer) -> None:
    async def scenario() -> str:
        async with http_client() as client:
            return (await client.get(f"{priority_server.url}/metrics")).text

    text = asyncio.run(scenario())
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names >= {RUNNING, WAITING, PREEMPTIONS, GENERATED, "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
    config = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in config
    assert 'num_gpu_blocks="65"' in config
    assert "kv_cache_size_tokens=" in config


def test_the_policy_and_the_seats_are_visible_only_in_developer_mode(
    priority_server: VllmServer, fcfs_server: VllmServer
) -> None:
    async def scenario() -> tuple[httpx.Response, httpx.Response, httpx.Response, httpx.Response]:
        async with http_client() as client:
            path = "/server_info?config_format=json"
            return (
                await client.get(priority_server.url + path),
                await client.get(fcfs_server.url + path),
                await client.get(fcfs_server.url + "/version"),
                await client.get(fcfs_server.url + "/v1/models"),
            )

    opened, closed, version, models = asyncio.run(scenario())
    scheduler = opened.json()["vllm_config"]["scheduler_config"]
    assert (scheduler["policy"], scheduler["max_num_seqs"]) == ("priority", 4)
    assert closed.status_code == 404
    assert version.json() == {"version": "0.32.0"}
    assert (models.json()["data"][0]["id"], models.json()["data"][0]["max_model_len"]) == ("tiny", 2048)


def test_errors_have_these_shapes_on_streams_too(priority_server: VllmServer) -> None:
    async def scenario() -> dict[str, tuple[int, dict[str, Any]]]:
        async with http_client() as client:
            base = priority_server.url
            json_type = {"content-type": "application/json"}
            answers = {
                "unknown model": await client.post(f"{base}/v1/completions", json=completion(1, model="nope")),
                "too long": await client.post(
                    f"{base}/v1/completions", json=completion(1, prompt="word " * 5000, stream=True)
                ),
                "not JSON": await client.post(
                    f"{base}/v1/completions", content=b'{"model": "tiny",', headers=json_type
                ),
                "priority is null": await client.post(f"{base}/v1/completions", json=completion(1, priority=None)),
                "priority is a fraction": await client.post(f"{base}/v1/completions", json=completion(1, priority=1.5)),
                "unknown path": await client.post(f"{base}/v1/nothing", json={}),
                "messages, unknown model": await client.post(f"{base}/v1/messages", json=chat(1, model="nope")),
            }
            return {name: (answer.status_code, json.loads(answer.text)) for name, answer in answers.items()}

    answers = asyncio.run(scenario())
    assert {name: status for name, (status, _) in answers.items()} == {
        "unknown model": 404,
        "too long": 400,
        "not JSON": 400,
        "priority is null": 400,
        "priority is a fraction": 400,
        "unknown path": 404,
        "messages, unknown model": 404,
    }
    error = answers["unknown model"][1]["error"]
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    error = answers["too long"][1]["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "input_tokens", 400)
    assert answers["not JSON"][1]["error"]["type"] == "Bad Request"
    assert answers["unknown path"][1] == {"detail": "Not Found"}
    assert answers["messages, unknown model"][1]["type"] == "error"
    assert answers["messages, unknown model"][1]["error"]["type"] == "NotFoundError"
