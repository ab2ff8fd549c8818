"""What a request costs does not grow with the teams, with what is held or with the instances: counted in calls."""

import random
import sys
from collections.abc import Callable
from fractions import Fraction
from types import FrameType

import pytest

from fairshare import Pool
from fairshare.core.decisions import BorrowOrder, HoldOptions, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue

REQUESTS = 300


def calls(work: Callable[[], object]) -> int:
    """How many functions it calls, those in C too."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def ticking() -> Callable[[], float]:
    """A clock that moves a millisecond at every reading."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    return clock


def pool_of(teams: int, capacity: int) -> Pool:
    return Pool("pool", capacity, {f"t{number}": Fraction(1, teams) for number in range(teams)}, 3600.0, ticking())


def test_acquire_and_release_cost_the_same_with_fifty_times_the_teams() -> None:
    def cost(teams: int) -> int:
        pool, rng = pool_of(teams, 16), random.Random(1)
        pool.rank("t0")

        def work() -> None:
            for _ in range(REQUESTS):
                pool.acquire(f"t{rng.randrange(teams)}").release(rng.random())

        return calls(work)

    assert cost(5_000) < 1.2 * cost(100)


@pytest.mark.parametrize("order", BorrowOrder)
def test_dispatch_costs_the_same_with_fifty_times_the_teams_and_the_held_requests(order: BorrowOrder) -> None:
    def cost(teams: int, instances: int) -> int:
        pool, rng = pool_of(teams, 16), random.Random(1)
        queue = make_queue(
            pool,
            Mode.HOLD,
            options=HoldOptions(borrow_order=order),
            instances=[Instance(id=f"e{number}", part_slots=1, seats=2) for number in range(instances)],
        )
        running: list[str] = []

        def submit(number: int) -> None:
            decisions = queue.submitted(Request(id=str(number), team=f"t{rng.randrange(teams)}"))
            running.extend(decision.request_id for decision in decisions if isinstance(decision, Send))

        for number in range(16 + teams // 2):  # half of the teams hold a request
            submit(number)

        def work() -> None:
            for number in range(REQUESTS):
                submit(100_000 + number)
                decisions = queue.released(running.pop(0), rng.random())
                running.extend(decision.request_id for decision in decisions if isinstance(decision, Send))

        return calls(work)

    assert cost(5_000, 400) < 1.2 * cost(100, 20)
