"""The gateway's Python on the way of one request, without sockets: microseconds, and bytecode instructions by file.

    make bench-relay

A client's connection and an engine's are handed the bytes that a read would bring, and what they write is thrown away.
Instructions are the same on every machine and in every run; microseconds are the best of several rounds.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from types import FrameType
from typing import Any, cast

import uvloop

import fake_engine
from fairshare.core.decisions import Instance, Mode
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass
from fairshare.gateway.data_port import ClientConnection, DataPort
from fairshare.gateway.driver import PoolDriver
from fairshare.gateway.identity import Identity, StaticDirectory, hash_key
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.options import Address, AdminSpec, GatewaySpec, InstanceSpec, PoolSpec
from fairshare.gateway.upstream import UpstreamConnection
from gateway import CHUNKS, STREAMED, WHOLE, key_of
from load import request

KEYS = 100
TEAMS = 2
ROUNDS = 15

Tracer = Callable[[FrameType, str, object], Any]


class Discarding:
    """A transport whose peer takes everything at once."""

    written_bytes = 0

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass


def connections() -> tuple[ClientConnection, UpstreamConnection]:
    """A client's connection to a gateway with one engine, and the idle one to that engine."""
    shares = {f"team{number}": Fraction(1, TEAMS) for number in range(TEAMS)}
    instance = InstanceSpec(url="http://127.0.0.1:1")
    spec = PoolSpec(
        name="chat",
        capacity=10_000,
        half_life_seconds=7 * 86400.0,
        shares=shares,
        models={"tiny": "tiny"},
        instances=(instance,),
    )
    address = Address("127.0.0.1", 0)
    metrics = Metrics(list, lambda: driver.counters)
    metrics.configure(GatewaySpec(listen=address, admin=AdminSpec(address=address), pools=(spec,)))
    driver = PoolDriver(recorder=metrics)
    driver.add_pool(spec, make_queue(Pool("chat", 10_000, shares, 7 * 86400.0), Mode.HOLD))
    driver.instance_changed("chat", instance, Instance(id=instance.id, part_slots=10_000, seats=20_000))
    driver.watch.know(instance.id, seats=20_000)
    identities = {
        hash_key(key_of(number)): Identity(f"key{number}", f"team{number % TEAMS}", ServiceClass.INTERACTIVE)
        for number in range(KEYS)
    }
    client = ClientConnection(DataPort(driver=driver, directory=StaticDirectory(identities)))
    client.connection_made(cast("asyncio.Transport", Discarding()))
    home = driver.pools["chat"].instances[instance.id]
    engine = UpstreamConnection(home)
    engine.connection_made(cast("asyncio.Transport", Discarding()))
    home.give_back(engine)
    return client, engine


def exchanges(kind: str) -> Callable[[], None]:
    """What plays one request."""
    client, engine = connections()
    body = STREAMED if kind == "stream" else WHOLE
    asked = [request("http://127.0.0.1:1", key_of(n), body) for n in range(KEYS if kind == "another key" else 1)]
    answer = [fake_engine.whole(fake_engine.ANSWER)]
    if kind == "stream":
        answer = [fake_engine.STREAM_HEAD, *[fake_engine.FRAMED_CHUNK] * CHUNKS, fake_engine.FRAMED_END]
    number = 0

    def once() -> None:
        nonlocal number
        client.data_received(asked[number % len(asked)])
        number += 1
        for read in answer:
            engine.data_received(read)

    for _ in range(3 * KEYS):
        once()
    return once


def microseconds(once: Callable[[], None], requests: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(requests):
            once()
        best = min(best, (time.process_time() - begin) / requests * 1e6)
    return best


def counting(counts: Counter[str]) -> Tracer:
    """For `sys.settrace`: counts the bytecode instructions of what is called from then on, by file."""

    def enter(frame: FrameType, event: str, _: object) -> Tracer:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        file = frame.f_code.co_filename.rpartition("src/")[2]

        def step(frame: FrameType, event: str, _: object) -> Tracer:
            if event == "opcode":
                counts[file] += 1
            return step

        return step

    return enter


def instructions(once: Callable[[], None], requests: int) -> Counter[str]:
    """By file, of one request."""
    counts: Counter[str] = Counter()
    sys.settrace(counting(counts))
    for _ in range(requests):
        once()
    sys.settrace(None)
    return Counter({file: round(n / requests) for file, n in counts.items() if file.startswith("fairshare/")})


async def main() -> None:
    for kind in ("whole", "another key", "stream"):
        once = exchanges(kind)
        per_request, shown = microseconds(once, 100 if kind == "stream" else 1000), kind
        if kind == "stream":
            print(f"{shown}: {per_request / CHUNKS:.2f} us for each of {CHUNKS} chunks, all in")
            continue
        counts = instructions(once, 50)
        print(f"{shown}: {per_request:.1f} us, {counts.total():,} instructions")
        if kind == "whole":
            for file, count in counts.most_common():
                print(f"{count:9,} {file}")


if __name__ == "__main__":
    argparse.ArgumentParser(description="The gateway's Python on the way of one request.").parse_args()
    uvloop.run(main())
