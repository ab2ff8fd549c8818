"""Reloads of every kind, one after the other, while both teams keep the gateway busy."""

import asyncio
import random

import test_compose as wired
from fairshare.config import Settings
from gateway.hostile_engine import Asked, Wire
from gateway.rig import run

RELOADS = 15
CLIENTS = 16


class BusyEngine(wired.Engine):
    """Takes a moment for each completion."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.script = self._take_a_moment

    async def _take_a_moment(self, asked: Asked, wire: Wire) -> None:
        if asked.path == "/v1/chat/completions":
            await asyncio.sleep(self._rng.random() * 0.03)
        await self._answer(asked, wire)


def some_settings(rng: random.Random, engines: list[BusyEngine]) -> Settings:
    first, second, third = engines
    mode = rng.choice(["hold", "hold", "pass", "observe"])
    fallback = ", fallback: spare" if mode != "observe" and rng.random() < 0.6 else ""
    shares = rng.choice(["{red: 1/2, blue: 1/2}", "{red: 1/4, blue: 1/2}", "{blue: 1}"])
    hold = f"{{batch_every: {rng.choice([5, 10])}, recall: {rng.choice(['true', 'false'])}}}"
    more = f", dispatch: {mode}{fallback}, shares: {shares}, hold: {hold}"
    chat = wired.pool(first, more, capacity=rng.choice([1, 2, 4, 8]))
    if rng.random() < 0.5:
        chat = chat.replace(f"'{first.url}'", f"'{first.url}', '{third.url}'")
    return wired.settings(chat, wired.pool(second, name="spare", model="other", capacity=2))


def test_no_request_is_lost_and_nothing_is_left_when_everything_is_reloaded_under_load() -> None:
    async def main() -> None:
        rng = random.Random(5)
        engines = [BusyEngine(rng) for _ in range(3)]
        for engine in engines:
            await engine.start()
        try:
            async with wired.running(some_settings(rng, engines)) as it:
                over = asyncio.Event()
                statuses: list[int] = []

                async def client(team: str) -> None:
                    while not over.is_set():
                        statuses.append((await it.ask(team)).status)

                clients = [asyncio.create_task(client(team)) for team in ["red", "blue"] * (CLIENTS // 2)]
                for _ in range(RELOADS):
                    await asyncio.sleep(0.05)
                    await it.gateway.reload(some_settings(rng, engines))
                over.set()
                await asyncio.gather(*clients)
                assert len(statuses) > CLIENTS
                assert set(statuses) == {200}
                for pool in it.gateway.pools():
                    assert (pool.in_flight, pool.held) == (0, 0)
                    assert [instance.in_flight for instance in pool.instances] == [0] * len(pool.instances)
        finally:
            for engine in engines:
                await engine.stop()

    run(main)
