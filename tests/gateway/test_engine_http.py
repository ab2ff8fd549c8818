"""The small client for health checks and scrapes, against servers on loopback that answer in awkward ways."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fairshare.gateway import engine_http
from fairshare.gateway.engine_http import Answer, EngineSilent, Failure, ask


@asynccontextmanager
async def server(*answer: bytes, read: list[bytes] | None = None) -> AsyncIterator[str]:
    """Reads a request's head, sends the pieces, closes."""

    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if read is not None:
                read.append(head)
            for piece in answer:
                writer.write(piece)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await asyncio.gather(*served)


def asked(*answer: bytes) -> Answer:
    async def scenario() -> Answer:
        async with server(*answer) as url:
            return await ask("GET", f"{url}/health", timeout_seconds=10.0)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 5\r\n\r", b"\nhel", b"lo"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello"],
        [b"HTTP/1.0 200 OK\r\n\r\nhello"],
    ],
)
def test_an_answer_is_read_whole_however_its_end_is_told(answer: list[bytes]) -> None:
    assert asked(*answer) == Answer(200, b"hello")


def test_a_bad_status_is_an_answer_too() -> None:
    assert asked(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n") == Answer(503, b"")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n"],
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
    ],
)
def test_half_an_answer_or_another_protocol_is_no_answer(answer: list[bytes]) -> None:
    with pytest.raises(EngineSilent) as silent:
        asked(*answer)
    assert silent.value.failure is Failure.BROKEN


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "MAX_ANSWER_BYTES", 1 << 16)
    with pytest.raises(EngineSilent) as silent:
        asked(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"x" * (1 << 18))
    assert silent.value.failure is Failure.BROKEN


def test_an_engine_that_takes_too_long_is_too_slow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        url = f"http://127.0.0.1:{never_accepts.getsockname()[1]}/"
        with pytest.raises(EngineSilent) as silent:
            asyncio.run(ask("GET", url, timeout_seconds=0.0))
    assert silent.value.failure is Failure.TOO_SLOW
    assert str(silent.value) == "no answer within 0 s"


def test_nothing_that_listens_and_a_name_that_does_not_resolve_are_unreachable() -> None:
    async def scenario(url: str | None) -> Failure:
        if url is None:
            async with server() as url:
                pass
        with pytest.raises(EngineSilent) as silent:
            await ask("GET", url, timeout_seconds=10.0)
        return silent.value.failure

    assert asyncio.run(scenario(None)) is Failure.UNREACHABLE
    assert asyncio.run(scenario("http://no-such-engine.invalid:1/")) is Failure.UNREACHABLE


def test_the_key_and_the_body_are_sent_and_the_path_keeps_its_query() -> None:
    async def scenario() -> bytes:
        read: list[bytes] = []
        async with server(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", read=read) as url:
            await ask("POST", f"{url}/a?b=c", api_key="secret", body=b"{}", timeout_seconds=10.0)
        return read[0]

    head = asyncio.run(scenario()).split(b"\r\n")
    assert head[0] == b"POST /a?b=c HTTP/1.1"
    assert {b"Authorization: Bearer secret", b"Content-Type: application/json", b"Content-Length: 2"} <= set(head)


def test_hanging_up_closes_the_connection_so_that_an_engine_aborts() -> None:
    async def scenario() -> bytes:
        asked_for = asyncio.Event()
        left: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked_for.set()
            try:
                left.set_result(await reader.read())
            except ConnectionResetError:
                left.set_result(b"")
            writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
        task = asyncio.create_task(ask("GET", url, timeout_seconds=60.0))
        await asked_for.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        rest = await left
        listening.close()
        return rest

    assert asyncio.run(scenario()) == b""
