"""vLLM's own scheduler and KV cache manager without a model: `python scheduler_twin.py MODEL < streams`.

Run by the virtual environment that holds vLLM. Reads a JSON list of streams (see `scheduler_streams.py`) and writes,
for each stream, what happened in every step: who runs in which order, who was evicted, who finished, how many tokens
were scheduled. One engine step is `schedule`, then a made-up token for every request whose text is computed, then
`update_from_output`: what the engine core does around the model.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

OUTPUT_TOKEN = 7
"""What every request generates; the streams' block keys count on it."""


class Twin:
    """One engine."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        block_size, num_blocks = config["block_size"], config["num_blocks"]
        vllm_config = VllmConfig(
            model_config=ModelConfig(
                model=model, dtype="float16", max_model_len=config["max_model_len"], skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=config["prefix_caching"]),
            scheduler_config=SchedulerConfig(
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_model_len=config["max_model_len"],
                policy=config["policy"],
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
        )
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            block_size=block_size,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(vllm_config),
        )
        self.hasher = None
        if config["prefix_caching"]:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(block_size, sha256)

    def do(self, action: dict[str, Any]) -> None:
        if "abort" in action:
            self.scheduler.finish_requests(action["abort"], RequestStatus.FINISHED_ABORTED)
            return
        self.scheduler.add_request(
            Request(
                request_id=action["id"],
                prompt_token_ids=action["prompt"],
                sampling_params=SamplingParams(max_tokens=action["output"], ignore_eos=True),
                pooling_params=None,
                arrival_time=action["arrival"],
                priority=action["priority"],
                block_hasher=self.hasher,
            )
        )

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def step(self, seen: Callable[[list[str], list[str]], None] | None = None) -> dict[str, Any]:
        """One step; `seen` is told who runs and who was evicted once that is decided."""
        out = self.scheduler.schedule()
        evicted = sorted(out.preempted_req_ids or ())
        if seen is not None:
            seen(self.running(), evicted)
        ids = list(out.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[OUTPUT_TOKEN] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        answer = self.scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={one: k for k, one in enumerate(ids)}, sampled_token_ids=sampled
            ),
        )
        outputs = [one for core in answer.values() for one in core.outputs]
        return {
            "running": self.running(),
            "evicted": evicted,
            "tokens": out.total_num_scheduled_tokens,
            "got": [one.request_id for one in outputs if one.new_token_ids],
            "finished": [one.request_id for one in outputs if one.finish_reason is not None],
        }


def play(model: str, stream: dict[str, Any]) -> list[dict[str, Any]]:
    twin = Twin(model, stream["config"])
    steps: list[dict[str, Any]] = []
    for actions in stream["steps"]:
        for action in actions:
            twin.do(action)
        steps.append(twin.step() if twin.scheduler.has_unfinished_requests() else {})
    return steps


if __name__ == "__main__":
    json.dump([play(sys.argv[1], stream) for stream in json.load(sys.stdin)], sys.stdout)
