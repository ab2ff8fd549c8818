"""Real fairshare processes on loopback, with ports that the operating system chooses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
from typer.testing import CliRunner

from fairshare.cli import program

TESTS = str(Path(__file__).parents[1])

PATIENCE_SECONDS = 30.0
"""How long a test waits for what must happen soon; a machine that is busy must not make it fail."""


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Waits until something holds; fails after `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"did not happen in {PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.02)


class Process:
    """One `fairshare ...` process; keeps what it prints."""

    def __init__(self, *arguments: str, open_files: int | None = None, module: str = "fairshare") -> None:
        """`open_files`: how many it may have at most. `module`: the program, if it is another one."""
        limit = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files} && exec "$0" "$@"']
        self._popen = subprocess.Popen(
            [*limit, sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | ({} if module == "fairshare" else {"PYTHONPATH": TESTS}),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            self._keep(self._popen.stdout, self.out),
            self._keep(self._popen.stderr, self.err),
        ]

    @staticmethod
    def _keep(stream: IO[bytes] | None, lines: list[str]) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            lines.extend(line.decode() for line in stream)

        # `extend` appends each line as it comes.
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def line(self, lines: list[str], wanted: str) -> str:
        """Waits for a line that holds `wanted`."""

        def there() -> bool:
            if not self.running:
                self.end()
                raise AssertionError(f"the process ended with {self._popen.returncode}:\n{''.join(self.err)}")
            return any(wanted in line for line in list(lines))

        try:
            eventually(there, f"a line with {wanted!r}")
        except BaseException:
            self.end()  # whoever waits for its first line in vain has nothing yet to end it by
            raise
        return next(line for line in list(lines) if wanted in line)

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Waits for its end; returns the exit code."""
        code = self._popen.wait(PATIENCE_SECONDS)
        self.end()
        return code

    def end(self) -> None:
        """Ends it, if it runs, and closes what belongs to it."""
        if self.running:
            self._popen.kill()
        self._popen.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()


class EngineProcess(Process):
    """`fairshare engine`."""

    def __init__(self, *options: str) -> None:
        super().__init__("engine", "--port", "0", "--model", "tiny", "--policy", "priority", *options)
        self.url = self.line(self.out, "ready ").split()[1]

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " "))
        )

    @property
    def is_idle(self) -> bool:
        return self.gauge("vllm:num_requests_running") == 0 and self.gauge("vllm:num_requests_waiting") == 0


class GatewayProcess(Process):
    """`fairshare serve`."""

    def __init__(
        self, config: Path, *, open_files: int | None = None, workers: int = 1, module: str = "fairshare"
    ) -> None:
        count = ["--workers", str(workers)] if workers > 1 else []
        super().__init__(
            "serve", "-c", str(config), "--log-format", "json", *count, open_files=open_files, module=module
        )
        ready: dict[str, str] = json.loads(self.line(self.err, "is ready"))
        self.url = f"http://{ready['listen']}"
        self.admin_url = f"http://{ready['admin']}"

    def pool(self, name: str = "chat") -> dict[str, Any]:
        pools: list[dict[str, Any]] = httpx.get(f"{self.admin_url}/api/v1/pools").json()
        return next(pool for pool in pools if pool["name"] == name)

    def team(self, team: str, pool: str = "chat") -> dict[str, Any]:
        return next(row for row in self.pool(pool)["teams"] if row["team"] == team)

    def metric(self, line_start: str) -> float:
        text = httpx.get(f"{self.admin_url}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))

    def reload(self) -> None:
        """SIGHUP, and wait until the gateway has said what came of it."""
        seen = self._reloads()
        self.signal(signal.SIGHUP)
        eventually(lambda: self._reloads() > seen, "the reload")

    def _reloads(self) -> int:
        return sum("was reloaded" in line or "was not reloaded" in line for line in list(self.err))


@contextmanager
def started(make: Callable[[], Process]) -> Iterator[Any]:
    process = make()
    try:
        yield process
    finally:
        process.end()


def keys_made(*arguments: str) -> tuple[str, str]:
    """A key from `fairshare keys new`, and the entry to store."""
    result = CliRunner().invoke(program(), ["keys", "new", *arguments])  # a process of its own would do nothing else
    assert result.exit_code == 0, result.output
    key = next(word for word in result.output.split() if word.startswith("fs-"))
    entry = next(line for line in result.output.splitlines() if "sha256" in line).split("[", 1)[1].rstrip("]")
    return key, entry
