"""A whole data path on loopback: hostile engines, the real dispatch queue, the data port, raw clients.

Time is the test's: nothing in the gateway times out unless a test moves `rig.clock` and sweeps.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import uvloop

from fairshare.core.decisions import HoldOptions, Instance, Mode
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass
from fairshare.gateway.data_port import DataPort
from fairshare.gateway.driver import PoolDriver
from fairshare.gateway.identity import Identity, StaticDirectory, hash_key
from fairshare.gateway.options import Address, Balance, InstanceSpec, Limits, PoolSpec, Timeouts, TokenEstimates
from fairshare.gateway.ports import RequestRecord
from gateway.hostile_engine import HostileEngine

KEYS = {
    "fs-red": Identity("red-key", "red", ServiceClass.INTERACTIVE),
    "fs-blue": Identity("blue-key", "blue", ServiceClass.INTERACTIVE),
    "fs-red-batch": Identity("red-batch-key", "red", ServiceClass.BATCH),
    "fs-other": Identity("other-key", "blue", ServiceClass.INTERACTIVE, frozenset({"other"})),
}


async def until(holds: Callable[[], object], *, every_seconds: float = 0.0) -> None:
    """Lets the loop run until something that no event tells of is so (`run` bounds it).

    `every_seconds`: between two looks, where others (a database's thread, a peer) do it in their own time.
    """
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(every_seconds)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on the loop that production uses, and no longer than 20 s of real time."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Kept:
    """Keeps the records."""

    records: list[RequestRecord] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)
        for count, event in self.waiting:
            if len(self.records) >= count:
                event.set()

    async def wait(self, count: int) -> RequestRecord:
        """Waits until `count` requests have ended in all; returns the last of them."""
        event = asyncio.Event()
        self.waiting.append((count, event))
        if len(self.records) < count:
            await event.wait()
        return self.records[count - 1]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    raw_head: bytes
    complete: bool = True
    """False: the connection ended before the body did."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]


class Client:
    """A client that writes bytes and reads what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def read_head(self) -> Reply:
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            assert name.lower() not in headers, f"header {name} came twice"
            headers[name.lower()] = value.strip()
        return Reply(int(lines[0].split(b" ")[1]), headers, b"", head)

    async def read_chunk(self) -> bytes:
        """One chunk of a chunked body; empty: the last."""
        size = int((await self.reader.readline()).strip(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def read(self, *, no_body: bool = False) -> Reply:
        """A whole answer."""
        reply = await self.read_head()
        while reply.status == 100:
            reply = await self.read_head()
        try:
            if no_body or reply.status in (204, 304):
                pass
            elif reply.headers.get("transfer-encoding") == "chunked":
                pieces: list[bytes] = []
                try:
                    while piece := await self.read_chunk():
                        pieces.append(piece)
                finally:
                    reply.body = b"".join(pieces)
            elif "content-length" in reply.headers:
                reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
            else:
                reply.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            reply.complete = False
        return reply

    async def at_end(self) -> bool:
        """Waits for more; whether the gateway closed the connection instead."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def leave(self) -> None:
        self.writer.transport.abort()


def request_bytes(
    path: str = "/v1/chat/completions",
    body: Any = None,
    *,
    key: str | None = "fs-red",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    if body is None and method == "POST":
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: gateway", "content-type: application/json"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if "transfer-encoding" not in (headers or {}):
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


STREAM = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Rig:
    """What a test holds."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.kept = Kept()
        self.driver: PoolDriver
        self.port: DataPort
        self.pool: Pool
        self.engines: list[HostileEngine] = []
        self.address: Address
        self.spec: PoolSpec
        self._clients: list[Client] = []

    @property
    def engine(self) -> HostileEngine:
        return self.engines[0]

    @property
    def records(self) -> list[RequestRecord]:
        return self.kept.records

    @property
    def queue(self) -> Any:
        return self.driver.pools["chat"].queue

    async def client(self, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port, limit=1 << 26, ssl=tls)
        client = Client(reader, writer)
        self._clients.append(client)
        return client

    async def ask(self, *args: Any, **kwargs: Any) -> Reply:
        """One request on a connection of its own."""
        client = await self.client()
        await client.send(request_bytes(*args, **kwargs))
        reply = await client.read(no_body=kwargs.get("method") == "HEAD")
        client.leave()
        return reply

    def later(self, seconds: float) -> None:
        """Time passes, and the gateway notices."""
        self.clock.now += seconds
        self.port.sweep()

    def sort_instances(self, *, accepting: bool = True, seats: int | None = None, parts: int = 4) -> None:
        for engine in self.engines:
            self.driver.instance_changed(
                "chat",
                InstanceSpec(url=engine.url, api_key="engine-secret"),
                Instance(id=engine.url, part_slots=parts, seats=seats, accepting=accepting),
            )

    async def until(self, holds: Callable[[], object]) -> None:
        """See the function of that name."""
        await until(holds)

    async def held(self, count: int) -> None:
        """Waits until the dispatch queue holds that many requests."""
        await self.until(lambda: self.queue.snapshot().held == count)

    async def settled(self) -> None:
        """Waits until nothing is in flight in the gateway."""
        await self.driver.wait_until_all_ended()

    def assert_nothing_left(self) -> None:
        """Promise P6: every counter is back at 0."""
        assert self.driver.open_requests == 0
        assert self.driver.counters.open_requests == 0
        stat = self.queue.snapshot()
        assert stat.held == 0
        assert stat.held_bytes == 0
        assert [instance.in_flight_slots for instance in stat.instances] == [0] * len(stat.instances)
        assert self.pool.usage()[1] == {} or set(self.pool.usage()[1].values()) <= {0}

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        *,
        engines: int = 1,
        mode: Mode = Mode.PASS,
        capacity: int = 8,
        shares: Mapping[str, Fraction] | None = None,
        hold: HoldOptions | None = None,
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        models: Mapping[str, str] | None = None,
        seats: int | None = None,
        half_life_seconds: float = 0.0,
        balance: Balance = Balance.PREFIX,
        token_estimates: TokenEstimates = TokenEstimates.BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator["Rig"]:
        sockets = len(open_sockets())
        tasks = len(asyncio.all_tasks())
        rig = cls()
        for _ in range(engines):
            rig.engines.append(await HostileEngine().start())
        shares = shares or {"red": Fraction(1, 2), "blue": Fraction(1, 2)}
        rig.spec = PoolSpec(
            name="chat",
            capacity=capacity,
            half_life_seconds=half_life_seconds,
            shares=shares,
            models=models or {"tiny": "tiny"},
            instances=tuple(InstanceSpec(url=engine.url) for engine in rig.engines),
            mode=mode,
            balance=balance,
            token_estimates=token_estimates,
            timeouts=timeouts or Timeouts(),
        )
        rig.pool = Pool("chat", capacity, shares, half_life_seconds, rig.clock)
        rig.driver = PoolDriver(recorder=rig.kept, clock=rig.clock, wall=lambda: 1.0e9)
        rig.driver.add_pool(rig.spec, make_queue(rig.pool, mode, options=hold))
        rig.port = DataPort(driver=rig.driver, directory=directory(), limits=limits)
        rig.address = await rig.port.start(Address("127.0.0.1", 0), tls=tls)
        rig.sort_instances(seats=seats, parts=max(1, capacity // engines))
        try:
            yield rig
            for client in rig._clients:
                client.leave()
            await rig.settled()
            rig.assert_nothing_left()
        finally:
            for client in rig._clients:
                client.leave()
            await rig.port.close()
            for engine in rig.engines:
                await engine.stop()
        for _ in range(20):
            if len(open_sockets()) <= sockets and len(asyncio.all_tasks()) <= tasks:
                break
            await asyncio.sleep(0.01)
        assert rig.driver.counters.open_connections == 0
        assert rig.driver.counters.upstream_connections == 0
        assert len(asyncio.all_tasks()) <= tasks, asyncio.all_tasks()
        assert len(open_sockets()) <= sockets


def open_sockets() -> list[str]:
    """Sockets that this process has open (the loop's other descriptors come and go)."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    return [link for link in links if link.startswith("socket:")]


def directory() -> StaticDirectory:
    return StaticDirectory({hash_key(key): identity for key, identity in KEYS.items()})


def with_timeouts(**kwargs: float) -> Timeouts:
    return replace(Timeouts(), **kwargs)
