"""The Pool, by hand: each example is worked out in its numbers or its comment."""

from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from math import inf, log, nan
from sys import float_info
from typing import Any

import pytest

import fairshare
from fairshare import MAX_RANK, Grant, Pool, ServiceClass, TeamStat

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH


class Time:
    """A clock that says what it is told and counts who asks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pool(time: Time) -> Pool:
    """C = 16; search owns 13 slots, ads 3; half-life a minute."""
    return Pool("chat", 16, {"search": "26/32", "ads": "6/32"}, 60.0, time)


def _stat(pool: Pool, team: str) -> TeamStat:
    return {stat.team: stat for stat in pool.snapshot()}[team]


def _take(pool: Pool, team: str, count: int) -> list[Grant]:
    return [pool.acquire(team) for _ in range(count)]


# The public face


def test_the_public_names_are_the_seeds_and_no_others() -> None:
    constants = {"WITHIN_SHARE_BASE", "BORROW_BASE", "RANK_STEP", "MAX_RANK"}
    assert set(fairshare.__all__) == {"Pool", "Grant", "TeamStat", "apportion", "ServiceClass"} | constants
    assert all(hasattr(fairshare, name) for name in fairshare.__all__)


def test_the_priority_layout_is_the_seeds() -> None:
    assert (fairshare.WITHIN_SHARE_BASE, fairshare.BORROW_BASE) == (0, 10)
    assert (fairshare.RANK_STEP, fairshare.MAX_RANK) == (10, 9)
    assert (INTERACTIVE, BATCH) == (0, 1)


def test_a_pool_says_what_it_was_made_of(pool: Pool) -> None:
    assert (pool.name, pool.capacity) == ("chat", 16)
    assert pool.decay_rate == log(2) / 60
    assert pool.half_life_seconds == 60
    assert pool.reserved() == {"search": 13, "ads": 3}
    assert list(pool.reserved()) == ["ads", "search"]
    assert pool.exact_shares == {"search": Fraction(13, 16), "ads": Fraction(3, 16)}


@pytest.mark.parametrize(
    ("half_life", "rate"), [(0, 0.0), (None, 0.0), (120, log(2) / 120), (timedelta(minutes=2), log(2) / 120)]
)
def test_a_half_life_is_seconds_or_a_timedelta_and_nothing_means_no_decay(half_life: Any, rate: float) -> None:
    assert Pool("p", 1, {}, half_life).decay_rate == rate


def test_without_a_clock_a_pool_uses_the_monotonic_one() -> None:
    assert Pool("p", 1, {"a": 1}, 60, None).begin() >= Pool("p", 1, {"a": 1}, 60).begin() - 60


def test_a_pool_of_capacity_0_is_an_elastic_pool_without_instances() -> None:
    pool = Pool("p", 0, {"a": 1}, 60)
    assert pool.reserved() == {"a": 0}
    assert pool.try_acquire("a") is None
    grant = pool.acquire("a")
    assert (grant.borrowing, grant.saturated, grant.priority) == (True, True, 10)


@pytest.mark.parametrize(
    ("capacity", "shares", "half_life", "message"),
    [
        (-1, {"a": 1}, 60, "capacity must be 0 or more slots, got -1"),
        (1, {"a": -1}, 60, "share of team 'a'"),
        (1, {"a": 1}, -1, "half_life"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(capacity: int, shares: Any, half_life: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pool("p", capacity, shares, half_life)


# Standing


def test_requests_that_fit_in_the_reservation_are_within_share_and_the_next_one_borrows(pool: Pool) -> None:
    grants = [pool.acquire("ads", cls) for cls in (INTERACTIVE, BATCH, INTERACTIVE, INTERACTIVE, BATCH)]
    assert [grant.priority for grant in grants] == [0, 1, 0, 10, 11]
    assert [grant.borrowing for grant in grants] == [False, False, False, True, True]
    assert {grant.team for grant in grants} == {"ads"}


def test_a_batch_request_within_share_beats_every_borrower(pool: Pool) -> None:
    within = pool.acquire("ads", BATCH)
    assert within.priority < min(pool.acquire(f"stranger-{n}").priority for n in range(3))
    assert within.priority < fairshare.BORROW_BASE


def test_standing_is_decided_once_and_a_released_slot_is_owned_again(pool: Pool) -> None:
    first, _, _, borrower = _take(pool, "ads", 4)
    first.release(0)
    assert (borrower.borrowing, borrower.priority) == (True, 10)
    # Two within share and one borrowing are in flight: three in all, so nothing is free.
    assert pool.acquire("ads").borrowing
    borrower.release(0)
    assert pool.acquire("ads").borrowing  # the one above took the room


def test_borrowing_requests_fill_the_reservation_too(pool: Pool) -> None:
    pool.adopt("ads", 10, True, slots=3)
    assert pool.acquire("ads").borrowing


def test_phantoms_fill_the_reservation(pool: Pool) -> None:
    pool.add_phantoms("ads", 2, until=100)
    assert [pool.acquire("ads").borrowing for _ in range(2)] == [False, True]


def test_a_wide_request_counts_all_its_slots(pool: Pool) -> None:
    wide = pool.acquire("search", slots=6)
    assert not wide.borrowing
    assert not pool.acquire("search", slots=7).borrowing
    assert pool.acquire("search").borrowing
    assert (_stat(pool, "search").in_flight, _stat(pool, "search").borrowing) == (14, 1)
    wide.release(0)
    assert _stat(pool, "search").in_flight == 8


def test_a_request_wider_than_the_reservation_borrows_with_all_its_slots(pool: Pool) -> None:
    assert pool.acquire("ads", slots=4).borrowing
    assert _stat(pool, "ads").borrowing == 4


@pytest.mark.parametrize("slots", [0, -1])
def test_fewer_slots_than_one_are_refused_and_counted_nowhere(pool: Pool, slots: int) -> None:
    for call in (
        lambda: pool.acquire("ads", slots=slots),
        lambda: pool.try_acquire("ads", slots=slots),
        lambda: pool.adopt("ads", 0, False, slots=slots),
        lambda: pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False, slots=slots),
    ):
        with pytest.raises(ValueError, match=f"slots must be 1 or more, got {slots}"):
            call()
    assert pool.usage()[1] == {"search": 0, "ads": 0}


def test_saturated_means_that_c_slots_were_in_flight_before(pool: Pool) -> None:
    assert [grant.saturated for grant in _take(pool, "search", 14)] == [False] * 14
    pool.add_phantoms("ads", 1, until=100)
    assert not pool.acquire("ads").saturated  # 15 before it
    assert pool.acquire("ads").saturated  # 16 before it
    assert pool.adopt("ads", 0, False).saturated


def test_estimated_tokens_are_shown_while_in_flight(pool: Pool) -> None:
    grant = pool.acquire("ads", BATCH, 500)
    pool.acquire("ads", estimated_tokens=30)
    assert _stat(pool, "ads").in_flight_tokens == 530
    grant.release(1e6)
    assert _stat(pool, "ads").in_flight_tokens == 30


def test_a_request_is_one_slot_of_no_known_tokens_unless_somebody_says_more(pool: Pool) -> None:
    pool.acquire("ads")
    pool.try_acquire("ads")
    pool.adopt("ads", 0, False)
    pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False)
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").in_flight_tokens) == (4, 0)
    assert pool.borrow_key("ads") == 0


def test_what_was_borrowed_is_not_borrowed_any_more_after_release(pool: Pool) -> None:
    narrow, wide = pool.acquire("ads", slots=4), pool.acquire("ads", slots=5)
    assert _stat(pool, "ads").borrowing == 9
    narrow.release(0)
    assert _stat(pool, "ads").borrowing == 5
    wide.release(0)
    assert _stat(pool, "ads").borrowing == 0


# Only if there is room


def test_try_acquire_never_pushes_a_pool_past_its_capacity(pool: Pool) -> None:
    assert all(pool.try_acquire("ads") for _ in range(16))
    assert pool.try_acquire("search") is None
    assert pool.usage()[1] == {"search": 0, "ads": 16}


def test_try_acquire_decides_the_standing_as_acquire_does(pool: Pool) -> None:
    grants = [pool.try_acquire("ads", BATCH, 5) for _ in range(4)]
    assert [grant and grant.priority for grant in grants] == [1, 1, 1, 11]
    assert _stat(pool, "ads").in_flight_tokens == 20


def test_phantoms_take_the_room_of_try_acquire(pool: Pool) -> None:
    pool.add_phantoms("search", 15, until=100)
    assert pool.try_acquire("ads", slots=2) is None
    assert pool.try_acquire("ads")
    assert pool.try_acquire("ads") is None


def test_a_request_wider_than_the_pool_goes_only_into_an_empty_one(pool: Pool) -> None:
    pool.set_capacity(4)
    with pool.acquire("ads"):
        assert pool.try_acquire("ads", slots=6) is None
    assert pool.try_acquire("ads", slots=6)


# Rank


def test_the_most_over_served_borrower_gets_the_largest_number() -> None:
    pool = Pool("p", 0, {"a": 0.5, "b": 0.3, "c": 0.2}, 0)
    # LF: a 0.5/0.1 = 5, b 0.3/0.3 = 1, c 0.2/0.6 = 1/3
    for team, usage in {"a": 10, "b": 30, "c": 60}.items():
        pool.set_usage(team, usage)
    assert [pool.acquire(team).priority for team in "abc"] == [10, 20, 30]
    assert [pool.acquire(team, BATCH).priority for team in "abc"] == [11, 21, 31]
    assert [stat.level_fairshare for stat in pool.snapshot()] == pytest.approx([5.0, 1.0, 1 / 3])


def test_a_charge_changes_the_rank_of_the_next_request(pool: Pool) -> None:
    pool.set_capacity(0)
    pool.acquire("search").release(13.1)
    pool.acquire("ads").release(3)
    assert [pool.acquire(team).priority for team in ("search", "ads")] == [20, 10]
    pool.charge("ads", 0.1)
    assert [pool.acquire(team).priority for team in ("search", "ads")] == [10, 20]


def test_a_team_that_shares_do_not_name_can_only_borrow_and_always_last(pool: Pool) -> None:
    assert [pool.acquire("stranger", cls).priority for cls in (INTERACTIVE, BATCH)] == [100, 101]
    stat = _stat(pool, "stranger")
    assert (stat.share, stat.reserved, stat.level_fairshare, stat.rank, stat.in_flight) == (0, 0, 0, MAX_RANK, 2)
    assert pool.borrow_key("stranger") == inf


def test_a_strangers_usage_changes_nobodys_level(pool: Pool) -> None:
    pool.charge("search", 5)
    pool.charge("ads", 5)
    before = [_stat(pool, team) for team in ("search", "ads")]
    pool.charge("stranger", 1e9)
    assert [_stat(pool, team) for team in ("search", "ads")] == before


def test_a_named_team_without_a_share_ranks_behind_the_others_only() -> None:
    pool = Pool("p", 0, {"a": 1, "guest": 0}, 0)
    pool.charge("a", 1e9)
    assert pool.acquire("guest").priority == 20
    assert _stat(pool, "guest").level_fairshare == 0


def test_ranks_of_more_than_ten_teams_are_spread_over_all_ten() -> None:
    pool = Pool("p", 0, {f"t{n:03}": "1/100" for n in range(100)}, 0)
    for n in range(100):
        pool.charge(f"t{n:03}", n)
    assert [stat.rank for stat in pool.snapshot()] == [n // 10 for n in range(100)]
    pool.charge("t000", 1000)  # one charge moves one level
    assert [pool.rank(f"t{n:03}") for n in (0, 1, 10, 11)] == [9, 0, 0, 1]


# Release


def test_usage_is_charged_at_release_with_what_was_consumed(pool: Pool, time: Time) -> None:
    grant = pool.acquire("ads")
    time.now = 3600
    assert pool.usage()[0]["ads"] == 0
    grant.release(7.5)
    assert pool.usage()[0]["ads"] == 7.5


def test_only_the_first_release_counts(pool: Pool) -> None:
    grant, _ = _take(pool, "ads", 2)
    grant.release(5)
    grant.release(100)
    pool.settle(grant, 100, now=pool.begin())
    assert pool.usage() == ({"search": 0, "ads": 5}, {"search": 0, "ads": 1})


@pytest.mark.parametrize("consumed", [-5.0, nan, inf, -inf])
def test_negative_nan_and_infinite_consumption_is_charged_as_0(pool: Pool, consumed: float) -> None:
    pool.charge("ads", 2)
    pool.charge("ads", consumed)
    pool.acquire("ads").release(consumed)
    assert pool.usage() == ({"search": 0, "ads": 2}, {"search": 0, "ads": 0})
    pool.set_usage("ads", consumed)
    assert pool.usage()[0]["ads"] == 0


def test_leaving_the_context_releases_and_charges_nothing(pool: Pool) -> None:
    with pool.acquire("ads"):
        assert _stat(pool, "ads").in_flight == 1
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").usage) == (0, 0)


def test_an_error_inside_the_context_still_releases(pool: Pool) -> None:
    with pytest.raises(KeyError), pool.acquire("ads"):
        raise KeyError
    assert _stat(pool, "ads").in_flight == 0


def test_a_release_inside_the_context_is_the_one_that_counts(pool: Pool) -> None:
    with pool.acquire("ads") as grant:
        grant.release(4)
    assert _stat(pool, "ads").usage == 4


def test_a_remote_grant_releases_once_with_the_consumption_and_is_counted_in_no_pool() -> None:
    released: list[float] = []
    grant = Grant.remote("ads", 21, True, False, released.append)
    assert (grant.team, grant.priority, grant.borrowing, grant.saturated) == ("ads", 21, True, False)
    assert (grant.slots, grant.estimated_tokens) == (1, 0)
    grant.release(3)
    grant.release(5)
    assert released == [3]


@pytest.mark.parametrize("consumed", [-5.0, nan, inf])
def test_a_remote_grant_passes_on_what_cannot_be_charged_as_0(consumed: float) -> None:
    released: list[float] = []
    Grant.remote("ads", 0, False, True, release=released.append).release(consumed)
    assert released == [0]


def test_a_remote_grant_whose_owner_cannot_be_told_is_released_all_the_same() -> None:
    calls: list[float] = []

    def unreachable(consumed: float) -> None:
        calls.append(consumed)
        raise ConnectionError

    grant = Grant.remote("ads", 0, False, True, unreachable)
    with pytest.raises(ConnectionError):
        grant.release(1)
    grant.release(1)
    assert calls == [1]


def test_a_remote_grant_is_a_context_manager() -> None:
    released: list[float] = []
    with Grant.remote("ads", 0, False, True, released.append):
        pass
    assert released == [0]


# Adopt, charge, restore


def test_an_adopted_request_keeps_its_standing_and_counts(pool: Pool) -> None:
    grant = pool.adopt("ads", priority=41, borrowing=True, estimated_tokens=9, slots=2)
    assert (grant.priority, grant.borrowing) == (41, True)
    stat = _stat(pool, "ads")
    assert (stat.in_flight, stat.borrowing, stat.in_flight_tokens) == (2, 2, 9)
    assert not pool.acquire("ads").borrowing
    assert pool.acquire("ads").borrowing
    grant.release(6)
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").usage) == (2, 6)


def test_a_charge_needs_no_grant(pool: Pool) -> None:
    pool.charge("ads", 4)
    assert pool.usage() == ({"search": 0, "ads": 4}, {"search": 0, "ads": 0})


def test_restored_usage_replaces_what_there_was_and_decays_from_now(pool: Pool, time: Time) -> None:
    pool.charge("ads", 1000)
    time.now = 90
    pool.set_usage("ads", 8)
    assert pool.usage()[0]["ads"] == pytest.approx(8)
    time.now = 150
    assert pool.usage()[0]["ads"] == pytest.approx(4)


def test_usage_can_be_as_large_as_a_float_and_never_becomes_infinite(pool: Pool, time: Time) -> None:
    for _ in range(3):
        pool.charge("ads", float_info.max)
    assert pool.usage()[0]["ads"] == float_info.max
    assert _stat(pool, "ads").level_fairshare == pytest.approx(3 / 16)
    pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False, provisional_cost_units=float_info.max)
    assert _stat(pool, "ads").level_fairshare == pytest.approx(3 / 16)
    time.now = 60 * 3000
    assert pool.usage()[0]["ads"] == 0


# Phantoms


def test_phantoms_are_in_flight_in_usage_but_not_in_the_snapshots_in_flight(pool: Pool) -> None:
    pool.add_phantoms("ads", 2, until=100)
    pool.acquire("ads")
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").phantoms) == (1, 2)
    assert pool.usage()[1] == {"search": 0, "ads": 3}
    assert (pool.live_slots, pool.phantom_slots) == (1, 2)


def test_phantoms_end_at_their_time_and_not_before(pool: Pool, time: Time) -> None:
    pool.add_phantoms("ads", 2, until=100)
    pool.add_phantoms("ads", 1, until=50)
    pool.add_phantoms("search", 1, until=200)
    assert pool.next_phantom_end() == 50
    for now, left in [(49.9, 3), (50, 2), (99.9, 2), (100, 0)]:
        time.now = now
        assert _stat(pool, "ads").phantoms == left
    assert pool.next_phantom_end() == 200
    time.now = 1e9
    assert pool.usage()[1] == {"search": 0, "ads": 0}
    assert pool.next_phantom_end() is None


def test_phantoms_whose_time_is_over_or_that_are_none_are_not_counted(pool: Pool, time: Time) -> None:
    time.now = 10
    pool.add_phantoms("ads", 2, until=10)
    pool.add_phantoms("ads", 2, until=5)
    pool.add_phantoms("ads", 0, until=50)
    assert _stat(pool, "ads").phantoms == 0
    assert pool.next_phantom_end() is None


def test_dropping_a_phantom_drops_the_one_that_would_last_longest(pool: Pool, time: Time) -> None:
    pool.add_phantoms("ads", 1, until=300)
    pool.add_phantoms("ads", 2, until=100)
    pool.add_phantoms("search", 1, until=900)
    assert pool.drop_phantom("ads")  # the one until 300
    time.now = 99
    assert _stat(pool, "ads").phantoms == 2
    assert pool.drop_phantom("ads")
    time.now = 100
    assert not pool.drop_phantom("ads")
    assert _stat(pool, "ads").phantoms == 0
    assert _stat(pool, "search").phantoms == 1


def test_phantoms_with_the_same_end_add_up_and_go_together(pool: Pool, time: Time) -> None:
    for n in (1, 2):
        pool.add_phantoms("ads", n, until=100)
        pool.add_phantoms("search", n, until=100)
        pool.add_phantoms("search", n, until=90)
    assert [_stat(pool, team).phantoms for team in ("ads", "search")] == [3, 6]
    assert pool.phantom_slots == 9
    pool.drop_phantom("ads")
    assert (_stat(pool, "ads").phantoms, pool.phantom_slots) == (2, 8)
    time.now = 100
    assert [_stat(pool, team).phantoms for team in ("ads", "search")] == [0, 0]
    assert pool.phantom_slots == 0


def test_a_team_without_phantoms_has_none_to_drop(pool: Pool) -> None:
    assert not pool.drop_phantom("ads")
    assert not pool.drop_phantom("stranger")


def test_the_next_phantom_end_is_that_of_a_phantom_that_is_still_there(pool: Pool) -> None:
    pool.add_phantoms("ads", 1, until=50)
    pool.add_phantoms("search", 1, until=70)
    pool.drop_phantom("ads")
    assert pool.next_phantom_end() == 70
    pool.add_phantoms("ads", 1, until=inf)
    pool.drop_phantom("search")
    assert pool.next_phantom_end() == inf


def test_adding_and_dropping_phantoms_for_ever_keeps_nothing(pool: Pool, time: Time) -> None:
    pool.add_phantoms("ads", 1, until=10)  # these last, so that nothing else comes to the top of the heap
    pool.add_phantoms("stranger", 1, until=10)
    for n in range(10_000):
        pool.add_phantoms("search", 1, until=1000 + n)
        assert pool.drop_phantom("search")
    assert len(pool._phantom_ends) < 100  # pyright: ignore[reportPrivateUsage]
    assert pool.next_phantom_end() == 10
    time.now = 10
    assert pool.usage()[1] == {"search": 0, "ads": 0}


@pytest.mark.parametrize(("n", "until"), [(-1, 100.0), (1, nan)])
def test_phantoms_that_cannot_be_are_refused(pool: Pool, n: int, until: float) -> None:
    with pytest.raises(ValueError, match="phantoms of team 'ads'"):
        pool.add_phantoms("ads", n, until)
    assert pool.phantom_slots == 0


# Changes while it runs


def test_a_change_of_capacity_keeps_standing_and_judges_new_requests_by_the_new_one(pool: Pool) -> None:
    grants = _take(pool, "ads", 4)
    assert pool.set_capacity(32) == 16
    assert pool.capacity == 32
    assert pool.reserved() == {"search": 26, "ads": 6}
    assert [grant.borrowing for grant in grants] == [False, False, False, True]
    assert [pool.acquire("ads").borrowing for _ in range(3)] == [False, False, True]
    assert pool.set_capacity(4) == 32
    assert pool.try_acquire("search") is None
    assert pool.acquire("search").saturated
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").borrowing) == (7, 2)


def test_a_negative_capacity_changes_nothing(pool: Pool) -> None:
    with pytest.raises(ValueError, match="got -1"):
        pool.set_capacity(-1)
    assert (pool.capacity, pool.reserved()) == (16, {"search": 13, "ads": 3})


def test_a_change_of_shares_returns_the_previous_ones_as_they_were_given(pool: Pool) -> None:
    assert pool.set_shares({"ads": 0.5}) == {"search": "26/32", "ads": "6/32"}
    assert pool.reserved() == {"ads": 8}
    assert pool.set_shares({}) == {"ads": 0.5}


def test_bad_shares_change_nothing(pool: Pool) -> None:
    before = pool.snapshot()
    with pytest.raises(ValueError, match="'search'"):
        pool.set_shares({"ads": 0.5, "search": nan})
    assert pool.snapshot() == before


def test_a_removed_team_keeps_what_it_has_in_flight_and_used_as_a_team_without_a_share(pool: Pool) -> None:
    grant = pool.acquire("ads", estimated_tokens=5)
    pool.charge("ads", 8)
    pool.add_phantoms("ads", 1, until=100)
    pool.set_shares({"search": 1})
    stat = _stat(pool, "ads")
    assert (stat.share, stat.reserved, stat.rank, stat.level_fairshare) == (0, 0, MAX_RANK, 0)
    assert (stat.in_flight, stat.usage, stat.phantoms, stat.in_flight_tokens) == (1, 8, 1, 5)
    assert pool.acquire("ads").priority == 100
    grant.release(2)
    assert pool.usage()[0]["ads"] == 10


def test_a_removed_team_is_kept_for_what_it_has_in_flight_alone(pool: Pool) -> None:
    grant = pool.acquire("ads")
    pool.add_phantoms("search", 1, until=100)
    pool.set_shares({})
    assert [(stat.team, stat.in_flight, stat.phantoms) for stat in pool.snapshot()] == [("ads", 1, 0), ("search", 0, 1)]
    assert pool.state("ads").exact_share == 0
    grant.release(0)
    pool.drop_phantom("search")
    assert pool.snapshot() == []
    assert (pool.live_slots, pool.phantom_slots) == (0, 0)


def test_a_removed_team_that_comes_back_finds_its_usage_however_many_there_were(pool: Pool) -> None:
    teams = {f"team-{n}": "1/3000" for n in range(3000)}
    pool.set_shares(teams)
    for team in teams:
        pool.charge(team, 3)
    pool.set_shares({"search": 1})
    pool.set_shares(teams)
    assert {usage for team, usage in pool.usage()[0].items() if team in teams} == {3.0}


def test_a_removed_team_with_nothing_to_show_is_gone(pool: Pool, time: Time) -> None:
    pool.charge("ads", 1)
    pool.set_shares({})
    assert [stat.team for stat in pool.snapshot()] == ["ads"]
    pool.set_usage("ads", 0)
    assert pool.snapshot() == []


def test_a_removed_team_is_forgotten_when_its_usage_has_decayed_to_nothing(pool: Pool, time: Time) -> None:
    pool.charge("ads", 1)
    pool.set_shares({})
    time.now = 60 * 1200
    assert pool.snapshot() == []


def test_a_team_that_gets_a_share_is_ranked_by_what_it_used_before() -> None:
    pool = Pool("p", 0, {"a": 0.5}, 0)
    pool.charge("a", 1)
    pool.charge("new", 2)
    pool.set_shares({"a": 0.5, "new": 0.5})
    assert [pool.acquire(team).priority for team in ("a", "new")] == [10, 20]


def test_a_change_of_half_life_keeps_the_usage_of_that_moment(pool: Pool, time: Time) -> None:
    pool.charge("ads", 8)
    time.now = 60
    assert pool.set_half_life(timedelta(seconds=30)) == 60
    assert pool.usage()[0]["ads"] == 4
    time.now = 90
    assert pool.usage()[0]["ads"] == 2
    assert pool.set_half_life(None) == 30
    time.now = 1e9
    assert pool.usage()[0]["ads"] == 2
    assert pool.set_half_life(10) == 0
    time.now += 10
    assert pool.usage()[0]["ads"] == 1
    with pytest.raises(ValueError, match="half_life"):
        pool.set_half_life(-1)
    assert pool.half_life_seconds == 10


def test_everything_that_makes_a_queues_keys_stale_is_a_new_generation(pool: Pool, time: Time) -> None:
    changes: list[Callable[[], object]] = [
        lambda: pool.set_capacity(5),
        lambda: pool.set_shares({"ads": 1}),
        lambda: pool.set_half_life(5),
    ]
    for change in changes:
        generation = pool.generation
        change()
        assert pool.generation > generation
    generation = pool.generation
    pool.charge("ads", 5)
    pool.acquire("ads").release(1)
    time.now = 5 * 63.9
    pool.begin()
    assert pool.generation == generation
    time.now = 5 * 64
    pool.begin()
    assert pool.generation > generation


# Time


def test_a_clock_that_steps_back_means_that_no_time_passed(pool: Pool, time: Time) -> None:
    time.now = 100
    pool.charge("ads", 8)
    pool.add_phantoms("ads", 1, until=110)
    time.now = 40
    assert pool.begin() == 100
    assert pool.usage()[0]["ads"] == pytest.approx(8)
    pool.charge("ads", 8)
    time.now = 100
    assert pool.usage()[0]["ads"] == pytest.approx(16)
    time.now = 160
    assert pool.usage() == ({"search": 0, "ads": pytest.approx(8)}, {"search": 0, "ads": 0})


@pytest.mark.parametrize("reading", [nan, inf])
def test_a_clock_that_says_nonsense_means_that_no_time_passed(pool: Pool, time: Time, reading: float) -> None:
    time.now = 100
    pool.charge("ads", 8)
    time.now = reading
    assert pool.begin() == 100
    assert pool.usage()[0]["ads"] == pytest.approx(8)


def test_every_call_reads_the_clock_once(pool: Pool, time: Time) -> None:
    grants = _take(pool, "ads", 2)
    calls: list[Callable[[], object]] = [
        lambda: pool.acquire("ads"),
        lambda: pool.try_acquire("ads"),
        lambda: pool.adopt("ads", 0, False),
        lambda: grants[0].release(1),
        lambda: pool.charge("ads", 1),
        lambda: pool.set_usage("ads", 1),
        lambda: pool.add_phantoms("ads", 1, 100),
        lambda: pool.drop_phantom("ads"),
        lambda: pool.set_capacity(3),
        lambda: pool.set_shares({"ads": 1}),
        lambda: pool.set_half_life(3),
        pool.snapshot,
        pool.usage,
        pool.begin,
    ]
    for call in calls:
        before = time.readings
        call()
        assert time.readings == before + 1


def test_what_a_queue_does_at_a_time_it_read_reads_no_clock(pool: Pool, time: Time) -> None:
    now = pool.begin()
    readings = time.readings
    grant = pool.record(pool.state("ads"), now=now, priority=0, borrowing=False, provisional_cost_units=1)
    pool.state("ads"), pool.rank("ads"), pool.borrow_key("ads"), pool.next_phantom_end()
    pool.settle(grant, 5, now=now)
    assert time.readings == readings


def test_a_settled_grant_is_charged_at_the_time_the_queue_read(pool: Pool, time: Time) -> None:
    grant = pool.record(pool.state("ads"), now=pool.begin(), priority=0, borrowing=False)
    time.now = 60
    pool.begin()
    time.now = 120
    pool.settle(grant, 8, now=60)
    assert pool.usage()[0]["ads"] == 4


# For dispatch queues


def test_a_recorded_grant_counts_as_it_was_decided(pool: Pool) -> None:
    grant = pool.record(pool.state("ads"), now=pool.begin(), priority=31, borrowing=True, slots=2, estimated_tokens=7)
    assert (grant.priority, grant.borrowing, grant.slots) == (31, True, 2)
    stat = _stat(pool, "ads")
    assert (stat.in_flight, stat.borrowing, stat.in_flight_tokens) == (2, 2, 7)
    grant.release(3)
    assert (_stat(pool, "ads").in_flight, _stat(pool, "ads").usage) == (0, 3)


def test_a_provisional_charge_counts_in_level_and_rank_but_never_in_usage(pool: Pool) -> None:
    pool.charge("search", 13)
    grant = pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False, provisional_cost_units=6)
    # S / U: search (13/16) / (13/19), ads (3/16) / (6/19)
    assert _stat(pool, "search").level_fairshare == pytest.approx(19 / 16)
    assert _stat(pool, "ads").level_fairshare == pytest.approx(19 / 32)
    assert (pool.rank("search"), pool.rank("ads")) == (0, 1)
    assert (pool.borrow_key("search"), pool.borrow_key("ads")) == (16, 32)
    assert pool.usage()[0] == {"search": 13, "ads": 0}
    pool.settle(grant, 1, now=0.0)
    assert pool.borrow_key("ads") == pytest.approx(16 / 3)
    assert (pool.rank("search"), pool.rank("ads")) == (1, 0)


@pytest.mark.parametrize("expected", [nan, inf, -1.0, 0.0])
def test_a_provisional_charge_that_is_no_amount_counts_as_0(pool: Pool, expected: float) -> None:
    pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False, provisional_cost_units=expected)
    assert pool.borrow_key("ads") == 0


def test_provisional_charges_are_taken_back_exactly_when_nothing_is_in_flight(pool: Pool, time: Time) -> None:
    grants: list[Grant] = []
    for n in range(7):
        time.now = 1.7 * n
        grants.append(
            pool.record(pool.state("ads"), now=pool.begin(), priority=0, borrowing=False, provisional_cost_units=0.1)
        )
    for grant in grants:
        grant.release(0)
    assert pool.borrow_key("ads") == 0


@pytest.mark.parametrize("change", ["rebase", "half-life"])
def test_a_provisional_charge_is_taken_back_at_the_scale_of_that_time(pool: Pool, time: Time, change: str) -> None:
    time.now = 60 * 65  # the scale has moved before the grant, and moves after it
    now = pool.begin()
    grant = pool.record(pool.state("ads"), now=now, priority=0, borrowing=False, provisional_cost_units=8)
    if change == "rebase":
        time.now += 60 * 65
        pool.begin()
    else:
        time.now += 60
        pool.set_half_life(30)
    other = pool.record(pool.state("ads"), now=pool.begin(), priority=0, borrowing=False, provisional_cost_units=0.25)
    grant.release(0)
    assert pool.state("ads").scaled_provisional == pytest.approx(0.25)
    other.release(0)


def test_of_a_provisional_charge_nothing_is_left_beside_a_grant_that_has_none(pool: Pool) -> None:
    charged = pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False, provisional_cost_units=8)
    pool.record(pool.state("ads"), now=0.0, priority=0, borrowing=False)
    charged.release(0)
    assert pool.state("ads").scaled_provisional == 0.0


def test_a_teams_record_shows_what_a_queue_needs(pool: Pool) -> None:
    pool.acquire("ads", estimated_tokens=4)
    pool.add_phantoms("ads", 2, until=100)
    state = pool.state("ads")
    assert (state.name, state.share, state.exact_share, state.reserved) == ("ads", 0.1875, Fraction(3, 16), 3)
    assert (state.in_flight_slots, state.borrowing_slots, state.phantom_slots) == (1, 0, 2)
    assert (state.in_flight_tokens, state.scaled_usage, state.scaled_provisional) == (4, 0, 0)
    assert pool.state("ads") is state


def test_asking_for_a_strangers_record_shows_nothing_in_snapshots(pool: Pool) -> None:
    assert (pool.state("stranger").share, pool.state("stranger").exact_share) == (0, 0)
    assert [stat.team for stat in pool.snapshot()] == ["ads", "search"]
    assert set(pool.usage()[0]) == {"ads", "search"}


def test_the_record_of_a_team_in_flight_is_never_replaced(pool: Pool) -> None:
    grant = pool.acquire("stranger")
    state = pool.state("stranger")
    for n in range(5000):
        pool.charge(f"other-{n}", 1)
    assert pool.state("stranger") is state
    grant.release(5)
    assert pool.usage()[0]["stranger"] == 5


def test_a_watcher_hears_of_every_team_that_changed_and_of_no_other(pool: Pool, time: Time) -> None:
    quiet = pool.acquire("ads")
    changed = pool.watch()

    def heard() -> set[str]:
        names = set(changed)
        changed.clear()
        return names

    grant = pool.acquire("search")
    assert heard() == {"search"}
    grant.release(0)
    assert heard() == {"search"}
    grant.release(0)
    pool.snapshot(), pool.rank("ads"), pool.borrow_key("search"), pool.drop_phantom("ads")
    pool.charge("ads", nan)
    pool.set_capacity(8)
    assert heard() == set()
    pool.charge("ads", 1)
    assert heard() == {"ads"}
    pool.set_usage("search", 1)
    assert heard() == {"search"}
    pool.add_phantoms("stranger", 2, until=10)
    assert heard() == {"stranger"}
    pool.drop_phantom("stranger")
    assert heard() == {"stranger"}
    time.now = 10
    pool.begin()
    assert heard() == {"stranger"}
    recorded = pool.record(pool.state("ads"), now=10.0, priority=0, borrowing=False, provisional_cost_units=1)
    assert heard() == {"ads"}
    pool.settle(recorded, 0, now=10.0)
    assert heard() == {"ads"}
    pool.set_shares({"ads": 0.1, "new": 0.1})
    assert heard() == {"ads", "search", "new"}
    quiet.release(0)
    assert heard() == {"ads"}


def test_several_watchers_hear_the_same(pool: Pool) -> None:
    first, second = pool.watch(), pool.watch()
    pool.charge("ads", 1)
    assert first == second == {"ads"}
    third = pool.watch()
    pool.charge("search", 1)
    assert first == second == {"ads", "search"}
    assert third == {"search"}


# Snapshots


def test_a_snapshot_lists_every_team_by_name_in_a_stable_order(pool: Pool) -> None:
    pool.acquire("zebra")
    pool.charge("aardvark", 1)
    assert [stat.team for stat in pool.snapshot()] == ["aardvark", "ads", "search", "zebra"]
    usage, in_flight = pool.usage()
    assert list(usage) == list(in_flight) == ["aardvark", "ads", "search", "zebra"]


def test_a_stranger_is_shown_only_while_it_has_anything_to_show(pool: Pool) -> None:
    grant = pool.acquire("stranger")
    assert _stat(pool, "stranger").in_flight == 1
    grant.release(0)
    assert [stat.team for stat in pool.snapshot()] == ["ads", "search"]


def test_a_snapshot_does_not_change_afterwards(pool: Pool) -> None:
    before = pool.snapshot()
    pool.acquire("ads").release(5)
    assert before[0].in_flight == 0
    assert before[0].usage == 0
    with pytest.raises(AttributeError):
        before[0].usage = 3.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_grant_says_what_it_is(pool: Pool) -> None:
    assert repr(pool.acquire("ads")) == "<Grant 'ads' within share priority=0 slots=1>"
    assert repr(pool.acquire("ads", slots=3)) == "<Grant 'ads' borrowing priority=10 slots=3>"


def test_what_ranks_are_worked_out_from_is_that_of_the_last_rank_asked_for() -> None:
    pool = Pool("chat", 8, {"red": "1/2", "blue": "1/4"}, 0)
    pool.set_usage("red", 30.0)
    assert pool.rank("red") == 1
    with pool.acquire("red"):
        pool.charge("blue", 5.0)
        assert pool.ranked_by(2) == ({"red": Fraction(1, 2), "blue": Fraction(1, 4)}, (30.0, 0.0))
        pool.rank("blue")
        assert pool.ranked_by(2) == (pool.exact_shares, (30.0, 5.0))
    assert pool.ranked_by(1) is None
    pool.set_shares({"blue": 1})
    assert pool.ranked_by(1) == ({"blue": Fraction(1)}, (5.0,))
