"""Lengths of prompts and answers in tokens: fixed, uniform, exponential or heavy-tailed draws."""

import math
import random
import re
from statistics import NormalDist
from typing import cast

_RANGE = re.compile(r"(\d+)-(\d+)")
_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)

FORMS = "a number (100), a range (50-150), {mean: 300} or {median: 200, p99: 4000, max: 8000}"
"""How lengths are written in a scenario."""


class Lengths:
    """A distribution of whole numbers."""

    __slots__ = ("high", "low", "mean", "median", "p99")

    def __init__(
        self, *, low: int = 1, high: int = 1 << 30, mean: float = 0.0, median: float = 0.0, p99: float = 0.0
    ) -> None:
        self.low = low
        self.high = high
        """Draws are cut to low .. high. Without a mean or median they are uniform between the two."""
        self.mean = mean
        """Exponential with this mean."""
        self.median = median
        self.p99 = p99
        """Log-normal with this median and 99th percentile."""

    def draw(self, rng: random.Random) -> int:
        """One length. Uses exactly one number of `rng` unless it is fixed, so that other draws stay what they are."""
        if self.low == self.high:
            return self.low
        if self.mean:
            drawn = -self.mean * math.log(1.0 - rng.random())
        elif self.median:
            sigma = math.log(self.p99 / self.median) / _Z99
            drawn = self.median * math.exp(sigma * _NORMAL.inv_cdf(max(1e-12, rng.random())))
        else:
            return self.low + int(rng.random() * (self.high - self.low + 1))
        return max(self.low, min(self.high, round(drawn)))


def parse_lengths(value: object) -> Lengths:
    """What a scenario says. Raises ValueError with the forms that are known."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Lengths(low=value, high=value)
    if isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        low, high = int(match[1]), int(match[2])
        if 0 < low <= high:
            return Lengths(low=low, high=high)
    if isinstance(value, dict):
        fields = cast("dict[object, object]", value)
        numbers = {
            str(key): number
            for key, number in fields.items()
            if isinstance(number, int | float) and not isinstance(number, bool) and number > 0
        }
        high = int(numbers.get("max", 1 << 30))
        if len(numbers) == len(fields):
            if set(numbers) - {"max"} == {"mean"}:
                return Lengths(mean=float(numbers["mean"]), high=high)
            if set(numbers) - {"max"} == {"median", "p99"} and numbers["p99"] > numbers["median"]:
                return Lengths(median=float(numbers["median"]), p99=float(numbers["p99"]), high=high)
    raise ValueError(f"must be lengths in tokens: {FORMS}; found {value!r}")
