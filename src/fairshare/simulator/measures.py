"""What is measured, each definition by itself: plain numbers in, plain numbers out."""

import math
from collections.abc import Iterable, Mapping, Sequence

PROMPT_WEIGHT = 1.0
COMPLETION_WEIGHT = 2.0
"""Weights of service as in VTC (Sheng et al., OSDI 2024): a generated token costs two prompt tokens."""


def service(prompt_tokens: float, output_tokens: float) -> float:
    """Service that tokens amount to, in VTC's units."""
    return PROMPT_WEIGHT * prompt_tokens + COMPLETION_WEIGHT * output_tokens


def vtc_bound(longest_prompt_tokens: float, batch_tokens: float) -> float:
    """VTC's U: two backlogged clients never differ by more than 2 U in accumulated service (theorem 4.4).

    `batch_tokens` is what fits in a running batch (the KV cache).
    """
    return max(PROMPT_WEIGHT * longest_prompt_tokens, COMPLETION_WEIGHT * batch_tokens)


def jain(values: Sequence[float]) -> float:
    """Jain's index, 1/n to 1: (sum x)^2 / (n sum x^2). All zero: 1, nobody is better off than anybody else."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def jain_of_shares(usage: Sequence[float], shares: Sequence[float]) -> float:
    """Jain's index of usage over share."""
    return jain([used / share for used, share in zip(usage, shares, strict=True)])


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` of the values do not exceed. No values: NaN."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100.0 * len(ordered)) - 1)]


def shortfall_points(served: Mapping[str, float], owned: Mapping[str, float]) -> dict[str, float]:
    """By how many points of all service each team got less than it owns (0 if it got as much or more).

    served: of every team, also those that are not judged. owned: share of each team that is judged.
    """
    total = sum(served.values())
    if not total:
        return dict.fromkeys(owned, 0.0)
    return {team: max(0.0, 100.0 * (share - served.get(team, 0.0) / total)) for team, share in owned.items()}


def largest_difference(accumulated: Sequence[Sequence[float]], weights: Sequence[float]) -> float:
    """VTC's accumulated difference: over any stretch in which both of two clients were backlogged all the time.

    accumulated: for each client its service per window, in windows in which all of them are backlogged.
    weights: 1 for each in plain VTC; shares for the weighted one, scaled so that they average 1.
    """
    largest = 0.0
    normal = [sum(weights) / len(weights) / weight for weight in weights]
    for i in range(len(accumulated)):
        for j in range(i):
            # The largest |sum over a stretch| of the differences is max minus min of their running sum.
            running = low = high = 0.0
            for mine, yours in zip(accumulated[i], accumulated[j], strict=True):
                running += mine * normal[i] - yours * normal[j]
                low, high = min(low, running), max(high, running)
            largest = max(largest, high - low)
    return largest
