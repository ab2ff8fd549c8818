"""The simulator's world on vLLM's own scheduler class: `python world_on_vllm.py MODEL < request`.

Run by the virtual environment that holds vLLM, with this project's src on PYTHONPATH. Reads {"scenario": text of a
scenario file, "policy": name} and writes the output tokens of each team per window.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from scheduler_twin import Twin

from fairshare.engine.scheduler import Change, Event, FinishReason, SchedulerConfig
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.scenario import parse
from fairshare.simulator.world import World


class VllmScheduler:
    """vLLM's scheduler with the face of ours, as far as the world needs it."""

    def __init__(self, model: str, config: SchedulerConfig, observer: Callable[[Change, str], None]) -> None:
        self.config = config
        self.observer = observer
        self.now = 0.0
        self.steps = 0
        self.scheduled_tokens = 0
        self._generated: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._twin = Twin(
            model,
            {
                "block_size": config.block_size,
                "num_blocks": config.num_blocks,
                "max_model_len": config.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "policy": config.policy,
                "prefix_caching": False,
            },
        )

    def add(self, request_id: str, *, prompt_tokens: int, output_tokens: int, priority: int, arrival: float) -> None:
        self._generated[request_id] = self._told[request_id] = 0
        self._twin.do(
            {
                "id": request_id,
                "prompt": [1] * prompt_tokens,
                "output": output_tokens,
                "priority": priority,
                "arrival": arrival,
            }
        )

    def abort(self, request_id: str) -> bool:
        self._twin.do({"abort": request_id})
        return self._generated.pop(request_id, None) is not None

    def generated(self, request_id: str) -> int:
        return self._generated[request_id]

    def quiet_until(self) -> float:
        return self.now if self._generated else inf

    def advance(self, until: float) -> list[Event]:
        while self._generated and self.now < until:
            events = self._step()
            if events:
                return events
        if not self._generated:
            self.now = max(self.now, until)
        return []

    def _step(self) -> list[Event]:
        before = self._twin.running()
        said = self._twin.step(self._started(before))
        self.steps += 1
        self.scheduled_tokens += said["tokens"]
        self.now += self.config.step_seconds + said["tokens"] * self.config.token_seconds
        events: list[Event] = []
        for request_id in said["got"]:
            self._generated[request_id] += 1
        for request_id in said["got"]:
            generated, finished = self._generated[request_id], request_id in said["finished"]
            if finished or self._told[request_id] == 0:
                new_tokens = generated - self._told[request_id]
                self._told[request_id] = generated
                events.append(Event(request_id, new_tokens, finished, FinishReason.LENGTH if finished else None, 0))
            if finished:
                del self._generated[request_id]
        return events

    def _started(self, before: list[str]) -> Callable[[list[str], list[str]], None]:
        def seen(running: list[str], evicted: list[str]) -> None:
            for request_id in evicted:
                self.observer(Change.PREEMPTED, request_id)
            for request_id in running:
                if request_id not in before:
                    self.observer(Change.ADMITTED, request_id)

        return seen


if __name__ == "__main__":
    asked: dict[str, Any] = json.load(sys.stdin)
    world = World(
        parse(asked["scenario"]),
        PolicyName(asked["policy"]),
        make_scheduler=partial(VllmScheduler, sys.argv[1]),  # pyright: ignore[reportArgumentType]
    )
    windows = world.run().pools[0].windows
    json.dump({"teams": windows.teams, "output_tokens": windows.output_tokens}, sys.stdout)
