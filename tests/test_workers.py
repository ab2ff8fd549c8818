"""The parent of several workers: when it starts one again, and what it does if none starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
