"""Which headers go up to an engine and which come down to a client, and the heads that are written.

Up: a list of what is allowed, because credentials cannot be listed by name; so no credential, cookie, priority, tenant
or fairshare header of a client reaches an engine, known today or not. Down: all but what belongs to one connection,
cookies, an engine's authentication, and names that are ours.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from http import HTTPStatus

import msgspec

from fairshare.core.priority import ServiceClass, Standing
from fairshare.wire.endpoints import Family
from fairshare.wire.problems import (
    INVALID_API_KEY,
    INVALID_REQUEST,
    Problem,
    RequestProblem,
    error_body,
)

Headers = Sequence[tuple[bytes, bytes]]
"""Names (in any case) and values, in the order they came."""

FORWARDED_UP = (
    b"accept",
    b"accept-language",
    b"anthropic-beta",
    b"anthropic-version",
    b"baggage",
    b"content-type",
    b"traceparent",
    b"tracestate",
    b"user-agent",
)
"""A client's headers that go to the engine, unless `Connection` names them."""

VLLM_PRIORITY_HEADER = b"x-vllm-priority"
SGLANG_PRIORITY_HEADER = b"x-override-priority"

_READ_ONCE = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"transfer-encoding",
        b"x-api-key",
        b"x-fairshare-class",
    }
)
"""Headers that decide something: which of two counts must not depend on who reads them."""

_READ = _READ_ONCE | frozenset(FORWARDED_UP) | {b"connection", b"expect", b"x-request-id"}

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_KEPT_FROM_CLIENTS = _HOP_BY_HOP | {
    b"authorization",
    b"alt-svc",
    b"content-length",
    b"set-cookie",
    b"set-cookie2",
    b"www-authenticate",
    b"authentication-info",
    b"x-api-key",
    b"x-goog-api-key",
    b"x-request-id",
    b"x-vllm-priority",
}
"""An engine's headers that never come down; `content-length` and `x-request-id` are written by the relay."""

PREPARED = 4096
"""Header lines that are kept ready, those used last; they are made of configured names only."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RequestHeaders(msgspec.Struct, kw_only=True, gc=False):
    """What the gateway needs to know of a client's headers."""

    key: bytes | None
    """The API key, from `Authorization: Bearer` or `x-api-key`."""
    request_id: bytes | None
    """The client's own, if it follows the rule (at most 64 of `[A-Za-z0-9._-]`); else None: make one."""
    service_class: ServiceClass | None
    """What `x-fairshare-class` asks for."""
    content_type: bytes
    content_encoding: bytes
    """Lower case; empty: identity."""
    content_length: int | None
    chunked: bool
    expects_continue: bool
    forwarded: bytes
    """Header lines for the engine."""


def read_request_headers(headers: Headers) -> RequestHeaders:
    """One pass over a client's headers.

    Raises `RequestProblem` for what two servers could read in two ways (two lengths, a length and chunks, a deciding
    header twice) and for an unknown class: a request of which the gateway is not sure is not sent on.
    """
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        lowered = name.lower()
        if lowered in _READ:
            if lowered in values:
                if lowered in _READ_ONCE:
                    raise RequestProblem(INVALID_REQUEST, f"The header {lowered.decode()} came twice. Send it once.")
                value = values[lowered] + b", " + value
            values[lowered] = value
    get = values.get
    client_id = get(b"x-request-id")
    length = get(b"content-length")
    encoding = get(b"transfer-encoding")
    if encoding is not None:
        if encoding.strip().lower() != b"chunked":
            raise _ambiguous(f"Transfer-Encoding {_shown(encoding)}; only `chunked` is understood")
        if length is not None:
            raise _ambiguous("both Content-Length and Transfer-Encoding")
    service_class = get(b"x-fairshare-class")
    return RequestHeaders(
        key=_key(get(b"authorization"), get(b"x-api-key")),
        request_id=client_id if client_id is not None and _REQUEST_ID.fullmatch(client_id) else None,
        service_class=None if service_class is None else _service_class(service_class),
        content_type=get(b"content-type", b""),
        content_encoding=get(b"content-encoding", b"").strip().lower(),
        content_length=None if length is None else _length(length),
        chunked=encoding is not None,
        expects_continue=get(b"expect", b"").strip().lower() == b"100-continue",
        forwarded=_forwarded(values),
    )


def _forwarded(values: dict[bytes, bytes]) -> bytes:
    connection = values.get(b"connection")
    named = () if connection is None or connection.lower() in _PLAIN_CONNECTIONS else _tokens(connection)
    parts: list[bytes] = []
    lines = 0
    for name in FORWARDED_UP:
        if name in values and name not in named:
            parts += (name, b": ", values[name], b"\r\n")
            lines += 1
    return _unbroken(b"".join(parts), lines)


_PLAIN_CONNECTIONS = frozenset({b"keep-alive", b"close"})


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip() for token in value.lower().split(b",")]


def _unbroken(block: bytes, lines: int) -> bytes:
    """The block, unless a value in it would begin another line. The HTTP parser refuses such values; this is the
    second lock on the same door."""
    if block.count(b"\n") != lines or block.count(b"\r") != lines or b"\0" in block:
        raise RequestProblem(INVALID_REQUEST, "A header's value holds a line break or a zero byte. Send it without.")
    return block


def request_id(client: bytes | None, make: Callable[[], str]) -> str:
    """The id of a request: the client's own if it follows the rule, else a new one."""
    if client is not None and _REQUEST_ID.fullmatch(client):
        return client.decode("ascii")
    return make()


def upstream_opening(
    *,
    method: str,
    path: str,
    host: bytes,
    priority: int | None = None,
    priority_header: bytes = VLLM_PRIORITY_HEADER,
    api_key: str | None = None,
) -> bytes:
    """The lines that are the same for many requests to an engine.

    `priority` None: no priority at all. `api_key`: the engine's own, never a client's. Asks for no compression, since
    usage is read on the way.
    """
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: " + host, b"accept-encoding: identity"]
    if priority is not None:
        lines.append(b"%b: %d" % (priority_header, priority))
    if api_key is not None:
        lines.append(b"authorization: Bearer " + api_key.encode())
    return b"\r\n".join([*lines, b""])


def upstream_head(
    opening: bytes, forwarded: bytes, request_id: str, content_length: int | None, body: bytes = b""
) -> bytes:
    """The head of a request to an engine, and what is known of its body.

    `opening`: of `upstream_opening`. `content_length` None: the body comes in chunks (with `GET`: there is none).
    """
    if content_length is not None:
        return b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            opening,
            forwarded,
            request_id.encode(),
            content_length,
            body,
        )
    framing = b"" if opening.startswith(b"GET ") else b"transfer-encoding: chunked\r\n"
    return b"%b%bx-request-id: %b\r\n%b\r\n" % (opening, forwarded, request_id.encode(), framing)


class ResponseHeaders(msgspec.Struct, kw_only=True, gc=False):
    """What the gateway needs to know of an engine's headers."""

    status: int = 200
    opening: bytes = b""
    """The status line and `lines`."""
    lines: bytes = b""
    """Header lines for the client, without framing (`content-length`, `transfer-encoding`) and connection."""
    content_length: int | None = None
    event_stream: bool = False
    """The body is a stream of server-sent events."""
    encoded: bool = False
    """Compressed although we asked for none: it is relayed as it is, and its usage cannot be read."""


def read_response_headers(headers: Headers, status: int = 200) -> ResponseHeaders:
    """One pass over an engine's headers. Values that would begin another line are dropped with their header."""
    found = ResponseHeaders(status=status)
    parts: list[bytes] = []
    dropped: list[bytes] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _KEPT_FROM_CLIENTS:
            if lowered == b"content-type":
                found.event_stream = value[:17].lower() == b"text/event-stream"
            elif lowered == b"content-encoding":
                found.encoded = value.strip().lower() not in (b"", b"identity")
            parts += (lowered, b": ", value, b"\r\n")
        elif lowered == b"content-length":
            found.content_length = int(value) if value.isdigit() else None
        elif lowered == b"connection" and value.lower() not in _PLAIN_CONNECTIONS:
            dropped += _tokens(value)
    lines = b"".join(parts)
    breaks = len(parts) // 4
    if dropped or b"x-fairshare-" in lines or lines.count(b"\n") != breaks or lines.count(b"\r") != breaks:
        fields = [parts[at : at + 4] for at in range(0, len(parts), 4)]
        lines = b"".join(b"".join(field) for field in fields if _may_come_down(field[0], field[2], dropped))
    found.lines = lines
    found.opening = status_line(status) + lines
    return found


def _may_come_down(name: bytes, value: bytes, dropped: list[bytes]) -> bool:
    return not (name in dropped or name.startswith(b"x-fairshare-") or b"\n" in value or b"\r" in value)


_STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of a response; an unknown status has no phrase."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def fairshare_lines(
    pool: str, standing: Standing, priority: int | None, held_seconds: float, explanation: bytes = b""
) -> bytes:
    """Our header lines on every relayed response; `explanation` (ASCII) only where there is something to explain."""
    lines = _standing_lines(pool, standing, priority, round(held_seconds * 1000) if held_seconds else 0)
    return lines + b"x-fairshare-explain: %b\r\n" % explanation if explanation else lines


@lru_cache(PREPARED)
def _standing_lines(pool: str, standing: Standing, priority: int | None, held_milliseconds: int) -> bytes:
    lines = f"x-fairshare-pool: {pool}\r\nx-fairshare-standing: {standing.value}\r\n"
    if priority is not None:
        lines += f"x-fairshare-priority: {priority}\r\n"
    return f"{lines}x-fairshare-held-ms: {held_milliseconds}\r\n".encode()


def problem_response(
    problem: Problem,
    message: str,
    *,
    family: Family = Family.OPENAI,
    param: str | None = None,
    request_id: str | None = None,
    retry_after_seconds: float | None = None,
    keep_alive: bool = True,
    head_only: bool = False,
    allow: str | None = None,
) -> bytes:
    """A whole response of our own. `head_only`: it answers a HEAD. `allow`: for 405, the methods that there are."""
    body = error_body(family, problem, message, param=param)
    head = status_line(problem.status) + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    if request_id is not None:
        head += b"x-request-id: %b\r\n" % request_id.encode()
    wait_seconds = problem.retry_after_seconds if retry_after_seconds is None else retry_after_seconds
    if wait_seconds is not None:
        # Whole seconds, at least one: clients read 0 as "at once".
        head += b"retry-after: %d\r\n" % max(1, -int(-wait_seconds // 1))
    if allow is not None:
        head += b"allow: %b\r\n" % allow.encode()
    if problem is INVALID_API_KEY:
        head += b"www-authenticate: Bearer\r\n"
    if not keep_alive:
        head += b"connection: close\r\n"
    return head + b"\r\n" + (b"" if head_only else body)


def _key(authorization: bytes | None, api_key: bytes | None) -> bytes | None:
    bearer = None
    if authorization is not None:
        scheme, _, token = authorization.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            bearer = token.strip() or None
    api_key = None if api_key is None else api_key.strip() or None
    if bearer is not None and api_key is not None and bearer != api_key:
        raise RequestProblem(INVALID_API_KEY, "The request carries two different API keys. Send one.")
    return bearer or api_key


def _service_class(value: bytes) -> ServiceClass:
    match value.strip().lower():
        case b"interactive":
            return ServiceClass.INTERACTIVE
        case b"batch":
            return ServiceClass.BATCH
        case _:
            raise RequestProblem(
                INVALID_REQUEST, f"`x-fairshare-class` must be interactive or batch, got {_shown(value)}."
            )


def _length(value: bytes) -> int:
    text = value.strip()
    if not text.isdigit() or len(text) > 15:
        raise _ambiguous(f"Content-Length {_shown(value)}")
    return int(text)


def _ambiguous(what: str) -> RequestProblem:
    return RequestProblem(
        INVALID_REQUEST, f"The request's length can be read in several ways: {what}. Send one Content-Length."
    )


def _shown(value: bytes) -> str:
    text = repr(value[:60])[1:]
    return text if len(value) <= 60 else text + "..."
