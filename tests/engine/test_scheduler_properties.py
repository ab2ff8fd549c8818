"""The scheduler against a naive one, and its own promises, under random loads."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.naive_scheduler import NaiveScheduler
from fairshare.engine.scheduler import Change, Event, FinishReason, Policy, Scheduler, SchedulerConfig
from fairshare.engine.sglang import SglangScheduler


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    usable = draw(st.integers(3, 14))
    max_num_seqs = draw(st.integers(1, 6))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        num_blocks=usable + 1,
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, max_num_seqs + 30)),
        max_model_len=usable * block_size - draw(st.integers(0, block_size - 1)),
        policy=draw(st.sampled_from(Policy)),
        prefix_caching=draw(st.booleans()),
        step_seconds=0.01,
        token_seconds=0.0003,
    )


@st.composite
def loads(draw: st.DrawFn) -> list[tuple]:
    """Additions, steps and aborts, many of each; from a seed, since a drawn list is mostly short."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    actions: list[tuple] = []
    for number in range(draw(st.integers(1, 40))):
        kind = dice.choices(["add", "step", "abort"], [6, 4, 1])[0]
        if kind == "add":
            size = dice.choice([0.0, 0.1, 0.3, 0.3, 0.5, 1.0]) * dice.random()  # part of the longest prompt
            output, priority = dice.choice([0, 1, 2, 5, 20, 40]), dice.choice([-1, 0, 0, 1, 2])
            actions.append(("add", size, output, priority, dice.randrange(3), dice.choice(list(FinishReason))))
        elif kind == "step":
            actions.append(("step", dice.choice([1, 1, 2, 5, 12])))
        else:
            actions.append(("abort", dice.randint(0, number)))
    return actions


def request_of(config: SchedulerConfig, action: tuple, number: int) -> dict:
    _, size, output, priority, text, reason = action
    prompt = 1 + round(size * (config.max_model_len - 2))
    full = prompt // config.block_size
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "priority": priority,
        "arrival": float(number // 2 if number % 3 else -number),  # together, and out of order
        "reason": reason,
        "block_keys": [(text, i) for i in range(full)],
    }


@settings(max_examples=200, deadline=None)
@given(configs(), loads())
def test_it_does_what_the_naive_scheduler_does_step_by_step(config: SchedulerConfig, actions: list) -> None:
    log: list[tuple[Change, str]] = []
    scheduler = Scheduler(config, observer=lambda change, id: log.append((change, id)))
    naive = NaiveScheduler(config)
    steps = 0
    for number, action in enumerate([*actions, ("step", 500)]):
        if action[0] == "add":
            request = request_of(config, action, number)
            scheduler.add(f"r{number}", **request)
            naive.add(f"r{number}", **request)
        elif action[0] == "abort":
            scheduler.abort(f"r{action[1]}")
            naive.abort(f"r{action[1]}")
        else:
            for _ in range(action[1]):
                assert scheduler.step() == naive.step()
                assert scheduler.running == [r.id for r in naive.running]
                assert log == naive.log
                assert scheduler.free_blocks == len(naive.free)
                assert scheduler.scheduled_tokens == naive.tokens
                steps = scheduler.steps
    assert steps == naive.steps
    assert scheduler.preemptions == naive.preemptions


def sglang(config: SchedulerConfig, observer: Callable[[Change, str], None] | None = None) -> Scheduler:
    return SglangScheduler(replace(config, policy=Policy.PRIORITY), observer, preemption_threshold=0)


@pytest.mark.parametrize("make", [Scheduler, sglang])
@settings(max_examples=100, deadline=None)
@given(config=configs(), actions=loads())
def test_advancing_gives_what_single_steps_give(make: Callable, config: SchedulerConfig, actions: list) -> None:
    changes: list[str] = []
    single, fast = make(config, observer=lambda _, id: changes.append(id)), make(config)
    tokens: dict[str, int] = {}
    for number, action in enumerate([*actions, ("step", 500)]):
        if action[0] == "add":
            for scheduler in (single, fast):
                scheduler.add(f"r{number}", **request_of(config, action, number))
        elif action[0] == "abort":
            assert single.abort(f"r{action[1]}") == fast.abort(f"r{action[1]}")
        else:
            until = fast.now + action[1] * 0.017
            while fast.busy and fast.now < until:
                quiet_until = fast.quiet_until()
                notable = fast.advance(until)
                seen: list[Event] = []
                while single.steps < fast.steps:
                    assert seen == [], "advance went past a step that it had to report"
                    assert single.now < until
                    quiet = single.now < quiet_until
                    changes.clear()
                    seen = [e for e in single.step() if e.finished or tokens.get(e.request_id, 0) == 0]
                    for event in seen:
                        tokens.setdefault(event.request_id, 1)
                    assert not quiet or (seen, changes) == ([], [])
                assert [(e.request_id, e.finished, e.reason) for e in notable] == [
                    (e.request_id, e.finished, e.reason) for e in seen
                ]
                assert fast.now == single.now
                assert fast.running == single.running
                assert fast.free_blocks == single.free_blocks
                assert [fast.generated(r) for r in fast.running] == [single.generated(r) for r in single.running]
            if not fast.busy:
                fast.advance(until)
                single.advance(until)
                assert fast.now == single.now
    assert fast.preemptions == single.preemptions


@settings(max_examples=80, deadline=None)
@given(configs(), loads())
def test_blocks_are_conserved_and_seats_are_never_exceeded(config: SchedulerConfig, actions: list) -> None:
    scheduler = Scheduler(config)
    added: dict[str, int] = {}
    for number, action in enumerate(actions):
        if action[0] == "add":
            scheduler.add(f"r{number}", **request_of(config, action, number))
            added[f"r{number}"] = number
        elif action[0] == "abort":
            here = f"r{action[1]}" in scheduler.running + scheduler.waiting
            assert scheduler.abort(f"r{action[1]}") == here
            assert f"r{action[1]}" not in scheduler.running + scheduler.waiting
        else:
            scheduler.step()
        assert scheduler.running_count <= config.max_num_seqs
        assert 0 <= scheduler.free_blocks <= config.usable_blocks
        assert scheduler.running_count == len(scheduler.running)
        assert scheduler.waiting_count == len(scheduler.waiting)
    for name in scheduler.running + scheduler.waiting:
        scheduler.abort(name)
    assert not scheduler.busy
    assert scheduler.free_blocks == config.usable_blocks
    assert scheduler.step() == []


@settings(max_examples=60, deadline=None)
@given(configs(), loads())
def test_every_request_ends_with_all_its_tokens(config: SchedulerConfig, actions: list) -> None:
    scheduler = Scheduler(config)
    got: dict[str, int] = {}
    due: dict[str, int] = {}
    for number, action in enumerate(actions):
        if action[0] != "add":
            continue
        request = request_of(config, action, number)
        due[f"r{number}"] = min(request["output_tokens"], config.max_model_len - request["prompt_tokens"])
        scheduler.add(f"r{number}", **request)
    while scheduler.busy:
        assert scheduler.steps < 100_000
        for event in scheduler.step():
            got[event.request_id] = got.get(event.request_id, 0) + event.new_tokens
    assert got == due
