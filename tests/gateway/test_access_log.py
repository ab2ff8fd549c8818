"""The access log: one line per request, and nothing that its writing runs into reaches the event loop."""

import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.access_log import AccessLine, AccessLog, line_of
from fairshare.gateway.ports import Outcome, RequestRecord

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "access-log.md"


def record(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "id": "r-1",
        "endpoint": "/v1/chat/completions",
        "key_id": "abc123",
        "team": "search",
        "pool": "chat",
        "served_by": "chat",
        "instance_id": "http://a:1",
        "model": "tiny",
        "service_class": ServiceClass.BATCH,
        "standing": Standing.BORROWING,
        "priority": 21,
        "slots": 1,
        "arrived_at": 1_796_025_600.25,
        "sent_seconds": 0.5,
        "first_byte_seconds": 0.75,
        "total_seconds": 1.5,
        "held_seconds": 0.1234567891,
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cost_units": 20.0,
    }
    return RequestRecord(**(defaults | fields))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_finished_request_is_one_line_with_its_fields(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.finished(record())
    log.write()
    log.finished(record(id="r-2", outcome=Outcome.REFUSED, status=429, standing=None, reason="queue_full"))
    log.write()
    first, second = lines(tmp_path / "access.log")
    assert first["time"] == "2026-11-30T08:00:00.250Z"
    assert (first["id"], first["team"], first["key"], first["engine"]) == ("r-1", "search", "abc123", "http://a:1")
    assert (first["service_class"], first["standing"], first["priority"]) == ("batch", "borrowing", 21)
    assert first["held_seconds"] == 0.123457
    assert (second["id"], second["status"], second["standing"], second["reason"]) == ("r-2", 429, None, "queue_full")


def test_the_reference_has_every_field_and_no_other() -> None:
    documented = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert documented == [field.name for field in msgspec.structs.fields(AccessLine)]
    assert list(msgspec.to_builtins(line_of(record()))) == documented


def test_a_file_that_was_rotated_away_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(path)
    log.finished(record())
    log.write()
    path.rename(tmp_path / "access.log.1")
    log.finished(record(id="r-2"))
    log.write()
    assert [line["id"] for line in lines(path)] == ["r-2"]
    assert path.stat().st_mode & 0o007 == 0, "others can read who asked what when"


def test_what_cannot_be_written_is_lost_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "logs"
    log = AccessLog(folder / "access.log")
    for _ in range(3):
        log.finished(record())
        log.write()
    folder.mkdir()
    log.finished(record(id="r-4"))
    log.write()
    assert [line["id"] for line in lines(folder / "access.log")] == ["r-4"]
    assert caplog.messages == [
        "The access log cannot be written (No such file or directory); its lines are lost until it can.",
        "The access log is written again.",
    ]


def test_lines_beyond_the_bound_are_lost_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(tmp_path / "access.log", most_waiting=3)
    for number in range(5):
        log.finished(record(id=f"r-{number}"))
    log.write()
    assert [line["id"] for line in lines(tmp_path / "access.log")] == ["r-0", "r-1", "r-2"]
    assert caplog.messages == ["2 lines of the access log were lost: it is written too slowly."]


def test_a_pipe_that_nobody_reads_holds_up_its_thread_only(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = AccessLog(pipe)
    log.finished(record())
    log.start()  # opening the pipe waits for a reader
    for _ in range(1000):
        log.finished(record())
    writing = next(thread for thread in threading.enumerate() if thread.name == "access log")
    descriptor = os.open(pipe, os.O_RDONLY)
    try:
        received = b""
        log._ending.set()  # pyright: ignore[reportPrivateUsage]
        while received.count(b"\n") < 1001:
            received += os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
    writing.join(5)
    assert not writing.is_alive()


def test_the_end_writes_what_waits(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.start()
    log.finished(record())
    log.stop()
    assert len(lines(tmp_path / "access.log")) == 1


def test_standard_error_gets_whole_lines(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = AccessLog(None)
    log.finished(record())
    log.finished(record(id="r-2"))
    log.write()
    assert [json.loads(line)["id"] for line in capfdbinary.readouterr().err.splitlines()] == ["r-1", "r-2"]
