"""The engine under measurement: one streamed completion at a time, timed where its bytes arrive."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from fairshare.clock import Clock
from fairshare.errors import OperatorError
from fairshare.gateway.engine_http import EngineSilent, Failure, ask
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.probe import LAZY_PRIORITY
from fairshare.gateway.scrape import EngineLoad, scrape
from fairshare.gateway.tls import engine_context

PRIORITY = LAZY_PRIORITY + 1
"""Behind everything that fairshare sends: on an engine that orders by priority, others go first."""

READ_BYTES = 64 << 10

BUSY_STATUSES = frozenset({429, 503})
"""The engine takes no more requests now; anything else that is not 200 is a fault that a person must mend."""


class EngineBusy(Exception):
    """The engine refused one request because it has too many."""


class EngineRefuses(OperatorError):
    """The engine refuses what is asked of it, and would refuse it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer."""

    first_token_seconds: float
    per_token_seconds: float | None
    """Between two tokens, on average; None: there was one only."""


class Target(Protocol):
    """What is measured. Cancelling `complete` must make the engine abort the request."""

    async def load(self) -> EngineLoad | None:
        """How busy the engine is; None: it does not say."""
        ...

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Served:
        """Sends a prompt and reads its answer of exactly so many tokens.

        Raises:
            EngineBusy: it takes no more requests now.
            EngineRefuses: it will never take this.
            EngineSilent: it is gone, or broke off.
        """
        ...


@dataclass(slots=True)
class _Reading:
    """What httptools reports of an answer."""

    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class _Error(msgspec.Struct):
    message: str = ""


class _Problem(msgspec.Struct):
    error: _Error | None = None
    detail: object = None


class HttpTarget:
    """A vLLM server, over connections of our own."""

    def __init__(self, spec: InstanceSpec, *, model: str, clock: Clock, idle_seconds: float) -> None:
        """`idle_seconds`: the longest silence within an answer before the engine counts as gone."""
        self._spec = spec
        self._model = model
        self._clock = clock
        self._idle_seconds = idle_seconds

    async def load(self) -> EngineLoad | None:
        return await scrape(ask, self._spec)

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Served:
        spec, parts = self._spec, urlsplit(self._spec.url)
        encrypted = parts.scheme == "https"
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": output_tokens,
                "min_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "priority": PRIORITY,
            }
        )
        head = [
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {spec.api_key}"] if spec.api_key is not None else []),
        ]
        begun_at = self._clock()
        try:
            reader, writer = await asyncio.open_connection(
                parts.hostname,
                parts.port or (443 if encrypted else 80),
                ssl=engine_context(spec.ca_file) if encrypted else None,
            )
        except OSError as error:
            raise EngineSilent(Failure.UNREACHABLE, (error.strerror or str(error)).lower()) from error
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            return await self._read(reader, begun_at, output_tokens)
        except (ConnectionError, httptools.HttpParserError) as error:
            raise EngineSilent(Failure.BROKEN, "it broke off an answer") from error
        finally:
            writer.transport.abort()  # the engine aborts what nobody waits for

    async def _read(self, reader: asyncio.StreamReader, begun_at: float, output_tokens: int) -> Served:
        answer = _Reading()
        parser = httptools.HttpResponseParser(answer)
        first_at = last_at = None
        tail = b""
        while not answer.complete:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    data = await reader.read(READ_BYTES)
            except TimeoutError:
                raise EngineSilent(
                    Failure.TOO_SLOW, f"it was silent within an answer for {self._idle_seconds:g} s"
                ) from None
            if not data:
                break
            parser.feed_data(data)
            if parser.get_status_code() == 200 and answer.body:
                now = self._clock()
                if first_at is None:
                    first_at = now
                if bytes(answer.body).strip() != b"data: [DONE]":
                    last_at = now
                tail = (tail + bytes(answer.body))[-4096:]
                answer.body.clear()
        status = parser.get_status_code()
        if status in BUSY_STATUSES:
            raise EngineBusy
        if status not in (0, 200):
            raise EngineRefuses(f"{self._spec.url} answers {status}: {_said(bytes(answer.body))}{_advice(status)}")
        if first_at is None or last_at is None or b"data: [DONE]" not in tail or b'"error"' in tail:
            raise EngineSilent(Failure.BROKEN, "it broke off an answer")
        between = (last_at - first_at) / (output_tokens - 1) if output_tokens > 1 else None
        return Served(first_token_seconds=first_at - begun_at, per_token_seconds=between)


def _said(body: bytes) -> str:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        return body[:200].decode("utf-8", "replace") or "nothing more"
    return problem.error.message[:300] if problem.error is not None else str(problem.detail)[:300]


def _advice(status: int) -> str:
    match status:
        case 401 | 403:
            return "; give the engine's key with --api-key-file"
        case 404:
            return "; give a name that the engine serves with --model"
        case _:
            return ""
