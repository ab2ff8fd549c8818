"""The short ways of the hold queue decide exactly as the long way does."""

import pytest

from fairshare import Pool
from fairshare.core.decisions import HoldOptions, Instance, Request
from fairshare.core.hold import HoldQueue
from support.desk import Desk
from support.two_pools import TwoPools


@pytest.mark.parametrize("seed", range(150))
def test_the_short_ways_decide_as_the_long_way_does(seed: int) -> None:
    short, long = TwoPools(seed), TwoPools(seed, long_way=True)
    for _ in range(120):
        short.event()
        long.event()
        assert short.log == long.log
        short.log.clear()
        long.log.clear()


def test_a_request_that_waited_too_long_is_gone_before_the_short_way_of_a_release() -> None:
    now = 0.0
    pool = Pool("pool", 2, {"red": "1/2", "blue": "1/2"}, None, clock=lambda: now)
    queue = HoldQueue(
        pool,
        options=HoldOptions(longest_wait_seconds=200.0),
        instances=[Instance(id="a", part_slots=2, seats=2)],
    )
    for number in range(3):
        queue.submitted(Request(id=str(number), team="red"))
    now = 250.0
    assert [type(decision).__name__ for decision in queue.released("0", 1.0)] == ["Refused"]
    assert queue.released("1", 1.0) == []
    assert queue.snapshot().held == 0


ROOMY = [Instance(id="e0", part_slots=10, seats=20)]


def test_an_owner_that_comes_when_phantoms_have_ended_does_not_hide_that_from_those_who_wait_for_it() -> None:
    desk = Desk(2, {"A": "1/2", "B": "1/2"}, instances=ROOMY)
    desk.submit("B")
    desk.release("B1")
    desk.pool.add_phantoms("A", 1, until=10.0)
    assert desk.submit("X", 2) + desk.submit("A") == ["borrow X1", "borrow X2", "hold A1"]
    desk.time.now = 10.0
    assert sorted(desk.submit("B")) == ["own A1", "own B2"]


def test_an_owner_that_comes_when_a_debt_of_the_turns_is_paid_does_not_delay_the_next_turn() -> None:
    desk = Desk(2, {"A": "1/4", "B": "1/4", "D": "1/2"}, instances=ROOMY)
    desk.submit("D")
    desk.time.now = 4.0
    desk.release("D1")
    desk.submit("X", 2)
    assert desk.submit("A", slots=3) + desk.submit("B") == ["own A1", "hold B1"]
    desk.time.now = 8.0
    assert desk.release("A1") == []
    assert desk.queue.next_deadline() == 16.0
    desk.time.now = 16.5
    assert sorted(desk.submit("D")) == ["own B1", "own D2"]
