"""The short ways of the hold queue decide exactly as the long way does."""

import pytest

from fairshare import Pool
from fairshare.core.decisions import HoldOptions, Instance, Request
from fairshare.core.hold import HoldQueue
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
