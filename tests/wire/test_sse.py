"""Streams on their way to a client: nothing is lost, nothing is added, one event may be taken out."""

import json
import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.wire.sse import MAX_EVENT_BYTES, StreamTail
from fairshare.wire.usage import Usage

USAGE = {
    "prompt_tokens": 12,
    "total_tokens": 15,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def event(payload: object, *, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def piece(text: str, *, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, **more}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]})


def usage_event(**more: object) -> bytes:
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE, **more})


DONE = b"data: [DONE]\n\n"
STREAM = piece("") + piece(" Hello") + piece(" world") + piece("", finish="stop")


def relay(tail: StreamTail, chunks: Iterable[bytes]) -> bytes:
    relayed = b"".join([tail.feed(chunk) for chunk in chunks])
    return relayed + tail.finish()


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def test_whole_ordinary_events_come_out_as_the_very_objects_that_went_in() -> None:
    tail = StreamTail(strip_usage=True)
    tail.feed(piece(""))
    tail.feed(piece(" Hello"))
    for chunk in (piece(" more"), piece(" more", stop_reason=None), piece(" a") + piece(" b")):
        assert tail.feed(chunk) is chunk


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_the_usage_event_is_taken_out_however_the_stream_is_split(size: int, newline: bytes) -> None:
    stream = (STREAM + usage_event() + DONE).replace(b"\n", newline)
    tail = StreamTail(strip_usage=True)
    assert relay(tail, pieces_of(stream, size)) == (STREAM + DONE).replace(b"\n", newline)
    assert tail.usage == Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=3)
    assert tail.ended
    assert tail.failure is None


def test_the_usage_event_is_taken_out_of_the_middle_of_one_piece_too() -> None:
    tail = StreamTail(strip_usage=True)
    tail.feed(STREAM)
    assert tail.feed(piece(" a") + usage_event() + piece(" b")) == piece(" a") + piece(" b")
    assert tail.events == 6


@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_the_usage_event_stays_if_the_client_asked_for_it(size: int) -> None:
    stream = STREAM + usage_event() + DONE
    tail = StreamTail(strip_usage=False)
    chunks = pieces_of(stream, size)
    assert [tail.feed(chunk) for chunk in chunks] == chunks
    assert tail.finish() == b""
    assert tail.usage == Usage(12, 8, 3)


def test_usage_on_every_event_is_read_and_kept_and_the_largest_counts() -> None:
    def counted(tokens: int) -> bytes:
        usage = {"prompt_tokens": 12, "total_tokens": 12 + tokens, "completion_tokens": tokens}
        choices = [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]
        return event({"choices": choices, "usage": usage})

    stream = b"".join(counted(tokens) for tokens in range(6))
    tail = StreamTail(strip_usage=True)
    assert relay(tail, [stream]) == stream
    assert tail.usage == Usage(12, 0, 5)


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [], "usage": USAGE},
        {"usage": USAGE, "choices": []},
        {"id": "x", "usage": USAGE},
        {"choices": None, "usage": USAGE},
    ],
)
def test_a_usage_event_has_empty_null_or_no_choices(payload: object) -> None:
    tail = StreamTail(strip_usage=True)
    assert relay(tail, [STREAM, event(payload), DONE]) == STREAM + DONE
    assert tail.usage == Usage(12, 8, 3)


@pytest.mark.parametrize(
    "text",
    ['"usage"', '{"choices":[],"usage":{"prompt_tokens":9}}', 'ends with "usage', "[DONE]", '"error"', '"abort"'],
)
def test_a_text_that_speaks_of_usage_errors_or_the_end_is_only_text(text: str) -> None:
    tail = StreamTail(strip_usage=True)
    stream = STREAM + piece(text) + piece(text, finish="stop")
    assert relay(tail, [*pieces_of(STREAM, 50), stream[len(STREAM) :]]) == stream
    assert tail.usage is None
    assert tail.failure is None
    assert not tail.ended


def test_an_event_with_null_usage_is_kept() -> None:
    stream = STREAM + event({"choices": [], "usage": None}) + DONE
    assert relay(StreamTail(strip_usage=True), [stream]) == stream


def test_a_stream_without_a_blank_line_at_its_end_is_relayed_to_the_last_byte() -> None:
    stream = STREAM + b"data: [DONE]"
    tail = StreamTail(strip_usage=True)
    assert relay(tail, pieces_of(stream, 11)) == stream
    assert tail.ended


def test_a_usage_event_that_is_the_last_thing_and_has_no_blank_line_is_taken_out() -> None:
    tail = StreamTail(strip_usage=True)
    assert relay(tail, [STREAM, usage_event().rstrip()]) == STREAM
    assert tail.usage == Usage(12, 8, 3)


def test_a_stream_cut_inside_an_event_is_relayed_to_the_cut() -> None:
    cut = usage_event()[:60]
    tail = StreamTail(strip_usage=True)
    assert relay(tail, [STREAM, cut]) == STREAM + cut
    assert tail.usage is None
    assert not tail.ended


def test_comments_do_not_wait_for_an_event() -> None:
    tail = StreamTail(strip_usage=True)
    assert tail.feed(b": ping\n") == b": ping\n"
    assert tail.feed(b": pi") == b""
    assert tail.feed(b"ng\r\n") == b": ping\r\n"
    assert relay(tail, [STREAM, b": x\n", usage_event(), b": y\n\n", DONE]) == STREAM + b": x\n" + b": y\n\n" + DONE


def test_an_engine_error_inside_the_stream_is_a_failure_and_is_relayed() -> None:
    broken = event({"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}})
    tail = StreamTail(strip_usage=True)
    assert relay(tail, [STREAM, broken, DONE]) == STREAM + broken + DONE
    assert tail.failure == "engine error: EngineCore died"


def test_finish_reason_abort_is_a_failure() -> None:
    tail = StreamTail(strip_usage=True)
    relay(tail, [STREAM, piece("", finish="abort"), usage_event(), DONE])
    assert tail.failure == "engine aborted: finish_reason is abort"
    assert tail.usage == Usage(12, 8, 3)


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_stream_says_why_it_stopped(size: int) -> None:
    for finish, told in (("length", "length"), ("stop", "stop"), ("a word of its own", "other")):
        tail = StreamTail(strip_usage=False)
        relay(tail, pieces_of(piece(" a") * 3 + piece("", finish=finish) + usage_event() + DONE, size))
        assert tail.finish_reason == told
    tail = StreamTail(strip_usage=False)
    relay(tail, [piece("a"), piece("b"), piece("c", finish="length"), DONE])
    assert tail.finish_reason == "length"


def test_a_responses_stream_tells_its_usage_in_its_last_event() -> None:
    usage = {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 7,
        "total_tokens": 27,
    }
    stream = (
        event(
            {"type": "response.created", "response": {"id": "r", "usage": None, "error": None}}, name="response.created"
        )
        + event({"type": "response.output_text.delta", "delta": "Hi"}, name="response.output_text.delta")
        + event(
            {
                "type": "response.completed",
                "response": {"id": "r", "status": "completed", "error": None, "usage": usage},
            },
            name="response.completed",
        )
    )
    tail = StreamTail(strip_usage=False)
    assert relay(tail, pieces_of(stream, 33)) == stream
    assert tail.usage == Usage(20, 16, 7)
    assert tail.ended
    assert tail.failure is None


def test_a_failed_response_is_a_failure() -> None:
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x", "message": "boom"}}}
    tail = StreamTail(strip_usage=False)
    relay(tail, [event(failed, name="response.failed")])
    assert tail.failure == "engine error: boom"
    assert tail.ended


def test_an_anthropic_stream_tells_its_usage_in_two_events() -> None:
    start = {
        "type": "message_start",
        "message": {"id": "m", "usage": {"input_tokens": 4, "output_tokens": 0, "cache_read_input_tokens": 16}},
    }
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}}
    stream = (
        event(start, name="message_start")
        + event(delta, name="content_block_delta")
        + event(end, name="message_delta")
        + event({"type": "message_stop"}, name="message_stop")
    )
    tail = StreamTail(strip_usage=False)
    assert relay(tail, pieces_of(stream, 21)) == stream
    assert tail.usage == Usage(prompt_tokens=20, cached_tokens=16, completion_tokens=7)
    assert tail.ended


def test_an_anthropic_error_event_is_a_failure() -> None:
    tail = StreamTail(strip_usage=False)
    relay(tail, [event({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, name="error")])
    assert tail.failure == "engine error: busy"


@pytest.mark.parametrize("strip_usage", [True, False])
def test_an_upstream_that_never_ends_an_event_costs_bounded_memory_and_loses_no_byte(strip_usage: bool) -> None:
    tail = StreamTail(strip_usage=strip_usage)
    text = b"data: " + b"x" * (3 * MAX_EVENT_BYTES)
    relayed = bytearray()
    for chunk in pieces_of(text, 10_000):
        relayed += tail.feed(chunk)
        assert len(text[: len(relayed) + MAX_EVENT_BYTES + 10_000]) >= len(relayed)
    assert len(relayed) > 2 * MAX_EVENT_BYTES
    rest = usage_event() + DONE
    relayed += tail.feed(b"\r\n")
    relayed += relay(tail, [b"\r\n" + rest])
    assert bytes(relayed) == text + b"\r\n\r\n" + (DONE if strip_usage else rest)
    assert tail.usage == Usage(12, 8, 3)


def test_a_long_event_may_end_right_where_it_became_too_long() -> None:
    tail = StreamTail(strip_usage=True)
    text = b"data: " + b"x" * MAX_EVENT_BYTES + b"\n"
    assert relay(tail, [text, b"\n" + usage_event() + DONE]) == text + b"\n" + DONE


def test_text_bytes_are_those_of_the_texts_about() -> None:
    words = [" Hello", " wide", " world", ",", ' \\"quoted\\"', " and", " more"] * 30
    tail = StreamTail(strip_usage=True)
    relay(tail, [piece(""), *(piece(word) for word in words), piece("", finish="stop"), usage_event(), DONE])
    written = sum(len(json.dumps(word)) - 2 for word in words)
    assert tail.text_bytes == pytest.approx(written, rel=0.05)
    assert tail.events == len(words) + 2


def test_text_bytes_are_measured_on_a_cut_stream_in_small_pieces_too() -> None:
    stream = piece("") + b"".join(piece(" token") for _ in range(100))
    tail = StreamTail(strip_usage=True)
    relay(tail, pieces_of(stream, 17))
    assert tail.text_bytes == pytest.approx(600, rel=0.05)


def test_text_bytes_of_other_endpoints_are_measured() -> None:
    completions = b"".join(
        event({"choices": [{"index": 0, "text": " token", "finish_reason": None}]}) for _ in range(50)
    )
    responses = b"".join(event({"type": "response.output_text.delta", "delta": " token"}) for _ in range(50))
    delta = {"type": "text_delta", "text": " token"}
    messages = b"".join(event({"type": "content_block_delta", "delta": delta}) for _ in range(50))
    for stream in (completions, responses, messages):
        tail = StreamTail(strip_usage=False)
        relay(tail, [stream])
        assert tail.text_bytes == 300


# Any stream, any split: against a plain reading of the WHATWG rules.

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")


def stripped_by_hand(stream: bytes) -> bytes:
    blocks: list[bytes] = []
    block = b""
    for line in _LINE.findall(stream):
        if not block and (line.startswith(b":") or not line.strip(b"\r\n")):
            blocks.append(line)
            continue
        block += line
        if not line.strip(b"\r\n"):
            blocks.append(block)
            block = b""
    return b"".join(block for block in [*blocks, block] if not is_usage_event(block))


def is_usage_event(block: bytes) -> bool:
    data = b"\n".join(line.strip(b"\r\n")[5:] for line in _LINE.findall(block) if line.startswith(b"data:"))
    try:
        payload = json.loads(data)
    except ValueError:
        return False
    return isinstance(payload, dict) and isinstance(payload.get("usage"), dict) and not payload.get("choices")


_events = st.one_of(
    st.text(max_size=20).map(piece),
    st.sampled_from(
        [
            usage_event(),
            usage_event(system_fingerprint='"usage"'),
            DONE,
            b": ping\n",
            b": ping\n\n",
            b"\n",
            b"\r\n",
            b"\r",
            b"event: x\nid: 7\n" + usage_event(),
            b"data: " + usage_event().rstrip()[6:].replace(b",", b",\ndata: ", 1) + b"\n\n",
            b'data: not json, but "usage"\n\n',
            b"retry: 3\n\n",
            piece("x", finish="stop") + usage_event(),
        ]
    ),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    newline = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    stream = b"".join(draw(st.lists(_events, max_size=12))).replace(b"\n", newline)
    return stream[: len(stream) - draw(st.integers(0, 3))]


@given(streams(), st.data())
def test_for_any_split_the_relayed_bytes_are_those_of_a_plain_reading(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    tail = StreamTail(strip_usage=True)
    assert relay(tail, chunks) == stripped_by_hand(stream)
    kept = StreamTail(strip_usage=False)
    assert relay(kept, chunks) == stream
    assert kept.usage == tail.usage
    assert kept.failure == tail.failure
    assert kept.events == tail.events


@given(st.binary(max_size=200), st.integers(1, 20))
def test_garbage_is_relayed_as_it_is(garbage: bytes, size: int) -> None:
    assert relay(StreamTail(strip_usage=True), pieces_of(garbage, size)) == garbage


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def warm() -> StreamTail:
    tail = StreamTail(strip_usage=True)
    tail.feed(piece("") + piece(" Hello"))
    return tail


@pytest.mark.parametrize("length", [0, 1, 100, 3000, 5000, 70_000])
def test_a_whole_chunk_with_one_ordinary_event_passes_and_counts_as_if_it_had_been_fed(length: int) -> None:
    payload = piece("x" * length)
    passed, fed = warm(), warm()
    assert passed.passes(framed(payload))
    fed.feed(payload)
    assert (passed.events, passed.text_bytes) == (fed.events, fed.text_bytes)


ORDINARY = piece(" more")


@pytest.mark.parametrize(
    "data",
    [
        framed(ORDINARY)[:-1],
        framed(ORDINARY) + b"0",
        framed(ORDINARY) + framed(ORDINARY),
        b"0" + framed(ORDINARY),
        b"%X\r\n%b\r\n" % (len(ORDINARY) + 1, ORDINARY),
        b"%x;ext\r\n%b\r\n" % (len(ORDINARY), ORDINARY),
        b"%x\n%b\r\n" % (len(ORDINARY), ORDINARY),
        framed(ORDINARY + ORDINARY),
        framed(piece("", finish="stop")),
        framed(usage_event()),
        framed(DONE),
        framed(b""),
        b"",
        b"\r\n",
    ],
)
def test_what_is_not_exactly_one_chunk_with_one_ordinary_event_does_not_pass(data: bytes) -> None:
    tail = warm()
    events = tail.events
    assert not tail.passes(data)
    assert tail.events == events


def test_nothing_passes_while_an_event_is_not_complete() -> None:
    tail = warm()
    tail.feed(piece(" half")[:20])
    assert not tail.passes(framed(ORDINARY))
