"""The stand-in engine as what is calibrated, in virtual time: its scheduler, service and metrics, without HTTP."""

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client.exposition import generate_latest

from fairshare.calibration.measuring import Calibration, Limits, Plan, Progress, calibrate
from fairshare.calibration.target import EngineBusy, Served
from fairshare.calibration.work import Workload
from fairshare.engine.bodies import Refusal
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.engine.service import EngineService, Wanted
from fairshare.engine.text import Script
from fairshare.gateway.engine_http import EngineSilent, Failure
from fairshare.gateway.scrape import EngineLoad, parse_metrics
from fairshare.simulator.lengths import Lengths
from support.virtual_time import run_virtually

LOOKED_AT = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
)


class StandIn:
    """`Target` over a service. `dies_at`: from then on it neither answers nor shows metrics."""

    def __init__(self, config: SchedulerConfig, *, most: int | None = None, dies_at: float = float("inf")) -> None:
        self.service = EngineService(config, "tiny", most)
        registry = self.service.metrics._registry  # pyright: ignore[reportPrivateUsage]
        # Its histograms take most of the time of a look, and calibration reads none of them.
        self._looked_at = registry.restricted_registry(LOOKED_AT)
        self.dies_at = dies_at
        self.most_seen = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def load(self) -> EngineLoad | None:
        await asyncio.sleep(0)
        if self._now() >= self.dies_at:
            return None
        self.most_seen = max(self.most_seen, self.service.unfinished)
        return parse_metrics(generate_latest(self._looked_at).decode())

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Served:
        begun_at = self._now()
        try:
            self.service.check_admission(1)
        except Refusal:
            raise EngineBusy from None
        script = Script(pieces=["x"] * output_tokens, tokens=output_tokens, finish_reason="length")
        answer = self.service.submit([Wanted(prompt, script, output_tokens)], priority=0, request_id="r")
        first_at = None
        try:
            while await answer.take():
                if self._now() >= self.dies_at:
                    raise EngineSilent(Failure.BROKEN, "it broke off an answer")
                first_at = self._now() if first_at is None else first_at
                last_at = self._now()
        finally:
            self.service.abort(answer)
        assert first_at is not None
        between = (last_at - first_at) / (output_tokens - 1) if output_tokens > 1 else None
        return Served(first_token_seconds=first_at - begun_at, per_token_seconds=between)


def calibrated(
    config: SchedulerConfig,
    *,
    prompt: Lengths,
    output: Lengths,
    limits: Limits = Limits(),  # noqa: B008
    most: int = 64,
    step_seconds: float = 12.0,
    with_weights: bool = False,
    gpus: int = 1,
    queue: int | None = None,
    dies_at: float = float("inf"),
    beside: Callable[[EngineService], None] = lambda _: None,
    progress: Progress = lambda _: None,
) -> tuple[Calibration, StandIn]:
    """A whole calibration; `beside` may put others' load on the engine first."""

    async def main() -> tuple[Calibration, StandIn]:
        target = StandIn(config, most=queue, dies_at=dies_at)
        stepping = asyncio.create_task(target.service.run())
        beside(target.service)
        await asyncio.sleep(0.5)
        workload = Workload((prompt, output), context_tokens=config.max_model_len, seed=1)
        plan = Plan(
            limits=limits, step_seconds=step_seconds, windows=4, most=most, with_weights=with_weights, gpus=gpus
        )
        loop = asyncio.get_running_loop()
        try:
            return await calibrate(target, workload, plan, clock=loop.time, progress=progress), target
        finally:
            stepping.cancel()

    return run_virtually(main())
