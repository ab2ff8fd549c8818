"""The admin port: health, readiness, metrics, the state of the pools as JSON, the status page, and the accounts.

Nothing here is hot. The accounts (`fairshare.gateway.accounts_api`) and the pools' instances
(`fairshare.gateway.discovery.api`) can be changed; every other route is a GET.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fairshare.accounts.rights import Actor
from fairshare.clock import Clock, monotonic
from fairshare.gateway.accounts_api import ACTOR, LOCAL
from fairshare.gateway.logins import FailedLogins
from fairshare.gateway.metrics import CONTENT_TYPE, Metrics
from fairshare.gateway.state_dump import DUMP_PATH
from fairshare.gateway.status import PoolStatus
from fairshare.gateway.status_api import OPERATOR_PATHS, TEAM_PATHS
from fairshare.wire.problems import (
    INVALID_API_KEY,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    TOO_MANY_FAILED_LOGINS,
    openai_error,
)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What an orchestrator asks without a key."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class Document:
    """What a browser gets."""

    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Pages:
    """The documents that browsers get, and what they may do there."""

    documents: Mapping[str, Document]
    """By path. All but `/` hold nothing worth a key: they are the same everywhere."""
    content_security_policy: str


def admin_app(
    *,
    pools: Callable[[], Sequence[PoolStatus]],
    metrics: Metrics,
    not_ready: Callable[[], str | None],
    pages: Pages,
    key: Callable[[], str | None],
    status: Sequence[Route] = (),
    dump: Sequence[Route] = (),
    instances: Sequence[Route] = (),
    accounts: Sequence[Route] = (),
    operator: Callable[[bytes], Actor | None] = lambda _: None,
    logins: FailedLogins | None = None,
    clock: Clock = monotonic,
) -> ASGIApp:
    """The admin application.

    Args:
        pools: the state of the pools, now.
        metrics: what /metrics shows.
        not_ready: why the gateway should get no traffic now; None: it should.
        pages: the status page, the page of teams, and what both load.
        key: the admin key in force; None: none is configured, and the port listens on loopback only.
        status: the routes that the pages ask (`fairshare.gateway.status_api`).
        dump: the route of the dump of the decision state.
        instances: the routes of the pools' instances.
        accounts: the routes of the accounts.
        operator: who has a role by the SHA-256 of what they show; they reach the accounts and the pools' instances.
        logins: bounds wrong keys, together with those of teams; None: with bounds of its own.
        clock: what those bounds are on.
    """
    encoder = msgspec.json.Encoder()

    async def healthz(_: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def readyz(_: Request) -> Response:
        reason = not_ready()
        if reason is None:
            return _json(b'{"status":"ready"}')
        return _json(encoder.encode({"status": "not ready", "reason": reason}), status=503)

    async def scrape(_: Request) -> Response:
        parts: list[bytes] = []
        for part in metrics.exposition():
            parts.append(part)
            await asyncio.sleep(0)  # a thousand teams take tens of milliseconds; requests do not wait for them
        return Response(b"".join(parts), headers=_HEADERS | {"Content-Type": CONTENT_TYPE})

    async def pool_states(_: Request) -> Response:
        return _json(encoder.encode(pools()))

    page_headers = _HEADERS | {
        "Content-Security-Policy": pages.content_security_policy,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }

    async def document(request: Request) -> Response:
        wanted = pages.documents.get(request.url.path)
        if wanted is None:
            raise HTTPException(404)
        return Response(wanted.content, media_type=wanted.media_type, headers=page_headers)

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "GET")
            problem, message = METHOD_NOT_ALLOWED, f"{request.method} is not possible here; use {allowed}."
        else:
            problem = NOT_FOUND
            message = "There is nothing here; see /, /team, /api/v1/pools, /metrics, /healthz and /readyz."
        return _json(openai_error(problem, message), status=error.status_code, headers=error.headers)

    # Handlers are coroutines, so that Starlette runs them on the loop's thread, where the pools' queues live.
    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", scrape),
            Route("/api/v1/pools", pool_states),
            *status,
            *dump,
            *instances,
            *accounts,
            Route("/", document),
            Route("/team", document),
            Route("/assets/{name}", document),
        ],
        exception_handlers={404: answer_error, 405: answer_error},
    )
    open_documents = frozenset(pages.documents) - {"/"}
    return _Guard(
        app, key, operator, bool(accounts), open_documents, FailedLogins() if logins is None else logins, clock
    )


def _json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, media_type="application/json", headers=_HEADERS | dict(headers or {}))


class _Guard:
    """Lets in who may see: with a configured key, whoever shows it; without one, this machine only."""

    def __init__(
        self,
        app: ASGIApp,
        key: Callable[[], str | None],
        operator: Callable[[bytes], Actor | None],
        has_accounts: bool,
        open_documents: frozenset[str],
        logins: FailedLogins,
        clock: Clock,
    ) -> None:
        self._app = app
        self._key = key
        self._operator = operator
        self._has_accounts = has_accounts
        self._without_admin_key = open_documents | set(TEAM_PATHS)
        self._logins = logins
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        given = _presented_key(headers.get(b"authorization", b""))
        actor = None if given is None else self._operator(hashlib.sha256(given).digest())
        if actor is not None and self._has_accounts and _is_of_accounts(scope["path"]):
            await self._app({**scope, ACTOR: actor}, receive, send)
            return
        refusal = self._refusal(headers, scope)
        scope = {**scope, ACTOR: Actor(name=LOCAL if self._key() is None else "admin key")}
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes], scope: Scope) -> Response | None:
        key = self._key()
        if key is None:
            # Without a key the port listens on loopback only. A web page that has its own name resolve to 127.0.0.1
            # could still read it through a browser on this machine: such a request carries that name.
            if _names_this_machine(headers.get(b"host", b"").decode("latin-1")):
                return None
            message = "Without an admin key, this port answers to localhost and to IP addresses only."
            return _json(openai_error(INVALID_API_KEY, message), status=INVALID_API_KEY.status)
        if scope["path"] in self._without_admin_key:
            return None  # what needs a key there asks for a team's
        given = _presented_key(headers.get(b"authorization", b""))
        # Hashes, so that neither the length nor a prefix of the key shows in the time.
        if given is not None and hmac.compare_digest(
            hashlib.sha256(given).digest(), hashlib.sha256(key.encode()).digest()
        ):
            return None
        if given is not None:
            address = scope["client"][0] if scope.get("client") else ""
            wait_seconds = self._logins.failed(address, self._clock())
            if wait_seconds is not None:
                message = (
                    "Too many requests with keys that are not valid came from your address. Try a good key, or again "
                    f"in {ceil(wait_seconds)} s."
                )
                return _json(
                    openai_error(TOO_MANY_FAILED_LOGINS, message),
                    status=TOO_MANY_FAILED_LOGINS.status,
                    headers={"Retry-After": str(ceil(wait_seconds))},
                )
        return _json(
            openai_error(
                INVALID_API_KEY,
                "The admin port needs its key: as a bearer token, or as the password in a browser (any user name).",
            ),
            status=INVALID_API_KEY.status,
            headers={"WWW-Authenticate": 'Basic realm="fairshare admin", charset="UTF-8"'},
        )


_NOT_OF_ACCOUNTS = frozenset({"/api/v1/pools", DUMP_PATH, *OPERATOR_PATHS, *TEAM_PATHS})


def _is_of_accounts(path: str) -> bool:
    return path.startswith("/api/v1/") and path not in _NOT_OF_ACCOUNTS


def _presented_key(authorization: bytes) -> bytes | None:
    """The key of a bearer token, or the password of basic authentication, which is what browsers ask people for."""
    scheme, _, credentials = authorization.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return credentials.strip()
        case b"basic":
            try:
                decoded = base64.b64decode(credentials.strip(), validate=True)
            except binascii.Error:
                return None
            return decoded.partition(b":")[2]
        case _:
            return None


def _names_this_machine(host: str) -> bool:
    """Whether a Host header holds `localhost` or an IP address, with or without a port."""
    name = host[: host.rfind("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class AdminServer(uvicorn.Server):
    """Serves the admin application on a socket of ours, and leaves the process's signals alone."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=65,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def run_on(self, listening: socket.socket) -> None:
        """Serve until `stop`. Closes the socket."""
        try:
            await self.serve(sockets=[listening])
        finally:
            listening.close()

    def stop(self) -> None:
        self.should_exit = True
