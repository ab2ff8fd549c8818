"""The admin port of a machine with several workers: one address that answers for all of them.

Each worker serves its own admin application on a Unix socket, with its keys and all; this one passes requests on, and
puts together what only all of them know: readiness, metrics and the state of the pools.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import msgspec
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fairshare.gateway.accounts_api import HEADERS, json_answer, problem_answer
from fairshare.gateway.explain import Explanation, put_together
from fairshare.gateway.findings import Severity
from fairshare.gateway.live import EVENT_BEGINS, EVENT_END
from fairshare.gateway.merged import PoolJson, Totals, deciding_workers, merged_metrics, merged_pools
from fairshare.gateway.metrics import CONTENT_TYPE
from fairshare.gateway.state_dump import DUMP_PATH
from fairshare.gateway.status import FindingStatus
from fairshare.gateway.status_api import RequestRow, most_rows
from fairshare.wire.problems import NO_WORKER

ANSWER_SECONDS = 2.0
"""How long a worker may take to begin an answer: one that hangs must not keep the others' from being seen."""

IDLE_SECONDS = 120.0
"""How long it may take between two pieces (a report over a million records)."""

READ_BYTES = 64 << 10

MAX_BODY_BYTES = 1 << 20

_PASSED_ON = frozenset({b"authorization", b"host", b"content-type", b"accept", b"origin"})
_OF_ONE_CONNECTION = frozenset({"connection", "content-length", "transfer-encoding", "date"})
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class WorkerSilent(Exception):
    """A worker gave no answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that runs."""

    name: str
    socket: Path
    """Where its admin application listens."""


@dataclass(slots=True)
class _Answer:
    """What httptools reports of one answer, as it comes."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    pieces: list[bytes] = field(default_factory=list[bytes])
    has_head: bool = False
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer whose body comes as it is read."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body])


@asynccontextmanager
async def fetched(
    socket: Path, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> AsyncGenerator[Fetched]:
    """Ask a worker over its Unix socket.

    Raises:
        WorkerSilent: it does not answer, or breaks off.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(socket))
    except (OSError, TimeoutError) as error:
        raise WorkerSilent(str(error)) from error
    try:
        head = [
            f"{method} {target} HTTP/1.1".encode("latin-1"),
            *(name + b": " + value for name, value in headers),
            b"Connection: close",
            *([f"Content-Length: {len(body)}".encode()] if body else []),
        ]
        writer.write(b"\r\n".join([*head, b"", b""]) + body)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.has_head:
            await _read_some(reader, parser, ANSWER_SECONDS)
        yield Fetched(parser.get_status_code(), answer.headers, _rest(reader, parser, answer, method))
    finally:
        writer.transport.abort()


async def _rest(
    reader: asyncio.StreamReader, parser: httptools.HttpResponseParser, answer: _Answer, method: str
) -> AsyncIterator[bytes]:
    while True:
        pieces, answer.pieces = answer.pieces, []
        for piece in pieces:
            yield piece
        if answer.complete or method == "HEAD":
            return
        await _read_some(reader, parser, IDLE_SECONDS)


async def _read_some(reader: asyncio.StreamReader, parser: httptools.HttpResponseParser, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            data = await reader.read(READ_BYTES)
        if not data:
            raise WorkerSilent("it closed the connection")
        parser.feed_data(data)
    except (OSError, TimeoutError, httptools.HttpParserError) as error:
        raise WorkerSilent(str(error)) from error


class MachineAdmin:
    """Answers for all workers."""

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        *,
        ended: Totals,
        own_metrics: Callable[[], Iterable[Metric]],
        findings: Callable[[], Sequence[str]],
    ) -> None:
        """
        Args:
            members: the workers that run, oldest first.
            ended: what workers counted that are no more.
            own_metrics: metrics of the machine itself.
            findings: what an operator should know of the workers; every pool shows it.
        """
        self._members = members
        self._ended = ended
        self._own_metrics = own_metrics
        self._findings = findings
        self.app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/api/v1/pools", self._pools),
                Route(DUMP_PATH, self._dump),
                Route("/api/v1/state", self._state),
                Route("/api/v1/live", self._live),
                *(Route(path, self._requests) for path in ("/api/v1/requests", "/api/v1/team/requests")),
                *(Route(path, self._explain) for path in ("/api/v1/explain", "/api/v1/team/explain")),
                Route("/api/v1/pools/{pool}/instances{rest:path}", self._instances, methods=_METHODS),
                Route("/{path:path}", self._pass_on, methods=_METHODS),
            ]
        )

    # ------------------------------------------------------------------ put together

    async def _healthz(self, _: Request) -> Response:
        return json_answer(b'{"status":"ok"}')

    async def _readyz(self, request: Request) -> Response:
        answers = await self._all(request)
        if not answers:
            return json_answer(b'{"status":"not ready","reason":"no worker runs"}', status=503)
        status, body, _ = min(answers.values(), key=lambda answer: answer[0])
        return json_answer(body, status=status)

    async def _metrics(self, request: Request) -> Response:
        pools, expositions = await asyncio.gather(self._all(request, "/api/v1/pools"), self._all(request, "/metrics"))
        refusal = _refusal(expositions)
        if refusal is not None:
            return refusal
        merged = merged_metrics(
            {name: body.decode() for name, (_, body, _) in expositions.items()},
            deciding=deciding_workers(_decoded(pools)),
            ended=self._ended,
            own=self._own_metrics(),
        )
        return Response(merged, headers=HEADERS | {"Content-Type": CONTENT_TYPE})

    async def _pools(self, request: Request) -> Response:
        answers = await self._all(request)
        refusal = _refusal(answers)
        if refusal is not None:
            return refusal
        if not answers:
            return _nobody()
        merged = self._with_findings({"pools": merged_pools(_decoded(answers))})
        return json_answer(msgspec.json.encode(merged["pools"]))

    async def _dump(self, request: Request) -> Response:
        """Each worker's, by its name: they are of one moment only nearly."""
        answers = await self._all(request)
        refusal = _refusal(answers)
        if refusal is not None:
            return refusal
        return json_answer(msgspec.json.encode({name: msgspec.Raw(body) for name, (_, body, _) in answers.items()}))

    async def _requests(self, request: Request) -> Response:
        """Each worker knows those that went through itself."""
        answers = await self._all(request)
        refusal = _refusal(answers)
        if refusal is not None:
            return refusal
        if not answers:
            return _nobody()
        rows = [row for _, body, _ in answers.values() for row in msgspec.json.decode(body, type=list[RequestRow])]
        rows.sort(key=lambda row: -row.at)
        return json_answer(msgspec.json.encode(rows[: most_rows(request.query_params)]))

    async def _explain(self, request: Request) -> Response:
        """Likewise; and what of it went through whom is added up."""
        answers = await self._all(request)
        known = [body for status, body, _ in answers.values() if status == 200]
        if known:
            explanations = [msgspec.json.decode(body, type=Explanation) for body in known]
            return json_answer(msgspec.json.encode(put_together(explanations)))
        return _refusal(answers) or _nobody()

    async def _state(self, request: Request) -> Response:
        """Every worker shows the pools as their owners see them. What only this process knows is added."""
        answers = await self._all(request)
        refusal = _refusal(answers)
        if refusal is not None:
            return refusal
        return next((json_answer(self._told(body)) for _, body, _ in answers.values()), None) or _nobody()

    async def _live(self, request: Request) -> Response:
        """The same as events, of one worker; when that ends, who watches asks again."""
        answer = await self._pass_on(request)
        if isinstance(answer, StreamingResponse) and answer.status_code == 200:
            answer.body_iterator = self._with_own_findings(answer.body_iterator)
        return answer

    async def _with_own_findings(self, pieces: AsyncIterable[Any]) -> AsyncIterator[bytes]:
        rest = b""
        async for piece in pieces:
            *events, rest = (rest + piece).split(EVENT_END)
            for event in events:
                yield EVENT_BEGINS + self._told(event.removeprefix(EVENT_BEGINS)) + EVENT_END

    def _told(self, state: bytes) -> bytes:
        """A state with what this process has found."""
        return msgspec.json.encode(self._with_findings(msgspec.json.decode(state))) if self._findings() else state

    def _with_findings(self, state: dict[str, Any]) -> dict[str, Any]:
        found = self._findings()
        details = msgspec.to_builtins([_detail(sentence) for sentence in found])
        for pool in state["pools"]:
            pool["findings"] = [*found, *pool["findings"]]
            pool["finding_details"] = [*details, *pool["finding_details"]]
        return state

    # ------------------------------------------------------------------ passed on

    async def _instances(self, request: Request) -> Response:
        """Every worker has its own list of a pool's instances: who changes it means all of them."""
        if request.method in ("GET", "HEAD"):
            return await self._pass_on(request)
        answers = await self._all(request, body=await request.body())
        if not answers:
            return _nobody()
        status, body, headers = max(answers.values(), key=lambda answer: answer[0])
        return Response(body, status, headers)

    async def _pass_on(self, request: Request) -> Response:
        """To one worker: what they share is in the store. One that knows nothing of it may be the wrong one."""
        body = await request.body()
        unknown: Response | None = None
        for member in self._members():
            try:
                answer = await self._streamed(member, request, body)
            except WorkerSilent:
                if request.method not in ("GET", "HEAD"):
                    break  # it may have done what was asked
                continue
            if answer.status_code != 404:
                return answer
            unknown = answer
        return unknown or _nobody()

    async def _streamed(self, member: Member, request: Request, body: bytes) -> Response:
        opened = fetched(member.socket, request.method, _target(request), _headers(request), body)
        answer = await opened.__aenter__()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.body:
                    yield piece
            finally:
                await opened.__aexit__(None, None, None)

        return StreamingResponse(pieces(), answer.status, _passed_back(answer.headers))

    async def _all(
        self, request: Request, target: str | None = None, body: bytes = b""
    ) -> dict[str, tuple[int, bytes, dict[str, str]]]:
        """Asks every worker at once; those that do not answer are left out."""
        method = "GET" if request.method == "HEAD" else request.method

        async def one(member: Member) -> tuple[int, bytes, dict[str, str]] | None:
            try:
                async with (
                    asyncio.timeout(ANSWER_SECONDS),
                    fetched(member.socket, method, target or _target(request), _headers(request), body) as answer,
                ):
                    return answer.status, await answer.read(), _passed_back(answer.headers)
            except (WorkerSilent, TimeoutError):
                return None

        members = self._members()
        answers = await asyncio.gather(*(one(member) for member in members))
        return {member.name: answer for member, answer in zip(members, answers, strict=True) if answer is not None}


def _refusal(answers: Mapping[str, tuple[int, bytes, dict[str, str]]]) -> Response | None:
    """What a worker says who may not see this."""
    for status, body, headers in answers.values():
        if status != 200:
            return Response(body, status, headers)
    return None


def _detail(sentence: str) -> FindingStatus:
    return FindingStatus(id="worker-gone", severity=Severity.WARNING, instance=None, sentence=sentence, why="", fix="")


def _nobody() -> Response:
    return problem_answer(NO_WORKER, "No worker of this machine answers; the log says why. They are started again.")


def _decoded(answers: Mapping[str, tuple[int, bytes, Any]]) -> dict[str, list[PoolJson]]:
    return {
        name: msgspec.json.decode(body, type=list[PoolJson])
        for name, (status, body, _) in answers.items()
        if status == 200
    }


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.url.query
    return path + (f"?{query}" if query else "")


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in request.headers.raw if name in _PASSED_ON]


def _passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _OF_ONE_CONNECTION}
