"""A reload changes how a pool dispatches: what is held and what runs stays where it is, and counts as it did."""

import pytest

from fairshare.core.decisions import BorrowOrder, Instance, Mode, Request
from fairshare.core.priority import Standing
from support.desk import BATCH, Desk, borrow, hold, own

HALVES = {"A": "1/2", "B": "1/2"}


def test_a_turn_that_was_given_is_not_given_again() -> None:
    desk = Desk(1, HALVES)
    assert desk.submit("A", 2) + desk.submit("B") == ["own A1", "hold A2", "hold B1"]
    assert desk.redispatch(recall=False) == []
    assert desk.queue.snapshot().turns_taken == 1
    desk.time.now = 10.0
    assert desk.release("A1") == ["own B1"]


def test_tags_go_on_so_that_nobody_gets_two_turns_in_a_row() -> None:
    desk = Desk(1, HALVES)
    desk.submit("A", 3)
    desk.submit("B", 2)
    desk.time.now = 10.0
    assert desk.release("A1") == ["own B1"]
    desk.redispatch(recall=False)
    desk.time.now = 20.0
    assert desk.release("B1") == ["own A2"]


def test_the_longest_wait_goes_on_and_follows_the_new_bound() -> None:
    desk = Desk(1, {"A": 1}, longest_wait_seconds=60.0)
    desk.submit("A", 2)
    desk.time.now = 50.0
    assert desk.redispatch(longest_wait_seconds=60.0) == []
    assert desk.queue.next_deadline() == 60.0
    desk.redispatch(longest_wait_seconds=100.0)
    assert desk.queue.next_deadline() == 100.0
    assert desk.redispatch(longest_wait_seconds=40.0) == ["refuse A2"]


def test_a_recalled_request_that_waits_follows_the_new_bound_too() -> None:
    desk = Desk(2, HALVES, seats=2, abort_grace_seconds=0.0, longest_wait_seconds=60.0)
    desk.submit("A", 3)
    desk.time.now = 10.0
    assert desk.submit("B") == ["recall A2", "own B1"]
    desk.redispatch(longest_wait_seconds=30.0)
    assert desk.wait(20.0) == ["refuse A3"]
    assert desk.wait(9.0) == []
    assert desk.wait(1.0) == ["refuse A2"]


def test_instances_keep_what_runs_there_and_what_may_be_taken_back_may_be_taken_back() -> None:
    desk = Desk(4, HALVES, instances=[Instance(id=f"e{n}", part_slots=2, seats=2) for n in range(2)])
    desk.submit("A", 5)
    desk.redispatch(recall=False)
    assert [stat.in_flight_slots for stat in desk.queue.snapshot().instances] == [2, 2]
    desk.redispatch()
    assert desk.submit("B") == ["recall A4", "own B1 @e1"]


def test_the_order_among_borrowers_changes_at_once() -> None:
    desk = Desk(20, {"A": "1/40", "B": "1/40"})
    desk.submit("X", 20)
    desk.pool.set_usage("A", 100.0)
    desk.pool.set_usage("B", 1.0)
    desk.submit("A", 9)
    desk.submit("B", 9)
    desk.time.now = 10.0
    assert desk.release("X1", "X2", "X3", "X4") == borrow("B", 1, 3)
    desk.redispatch(borrow_order=BorrowOrder.WEIGHTED)
    said = desk.release("X5", "X6", "X7", "X8", "X9", "X10")
    assert sorted({word.split()[1][0] for word in said}) == ["A", "B"]


def test_what_was_borrowed_by_rank_moves_no_tag_of_the_weighted_order() -> None:
    desk = Desk(4, {"S": "1/2", "A": "1/4", "B": "1/4"})
    assert desk.submit("A", 2) == ["own A1", "borrow A2"]
    desk.time.now = 100.0
    desk.release("A2")
    desk.redispatch(borrow_order=BorrowOrder.WEIGHTED)
    desk.submit("S", 4)
    assert desk.submit("A") + desk.submit("B", 2) == ["hold A3", "own B1", "hold B2"]
    assert desk.release("S1", "S2", "S3", "S4") == ["own S4", "borrow A3", "borrow B2"]


def test_a_pool_that_falls_back_elsewhere_leaves_its_old_fallback_and_its_guests_there_end_as_they_would() -> None:
    first = Desk(1, {"S": 1}, seats=1, name="first", abort_grace_seconds=0.0)
    second = Desk(1, {"S": 1}, name="second")
    second.time = second.pool._clock = first.time  # type: ignore[assignment]
    desk = Desk(1, {"A": 1}, fallback=first)
    assert desk.submit("A", 3) == ["own A1", "borrow A2 in first", "hold A3"]
    assert desk.redispatch(fallback=second) == ["borrow A3 in second"]
    assert first.queue._guests == ()
    assert first.submit("S") == ["recall A2", "own S1"]
    assert first.release("S1") == []
    assert [stat.aborting_slots for stat in first.queue.snapshot().instances] == [1]
    desk.aborted("A2")
    assert [stat.aborting_slots for stat in first.queue.snapshot().instances] == [0]
    assert desk.held() == 1
    assert desk.redispatch(fallback=first) == ["borrow A2 in first"]
    desk.redispatch()
    assert first.queue._guests == second.queue._guests == ()
    assert desk.release("A2", "A3", "A1") == []
    assert (first.pool.live_slots, second.pool.live_slots, desk.pool.live_slots) == (0, 0, 0)


def test_a_pool_that_leaves_or_joins_a_fallback_leaves_its_other_guests_there() -> None:
    spare = Desk(1, {"S": 1}, name="spare")
    staying, moving = Desk(1, {"A": 1}, fallback=spare), Desk(1, {"B": 1}, fallback=spare)
    spare.submit("S")
    assert staying.submit("A", 2) == ["own A1", "hold A2"]
    moving.redispatch()
    assert spare.release("S1") == ["borrow A2"]
    assert moving.submit("B", 2) == ["own B1", "hold B2"]
    assert moving.redispatch(fallback=spare) == []
    assert staying.submit("A") == ["hold A3"]
    assert staying.release("A2") == ["borrow A3 in spare"]
    assert staying.release("A3") == ["borrow B2 in spare"]


def test_from_hold_to_pass_everything_goes() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 4)
    desk.submit("A", of=BATCH)
    assert desk.redispatch(Mode.PASS) == borrow("A", 3, 5)
    assert desk.queue.mode is Mode.PASS
    assert desk.submit("B") == ["own B1"]


def test_from_pass_to_hold_what_runs_above_the_whole_slots_holds_its_turn() -> None:
    desk = Desk(3, HALVES, mode=Mode.PASS)
    assert desk.submit("A", 4) == [*own("A", 1, 2), *borrow("A", 3, 4)]
    assert desk.redispatch() == []
    assert desk.queue.snapshot().turns_taken == 1
    assert desk.submit("B", 2) == ["own B1", "hold B2"]
    assert desk.release("A2", "A1") == ["own B2"]


def test_after_hold_pass_and_hold_again_no_turn_is_given_until_fewer_are_held_than_there_are() -> None:
    desk = Desk(3, HALVES)
    assert desk.submit("B", 2) == own("B", 1, 2)  # B2 by the one turn
    desk.redispatch(Mode.PASS)
    assert desk.submit("A", 2) == own("A", 1, 2)  # pass rounds: A reserves 2 of the 3
    assert desk.redispatch() == []
    stat = desk.queue.snapshot()
    assert (stat.turn_slots, stat.turns_taken) == (1, 2)
    desk.submit("A")
    desk.submit("B")
    assert desk.release("B2") == []
    assert desk.release("A2") == ["own A3"]


@pytest.mark.parametrize("mode", [Mode.PASS, Mode.OBSERVE])
def test_what_a_wide_request_was_owed_is_forgotten_with_it(mode: Mode) -> None:
    desk = Desk(4, HALVES)
    desk.submit("B", 4)
    assert desk.submit("A", slots=3) == ["hold A1"]
    desk.redispatch(mode)
    desk.release("A1")
    desk.redispatch()
    assert desk.submit("B") == ["hold B5"]
    assert desk.release("B1") == ["borrow B5"]


def test_a_wide_request_that_ended_meanwhile_has_made_no_debt() -> None:
    desk = Desk(4, HALVES)
    assert desk.submit("A", slots=3) == ["own A1"]
    desk.redispatch(Mode.PASS)
    desk.time.now = 1.0
    desk.release("A1")
    desk.time.now = 1000.0
    desk.redispatch()
    desk.submit("B", 4)
    assert desk.submit("B") + desk.submit("A", slots=3) == ["hold B5", "hold A2"]
    assert desk.release("B1") == ["own A2"]


def test_from_hold_to_observe_and_back_nothing_is_lost() -> None:
    desk = Desk(2, HALVES)
    assert desk.submit("A", 4) == ["own A1", "borrow A2", *hold("A", 3, 4)]
    assert desk.redispatch(Mode.OBSERVE) == borrow("A", 3, 4)
    assert (desk.sends["A2"].priority, desk.sends["A3"].priority) == (10, None)
    assert desk.submit("A") == ["borrow A5"]
    assert desk.redispatch() == []
    assert desk.submit("A") == ["hold A6"]
    assert desk.submit("B") == ["recall A5", "own B1"]
    desk.aborted("A5")
    desk.release("A1", "A2", "A3", "A4", "A5", "A6", "B1")
    assert (desk.pool.live_slots, desk.held()) == (0, 0)


def test_what_observing_shows_goes_by_the_options_of_the_reload_and_by_the_seats_that_are_known() -> None:
    for recall, recalls in ((True, 1), (False, 0)):
        desk = Desk(2, HALVES, seats=2)
        desk.redispatch(Mode.OBSERVE, recall=recall)
        desk.submit("A", 2)
        desk.submit("B")
        assert desk.queue.snapshot().recalls_total == recalls


def test_what_ends_at_a_former_fallback_sends_that_pools_own_with_its_priority() -> None:
    spare = Desk(2, {"S": 1}, name="spare")
    desk = Desk(1, {"A": 1}, fallback=spare)
    assert desk.submit("A", 2) == ["own A1", "borrow A2 in spare"]
    assert spare.submit("X", 2) == ["borrow X1", "hold X2"]
    desk.redispatch(Mode.OBSERVE)
    assert desk.release("A2") == ["borrow X2 in spare"]
    assert desk.sends["X2"].priority == 100


def test_what_is_held_without_an_instance_is_sent_without_a_priority_when_one_comes() -> None:
    desk = Desk(2, HALVES, longest_wait_seconds=60.0)
    desk.submit("A", 4)
    desk.instance("e0", 2, accepting=False)
    assert desk.redispatch(Mode.OBSERVE) == []
    assert desk.queue.next_deadline() == 300.0
    assert desk.instance("e0", 2) == borrow("A", 3, 4)
    assert desk.sends["A3"].priority is None


def test_what_is_held_may_be_cancelled_while_the_pool_observes() -> None:
    desk = Desk(2, HALVES)
    desk.submit("A", 4)
    desk.instance("e0", 2, accepting=False)
    desk.redispatch(Mode.OBSERVE)
    assert desk.cancel("A3") == []
    assert desk.instance("e0", 2) == ["borrow A4"]


def test_the_seat_of_what_was_taken_back_before_the_pool_observes_is_free_when_its_abort_is_through() -> None:
    desk = Desk(2, HALVES, seats=2)
    desk.submit("A", 2)
    assert desk.submit("B") == ["recall A2", "own B1"]
    assert desk.redispatch(Mode.OBSERVE) == ["borrow A2"]
    desk.aborted("A2")
    desk.release("A1", "A2", "B1")
    desk.redispatch()
    desk.wait(5.0)
    assert desk.submit("A", 2) == ["own A3", "borrow A4"]


def test_what_begins_while_the_pool_observes_is_not_taken_back_after_it() -> None:
    for begun, taken_back in ((["A1", "A2"], []), (["A1"], ["recall A2"])):
        desk = Desk(2, HALVES, seats=2, mode=Mode.OBSERVE)
        desk.submit("A", 2)
        desk.first_byte(*begun)
        desk.redispatch()
        assert desk.submit("B") == [*taken_back, "own B1"]


@pytest.mark.parametrize("began", [True, False])
def test_what_a_pool_that_observes_adopts_is_taken_back_only_if_it_has_not_begun(began: bool) -> None:
    adopted = Request(id="A1", team="A")
    desk = Desk(2, {"B": 1}, seats=1, mode=Mode.OBSERVE)
    desk.queue.adopted(adopted, instance_id="e0", priority=None, standing=Standing.BORROWING, began=began)
    desk.submit("B")
    assert desk.queue.snapshot().recalls_total == (0 if began else 1)
    desk.release("B1")
    desk.redispatch()
    assert desk.submit("B") == [*([] if began else ["recall A1"]), "own B2"]


def test_a_reload_to_an_observing_fallback_is_refused() -> None:
    spare = Desk(1, {"S": 1}, name="spare", mode=Mode.OBSERVE)
    desk = Desk(1, {"A": 1})
    with pytest.raises(ValueError, match="'spare' is in mode observe"):
        desk.redispatch(fallback=spare)
