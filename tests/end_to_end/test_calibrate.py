"""`fairshare calibrate` against a running stand-in engine."""

import json
import os
import pty
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from end_to_end.processes import EngineProcess, eventually, started

CALIBRATE = (sys.executable, "-m", "fairshare", "calibrate")


def test_it_finds_seats_and_costs_with_the_lengths_of_a_trace(tmp_path: Path) -> None:
    out, trace, picture = tmp_path / "figures.json", tmp_path / "trace.csv", tmp_path / "figures.png"
    rows = [f"2024-05-10 00:00:{second:02}.0,{10 + second},{second // 2}" for second in range(10, 50)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    options = ["--max-num-seqs", "4", "--step-ms", "10", "--token-us", "200", "--policy", "priority"]
    with started(lambda: EngineProcess(*options)) as engine:
        asked = ["--trace", str(trace), "--step", "600ms", "--max-concurrency", "5", "--json", str(out)]
        ended = subprocess.run(
            [*CALIBRATE, engine.url, *asked, "--plot", str(picture)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = json.loads(out.read_text())
        # Four seats, 10 ms for a step and 200 us for a token. A machine that is busy shows fewer and longer steps;
        # this is about the units, and `tests/calibration` compares the figures, in virtual time.
        assert 1 <= found["capacity"] <= 4
        exact = 0.0002 + 0.010 / found["capacity"]
        assert found["weights"] is None or exact / 10 < found["weights"]["completion"]["value"] < exact * 10
        assert picture.read_bytes().startswith(b"\x89PNG")
        # Nobody watches: a line for each step, and no bar.
        assert "step 1 of at most 11: 1 at once" in ended.stderr
        assert "\x1b" not in ended.stderr
        # Prompts of the trace, 20 to 59 tokens, and a quarter of that.
        mean = engine.gauge("vllm:request_prompt_tokens_sum") / engine.gauge("vllm:request_prompt_tokens_count")
        assert 5 <= mean <= 59


def everything(screen: int) -> bytes:
    """What is written to a terminal until nobody has it open any more; one read gives 4 KiB of it at most."""
    said = b""
    with suppress(OSError):  # so a terminal ends
        while piece := os.read(screen, 1 << 16):
            said += piece
    return said


def test_a_terminal_shows_a_bar_and_ctrl_c_leaves_nothing_at_the_engine() -> None:
    with started(lambda: EngineProcess("--policy", "priority")) as engine:
        screen, terminal = pty.openpty()
        with ThreadPoolExecutor(1) as reading:
            shown = reading.submit(everything, screen)
            running = subprocess.Popen(
                [*CALIBRATE, engine.url, "--prompt", "20", "--output", "2000"],
                stdout=subprocess.PIPE,
                stderr=terminal,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            )
            os.close(terminal)
            try:
                eventually(lambda: not engine.is_idle, "the engine is being measured")
                running.send_signal(signal.SIGINT)
                running.communicate(timeout=30)
            finally:
                running.kill()
            said = shown.result().decode()
        os.close(screen)
        assert running.returncode == 1
        assert "measuring 1 at once" in said
        assert "━" in said
        assert "step 1 of at most 20" in said
        assert "nothing of the measurement is left at the engine" in said
        assert engine.is_idle


def test_what_an_engine_refuses_is_one_sentence_with_what_to_do() -> None:
    with started(lambda: EngineProcess("--api-key", "secret")) as engine:
        ended = subprocess.run([*CALIBRATE, engine.url], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1
        assert "it answers 401; give the engine's key with --api-key-file" in ended.stderr
