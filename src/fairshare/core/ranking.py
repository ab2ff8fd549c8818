"""Slurm's level fairshare and the rank of a team among borrowers.

LF = S / U: a team's share over its decayed usage, both normalised over the teams of the pool (Slurm's Fair Tree,
https://slurm.schedmd.com/fair_tree.html, as its code computes it). S = 0 gives 0 whatever U is; U = 0 with S > 0 gives
infinity. A rank is the number of teams ahead.
"""

from bisect import bisect_left, insort
from collections import Counter
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
        # Not over `part / used_sum`: what is left of a usage after a thousand half-lives would make that 0.
        0.0 if not share else inf if not part else (share / share_sum) * (used_sum / part)
        for share, part in zip(shares, used, strict=True)
    ]


def level_key(scaled_cost_units: float, share: float) -> float:
    """What teams are ranked by, lower is better: usage / share, rounded to 12 significant digits.

    It is 1 / LF but for the normalisation, a factor that all teams of a pool have in common, so it needs no sum over
    teams. Rounding makes levels equal that are equal in decimals and not in binary floats (0.1 / 0.3 and 0.2 / 0.6).
    """
    if not share:
        return inf
    return float(f"{scaled_cost_units / share:.12g}")


class Ladder:
    """The levels of a pool's teams, in order.

    `rank` is O(log teams), by bisection. `move` is too, plus a memmove of a list of pointers where a level appears and
    where one disappears (10,000 levels: 80 kB at most, 1 to 3 microseconds; a balanced tree in Python costs more).
    """

    __slots__ = ("_keys", "_teams_on")

    def __init__(self, keys: Iterable[float]) -> None:
        self._keys = sorted(keys)
        """Up to 10 teams: a key for each team. More teams: each level's key once."""
        self._teams_on: dict[float, int] | None = None
        """How many teams are on each level, where that is needed: with more than 10 teams."""
        if len(self._keys) > MOST_EXACT_RANKS:
            self._teams_on = dict(Counter(self._keys))
            self._keys = list(self._teams_on)

    def move(self, old_key: float, new_key: float) -> None:
        """A team went from one level to another."""
        if old_key == new_key:
            return
        keys, teams_on = self._keys, self._teams_on
        old_is_left = new_is_reached = True
        if teams_on is not None:
            old_is_left, new_is_reached = teams_on[old_key] == 1, new_key not in teams_on
            teams_on[old_key] -= 1
            teams_on[new_key] = teams_on.get(new_key, 0) + 1
            if old_is_left:
                del teams_on[old_key]
        if old_is_left:
            del keys[bisect_left(keys, old_key)]
        if new_is_reached:
            insort(keys, new_key)

    def rank(self, key: float) -> int:
        """The rank, 0 to `MAX_RANK`, of a team on this level.

        Up to 10 teams: the number of teams strictly ahead (ties share, the next one skips). More teams, q of Q distinct
        levels ahead: q if Q <= 10, else 10 * q // Q; a plain cap would make the 11th team and the worst hog equal.
        """
        ahead, levels = bisect_left(self._keys, key), len(self._keys)
        return ahead if levels <= MOST_EXACT_RANKS else MOST_EXACT_RANKS * ahead // levels
