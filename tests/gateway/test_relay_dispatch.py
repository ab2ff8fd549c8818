"""What the dispatch queue decides is carried out: recall, drain, reload, uploads, requests without a slot."""

import asyncio
import json
from dataclasses import replace
from fractions import Fraction

import pytest

from fairshare.core.decisions import HoldOptions, Instance, Mode
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.gateway.decision_log import SentEntry
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.ports import Outcome
from gateway.hostile_engine import (
    DONE,
    END,
    STREAM_HEAD,
    Asked,
    Wire,
    answer,
    chat,
    chunk,
    completion,
    event,
    forever,
    sends,
)
from gateway.rig import STREAM, Client, Rig, request_bytes, run

AUDIO = "/v1/audio/transcriptions"
FORM_HEAD = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
FILE_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
FORM_END = b"\r\n--b--\r\n"


async def ask_and_wait(rig: Rig, client: Client, count: int, **kwargs: object) -> Asked:
    await client.send(request_bytes(**kwargs))  # type: ignore[arg-type]
    return await rig.engine.received(count)


# ---------------------------------------------------------------------- hold


def test_a_held_request_goes_when_a_slot_is_free_and_says_how_long_it_was_held() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1, shares={"red": Fraction(1)}) as rig:
            rig.engine.scripts = [forever]
            first, second = await rig.client(), await rig.client()
            await ask_and_wait(rig, first, 1)
            await second.send(request_bytes())
            await rig.held(1)
            rig.clock.now += 1.5
            first.leave()
            reply = await second.read()
            assert reply.headers["x-fairshare-held-ms"] == "1500"
            assert reply.headers["x-fairshare-explain"] == (
                "waited 1500 ms: on arrival its team had 1 slots in flight and owns 1, 1 of the pool's 1 were taken, "
                "and 0 of its team's requests waited before it; it runs within its team's share"
            )
            _, sent = rig.driver.decisions.of_request(reply.headers["x-request-id"])
            assert isinstance(sent, SentEntry)
            assert (sent.held_seconds, sent.team_in_flight_slots, sent.capacity_slots) == (1.5, 1, 1)
            assert (await rig.kept.wait(2)).held_seconds == 1.5

    run(main)


def recall_rig() -> object:
    """Two slots that red has borrowed or owns, two seats: the next owner has no seat."""
    return Rig.started(mode=Mode.HOLD, capacity=2, seats=2, hold=HoldOptions(recall_waste=1.0))


def test_a_borrower_of_which_nothing_was_seen_is_taken_back_for_an_owner_and_served_later() -> None:
    async def main() -> None:
        async with recall_rig() as rig:  # type: ignore[attr-defined]
            rig.engine.scripts = [forever, sends(STREAM_HEAD, then="stall"), sends(answer(completion()))]
            owner, borrower, blue = [await rig.client() for _ in range(3)]
            await ask_and_wait(rig, owner, 1)
            borrowed = await ask_and_wait(rig, borrower, 2, body=STREAM)  # its head has come, and is kept back
            assert borrowed.headers["x-vllm-priority"] == "10"
            await blue.send(request_bytes(key="fs-blue"))
            await borrowed.gone.wait()
            assert (await blue.read()).headers["x-fairshare-standing"] == "within-share"
            assert rig.queue.snapshot().recalls_total == 1
            rig.later(1.0)  # the seat is free a moment after the connection is closed
            reply = await borrower.read()
            assert reply.body.endswith(DONE)
            record = await rig.kept.wait(2)
            assert (record.recalls, record.outcome, record.standing) == (1, Outcome.COMPLETED, Standing.BORROWING)
            assert (record.prompt_tokens, record.completion_tokens) == (10, 5)  # what was thrown away costs nothing

    run(main)


def test_a_borrower_that_has_begun_is_not_taken_back() -> None:
    async def main() -> None:
        async with recall_rig() as rig:  # type: ignore[attr-defined]
            begins = sends(STREAM_HEAD, chunk(event("a")), then="stall")
            rig.engine.scripts = [begins, begins]
            owner, borrower, blue = [await rig.client() for _ in range(3)]
            for number, client in enumerate((owner, borrower)):
                borrowed = await ask_and_wait(rig, client, number + 1, body=STREAM)
                await client.read_head()
                assert await client.read_chunk() == event("a")
            await blue.send(request_bytes(key="fs-blue"))
            assert (await blue.read()).status == 200  # the engine finds room for it
            assert not borrowed.gone.is_set()
            assert rig.queue.snapshot().recalls_total == 0

    run(main)


def test_a_client_may_leave_while_its_request_is_taken_back() -> None:
    async def main() -> None:
        async with recall_rig() as rig:  # type: ignore[attr-defined]
            rig.engine.scripts = [forever, forever, sends(answer(completion()))]
            owner, borrower, blue = [await rig.client() for _ in range(3)]
            await ask_and_wait(rig, owner, 1)
            borrowed = await ask_and_wait(rig, borrower, 2)
            borrower.leave()
            await blue.send(request_bytes(key="fs-blue"))
            await borrowed.gone.wait()
            assert (await blue.read()).status == 200

    run(main)


def test_the_seat_of_a_recalled_request_is_free_again_when_its_client_left_in_between() -> None:
    async def main() -> None:
        async with recall_rig() as rig:  # type: ignore[attr-defined]
            rig.engine.scripts = [forever, forever, sends(answer(completion()))]
            owner, borrower, blue = [await rig.client() for _ in range(3)]
            await ask_and_wait(rig, owner, 1)
            await ask_and_wait(rig, borrower, 2)
            await blue.send(request_bytes(key="fs-blue"))
            assert (await blue.read()).status == 200
            borrower.leave()
            await rig.kept.wait(2)
            rig.later(1.0)
            (instance,) = rig.queue.snapshot().instances
            assert instance.aborting_slots == 0

    run(main)


def test_observe_sends_no_priority_at_all() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.OBSERVE) as rig:
            reply = await rig.ask()
            assert reply.status == 200
            assert "priority" not in rig.engine.asked[0].json
            assert "x-vllm-priority" not in rig.engine.asked[0].headers
            assert "x-fairshare-priority" not in reply.headers

    run(main)


# ---------------------------------------------------------------------- drain and reload


def test_draining_lets_streams_finish_and_refuses_what_is_new() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await wire.send(STREAM_HEAD, chunk(event("a")))
                await go.wait()
                await wire.send(chunk(DONE) + END)

            rig.engine.scripts = [waits]
            streaming, idle, kept_alive = [await rig.client() for _ in range(3)]
            await ask_and_wait(rig, streaming, 1, body=STREAM)
            await streaming.read_head()
            await kept_alive.send(request_bytes()[:-1])
            await rig.until(
                lambda: rig.driver.counters.open_connections == 3 and any(c._reading for c in rig.port._connections)
            )
            draining = asyncio.create_task(rig.port.drain(30.0))
            await asyncio.sleep(0)
            with pytest.raises(OSError):
                await rig.client()
            rig.later(1.0)
            assert await idle.at_end()
            rig.engine.scripts = [sends(answer(completion()))]
            await kept_alive.send(b"}")
            reply = await kept_alive.read()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert await kept_alive.at_end()
            go.set()
            assert await streaming.read_chunk() == event("a")
            assert await streaming.read_chunk() == DONE
            assert await streaming.read_chunk() == b""
            await rig.kept.wait(2)
            assert not draining.done()  # the client was not told that its connection closes: it may ask once more
            rig.later(1.0)
            await draining
            assert await streaming.at_end()
            assert [record.outcome for record in rig.records] == [Outcome.COMPLETED] * 2

    run(main)


def test_requests_that_are_on_their_way_when_a_drain_begins_are_served_and_their_answers_close() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await wire.send(STREAM_HEAD, chunk(event("a")))
                await go.wait()
                await wire.send(chunk(DONE) + END)

            rig.engine.scripts = [sends(answer(completion())), waits]
            idle, streaming, lists = [await rig.client() for _ in range(3)]
            await idle.send(request_bytes())
            assert "connection" not in (await idle.read()).headers
            await ask_and_wait(rig, streaming, 2, body=STREAM)
            await streaming.read_head()
            draining = asyncio.create_task(rig.port.drain(30.0))
            await asyncio.sleep(0)
            rig.later(0.9)
            rig.engine.scripts = [sends(answer(completion()))] * 2
            for client in (idle, lists):
                await client.send(request_bytes() if client is idle else request_bytes("/v1/models", method="GET"))
                reply = await client.read()
                assert (reply.status, reply.headers["connection"]) == (200, "close")
                assert await client.at_end()
            go.set()
            assert await streaming.read_chunk() == event("a")
            assert await streaming.read_chunk() == DONE
            assert await streaming.read_chunk() == b""
            rig.later(0.9)  # longer than the grace since the drain began, but not since this answer
            await streaming.send(request_bytes())
            reply = await streaming.read()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            await draining

    run(main)


def test_idle_connections_do_not_hold_up_a_drain_beyond_its_limit() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            idle = await rig.client()
            await rig.until(lambda: rig.driver.counters.open_connections == 1)
            await rig.port.drain(0.01)
            assert await idle.at_end()

    run(main)


def test_what_does_not_finish_while_draining_is_told_so_and_released() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=2, shares={"red": Fraction(1)}) as rig:
            rig.engine.scripts = [sends(STREAM_HEAD, chunk(event("a")), then="stall"), forever]
            streaming, running, held = [await rig.client() for _ in range(3)]
            await ask_and_wait(rig, streaming, 1, body=STREAM)
            await streaming.read_head()
            await streaming.read_chunk()
            await ask_and_wait(rig, running, 2)
            await held.send(request_bytes())
            await rig.held(1)
            await rig.port.drain(0.01)
            await rig.port.close()  # at once, as a gateway that ends does
            for client in (running, held):
                reply = await client.read()
                assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "shutting_down", "1")
                assert reply.headers["connection"] == "close"
            assert b'"shutting_down"' in await streaming.read_chunk()
            assert len(rig.records) == 3
            rig.assert_nothing_left()

    run(main)


def test_a_request_on_a_kept_alive_connection_is_refused_after_the_drain() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.scripts = [forever]
            running = await rig.client()
            await ask_and_wait(rig, running, 1)
            pipelined = await rig.client()
            rig.port.refusing = True
            await pipelined.send(request_bytes())
            reply = await pipelined.read()
            assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "shutting_down", "1")
            assert await pipelined.at_end()

    run(main)


def test_a_removed_instance_finishes_what_it_runs_and_gets_nothing_new() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await go.wait()
                await wire.send(answer(completion()))

            leaving, staying = rig.engines
            leaving.script = waits
            client = await rig.client()
            await ask_and_wait(rig, client, 1)
            rig.driver.instance_removed("chat", leaving.url)
            for _ in range(3):
                assert (await rig.ask()).status == 200
            assert len(staying.asked) == 3
            go.set()
            assert (await client.read()).status == 200

    run(main)


def test_a_removed_pool_refuses_what_it_held_and_finishes_what_it_ran() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1, shares={"red": Fraction(1)}) as rig:
            go = asyncio.Event()

            async def waits(asked: Asked, wire: Wire) -> None:
                await go.wait()
                await wire.send(answer(completion()))

            rig.engine.scripts = [waits]
            running, held = await rig.client(), await rig.client()
            await ask_and_wait(rig, running, 1)
            await held.send(request_bytes())
            await rig.held(1)
            queue = rig.queue
            rig.driver.remove_pool("chat")
            assert (await held.read()).code == "no_instance"
            assert (await rig.ask()).code == "model_not_found"
            go.set()
            assert (await running.read()).status == 200
            rig.driver.add_pool(rig.spec, queue)

    run(main)


# ---------------------------------------------------------------------- uploads


def upload_head(length: int | None, key: str = "fs-red") -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"POST {AUDIO} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
        f"content-type: multipart/form-data; boundary=b\r\n{framing}\r\n\r\n"
    ).encode()


TRANSCRIPT = json.dumps({"text": "hello", "usage": {"type": "duration", "seconds": 2}}).encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_an_upload_streams_through_and_is_charged(chunked: bool) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.engine.script = sends(answer(TRANSCRIPT))
            sound = bytes(range(256)) * 4096
            form = FORM_HEAD + FILE_HEAD + sound + FORM_END
            client = await rig.client()
            await client.send(upload_head(None if chunked else len(form)))
            for at in range(0, len(form), 50_000):
                piece = form[at : at + 50_000]
                await client.send(chunk(piece) if chunked else piece)
            if chunked:
                await client.send(END)
            assert (await client.read()).body == TRANSCRIPT
            assert rig.engine.asked[0].body == form
            assert rig.engine.asked[0].headers["content-type"] == "multipart/form-data; boundary=b"
            record = await rig.kept.wait(1)
            assert (record.slots, record.prompt_tokens, record.model) == (1, 100, "tiny")

    run(main)


def test_the_model_in_a_form_is_the_name_that_the_engine_knows() -> None:
    async def main() -> None:
        async with Rig.started(models={"tiny": "org/whisper"}) as rig:
            rig.engine.script = sends(answer(TRANSCRIPT))
            form = FORM_HEAD + FILE_HEAD + b"sound" + FORM_END
            client = await rig.client()
            await client.send(upload_head(len(form)) + form)
            assert (await client.read()).status == 200
            assert rig.engine.asked[0].body == form.replace(b"\r\ntiny\r\n", b"\r\norg/whisper\r\n")

    run(main)


def test_a_held_upload_is_read_ahead_of_its_engine_by_a_bound_only() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1, shares={"red": Fraction(1)}) as rig:
            rig.engine.scripts = [forever, sends(answer(TRANSCRIPT))]
            running, uploading = await rig.client(), await rig.client()
            await ask_and_wait(rig, running, 1)
            form = FORM_HEAD + FILE_HEAD + b"s" * 20_000_000 + FORM_END
            uploading.writer.write(upload_head(len(form)) + form)
            await rig.until(lambda: any(c._read_paused for c in rig.port._connections))
            (upload,) = [c._current.upload for c in rig.port._connections if c._current and c._current.upload]
            assert upload is not None
            assert upload.size < 1.5 * (1 << 20)
            running.leave()
            assert (await uploading.read()).status == 200
            assert len(rig.engine.asked[1].body) == len(form)

    run(main)


def test_an_upload_whose_engine_cannot_be_reached_goes_to_another() -> None:
    async def main() -> None:
        async with Rig.started(engines=2) as rig:
            for engine in rig.engines:
                engine.script = sends(answer(TRANSCRIPT))
            await rig.engines[0].stop()
            form = FORM_HEAD + FILE_HEAD + b"sound" + FORM_END
            client = await rig.client()
            await client.send(upload_head(len(form)) + form)
            assert (await client.read()).status == 200
            assert rig.engines[1].asked[0].body == form

    run(main)


def test_an_engine_that_refuses_an_upload_early_is_relayed() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            # Answers as soon as the head is there: the raw server of the test reads bodies whole, so this one does not.
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(b'{"error":{}}', status="413 Content Too Large"))
                await reader.read()
                closed.set()
                writer.close()

            closed = asyncio.Event()
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            rig.driver.instance_removed("chat", rig.engine.url)
            rig.driver.instance_changed("chat", InstanceSpec(url=url), Instance(id=url, part_slots=8))
            form = FORM_HEAD + FILE_HEAD + b"s" * 3_000_000
            client = await rig.client()
            client.writer.write(upload_head(len(form) + 1_000_000) + form)
            reply = await client.read()
            assert (reply.status, reply.body) == (413, b'{"error":{}}')
            assert await client.at_end()
            await closed.wait()  # half a body was sent on it: no other request may follow
            server.close()

    run(main)


def test_a_form_without_its_model_in_the_first_mebibyte_is_refused() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            form = FILE_HEAD + b"s" * 3_000_000 + b"\r\n" + FORM_HEAD
            client = await rig.client()
            client.writer.write(upload_head(len(form)) + form)
            reply = await client.read()
            assert (reply.status, reply.json["error"]["param"]) == (413, "model")

    run(main)


def test_a_client_that_leaves_in_the_middle_of_an_upload_aborts_it() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            await client.send(upload_head(1_000_000) + FORM_HEAD + FILE_HEAD + b"s" * 1000)
            await rig.until(lambda: rig.driver.open_requests)
            client.leave()
            assert (await rig.kept.wait(1)).outcome is Outcome.CANCELLED

    run(main)


# ---------------------------------------------------------------------- requests that take no slot


def test_tokenize_takes_no_slot_and_costs_nothing() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=1, shares={"red": Fraction(1)}) as rig:
            rig.engine.scripts = [forever, sends(answer(b'{"count":1,"tokens":[1]}'))]
            running = await rig.client()
            await ask_and_wait(rig, running, 1)
            reply = await rig.ask("/tokenize", {"model": "tiny", "prompt": "hi"})
            assert reply.json["count"] == 1
            record = await rig.kept.wait(1)
            assert (record.slots, record.cost_units, record.standing, record.estimated) == (0, 0.0, None, False)

    run(main)


def test_tokenize_without_an_instance_is_a_503() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            rig.sort_instances(accepting=False)
            assert (await rig.ask("/tokenize", {"model": "tiny", "prompt": "hi"})).code == "no_instance"

    run(main)


def test_a_full_model_is_full_beside_an_idle_one() -> None:
    async def main() -> None:
        async with Rig.started(capacity=4) as rig:
            full = Pool("full", 1, {"red": Fraction(1, 2), "blue": Fraction(1, 2)}, 0.0, clock=rig.clock)
            rig.driver.add_pool(replace(rig.spec, name="full", models={"big": "big"}), make_queue(full, Mode.HOLD))
            instance = Instance(id=rig.engine.url, part_slots=1, seats=1)
            rig.driver.instance_changed("full", InstanceSpec(url=rig.engine.url), instance)
            rig.engine.script = forever
            first, second = await rig.client(), await rig.client()
            await first.send(request_bytes(body=STREAM | {"model": "big"}))
            await rig.engine.received(1)
            await second.send(request_bytes(body=STREAM | {"model": "big"}))
            rig.engine.script = chat
            assert (await rig.ask()).status == 200
            assert rig.driver.pools["full"].queue.snapshot().held == 1
            assert [record.pool for record in rig.kept.records] == ["chat"]

    run(main)
