"""What engines report of tokens, and what it costs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.wire.usage import (
    ANSWER_END_BYTES,
    FINISH_REASONS,
    MAX_ANSWER_BYTES,
    AnswerTail,
    CostWeights,
    Usage,
    answer_fields,
    read_answer,
    reported_failure,
    reported_finish,
    reported_usage,
)


def tail_of(body: bytes, *, size: int = 1 << 16) -> AnswerTail:
    tail = AnswerTail()
    for at in range(0, len(body), size):
        tail.feed(body[at : at + size])
    tail.finish()
    return tail


def usage_of(answer: object) -> Usage | None:
    return tail_of(json.dumps(answer).encode()).usage


def test_cost_counts_cached_tokens_as_a_part_of_the_prompt() -> None:
    # 100 - 60 computed at 1, 60 cached at 0.1, 10 generated at 2: 40 + 6 + 20.
    assert CostWeights().cost_units(Usage(100, 60, 10)) == pytest.approx(66.0)
    gpu_seconds = CostWeights(prompt=0.001, cached=0.0, completion=0.02, unit="gpu_seconds")
    assert gpu_seconds.cost_units(Usage(100, 60, 10)) == pytest.approx(0.24)
    assert CostWeights().cost_units(Usage()) == 0.0


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        # vLLM chat and completions, with and without prompt details.
        ({"prompt_tokens": 401, "total_tokens": 421, "completion_tokens": 20}, Usage(401, 0, 20)),
        (
            {
                "prompt_tokens": 401,
                "total_tokens": 421,
                "completion_tokens": 20,
                "prompt_tokens_details": {"cached_tokens": 384},
            },
            Usage(401, 384, 20),
        ),
        (
            {"prompt_tokens": 401, "total_tokens": 421, "completion_tokens": 20, "prompt_tokens_details": None},
            Usage(401, 0, 20),
        ),
        ({"prompt_tokens": 5, "completion_tokens": None, "total_tokens": 5}, Usage(5, 0, 0)),
        # Embeddings, pooling, rerank, score.
        ({"prompt_tokens": 12, "total_tokens": 12}, Usage(12, 0, 0)),
        ({"total_tokens": 12}, Usage(12, 0, 0)),
        # Responses.
        (
            {
                "input_tokens": 20,
                "input_tokens_details": {"cached_tokens": 16},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 3},
                "total_tokens": 27,
            },
            Usage(20, 16, 7),
        ),
        # Messages: input_tokens are what is neither read from the cache nor written to it.
        ({"input_tokens": 4, "output_tokens": 7}, Usage(4, 0, 7)),
        ({"input_tokens": 4, "output_tokens": 7, "cache_read_input_tokens": 16}, Usage(20, 16, 7)),
        (
            {
                "input_tokens": 4,
                "output_tokens": 7,
                "cache_read_input_tokens": 16,
                "cache_creation_input_tokens": 10,
            },
            Usage(30, 16, 7),
        ),
        # Audio: seconds of the upload, or tokens.
        ({"type": "duration", "seconds": 30}, Usage(1500, 0, 0)),
        ({"type": "tokens", "input_tokens": 9, "output_tokens": 3, "total_tokens": 12}, Usage(9, 0, 3)),
        # Nonsense counts nothing, and never less than nothing.
        ({"prompt_tokens": -5, "completion_tokens": "many"}, Usage(0, 0, 0)),
        ({"prompt_tokens": 1e300, "completion_tokens": 3}, Usage(0, 0, 3)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}, "completion_tokens": 1}, Usage(5, 5, 1)),
        ({"prompt_tokens": 5, "prompt_tokens_details": [9], "completion_tokens": 1}, Usage(5, 0, 1)),
        ({}, None),
        (None, None),
    ],
)
def test_usage_is_read_from_every_endpoints_answer(usage: object, expected: Usage | None) -> None:
    assert usage_of({"id": "x", "choices": [], "usage": usage}) == expected


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"not json", b'{"usage":5}', b'{"usage":', b"\xff\xfe"])
def test_an_answer_without_a_usage_that_makes_sense_has_none(body: bytes) -> None:
    tail = tail_of(body)
    assert tail.usage is None
    assert tail.failure is None


def test_a_text_in_the_answer_is_never_taken_for_its_usage() -> None:
    text = '"usage":{"prompt_tokens":1,"completion_tokens":1}'
    answer = {"choices": [{"message": {"content": text}, "usage": {"prompt_tokens": 1}}]}
    assert usage_of(answer) is None


@given(st.integers(1, 500))
def test_an_answer_in_pieces_is_the_same_answer(size: int) -> None:
    body = json.dumps({"choices": [{"text": "x" * 200}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    assert tail_of(body.encode(), size=size).usage == Usage(5, 0, 3)


def long_answer(last: dict[str, object]) -> bytes:
    data = [{"index": index, "embedding": [0.123456] * 1000} for index in range(200)]
    return json.dumps({"object": "list", "data": data, **last}).encode()


@pytest.mark.parametrize("size", [1 << 16, 4_321])
def test_of_a_long_answer_only_the_end_is_kept_and_usage_is_still_found(size: int) -> None:
    body = long_answer(
        {"usage": {"prompt_tokens": 800, "total_tokens": 800, "prompt_tokens_details": {"cached_tokens": 16}}}
    )
    assert len(body) > MAX_ANSWER_BYTES
    assert tail_of(body, size=size).usage == Usage(800, 16, 0)


def test_in_the_end_of_a_long_answer_an_escaped_usage_is_text() -> None:
    text = '"usage":{"prompt_tokens":1}'
    body = long_answer({"usage": {"prompt_tokens": 800, "completion_tokens": 0}, "system_fingerprint": text})
    assert tail_of(body).usage == Usage(800, 0, 0)
    assert tail_of(long_answer({"note": text})).usage is None
    assert tail_of(long_answer({'a key of "usage': {"prompt_tokens": 1}})).usage is None


def test_a_long_answers_memory_is_bounded() -> None:
    tail = AnswerTail()
    for _ in range(100):
        tail.feed(b"x" * 65_536)
        assert len(tail._body) <= MAX_ANSWER_BYTES
    tail.feed(b"x" * 65_536)
    assert len(tail._body) <= 3 * ANSWER_END_BYTES


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ({"choices": [{"finish_reason": "abort"}]}, "engine aborted: finish_reason is abort"),
        (
            {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]},
            "engine aborted: finish_reason is abort",
        ),
        ({"type": "message", "stop_reason": "abort"}, "engine aborted: stop_reason is abort"),
        ({"error": {"message": "boom", "code": 500}}, "engine error: boom"),
        ({"error": "boom"}, "engine error: boom"),
        ({"status": "failed", "error": {"code": "server_error", "message": "boom"}}, "engine error: boom"),
        ({"error": {"message": "x" * 1000}}, "engine error: " + "x" * 200),
        ({"choices": [{"finish_reason": "stop"}], "error": None}, None),
        ({"choices": [{"finish_reason": None}]}, None),
        ({"status": "completed"}, None),
    ],
)
def test_an_engines_own_failure_inside_a_200_is_seen(answer: object, failure: str | None) -> None:
    assert tail_of(json.dumps(answer).encode()).failure == failure


def test_two_reports_of_one_request_join_to_the_larger_counts() -> None:
    assert Usage(20, 16, 0).joined(Usage(0, 0, 7)) == Usage(20, 16, 7)
    assert Usage(20, 0, 3).joined(Usage(20, 8, 5)) == Usage(20, 8, 5)
    assert Usage(20, 16, 7).joined(None) == Usage(20, 16, 7)


ODD = st.sampled_from([None, 0, 1, 7, -1, 2.5, True, "9", [], {}, 10**15, 10**16])


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "usage": st.none()
            | st.fixed_dictionaries(
                {},
                optional={
                    "prompt_tokens": ODD,
                    "completion_tokens": ODD,
                    "total_tokens": ODD,
                    "prompt_tokens_details": ODD | st.fixed_dictionaries({"cached_tokens": ODD}),
                    "input_tokens": ODD,
                    "output_tokens": ODD,
                    "cache_read_input_tokens": ODD,
                },
            ),
            "choices": st.none()
            | st.lists(st.fixed_dictionaries({"finish_reason": st.sampled_from([None, "stop", "abort", "odd", 3])})),
            "error": st.sampled_from([None, "bad", {"message": "worse"}, 3]),
            "stop_reason": st.sampled_from([None, "abort", "end_turn"]),
            "message": st.sampled_from([None, "text"]),
        },
    )
)
def test_the_short_way_of_plain_answers_says_what_the_long_way_says(answer: object) -> None:
    body = json.dumps(answer).encode()
    fields = answer_fields(body)
    if fields is None:
        assert read_answer(body) == (None, None, "")
    else:
        assert read_answer(body) == (reported_usage(fields), reported_failure(fields), reported_finish(fields))
        assert reported_finish(fields) in {"", *FINISH_REASONS}


@pytest.mark.parametrize(
    ("answer", "finish_reason"),
    [
        ({"choices": [{"finish_reason": "length"}]}, "length"),
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "tool_calls"}]}, "tool_calls"),
        ({"choices": [{"finish_reason": "words of a prompt"}]}, "other"),
        ({"choices": [{"finish_reason": None}]}, ""),
        ({"choices": [{"finish_reason": 3}]}, ""),
        ({"stop_reason": "end_turn", "type": "message"}, "stop"),
        ({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}, "length"),
        ({"type": "message_delta", "delta": "odd"}, ""),
        ({"type": "content_block_delta", "delta": {"stop_reason": "max_tokens"}}, ""),
        ({"status": "completed", "object": "response"}, "stop"),
        ({"type": "response.incomplete", "response": {"status": "incomplete"}}, "length"),
        ({"type": "response.created", "response": {"status": "in_progress"}}, ""),
        ({"data": []}, ""),
    ],
)
def test_why_an_engine_stopped_is_one_of_a_few_words(answer: object, finish_reason: str) -> None:
    assert read_answer(json.dumps(answer).encode())[2] == finish_reason
