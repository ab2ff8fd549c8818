"""A raw HTTP/1.1 server that does exactly what a test tells it, byte for byte, as an engine might at its worst."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request that reached the engine."""

    method: str
    path: str
    headers: dict[str, str]
    raw_head: bytes
    body: bytes
    connection: int
    """Which connection it came on, counted from 0."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The gateway closed the connection."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """The engine's side of one connection while it answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.closed = False
        self.aborts = True
        self.asked: Asked | None = None
        """What is being answered."""

    async def send(self, *pieces: bytes) -> None:
        """Each piece on its own; the gateway has taken one before the next is sent, as far as buffers allow."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.closed = True
        self.writer.transport.abort()

    def close(self) -> None:
        """FIN after what was sent."""
        self.closed = True
        self.aborts = False
        self.writer.close()


class _Connection(asyncio.StreamReaderProtocol):
    """Tells a request that the gateway closed its connection."""

    def __init__(self, engine: "HostileEngine") -> None:
        self._its_engine = engine
        self._its_wire: Wire | None = None
        self._serving: asyncio.Task[None] | None = None
        self._bytes = asyncio.StreamReader(limit=1 << 24)
        super().__init__(self._bytes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(transport, self, self._bytes, loop)  # type: ignore[arg-type]
        self._its_wire = Wire(self._bytes, writer)
        self._serving = loop.create_task(
            self._its_engine.serve(self._bytes, self._its_wire, self._its_engine.connections)
        )
        self._its_engine.connections += 1
        self._its_engine.tasks.add(self._serving)
        self._serving.add_done_callback(self._its_engine.tasks.discard)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # as engines do: who closes has left

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._its_wire is not None and self._its_wire.asked is not None and not self._its_wire.closed:
            self._its_wire.asked.gone.set()
            assert self._serving is not None
            self._serving.cancel()


Script = Callable[[Asked, Wire], Awaitable[None]]


class HostileEngine:
    """Listens on a loopback port; `script` answers every request unless `scripts` has one for it, in order."""

    def __init__(self, script: Script | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.script: Script = script or chat
        self.scripts: list[Script] = []
        self.asked: list[Asked] = []
        self.connections = 0
        self._server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> "HostileEngine":
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def received(self, count: int) -> Asked:
        """Waits until `count` requests have come in all; returns the last of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.asked) >= count)
        return self.asked[count - 1]

    async def serve(self, reader: asyncio.StreamReader, wire: Wire, number: int) -> None:
        """Answers what comes on one connection until it is gone."""
        try:
            while not wire.closed and (asked := await self._read(reader, number)) is not None:
                async with self._arrived:
                    self.asked.append(asked)
                    self._arrived.notify_all()
                wire.asked = asked
                await (self.scripts.pop(0) if self.scripts else self.script)(asked, wire)
                wire.asked = None
        except (ConnectionError, asyncio.CancelledError):
            pass  # the gateway left
        finally:
            if wire.aborts:
                wire.writer.transport.abort()
            else:
                wire.writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Asked | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        lines = head[:-4].split(b"\r\n")
        method, path, _ = lines[0].decode().split(" ")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            assert name.lower() not in headers, f"header {name} sent twice"
            headers[name.lower()] = value.strip()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).strip(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Asked(method, path, headers, head, body, number)


def answer(body: bytes, *, status: str = "200 OK", headers: bytes = b"content-type: application/json\r\n") -> bytes:
    """A whole answer with its length."""
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status.encode(), headers, len(body), body)


def completion(*, prompt: int = 10, completion: int = 5, cached: int = 0, text: str = "hello") -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    ).encode()


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, *, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return (
        b"data: " + json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"
    )


def usage_event(*, prompt: int = 10, completion: int = 5) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: " + json.dumps({"id": "c", "choices": [], "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def chat(asked: Asked, wire: Wire) -> None:
    """A well-behaved engine: a short completion, or the same in pieces."""
    body = asked.json
    if not body.get("stream"):
        await wire.send(answer(completion()))
        return
    pieces = [event(word) for word in ("hel", "lo")] + [event("", finish="stop")]
    if (body.get("stream_options") or {}).get("include_usage"):
        pieces.append(usage_event())
    await wire.send(STREAM_HEAD, *[chunk(piece) for piece in pieces], chunk(DONE) + END)


async def forever(asked: Asked, wire: Wire) -> None:
    """Accepts and never answers."""
    await asyncio.Event().wait()


def sends(*pieces: bytes, then: str = "keep") -> Script:
    """Exactly these bytes; `then` keep, close, reset or stall."""

    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(*pieces)
        match then:
            case "keep":
                pass
            case "close":
                wire.close()
            case "reset":
                wire.reset()
            case _:
                await asyncio.Event().wait()

    return script
