"""The LiteLLM callback with what LiteLLM hands it, without LiteLLM; tests/real_litellm has the real one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from fairshare.gateway.options import EmbeddedPool, EmbeddedSpec
from fairshare.integrations.litellm_hooks import Hooks

SHARES = {"red": Fraction(1, 2), "blue": Fraction(1, 2)}


def hooks(capacity: int = 2) -> Hooks:
    pools = tuple(
        EmbeddedPool(name=name, capacity=capacity, shares=SHARES, models=(name,), half_life_seconds=0.0)
        for name in ("chat", "code")
    )
    return Hooks(EmbeddedSpec(pools=pools), lambda turned_away: RuntimeError(str(turned_away)))


def key(team: str | None = "red", **metadata: str) -> Any:
    return SimpleNamespace(team_alias=team, metadata=metadata)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hello"}], **more}


def usage(at: Hooks, team: str = "red", pool: str = "chat") -> float:
    return at.admissions[pool].pool.usage()[0].get(team, 0.0)


def in_flight(at: Hooks, pool: str = "chat") -> int:
    return sum(at.admissions[pool].pool.usage()[1].values())


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


async def before(at: Hooks, data: dict[str, Any], who: Any = None) -> dict[str, Any] | None:
    return await at.async_pre_call_hook(who or key(), None, data, "acompletion")


def attempt(model_group: str = "chat", **more: Any) -> dict[str, Any]:
    return {"custom_llm_provider": "hosted_vllm", "metadata": {"model_group": model_group}, **more}


def chunk(text: str | None = None, **more: Any) -> Any:
    choices = [] if text is None else [SimpleNamespace(delta=SimpleNamespace(content=text), finish_reason=None)]
    return SimpleNamespace(choices=choices, **more)


REPORTED = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 10}}
COST = 10 * 0.1 + 5 * 2


async def stream(*chunks: Any, breaks: bool = False) -> AsyncGenerator[Any]:
    for one in chunks:
        yield one
    if breaks:
        raise ConnectionError


def test_a_model_of_no_pool_is_left_alone() -> None:
    async def main() -> None:
        at = hooks()
        data = chat(model="other", priority=3)
        assert await before(at, data) is None
        assert data["priority"] == 3
        assert await at.async_pre_call_deployment_hook(attempt("other"), None) is None

    run(main)


def test_a_whole_answer_is_charged_and_released_once() -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat())
        assert in_flight(at) == 1
        for _ in range(2):
            await at.async_post_call_success_hook({}, key(), {"usage": REPORTED})
        await at.async_post_call_failure_hook({}, RuntimeError(), key())
        assert (in_flight(at), usage(at)) == (0, COST)

    run(main)


def test_our_priority_replaces_every_priority_of_the_client() -> None:
    async def main() -> None:
        at = hooks()
        data = chat(
            priority=1,
            extra_body={"priority": 2, "top_k": 3},
            extra_headers={"X-Vllm-Priority": "4", "x-trace": "5"},
            headers={"x-VLLM-priority": "6"},
        )
        await before(at, data)
        assert "priority" not in data
        sent = await at.async_pre_call_deployment_hook(data | attempt(), None)
        assert sent is not None
        assert sent["extra_body"] == {"priority": 0, "top_k": 3}
        assert sent["extra_headers"] == {"x-vllm-priority": "0", "x-trace": "5"}
        assert sent["headers"] == {}

    run(main)


def test_another_provider_is_told_no_priority() -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat())
        assert await at.async_pre_call_deployment_hook(attempt() | {"custom_llm_provider": "anthropic"}, None) is None

    run(main)


@pytest.mark.parametrize("breaks", [False, True], ids=["ends", "breaks"])
def test_a_streams_usage_is_charged_and_taken_out_unless_it_was_asked_for(breaks: bool) -> None:
    async def main(asked: bool) -> None:
        at = hooks()
        options = {"stream_options": {"include_usage": True}} if asked else {}
        data = chat(stream=True, **options)
        await before(at, data)
        assert data["stream_options"] == {"include_usage": True}
        seen: list[Any] = []
        source = stream(chunk("a"), chunk("b"), chunk(usage=REPORTED), breaks=breaks)
        passing = at.async_post_call_streaming_iterator_hook(key(), source, data)
        try:
            async for one in passing:
                seen += [one]
        except ConnectionError:
            assert breaks
        assert len(seen) == 2 + asked
        assert (in_flight(at), usage(at)) == (0, COST)

    run(lambda: main(True))
    run(lambda: main(False))


def test_a_client_that_leaves_in_the_middle_of_a_stream_is_charged_by_estimate() -> None:
    async def main() -> None:
        at = hooks()
        data = chat(stream=True)
        await before(at, data)
        passing = at.async_post_call_streaming_iterator_hook(key(), stream(*[chunk("x" * 40)] * 5), data)
        await anext(passing)
        await anext(passing)
        await passing.aclose()
        assert in_flight(at) == 0
        assert usage(at) == 2 * (2 * 40 // 4) + len('[{"role": "user", "content": "hello"}]') // 4

    run(main)


def test_the_end_of_the_requests_task_releases_what_no_hook_did() -> None:
    async def main() -> None:
        at = hooks()
        request = asyncio.ensure_future(before(at, chat()))
        await request
        await asyncio.sleep(0)
        assert (in_flight(at), usage(at)) == (0, 0.0)

    run(main)


def test_a_fallback_to_another_pools_model_moves_there_and_out_of_all_pools_ends_here() -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat())
        moved = await at.async_pre_call_deployment_hook(attempt("code"), None)
        assert moved is not None
        assert (in_flight(at, "chat"), in_flight(at, "code")) == (0, 1)
        assert await at.async_pre_call_deployment_hook(attempt("elsewhere"), None) is None
        assert (in_flight(at, "chat"), in_flight(at, "code")) == (0, 0)

    run(main)


def test_a_retry_keeps_its_slot() -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat())
        for _ in range(3):
            assert await at.async_pre_call_deployment_hook(attempt(), None) is not None
        assert in_flight(at) == 1

    run(main)


@pytest.mark.parametrize(
    ("who", "more"),
    [
        (key(fairshare_class="batch"), {}),
        (key(), {"service_tier": "flex"}),
        (key(), {"proxy_server_request": {"headers": {"X-Fairshare-Class": "batch"}}}),
        (key(fairshare_class="batch"), {"proxy_server_request": {"headers": {"x-fairshare-class": "interactive"}}}),
    ],
)
def test_batch_is_asked_for_by_key_header_or_tier(who: Any, more: dict[str, Any]) -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat(**more), who)
        headers = await at.async_post_call_response_headers_hook({}, who, None)
        assert headers is not None
        assert headers["x-fairshare-priority"] == "1"

    run(main)


def test_a_key_without_a_team_borrows() -> None:
    async def main() -> None:
        at = hooks()
        await before(at, chat(), key(None))
        headers = await at.async_post_call_response_headers_hook({}, key(None), None)
        assert headers is not None
        assert headers["x-fairshare-standing"] == "borrowing"

    run(main)


def test_prompts_and_choices_take_a_slot_each() -> None:
    async def main() -> None:
        at = hooks(capacity=16)
        await at.async_pre_call_hook(key(), None, {"model": "chat", "prompt": ["a", "b"], "n": 3}, "atext_completion")
        assert in_flight(at) == 6

    run(main)


def test_more_choices_than_a_request_may_ask_for_are_refused_as_litellm_wants_it() -> None:
    async def main() -> None:
        at = hooks()
        with pytest.raises(RuntimeError, match="slots must be from 1 to"):
            await at.async_pre_call_hook(key(), None, chat(n=10**30), "acompletion")
        assert in_flight(at) == 0

    run(main)
