"""The stand-in server answers like a vLLM 0.32 server: measured facts, on the ASGI application itself."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.asgi import Call, until
from fairshare.engine.scheduler import Policy, SchedulerConfig
from fairshare.engine.server import EngineApp, EngineSettings
from fairshare.engine.service import Answer, Wanted
from fairshare.engine.sglang import SglangOptions
from fairshare.gateway.scrape import parse_sglang_metrics

RECORDED = json.loads((Path(__file__).parent / "recorded_vllm.json").read_text())
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "ignore_eos": True, "max_tokens": 3}
TEXT = {"model": "tiny", "prompt": "hello", "ignore_eos": True, "max_tokens": 3}

SCHEDULER = SchedulerConfig(
    max_num_seqs=4,
    num_blocks=65,
    block_size=128,
    max_model_len=2048,
    prefix_caching=True,
    step_seconds=1e-7,
    token_seconds=0.0,
)
SETTINGS = EngineSettings(model_names=("tiny",), scheduler=SCHEDULER)


@asynccontextmanager
async def running(settings: EngineSettings = SETTINGS, **changes: Any) -> AsyncIterator[EngineApp]:
    """An application whose engine steps."""
    app = EngineApp(replace(settings, **changes))
    engine = asyncio.ensure_future(app.service.run())
    try:
        yield app
    finally:
        engine.cancel()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def ask(app: EngineApp, path: str, body: Any = None, **more: Any) -> Call:
    return await Call(app, path, body, **more).done()


def grown(value: Any) -> Any:
    """Repeats what the recorded cases write as {"$repeat": [what, times]}."""
    if isinstance(value, dict):
        if "$repeat" in value:
            what, times = value["$repeat"]
            return what * times
        return {k: grown(v) for k, v in value.items()}
    return [grown(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- errors, as recorded


@pytest.mark.parametrize("case", RECORDED["errors"], ids=[case["name"] for case in RECORDED["errors"]])
def test_errors_are_those_of_the_real_server(case: dict[str, Any]) -> None:
    async def test() -> None:
        async with running() as app:
            raw = case["raw"].encode("latin-1") if "raw" in case else None
            body = grown(case.get("body"))
            call = await ask(app, case["path"], body, raw=raw, method=case["method"], headers=case.get("headers"))
            assert call.status == case["status"]
            assert call.json() == case["answer"]

    run(test)


def test_a_prompt_of_token_ids_that_is_too_long_is_told_its_length() -> None:
    async def test() -> None:
        async with running() as app:
            call = await ask(app, "/v1/completions", {"prompt": [5] * 3000, "max_tokens": 1})
            assert "your prompt contains 3000 input tokens" in call.json()["error"]["message"]

    run(test)


def test_a_path_with_a_slash_at_its_end_is_redirected_and_head_is_not_allowed() -> None:
    async def test() -> None:
        async with running() as app:
            assert (await ask(app, "/v1/chat/completions/", CHAT)).status == 307
            assert (await ask(app, "/health", method="HEAD")).status == 405
            options = await ask(app, "/v1/chat/completions", method="OPTIONS")
            assert (options.status, options.headers["allow"]) == (405, "POST")

    run(test)


# ---------------------------------------------------------------- priority


class Spied(EngineApp):
    """Keeps the priorities that reach the engine."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.priorities: list[int] = []
        submit = self.service.submit

        def spy(wanted: Sequence[Wanted], *, priority: int, request_id: str) -> Answer:
            self.priorities.append(priority)
            return submit(wanted, priority=priority, request_id=request_id)

        self.service.submit = spy


EMBED = {"model": "tiny", "input": "hello"}
PAIR = {"text_1": "a", "text_2": "b"}
RERANK = {"query": "a", "documents": ["b"]}
MESSAGE = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 3}
RESPONSE = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
BOTH, BODY_ONLY, HEADER_ONLY = 7, 5, 7  # what arrives when the body says 5 and the header 7


@pytest.mark.parametrize(
    ("path", "body", "arrives"),
    [
        ("/v1/chat/completions", CHAT, BOTH),
        ("/v1/completions", TEXT, BOTH),
        ("/v1/responses", RESPONSE, BOTH),
        ("/v1/messages", MESSAGE, HEADER_ONLY),
        ("/v1/embeddings", EMBED, BODY_ONLY),
        ("/pooling", EMBED, BODY_ONLY),
        ("/score", PAIR, BODY_ONLY),
        ("/v1/score", PAIR, BODY_ONLY),
        ("/rerank", RERANK, BODY_ONLY),
        ("/v1/rerank", RERANK, BODY_ONLY),
        ("/v2/rerank", RERANK, BODY_ONLY),
    ],
)
def test_each_endpoint_takes_its_priority_from_where_vllm_takes_it(path: str, body: Any, arrives: int) -> None:
    async def test() -> None:
        app = Spied(SETTINGS)
        engine = asyncio.ensure_future(app.service.run())
        call = await ask(app, path, {**body, "priority": 5}, headers={"X-Vllm-Priority": "7"})
        assert call.status == 200
        assert app.priorities == [arrives]
        await ask(app, path, {**body, "priority": 5})
        assert app.priorities[1] == (0 if path == "/v1/messages" else 5)
        engine.cancel()

    run(test)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score", "/rerank", "/v1/responses"])
@pytest.mark.parametrize("bad", ["bad", 1.5, None])
def test_a_bad_priority_in_the_body_is_refused_where_the_field_is_known(path: str, bad: Any) -> None:
    async def test() -> None:
        bodies = {"/score": PAIR, "/rerank": RERANK, "/v1/responses": RESPONSE}
        async with running() as app:
            call = await ask(app, path, {**bodies.get(path, EMBED), "priority": bad})
            assert call.status == 400
            assert call.json()["error"]["param"] == "body.priority"

    run(test)


@pytest.mark.parametrize(
    ("given", "arrives"), [("3", 3), (" 3 ", 3), ("3.0", 3), (1.0, 1), (1e3, 1000), (True, 1), (-7, -7)]
)
def test_a_priority_may_be_written_in_every_way_that_pydantic_reads(given: Any, arrives: int) -> None:
    async def test() -> None:
        app = Spied(SETTINGS)
        engine = asyncio.ensure_future(app.service.run())
        assert (await ask(app, "/v1/completions", {**TEXT, "priority": given})).status == 200
        assert app.priorities == [arrives]
        engine.cancel()

    run(test)


@pytest.mark.parametrize("header", ["x", "1.5", ""])
def test_a_header_that_is_no_integer_is_ignored(header: str) -> None:
    async def test() -> None:
        app = Spied(SETTINGS)
        engine = asyncio.ensure_future(app.service.run())
        await ask(app, "/v1/completions", {**TEXT, "priority": 5}, headers={"X-Vllm-Priority": header})
        assert app.priorities == [5]
        engine.cancel()

    run(test)


def test_a_header_beyond_the_engines_integers_is_an_internal_error_also_inside_a_stream() -> None:
    async def test() -> None:
        async with running() as app:
            huge = {"X-Vllm-Priority": str(10**30)}
            assert (await ask(app, "/v1/completions", TEXT, headers=huge)).status == 500
            stream = await ask(app, "/v1/completions", {**TEXT, "stream": True}, headers=huge)
            assert stream.status == 200
            assert stream.events()[0]["error"]["code"] == 500
            assert stream.text.endswith("data: [DONE]\n\n")
            assert (await ask(app, "/v1/completions", TEXT, headers={"X-Vllm-Priority": str(2**63)})).status == 200

    run(test)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.PRIORITY, ["-4", "0", "3", "3b", "5", "9"]), (Policy.FCFS, ["5", "3", "9", "0", "-4", "3b"])],
)
def test_waiting_requests_are_served_by_priority_and_fcfs_ignores_it_without_a_word(
    policy: Policy, expected: list[str]
) -> None:
    async def test() -> None:
        scheduler = replace(SCHEDULER, max_num_seqs=1, policy=policy)
        app = EngineApp(replace(SETTINGS, scheduler=scheduler))
        names = ["5", "3", "9", "0", "-4", "3b"]
        order: list[str] = []
        calls = [Call(app, "/v1/completions", {**TEXT, "max_tokens": 50, "priority": -99})]
        await until(lambda: app.service.unfinished == 1)
        for count, name in enumerate(names, 2):
            later_ids_first = {"X-Request-Id": str(99 - count)}  # an id decides only between equal arrivals
            body = {**TEXT, "priority": int(name.rstrip("b"))}
            call = Call(app, "/v1/completions", body, headers=later_ids_first)
            call.task.add_done_callback(lambda _, name=name: order.append(name))
            calls.append(call)
            await until(lambda count=count: app.service.unfinished == count)
        engine = asyncio.ensure_future(app.service.run())
        for call in calls:
            await call.done()
            assert call.status == 200
        assert order == expected
        engine.cancel()

    run(test)


# ---------------------------------------------------------------- answers


def test_a_chat_answer_has_the_fields_of_vllm() -> None:
    async def test() -> None:
        async with running(prompt_tokens_details=True) as app:
            answer = (await ask(app, "/v1/chat/completions", CHAT, headers={"X-Request-Id": "my-id"})).json()
            assert answer["id"] == "chatcmpl-my-id"
            assert answer["object"] == "chat.completion"
            (choice,) = answer["choices"]
            assert choice["message"]["role"] == "assistant"
            assert len(choice["message"]["content"]) == 12
            assert choice["finish_reason"] == "length"
            prompt = answer["usage"]["prompt_tokens"]
            assert answer["usage"] == {
                "prompt_tokens": prompt,
                "total_tokens": prompt + 3,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": None},
                "completion_tokens_details": None,
            }
            plain = (await ask(app, "/v1/completions", {"prompt": "hi"}, headers={"X-Request-Id": "abc"})).json()
            assert plain["id"] == "cmpl-abc"
            assert plain["model"] == "tiny"
            assert plain["usage"]["completion_tokens"] <= 16

    run(test)


def test_the_same_prompt_gives_the_same_text_and_another_one_another() -> None:
    async def test() -> None:
        async with running() as app:
            texts = [
                (await ask(app, "/v1/completions", {**TEXT, "prompt": prompt, "max_tokens": 20})).json()["choices"][0]
                for prompt in ("hello", "hello", "hallo")
            ]
            assert texts[0] == texts[1]
            assert texts[0]["text"] != texts[2]["text"]

    run(test)


def test_n_and_prompt_lists_are_several_sequences_that_count_in_one_usage() -> None:
    async def test() -> None:
        async with running() as app:
            body = {**TEXT, "prompt": ["one", "other"], "n": 3, "max_tokens": 2}
            answer = (await ask(app, "/v1/completions", body)).json()
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
            assert len({choice["text"] for choice in answer["choices"]}) == 6
            assert answer["usage"]["completion_tokens"] == 12
            assert answer["usage"]["prompt_tokens"] == 3

    run(test)


def test_the_natural_end_is_a_token_without_text() -> None:
    async def test() -> None:
        async with running() as app:
            body = {"prompt": "tell me", "max_tokens": 2000}
            answer = (await ask(app, "/v1/completions", body)).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert len(answer["choices"][0]["text"]) == 4 * (answer["usage"]["completion_tokens"] - 1)

    run(test)


def test_a_stop_string_ends_the_text_before_it_and_is_never_seen_in_a_stream() -> None:
    async def test() -> None:
        async with running() as app:
            body = {**CHAT, "max_tokens": 200}
            full = (await ask(app, "/v1/chat/completions", body)).json()["choices"][0]["message"]["content"]
            stop = full[41:46]  # begins inside a token and ends in the next
            expected = full[: full.index(stop)]
            whole = (await ask(app, "/v1/chat/completions", {**body, "stop": [stop, "###"]})).json()
            assert whole["choices"][0]["message"]["content"] == expected
            assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", stop)
            stream = await ask(app, "/v1/chat/completions", {**body, "stop": stop, "stream": True})
            assert "".join(e["choices"][0]["delta"]["content"] for e in stream.events()) == expected
            assert stream.events()[-1]["choices"][0]["stop_reason"] == stop
            kept = await ask(app, "/v1/chat/completions", {**body, "stop": stop, "include_stop_str_in_output": True})
            assert kept.json()["choices"][0]["message"]["content"] == expected + stop

    run(test)


def test_a_repeated_prompt_is_cached_except_for_its_last_block() -> None:
    async def test() -> None:
        async with running(prompt_tokens_details=True) as app:
            body = {**TEXT, "prompt": list(range(401)), "max_tokens": 1}
            first, second = [(await ask(app, "/v1/completions", body)).json()["usage"] for _ in range(2)]
            assert first["prompt_tokens"] == 401
            assert first["prompt_tokens_details"]["cached_tokens"] == 0
            assert second["prompt_tokens_details"]["cached_tokens"] == 384
            text = app.service.metrics.render()[0].decode()
            labels = 'engine="0",model_name="tiny"'
            for line in (
                f"vllm:prompt_tokens_cached_total{{{labels}}} 384.0",
                f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 418.0',
                f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 384.0',
                f"vllm:prefix_cache_queries_total{{{labels}}} 802.0",
                f"vllm:prefix_cache_hits_total{{{labels}}} 384.0",
            ):
                assert line in text.splitlines()

    run(test)


def test_a_chat_says_how_many_tokens_it_left_in_the_cache() -> None:
    async def test() -> None:
        async with running(prompt_tokens_details=True) as app:
            body = {**CHAT, "messages": [{"role": "user", "content": "word " * 400}]}
            first, second = [
                (await ask(app, "/v1/chat/completions", body)).json()["usage"]["prompt_tokens_details"]
                for _ in range(2)
            ]
            assert (first["cached_tokens"], first["created_cache_tokens"]) == (0, 384)
            assert (second["cached_tokens"], second["created_cache_tokens"]) == (384, 0)
            message = (await ask(app, "/v1/messages", {**MESSAGE, "messages": body["messages"]})).json()
            usage = message["usage"]
            assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (384, 0)

    run(test)


def test_the_next_turn_of_a_chat_finds_the_last_one_in_the_cache() -> None:
    async def test() -> None:
        scheduler = replace(SCHEDULER, block_size=16, num_blocks=200)
        async with running(scheduler=scheduler, prompt_tokens_details=True) as app:
            body = {**CHAT, "max_tokens": 100}
            first = (await ask(app, "/v1/chat/completions", body)).json()
            reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            turn = {**body, "messages": [*CHAT["messages"], reply, {"role": "user", "content": "go on"}]}
            second = (await ask(app, "/v1/chat/completions", turn)).json()["usage"]
            # All of the first turn but its last token, in whole blocks.
            known = first["usage"]["total_tokens"] - 1
            assert second["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16

    run(test)


# ---------------------------------------------------------------- streams


def test_a_stream_without_usage_has_none_and_ends_with_done() -> None:
    async def test() -> None:
        async with running() as app:
            call = await ask(app, "/v1/chat/completions", {**CHAT, "stream": True})
            assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = call.events()
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "length"]
            assert all("usage" not in event for event in events)
            assert ["system_fingerprint" in event for event in events] == [False, False, False, True]
            assert call.text.endswith("data: [DONE]\n\n")

    run(test)


def test_include_usage_adds_one_event_without_choices() -> None:
    async def test() -> None:
        async with running(prompt_tokens_details=True) as app:
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                events = (await ask(app, path, {**body, **options})).events()
                assert [bool(event["choices"]) for event in events][-2:] == [True, False]
                usage = events[-1]["usage"]
                assert usage["completion_tokens"] == 3
                assert usage["total_tokens"] == usage["prompt_tokens"] + 3
                assert usage["prompt_tokens_details"]["cached_tokens"] == 0
                assert all("usage" not in event for event in events[:-1])
                # The fingerprint is on the last event, whichever that is.
                assert ["system_fingerprint" in event for event in events] == [False] * (len(events) - 1) + [True]

    run(test)


def test_without_the_option_the_last_usage_has_no_details() -> None:
    async def test() -> None:
        async with running() as app:
            body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
            usage = (await ask(app, "/v1/chat/completions", body)).events()[-1]["usage"]
            assert "prompt_tokens_details" not in usage
            whole = (await ask(app, "/v1/chat/completions", CHAT)).json()["usage"]
            assert whole["prompt_tokens_details"] is None

    run(test)


def test_continuous_usage_is_on_every_event_without_details() -> None:
    async def test() -> None:
        async with running(prompt_tokens_details=True) as app:
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = (
                await ask(app, "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": options})
            ).events()
            assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]
            assert ["prompt_tokens_details" in event["usage"] for event in events] == [False] * 4 + [True]
            alone = {"continuous_usage_stats": True}
            events = (
                await ask(app, "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": alone})
            ).events()
            assert all("usage" not in event for event in events)

    run(test)


def test_a_reader_that_is_slow_gets_several_tokens_in_one_event() -> None:
    async def test() -> None:
        answer = Answer(1)
        for _ in range(3):
            answer.put(0, 1, None)
        answer.put(0, 1, "length")
        (delta,) = await answer.take()
        assert (delta.tokens, delta.finish_reason) == (4, "length")
        assert await answer.take() == []

    run(test)


def test_headers_of_a_stream_come_while_the_request_still_waits() -> None:
    async def test() -> None:
        app = EngineApp(SETTINGS)  # its engine does not step
        call = Call(app, "/v1/chat/completions", {**CHAT, "stream": True})
        await until(lambda: call.status == 200)
        assert call.chunks == []
        call.leave()
        await call.done()

    run(test)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_request_waits_is_forgotten_at_once(stream: bool) -> None:
    async def test() -> None:
        app = EngineApp(SETTINGS)
        call = Call(app, "/v1/chat/completions", {**CHAT, "stream": stream, "n": 2})
        await until(lambda: app.service.unfinished == 2)
        call.leave()
        await call.done()
        assert app.service.unfinished == 0
        assert not app.service._scheduler.busy
        text = app.service.metrics.render()[0].decode()
        assert 'num_requests_waiting{engine="0",model_name="tiny"} 0.0' in text

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_the_middle_stops_the_engine(stream: bool) -> None:
    async def test() -> None:
        async with running() as app:
            call = Call(app, "/v1/chat/completions", {**CHAT, "stream": stream, "max_tokens": 2000})
            metrics = app.service.metrics
            await until(lambda: metrics.generation_tokens._value.get() > 20)
            call.leave()
            await call.done()
            assert app.service.unfinished == 0
            assert app.service._scheduler.free_blocks == SCHEDULER.usable_blocks
            made = metrics.generation_tokens._value.get()
            assert 20 < made < 2000
            text = metrics.render()[0].decode()
            for reason in ("stop", "length", "abort"):  # vLLM counts an aborted request nowhere
                assert f'request_success_total{{engine="0",finished_reason="{reason}",model_name="tiny"}} 0.0' in text

    run(test)


# ---------------------------------------------------------------- other APIs


def test_responses_answer_and_stream_as_vllm_does() -> None:
    async def test() -> None:
        async with running() as app:
            whole = (await ask(app, "/v1/responses", RESPONSE)).json()
            assert whole["id"].startswith("resp_")
            assert whole["usage"]["output_tokens"] <= 3
            stream = await ask(app, "/v1/responses", {**RESPONSE, "ignore_eos": True, "stream": True})
            events = stream.events()
            assert [event["type"] for event in events] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert [event["sequence_number"] for event in events] == list(range(11))
            last = events[-1]["response"]
            assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert last["usage"]["output_tokens"] == 3
            assert "[DONE]" not in stream.text

    run(test)


def test_stored_and_background_responses_are_refused() -> None:
    async def test() -> None:
        async with running() as app:
            background = await ask(app, "/v1/responses", {**RESPONSE, "background": True})
            assert (background.status, background.json()["error"]["param"]) == (400, "background")
            follow_up = await ask(app, "/v1/responses", {**RESPONSE, "previous_response_id": "resp_1"})
            assert follow_up.status == 404

    run(test)


def test_messages_answer_and_stream_as_vllm_does() -> None:
    async def test() -> None:
        async with running() as app:
            whole = (await ask(app, "/v1/messages", {**MESSAGE, "priority": "bad"})).json()
            assert whole["type"] == "message"
            assert whole["content"][0]["type"] == "text"
            stream = await ask(app, "/v1/messages", {**MESSAGE, "system": "brief", "max_tokens": 1, "stream": True})
            events = stream.events()
            assert events[0]["type"] == "message_start"
            assert [e["type"] for e in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
            assert events[-2]["delta"]["stop_reason"] == "max_tokens"
            assert events[-2]["usage"]["output_tokens"] == 1
            assert events[0]["message"]["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
            counted = (await ask(app, "/v1/messages/count_tokens", MESSAGE)).json()
            assert counted["input_tokens"] == whole["usage"]["input_tokens"]

    run(test)


FUNCTION = {
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "minLength": 2}, "days": {"type": "integer", "minimum": 3}},
        "required": ["town", "days"],
    },
}
ARGUMENTS = {"town": "xx", "days": 3}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "look_up"}}, "stop")],
)
def test_a_forced_tool_is_called_with_valid_arguments(choice: Any, reason: str) -> None:
    async def test() -> None:
        async with running() as app:
            body = {**CHAT, "max_tokens": 50, "tools": [{"type": "function", "function": FUNCTION}]}
            body["tool_choice"] = choice
            (whole,) = (await ask(app, "/v1/chat/completions", body)).json()["choices"]
            (call,) = whole["message"]["tool_calls"]
            assert call["function"]["name"] == "look_up"
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            assert whole["finish_reason"] == reason
            events = (await ask(app, "/v1/chat/completions", {**body, "stream": True})).events()
            deltas = [event["choices"][0]["delta"] for event in events]
            arguments = "".join(
                d["tool_calls"][0]["function"].get("arguments", "") for d in deltas if "tool_calls" in d
            )
            assert json.loads(arguments) == ARGUMENTS
            assert events[-1]["choices"][0]["finish_reason"] == reason

    run(test)


def test_a_json_schema_is_answered_with_an_instance() -> None:
    async def test() -> None:
        async with running() as app:
            schema = {"name": "x", "schema": FUNCTION["parameters"]}
            body = {**CHAT, "max_tokens": 50, "response_format": {"type": "json_schema", "json_schema": schema}}
            (choice,) = (await ask(app, "/v1/chat/completions", body)).json()["choices"]
            assert json.loads(choice["message"]["content"]) == ARGUMENTS
            assert choice["finish_reason"] == "stop"

    run(test)


def test_embeddings_pooling_scores_and_ranks() -> None:
    async def test() -> None:
        async with running() as app:
            embedded = (await ask(app, "/v1/embeddings", {"input": ["a", "b", "a"], "dimensions": 8})).json()
            vectors = [item["embedding"] for item in embedded["data"]]
            assert [len(vector) for vector in vectors] == [8, 8, 8]
            assert vectors[0] == vectors[2] != vectors[1]
            assert embedded["usage"]["prompt_tokens"] == embedded["usage"]["total_tokens"] == 3
            coded = (await ask(app, "/v1/embeddings", {"input": "a", "encoding_format": "base64"})).json()
            assert isinstance(coded["data"][0]["embedding"], str)
            assert (await ask(app, "/pooling", EMBED)).json()["data"][0]["object"] == "pooling"
            scores = (await ask(app, "/score", {"queries": "q", "documents": ["a", "b"]})).json()
            assert [item["object"] for item in scores["data"]] == ["score", "score"]
            ranked = (await ask(app, "/rerank", {"query": "q", "documents": ["a", "b", "c"], "top_n": 2})).json()
            relevance = [item["relevance_score"] for item in ranked["results"]]
            assert len(relevance) == 2
            assert relevance == sorted(relevance, reverse=True)
            assert ranked["results"][0]["document"]["text"] == "abc"[ranked["results"][0]["index"]]
            uneven = await ask(app, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
            assert uneven.status == 400

    run(test)


def multipart(*parts: tuple[str, bytes]) -> dict[str, Any]:
    lines = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        % (name.encode(), b'; filename="a.wav"' if name == "file" else b"", value)
        for name, value in parts
    )
    return {"raw": lines + b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_audio_is_transcribed_with_priority_zero_whatever_is_asked(path: str) -> None:
    async def test() -> None:
        app = Spied(SETTINGS)
        engine = asyncio.ensure_future(app.service.run())
        audio = b"RIFF\r\n\n\x00\xff" * 7000
        form = multipart(("file", audio), ("model", b"tiny"), ("priority", b"9"))
        form["headers"]["X-Vllm-Priority"] = "9"
        call = await ask(app, path, **form)
        assert call.json()["usage"] == {"type": "duration", "seconds": 2}
        assert app.priorities == [0]
        form = multipart(("file", audio), ("stream", b"true"), ("stream_include_usage", b"true"))
        stream = await ask(app, path, **form)
        assert stream.events()[-1]["usage"]["completion_tokens"] == len(call.json()["text"]) // 4 + (
            stream.events()[-2]["choices"][0]["finish_reason"] == "stop"
        )
        assert stream.text.endswith("data: [DONE]\n\n")
        missing = await ask(app, path, **multipart(("model", b"tiny")))
        assert (missing.status, missing.json()["error"]["param"]) == (400, "body.file")
        unknown = await ask(app, path, **multipart(("file", audio), ("model", b"nope")))
        assert unknown.status == 404
        engine.cancel()

    run(test)


def test_tokens_become_text_again() -> None:
    async def test() -> None:
        async with running() as app:
            text = "Grüße, 世界! 🦊 and more"
            tokens = (await ask(app, "/tokenize", {"prompt": text, "return_token_strs": True})).json()
            assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
            assert tokens["max_model_len"] == 2048
            assert (await ask(app, "/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": text}
            chat = (await ask(app, "/tokenize", {"messages": CHAT["messages"]})).json()
            usage = (await ask(app, "/v1/chat/completions", CHAT)).json()["usage"]
            assert chat["count"] == usage["prompt_tokens"]

    run(test)


# ---------------------------------------------------------------- about the server


def test_what_can_be_discovered_is_there_and_what_cannot_is_not() -> None:
    async def test() -> None:
        async with running(model_names=("tiny", "alias")) as app:
            models = (await ask(app, "/v1/models", method="GET")).json()
            assert [card["id"] for card in models["data"]] == ["tiny", "alias"]
            assert models["data"][0]["max_model_len"] == 2048
            assert (await ask(app, "/version", method="GET")).json() == {"version": "0.32.0"}
            for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST")):
                call = await ask(app, path, method=method)
                assert (call.status, call.text) == (200, "")
            assert (await ask(app, "/server_info", method="GET")).status == 404
            assert (await ask(app, "/v1/completions", {**TEXT, "model": "alias"})).json()["model"] == "alias"
        async with running(dev_mode=True) as app:
            info = (await ask(app, "/server_info?config_format=json", method="GET")).json()
            config = info["vllm_config"]["scheduler_config"]
            assert (config["max_num_seqs"], config["policy"]) == (4, "priority")
            text = (await ask(app, "/server_info", method="GET")).json()["vllm_config"]
            assert isinstance(text, str)

    run(test)


def test_metrics_have_vllms_names_and_count_what_was_served() -> None:
    async def test() -> None:
        async with running() as app:
            await ask(app, "/v1/completions", {**TEXT, "n": 2})
            call = await ask(app, "/metrics", method="GET")
            assert call.headers["content-type"].startswith("text/plain")
            found = {line.split()[2] for line in call.text.splitlines() if line.startswith("# TYPE")}
            assert set(RECORDED["metrics"]) <= found
            labels = '{engine="0",model_name="tiny"}'
            for line in (
                f"vllm:generation_tokens_total{labels} 6.0",
                f"vllm:prompt_tokens_total{labels} 4.0",
                f"vllm:num_requests_running{labels} 0.0",
                'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 2.0',
                f"vllm:request_params_n_sum{labels} 4.0",
                f"vllm:inter_token_latency_seconds_count{labels} 4.0",
                f"vllm:time_to_first_token_seconds_count{labels} 2.0",
            ):
                assert line in call.text.splitlines()
            (info,) = [line for line in call.text.splitlines() if line.startswith("vllm:cache_config_info{")]
            assert 'num_gpu_blocks="65"' in info
            assert 'block_size="128"' in info
            assert 'kv_cache_size_tokens="8320"' in info

    run(test)


def test_a_preemption_is_counted_when_its_victim_runs_again() -> None:
    async def test() -> None:
        scheduler = replace(SCHEDULER, block_size=32, num_blocks=65, prefix_caching=False, max_num_seqs=8)
        async with running(scheduler=scheduler) as app:
            calls = [
                Call(app, "/v1/completions", {**TEXT, "prompt": list(range(19)), "max_tokens": 700, "priority": p})
                for p in (0, 5, 9, 0)
            ]
            engine = app.service._scheduler
            await until(lambda: engine.preemptions == 1)
            counted = app.service.metrics.preemptions._value
            assert counted.get() == 0
            for call in calls:
                await call.done()
                assert call.json()["usage"]["completion_tokens"] == 700
            assert engine.preemptions == counted.get() == 2

    run(test)


def test_a_request_that_is_preempted_twice_counts_twice() -> None:
    async def test() -> None:
        scheduler = replace(SCHEDULER, block_size=32, num_blocks=65, prefix_caching=False, max_num_seqs=8)
        async with running(scheduler=scheduler) as app:
            # Three grow alike: the worst is evicted at 2048 tokens together, returns when the short one has ended,
            # and is evicted again when two fill the cache.
            sizes = ((700, 0), (1300, 0), (1000, 9))
            calls = [
                Call(app, "/v1/completions", {**TEXT, "prompt": list(range(19)), "max_tokens": tokens, "priority": p})
                for tokens, p in sizes
            ]
            for call in calls:
                await call.done()
            assert app.service._scheduler.preemptions == 2
            assert app.service.metrics.preemptions._value.get() == 2
            labels = '{engine="0",model_name="tiny"}'
            assert f"vllm:request_num_preemptions_sum{labels} 2.0" in app.service.metrics.render()[0].decode()

    run(test)


def test_a_full_queue_is_answered_with_503_and_running_ones_count() -> None:
    async def test() -> None:
        app = EngineApp(replace(SETTINGS, max_num_queued_reqs=3))
        waiting = Call(app, "/v1/completions", {**TEXT, "n": 3})
        await until(lambda: app.service.unfinished == 3)
        message = (
            "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance."
        )
        for stream in (True, False):
            busy = await ask(app, "/v1/chat/completions", {**CHAT, "stream": stream})
            assert busy.status == 503
            assert busy.json() == {
                "error": {"message": message, "type": "Service Unavailable", "param": None, "code": 503}
            }
        anthropic = await ask(app, "/v1/messages", MESSAGE)
        assert anthropic.json() == {"type": "error", "error": {"type": "Service Unavailable", "message": message}}
        text = app.service.metrics.render()[0].decode()
        assert 'admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 3.0' in text
        waiting.leave()
        await waiting.done()

    run(test)


def test_v1_paths_need_the_key_and_the_others_do_not() -> None:
    async def test() -> None:
        async with running(api_key="sekret") as app:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sekret"}):
                call = await ask(app, "/v1/completions", TEXT, headers=headers)
                assert (call.status, call.json()) == (401, {"error": "Unauthorized"})
            assert (await ask(app, "/v1/completions", TEXT, headers={"Authorization": "Bearer sekret"})).status == 200
            assert (await ask(app, "/tokenize", {"prompt": "x"})).status == 200
            assert (await ask(app, "/v2/rerank", RERANK)).status == 401

    run(test)


def test_request_ids_and_load_are_shown_only_when_asked_for() -> None:
    async def test() -> None:
        async with running() as app:
            assert "x-request-id" not in (await ask(app, "/version", method="GET")).headers
        async with running(request_id_headers=True) as app:
            call = await ask(app, "/v1/completions", TEXT, headers={"X-Request-Id": "mine"})
            assert call.headers["x-request-id"] == "mine"
            assert len((await ask(app, "/version", method="GET")).headers["x-request-id"]) == 32
        for tracking, shown in ((True, 2), (False, 0)):
            app = EngineApp(replace(SETTINGS, load_tracking=tracking))
            calls = [Call(app, "/v1/completions", TEXT) for _ in range(2)]
            await until(lambda app=app: app.service.unfinished == 2)
            assert (await ask(app, "/load", method="GET")).json() == {"server_load": shown}
            for call in calls:
                call.leave()
                await call.done()
            assert (await ask(app, "/load", method="GET")).json() == {"server_load": 0}

    run(test)


# ---------------------------------------------------------------- an engine that is told to stop


def test_requests_end_with_abort_when_the_engine_stops() -> None:
    async def test() -> None:
        async with running() as app:
            body = {**CHAT, "max_tokens": 2000}
            calls = [Call(app, "/v1/chat/completions", {**body, "stream": stream}) for stream in (True, False)]
            await until(lambda: app.service.metrics.generation_tokens._value.get() > 20)
            app.service.end_all()
            message = Call(app, "/v1/messages", {**MESSAGE, "max_tokens": 2000})
            await until(lambda: app.service.unfinished == 1)
            app.service.end_all()
            assert "stop_reason" not in (await message.done()).json()
            stream, whole = [await call.done() for call in calls]
            assert stream.events()[-1]["choices"][0]["finish_reason"] == "abort"
            assert stream.text.endswith("data: [DONE]\n\n")
            assert whole.json()["choices"][0]["finish_reason"] == "abort"
            assert 0 < whole.json()["usage"]["completion_tokens"] < 2000

    run(test)


def test_new_requests_are_an_internal_error_while_the_engine_shuts_down() -> None:
    async def test() -> None:
        async with running() as app:
            app.service.accepting = False
            call = await ask(app, "/v1/completions", TEXT)
            assert call.status == 500
            assert call.json()["error"]["message"] == "cannot schedule new futures after shutdown"
            assert (await ask(app, "/health", method="GET")).status == 200

    run(test)


# ---------------------------------------------------------------- as SGLang

SGLANG = replace(SETTINGS, sglang=SglangOptions(enable_priority_scheduling=True))


def test_as_sglang_it_says_its_flags_and_its_load_under_sglangs_names() -> None:
    async def test() -> None:
        async with running(SGLANG) as app:
            for path in ("/server_info", "/get_server_info"):
                info = (await ask(app, path, method="GET")).json()
                assert (info["enable_priority_scheduling"], info["max_running_requests"]) == (True, 4)
                assert info["internal_states"] == [{"effective_max_running_requests_per_dp": 4}]
            await ask(app, "/v1/completions", TEXT)
            load = parse_sglang_metrics((await ask(app, "/metrics", method="GET")).text)
            assert load is not None
            assert (load.running, load.waiting, load.schedulers) == (0, 0, 1)
            assert (load.kv_tokens, load.completion_tokens_total) == (65 * 128, 3)
            assert (await ask(app, "/version", method="GET")).status == 404
            assert (await ask(app, "/v1/models", method="GET")).json()["data"][0]["owned_by"] == "sglang"

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "headers", "number"),
    [
        ("/v1/completions", TEXT, {}, None),
        ("/v1/completions", TEXT | {"priority": -7}, {"x-override-priority": "5"}, -7),
        ("/v1/chat/completions", CHAT | {"priority": -7}, {}, -7),
        ("/v1/chat/completions", CHAT | {"priority": -7}, {"x-override-priority": "5"}, 5),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, {}, None),
        ("/v1/embeddings", {"model": "tiny", "input": "x", "priority": 3}, {}, 3),
    ],
)
def test_as_sglang_it_takes_a_priority_from_where_sglang_does(
    path: str, body: Any, headers: dict[str, str], number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(SGLANG) as app:
            submit, seen = app.service.submit, []

            def noting(wanted: Sequence[Wanted], *, priority: int | None, request_id: str) -> Answer:
                seen.append(priority)
                return submit(wanted, priority=priority, request_id=request_id)

            monkeypatch.setattr(app.service, "submit", noting)
            assert (await ask(app, path, body, headers=headers)).status == 200
            assert seen == [number]

    run(test)


def test_as_sglang_a_header_that_is_no_number_is_refused_and_errors_have_its_shape() -> None:
    async def test() -> None:
        async with running(SGLANG, api_key="key") as app:
            key = {"authorization": "Bearer key"}
            call = await ask(app, "/v1/chat/completions", CHAT, headers=key | {"x-override-priority": "x"})
            assert (call.status, "x-override-priority" in call.json()["detail"]) == (400, True)
            call = await ask(app, "/v1/completions", TEXT | {"max_tokens": -1}, headers=key)
            assert (call.status, call.json()["object"], call.json()["code"]) == (400, "error", 400)
            assert (await ask(app, "/server_info", method="GET")).status == 401
            assert (await ask(app, "/health", method="GET")).status == 200

    run(test)


def test_as_sglang_who_leaves_is_aborted_and_a_better_one_displaces_who_runs() -> None:
    async def test() -> None:
        async with running(SGLANG) as app:
            long = TEXT | {"max_tokens": 1000, "stream": True}
            calls = [Call(app, "/v1/completions", long | {"priority": -20}) for _ in range(4)]
            await until(lambda: all(call.chunks for call in calls))
            better = await ask(app, "/v1/completions", TEXT | {"priority": 0})
            assert better.status == 200
            assert app.service.unfinished == 4  # it did not wait for one of them
            for call in calls:
                call.leave()
                await call.done()
            assert app.service.unfinished == 0

    run(test)
