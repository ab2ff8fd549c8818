"""`fairshare doctor --probe` on running engines: the stand-in must show it what a real vLLM shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.processes import EngineProcess, eventually, keys_made, started

CONFIG = """
pools:
  - name: chat
    capacity: 4
    shares: {{search: 1}}
    models: {{small: tiny}}
    instances: [{engine}]
teams:
  - name: search
    keys: [{search}]
"""


@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ("priority", 0, "policy probed: priority"),
        ("fcfs", 1, "error priority-ignored"),
    ],
)
def test_the_probe_tells_the_policies_apart_and_leaves_nothing_behind(
    policy: str, code: int, said: str, tmp_path: Path
) -> None:
    _, search = keys_made("--team", "search")
    config = tmp_path / "fairshare.yaml"
    with started(lambda: EngineProcess("--max-num-seqs", "8", "--step-ms", "4", "--policy", policy)) as engine:
        config.write_text(CONFIG.format(engine=engine.url, search=search))
        result = subprocess.run(
            [sys.executable, "-m", "fairshare", "doctor", "-c", str(config), "--probe"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert said in result.stdout, result.stdout + result.stderr
        assert "ran 8 sequences at once" in result.stdout or "8 seats" in result.stdout
        assert result.returncode == code
        eventually(lambda: engine.is_idle, "the engine has nothing left of the probe")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--enable-priority-scheduling",), 0, "policy probed: priority"),
        ((), 1, "--enable-priority-scheduling"),
        (("--enable-priority-scheduling", "--schedule-low-priority-values-first"), 1, "policy probed: reversed"),
    ],
)
def test_the_doctor_sees_what_an_sglang_does_and_names_its_flags(
    flags: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    _, search = keys_made("--team", "search")
    config = tmp_path / "fairshare.yaml"
    with started(lambda: EngineProcess("--kind", "sglang", "--max-num-seqs", "8", "--step-ms", "4", *flags)) as engine:
        text = CONFIG.format(engine=f"{{url: {engine.url}, kind: sglang}}", search=search)
        config.write_text(text)
        result = subprocess.run(
            [sys.executable, "-m", "fairshare", "doctor", "-c", str(config), "--probe"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert said in result.stdout, result.stdout + result.stderr
        assert "8 seats" in result.stdout
        assert result.returncode == code
