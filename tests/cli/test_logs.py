"""Log lines: one for each event, whatever is in it."""

import json
import logging
import sys
from typing import Any

from fairshare.cli.logs import LineFormatter, LogFormat


def line(log_format: LogFormat, message: str, *arguments: object, exception: bool = False, **fields: Any) -> str:
    record = logging.LogRecord("fairshare.gateway", logging.WARNING, __file__, 1, message, arguments, None)
    record.created = 1_800_000_000.25
    vars(record).update(fields)
    if exception:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            record.exc_info = sys.exc_info()
    return LineFormatter(log_format).format(record)


def test_a_line_for_people_is_words_with_names() -> None:
    assert line(LogFormat.TEXT, "Engine %s is gone.", "http://a:1", pool="chat", slots=8) == (
        'time=2027-01-15T08:00:00.250Z level=warning logger=fairshare.gateway message="Engine http://a:1 is gone." '
        "pool=chat slots=8"
    )


def test_a_line_in_json_has_the_same_fields() -> None:
    assert json.loads(line(LogFormat.JSON, "Engine %s is gone.", "http://a:1", pool="chat", slots=8)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "fairshare.gateway",
        "message": "Engine http://a:1 is gone.",
        "pool": "chat",
        "slots": 8,
    }


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    for log_format in LogFormat:
        text = line(log_format, "a\nb", exception=True, team='x" level=error\r\n')
        assert len(text.splitlines()) == 1
        assert "two\\nlines" in text


def test_a_value_cannot_pretend_to_be_another_field() -> None:
    assert line(LogFormat.TEXT, "m", team="a level=error").endswith('team="a level=error"')
    assert line(LogFormat.TEXT, "m", team="").endswith('team=""')
