"""The engine in real time: one task runs the scheduler's steps and hands out tokens when a step's time is over."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from fairshare.engine.bodies import Refusal
from fairshare.engine.metrics import Metrics
from fairshare.engine.scheduler import Change, Event, FinishReason, Scheduler, SchedulerConfig, block_keys
from fairshare.engine.text import Script, tokenize

_CATCH_UP_SECONDS = 0.05
"""A step begins where the last ended, even if handing out tokens made us this late: a real engine goes on meanwhile."""


@dataclass(slots=True)
class Delta:
    """What one sequence got since its reader last looked: several tokens if the reader was slow."""

    choice: int
    tokens: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sequence that a request asks for. Without a script (embedding) it is done with its prompt."""

    prompt: Sequence[int]
    script: Script | None
    max_tokens: int = 1
    n: int = 1
    salt: str | None = None
    """`cache_salt`: it shares cached prefixes only with those that have the same."""


class Answer:
    """The sequences of one HTTP request and the tokens that its one reader has not taken yet."""

    def __init__(self, choices: int) -> None:
        self.cached_tokens: int | None = None
        """Prompt tokens from the prefix cache (of the sequence that began last); None before the first token."""
        self.ids: list[str] = []
        self._new: dict[int, Delta] = {}
        self._unfinished = choices
        self._wake: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """No token will come any more; some may still wait to be taken."""
        return self._unfinished == 0

    def put(self, choice: int, tokens: int, finish_reason: str | None) -> None:
        delta = self._new.setdefault(choice, Delta(choice))
        delta.tokens += tokens
        if finish_reason is not None:
            delta.finish_reason = finish_reason
            self._unfinished -= 1
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def take(self) -> list[Delta]:
        """What is new, waiting for it if need be. Empty: all choices have been taken to their end."""
        while not self._new and self._unfinished:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        new = list(self._new.values())
        self._new = {}
        return new


@dataclass(slots=True)
class _Live:
    answer: Answer
    choice: int
    wanted: Wanted
    arrived_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    unreported_preemptions: int = 0


class EngineService:
    """Submits, aborts and steps. Points in time are on `time.time()` for the order, on the loop's clock else."""

    def __init__(
        self,
        config: SchedulerConfig,
        model_name: str,
        max_num_queued_reqs: int | None = None,
        make_scheduler: Callable[[SchedulerConfig, Callable[[Change, str], None]], Scheduler] = Scheduler,
    ) -> None:
        self.config = config
        self.metrics = Metrics(model_name, _cache_config(config))
        self.max_num_queued_reqs = max_num_queued_reqs
        self.accepting = True
        self._scheduler = make_scheduler(config, self._observe)
        self._live: dict[str, _Live] = {}
        self._numbers = count(1)
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._begin_at = 0.0
        self._reported_queries = self._reported_hits = 0

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def check_admission(self, sequences: int) -> None:
        """Raises the engine's 503 where `max_num_queued_reqs` would be exceeded; running and waiting count alike."""
        if self.max_num_queued_reqs is not None and self.unfinished + sequences > self.max_num_queued_reqs:
            self.metrics.rejected_requests.inc()
            raise Refusal(
                503,
                "Service Unavailable",
                "The engine is currently busy and cannot accept new requests. "
                "Please try again later or on a different instance.",
            )

    def submit(self, wanted: Sequence[Wanted], *, priority: int | None, request_id: str) -> Answer:
        """Adds the sequences of one request, all with one arrival. The id may be in use: a number makes it unique."""
        answer = Answer(len(wanted))
        arrival = time.time()
        arrived_at = asyncio.get_running_loop().time()
        number = next(self._numbers)
        for choice, want in enumerate(wanted):
            sequence_id = f"{choice}_{request_id}-{number:08x}"
            script = want.script
            keys: list[int] = []
            if self.config.prefix_caching:
                text = list(want.prompt)
                if script is not None:
                    text += tokenize("".join(script.pieces))
                keys = block_keys(text, self.config.block_size, want.salt)
            reason = FinishReason.LENGTH
            if script is None or script.finish_reason == "stop":
                reason = FinishReason.STOP
            self._scheduler.add(
                sequence_id,
                prompt_tokens=len(want.prompt),
                output_tokens=0 if script is None else script.tokens,
                priority=priority,
                arrival=arrival,
                reason=reason,
                block_keys=keys,
            )
            self._live[sequence_id] = _Live(answer, choice, want, arrived_at)
            answer.ids.append(sequence_id)
        self._show_load()
        self._idle.clear()
        self._work.set()
        return answer

    def abort(self, answer: Answer) -> None:
        """Forgets what is left of a request, at once. Tokens of the step that runs now are lost."""
        for sequence_id in answer.ids:
            if self._live.pop(sequence_id, None) is not None:
                self._scheduler.abort(sequence_id)
        self._after_leaving()

    def end_all(self) -> None:
        """Ends every request with finish reason `abort` (an engine that is told to stop)."""
        for sequence_id, live in list(self._live.items()):
            self._scheduler.abort(sequence_id)
            live.answer.put(live.choice, 0, "abort")
        self._live.clear()
        self._after_leaving()

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self._idle.wait()

    async def run(self) -> None:
        """Steps for ever; one task per engine."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._scheduler.busy:
                self._work.clear()
                await self._work.wait()
                self._begin_at = loop.time()
            if loop.time() - self._begin_at >= _CATCH_UP_SECONDS:
                self._begin_at = loop.time()
            before, tokens_before = self._scheduler.now, self._scheduler.scheduled_tokens
            events = self._scheduler.step()
            self._begin_at += self._scheduler.now - before
            await _sleep_until(self._begin_at)
            self._hand_out(events, loop.time())
            if (tokens := self._scheduler.scheduled_tokens - tokens_before) > 0:
                self.metrics.iteration_tokens.observe(tokens)

    def _hand_out(self, events: Sequence[Event], now: float) -> None:
        metrics = self.metrics
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:  # aborted while the step ran
                metrics.generation_tokens.inc(event.new_tokens)
                continue
            if live.first_token_at is None:
                live.first_token_at = now
                live.answer.cached_tokens = event.cached_tokens
                self._count_prefill(live, event.cached_tokens, now)
            elif event.new_tokens:
                metrics.between_tokens.observe(now - live.last_token_at)
            if live.unreported_preemptions:  # vLLM counts them when the victim runs again
                metrics.preemptions.inc(live.unreported_preemptions)
                live.unreported_preemptions = 0
            live.last_token_at = now
            live.tokens += event.new_tokens
            metrics.generation_tokens.inc(event.new_tokens)
            reason = None if event.reason is None else event.reason.value
            if event.finished:
                del self._live[event.request_id]
                self._count_finish(live, event, now)
            live.answer.put(live.choice, event.new_tokens, reason)
        self._after_leaving()

    def _count_prefill(self, live: _Live, cached: int, now: float) -> None:
        prompt = len(live.wanted.prompt)
        metrics = self.metrics
        metrics.first_token.observe(now - live.arrived_at)
        metrics.prompt_tokens.inc(prompt)
        metrics.prompt_tokens_computed.inc(prompt - cached)
        metrics.prompt_tokens_hit.inc(cached)
        metrics.prompt_tokens_cached.inc(cached)
        metrics.prefill_computed.observe(prompt - cached)

    def _count_finish(self, live: _Live, event: Event, now: float) -> None:
        assert event.reason is not None
        assert live.scheduled_at is not None
        assert live.first_token_at is not None
        metrics = self.metrics
        metrics.success[event.reason.value].inc()
        metrics.request_prompt_tokens.observe(len(live.wanted.prompt))
        metrics.request_generation_tokens.observe(live.tokens)
        metrics.max_generation_tokens.observe(live.tokens)
        metrics.params_n.observe(live.wanted.n)
        metrics.params_max_tokens.observe(live.wanted.max_tokens)
        metrics.whole_request.observe(now - live.arrived_at)
        metrics.queue_time.observe(live.scheduled_at - live.arrived_at)
        metrics.inference_time.observe(now - live.scheduled_at)
        metrics.prefill_time.observe(live.first_token_at - live.scheduled_at)
        metrics.decode_time.observe(now - live.first_token_at)
        metrics.request_preemptions.observe(live.preemptions)
        if live.tokens > 1:
            metrics.per_output_token.observe((now - live.first_token_at) / (live.tokens - 1))

    def _observe(self, change: Change, sequence_id: str) -> None:
        live = self._live.get(sequence_id)
        if live is None:
            return
        if change is Change.PREEMPTED:
            live.preemptions += 1
            live.unreported_preemptions += 1
        elif live.scheduled_at is None:
            live.scheduled_at = self._begin_at

    def _after_leaving(self) -> None:
        self._show_load()
        if not self._live:
            self._idle.set()

    def _show_load(self) -> None:
        metrics, scheduler = self.metrics, self._scheduler
        metrics.running.set(scheduler.running_count)
        metrics.waiting.set(scheduler.waiting_count)
        metrics.waiting_for_capacity.set(scheduler.waiting_count)
        metrics.kv_usage.set(scheduler.kv_usage)
        metrics.prefix_queries.inc(scheduler.prefix_queries - self._reported_queries)
        metrics.prefix_hits.inc(scheduler.prefix_hits - self._reported_hits)
        self._reported_queries, self._reported_hits = scheduler.prefix_queries, scheduler.prefix_hits


async def _sleep_until(at: float) -> None:
    loop = asyncio.get_running_loop()
    wake: asyncio.Future[None] = loop.create_future()
    handle = loop.call_at(at, wake.set_result, None)
    try:
        await wake
    finally:
        handle.cancel()


def _cache_config(config: SchedulerConfig) -> dict[str, str]:
    """Labels of vllm:cache_config_info, as far as they mean something here."""
    tokens = config.num_blocks * config.block_size  # with the null block, as vLLM counts
    return {
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": str(config.prefix_caching),
        "gpu_memory_utilization": "0.92",
        "kv_cache_max_concurrency": str(tokens / config.max_model_len),
        "kv_cache_size_tokens": str(tokens),
        "num_gpu_blocks": str(config.num_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
    }
