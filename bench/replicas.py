"""What it costs that another process decides, and what more workers bring.

    make bench-replicas           # the tables below, and bench/results/replicas.json
    make bench-replicas BENCH="--seconds 4 --part decisions"

Part "decisions": an owner and 1, 2 or 4 askers, real processes with the real peer link, no HTTP. A decision is an
acquire and its release. First as many as they can make (askers keep 64 open each), then half as many (at most 10,000/s)
at random times, for the latency: from the submit to the decision in the asker, beside the same queue asked in the same
process.
Part "workers": `fairshare serve --workers` behind real connections, as in `make bench`.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from fairshare.core.decisions import Decision, DispatchQueue, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.gateway.replication import ReplicaSpec, Replication
from fairshare.replicas.member import MemberOptions
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.peers import PeerAddress
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from gateway import CONNECTIONS, STREAMED, WHOLE, key_of
from processes import BENCH, Process, free_ports, measured

OPEN_AT_ONCE = 64
TEAMS = 20

HALF_RATE = 10_000.0
"""Decisions per second at which latency is measured at most: half of what an owner is to make."""


# ---------------------------------------------------------------------- one replica, for part "decisions"


def fresh(names: Sequence[str], parts: int) -> dict[str, DispatchQueue]:
    shares = {f"team{number}": f"1/{TEAMS}" for number in range(TEAMS)}
    pool = Pool("chat", 100_000 // parts, shares, 7 * 86400.0, time.monotonic)
    instance = Instance(id="http://127.0.0.1:1", part_slots=100_000, seats=200_000)
    return {"chat": make_queue(pool, Mode.HOLD, instances=[instance])}


class Asker:
    """Submits requests to a pool's queue, and ends each as soon as it is sent."""

    def __init__(self, queue: DispatchQueue) -> None:
        self.queue = queue
        self.submitted: dict[str, float] = {}
        self.latencies: list[float] = []
        self.number = 0
        self.again = False

    def submit(self) -> None:
        self.number += 1
        request_id = str(self.number)
        self.submitted[request_id] = time.perf_counter()
        self.decided(self.queue.submitted(Request(request_id, f"team{self.number % TEAMS}")))

    def decided(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                self.latencies.append(time.perf_counter() - self.submitted.pop(decision.request_id))
                self.decided(self.queue.released(decision.request_id, 1.0))
                if self.again:
                    self.submit()


async def replica(job: dict[str, Any]) -> None:
    """One process: the owner, which only waits, or an asker. Reads commands from standard input."""
    folder = Path(job["folder"])
    asker: Asker | None = None

    def decided(_: str, decisions: list[Decision]) -> None:
        if asker is not None:
            asker.decided(decisions)

    replication = Replication(
        ReplicaSpec(
            name=job["name"], listen=PeerAddress("", 0, str(folder / job["name"])), advertise=None, secret=b"s" * 32
        ),
        database=Database(SqliteFile(folder / "store.sqlite3")),
        decided=decided,
        new_queues=fresh,
    )
    await replication.start()
    replication.add("chat", fresh(("chat",), 1), MemberOptions(owner=OwnerOptions(longest_request_seconds=60.0)))
    await replication.wait_for_owners()
    asker = Asker(replication.queue("chat"))
    print(json.dumps({"role": replication.status("chat").role}), flush=True)
    commands: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: commands.put_nowait(sys.stdin.readline()))
    while command := await commands.get():
        print(json.dumps(await asked(asker, json.loads(command))), flush=True)


async def asked(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    asker.latencies.clear()
    began = time.perf_counter()
    if job["kind"] == "closed":
        asker.again = True
        for _ in range(OPEN_AT_ONCE):
            asker.submit()
        await asyncio.sleep(job["seconds"])
        asker.again = False
    else:
        due, rng = began, random.Random(job["seed"])
        while due < began + job["seconds"]:
            due += rng.expovariate(job["rate"])
            # Whatever is due by now goes: the timer is coarser than the rate.
            if due > time.perf_counter():
                await asyncio.sleep(due - time.perf_counter())
            asker.submit()
    seconds = time.perf_counter() - began
    while asker.submitted:  # noqa: ASYNC110 (nobody tells when the last one is decided)
        await asyncio.sleep(0.001)
    found = sorted(asker.latencies)
    return {
        "decisions": len(found),
        "seconds": seconds,
        "p50_us": found[len(found) // 2] * 1e6,
        "p99_us": found[int(len(found) * 0.99)] * 1e6,
    }


class Replica:
    """Its process, as the bench sees it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._popen = subprocess.Popen(
            [
                sys.executable,
                str(BENCH / "replicas.py"),
                "--replica",
                json.dumps({"folder": str(folder), "name": name}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.role = self.answer()["role"]

    def answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise SystemExit(f"a replica ended with code {self._popen.wait()}")
        return json.loads(line)

    def ask(self, job: Mapping[str, Any]) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(job) + "\n")
        self._popen.stdin.flush()

    def cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self._popen.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()


def decisions(askers: int, seconds: float) -> dict[str, float]:
    """One row of the table of decisions."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        owner = Replica(Path(folder), "owner")
        stack.callback(owner.end)
        assert owner.role == "owner", owner.role
        others = [Replica(Path(folder), f"asker{number}") for number in range(askers)]
        for other in others:
            stack.callback(other.end)
            assert other.role == "follower", other.role

        def run(job: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float]:
            before = owner.cpu_seconds()
            for number, other in enumerate(others):
                other.ask({**job, "seed": number})
            answers = [other.answer() for other in others]
            return answers, owner.cpu_seconds() - before

        run({"kind": "closed", "seconds": 0.5})
        most, cpu = run({"kind": "closed", "seconds": seconds})
        made = sum(answer["decisions"] for answer in most)
        rate = made / max(answer["seconds"] for answer in most)
        half, half_cpu = run({"kind": "open", "rate": min(rate / 2, HALF_RATE) / askers, "seconds": seconds})
        half_made = sum(answer["decisions"] for answer in half)
        # On a machine where askers and owner share cores, what the owner's CPU would allow is more than what came out.
        return {
            "per_second": rate,
            "cpu_us_per_decision": cpu / made * 1e6,
            "per_owner_core": made / cpu,
            "half_rate": half_made / seconds,
            "half_p50_us": statistics.median(answer["p50_us"] for answer in half),
            "half_p99_us": max(answer["p99_us"] for answer in half),
            "half_cpu_us_per_decision": half_cpu / half_made * 1e6,
        }


def local_decisions(seconds: float) -> dict[str, float]:
    """The same without a peer: the queue in the same process."""
    asker = Asker(fresh(("chat",), 1)["chat"])
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        asker.submit()
    spent = time.process_time() - cpu
    found = sorted(asker.latencies)
    return {
        "per_second": len(found) / seconds,
        "cpu_us_per_decision": spent / len(found) * 1e6,
        "half_p50_us": found[len(found) // 2] * 1e6,
        "half_p99_us": found[int(len(found) * 0.99)] * 1e6,
    }


# ---------------------------------------------------------------------- part "workers"


def serving(engine: Process, folder: Path, workers: int) -> Process:
    port, admin = free_ports(2)
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "limits": {"max_connections": 10_000},
        "store": "none",
        "pools": [
            {
                "name": "chat",
                "capacity": 10_000,
                "half_life": "7d",
                "shares": {"team0": "1/2", "team1": "1/2"},
                "models": ["tiny"],
                "instances": [{"url": engine.url, "max_num_seqs": 20_000}],
            }
        ],
        "teams": [
            {"name": f"team{n}", "keys": [{"sha256": hashlib.sha256(key_of(n).encode()).hexdigest()}]} for n in range(2)
        ],
    }
    path = folder / f"workers-{workers}.yaml"
    path.write_bytes(msgspec.json.encode(config))
    count = ["--workers", str(workers)] if workers > 1 else []
    return Process(
        f"workers-{workers}",
        [sys.executable, "-m", "fairshare", "serve", "-c", str(path), "--log-level", "error", *count],
        f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{admin}/readyz",
    )


def requests(counts: Sequence[int], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Requests/s and CPU per request, whole answers and streams, interleaved."""
    keys = [key_of(0), key_of(1)]
    with tempfile.TemporaryDirectory(prefix="fairshare-bench-") as folder, ExitStack() as stack:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        engine = Process(
            "engine",
            [sys.executable, str(BENCH / "fake_engine.py"), "--port", str(port)],
            url,
            health_url=f"{url}/health",
        )
        stack.callback(engine.end)
        targets = {count: serving(engine, Path(folder), count) for count in counts}
        for target in targets.values():
            stack.callback(target.end)
        figures: dict[int, dict[str, list[float]]] = {count: {} for count in counts}
        for number in range(-1, rounds):
            for count in random.Random(number).sample(list(counts), len(counts)):
                target = targets[count]
                for name, body in (("whole", WHOLE), ("streamed", STREAMED)):
                    job = {"kind": "closed", "url": target.url, "keys": keys, "body": body}
                    before = target.cpu_seconds()
                    found = measured({**job, "connections": CONNECTIONS, "seconds": seconds if number >= 0 else 1.0})
                    cpu = target.cpu_seconds() - before
                    if number >= 0:  # the first round warms up
                        row = figures[count]
                        row.setdefault(f"{name}_per_second", []).append(found["requests"] / found["seconds"])
                        row.setdefault(f"{name}_cpu_us", []).append(cpu / found["requests"] * 1e6)
        return {
            str(count): {name: statistics.median(values) for name, values in rows.items()}
            for count, rows in figures.items()
        }


def shown(console: Console, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title=title)
    table.add_column("")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for label, row in rows.items():
        table.add_row(label, *(f"{row[name]:,.0f}" if name in row else "" for name in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("decisions", "workers"))
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        uvloop.run(replica(json.loads(arguments.replica)))
        return
    console = Console(width=160)
    result: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if arguments.part != "workers":
        rows = {"same process": local_decisions(arguments.seconds)}
        for askers in (1, 2, 4):
            rows[f"{askers} askers"] = decisions(askers, arguments.seconds)
        result["decisions"] = rows
        shown(console, "Decisions (an acquire and its release) of one owner", rows)
    if arguments.part != "decisions":
        result["workers"] = requests((1, 2, 4), arguments.rounds, arguments.seconds)
        shown(console, f"Requests, {CONNECTIONS} connections", result["workers"])
    path = BENCH / "results" / "replicas.json"
    if arguments.part is None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
