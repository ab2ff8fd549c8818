"""The access log: one line of JSON per finished request, made and written by a thread of its own.

A disk or a pipe that hangs fills the thread's queue, and serving goes on. The file is opened for each batch, so whoever
rotates it need tell nobody.
"""

import logging
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fairshare.gateway.ports import RequestRecord
from fairshare.gateway.record_thread import RecordThread

log = logging.getLogger("fairshare.gateway")

MOST_WAITING = 100_000
"""Records that wait to be written; about 40 MB."""

WRITE_SECONDS = 0.2
"""How long lines are gathered."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as its line says it; the fields of the record that are not explained here are `RequestRecord`'s."""

    time: str
    """When it arrived, UTC."""
    id: str
    team: str
    key: str
    """The id of its key, never the key."""
    endpoint: str
    model: str
    pool: str
    served_by: str
    engine: str
    service_class: str
    standing: str | None
    priority: int | None
    slots: int
    stream: bool
    status: int
    outcome: str
    reason: str
    detail: str
    held_seconds: float
    added_seconds: float
    sent_seconds: float | None
    first_byte_seconds: float | None
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool
    cost_units: float
    recalls: int
    retries: int


def line_of(record: RequestRecord) -> AccessLine:
    at = datetime.fromtimestamp(record.arrived_at, UTC)
    return AccessLine(
        time=at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        id=record.id,
        team=record.team,
        key=record.key_id,
        endpoint=record.endpoint,
        model=record.model,
        pool=record.pool,
        served_by=record.served_by,
        engine=record.instance_id,
        service_class=record.service_class.name.lower(),
        standing=None if record.standing is None else record.standing.value,
        priority=record.priority,
        slots=record.slots,
        stream=record.stream,
        status=record.status,
        outcome=record.outcome.value,
        reason=record.reason,
        detail=record.detail,
        held_seconds=round(record.held_seconds, 6),
        added_seconds=round(record.added_seconds, 6),
        sent_seconds=_rounded(record.sent_seconds),
        first_byte_seconds=_rounded(record.first_byte_seconds),
        total_seconds=round(record.total_seconds, 6),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        estimated=record.estimated,
        cost_units=record.cost_units,
        recalls=record.recalls,
        retries=record.retries,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class AccessLog(RecordThread):
    """Writes a line for each request that has ended."""

    def __init__(self, path: Path | None, *, most_waiting: int = MOST_WAITING) -> None:
        """`path`: the file that lines are added to; None: standard error."""
        super().__init__("access log", every_seconds=WRITE_SECONDS, most_waiting=most_waiting)
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._trouble = ""

    def take(self, records: list[RequestRecord], lost: int) -> None:
        lines = [self._encode(line_of(record)) + b"\n" for record in records]
        try:
            if lines:
                self._write(lines)
            trouble = ""
        except OSError as error:
            trouble = error.strerror or type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("The access log cannot be written (%s); its lines are lost until it can.", trouble)
            else:
                log.info("The access log is written again.")
        if lost and not trouble:
            log.warning("%d lines of the access log were lost: it is written too slowly.", lost)

    def _write(self, lines: Iterable[bytes]) -> None:
        if self._path is None:
            # One call for each: a pipe that others write to, too, keeps a line of up to 4 KiB in one piece.
            for line in lines:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            content = memoryview(b"".join(lines))
            while content:
                content = content[os.write(descriptor, content) :]
        finally:
            os.close(descriptor)
