"""Asks an engine something beside the data path: one small request on a connection of its own, with a deadline.

Health checks, scrapes and the probe must work when the data path is full, so they share nothing with it.
"""

import asyncio
import errno
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from fairshare.errors import TryElsewhere
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.tls import engine_context

MAX_ANSWER_BYTES = 8 << 20
"""More than this is no answer to anything we ask; a vLLM with many models has some 200 KiB of metrics."""

READ_BYTES = 64 << 10

KEPT_SECONDS = 7.0
"""How long an idle connection is watched: a vLLM closes it after 5 s unless it is told otherwise."""


class Failure(StrEnum):
    """Why an engine gave no answer."""

    UNREACHABLE = "unreachable"
    """Nothing listens there, or the name does not resolve."""

    TOO_SLOW = "too slow"
    """It took longer than it was given."""

    NOT_ASKED = "not asked"
    """We could not ask: the process may not open another file. It says nothing about the engine."""

    BROKEN = "broken"
    """It closed the connection early, or what it sent is not HTTP."""


class EngineSilent(TryElsewhere):
    """An engine gave no answer."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail
        """What was found, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer, whole."""

    status: int
    body: bytes


class Ask(Protocol):
    """Sends one request and returns the whole answer, whatever its status."""

    async def __call__(
        self,
        method: str,
        url: str,
        *,
        api_key: str | None = None,
        ca_file: Path | None = None,
        body: bytes | None = None,
        timeout_seconds: float,
    ) -> Answer:
        """`body` is JSON; `ca_file` says who may have signed the certificate of an https engine.

        Cancelling closes the connection, so that the engine aborts what it was doing for us.

        Raises:
            EngineSilent: there was no answer.
        """
        ...


@dataclass(slots=True)
class _Reader:
    """What httptools reports of one answer."""

    body: bytearray = field(default_factory=bytearray)
    has_length: bool = False
    """False: the answer ends where its connection ends."""
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_length = self.has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


async def ask(
    method: str,
    url: str,
    *,
    api_key: str | None = None,
    ca_file: Path | None = None,
    body: bytes | None = None,
    timeout_seconds: float,
) -> Answer:
    """`Ask` over a TCP connection that is closed afterwards; certificates are verified."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _exchange(method, url, api_key=api_key, ca_file=ca_file, body=body)
    except TimeoutError:
        raise EngineSilent(Failure.TOO_SLOW, f"no answer within {timeout_seconds:g} s") from None
    except ssl.SSLError as error:
        raise EngineSilent(Failure.UNREACHABLE, f"TLS failed: {error.reason or error}") from error
    except ConnectionRefusedError as error:
        raise EngineSilent(Failure.UNREACHABLE, "the connection is refused") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise EngineSilent(Failure.NOT_ASKED, "fairshare may not open another file") from error
        raise EngineSilent(Failure.UNREACHABLE, (error.strerror or str(error)).lower()) from error


async def _exchange(method: str, url: str, *, api_key: str | None, ca_file: Path | None, body: bytes | None) -> Answer:
    parts = urlsplit(url)
    encrypted = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if encrypted else 80),
        ssl=engine_context(ca_file) if encrypted else None,
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", "Accept: */*"]
        if api_key is not None:
            head.append(f"Authorization: Bearer {api_key}")
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        return await _read_answer(reader)
    finally:
        # Not waited for: what the engine still does with the connection is no concern of ours.
        writer.transport.abort()


async def kept_open(spec: InstanceSpec) -> float | None:
    """After how many seconds an engine closes a connection on which nothing more is asked.

    None: it was still open after `KEPT_SECONDS`, or the engine did not answer.
    """
    parts = urlsplit(spec.url)
    encrypted = parts.scheme == "https"
    try:
        async with asyncio.timeout(KEPT_SECONDS):
            reader, writer = await asyncio.open_connection(
                parts.hostname,
                parts.port or (443 if encrypted else 80),
                ssl=engine_context(spec.ca_file) if encrypted else None,
            )
            try:
                writer.write(f"GET {parts.path}/health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
                await _read_answer(reader)
                begun_at = asyncio.get_running_loop().time()
                await reader.read()
                return asyncio.get_running_loop().time() - begun_at
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EngineSilent):
        return None


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    answer = _Reader()
    parser = httptools.HttpResponseParser(answer)
    try:
        while not answer.complete:
            data = await reader.read(READ_BYTES)
            if not data:
                break
            parser.feed_data(data)
            if len(answer.body) > MAX_ANSWER_BYTES:
                raise EngineSilent(Failure.BROKEN, f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
    except httptools.HttpParserError as error:
        raise EngineSilent(Failure.BROKEN, "what it sends is not HTTP") from error
    except ConnectionError as error:
        raise EngineSilent(Failure.BROKEN, "it reset the connection") from error
    if parser.get_status_code() == 0 or (answer.has_length and not answer.complete):
        raise EngineSilent(Failure.BROKEN, "it closed the connection before its answer was complete")
    return Answer(parser.get_status_code(), bytes(answer.body))
