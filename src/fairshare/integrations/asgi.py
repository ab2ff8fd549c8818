"""Plain ASGI middleware: requests of your own gateway wait for their team's turn before your code sees them."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairshare.core.priority import ServiceClass
from fairshare.gateway.options import Limits
from fairshare.integrations.admission import Admission, Admitted, TurnedAway
from fairshare.wire.endpoints import Family
from fairshare.wire.problems import REQUEST_TOO_LARGE, Problem, error_body

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"})

MAX_BODY_BYTES = Limits().max_body_bytes


class _TooLarge(Exception):
    """More of a body came, while its request waited, than is kept."""


class FairshareMiddleware:
    """Puts the request's `Admitted` into `scope["state"]["fairshare"]`, and releases it when the application returns.

    The application sends `admitted.priority` to vLLM, and tells `admitted.consumed(usage)` before it returns; both are
    all that it has to know.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: Admission,
        team: Callable[[Scope], str],
        service_class: Callable[[Scope], ServiceClass] = lambda scope: ServiceClass.INTERACTIVE,
        paths: Collection[str] = GENERATING,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """
        Args:
            team: whose request it is, from what your authentication left in the scope.
            paths: which ones wait.
            max_body_bytes: how much of the body is kept while a request waits; more is refused, 413.
        """
        self._app = app
        self._admission = admission
        self._team = team
        self._service_class = service_class
        self._paths = frozenset(paths)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        early: deque[Message] = deque()
        try:
            admitted = await self._wait(scope, receive, early)
        except TurnedAway as turned_away:
            retry_after = (b"retry-after", b"%d" % turned_away.retry_after_seconds)
            await _answer(send, turned_away.problem, str(turned_away), retry_after)
            return
        except _TooLarge:
            sentence = f"The body is longer than max_body_bytes, {self._max_body_bytes} bytes. Send less at once."
            await _answer(send, REQUEST_TOO_LARGE, sentence)
            return
        if admitted is None:
            return

        async def replayed() -> Message:
            return early.popleft() if early else await receive()

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_headers(admitted)]}
            await send(message)

        scope.setdefault("state", {})["fairshare"] = admitted
        try:
            await self._app(scope, replayed, labelled)
        finally:
            admitted.release()

    async def _wait(self, scope: Scope, receive: Receive, early: deque[Message]) -> Admitted | None:
        """None: the client left first. What came of the body meanwhile is in `early`."""
        waiting = asyncio.ensure_future(self._admission.acquire(self._team(scope), self._service_class(scope)))
        hearing: asyncio.Future[Message] | None = None
        admitted: Admitted | None = None
        kept_bytes = 0
        try:
            await asyncio.sleep(0)
            while not waiting.done():
                hearing = hearing or asyncio.ensure_future(receive())
                await asyncio.wait((waiting, hearing), return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():
                    early.append(hearing.result())
                    hearing = None
                    if early[-1]["type"] == "http.disconnect" and not waiting.done():
                        return None
                    kept_bytes += len(early[-1].get("body", b""))
                    if kept_bytes > self._max_body_bytes:
                        raise _TooLarge
            admitted = waiting.result()
            return admitted
        finally:
            if hearing is not None:
                hearing.cancel()
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            elif admitted is None and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().release()  # it was admitted in the turn in which this was cancelled, or hearing failed


def _headers(admitted: Admitted) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"x-fairshare-pool", admitted.pool.encode()),
        (b"x-fairshare-standing", admitted.standing.encode()),
        (b"x-fairshare-held-ms", b"%d" % round(admitted.held_seconds * 1000)),
    ]
    if admitted.priority is not None:
        headers.append((b"x-fairshare-priority", b"%d" % admitted.priority))
    return headers


async def _answer(send: Send, problem: Problem, sentence: str, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), *more]
    body = error_body(Family.OPENAI, problem, sentence)
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
