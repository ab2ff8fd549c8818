"""The stand-in for SGLang's scheduler, and what our priorities do on it."""

from collections.abc import Callable
from typing import Any

import pytest

from fairshare.core.pool import Pool
from fairshare.engine.scheduler import Change, Scheduler, SchedulerConfig
from fairshare.engine.sglang import SglangScheduler
from fairshare.gateway.kinds import SglangFlags, sglang_priority
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.scenario import parse
from fairshare.simulator.world import World

FOUR_SEATS = SchedulerConfig(max_num_seqs=4, step_seconds=0.01, token_seconds=0.0)


def add(engine: SglangScheduler, name: str, priority: int | None, *, output: int = 50) -> None:
    engine.add(name, prompt_tokens=8, output_tokens=output, priority=priority)


def steps(engine: SglangScheduler, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("low_values_first", [False, True])
def test_the_order_is_the_flags(low_values_first: bool) -> None:
    config = SchedulerConfig(max_num_seqs=1, step_seconds=0.01, token_seconds=0.0)
    engine = SglangScheduler(config, low_values_first=low_values_first)
    for name, priority in (("none", None), ("five", 5), ("seven", 7), ("five too", 5)):
        add(engine, name, priority, output=1)
    order: list[str] = []
    while engine.busy:
        order += [event.request_id for event in engine.step() if event.finished]
    ordered = ["seven", "five", "five too"] if not low_values_first else ["five", "five too", "seven"]
    assert order == [*ordered, "none"]


@pytest.mark.parametrize(("difference", "displaces"), [(10, False), (11, True)])
def test_a_waiting_request_displaces_only_beyond_the_threshold(difference: int, displaces: bool) -> None:
    engine = SglangScheduler(FOUR_SEATS)
    for index in range(4):
        add(engine, f"old {index}", 0)
        steps(engine, 1)
    add(engine, "new", difference)
    steps(engine, 2)
    assert ("new" in engine.running) == displaces
    assert engine.preemptions == displaces
    assert displaces == ("old 3" not in engine.running)


def test_without_preemption_nothing_is_displaced() -> None:
    engine = SglangScheduler(FOUR_SEATS, preemption_threshold=None)
    for index in range(4):
        add(engine, f"old {index}", 0)
    steps(engine, 3)
    add(engine, "new", 1000)
    steps(engine, 2)
    assert "new" not in engine.running


def test_blocks_and_tokens_add_up_after_many_displacements() -> None:
    engine = SglangScheduler(
        SchedulerConfig(max_num_seqs=4, num_blocks=65, block_size=4, max_model_len=128, step_seconds=0.01)
    )
    total = engine.free_blocks
    for round in range(30):
        add(engine, f"{round}", 20 * round, output=30)
        steps(engine, 1 + round % 5)
    done: dict[str, int] = {}
    while engine.busy:
        for event in engine.step():
            done[event.request_id] = engine.generated(event.request_id) if not event.finished else 30
    assert engine.preemptions > 5
    assert engine.free_blocks == total


@pytest.mark.parametrize("by_priority", [False, True])
def test_memory_that_is_short_takes_the_least_output_or_the_worst_priority(by_priority: bool) -> None:
    config = SchedulerConfig(max_num_seqs=4, num_blocks=17, block_size=4, max_model_len=64, step_seconds=0.01)
    engine = SglangScheduler(config, retracts_by_priority=by_priority, preemption_threshold=None)
    add(engine, "lazy", 0)
    steps(engine, 10)
    add(engine, "urgent", 100)
    while not engine.preemptions:
        engine.step()
    assert engine.running == (["urgent"] if by_priority else ["lazy"])


def started_of_owner(priority_of: object, *, low_values_first: bool) -> int:
    """A team floods the engine; the owner of half of it comes. How many of its requests run three steps later."""
    engine = SglangScheduler(FOUR_SEATS, low_values_first=low_values_first)
    pool = Pool("chat", 4, {"search": "1/2", "ads": "1/2"}, 0)
    for index in range(20):
        add(engine, f"ads {index}", priority_of(pool.acquire("ads").priority), output=400)  # type: ignore[operator]
    steps(engine, 5)
    for index in range(2):
        add(engine, f"search {index}", priority_of(pool.acquire("search").priority))  # type: ignore[operator]
    steps(engine, 3)
    return sum(name.startswith("search") for name in engine.running)


@pytest.mark.parametrize("low_values_first", [False, True])
def test_an_owner_gets_its_slots_at_once_behind_a_flood(low_values_first: bool) -> None:
    flags = SglangFlags(low_values_first=low_values_first)
    mapped = started_of_owner(lambda one: sglang_priority(one, flags), low_values_first=low_values_first)
    assert mapped == 2


@pytest.mark.parametrize("low_values_first", [False, True])
def test_with_vllms_numbers_the_owner_waits_behind_the_flood(low_values_first: bool) -> None:
    assert started_of_owner(lambda one: one, low_values_first=low_values_first) == 0


# ---------------------------------------------------------------- the burst, behind the gateway's queue

BURST = """
title: a burst, and an owner of half who comes {b_starts}
duration: 8s
window: 500ms
pools: [{{capacity: 16, engines: {{max_num_seqs: 16}}}}]
teams:
  - {{name: a, share: 1/2, loads: [{{burst: 100, prompt: 50-150, output: 50-150}}]}}
  - {{name: b, share: 1/2, loads: [{{clients: 16, start: {b_starts}, prompt: 50-150, output: 50-150}}]}}
"""


def shares_of_b(b_starts: str, number: Callable[[int], int], *, low_values_first: bool) -> list[float]:
    """Of the tokens in each half second, with `dispatch: hold` (the real queue) on SGLang's rules.

    `number`: makes what the engine is told of our priorities.
    """

    class Told(SglangScheduler):
        def add(self, request_id: str, *, priority: int | None = None, **more: Any) -> None:
            super().add(request_id, priority=None if priority is None else number(priority), **more)

    def engine(config: SchedulerConfig, observer: Callable[[Change, str], None]) -> Scheduler:
        return Told(
            config, observer, low_values_first=low_values_first, preemption_threshold=20, retracts_by_priority=True
        )

    scenario = parse(BURST.format(b_starts=b_starts))
    (pool,) = World(scenario, PolicyName.HOLD_RECALL, make_scheduler=engine).run().pools
    b = list(pool.teams).index("b")
    return [row[b] / sum(row) for row in pool.windows.output_tokens]


@pytest.mark.parametrize("low_values_first", [False, True])
def test_a_burst_takes_nothing_of_the_half_that_another_team_owns(low_values_first: bool) -> None:
    flags = SglangFlags(low_values_first=low_values_first, preemption_threshold=20)
    shares = shares_of_b("0s", lambda one: sglang_priority(one, flags), low_values_first=low_values_first)
    assert len(shares) == 16
    assert shares == pytest.approx([0.5] * 16, abs=0.02)


@pytest.mark.parametrize("low_values_first", [False, True])
def test_who_comes_after_the_burst_has_its_half_at_once_and_with_vllms_numbers_it_has_not(
    low_values_first: bool,
) -> None:
    flags = SglangFlags(low_values_first=low_values_first, preemption_threshold=20)
    mapped = shares_of_b("500ms", lambda one: sglang_priority(one, flags), low_values_first=low_values_first)
    naive = shares_of_b("500ms", lambda one: one, low_values_first=low_values_first)
    assert mapped[0] == naive[0] == 0.0
    assert mapped[1] > 0.43  # its prompts are computed in that half second
    assert mapped[2:] == pytest.approx([0.5] * (len(mapped) - 2), abs=0.02)
    assert naive[1] < 0.2
