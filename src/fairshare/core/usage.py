"""Decayed usage that costs nothing per team: usage is kept in scaled form.

Exact decay is u(t) = u(s) * 2**(-(t - s) / half-life), which is Slurm's PriorityDecayHalfLife without its first-order
error. Multiplying every team's number as time passes would be O(teams) per call. Instead each number is kept as what
it would have to be at the origin's scale, u(t) * 2**((t - origin) / half-life), which does not change while nobody is
charged. Ratios and the order of teams are the same in both forms.
"""

from datetime import timedelta
from math import exp2, floor, inf, isfinite, ldexp, log
from sys import float_info

LONGEST_SCALE_HALF_LIVES = 64
"""After so many half-lives the origin moves on, so that no scaled number grows without bound."""

_FORGOTTEN_HALF_LIVES = 4096
"""The largest float is 0 after 2,200 half-lives."""


def countable_cost_units(consumed: float) -> float:
    """What is charged for `consumed` cost units: negative, NaN and infinite values count as 0."""
    return consumed if 0.0 < consumed < inf else 0.0


def half_life_seconds(half_life: float | timedelta | None) -> float:
    """A half-life in seconds; 0.0: no decay.

    Raises:
        ValueError: it is negative, NaN or infinite.
    """
    seconds = half_life.total_seconds() if isinstance(half_life, timedelta) else float(half_life or 0.0)
    if not (isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"half_life must be a finite number of seconds >= 0 (0: no decay), got {half_life!r}")
    return seconds


class UsageScale:
    """Translates between cost units at a time (pool clock, seconds) and scaled numbers."""

    __slots__ = ("half_life_seconds", "origin_at", "rebase_at", "shift_half_lives")

    def __init__(self, half_life_seconds: float, now: float) -> None:
        self.shift_half_lives = 0.0
        """How far the origin has moved in all: a number scaled when this was s is worth 2**(s - now's) times as much.

        Lets somebody who keeps a scaled number (an open grant's provisional charge) find out what became of it.
        """
        self._start(half_life_seconds, now)

    @property
    def decay_rate(self) -> float:
        """The seed's lambda: ln 2 / half-life in 1/s; 0.0: no decay."""
        return log(2.0) / self.half_life_seconds if self.half_life_seconds else 0.0

    def growth(self, now: float) -> float:
        """Scaled numbers are this many times the cost units at `now`."""
        if not self.half_life_seconds:
            return 1.0
        return exp2((now - self.origin_at) / self.half_life_seconds)

    def scaled(self, cost_units: float, now: float) -> float:
        """The scaled form of cost units at `now`; never infinite."""
        if not self.half_life_seconds:
            return cost_units
        scaled = cost_units * exp2((now - self.origin_at) / self.half_life_seconds)
        return scaled if scaled < inf else float_info.max

    def cost_units(self, scaled: float, now: float) -> float:
        """The decayed cost units at `now` that a scaled number stands for."""
        return scaled / self.growth(now)

    def rebase(self, now: float) -> int:
        """Move the origin on by whole half-lives to at most one before `now`; returns how many.

        The caller divides every scaled number by two that often (`ldexp`): exact, but for what becomes 0.
        """
        elapsed_half_lives = (now - self.origin_at) / self.half_life_seconds
        if elapsed_half_lives < _FORGOTTEN_HALF_LIVES:
            moved = floor(elapsed_half_lives)
            self._move_origin(self.origin_at + moved * self.half_life_seconds)
        else:
            moved = _FORGOTTEN_HALF_LIVES
            self._move_origin(now)
        self.shift_half_lives += moved
        return moved

    def restart(self, half_life_seconds: float, now: float) -> float:
        """Change the half-life at `now`; returns the factor by which every scaled number is multiplied."""
        growth = self.growth(now)
        if self.half_life_seconds:
            self.shift_half_lives += (now - self.origin_at) / self.half_life_seconds
        self._start(half_life_seconds, now)
        return 1.0 / growth

    def _start(self, half_life_seconds: float, now: float) -> None:
        self.half_life_seconds = half_life_seconds
        self._move_origin(now)

    def _move_origin(self, at: float) -> None:
        self.origin_at = at
        self.rebase_at = at + LONGEST_SCALE_HALF_LIVES * self.half_life_seconds if self.half_life_seconds else inf


def halved(scaled: float, times: int) -> float:
    """A scaled number after `UsageScale.rebase` moved the origin on by so many half-lives."""
    return ldexp(scaled, -times)
