"""Calibrations of the stand-in engine, whose answers are known from its step time, its seats and its KV cache."""

import pytest

from calibration.stand_in import calibrated
from fairshare.calibration.measuring import Limits, Now, Verdict
from fairshare.calibration.report import config_lines, sentences
from fairshare.calibration.work import Mix
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.engine.service import EngineService, Wanted
from fairshare.engine.text import Script
from fairshare.errors import OperatorError
from fairshare.simulator.lengths import Lengths

STEP, TOKEN = 0.050, 500e-6
CONFIG = SchedulerConfig(max_num_seqs=256, num_blocks=10_001, step_seconds=STEP, token_seconds=TOKEN)


def fixed(tokens: int) -> Lengths:
    return Lengths(low=tokens, high=tokens)


def test_the_largest_concurrency_within_a_time_per_token_is_what_the_step_time_says() -> None:
    limit = 0.070
    made, target = calibrated(
        CONFIG, prompt=fixed(1), output=Lengths(low=30, high=70), limits=Limits(per_token_seconds=limit)
    )
    # A step at concurrency c holds c tokens: 50 ms + c x 500 us, and 40 of them take 70 ms.
    assert made.capacity == pytest.approx((limit - STEP) / TOKEN, rel=0.05)
    assert target.service.unfinished == 0


def test_seats_bound_it_where_no_latency_does() -> None:
    config = SchedulerConfig(max_num_seqs=24, step_seconds=STEP, token_seconds=TOKEN)
    made, _ = calibrated(config, prompt=fixed(50), output=Lengths(low=20, high=40))
    assert made.capacity == 24
    above = made.steps[-1]
    assert (above.verdict, above.broke) == (Verdict.BROKEN, ("requests wait inside the engine",))


def test_what_the_cache_holds_bounds_it_without_preemption() -> None:
    # 512 tokens a request at its end, nearly all of them its prompt: 20 requests fill 640 blocks of 16.
    config = SchedulerConfig(num_blocks=641, max_num_batched_tokens=8192, step_seconds=STEP, token_seconds=1e-5)
    made, _ = calibrated(config, prompt=fixed(500), output=fixed(12), step_seconds=8.0)
    assert made.capacity == pytest.approx(20, rel=0.05)


def test_cost_weights_are_what_a_token_takes_of_the_engine_at_that_concurrency() -> None:
    config = SchedulerConfig(max_num_seqs=16, prefix_caching=True, step_seconds=STEP, token_seconds=TOKEN)
    seen: list[Now] = []
    made, _ = calibrated(
        config,
        prompt=Lengths(low=150, high=250),
        output=Lengths(low=60, high=140),
        with_weights=True,
        gpus=2,
        progress=seen.append,
    )
    assert made.capacity == 16
    assert made.weights is not None
    prompt, cached, completion = made.weights.prompt, made.weights.cached, made.weights.completion
    assert prompt is not None
    assert cached is not None
    assert completion is not None
    # Every token takes TOKEN; a step is shared by the 16 tokens of answers in it. On two GPUs, twice that.
    assert prompt.value == pytest.approx(2 * TOKEN, rel=0.05)
    assert completion.value == pytest.approx(2 * (TOKEN + STEP / 16), rel=0.05)
    assert cached.value < 0.1 * prompt.value
    assert max(prompt.margin / prompt.value, completion.margin / completion.value) < 0.1
    # A seat stays empty for a step between two requests: that is no cost of their prompts.
    assert made.weights.request is not None
    assert made.weights.request.value == pytest.approx(2 * STEP / 16, abs=made.weights.request.margin)
    assert config_lines(made)[0] == "capacity_per_instance: 16"

    assert [now.what for now in seen if now.done == int(now.done)] == [
        *(f"{concurrency} at once" for concurrency in (1, 2, 4, 8, 16, 32, 24, 20, 18, 17)),
        *(f"16 at once, {mix}" for mix in Mix),
    ]
    assert [now.done for now in seen] == sorted(now.done for now in seen)
    assert seen[-1].done < seen[-1].expected == 15
    assert all(now.expected <= seen[0].expected for now in seen)


def test_a_limit_that_one_request_already_breaks_leaves_no_capacity() -> None:
    made, _ = calibrated(CONFIG, prompt=fixed(50), output=fixed(20), limits=Limits(per_token_seconds=0.02))
    assert made.capacity is None
    assert config_lines(made) == []


def test_an_engine_that_sustains_all_that_was_tried_is_said_to_sustain_at_least_that() -> None:
    made, _ = calibrated(CONFIG, prompt=fixed(50), output=fixed(50), most=8, step_seconds=20.0)
    assert (made.capacity, made.tried_up_to) == (8, True)


def test_an_engine_that_takes_only_so_many_requests_is_at_its_bound_where_it_refuses() -> None:
    made, _ = calibrated(CONFIG, prompt=fixed(50), output=fixed(50), queue=6, step_seconds=20.0)
    assert made.capacity == 6


def test_an_engine_that_dies_leaves_what_was_measured_until_then_and_says_so() -> None:
    made, _ = calibrated(CONFIG, prompt=fixed(50), output=fixed(50), dies_at=60.0, step_seconds=12.0)
    assert made.steps
    assert made.capacity is not None
    assert made.stopped


def test_an_engine_that_dies_at_once_is_an_error() -> None:
    with pytest.raises(OperatorError, match="nothing was measured"):
        calibrated(CONFIG, prompt=fixed(50), output=fixed(50), dies_at=3.0, step_seconds=12.0)


def others(count: int, tokens: int = 3000) -> "object":
    def load(service: EngineService) -> None:
        for _ in range(count):
            script = Script(pieces=["x"] * tokens, tokens=tokens, finish_reason="length")
            service.submit([Wanted(list(range(10)), script, tokens)], priority=0, request_id="other")

    return load


def test_a_measurement_stops_where_others_would_wait() -> None:
    config = SchedulerConfig(max_num_seqs=8, step_seconds=STEP, token_seconds=TOKEN)
    made, target = calibrated(
        config,
        prompt=fixed(50),
        output=fixed(50),
        step_seconds=6.0,
        beside=others(5),  # pyright: ignore[reportArgumentType]
    )
    assert "others use this engine" in made.stopped, made.steps
    assert made.capacity is not None
    assert made.capacity <= 3
    assert target.service.unfinished == 5  # theirs


def test_an_engine_at_which_requests_wait_already_is_left_alone() -> None:
    config = SchedulerConfig(max_num_seqs=4, step_seconds=STEP, token_seconds=TOKEN)
    with pytest.raises(OperatorError, match="2 requests wait at the engine already"):
        calibrated(config, prompt=fixed(5), output=fixed(5), beside=others(6))  # pyright: ignore[reportArgumentType]


def test_the_answer_is_said_in_plain_words() -> None:
    from calibration.stand_in import Plan

    config = SchedulerConfig(max_num_seqs=6, step_seconds=STEP, token_seconds=TOKEN)
    made, _ = calibrated(config, prompt=fixed(50), output=Lengths(low=20, high=40), step_seconds=12.0)
    plan = Plan(limits=Limits(), step_seconds=12.0, windows=4, most=64, with_weights=False, gpus=1)
    assert sentences(made, plan)[0].startswith("C is 6; at ")
    assert sentences(made, plan)[0].endswith(" it is no longer sustained: requests wait inside the engine.")
