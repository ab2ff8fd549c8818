"""Shows by behaviour whether an engine orders what waits by priority: a few seconds of load, only when asked.

The engine is filled with short prompts until some of them wait. Then a lazy request is sent, and after it an urgent
one, and one seat is freed by hanging up on a filler. An engine that orders by priority starts the urgent request in it;
one that does not starts a filler that has waited longer. Nothing here depends on how fast the engine is, and hanging up
on everything ends the load at once, because an engine aborts what nobody waits for.

An SGLang engine that does not order by the numbers as it is configured is tried with them the other way round as well.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from fairshare.clock import Clock
from fairshare.gateway.engine_http import Answer, Ask, EngineSilent
from fairshare.gateway.kinds import SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec
from fairshare.gateway.scrape import EngineLoad, scrape

LONGEST_SECONDS = 30.0
"""The whole probe ends by then, whatever happened."""

STEP_SECONDS = 4.0
"""How long to wait for what one step should bring about."""

LOOK_SECONDS = 0.05
"""Between two looks at the engine's metrics."""

SINGLES = 3
"""Fillers with a seat and a connection of their own: hanging up on one frees exactly one seat."""

LEAST_WAITING = SINGLES + 1
"""Fillers that wait. More than the seats that are freed, so that an engine that ignores priority never comes to the
urgent request."""

LEAST_PATIENCE_SECONDS = 0.5
"""How long a request that has a seat may take for its only token, at least."""

PATIENCE_FACTOR = 10.0
"""The same in times of what it took on the quiet engine."""

FIRST_PROMPTS = 32
"""Fillers of the first request, where the engine's seats are not known; doubled until some wait."""

MOST_PROMPTS = 4096
"""More than any engine was seen to run at once."""

MOST_TOKENS = 8192
"""A filler would end by itself after this many."""

FILLER_PRIORITY = 1000
"""Behind everything that fairshare sends."""

LAZY_PRIORITY = 101
"""The worst that fairshare sends: a batch request of the most over-served borrower."""

URGENT_PRIORITY = 0
"""The best that fairshare sends: an interactive request within its team's share."""


class Policy(StrEnum):
    """What an engine's behaviour shows."""

    PRIORITY = "priority"
    """The urgent request started first."""

    REVERSED = "reversed"
    """It orders by priority, the other way round than configured."""

    IGNORED = "ignored"
    """Seats went to others while the urgent request waited."""

    UNCLEAR = "unclear"
    """The engine could not be brought into the situation that shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probe saw."""

    policy: Policy
    detail: str
    """What was seen, as a sentence."""
    seats: int | None = None
    """How many sequences ran when others had to wait."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What the probe's requests carry as their priority."""

    filler: int
    lazy: int
    urgent: int


_VLLM_NUMBERS = _Numbers(FILLER_PRIORITY, LAZY_PRIORITY, URGENT_PRIORITY)


def _sglang_numbers(*, low_values_first: bool) -> _Numbers:
    """Far behind everything that fairshare sends. The lazy one is no better than a filler: whatever the threshold, it
    displaces nobody. The urgent one is by one: it displaces a filler where the threshold is 0, and starts then.
    """
    sign = 1 if low_values_first else -1
    return _Numbers(sign * FILLER_PRIORITY, sign * FILLER_PRIORITY, sign * (FILLER_PRIORITY - 1))


class _Unclear(Exception):
    """The probe cannot go on; the message says why."""


async def probe(
    ask: Ask,
    spec: InstanceSpec,
    *,
    model: str,
    context_tokens: int | None,
    seats: int | None,
    reported: SglangReport | None = None,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Probed:
    """Loads the engine for a few seconds and sees what it does. Never raises for what the engine does.

    `model` is the engine's own name, `context_tokens` its `max_model_len`; `seats` is `max_num_seqs`, if known.
    `reported`: what SGLang says of its flags.
    """

    async def once(numbers: _Numbers) -> Probed:
        return await _probe_once(_Probe(ask, spec, model, context_tokens, numbers, clock, sleep), seats)

    if spec.kind is EngineKind.VLLM:
        return await once(_VLLM_NUMBERS)
    configured = spec.sglang.low_values_first
    # First as the engine says it is: the load then is behind everybody's, even if the configuration is wrong.
    first = configured if reported is None else reported.flags.low_values_first
    seen = await once(_sglang_numbers(low_values_first=first))
    if seen.policy is Policy.IGNORED:
        other = await once(_sglang_numbers(low_values_first=not first))
        if other.policy is Policy.PRIORITY:
            first, seen = not first, other
    if seen.policy is Policy.PRIORITY and first != configured:
        order = "lowest" if first else "highest"
        detail = f"Of two requests that waited, the one with the {order} number started first."
        return Probed(policy=Policy.REVERSED, detail=detail, seats=seen.seats)
    return seen


async def _probe_once(running: "_Probe", seats: int | None) -> Probed:
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            return await running.run(seats)
    except TimeoutError:
        return Probed(policy=Policy.UNCLEAR, detail=f"The probe did not come to an end within {LONGEST_SECONDS:g} s.")
    except _Unclear as unclear:
        return Probed(policy=Policy.UNCLEAR, detail=str(unclear))
    finally:
        await running.clean_up()


class _Probe:
    """One run against one engine."""

    def __init__(
        self,
        ask: Ask,
        spec: InstanceSpec,
        model: str,
        context_tokens: int | None,
        numbers: _Numbers,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._ask = ask
        self._spec = spec
        self._model = model
        self._numbers = numbers
        # A filler's prompt takes a handful of tokens; the rest of the context is for what it generates.
        self._filler_tokens = max(1, min(MOST_TOKENS, (context_tokens or 2048) - 64))
        self._clock = clock
        self._sleep = sleep
        self._tasks: list[asyncio.Task[Answer]] = []
        self._fillers: list[asyncio.Task[Answer]] = []
        self._filler_prompts = 0
        self._answered_first: asyncio.Task[Answer] | None = None
        """Of the lazy and the urgent request."""

    async def run(self, seats: int | None) -> Probed:
        before = await self._load()
        if before.waiting:
            raise _Unclear(f"{before.waiting} requests wait at the engine already: it is too busy to tell anything.")
        patience_seconds = await self._measure_patience()

        singles = [self._fill(1) for _ in range(SINGLES)]
        await self._until(partial(_has, before.running + SINGLES), "take the first fillers")
        full = await self._fill_until_some_wait(seats, already=before.running + SINGLES)
        lazy = self._send(self._numbers.lazy, "lazy")
        await self._until(lambda load: load.waiting > full.waiting, "queue the lazy request")
        urgent = self._send(self._numbers.urgent, "urgent")
        for task in (lazy, urgent):
            task.add_done_callback(self._note_first)
        queued = await self._until(
            lambda load: load.waiting > full.waiting + 1 or urgent.done(), "queue the urgent request"
        )

        freed = 0
        for single in singles:
            self._check_fillers(but=singles[:freed])
            if urgent.done() or lazy.done():
                break
            single.cancel()
            freed += 1
            await self._wait_for_a_start(urgent, lazy, queued.waiting - freed, patience_seconds)
        after = await self._settled(await self._load())
        ours = self._filler_prompts - freed + (not urgent.done()) + (not lazy.done())
        alone = before.running == 0 and after.running + after.waiting <= ours
        return self._verdict(urgent, lazy, seats=full.running, alone=alone)

    async def _measure_patience(self) -> float:
        """How long one token may take here, in seconds. Also finds out whether the engine answers this at all."""
        begun_at = self._clock()
        alone = self._send(self._numbers.lazy, "alone")
        await asyncio.wait([alone])
        _answered(alone, "a request for one token")
        return min(STEP_SECONDS, max(LEAST_PATIENCE_SECONDS, PATIENCE_FACTOR * (self._clock() - begun_at)))

    async def _fill_until_some_wait(self, seats: int | None, *, already: int) -> EngineLoad:
        prompts = seats + LEAST_WAITING if seats is not None else FIRST_PROMPTS
        total = already
        while total + prompts <= MOST_PROMPTS:
            self._fill(prompts)
            total += prompts
            load = await self._settled(await self._until(partial(_has, total), f"take {total} prompts"))
            if load.waiting >= LEAST_WAITING:
                return load
            prompts *= 2
        raise _Unclear(f"The engine ran {total} prompts at once and none had to wait; it cannot be filled.")

    async def _settled(self, load: EngineLoad) -> EngineLoad:
        """The load once it is the same in two looks: a long list of prompts is let in over several steps."""
        deadline_at = self._clock() + STEP_SECONDS
        while self._clock() < deadline_at:
            await self._sleep(LOOK_SECONDS)
            before, load = load, await self._load()
            if (before.running, before.waiting) == (load.running, load.waiting):
                break
        return load

    async def _wait_for_a_start(
        self, urgent: "asyncio.Task[Answer]", lazy: "asyncio.Task[Answer]", waiting: int, patience_seconds: float
    ) -> None:
        """Until the seat that was freed is taken: by a request that answers, or by a filler."""
        deadline_at = self._clock() + STEP_SECONDS
        while self._clock() < deadline_at:
            if urgent.done() or lazy.done():
                return
            if (await self._load()).waiting <= waiting:
                # Somebody started. If it was one of the two, its only token is on its way.
                answered_by = self._clock() + patience_seconds
                while self._clock() < answered_by and not (urgent.done() or lazy.done()):
                    await self._sleep(LOOK_SECONDS)
                return
            await self._sleep(LOOK_SECONDS)
        raise _Unclear("A seat was freed, and the engine gave it to nobody.")

    def _verdict(
        self, urgent: "asyncio.Task[Answer]", lazy: "asyncio.Task[Answer]", *, seats: int, alone: bool
    ) -> Probed:
        for name, task in (("urgent", urgent), ("lazy", lazy)):
            if task.done():
                _answered(task, f"the {name} request")
        if urgent.done() and lazy.done() and not alone:
            raise _Unclear("Others used the engine, and more than one seat may have become free at once.")
        # The first one's only token frees its seat for the other, so both may have answered by now.
        first = self._answered_first
        if first is urgent:
            return Probed(
                policy=Policy.PRIORITY,
                detail="An urgent request that was sent last started first.",
                seats=seats,
            )
        if first is lazy:
            detail = "A lazy request started before an urgent one that waited beside it."
        elif alone:
            detail = f"{SINGLES} seats were freed one by one, and each went to a lazier request than the urgent one."
        else:
            raise _Unclear("Others used the engine, and the seats that were freed may have gone to them.")
        return Probed(policy=Policy.IGNORED, detail=detail, seats=seats)

    # ------------------------------------------------------------------ small steps

    def _note_first(self, task: "asyncio.Task[Answer]") -> None:
        self._answered_first = self._answered_first or task

    def _fill(self, prompts: int) -> "asyncio.Task[Answer]":
        self._filler_prompts += prompts
        task = self._start(prompt=["1"] * prompts, max_tokens=self._filler_tokens, priority=self._numbers.filler)
        self._fillers.append(task)
        return task

    def _send(self, priority: int, prompt: str) -> "asyncio.Task[Answer]":
        return self._start(prompt=prompt, max_tokens=1, priority=priority)

    def _start(self, **body: Any) -> "asyncio.Task[Answer]":
        content = msgspec.json.encode({"model": self._model, "ignore_eos": True, "temperature": 0.0, **body})
        task = asyncio.create_task(
            _in_time(self._ask, self._spec, content),
            name=f"probe {self._spec.id}",
        )
        self._tasks.append(task)
        return task

    async def _load(self) -> EngineLoad:
        load = await scrape(self._ask, self._spec)
        if load is None:
            raise _Unclear("The engine's /metrics do not show how many requests run and wait.")
        return load

    async def _until(self, condition: Callable[[EngineLoad], bool], what: str) -> EngineLoad:
        deadline_at = self._clock() + STEP_SECONDS
        while True:
            self._check_fillers()
            load = await self._load()
            if condition(load):
                return load
            if self._clock() >= deadline_at:
                raise _Unclear(
                    f"The engine did not {what} within {STEP_SECONDS:g} s ({load.running} ran, {load.waiting} waited)."
                )
            await self._sleep(LOOK_SECONDS)

    def _check_fillers(self, but: "list[asyncio.Task[Answer]] | None" = None) -> None:
        """A filler that has ended no longer fills a seat, and says why if the engine refused it."""
        for task in self._fillers:
            if task.done() and task not in (but or ()):
                _answered(task, "a filler")
                raise _Unclear("The fillers ended before the engine had shown anything: it is too fast for this probe.")

    async def clean_up(self) -> None:
        """Hangs up on everything, and waits until that is done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _has(prompts: int, load: EngineLoad) -> bool:
    return load.running + load.waiting >= prompts


async def _in_time(ask: Ask, spec: InstanceSpec, content: bytes) -> Answer:
    return await ask(
        "POST",
        f"{spec.url}/v1/completions",
        api_key=spec.api_key,
        ca_file=spec.ca_file,
        body=content,
        timeout_seconds=LONGEST_SECONDS,
    )


def _answered(task: "asyncio.Task[Answer]", what: str) -> None:
    """Nothing, if the request was answered well; else why the probe cannot use it."""
    try:
        answer = task.result()
    except EngineSilent as silent:
        raise _Unclear(f"The engine did not answer {what}: {silent.detail}.") from None
    if answer.status != 200:
        text = answer.body.decode("utf-8", "replace")[:200]
        raise _Unclear(f"The engine answered {what} with {answer.status}: {text}")
