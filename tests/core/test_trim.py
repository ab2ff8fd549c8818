"""Adaptive capacity: what three scrapes of an engine's queue do to its part of C."""

from hypothesis import given
from hypothesis import strategies as st

from fairshare.core.trim import Trim


def scraped(trim: Trim, *waiting: int, in_flight: int = 0, part: int = 8) -> list[int]:
    return [trim.scraped(each, in_flight_slots=in_flight, part_slots=part) for each in waiting]


def test_two_scrapes_say_nothing_and_the_third_takes_one_slot() -> None:
    trim = Trim()
    assert scraped(trim, 9, 9, 9) == [0, 0, -1]
    assert trim.effective(8) == 7


def test_the_mean_of_three_counts_not_one_burst() -> None:
    assert scraped(Trim(), 0, 5, 0, 0) == [0, 0, 0, 0]
    assert scraped(Trim(), 0, 6, 0) == [0, 0, -1]


def test_it_goes_on_falling_while_requests_wait_and_never_below_one_slot() -> None:
    trim = Trim()
    assert scraped(trim, *[2] * 12, part=4) == [0, 0, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0]
    assert trim.effective(4) == 1


def test_a_queue_of_what_was_sent_beyond_the_part_takes_nothing() -> None:
    trim = Trim()
    assert scraped(trim, 5, 5, 5, in_flight=9) == [0, 0, 0]
    assert scraped(trim, 5, in_flight=8) == [-1]
    assert scraped(trim, 5, in_flight=8) == [0]  # its part is 7 now, and what runs there stays


def test_three_zeros_give_one_slot_back_and_the_next_needs_three_of_its_own() -> None:
    trim = Trim()
    scraped(trim, 2, 2, 2, 2)
    assert trim.effective(8) == 6
    assert scraped(trim, 0, 0, 0, 0, 0, 0, 0, 0, 0) == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert trim.effective(8) == 8


def test_one_that_waits_keeps_it_where_it_is() -> None:
    trim = Trim()
    scraped(trim, 2, 2, 2)
    assert scraped(trim, *[1] * 9) == [0] * 9


def test_after_silence_old_scrapes_no_longer_count() -> None:
    trim = Trim()
    scraped(trim, 9, 9)
    trim.silent()
    assert scraped(trim, 9, 9, 9) == [0, 0, -1]


def test_a_part_that_shrank_rises_from_what_is_in_force() -> None:
    trim = Trim()
    scraped(trim, *[4] * 8)  # 6 below 8
    assert trim.effective(4) == 1
    assert scraped(trim, 0, 0, 0, part=4) == [0, 0, 1]
    assert trim.effective(4) == 2


def test_no_part_stays_no_part() -> None:
    assert Trim().effective(0) == 0
    assert scraped(Trim(), 9, 9, 9, part=0) == [0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 10)), max_size=60))
def test_whatever_is_scraped_the_effective_part_stays_between_one_and_the_part(
    scrapes: list[tuple[int, int, int]],
) -> None:
    trim = Trim()
    for waiting, in_flight, part in scrapes:
        before = trim.effective(part)
        change = trim.scraped(waiting, in_flight_slots=in_flight, part_slots=part)
        assert trim.effective(part) == before + change
        assert min(1, part) <= trim.effective(part) <= part
