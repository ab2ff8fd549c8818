"""One pool on the event loop of another program."""

import asyncio
from collections.abc import Awaitable, Callable
from fractions import Fraction

import pytest

from fairshare.core.decisions import HoldOptions, Mode
from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.options import EmbeddedPool
from fairshare.integrations.admission import Admission, Admitted, TooWide, TurnedAway
from fairshare.wire.body import MAX_SLOTS
from fairshare.wire.usage import Usage


def pool(capacity: int = 2, mode: Mode = Mode.HOLD, **hold: int) -> EmbeddedPool:
    shares = {"red": Fraction(1, 2), "blue": Fraction(1, 2)}
    return EmbeddedPool(
        name="chat", capacity=capacity, shares=shares, half_life_seconds=0.0, mode=mode, hold=HoldOptions(**hold)
    )


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_flight(admission: Admission) -> int:
    return sum(admission.pool.usage()[1].values())


def test_an_owner_goes_at_once_and_a_borrower_waits_for_room() -> None:
    async def main() -> None:
        admission = Admission(pool())
        first, second = await admission.acquire("red"), await admission.acquire("red")
        assert (first.priority, first.standing, second.priority) == (0, Standing.WITHIN_SHARE, 10)
        third = asyncio.ensure_future(admission.acquire("red"))
        await settle()
        assert admission.held == 1
        owner = await admission.acquire("blue", ServiceClass.BATCH)
        assert (owner.priority, owner.held_seconds) == (1, 0.0)
        for admitted in (first, second):
            admitted.release()
        assert (await third).standing is Standing.WITHIN_SHARE
        assert admission.held == 0

    run(main)


def test_the_last_word_is_charged_once() -> None:
    async def main() -> None:
        admission = Admission(pool())
        admitted = await admission.acquire("red")
        admitted.consumed(Usage(prompt_tokens=1000))
        admitted.consumed(Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=5))
        for _ in range(3):
            admitted.release()
        assert admission.pool.usage()[0]["red"] == 20.0
        assert in_flight(admission) == 0
        assert admitted.released

    run(main)


def test_the_end_of_the_block_releases_whatever_happens_in_it() -> None:
    async def main() -> None:
        admission = Admission(pool())
        with pytest.raises(RuntimeError):
            async with admission.admit("red"):
                raise RuntimeError
        assert in_flight(admission) == 0

    run(main)


def test_a_request_that_is_cancelled_while_it_waits_gives_its_place_up() -> None:
    async def main() -> None:
        admission = Admission(pool(capacity=1))
        admitted = await admission.acquire("red")
        waiting = [asyncio.ensure_future(admission.acquire("blue")) for _ in range(2)]
        await settle()
        assert admission.held == 2
        waiting[0].cancel()
        await settle()
        assert admission.held == 1
        admitted.release()
        await waiting[1]
        assert in_flight(admission) == 1

    run(main)


@pytest.mark.parametrize("cancel_first", [True, False], ids=["cancelled, then sent", "sent, then cancelled"])
def test_a_request_that_is_sent_and_cancelled_in_the_same_turn_keeps_no_slot(cancel_first: bool) -> None:
    async def main() -> None:
        admission = Admission(pool(capacity=1))
        admitted = await admission.acquire("red")
        waiting = asyncio.ensure_future(admission.acquire("blue"))
        await settle()
        for step in (waiting.cancel, admitted.release) if cancel_first else (admitted.release, waiting.cancel):
            step()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (in_flight(admission), admission.held) == (0, 0)

    run(main)


def test_a_full_queue_turns_away_and_says_when_to_come_back() -> None:
    async def main() -> None:
        admission = Admission(pool(capacity=1, max_held=1))
        await admission.acquire("red")
        waiting = asyncio.ensure_future(admission.acquire("red"))
        await settle()
        with pytest.raises(TurnedAway, match="already holds 1 waiting") as turned_away:
            await admission.acquire("red")
        assert (turned_away.value.problem.status, turned_away.value.problem.code) == (429, "queue_full")
        assert turned_away.value.retry_after_seconds >= 1
        waiting.cancel()

    run(main)


def test_a_request_that_waits_too_long_is_turned_away() -> None:
    async def main() -> None:
        now = [100.0]
        admission = Admission(pool(capacity=1, longest_wait_seconds=60), clock=lambda: now[0])
        await admission.acquire("red")
        waiting = asyncio.ensure_future(admission.acquire("red"))
        await settle()
        now[0] += 61.0
        admission.tick()
        with pytest.raises(TurnedAway) as turned_away:
            await waiting
        assert turned_away.value.problem.code == "held_too_long"

    run(main)


def test_a_request_that_nobody_releases_is_released_at_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        options = EmbeddedPool(name="chat", capacity=1, shares={"red": Fraction(1)}, longest_request_seconds=0.0)
        admission = Admission(options)
        forgotten: Admitted = await admission.acquire("red")
        await asyncio.sleep(0)
        await settle()
        assert forgotten.released
        assert in_flight(admission) == 0

    run(main)
    assert "not released" in caplog.text


def test_pass_never_waits_and_observe_says_no_priority() -> None:
    async def main() -> None:
        passing = Admission(pool(capacity=1, mode=Mode.PASS))
        assert [(await passing.acquire("red")).priority for _ in range(3)] == [10, 10, 10]
        observing = Admission(pool(capacity=1, mode=Mode.OBSERVE))
        assert [(await observing.acquire("red")).priority for _ in range(3)] == [None, None, None]

    run(main)


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOTS + 1, 10**30])
def test_no_slots_and_more_than_a_request_may_ask_for_are_refused(slots: int) -> None:
    async def main() -> None:
        admission = Admission(pool())
        with pytest.raises(TooWide, match=f"slots must be from 1 to 16384, got {slots}"):
            await admission.acquire("red", slots=slots)
        assert in_flight(admission) == admission.held == 0
        (await admission.acquire("red", slots=MAX_SLOTS)).release()  # wider than C: it passes C by its width

    run(main)
