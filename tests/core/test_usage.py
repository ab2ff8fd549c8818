"""Decay in scaled form, against numbers worked out with 40 digits."""

import json
from datetime import timedelta
from math import inf, log, nan
from pathlib import Path
from sys import float_info
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare import Pool
from fairshare.core.usage import (
    LONGEST_SCALE_HALF_LIVES,
    UsageScale,
    countable_cost_units,
    half_life_seconds,
    halved,
)

CASES: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent.parent / "cases" / "decay.json").read_text())


class Time:
    """A clock that says what it is told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _usage(pool: Pool) -> float:
    return pool.usage()[0]["a"]


@pytest.mark.parametrize("start", [0.0, 1_000_000.0])
@pytest.mark.parametrize("case", CASES["points"], ids=lambda c: f"{c['half_life_s']}s-{c['dt_s']}s")
def test_usage_after_any_step_is_the_exact_exponential(case: dict[str, Any], start: float) -> None:
    time = Time(start)
    pool = Pool("p", 1, {"a": 1}, case["half_life_s"], time)
    pool.charge("a", case["usage"])
    time.now += case["dt_s"]
    assert _usage(pool) == pytest.approx(case["exact"], rel=1e-12)


@pytest.mark.parametrize("case", CASES["composition"], ids=lambda c: f"{c['passes']}-passes")
def test_usage_does_not_depend_on_how_often_somebody_looks(case: dict[str, Any]) -> None:
    time = Time()
    pool = Pool("p", 1, {"a": 1}, case["half_life_s"], time)
    pool.set_usage("a", case["usage"])
    for _ in range(case["passes"]):
        time.now += case["pass_s"]
        pool.begin()
    assert _usage(pool) == pytest.approx(case["exact"], rel=1e-12)


@pytest.mark.parametrize("case", CASES["charges"], ids=lambda c: f"{c['half_life_s']}s-at-{c['read_at_s']}s")
def test_charges_at_different_times_decay_each_from_its_own(case: dict[str, Any]) -> None:
    time = Time()
    pool = Pool("p", 1, {"a": 1}, case["half_life_s"], time)
    for at, amount in case["charges_t_s_and_amount"]:
        if at <= case["read_at_s"]:
            time.now = at
            pool.charge("a", amount)
    time.now = case["read_at_s"]
    assert _usage(pool) == pytest.approx(case["exact"], rel=1e-12)


def test_one_half_life_halves_and_two_quarter() -> None:
    scale = UsageScale(60.0, now=100.0)
    kept = scale.scaled(8.0, now=100.0)
    assert scale.cost_units(kept, now=160.0) == 4.0
    assert scale.cost_units(kept, now=220.0) == 2.0
    assert scale.scaled(1.0, now=160.0) == 2.0


def test_the_decay_rate_is_ln_2_over_the_half_life() -> None:
    assert UsageScale(10.0, now=0.0).decay_rate == log(2.0) / 10.0
    assert UsageScale(0.0, now=0.0).decay_rate == 0.0


def test_without_a_half_life_nothing_decays_or_is_rebased() -> None:
    scale = UsageScale(0.0, now=0.0)
    assert scale.growth(1e300) == 1.0
    assert scale.rebase_at == inf


@pytest.mark.parametrize(
    ("half_life", "seconds"), [(None, 0.0), (0, 0.0), (90, 90.0), (0.5, 0.5), (timedelta(days=7), 604800.0)]
)
def test_a_half_life_is_seconds_or_a_timedelta_or_nothing(half_life: Any, seconds: float) -> None:
    assert half_life_seconds(half_life) == seconds


@pytest.mark.parametrize("half_life", [-1, nan, inf, -inf, timedelta(seconds=-1)], ids=repr)
def test_a_half_life_that_is_negative_or_not_finite_is_refused(half_life: Any) -> None:
    with pytest.raises(ValueError, match="half_life must be a finite number of seconds >= 0"):
        half_life_seconds(half_life)


@pytest.mark.parametrize("consumed", [nan, inf, -inf, -1.0, -0.0, 0.0, -1e-300])
def test_negative_nan_and_infinite_consumption_counts_as_nothing(consumed: float) -> None:
    assert countable_cost_units(consumed) == 0.0


@pytest.mark.parametrize("consumed", [5e-324, 1, 2.5, float_info.max])
def test_any_positive_finite_consumption_counts(consumed: float) -> None:
    assert countable_cost_units(consumed) == consumed


def test_a_scale_asks_to_be_rebased_after_64_half_lives_and_moves_by_whole_ones() -> None:
    scale = UsageScale(10.0, now=5.0)
    assert scale.rebase_at == 5.0 + 640.0
    assert scale.rebase(now=5.0 + 648.0) == LONGEST_SCALE_HALF_LIVES
    assert scale.origin_at == 645.0
    assert scale.rebase_at == 645.0 + 640.0
    assert scale.shift_half_lives == 64.0


@given(
    charged=st.floats(1e-3, 1e9),
    half_life=st.floats(1e-3, 1e9),
    half_lives=st.lists(st.floats(0.0, 200.0), max_size=12),
)
def test_rebasing_changes_no_usage(charged: float, half_life: float, half_lives: list[float]) -> None:
    scale = UsageScale(half_life, now=0.0)
    kept = scale.scaled(charged, now=0.0)
    now = 0.0
    for step in half_lives:
        now += step * half_life
        if now >= scale.rebase_at:
            kept = halved(kept, scale.rebase(now))
        assert 1.0 - 1e-9 <= scale.growth(now) <= 2.0**LONGEST_SCALE_HALF_LIVES
    assert scale.cost_units(kept, now) == pytest.approx(charged * 2.0 ** (-now / half_life), rel=1e-9, abs=1e-300)


def test_a_scale_survives_any_pause_however_long() -> None:
    for pause_seconds in (4095.0, 4096.0, 1e300):
        scale = UsageScale(1.0, now=0.0)
        assert halved(float_info.max, scale.rebase(now=pause_seconds)) == 0.0
        assert scale.growth(pause_seconds) == 1.0
    scale = UsageScale(1e-300, now=0.0)
    scale.rebase(now=1e300)
    assert scale.growth(1e300) == 1.0


def test_a_rebase_tells_what_became_of_a_number_that_somebody_kept() -> None:
    scale = UsageScale(10.0, now=0.0)
    kept, shift = scale.scaled(3.0, now=0.0), scale.shift_half_lives
    scale.rebase(now=700.0)
    assert kept * 2.0 ** (shift - scale.shift_half_lives) == halved(kept, 70)
    scale.rebase(now=1400.0)
    assert kept * 2.0 ** (shift - scale.shift_half_lives) == halved(kept, 140)
    scale.restart(20.0, now=1410.0)
    assert kept * 2.0 ** (shift - scale.shift_half_lives) == halved(kept, 141)


def test_a_change_of_half_life_keeps_the_usage_of_that_moment() -> None:
    scale = UsageScale(10.0, now=0.0)
    kept, shift = scale.scaled(8.0, now=0.0), scale.shift_half_lives
    kept_after = kept * scale.restart(5.0, now=20.0)
    assert kept_after == 2.0
    assert kept * 2.0 ** (shift - scale.shift_half_lives) == 2.0
    assert scale.cost_units(kept_after, now=20.0) == 2.0
    assert scale.cost_units(kept_after, now=25.0) == 1.0


def test_usage_without_decay_changes_half_life_as_it_is() -> None:
    scale = UsageScale(0.0, now=0.0)
    assert scale.restart(5.0, now=1e9) == 1.0
    assert scale.shift_half_lives == 0.0
    assert scale.cost_units(8.0, now=1e9 + 5.0) == 4.0


def test_a_scaled_number_is_never_infinite() -> None:
    scale = UsageScale(1.0, now=0.0)
    assert scale.scaled(float_info.max, now=60.0) == float_info.max
