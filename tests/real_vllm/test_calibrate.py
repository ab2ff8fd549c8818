"""`fairshare calibrate` on a real vLLM: seats bound it, and nothing stays at the engine."""

import json
import subprocess
import sys
from pathlib import Path

import httpx

from real_vllm.vllm_server import VllmServer


def test_the_concurrency_that_a_real_engine_sustains_is_its_seats_and_tokens_have_a_cost(
    priority_server: VllmServer, tmp_path: Path
) -> None:
    out = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "fairshare", "calibrate", priority_server.url]
    options = ["--prompt", "40-80", "--output", "40-80", "--step", "8s", "--max-concurrency", "16", "--json", str(out)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500, check=False)
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert found["capacity"] == priority_server.max_num_seqs
    assert found["weights"]["completion"]["value"] > 0.0
    metrics = httpx.get(f"{priority_server.url}/metrics", trust_env=False).text
    running = [
        line
        for line in metrics.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    ]
    assert [line.rsplit(" ", 1)[1] for line in running] == ["0.0", "0.0"]
