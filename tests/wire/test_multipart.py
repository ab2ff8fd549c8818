"""Uploads that are read while they pass through."""

import asyncio
import io
from collections.abc import AsyncGenerator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from fairshare.wire.body import MAX_SLOTS
from fairshare.wire.multipart import MAX_FIELD_BYTES, FormReader
from fairshare.wire.problems import INVALID_REQUEST, UNSUPPORTED_MEDIA_TYPE, RequestProblem

CONTENT_TYPE = b"multipart/form-data; boundary=XX"
AUDIO = bytes(range(256)) * 40


def field(name: str, value: str, head: str = "") -> bytes:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{head}\r\n\r\n{value}\r\n'.encode()


def upload(data: bytes = AUDIO, name: str = "file") -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = b"--XX--\r\n"


def read(form: bytes, *, size: int = 1 << 16, content_type: bytes = CONTENT_TYPE) -> FormReader:
    reader = FormReader(content_type)
    for at in range(0, len(form), size):
        reader.feed(form[at : at + size])
    reader.end()
    return reader


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_the_fields_that_decide_are_read_however_the_form_is_split(size: int) -> None:
    form = field("model", "whisper") + field("stream", "true") + field("n", "3") + upload() + END
    facts = read(form, size=size).facts()
    assert (facts.model, facts.stream, facts.slots, facts.wants_usage) == ("whisper", True, 3, False)


def test_a_form_is_ready_when_the_model_is_known_and_the_file_begins() -> None:
    reader = FormReader(CONTENT_TYPE)
    reader.feed(field("model", "whisper"))
    assert not reader.ready
    reader.feed(upload()[:200])
    assert reader.ready
    assert reader.facts().model == "whisper"


def test_a_form_with_the_file_first_is_ready_at_its_end() -> None:
    reader = FormReader(CONTENT_TYPE)
    reader.feed(upload() + field("model", "whisper"))
    assert not reader.ready or reader.facts().model == "whisper"
    reader.feed(END)
    assert reader.ready
    assert reader.facts().model == "whisper"


def test_a_form_without_a_model_says_so_at_its_end() -> None:
    reader = read(upload() + END)
    assert reader.ready
    assert reader.facts().model is None


def test_memory_stays_small_while_a_file_passes() -> None:
    reader = FormReader(CONTENT_TYPE)
    reader.feed(field("model", "whisper") + upload()[:200])
    for _ in range(100):
        reader.feed(b"\r\n--X" * 10_000)
        assert len(reader._buffer) < 100


@pytest.mark.parametrize("late", ["model", "stream", "n", "stream_include_usage", "priority"])
def test_a_deciding_field_after_the_request_was_sent_on_is_refused(late: str) -> None:
    reader = FormReader(CONTENT_TYPE)
    with pytest.raises(RequestProblem) as caught:
        reader.feed(field("model", "whisper") + upload() + field(late, "1"))
    assert caught.value.problem is INVALID_REQUEST
    assert late in caught.value.message


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (field("model", "a") + field("model", "b") + upload() + END, "twice"),
        (field("stream", "true") + field("stream", "true") + END, "twice"),
        (field("priority", "-5") + upload() + END, "priority"),
        (upload(name="model") + END, "'model' is a file"),
        (field("model", "x" * (MAX_FIELD_BYTES + 1)) + END, "longer"),
        (field("model", "x" * (MAX_FIELD_BYTES + 100_000)) + END, "longer"),
        (b"--XX\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n" + END, "not understood"),
        (b"--XX\r\nContent-Disposition: form-data; name='model'\r\n\r\na\r\n" + END, "not understood"),
        (b'--XX\r\nContent-Disposition: form-data; filename="a"; name="model"\r\n\r\na\r\n' + END, "not understood"),
        (b'--XX\r\nContent-Disposition: form-data; name="a"; name="model"\r\n\r\na\r\n' + END, "not understood"),
        (b'--XX\r\nContent-Disposition: form-data; name="mo\\del"\r\n\r\na\r\n' + END, "not understood"),
        (
            b'--XX\r\nContent-Disposition: form-data; name="a"\r\n'
            b'Content-Disposition: form-data; name="model"\r\n\r\na\r\n' + END,
            "not understood",
        ),
        (b'--XX\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\na\r\n' + END, "not"),
        (b'--XX\r\nContent-Disposition: form-data; name="model"\nX: y\r\n\r\na\r\n' + END, "no header"),
        (b'--XX\r\nContent-Disposition : form-data; name="model"\r\n\r\na\r\n' + END, "no header"),
        (b"--XX\r\nX: y\r\n\r\na\r\n" + END, "no Content-Disposition"),
        (
            b'--XX\r\nContent-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: base64\r\n\r\nYQ==\r\n'
            + END,
            "Transfer-Encoding",
        ),
        (b'--XX\r\nContent-Disposition: form-data; name="\xff"\r\n\r\na\r\n' + END, "UTF-8"),
        (b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n' + END, "UTF-8"),
        (b"--XX\r\n" + b"X" * 10_000, "longer"),
        (b"preamble\r\n" + field("model", "a") + END, "begin"),
        (b"p" * 10_000, "begin"),
        (b"--YY\r\n" * 3, "begin"),
        (field("model", "a") + b"--XXX\r\n", "line end"),
        (field("model", "a"), "closing"),
        (b"", "closing"),
        (field("model", "a")[:-2], "closing"),
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_form_that_could_be_read_in_two_ways_is_refused(form: bytes, says: str, size: int) -> None:
    with pytest.raises(RequestProblem) as caught:
        read(form, size=size)
    assert caught.value.problem is INVALID_REQUEST
    assert says in caught.value.message


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b"multipart/mixed; boundary=XX",
        b'multipart/form-data; boundary="a',
    ],
)
def test_a_body_that_is_no_form_is_an_unsupported_media_type(content_type: bytes) -> None:
    with pytest.raises(RequestProblem) as caught:
        FormReader(content_type)
    assert caught.value.problem is UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize("content_type", [b'Multipart/Form-Data;boundary="XX"', b"multipart/form-data; boundary=XX "])
def test_boundaries_may_be_quoted(content_type: bytes) -> None:
    assert read(field("model", "a") + END, content_type=content_type).facts().model == "a"


@pytest.mark.parametrize("value", ["many", "1.5", str(MAX_SLOTS + 1), ""])
def test_a_number_of_beams_that_makes_no_sense_is_refused(value: str) -> None:
    with pytest.raises(RequestProblem) as caught:
        read(field("n", value) + END).facts()
    assert caught.value.param == "n"


@pytest.mark.parametrize("before", [b"", field("language", "en")])
def test_the_served_name_and_the_wish_for_usage_are_written_into_the_form(before: bytes) -> None:
    held = before + field("model", "whisper") + field("stream", "1") + upload()[:300]
    reader = FormReader(CONTENT_TYPE)
    reader.feed(held)
    assert reader.facts().stream
    sent = reader.rewrite(held, served_name="served/whisper", ask_usage=True)
    again = FormReader(CONTENT_TYPE)
    again.feed(sent)
    assert again.facts().model == "served/whisper"
    assert again.facts().wants_usage
    assert sent.endswith(before + field("model", "served/whisper") + field("stream", "1") + upload()[:300])
    assert reader.rewrite(held, served_name=None, ask_usage=False) == held


def test_a_clients_own_no_to_usage_is_replaced_in_place() -> None:
    held = field("stream_include_usage", "false") + field("model", "a") + upload()[:200]
    reader = FormReader(CONTENT_TYPE)
    reader.feed(held)
    sent = reader.rewrite(held, served_name="bb", ask_usage=True)
    assert sent == field("stream_include_usage", "true") + field("model", "bb") + upload()[:200]


def test_forms_of_common_clients_are_read() -> None:
    request = httpx.Request(
        "POST",
        "http://test",
        data={"model": "whisper", "language": "en", "timestamp_granularities[]": ["word", "segment"]},
        files={"file": ('a "b" ü.wav', io.BytesIO(AUDIO), "audio/wav")},
    )
    reader = read(request.read(), content_type=request.headers["content-type"].encode())
    assert reader.facts().model == "whisper"
    # curl and browsers; a client that also sends the RFC 5987 name.
    for name in ('filename="a\\"b.wav"', "filename=\"a\"; filename*=utf-8''%C3%BC.wav"):
        head = f'--XX\r\nContent-Disposition: form-data; name="file"; {name}\r\nContent-Type: audio/wav\r\n\r\n'
        form = field("model", "whisper") + head.encode() + AUDIO + b"\r\n" + END
        assert read(form).facts().model == "whisper"


# Against the parser that vLLM's server uses.

_line = st.sampled_from(
    [
        b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n',
        b'--XX\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\n',
        b'--XX\r\nContent-Disposition: form-data; name="stream"\r\n\r\n',
        b'--XX\r\nContent-Disposition: form-data; name="other"\r\n\r\n',
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n',
        b"tiny\r\n",
        b"big\r\n",
        b"\r\n",
        b"--XX\n",
        b"\n--XX\r\n",
        b"--XX",
        b"--XX--\r\n",
        b"--X",
        b"\r",
    ]
)


async def _model_at_the_engine(form: bytes) -> object:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield form

    parsed = await MultiPartParser(Headers({"content-type": CONTENT_TYPE.decode()}), stream()).parse()
    await parsed.close()
    return parsed.get("model")


@given(st.lists(_line, max_size=8).map(lambda lines: b"".join([*lines, END])))
def test_a_form_that_is_accepted_means_the_same_to_the_engine(form: bytes) -> None:
    try:
        facts = read(form).facts()
        model = asyncio.run(_model_at_the_engine(form))
    except (RequestProblem, MultiPartException):
        return
    assert facts.model == model
