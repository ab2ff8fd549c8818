"""Connections to engines: one keep-alive pool per instance, one request at a time on each connection.

What a connection hears goes to its `Listener` (the exchange) as whole steps: the head and the pieces of the body
that one read brought, and whether the answer is complete. Nothing here knows about teams, grants or clients.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from fairshare.gateway.engine_http import Failure
from fairshare.gateway.kinds import sglang_priority
from fairshare.gateway.options import EngineKind, InstanceSpec
from fairshare.gateway.ports import CoarseTime, Counters
from fairshare.gateway.tls import engine_context
from fairshare.wire.endpoints import Endpoint
from fairshare.wire.headers import (
    SGLANG_PRIORITY_HEADER,
    VLLM_PRIORITY_HEADER,
    ResponseHeaders,
    read_response_headers,
    upstream_opening,
)
from fairshare.wire.known_head import HeadMemory

log = logging.getLogger("fairshare.gateway")

MAX_HEAD_BYTES = 256 << 10
"""An engine's response head beyond this is not one."""

MAX_IDLE_CONNECTIONS = 512
"""Kept per instance; what a burst opened beyond them is closed when it is done."""

NO_HEAD = ResponseHeaders()

Headers = list[tuple[bytes, bytes]]


class Loss(StrEnum):
    """Why an answer will never be complete."""

    NO_DESCRIPTOR = "no_descriptor"
    """No connection was made because the gateway may not open another file: no fault of the engine's."""

    UNREACHABLE = "unreachable"
    """No connection was made: refused, timed out, or the name does not resolve."""

    RESET = "reset"
    """The connection ended before the answer was complete."""

    GARBAGE = "garbage"
    """What came is not an HTTP/1.1 answer."""


class Listener(Protocol):
    """Who waits for an answer. On the event loop; exactly one `lost`, or one `answer(complete=True)`, is last."""

    def connected(self, connection: "UpstreamConnection") -> None:
        """A connection asked for with `InstanceConnections.connect` is there: send on it."""
        ...

    def answer(self, head: ResponseHeaders, body: bytes, complete: bool) -> None:
        """More of the body (maybe none) came of the answer with this head.

        When it is complete the connection already serves others.
        """
        ...

    def chunk_came(self, framed: bytes) -> bool:
        """What came begins where a chunk may begin. True: it is one whole chunk, with its frame, and was relayed as it
        is. False: nothing was done with it."""
        ...

    def lost(self, loss: Loss, *, anything_came: bool, reused: bool, detail: str) -> None:
        """The answer is lost. `anything_came`: bytes of it had come. `reused`: the connection had served before."""
        ...

    def upload_blocked(self, blocked: bool) -> None:
        """The engine takes no more of the request body for now, or takes it again."""
        ...

    def fault(self) -> None:
        """Handling the answer raised: a fault of ours, which is logged already."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_between_chunks",
        "_complete",
        "_head",
        "_head_bytes",
        "_head_complete",
        "_headers",
        "_keeps_alive",
        "_listener",
        "_on_closed",
        "_parser",
        "_paused",
        "_pieces",
        "_reused",
        "_status",
        "_transport",
        "blocked",
        "home",
        "idle_since",
        "sending",
    )

    def __init__(self, home: "InstanceConnections") -> None:
        self.home = home
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._on_closed: Callable[[], None] | None = None
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._head_complete = False
        self._between_chunks = False
        """The last bytes that came were the end of a chunk."""
        self._complete = False
        self._keeps_alive = False
        self._paused = False
        self._reused = False
        self.sending = False
        """The request body is not sent whole yet: the connection cannot be used again."""
        self.blocked = False
        """The engine takes no more bytes for now."""
        self._status = 0
        self._head = NO_HEAD
        """The answer's, when it has come."""
        self._headers: Headers = []
        self.idle_since = 0.0
        """When it became idle (coarse time)."""

    # --- what the exchange does

    def begin(self, listener: Listener) -> None:
        """The next answer belongs to `listener`."""
        assert self._listener is None
        self._listener = listener

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def pause_reading(self) -> None:
        """Back-pressure: the client reads more slowly than the engine writes."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self, on_closed: Callable[[], None] | None = None) -> None:
        """Close at once, so that the engine stops working for it. `on_closed` is called when it is closed."""
        self._listener = None
        if self._transport is None:
            if on_closed is not None:
                on_closed()
            return
        self._on_closed = on_closed
        self._transport.abort()

    def abandon(self) -> None:
        """The attempt to connect was given up, and maybe it is connected already: close it, if there is anything.

        uvloop does not tell a protocol that its connection is closed when `create_connection` is cancelled after
        `connection_made`. Found by `make fuzz`: the gateway waited for that connection for ever when it closed.
        """
        self.abort()
        self.connection_lost(None)

    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.home.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is None:
            return  # it was abandoned
        self._transport = None
        self.home.closed(self)
        listener, self._listener = self._listener, None
        if listener is not None:
            if exc is None and self._head_complete and self._ends_with_connection():
                listener.answer(self._head, b"", True)
            else:
                listener.lost(
                    Loss.RESET,
                    anything_came=self._head_bytes > 0,
                    reused=self._reused,
                    detail=str(exc) if exc is not None else "the engine closed the connection",
                )
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()

    def data_received(self, data: bytes) -> None:
        listener = self._listener
        if listener is None:
            # Nothing was asked, so this answers nothing of ours.
            self.abort()
            return
        if self._between_chunks:
            # What a stream consists of. The parser need not see it: it is between two chunks before and after.
            try:
                if listener.chunk_came(data):
                    return
            except Exception:
                self._fault(listener)
                return
        if not self._head_complete:
            if not self._head_bytes and not self.sending:
                known = self.home.known_head
                body = known.body_of(data)
                if body is not None:
                    assert known.meaning is not None
                    self._give_back()
                    self._tell(listener, known.meaning, body, True)
                    return
            self._head_bytes += len(data)
        reusable = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                self._give_up(listener, f"not an HTTP/1.1 answer: {error}")
                return
            # Bytes after the end of the answer: the answer stands, the connection cannot be trusted again.
            reusable = False
            data = b""
        if self._between_chunks and not data.endswith(b"\n"):
            self._between_chunks = False  # the beginning of the next one's size came too
        if self._complete and self._keeps_alive and self._head_bytes == len(data):
            self.home.known_head.learn(data, self._head)
        self._deliver(listener, reusable)

    def pause_writing(self) -> None:
        self.blocked = True
        if self._listener is not None:
            self._listener.upload_blocked(True)

    def resume_writing(self) -> None:
        self.blocked = False
        if self._listener is not None:
            self._listener.upload_blocked(False)

    # --- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_complete:  # not a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            raise ValueError("a second answer to one request")
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._head_complete = True
            self._head = read_response_headers(self._headers, self._status)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._complete = True
            # Now, not later: llhttp forgets the head when it is done with the message.
            self._keeps_alive = self._parser.should_keep_alive()
        else:
            self._headers.clear()  # 100 Continue and the like: the answer is still to come

    # --- inside

    def _tell(self, listener: Listener, head: ResponseHeaders, body: bytes, complete: bool) -> None:
        try:
            listener.answer(head, body, complete)
        except Exception:
            self._fault(listener)

    def _fault(self, listener: Listener) -> None:
        log.exception("could not handle an answer of %s", self.home.id)
        listener.fault()  # closes the connection, unless it serves others already

    def _deliver(self, listener: Listener, reusable: bool) -> None:
        """Tell the listener what one read brought."""
        pieces = self._pieces
        if self._complete:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            head = self._head
            if reusable and self._keeps_alive and not self.sending:
                self._head_bytes = self._status = 0
                self._head_complete = self._complete = self._between_chunks = False
                self._headers = []
                self._head = NO_HEAD
                self._give_back()
            else:
                self.abort()
            self._tell(listener, head, body, True)
        elif pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._tell(listener, self._head, body, False)
        elif not self._head_complete and self._head_bytes > MAX_HEAD_BYTES:
            self._give_up(listener, f"the answer's head is longer than {MAX_HEAD_BYTES} bytes")

    def _give_back(self) -> None:
        """Its answer is complete; it may serve others."""
        self._listener = None
        self._reused = True
        self.home.give_back(self)

    def _ends_with_connection(self) -> bool:
        return not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    def _give_up(self, listener: Listener, detail: str) -> None:
        anything_came = self._head_bytes > 0
        self.abort()
        listener.lost(Loss.GARBAGE, anything_came=anything_came, reused=self._reused, detail=detail)


class InstanceConnections:
    """The connections to one instance."""

    def __init__(
        self,
        spec: InstanceSpec,
        *,
        counters: Counters,
        coarse: CoarseTime,
        unreachable: Callable[[Failure, str], None] | None = None,
    ) -> None:
        """`unreachable` is told of every attempt to connect that failed by the engine's fault."""
        url = urlsplit(spec.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"instance must be http://host:port, got {spec.url!r}")
        self.spec = spec
        self.path_prefix = url.path.rstrip("/")
        self.host = url.netloc.rpartition("@")[2].encode("ascii")
        """What the `host` header says."""
        self._host = url.hostname
        self._tls = url.scheme == "https"
        self._openings: dict[tuple[str, int | None], bytes] = {}
        self._sglang = spec.sglang if spec.kind is EngineKind.SGLANG else None
        self._port = url.port or (443 if self._tls else 80)
        self.known_head = HeadMemory[ResponseHeaders]()
        self._unreachable = unreachable
        self._counters = counters
        self._coarse = coarse
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._connects: set[asyncio.Task[None]] = set()
        self._retired = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def id(self) -> str:
        return self.spec.id

    def told_priority(self, priority: int | None) -> int | None:
        """What this kind of engine is told for our priority; None: nothing."""
        return priority if priority is None or self._sglang is None else sglang_priority(priority, self._sglang)

    def opening(self, endpoint: Endpoint, priority: int | None) -> bytes:
        """The first lines of a request to it, with a priority that `told_priority` gave."""
        opening = self._openings.get((endpoint.path, priority))
        if opening is None:
            opening = self._openings[endpoint.path, priority] = upstream_opening(
                method=endpoint.method,
                path=self.path_prefix + endpoint.path,
                host=self.host,
                priority=priority,
                priority_header=VLLM_PRIORITY_HEADER if self._sglang is None else SGLANG_PRIORITY_HEADER,
                api_key=self.spec.api_key,
            )
        return opening

    def take(self) -> UpstreamConnection | None:
        """An idle connection, the one used last; None: there is none, `connect`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
        return None

    def connect(self, listener: Listener, timeout_seconds: float) -> asyncio.Task[None]:
        """A new connection for `listener`, reported by `connected` or `lost`; cancel the task to give up."""
        task = asyncio.get_running_loop().create_task(self._connect(listener, timeout_seconds))
        self._connects.add(task)
        task.add_done_callback(self._connects.discard)
        return task

    async def _connect(self, listener: Listener, timeout_seconds: float) -> None:
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    self._host,
                    self._port,
                    ssl=engine_context(self.spec.ca_file) if self._tls else None,
                )
        except asyncio.CancelledError:
            connection.abandon()
            raise
        except (OSError, TimeoutError) as error:
            connection.abandon()
            self._not_connected(listener, error, timeout_seconds)
        else:
            try:
                listener.connected(connection)
            except Exception:
                log.exception("could not use a connection to %s", self.id)
                connection.abort()
                listener.fault()

    def _not_connected(self, listener: Listener, error: OSError, timeout_seconds: float) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            self._counters.descriptors_exhausted_total += 1
            listener.lost(Loss.NO_DESCRIPTOR, anything_came=False, reused=False, detail=os.strerror(error.errno))
            return
        slow = isinstance(error, TimeoutError)
        detail = str(error) or f"no connection within {timeout_seconds:g} s"
        listener.lost(Loss.UNREACHABLE, anything_came=False, reused=False, detail=detail)
        if self._unreachable is not None and not self._retired:
            self._unreachable(Failure.TOO_SLOW if slow else Failure.UNREACHABLE, detail)

    def retire(self) -> None:
        """The instance is gone: idle connections are closed, the others when their answer is complete."""
        self._retired = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        """Close every connection at once."""
        self.retire()
        for task in tuple(self._connects):
            task.cancel()
        for connection in tuple(self._open):
            connection.abort()

    async def wait_until_closed(self) -> None:
        """After `close`: until every connection and attempt to connect is gone."""
        await asyncio.gather(*self._connects, return_exceptions=True)
        await self._all_closed.wait()

    def sweep(self, idle_since_before: float) -> None:
        """Close what has been idle since before then, and forget what the engine closed."""
        kept: list[UpstreamConnection] = []
        for connection in self._idle:
            if connection.idle_since < idle_since_before:
                connection.abort()
            elif connection.is_usable():
                kept.append(connection)
        self._idle = kept

    # --- called by its connections

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)
        self._all_closed.clear()
        self._counters.upstream_connections += 1
        self._counters.upstream_connects_total += 1

    def closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()
        self._counters.upstream_connections -= 1

    def give_back(self, connection: UpstreamConnection) -> None:
        if self._retired or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
        else:
            connection.idle_since = self._coarse.now
            self._idle.append(connection)
