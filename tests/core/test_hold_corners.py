"""Corners of the hold queue that its other examples do not reach; each stands for a planted fault they missed."""

from collections.abc import Callable

import pytest

from fairshare import Pool
from fairshare.core.decisions import DispatchQueue, HoldOptions, Instance, Mode, Request
from fairshare.core.dispatch import make_queue
from fairshare.core.hold import HoldQueue
from fairshare.core.priority import Standing
from fairshare.core.team_queue import Entry, Line
from support.desk import BATCH, WEIGHTED, Desk, borrow, hold, own

HALVES = {"A": "1/2", "B": "1/2"}


# What a grant and a decision say


def test_the_grant_says_what_the_decision_says() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 2, of=BATCH, estimated_tokens=7)
    assert [desk.sends[name].grant.priority for name in ("A1", "A2")] == [1, 11]
    assert [stat.in_flight_tokens for stat in desk.pool.snapshot()] == [14, 0]


# Every event sends what may go


@pytest.mark.parametrize(
    "event",
    [
        lambda queue: queue.released("nobody", 1.0),
        lambda queue: queue.aborted("nobody"),
        lambda queue: queue.cancelled("nobody"),
        lambda queue: queue.instance_removed("nowhere"),
    ],
)
def test_an_event_of_something_unknown_sends_what_may_go_now(event: Callable[[DispatchQueue], list[object]]) -> None:
    desk = Desk(2, HALVES)
    desk.pool.add_phantoms("B", 1, until=60.0)
    assert desk.submit("A", 2) + desk.submit("B") == ["own A1", "borrow A2", "hold B1"]
    desk.pool.drop_phantom("B")
    desk.time.now = 5.0
    assert desk.note(event(desk.queue)) == ["own B1"]
    desk.time.now = 6.0
    assert desk.release("B1") == []
    assert desk.queue._expected_seconds(desk.queue._teams["B"]) == 1.0


@pytest.mark.parametrize(
    "event",
    [
        lambda queue: queue.instance_changed(Instance(id="e0", part_slots=1)),
        lambda queue: queue.instance_removed("nowhere"),
        lambda queue: queue.aborted("nobody"),
        lambda queue: queue.cancelled("nobody"),
    ],
)
def test_any_event_refuses_what_waited_too_long(event: Callable[[DispatchQueue], list[object]]) -> None:
    desk = Desk(1, {"A": 1}, longest_wait_seconds=60.0)
    desk.submit("A", 2)
    desk.time.now = 60.0
    assert desk.note(event(desk.queue)) == ["refuse A2"]


def test_a_request_behind_others_does_not_hide_what_has_changed() -> None:
    desk = Desk(2, HALVES)
    desk.pool.add_phantoms("B", 1, until=60.0)
    assert desk.submit("A", 3) + desk.submit("B") == ["own A1", "borrow A2", "hold A3", "hold B1"]
    desk.pool.drop_phantom("B")
    assert desk.submit("A") == ["own B1", "hold A4"]


def test_a_pool_that_shrank_is_seen_by_the_next_request_even_if_nobody_said_so() -> None:
    desk = Desk(4, HALVES)
    assert desk.submit("A") == ["own A1"]
    desk.pool.set_capacity(2)
    assert desk.submit("A") == ["borrow A2"]


def test_behind_others_too_a_request_sees_that_the_pool_has_grown() -> None:
    desk = Desk(2, HALVES)
    assert desk.submit("A", 3) == ["own A1", "borrow A2", "hold A3"]
    desk.pool.set_capacity(4)
    assert desk.submit("A") == borrow("A", 3, 4)


def test_a_team_that_comes_above_its_share_by_grants_from_elsewhere_is_recalled_from() -> None:
    desk = Desk(4, HALVES, seats=3)
    assert desk.submit("B", 2) + desk.submit("A") == ["own B1", "own B2", "own A1"]
    desk.pool.acquire("B")
    assert desk.release("A1") == []  # two teams changed
    assert desk.submit("A", 2) == ["own A2", "recall B2", "own A3"]


def test_what_waited_too_long_is_gone_from_the_order_of_borrowers_in_a_short_way_too() -> None:
    desk = Desk(2, HALVES, longest_wait_seconds=200.0)
    desk.submit("A", 3)
    desk.time.now = 250.0
    assert desk.release("A1") == ["refuse A3"]
    assert desk.release("A2") == []
    assert desk.submit("B", 3) == ["own B1", "borrow B2", "hold B3"]


def test_in_pass_made_up_names_leave_nothing_when_others_change_too() -> None:
    desk = Desk(2, HALVES, mode=Mode.PASS)
    desk.submit("X")
    desk.pool.charge("B", 1.0)
    desk.release("X1")
    assert "X" not in desk.queue._teams


# Seats of recalled requests


def test_a_seat_that_comes_free_is_seen_by_the_next_event_whatever_came_between() -> None:
    desk = Desk(2, HALVES, seats=2)
    desk.submit("A", 2)
    assert desk.submit("B") == ["recall A2", "own B1"]
    desk.aborted("A2")
    desk.cancel("nobody")
    assert desk.queue.next_deadline() == 0.05
    desk.time.now = 1.0
    assert desk.release("B1") == ["borrow A2"]


def test_the_seats_of_a_wide_recall_serve_an_owner_and_a_borrower_in_one_event() -> None:
    desk = Desk(4, {"A": "1/4", "B": "1/4", "C": "1/4", "D": "1/4"}, seats=4)
    assert desk.submit("A", 2) + desk.submit("A", slots=2) == ["own A1", "borrow A2", "borrow A3"]
    assert desk.submit("B") == ["recall A3", "own B1"]
    assert desk.aborted("A3") + desk.release("A2") == []
    desk.time.now = 1.0
    assert desk.submit("C") == ["own C1", "borrow A3"]


def test_the_end_of_phantoms_wakes_the_queue_only_if_it_is_the_first_to_come() -> None:
    desk = Desk(2, HALVES, longest_wait_seconds=10.0)
    desk.pool.add_phantoms("B", 1, until=60.0)
    desk.submit("A", 2)
    desk.submit("B")
    assert desk.queue.next_deadline() == 10.0
    desk.pool.add_phantoms("B", 1, until=5.0)
    assert desk.queue.next_deadline() == 5.0


# Fallback


def test_when_a_guest_ends_the_fallbacks_own_goes_also_if_the_home_has_changed() -> None:
    spare = Desk(2, {"S": "1/2"}, name="spare")
    desk = Desk(4, HALVES, fallback=spare)
    desk.submit("A", 5)
    assert spare.submit("S", 2) == ["own S1", "hold S2"]
    desk.pool.charge("A", 1.0)
    assert desk.release("A5") == ["borrow S2 in spare"]


def test_a_request_with_state_does_not_leave_for_the_fallback() -> None:
    spare = Desk(2, {"S": 1}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare)
    assert desk.submit("A") + desk.submit("A", state_instance="e0") == ["own A1", "hold A2"]


def test_guests_count_in_the_order_of_batch_and_interactive() -> None:
    # Every third request of the team is batch, wherever it goes.
    spare = Desk(9, {"S": 1}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare, batch_every=3)
    spare.submit("S", 9)
    desk.submit("A")
    desk.submit("A", 2, of=BATCH)
    desk.submit("A", 5)
    assert spare.release(*(f"S{n}" for n in range(1, 6))) == [f"borrow A{n}" for n in (4, 2, 5, 6, 3)]


def test_in_pass_all_that_wait_go_to_the_fallback_when_it_grows() -> None:
    spare = Desk(1, {"S": 1}, name="spare", mode=Mode.PASS)
    desk = Desk(0, HALVES, mode=Mode.PASS, fallback=spare, instances=[])
    spare.submit("S")
    assert desk.submit("A", 2) == hold("A", 1, 2)
    assert spare.set_capacity(3) == borrow("A", 1, 2)


# Instances


def test_a_request_whose_instance_failed_goes_where_its_team_holds_the_smallest_part() -> None:
    instances = [Instance(id=f"e{n}", part_slots=8, seats=8) for n in range(3)]
    desk = Desk(24, HALVES, instances=instances)
    assert desk.submit("A", preferred_instances=["e0"]) == ["own A1 @e0"]
    assert desk.submit("A", preferred_instances=["e1"]) == ["own A2 @e1"]
    for _ in range(2):
        desk.submit("B", state_instance="e2")
    assert desk.queue.reassigned("A1", frozenset()) == "e2"


# Inside a team


def line_of(*requests: tuple[int, int]) -> Line:
    """Recalled requests, each (sequence, slots), in the order in which they were taken back."""
    queue, line = HoldQueue(Pool("pool", 1, {}, None)), Line()
    for sequence, slots in requests:
        entry = Entry(Request(id=str(sequence), team="A", slots=slots), queue, sequence)
        entry.recalled = True
        line.add(entry)
    return line


def test_of_recalled_requests_the_one_sent_first_goes_first_of_those_that_fit_too() -> None:
    line = line_of((3, 1), (2, 1), (1, 4))
    assert [entry.sequence for entry in (line.first(), line.first(1)) if entry is not None] == [1, 2]


def test_a_wide_request_that_was_taken_back_does_not_use_whole_slots_it_does_not_fit_in() -> None:
    desk = Desk(4, HALVES, seats=4)
    assert desk.submit("A", 2) + desk.submit("A", slots=2) + desk.submit("A") == [
        *own("A", 1, 2),
        "borrow A3",
        "hold A4",
    ]
    assert desk.submit("B", 2) == ["recall A3", *own("B", 1, 2)]
    assert desk.release("A1") == ["own A4"]


def test_a_wide_batch_request_at_its_turn_does_not_use_whole_slots_it_does_not_fit_in() -> None:
    desk = Desk(4, HALVES, batch_every=3)
    desk.submit("A", 2)  # the next is the turn of batch
    assert desk.submit("B") + desk.submit("B", slots=2) == ["own B1", "own B2"]
    assert desk.submit("A", slots=2, of=BATCH) + desk.submit("A") == hold("A", 3, 4)
    assert desk.release("A1") == ["own A4"]  # four slots are taken still


# What a team is owed for wide requests


def test_a_narrow_request_that_fits_is_no_wide_one_though_a_wide_one_waits_behind_it() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", 4)
    desk.submit("B", 4)
    assert desk.submit("A") + desk.submit("A", slots=3) == hold("A", 5, 6)
    assert desk.release("A1") == ["own A5"]
    assert desk.queue._teams["A"].wide_slots == 0


def test_a_wide_request_behind_narrow_ones_is_noticed() -> None:
    desk = Desk(2, HALVES)
    assert desk.submit("A", 3) + desk.submit("A", slots=2) == ["own A1", "borrow A2", *hold("A", 3, 4)]
    assert desk.queue._teams["A"].wide_waits


def test_borrowing_is_no_debt_of_wide_requests() -> None:
    desk = Desk(16, {"A": "1/4", "B": "3/4"})
    desk.submit("A", 3)
    assert desk.submit("A", slots=2) + desk.submit("A", 4) == ["own A4", *borrow("A", 5, 8)]
    assert desk.queue._credit(desk.queue._teams["A"], 10.0) == -2 * 10.0


def test_wide_requests_that_run_at_the_same_time_add_up() -> None:
    desk = Desk(8, HALVES)
    assert desk.submit("A", slots=6) == ["own A1"]
    assert desk.set_capacity(16) == []
    assert desk.submit("A", slots=4) == ["own A2"]
    assert desk.queue._teams["A"].wide_slots == 10


def test_who_has_no_whole_slots_any_more_owes_and_is_owed_nothing() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", slots=6)
    desk.time.now = 10.0
    desk.set_shares({"B": 1})
    team = desk.queue._teams["A"]
    assert (team.credit_slot_seconds, team.credit_rate_slots) == (0.0, 0.0)
    desk.release("A1")
    assert "A" not in desk.queue._teams


def test_when_nothing_is_owed_any_more_nothing_grows() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 8)
    assert desk.submit("A", slots=6) == ["hold A1"]
    desk.cancel("A1")
    team = desk.queue._teams["A"]
    assert (team.credit_slot_seconds, team.credit_rate_slots, team.wide_counts) == (0.0, 0.0, False)


def test_half_a_slot_second_is_owed_too() -> None:
    desk = Desk(8, HALVES)
    desk.submit("B", 8)
    desk.submit("A", slots=6)
    desk.time.now = 0.125
    assert desk.submit("A", slots=6) == ["hold A2"]
    assert desk.queue._teams["A"].credit_slot_seconds == 0.5


def test_a_debt_that_is_being_paid_while_nothing_can_be_used_ends_at_nothing() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", slots=5)
    desk.submit("B", 8)
    desk.time.now = 1.0
    assert desk.submit("A", slots=5) == ["hold A2"]
    assert desk.release("A1") == borrow("B", 5, 8)
    assert desk.submit("A", 4) == own("A", 3, 6)
    assert desk.queue._credit(desk.queue._teams["A"], 1000.0) == 0.0


def test_a_debt_that_is_paid_leaves_nothing_over() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", slots=5)
    desk.submit("B", 9)
    desk.time.now = 1.0
    assert desk.submit("A", slots=5) + desk.release("A1") == ["hold A2", *borrow("B", 5, 8)]
    assert desk.queue.next_deadline() == 1.25  # it owes one slot-second, and four slots are free for it
    assert desk.wait(0.25) == []  # but eight are taken
    assert desk.queue._teams["A"].credit_slot_seconds == 0.0


def test_a_debt_is_paid_from_the_end_of_the_wide_request_also_when_nobody_waits_then() -> None:
    desk = Desk(4, HALVES)
    desk.submit("A", slots=3)
    desk.time.now = 10.0
    desk.release("A1")
    desk.time.now = 12.0
    desk.submit("B", 5)
    desk.submit("A", slots=3)
    assert desk.queue.next_deadline() == 15.0  # ten seconds with one slot above its own, five with two below


def test_what_a_team_consumed_counts_for_the_weights_of_others_at_once() -> None:
    desk = Desk(4, dict.fromkeys("ABCS", "1/4"), borrow_order=WEIGHTED, half_life=1e12)
    for team, cost in (("B", 10.0), ("C", 20.0), ("A", 100.0)):
        desk.submit(team)
        desk.time.now += 1.0
        desk.release(f"{team}1", cost=cost)
    # Of 130 units B's LF is 3.25, so it borrows with twice its weight, and C's is 1.6: B moves back by less. Without
    # what A consumed, B's would have been 0.75.
    assert desk.submit("B", 2) == ["own B2", "borrow B3"]
    assert desk.submit("A") + desk.submit("C", 2) == ["own A2", "own C2", "hold C3"]
    assert desk.release("A2") == ["borrow C3"]
    assert desk.submit("C") + desk.submit("B") == ["hold C4", "hold B4"]
    assert desk.release("B2", "C2") == ["borrow B4", "borrow C4"]


def test_usage_from_before_the_queue_was_made_counts_for_the_weights_of_others() -> None:
    desk = Desk(4, dict.fromkeys("ABCS", "1/4"), half_life=1e12)
    for team, cost in (("B", 10.0), ("C", 20.0), ("A", 100.0)):
        desk.pool.set_usage(team, cost)
    options = HoldOptions(borrow_order=WEIGHTED)
    desk.queue = make_queue(desk.pool, Mode.HOLD, options=options, instances=desk.queue.instances())
    assert desk.submit("B", 2) == ["own B1", "borrow B2"]  # with twice its weight, as in the test above
    assert desk.submit("S") + desk.submit("C", 2) == ["own S1", "own C1", "hold C2"]
    desk.time.now = 1.0
    assert desk.release("S1") == ["borrow C2"]
    assert desk.submit("C") + desk.submit("B") == ["hold C3", "hold B3"]
    assert desk.release("B1", "C1") == ["borrow B3", "borrow C3"]


def test_a_wide_request_that_leaves_is_waited_for_no_longer() -> None:
    desk = Desk(8, HALVES)
    desk.submit("A", slots=6)
    desk.submit("B", 8)
    desk.time.now = 10.0
    desk.submit("A", slots=6)
    desk.release("A1")
    due = desk.queue.next_deadline()
    assert due is not None
    desk.cancel("A2")
    desk.time.now = due + 1.0
    assert desk.submit("B") == ["hold B9"]
    assert not desk.queue._wide_due.priorities


# Weights


def test_weighted_knows_consumption_of_less_than_one_cost_unit() -> None:
    desk = Desk(8, HALVES, borrow_order=WEIGHTED)
    for team in HALVES:
        desk.pool.set_usage(team, 0.5)
    desk.note(desk.queue.tick())
    assert desk.queue._level_fairshare(desk.queue._team("A")) == 1.0


# Changes while it runs


def test_a_tag_goes_on_from_where_it_was_if_its_team_owned_something_before_a_change() -> None:
    desk = Desk(1, HALVES)
    desk.submit("A")
    desk.submit("B")
    desk.queue._turn_virtual_time, desk.queue._borrow_virtual_time = 7.0, 9.0
    desk.set_capacity(3)
    teams = desk.queue._teams
    assert [(teams[name].turn_floor, teams[name].borrow_floor) for name in HALVES] == [(0.0, 0.0)] * 2
    desk.set_shares({"A": "1/2"})
    desk.set_shares(HALVES)
    assert [(teams[name].turn_floor, teams[name].borrow_floor) for name in HALVES] == [(0.0, 0.0), (7.0, 9.0)]


def test_the_budget_of_recalls_grows_with_time_and_not_with_questions() -> None:
    queue = Desk(10, HALVES).queue
    queue._waste_slot_seconds = 5.0
    queue._fill_waste(0.0)
    assert queue._waste_slot_seconds == 5.0
    queue._fill_waste(0.5)
    assert queue._waste_slot_seconds == 5.5


# What runs already


def test_what_is_adopted_counts_with_the_standing_it_has() -> None:
    desk = Desk(4, HALVES, seats=4)
    for number in range(3):
        request = Request(id=f"A{number}", team="A", slots=1, estimated_tokens=7)
        said = desk.queue.adopted(
            request,
            instance_id="e0",
            priority=[0, 1, 31][number],
            standing=Standing.BORROWING if number == 2 else Standing.WITHIN_SHARE,
            began=number == 0,
        )
        assert said == []
    assert [(s.in_flight, s.borrowing, s.in_flight_tokens) for s in desk.pool.snapshot()] == [(3, 1, 21), (0, 0, 0)]
    assert [entry.grant.priority for entry in desk.queue._entries.values()] == [0, 1, 31]
    assert list(desk.queue._teams["A"].recallable) == ["A1", "A2"]
    desk.time.now = 2.0
    assert desk.submit("B", 2) == ["own B1", "recall A2", "own B2"]
    assert desk.release("A0", "A1") == ["own A2"]
    assert desk.queue._expected_seconds(desk.queue._teams["A"]) == 2.0


def test_what_is_adopted_may_run_where_nothing_is_known_of_and_says_no_priority() -> None:
    desk = Desk(2, HALVES)
    request = Request(id="A1", team="A")
    desk.queue.adopted(request, instance_id="gone", priority=None, standing=Standing.WITHIN_SHARE, began=True)
    stats = desk.queue.snapshot().instances
    assert [(stat.id, stat.in_flight_slots, stat.accepting) for stat in stats] == [("e0", 0, True), ("gone", 1, False)]
    assert desk.queue._entries["A1"].grant.priority == 0
    with pytest.raises(ValueError, match="'A1' was submitted already"):
        desk.queue.adopted(request, instance_id="e0", priority=0, standing=Standing.BORROWING, began=True)
    assert desk.release("A1") == []
    assert [stat.id for stat in desk.queue.snapshot().instances] == ["e0"]


def test_what_waits_may_go_or_be_refused_when_something_is_adopted() -> None:
    desk = Desk(1, {"A": 1}, longest_wait_seconds=60.0)
    desk.submit("A", 2)
    desk.time.now = 60.0
    said = desk.queue.adopted(
        Request(id="A3", team="A"), instance_id="e0", priority=11, standing=Standing.BORROWING, began=True
    )
    assert desk.note(said) == ["refuse A2"]


def test_an_observing_queue_adopts_in_its_shadow_too() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE)
    desk.queue.adopted(
        Request(id="A1", team="A"), instance_id="e0", priority=11, standing=Standing.BORROWING, began=False
    )
    for pool, queue in ((desk.pool, desk.queue.through), (desk.queue._shadow_pool, desk.queue._shadow)):
        assert [(stat.in_flight, stat.borrowing) for stat in pool.snapshot()] == [(1, 1), (0, 0)]
        assert queue._entries["A1"].grant.priority == 11
        assert list(queue._teams["A"].recallable) == ["A1"]
        assert [stat.in_flight_slots for stat in queue.snapshot().instances] == [1]


def test_what_is_adopted_above_the_whole_slots_of_its_team_holds_its_turn() -> None:
    desk = Desk(3, HALVES)

    def adopt(name: str, standing: Standing, slots: int = 1) -> None:
        request = Request(id=name, team="A", slots=slots)
        desk.queue.adopted(request, instance_id="e0", priority=0, standing=standing, began=False)

    adopt("borrows", Standing.BORROWING, slots=2)
    adopt("own", Standing.WITHIN_SHARE)
    assert desk.queue.snapshot().turns_taken == 0
    adopt("turn", Standing.WITHIN_SHARE)
    team = desk.queue._teams["A"]
    assert (desk.queue.snapshot().turns_taken, desk.queue._turn_held_slots, team.turn_slots) == (1, 1, 1)
    assert [stat.in_flight for stat in desk.pool.snapshot()] == [4, 0]
    assert [entry.sequence for entry in desk.queue._entries.values()] == [0, 1, 2]
    desk.time.now = 2.0
    desk.release("turn", "own", "borrows")
    assert (desk.queue.snapshot().turns_taken, team.turn_slots, team.turn_end_tag) == (0, 0, 2.0 / 0.5)


def test_a_turn_that_phantoms_may_hold_is_not_given_away() -> None:
    desk = Desk(3, HALVES)
    desk.pool.add_phantoms("A", 2, until=60.0)
    assert desk.submit("B", 2) == ["own B1", "borrow B2"]
    desk.release("B2")
    desk.pool.drop_phantom("A")  # what is left fits in its whole slot
    assert desk.submit("B") == ["own B3"]


def test_phantoms_are_counted_where_something_changed_and_not_by_looking_at_every_team() -> None:
    desk = Desk(3, {"A": "1/2", "B": "1/4"} | {f"team{number}": "1/8000" for number in range(2000)})
    desk.pool.add_phantoms("A", 2, until=60.0)
    desk.pool.add_phantoms("team7", 1, until=60.0)
    desk.submit("B", 2)
    assert set(desk.queue._teams) == {"A", "B", "team7"}
    assert desk.queue._phantom_turns == 2
    desk.time.now = 60.0
    desk.queue.tick()
    assert desk.queue._phantom_turns == 0


def test_phantoms_of_before_the_queue_was_there_and_of_other_shares_are_counted() -> None:
    desk = Desk(3, HALVES)
    desk.pool.add_phantoms("A", 2, until=60.0)
    desk.queue = make_queue(desk.pool, Mode.HOLD, instances=[Instance(id="e0", part_slots=3)])
    assert desk.submit("B", 2) == ["own B1", "borrow B2"]
    desk.set_shares({"A": "2/3", "B": "1/3"})
    assert desk.queue._phantom_turns == 0
    desk.set_shares(HALVES)
    assert desk.queue._phantom_turns == 1
    desk.set_shares({"B": 1})
    assert desk.queue._phantom_turns == 0


def test_a_turn_that_phantoms_held_is_free_when_its_team_has_less_in_flight() -> None:
    desk = Desk(3, HALVES)
    desk.submit("A")
    desk.pool.add_phantoms("A", 1, until=60.0)
    assert desk.submit("B", 2) == ["own B1", "borrow B2"]
    desk.release("A1")
    assert desk.submit("B") == ["own B3"]


def test_a_fallback_for_which_nobody_waits_has_no_deadline() -> None:
    spare = Desk(1, {"S": 1}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare)
    assert (spare.queue.next_deadline(), desk.queue.next_deadline()) == (None, None)
