"""Engines for tests of health, discovery and doctor: they answer in memory, and time passes when a test says so."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fairshare.gateway.engine_http import Answer, EngineSilent, Failure


def metrics_text(
    *, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, kv_tokens: int = 1 << 20, schedulers: int = 1
) -> str:
    """What vLLM's /metrics says, shortened."""
    lines: list[str] = []
    for scheduler in range(schedulers):
        labels = f'{{engine="{scheduler}",model_name="tiny"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running / schedulers}",
            f"vllm:num_requests_waiting{labels} {waiting / schedulers}",
            f'vllm:num_requests_waiting_by_reason{{engine="{scheduler}",model_name="tiny",reason="capacity"}} 7.0',
            f"vllm:kv_cache_usage_perc{labels} {kv_usage}",
            f"vllm:num_preemptions_total{labels} 0.0",
            f"vllm:num_preemptions_created{labels} 1.7e+09",
            'vllm:time_to_first_token_seconds_bucket{le="0.1"} 3.0',
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{kv_tokens // 16}",'
            f'kv_cache_size_tokens="{kv_tokens // schedulers}"}} 1.0',
        ]
    return "# HELP vllm:num_requests_running Running.\n" + "\n".join(lines) + "\n"


@dataclass
class FakeEngine:
    """One engine behind a url."""

    silent: Failure | None = None
    health_status: int = 200
    version: str | None = "0.32.0"
    models: dict[str, int] | None = field(default_factory=lambda: {"tiny": 2048})
    server_info: dict[str, Any] | None = None
    sglang_info: dict[str, Any] | None = None
    metrics: str | None = field(default_factory=metrics_text)
    api_key: str | None = None
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, api_key: str | None) -> Answer:
        self.asked.append(path)
        if self.silent is not None:
            raise EngineSilent(self.silent, f"it is {self.silent}")
        if path == "/health":
            return Answer(self.health_status, b"")
        if path == "/version" and self.version is not None:
            return _json({"version": self.version})
        if path == "/v1/models" and self.models is not None:
            if self.api_key != api_key:
                return Answer(401, b"{}")
            return _json({"object": "list", "data": [{"id": k, "max_model_len": v} for k, v in self.models.items()]})
        if path == "/server_info" and self.server_info is not None:
            return _json({"vllm_config": {"scheduler_config": self.server_info}})
        if path == "/server_info" and self.sglang_info is not None:
            return _json(self.sglang_info)
        if path == "/metrics" and self.metrics is not None:
            return Answer(200, self.metrics.encode())
        return _json({"detail": "Not Found"}, 404)


def _json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


class FakeNetwork:
    """`Ask` over fake engines; a url without one refuses the connection."""

    def __init__(self, **engines: FakeEngine) -> None:
        self.engines = {f"http://{name}": engine for name, engine in engines.items()}

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[f"http://{name}"]

    async def __call__(
        self,
        method: str,
        url: str,
        *,
        api_key: str | None = None,
        ca_file: Path | None = None,
        body: bytes | None = None,
        timeout_seconds: float,
    ) -> Answer:
        await asyncio.sleep(0)
        parts = urlsplit(url)
        engine = self.engines.get(f"{parts.scheme}://{parts.netloc}")
        if engine is None:
            raise EngineSilent(Failure.UNREACHABLE, "the connection is refused")
        return engine.answer(parts.path, api_key)
