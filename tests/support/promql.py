"""What an expression of PromQL names: enough of the language to compare ours with the code."""

import re
from dataclasses import dataclass

from fairshare.gateway.metrics import METRICS

_METRIC = re.compile(r"\bfairshare_[a-z_]+\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")

OF_TARGETS = frozenset({"job", "instance"})
"""Labels that Prometheus itself gives."""


@dataclass(frozen=True)
class Series:
    """One selector."""

    metric: str
    """As the table of metrics has it."""
    suffix: str
    """`_bucket`, `_count`, `_sum` or nothing."""
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""


def series_in(expression: str) -> list[Series]:
    """The selectors of our metrics; one that is none of ours fails."""
    names = {metric.name: metric for metric in METRICS}
    found: list[Series] = []
    for match in _METRIC.finditer(expression):
        whole = match[0].partition("{")[0]
        name, suffix = whole, ""
        for each in ("_bucket", "_count", "_sum"):
            base = whole.removesuffix(each)
            if whole.endswith(each) and base in names and names[base].kind == "histogram":
                name, suffix = base, each
        assert name in names, f"{whole} is no metric of fairshare"
        assert (names[name].kind == "histogram") == bool(suffix), f"{whole}: a histogram is asked by its parts"
        found.append(Series(name, suffix, tuple(_MATCHER.findall(match[1] or ""))))
    return found


def labels_in(expression: str) -> set[str]:
    """Every label that it groups or matches by."""
    grouped = {label.strip() for group in _GROUPING.findall(expression) for label in group.split(",") if label.strip()}
    return grouped | {label for series in series_in(expression) for label, _, _ in series.matchers}


def labels_of(expression: str) -> set[str]:
    """The labels that its series may have."""
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    found = set(OF_TARGETS)
    for series in series_in(expression):
        found |= labels[series.metric] | ({"le"} if series.suffix == "_bucket" else set())
    return found


def alternatives(series: Series, label: str) -> list[str]:
    """The values of a label that it wants, one by one."""
    return [
        value for name, how, wanted in series.matchers if name == label and how != "!~" for value in wanted.split("|")
    ]
