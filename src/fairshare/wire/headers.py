"""Which headers go up to an engine and which come down to a client, and the heads that are written.

Up: a list of what is allowed, because credentials cannot be listed by name; so no credential, cookie, priority, tenant
or fairshare header of a client reaches an engine, known today or not. Down: all but what belongs to one connection,
cookies, an engine's authentication, and names that are ours.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

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

FORWARDED_UP = frozenset(
    {
        b"accept",
        b"accept-language",
        b"anthropic-beta",
        b"anthropic-version",
        b"baggage",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"user-agent",
    }
)
"""A client's headers that go to the engine, unless `Connection` names them."""

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

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}", re.ASCII)

_BEARER = re.compile(rb"bearer +([^\s]+)", re.IGNORECASE)


@dataclass(slots=True)
class RequestHeaders:
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

    Raises `RequestProblem` for what two servers could read in two ways (two lengths, a length and chunks, several
    keys) and for an unknown class: a request of which the gateway is not sure is not sent on.
    """
    found = RequestHeaders(None, None, None, b"", b"", None, False, False, b"")
    forwarded: list[tuple[bytes, bytes]] = []
    named: list[bytes] = []
    transfer_encoding: bytes | None = None
    for name, value in headers:
        lowered = name.lower()
        if lowered in FORWARDED_UP:
            forwarded.append((lowered, value))
            if lowered == b"content-type":
                found.content_type = value
        elif lowered in _READ:
            match lowered:
                case b"authorization":
                    bearer = _BEARER.fullmatch(value.strip())
                    if bearer is not None:
                        _take_key(found, bearer[1])
                case b"x-api-key":
                    if value.strip():
                        _take_key(found, value.strip())
                case b"x-request-id":
                    found.request_id = value if _REQUEST_ID.fullmatch(value) else None
                case b"x-fairshare-class":
                    _take_class(found, value)
                case b"content-length":
                    _take_length(found, value)
                case b"content-encoding":
                    found.content_encoding = value.strip().lower()
                case b"transfer-encoding":
                    if transfer_encoding is not None:
                        raise _ambiguous("two Transfer-Encoding headers")
                    transfer_encoding = value.strip().lower()
                    if transfer_encoding != b"chunked":
                        raise _ambiguous(f"Transfer-Encoding {_shown(value)}; only `chunked` is understood")
                    found.chunked = True
                case b"expect":
                    found.expects_continue = value.strip().lower() == b"100-continue"
                case _:
                    named.extend(token.strip().lower() for token in value.split(b","))
    if found.chunked and found.content_length is not None:
        raise _ambiguous("both Content-Length and Transfer-Encoding")
    found.forwarded = b"".join(
        b"%b: %b\r\n" % line for line in forwarded if line[0] not in named and not _breaks_lines(line[1])
    )
    return found


_READ = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"transfer-encoding",
        b"x-api-key",
        b"x-fairshare-class",
        b"x-request-id",
    }
)


def request_id(client: bytes | None, make: Callable[[], str]) -> str:
    """The id of a request: the client's own if it follows the rule, else a new one."""
    if client is not None and _REQUEST_ID.fullmatch(client):
        return client.decode("ascii")
    return make()


def upstream_head(
    *,
    method: str,
    path: str,
    host: bytes,
    request_id: str,
    forwarded: bytes = b"",
    priority: int | None = None,
    api_key: str | None = None,
    content_length: int | None = None,
) -> bytes:
    """The head of a request to an engine.

    `priority` None: no priority at all. `api_key`: the engine's own, never a client's. `content_length` None: the
    body comes in chunks (with `method` GET: there is none). Asks for no compression, since usage is read on the way.
    """
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%baccept-encoding: identity\r\nx-request-id: %b\r\n" % (
        method.encode(),
        path.encode(),
        host,
        forwarded,
        request_id.encode(),
    )
    if priority is not None:
        head += b"x-vllm-priority: %d\r\n" % priority
    if api_key is not None:
        head += b"authorization: Bearer %b\r\n" % api_key.encode()
    if content_length is not None:
        return head + b"content-length: %d\r\n\r\n" % content_length
    return head + (b"\r\n" if method == "GET" else b"transfer-encoding: chunked\r\n\r\n")


@dataclass(slots=True)
class ResponseHeaders:
    """What the gateway needs to know of an engine's headers."""

    lines: bytes
    """Header lines for the client, without framing (`content-length`, `transfer-encoding`) and connection."""
    content_length: int | None
    event_stream: bool
    """The body is a stream of server-sent events."""
    encoded: bool
    """Compressed although we asked for none: it is relayed as it is, and its usage cannot be read."""


def read_response_headers(headers: Headers) -> ResponseHeaders:
    """One pass over an engine's headers."""
    found = ResponseHeaders(b"", None, False, False)
    lines: list[tuple[bytes, bytes]] = []
    named: list[bytes] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered in _KEPT_FROM_CLIENTS:
            if lowered == b"content-length":
                found.content_length = int(value) if value.isdigit() else None
            elif lowered == b"connection":
                named.extend(token.strip().lower() for token in value.split(b","))
            continue
        if lowered.startswith(b"x-fairshare-"):
            continue
        if lowered == b"content-type":
            found.event_stream = value[:17].lower() == b"text/event-stream"
        elif lowered == b"content-encoding":
            found.encoded = value.strip().lower() not in (b"", b"identity")
        lines.append((lowered, value))
    found.lines = b"".join(
        b"%b: %b\r\n" % line for line in lines if line[0] not in named and not _breaks_lines(line[1])
    )
    return found


_STATUS_LINES: dict[int, bytes] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of a response; an unknown status has no phrase."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def fairshare_lines(
    *, request_id: str, pool: str, standing: Standing, priority: int | None, held_seconds: float
) -> bytes:
    """Our header lines on every relayed response."""
    return b"x-request-id: %b\r\nx-fairshare-pool: %b\r\nx-fairshare-standing: %b\r\n%bx-fairshare-held-ms: %d\r\n" % (
        request_id.encode(),
        pool.encode(),
        standing.value.encode(),
        b"" if priority is None else b"x-fairshare-priority: %d\r\n" % priority,
        round(held_seconds * 1000),
    )


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


def _take_key(found: RequestHeaders, key: bytes) -> None:
    if found.key is not None and found.key != key:
        raise RequestProblem(INVALID_API_KEY, "The request carries several different API keys. Send one.")
    found.key = key


def _take_class(found: RequestHeaders, value: bytes) -> None:
    match value.strip().lower():
        case b"interactive":
            asked = ServiceClass.INTERACTIVE
        case b"batch":
            asked = ServiceClass.BATCH
        case _:
            raise RequestProblem(
                INVALID_REQUEST, f"`x-fairshare-class` must be interactive or batch, got {_shown(value)}."
            )
    if found.service_class is not None and found.service_class != asked:
        raise RequestProblem(INVALID_REQUEST, "`x-fairshare-class` came twice with different values. Send it once.")
    found.service_class = asked


def _take_length(found: RequestHeaders, value: bytes) -> None:
    text = value.strip()
    if not text.isdigit() or len(text) > 15:
        raise _ambiguous(f"Content-Length {_shown(value)}")
    if found.content_length is not None:
        raise _ambiguous("two Content-Length headers")
    found.content_length = int(text)


def _breaks_lines(value: bytes) -> bool:
    return b"\n" in value or b"\r" in value or b"\0" in value


def _ambiguous(what: str) -> RequestProblem:
    return RequestProblem(
        INVALID_REQUEST, f"The request's length can be read in several ways: {what}. Send one Content-Length."
    )


def _shown(value: bytes) -> str:
    text = repr(value[:60])[1:]
    return text if len(value) <= 60 else text + "..."
