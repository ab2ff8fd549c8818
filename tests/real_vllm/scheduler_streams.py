"""Seeded request streams for the differential test, and how our engine scheduler plays them."""

import random
from typing import Any

from fairshare.engine.scheduler import Change, Policy, Scheduler, SchedulerConfig, block_keys

OUTPUT_TOKEN = 7

Stream = dict[str, Any]


def stream(seed: int, *, policy: str = "priority", prefix_caching: bool = False, kv: str = "short") -> Stream:
    """Requests with priorities, bursts and aborts, for a few hundred steps.

    kv: `short` evicts often, `ample` never; `tiny` holds hardly more than the longest request.
    """
    rng = random.Random(f"{seed}/{policy}/{prefix_caching}/{kv}")
    block_size = rng.choice((8, 16, 32))
    max_model_len = 512
    least_blocks = -(-max_model_len // block_size) + 1
    num_blocks = {"tiny": least_blocks, "short": 3 * least_blocks // 2, "ample": 40 * least_blocks}[kv]
    max_num_seqs = rng.choice((4, 8, 16, 16))
    steps: list[list[dict[str, Any]]] = []
    prefixes = [[rng.randrange(1000) for _ in range(rng.choice((16, 64, 130)))] for _ in range(3)]
    alive: list[str] = []
    number = 0
    for step in range(300):
        actions: list[dict[str, Any]] = []
        busy = step < 220
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 8)) if busy and rng.random() < 0.35 else 0):
            number += 1
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, rng.choice((10, 40, 40, 350))))]
            if rng.random() < 0.3:
                prompt = (rng.choice(prefixes) + prompt)[:400]
            name = f"r{number:03d}"
            actions.append(
                {
                    "id": name,
                    "prompt": prompt,
                    "output": rng.randint(1, rng.choice((4, 60, 110, 200))),
                    "priority": rng.choice((0, 0, 1, 10, 11, 20, 100)),
                    # Several may carry the same arrival: then ids decide.
                    "arrival": float(step) + rng.choice((0.0, 0.0, 0.25)),
                }
            )
            alive.append(name)
        if alive and rng.random() < 0.02:
            actions.append({"abort": alive.pop(rng.randrange(len(alive)))})
        steps.append(actions)
    return {
        "config": {
            "policy": policy,
            "prefix_caching": prefix_caching,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.choice((max_num_seqs, 64, 256, 2048)) if kv != "tiny" else 256,
            "max_model_len": max_model_len,
        },
        "steps": steps,
    }


def play(stream: Stream) -> list[dict[str, Any]]:
    """What our scheduler does with a stream, step by step, in the twin's words."""
    settings = stream["config"]
    config = SchedulerConfig(**(settings | {"policy": Policy(settings["policy"])}))
    evicted: list[str] = []

    def seen(change: Change, request_id: str) -> None:
        if change is Change.PREEMPTED:
            evicted.append(request_id)

    scheduler = Scheduler(config, seen)
    steps: list[dict[str, Any]] = []
    for actions in stream["steps"]:
        for action in actions:
            if "abort" in action:
                scheduler.abort(action["abort"])
                continue
            prompt, output = action["prompt"], action["output"]
            keys = block_keys([*prompt, *[OUTPUT_TOKEN] * output], config.block_size) if config.prefix_caching else ()
            scheduler.add(
                action["id"],
                prompt_tokens=len(prompt),
                output_tokens=output,
                priority=action["priority"],
                arrival=action["arrival"],
                block_keys=keys,
            )
        if not scheduler.busy:
            steps.append({})
            continue
        evicted.clear()
        tokens_before = scheduler.scheduled_tokens
        events = scheduler.step()
        finished = [event.request_id for event in events if event.finished]
        steps.append(
            {
                "running": [*scheduler.running],
                "evicted": sorted(evicted),
                "tokens": scheduler.scheduled_tokens - tokens_before,
                "got": [event.request_id for event in events if event.new_tokens],
                "finished": finished,
            }
        )
    return steps
