"""What windows of a loaded engine say of the cost of a token: non-negative least squares, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, nan, sqrt
from statistics import fmean

LEAST_ROWS = 6
"""Fewer windows than twice the unknowns say nothing of their own spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine did in a stretch of time in which it was never idle."""

    seconds: float
    prompt_tokens: int
    """Computed; without those from the prefix cache."""
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """GPU-seconds per token, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a token costs. None: there were none of its kind, so it cannot be told."""

    prompt: Weight | None
    cached: Weight | None
    completion: Weight | None


def fit_weights(rows: Sequence[Work], *, gpus: int) -> Weights | None:
    """The weights w >= 0 that come closest to `gpus x seconds = w . tokens` over all rows, relative to their length.

    Standard errors are the jackknife's: how much the answer moves when one row at a time is left out. None: too few
    rows to tell anything.
    """
    if len(rows) < LEAST_ROWS:
        return None
    # Rows of equal weight, whatever their length: tokens per GPU-second, each row summing up to 1.
    scaled = [
        [tokens / (gpus * row.seconds) for tokens in (row.prompt_tokens, row.cached_tokens, row.completion_tokens)]
        for row in rows
    ]
    known = [column for column in range(3) if any(row[column] for row in scaled)]
    fitted = non_negative([[row[column] for column in known] for row in scaled], [1.0] * len(rows))
    left_out = [
        non_negative(
            [[row[column] for column in known] for row in scaled[:at] + scaled[at + 1 :]], [1.0] * (len(rows) - 1)
        )
        for at in range(len(rows))
    ]
    weights: list[Weight | None] = [None, None, None]
    for place, column in enumerate(known):
        each = [one[place] for one in left_out]
        mean = fmean(each)
        error = sqrt((len(rows) - 1) / len(rows) * sum((value - mean) ** 2 for value in each))
        weights[column] = Weight(value=fitted[place], error=error)
    return Weights(prompt=weights[0], cached=weights[1], completion=weights[2])


def non_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the least |rows x - wanted|^2: of all choices of zeros, the best whose rest is not negative.

    There are three unknowns at most, so all eight choices are tried.
    """
    unknowns = len(rows[0])
    best, least = [0.0] * unknowns, sum(value * value for value in wanted)
    for size in range(1, unknowns + 1):
        for columns in combinations(range(unknowns), size):
            solved = _least_squares([[row[column] for column in columns] for row in rows], wanted)
            if solved is None or min(solved) < 0.0:
                continue
            full = [0.0] * unknowns
            for column, value in zip(columns, solved, strict=True):
                full[column] = value
            rest = sum(
                (sum(a * x for a, x in zip(row, full, strict=True)) - value) ** 2
                for row, value in zip(rows, wanted, strict=True)
            )
            if rest < least:
                best, least = full, rest
    return best


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """By normal equations and elimination; None: the columns do not tell the unknowns apart."""
    size = len(rows[0])
    # Columns of like size, so that the test for a singular matrix means the same for all.
    scale = [sqrt(sum(row[column] ** 2 for row in rows)) or 1.0 for column in range(size)]
    unit = [[row[column] / scale[column] for column in range(size)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in unit) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(unit, wanted, strict=True))]
        for i in range(size)
    ]
    for pivot in range(size):
        largest = max(range(pivot, size), key=lambda row: abs(matrix[row][pivot]))
        if abs(matrix[largest][pivot]) < 1e-9:
            return None
        matrix[pivot], matrix[largest] = matrix[largest], matrix[pivot]
        for row in range(size):
            if row != pivot:
                factor = matrix[row][pivot] / matrix[pivot][pivot]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
    return [matrix[place][size] / matrix[place][place] / scale[place] for place in range(size)]


def percentile(values: Sequence[float], part: float) -> float:
    """Nearest rank; NaN without values."""
    if not values:
        return nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-part * len(ordered) // 1) - 1))]


def spread(values: Sequence[float]) -> float:
    """Standard deviation over mean; infinite: fewer than two values, so it is not known."""
    if len(values) < 2 or not (mean := fmean(values)):
        return inf
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean
