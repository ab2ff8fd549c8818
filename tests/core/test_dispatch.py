"""The modes beside `hold`: `pass` stamps on arrival, `observe` stamps nothing and counts what `hold` would do."""

import pytest

from fairshare import Pool
from fairshare.core.decisions import Instance, Mode
from fairshare.core.dispatch import make_queue
from support.desk import BATCH, Desk, borrow, own

HALVES = {"A": "1/2", "B": "1/2"}


def test_pass_sends_everything_at_once_with_the_standing_it_has_on_arrival() -> None:
    desk = Desk(4, HALVES, mode=Mode.PASS)
    assert desk.submit("A", 7) == own("A", 1, 2) + borrow("A", 3, 7)
    assert desk.submit("B", 3) == own("B", 1, 2) + borrow("B", 3, 3)
    assert desk.pool.live_slots == 10
    assert (desk.sends["A7"].priority, desk.sends["B1"].priority) == (10, 0)


def test_pass_counts_what_waits_at_the_engine_so_a_backlog_makes_every_request_a_borrower() -> None:
    desk = Desk(4, HALVES, mode=Mode.PASS)
    desk.submit("B", 4)
    for number in range(5, 50):
        desk.release(f"B{number - 4}")
        assert desk.submit("B") == [f"borrow B{number}"]


def test_pass_stamps_with_the_seeds_reservation_where_fractions_are_whole_slots() -> None:
    desk = Desk(1, HALVES, mode=Mode.PASS)
    assert desk.submit("B") + desk.submit("A") == ["borrow B1", "own A1"]


def test_pass_counts_phantoms_and_width_in_the_within_share_test() -> None:
    desk = Desk(8, HALVES, mode=Mode.PASS)
    desk.pool.add_phantoms("A", 1, until=60.0)
    assert desk.submit("A", slots=4) == ["borrow A1"]
    assert desk.submit("B", slots=4) == ["own B1"]


def test_pass_stamps_rank_and_class() -> None:
    desk = Desk(2, HALVES, mode=Mode.PASS)
    desk.pool.set_usage("A", 5.0)
    desk.submit("A", 2, of=BATCH)
    assert [desk.sends[i].priority for i in ("A1", "A2")] == [1, 21]


def test_pass_takes_nobody_back() -> None:
    desk = Desk(2, HALVES, mode=Mode.PASS, seats=2)
    desk.submit("A", 9)
    assert desk.submit("B", 2) == ["own B1", "borrow B2"]
    assert desk.queue.snapshot().recalls_total == 0


def test_pass_charges_what_was_consumed_once() -> None:
    desk = Desk(2, HALVES, mode=Mode.PASS)
    desk.submit("A")
    assert desk.release("A1", cost=3.0) + desk.release("A1", cost=3.0) == []
    assert desk.pool.usage() == ({"A": 3.0, "B": 0.0}, {"A": 0, "B": 0})


def test_pass_refuses_without_an_instance() -> None:
    assert Desk(2, HALVES, mode=Mode.PASS, instances=[]).submit("A") == ["refuse A1"]


def test_pass_uses_the_fallback_pool_for_a_borrower_without_room() -> None:
    spare = Desk(1, {"S": 1}, name="spare", mode=Mode.PASS)
    desk = Desk(2, HALVES, mode=Mode.PASS, fallback=spare)
    assert desk.submit("A", 4) == ["own A1", "borrow A2", "borrow A3 in spare", "borrow A4"]
    assert desk.submit("B") == ["own B1"]


def test_pass_leaves_nothing_of_made_up_names() -> None:
    desk = Desk(2, HALVES, mode=Mode.PASS)
    for number in range(1000):
        desk.submit(f"name {number}", name="x")
        desk.release("x")
    assert set(desk.queue._teams) <= {"A", "B"}


def test_a_fallback_in_pass_keeps_no_names_of_its_guests() -> None:
    spare = Desk(4, {"S": 1}, name="spare", mode=Mode.PASS)
    chat = Desk(1, {"A": 1}, fallback=spare)
    chat.submit("A")
    for number in range(100):
        assert chat.submit(f"x{number}", name="guest") == ["borrow guest in spare"]
        chat.release("guest")
    assert spare.queue._above.priorities == {}


def test_observe_sends_everything_without_a_priority_and_shows_what_hold_would_hold() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE)
    assert desk.submit("A", 4) == ["own A1", *borrow("A", 2, 4)]
    assert {send.priority for send in desk.sends.values()} == {None}
    stat = desk.queue.snapshot()
    assert (stat.mode, stat.held, [(team.team, team.held) for team in stat.teams]) == (Mode.OBSERVE, 2, [("A", 2)])
    assert stat.instances[0].in_flight_slots == 4
    desk.release("A1", "A3")
    assert desk.queue.snapshot().held == 0


def test_observe_sends_a_request_to_another_instance_when_its_own_fails() -> None:
    desk = Desk(4, HALVES, mode=Mode.OBSERVE, instances=[Instance(id=f"e{n}", part_slots=2) for n in range(2)])
    (sent,) = desk.submit("A")
    other = "e1" if sent.endswith("e0") else "e0"
    assert desk.queue.reassigned("A1", frozenset()) == other


def test_observe_counts_the_recalls_that_hold_would_have_made() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE, seats=2)
    desk.submit("A", 2)
    desk.time.now = 1.0
    assert desk.submit("B") == ["own B1"]
    stat = desk.queue.snapshot()
    assert (stat.recalls_total, stat.recalled_slot_seconds_total, stat.held) == (1, 1.0, 1)


def test_observe_takes_nobody_back_that_has_begun_in_its_shadow_either() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE, seats=2)
    desk.submit("A", 2)
    desk.first_byte("A1", "A2")
    desk.submit("B")
    assert desk.queue.snapshot().recalls_total == 0


def test_observe_charges_the_pool_and_its_shadow_alike() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE)
    desk.submit("A", 4)
    desk.release("A1", "A4", cost=2.0)  # A4 would still be held
    assert desk.queue.snapshot().held == 0
    assert desk.pool.usage()[0]["A"] == 4.0
    assert desk.queue._shadow_pool.usage()[0]["A"] == 4.0


def test_observe_follows_capacity_shares_and_usage() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE)
    desk.submit("A", 6)
    desk.pool.set_usage("B", 7.0)
    desk.set_capacity(4)
    assert desk.queue.snapshot().held == 2
    assert desk.queue._shadow_pool.usage()[0]["B"] == 7.0
    desk.set_shares({"C": 1})
    assert desk.queue._shadow_pool.reserved() == {"C": 4}


def test_observe_follows_the_half_life_and_what_engines_report() -> None:
    instances = [Instance(id="e0", part_slots=2), Instance(id="e1", part_slots=2)]
    desk = Desk(4, HALVES, mode=Mode.OBSERVE, instances=instances, half_life=60.0)
    desk.pool.set_half_life(3600.0)
    desk.queue.capacity_changed()
    assert desk.queue._shadow_pool.half_life_seconds == 3600.0
    desk.queue.running_seen("e0", 4)
    desk.queue.instance_removed("e1")
    assert [(stat.id, stat.seats) for stat in desk.queue._shadow.snapshot().instances] == [("e0", 4)]


def test_observe_refuses_without_an_instance_and_follows_those_that_come_and_go() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE, instances=[])
    assert desk.submit("A") == ["refuse A1"]
    desk.instance("e0", 2)
    assert desk.submit("A") == ["own A2"]
    desk.queue.instance_removed("e0")
    assert desk.submit("A") == ["refuse A3"]


def test_observe_is_woken_for_its_shadow() -> None:
    desk = Desk(1, {"A": 1}, mode=Mode.OBSERVE, longest_wait_seconds=60.0)
    desk.submit("A", 2)
    assert desk.queue.next_deadline() == 60.0
    assert desk.wait(60.0) == []
    assert desk.queue.snapshot().held == 0


@pytest.mark.parametrize("mode", [Mode.PASS, Mode.OBSERVE])
def test_nothing_is_held_aborted_or_unknown_outside_of_hold(mode: Mode) -> None:
    desk = Desk(1, {"A": 1}, mode=mode)
    desk.submit("A", 2)
    assert desk.cancel("A2") + desk.aborted("A2") + desk.release("nobody") + desk.cancel("nobody") == []
    assert desk.in_flight("A") == 2
    assert desk.queue.running_seen("e0", 5) == []
    assert desk.queue.reassigned("A1", frozenset()) is None


def test_a_pool_that_observes_cannot_be_a_fallback() -> None:
    spare = Desk(1, {"S": 1}, name="spare", mode=Mode.OBSERVE)
    with pytest.raises(ValueError, match="'spare' is in mode observe and cannot be the fallback of 'chat'"):
        Desk(1, HALVES, fallback=spare)


@pytest.mark.parametrize("mode", Mode)
def test_a_queue_says_its_mode_and_its_pool(mode: Mode) -> None:
    pool = Pool("p", 1, {"A": 1}, 0.0, clock=lambda: 0.0)
    queue = make_queue(pool, mode, instances=[Instance(id="e0", part_slots=1)])
    assert (queue.mode, queue.pool, queue.snapshot().mode) == (mode, pool, mode)


def test_observe_shows_seats_of_recalled_requests_as_free_after_the_grace() -> None:
    desk = Desk(2, HALVES, mode=Mode.OBSERVE, seats=2)
    desk.submit("A", 2)
    desk.submit("B")
    assert desk.queue.snapshot().held == 1
    desk.time.now = 1.0
    desk.release("B1")
    assert desk.queue.snapshot().held == 0


def test_observe_decays_in_its_shadow_too_and_shows_the_seats_that_engines_reported() -> None:
    instances = [Instance(id="e0", part_slots=2)]
    desk = Desk(2, HALVES, mode=Mode.OBSERVE, half_life=60.0, instances=instances)
    assert desk.queue._shadow_pool.half_life_seconds == 60.0
    desk.queue.running_seen("e0", 5)
    assert [stat.seats for stat in desk.queue.snapshot().instances] == [5]
