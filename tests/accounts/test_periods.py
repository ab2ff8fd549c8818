"""Periods are half-open, and mean what a calendar in their time zone means."""

from datetime import UTC, datetime

import pytest

from fairshare.accounts.periods import (
    FOREVER,
    Period,
    Span,
    around,
    duration,
    month,
    months_to_roll_up,
    point,
    shown,
    zone,
)
from fairshare.errors import CallerError

BERLIN = zone("Europe/Berlin")


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_a_month_begins_and_ends_at_midnight_of_its_time_zone() -> None:
    assert month("2026-12", UTC) == Span(at("2026-12-01T00:00Z"), at("2027-01-01T00:00Z"))
    # It begins in winter time and ends in summer time.
    assert month("2026-03", BERLIN) == Span(at("2026-02-28T23:00Z"), at("2026-03-31T22:00Z"))


def test_the_day_of_a_change_of_the_clocks_has_as_many_hours_as_it_has() -> None:
    spring = around(Period.DAY, at("2026-03-29T12:00Z"), BERLIN)
    autumn = around(Period.DAY, at("2026-10-25T00:30Z"), BERLIN)  # 02:30, the first time
    later = around(Period.DAY, at("2026-10-25T01:30Z"), BERLIN)  # 02:30, the second time
    assert (spring.ends_at - spring.begins_at, autumn.ends_at - autumn.begins_at) == (23 * 3600, 25 * 3600)
    assert autumn == later


def test_a_week_begins_on_monday_and_the_end_of_a_period_is_in_the_next() -> None:
    week = around(Period.WEEK, at("2026-11-30T00:00Z"), UTC)
    assert week == Span(at("2026-11-30T00:00Z"), at("2026-12-07T00:00Z"))
    assert around(Period.WEEK, week.begins_at - 0.001, UTC).ends_at == week.begins_at
    assert around(Period.WEEK, week.ends_at, UTC).begins_at == week.ends_at


def test_a_total_lasts_for_ever() -> None:
    assert around(Period.TOTAL, 5.0, BERLIN) is FOREVER
    assert shown(FOREVER.ends_at, UTC) == "never"


def test_a_point_in_time_is_meant_in_its_time_zone() -> None:
    assert point("2026-07-01", BERLIN) == at("2026-06-30T22:00Z")
    assert point("2026-07-01T06:30", UTC) == at("2026-07-01T06:30Z")


@pytest.mark.parametrize("text", ["2026-02-30", "2026", "tomorrow", "2026-11-01T25:00", ""])
def test_what_is_no_point_in_time_is_refused(text: str) -> None:
    with pytest.raises(CallerError, match="must be a date"):
        point(text, UTC)


@pytest.mark.parametrize("text", ["2026-13", "2026-00", "26-11", "2026-11-01"])
def test_what_is_no_month_is_refused(text: str) -> None:
    with pytest.raises(CallerError, match="must be a month"):
        month(text, UTC)


@pytest.mark.parametrize("name", ["Europe", "Mars/Base", "../../etc/passwd", ""])
def test_what_is_no_time_zone_is_refused(name: str) -> None:
    with pytest.raises(CallerError, match="no time zone"):
        zone(name)


def test_only_whole_months_that_ended_long_enough_ago_are_rolled_up() -> None:
    january, february = month("2026-01", UTC), month("2026-02", UTC)

    def due(now: str) -> list[Span]:
        return months_to_roll_up(oldest=at("2026-01-20T00:00Z"), now=at(now), keep_seconds=10 * 86400.0)

    assert due("2026-02-10T23:59Z") == []
    assert due("2026-02-11T00:00Z") == [january]
    assert due("2026-03-11T00:00Z") == [january, february]


def test_durations_have_a_unit() -> None:
    assert [duration(text) for text in ("30s", "5m", "24h", "90d", "2w")] == [30, 300, 86400, 90 * 86400, 14 * 86400]
    for text in ("30", "d", "-1d", "1.5h", "1y", "٣d"):
        with pytest.raises(CallerError, match="must be a duration"):
            duration(text)
