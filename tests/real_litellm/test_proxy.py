"""docs/howto/litellm.md with the real LiteLLM proxy (`make test-litellm`)."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from end_to_end.processes import EngineProcess, eventually
from howto.pages import blocks
from real_litellm.proxy import Proxy, litellm

pytestmark = [pytest.mark.real_litellm, pytest.mark.timeout(180)]

(PAGE,) = blocks("litellm.md", "yaml")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}


class Site:
    def __init__(self, engine: EngineProcess, proxy: Proxy) -> None:
        self.engine = engine
        self.proxy = proxy

    async def ask(self, key: str = "sk-search", **more: Any) -> httpx.Response:
        async with self.proxy.client(key) as client:
            return await client.post("/v1/chat/completions", json=BODY | more)

    async def leave(self, key: str = "sk-search", *, after_first_chunk: bool, stream: bool = True) -> None:
        """Asks for a long answer, and closes the connection once it has begun, or while it has not."""
        more = {"max_tokens": 3000, "stream": stream}
        async with self.proxy.client(key) as client:
            if after_first_chunk:
                async with client.stream("POST", "/v1/chat/completions", json=BODY | more) as answer:
                    async for _ in answer.aiter_bytes():
                        break
                return
            asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY | more))
            await asyncio.to_thread(eventually, lambda: not self.engine.is_idle, "the request runs")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def assert_all_slots_are_free(self) -> None:
        """The team's three whole slots at once: had one leaked, one of them would borrow."""
        await asyncio.to_thread(eventually, lambda: self.engine.is_idle, "the engine is idle")

        async def standings() -> set[tuple[str, str]]:
            answers = await asyncio.gather(*(self.ask(max_tokens=60) for _ in range(3)))
            return {(one.headers["x-fairshare-standing"], one.headers["x-fairshare-held-ms"]) for one in answers}

        # The engine is told of a client that left a moment before the callback is.
        for _ in range(20):
            if (found := await standings()) == {("within-share", "0")}:
                return
        raise AssertionError(f"a slot is still taken: {found}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    engine = EngineProcess("--max-num-seqs", "8", "--step-ms", "10")
    try:
        with litellm(PAGE, engine, tmp_path_factory.mktemp("litellm")) as proxy:
            yield Site(engine, proxy)
    finally:
        engine.end()


def test_an_answer_says_its_standing_and_frees_its_slot(site: Site) -> None:
    async def main() -> None:
        answer = await site.ask()
        assert answer.status_code == 200
        assert answer.headers["x-fairshare-priority"] == "0"
        assert answer.json()["usage"]["completion_tokens"] == 8
        await site.assert_all_slots_are_free()

    asyncio.run(main())


def test_a_stream_arrives_as_without_the_callback_and_frees_its_slot(site: Site) -> None:
    async def main() -> None:
        plain = await site.ask(stream=True)
        assert plain.text.rstrip().endswith("data: [DONE]")
        assert "usage" not in plain.text
        asked = await site.ask(stream=True, stream_options={"include_usage": True})
        assert '"completion_tokens":8' in asked.text.replace(" ", "")
        await site.assert_all_slots_are_free()

    asyncio.run(main())


def test_what_the_engine_refuses_frees_its_slot(site: Site) -> None:
    async def main() -> None:
        for stream in (False, True):
            answer = await site.ask(max_tokens=1_000_000, stream=stream)
            assert answer.status_code == 400
        await site.assert_all_slots_are_free()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("after_first_chunk", "stream"), [(True, True), (False, True), (False, False)], ids=["begun", "stream", "whole"]
)
def test_a_client_that_leaves_frees_its_slot_and_ends_the_engines_work(
    site: Site, after_first_chunk: bool, stream: bool
) -> None:
    async def main() -> None:
        for _ in range(3):
            await site.leave(after_first_chunk=after_first_chunk, stream=stream)
            # 30 s of work: idle within the patience of a test only if it was aborted
            await asyncio.to_thread(eventually, lambda: site.engine.is_idle, "the engine stopped")
        await site.assert_all_slots_are_free()

    asyncio.run(main())


def test_a_key_without_a_share_borrows_and_a_batch_key_is_batch(site: Site) -> None:
    async def main() -> None:
        answer = await site.ask("sk-ads-batch")
        assert answer.headers["x-fairshare-priority"] == "1"
        answer = await site.ask("sk-other")
        assert answer.headers["x-fairshare-standing"] == "borrowing"

    asyncio.run(main())


def test_two_teams_that_compete_get_their_shares(site: Site) -> None:
    """Four slots, three to one, twelve clients each: completions by team in 24 seconds of it.

    Answers of two seconds: the engine, not the proxy, must be what is short.
    """

    async def main() -> None:
        done: Counter[str] = Counter()
        most = 0.0
        loop = asyncio.get_running_loop()
        counting_from, until = loop.time() + 6.0, loop.time() + 30.0

        async def client(key: str) -> None:
            while loop.time() < until:
                answer = await site.ask(key, max_tokens=200)
                assert answer.status_code == 200, answer.text
                done[key] += counting_from < loop.time() < until

        async def watch() -> None:
            nonlocal most
            while loop.time() < until:
                most = max(most, await asyncio.to_thread(site.engine.gauge, "vllm:num_requests_running"))
                await asyncio.sleep(0.2)

        await asyncio.gather(watch(), *(client(key) for key in ("sk-search", "sk-ads") for _ in range(12)))
        part = done["sk-search"] / done.total()
        print(f"search got {part:.0%} of {done.total()} completions; it owns 75 %; at most {most:.0f} ran at once")
        assert 0.68 <= part <= 0.82
        await site.assert_all_slots_are_free()

    asyncio.run(main())


# ---------------------------------------------------------------------- what reaches the engine


class Recorder:
    """An engine that keeps what it was sent; a `poor` one answers 500."""

    def __init__(self, *, poor: bool = False) -> None:
        asked: list[tuple[dict[str, str], dict[str, Any]]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked.append(({name.lower(): value for name, value in self.headers.items()}, body))
                message = {"role": "assistant", "content": "hi"}
                answer = {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 1,
                    "model": body["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
                data = json.dumps({"error": {"message": "poor"}} if poor else answer).encode()
                self.send_response(500 if poor else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.asked = asked
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def recorders(*poor: bool) -> Iterator[list[Recorder]]:
    started = [Recorder(poor=one) for one in poor]
    try:
        yield started
    finally:
        for one in started:
            one.end()


def test_the_engine_gets_our_priority_on_every_attempt_and_a_fallback_outside_the_pool_gets_none(
    tmp_path: Path,
) -> None:
    with recorders(True, False) as (poor, other):
        config = json.loads(json.dumps(_yaml(PAGE)))
        config["model_list"] = [
            {"model_name": "tiny", "litellm_params": _at("hosted_vllm/tiny", poor.url)},
            {"model_name": "elsewhere", "litellm_params": _at("hosted_vllm/elsewhere", other.url)},
        ]
        config["litellm_settings"] |= {"num_retries": 1, "fallbacks": [{"tiny": ["elsewhere"]}]}
        config["general_settings"] |= {"forward_client_headers_to_llm_api": True}
        with litellm(json.dumps(config), poor, tmp_path) as proxy:  # pyright: ignore[reportArgumentType]

            async def main() -> None:
                async with proxy.client("sk-search") as client:
                    theirs = {
                        "priority": -5,
                        "extra_body": {"priority": -6},
                        "extra_headers": {"X-Vllm-Priority": "-7"},
                    }
                    answer = await client.post(
                        "/v1/chat/completions", json=BODY | theirs, headers={"x-vllm-priority": "-8"}
                    )
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-fairshare-standing"] == "within-share"

            asyncio.run(main())
        assert len(poor.asked) == 2
        for headers, body in poor.asked:
            assert (body["priority"], headers["x-vllm-priority"]) == (0, "0")
        ((headers, body),) = other.asked
        assert "priority" not in body
        assert "x-vllm-priority" not in headers


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _at(model: str, url: str) -> dict[str, str]:
    return {"model": model, "api_base": f"{url}/v1", "api_key": "none"}
