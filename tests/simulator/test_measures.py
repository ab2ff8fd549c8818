"""What is measured, against numbers worked out elsewhere."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fairshare.simulator import measures

CASES: dict[str, Any] = json.loads((Path(__file__).parent.parent / "cases" / "fairness_metrics.json").read_text())


@pytest.mark.parametrize("case", CASES["jain"], ids=lambda case: case["id"])
def test_jains_index_is_that_of_the_cases(case: dict[str, Any]) -> None:
    expected = 1.0 if case["expected"] is None else case["expected"]  # all zero is undefined: 1 by our definition
    assert measures.jain(case["x"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", CASES["jain_weighted"], ids=lambda case: case["id"])
def test_jains_index_of_usage_over_share_is_that_of_the_cases(case: dict[str, Any]) -> None:
    assert measures.jain_of_shares(case["usage"], case["share"]) == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.parametrize("case", CASES["service"], ids=lambda case: f"{case['input']}+{case['output']}")
def test_service_weighs_an_output_token_like_two_prompt_tokens(case: dict[str, Any]) -> None:
    assert measures.service(case["input"], case["output"]) == case["expected"]


@pytest.mark.parametrize("case", CASES["bound"], ids=lambda case: f"L={case['L_input_max']}")
def test_vtcs_bound_is_that_of_the_paper(case: dict[str, Any]) -> None:
    bound = measures.vtc_bound(case["L_input_max"], case["M_batch_tokens"])
    assert (bound, 2 * bound) == (case["U"], case["two_U"])


def test_the_largest_difference_is_over_any_stretch_and_any_two_clients() -> None:
    # a leads b by 3 - 1 = 2, then b catches up by 5: the stretch of windows 1 and 2 has the largest difference.
    a, b, c = [3.0, 1.0, 0.0, 2.0], [1.0, 3.0, 3.0, 2.0], [2.0, 2.0, 2.0, 2.0]
    assert measures.largest_difference([a, b], [1, 1]) == 5.0
    assert measures.largest_difference([a, b, c], [1, 1, 1]) == 5.0


def test_weights_are_scaled_to_average_one() -> None:
    # Served exactly by 3 : 1, nobody is ahead.
    assert measures.largest_difference([[3.0, 3.0], [1.0, 1.0]], [0.75, 0.25]) == 0.0
    assert measures.largest_difference([[2.0], [2.0]], [0.75, 0.25]) == pytest.approx(2 * 2 - 2 * 2 / 3)


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [measures.percentile(values, p) for p in (1, 20, 21, 50, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    assert math.isnan(measures.percentile([], 50))


def test_a_shortfall_is_in_points_of_all_service_and_never_negative() -> None:
    served = {"a": 30.0, "b": 60.0, "stranger": 10.0}
    assert measures.shortfall_points(served, {"a": 0.5, "b": 0.5}) == {"a": 20.0, "b": 0.0}
    assert measures.shortfall_points({"a": 0.0, "b": 0.0}, {"a": 0.5}) == {"a": 0.0}
