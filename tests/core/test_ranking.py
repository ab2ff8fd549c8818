"""Level fairshare and ranks, against values of Slurm's own function."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare import MAX_RANK, Pool
from fairshare.core.ranking import Ladder, level_fairshares, level_key

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "cases" / "fairtree.json").read_text())[
    "cases"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_level_fairshare_is_slurms(case: dict[str, Any]) -> None:
    names, shares, usages = zip(*case["teams"], strict=True)
    found = dict(zip(names, level_fairshares(shares, usages), strict=True))
    assert found == {name: pytest.approx(float(value), rel=1e-12) for name, value in case["level_fs"].items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_rank_in_a_flat_pool_is_the_number_of_users_that_slurm_puts_ahead(case: dict[str, Any]) -> None:
    whole = sum(shares for _, shares, _ in case["teams"])
    pool = Pool(
        "p", 0, {name: f"{shares:.10f}" if whole <= 1 else f"{shares}/{whole}" for name, shares, _ in case["teams"]}, 0
    )
    for name, _, usage in case["teams"]:
        pool.set_usage(name, usage)
    assert {stat.team: stat.rank for stat in pool.snapshot()} == case["users_ahead"]
    assert {name: pool.rank(name) for name in case["users_ahead"]} == case["users_ahead"]


def test_level_fairshare_by_hand() -> None:
    # S = 3/4 and 1/4 of the shares, U = 1/2 each: 1.5 and 0.5.
    assert level_fairshares([0.6, 0.2], [5.0, 5.0]) == [pytest.approx(1.5), pytest.approx(0.5)]


def test_without_any_usage_everybody_with_a_share_is_infinitely_far_ahead() -> None:
    assert level_fairshares([0.5, 0.0], [0.0, 0.0]) == [inf, 0.0]


def test_without_any_share_everybody_is_last() -> None:
    assert level_fairshares([0.0, 0.0], [0.0, 7.0]) == [0.0, 0.0]
    assert level_fairshares([], []) == []


def test_usages_near_the_largest_float_still_have_level_fairshares() -> None:
    assert level_fairshares([0.5, 0.5], [1.7e308, 1.7e308]) == [1.0, 1.0]
    assert level_fairshares([0.5, 0.5], [5e-324, 1.7e308]) == [inf, 0.5]


def test_what_is_left_of_a_usage_after_a_thousand_half_lives_is_infinitely_far_ahead() -> None:
    assert level_fairshares([0.25, 0.25, 0.5], [5e-324, 1.0, 1.0]) == [inf, 0.5, 1.0]


def test_levels_are_compared_after_rounding_to_12_significant_digits() -> None:
    assert level_key(0.3, 0.1) == level_key(0.6, 0.2) == level_key(2.1, 0.7)
    assert level_key(1.00000000000049, 1.0) == 1.0
    assert level_key(1.0000000000051, 1.0) == 1.00000000001
    assert level_key(1.23456789012e-200, 1.0) == 1.23456789012e-200
    assert level_key(1.23456789012e200, 1.0) > level_key(1.23456789011e200, 1.0)


def test_a_lower_level_is_better_and_no_share_is_the_last_whatever_was_used() -> None:
    assert level_key(0.0, 0.5) == 0.0
    assert level_key(10.0, 0.5) == 20.0
    assert level_key(0.0, 0.0) == level_key(5.0, 0.0) == inf


def test_up_to_ten_teams_ties_share_a_rank_and_the_next_one_skips() -> None:
    ladder = Ladder([0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, inf])
    assert [ladder.rank(key) for key in (0.0, 1.0, 2.0, 3.0, inf)] == [0, 3, 5, 6, 9]


def test_eleven_teams_on_ten_levels_have_the_levels_ahead_as_rank() -> None:
    ladder = Ladder([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    assert [ladder.rank(float(level)) for level in range(10)] == list(range(10))


def test_eleven_teams_on_eleven_levels_are_spread_over_the_ten_ranks() -> None:
    ladder = Ladder([float(level) for level in range(11)])
    assert [ladder.rank(float(level)) for level in range(11)] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_eleven_teams_of_which_ten_tie_have_two_ranks() -> None:
    ladder = Ladder([0.0] * 10 + [5.0])
    assert (ladder.rank(0.0), ladder.rank(5.0)) == (0, 1)


def test_a_hundred_levels_fill_each_rank_with_ten() -> None:
    ladder = Ladder([float(level) for level in range(100)])
    assert [ladder.rank(float(level)) for level in range(100)] == [level // 10 for level in range(100)]


def test_a_level_counts_until_its_last_team_has_left_it() -> None:
    ladder = Ladder([0.0, 0.0, 0.0] + [float(level) for level in range(1, 12)])  # 14 teams on 12 levels
    assert ladder.rank(6.0) == 5  # 10 * 6 // 12
    ladder.move(0.0, 1.0)
    ladder.move(0.0, 1.0)
    assert ladder.rank(6.0) == 5
    ladder.move(0.0, 1.0)
    assert ladder.rank(6.0) == 4  # 10 * 5 // 11
    ladder.move(1.0, 0.0)
    assert ladder.rank(6.0) == 5


def _naive_rank(keys: list[float], key: float) -> int:
    if len(keys) <= 10:
        return sum(other < key for other in keys)
    levels = sorted(set(keys))
    ahead = levels.index(key)
    return ahead if len(levels) <= 10 else 10 * ahead // len(levels)


@given(
    start=st.one_of(
        st.lists(st.integers(0, 14), min_size=1, max_size=10), st.lists(st.integers(0, 14), min_size=11, max_size=25)
    ),
    moves=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 14)), max_size=40),
)
def test_a_ladder_knows_the_rank_of_every_team_after_any_moves(start: list[int], moves: list[tuple[int, int]]) -> None:
    keys = [inf if level == 14 else float(level) for level in start]
    ladder = Ladder(keys)
    for team, level in moves:
        if team < len(keys):
            new_key = inf if level == 14 else float(level)
            ladder.move(keys[team], new_key)
            keys[team] = new_key
        assert [ladder.rank(key) for key in keys] == [_naive_rank(keys, key) for key in keys]
        assert all(0 <= ladder.rank(key) <= MAX_RANK for key in keys)
