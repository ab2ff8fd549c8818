"""One scenario three ways: our simulator, the simulator's world on vLLM's scheduler class, a real vLLM server.

The load is that of `burst.py`: a sends 100 requests at once, b comes a quarter of a second later with 16 in flight.
"""

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fairshare.simulator.policies import PolicyName
from fairshare.simulator.scenario import parse
from fairshare.simulator.world import World
from real_vllm.burst import A_REQUESTS, B_COMES_AFTER_SECONDS, B_IN_FLIGHT, CAPACITY, FEWEST_TOKENS, MOST_TOKENS, Burst
from real_vllm.test_burst import burst
from real_vllm.vllm_server import VllmServer, vllm_server

REPOSITORY = Path(__file__).resolve().parents[2]

LENGTHS = f"prompt: 6, output: {FEWEST_TOKENS}-{MOST_TOKENS}"
B_COMES_AFTER = f"{int(B_COMES_AFTER_SECONDS * 1000)}ms"

SCENARIO = f"""
title: the burst on a real vLLM
duration: 13s
window: 1s
pools:
  - capacity: {CAPACITY}
    half_life: 0
    engines: {{max_num_seqs: {CAPACITY}, kv_tokens: 32768, block_size: 32, max_model_len: 2048}}
teams:
  - name: a
    share: 1/2
    loads: [{{burst: {A_REQUESTS}, {LENGTHS}}}]
  - name: b
    share: 1/2
    loads: [{{clients: {B_IN_FLIGHT}, start: {B_COMES_AFTER}, {LENGTHS}}}]
"""

BACKLOGGED = slice(2, 11)
"""Windows in which a certainly has a backlog and what it had borrowed before b came is gone."""


def simulated() -> list[list[float]]:
    return World(parse(SCENARIO), PolicyName.HOLD_RECALL).run().pools[0].windows.output_tokens


@pytest.fixture(scope="module")
def on_vllms_class(vllm_python: Path, tiny_model: Path) -> list[list[float]]:
    done = subprocess.run(
        [str(vllm_python), str(Path(__file__).with_name("world_on_vllm.py")), str(tiny_model)],
        input=json.dumps({"scenario": SCENARIO, "policy": "hold+recall"}),
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["teams"] == ["a", "b"]
    return answer["output_tokens"]


@pytest.fixture(scope="module")
def on_the_server(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Burst:
    directory = tmp_path_factory.mktemp("three-ways")
    with vllm_server(
        python=vllm_python,
        model=tiny_model,
        log=directory / "vllm.log",
        max_num_seqs=CAPACITY,
        arguments=("--scheduling-policy", "priority"),
    ) as engine:
        return serve(engine, directory)


def serve(engine: VllmServer, directory: Path) -> Burst:
    return burst(engine, "hold", 7, directory)


def share_of_b(windows: list[list[float]]) -> float:
    return fmean(row[1] / sum(row) for row in windows[BACKLOGGED])


def test_on_vllms_scheduler_class_the_simulator_gives_the_same_tokens_in_every_window(
    on_vllms_class: list[list[float]],
) -> None:
    assert on_vllms_class == simulated()


def test_the_shares_agree_within_two_points_with_a_real_server_behind_the_gateway(on_the_server: Burst) -> None:
    found = on_the_server.b_shares[1:]
    assert len(found) >= 2, "a quick engine is through A's backlog early, but some windows must be compared"
    assert fmean(found) == pytest.approx(share_of_b(simulated()), abs=0.02)
