"""The access log: one line of JSON per finished request, made and written by a thread of its own.

The event loop appends a reference to a queue and does nothing else. A disk or a pipe that hangs fills the queue, and
what no longer fits is counted and lost: serving goes on. The file is opened for each batch, so whoever rotates it need
tell nobody.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fairshare.gateway.ports import RequestRecord

log = logging.getLogger("fairshare.gateway")

MOST_WAITING = 100_000
"""Records that wait to be written; about 40 MB."""

WRITE_SECONDS = 0.2
"""How long lines are gathered."""

END_SECONDS = 2.0
"""How long the end may wait for what is not written yet."""


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


class AccessLog:
    """Writes a line for each request that has ended (a `Recorder`)."""

    def __init__(self, path: Path | None, *, most_waiting: int = MOST_WAITING) -> None:
        """`path`: the file that lines are added to; None: standard error."""
        self._path = path
        self._most_waiting = most_waiting
        self._waiting: deque[RequestRecord] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="access log", daemon=True)
        self._encode = msgspec.json.Encoder().encode
        self._lost = 0
        self._trouble = ""

    # ------------------------------------------------------------------ on the event loop

    def finished(self, record: RequestRecord) -> None:
        if len(self._waiting) < self._most_waiting:
            self._waiting.append(record)
        else:
            self._lost += 1

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, for at most `END_SECONDS`."""
        self._ending.set()
        self._thread.join(END_SECONDS)

    # ------------------------------------------------------------------ on its thread

    def _keep_writing(self) -> None:
        while not self._ending.wait(WRITE_SECONDS):
            self.write()
        self.write()

    def write(self) -> None:
        """Write everything that waits now."""
        lines = [self._encode(line_of(self._waiting.popleft())) + b"\n" for _ in range(len(self._waiting))]
        lost, self._lost = self._lost, 0
        try:
            if lines:
                self._write(lines)
            trouble = ""
        except OSError as error:
            lost += len(lines)
            trouble = error.strerror or type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("The access log cannot be written (%s); its lines are lost until it can.", trouble)
            else:
                log.info("The access log is written again.")
        elif lost and not trouble:
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
