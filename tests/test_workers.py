"""The parent of several workers: when it starts one again, and what it does if none starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairshare.gateway.listening import bound_to, listening_socket
from fairshare.gateway.options import Address
from fairshare.workers import LONG_LIFE_SECONDS, LONGEST_PAUSE_SECONDS, Restarts


def test_a_worker_that_dies_is_started_at_once_and_then_with_longer_and_longer_pauses() -> None:
    restarts = Restarts()
    assert [restarts.died(lived_seconds=1.0) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert [restarts.died(lived_seconds=1.0) for _ in range(10)][-1] == LONGEST_PAUSE_SECONDS


def test_a_long_life_is_forgiven() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.died(lived_seconds=1.0)
    assert restarts.died(lived_seconds=LONG_LIFE_SECONDS) == 0.0
    assert restarts.died(lived_seconds=1.0) == 0.5


CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - {name: chat, capacity: 8, half_life: 0, shares: {search: 1}, models: [tiny], instances: [http://127.0.0.1:9]}
"""


def serve(folder: Path, more: str) -> "subprocess.Popen[str]":
    path = folder / "fairshare.yaml"
    path.write_text(CONFIG + more)
    return subprocess.Popen(
        [sys.executable, "-m", "fairshare", "serve", "-c", str(path), "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def test_if_no_worker_starts_the_parent_ends_and_says_so(tmp_path: Path) -> None:
    key = tmp_path / "peers.key"
    key.write_text("0123456789abcdef" * 2)
    key.chmod(0o600)
    # Only workers listen there, and nobody can: it is an address of documentation.
    process = serve(tmp_path, f"replicas: {{listen: '192.0.2.1:7000', secret_file: {key}}}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "replicas.listen: cannot listen on 192.0.2.1" in said
    assert said.rstrip().splitlines()[-1].startswith("fairshare: no worker could start")


def test_workers_end_with_their_parent_when_it_is_killed(tmp_path: Path) -> None:
    with serve(tmp_path, "store: none") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "is ready with 2 workers" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        process.send_signal(signal.SIGKILL)
        # Their log lines go to the same pipe: it ends when the last of them has ended.
        rest = process.stderr.read()
        assert rest.count("Draining") == rest.count("Ended") == 2


def test_a_second_gateway_does_not_join_the_sockets_of_the_first(tmp_path: Path) -> None:
    with listening_socket(Address("127.0.0.1", 0), purpose="a test", shared=True) as taken:
        at = bound_to(taken)
        path = tmp_path / "fairshare.yaml"
        path.write_text(CONFIG.replace("listen: 127.0.0.1:0", f"listen: {at}") + "store: none")
        arguments = [sys.executable, "-m", "fairshare", "serve", "-c", str(path), "--workers", "2"]
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"the data port cannot listen on {at}" in ended.stderr


def test_workers_that_are_killed_together_again_and_again_are_started_again(tmp_path: Path) -> None:
    with serve(tmp_path, "store: none") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "is ready with 2 workers" in line:
                break
        for _ in range(2):
            for child in children(process.pid, 2):
                os.kill(child, signal.SIGKILL)
        for line in process.stderr:
            if "The worker serves" in line:
                break
        process.terminate()
        rest = process.stderr.read()
        assert "no worker could start" not in rest
        assert process.wait() == 0


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with serve(tmp_path, "store: none") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "set TMPDIR to a shorter one" in said
    assert "Traceback" not in said


def children(process: int, count: int) -> list[int]:
    """So many children of a process, as soon as it has them."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
        # One that was killed may still be there to be buried.
        living = [each for each in found if "(zombie)" not in Path(f"/proc/{each}/status").read_text()]
        if len(living) == count:
            return living
        time.sleep(0.05)
    raise AssertionError(f"process {process} has not {count} children")
