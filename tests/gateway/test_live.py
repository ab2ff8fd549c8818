"""One look a second serves the history and every watcher."""

import asyncio
import json

from fairshare.gateway.history import History
from fairshare.gateway.live import Live
from fairshare.gateway.status import PoolStatus
from gateway.statuses import pool_status_of, team_status


class Site:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.pools: list[PoolStatus] = [pool_status_of("chat", teams=[team_status("red")])]
        self.now = 100.0
        self.history = History()
        self.ticks: asyncio.Queue[None] = asyncio.Queue()
        self.live = Live(
            pools=lambda: self.pools, budgets=list, history=self.history, wall=lambda: self.now, sleep=self.sleep
        )

    async def sleep(self, seconds: float) -> None:
        if seconds == 1.0:
            await self.ticks.get()
        else:
            await asyncio.Event().wait()

    async def second(self) -> None:
        self.now += 1.0
        self.ticks.put_nowait(None)
        for _ in range(5):
            await asyncio.sleep(0)


def at(event: bytes) -> float:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[len(b"data: ") :])["at"]


def test_a_watcher_gets_everything_at_once_and_again_every_second() -> None:
    async def main() -> None:
        site = Site()
        await site.live.start()
        events = site.live.events(site.live.encoded)
        assert at(await anext(events)) == 100.0
        await site.second()
        assert at(await anext(events)) == 101.0
        assert site.live.watchers == 1
        await events.aclose()
        assert site.live.watchers == 0
        await site.live.stop()

    asyncio.run(main())


def test_a_slow_watcher_misses_seconds_and_gets_the_last_one() -> None:
    async def main() -> None:
        site = Site()
        await site.live.start()
        events = site.live.events(site.live.encoded)
        await anext(events)
        for _ in range(3):
            await site.second()
        assert at(await anext(events)) == 103.0
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        await site.second()
        assert at(await waiting) == 104.0
        await events.aclose()
        await site.live.stop()

    asyncio.run(main())


def test_the_end_of_the_gateway_ends_every_stream() -> None:
    async def main() -> None:
        site = Site()
        await site.live.start()
        events = site.live.events(site.live.encoded)
        await anext(events)
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        await site.live.stop()
        assert await waiting is None
        assert site.live.watchers == 0

    asyncio.run(main())


def test_a_stream_ends_when_there_is_nothing_more_to_show() -> None:
    async def main() -> None:
        site = Site()
        assert [event async for event in site.live.events(lambda: None)] == []

    asyncio.run(main())


def test_looking_outlives_a_look_that_fails() -> None:
    async def main() -> None:
        site = Site()
        await site.live.start()
        good, site.pools = site.pools, [None]  # type: ignore[list-item]
        await site.second()
        site.pools = good
        await site.second()
        answer = site.history.pool("chat", since=0.0)
        assert answer is not None
        assert answer.at == [102.0]
        await site.live.stop()

    asyncio.run(main())
