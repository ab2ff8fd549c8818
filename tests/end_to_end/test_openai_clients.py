"""The official client talks through the gateway to engines."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from end_to_end.conftest import Site
from end_to_end.processes import eventually

TO_THE_END: Any = {"ignore_eos": True}
"""Engines stop where `max_tokens` says, not where the text might end."""
MESSAGES: Any = [{"role": "user", "content": "Say something about shares."}]


def client(site: Site, key: str = "search") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{site.gateway.url}/v1", api_key=site.keys.get(key, key), max_retries=0)


def async_client(site: Site, key: str = "search") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{site.gateway.url}/v1", api_key=site.keys.get(key, key), max_retries=0)


def all_is_over(site: Site) -> bool:
    pool = site.gateway.pool()
    return pool["in_flight"] == 0 and pool["held"] == 0 and all(engine.is_idle for engine in site.engines)


def test_an_answer_comes_whole_with_our_headers(site: Site) -> None:
    with client(site) as openai_client:
        raw = openai_client.chat.completions.with_raw_response.create(
            model="small", messages=MESSAGES, max_tokens=7, extra_body=TO_THE_END
        )
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert raw.headers["x-fairshare-pool"] == "chat"
    assert raw.headers["x-fairshare-standing"] == "within-share"
    assert raw.headers["x-fairshare-priority"] == "0"
    assert int(raw.headers["x-fairshare-held-ms"]) >= 0
    assert raw.headers["x-request-id"]


def test_a_stream_comes_in_pieces_and_has_a_usage_event_only_if_asked_for(site: Site) -> None:
    with client(site) as openai_client:
        for asked in (False, True):
            options: Any = {"stream_options": {"include_usage": True}} if asked else {}
            with openai_client.chat.completions.create(
                model="small", messages=MESSAGES, max_tokens=9, extra_body=TO_THE_END, stream=True, **options
            ) as stream:
                chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text
            assert len(chunks) > 2
            usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
            assert [usage.completion_tokens for usage in usages] == ([9] if asked else [])


def test_completions_and_models_work_too(site: Site) -> None:
    with client(site) as openai_client:
        completion = openai_client.completions.create(model="small", prompt="Once", max_tokens=3)
        assert completion.choices[0].text
        assert [model.id for model in openai_client.models.list()] == ["small"]


def test_many_async_requests_of_both_teams_are_answered_and_exactly_what_they_used_is_charged(site: Site) -> None:
    before = {team: site.gateway.team(team)["usage"] for team in ("search", "ads")}

    async def ask(openai_client: openai.AsyncOpenAI, number: int) -> float:
        """Cost units by the default weights."""
        if number % 2:
            answer = await openai_client.chat.completions.create(
                model="small", messages=MESSAGES, max_tokens=5 + number
            )
            usage = answer.usage
        else:
            usage = None
            stream = await openai_client.chat.completions.create(
                model="small",
                messages=MESSAGES,
                max_tokens=5 + number,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
        assert usage is not None
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details is not None else 0) or 0
        return usage.prompt_tokens - cached + 0.1 * cached + 2 * usage.completion_tokens

    async def main() -> dict[str, float]:
        async with async_client(site, "search") as search, async_client(site, "ads") as ads:
            costs = {
                team: asyncio.gather(*(ask(openai_client, number) for number in range(20)))
                for team, openai_client in (("search", search), ("ads", ads))
            }
            return {team: sum(await each) for team, each in costs.items()}

    costs = asyncio.run(main())
    eventually(lambda: all_is_over(site), "everything released")
    for team in ("search", "ads"):
        assert site.gateway.team(team)["usage"] - before[team] == pytest.approx(costs[team], rel=1e-9)


def test_a_key_that_is_not_known_and_a_model_that_nobody_serves_are_refused_with_their_codes(site: Site) -> None:
    with client(site, "fs-unknown") as stranger, pytest.raises(openai.AuthenticationError) as refused:
        stranger.chat.completions.create(model="small", messages=MESSAGES)
    assert refused.value.code == "invalid_api_key"
    with client(site) as known, pytest.raises(openai.NotFoundError) as missing:
        known.chat.completions.create(model="huge", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


def test_a_class_is_what_was_asked_for_up_to_what_the_key_may_ask(site: Site) -> None:
    def priority(key: str, **options: Any) -> str:
        with client(site, key) as openai_client:
            raw = openai_client.chat.completions.with_raw_response.create(
                model="small", messages=MESSAGES, max_tokens=1, **options
            )
        return raw.headers["x-fairshare-priority"]

    assert priority("ads") == "0"
    assert priority("ads", service_tier="flex") == "1"
    assert priority("ads", extra_headers={"x-fairshare-class": "batch"}) == "1"
    assert priority("ads_batch", extra_headers={"x-fairshare-class": "interactive"}) == "1"
    assert priority("ads", extra_body={"priority": -5}, extra_headers={"x-vllm-priority": "-5"}) == "0"


def test_a_client_that_leaves_frees_its_slot_at_the_engine_too_and_is_charged(site: Site) -> None:
    before = site.gateway.team("search")["usage"]
    with (
        client(site) as openai_client,
        openai_client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=3000, extra_body=TO_THE_END, stream=True
        ) as stream,
    ):
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
        assert site.gateway.team("search")["in_flight"] == 1
    eventually(lambda: all_is_over(site), "the slot is free and the engine idle")
    assert 0 < site.gateway.team("search")["usage"] - before < 3000


def test_an_engine_s_own_error_comes_through_as_it_is(site: Site) -> None:
    with client(site) as openai_client, pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=10_000_000)
    assert "max_tokens" in str(refused.value)


def test_a_flood_of_one_team_does_not_keep_the_other_from_what_it_owns(site: Site) -> None:
    async def main() -> tuple[list[int], int]:
        async with async_client(site, "ads") as ads, async_client(site, "search") as search:
            flood = [
                asyncio.create_task(
                    ads.chat.completions.create(
                        model="small", messages=MESSAGES, max_tokens=60, extra_body=TO_THE_END, stream=False
                    )
                )
                for _ in range(60)
            ]
            await asyncio.to_thread(eventually, lambda: site.gateway.team("ads")["in_flight"] >= 8, "the flood runs")
            borrowed = (await asyncio.to_thread(site.gateway.team, "ads"))["borrowing"]
            held_ms: list[int] = []

            async def owner() -> None:
                for _ in range(5):
                    raw = await search.chat.completions.with_raw_response.create(
                        model="small", messages=MESSAGES, max_tokens=5
                    )
                    assert raw.headers["x-fairshare-standing"] == "within-share"
                    held_ms.append(int(raw.headers["x-fairshare-held-ms"]))

            await asyncio.gather(*(owner() for _ in range(4)))
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return held_ms, borrowed

    held_ms, borrowed = asyncio.run(main())
    # Its first four were within share; what follows one that ended while eight run is a borrower.
    assert 4 <= borrowed <= 8
    assert max(held_ms) == 0
    eventually(lambda: all_is_over(site), "everything released")


def test_what_the_gateway_shows_agrees_with_what_it_did(site: Site) -> None:
    eventually(lambda: all_is_over(site), "everything released")
    assert httpx.get(f"{site.gateway.admin_url}/readyz").status_code == 200
    assert site.gateway.metric("fairshare_in_flight{") == 0
    assert site.gateway.metric("fairshare_held{") == 0
    assert site.gateway.metric('fairshare_requests_total{class="interactive",code="200"') > 0
    assert site.gateway.metric('fairshare_requests_failed_total{pool="",reason="invalid_api_key"}') == 1
    pool = site.gateway.pool()
    assert [instance["healthy"] for instance in pool["instances"]] == [True, True]
    assert pool["capacity"] == 8
