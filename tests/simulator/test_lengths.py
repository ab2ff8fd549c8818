"""Draws of lengths."""

import random
from statistics import fmean, median

import pytest

from fairshare.simulator.lengths import parse_lengths
from fairshare.simulator.measures import percentile


def draws(value: object, count: int = 4000) -> list[int]:
    rng = random.Random(1)
    lengths = parse_lengths(value)
    return [lengths.draw(rng) for _ in range(count)]


def test_a_number_is_always_itself_and_uses_no_random_number() -> None:
    rng = random.Random(1)
    before = rng.getstate()
    assert parse_lengths(7).draw(rng) == 7
    assert rng.getstate() == before


def test_a_range_is_uniform_and_includes_both_ends() -> None:
    found = draws("5-8")
    assert set(found) == {5, 6, 7, 8}
    assert fmean(found) == pytest.approx(6.5, abs=0.1)


def test_a_heavy_tail_has_the_median_and_the_99th_percentile_it_was_given() -> None:
    found = draws({"median": 200, "p99": 4000}, 20_000)
    assert median(found) == pytest.approx(200, rel=0.05)
    assert percentile(found, 99) == pytest.approx(4000, rel=0.1)
    assert max(draws({"median": 200, "p99": 4000, "max": 900})) == 900


def test_an_exponential_has_its_mean() -> None:
    assert fmean(draws({"mean": 300}, 20_000)) == pytest.approx(300, rel=0.03)


@pytest.mark.parametrize(
    "value", [-1, 1.5, True, "8-5", "0-3", {}, {"mean": 0}, {"median": 5}, {"median": 9, "p99": 3}, None]
)
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be lengths in tokens"):
        parse_lengths(value)
