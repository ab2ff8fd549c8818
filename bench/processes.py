"""Starts what is measured, and reads from the operating system what it costs."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
PEERS = BENCH.parent / ".venv-peers" / "bin"


def free_ports(number: int) -> list[int]:
    """Different ports that nothing listens on now."""
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


class Process:
    """A process that serves `url`; ended by `end`, with everything it started."""

    def __init__(
        self, name: str, command: Sequence[str], url: str, *, health_url: str, patience_seconds: float = 60.0
    ) -> None:
        self.name, self.url, self.health_url = name, url, health_url
        self.log = tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log")  # noqa: SIM115 (closed in end)
        self._popen = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + patience_seconds
        while not answers(health_url):
            if self._popen.poll() is not None or time.monotonic() > deadline:
                said = Path(self.log.name).read_text(errors="replace")[-2000:]
                self.end()
                raise SystemExit(f"{name} did not start within {patience_seconds:g} s; it said:\n{said}")
            time.sleep(0.05)

    def pids(self) -> list[int]:
        """Of the process and of what it started."""
        found, todo = [], [self._popen.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                todo += [int(child) for child in task.read_text().split()]
        return found

    def cpu_seconds(self) -> float:
        """User and system time of the process and its children so far, from the process accounting."""
        total = 0.0
        for pid in self.pids():
            threads = Path(f"/proc/{pid}/task").iterdir()
            # Nanoseconds on the CPU, per thread: finer than the clock ticks of /proc/PID/stat.
            total += sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        return total

    def resident_bytes(self) -> int:
        """Proportional set size of the process and its children."""
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total

    def end(self) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGTERM)
            try:
                self._popen.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()
        self.log.close()


class Load:
    """A load process that works on one job."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(BENCH / "load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(job) + "\n")
        self._popen.stdin.flush()

    def line(self) -> dict[str, Any]:
        """What it measured. Exits if the load failed: a benchmark of errors says nothing."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise SystemExit(f"the load ended with code {self._popen.wait()}")
        return json.loads(line)

    def end(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait()
        self._popen.stdout.close()


def measured(job: Mapping[str, Any]) -> dict[str, Any]:
    load = Load(job)
    result = load.line()
    load.end()
    return result
