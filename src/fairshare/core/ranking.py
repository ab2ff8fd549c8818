"""Slurm's level fairshare and the rank of a team among borrowers.

LF = S / U: a team's share over its decayed usage, both normalised over the teams of the pool (Slurm's Fair Tree,
https://slurm.schedmd.com/fair_tree.html, as its code computes it). S = 0 gives 0 whatever U is; U = 0 with S > 0 gives
infinity. A rank is the number of teams ahead.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import fsum, inf

from fairshare.core.priority import MAX_RANK

MOST_EXACT_RANKS = MAX_RANK + 1
"""With more teams, or more levels, than there are ranks, ranks are spread evenly over the levels."""


def level_fairshares(shares: Sequence[float], usages: Sequence[float]) -> list[float]:
    """LF of every team, in order. Usages may be in any common unit."""
    share_sum = fsum(shares)
    # Relative to the largest first: the sum of usages near the largest float would be infinite.
    largest = max(usages, default=0.0)
    used = [usage / largest for usage in usages] if largest else list(usages)
    used_sum = fsum(used)
    return [
        0.0 if not share else inf if not part else (share / share_sum) / (part / used_sum)
        for share, part in zip(shares, used, strict=True)
    ]


def level_key(scaled_cost_units: float, share: float) -> float:
    """What teams are ranked by, lower is better: usage / share, rounded to 12 significant digits.

    It is 1 / LF but for the normalisation, a factor that all teams of a pool have in common, so it needs no sum over
    teams. Rounding makes levels equal that are equal in decimals and not in binary floats (0.1 / 0.3 and 0.2 / 0.6).
    """
    if not share:
        return inf
    return float(f"{scaled_cost_units / share:.11e}") if scaled_cost_units else 0.0


class Ladder:
    """The levels of a pool's teams, in order.

    `rank` is O(log levels) by bisection. `move` is O(log levels) too, plus a memmove of a list of pointers when a level
    appears or disappears (10,000 levels: 80 kB at most, about a microsecond); a balanced tree in Python costs more.
    """

    __slots__ = ("_counts", "_levels", "_teams")

    def __init__(self, keys: Iterable[float]) -> None:
        self._counts: dict[float, int] = {}
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
        self._levels = sorted(self._counts)
        self._teams = sum(self._counts.values())

    def move(self, old_key: float, new_key: float) -> None:
        """A team went from one level to another."""
        if old_key == new_key:
            return
        if self._counts[old_key] > 1:
            self._counts[old_key] -= 1
        else:
            del self._counts[old_key]
            del self._levels[bisect_left(self._levels, old_key)]
        if new_key in self._counts:
            self._counts[new_key] += 1
        else:
            self._counts[new_key] = 1
            self._levels.insert(bisect_left(self._levels, new_key), new_key)

    def rank(self, key: float) -> int:
        """The rank, 0 to `MAX_RANK`, of a team on this level.

        Up to 10 teams: the number of teams strictly ahead (ties share, the next one skips). More teams, q of Q distinct
        levels ahead: q if Q <= 10, else 10 * q // Q; a plain cap would make the 11th team and the worst hog equal.
        """
        ahead = bisect_left(self._levels, key)
        if self._teams <= MOST_EXACT_RANKS:
            return sum(self._counts[level] for level in self._levels[:ahead])
        levels = len(self._levels)
        return ahead if levels <= MOST_EXACT_RANKS else MOST_EXACT_RANKS * ahead // levels
