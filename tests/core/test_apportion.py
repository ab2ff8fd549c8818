"""Exact shares and whole reservations, against outside cases."""

import json
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare import apportion
from fairshare.core.apportion import exact_shares

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent.parent / "cases" / "apportion.json").read_text()
)


def _id(case: dict[str, Any]) -> str:
    return case["id"]


def _normalised(weights: dict[str, int]) -> dict[str, Fraction]:
    return {name: Fraction(weight, sum(weights.values())) for name, weight in weights.items()}


@pytest.mark.parametrize("case", CASES["weighted"], ids=_id)
def test_reservations_are_the_seats_of_published_largest_remainder_apportionments(case: dict[str, Any]) -> None:
    assert apportion(case["capacity"], _normalised(case["weights"])) == case["expected"]


@pytest.mark.parametrize("case", CASES["absolute_shares"] + CASES["float_traps"], ids=_id)
def test_float_shares_are_read_as_the_decimals_a_person_wrote(case: dict[str, Any]) -> None:
    assert apportion(case["capacity"], case["shares"]) == case["expected"]


@pytest.mark.parametrize("case", CASES["alabama_paradox"], ids=_id)
def test_a_team_may_lose_a_slot_when_capacity_grows(case: dict[str, Any]) -> None:
    shares = _normalised(case["weights"])
    assert apportion(case["capacity_from"], shares) == case["expected_from"]
    assert apportion(case["capacity_to"], shares) == case["expected_to"]


def test_the_seeds_own_example_no_longer_promises_eleven_of_ten_slots() -> None:
    assert apportion(10, {"A": 0.8125, "B": 0.1875}) == {"A": 8, "B": 2}


@pytest.mark.parametrize("share", [0.8125, Decimal("0.8125"), Fraction(13, 16), "26/32", "0.8125", " 26 / 32 "])
def test_a_share_may_be_written_as_float_decimal_fraction_ratio_or_text(share: Any) -> None:
    assert exact_shares({"search": share}) == {"search": Fraction(13, 16)}


def test_an_integer_share_of_one_is_the_whole_pool() -> None:
    assert exact_shares({"search": 1, "ads": 0}) == {"search": Fraction(1), "ads": Fraction(0)}


def test_a_float_that_prints_as_something_else_is_still_read_by_its_digits() -> None:
    class Loud(float):
        def __repr__(self) -> str:
            return f"loud({float(self)})"

    assert exact_shares({"search": Loud(0.1)}) == {"search": Fraction(1, 10)}


def test_ties_go_by_name_order_and_the_result_keeps_the_order_of_the_shares() -> None:
    assert list(apportion(4, {"c": "1/3", "b": "1/3", "a": "1/3"}).items()) == [("c", 1), ("b", 1), ("a", 2)]


def test_a_sum_just_below_one_counts_as_one() -> None:
    thirds = {"a": 0.333333333, "b": 0.333333333, "c": 0.333333333}
    assert apportion(3, thirds) == {"a": 1, "b": 1, "c": 1}
    assert exact_shares(thirds)["a"] == Fraction(1, 3)


def test_a_sum_just_above_one_counts_as_one_and_never_promises_more_than_capacity() -> None:
    shares = {"a": 0.5, "b": 0.500000001}
    assert sum(exact_shares(shares).values()) == 1
    assert sum(apportion(10**12, shares).values()) == 10**12


def test_a_sum_further_from_one_than_a_billionth_stays_what_it_is() -> None:
    assert exact_shares({"a": 0.5, "b": 0.499999998})["a"] == Fraction(1, 2)
    assert sum(apportion(10**9, {"a": 0.5, "b": 0.499999998}).values()) == 10**9 - 2
    with pytest.raises(ValueError, match="sum to at most 1"):
        exact_shares({"a": 0.5, "b": 0.500000002})


def test_no_teams_reserve_nothing() -> None:
    assert apportion(8, {}) == {}


@pytest.mark.parametrize(
    "share",
    [
        -0.1,
        float("nan"),
        float("inf"),
        float("-inf"),
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("-Infinity"),
        Fraction(-1, 3),
        "-1/3",
        "1/0",
        "half",
        "",
        "1e-999999999",
        "1e999999999",
        None,
        [1],
    ],
    ids=repr,
)
def test_a_bad_share_is_refused_with_its_team_and_number(share: Any) -> None:
    with pytest.raises(ValueError) as refusal:
        apportion(8, {"search": 0.5, "ads": share})
    assert "'ads'" in str(refusal.value)
    assert repr(share) in str(refusal.value)


def test_shares_above_one_are_refused_with_the_team_that_goes_over_and_the_sum() -> None:
    with pytest.raises(ValueError, match=r"share 0\.4 of team 'ads' brings the sum to 1\.2;"):
        apportion(8, {"search": 0.8, "ads": 0.4, "batch": 0.0})
    with pytest.raises(ValueError, match="'ads'"):
        apportion(8, {"ads": 26})


@pytest.mark.parametrize("capacity", [-1, -(10**30)])
def test_a_negative_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity must be 0 or more slots, got {capacity}"):
        apportion(capacity, {"a": 1})


def test_a_capacity_that_is_no_whole_number_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        apportion(1.5, {"a": 1})  # pyright: ignore[reportArgumentType]


@given(
    capacity=st.integers(0, 10_000),
    weights=st.dictionaries(st.text(max_size=3), st.integers(0, 1_000), min_size=1, max_size=12),
    slack=st.integers(0, 500),
)
def test_every_team_gets_its_quota_rounded_down_or_up_and_all_get_the_floor_of_the_sum(
    capacity: int, weights: dict[str, int], slack: int
) -> None:
    whole = sum(weights.values()) + slack
    shares = {name: Fraction(weight, whole or 1) for name, weight in weights.items()}
    reserved = apportion(capacity, shares)
    assert sum(reserved.values()) == sum(shares.values()) * capacity // 1
    for name, share in shares.items():
        assert share * capacity // 1 <= reserved[name] <= -(-share * capacity // 1)
    # Whoever got the slot of a remainder had one at least as large as whoever did not; equals go by name.
    by_remainder = sorted(shares, key=lambda name: (-(shares[name] * capacity % 1), name))
    got_one = [reserved[name] > shares[name] * capacity // 1 for name in by_remainder]
    assert all(earlier or not later for earlier, later in pairwise(got_one))
