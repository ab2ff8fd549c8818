"""`token_estimates: tokenize`: the engine is asked beside the request, and nothing waits for it."""

import asyncio
import json
from pathlib import Path

import pytest

from fairshare.gateway.engine_http import Answer, EngineSilent, Failure
from fairshare.gateway.options import InstanceSpec, TokenEstimates
from fairshare.gateway.token_count import MOST_AT_ONCE, TokenCounter, question_for
from fairshare.wire.endpoints import Kind
from gateway.hostile_engine import Asked, Wire, answer, forever
from gateway.rig import Rig, request_bytes, run

SPEC = InstanceSpec(url="http://one", api_key="secret")


def test_a_cut_request_is_charged_for_the_tokens_that_its_engine_counted() -> None:
    async def main() -> None:
        asked_for: list[object] = []

        async def script(asked: Asked, wire: Wire) -> None:
            if asked.path != "/tokenize":
                await forever(asked, wire)
            asked_for.append(asked.json)
            await wire.send(answer(b'{"count":1234,"tokens":[]}'))

        async with Rig.started(token_estimates=TokenEstimates.TOKENIZE, models={"tiny": "served"}) as rig:
            rig.engine.script = script
            client = await rig.client()
            await client.send(request_bytes())
            await rig.engine.received(2)
            await rig.until(lambda: not rig.driver.token_counter._asking)
            client.leave()
            record = await rig.kept.wait(1)
            assert record.estimated
            assert record.prompt_tokens == 1234
            assert asked_for == [{"model": "served", "messages": [{"role": "user", "content": "hi"}]}]

    run(main)


@pytest.mark.parametrize(
    "said", [answer(b"not found", status="404 No"), answer(b"[]"), b"garbage", answer(b'{"count":-1}')]
)
def test_what_is_no_count_leaves_the_estimate_from_the_bytes(said: bytes) -> None:
    async def main() -> None:
        async def script(asked: Asked, wire: Wire) -> None:
            if asked.path != "/tokenize":
                await forever(asked, wire)
            await wire.send(said)
            wire.close()

        async with Rig.started(token_estimates=TokenEstimates.TOKENIZE) as rig:
            rig.engine.script = script
            client = await rig.client()
            await client.send(request_bytes())
            await rig.engine.received(2)
            await rig.until(lambda: not rig.driver.token_counter._asking)
            client.leave()
            assert 0 < (await rig.kept.wait(1)).prompt_tokens < 100

    run(main)


def test_an_engine_that_does_not_say_delays_nothing() -> None:
    async def main() -> None:
        async def script(asked: Asked, wire: Wire) -> None:
            if asked.path == "/tokenize":
                await forever(asked, wire)
            await wire.send(answer(b"{}"))

        async with Rig.started(token_estimates=TokenEstimates.TOKENIZE) as rig:
            rig.engine.script = script
            assert (await rig.ask()).status == 200

    run(main)


def test_by_default_no_engine_is_asked() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            await rig.ask()
            assert [asked.path for asked in rig.engine.asked] == ["/v1/chat/completions"]

    run(main)


def test_at_most_so_many_questions_are_open() -> None:
    asked = 0

    async def silent(
        method: str,
        url: str,
        *,
        api_key: str | None = None,
        ca_file: Path | None = None,
        body: bytes | None = None,
        timeout_seconds: float,
    ) -> Answer:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise EngineSilent(Failure.TOO_SLOW, "")

    async def main() -> None:
        counter = TokenCounter(silent)
        for _ in range(MOST_AT_ONCE + 5):
            counter.count(SPEC, b"{}", lambda count: None)
        await asyncio.sleep(0)
        assert asked == MOST_AT_ONCE
        await counter.close()

    asyncio.run(main())


def test_a_question_is_the_prompt_as_it_was_sent() -> None:
    assert json.loads(question_for(Kind.CHAT, "m", b"[]") or b"") == {"model": "m", "messages": []}
    assert json.loads(question_for(Kind.COMPLETION, "m", b'"hi"') or b"") == {"model": "m", "prompt": "hi"}
    assert question_for(Kind.COMPLETION, "m", b'["a","b"]') is None
    assert question_for(Kind.RESPONSES, "m", b'"hi"') is None
