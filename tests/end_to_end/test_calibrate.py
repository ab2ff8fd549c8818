"""`fairshare calibrate` against a running stand-in engine."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from end_to_end.processes import EngineProcess, eventually, started

CALIBRATE = (sys.executable, "-m", "fairshare", "calibrate")


def test_it_finds_the_seats_and_a_ctrl_c_leaves_nothing_at_the_engine(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with started(lambda: EngineProcess("--max-num-seqs", "4", "--step-ms", "10", "--policy", "priority")) as engine:
        lengths = ["--prompt", "20-40", "--output", "20-40", "--step", "1s", "--no-weights", "--json", str(out)]
        ended = subprocess.run(
            [*CALIBRATE, engine.url, *lengths, "--max-concurrency", "8"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert json.loads(out.read_text())["capacity"] in (3, 4)  # a busy machine may make one of two steps look bad

        running = subprocess.Popen(
            [*CALIBRATE, engine.url, "--prompt", "20", "--output", "2000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        eventually(lambda: not engine.is_idle, "the engine is being measured")
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=30)
        assert running.returncode == 1
        assert "nothing of the measurement is left at the engine" in said
        assert engine.is_idle


def test_what_an_engine_refuses_is_one_sentence_with_what_to_do() -> None:
    with started(lambda: EngineProcess("--api-key", "secret")) as engine:
        ended = subprocess.run([*CALIBRATE, engine.url], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1
        assert "it answers 401; give the engine's key with --api-key-file" in ended.stderr
