"""Replicas that serve real clients: load by the `openai` client, and what the operating system knows of the workers."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from end_to_end.processes import EngineProcess, GatewayProcess, keys_made

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: 8
    half_life: 0
    shares: {{search: 1/2, ads: 1/2}}
    models: [tiny]
    instances: [{engine}]
    timeouts: {{longest_request: {longest}}}
teams:
  - name: search
    keys: [{search}]
  - name: ads
    keys: [{ads}]
store: {store}
{more}
"""


@dataclass
class Site:
    """A configuration for one engine."""

    config: Path
    keys: dict[str, str]


def site(
    folder: Path,
    engine: EngineProcess,
    *,
    store: str = "sqlite:store.sqlite3",
    more: str = "",
    longest_request: str = "20s",
) -> Site:
    keys: dict[str, str] = {}
    entries: dict[str, str] = {}
    for team in ("search", "ads"):
        keys[team], entries[team] = keys_made("--team", team)
    config = folder / "fairshare.yaml"
    config.write_text(CONFIG.format(engine=engine.url, store=store, more=more, longest=longest_request, **entries))
    return Site(config, keys)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the operating system gives away."""
    while True:
        first = random.randrange(20_000, 30_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@dataclass
class Load:
    """What became of the requests of one team's clients."""

    completed: int = 0
    failures: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """(when, on the test's clock; what the client saw)."""


@contextmanager
def load(urls: list[str], key: str, *, clients: int, tokens: int = 20, keep_alive: bool = False) -> Iterator[Load]:
    """So many clients that stream one answer after the other, until the end of the block.

    `keep_alive`: each over one connection as long as the gateway keeps it open; else each request has its own.
    """
    result, stop = Load(), threading.Event()

    def client(number: int) -> None:
        url = urls[number % len(urls)]
        # No retries: what fails is seen.
        with httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=int(keep_alive))) as http:
            api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)
            while not stop.is_set():
                try:
                    stream = api.chat.completions.create(
                        model="tiny",
                        messages=[{"role": "user", "content": "hello"}],
                        max_tokens=tokens,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    finished = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
                    assert finished[-1] is not None, "the stream ended early"
                    result.completed += 1
                except Exception as error:
                    result.failures.append((time.monotonic(), f"{type(error).__name__}: {error}"))

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield result
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def most_running(engine: EngineProcess, seconds: float) -> int:
    """The most requests that the engine ran at once, looked at for so long."""
    most, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        most = max(most, int(engine.gauge("vllm:num_requests_running")))
        time.sleep(0.02)
    return most


def workers(gateway: GatewayProcess) -> list[int]:
    """Its worker processes."""
    children: list[int] = []
    for path in Path(f"/proc/{gateway.pid}/task").glob("*/children"):
        children += [int(pid) for pid in path.read_text().split()]
    return children


def owner(gateway: GatewayProcess, pool: str = "chat") -> int:
    """The worker that decides. A replica's name holds its process id."""
    replication = gateway.pool(pool)["replication"]
    assert replication["role"] == "owner", replication
    return int(replication["replica"].split("-")[-2])


def clients_of(pid: int, url: str) -> int:
    """How many connections of clients a process has."""
    port = int(url.rsplit(":", 1)[1])
    of_the_port = {
        fields[9]
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if int(fields[1].split(":")[1], 16) == port and fields[3] == "01"
    }
    held: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            held.add(target.removeprefix("socket:[").rstrip("]"))
    return len(of_the_port & held)
