"""The probe of the scheduling policy, and the examination that `fairshare doctor` shows, on engines in memory.

Time is counted in steps: every sleep of the probe is one step of the engine.
"""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fairshare.core.decisions import Mode
from fairshare.gateway.engine_http import Answer, Failure
from fairshare.gateway.examination import Examination, examine
from fairshare.gateway.kinds import SglangFlags, SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec, PoolSpec
from fairshare.gateway.probe import Policy, Probed, probe
from gateway.fake_engines import FakeEngine, FakeNetwork, metrics_text

URL = "http://one"
SPEC = InstanceSpec(url=URL)


@dataclass(eq=False)
class Sequence:
    order: tuple[int, int]
    left: int
    done: "asyncio.Future[None]"


@dataclass
class SchedulingEngine:
    """Runs sequences in its seats; takes the next ones by priority or by arrival, a token a step."""

    seats: int = 4
    by_priority: bool = True
    highest_first: bool = False
    threshold: int | None = None
    """A waiting sequence displaces a running one that is worse by more than this; None: never."""
    refuses: int | None = None
    others: int = 0
    """Urgent sequences of somebody else that come with every step."""
    others_begin_at: int = 0
    steps: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    most_sent: int = 0
    arrivals: Any = field(default_factory=itertools.count)

    @property
    def clock(self) -> float:
        return self.steps * 0.05

    async def sleep(self, seconds: float) -> None:
        for _ in range(self.others if self.steps >= self.others_begin_at else 0):
            self._add(0, 3)
        self._step()
        for _ in range(5):  # let those who were answered go on
            await asyncio.sleep(0)

    def _step(self) -> None:
        self.steps += 1
        for sequence in self.running:
            sequence.left -= 1
            if sequence.left <= 0 and not sequence.done.done():
                sequence.done.set_result(None)
        self._admit()

    def _admit(self) -> None:
        self.running = [sequence for sequence in self.running if not sequence.done.done()]
        self.waiting = [sequence for sequence in self.waiting if not sequence.done.done()]
        self.waiting.sort(key=lambda sequence: sequence.order)
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.pop(0))
        while self.threshold is not None and self.waiting and self.running:
            worst = max(self.running, key=lambda sequence: sequence.order)
            if worst.order[0] - self.waiting[0].order[0] <= self.threshold:
                break
            self.running[self.running.index(worst)] = self.waiting.pop(0)
            self.waiting.append(worst)

    def _add(self, priority: int, tokens: int) -> Sequence:
        order = (-priority if self.highest_first else priority) if self.by_priority else 0
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sequence = Sequence((order, next(self.arrivals)), tokens, done)
        self.waiting.append(sequence)
        self._admit()
        self.most_sent = max(self.most_sent, len(self.waiting) + len(self.running))
        return sequence

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
        path = urlsplit(url).path
        if path == "/metrics":
            text = metrics_text(running=len(self.running), waiting=len(self.waiting))
            text += "".join(
                f"sglang:{name} {len(queue)}\n"
                for name, queue in (("num_running_reqs", self.running), ("num_queue_reqs", self.waiting))
            )
            return Answer(200, text.encode())
        if path != "/v1/completions":
            return await FakeNetwork(one=FakeEngine())(method, url, timeout_seconds=timeout_seconds)
        if self.refuses is not None:
            return Answer(self.refuses, b'{"error": "no completions here"}')
        asked = json.loads(body or b"")
        prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
        sequences = [self._add(asked["priority"], asked["max_tokens"]) for _ in prompts]
        try:
            if asked["max_tokens"] == 1 and len(self.waiting) + len(self.running) == 1:
                self._step()  # nobody sleeps while the first request runs alone
            for sequence in sequences:
                await sequence.done
        except asyncio.CancelledError:
            for sequence in sequences:
                sequence.done.cancel()
            self._admit()
            raise
        return Answer(200, b"{}")


def probed(engine: SchedulingEngine, *, seats: int | None = None, context_tokens: int = 2048) -> Probed:
    async def scenario() -> Probed:
        result = await probe(
            engine,
            SPEC,
            model="tiny",
            context_tokens=context_tokens,
            seats=seats,
            clock=lambda: engine.clock,
            sleep=engine.sleep,
        )
        engine._admit()
        assert (engine.running, engine.waiting) == ([], []) or engine.others, "the probe must leave nothing behind"
        return result

    return asyncio.run(scenario())


@pytest.mark.parametrize("seats", [1, 2, 3, 4, 16, 256, 1024])
@pytest.mark.parametrize("known", [True, False], ids=["seats known", "seats unknown"])
def test_an_engine_that_orders_by_priority_is_seen_to(seats: int, known: bool) -> None:
    result = probed(SchedulingEngine(seats=seats), seats=seats if known else None)
    assert (result.policy, result.seats) == (Policy.PRIORITY, seats)


@pytest.mark.parametrize("seats", [1, 2, 3, 4, 16, 256, 1024])
@pytest.mark.parametrize("known", [True, False], ids=["seats known", "seats unknown"])
def test_an_engine_that_takes_them_as_they_come_is_seen_to(seats: int, known: bool) -> None:
    result = probed(SchedulingEngine(seats=seats, by_priority=False), seats=seats if known else None)
    assert (result.policy, result.seats) == (Policy.IGNORED, seats)


def test_an_engine_that_takes_the_highest_number_first_does_not_do_what_is_needed() -> None:
    assert probed(SchedulingEngine(highest_first=True)).policy is Policy.IGNORED


def test_a_known_number_of_seats_keeps_the_load_small() -> None:
    engine = SchedulingEngine(seats=4)
    probed(engine, seats=4)
    assert engine.most_sent <= 16


def test_an_engine_that_cannot_be_filled_shows_nothing() -> None:
    result = probed(SchedulingEngine(seats=1 << 20))
    assert result.policy is Policy.UNCLEAR
    assert "cannot be filled" in result.detail


def test_an_engine_whose_requests_wait_already_is_left_alone() -> None:
    async def scenario() -> tuple[Probed, int]:
        engine = SchedulingEngine(seats=1)
        for _ in range(3):
            engine._add(0, 1000)
        result = await probe(
            engine, SPEC, model="tiny", context_tokens=2048, seats=1, clock=lambda: engine.clock, sleep=engine.sleep
        )
        return result, engine.most_sent

    result, most_sent = asyncio.run(scenario())
    assert result.policy is Policy.UNCLEAR
    assert "too busy" in result.detail
    assert most_sent == 3


@pytest.mark.parametrize("seats", [2, 4, 8])
@pytest.mark.parametrize("others_begin_at", range(12))
def test_others_who_come_meanwhile_never_make_a_good_engine_look_bad(seats: int, others_begin_at: int) -> None:
    for others in (1, 2, seats):
        engine = SchedulingEngine(seats=seats, others=others, others_begin_at=others_begin_at)
        result = probed(engine, seats=seats)
        assert result.policy is not Policy.IGNORED, result


def test_an_engine_without_completions_says_so_and_is_not_loaded() -> None:
    engine = SchedulingEngine(refuses=404)
    result = probed(engine)
    assert result.policy is Policy.UNCLEAR
    assert "404" in result.detail
    assert "no completions here" in result.detail


def test_fillers_that_end_by_themselves_make_no_verdict() -> None:
    result = probed(SchedulingEngine(), context_tokens=66)
    assert result.policy is Policy.UNCLEAR


# ---------------------------------------------------------------------- SGLang


def probed_sglang(engine: SchedulingEngine, *, configured: bool, reported: bool | None = None) -> Probed:
    """`configured` and `reported`: whether low values go first."""
    spec = InstanceSpec(url=URL, kind=EngineKind.SGLANG, sglang=SglangFlags(low_values_first=configured))
    report = SglangReport(
        flags=SglangFlags(low_values_first=bool(reported)), enabled=True, displaces=True, retraction_policy="priority"
    )

    async def scenario() -> Probed:
        result = await probe(
            engine,
            spec,
            model="tiny",
            context_tokens=2048,
            seats=engine.seats,
            reported=report if reported is not None else None,
            clock=lambda: engine.clock,
            sleep=engine.sleep,
        )
        engine._admit()
        assert (engine.running, engine.waiting) == ([], [])
        return result

    return asyncio.run(scenario())


@pytest.mark.parametrize("reported", [None, True, False])
@pytest.mark.parametrize("threshold", [None, 0, 1, 10, 20])
@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("seats", [1, 2, 4, 16])
def test_sglangs_polarity_is_seen_by_what_it_does(
    seats: int, configured: bool, low_first: bool, threshold: int | None, reported: bool | None
) -> None:
    engine = SchedulingEngine(seats=seats, highest_first=not low_first, threshold=threshold)
    result = probed_sglang(engine, configured=configured, reported=reported)
    assert result.policy is (Policy.PRIORITY if configured == low_first else Policy.REVERSED), result


@pytest.mark.parametrize("seats", [1, 2, 4, 16])
def test_an_sglang_that_ignores_priority_is_neither_way_round(seats: int) -> None:
    assert probed_sglang(SchedulingEngine(seats=seats, by_priority=False), configured=False).policy is Policy.IGNORED


# ---------------------------------------------------------------------- the examination


def pool(*names: str, mode: Mode = Mode.HOLD, capacity: int = 2) -> PoolSpec:
    return PoolSpec(
        name="chat",
        capacity=capacity,
        half_life_seconds=0.0,
        mode=mode,
        shares={"a": Fraction(1)},
        models={"client-name": "tiny"},
        instances=tuple(InstanceSpec(url=f"http://{name}") for name in names),
    )


def examined(ask: Any, spec: PoolSpec, *, with_probe: bool = False, kept: float | None = None) -> Examination:
    engine = ask if isinstance(ask, SchedulingEngine) else SchedulingEngine()

    async def keeps(_: InstanceSpec) -> float | None:
        return kept

    async def scenario() -> Examination:
        clock = lambda: engine.clock  # noqa: E731
        return await examine(spec, ask=ask, with_probe=with_probe, clock=clock, sleep=engine.sleep, kept=keeps)

    return asyncio.run(scenario())


def ids(examination: Examination) -> list[str]:
    return [finding.id for finding in examination.findings]


def test_without_a_probe_the_policy_is_unverified_and_that_is_no_error() -> None:
    examination = examined(FakeNetwork(one=FakeEngine()), pool("one"))
    assert ids(examination) == ["policy-unverified"]
    assert examination.sound


def test_a_probe_verifies_the_policy_and_the_seats() -> None:
    examination = examined(SchedulingEngine(seats=4), pool("one"), with_probe=True)
    assert ids(examination) == []
    examination = examined(SchedulingEngine(seats=3), pool("one", capacity=4), with_probe=True)
    assert ids(examination) == ["capacity-above-seats"]


def test_a_probe_that_sees_priority_ignored_is_an_error_with_the_flag_to_set() -> None:
    examination = examined(SchedulingEngine(by_priority=False), pool("one"), with_probe=True)
    assert ids(examination) == ["priority-ignored"]
    assert not examination.sound
    assert "--scheduling-policy priority" in examination.findings[0].fix


def test_an_engine_that_soon_closes_idle_connections_is_a_warning_with_the_variable_to_set() -> None:
    examination = examined(SchedulingEngine(), pool("one"), with_probe=True, kept=5.0)
    assert ids(examination) == ["short-keep-alive"]
    assert examination.sound
    assert examination.findings[0].sentence == (
        "http://one of pool chat closes a connection on which nothing was asked for 5.0 s."
    )
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60" in examination.findings[0].fix
    assert ids(examined(SchedulingEngine(), pool("one"), kept=5.0)) == ["policy-unverified"]


def test_a_probe_that_shows_nothing_is_a_warning() -> None:
    examination = examined(SchedulingEngine(refuses=404), pool("one"), with_probe=True)
    assert ids(examination) == ["policy-unverified", "probe-unclear"]
    assert examination.sound


def test_in_observe_the_policy_does_not_matter() -> None:
    examination = examined(SchedulingEngine(by_priority=False), pool("one", mode=Mode.OBSERVE), with_probe=True)
    assert ids(examination) == []


def test_engines_that_are_down_are_said_and_not_probed() -> None:
    network = FakeNetwork(one=FakeEngine(silent=Failure.TOO_SLOW), two=FakeEngine(health_status=503))
    examination = examined(network, pool("one", "two", "three"), with_probe=True)
    assert ids(examination) == ["instance-out"] * 3 + ["pool-without-instance"]
    assert [instance.trouble for instance in examination.instances] == [
        "it is too slow",
        "/health answers 503",
        "the connection is refused",
    ]
    assert not examination.sound
