"""What a failover leaves behind keeps its turns: a turn that may still be held is not given to another team."""

from fairshare import Pool
from fairshare.core.decisions import DispatchQueue, Instance, Request, Send
from fairshare.core.hold import HoldQueue
from fairshare.core.priority import Standing
from support.desk import Desk

SHARES = {"x": "1/2", "y": "5/16", "z": "3/16"}
"""Of 4 slots: 2, 1.25 and 0.75, so 3 whole slots and one turn, for which y and z compete."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of_four(clock: Clock) -> HoldQueue:
    pool = Pool("pool", 4, SHARES, None, clock=clock)
    return HoldQueue(pool, instances=[Instance(id="e0", part_slots=4, seats=8)])


def adopt(queue: DispatchQueue, team: str, count: int, standing: Standing = Standing.WITHIN_SHARE) -> None:
    for number in range(count):
        request = Request(f"old {team} {number}", team)
        queue.adopted(request, instance_id="e0", priority=0, standing=standing, began=True)


def within_share(queue: HoldQueue, team: str, count: int) -> int:
    """Submit so many requests of a team; how many go within share."""
    said = [decision for number in range(count) for decision in queue.submitted(Request(f"{team} {number}", team))]
    return sum(isinstance(each, Send) and each.standing is Standing.WITHIN_SHARE for each in said)


def test_an_adopted_request_above_its_teams_whole_slots_holds_the_turn() -> None:
    queue = queue_of_four(Clock())
    adopt(queue, "z", 1)
    assert queue.snapshot().turns_taken == 1
    assert within_share(queue, "x", 3) == 2
    assert within_share(queue, "y", 3) == 1
    assert queue.released("old z 0", 1.0)[0].request_id == "y 1"
    assert queue.snapshot().turns_taken == 1


def test_a_turn_that_ends_passes_on_to_what_its_team_still_runs_above_its_whole_slots() -> None:
    queue = queue_of_four(Clock())
    adopt(queue, "z", 2)
    assert within_share(queue, "x", 2) == 2
    queue.released("old z 0", 1.0)
    assert queue.snapshot().turns_taken == 1
    assert within_share(queue, "y", 2) == 1
    assert queue.released("old z 1", 1.0)[0].request_id == "y 1"


def test_a_turn_that_was_taken_over_is_paid_for_from_then_on() -> None:
    desk = Desk(1, {"A": "1/2", "B": "1/2"})
    desk.time.now = 100.0
    adopt(desk.queue, "A", 1)
    assert desk.submit("A") + desk.submit("B", 2) == ["hold A1", "hold B1", "hold B2"]
    desk.time.now = 110.0
    assert desk.release("old A 0") == ["own B1"]
    desk.time.now = 115.0
    assert desk.release("B1") == ["own B2"]  # it has used 5 slot-seconds, A 10
    desk.time.now = 125.0
    assert desk.release("B2") == ["own A1"]


def test_adopted_requests_within_whole_slots_hold_no_turn() -> None:
    queue = queue_of_four(Clock())
    adopt(queue, "x", 2)
    adopt(queue, "y", 1)
    assert queue.snapshot().turns_taken == 0
    assert within_share(queue, "z", 2) == 1


def test_an_adopted_borrower_holds_no_turn() -> None:
    queue = queue_of_four(Clock())
    adopt(queue, "z", 1, Standing.BORROWING)
    assert queue.snapshot().turns_taken == 0


def test_a_turn_that_a_phantom_may_hold_is_given_when_the_phantom_ends() -> None:
    clock = Clock()
    queue = queue_of_four(clock)
    queue.pool.add_phantoms("z", 1, until=10.0)
    assert within_share(queue, "x", 2) == 2
    assert within_share(queue, "y", 1) == 1
    adopt(queue, "stranger", 1, Standing.BORROWING)
    assert not any(isinstance(each, Send) for each in queue.submitted(Request("waits", "y")))
    clock.now = 10.0
    assert queue.next_deadline() == 10.0
    said = queue.tick()
    assert [(each.request_id, each.standing) for each in said if isinstance(each, Send)] == [
        ("waits", Standing.WITHIN_SHARE)
    ]


def test_a_phantom_of_whole_slots_leaves_the_turn_free() -> None:
    queue = queue_of_four(Clock())
    queue.pool.add_phantoms("x", 2, until=10.0)
    assert within_share(queue, "y", 1) == 1
    adopt(queue, "stranger", 3, Standing.BORROWING)
    assert within_share(queue, "z", 1) == 1


def test_phantoms_of_a_team_that_owns_whole_slots_only_hold_no_turn() -> None:
    queue = queue_of_four(Clock())
    queue.pool.add_phantoms("x", 3, until=10.0)
    adopt(queue, "stranger", 3, Standing.BORROWING)
    assert within_share(queue, "z", 1) == 1


def test_phantoms_of_several_teams_hold_a_turn_each() -> None:
    shares = {"p": "1/5", "q": "1/5", "r": "3/10", "s": "3/10"}  # of two slots nobody owns a whole one: two turns
    queue = HoldQueue(
        Pool("pool", 2, shares, None, clock=Clock()), instances=[Instance(id="e0", part_slots=2, seats=4)]
    )
    queue.pool.add_phantoms("p", 1, until=10.0)
    queue.pool.add_phantoms("q", 1, until=10.0)
    assert within_share(queue, "r", 1) == 0
