"""Engines at their worst: what a client sees, what is charged, and that nothing is left."""

import asyncio
import gzip
import json

import pytest

from fairshare.core.decisions import Instance
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.ports import Outcome
from gateway.hostile_engine import (
    DONE,
    END,
    STREAM_HEAD,
    Asked,
    HostileEngine,
    Wire,
    answer,
    chat,
    chunk,
    completion,
    event,
    forever,
    sends,
    usage_event,
)
from gateway.rig import STREAM, Rig, request_bytes, run, with_timeouts

STREAMED = event("hel") + event("lo") + event("", finish="stop") + usage_event() + DONE


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        ("400 Bad Request", b"content-type: application/json\r\n"),
        ("429 Too Many Requests", b"content-type: application/json\r\nretry-after: 7\r\n"),
        ("503 Service Unavailable", b"content-type: application/json\r\nRetry-After: 3\r\n"),
        ("500 Internal Server Error", b"content-type: text/plain\r\n"),
    ],
)
@pytest.mark.parametrize("body", [{"model": "tiny", "messages": []}, STREAM])
def test_an_engines_error_passes_through_unchanged_and_costs_nothing(status: str, headers: bytes, body: object) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            said = b'{"error":{"message":"no","type":"X","param":null,"code":400}}'
            rig.engine.script = sends(answer(said, status=status, headers=headers))
            reply = await rig.ask(body=body)
            assert reply.status == int(status[:3])
            assert reply.body == said
            if b"etry" in headers:
                assert reply.headers["retry-after"] in "37"
            record = await rig.kept.wait(1)
            assert (record.cost_units, record.estimated) == (0.0, False)
            assert record.outcome is (Outcome.FAILED if reply.status >= 500 else Outcome.COMPLETED)

    run(main)


def test_a_stream_split_at_every_byte_arrives_the_same() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            whole = STREAM_HEAD + chunk(STREAMED) + END
            rig.engine.script = sends(*[whole[at : at + 1] for at in range(len(whole))])
            reply = await rig.ask(body=STREAM)
            assert reply.body == STREAMED.replace(usage_event(), b"")
            assert (await rig.kept.wait(1)).completion_tokens == 5

    run(main)


def test_an_answer_that_ends_with_its_connection_is_complete() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            body = completion()
            rig.engine.script = sends(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", body, then="close")
            reply = await rig.ask()
            assert reply.body == body
            assert (await rig.kept.wait(1)).completion_tokens == 5

    run(main)


def test_100_continue_from_an_engine_is_not_taken_for_its_answer() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(b"HTTP/1.1 100 Continue\r\n\r\n", answer(completion()))
            assert (await rig.ask()).status == 200

    run(main)


def test_an_engines_keys_cookies_and_fairshare_headers_do_not_come_down() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            headers = (
                b"content-type: application/json\r\nset-cookie: canary\r\nauthorization: Bearer canary\r\n"
                b"x-fairshare-pool: canary\r\nx-request-id: canary\r\nkeep-alive: canary\r\nserver: engine\r\n"
            )
            rig.engine.script = sends(answer(completion(), headers=headers))
            reply = await rig.ask()
            assert b"canary" not in reply.raw_head
            assert reply.headers["server"] == "engine"

    run(main)


def test_a_compressed_answer_passes_through_and_is_charged_by_estimate() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            body = gzip.compress(completion())
            headers = b"content-type: application/json\r\ncontent-encoding: gzip\r\n"
            rig.engine.script = sends(answer(body, headers=headers))
            reply = await rig.ask()
            assert reply.headers["content-encoding"] == "gzip"
            assert gzip.decompress(reply.body) == completion()
            assert rig.engine.asked[0].headers["accept-encoding"] == "identity"
            assert (await rig.kept.wait(1)).estimated

    run(main)


def test_a_refused_connection_is_tried_once_on_another_instance() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            await rig.engines[0].stop()
            for _ in range(4):
                assert (await rig.ask()).status == 200
            await rig.kept.wait(4)
            assert [record.retries for record in rig.records] == [1, 1, 1, 1]
            assert {record.instance_id for record in rig.records} == {rig.engines[1].url}

    run(main)


def test_an_instance_that_cannot_be_reached_and_has_no_other_is_answered_502() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            await rig.engine.stop()
            reply = await rig.ask()
            assert (reply.status, reply.code) == (502, "upstream_unreachable")
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason) == (Outcome.FAILED, "upstream_unreachable")
            assert (record.cost_units, record.status) == (0.0, 502)

    run(main)


def test_a_reset_before_any_byte_is_tried_once_elsewhere_and_only_once() -> None:
    async def main() -> None:
        async with Rig.started(engines=3) as rig:
            for engine in rig.engines:
                engine.script = sends(then="reset")
            reply = await rig.ask()
            assert (reply.status, reply.code) == (502, "upstream_unreachable")
            assert sum(len(engine.asked) for engine in rig.engines) == 2

    run(main)


def test_a_reset_after_a_byte_is_never_tried_again() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            for engine in rig.engines:
                engine.script = sends(b"HTTP/1.1 200", then="reset")
            reply = await rig.ask()
            assert (reply.status, reply.code) == (502, "upstream_broke")
            assert sum(len(engine.asked) for engine in rig.engines) == 1

    run(main)


def test_a_kept_alive_connection_that_the_engine_closed_is_replaced_without_a_trace() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            closing = asyncio.Event()

            async def closes_on_the_next_request(asked: Asked, wire: Wire) -> None:
                wire.reset()

            assert (await rig.ask()).status == 200
            rig.engine.scripts = [closes_on_the_next_request]
            assert (await rig.ask()).status == 200
            assert rig.engine.connections == 2
            assert [record.retries for record in rig.records] == [0, 0]
            closing.set()

    run(main)


def test_stale_connections_to_every_instance_are_replaced_without_a_trace() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            first, second = rig.engines
            for engine in (first, second):  # a connection to each is kept alive
                rig.sort_instances(accepting=False)
                rig.driver.instance_changed(
                    "chat",
                    InstanceSpec(url=engine.url, api_key="engine-secret"),
                    Instance(id=engine.url, part_slots=4, accepting=True),
                )
                assert (await rig.ask()).status == 200
            rig.sort_instances()

            async def resets(asked: Asked, wire: Wire) -> None:
                wire.reset()

            first.scripts = [resets, resets]
            second.scripts = [resets]
            assert (await rig.ask()).status == 200

    run(main)


def test_bytes_behind_an_answer_do_not_become_the_next_clients_answer() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.scripts = [sends(answer(completion()) + answer(b'{"stolen":true}'), then="stall")]
            assert (await rig.ask()).json["choices"]
            assert (await rig.ask()).json["choices"]
            assert rig.engine.connections == 2

    run(main)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"HTTP/1.1 abc\r\n\r\n", b"SSH-2.0-OpenSSH\r\n"])
def test_garbage_is_answered_502(garbage: bytes) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(garbage, then="stall")
            reply = await rig.ask()
            assert (reply.status, reply.code) == (502, "upstream_broke")

    run(main)


def test_a_head_without_end_is_answered_502() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 600_000, then="stall")
            assert (await rig.ask()).code == "upstream_broke"

    run(main)


def test_a_stream_that_is_cut_ends_with_an_error_event_and_is_charged_for_what_went_by() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(STREAM_HEAD, chunk(event("hel")), chunk(event("lo")), then="reset")
            reply = await rig.ask(body=STREAM)
            assert reply.status == 200
            assert reply.complete
            assert reply.body.startswith(event("hel") + event("lo"))
            last = json.loads(reply.body.rstrip().rpartition(b"data: ")[2])
            assert last["error"]["code"] == "upstream_broke"
            assert DONE not in reply.body
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason, record.estimated) == (Outcome.FAILED, "upstream_broke", True)
            assert record.completion_tokens == 2

    run(main)


def test_a_body_that_is_cut_is_seen_as_cut() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(answer(completion())[:-10], then="close")
            client = await rig.client()
            await client.send(request_bytes())
            assert not (await client.read()).complete
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason, record.estimated) == (Outcome.FAILED, "upstream_broke", True)

    run(main)


def test_an_error_inside_a_stream_is_relayed_and_counted_as_a_failure() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            error = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'
            rig.engine.script = sends(STREAM_HEAD, chunk(event("hel")), chunk(error), chunk(DONE) + END)
            reply = await rig.ask(body=STREAM)
            assert reply.body == event("hel") + error + DONE
            record = await rig.kept.wait(1)
            assert (record.outcome, record.reason, record.status) == (Outcome.FAILED, "engine_error", 200)
            assert record.estimated

    run(main)


def test_an_engine_that_accepts_and_never_answers_gives_its_slots_back_at_the_first_byte_limit() -> None:
    async def main() -> None:
        async with Rig.started(timeouts=with_timeouts(first_byte_seconds=30.0)) as rig:
            rig.engine.script = forever
            clients = [await rig.client() for _ in range(8)]
            for client in clients:
                await client.send(request_bytes())
            await rig.engine.received(8)
            rig.later(29.0)
            assert rig.driver.open_requests == 8
            rig.later(2.0)
            for client in clients:
                reply = await client.read()
                assert (reply.status, reply.code) == (504, "upstream_timeout")
            assert {record.cost_units for record in rig.records} == {0.0}
            await rig.engine.asked[0].gone.wait()
            rig.engine.script = chat
            assert (await rig.ask()).status == 200

    run(main)


def test_a_stream_that_goes_silent_is_cut_at_the_idle_limit() -> None:
    async def main() -> None:
        async with Rig.started(timeouts=with_timeouts(first_byte_seconds=5.0, idle_seconds=30.0)) as rig:
            rig.engine.script = sends(STREAM_HEAD, chunk(event("hel")), then="stall")
            client = await rig.client()
            await client.send(request_bytes(body=STREAM))
            await client.read_head()
            assert await client.read_chunk() == event("hel")
            rig.later(29.0)
            assert rig.driver.open_requests == 1
            rig.later(2.0)
            assert b'"upstream_timeout"' in await client.read_chunk()
            await rig.engine.asked[0].gone.wait()

    run(main)


def test_a_request_ends_at_the_longest_request_limit_even_if_it_flows() -> None:
    async def main() -> None:
        async with Rig.started(timeouts=with_timeouts(longest_request_seconds=60.0)) as rig:
            rig.engine.script = sends(STREAM_HEAD, chunk(event("hel")), then="stall")
            client = await rig.client()
            await client.send(request_bytes(body=STREAM))
            await client.read_head()
            await client.read_chunk()
            rig.later(61.0)
            assert b'"upstream_timeout"' in await client.read_chunk()

    run(main)


def test_a_failed_health_check_cuts_what_is_silent_and_leaves_what_flows() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            silent, other = rig.engines
            rig.driver.instance_changed(
                "chat", InstanceSpec(url=other.url), Instance(id=other.url, part_slots=4, accepting=False)
            )
            more = asyncio.Event()

            async def flows(asked: Asked, wire: Wire) -> None:
                await wire.send(STREAM_HEAD, chunk(event("a")))
                await more.wait()
                await wire.send(chunk(event("b")), chunk(DONE) + END)

            silent.scripts = [sends(STREAM_HEAD, chunk(event("a")), then="stall"), forever, flows]
            clients = [await rig.client() for _ in range(3)]
            for number, client in enumerate(clients):
                await client.send(request_bytes(body=STREAM))
                await silent.received(number + 1)
                if number != 1:
                    await client.read_head()
                    await client.read_chunk()
                if number != 2:
                    for _ in range(3):  # silence is certain to a sweep
                        rig.later(1.0)
            rig.driver.instance_changed(
                "chat", InstanceSpec(url=other.url), Instance(id=other.url, part_slots=4, accepting=True)
            )
            assert rig.driver.cut_instance("chat", silent.url, silent_seconds=1.0) == 2
            assert b'"upstream_broke"' in await clients[0].read_chunk()
            assert (await clients[1].read()).status == 200  # nothing of it had come: the other instance served it
            assert len(other.asked) == 1
            more.set()
            assert await clients[2].read_chunk() == event("b")
            assert await clients[2].read_chunk() == DONE

    run(main)


def test_an_engine_behind_a_path_gets_that_path_and_its_own_key() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            engine: HostileEngine = rig.engine
            spec = InstanceSpec(url=engine.url + "/engines/a", api_key="engine-secret")
            rig.driver.instance_removed("chat", engine.url)
            rig.driver.instance_changed("chat", spec, Instance(id=spec.id, part_slots=8))
            assert (await rig.ask()).status == 200
            assert engine.asked[0].path == "/engines/a/v1/chat/completions"
            assert engine.asked[0].headers["authorization"] == "Bearer engine-secret"

    run(main)


def test_head_comes_with_the_first_byte_of_the_body() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            go = asyncio.Event()

            async def head_first(asked: Asked, wire: Wire) -> None:
                await wire.send(STREAM_HEAD)
                await go.wait()
                await wire.send(chunk(event("a")), chunk(DONE) + END)

            rig.engine.script = head_first
            client = await rig.client()
            await client.send(request_bytes(body=STREAM))
            await rig.engine.received(1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.read_head()
            go.set()
            assert (await client.read()).body == event("a") + DONE

    run(main)


def test_a_fault_of_ours_in_an_answer_is_a_500_and_harms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(body: bytes) -> None:
        raise RuntimeError("a fault of ours")

    async def main() -> None:
        async with Rig.started() as rig:
            with monkeypatch.context() as patched:
                patched.setattr("fairshare.gateway.exchange.read_answer", breaks)
                reply = await rig.ask()
            assert (reply.status, reply.code) == (500, "internal_error")
            assert (await rig.ask()).status == 200
            assert rig.engine.connections == 1  # the connection was not ours any more when it broke

    run(main)


def test_chunks_of_a_stream_come_the_same_however_they_are_framed_and_split() -> None:
    pieces = [event("a"), event("b") + event("c"), b": comment\n\n", event("d")[:9], event("d")[9:], b"\r\n", b"5\r\nx"]
    pieces.append(b"abcd\r\n" + b": 3456789012\n\n")
    ways: list[list[bytes]] = [
        [chunk(piece) for piece in pieces],
        [chunk(pieces[0]), b"".join(chunk(piece) for piece in pieces[1:3]), *[chunk(piece) for piece in pieces[3:]]],
        [b"%X;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces],
        [b"0%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces],
        [part for piece in pieces for part in (chunk(piece)[:-2], b"\r\n")],
        [part for piece in pieces for part in (chunk(piece)[:-1], b"\n")],
        [part for piece in pieces for part in (chunk(piece)[:1], chunk(piece)[1:])],
        [part for piece in pieces for part in (chunk(piece)[:-3], chunk(piece)[-3:])],
        # A read that looks like a whole chunk, but begins in the middle of a size.
        [*[chunk(piece) for piece in pieces[:-1]], b"1", b"4\r\nabcd\r\n", pieces[-1][6:] + b"\r\n"],
        [
            *[chunk(piece) for piece in pieces[:-2]],
            chunk(pieces[-2]) + b"1",
            b"4\r\nabcd\r\n",
            pieces[-1][6:] + b"\r\n",
        ],
    ]

    async def main() -> None:
        async with Rig.started() as rig:
            for way in ways:

                async def script(asked: Asked, wire: Wire, way: list[bytes] = way) -> None:
                    await wire.send(STREAM_HEAD, *way, chunk(DONE), END)

                rig.engine.script = script
                reply = await rig.ask(body=STREAM)
                assert reply.complete
                assert reply.body == b"".join(pieces) + DONE, way
            assert (await rig.ask(body=STREAM)).status == 200

    run(main)
