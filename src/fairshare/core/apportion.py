"""Shares of a pool, read exactly, and the division of its slots into whole reservations.

Plain float arithmetic loses a slot in 5.9 % of two-decimal share sets (0.29 + 0.57 + 0.14 of 100 slots gives 99),
so every share becomes a `Fraction` once, and nothing here rounds.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from operator import index

Share = int | float | Decimal | Fraction | str
"""A part of a pool, 0 to 1. A float is the decimal a person wrote (0.1 is 1/10); a string is "26/32" or "0.8125"."""

SUM_TOLERANCE = Fraction(1, 10**9)
"""A sum of shares this close to 1 counts as 1: rounded thirds are meant to fill the pool."""

_RATIO = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_MOST_DECIMAL_PLACES = 400
"""The longest float has 324; "1e-999999999" would need a billion digits to be exact."""


def exact_shares(shares: Mapping[str, Share]) -> dict[str, Fraction]:
    """Every team's share as an exact fraction; they sum to at most 1.

    If their sum is within 1e-9 of 1 it counts as 1: each is divided by the sum, so that no capacity, however large,
    is promised twice.

    Raises:
        ValueError: a share is negative, NaN, infinite or not a number, or the sum is above 1. Names team and number.
    """
    exact: dict[str, Fraction] = {}
    total = Fraction(0)
    for team, share in shares.items():
        exact[team] = _exact(team, share)
        total += exact[team]
        if total > 1 + SUM_TOLERANCE:
            raise ValueError(
                f"shares must sum to at most 1, but the share {share!r} of team {team!r} brings the sum to "
                f"{float(total):.12g}; lower it, or another team's"
            )
    if abs(total - 1) <= SUM_TOLERANCE:
        return {team: share / total for team, share in exact.items()}
    return exact


def apportion(capacity: int, shares: Mapping[str, Share]) -> dict[str, int]:
    """Divide `capacity` slots into whole reservations by the largest-remainder (Hamilton) method.

    Every team first gets floor(share x C); the slots left up to floor(sum of shares x C) go one each to the largest
    fractional parts, ties by name order. The sum never exceeds C, and equals C when the shares sum to 1.

    Raises:
        ValueError: `capacity` is negative, or `exact_shares` refuses the shares.
    """
    return apportion_exact(checked_capacity(capacity), exact_shares(shares))


def apportion_exact(capacity_slots: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """`apportion` for a capacity and shares that are already checked."""
    reserved: dict[str, int] = {}
    remainders: list[tuple[Fraction, str]] = []
    for team, share in shares.items():
        whole, part = divmod(share.numerator * capacity_slots, share.denominator)
        reserved[team] = whole
        remainders.append((Fraction(-part, share.denominator), team))  # negated: the largest first, then by name
    left = int(sum(shares.values()) * capacity_slots) - sum(reserved.values())
    for _, team in sorted(remainders)[:left]:
        reserved[team] += 1
    return reserved


def checked_capacity(capacity: int) -> int:
    """`capacity` in slots; 0 is an elastic pool without instances.

    Raises:
        ValueError: it is negative.
    """
    if (slots := index(capacity)) < 0:
        raise ValueError(f"capacity must be 0 or more slots, got {capacity}")
    return slots


def _exact(team: str, share: Share) -> Fraction:
    try:
        exact = _fraction(share)
    except (ValueError, ZeroDivisionError, OverflowError, InvalidOperation, TypeError):
        exact = None
    if exact is None or exact < 0:
        raise ValueError(f'share of team {team!r} must be a number from 0 to 1, such as 0.25 or "26/32", got {share!r}')
    return exact


def _fraction(share: Share) -> Fraction:
    if isinstance(share, str):
        if ratio := _RATIO.fullmatch(share):
            return Fraction(int(ratio[1]), int(ratio[2]))
        share = Decimal(share)
    elif isinstance(share, float):
        # float.__repr__, not repr: a subclass (numpy's float64) may print more than the number.
        share = Decimal(float.__repr__(share))
    if isinstance(share, Decimal):
        exponent = share.as_tuple().exponent
        if not isinstance(exponent, int) or not -_MOST_DECIMAL_PLACES <= exponent <= _MOST_DECIMAL_PLACES:
            raise ValueError  # NaN, infinite, or too long to be exact; the caller says whose share it is
    return Fraction(share)
