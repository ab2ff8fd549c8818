"""Our engine scheduler against vLLM's own `Scheduler` class, step by step on the same streams."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from real_vllm import scheduler_streams
from real_vllm.scheduler_streams import Stream

TWIN = Path(__file__).with_name("scheduler_twin.py")

STREAMS: dict[str, Stream] = {
    f"{kv} KV, {policy}, prefix caching {'on' if caching else 'off'}, seed {seed}": scheduler_streams.stream(
        seed, policy=policy, prefix_caching=caching, kv=kv
    )
    for kv in ("ample", "short", "tiny")
    for policy in ("priority", "fcfs")
    for caching in (False, True)
    for seed in range(8)
}


@pytest.fixture(scope="module")
def played_by_vllm(vllm_python: Path, tiny_model: Path) -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run(
        ["nice", "-n", "10", str(vllm_python), str(TWIN), str(tiny_model)],
        input=json.dumps(list(STREAMS.values())),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(STREAMS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", STREAMS)
def test_our_scheduler_does_in_every_step_what_that_of_vllm_does(
    name: str, played_by_vllm: dict[str, list[dict[str, Any]]]
) -> None:
    ours = scheduler_streams.play(STREAMS[name])
    for step, (mine, theirs) in enumerate(zip(ours, played_by_vllm[name], strict=True)):
        assert mine == theirs, f"step {step}"


def test_the_streams_contain_what_is_compared(played_by_vllm: dict[str, list[dict[str, Any]]]) -> None:
    steps = [step for played in played_by_vllm.values() for step in played]
    assert sum(len(step.get("evicted", ())) for step in steps) > 300
    assert sum(len(step.get("finished", ())) for step in steps) > 3000
    aborts = [
        action for stream in STREAMS.values() for actions in stream["steps"] for action in actions if "abort" in action
    ]
    assert len(aborts) > 200
