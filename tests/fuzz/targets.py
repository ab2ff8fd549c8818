"""What is fuzzed. Each target takes a source of random numbers and raises if something is wrong."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fairshare.core.decisions import Mode
from fairshare.gateway.options import Limits
from fairshare.wire.body import inspect_body, rewrite_body
from fairshare.wire.endpoints import ENDPOINTS, BodyKind
from fairshare.wire.headers import read_request_headers, read_response_headers
from fairshare.wire.multipart import FormReader
from fairshare.wire.prefix import prefix_keys
from fairshare.wire.problems import RequestProblem
from fairshare.wire.sse import StreamTail
from fairshare.wire.usage import AnswerTail
from gateway.hostile_engine import (
    DONE,
    END,
    STREAM_HEAD,
    Asked,
    Script,
    Wire,
    answer,
    chat,
    chunk,
    completion,
    event,
    usage_event,
)
from gateway.rig import STREAM, Client, Rig, request_bytes, run

PRIORITY = 11
SECRETS = (b"fs-red", b"fs-blue", b"canary-cookie")

# ---------------------------------------------------------------------- random bytes

TOKENS = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b"\xef\xbb\xbf", b" "),
    *(b"0", b"-1", b"1e400", b"9" * 40, b"null", b"true", b"NaN", b"priority", b"pri\\u006frity", b"\\ud800", b"--b"),
    *(b"data:", b"event: ", b"[DONE]", b"content-length", b"transfer-encoding: chunked", b"0\r\n\r\n", b"\r\n\r\n"),
]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Some bytes of `data` changed, doubled, cut or replaced by what parsers trip over."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        place = rng.randint(0, len(changed))
        match rng.randrange(6):
            case 0 if changed:
                changed[place % len(changed)] = rng.randrange(256)
            case 1:
                changed[place:place] = rng.choice(TOKENS)
            case 2:
                del changed[place : place + rng.randint(1, 20)]
            case 3:
                changed[place:place] = changed[place : place + rng.randint(1, 60)]
            case 4:
                changed[place : place + rng.randint(0, 5)] = rng.choice(TOKENS)
            case _:
                del changed[place:]
    return bytes(changed)


def split(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces; in single bytes now and then."""
    if rng.random() < 0.1:
        return [data[place : place + 1] for place in range(len(data))]
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((0, 1, 2, 5))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def any_json(rng: random.Random, depth: int = 3) -> Any:
    match rng.randrange(8 if depth else 6):
        case 0:
            return rng.choice((0, 1, -1, 2**63, 10**30, 1.5))
        case 1:
            return rng.choice((None, True, False))
        case 2 | 3 | 4:
            return rng.choice(("", "1", "on", "flex", "priority", "ü\ud7ff", "x" * 300))
        case 5:
            return "auto"
        case 6:
            return [any_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        case _:
            return {rng.choice(("a", "type", "include_usage", "priority")): any_json(rng, depth - 1) for _ in range(2)}


MEMBERS = (
    *("messages", "prompt", "input", "n", "best_of", "stream", "stream_options", "max_tokens", "service_tier", "tools"),
    *("priority", "documents", "text_1", "store", "previous_response_id", "encoding_format", "use_beam_search"),
)


def any_body(rng: random.Random) -> bytes:
    members = [("model", "tiny"), *((rng.choice(MEMBERS), any_json(rng)) for _ in range(rng.randint(0, 6)))]
    rng.shuffle(members)
    text = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members)
    return b"{" + text.encode("utf-8", "surrogatepass") + b"}"


# ---------------------------------------------------------------------- parsers


def body(rng: random.Random) -> None:
    """Whatever a client sends, the engine reads our priority and nothing else that was not sent."""
    endpoint = rng.choice([each for each in ENDPOINTS if each.body is BodyKind.JSON])
    sent = mutated(rng, any_body(rng))
    try:
        facts = inspect_body(endpoint, sent)
        rewritten = rewrite_body(endpoint, sent, facts, priority=PRIORITY, served_name="served")
    except RequestProblem:
        return
    assert facts.slots >= 1
    if facts.prompt is not None:
        prefix_keys("tiny", memoryview(facts.prompt))
    try:
        expected = json.loads(sent)
    except (ValueError, RecursionError):
        return  # values that nobody here reads are not decoded; what is wrong in them the engine refuses
    read = json.loads(rewritten)
    assert read["model"] == "served"
    assert read.get("priority") == (PRIORITY if endpoint.priority_in_body else None)
    for name in expected.keys() | read.keys() - {"priority", "model", "stream_options"}:
        if name not in {"priority", "model", "stream_options"}:
            assert repr(expected[name]) == repr(read[name])  # repr: NaN is not equal to itself


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\x01\r\n--b--\r\n'
)


def form(rng: random.Random) -> None:
    """A form is refused or understood, and in the same way however it is cut into pieces."""

    def read(pieces: list[bytes]) -> tuple[str | None, bool]:
        reader = FormReader(b"multipart/form-data; boundary=b")
        try:
            for piece in pieces:
                reader.feed(piece)
            reader.end()
            return reader.facts().model, True
        except RequestProblem:
            return None, False

    sent = mutated(rng, FORM)
    assert read([sent]) == read(split(rng, sent))


def stream(rng: random.Random) -> None:
    """What is not stripped is relayed byte for byte, however the stream is cut; only the usage event is stripped."""
    broken = b"event: x\ndata: {\n\n"
    ordinary = b'data: {"choices":[{"index":0,"delta":{"content":"hello"},"finish_reason":null}]}\n\n'
    events = [ordinary, event("hello"), b": comment\r\n\r\n", event("", finish="stop"), usage_event(), DONE, broken]
    sent = mutated(rng, b"".join(rng.choice(events) for _ in range(rng.randint(1, 8))))
    strip = rng.random() < 0.5
    whole, cut = StreamTail(strip_usage=strip), StreamTail(strip_usage=strip)
    relayed = whole.feed(sent) + whole.finish()
    pieces = split(rng, sent) if rng.random() < 0.5 else re.findall(rb".*?\n\n|.+", sent, re.DOTALL)
    in_pieces = b"".join(piece if cut.passes(chunk(piece)) else cut.feed(piece) for piece in pieces) + cut.finish()
    assert relayed == in_pieces
    assert (whole.usage, whole.failure) == (cut.usage, cut.failure)
    assert strip or relayed == sent
    assert len(relayed) <= len(sent)


def tail(rng: random.Random) -> None:
    """The usage of an answer is the same however it is cut."""
    sent = mutated(rng, completion(text="x" * rng.choice((1, 70_000))))
    whole, cut = AnswerTail(), AnswerTail()
    for piece in split(rng, sent):
        cut.feed(piece)
    whole.feed(sent)
    whole.finish()
    cut.finish()
    assert (whole.usage, whole.failure) == (cut.usage, cut.failure)


SECRET_NAMES = (b"authorization", b"x-api-key", b"Cookie", b"X-Goog-Api-Key")
NAMES = (
    *(
        b"content-length",
        b"Transfer-Encoding",
        b"X-Vllm-Priority",
        b"connection",
        b"content-encoding",
        b"expect",
        b"te",
    ),
    *(b"x-fairshare-class", b"x-request-id", b"accept", b"user-agent", b"traceparent"),
)
VALUES = (b"", b"1", b"0", b"chunked", b"identity", b"batch", b"close, accept", b"100-continue", b"a\r\nx: y")


def headers(rng: random.Random) -> None:
    """No header of a client's or an engine's carries a secret, a priority or a second line across."""
    pairs = [(rng.choice(NAMES), mutated(rng, rng.choice(VALUES))) for _ in range(rng.randint(0, 8))]
    pairs += [(rng.choice(SECRET_NAMES), b"Bearer canary") for _ in range(rng.randint(0, 2))]
    rng.shuffle(pairs)
    lines = [read_response_headers(list(pairs)).lines]
    with suppress(RequestProblem):
        lines.append(read_request_headers(list(pairs)).forwarded)
    for block in lines:
        for line in block.split(b"\r\n")[:-1]:
            name = line.partition(b":")[0].lower()
            assert name not in {b"x-vllm-priority", b"transfer-encoding", b"content-length", b"connection", b"te", b"x"}
            assert b"\n" not in line
            assert b"\r" not in line
    if len(lines) == 2:
        assert b"canary" not in lines[1]


# ---------------------------------------------------------------------- the relay, over sockets


def engine_script(rng: random.Random, faults: list[str]) -> Script:
    """Answers as an engine might at its worst; writes down what should never have reached it."""

    async def script(asked: Asked, wire: Wire) -> None:
        seen = asked.raw_head + asked.body
        faults.extend(f"{secret!r} reached the engine" for secret in SECRETS if secret in seen)
        if asked.headers.get("authorization") != "Bearer engine-secret":
            faults.append(f"the engine's key was {asked.headers.get('authorization')!r}")
        told = asked.headers.get("x-vllm-priority")
        if asked.path == "/v1/chat/completions" and asked.json.get("priority") != (None if told is None else int(told)):
            faults.append(f"the body says {asked.json.get('priority')!r}, the header {told!r}")
        whole = rng.choice(
            (
                answer(completion()),
                answer(b'{"error":{"message":"busy"}}', status="503 Busy", headers=b"retry-after: 1\r\n"),
                STREAM_HEAD + chunk(event("hel") + event("lo")) + chunk(usage_event()) + chunk(DONE) + END,
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + completion(),
            )
        )
        await wire.send(*split(rng, mutated(rng, whole)))
        match rng.randrange(4):
            case 0:
                wire.close()
            case 1:
                wire.reset()
            case 2:
                await asyncio.Event().wait()
            case _:
                pass

    return script


def client_bytes(rng: random.Random) -> bytes:
    """One to three requests of a client, good ones and others."""
    sent = b""
    for _ in range(rng.randint(1, 3)):
        content: Any = rng.choice((None, STREAM, any_body(rng), b"{}"))
        path = rng.choice(("/v1/chat/completions",) * 4 + ("/v1/completions", "/v1/models", "/tokenize", "/nowhere"))
        extra = rng.choice(({}, {"x-vllm-priority": "-9", "cookie": "canary-cookie"}, {"connection": "close"}))
        one = request_bytes(path, content, key=rng.choice(("fs-red", "fs-blue", "fs-wrong", None)), headers=extra)
        sent += mutated(rng, one) if rng.random() < 0.5 else one
    return sent


async def hostile_client(rng: random.Random, client: Client) -> None:
    try:
        await client.send(*split(rng, client_bytes(rng)))
        for _ in range(rng.randint(0, 3)):
            await client.read()
    except (ConnectionError, EOFError, ValueError, IndexError):
        pass
    if rng.random() < 0.5:
        client.leave()


def relay(rng: random.Random) -> None:
    """After hostile clients and engines nothing is left, nothing has leaked, and the next request works."""

    async def main() -> None:
        limits = Limits(max_body_bytes=4096, max_header_bytes=2048)
        async with Rig.started(engines=2, mode=rng.choice(tuple(Mode)), capacity=4, limits=limits) as rig:
            faults: list[str] = []
            for engine in rig.engines:
                engine.script = engine_script(rng, faults)
            clients = [await rig.client() for _ in range(rng.randint(1, 5))]
            tasks = [asyncio.ensure_future(hostile_client(rng, client)) for client in clients]
            await asyncio.wait(tasks, timeout=0.02)
            for _ in range(4):  # every timeout of the gateway passes
                rig.later(4000.0)
                await asyncio.wait(tasks, timeout=0.005)
            for client in clients:
                client.leave()
            await asyncio.wait(tasks, timeout=5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for engine in rig.engines:
                engine.script = chat
            assert (await rig.ask()).status == 200
            assert faults == []

    run(main)


TARGETS: dict[str, Callable[[random.Random], None]] = {
    each.__name__: each for each in (body, form, stream, tail, headers, relay)
}


def play(target: str, seed: int) -> None:
    """One case; the seed says all of it (but for when sockets deliver)."""
    TARGETS[target](random.Random(f"{target} {seed}"))
