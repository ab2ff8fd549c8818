"""Periods of time as people mean them: half-open, in a time zone. Pure."""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo

from fairshare.errors import CallerError


class Period(StrEnum):
    """How long a budget lasts before it starts again."""

    DAY = "day"
    WEEK = "week"
    """From Monday."""
    MONTH = "month"
    TOTAL = "total"
    """It never starts again."""


class Span:
    """Half-open: from `begins_at` on, until just before `ends_at` (wall clock, seconds)."""

    __slots__ = ("begins_at", "ends_at")

    def __init__(self, begins_at: float, ends_at: float) -> None:
        self.begins_at = begins_at
        self.ends_at = ends_at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and (self.begins_at, self.ends_at) == (other.begins_at, other.ends_at)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Span({shown(self.begins_at, UTC)}, {shown(self.ends_at, UTC)})"


LAST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Moments behind it cannot be shown in every time zone."""

FOREVER = Span(0.0, float("inf"))

_POINT = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d))?)?")
_DURATION = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_MONTH = re.compile(r"(\d{4})-(\d\d)")


def zone(name: str) -> tzinfo:
    """A time zone by its IANA name. Raises `CallerError`."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # not there, no name at all, or a folder of names
        raise CallerError(
            f"there is no time zone {name[:80]!r}; write an IANA name such as Europe/Berlin, or UTC"
        ) from None


def point(text: str, where: tzinfo) -> float:
    """A date, or a date and time, as wall clock seconds. Raises `CallerError`."""
    match = _POINT.fullmatch(text)
    if match is not None and 1970 <= int(match[1]) < 9999:
        year, month, day, hour, minute, second = (int(part or 0) for part in match.groups())
        try:
            return datetime(year, month, day, hour, minute, second, tzinfo=where).timestamp()
        except ValueError:
            pass  # no such day, say
    raise CallerError(f"must be a date such as 2026-11-01 or 2026-11-01T06:00, found {text[:40]!r}")


def duration(text: str) -> float:
    """A duration in seconds, written 30s, 5m, 24h, 90d or 2w. Raises `CallerError`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise CallerError(f"must be a duration such as 30s, 24h or 90d, found {text[:40]!r}")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def month(text: str, where: tzinfo) -> Span:
    """A calendar month, written 2026-11. Raises `CallerError`."""
    match = _MONTH.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 12 or not 1970 <= int(match[1]) < 9999:
        raise CallerError(f"must be a month such as 2026-11, found {text[:40]!r}")
    return around(Period.MONTH, datetime(int(match[1]), int(match[2]), 1, tzinfo=where).timestamp(), where)


def around(period: Period, at: float, where: tzinfo) -> Span:
    """The period that holds a moment. Days with a change to or from summer time have 23 or 25 hours."""
    if period is Period.TOTAL:
        return FOREVER
    midnight = datetime.fromtimestamp(at, where).replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case Period.DAY:
            begin, end = midnight, midnight + timedelta(days=1)
        case Period.WEEK:
            begin = midnight - timedelta(days=midnight.weekday())
            end = begin + timedelta(days=7)
        case Period.MONTH:
            begin = midnight.replace(day=1)
            end = (begin + timedelta(days=32)).replace(day=1)
    # Arithmetic was on the clock on the wall; what is midnight in seconds depends on the day. `fold` of the moment
    # itself says nothing about midnight.
    return Span(begin.replace(fold=0).timestamp(), end.replace(fold=0).timestamp())


def months_to_roll_up(*, oldest: float, now: float, keep_seconds: float) -> list[Span]:
    """Whole months (UTC) from the one of the oldest record on whose end is `keep_seconds` ago, oldest first."""
    months: list[Span] = []
    span = around(Period.MONTH, oldest, UTC)
    while span.ends_at <= now - keep_seconds:
        months.append(span)
        span = around(Period.MONTH, span.ends_at, UTC)
    return months


def shown(at: float, where: tzinfo) -> str:
    """A moment as people read it."""
    if at in (float("inf"), float("-inf")):
        return "never"
    return datetime.fromtimestamp(at, where).isoformat(timespec="seconds")
