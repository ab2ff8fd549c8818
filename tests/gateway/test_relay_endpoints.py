"""Every endpoint goes through, in its own shape."""

import json
from typing import Any

import pytest

from fairshare.gateway.ports import Outcome
from fairshare.wire.endpoints import ENDPOINTS, BodyKind, Kind
from gateway.hostile_engine import END, STREAM_HEAD, answer, chunk, sends
from gateway.rig import Rig, request_bytes, run

ASKED: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"messages": [], "n": 2}, 2),
    "/v1/completions": ({"prompt": ["a", "b", "c"], "n": 2}, 6),
    "/v1/responses": ({"input": "hi", "store": False}, 1),
    "/v1/messages": ({"messages": [], "max_tokens": 9}, 1),
    "/v1/embeddings": ({"input": ["a", "b"], "encoding_format": "base64"}, 2),
    "/pooling": ({"input": "a"}, 1),
    "/v1/rerank": ({"query": "q", "documents": ["a", "b", "c"]}, 3),
    "/v1/score": ({"text_1": "a", "text_2": ["b", "c"]}, 2),
}
"""Path → what is asked, and the slots that takes."""


def test_the_table_of_this_test_is_complete() -> None:
    taken = {e.path for e in ENDPOINTS if e.takes_slots and e.body is BodyKind.JSON}
    assert taken <= set(ASKED) | {"/score", "/rerank", "/v2/rerank"}


@pytest.mark.parametrize("path", ASKED)
def test_a_json_endpoint_goes_through_with_its_slots_and_our_priority(path: str) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            body, slots = ASKED[path]
            said = json.dumps({"data": "AAAA", "usage": {"prompt_tokens": 7, "total_tokens": 7}}).encode()
            rig.engine.script = sends(answer(said))
            client = await rig.client()
            await client.send(request_bytes(path, body | {"model": "tiny", "priority": -9}))
            reply = await client.read()
            assert (reply.status, reply.body) == (200, said)
            asked = rig.engine.asked[0]
            assert asked.path == path
            assert asked.headers["x-vllm-priority"] == reply.headers["x-fairshare-priority"]
            endpoint = next(e for e in ENDPOINTS if e.path == path)
            expected = int(reply.headers["x-fairshare-priority"]) if endpoint.priority_in_body else None
            assert asked.json.get("priority") == expected
            record = await rig.kept.wait(1)
            assert (record.slots, record.prompt_tokens, record.cost_units) == (slots, 7, 7.0)

    run(main)


@pytest.mark.parametrize("path", [e.path for e in ENDPOINTS if e.kind is Kind.TOKENS])
def test_an_endpoint_of_tokens_goes_through_without_a_slot(path: str) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(answer(b'{"count":3}'))
            client = await rig.client()
            await client.send(request_bytes(path, {"model": "tiny"}))
            reply = await client.read()
            assert (reply.status, reply.body) == (200, b'{"count":3}')
            assert "x-fairshare-standing" not in reply.headers
            assert (await rig.kept.wait(1)).slots == 0

    run(main)


def test_anthropics_endpoint_gets_anthropics_errors_in_answers_and_in_streams() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask("/v1/messages", {"model": "nope", "messages": []})
            assert reply.json["type"] == "error"
            assert reply.json["error"]["type"] == "not_found_error"
            start = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":9}}}\n\n'
            rig.engine.script = sends(STREAM_HEAD, chunk(start), then="reset")
            reply = await rig.ask("/v1/messages", {"model": "tiny", "messages": [], "stream": True, "max_tokens": 5})
            assert reply.body.startswith(start)
            assert b'event: error\ndata: {"type":"error"' in reply.body
            assert (await rig.kept.wait(2)).outcome is Outcome.FAILED

    run(main)


def test_anthropics_stream_is_relayed_whole_and_counted() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            events = (
                b'event: message_start\ndata: {"type":"message_start","message":{"usage":'
                b'{"input_tokens":9,"output_tokens":0}}}\n\n'
                b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":'
                b'{"type":"text_delta","text":"hi"}}\n\n'
                b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
                b'"usage":{"output_tokens":4}}\n\n'
                b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
            )
            rig.engine.script = sends(
                STREAM_HEAD, *[chunk(events[at : at + 50]) for at in range(0, len(events), 50)], END
            )
            reply = await rig.ask("/v1/messages", {"model": "tiny", "messages": [], "stream": True, "max_tokens": 5})
            assert reply.body == events
            record = await rig.kept.wait(1)
            assert (record.prompt_tokens, record.completion_tokens) == (9, 4)

    run(main)


def test_a_huge_embeddings_answer_comes_back_unchanged_and_is_counted() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            said = (
                b'{"data":[{"embedding":"' + b"QUJD" * 2_000_000 + b'"}],"usage":{"prompt_tokens":8,"total_tokens":8}}'
            )
            rig.engine.script = sends(answer(said))
            reply = await rig.ask("/v1/embeddings", {"model": "tiny", "input": "a"})
            assert reply.body == said
            assert (await rig.kept.wait(1)).prompt_tokens == 8

    run(main)
