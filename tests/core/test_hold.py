"""The rules of `hold`, one plain example each, in the order in which they apply: owners, turns, borrowers."""

import gc
import math

import pytest

from fairshare import Pool
from fairshare.core.decisions import Instance, RefusalReason, Request
from fairshare.core.hold import HoldQueue
from fairshare.core.priority import Standing
from support.desk import BATCH, WEIGHTED, Desk, borrow, hold, own

HALVES = {"A": "1/2", "B": "1/2"}


def owner_and_a_guest_at_capacity(**options: object) -> Desk:
    """C = 4 with as many seats, A owns 2 and has taken all 4."""
    desk = Desk(4, HALVES, seats=4, **options)
    desk.submit("A", 4)
    return desk


# owners are never held


def test_owners_go_first_then_the_rest_borrows_then_it_waits() -> None:
    desk = Desk(16, HALVES)
    assert desk.submit("A", 18) == own("A", 1, 8) + borrow("A", 9, 16) + hold("A", 17, 18)


def test_an_owner_is_not_held_when_all_slots_are_taken() -> None:
    desk = Desk(16, HALVES)
    desk.submit("A", 16)
    assert desk.submit("B", 9) == own("B", 1, 8) + hold("B", 9, 9)
    assert [desk.sends[f"B{n}"].held_seconds for n in range(1, 9)] == [0.0] * 8


def test_a_thousand_queued_requests_of_others_change_nothing() -> None:
    desk = Desk(16, HALVES)
    desk.submit("A", 1000)
    assert desk.submit("B", 8) == own("B", 1, 8)


def test_what_a_team_borrows_fills_its_own_slots_too() -> None:
    desk = Desk(4, HALVES)
    desk.submit("A", 4)
    desk.release("A1", "A2")  # the two that borrow go on
    assert desk.submit("A", 3) == [*borrow("A", 5, 6), "hold A7"]


def test_an_owners_next_request_goes_when_its_slot_is_free_also_above_the_capacity() -> None:
    desk = Desk(4, HALVES)
    desk.submit("A", 4)
    desk.submit("B", 3)
    assert desk.release("B1") == ["own B3"]


def test_the_stamp_says_the_standing_and_the_class() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A")
    desk.submit("A", of=BATCH)
    desk.submit("B", of=BATCH)
    assert [(desk.sends[i].priority, desk.sends[i].standing) for i in ("A1", "A2", "B1")] == [
        (0, Standing.WITHIN_SHARE),
        (11, Standing.BORROWING),
        (1, Standing.WITHIN_SHARE),
    ]


def test_a_borrower_is_stamped_with_its_rank_when_it_leaves() -> None:
    desk = Desk(3, {"A": "1/3", "B": "1/3", "C": "1/3"})
    desk.submit("X", 3)
    desk.submit("A", 2)
    desk.pool.set_usage("A", 100.0)  # while it is held: two teams are ahead now
    desk.release("X1", "X2")
    assert desk.sends["A2"].priority == 30
    assert desk.sends["X1"].priority == 100


# turn slots

UNEVEN = {"A": "26/32", "B": "6/32"}
"""Of C = 10: A owns 8.125, B 1.875: 8 and 1 whole slots, and one turn."""


def test_what_the_fractions_add_up_to_is_held_in_turn() -> None:
    desk = Desk(10, UNEVEN)
    assert desk.submit("A", 11) == [*own("A", 1, 9), "borrow A10", "hold A11"]
    assert desk.queue.snapshot().turn_slots == desk.queue.snapshot().turns_taken == 1
    assert desk.submit("B", 2) == ["own B1", "hold B2"]
    desk.time.now = 1.0
    assert desk.release("A9") == ["own B2"]  # the turn goes on, though the pool is full


def test_a_turn_is_not_counted_against_whole_slots() -> None:
    desk = Desk(10, UNEVEN)
    desk.submit("A", 11)
    assert desk.release("A10") == ["borrow A11"]
    desk.submit("A")
    assert desk.release("A1", "A2", "A3") == ["borrow A12"]  # 9 in flight: the turn, and 8 that count
    desk.submit("X", 3)
    assert desk.submit("A", 2) == ["own A13", "hold A14"]  # of 7 that count one is free


def test_a_free_turn_goes_at_once_also_when_all_slots_are_taken() -> None:
    desk = Desk(10, UNEVEN)
    desk.submit("X", 10)
    assert desk.submit("B", 3) == ["own B1", "own B2", "hold B3"]


def test_a_team_holds_one_turn_at_most() -> None:
    # Four teams own 1.5 of C = 6 each: two turns.
    desk = Desk(6, dict.fromkeys("ABCD", "1/4"))
    desk.submit("X", 6)
    assert desk.submit("A", 3) == ["own A1", "own A2", "hold A3"]
    assert desk.submit("B", 3) == ["own B1", "own B2", "hold B3"]
    assert desk.submit("C", 3) == ["own C1", "hold C2", "hold C3"]


def test_a_team_without_a_fraction_gets_no_turn() -> None:
    desk = Desk(4, {"A": "1/4", "B": "3/8", "C": "3/8"})
    desk.submit("X", 4)
    assert desk.submit("A", 2) == ["own A1", "hold A2"]
    assert desk.submit("B", 2) == own("B", 1, 2)


def test_turns_go_to_the_smallest_tag_with_end_tags_corrected_at_release() -> None:
    # C = 1, half a slot each. A tag is in slot-seconds per owned slot: one second of the turn is 2.
    desk = Desk(1, HALVES)
    assert desk.submit("A", 5) == ["own A1", *hold("A", 2, 5)]  # tag 0, expected to take 1 s: end tag 2
    desk.submit("B", 5)
    desk.time.now = 3.0
    assert desk.release("A1") == ["own B1"]  # 3 s: A's end tag is 6. B's is 0 + 3 (what requests take here) / 0.5 = 6
    desk.time.now = 4.0
    assert desk.release("B1") == ["own B2"]  # took 1 s: B's end tag is 2, with B2 4
    desk.time.now = 5.0
    assert desk.release("B2") == ["own B3"]  # with B3 6
    desk.time.now = 5.5
    assert desk.release("B3") == ["own B4"]  # took 0.5 s: 5; with B4 (expected (1 + 1 + 0.5) / 3 s) 6 2/3
    assert desk.queue._teams["B"].turn_end_tag == pytest.approx(5 + 5 / 3)
    desk.time.now = 6.0
    assert desk.release("B4") == ["own A2"]  # took 0.5 s: both are at 6, and A2 has waited longest
    assert desk.queue._teams["A"].turn_end_tag == pytest.approx(6 + 3 / 0.5)


def test_idling_earns_no_hoard_of_turns() -> None:
    desk = Desk(1, HALVES)
    desk.submit("A", 200)
    for number in range(1, 101):
        desk.time.now += 1.0
        assert desk.release(f"A{number}") == [f"own A{number + 1}"]
    desk.submit("B", 10)
    turns: list[str] = []
    for _ in range(10):
        desk.time.now += 1.0
        running = turns[-1] if turns else "own A101"
        turns += desk.release(running.removeprefix("own "))
    assert [turn[4] for turn in turns] == ["B", "A"] * 5


def test_a_wide_request_takes_one_turn_and_pays_for_all_its_slots() -> None:
    desk = Desk(1, HALVES)
    desk.submit("X")  # nobody can borrow
    desk.submit("A", slots=3)
    desk.submit("A", 9)
    desk.submit("B", 9)
    turns: list[str] = ["own A1"]
    while len(turns) < 9:
        desk.time.now += 1.0
        turns += desk.release(turns[-1].removeprefix("own ")) or desk.wait(2.0)
    assert [turn[4] for turn in turns] == ["A", "B", "B", "B", "A", "B", "A", "B", "A"]


def test_a_turn_stays_free_until_what_a_wide_request_took_above_it_is_paid_back() -> None:
    # Three slots for 4 s where one is owned: 8 slot-seconds, which are the turn's next 8 s.
    desk = Desk(1, HALVES)
    desk.submit("X")
    assert desk.submit("A", slots=3) == ["own A1"]
    desk.submit("B", 2)
    desk.time.now = 4.0
    assert desk.release("A1") == []
    assert desk.queue.next_deadline() == 12.0
    assert desk.wait(7.9) == []
    assert desk.wait(0.1) == ["own B1"]
    desk.time.now = 13.0
    assert desk.release("B1") == ["own B2"]


def test_the_slots_of_free_turns_pay_the_debt() -> None:
    # Four teams own 1.5 of C = 6 each: two turns. A's takes four slots for 2 s, and B's one.
    desk = Desk(6, dict.fromkeys("ABCD", "1/4"), seats=99)
    desk.submit("X", 6)
    assert desk.queue.next_deadline() is None
    assert desk.submit("A", slots=4) == ["own A1"]
    desk.submit("B", 2)
    assert desk.submit("C", 2) == ["own C1", "hold C2"]
    assert desk.queue.next_deadline() == 300.0
    desk.time.now = 2.0
    assert desk.release("A1") == []  # 2 x (5 - 2) slot-seconds above, and one of two turns is free
    assert desk.queue.next_deadline() == 8.0
    desk.time.now = 3.0
    assert desk.release("B2") == []
    assert desk.queue.next_deadline() == 5.5
    assert desk.wait(2.5) == ["own C2"]
    assert desk.queue.next_deadline() is None


def test_a_turn_is_left_free_for_the_time_of_eight_requests_at_most() -> None:
    desk = Desk(1, HALVES)
    desk.submit("X")
    desk.submit("A", slots=6)
    desk.submit("B")
    desk.time.now = 100.0  # 500 slot-seconds above, where requests take about a second
    assert desk.release("A1") == []
    assert desk.queue.next_deadline() == 108.0


def test_shares_that_do_not_fill_the_pool_leave_turns_for_all_that_they_add_up_to() -> None:
    # 0.9 + 0.9 of a slot: two turns, or somebody who owns 0.9 gets 0.5. Never more than C, whatever is rounded up.
    assert Desk(3, {"A": 0.3, "B": 0.3}).queue.snapshot().turn_slots == 2
    assert Desk(1, {"A": 0.4, "B": 0.4}).queue.snapshot().turn_slots == 1
    assert Desk(4, {"A": 0.25, "B": 0.25}).queue.snapshot().turn_slots == 0


# borrow order


def three_that_want_to_borrow(**options: object) -> Desk:
    """C = 8 is full of 8 requests of X; A and B own 1 each, run it, and hold three more each; the rest is nobody's."""
    desk = Desk(8, {"A": "1/8", "B": "1/8"}, **options)
    desk.submit("X", 10)
    desk.submit("A", 4)
    desk.submit("B", 4)
    assert desk.release("X1", "X2") == []  # 8 slots are taken still
    return desk


def test_idle_capacity_goes_to_the_team_with_the_best_level_fairshare() -> None:
    desk = three_that_want_to_borrow()
    desk.pool.set_usage("A", 10.0)
    desk.pool.set_usage("B", 9.0)
    assert desk.release("X3", "X4", "X5", "X6", "X7", "X8") == [*borrow("B", 2, 4), *borrow("A", 2, 4)]


def test_level_fairshare_is_consumption_over_share() -> None:
    desk = Desk(8, {"A": "2/8", "B": "1/8"})
    desk.submit("X", 8)
    desk.submit("A", 3)
    desk.submit("B", 2)
    desk.pool.set_usage("A", 19.0)
    desk.pool.set_usage("B", 10.0)
    assert desk.release("X1", "X2", "X3", "X4") == ["borrow A3"]


def test_equal_teams_go_by_the_oldest_held_request() -> None:
    desk = Desk(4, {"A": "1/4", "B": "1/4"})
    desk.submit("X", 4)
    for team in "ABABAAB":
        desk.submit(team)
    assert desk.release("X1", "X2", "X3", "X4") == ["borrow A2", "borrow B2"]


def test_share_zero_comes_last() -> None:
    desk = three_that_want_to_borrow()
    desk.pool.set_usage("A", 1e9)
    assert desk.release(*(f"X{n}" for n in range(3, 9))) == [*borrow("B", 2, 4), *borrow("A", 2, 4)]
    assert desk.release("A1", "A2") == borrow("X", 9, 10)


def test_what_is_on_its_way_counts_in_level_fairshare_and_never_in_usage() -> None:
    desk = three_that_want_to_borrow()
    desk.release("A1", "B1", cost=6.0)  # A2 and B2 take their own slots and are expected to cost 6 as well
    assert desk.pool.borrow_key("A") == desk.pool.borrow_key("B") == (6.0 + 6.0) * 8
    assert {stat.team: stat.usage for stat in desk.pool.snapshot()} == {"A": 6.0, "B": 6.0, "X": 0.0}
    assert desk.release("X3", "X4", "X5") == ["borrow A3", "borrow B3", "borrow A4"]
    desk.release("A2", "A3", "A4", cost=1.0)
    assert desk.pool.borrow_key("A") == 9.0 * 8


def test_an_estimate_is_what_the_teams_requests_cost_and_never_what_a_request_could_cost() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", estimated_tokens=1_000_000)
    desk.release("A1", cost=2.0)
    desk.submit("A", estimated_tokens=1_000_000)
    desk.release("A2", cost=4.0)
    desk.submit("A", slots=2, estimated_tokens=1_000_000)
    assert desk.pool.borrow_key("A") == (6.0 + 2 * 3.0) * 2
    assert desk.queue._teams["A"].turn_end_tag == 0.0


def test_estimates_are_for_each_slot_and_a_request_that_cost_nothing_counts() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", slots=3)
    desk.time.now = 4.0
    desk.release("A1", cost=12.0)
    desk.submit("A", slots=2)
    assert desk.pool.borrow_key("A") == (12.0 + 2 * 4.0) * 2
    assert desk.queue._expected_seconds(desk.queue._teams["A"]) == 4.0
    desk.release("A2", cost=0.0)
    desk.submit("A")
    assert desk.pool.borrow_key("A") == (12.0 + 2.0) * 2


def test_a_teams_first_estimate_is_what_requests_cost_in_its_pool() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A")
    desk.release("A1", cost=5.0)
    desk.submit("B")
    assert desk.pool.borrow_key("B") == 5.0 * 2


def test_the_running_mean_follows_the_last_requests() -> None:
    desk = Desk(8, HALVES)
    for _ in range(100):
        desk.submit("A", name="a")
        desk.release("a", cost=1000.0)
    for _ in range(100):
        desk.submit("A", name="a")
        desk.release("a", cost=1.0)
    desk.submit("A")
    assert desk.pool.borrow_key("A") / 2 - 100_100 == pytest.approx(1.0 + 999 * (15 / 16) ** 100)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0])
def test_a_cost_that_is_no_number_teaches_nothing(cost: float) -> None:
    desk = Desk(8, HALVES)
    desk.submit("A")
    desk.release("A1", cost=3.0)
    desk.submit("A")
    desk.release("A2", cost=cost)
    desk.submit("A")
    assert desk.pool.borrow_key("A") == (3.0 + 3.0) * 2


def test_weighted_goes_by_start_tags_with_the_share_as_weight() -> None:
    desk = Desk(16, {"A": "2/16", "B": "1/16"}, borrow_order=WEIGHTED)
    desk.submit("X", 16)
    desk.submit("A", 10)
    desk.submit("B", 10)
    desk.release(*(f"X{n}" for n in range(1, 4)))
    # Nothing was consumed: LF is at its bound of 2. Requests are expected to take 0 s (X's): let 1 s pass first.
    desk.time.now = 1.0
    said = desk.release(*(f"X{n}" for n in range(4, 16)))
    order = [word.removeprefix("borrow ")[0] for word in said]
    assert (order.count("A"), order.count("B")) == (8, 4)


def test_weighted_end_tags_are_corrected_at_release() -> None:
    desk = Desk(4, {"A": "1/4"}, borrow_order=WEIGHTED)
    assert desk.submit("A", 2) == ["own A1", "borrow A2"]
    # A request is expected to take 1 s; the weight is the share x LF's bound of 2, as nothing was consumed.
    assert desk.queue._teams["A"].borrow_end_tag == 1.0 / 0.5
    desk.time.now = 3.0
    desk.release("A2")
    assert desk.queue._teams["A"].borrow_end_tag == 2.0 + (3.0 - 1.0) / 0.5
    assert desk.submit("A", slots=2) == ["borrow A3"]
    assert desk.queue._teams["A"].borrow_end_tag == 6.0 + 2 * 3.0 / 0.5


def test_weighted_takes_level_fairshare_over_the_teams_with_what_is_on_its_way() -> None:
    desk = Desk(8, {"A": "1/4", "B": "1/4"}, borrow_order=WEIGHTED)
    desk.submit("A")
    desk.release("A1", cost=2.0)
    desk.submit("A")  # expected to cost 2 as well
    desk.pool.set_usage("B", 1.0)
    desk.note(desk.queue.tick())
    teams = desk.queue._teams
    desk.submit("B")
    # A: half of the shares, 2 + 2 of 4 + 1 + 2 cost units; B is expected to cost what requests cost here.
    assert desk.queue._level_fairshare(teams["A"]) == pytest.approx((1 / 2) / (4 / 7))
    assert desk.queue._level_fairshare(teams["B"]) == pytest.approx((1 / 2) / (3 / 7))


def test_weighted_bounds_what_a_weekend_of_idle_capacity_does() -> None:
    # A took 1000 times more of its share than B; it still gets a part (weights 1/2 and 2: one in five).
    desk = Desk(12, {"A": "1/12", "B": "1/12"}, borrow_order=WEIGHTED)
    desk.submit("X", 12)
    desk.pool.set_usage("A", 1000.0)
    desk.pool.set_usage("B", 1.0)
    desk.submit("A", 20)
    desk.submit("B", 20)
    desk.time.now = 1.0
    said = desk.release(*(f"X{n}" for n in range(1, 13)))
    order = [word.removeprefix("borrow ")[0] for word in said]
    assert (order.count("A"), order.count("B")) == (2, 8)


def test_weighted_idling_earns_no_hoard() -> None:
    desk = Desk(4, {"A": "1/4", "B": "1/4"}, borrow_order=WEIGHTED)
    for _ in range(200):
        desk.submit("A", 4)
        desk.time.now += 1.0
        desk.release(*[request_id for request_id, send in desk.sends.items() if send.grant._state is not None])
    desk.submit("X", 4)
    desk.submit("A", 5)
    desk.submit("B", 5)
    desk.time.now += 1.0
    said = desk.release("X1", "X2", "X3", "X4") + desk.release("A801", "B1")
    assert [word[:-1] for word in said].count("borrow B") <= 3


def test_weighted_share_zero_comes_last() -> None:
    desk = three_that_want_to_borrow(borrow_order=WEIGHTED)
    assert {word[:8] for word in desk.release(*(f"X{n}" for n in range(3, 9)))} == {"borrow A", "borrow B"}
    assert desk.release("A1", "A2") == borrow("X", 9, 10)


# the order in a team


def test_interactive_goes_before_batch_and_each_first_come_first_served() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A")
    desk.submit("A", 2, of=BATCH)
    desk.submit("A", 2)
    assert [desk.release(f"A{n}") for n in (1, 4, 5, 2)] == [["own A4"], ["own A5"], ["own A2"], ["own A3"]]


def test_every_tenth_request_of_a_team_is_its_oldest_batch_request() -> None:
    desk = Desk(1, {"A": 1}, batch_every=10)
    desk.submit("A")
    desk.submit("A", 3, of=BATCH)
    desk.submit("A", 40)
    sent = ["own A1"]
    while len(sent) < 30:
        sent += desk.release(sent[-1].removeprefix("own "))
    assert [n + 1 for n, word in enumerate(sent) if word in own("A", 2, 4)] == [10, 20, 30]


def test_batch_every_0_is_strict() -> None:
    desk = Desk(1, {"A": 1}, batch_every=0)
    desk.submit("A")
    desk.submit("A", of=BATCH)
    desk.submit("A", 40)
    sent = ["own A1"]
    while len(sent) < 42:
        sent += desk.release(sent[-1].removeprefix("own "))
    assert sent[-1] == "own A2"


def test_the_tenth_request_is_interactive_if_no_batch_waits() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", 20)
    assert [desk.release(f"A{n}") for n in range(1, 12)] == [[f"own A{n + 1}"] for n in range(1, 12)]


# wide requests


def test_a_wide_request_that_fits_its_teams_whole_slots_is_an_owner() -> None:
    desk = Desk(16, HALVES)
    desk.submit("X", 16)
    assert desk.submit("A", slots=8) == ["own A1"]


def test_a_wide_borrower_goes_when_one_slot_is_free_and_passes_c_by_its_width_less_one() -> None:
    desk = Desk(4, HALVES)
    desk.submit("X", 4)
    assert desk.submit("Y", slots=4) == ["hold Y1"]
    assert desk.release("X1") == ["borrow Y1"]
    assert desk.pool.live_slots == 7
    assert desk.submit("Y") == ["hold Y2"]
    assert desk.release("X2", "X3", "X4") == []
    assert desk.release("Y1") == ["borrow Y2"]


def test_a_wide_request_beyond_whole_slots_is_within_share_and_its_debt_is_paid_back() -> None:
    # A owns 4 of 8 and sends requests of 6: over time it gets exactly 4, not 6 and not 0.
    desk = Desk(8, HALVES)
    desk.pool.set_usage("A", 1.0)  # others borrow first
    desk.submit("B", 4)
    assert desk.submit("A", 2, slots=6) == ["own A1", "hold A2"]
    assert desk.submit("B", 4) == hold("B", 5, 8)
    desk.time.now = 10.0
    # Ten seconds with 2 slots above its own are paid back by five with 4 below.
    assert desk.release("A1") == borrow("B", 5, 8)
    assert desk.queue.next_deadline() == 15.0
    desk.time.now = 14.0
    assert desk.submit("B") == ["hold B9"]
    assert desk.release("B5") == ["borrow B9"]
    assert desk.wait(1.0) == []
    assert desk.submit("B", 9) == hold("B", 10, 18)
    assert desk.release("B6") == ["own A2"]
    # And again: ten seconds with 2 above.
    assert desk.submit("A", slots=6) == ["hold A3"]
    desk.time.now = 25.0
    desk.release("B1", "B2", "B3", "B4", "A2")
    assert desk.held("A") == 1
    assert desk.queue.next_deadline() == 30.0


def test_what_a_team_is_owed_for_wide_requests_grows_with_the_slots_it_cannot_use_and_is_bounded() -> None:
    desk = Desk(8, HALVES, longest_wait_seconds=1e9)
    desk.submit("A")
    desk.time.now = 2.0
    desk.release("A1")  # its requests take 2 s
    desk.submit("B", 8)
    assert desk.submit("A", 2, slots=6) == hold("A", 2, 3)
    team = desk.queue._teams["A"]
    assert desk.queue._credit(team, 7.0) == 5 * 4.0
    desk.time.now = 1000.0
    assert desk.release("B1") == ["own A2"]
    assert (team.credit_slot_seconds, team.wide_slots) == (8 * 6 * 2.0, 6)  # eight such requests
    assert desk.queue._credit(team, 1010.0) == 96.0 - 10 * 2.0
    desk.cancel("A3")
    desk.time.now = 1010.0
    desk.submit("X")
    assert desk.release("A2") == ["borrow X1"]
    assert (team.credit_slot_seconds, team.wide_slots) == (-2 * 10.0, 0)  # nothing waits: nothing is owed


def test_a_wide_request_that_is_owed_slots_goes_before_all_borrowers() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 8)
    assert desk.submit("B", 2) == hold("B", 9, 10)
    assert desk.submit("A", slots=6) == ["hold A1"]
    assert desk.release("B1") == ["own A1"]


def test_a_narrow_request_that_fits_goes_past_a_wide_one() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 8)
    assert desk.submit("A", slots=6) == ["hold A1"]
    assert desk.submit("A") == ["own A2"]


def test_a_wide_request_goes_at_its_turn_before_a_narrow_one_that_would_fit() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 4)
    desk.submit("A", 4)
    assert desk.submit("A", slots=4) == ["hold A5"]
    assert desk.submit("A") == ["hold A6"]
    assert desk.release("A1") == ["own A5"]  # 11 slots: it may pass C by its width less one
    assert desk.release("A2", "A3", "A4") == []
    assert desk.release("A5") == ["own A6"]


def test_narrow_requests_pass_a_wide_one_until_a_tenth_of_the_teams_slots_has_paid_its_debt() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 4)
    desk.submit("A", 4)
    desk.submit("A", slots=4)
    desk.submit("A", 4)
    assert desk.release("A1") == ["own A5"]
    desk.time.now = 10.0  # three slots above its own for 10 s
    assert desk.release("A2", "A3", "A4", "A5") == own("A", 6, 9)
    assert desk.submit("A", slots=4) == ["hold A10"]
    desk.submit("A", 3)
    desk.time.now = 84.0  # 0.4 slots a second pay 30 slot-seconds in 75 s
    assert desk.release("A6") == ["own A11"]
    desk.time.now = 86.0
    assert desk.release("A7") == ["own A10"]


def test_a_wide_batch_request_goes_when_it_is_batchs_turn() -> None:
    desk = Desk(4, HALVES, batch_every=3)
    desk.submit("B", 2)
    desk.submit("A", 2)
    assert desk.submit("A", slots=2, of=BATCH) == ["hold A3"]
    desk.submit("A", 3)
    assert desk.release("A1") == ["own A3"]
    assert desk.release("A3") == ["own A4"]


# which instance


def two_instances(part: int = 4, seats: int | None = None) -> list[Instance]:
    return [Instance(id="e0", part_slots=part, seats=seats), Instance(id="e1", part_slots=part, seats=seats)]


def test_requests_of_a_team_spread_over_instances() -> None:
    desk = Desk(8, HALVES, instances=two_instances())
    assert desk.submit("A", 4) == ["own A1 @e0", "own A2 @e1", "own A3 @e0", "own A4 @e1"]


def test_the_prefix_decides_between_near_equals() -> None:
    desk = Desk(8, HALVES, instances=two_instances())
    assert desk.submit("A", 3, preferred_instances=["e1"]) == ["own A1 @e1", "own A2 @e1", "own A3 @e0"]


def test_a_request_goes_to_the_instance_that_holds_its_state_also_without_room() -> None:
    desk = Desk(8, HALVES, instances=two_instances())
    assert desk.submit("A", 4, state_instance="e1")[:4] == ["own A1 @e1", "own A2 @e1", "own A3 @e1", "own A4 @e1"]
    assert desk.submit("B", state_instance="e1") == ["own B1 @e1"]


def test_when_the_instance_that_holds_its_state_is_gone_another_one_answers() -> None:
    desk = Desk(8, HALVES, instances=two_instances())
    desk.queue.instance_removed("e1")
    assert desk.submit("A", state_instance="e1") == ["own A1 @e0"]


def test_an_owner_without_room_goes_where_a_borrower_is_taken_back() -> None:
    desk = Desk(8, HALVES, instances=two_instances(seats=4))
    desk.submit("A", 8)
    desk.first_byte("A8")  # on e1: immune
    assert desk.submit("B") == ["recall A7", "own B1 @e0"]


def test_an_owner_without_room_goes_to_a_free_seat_before_anybody_is_taken_back() -> None:
    instances = [Instance(id="e0", part_slots=4, seats=4), Instance(id="e1", part_slots=4, seats=5)]
    desk = Desk(8, HALVES, instances=instances)
    desk.submit("A", 8)
    assert desk.submit("B", 2) == ["own B1 @e1", "recall A8", "own B2 @e1"]


def test_a_request_whose_instance_cannot_be_reached_moves_to_another() -> None:
    desk = Desk(8, HALVES, instances=two_instances())
    desk.submit("A")
    assert desk.queue.reassigned("A1", frozenset()) == "e1"
    assert desk.queue.reassigned("A1", frozenset({"e0"})) is None
    assert desk.queue.reassigned("unknown", frozenset()) is None
    assert [stat.in_flight_slots for stat in desk.queue.snapshot().instances] == [0, 1]
    desk.release("A1")
    assert [stat.in_flight_slots for stat in desk.queue.snapshot().instances] == [0, 0]


def test_a_moved_request_goes_where_there_is_room_and_its_prefix() -> None:
    # e1 has most of its seats free and no room; e2 and e3 have room.
    instances = [Instance(id="e0", part_slots=2), Instance(id="e1", part_slots=0, seats=99)]
    instances += [Instance(id="e2", part_slots=2, seats=2), Instance(id="e3", part_slots=2, seats=2)]
    desk = Desk(6, {"A": 1}, instances=instances)
    desk.submit("A", preferred_instances=["e0", "e3"])
    assert desk.queue.reassigned("A1", frozenset()) == "e3"
    assert desk.queue.reassigned("A1", frozenset({"e0"})) == "e2"


def test_a_moved_request_goes_to_the_emptiest_instance_if_none_has_room() -> None:
    desk = Desk(4, HALVES, instances=[*two_instances(2), Instance(id="e2", part_slots=0, seats=1)])
    desk.submit("A", 4)
    assert desk.queue.reassigned("A1", frozenset()) == "e2"


# recall


def test_an_owner_without_a_seat_takes_back_the_request_sent_last() -> None:
    desk = owner_and_a_guest_at_capacity()
    assert desk.submit("B", 3) == ["recall A4", "own B1", "recall A3", "own B2", "hold B3"]
    assert desk.held("A") == 2
    assert (desk.in_flight("A"), desk.in_flight("B")) == (2, 2)


def test_nobody_is_taken_back_while_a_seat_is_free() -> None:
    desk = Desk(4, HALVES, seats=6)
    desk.submit("A", 4)
    assert desk.submit("B", 2) == own("B", 1, 2)


def test_the_team_most_above_its_share_is_taken_from_first() -> None:
    desk = Desk(8, {"A": "2/8", "B": "2/8", "C": "4/8"}, seats=8)
    desk.submit("B", 5)
    desk.submit("A", 3)
    assert desk.submit("C", 4) == [
        *["recall B5", "own C1", "recall B4", "own C2", "recall A3", "own C3", "recall B3", "own C4"]
    ]


def test_who_is_above_counts_and_not_who_was_stamped_as_borrowing() -> None:
    desk = Desk(4, HALVES, seats=4)
    desk.submit("A", 4)
    desk.release("A1", "A2")  # A3 and A4 borrowed, and are A's own two now
    desk.submit("X", 2)
    assert desk.submit("B", 2) == ["recall X2", "own B1", "recall X1", "own B2"]
    assert desk.submit("B") == ["hold B3"]


def test_what_is_stamped_within_share_is_taken_back_when_its_team_owns_less_now() -> None:
    desk = Desk(4, {"A": 1}, seats=4)
    desk.submit("A", 4)
    desk.set_shares(HALVES)
    assert desk.submit("B") == ["recall A4", "own B1"]


def test_a_request_whose_client_has_received_a_byte_is_never_taken_back() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.first_byte("A4", "A3")
    assert desk.submit("B") == ["recall A2", "own B1"]
    desk.first_byte("A1")
    assert desk.submit("B") == ["own B2"]


def test_a_request_with_state_at_the_engine_is_never_taken_back() -> None:
    desk = Desk(4, HALVES, seats=4)
    desk.submit("A", 4, recallable=False)
    assert desk.submit("B") == ["own B1"]


def test_a_turn_is_never_taken_back() -> None:
    desk = Desk(1, HALVES, seats=1)
    desk.submit("A")
    desk.set_shares({"B": 1})
    assert desk.submit("B") == ["own B1"]


def test_recall_can_be_switched_off() -> None:
    desk = owner_and_a_guest_at_capacity(recall=False)
    assert desk.submit("B") == ["own B1"]


def test_nobody_is_taken_below_its_own() -> None:
    desk = Desk(4, {"A": "3/4", "B": "1/4"}, seats=4)
    desk.submit("A", slots=2)
    desk.submit("A", slots=2)  # four slots of three: one above, but the request has two
    assert desk.submit("B") == ["own B1"]


def test_a_borrower_takes_nobody_back() -> None:
    desk = Desk(4, HALVES, seats=2)
    desk.submit("A", 4)
    assert desk.queue.snapshot().recalls_total == 0


def test_a_wide_owner_takes_back_as_many_as_it_needs_on_one_instance() -> None:
    instances = [Instance(id="e0", part_slots=4, seats=4), Instance(id="e1", part_slots=4, seats=4)]
    desk = Desk(8, HALVES, instances=instances)
    desk.submit("A", 8)
    assert desk.submit("B", slots=2) == ["recall A8", "recall A6", "own B1 @e1"]


def test_a_request_taken_back_waits_at_the_head_of_its_team() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.submit("A", 2)
    desk.submit("B", 2)
    for request_id in ("A4", "A3"):
        desk.aborted(request_id)
    desk.wait(0.05)
    assert desk.release("B1") == ["borrow A3"]
    assert desk.release("B2") == ["borrow A4"]
    assert desk.release("A1") == ["borrow A5"]


def test_a_team_that_takes_a_turn_does_not_take_back_its_own() -> None:
    desk = Desk(4, {"A": "3/8", "B": "1/8"}, seats=4)  # A owns 1.5 and B 0.5: one turn
    assert desk.submit("B") == ["own B1"]
    assert desk.submit("A", 3) == ["own A1", *borrow("A", 2, 3)]
    desk.release("B1")
    assert desk.submit("X") == ["borrow X1"]
    assert desk.submit("A") == ["recall X1", "own A4"]  # A is further above its share than X


def test_a_teams_turn_is_its_own() -> None:
    desk = Desk(6, {"A": "1/4", "B": "1/2", "C": "1/4"}, seats=6)  # A and C own 1.5, B 3: one turn
    assert desk.submit("A", 2) == own("A", 1, 2)
    assert desk.submit("A", slots=3) == ["borrow A3"]
    desk.release("A1")
    desk.submit("X", 2)  # all six seats are taken
    assert desk.submit("B", 3) == ["recall X2", "own B1", "recall X1", "own B2", "own B3"]  # A3 is one too wide


def test_a_wide_owner_takes_back_no_more_than_it_lacks() -> None:
    desk = Desk(4, HALVES, seats=5)
    desk.submit("A", 4)
    assert desk.submit("B", slots=2) == ["recall A4", "own B1"]


def test_a_wide_owner_goes_where_some_of_its_seats_become_free() -> None:
    desk = Desk(8, HALVES, instances=two_instances(seats=4))
    desk.submit("A", 8)
    desk.first_byte("A2", "A4", "A5", "A6", "A7", "A8")
    assert desk.submit("B", slots=2) == ["recall A3", "recall A1", "own B1 @e0"]
    desk = Desk(8, HALVES, instances=two_instances(seats=4))
    desk.submit("A", 8)
    desk.first_byte("A1", "A2", "A3", "A4", "A5", "A6", "A8")
    assert desk.submit("B", slots=2) == ["recall A7", "own B1 @e0"]


def test_a_request_taken_back_twice_frees_two_seats() -> None:
    desk = owner_and_a_guest_at_capacity(abort_grace_seconds=0.0)
    desk.submit("B")
    desk.release("B1", "A1", "A2")
    assert desk.sends["A4"].held_seconds == 0.0  # sent again
    assert desk.submit("A") == ["borrow A5"]
    desk.first_byte("A5")
    assert desk.submit("B") == ["recall A4", "own B2"]
    assert [stat.aborting_slots for stat in desk.queue.snapshot().instances] == [2]
    desk.aborted("A4")
    assert [stat.aborting_slots for stat in desk.queue.snapshot().instances] == [1]
    desk.aborted("A4")
    assert [stat.aborting_slots for stat in desk.queue.snapshot().instances] == [0]
    assert desk.queue._aborting == {}


def test_a_batch_request_taken_back_goes_before_interactive_ones() -> None:
    desk = Desk(2, HALVES, seats=2)
    desk.submit("A")
    desk.submit("A", of=BATCH)
    desk.submit("A")
    desk.submit("B")
    desk.aborted("A2")
    desk.wait(0.05)
    assert desk.release("B1") == ["borrow A2"]


def test_the_seat_counts_as_taken_until_the_abort_is_over() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.submit("B")
    assert desk.release("B1") == []  # the engine may still run A4
    assert desk.queue.next_deadline() == 300.0
    desk.time.now = 1.0
    assert desk.aborted("A4") == []
    assert desk.queue.next_deadline() == 1.05
    assert desk.wait(0.04) == []
    assert desk.wait(0.02) == ["borrow A4"]


def test_without_a_grace_the_seat_is_free_when_the_connection_is_closed() -> None:
    desk = owner_and_a_guest_at_capacity(abort_grace_seconds=0.0)
    desk.submit("B")
    desk.release("B1")
    assert desk.aborted("A4") == ["borrow A4"]
    assert desk.aborted("A4") == []


def test_what_is_thrown_away_is_charged_to_nobody_and_is_counted() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.release("A4", cost=7.0)  # A's requests are expected to cost 7 from now on
    desk.submit("A")
    desk.time.now = 3.0
    desk.submit("B")
    assert desk.recalls["A5"].wasted_slot_seconds == 3.0
    stat = desk.queue.snapshot()
    assert (stat.recalls_total, stat.recalled_slot_seconds_total) == (1, 3.0)
    assert desk.recalls["A5"].instance_id == "e0"
    assert desk.pool.usage()[0] == {"A": 7.0, "B": 0.0}
    assert desk.pool.borrow_key("A") == 7.0 * 2
    assert desk.release("A5", cost=100.0) == []  # it is held: there is nothing to settle
    assert desk.pool.usage()[0]["A"] == 7.0


def test_recalls_throw_away_a_tenth_of_the_pool_at_most_over_five_minutes() -> None:
    desk = Desk(8, HALVES, seats=8)  # 0.1 x 8 slots x 300 s = 240 slot-seconds
    desk.submit("A", 8)
    desk.time.now = 70.0
    assert desk.submit("B", 4) == ["recall A8", "own B1", "recall A7", "own B2", "recall A6", "own B3", "own B4"]
    desk.release("B4")


def test_the_bucket_of_waste_is_five_minutes_deep() -> None:
    desk = Desk(8, HALVES, seats=8)
    desk.time.now = 10_000.0
    desk.submit("A", 8)
    desk.time.now = 10_239.0
    assert desk.submit("B", 2) == ["recall A8", "own B1", "own B2"]


def test_the_bucket_fills_with_time() -> None:
    desk = Desk(8, HALVES, seats=8)
    desk.submit("A", 8)
    desk.time.now = 240.0
    assert desk.submit("B") == ["recall A8", "own B1"]  # empty now; 0.1 x 8 slot-seconds come in each second
    desk.cancel("A8")
    desk.aborted("A8")
    desk.release("A1")
    assert desk.submit("X") == ["hold X1"]
    assert desk.wait(0.125) == ["borrow X1"]
    desk.time.now = 241.0
    assert desk.submit("B") == ["own B2"]
    desk.release("X1", "B2")
    desk.time.now = 250.0
    assert desk.submit("X") == ["borrow X2"]
    desk.time.now = 258.0
    assert desk.submit("B") == ["recall X2", "own B3"]


def test_a_waste_of_zero_takes_back_only_what_was_sent_at_this_very_time() -> None:
    desk = Desk(4, HALVES, seats=4, recall_waste=0.0)
    desk.submit("A", 4)
    desk.time.now = 0.001
    assert desk.submit("B") == ["own B1"]


def test_a_recall_never_causes_another() -> None:
    # D is at 4 with 2.5 of its own, and the only turn has just become free: D4, taken back for B, takes that turn.
    desk = Desk(8, {"B": "2/8", "D": "5/16", "E": "7/16"}, seats=8)
    assert desk.submit("E", 4) == own("E", 1, 4)
    assert desk.submit("D", 4) == [*own("D", 1, 2), *borrow("D", 3, 4)]
    desk.release("E4")
    assert desk.submit("X") == ["borrow X1"]
    assert desk.submit("B") == ["recall D4", "own B1", "own D4"]


def test_nothing_the_client_can_see_breaks_when_a_request_is_taken_back_again_and_again() -> None:
    desk = owner_and_a_guest_at_capacity(abort_grace_seconds=0.0)
    for number in range(1, 6):
        assert desk.submit("B") == ["recall A4", f"own B{number}"]
        desk.aborted("A4")
        assert desk.release(f"B{number}") == ["borrow A4"]
    assert desk.queue.snapshot().recalls_total == 5
    assert desk.release("A4", cost=2.0) == []
    assert desk.pool.usage()[0]["A"] == 2.0


def test_a_request_taken_back_may_be_cancelled_while_it_is_being_aborted() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.submit("B")
    assert desk.cancel("A4") == []
    assert desk.held() == 0
    desk.aborted("A4")
    desk.wait(0.05)
    assert desk.submit("A") == ["hold A5"]  # A1 to A3 and B1 are running
    assert desk.release("B1") == ["borrow A5"]


def test_seats_that_nobody_told_are_what_was_seen_to_run() -> None:
    desk = Desk(4, HALVES, instances=[Instance(id="e0", part_slots=4)])
    desk.submit("A", 4)
    assert desk.submit("B") == ["recall A4", "own B1"]
    assert desk.queue.running_seen("e0", 8) == []
    assert desk.submit("B") == ["own B2"]


# bounds, cancel, the longest wait


def refusal(desk: Desk, request_id: str) -> tuple[RefusalReason, float, float]:
    refused = desk.refusals[request_id]
    return refused.reason, refused.found, refused.limit


def test_a_pool_holds_so_many_requests() -> None:
    desk = Desk(1, {"A": 1}, max_held=2)
    desk.submit("A", 2)
    assert desk.submit("B", 2) == ["hold B1", "refuse B2"]
    assert refusal(desk, "B2") == (RefusalReason.QUEUE_FULL, 2, 2)
    assert desk.held() == 2


def test_a_team_holds_so_many_requests() -> None:
    desk = Desk(1, {"A": 1}, max_held_per_team=2)
    assert desk.submit("A", 4) == ["own A1", *hold("A", 2, 3), "refuse A4"]
    assert refusal(desk, "A4") == (RefusalReason.TEAM_QUEUE_FULL, 2, 2)
    assert desk.submit("B") == ["hold B1"]


def test_a_pool_holds_so_many_bytes() -> None:
    desk = Desk(1, {"A": 1}, max_held_bytes=1000)
    desk.submit("A", body_bytes=5000)
    assert desk.submit("A", body_bytes=900) == ["hold A2"]
    assert desk.submit("A", body_bytes=101) == ["refuse A3"]
    assert refusal(desk, "A3") == (RefusalReason.HELD_BYTES_FULL, 1001, 1000)
    assert desk.submit("A", body_bytes=100) == ["hold A4"]
    assert desk.queue.snapshot().held_bytes == 1000


def test_bounds_are_for_what_is_held_and_not_for_owners() -> None:
    desk = Desk(2, HALVES, max_held=0, max_held_per_team=0, max_held_bytes=0)
    assert desk.submit("A", 2, body_bytes=9) == ["own A1", "borrow A2"]
    assert desk.submit("B", 2, body_bytes=9) == ["own B1", "refuse B2"]


def test_a_request_waits_so_long_and_no_longer() -> None:
    desk = Desk(1, {"A": 1}, longest_wait_seconds=60.0)
    desk.submit("A")
    desk.time.now = 1.0
    desk.submit("A")
    assert desk.queue.next_deadline() == 61.0
    assert desk.wait(59.99) == []
    assert desk.wait(0.01) == ["refuse A2"]
    assert refusal(desk, "A2") == (RefusalReason.HELD_TOO_LONG, 60.0, 60.0)
    assert desk.queue.next_deadline() is None
    assert desk.release("A1") == []


def test_a_request_that_was_taken_back_has_waited_before() -> None:
    desk = Desk(2, HALVES, seats=2, longest_wait_seconds=10.0)
    desk.submit("A", 3)
    assert desk.wait(3.0) == []
    assert desk.submit("A") == ["hold A4"]
    assert desk.wait(3.0) + desk.release("A2") == ["borrow A3"]
    assert desk.wait(1.0) + desk.submit("B") == ["recall A3", "own B1"]
    desk.aborted("A3")
    assert desk.wait(1.0) == []
    assert desk.queue.next_deadline() == 11.0  # six seconds before it was sent and four now
    assert desk.queue.snapshot().teams[0].oldest_held_seconds == 7.0
    assert desk.wait(2.99) == []
    assert desk.wait(0.01) == ["refuse A3"]
    assert refusal(desk, "A3") == (RefusalReason.HELD_TOO_LONG, 10.0, 10.0)
    assert desk.queue.next_deadline() == 13.0
    assert desk.wait(2.0) == ["refuse A4"]


def test_of_requests_that_were_taken_back_the_one_that_waited_longest_is_refused_first() -> None:
    desk = Desk(3, {"A": "1/3", "B": "2/3"}, seats=3, longest_wait_seconds=10.0)
    desk.submit("A", 4)
    assert desk.wait(2.0) + desk.submit("A") == ["hold A5"]
    assert desk.wait(3.0) + desk.release("A2", "A3") == ["borrow A4", "borrow A5"]
    assert desk.submit("B") == ["recall A5", "own B1"]
    assert desk.wait(1.0) + desk.submit("B") == ["recall A4", "own B2"]
    assert desk.queue.next_deadline() == 6.0 + 5.0
    assert desk.wait(5.99) == ["refuse A4"]
    assert desk.wait(0.01) == ["refuse A5"]


def test_a_refused_client_is_told_to_come_back_when_a_slot_is_expected_to_be_free() -> None:
    desk = Desk(2, {"A": 1}, max_held_per_team=3)
    desk.submit("A", 2)
    desk.time.now = 12.0
    desk.release("A1")
    desk.submit("A", 5)
    assert desk.refusals["A7"].retry_after_seconds == 24.0  # the fourth x 12 s / 2 slots
    desk.time.now = 300.0
    desk.release("A2")
    desk.submit("A", 2)
    assert desk.refusals["A9"].retry_after_seconds == 60.0


def test_without_any_capacity_a_refused_client_is_told_to_come_back_in_five_seconds() -> None:
    desk = Desk(0, HALVES, instances=[Instance(id="e0", part_slots=0)], max_held=0)
    desk.submit("A")
    assert desk.refusals["A1"].retry_after_seconds == 5.0


def test_a_first_refusal_says_a_second() -> None:
    desk = Desk(2, {"A": 1}, max_held_per_team=0)
    desk.submit("A", 3)
    assert desk.refusals["A3"].retry_after_seconds == 1.0


def test_a_held_request_whose_client_leaves_is_gone_at_once() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", 3, body_bytes=10)
    assert desk.cancel("A2") == []
    assert (desk.held(), desk.queue.snapshot().held_bytes) == (1, 10)
    assert desk.release("A1") == ["own A3"]


def test_a_dispatched_request_whose_client_leaves_keeps_its_slot_until_the_engine_is_done() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", 2)
    assert desk.cancel("A1") == []
    assert desk.in_flight("A") == 1
    assert desk.release("A1") == ["own A2"]


def test_what_is_held_says_what_it_waits_for() -> None:
    desk = Desk(4, HALVES)
    desk.submit("A", 6)
    held = desk.helds["A6"]
    assert (held.team_held, held.team_in_flight_slots, held.reserved_slots) == (2, 4, 2)
    assert (held.pool_in_flight_slots, held.capacity_slots) == (4, 4)


def test_a_snapshot_says_what_a_team_has_waiting() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A")
    desk.time.now = 2.0
    desk.submit("A", slots=3, body_bytes=100, of=BATCH)
    desk.time.now = 3.0
    desk.submit("A", body_bytes=10)
    desk.time.now = 7.0
    (team,) = desk.queue.snapshot().teams
    assert (team.team, team.held, team.held_slots, team.held_bytes) == ("A", 2, 4, 110)
    assert team.oldest_held_seconds == 5.0


def test_what_was_held_says_how_long() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", 2)
    desk.time.now = 2.5
    desk.release("A1")
    assert desk.sends["A2"].held_seconds == 2.5


def test_both_waits_of_a_request_taken_back_count() -> None:
    desk = owner_and_a_guest_at_capacity(abort_grace_seconds=0.0)
    desk.submit("A")
    desk.time.now = 1.0
    assert desk.release("A4") == ["borrow A5"]
    desk.time.now = 2.0
    assert desk.submit("B") == ["recall A5", "own B1"]
    desk.time.now = 5.0
    desk.aborted("A5")
    assert desk.release("B1") == ["borrow A5"]
    assert desk.sends["A5"].held_seconds == 4.0
    assert desk.recalls["A5"].wasted_slot_seconds == 1.0
    desk.time.now = 7.0
    assert desk.submit("B") == ["recall A5", "own B2"]
    assert desk.queue.snapshot().recalled_slot_seconds_total == 1.0 + 2.0


# changes while requests are held


def test_more_capacity_goes_to_who_waits() -> None:
    desk = Desk(2, HALVES, instances=[Instance(id="e0", part_slots=4)])
    desk.submit("A", 5)
    assert desk.set_capacity(4) == borrow("A", 3, 4)
    assert desk.held() == 1


def test_less_capacity_takes_nothing_from_what_runs_and_owners_still_go() -> None:
    desk = Desk(16, HALVES, instances=[Instance(id="e0", part_slots=16)])
    desk.submit("A", 16)
    assert desk.set_capacity(8) == []
    assert desk.submit("B", 5)[-2:] == ["own B4", "hold B5"]


def test_new_shares_send_the_new_owner() -> None:
    desk = Desk(4, HALVES)
    desk.submit("X", 4)
    desk.submit("C", 2)
    assert desk.set_shares({"C": "2/4", "A": "2/4"}) == own("C", 1, 2)


def test_a_new_half_life_keeps_the_order() -> None:
    desk = three_that_want_to_borrow(half_life=3600.0)
    desk.pool.set_usage("A", 10.0)
    desk.pool.set_usage("B", 9.0)
    desk.time.now = 100.0
    desk.pool.set_half_life(60.0)
    assert desk.note(desk.queue.capacity_changed()) == []
    assert desk.release("X3", "X4") == borrow("B", 2, 3)


def test_a_team_that_gets_a_fraction_has_no_hoard_of_turns_from_before() -> None:
    desk = Desk(2, {"A": "1/4", "B": "1/4", "C": "1/2"})  # A and B share a turn; C owns 1
    desk.submit("C", 200)
    desk.submit("A", 200)
    for number in range(100):
        desk.time.now += 1.0
        desk.release(f"A{number + 1}")
    desk.set_shares({"A": "1/4", "C": "1/4", "B": "1/2"})
    desk.release("C1")  # ran in the slot that C owned before
    turns: list[str] = []
    running = next(request_id for request_id, send in desk.sends.items() if send.grant._state and request_id[0] == "A")
    for _ in range(8):
        desk.time.now += 1.0
        turns += [word.split()[1] for word in desk.release(running) if word.startswith("own")]
        running = turns[-1]
    assert 3 <= sum(turn[0] == "C" for turn in turns) <= 5


def test_an_instance_that_comes_takes_who_waits() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 4)
    desk.several = True
    desk.pool.set_capacity(4)
    assert desk.instance("e1", 2) == ["borrow A3 @e1", "borrow A4 @e1"]


def test_without_an_instance_a_request_is_refused() -> None:
    desk = Desk(4, HALVES, instances=[])
    assert desk.submit("A") == ["refuse A1"]
    assert refusal(desk, "A1") == (RefusalReason.NO_INSTANCE, 0, 1)


def test_what_is_held_when_the_last_instance_goes_waits_for_the_next() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 3)
    desk.instance("e0", 2, accepting=False)
    desk.release("A1", "A2")
    assert desk.held() == 1
    assert desk.submit("B") == ["refuse B1"]
    assert desk.instance("e0", 2) == ["own A3"]


def test_a_removed_instance_gets_nothing_and_keeps_what_it_runs() -> None:
    desk = Desk(4, HALVES, instances=two_instances(2))
    desk.submit("A", 2)
    assert desk.note(desk.queue.instance_removed("e0")) == []
    assert desk.submit("B", 2) == ["own B1 @e1", "own B2 @e1"]
    desk.release("A1")
    assert [stat.id for stat in desk.queue.snapshot().instances] == ["e1"]


def test_what_waits_goes_where_there_is_room_when_an_instance_is_removed() -> None:
    desk = Desk(4, HALVES, instances=two_instances(2))
    desk.submit("X", 5)
    desk.time.now = 1.0
    assert desk.note(desk.queue.instance_removed("e0")) == ["borrow X5 @e1"]
    assert desk.sends["X5"].held_seconds == 1.0


def test_what_runs_on_an_instance_that_left_takes_no_room_of_the_others() -> None:
    desk = Desk(4, HALVES, instances=two_instances(2))
    desk.submit("A", 4)
    desk.submit("X", 2)
    desk.pool.set_capacity(2)
    assert desk.instance("e0", 2, accepting=False) == []
    assert desk.release("A2") == ["borrow X1 @e1"]


# phantoms


def test_phantoms_count_in_the_within_share_test_and_not_in_the_room() -> None:
    desk = Desk(4, HALVES)
    desk.pool.add_phantoms("A", 2, until=600.0)
    assert desk.submit("A", 5) == [*borrow("A", 1, 4), "hold A5"]
    assert desk.submit("B", 2) == own("B", 1, 2)


def test_phantoms_of_a_whole_pool_leave_nothing_idle() -> None:
    desk = Desk(4, HALVES)
    desk.pool.add_phantoms("A", 4, until=600.0)
    assert desk.submit("A", 5) == [*borrow("A", 1, 4), "hold A5"]


def test_an_owner_goes_when_its_phantoms_end() -> None:
    desk = Desk(2, HALVES)
    desk.pool.add_phantoms("A", 1, until=10.0)
    desk.submit("X", 2)
    assert desk.submit("A") == ["hold A1"]
    assert desk.queue.next_deadline() == 10.0
    assert desk.wait(10.0) == ["own A1"]


# fallback


def with_a_spare_pool(**options: object) -> tuple[Desk, Desk]:
    """`chat` (C = 4, A and B own 2 each) falls back on `spare` (C = 2, all of S; seats for no more)."""
    spare = Desk(2, {"S": 1}, seats=2, name="spare", abort_grace_seconds=0.0)
    return Desk(4, HALVES, fallback=spare, **options), spare


def test_the_next_borrower_uses_the_free_room_of_the_fallback_pool() -> None:
    desk, spare = with_a_spare_pool()
    assert desk.submit("A", 7) == [
        *own("A", 1, 2),
        *borrow("A", 3, 4),
        "borrow A5 in spare",
        "borrow A6 in spare",
        "hold A7",
    ]
    assert desk.sends["A5"].priority == 100
    assert (desk.pool.live_slots, spare.pool.live_slots) == (4, 2)
    desk.release("A5", cost=3.0)
    assert (desk.pool.usage()[0]["A"], spare.pool.usage()[0]["A"]) == (0.0, 3.0)


def test_room_in_the_fallback_pool_is_used_when_it_appears() -> None:
    desk, spare = with_a_spare_pool()
    spare.submit("S", 2)
    assert desk.submit("A", 5)[-1] == "hold A5"
    assert spare.release("S1") == ["borrow A5"]
    assert desk.submit("A") == ["hold A6"]
    assert desk.release("A5") == ["borrow A6 in spare"]


def test_an_owner_never_goes_to_the_fallback_pool() -> None:
    desk, _ = with_a_spare_pool()
    desk.submit("A", 4)
    assert desk.submit("B", 2) == own("B", 1, 2)


def test_the_best_borrower_goes_to_the_fallback_pool() -> None:
    desk, spare = with_a_spare_pool()
    spare.submit("S", 2)
    desk.submit("A", 6)
    desk.submit("B", 3)
    desk.pool.set_usage("A", 5.0)
    assert spare.release("S1", "S2") == ["borrow B3", "borrow A5"]


def test_a_pool_that_holds_requests_of_its_own_takes_no_guests() -> None:
    desk, spare = with_a_spare_pool()
    spare.submit("S", 3)
    desk.submit("A", 5)
    assert spare.release("S1") == ["own S3"]
    assert spare.release("S2") == ["borrow A5"]


def test_when_a_guest_ends_the_fallback_pools_own_go_first() -> None:
    spare = Desk(2, {"S": "1/2"}, name="spare")
    desk = Desk(4, HALVES, fallback=spare)
    desk.submit("A", 5)
    assert spare.submit("S", 2) == ["own S1", "hold S2"]
    assert desk.submit("A") == ["hold A6"]
    assert desk.release("A5") == ["borrow S2 in spare"]


def test_when_a_guest_ends_the_fallback_pools_own_go_though_its_home_holds_nothing() -> None:
    spare = Desk(2, {"S": "1/2"}, name="spare")
    desk = Desk(4, HALVES, fallback=spare)
    desk.submit("A", 5)
    assert spare.submit("S", 2) == ["own S1", "hold S2"]
    assert desk.release("A5") == ["borrow S2 in spare"]


def test_when_a_wide_request_leaves_the_next_may_go_to_the_fallback_pool() -> None:
    desk, spare = with_a_spare_pool()
    spare.submit("S")
    desk.submit("A", 4)
    assert desk.submit("A", slots=2) + desk.submit("A") == hold("A", 5, 6)
    assert desk.cancel("A5") == ["borrow A6 in spare"]


def test_phantoms_of_the_fallback_pool_keep_guests_out() -> None:
    desk, spare = with_a_spare_pool()
    spare.pool.add_phantoms("S", 2, until=60.0)
    assert desk.submit("A", 5)[-1] == "hold A5"


def test_a_guests_standing_goes_by_the_shares_that_the_fallback_pool_has_now() -> None:
    desk, spare = with_a_spare_pool()
    assert desk.submit("A", 5)[-1] == "borrow A5 in spare"
    spare.pool.set_shares({"A": 1})
    assert desk.submit("A") == ["own A6 in spare"]


def test_a_guest_that_is_taken_back_waits_in_its_own_queue() -> None:
    desk, spare = with_a_spare_pool()
    desk.submit("A", 7)
    assert spare.submit("S") == ["recall A6", "own S1"]
    assert (desk.held("A"), spare.held()) == (2, 0)
    assert desk.release("A1") == ["borrow A6"]
    assert desk.aborted("A6") == []
    assert spare.release("S1") == ["borrow A7"]


def test_the_home_queue_hears_of_the_end_of_a_recall_elsewhere() -> None:
    desk, spare = with_a_spare_pool()
    desk.submit("A", 6)
    spare.submit("S")
    spare.release("S1")
    assert desk.held() == 1  # the seat may still be taken
    assert desk.aborted("A6") == ["borrow A6 in spare"]


def test_a_queue_that_is_given_up_leaves_its_fallback_when_its_last_request_has_ended() -> None:
    desk, spare = with_a_spare_pool()
    desk.submit("A", 5)
    left = desk.queue
    del desk.queue
    assert left.released("A5", 1.0) == []
    assert spare.queue._live_guests() == [left]
    for number in range(1, 5):
        left.released(f"A{number}", 1.0)
    del left
    gc.collect()
    assert spare.queue._live_guests() == []
    other = HoldQueue(Pool("other", 1, {}, None), fallback=spare.queue)
    assert spare.queue._live_guests() == [other]


def test_a_guest_within_share_and_its_teams_turn_are_not_one_slot_more_than_the_pool_owns() -> None:
    # Of C = 2, A owns 0.9 of a slot and B 1.1: one whole slot and one turn.
    spare = Desk(2, {"A": "9/20", "B": "11/20"}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare)
    assert desk.submit("A", 2) == ["own A1", "borrow A2 in spare"]
    assert spare.submit("B", 2) == ["own B1", "own B2"]
    assert spare.pool.live_slots == 3  # B2 holds the turn; whoever borrows is beside what is owned


def test_a_guest_of_whole_slots_is_within_share() -> None:
    spare = Desk(2, {"A": "1/2", "B": "1/2"}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare)
    assert desk.submit("A", 3) == ["own A1", "own A2 in spare", "borrow A3 in spare"]
    assert spare.submit("B") == ["own B1"]


def test_a_guest_that_began_is_not_taken_back() -> None:
    desk, spare = with_a_spare_pool()
    desk.submit("A", 6)
    desk.first_byte("A5", "A6")
    assert spare.submit("S") == ["own S1"]


def test_a_guest_is_ordered_as_its_home_orders_it() -> None:
    # Every second request of the team is batch, wherever it goes.
    spare = Desk(9, {"S": 1}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare, batch_every=2)
    spare.submit("S", 9)
    desk.submit("A")
    desk.submit("A", 5, of=BATCH)
    desk.submit("A", 5)
    assert spare.release(*(f"S{n}" for n in range(1, 7))) == [f"borrow A{n}" for n in (2, 7, 3, 8, 4, 9)]


def test_a_guest_has_the_standing_that_its_team_has_there() -> None:
    spare = Desk(4, {"S": "3/4", "A": "1/4"}, name="spare", instances=two_instances(2))
    desk = Desk(1, {"A": 1}, fallback=spare)
    spare.submit("S", 4)
    desk.submit("A")
    desk.submit("A", of=BATCH, estimated_tokens=7)
    spare.time.now = 2.0
    assert spare.release("S1") == ["own A2 @e0"]
    guest = spare.sends["A2"]
    assert (guest.priority, guest.standing, guest.held_seconds) == (1, Standing.WITHIN_SHARE, 2.0)
    assert [stat.in_flight_tokens for stat in spare.pool.snapshot()] == [7, 0]
    assert desk.submit("A", slots=2) == ["hold A3"]
    assert spare.release("S2") == []  # two slots must fit in a pool that is not its own
    assert spare.release("S3") == ["borrow A3 @e1"]
    assert (spare.sends["A3"].priority, spare.sends["A3"].standing) == (10, Standing.BORROWING)
    assert spare.in_flight("A") == 3


def test_without_an_instance_of_its_own_a_pool_uses_its_fallback() -> None:
    spare = Desk(2, {"S": 1}, name="spare")
    desk = Desk(0, HALVES, instances=[], fallback=spare)
    assert desk.submit("A", 3) == ["borrow A1 in spare", "borrow A2 in spare", "hold A3"]


# once, unknown, errors


def test_a_release_counts_once() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 4)
    assert desk.release("A1", cost=1.0) == ["borrow A3"]
    assert desk.release("A1", cost=1.0) == []
    assert desk.pool.usage()[0]["A"] == 1.0
    assert desk.in_flight("A") == 2


def test_unknown_requests_change_nothing() -> None:
    desk = owner_and_a_guest_at_capacity()
    desk.submit("A")
    desk.first_byte("nobody")
    assert desk.release("nobody") + desk.cancel("nobody") + desk.aborted("nobody") == []
    assert (desk.held(), desk.in_flight("A")) == (1, 4)


def test_a_held_request_cannot_be_released_or_begin() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", 2)
    desk.first_byte("A2")
    assert desk.release("A2", cost=9.0) == []
    assert desk.held() == 1
    assert desk.pool.usage()[0]["A"] == 0.0


def test_an_id_may_be_used_again_when_its_request_is_finished() -> None:
    desk = Desk(1, {"A": 1})
    desk.submit("A", name="x")
    with pytest.raises(ValueError, match="'x' was submitted already"):
        desk.submit("A", name="x")
    desk.release("x")
    assert desk.submit("A", name="x") == ["own x"]


@pytest.mark.parametrize("slots", [0, -1])
def test_a_request_has_at_least_one_slot(slots: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {slots}"):
        Desk(1, {"A": 1}).queue.submitted(Request(id="x", team="A", slots=slots))


def test_made_up_names_leave_nothing_behind() -> None:
    desk = Desk(2, HALVES)
    for number in range(2000):
        desk.submit(f"name {number}", name="x")
        desk.release("x")
    assert set(desk.queue._teams) <= {"A", "B"}


def test_a_pool_without_capacity_holds_everything() -> None:
    desk = Desk(0, HALVES, instances=[Instance(id="e0", part_slots=0)])
    assert desk.submit("A") == ["hold A1"]
    assert desk.set_capacity(2) == ["own A1"]
