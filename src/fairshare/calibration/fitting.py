"""What windows of a loaded engine say of the cost of a token: robust non-negative least squares, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, nan, sqrt
from statistics import fmean, median

LEAST_ROWS = 8
"""Fewer windows than twice the unknowns say nothing of their own spread."""

KINDS = 4
"""Unknowns at most: prompt, cached and completion tokens, and requests."""

HUBER = 1.345
"""Residuals beyond so many standard deviations pull with that strength only: 95 % as sharp as least squares where there
is nothing but noise (Huber 1964), and a window in which the machine did something else does not decide."""

REWEIGHTED = 10
"""So many rounds; later ones change nothing that shows."""

NORMAL_97_5 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine did in a stretch of time in which it was never idle."""

    seconds: float
    prompt_tokens: int
    """Computed; without those from the prefix cache."""
    cached_tokens: int
    completion_tokens: int
    requests: int
    """That ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """GPU-seconds per token (or request), and half of its 95 % confidence interval."""

    value: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a token costs. None: there were none of its kind, so it cannot be told."""

    prompt: Weight | None
    cached: Weight | None
    completion: Weight | None
    request: Weight | None
    """What a request costs beside its tokens: its seat is empty until the next one comes, for a step of the engine at
    least, and the engine has work with it. Left out, this would be taken for the cost of its prompt."""


def fit_weights(rows: Sequence[Work], *, gpus: int) -> Weights | None:
    """The weights w >= 0 that come closest to `gpus x seconds = w . (tokens, requests)` over all rows, relative to
    their length.

    Intervals are the jackknife's: how much the answer moves when one row at a time is left out. None: too few rows to
    tell anything.
    """
    if len(rows) < LEAST_ROWS:
        return None
    # Rows of equal weight, whatever their length: tokens per GPU-second, each row summing up to 1.
    scaled = [
        [
            amount / (gpus * row.seconds)
            for amount in (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.requests)
        ]
        for row in rows
    ]
    known = [column for column in range(KINDS) if any(row[column] for row in scaled)]
    scaled = [[row[column] for column in known] for row in scaled]
    fitted = robust(scaled)
    left_out = [robust(scaled[:at] + scaled[at + 1 :]) for at in range(len(scaled))]
    quantile = students_t(len(rows) - len(known))
    weights: list[Weight | None] = [None] * KINDS
    for place, column in enumerate(known):
        each = [one[place] for one in left_out]
        mean = fmean(each)
        error = sqrt((len(rows) - 1) / len(rows) * sum((value - mean) ** 2 for value in each))
        weights[column] = Weight(value=fitted[place], margin=quantile * error)
    return Weights(prompt=weights[0], cached=weights[1], completion=weights[2], request=weights[3])


def students_t(freedom: int) -> float:
    """The 97.5 % quantile, within 2 % from four degrees of freedom on (Abramowitz and Stegun 26.7.5)."""
    z = NORMAL_97_5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def robust(rows: Sequence[Sequence[float]]) -> list[float]:
    """The x >= 0 for which `rows x` comes closest to 1, where the rows that are far off count less."""
    pulls = [1.0] * len(rows)
    found: list[float] = []
    for _ in range(REWEIGHTED):
        roots = [sqrt(pull) for pull in pulls]
        found = non_negative([[root * value for value in row] for root, row in zip(roots, rows, strict=True)], roots)
        off = [abs(1.0 - sum(a * x for a, x in zip(row, found, strict=True))) for row in rows]
        # The median of what is off, as the standard deviation of normal noise.
        reach = HUBER * max(1e-9, 1.4826 * median(off))
        pulls = [1.0 if each <= reach else reach / each for each in off]
    return found


def non_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the least |rows x - wanted|^2: of all choices of zeros, the best whose rest is not negative.

    There are four unknowns at most, so all sixteen choices are tried.
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
