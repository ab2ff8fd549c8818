"""Why a request waited: from the moment of the decision, from the record, from the account; and who may know."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from dashboard.admin_port import Decided, Desk
from fairshare.core.decisions import Held, Send
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.explain import Everything, Explainer, Own
from fairshare.gateway.explain_header import explained, refused_after_waiting
from fairshare.gateway.identity import Identity
from fairshare.gateway.options import Level
from fairshare.storage.ledger import LedgerRow
from gateway.statuses import budget_status, instance_status, pool_status_of, team_status
from support.storing import row

EVERYTHING = Everything()
HELD = Held(
    request_id="r", team_held=3, team_in_flight_slots=8, reserved_slots=8, pool_in_flight_slots=16, capacity_slots=16
)


class Levels:
    def __init__(self, **levels: float) -> None:
        self._levels = levels

    def levels(self, pool: str, at: float) -> dict[str, float]:
        return self._levels


def explainer(
    desk: Desk,
    levels: Levels | None = None,
    written: list[LedgerRow] | None = None,
    clock: Callable[[], float] | None = None,
) -> Explainer:
    async def find(request_id: str) -> list[LedgerRow]:
        return [each for each in written or [] if each.request_id == request_id]

    return Explainer(
        log=desk.log,
        history=levels or Levels(),
        clock=time.monotonic if clock is None else clock,
        wall=time.time if clock is None else lambda: 1e6 + clock(),
        written=None if written is None else find,
    )


def desk() -> Desk:
    return Desk([pool_status_of("chat", teams=[team_status("red"), team_status("blue")])])


def own(team: str, *, key_id: str = "key", level: Level = Level.TEAM, organisation: str = "") -> Own:
    identity = Identity(key_id, team, ServiceClass.INTERACTIVE, organisation=organisation)
    return Own(identity, lambda pool: level if pool == "chat" else None, {"key": "red", "other": "green"}.get)


def sentences(explanation: Any) -> str:
    return " ".join(step.sentence for step in explanation.steps)


def test_a_request_that_waited_and_borrowed_is_told_in_order_with_the_numbers_of_the_moment() -> None:
    at = desk()
    at.waited("r", "red", usage={"red": 300.0, "blue": 100.0, "gold": 300.0})
    # What the level was a second ago is not asked.
    explanation = explainer(at, Levels(red=9.0, blue=8.0)).lately_seen("r", EVERYTHING)
    assert explanation is not None
    assert [step.what for step in explanation.steps] == ["arrived", "held", "sent", "ended"]
    told = sentences(explanation)
    assert "red had 8 slots in flight and owns 8 whole; 16 of the 16 slots of pool chat were taken" in told
    assert "2 requests of its own team waited before it" in told
    # A third each, of 700 used: 7/9 and 7/3. Its own expected cost counts from the next decision on.
    assert "Its rank was 1 (0: first in line, 9: last), its level fairshare 0.778." in told
    assert "Ahead of it for idle capacity: blue (2.33)." in told
    numbers = explanation.steps[2].numbers
    assert (numbers["rank"], numbers["level_fairshare"], numbers["teams_ahead"]) == (1, pytest.approx(7 / 9), 1)
    theirs = sentences(explainer(at).lately_seen("r", own("red")))
    assert "1 team used less of what they own." in theirs
    assert "blue" not in theirs


def test_of_a_request_that_another_replica_decided_the_levels_are_those_of_that_second() -> None:
    at = desk()
    at.waited("r", "red")
    explanation = explainer(at, Levels(red=0.5, blue=2.0)).lately_seen("r", EVERYTHING)
    assert "Its rank was 1 (0: first in line, 9: last), its level fairshare 0.5." in sentences(explanation)
    assert "Ahead of it for idle capacity: blue (2)." in sentences(explanation)


def test_a_team_that_owns_nothing_has_everybody_ahead_of_it() -> None:
    at = desk()
    at.waited("r", "stranger", usage={"red": 300.0, "blue": 100.0})
    told = sentences(explainer(at).lately_seen("r", EVERYTHING))
    assert "It owns nothing of the pool, so the teams that own some come first." in told


def test_who_went_meanwhile_is_counted() -> None:
    at = desk()
    log = at.log
    steps = iter(range(100))
    log._clock = lambda: float(next(steps))  # pyright: ignore[reportPrivateUsage]
    pool = Pool("chat", 16, {"red": 0.5, "blue": 0.5}, 0.0)

    def sent(request_id: str, team: str, held_seconds: float) -> None:
        send = Send(
            request_id=request_id,
            pool="chat",
            instance_id="http://a:1",
            grant=pool.acquire(team),
            priority=0,
            standing=Standing.WITHIN_SHARE,
            held_seconds=held_seconds,
        )
        log.sent(decided(request_id, team), send, pool)

    log.held(decided("r", "red"), HELD)
    sent("b1", "blue", 0.0)
    sent("b2", "blue", 0.0)
    sent("r0", "red", 0.0)
    sent("r", "red", 4.0)
    sent("b3", "blue", 0.0)
    told = sentences(explainer(at, clock=lambda: 20.0).lately_seen("r", EVERYTHING))
    assert "While it waited, 3 other requests went: 1 of its own team, 2 of blue within share." in told
    theirs = sentences(explainer(at, clock=lambda: 20.0).lately_seen("r", own("red")))
    assert "While it waited, 3 other requests went: 1 of its own team, 2 of others within share." in theirs
    assert "blue" not in theirs


def decided(request_id: str, team: str) -> Any:
    return Decided(request_id, "key", team, "chat")


def test_an_id_that_is_used_again_tells_of_the_last_request() -> None:
    at = desk()
    at.waited("r", "red", held_seconds=1.0)
    at.waited("r", "red", held_seconds=2.0)
    explanation = explainer(at).lately_seen("r", EVERYTHING)
    assert explanation is not None
    assert explanation.steps[0].what == "arrived"
    assert [step.what for step in explanation.steps].count("ended") == 1


def test_of_an_older_request_there_is_what_the_account_has() -> None:
    written = [row(5, request_id="old", held_seconds=1.5, recalls=2)]
    explanation = asyncio.run(explainer(desk(), written=written).request("old", EVERYTHING))
    told = sentences(explanation)
    assert "Sent after it was held for 1.5 s, within its share. It was taken back 2 times for owners." in told
    assert "the numbers of that moment are not kept any more" in told
    assert asyncio.run(explainer(desk(), written=written).request("never", EVERYTHING)) is None
    assert asyncio.run(explainer(desk()).request("old", EVERYTHING)) is None


def test_a_team_sees_its_own_requests_only_also_in_the_account() -> None:
    at = desk()
    at.waited("r", "red", key_id="key")
    assert explainer(at).lately_seen("r", own("red")) is not None
    assert explainer(at).lately_seen("r", own("blue")) is None
    written = [row(5, request_id="old", team="blue", pool="chat")]
    assert asyncio.run(explainer(at, written=written).request("old", own("red"))) is None
    assert asyncio.run(explainer(at, written=written).request("old", own("blue"))) is not None


def test_somebody_who_uses_another_s_request_id_neither_sees_nor_hides_it() -> None:
    at = desk()
    at.waited("r", "red", key_id="key")
    at.waited("r", "blue", key_id="other")
    theirs = sentences(explainer(at).lately_seen("r", own("red")))
    assert "by team red" in theirs
    assert "blue" not in theirs


def test_teams_of_one_organisation_share_its_row_but_not_their_requests() -> None:
    red, green = (own(team, level=Level.ORGANISATION, organisation="lab") for team in ("red", "green"))
    assert red.sees("chat", "lab", "key")
    assert not red.sees("chat", "lab", "other")
    assert green.sees("chat", "lab", "other")
    assert not green.sees("chat", "red", "other")
    assert not own("red").sees("another-pool", "red", "key")


def test_a_team_that_waits_is_told_why_and_who_comes_first() -> None:
    red = team_status("red", in_flight=8, held=5, oldest_held_seconds=3.0, usage=90.0, level_fairshare=0.5, rank=1)
    blue = team_status("blue", in_flight=8, held=2, usage=10.0, level_fairshare=2.0)
    pool = pool_status_of("chat", in_flight=16, teams=[red, blue], instances=[instance_status("http://a:1")])
    budget = budget_status("team:red", hard=100.0, used=90.0, left=10.0)
    told = sentences(explainer(desk()).team("red", [pool], [budget], EVERYTHING))
    assert "red owns 8 of the 16 slots of pool chat (share 0.5) and has 8 in flight." in told
    assert "5 requests of it wait, the oldest for 3 s: its own 8 slots are in use, and all 16 slots" in told
    assert "For idle capacity these come first: blue (2 waiting)." in told
    assert "The budget of team red: 90 of 100 cost units used this month, 10 left." in told
    theirs = sentences(explainer(desk()).team("red", [pool], [], own("red")))
    assert "For idle capacity 1 other team with 2 waiting comes first." in theirs
    assert "blue" not in theirs
    broken = pool_status_of("chat", teams=[red], instances=[instance_status("http://a:1", healthy=False)])
    assert "no engine of the pool is healthy" in sentences(explainer(desk()).team("red", [broken], [], EVERYTHING))


@pytest.mark.parametrize(
    ("standing", "priority", "held", "recalls", "sentence"),
    [
        (Standing.WITHIN_SHARE, 0, None, 0, ""),
        (
            Standing.WITHIN_SHARE,
            0,
            HELD,
            0,
            "waited 1500 ms: on arrival its team had 8 slots in flight and owns 8, 16 of the pool's 16 were taken, "
            "and 2 of its team's requests waited before it; it runs within its team's share",
        ),
        (
            Standing.BORROWING,
            31,
            None,
            0,
            "did not wait on arrival; it runs on idle capacity with rank 2 of 0 to 9 (0: nobody was ahead)",
        ),
        (
            Standing.BORROWING,
            100,
            None,
            2,
            "did not wait on arrival; it was taken back 2 times for owners; it runs on idle capacity with rank 9 of 0 "
            "to 9 (0: nobody was ahead)",
        ),
        (Standing.BORROWING, None, None, 0, "did not wait on arrival; it is beyond its team's share"),
    ],
)
def test_the_header_says_it_in_one_sentence(
    standing: Standing, priority: int | None, held: Held | None, recalls: int, sentence: str
) -> None:
    grant = Pool("chat", 16, {"red": 0.5}, 0.0).acquire("red")
    send = Send(
        request_id="r",
        pool="chat",
        instance_id="http://a:1",
        grant=grant,
        priority=priority,
        standing=standing,
        held_seconds=1.5,
    )
    assert explained(send, held, recalls=recalls).decode("ascii") == sentence


def test_a_refusal_after_a_wait_says_what_was_in_the_way() -> None:
    assert refused_after_waiting(HELD) == (
        " On arrival its team had 8 slots in flight and owns 8, 16 of the pool's 16 were taken, and 2 of its team's "
        "requests waited before it."
    )
