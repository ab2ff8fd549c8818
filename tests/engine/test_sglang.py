"""The stand-in for SGLang's scheduler, and what our priorities do on it."""

import pytest

from fairshare.core.pool import Pool
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.engine.sglang import SglangScheduler
from fairshare.gateway.kinds import SglangFlags, sglang_priority

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
