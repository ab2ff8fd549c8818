"""What tests of sources hear."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fairshare.gateway.discovery.source import Source
from fairshare.gateway.options import InstanceSpec


class Heard:
    """Notes what a source tells, and lets its sleeps last until a test wakes it."""

    def __init__(self) -> None:
        self.said: list[list[str] | str] = []
        """Urls of an answer, or the trouble of a failure."""
        self.sleeps: list[float] = []
        self._more = asyncio.Condition()
        self._wake = asyncio.Semaphore(0)
        self._tasks: set[asyncio.Task[None]] = set()

    def answered(self, instances: Iterable[InstanceSpec]) -> None:
        self._say([instance.url for instance in instances])

    def failed(self, trouble: str) -> None:
        self._say(trouble)

    def _say(self, what: list[str] | str) -> None:
        self.said.append(what)
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def sleep(self, seconds: float) -> None:
        """Given to the source as its sleep."""
        self.sleeps.append(seconds)
        await self._notify()
        await self._wake.acquire()

    async def slept(self, times: int) -> None:
        """Waits until the source has gone to sleep so often."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.sleeps) >= times)

    async def next(self, count: int) -> None:
        """Waits until so many things were said."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.said) >= count)

    def wake(self) -> None:
        self._wake.release()


@asynccontextmanager
async def following(make: Callable[[Heard], Source]):
    """A source that is followed, and what it says."""
    heard = Heard()
    task = asyncio.ensure_future(make(heard).follow(heard))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(scenario: Callable[[], Awaitable[Any]]) -> None:
    """A scenario that waits in vain ends."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())
