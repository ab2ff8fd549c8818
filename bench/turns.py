"""What keeps requests waiting: the longest stretches of work of the gateway's event loop, and what ran in each.

    make bench-turns
    make bench-turns BENCH="--rate 1000 --seconds 20"

A gateway is started on an event loop that notes when each callback begins and ends, requests come at a steady rate (a
pair is one to the gateway and one straight to the engine) and Prometheus looks once a second. A stretch is callbacks
without a pause between them; what arrives meanwhile waits until its end. Those that took most time on the CPU are
shown; where the clock says much more, the operating system or another thread with the interpreter held it up. Noting a
callback costs some 2 us.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from fairshare import compose
from gateway import WHOLE, fairshare
from processes import BENCH, Process, free_ports, measured

PAUSE_SECONDS = 40e-6
"""A shorter time between two callbacks is the kernel's, reading and writing for them."""

REQUEST = "ClientConnection read"
SHOWN = 12


class Stretches:
    """Callbacks that ran without a pause, those with most time on the CPU first. From the first request on."""

    def __init__(self) -> None:
        self.longest: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self._begin = self._end = self._cpu = time.perf_counter()
        self._ran: Counter[str] = Counter()

    def timed(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        if begin - self._end > PAUSE_SECONDS:
            self._close()
            self._begin, self._cpu = begin, time.thread_time()
        try:
            return call(*args)
        finally:
            self._end = time.perf_counter()
            self._ran[what] += int((self._end - begin) * 1e6)

    def _close(self) -> None:
        if self.seconds or REQUEST in self._ran:
            cpu = time.thread_time() - self._cpu
            self.seconds.append(cpu)
            if len(self.longest) < SHOWN or cpu > self.longest[-1]["cpu_seconds"]:
                self.longest.append({"seconds": self._end - self._begin, "cpu_seconds": cpu, "us": dict(self._ran)})
                self.longest = sorted(self.longest, key=lambda each: -each["cpu_seconds"])[:SHOWN]
        self._ran.clear()


STRETCHES = Stretches()


class Noted(asyncio.Protocol):
    """Stands before a protocol and notes what it does."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._name = type(protocol).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: Any) -> None:
        STRETCHES.timed(f"{self._name} made", self._protocol.connection_made, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        STRETCHES.timed(f"{self._name} lost", self._protocol.connection_lost, exc)

    def data_received(self, data: bytes) -> None:
        STRETCHES.timed(f"{self._name} read", self._protocol.data_received, data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


class NotedSteps(Coroutine[Any, Any, Any]):
    """A task's coroutine, each step noted."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine
        self._name = f"task {getattr(coroutine, '__qualname__', coroutine)}"

    def send(self, value: Any) -> Any:
        return STRETCHES.timed(self._name, self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


class NotingLoop(uvloop.Loop):
    """An event loop that notes what it runs."""

    async def create_server(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        return await super().create_server(lambda: Noted(protocol_factory()), *args, **more)

    async def create_connection(self, protocol_factory: Any, *args: Any, **more: Any) -> Any:
        transport, noted = await super().create_connection(lambda: Noted(protocol_factory()), *args, **more)
        return transport, noted._protocol

    def call_later(self, delay: float, callback: Any, *args: Any, **more: Any) -> Any:
        name = f"timer {getattr(callback, '__qualname__', callback)}"
        return super().call_later(delay, STRETCHES.timed, name, callback, *args, **more)


def serve(config: Path, report: Path) -> None:
    """In the gateway's process: serve until SIGTERM, then say what took long."""

    def new_loop() -> NotingLoop:
        loop = NotingLoop()
        loop.set_task_factory(lambda loop, coroutine, **more: asyncio.Task(NotedSteps(coroutine), loop=loop, **more))
        return loop

    began = 0.0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif threading.current_thread() is threading.main_thread():
            STRETCHES._ran[f"gc of generation {info['generation']}"] += int((time.perf_counter() - began) * 1e6)

    gc.callbacks.append(collecting)
    uvloop.new_event_loop = new_loop
    try:
        compose.run(config, os.environ)
    finally:
        report.write_text(json.dumps({"longest": STRETCHES.longest, "seconds": sorted(STRETCHES.seconds)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="pairs a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--teams", type=int, default=2)
    parser.add_argument("--ledger", action="store_true", help="with the account of requests, in SQLite")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairshare-turns-")))
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        engine = Process(
            "direct",
            [sys.executable, str(BENCH / "fake_engine.py"), "--port", str(port)],
            url,
            health_url=url + "/health",
        )
        stack.callback(engine.end)
        report = folder / "report.json"
        command = [sys.executable, __file__, "--report", str(report), "--serve"]
        store = "ledger" if given.ledger else "none"
        gateway, keys = fairshare(engine, folder, teams=given.teams, store=store, command=command)
        stack.callback(gateway.end)
        ends = threading.Event()

        def scrape() -> None:
            while not ends.wait(1.0):
                with urllib.request.urlopen(gateway.health_url.replace("/readyz", "/metrics"), timeout=5.0) as answer:
                    answer.read()

        scraper = threading.Thread(target=scrape)
        scraper.start()
        job = {"kind": "paired", "url": gateway.url, "keys": keys, "body": WHOLE, "direct": url, "seed": 1}
        added = measured({**job, "rate": given.rate, "seconds": given.seconds})
        ends.set()
        scraper.join()
        gateway.end()
        found = json.loads(report.read_text())
    print("added latency, ms: " + ", ".join(f"{name} {added[name] * 1e3:.2f}" for name in ("p50", "p95", "p99")))
    seconds = found["seconds"]
    shown = ", ".join(f"{part:.1%} {seconds[int(part * len(seconds))] * 1e3:.2f}" for part in (0.5, 0.95, 0.99, 0.999))
    print(f"{len(seconds):,} stretches, ms on the CPU: {shown}")
    for each in found["longest"]:
        ran = sorted(each["us"].items(), key=lambda item: -item[1])[:5]
        print(f"{each['cpu_seconds'] * 1e3:8.2f} ms, {each['seconds'] * 1e3:.2f} by the clock: {dict(ran)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        serve(Path(sys.argv[4]), Path(sys.argv[2]))
    else:
        main()
