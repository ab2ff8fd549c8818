"""Clients at their worst, and HTTP/1.1 as it is written."""

import asyncio
import json
import socket
import struct

import pytest

from fairshare.core.decisions import HoldOptions, Mode
from fairshare.core.priority import ServiceClass
from fairshare.gateway.data_port import MAX_BACKLOG_BYTES, MAX_PIPELINED
from fairshare.gateway.options import Limits
from fairshare.gateway.ports import Outcome
from gateway.hostile_engine import DONE, END, STREAM_HEAD, Asked, Wire, chunk, event, forever, sends
from gateway.rig import STREAM, Client, Rig, request_bytes, run, with_timeouts

SHORT = {"model": "tiny", "messages": []}

# ---------------------------------------------------------------------- who may ask what


@pytest.mark.parametrize("key", [None, "fs-unknown", "", "Bearer fs-red"])
def test_a_request_without_a_valid_key_is_answered_401_and_reaches_no_engine(key: str | None) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask(key=key)
            assert (reply.status, reply.code) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "allow" not in reply.headers
            assert rig.engine.asked == []
            record = await rig.kept.wait(1)
            assert (record.team, record.outcome, record.reason) == ("", Outcome.REFUSED, "invalid_api_key")

    run(main)


def test_a_key_in_x_api_key_is_as_good() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            assert (await rig.ask(key=None, headers={"x-api-key": "fs-red"})).status == 200

    run(main)


def test_no_header_of_a_client_that_could_be_a_secret_or_an_order_reaches_an_engine() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            names = [
                "cookie", "x-goog-api-key", "proxy-authorization", "x-vllm-priority", "X-VLLM-Priority",
                "x-fairshare-team", "x-tenant", "openai-organization", "te", "api-key",
            ]  # fmt: skip
            for name in names:
                reply = await rig.ask(headers={name: "canary"})
                assert reply.status == 200
            for asked in rig.engine.asked:
                assert b"canary" not in asked.raw_head
                assert b"fs-red" not in asked.raw_head
                assert asked.headers["x-vllm-priority"] == "0"
                assert asked.headers["authorization"] == "Bearer engine-secret"

    run(main)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","priority":-100,"messages":[]}',
        b'{"priority":-100,"model":"tiny","messages":[],"priority":"-5"}',
        b'{"model":"tiny","pri\\u006frity":-100,"messages":[]}',
        b'{"model":"tiny","messages":[]}',
    ],
)
def test_the_priority_in_the_body_is_ours(body: bytes) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            assert (await rig.ask(body=body)).status == 200
            pairs = json.loads(rig.engine.asked[0].body, object_pairs_hook=list)
            assert [value for name, value in pairs if name == "priority"] == [0]

    run(main)


@pytest.mark.parametrize(
    ("key", "header", "tier", "expected"),
    [
        ("fs-red", None, None, ServiceClass.INTERACTIVE),
        ("fs-red", "batch", None, ServiceClass.BATCH),
        ("fs-red", None, "flex", ServiceClass.BATCH),
        ("fs-red", "interactive", "flex", ServiceClass.BATCH),
        ("fs-red-batch", None, None, ServiceClass.BATCH),
        ("fs-red-batch", "interactive", None, ServiceClass.BATCH),
    ],
)
def test_the_service_class_is_what_is_asked_for_as_far_as_the_key_may(
    key: str, header: str | None, tier: str | None, expected: ServiceClass
) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            body = SHORT | ({"service_tier": tier} if tier else {})
            reply = await rig.ask(body=body, key=key, headers={"x-fairshare-class": header} if header else {})
            assert reply.headers["x-fairshare-priority"] == str(int(expected))
            assert (await rig.kept.wait(1)).service_class is expected

    run(main)


def test_a_model_that_is_unknown_or_not_for_the_key_is_answered_404_in_the_same_words() -> None:
    async def main() -> None:
        async with Rig.started(models={"tiny": "tiny", "other": "tiny"}) as rig:
            unknown = await rig.ask(body={"model": "nope", "messages": []}, key="fs-other")
            forbidden = await rig.ask(body={"model": "tiny", "messages": []}, key="fs-other")
            assert (unknown.status, unknown.code) == (404, "model_not_found")
            assert forbidden.json["error"]["message"] == unknown.json["error"]["message"].replace("nope", "tiny")
            assert (await rig.ask(body={"model": "other", "messages": []}, key="fs-other")).status == 200

    run(main)


def test_the_engine_is_asked_for_the_name_it_knows() -> None:
    async def main() -> None:
        async with Rig.started(models={"tiny": "org/tiny-v2"}) as rig:
            assert (await rig.ask()).status == 200
            assert rig.engine.asked[0].json["model"] == "org/tiny-v2"

    run(main)


def test_models_are_listed_once_for_who_may_use_them() -> None:
    async def main() -> None:
        async with Rig.started(models={"tiny": "t", "other": "o"}) as rig:
            rig.driver.models_seen("chat", rig.engine.url, {"t": 2048, "unrelated": 1})
            every = await rig.ask("/v1/models", method="GET")
            assert [card["id"] for card in every.json["data"]] == ["tiny", "other"]
            assert every.json["data"][0]["max_model_len"] == 2048
            assert [c["id"] for c in (await rig.ask("/v1/models", method="GET", key="fs-other")).json["data"]] == [
                "other"
            ]
            assert (await rig.ask("/v1/models/tiny", method="GET")).json["id"] == "tiny"
            assert (await rig.ask("/v1/models/tiny", method="GET", key="fs-other")).status == 404
            assert (await rig.ask("/v1/models", method="GET", key=None)).status == 401

    run(main)


@pytest.mark.parametrize("path", ["/", "/v2/chat", "/v1/chat/completions/", "//v1/chat/completions", "/metrics"])
def test_an_unknown_path_is_a_404_in_openais_shape(path: str) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask(path)
            assert (reply.status, reply.code) == (404, "not_found")
            assert set(reply.json["error"]) == {"message", "type", "param", "code"}

    run(main)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":1}', b'{"messages":[]}', b'{"model":"tiny","n":"x"}'])
def test_a_body_that_cannot_be_read_is_a_400_and_keeps_no_slot(body: bytes) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask(body=body)
            assert (reply.status, reply.code) == (400, "invalid_request")
            assert rig.engine.asked == []

    run(main)


def test_a_request_id_is_kept_if_it_is_harmless() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            assert (await rig.ask(headers={"x-request-id": "job-1.a_b"})).headers["x-request-id"] == "job-1.a_b"
            assert rig.engine.asked[0].headers["x-request-id"] == "job-1.a_b"
            assert (await rig.ask(headers={"x-request-id": "a b"})).headers["x-request-id"] != "a b"
            assert (await rig.ask(headers={"x-request-id": "a" * 65})).headers["x-request-id"] != "a" * 65

    run(main)


def test_two_requests_with_one_id_are_two_requests() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await go.wait()
                await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

            rig.engine.script = waits
            clients = [await rig.client() for _ in range(2)]
            for client in clients:
                await client.send(request_bytes(headers={"x-request-id": "same"}))
            await rig.engine.received(2)
            go.set()
            assert [(await client.read()).status for client in clients] == [200, 200]

    run(main)


# ---------------------------------------------------------------------- leaving


def leave_by_reset(client: Client) -> None:
    sock = client.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()


def leave_by_eof(client: Client) -> None:
    client.writer.write_eof()


@pytest.mark.parametrize("leave", [leave_by_reset, leave_by_eof, Client.leave])
@pytest.mark.parametrize("body", [SHORT, STREAM])
def test_a_client_that_leaves_before_the_answer_aborts_the_engine_at_once(leave: object, body: object) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = forever
            client = await rig.client()
            await client.send(request_bytes(body=body))
            asked = await rig.engine.received(1)
            assert callable(leave)
            leave(client)
            await asked.gone.wait()
            record = await rig.kept.wait(1)
            assert (record.outcome, record.status, record.reason) == (Outcome.CANCELLED, 0, "client_left")
            assert record.estimated

    run(main)


def test_what_a_stream_generated_until_its_client_left_is_charged_by_estimate() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            words = [event("word ") for _ in range(7)]
            rig.engine.script = sends(STREAM_HEAD, *[chunk(word) for word in words], then="stall")
            client = await rig.client()
            await client.send(request_bytes(body=STREAM))
            await client.read_head()
            for word in words:
                assert await client.read_chunk() == word
            client.leave()
            record = await rig.kept.wait(1)
            assert (record.estimated, record.completion_tokens, record.status) == (True, 9, 200)  # 35 bytes / 4
            assert record.prompt_tokens > 0
            assert record.cost_units == record.prompt_tokens + 2 * record.completion_tokens

    run(main)


def test_what_a_call_generated_until_its_client_left_is_estimated_from_time_up_to_max_tokens() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = forever
            for seconds, max_tokens, expected in [(2.0, None, 60), (2.0, 50, 50)]:
                client = await rig.client()
                await client.send(request_bytes(body=SHORT | ({"max_tokens": max_tokens} if max_tokens else {})))
                await rig.engine.received(len(rig.records) + 1)
                rig.clock.now += seconds
                client.leave()
                record = await rig.kept.wait(len(rig.records) + 1)
                assert record.completion_tokens == expected  # 30 tokens/s are assumed until they are measured

    run(main)


def test_the_estimate_uses_what_was_measured_of_the_instance() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            assert (await rig.ask()).status == 200  # 5 tokens in no time teach nothing
            rig.driver.pools["chat"].tokens_per_slot_second(rig.engine.url).add(100.0, 1.0)
            rig.engine.script = forever
            client = await rig.client()
            await client.send(request_bytes())
            await rig.engine.received(2)
            rig.clock.now += 3.0
            client.leave()
            assert (await rig.kept.wait(2)).completion_tokens == 300

    run(main)


def test_a_limit_of_one_is_free_again_after_every_client_that_left() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1) as rig:
            rig.engine.script = sends(STREAM_HEAD, chunk(event("a")), chunk(event("b")), then="stall")
            for number in range(100):
                client = await rig.client()
                await client.send(request_bytes(body=STREAM))
                await client.read_head()
                await client.read_chunk()
                await client.read_chunk()
                client.leave()
                await rig.kept.wait(number + 1)
            assert rig.pool.live_slots == 0

    run(main)


def test_a_held_request_whose_client_leaves_is_gone_at_once() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1) as rig:
            rig.engine.script = forever
            first, second = await rig.client(), await rig.client()
            await first.send(request_bytes())
            await rig.engine.received(1)
            await second.send(request_bytes())
            await rig.held(1)
            second.leave()
            record = await rig.kept.wait(1)
            assert (record.outcome, record.sent_seconds, record.cost_units) == (Outcome.CANCELLED, None, 0.0)
            assert rig.queue.snapshot().held == 0
            assert len(rig.engine.asked) == 1

    run(main)


# ---------------------------------------------------------------------- slow readers


def test_a_slow_reader_costs_no_memory_and_its_slot_ends_with_the_engine() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            big = event("x" * 60_000)
            rig.engine.script = sends(STREAM_HEAD, *[chunk(big) for _ in range(10)], chunk(DONE) + END)
            client = await rig.client()
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request_bytes(body=STREAM))
            # 600 kB fit into what is read ahead, so the request ends although nothing was read.
            record = await rig.kept.wait(1)
            assert record.outcome is Outcome.COMPLETED
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert (await client.read()).body == big * 10 + DONE

    run(main)


def test_an_engine_is_not_read_ahead_of_a_slow_client_without_bound() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            sent = 0

            async def floods(asked: Asked, wire: Wire) -> None:
                nonlocal sent
                wire.writer.transport.set_write_buffer_limits(high=0)
                wire.writer.write(STREAM_HEAD)
                for _ in range(300):
                    wire.writer.write(chunk(event("x" * 100_000)))
                    await wire.writer.drain()
                    sent += 100_000
                wire.writer.write(chunk(DONE) + END)

            rig.engine.script = floods
            client = await rig.client()
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request_bytes(body=STREAM))
            await rig.until(lambda: any(connection._write_blocked for connection in rig.port._connections))
            for _ in range(1000):  # until what is under way has arrived
                await asyncio.sleep(0)
            buffered = max(c._transport.get_write_buffer_size() for c in rig.port._connections)  # type: ignore[union-attr]
            assert buffered < 1.5 * (1 << 20)
            assert sent < 20_000_000
            fast = await rig.client()  # and nobody else waits for it
            rig.engine.scripts = [sends(STREAM_HEAD, chunk(event("a")), chunk(DONE) + END)]
            await fast.send(request_bytes(body=STREAM))
            assert (await fast.read()).body == event("a") + DONE
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await client.read()).body) > 30_000_000

    run(main)


def test_a_client_that_reads_nothing_for_the_idle_limit_loses_its_connection() -> None:
    async def main() -> None:
        async with Rig.started(timeouts=with_timeouts(idle_seconds=30.0)) as rig:
            rig.engine.script = sends(STREAM_HEAD, *[chunk(event("x" * 1_000_000)) for _ in range(20)], then="stall")
            client = await rig.client()
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(request_bytes(body=STREAM))
            await rig.until(lambda: any(connection._write_blocked for connection in rig.port._connections))
            rig.later(31.0)
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason) == (Outcome.CANCELLED, "client_stalled")

    run(main)


def test_a_client_that_sends_without_reading_is_not_read_without_bound() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes())
            assert (await client.read()).status == 200
            (connection,) = rig.port._connections
            connection.pause_writing()  # as the transport does when the answer before is not read
            big = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 100_000}]}
            client.writer.write(request_bytes(body=big) * 100)
            await rig.until(lambda: connection._read_paused)
            assert connection._backlog_bytes < 1 << 20
            assert not connection._ready
            assert len(rig.engine.asked) == 1
            connection.resume_writing()
            assert [(await client.read()).status for _ in range(100)] == [200] * 100

    run(main)


# ---------------------------------------------------------------------- HTTP/1.1


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            ids = [f"n{number}" for number in range(40)]
            await client.send(b"".join(request_bytes(headers={"x-request-id": name}) for name in ids))
            assert [(await client.read()).headers["x-request-id"] for _ in ids] == ids
            assert rig.driver.counters.connections_total == 1

    run(main)


def test_a_pipelined_request_waits_while_the_one_before_it_runs() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await go.wait()
                await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

            rig.engine.scripts = [waits]
            client = await rig.client()
            await client.send(request_bytes())
            await rig.engine.received(1)
            await client.send(request_bytes("/nowhere"), request_bytes())
            go.set()
            assert [(await client.read()).status for _ in range(3)] == [200, 404, 200]

    run(main)


def test_ten_thousand_pipelined_requests_neither_recurse_nor_pile_up() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            client.writer.write(request_bytes("/nowhere", b"") * 10_000)
            statuses = []
            try:
                while True:
                    statuses.append((await client.read()).status)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            assert set(statuses) == {404}

    run(main)


def test_what_is_pipelined_beyond_the_limit_is_not_answered_in_the_place_of_another() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            ids = [f"n{number}" for number in range(MAX_PIPELINED)]
            pieces = [request_bytes("/nowhere", headers={"x-request-id": name}) for name in [*ids, "one too many"]]
            client.writer.write(b"".join(pieces) + b"GARBAGE\r\n\r\n" + bytes(2 * MAX_BACKLOG_BYTES))
            assert [(await client.read()).headers["x-request-id"] for _ in ids] == ids
            # An end and no reset, which could cost the client answers that it has not read.
            assert await client.reader.read() == b""

    run(main)


def test_expect_100_continue_is_answered_before_the_body_comes() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            head, _, body = request_bytes(headers={"expect": "100-continue"}).partition(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            assert (await client.read_head()).status == 100
            await client.send(body)
            assert (await client.read()).status == 200

    run(main)


def test_expect_100_continue_is_refused_without_the_body() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            head, _, _ = request_bytes(key="fs-wrong", headers={"expect": "100-continue"}).partition(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            assert (await client.read_head()).status == 401

    run(main)


def test_a_chunked_request_body_is_read() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            body = json.dumps(SHORT).encode()
            client = await rig.client()
            head = request_bytes(body=b"", headers={"transfer-encoding": "chunked"})
            pieces = [b"%x\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body))]
            await client.send(head, *pieces, b"0\r\nx-trailer: ignored\r\n\r\n")
            assert (await client.read()).status == 200
            assert rig.engine.asked[0].json["messages"] == []
            assert "x-trailer" not in rig.engine.asked[0].headers

    run(main)


def test_http_1_0_gets_an_answer_that_ends_with_the_connection() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes(body=STREAM, version="1.0"))
            reply = await client.read()
            assert reply.headers["connection"] == "close"
            assert "transfer-encoding" not in reply.headers
            assert reply.body.endswith(DONE)
            assert await client.at_end()

    run(main)


def test_http_1_0_may_keep_its_connection() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            for _ in range(2):
                await client.send(request_bytes(version="1.0", headers={"connection": "keep-alive"}))
                reply = await client.read()
                assert reply.headers["connection"] == "keep-alive"
                assert reply.status == 200

    run(main)


def test_connection_close_is_honoured() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes(headers={"connection": "close"}))
            reply = await client.read()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert await client.at_end()

    run(main)


def test_head_and_options_have_no_body() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes("/v1/models", method="HEAD"))
            head = await client.read(no_body=True)
            await client.send(request_bytes("/v1/models", method="GET"))
            get = await client.read()
            assert head.headers["content-length"] == get.headers["content-length"]
            await client.send(request_bytes(method="HEAD"))
            wrong = await client.read(no_body=True)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            await client.send(request_bytes(method="OPTIONS", key=None))
            assert (await client.read()).headers["allow"] == "POST, OPTIONS"
            await client.send(request_bytes(method="GET"))
            assert (await client.read()).code == "method_not_allowed"

    run(main)


def test_an_offer_to_upgrade_is_ignored_and_the_body_is_not_lost() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
            for _ in range(2):
                await client.send(request_bytes(headers=upgrade))
                assert (await client.read()).status == 200
            assert rig.engine.asked[0].json["model"] == "tiny"

    run(main)


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length : 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: a\r\nx: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nhost: a\n\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_two_servers_could_read_in_two_ways_is_refused_and_the_connection_closed(raw: bytes) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(raw + request_bytes())
            reply = await client.read()
            assert (reply.status, reply.code, reply.headers["connection"]) == (400, "invalid_request", "close")
            assert await client.at_end()
            assert rig.engine.asked == []

    run(main)


def test_a_body_over_the_limit_is_a_413_that_the_client_can_read() -> None:
    async def main() -> None:
        async with Rig.started(limits=Limits(max_body_bytes=1000)) as rig:
            for headers in ({}, {"transfer-encoding": "chunked"}):
                client = await rig.client()
                body = b"x" * 400_000
                if headers:
                    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
                client.writer.write(request_bytes(body=body, headers=headers))
                reply = await client.read()
                assert (reply.status, reply.code) == (413, "request_too_large")
                assert await client.at_end()
            assert rig.engine.asked == []

    run(main)


@pytest.mark.parametrize("pieces", [1, 50])
def test_a_head_over_the_limit_is_a_431(pieces: int) -> None:
    async def main() -> None:
        async with Rig.started(limits=Limits(max_header_bytes=4096)) as rig:
            client = await rig.client()
            raw = request_bytes(headers={f"x-{number}": "y" * 1000 for number in range(50)})
            size = len(raw) // pieces + 1
            for at in range(0, len(raw), size):
                client.writer.write(raw[at : at + size])
                await asyncio.sleep(0)
            reply = await client.read()
            assert (reply.status, reply.code) == (431, "headers_too_large")

    run(main)


def test_slow_headers_are_a_408() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(b"POST /v1/chat/com")
            await rig.until(lambda: any(connection._reading for connection in rig.port._connections))
            for _ in range(5):
                rig.later(3.0)
                await client.send(b"p")  # keeps dripping
                await asyncio.sleep(0)
            reply = await client.read()
            assert (reply.status, reply.code) == (408, "request_timeout")
            assert await client.at_end()

    run(main)


def test_a_body_that_stops_coming_is_a_408() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes()[:-5])
            await rig.until(lambda: any(c._reading and c._reading.head_complete for c in rig.port._connections))
            rig.later(61.0)
            assert (await client.read()).code == "request_timeout"

    run(main)


def test_an_idle_connection_is_closed_after_a_while() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(request_bytes())
            assert (await client.read()).status == 200
            rig.later(70.0)
            await client.send(request_bytes())
            assert (await client.read()).status == 200
            rig.later(76.0)
            assert await client.at_end()

    run(main)


def test_more_connections_than_allowed_are_told_so() -> None:
    async def main() -> None:
        async with Rig.started(limits=Limits(max_connections=2)) as rig:
            kept = [await rig.client() for _ in range(2)]
            await kept[1].send(request_bytes())
            assert (await kept[1].read()).status == 200
            extra = await rig.client()
            reply = await extra.read()
            assert (reply.status, reply.code) == (503, "too_many_connections")
            assert rig.driver.counters.connections_refused_total == 1
            kept[0].leave()
            await rig.until(lambda: rig.driver.counters.open_connections <= 1)
            assert (await rig.ask()).status == 200

    run(main)


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1, hold=HoldOptions(max_held=1)) as rig:
            rig.engine.script = forever
            clients = [await rig.client() for _ in range(2)]
            for number, client in enumerate(clients):
                await client.send(request_bytes())
                await rig.until(lambda count=number + 1: rig.driver.open_requests == count)
            reply = await rig.ask()
            assert (reply.status, reply.code) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1

    run(main)


def test_a_request_held_too_long_is_a_503() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1) as rig:
            rig.engine.script = forever
            first, second = await rig.client(), await rig.client()
            await first.send(request_bytes())
            await rig.engine.received(1)
            await second.send(request_bytes())
            await rig.held(1)
            rig.later(301.0)
            reply = await second.read()
            assert (reply.status, reply.code) == (503, "held_too_long")
            assert (await rig.kept.wait(1)).outcome is Outcome.REFUSED

    run(main)


def test_no_instance_is_a_503() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD) as rig:
            rig.sort_instances(accepting=False)
            reply = await rig.ask()
            assert (reply.status, reply.code) == (503, "no_instance")

    run(main)


def test_a_head_that_came_on_another_connection_is_recognised_and_its_key_is_still_asked_for() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            for key in ("fs-red", "fs-blue", "fs-red", "fs-blue"):
                client = await rig.client()
                await client.send(request_bytes(key=key))
                assert (await client.read()).status == 200
            assert [record.team for record in rig.kept.records] == ["red", "blue", "red", "blue"]
            cache = rig.port.known_heads
            assert cache.find(request_bytes(key="fs-red")) is not None
            assert cache.find(request_bytes(key="fs-green")) is None
            rig.port.directory.replace({})  # every key is taken back
            client = await rig.client()
            await client.send(request_bytes(key="fs-red"))
            assert (await client.read()).code == "invalid_api_key"

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_has_left(stream: bool) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = forever
            client = await rig.client()
            await client.send(request_bytes(body=STREAM if stream else None))
            await rig.engine.received(1)
            client.writer.write_eof()  # it could still read, and so could one that was killed
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason, record.status) == (Outcome.CANCELLED, "client_left", 0)
            assert await client.at_end()

    run(main)


def test_models_are_listed_while_an_engine_is_down_or_gone() -> None:
    async def main() -> None:
        async with Rig.started(engines=2, models={"tiny": "t", "other": "o"}) as rig:
            rig.driver.models_seen("chat", rig.engines[0].url, {"t": 2048})
            await rig.engines[0].stop()
            assert [card["id"] for card in (await rig.ask("/v1/models", method="GET")).json["data"]] == [
                "tiny",
                "other",
            ]
            for engine in rig.engines:
                rig.driver.instance_removed("chat", engine.url)
            cards = (await rig.ask("/v1/models", method="GET")).json["data"]
            assert [card["id"] for card in cards] == ["tiny", "other"]
            assert "max_model_len" not in cards[0]

    run(main)
