"""The rules of a pool written down as plainly as they are told, slow and exact: what `Pool` is compared with.

Every request in flight and every phantom slot is an entry of a list; usage is a fraction that is decayed at every step.
Half-lives and steps must be such that a step is a whole number of half-lives: no number here is ever rounded.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import inf, isfinite


@dataclass(eq=False)
class NaiveGrant:
    team: str
    slots: int
    tokens: int
    priority: int
    borrowing: bool
    saturated: bool
    provisional: Fraction = Fraction(0)


@dataclass
class NaivePhantom:
    """One slot."""

    team: str
    until: float


def countable(consumed: float) -> Fraction:
    return Fraction(consumed) if isfinite(consumed) and consumed > 0 else Fraction(0)


class NaivePool:
    def __init__(self, capacity: int, shares: dict[str, Fraction], half_life: int) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.shares = shares
        self.half_life = half_life
        self.usage: dict[str, Fraction] = {}
        self.grants: list[NaiveGrant] = []
        self.phantoms: list[NaivePhantom] = []

    # Time

    def clock_says(self, reading: float) -> None:
        if reading <= self.now:
            return  # it stepped back: no time passed
        if self.half_life:
            half_lives = (reading - self.now) / self.half_life
            assert half_lives == int(half_lives)
            factor = Fraction(1, 2 ** int(half_lives))
            self.usage = {team: usage * factor for team, usage in self.usage.items()}
            for grant in self.grants:
                grant.provisional *= factor
        self.now = reading
        self.phantoms = [phantom for phantom in self.phantoms if phantom.until > reading]

    # What is counted

    def in_flight(self, team: str) -> int:
        return sum(grant.slots for grant in self.grants if grant.team == team)

    def phantom_slots(self, team: str) -> int:
        return sum(phantom.team == team for phantom in self.phantoms)

    def occupied(self) -> int:
        return sum(grant.slots for grant in self.grants) + len(self.phantoms)

    # Who owns what, and who is ahead of whom

    def reserved(self) -> dict[str, int]:
        reserved = {team: int(share * self.capacity) for team, share in self.shares.items()}
        slots_left = int(sum(self.shares.values()) * self.capacity) - sum(reserved.values())
        largest_remainder_first = sorted(self.shares, key=lambda team: (-(self.shares[team] * self.capacity % 1), team))
        for team in largest_remainder_first[:slots_left]:
            reserved[team] += 1
        return reserved

    def level_fairshares(self) -> dict[str, float]:
        used = {
            team: self.usage.get(team, Fraction(0)) + sum(g.provisional for g in self.grants if g.team == team)
            for team in self.shares
        }
        shares, all_shares, all_used = self.shares, sum(self.shares.values()), sum(used.values())
        return {
            team: 0.0
            if not shares[team]
            else inf
            if not used[team]
            else float((shares[team] / all_shares) / (used[team] / all_used))
            for team in shares
        }

    def ranks(self) -> dict[str, int]:
        levels = {team: float(f"{fairshare:.11e}") for team, fairshare in self.level_fairshares().items()}
        if len(levels) <= 10:
            return {team: sum(other > level for other in levels.values()) for team, level in levels.items()}
        distinct = sorted(set(levels.values()), reverse=True)
        ahead = {team: distinct.index(level) for team, level in levels.items()}
        return {team: q if len(distinct) <= 10 else 10 * q // len(distinct) for team, q in ahead.items()}

    def ranks_are_certain(self) -> bool:
        """Whether no two levels are so close that rounding in another unit could decide otherwise."""
        levels = sorted(self.level_fairshares().values())
        gaps = [(higher - lower) / higher for lower, higher in pairwise(levels) if 0 < higher < inf]
        return not any(1e-15 < gap < 1e-9 for gap in gaps)

    # Requests

    def acquire(self, team: str, service_class: int, tokens: int, slots: int) -> NaiveGrant:
        held = self.in_flight(team) + self.phantom_slots(team)
        borrowing = held + slots > self.reserved().get(team, 0)
        priority = 10 + 10 * self.ranks().get(team, 9) + service_class if borrowing else service_class
        return self.adopt(team, priority, borrowing, tokens, slots)

    def try_acquire(self, team: str, service_class: int, tokens: int, slots: int) -> NaiveGrant | None:
        if self.capacity == 0 or self.occupied() + min(slots, self.capacity) > self.capacity:
            return None
        return self.acquire(team, service_class, tokens, slots)

    def adopt(self, team: str, priority: int, borrowing: bool, tokens: int, slots: int) -> NaiveGrant:
        grant = NaiveGrant(team, slots, tokens, priority, borrowing, self.occupied() >= self.capacity)
        self.grants.append(grant)
        return grant

    def expect(self, grant: NaiveGrant, cost_units: float) -> None:
        grant.provisional = countable(cost_units)

    def release(self, grant: NaiveGrant, consumed: float) -> None:
        if grant in self.grants:
            self.grants.remove(grant)
            self.charge(grant.team, consumed)

    def charge(self, team: str, consumed: float) -> None:
        self.usage[team] = self.usage.get(team, Fraction(0)) + countable(consumed)

    def set_usage(self, team: str, usage: float) -> None:
        self.usage[team] = countable(usage)

    def add_phantoms(self, team: str, n: int, until: float) -> None:
        if until > self.now:
            self.phantoms += [NaivePhantom(team, until) for _ in range(n)]

    def drop_phantom(self, team: str) -> bool:
        of_team = [phantom for phantom in self.phantoms if phantom.team == team]
        if not of_team:
            return False
        self.phantoms.remove(max(of_team, key=lambda phantom: phantom.until))
        return True

    # What people see

    def teams_to_show(self) -> list[str]:
        busy = {grant.team for grant in self.grants} | {phantom.team for phantom in self.phantoms}
        used = {team for team, usage in self.usage.items() if usage}
        return sorted(set(self.shares) | busy | used)
