"""The load: keep-alive connections that ask, one request after the other. Runs in a process of its own.

Reads one job as JSON on standard input and prints what it measured as JSON:

    closed   `connections` ask as fast as they are answered, for `seconds`; spread over the URLs if `url` names several;
             each in turn with the next of `max_tokens`, if there are any
    paired   `rate` pairs a second: the same request to `url` and to `direct`, in random order, for `seconds`
    open     `connections` streams are opened and kept open until standard input ends
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import httptools
import uvloop


def request(url: str, key: str, body: dict[str, Any]) -> bytes:
    host = url.removeprefix("http://")
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\nuser-agent: bench\r\naccept: */*\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class Client(asyncio.Protocol):
    """One connection; `ask` sends a request and returns its seconds."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[float] | None = None
        self.first_body: asyncio.Future[None] | None = None
        self.started = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def ask(self, data: bytes) -> "asyncio.Future[float]":
        self.parser = httptools.HttpResponseParser(self)
        self.answered = asyncio.get_running_loop().create_future()
        self.started = time.perf_counter()
        self.transport.write(data)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self.first_body is not None and not self.first_body.done():
            self.first_body.set_result(None)

    def on_message_complete(self) -> None:
        assert self.answered is not None
        status = self.parser.get_status_code()
        if status == 200:
            self.answered.set_result(time.perf_counter() - self.started)
        else:
            self.answered.set_exception(RuntimeError(f"answered with status {status}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(RuntimeError(f"the connection was lost: {exc}"))


async def connect(url: str) -> Client:
    host, port = url.removeprefix("http://").split(":")
    _, client = await asyncio.get_running_loop().create_connection(Client, host, int(port))
    return client


async def closed(job: dict[str, Any]) -> dict[str, Any]:
    urls = job["url"].split()
    keys, body = job["keys"], job["body"]
    bodies = [{**body, "max_tokens": number} for number in job.get("max_tokens", ())] or [body]
    turns = range(max(len(keys), len(bodies)))
    data = [[request(url, keys[n % len(keys)], bodies[n % len(bodies)]) for n in turns] for url in urls]
    clients = [await connect(urls[number % len(urls)]) for number in range(job["connections"])]
    requests = 0
    ends_at = time.perf_counter() + job["seconds"]

    async def work(number: int, client: Client) -> None:
        nonlocal requests
        mine = data[number % len(urls)]
        number //= len(urls)
        while time.perf_counter() < ends_at:
            await client.ask(mine[number % len(mine)])
            number += len(clients)
            requests += 1

    began = time.perf_counter()
    await asyncio.gather(*(work(number, client) for number, client in enumerate(clients)))
    return {"requests": requests, "seconds": time.perf_counter() - began}


async def paired(job: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(job["seed"])
    idle: dict[str, list[Client]] = {job["url"]: [], job["direct"]: []}
    asked = {url: request(url, job["keys"][0], job["body"]) for url in idle}
    added: list[float] = []

    async def once(url: str) -> float:
        client = idle[url].pop() if idle[url] else await connect(url)
        seconds = await client.ask(asked[url])
        idle[url].append(client)
        return seconds

    async def pair() -> None:
        order = [job["url"], job["direct"]]
        rng.shuffle(order)
        taken = {url: await once(url) for url in order}
        added.append(taken[job["url"]] - taken[job["direct"]])

    for url in idle:  # no pair pays for connecting
        for _ in range(16):
            idle[url].append(await connect(url))
    pairs: list[asyncio.Task[None]] = []
    due = time.perf_counter()
    ends_at = due + job["seconds"]
    while due < ends_at:
        due += rng.expovariate(job["rate"])
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        pairs.append(asyncio.ensure_future(pair()))
    await asyncio.gather(*pairs)
    added.sort()
    parts = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {"pairs": len(added)} | {name: added[int(part * len(added))] for name, part in parts.items()}


async def held_open(job: dict[str, Any]) -> dict[str, Any]:
    data = request(job["url"], job["keys"][0], job["body"])
    clients: list[Client] = []
    for number in range(job["connections"]):
        client = await connect(job["url"])
        client.first_body = asyncio.get_running_loop().create_future()
        client.ask(data).add_done_callback(lambda answered: answered.exception())
        clients.append(client)
        if number % 100 == 99:
            await asyncio.gather(*(c.first_body for c in clients[-100:] if c.first_body is not None))
    await asyncio.gather(*(c.first_body for c in clients if c.first_body is not None))
    print(json.dumps({"open": len(clients)}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for client in clients:
        client.transport.abort()
    return {}


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    print(json.dumps(uvloop.run({"closed": closed, "paired": paired, "open": held_open}[job["kind"]](job))), flush=True)
