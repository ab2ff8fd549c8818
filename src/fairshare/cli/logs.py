"""One line per event on standard error: `key=value` for people and log tools, or JSON.

Values passed as `extra={...}` become fields. No log line holds a secret or a word of a prompt: what is logged are
configured names, ids and numbers.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important events that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LineFormatter(logging.Formatter):
    """Makes each event one line, whatever is in it."""

    def __init__(self, log_format: LogFormat, of_every_line: Mapping[str, Any] | None = None) -> None:
        """`of_every_line`: fields that every line has."""
        super().__init__()
        self._log_format = log_format
        self._of_every_line = dict(of_every_line or {})

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(self._fields(record))
        if self._log_format is LogFormat.JSON:
            return json.dumps(fields, ensure_ascii=False, default=str)
        return " ".join(f"{name}={_plain(value)}" for name, value in fields.items())

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        at = datetime.fromtimestamp(record.created, UTC)
        yield "time", at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        yield "level", record.levelname.lower()
        yield "logger", record.name
        yield from self._of_every_line.items()
        yield "message", record.getMessage()
        for name, value in vars(record).items():
            if name not in _OF_EVERY_RECORD:
                yield name, value
        if record.exc_info:
            yield "exception", self.formatException(record.exc_info)


def _plain(value: Any) -> str:
    """A value as one word: quoted as in JSON where it is not one already."""
    text = value if isinstance(value, str) else str(value)
    if text and text.isprintable() and not any(character in ' "=\\' for character in text):
        return text
    return json.dumps(text, ensure_ascii=False)


def configure(log_format: LogFormat, level: LogLevel, of_every_line: Mapping[str, Any] | None = None) -> None:
    """Send every log line of the process to standard error. `of_every_line`: fields that every line has."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(log_format, of_every_line))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its "Started server process" and the like say nothing that ours do not say better.
    # Nor do alembic's "setup plugin" lines, at every start.
    for library in ("uvicorn", "alembic.runtime.plugins"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
