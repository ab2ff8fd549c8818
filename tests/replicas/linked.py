"""Replicas that only have links: two ports on loopback, and peers that misbehave."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import uvloop

from fairshare.replicas.link import LinkOptions, PeerLink
from fairshare.replicas.peers import SWEEP_SECONDS, PeerAddress, PeerPort, PeerTls


class Lines:
    """Messages that are strings."""

    def encode(self, messages: Sequence[str]) -> bytes:
        return msgspec.msgpack.encode(list(messages))

    def decode(self, payload: bytes) -> list[str]:
        return msgspec.msgpack.decode(payload, type=list[str])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Ear:
    """What one side heard."""

    frames: list[list[str]] = field(default_factory=list[list[str]])
    links: list[PeerLink[str]] = field(default_factory=list[PeerLink[str]])
    gone: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lines(self) -> list[str]:
        return [line for frame in self.frames for line in frame]

    def connected(self, link: PeerLink[str]) -> None:
        self.links.append(link)
        self.changed.set()

    def received(self, link: PeerLink[str], messages: list[str]) -> None:
        self.frames.append(messages)
        self.changed.set()
        if "fail" in messages:
            raise RuntimeError("the handler fails")

    def disconnected(self, link: PeerLink[str], reason: str) -> None:
        self.links.remove(link)
        self.gone.append(reason)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()


class Side:
    """One replica: its port, what it heard, its clock. Nothing is swept unless a test does it."""

    def __init__(
        self,
        replica: str = "one",
        *,
        secret: bytes = b"s" * 32,
        versions: Sequence[int] = (1,),
        tls: PeerTls | None = None,
    ) -> None:
        self.ear = Ear()
        self.clock = Clock()
        self.pauses: list[float] = []
        options = LinkOptions[str](
            replica=replica,
            secret=secret,
            codecs=dict.fromkeys(versions, Lines()),
            clock=self.clock,
            nonce=os.urandom,
        )
        self.port = PeerPort(options, self.ear, fraction=lambda: 0.5, sleep=self._sleep, tls=tls)
        self.address = PeerAddress("127.0.0.1", 0)

    async def listen(self, address: PeerAddress | None = None) -> PeerAddress:
        self.address = await self.port.start(address or self.address)
        return self.address

    async def _sleep(self, seconds: float) -> None:
        if seconds == SWEEP_SECONDS:
            await asyncio.Event().wait()
        self.pauses.append(seconds)
        self.ear.changed.set()
        await asyncio.sleep(0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On the loop that production uses, and for at most 20 s of real time."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@asynccontextmanager
async def two(first: Side | None = None, second: Side | None = None) -> AsyncGenerator[tuple[Side, Side]]:
    """The first listens, the second dials it; they are connected."""
    listens, dials = first or Side("one"), second or Side("two")
    try:
        await listens.listen()
        dials.port.dial(listens.address)
        await listens.ear.until(lambda: bool(listens.ear.links))
        await dials.ear.until(lambda: bool(dials.ear.links))
        yield listens, dials
    finally:
        await dials.port.close()
        await listens.port.close()
