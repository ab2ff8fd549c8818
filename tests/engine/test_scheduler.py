"""vLLM's measured scheduling rules as hand-worked transcripts (vLLM 0.32, priority and fcfs policy)."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from fairshare.engine.scheduler import (
    Change,
    Event,
    FinishReason,
    Policy,
    Scheduler,
    SchedulerConfig,
    block_keys,
)

BIG = SchedulerConfig(max_num_seqs=4)
SMALL_KV = SchedulerConfig(max_num_seqs=8, block_size=32, num_blocks=65, max_model_len=2048)
"""64 usable blocks of 32: 2048 tokens."""


class Recorded(Scheduler):
    """A scheduler that keeps what happened, with the step in which it happened."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.victims: list[str] = []
        self.admitted: list[str] = []
        self.by_step: list[tuple[int, Change, str]] = []
        super().__init__(config, observer=self._note)

    def _note(self, change: Change, request_id: str) -> None:
        (self.victims if change is Change.PREEMPTED else self.admitted).append(request_id)
        self.by_step.append((self.steps, change, request_id))


def drain(scheduler: Scheduler) -> list[str]:
    """Runs to the end; the order in which requests finished."""
    order: list[str] = []
    while scheduler.busy:
        order += [event.request_id for event in scheduler.step() if event.finished]
    return order


def first_tokens(scheduler: Scheduler, names: set[str]) -> list[str]:
    """Runs to the end; the order in which these requests got their first token."""
    order: list[str] = []
    while scheduler.busy:
        for event in scheduler.step():
            if event.request_id in names and event.request_id not in order:
                order.append(event.request_id)
    return order


def changed(config: SchedulerConfig, **changes: Any) -> SchedulerConfig:
    return replace(config, **changes)


# ---------------------------------------------------------------- order of waiting requests


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.PRIORITY, ["-4", "0", "3", "3b", "5", "9"]), (Policy.FCFS, ["5", "3", "9", "0", "-4", "3b"])],
)
def test_waiting_requests_start_by_priority_then_arrival_and_with_fcfs_by_arrival_alone(
    policy: Policy, expected: list[str]
) -> None:
    scheduler = Scheduler(changed(BIG, policy=policy))
    for i in range(4):  # four slots, ending one after the other
        scheduler.add(f"busy{i}", prompt_tokens=50, output_tokens=30 + i, priority=9)
    scheduler.step()
    names = ["5", "3", "9", "0", "-4", "3b"]
    for i, name in enumerate(names):
        scheduler.add(name, prompt_tokens=50, output_tokens=20, priority=int(name.rstrip("b")), arrival=1.0 + i)
    assert first_tokens(scheduler, set(names)) == expected


def test_equal_priority_and_arrival_start_by_request_id() -> None:
    scheduler = Recorded(BIG)
    for name in ("0_x", "2_x", "1_x"):
        scheduler.add(name, prompt_tokens=5, output_tokens=5, arrival=7.0)
    scheduler.step()
    assert scheduler.admitted == ["0_x", "1_x", "2_x"]


# ---------------------------------------------------------------- a waiting request displaces nobody


def test_an_urgent_request_waits_until_a_running_one_has_finished() -> None:
    scheduler = Recorded(changed(BIG, max_num_seqs=8))
    for i in range(8):
        scheduler.add(f"lazy{i}", prompt_tokens=50, output_tokens=100 + i, priority=9)
    scheduler.step()
    scheduler.add("urgent", prompt_tokens=50, output_tokens=5, priority=-100)
    finished: list[str] = []
    while not finished:
        assert scheduler.waiting == ["urgent"]
        finished = [event.request_id for event in scheduler.step() if event.finished]
    assert finished == ["lazy0"]
    scheduler.step()
    # lazy0 has its hundredth token at the end of step 100, and the next step (number 100, from 0) admits.
    assert scheduler.by_step[-1] == (100, Change.ADMITTED, "urgent")
    assert scheduler.preemptions == 0


def test_a_head_that_does_not_fit_blocks_those_behind_it_and_evicts_nobody() -> None:
    scheduler = Recorded(SMALL_KV)
    for name in "ABCD":  # 10 blocks each for the prompt, later 13: 52 of 64
        scheduler.add(name, prompt_tokens=300, output_tokens=100, priority=9)
    scheduler.step()
    scheduler.add("head", prompt_tokens=1200, output_tokens=10, priority=-100)  # 38 blocks
    scheduler.add("small", prompt_tokens=20, output_tokens=5, priority=50)  # would fit, has a seat
    scheduler.step()
    assert scheduler.running == ["A", "B", "C", "D"]
    assert drain(scheduler) == ["A", "B", "C", "D", "small", "head"]
    assert scheduler.admitted == ["A", "B", "C", "D", "head", "small"]
    assert scheduler.victims == []


def test_a_long_prompt_is_admitted_only_if_all_of_it_fits_now() -> None:
    config = changed(SMALL_KV, max_num_batched_tokens=64)  # its first part alone would fit
    scheduler = Scheduler(config)
    scheduler.add("A", prompt_tokens=64, output_tokens=200)  # 2 blocks, and one more with its second token
    scheduler.step()
    scheduler.step()
    assert scheduler.free_blocks == 61
    scheduler.add("B", prompt_tokens=61 * 32 + 1, output_tokens=1)
    scheduler.step()
    assert scheduler.running == ["A"]
    scheduler.add("C", prompt_tokens=61 * 32, output_tokens=1, priority=-1)
    scheduler.step()
    assert scheduler.running == ["A", "C"]


# ---------------------------------------------------------------- eviction


def test_growth_evicts_the_worst_priority_first_and_never_the_better_ones() -> None:
    scheduler = Recorded(SMALL_KV)
    for name, priority in (("A", 0), ("B", 5), ("C", 9), ("D", 0)):
        scheduler.add(name, prompt_tokens=19, output_tokens=700, priority=priority)
        scheduler.step()
    order = drain(scheduler)
    assert scheduler.victims == ["C", "B"]
    assert order == ["A", "D", "B", "C"]


def test_of_equal_priorities_the_latest_arrival_is_evicted() -> None:
    scheduler = Recorded(SMALL_KV)
    for name, arrival in (("late", 9.0), ("early", 1.0), ("middle", 5.0)):
        scheduler.add(name, prompt_tokens=600, output_tokens=300, arrival=arrival)
    while not scheduler.victims:
        scheduler.step()
    assert scheduler.victims == ["late"]


def test_under_fcfs_the_last_admitted_is_evicted_and_is_the_next_to_return() -> None:
    scheduler = Recorded(changed(SMALL_KV, policy=Policy.FCFS, max_num_seqs=3))
    for name, priority in (("A", 9), ("B", 5), ("C", -100)):
        scheduler.add(name, prompt_tokens=600, output_tokens=300, priority=priority)
    scheduler.add("D", prompt_tokens=10, output_tokens=10, priority=-200)
    drain(scheduler)
    assert scheduler.victims[0] == "C"
    assert scheduler.admitted == ["A", "B", "C", "C", "D"]


def test_nothing_is_admitted_in_a_step_that_evicted() -> None:
    scheduler = Recorded(SMALL_KV)
    scheduler.add("A", prompt_tokens=992, output_tokens=50)  # 31 blocks: needs a block at its second token
    scheduler.add("B", prompt_tokens=1023, output_tokens=50, priority=1)  # 32 blocks, needs one at its third
    scheduler.step()
    assert scheduler.free_blocks == 1
    scheduler.step()  # A takes the last block
    scheduler.add("small", prompt_tokens=5, output_tokens=5)
    scheduler.step()  # B needs one, evicts itself; small would fit in what it left
    assert scheduler.victims == ["B"]
    assert scheduler.running == ["A"]
    assert scheduler.free_blocks == 32
    scheduler.step()
    assert scheduler.running == ["A", "small"]  # B's 1025 tokens need 33 blocks


def test_a_request_that_evicts_itself_ends_the_step_for_those_behind_it() -> None:
    scheduler = Recorded(SMALL_KV)
    scheduler.add("bad", prompt_tokens=1024, output_tokens=50, priority=9)  # 32 blocks
    scheduler.step()
    scheduler.add("good", prompt_tokens=31 * 32 - 2, output_tokens=50)  # the other 31 (bad has 33)
    assert [e.request_id for e in scheduler.step()] == ["bad", "good"]
    assert scheduler.free_blocks == 0
    seen = [[e.request_id for e in scheduler.step()] for _ in range(35)]
    # good grows at its fourth token and evicts bad, which is visited first in every step.
    assert scheduler.victims == ["bad"]
    assert seen[:4] == [["bad", "good"], ["bad", "good"], ["good"], ["good"]]

    scheduler = Recorded(SMALL_KV)
    scheduler.add("bad", prompt_tokens=1023, output_tokens=50, priority=9)
    scheduler.add("good", prompt_tokens=1000, output_tokens=50)  # 32 and 32 blocks; bad grows at its third token
    assert [e.request_id for e in scheduler.step()] == ["good", "bad"]
    scheduler.abort("good")
    scheduler.add("good", prompt_tokens=1000, output_tokens=50)
    assert [e.request_id for e in scheduler.step()] == ["bad", "good"]
    before = scheduler.now
    assert scheduler.step() == []  # bad evicts itself, good gets nothing
    assert scheduler.victims == ["bad"]
    assert scheduler.now - before == pytest.approx(0.010)
    assert [(e.request_id, e.new_tokens) for e in scheduler.step()] == [("good", 1)]


def test_a_victim_that_got_a_block_in_this_very_step_gives_it_back() -> None:
    scheduler = Recorded(SMALL_KV)
    scheduler.add("bad", prompt_tokens=960, output_tokens=100, priority=9)  # 30 blocks, one more at steps 1 and 33
    scheduler.step()
    scheduler.add("good", prompt_tokens=993, output_tokens=100)  # 32 blocks, one more at step 33
    while scheduler.steps < 33:
        scheduler.step()
    assert scheduler.free_blocks == 1
    assert [event.request_id for event in scheduler.step()] == ["good"]  # bad, first in line, took the last block
    assert scheduler.victims == ["bad"]
    assert scheduler.free_blocks == 64 - 33
    assert scheduler.scheduled_tokens == (960 + 32) + (993 + 32)


def test_once_admitted_a_better_request_grows_at_the_cost_of_worse_ones() -> None:
    scheduler = Recorded(changed(SMALL_KV, max_num_batched_tokens=512))
    for i in range(4):
        scheduler.add(f"lazy{i}", prompt_tokens=200, output_tokens=300, priority=9, arrival=float(i))
    scheduler.step()
    scheduler.step()
    scheduler.add("urgent", prompt_tokens=1000, output_tokens=200)  # fits now: 32 of 36 blocks
    order = drain(scheduler)
    assert scheduler.victims[0] == "lazy3"
    assert "urgent" not in scheduler.victims
    assert order[0] == "urgent"


def test_a_victim_keeps_its_text_and_computes_all_of_it_again() -> None:
    scheduler = Recorded(SMALL_KV)
    scheduler.add("A", prompt_tokens=1000, output_tokens=100)
    scheduler.add("B", prompt_tokens=1000, output_tokens=60, priority=1)
    tokens = {"A": 0, "B": 0}
    while not scheduler.victims:
        for event in scheduler.step():
            tokens[event.request_id] += event.new_tokens
    # Both begin with 32 blocks, full with the 24th output token; the 25th is the first that needs one more.
    assert scheduler.steps == 26
    assert tokens == {"A": 26, "B": 25}
    assert scheduler.generated("B") == 25
    while "B" not in scheduler.running:
        scheduler.step()
    resumed = next(event for event in scheduler.step() if event.request_id == "B")
    assert resumed.new_tokens == 1
    drain(scheduler)
    # Every token but the last of each once, and the 1024 of B that had been computed when it was evicted.
    assert scheduler.scheduled_tokens == (1000 + 99) + (1000 + 59) + 1024


def test_a_victim_waits_with_its_own_priority_and_arrival() -> None:
    scheduler = Recorded(changed(SMALL_KV, max_num_seqs=2))
    scheduler.add("A", prompt_tokens=1000, output_tokens=100, arrival=0.0)
    scheduler.add("B", prompt_tokens=1000, output_tokens=60, priority=5, arrival=1.0)
    while not scheduler.victims:
        scheduler.step()
    scheduler.add("worse", prompt_tokens=10, output_tokens=10, priority=6, arrival=0.5)
    scheduler.add("same priority, later", prompt_tokens=10, output_tokens=10, priority=5, arrival=2.0)
    scheduler.add("better", prompt_tokens=10, output_tokens=10, priority=4, arrival=3.0)
    drain(scheduler)
    assert scheduler.admitted == ["A", "B", "better", "B", "same priority, later", "worse"]


# ---------------------------------------------------------------- tokens, blocks and time of a step


def test_running_requests_get_the_token_budget_first_in_admission_order() -> None:
    scheduler = Scheduler(changed(BIG, max_num_batched_tokens=100))
    scheduler.add("long", prompt_tokens=250, output_tokens=5, priority=9)
    scheduler.step()
    scheduler.add("urgent", prompt_tokens=60, output_tokens=5, priority=-100)
    assert scheduler.step() == []  # the long prompt takes the whole budget again
    assert scheduler.running == ["long"]
    # 50 tokens are left of it, 50 for the first part of the urgent prompt
    assert scheduler.step() == [Event("long", 1, False, None, 0)]
    assert scheduler.running == ["long", "urgent"]
    assert scheduler.step() == [Event("long", 1, False, None, 0), Event("urgent", 1, False, None, 0)]
    assert scheduler.scheduled_tokens == 250 + 60 + 1


def test_a_step_takes_a_base_time_and_a_time_per_scheduled_token() -> None:
    scheduler = Scheduler(changed(BIG, step_seconds=0.5, token_seconds=0.01))
    scheduler.add("A", prompt_tokens=100, output_tokens=3)
    scheduler.step()
    assert scheduler.now == pytest.approx(0.5 + 1.0)
    scheduler.step()
    assert scheduler.now == pytest.approx(0.5 + 1.0 + 0.5 + 0.01)


def test_the_first_token_comes_with_the_prompt_and_the_last_one_needs_no_block() -> None:
    scheduler = Scheduler(changed(SMALL_KV))
    scheduler.add("A", prompt_tokens=32, output_tokens=33)
    assert scheduler.step() == [Event("A", 1, False, None, 0)]
    assert scheduler.free_blocks == 63  # its first token is not computed yet
    scheduler.step()
    assert scheduler.free_blocks == 62
    for _ in range(30):
        scheduler.step()
    assert scheduler.free_blocks == 62
    assert scheduler.step() == [Event("A", 1, True, FinishReason.LENGTH, 0)]
    assert scheduler.steps == 33
    assert scheduler.free_blocks == 64


def test_a_finished_request_gives_its_seat_to_the_next_step() -> None:
    scheduler = Scheduler(changed(BIG, max_num_seqs=1))
    scheduler.add("A", prompt_tokens=5, output_tokens=2)
    scheduler.add("B", prompt_tokens=5, output_tokens=1, reason=FinishReason.STOP)
    scheduler.step()
    assert scheduler.step() == [Event("A", 1, True, FinishReason.LENGTH, 0)]
    assert scheduler.running == []
    assert scheduler.step() == [Event("B", 1, True, FinishReason.STOP, 0)]


def test_the_model_length_ends_a_request() -> None:
    scheduler = Scheduler(changed(SMALL_KV, max_model_len=100))
    scheduler.add("A", prompt_tokens=98, output_tokens=50, reason=FinishReason.STOP)
    assert [e.finished for e in scheduler.step()] == [False]
    assert scheduler.step() == [Event("A", 1, True, FinishReason.LENGTH, 0)]


def test_a_request_without_output_is_done_with_its_prompt() -> None:
    scheduler = Scheduler(changed(BIG, max_num_batched_tokens=64))
    scheduler.add("embedding", prompt_tokens=100, output_tokens=0, reason=FinishReason.STOP)
    assert scheduler.step() == []
    assert scheduler.step() == [Event("embedding", 0, True, FinishReason.STOP, 0)]


def test_several_choices_take_several_seats() -> None:
    scheduler = Scheduler(changed(BIG, max_num_seqs=16))
    for i in range(20):  # one HTTP request with a list of twenty prompts
        scheduler.add(f"cmpl-{i}", prompt_tokens=10, output_tokens=5, arrival=0.0)
    scheduler.step()
    assert (scheduler.running_count, scheduler.waiting_count) == (16, 4)


# ---------------------------------------------------------------- abort


def test_an_aborted_request_leaves_nothing_wherever_it_was() -> None:
    scheduler = Scheduler(changed(SMALL_KV, max_num_seqs=2, max_num_batched_tokens=64))
    scheduler.add("decoding", prompt_tokens=10, output_tokens=50)
    scheduler.step()
    scheduler.add("prompt half computed", prompt_tokens=500, output_tokens=50)
    scheduler.add("waiting", prompt_tokens=10, output_tokens=50)
    scheduler.step()
    for name in ("waiting", "prompt half computed", "decoding"):
        assert scheduler.abort(name)
        assert not scheduler.abort(name)
    assert not scheduler.busy
    assert (scheduler.running_count, scheduler.waiting_count, scheduler.free_blocks) == (0, 0, 64)
    scheduler.add("decoding", prompt_tokens=10, output_tokens=1)  # the id may be used again
    assert drain(scheduler) == ["decoding"]


def test_aborted_waiting_requests_do_not_pile_up() -> None:
    for policy in Policy:
        scheduler = Scheduler(changed(BIG, policy=policy))
        for i in range(4):
            scheduler.add(f"busy{i}", prompt_tokens=10, output_tokens=1000)
        scheduler.step()
        for i in range(10_000):
            scheduler.add(f"r{i}", prompt_tokens=10, output_tokens=10)
            scheduler.abort(f"r{i}")
        kept = vars(scheduler._waiting)
        assert max(len(queue) for queue in kept.values()) < 100


# ---------------------------------------------------------------- prefix cache


def test_a_repeated_prompt_comes_from_the_cache_except_its_last_block() -> None:
    config = changed(BIG, block_size=128, num_blocks=65, prefix_caching=True, max_model_len=4096)
    prompt = list(range(401))
    scheduler = Scheduler(config)
    cached: list[int] = []
    for i in range(2):
        scheduler.add(f"r{i}", prompt_tokens=401, output_tokens=1, block_keys=block_keys(prompt, 128))
        cached += [event.cached_tokens for event in scheduler.step()]
    assert cached == [0, 384]
    assert scheduler.scheduled_tokens == 401 + 17
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (802, 384)
    # A prompt of whole blocks is computed from the last block on: one token must always be computed.
    scheduler.add("whole", prompt_tokens=384, output_tokens=1, block_keys=block_keys(prompt[:384], 128))
    assert [event.cached_tokens for event in scheduler.step()] == [256]


def test_a_block_is_only_found_behind_the_same_beginning() -> None:
    one = block_keys([1] * 16 + [7] * 16, 16)
    other = block_keys([2] * 16 + [7] * 16, 16)
    assert len(one) == 2
    assert not set(one) & set(other)
    assert block_keys([1] * 31, 16) == one[:1]


def test_cached_blocks_are_free_for_others_and_the_oldest_go_first() -> None:
    config = SchedulerConfig(max_num_seqs=4, block_size=16, num_blocks=9, max_model_len=128, prefix_caching=True)
    scheduler = Scheduler(config)

    def run(name: str, text: str, blocks: int) -> int:
        scheduler.add(
            name, prompt_tokens=16 * blocks + 1, output_tokens=1, block_keys=[(text, i) for i in range(blocks)]
        )
        (event,) = scheduler.step()
        assert scheduler.free_blocks == 8
        assert scheduler.kv_usage == 0.0
        return event.cached_tokens

    assert run("a1", "a", 3) == 0
    assert run("b1", "b", 3) == 0  # 6 of 8 blocks hold a text now
    assert run("a2", "a", 3) == 48  # a is the younger one again
    assert run("c1", "c", 3) == 0  # takes the two empty blocks, and the end of b
    assert run("b2", "b", 3) == 16  # its beginning is left; takes the one empty block, and the end of a
    assert run("a3", "a", 3) == 16


def test_a_victim_finds_its_own_text_again() -> None:
    scheduler = Recorded(changed(SMALL_KV, prefix_caching=True))
    scheduler.add("A", prompt_tokens=1000, output_tokens=100)
    scheduler.add("B", prompt_tokens=1000, output_tokens=60, priority=1)
    while not scheduler.victims:
        scheduler.step()
    before = scheduler.scheduled_tokens
    order = drain(scheduler)
    assert order == ["A", "B"]
    # A's last 74 steps and B's last 35 tokens; of B's 1025 tokens only what A's growth (3 blocks) took is computed.
    assert scheduler.scheduled_tokens - before < 74 + 35 + 5 * 32
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (2000, 0)  # a return is no query


# ---------------------------------------------------------------- clock and input


def test_an_idle_engine_waits_for_the_time_asked_for() -> None:
    scheduler = Scheduler(BIG)
    assert scheduler.step() == []
    assert scheduler.advance(12.5) == []
    assert scheduler.now == 12.5
    assert scheduler.advance(3.0) == []
    assert scheduler.now == 12.5
    scheduler.add("A", prompt_tokens=10, output_tokens=1000)
    (first,) = scheduler.advance(100.0)
    assert first == Event("A", 1, False, None, 0)
    (last,) = scheduler.advance(100.0)
    assert last == Event("A", 999, True, FinishReason.LENGTH, 0)
    assert scheduler.steps == 1000


def test_a_step_that_begins_before_the_time_asked_for_is_run_to_its_end() -> None:
    scheduler = Scheduler(changed(BIG, step_seconds=1.0, token_seconds=0.0))
    scheduler.add("A", prompt_tokens=10, output_tokens=1000)
    scheduler.advance(1.0)
    assert scheduler.now == 1.0
    scheduler.advance(4.5)
    assert (scheduler.now, scheduler.generated("A")) == (5.0, 5)
    scheduler.advance(5.0)
    assert scheduler.now == 5.0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt_tokens": 0, "output_tokens": 1}, "1 to 2047"),
        ({"prompt_tokens": 2048, "output_tokens": 1}, "1 to 2047"),
        ({"prompt_tokens": 2049, "output_tokens": 0}, "1 to 2048"),
        ({"prompt_tokens": 5, "output_tokens": -1}, "must not be negative"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused(request_: dict[str, int], message: str) -> None:
    scheduler = Scheduler(SMALL_KV)
    with pytest.raises(ValueError, match=message):
        scheduler.add("A", **request_)
    assert not scheduler.busy


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(BIG)
    scheduler.add("A", prompt_tokens=5, output_tokens=5)
    with pytest.raises(ValueError, match="'A' is in use"):
        scheduler.add("A", prompt_tokens=5, output_tokens=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 3000}, "must be at least max_num_seqs"),
        ({"max_model_len": 2049}, "needs 65 KV blocks"),
        ({"step_seconds": 0.0, "token_seconds": 0.0}, "a step must take time"),
        ({"step_seconds": float("nan")}, "a step must take time"),
    ],
)
def test_a_configuration_that_could_not_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(SMALL_KV, **changes)


def test_a_decoding_request_is_quiet_until_its_last_step() -> None:
    scheduler = Scheduler(changed(BIG, step_seconds=1.0, token_seconds=0.0))
    assert scheduler.quiet_until() == inf
    scheduler.add("a", prompt_tokens=10, output_tokens=20)
    assert scheduler.quiet_until() == 0.0
    scheduler.step()
    # It has one token of twenty: eighteen quiet steps, and the one that begins at 19 ends it.
    assert 18.0 < scheduler.quiet_until() < 19.0
