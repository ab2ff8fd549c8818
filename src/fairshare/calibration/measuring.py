"""Loads an engine step by step, and finds the largest concurrency that it sustains.

Sustainable, so C of one engine, is the largest number of requests in flight at which, in every window measured,

* every one of them runs: no more of them wait in the engine's own queue than those that begin with its next step,
* nothing is preempted,
* the 95th percentiles of time to first token and of time per output token stay within what was asked for.

These are the conditions of the promise: what waits inside an engine is beyond any reservation's reach, and what is
preempted is computed twice. The knee, the least concurrency with `KNEE_PART` of the best throughput seen, is shown
beside it: from there on more concurrency buys little throughput.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, isnan, log2, nan
from statistics import fmean

from fairshare.calibration.fitting import Weights, Work, fit_weights, percentile, spread
from fairshare.calibration.target import EngineBusy, Served, Target
from fairshare.calibration.work import Mix, Workload
from fairshare.clock import Clock
from fairshare.errors import OperatorError
from fairshare.gateway.engine_http import EngineSilent
from fairshare.gateway.scrape import EngineLoad

KNEE_PART = 0.9

JUDGED_PART = 0.95
"""The percentile of latencies that must stay within a limit."""

QUEUE = 0.5
"""Requests that wait inside the engine, on average and beyond those that wait for its next step to begin: one more than
it has seats for is always one more."""

LOOK_SECONDS = 0.25
"""Between two scrapes, at most; a window has at least `LEAST_LOOKS`."""

LEAST_LOOKS = 8

LONGEST_WINDOWS = 4.0
"""A window in which no request ended is made longer, up to so many times."""

CLEAN_UP_SECONDS = 5.0

BETWEEN_LOOKS = 2
"""So many more requests than ours are no strangers yet: some began or ended while the engine was asked."""

HARM_LOOKS = 3
"""Somebody waits in the engine's queue at so many looks in a row: beside others' load that stops a measurement."""

HARDLY_APART = 40
"""What holds and what does not are close enough when they differ by a fortieth (2.5 %)."""

NOISY = 0.05
"""Throughput of the windows of one step that differs by more than this (standard deviation over mean) is noise."""


class Verdict(StrEnum):
    """Whether an engine sustains a concurrency."""

    KEPT = "kept"
    """In every window."""
    MIXED = "mixed"
    """In some windows, not in others."""
    BROKEN = "broken"
    """In no window."""


class Harm(OperatorError):
    """Others use the engine, and the measurement would hurt them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What must hold at C. None: no limit."""

    first_token_seconds: float | None = None
    per_token_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to measure."""

    limits: Limits
    step_seconds: float
    """One concurrency is loaded for so long, without the time until it runs steadily."""
    windows: int
    """A step is cut into so many windows, which show how much figures vary."""
    most: int
    """The highest concurrency to try."""
    with_weights: bool
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was seen in one stretch of time."""

    work: Work
    running: int
    """The most that the engine ran at once."""
    waiting: float
    """Mean number of requests in the engine's queue."""
    kv_usage: float
    """The most that was seen."""
    beginning: float
    """How many of them only waited for the engine's next step: requests per second x the time of two steps."""
    preemptions: int
    first_token_seconds: float
    """95th percentile of the requests that ended in it; NaN: none did."""
    per_token_seconds: float
    refused: int
    """Requests that the engine did not take (429 or 503)."""

    @property
    def queues(self) -> bool:
        """Whether more waits than what begins."""
        return self.waiting >= self.beginning + max(QUEUE, self.beginning / 4)

    def broken(self, limits: Limits) -> list[str]:
        """What was not kept, in words; empty: all was."""
        said: list[str] = []
        if self.refused:
            said.append("the engine refuses requests")
        if self.queues:
            said.append("requests wait inside the engine")
        if self.preemptions:
            said.append("the engine preempts")
        if limits.first_token_seconds is not None and not self.first_token_seconds <= limits.first_token_seconds:
            said.append("time to first token")
        if (
            limits.per_token_seconds is not None
            and not isnan(self.per_token_seconds)
            and self.per_token_seconds > limits.per_token_seconds
        ):
            said.append("time per token")
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One concurrency, as it was measured."""

    concurrency: int
    windows: tuple[Window, ...]
    verdict: Verdict
    broke: tuple[str, ...]
    """What was not kept, in words."""

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens that were computed and tokens that were made."""
        return sum(one.work.prompt_tokens + one.work.completion_tokens for one in self.windows) / sum(
            one.work.seconds for one in self.windows
        )

    @property
    def spread(self) -> float:
        """Of the throughput over its windows."""
        return spread(
            [(one.work.prompt_tokens + one.work.completion_tokens) / one.work.seconds for one in self.windows]
        )


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What came out; also where it was broken off."""

    steps: list[Step] = field(default_factory=list[Step])
    """By concurrency."""
    capacity: int | None = None
    """C of the engine; None: even one request at a time breaks a limit, or nothing was measured."""
    tried_up_to: bool = False
    """The highest concurrency that was allowed is still sustained: C may be higher."""
    unclear_up_to: int | None = None
    """The highest concurrency above C at which some windows kept everything: noise, so C is between the two."""
    weights: Weights | None = None
    stopped: str = ""
    """Why it ended early, as a sentence."""
    others_seen: bool = False
    """Whether anybody else had requests at the engine at any time."""

    @property
    def knee(self) -> int | None:
        best = max((step.tokens_per_second for step in self.steps), default=nan)
        return next((step.concurrency for step in self.steps if step.tokens_per_second >= KNEE_PART * best), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Where a calibration is."""

    what: str
    """What is measured."""
    done: float
    """Steps, and the part of this one."""
    expected: int
    """Steps in all, at most: a search that ends early has fewer."""


Progress = Callable[[Now], None]
"""Told where it is, whenever that changes."""


async def calibrate(
    target: Target,
    workload: Workload,
    plan: Plan,
    *,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measures. Never leaves a request at the engine, however it ends.

    Raises:
        OperatorError: nothing can be measured: the engine does not answer, refuses the requests, or is busy.
    """
    before = await target.load()
    if before is None:
        raise OperatorError("the engine shows no metrics of a vLLM; without them nothing can be measured")
    if before.waiting:
        raise OperatorError(
            f"{before.waiting} requests wait at the engine already, so it is above what it sustains now; "
            "measure when it is quieter"
        )
    made = Calibration()
    measured = _Measurement(target, workload, plan, clock, sleep, progress, others_seen=before.running > 0)
    try:
        await _search(measured, plan, made)
        if plan.with_weights and made.capacity is not None:
            made.weights = await _weigh(measured, plan, made.capacity)
    except (Harm, EngineSilent) as error:
        if not made.steps:
            raise OperatorError(f"nothing was measured: {_sentence(error)}") from error
        made.stopped = _sentence(error)
    finally:
        await measured.hang_up()
    made.others_seen = measured.others_seen
    made.steps.sort(key=lambda step: step.concurrency)
    return made


def _sentence(error: Exception) -> str:
    return f"the engine is gone ({error})" if isinstance(error, EngineSilent) else str(error)


async def _search(measured: "_Measurement", plan: Plan, made: Calibration) -> None:
    """Doubles until something breaks, then halves what is between. What is kept is C at every moment."""
    broken: int | None = None
    concurrency = 1
    weighing = len(Mix) if plan.with_weights else 0
    while True:
        if broken is None:  # at worst, the last that is tried breaks first
            left = ceil(log2(plan.most / concurrency)) + _halvings(plan.most // 2, plan.most)
        else:
            left = _halvings(made.capacity or 0, broken) - 1
        step = await measured.step(concurrency, left=left + weighing)
        made.steps.append(step)
        if step.verdict is Verdict.KEPT:
            made.capacity = max(made.capacity or 0, concurrency)
        else:
            broken = concurrency if broken is None else min(broken, concurrency)
            if step.verdict is Verdict.MIXED:
                made.unclear_up_to = max(made.unclear_up_to or 0, concurrency)
        kept = made.capacity or 0
        if broken is None:
            if concurrency >= plan.most:
                made.tried_up_to = True
                break
            concurrency = min(2 * concurrency, plan.most)
        elif broken - kept <= max(1, kept // HARDLY_APART):
            break
        else:
            concurrency = (kept + broken) // 2
    above = [
        one.running
        for step in made.steps
        for one in step.windows
        if step.concurrency > (made.capacity or step.concurrency)
    ]
    if made.capacity is not None and above:
        # A seat is empty until its next request comes, so one or two more than there are seats hardly queue.
        made.capacity = min(made.capacity, max(above))
    if made.unclear_up_to is not None and made.unclear_up_to <= (made.capacity or 0):
        made.unclear_up_to = None


def _halvings(kept: int, broken: int) -> int:
    """How many steps it takes from here until the two are hardly apart."""
    return ceil(log2(max(1.0, (broken - kept) / max(1, kept // HARDLY_APART))))


async def _weigh(measured: "_Measurement", plan: Plan, concurrency: int) -> Weights | None:
    """At C, where the engine is meant to run: one of its steps costs nearly the same for one sequence as for many."""
    work: list[Work] = []
    for left, mix in zip(reversed(range(len(Mix))), Mix, strict=True):
        step = await measured.step(concurrency, mix, left=left)
        # What is preempted is computed twice, and where requests wait seats may be empty: neither tells a cost.
        work += [one.work for one in step.windows if not one.preemptions and not one.queues]
    return fit_weights(work, gpus=plan.gpus)


class _Measurement:
    """Loads one engine, at one concurrency at a time."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        plan: Plan,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
        progress: Progress,
        *,
        others_seen: bool,
    ) -> None:
        self._target = target
        self._workload = workload
        self._plan = plan
        self._clock = clock
        self._sleep = sleep
        self._progress = progress
        self._steps = 0
        """That are done."""
        self._clients: list[asyncio.Task[None]] = []
        self._mix = Mix.AS_GIVEN
        self._served: list[Served] = []
        self._in_flight = 0
        self._refused = 0
        self._waiting: deque[int] = deque(maxlen=HARM_LOOKS)
        self.others_seen = others_seen

    async def step(self, concurrency: int, mix: Mix | None = None, *, left: int) -> Step:
        """Loads the engine with so many requests at once and looks. What runs goes on into the next step.

        `mix`: for weights; None: to find C, with the lengths as given. `left`: so many steps come after it, at most.
        """
        what = f"{concurrency} at once" + ("" if mix is None else f", {mix}")

        def tell(part: float) -> None:
            self._progress(Now(what=what, done=self._steps + part, expected=self._steps + 1 + left))

        tell(0.0)
        mix = mix or Mix.AS_GIVEN
        if mix is not self._mix or len(self._clients) > concurrency:
            await self.hang_up()
        self._mix = mix
        for _ in range(concurrency - len(self._clients)):
            self._clients.append(asyncio.create_task(self._client()))
        await self._until_steady(concurrency)
        windows: list[Window] = []
        seconds = self._plan.step_seconds / self._plan.windows
        while len(windows) < self._plan.windows:
            tell((1 + len(windows)) / (1 + self._plan.windows))
            windows.append(await self._window(seconds, concurrency))
        self._steps += 1
        broke = [window.broken(self._plan.limits) for window in windows]
        kept = sum(not each for each in broke)
        verdict = Verdict.MIXED
        if kept in (0, len(windows)):
            verdict = Verdict.KEPT if kept else Verdict.BROKEN
        said = tuple(dict.fromkeys(each for window in broke for each in window))
        return Step(concurrency=concurrency, windows=tuple(windows), verdict=verdict, broke=said)

    async def _client(self) -> None:
        """Sends one request after the other."""
        job = self._workload.part_of(self._workload.job(self._mix))
        while True:
            self._in_flight += 1
            try:
                self._served.append(await self._target.complete(job.prompt, job.output_tokens))
            except EngineBusy:
                self._refused += 1
                await self._sleep(LOOK_SECONDS)
            finally:
                self._in_flight -= 1
            job = self._workload.job(self._mix)

    async def _until_steady(self, concurrency: int) -> None:
        """Until as many requests have ended as run at once, or a step's time has passed."""
        ended, begun_at = len(self._served), self._clock()
        while len(self._served) - ended < concurrency and self._clock() - begun_at < self._plan.step_seconds:
            await self._look(concurrency)
            await self._sleep(self._look_seconds)

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS, self._plan.step_seconds / self._plan.windows / LEAST_LOOKS)

    async def _window(self, seconds: float, concurrency: int) -> Window:
        self._served.clear()
        self._refused = 0
        before = await self._look(concurrency)
        begun_at = now = self._clock()
        waiting: list[int] = []
        kv_usage, running = before.kv_usage, before.running
        load = before
        while now - begun_at < seconds or (not self._served and now - begun_at < LONGEST_WINDOWS * seconds):
            await self._sleep(self._look_seconds)
            load = await self._look(concurrency)
            now = self._clock()
            waiting.append(load.waiting)
            kv_usage = max(kv_usage, load.kv_usage)
            running = max(running, load.running)
        cached_tokens = load.cached_tokens_total - before.cached_tokens_total
        between = [one.per_token_seconds for one in self._served if one.per_token_seconds is not None]
        step_seconds = percentile(between or [one.first_token_seconds for one in self._served], 0.5)
        return Window(
            work=Work(
                seconds=now - begun_at,
                prompt_tokens=load.prompt_tokens_total - before.prompt_tokens_total - cached_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=load.completion_tokens_total - before.completion_tokens_total,
                requests=len(self._served),
            ),
            running=running,
            waiting=fmean(waiting),
            # A request counts as waiting until the end of the step that admits it, and comes while another one runs.
            beginning=2.0 * len(self._served) / (now - begun_at) * (0.0 if isnan(step_seconds) else step_seconds),
            kv_usage=kv_usage,
            preemptions=load.preemptions_total - before.preemptions_total,
            first_token_seconds=percentile([one.first_token_seconds for one in self._served], JUDGED_PART),
            per_token_seconds=percentile(between, JUDGED_PART),
            refused=self._refused,
        )

    async def _look(self, concurrency: int) -> EngineLoad:
        """How busy the engine is. Raises what a client ran into, or `Harm`."""
        for client in self._clients:
            if client.done() and (error := client.exception()) is not None:
                raise error
        in_flight = self._in_flight
        load = await self._target.load()
        if load is None:
            raise Harm(f"the engine stopped answering /metrics at {concurrency} at once")
        # A request that begins or ends between the two looks is no stranger.
        if load.running + load.waiting > max(in_flight, self._in_flight) + BETWEEN_LOOKS:
            self.others_seen = True
        self._waiting.append(load.waiting)
        if self.others_seen and len(self._waiting) == HARM_LOOKS and min(self._waiting) > 0:
            raise Harm(
                f"others use this engine, and at {concurrency} at once {load.waiting} requests waited there; "
                "measure when it is quieter, or an engine of its own"
            )
        return load

    async def hang_up(self) -> None:
        """Ends every request, and waits a little until the engine has noticed."""
        clients, self._clients = self._clients, []
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        until = self._clock() + CLEAN_UP_SECONDS
        while not self.others_seen and self._clock() < until:
            load = await self._target.load()
            if load is None or load.running + load.waiting == 0:
                return
            await self._sleep(LOOK_SECONDS)
