"""What an engine tells about itself without load: version, models, KV cache, policy, and how busy it is.

SGLang's names are those of its 0.5.23 (`metrics_collector.py`, `http_server.py`, `server_args.py`).
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from fairshare.gateway.engine_http import Ask, EngineSilent
from fairshare.gateway.kinds import SglangFlags, SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec

ASK_SECONDS = 3.0
"""How long an engine may take for one answer about itself."""

ENGINE_NAMES = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TOKENS_TOTAL = ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total")
_LOOKED_AT = ("vllm:num_", "vllm:kv_cache_usage", "vllm:cache_config_info", *_TOKENS_TOTAL)
_SAMPLE = re.compile(r"((?:vllm|sglang):\w+)(?:\{(.*)\})? (\S+)")
_SGLANG_LOAD = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_grammar_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
    "sglang:num_retracted_requests_total": "preemptions",
    "sglang:max_total_num_tokens": "kv_tokens",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:cached_tokens_total": "cached_tokens",
    "sglang:generation_tokens_total": "completion_tokens",
}
_SGLANG_COUNTERS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One scrape of an engine's /metrics. With several schedulers (data parallel) behind one port: their sum."""

    running: int
    """Sequences that run now (`num_requests_running`)."""
    waiting: int
    """Sequences in the engine's own queue (`num_requests_waiting`), preempted ones among them."""
    kv_usage: float
    """The fullest scheduler's KV cache, 0 to 1."""
    preemptions_total: int
    kv_tokens: int | None
    """What the KV cache holds, tokens; None: the engine does not say."""
    schedulers: int
    """How many schedulers share the port, each with its own seats and its own order."""
    prompt_tokens_total: int = 0
    """Of all prompts whose first token was made; with those that came from the prefix cache."""
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine runs. None: it does not say."""

    version: str | None = None
    context_tokens: Mapping[str, int | None] | None = None
    """What the engine calls each of its models → its `max_model_len`. None: it did not answer that question."""
    policy: str | None = None
    """`--scheduling-policy`; visible only where /server_info is open."""
    max_num_seqs: int | None = None
    """`--max-num-seqs`; likewise."""
    sglang: SglangReport | None = None
    """What SGLang says of its priorities; None: it is no SGLang, or it does not say."""
    models_problem: str | None = None
    """Why `context_tokens` is None, as a part of a sentence."""
    load: EngineLoad | None = field(default=None, compare=False)
    """How busy it was then."""


_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Scheduler(msgspec.Struct):
    policy: str | None = None
    max_num_seqs: int | None = None


class _VllmConfig(msgspec.Struct):
    scheduler_config: _Scheduler


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig


class _SglangState(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None


class _SglangInfo(msgspec.Struct):
    version: str
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    priority_scheduling_preemption_threshold: int
    disable_priority_preemption: bool = False
    retraction_policy: str = "length"
    max_running_requests: int | None = None
    internal_states: list[_SglangState] = []

    @property
    def seats(self) -> int | None:
        """Of all its schedulers; what memory allows can be less than the flag, and is what it says of each."""
        each = [state.effective_max_running_requests_per_dp for state in self.internal_states]
        known = [seats for seats in each if seats is not None]
        return sum(known) if known and len(known) == len(each) else self.max_running_requests


def parse_metrics(text: str) -> EngineLoad | None:
    """Reads the few vLLM metrics that dispatch looks at; None: they are not there, so it is no vLLM."""
    running: list[float] = []
    tokens = dict.fromkeys(_TOKENS_TOTAL, 0.0)
    waiting = kv_usage = preemptions = 0.0
    kv_tokens: int | None = None
    for line in text.splitlines():
        # Histograms are most of the text; a look at the name is cheaper than the expression.
        if not line.startswith(_LOOKED_AT):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.group(1), sample.group(2) or "", _number(sample.group(3))
        if name == "vllm:num_requests_running":
            running.append(value)
        elif name == "vllm:num_requests_waiting":
            waiting += value
        elif name == "vllm:kv_cache_usage_perc":
            kv_usage = max(kv_usage, value)
        elif name == "vllm:num_preemptions_total":
            preemptions += value
        elif name in tokens:
            tokens[name] += value
        elif name == "vllm:cache_config_info":
            held = _kv_tokens(dict(_LABEL.findall(labels)))
            if held is not None:
                kv_tokens = (kv_tokens or 0) + held
    if not running:
        return None
    return EngineLoad(
        running=int(sum(running)),
        waiting=int(waiting),
        kv_usage=kv_usage,
        preemptions_total=int(preemptions),
        kv_tokens=kv_tokens,
        schedulers=len(running),
        prompt_tokens_total=int(tokens["vllm:prompt_tokens_total"]),
        cached_tokens_total=int(tokens["vllm:prompt_tokens_cached_total"]),
        completion_tokens_total=int(tokens["vllm:generation_tokens_total"]),
    )


def parse_sglang_metrics(text: str) -> EngineLoad | None:
    """Reads the same of SGLang's metrics; None: they are not there (they need `--enable-metrics`)."""
    found = dict.fromkeys(_SGLANG_LOAD.values(), 0.0)
    schedulers: set[str] = set()
    has_kv_tokens = False
    for line in text.splitlines():
        if not line.startswith("sglang:"):
            continue
        sample = _SAMPLE.match(line)
        field_name = _SGLANG_LOAD.get(sample.group(1)) if sample is not None else None
        if sample is None or field_name is None:
            continue
        labels, value = dict(_LABEL.findall(sample.group(2) or "")), _number(sample.group(3))
        # With priority scheduling the gauges come once as a whole, under an empty label, and once for each priority.
        # What is counted by request comes for each priority only.
        if labels.get("priority") and field_name not in _SGLANG_COUNTERS:
            continue
        if field_name == "running":
            schedulers.add(labels.get("dp_rank", ""))
        has_kv_tokens = has_kv_tokens or field_name == "kv_tokens"
        found[field_name] = max(found[field_name], value) if field_name == "kv_usage" else found[field_name] + value
    if not schedulers:
        return None
    return EngineLoad(
        running=int(found["running"]),
        waiting=int(found["waiting"]),
        kv_usage=found["kv_usage"],
        preemptions_total=int(found["preemptions"]),
        kv_tokens=int(found["kv_tokens"]) if has_kv_tokens else None,
        schedulers=len(schedulers),
        prompt_tokens_total=int(found["prompt_tokens"]),
        cached_tokens_total=int(found["cached_tokens"]),
        completion_tokens_total=int(found["completion_tokens"]),
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e18 else 0.0  # also NaN and infinity


def _kv_tokens(labels: dict[str, str]) -> int | None:
    if labels.get("kv_cache_size_tokens", "").isdigit():
        return int(labels["kv_cache_size_tokens"])
    blocks, block_size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(block_size) if blocks.isdigit() and block_size.isdigit() else None


async def scrape(ask: Ask, spec: InstanceSpec) -> EngineLoad | None:
    """How busy the engine is; None: it does not say (no answer, or not the metrics of its kind)."""
    try:
        answer = await ask(
            "GET", f"{spec.url}/metrics", api_key=spec.api_key, ca_file=spec.ca_file, timeout_seconds=ASK_SECONDS
        )
    except EngineSilent:
        return None
    if answer.status != 200:
        return None
    text = answer.body.decode("utf-8", "replace")
    return parse_sglang_metrics(text) if spec.kind is EngineKind.SGLANG else parse_metrics(text)


async def discover(ask: Ask, spec: InstanceSpec) -> EngineFacts:
    """What an engine that is up tells about itself. A question it does not answer leaves a None; nothing is raised."""
    if spec.kind is EngineKind.SGLANG:
        return await _discover_sglang(ask, spec)
    version, models, info, load = await asyncio.gather(
        _asked(ask, spec, "/version", _Version),
        _asked(ask, spec, "/v1/models", _Models),
        _asked(ask, spec, "/server_info?config_format=json", _ServerInfo),
        scrape(ask, spec),
    )
    scheduler = info.vllm_config.scheduler_config if isinstance(info, _ServerInfo) else _Scheduler()
    return EngineFacts(
        version=version.version if isinstance(version, _Version) else None,
        context_tokens=_lengths(models),
        policy=scheduler.policy,
        max_num_seqs=scheduler.max_num_seqs,
        models_problem=models if isinstance(models, str) else None,
        load=load,
    )


async def _discover_sglang(ask: Ask, spec: InstanceSpec) -> EngineFacts:
    models, info, load = await asyncio.gather(
        _asked(ask, spec, "/v1/models", _Models),
        _asked(ask, spec, "/server_info", _SglangInfo),
        scrape(ask, spec),
    )
    known = info if isinstance(info, _SglangInfo) else None
    return EngineFacts(
        version=known.version if known is not None else None,
        context_tokens=_lengths(models),
        policy=None if known is None else "priority" if known.enable_priority_scheduling else "fcfs",
        max_num_seqs=known.seats if known is not None else None,
        sglang=_report(known) if known is not None else None,
        models_problem=models if isinstance(models, str) else None,
        load=load,
    )


def _report(info: _SglangInfo) -> SglangReport:
    return SglangReport(
        flags=SglangFlags(
            low_values_first=info.schedule_low_priority_values_first,
            preemption_threshold=info.priority_scheduling_preemption_threshold,
        ),
        enabled=info.enable_priority_scheduling,
        displaces=not info.disable_priority_preemption,
        retraction_policy=info.retraction_policy,
    )


def _lengths(models: _Models | str) -> dict[str, int | None] | None:
    return {model.id: model.max_model_len for model in models.data} if isinstance(models, _Models) else None


async def _asked(ask: Ask, spec: InstanceSpec, path: str, shape: type[_Shape]) -> _Shape | str:
    """The answer to one question, or why there is none (a part of a sentence)."""
    try:
        answer = await ask(
            "GET", spec.url + path, api_key=spec.api_key, ca_file=spec.ca_file, timeout_seconds=ASK_SECONDS
        )
        if answer.status != 200:
            return f"it answers {answer.status}"
        return msgspec.json.decode(answer.body, type=shape)
    except EngineSilent as silent:
        return silent.detail
    except msgspec.MsgspecError:
        return f"its answer is not what {ENGINE_NAMES[spec.kind]} answers"
