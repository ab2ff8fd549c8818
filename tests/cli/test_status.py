"""`fairshare status` against an admin port on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fairshare.cli import program
from gateway.statuses import instance_status, pool_status_of, team_status

POOL = pool_status_of(
    "chat",
    in_flight=9,
    held=4,
    recalls=2,
    teams=[
        team_status("search [bold]", share=0.8125, reserved=13, in_flight=9, borrowing=1, held=4, usage=1234.5),
        team_status("ads", share=0.1875, reserved=3, level_fairshare=0.5, rank=1),
    ],
    instances=[
        instance_status("http://127.0.0.1:9001", running=9, kv_usage=0.25),
        instance_status("http://127.0.0.1:9002", healthy=False, seats=None, running=None, waiting=None, kv_usage=None),
        instance_status("http://127.0.0.1:9003", healthy=False, leaving=True, part=0, in_flight=2),
    ],
    findings=["Costs are not calibrated."],
)


@contextmanager
def admin_port(body: bytes, *, code: int = 200) -> Iterator[tuple[str, list[str | None]]]:
    """Answers every request the same; yields its address and the credentials it was shown."""
    shown: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", shown
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(program(), ["status", *arguments], env={"COLUMNS": "200"} | (env or {}))
    return result.exit_code, result.output, result.exception


def test_a_pool_is_shown_with_its_teams_engines_and_findings() -> None:
    with admin_port(msgspec.json.encode([POOL])) as (url, _):
        code, output, _ = run("--admin", url)
    assert code == 0
    assert "chat: 9 of 16 slots in flight (has room), 4 held, 2 recalled, dispatch hold" in output
    row = next(line for line in output.splitlines() if "search [bold]" in line).split()
    assert row[2:] == ["0.8125", "13", "9", "1", "4", "1,234", "∞", "0", "0"]
    broken = next(line for line in output.splitlines() if "9002" in line).split()
    assert broken[1:] == ["unhealthy", "8", "?", "0", "?", "?", "?"]
    leaving = next(line for line in output.splitlines() if "9003" in line).split()
    assert leaving[1:3] == ["leaving", "0"]
    assert "! Costs are not calibrated." in output


def test_json_is_the_answer_as_it_is() -> None:
    body = msgspec.json.encode([POOL])
    with admin_port(body) as (url, _):
        assert run("--admin", url, "--json")[1] == body.decode() + "\n"


def test_the_admin_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("from-file\n")
    with admin_port(b"[]") as (url, shown):
        run("--admin", url, "--key-file", str(tmp_path / "admin.key"))
        run("--admin", url, env={"FAIRSHARE_ADMIN_KEY": "from-environment"})
        run("--admin", url)
    assert shown == ["Bearer from-file", "Bearer from-environment", None]


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        (b"", 401, "refuses the key; give the right one with --key-file"),
        (b"", 500, "answers with status 500"),
        (b"<html>", 200, "does not answer like the admin port"),
    ],
)
def test_an_admin_port_that_answers_something_else_is_a_plain_sentence(body: bytes, code: int, sentence: str) -> None:
    with admin_port(body, code=code) as (url, _):
        _, _, error = run("--admin", url)
    assert sentence in str(error)


def test_a_gateway_that_does_not_run_is_a_plain_sentence() -> None:
    with admin_port(b"") as (url, _):
        pass
    assert "cannot be reached (connection refused); is the gateway running?" in str(run("--admin", url)[2])
    assert str(run("--admin", "file:///etc/passwd")[2]).endswith('found "file:///etc/passwd"')
