"""The state of everything, once a second: for the history, and for whoever watches (server-sent events).

One look at the pools a second serves all watchers. A slow watcher misses seconds, it never delays anybody.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from importlib.metadata import version

import msgspec

from fairshare.clock import Clock
from fairshare.gateway.history import History
from fairshare.gateway.status import BudgetStatus, PoolStatus

log = logging.getLogger("fairshare.status")

LOOK_SECONDS = 1.0
"""From one look at the pools to the next."""

SAVE_SECONDS = 5.0
"""How often minutes that have ended are written to the store."""

EVENT_BEGINS, EVENT_END = b"data: ", b"\n\n"
"""Around the JSON of a server-sent event, which has no line break in it."""

MOST_WATCHERS = 200
"""Streams of events open at once."""

MOST_FOR_TEAMS = 150
"""A team's page is refused from so many streams on, so that no team keeps operators from theirs."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the status page and `fairshare top` show."""

    at: float
    """Wall clock."""
    version: str
    """Of fairshare."""
    history_kept: bool
    """Whether the history survives a restart."""
    pools: Sequence[PoolStatus]
    budgets: Sequence[BudgetStatus]


class Live:
    """Looks once a second; lives on the event loop's thread."""

    def __init__(
        self,
        *,
        pools: Callable[[], Sequence[PoolStatus]],
        budgets: Callable[[], Sequence[BudgetStatus]],
        history: History,
        wall: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pools = pools
        self._budgets = budgets
        self._history = history
        self._wall = wall
        self._sleep = sleep
        self._version = version("fairshare")
        self._looked = asyncio.Event()
        self._looks = 0
        self._last: State | None = None
        self._encoded: bytes | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = False
        self.watchers = 0

    # ------------------------------------------------------------------ what others may read

    def state(self) -> State:
        """Everything, now."""
        return State(
            at=self._wall(),
            version=self._version,
            history_kept=self._history.is_kept,
            pools=self._pools(),
            budgets=self._budgets(),
        )

    def last(self) -> State:
        """Everything, as of the last look."""
        return self._last or self.state()

    def encoded(self) -> bytes:
        """The same as JSON, made once for all watchers."""
        if self._encoded is None:
            self._encoded = _encode(self.last())
        return self._encoded

    def is_full(self, *, for_teams: bool) -> bool:
        return self.watchers >= (MOST_FOR_TEAMS if for_teams else MOST_WATCHERS)

    async def events(self, render: Callable[[], bytes | None]) -> AsyncGenerator[bytes]:
        """A server-sent event now and after every look, until `render` says None or the gateway ends."""
        self.watchers += 1
        try:
            while not self._ended and (data := render()) is not None:
                seen = self._looks
                yield EVENT_BEGINS + data + EVENT_END
                # Whoever took longer than a second to send that gets the newest at once.
                while self._looks == seen and not self._ended:
                    await self._looked.wait()
        finally:
            self.watchers -= 1

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Look from now on."""
        await self._history.restore(self._wall())
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self._keep_saving())]

    async def stop(self) -> None:
        """End every stream, and write what the store does not have yet."""
        self._ended = True
        self._wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            await self._history.save(self._wall(), with_last=True)

    def look(self) -> None:
        """A second has passed."""
        self._last = self.state()
        self._encoded = None
        self._looks += 1
        self._history.add(self._last.at, self._last.pools)
        self._wake()

    def _wake(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

    async def _keep_looking(self) -> None:
        while True:
            await self._sleep(LOOK_SECONDS)
            try:
                self.look()
            except Exception:
                # Looking must outlive whatever one look runs into.
                log.exception("A look at the pools failed inside fairshare.")

    async def _keep_saving(self) -> None:
        while True:
            await self._sleep(SAVE_SECONDS)
            try:
                await self._history.save(self._wall())
            except Exception:
                log.exception("Saving the history failed inside fairshare.")


_encode = msgspec.json.Encoder().encode
