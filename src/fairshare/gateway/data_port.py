"""The port that clients talk to: HTTP/1.1 in, answers out, one request at a time on each connection, in order.

A `ClientConnection` reads requests and knows what they ask for; an `Exchange` serves those that go to an engine.
"""

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, cast
from urllib.parse import unquote

import httptools
import msgspec

from fairshare.core.decisions import Request
from fairshare.gateway.driver import PoolDriver
from fairshare.gateway.exchange import Exchange, Upload
from fairshare.gateway.identity import Directory, Identity
from fairshare.gateway.listening import served_at
from fairshare.gateway.logins import FailedLogins
from fairshare.gateway.options import Address, Limits
from fairshare.gateway.ports import Admission, Outcome, RequestRecord
from fairshare.wire.body import inspect_body
from fairshare.wire.endpoints import BodyKind, Endpoint, Family, Kind, find_endpoint
from fairshare.wire.headers import (
    RequestHeaders,
    problem_response,
    read_request_headers,
    status_line,
)
from fairshare.wire.known_head import HeadCache, HeadMemory
from fairshare.wire.multipart import FormReader
from fairshare.wire.problems import (
    HEADERS_TOO_LARGE,
    INVALID_API_KEY,
    INVALID_REQUEST,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    REQUEST_TIMEOUT,
    REQUEST_TOO_LARGE,
    SHUTTING_DOWN,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_FAILED_LOGINS,
    UNSUPPORTED_MEDIA_TYPE,
    Problem,
    RequestProblem,
    missing_model,
    unknown_model,
)

log = logging.getLogger("fairshare.gateway")

READ_AHEAD_BYTES = 1 << 20
"""How much of an answer is read ahead of a slow client, and of an upload ahead of its engine."""

KEEP_ALIVE_SECONDS = 75.0
"""How long a connection may wait for its next request."""

DRAIN_GRACE_SECONDS = 1.0
"""How long an idle connection stays open while the gateway drains: its next request may be on its way already, and to
close then would fail it (RFC 9112, 9.6). An answer that says `connection: close` needs no such time."""

BODY_IDLE_SECONDS = 60.0
"""How long a client may pause while it sends a body."""

WRITE_IDLE_SECONDS = 60.0
"""How long a client may take nothing of an answer that the engine has finished."""

LINGER_SECONDS = 2.0
"""How long what a client still sends is thrown away before its connection is closed: closing at once would reset it,
and the client would lose the answer that says why."""

FLUSH_SECONDS = 3.0
"""How long clients may take to read what has been answered when the gateway ends."""

MAX_PIPELINED = 64
"""Requests of one connection that may wait for their turn; what comes beyond them closes it."""

MAX_BACKLOG_BYTES = 256 << 10
"""Bytes that may wait behind a running request before the connection is not read any more."""

LISTEN_BACKLOG = 2048

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_MODELS = Kind.MODELS

MODELS_PATH = b"/v1/models/"


def _to_nobody(data: bytes) -> None:
    """Writes to a client that is gone."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A request as its bytes come in."""

    target: bytes = b""
    method: bytes = b""
    http_1_1: bool = True
    found: RequestHeaders | None = None
    key_sha256: bytes | None = None
    endpoint: Endpoint | None = None
    pieces: list[bytes] = field(default_factory=list[bytes])
    size: int = 0
    """Bytes of its body so far."""
    head_complete: bool = False
    complete: bool = False
    id: str = ""
    """What the client and the engine see: the client's own id, if it sent one."""
    own_id: str = ""
    """Ours; no other request of any gateway has it."""
    arrived_at: float = 0.0
    arrived_wall_at: float = 0.0
    received_at: float = 0.0
    """When the last byte of its body had come, if it came at once with its head."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    keep_alive: bool = True
    upgrade: bool = False
    """It asks for another protocol, which is ignored (RFC 9110, 7.8)."""
    owes_continue: bool = False
    """The client waits for `100 Continue` before it sends the body."""
    identity: Identity | None = None
    problem: RequestProblem | None = None
    """What it will be answered; its body is thrown away."""
    upload: Upload | None = None
    """Its body is streamed through."""

    def again(self, body: bytes, own_id: str = "", now: float = 0.0, wall_now: float = 0.0) -> "Incoming":
        """A request with the same head and another body."""
        clients_id = None if self.found is None else self.found.request_id
        return Incoming(
            self.target,
            self.method,
            self.http_1_1,
            self.found,
            self.key_sha256,
            self.endpoint,
            [body],
            len(body),
            True,
            True,
            own_id if clients_id is None else clients_id.decode("ascii"),
            own_id,
            now,
            wall_now,
            now,
        )

    @property
    def may_come_again(self) -> bool:
        """Whether all that its head says is in it, but for the length."""
        found = self.found
        return (
            found is not None
            and found.content_length is not None
            and self.problem is None
            and self.complete
            and self.keep_alive
            and self.upload is None
            and not found.expects_continue
        )


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    __slots__ = (
        "_advancing",
        "_backlog",
        "_backlog_bytes",
        "_broken",
        "_closing",
        "_current",
        "_exchange",
        "_head_bytes",
        "_heard_at",
        "_known_head",
        "_parser",
        "_port",
        "_read_paused",
        "_reading",
        "_ready",
        "_transport",
        "_unwritten_bytes",
        "_upload_wanted",
        "_write_blocked",
        "_written_at",
        "write",
    )

    def __init__(self, port: "DataPort") -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self.write: Callable[[bytes], None] = _to_nobody
        """More of the answer: the transport's own, while there is one."""
        self._parser = httptools.HttpRequestParser(self)
        self._reading: Incoming | None = None
        """The request whose bytes are coming in."""
        self._ready: deque[Incoming] = deque()
        """Requests that are complete and wait for their turn."""
        self._current: Incoming | None = None
        """The request that is being answered."""
        self._exchange: Exchange | None = None
        """What serves it, if it goes to an engine."""
        self._backlog: deque[bytes] = deque()
        """Bytes that came while a request was served, not looked at yet."""
        self._backlog_bytes = 0
        self._head_bytes = 0
        """At most what has come of the head that is being read: whole reads, with what was before it in the first."""
        self._heard_at = port.driver.coarse.now
        """When bytes last came, or its last answer was complete (coarse time)."""
        self._known_head = HeadMemory[Incoming]()
        self._advancing = False
        self._broken = False
        """What came is no HTTP/1.1; nothing more is read."""
        self._closing = False
        self._read_paused = False
        self._upload_wanted = True
        self._write_blocked = False
        self._unwritten_bytes = 0
        self._written_at = 0.0

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(high=READ_AHEAD_BYTES, low=READ_AHEAD_BYTES // 4)
        if not self._port.opened(self):
            self._closing = True
            self._transport.write(
                problem_response(
                    TOO_MANY_CONNECTIONS,
                    f"The gateway has {self._port.connection_limit} connections open, its limit. Try again.",
                    keep_alive=False,
                )
            )
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.write = _to_nobody
        self._closing = True
        self._port.closed(self)
        self._ready.clear()
        self._backlog.clear()
        self._reading = self._current = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return  # lingering: what comes is thrown away
        self._heard_at = self._port.driver.coarse.now
        current = self._current
        if self._ready or (self._write_blocked if current is None else current.complete):
            # What comes behind a request that is being served, or behind an answer that is not read, waits as bytes.
            self._backlog.append(data)
            self._backlog_bytes += len(data)
            if self._backlog_bytes > MAX_BACKLOG_BYTES:
                self._pause_reading()
            return
        if current is None and self._reading is None and not self._backlog and not self._broken:
            incoming = self._recognised(data)
            if incoming is not None:
                self._check_head(incoming)
                self._start(incoming)
                return
            self._feed(data)
            if len(self._ready) == 1 and self._ready[0].may_come_again:
                meaning = self._ready[0].again(b"")
                if self._known_head.learn(data, meaning):
                    self._port.known_heads.learn(data, meaning)
        else:
            self._feed(data)
        self._advance()

    def pause_writing(self) -> None:
        self._write_blocked = True
        if self._exchange is not None:
            self._exchange.client_blocked(True)

    def resume_writing(self) -> None:
        self._write_blocked = False
        if self._exchange is not None:
            self._exchange.client_blocked(False)
        else:
            self._advance()

    # ------------------------------------------------------------------ httptools callbacks

    def on_message_begin(self) -> None:
        if self._reading is None:
            self._reading = Incoming()
            self._reading.arrived_at = self._port.driver.coarse.now

    def on_url(self, url: bytes) -> None:
        reading = self._reading
        assert reading is not None
        if not reading.head_complete:
            reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        reading = self._reading
        assert reading is not None
        if not reading.head_complete:  # not a trailer
            reading.headers.append((name, value))

    def on_headers_complete(self) -> None:
        reading = self._reading
        assert reading is not None
        if reading.head_complete:
            return  # the stand-in for an ignored upgrade
        reading.head_complete = True
        parser = self._parser
        reading.method = parser.get_method()
        reading.keep_alive = parser.should_keep_alive()
        reading.http_1_1 = parser.get_http_version() == "1.1"
        reading.upgrade = parser.should_upgrade()
        self._port.arrived(reading)
        try:
            if self._head_bytes > self._port.limits.max_header_bytes:
                self._check_head_size(reading)
            self._port.read_head(reading)
        except RequestProblem as problem:
            reading.problem = problem
        else:
            self._check_head(reading)

    def on_body(self, body: bytes) -> None:
        reading = self._reading
        assert reading is not None
        reading.size += len(body)
        if reading.problem is not None:
            return
        if reading.size > self._port.limits.max_body_bytes:
            reading.problem = self._port.too_large()
            reading.pieces.clear()
        elif reading.upload is not None:
            try:
                reading.upload.add(body)
            except RequestProblem as problem:
                reading.problem = problem
        else:
            reading.pieces.append(body)

    def on_message_complete(self) -> None:
        reading = self._reading
        assert reading is not None
        if reading.upgrade:
            return  # its body is still to come, see `_ignore_upgrade`
        self._reading = None
        reading.complete = True
        if reading.upload is not None and reading.problem is None:
            try:
                reading.upload.end()
            except RequestProblem as problem:
                reading.problem = problem
        if reading is self._current:
            return  # an upload that is already being served
        if len(self._ready) < MAX_PIPELINED:
            self._ready.append(reading)
        else:
            self._broken = True

    # ------------------------------------------------------------------ what an exchange asks for

    def answered(self, *, keep_alive: bool) -> None:
        """The answer to the current request is complete."""
        current, self._current, self._exchange = self._current, None, None
        assert current is not None
        if not current.complete:
            # The rest of its body is of no use any more, and the next request is behind it.
            self._linger()
        elif not keep_alive or self._port.refusing:
            self._close()
        else:
            # While it drains: the head of this answer was sent before, and the client may count on the connection.
            driver = self._port.driver
            self._heard_at = driver.clock() if driver.draining else driver.coarse.now
            if self._ready or self._backlog or self._reading is not None or self._broken:
                self._advance()

    def answer_problem(
        self, problem: Problem, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        current = self._current
        assert current is not None
        endpoint = current.endpoint
        keep_alive = current.keep_alive and current.complete and not self._port.driver.draining
        self.write(
            problem_response(
                problem,
                message,
                family=Family.OPENAI if endpoint is None else endpoint.family,
                param=param,
                request_id=current.id,
                retry_after_seconds=retry_after_seconds,
                keep_alive=keep_alive,
                head_only=current.method == b"HEAD",
                allow=endpoint.method if endpoint is not None and problem is METHOD_NOT_ALLOWED else None,
            )
        )
        self.answered(keep_alive=keep_alive)

    def break_off(self) -> None:
        self._current = self._exchange = None
        self.abort()

    def want_upload(self, wanted: bool) -> None:
        self._upload_wanted = wanted
        if wanted:
            self._resume_reading()
        else:
            self._pause_reading()

    # ------------------------------------------------------------------ what the port asks for

    @property
    def address(self) -> str:
        """Where the client connects from; empty for what is no TCP connection."""
        peer: object = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(cast("tuple[object, ...]", peer)[0]) if isinstance(peer, tuple) and peer else ""

    def abort(self) -> None:
        """Close at once; whatever is served is told that the client left."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def may_ask(self) -> bool:
        """Whether a request may still come that nobody told the client not to send."""
        return self._current is None and not self._closing and not self._write_blocked

    def end(self) -> None:
        """Close as soon as nothing is being served."""
        if self._current is None and not self._ready and not self._closing:
            self._close()

    def sweep(self, now: float) -> None:
        """Close what is too slow or idle for too long (coarse time)."""
        transport = self._transport
        if transport is None or self._exchange is not None:
            return
        unwritten_bytes = transport.get_write_buffer_size()
        if unwritten_bytes:
            if unwritten_bytes != self._unwritten_bytes:
                self._unwritten_bytes, self._written_at = unwritten_bytes, now
            elif now - self._written_at > WRITE_IDLE_SECONDS:
                self.abort()
            return
        silent_seconds = now - self._heard_at
        reading = self._reading
        if self._closing:
            if silent_seconds > LINGER_SECONDS:
                self.abort()
        elif reading is None:
            drained_seconds = self._port.drained_seconds(now)
            if silent_seconds > KEEP_ALIVE_SECONDS or min(silent_seconds, drained_seconds) >= DRAIN_GRACE_SECONDS:
                self._close()
        elif not reading.head_complete:
            if now - reading.arrived_at > self._port.limits.header_timeout_seconds:
                self._time_out(reading, "the rest of its head")
        elif silent_seconds > BODY_IDLE_SECONDS:
            self._time_out(reading, "the rest of its body")

    # ------------------------------------------------------------------ inside: reading

    def _recognised(self, data: bytes) -> Incoming | None:
        """The request, if `data` is one with a head that came before, on this connection or another."""
        known = self._known_head
        body = known.body_of(data)
        if body is not None:
            assert known.meaning is not None
            return self._port.arrived_again(known.meaning, body)
        found = self._port.known_heads.find(data)
        if found is None:
            return None
        known.known_elsewhere()
        return self._port.arrived_again(*found)

    def _check_head(self, incoming: Incoming) -> None:
        try:
            self._port.check_head(incoming, self)
        except RequestProblem as problem:
            incoming.problem = problem

    def _feed(self, data: bytes) -> None:
        if self._broken:
            return
        head_goes_on = self._reading is not None and not self._reading.head_complete
        self._head_bytes = self._head_bytes + len(data) if head_goes_on else len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours
        except httptools.HttpParserError as error:
            self._refuse_rest(RequestProblem(INVALID_REQUEST, f"What came is not a valid HTTP/1.1 request: {error}."))
        reading = self._reading
        too_long = self._head_bytes > self._port.limits.max_header_bytes
        if head_goes_on and too_long and reading is not None and not reading.head_complete:
            self._refuse_rest(self._port.head_too_large())
        current = self._current
        if current is not None and current.upload is not None and self._exchange is not None:
            self._pass_upload(current, current.upload, self._exchange)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A request for another protocol (h2c from Java's client, say) is served as the HTTP/1.1 that it is.

        llhttp stops after such a head and takes the request for bodiless, so a new parser is shown the same framing.
        """
        reading = self._reading
        if reading is None or reading.found is None or reading.method == b"CONNECT":
            self._refuse_rest(RequestProblem(INVALID_REQUEST, "CONNECT is not served here."))
            return
        reading.upgrade = False
        self._parser = httptools.HttpRequestParser(self)
        if reading.found.chunked:
            framing = b"transfer-encoding: chunked"
        else:
            framing = b"content-length: %d" % (reading.found.content_length or 0)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        self._feed(rest)

    def _refuse_rest(self, problem: RequestProblem) -> None:
        """What came cannot be read, nor what comes behind it: answer `problem` in its turn, then close."""
        if self._broken:
            return  # it is behind what was given up already: its answer would be taken for that of another request
        self._broken = True
        self._port.counters.bad_requests_total += 1
        reading, self._reading = self._reading, None
        if reading is not None and reading is self._current:
            if self._exchange is not None:
                self._exchange.fail(problem.problem, problem.message)
            return
        refused = reading or Incoming()
        if not refused.id:
            self._port.arrived(refused)
        refused.keep_alive = False
        refused.problem = problem
        self._ready.append(refused)

    def _check_head_size(self, reading: Incoming) -> None:
        """The reads that brought this head were longer than a head may be; they may have brought more than it."""
        head_bytes = len(reading.target) + sum(len(name) + len(value) + 4 for name, value in reading.headers)
        if head_bytes > self._port.limits.max_header_bytes:
            reading.keep_alive = False
            raise self._port.head_too_large()

    def _pass_upload(self, current: Incoming, upload: Upload, exchange: Exchange) -> None:
        """More of the body of the request that is being served came."""
        if current.problem is not None:
            exchange.fail(current.problem.problem, current.problem.message)
            return
        exchange.upload_came()
        if upload.size > READ_AHEAD_BYTES:
            self.want_upload(False)

    def _pause_reading(self) -> None:
        if not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    # ------------------------------------------------------------------ inside: serving

    def _advance(self) -> None:
        """Serve what is there, in order. A loop and not a recursion, however many requests came at once."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._current is None and not self._closing and not self._write_blocked:
                if self._ready:
                    self._start(self._ready.popleft())
                elif self._broken:
                    self._linger()
                elif self._backlog:
                    data = b"".join(self._backlog)
                    self._backlog.clear()
                    self._backlog_bytes = 0
                    self._resume_reading()
                    self._feed(data)
                elif not self._start_early():
                    break
        finally:
            self._advancing = False

    def _start_early(self) -> bool:
        """Serve a request whose body is still coming, if that is how it is served."""
        reading = self._reading
        if reading is None or not reading.head_complete:
            return False
        if reading.problem is not None:
            if not reading.owes_continue and reading.problem.problem is not REQUEST_TOO_LARGE:
                return False  # its body is thrown away first, so that the connection can go on
            self._start(reading)
            return True
        if reading.owes_continue:
            reading.owes_continue = False
            self.write(CONTINUE)
        upload = reading.upload
        if upload is None:
            return False
        if not upload.ready:
            if upload.size > READ_AHEAD_BYTES:
                reading.problem = RequestProblem(
                    REQUEST_TOO_LARGE,
                    f"The form's fields must come before its file: the first {READ_AHEAD_BYTES} bytes name no `model`.",
                    param="model",
                )
                return True
            return False
        self._start(reading)
        return True

    def _start(self, incoming: Incoming) -> None:
        self._current = incoming
        try:
            if incoming.problem is not None:
                raise incoming.problem
            endpoint = incoming.endpoint
            assert endpoint is not None
            if incoming.method == b"OPTIONS":
                self._answer(incoming, 204, b"allow: %b, OPTIONS\r\n" % endpoint.method.encode("ascii"), b"")
            elif endpoint.kind is _MODELS:
                body = self._port.models(incoming)
                head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
                self._answer(incoming, 200, head, b"" if incoming.method == b"HEAD" else body)
            else:
                exchange, queued = self._port.admit(self, incoming)
                self._exchange = exchange
                if queued:
                    self._port.driver.submit(exchange)
                else:
                    self._port.driver.submit_unqueued(exchange)
        except RequestProblem as problem:
            self._port.record(incoming, status=problem.problem.status, reason=problem.problem.code)
            self.answer_problem(
                problem.problem,
                problem.message,
                param=problem.param,
                retry_after_seconds=problem.retry_after_seconds,
            )

    def _answer(self, incoming: Incoming, status: int, lines: bytes, body: bytes) -> None:
        keep_alive = incoming.keep_alive and not self._port.driver.draining
        connection = b"" if keep_alive and incoming.http_1_1 else b"connection: keep-alive\r\n"
        if not keep_alive:
            connection = b"connection: close\r\n"
        self._port.record(incoming, status=status)
        self.write(
            b"%b%bx-request-id: %b\r\n%b\r\n%b"
            % (status_line(status), lines, incoming.id.encode("ascii"), connection, body)
        )
        self.answered(keep_alive=keep_alive)

    def _time_out(self, reading: Incoming, what: str) -> None:
        self._refuse_rest(
            RequestProblem(REQUEST_TIMEOUT, f"The client did not send {what} in time. Send requests without a pause.")
        )
        self._advance()

    # ------------------------------------------------------------------ inside: closing

    def _close(self) -> None:
        """Close when what is written is sent."""
        self._closing = True
        self._ready.clear()
        if self._transport is not None:
            self._transport.close()

    def _linger(self) -> None:
        """Close, but let the client read the answer first: it may still be sending."""
        self._closing = True
        self._ready.clear()
        self._heard_at = self._port.driver.coarse.now
        if self._transport is not None:
            self._resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()  # TLS ends both directions at once


class DataPort:
    """Listens for clients, knows their keys, and hands what they ask for to the driver."""

    def __init__(
        self,
        *,
        driver: PoolDriver,
        directory: Directory,
        admission: Admission | None = None,
        limits: Limits | None = None,
        sweep_seconds: float = 1.0,
    ) -> None:
        """`admission`: limits and budgets; None: there are none.

        `sweep_seconds`: how often timeouts are looked at; they are late by at most that.
        """
        self.driver = driver
        self.directory = directory
        self.admission = admission
        self.limits = limits or Limits()
        self.counters = driver.counters
        self._draining_since: float | None = None
        self.refusing = False
        """It has drained: what still comes is answered `shutting_down`."""
        self.descriptors_allow = sys.maxsize
        """As many connections as the process may have open files for."""
        self._sweep_seconds = sweep_seconds
        self.known_heads = HeadCache[Incoming]()
        self._failed_logins = FailedLogins()
        self._connections: set[ClientConnection] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._swept = asyncio.Event()
        """Set for a moment after each sweep."""
        self._id_prefix = secrets.token_hex(8)
        self._next_number = 0
        self._started_wall_at = int(driver.wall())

    # ------------------------------------------------------------------ life

    async def start(
        self, address: Address, *, sock: socket.socket | None = None, tls: ssl.SSLContext | None = None
    ) -> Address:
        """Listen, on `sock` if one is given, with TLS if there is a certificate; returns where.

        Raises:
            OSError: the address cannot be listened on.
        """
        place: dict[str, Any] = {"host": address.host, "port": address.port} if sock is None else {"sock": sock}
        if tls is not None:
            place |= {"ssl": tls, "ssl_handshake_timeout": self.limits.header_timeout_seconds}
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(self), backlog=LISTEN_BACKLOG, **place
        )
        self._sweep_later()
        return served_at(self._server)

    def update(self, limits: Limits) -> None:
        """A reload changed the limits. (Keys are switched in the directory, pools in the driver.)"""
        self.limits = limits

    def drained_seconds(self, now: float) -> float:
        """How long it has been draining; 0: it is not."""
        return 0.0 if self._draining_since is None else now - self._draining_since

    async def drain(self, limit_seconds: float) -> None:
        """Stop accepting, let what has been accepted finish, and after `limit_seconds` end what is left.

        What is held goes on being sent while it drains. A client may have sent a request that is still on its way: it
        is served, and its answer says that the connection closes. What is left at the end is answered `shutting_down`,
        or its stream ends with that error; every grant is released. Then clients get a moment to read what was written.
        """
        self.driver.draining = True
        self._draining_since = self.driver.clock()
        if self._server is not None:
            self._server.close()
        try:
            async with asyncio.timeout(limit_seconds):
                await self.driver.wait_until_all_ended()
                while any(connection.may_ask for connection in self._connections):
                    await self._swept.wait()
                    await self.driver.wait_until_all_ended()
        except TimeoutError:
            if self.driver.open_requests:
                log.warning(
                    "%d requests did not finish within %g s of draining", self.driver.open_requests, limit_seconds
                )
        self.refusing = True
        self.driver.fail_all(SHUTTING_DOWN, "The gateway is shutting down. Try again.")
        for connection in tuple(self._connections):
            connection.end()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._all_closed.wait()
        except TimeoutError:
            log.warning("%d clients had not read their answers when the gateway ended", len(self._connections))

    async def close(self) -> None:
        """Close everything at once. Afterwards no connection is open and nothing is in flight."""
        self.refusing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        self.driver.close()
        await self._all_closed.wait()
        await self.driver.wait_until_closed()

    def sweep(self) -> None:
        """Look at every timeout."""
        self.driver.sweep()
        now = self.driver.coarse.now
        for connection in tuple(self._connections):
            connection.sweep(now)
        self._swept.set()
        self._swept.clear()

    def _sweep_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._sweep_seconds, self._sweep_and_again)

    def _sweep_and_again(self) -> None:
        self._sweep_later()
        self.sweep()

    # ------------------------------------------------------------------ its connections

    @property
    def connection_limit(self) -> int:
        """How many clients may be connected: beyond it the operating system would refuse files to requests."""
        return min(self.limits.max_connections, self.descriptors_allow)

    def opened(self, connection: ClientConnection) -> bool:
        """A client connected; False: there are too many."""
        self._connections.add(connection)
        self._all_closed.clear()
        self.counters.connections_total += 1
        self.counters.open_connections += 1
        if len(self._connections) > self.connection_limit:
            self.counters.connections_refused_total += 1
            return False
        return True

    def closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self.counters.open_connections -= 1
        if not self._connections:
            self._all_closed.set()

    # ------------------------------------------------------------------ what requests ask for

    def arrived(self, incoming: Incoming) -> None:
        """A request's head is complete, or will never be."""
        incoming.arrived_at = self.driver.clock()
        incoming.arrived_wall_at = self.driver.wall()
        self._next_number += 1
        incoming.id = incoming.own_id = f"{self._id_prefix}-{self._next_number}"
        if incoming.found is not None and incoming.found.request_id is not None:
            incoming.id = incoming.found.request_id.decode("ascii")

    def arrived_again(self, known: Incoming, body: bytes) -> Incoming:
        """A request whose head came before, with another body."""
        number = self._next_number = self._next_number + 1
        return known.again(body, f"{self._id_prefix}-{number}", self.driver.clock(), self.driver.wall())

    def read_head(self, incoming: Incoming) -> None:
        """What a request's head says, whenever it comes.

        Raises:
            RequestProblem: what it will be answered.
        """
        try:
            found = incoming.found = read_request_headers(incoming.headers)
        except RequestProblem:
            incoming.keep_alive = False  # where its body ends may be what is wrong
            raise
        if found.request_id is not None:
            incoming.id = found.request_id.decode("ascii")
        incoming.owes_continue = found.expects_continue and incoming.http_1_1
        path = incoming.target.partition(b"?")[0]
        endpoint = find_endpoint(path)
        if endpoint is None and path.startswith(MODELS_PATH):
            endpoint = find_endpoint(MODELS_PATH[:-1])
        if endpoint is None:
            raise RequestProblem(NOT_FOUND, f"There is no {shown(path)} here. The paths are those of OpenAI's API.")
        incoming.endpoint = endpoint
        method = incoming.method.decode("ascii")
        if method == "OPTIONS":
            return
        if method != endpoint.method and not (method == "HEAD" and endpoint.method == "GET"):
            raise RequestProblem(
                METHOD_NOT_ALLOWED, f"{method} is not served at {endpoint.path}; use {endpoint.method}."
            )
        if found.key is None:
            raise RequestProblem(
                INVALID_API_KEY, "The request carries no API key. Send `Authorization: Bearer <key>` or `x-api-key`."
            )
        incoming.key_sha256 = hashlib.sha256(found.key).digest()
        if found.content_encoding not in (b"", b"identity"):
            raise RequestProblem(
                UNSUPPORTED_MEDIA_TYPE,
                f"A body in content-encoding {shown(found.content_encoding)} is not read. Send it uncompressed.",
            )
        if endpoint.body is BodyKind.MULTIPART:
            incoming.upload = Upload(found.content_length, FormReader(found.content_type))

    def check_head(self, incoming: Incoming, client: ClientConnection) -> None:
        """What a head means now: who asks, and whether that is served.

        Raises:
            RequestProblem: what it will be answered.
        """
        if incoming.key_sha256 is None:
            return  # OPTIONS needs no key
        identity = incoming.identity = self.directory.find(incoming.key_sha256)
        if identity is None:
            raise self._wrong_key(client.address)
        if self.refusing:
            raise RequestProblem(SHUTTING_DOWN, "The gateway is shutting down. Try again.")
        found = incoming.found
        assert found is not None
        length = incoming.size if incoming.complete else found.content_length
        if length is not None and length > self.limits.max_body_bytes:
            raise self.too_large()

    def admit(self, client: ClientConnection, incoming: Incoming) -> tuple[Exchange, bool]:
        """The exchange for a request whose body is known, and whether a queue has a say in it.

        Raises:
            RequestProblem: what it will be answered.
        """
        endpoint, identity, found, upload = incoming.endpoint, incoming.identity, incoming.found, incoming.upload
        assert endpoint is not None
        assert identity is not None
        assert found is not None
        if upload is None:
            pieces = incoming.pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()  # the exchange keeps it as long as it must
            facts = inspect_body(endpoint, body)
        else:
            body = b""
            facts = upload.form.facts()
        model = facts.model
        if model is None:
            raise missing_model(self._models_of(identity))
        home = self.driver.pool_of_model(model)
        if home is None or (identity.models is not None and model not in identity.models):
            raise unknown_model(model, self._models_of(identity))
        # A class is the most a key may ask: batch is above interactive in number and below it in right.
        service_class, by_header, by_body = identity.service_class, found.service_class, facts.service_class
        if by_header is not None and by_header > service_class:
            service_class = by_header
        if by_body is not None and by_body > service_class:
            service_class = by_body
        request = Request(
            incoming.own_id,  # not the client's: two clients may use the same one at once
            identity.team_at(home.spec.level),
            service_class,
            facts.slots,
            facts.estimated_prompt_tokens + (facts.max_tokens or 0),
            len(body) if upload is None else READ_AHEAD_BYTES,
            upload is None and not facts.stateful,
        )
        reservation = None
        if self.admission is not None:
            reservation = self.admission.admit(
                identity,
                model=model,
                prompt_tokens=facts.estimated_prompt_tokens,
                max_tokens=facts.max_tokens,
                slots=facts.slots,
                cost=home.spec.cost if endpoint.takes_slots else None,
            )
        spec, arrived_at = home.spec, incoming.arrived_at
        tracer, forwarded, trace = self.driver.tracer, found.forwarded, None
        if tracer is not None:
            trace, forwarded = tracer.begin(forwarded)
        # In the order of its fields: with their names CPython makes a dictionary of them first, at every call.
        exchange = Exchange(
            self.driver,
            client,
            client.write,
            home,
            spec,
            home,  # serves it, if no other has to
            home.queue,
            endpoint,
            request,
            incoming.id,
            identity.key_id,
            model,
            facts,
            body,
            upload,
            forwarded,
            trace,
            incoming.keep_alive,
            incoming.http_1_1,
            arrived_at,
            incoming.arrived_wall_at,
            incoming.received_at or self.driver.clock(),
            reservation,
            arrived_at,  # nothing was heard of it since
            arrived_at + spec.timeouts.longest_request_seconds,
        )
        return exchange, endpoint.takes_slots

    def models(self, incoming: Incoming) -> bytes:
        """The answer to GET /v1/models, or to one of its models.

        Raises:
            RequestProblem: there is no such model for this key.
        """
        identity = incoming.identity
        assert identity is not None
        path = incoming.target.partition(b"?")[0]
        name = unquote(path[len(MODELS_PATH) :].decode("latin-1")) if path.startswith(MODELS_PATH) else ""
        if name:
            if name not in self._models_of(identity):
                raise unknown_model(name, self._models_of(identity))
            return msgspec.json.encode(self._model_card(name))
        cards = [self._model_card(model) for model in self._models_of(identity)]
        return msgspec.json.encode({"object": "list", "data": cards})

    def record(self, incoming: Incoming, *, status: int, reason: str = "") -> None:
        """A request that fairshare answered itself has ended."""
        identity, endpoint = incoming.identity, incoming.endpoint
        tracer = self.driver.tracer
        self.driver.record(
            RequestRecord(
                id=incoming.id,
                endpoint="" if endpoint is None else endpoint.path,
                key_id="" if identity is None else identity.key_id,
                team="" if identity is None else identity.team,
                arrived_at=incoming.arrived_wall_at,
                total_seconds=self.driver.clock() - incoming.arrived_at,
                outcome=Outcome.REFUSED if reason else Outcome.COMPLETED,
                status=status,
                reason=reason,
                trace=None if tracer is None or incoming.found is None else tracer.begin(incoming.found.forwarded)[0],
            )
        )

    def _wrong_key(self, address: str) -> RequestProblem:
        """The same for a key that never was and one that was taken back: both are only not in the directory."""
        wait_seconds = self._failed_logins.failed(address, self.driver.coarse.now)
        if wait_seconds is None:
            return RequestProblem(INVALID_API_KEY, "The API key is not valid. Ask whoever runs fairshare for one.")
        return RequestProblem(
            TOO_MANY_FAILED_LOGINS,
            f"Too many requests with keys that are not valid came from your address. Try a good key, or again in "
            f"{ceil(wait_seconds)} s.",
        )

    def too_large(self) -> RequestProblem:
        return RequestProblem(
            REQUEST_TOO_LARGE,
            f"The body is longer than max_body, {self.limits.max_body_bytes} bytes. Send less at once.",
        )

    def head_too_large(self) -> RequestProblem:
        return RequestProblem(
            HEADERS_TOO_LARGE,
            f"The headers are longer than max_header, {self.limits.max_header_bytes} bytes. Send fewer.",
        )

    # ------------------------------------------------------------------ inside

    def _models_of(self, identity: Identity) -> list[str]:
        """What clients may call models with this key, each once."""
        return [model for model in self.driver.models if identity.models is None or model in identity.models]

    def _model_card(self, model: str) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": model,
            "object": "model",
            "created": self._started_wall_at,
            "owned_by": "fairshare",
        }
        pool = self.driver.models[model]
        served_name = pool.spec.models[model]
        lengths = [seen[served_name] for seen in pool.context_tokens.values() if served_name in seen]
        if lengths:
            card["max_model_len"] = min(lengths)  # what every instance can take
        return card


def shown(value: bytes) -> str:
    """What a client sent, fit for a message."""
    return repr(value[:100].decode("latin-1"))
