"""`make run` as a newcomer meets it."""

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from end_to_end.processes import Process, started

README = (Path(__file__).parents[2] / "README.md").read_text()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ask_as(line: str) -> dict[str, Any]:
    """What a shell would do with the printed line; curl itself need not be installed."""
    program, _, url, *options = shlex.split(line)
    assert program == "curl"
    pairs = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ") for flag, value in pairs if flag == "-H")
    (body,) = (value for flag, value in pairs if flag == "-d")
    return httpx.post(url, headers=headers, content=body).json()


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_prints_a_curl_line_that_works_and_leaves_nothing_behind(number: signal.Signals) -> None:
    with started(lambda: Process("demo", "--port", "0", "--admin-port", "0")) as demo:
        status_page = demo.line(demo.out, "Status page: ").split()[-1]
        curl = demo.line(demo.out, "curl ")
        demo.line(demo.out, "[1/5] search works alone")
        line = demo.line(demo.out, "waiting, answered")
        assert "search: owns 10, in flight" in line
        assert without_numbers(line) in without_numbers(README), "the README shows lines of another form"

        assert ask_as(curl)["object"] == "chat.completion"
        assert "<html" in httpx.get(status_page).text

        children = children_of(demo.pid)
        assert len(children) == 3
        demo.signal(number)
        assert demo.wait() == 0
        assert [pid for pid in children if is_alive(pid)] == []
        assert demo.err == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(status_page)
