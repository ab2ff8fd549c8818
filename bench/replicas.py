"""What it costs that another process decides, and what more workers bring.

    make bench-replicas                                           # under four minutes; writes docs/scaling.md's tables
    make bench-replicas BENCH="--seconds 4 --part decisions"      # prints one of them

Part "decisions": an owner and 1, 2 or 4 askers, real processes with the real peer link, no HTTP. A decision is an
acquire and its release. First as many as they can make (askers keep 64 open each), then 10,000/s, or half as many as
they could make, at random times, for the latency: from the submit to the decision in the asker, beside the same asked
of a queue in the asker itself at the same moment. `asked`: requests that take two slots, which are never lent. `lent`:
requests of one slot, most of which use one that was lent.
Part "workers": `fairshare serve --workers` behind real connections, as in `make bench`; beside them as many gateways
that know nothing of each other, each with its part of the connections.
Part "limit": `owner_limit.py` with the costs that part "decisions" found.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from fairshare.compose import relieve_collector
from fairshare.core.decisions import Decision, DispatchQueue, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.gateway.replication import CODECS, ReplicaSpec, Replication
from fairshare.replicas.link import LinkOptions, PeerLink
from fairshare.replicas.member import MemberOptions
from fairshare.replicas.messages import Announce, Envelope, Message, OnLink, Released, Sent, Submitted
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.peers import PeerAddress
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from gateway import CONNECTIONS, STREAMED, WHOLE, key_of
from owner_limit import REPLICAS, Costs, simulated, table
from processes import BENCH, Process, free_ports, measured

OPEN_AT_ONCE = 64
TEAMS = 20
ASKERS = (1, 2, 4)
WORKERS = (1, 2, 4)
KINDS = {"asked": 2, "lent": 1}
"""To the slots of a request."""

HALF_RATE = 10_000.0
"""Decisions per second at which latency is measured at most: half of what an owner is to make."""

SECRET = b"s" * 32

STREAMS = 256
"""Open at once: enough that what idle workers cost is a small part."""

PAGE = BENCH.parent / "docs" / "scaling.md"


# ---------------------------------------------------------------------- one replica, for part "decisions"


def fresh(names: Sequence[str], parts: int) -> dict[str, DispatchQueue]:
    shares = {f"team{number}": f"1/{TEAMS}" for number in range(TEAMS)}
    pool = Pool("chat", 100_000 // parts, shares, 7 * 86400.0, time.monotonic)
    instance = Instance(id="http://127.0.0.1:1", part_slots=100_000, seats=200_000)
    return {"chat": make_queue(pool, Mode.HOLD, instances=[instance])}


class Asker:
    """Submits requests to a pool's queue, and ends each in the next turn after it is sent."""

    def __init__(self, queue: DispatchQueue) -> None:
        self.queue = queue
        self.slots = 1
        self.submitted: dict[str, float] = {}
        self.latencies: list[float] = []
        self.number = 0
        self.again = False

    def submit(self) -> None:
        self.number += 1
        request_id = str(self.number)
        self.submitted[request_id] = time.perf_counter()
        self.decided(self.queue.submitted(Request(request_id, f"team{self.number % TEAMS}", slots=self.slots)))

    def decided(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                self.latencies.append(time.perf_counter() - self.submitted.pop(decision.request_id))
                asyncio.get_running_loop().call_soon(self.ends, decision.request_id)

    def ends(self, request_id: str) -> None:
        self.decided(self.queue.released(request_id, 1.0))
        if self.again:
            self.submit()


async def replica(job: Mapping[str, Any], measures: Mapping[str, "Measure"]) -> None:
    """One process: the owner, which only waits, or an asker. Reads commands from standard input."""
    if "core" in job:
        os.sched_setaffinity(0, {job["core"]})
    folder = Path(job["folder"])
    asker: Asker | None = None
    if job["name"] != "owner":
        os.nice(5)  # whoever asks as fast as it can must not keep the owner from answering

    def decided(_: str, decisions: list[Decision]) -> None:
        if asker is not None:
            asker.decided(decisions)

    replication = Replication(
        ReplicaSpec(
            name=job["name"], listen=PeerAddress("", 0, str(folder / job["name"])), advertise=None, secret=SECRET
        ),
        database=Database(SqliteFile(folder / "store.sqlite3")),
        decided=decided,
        new_queues=fresh,
    )
    await replication.start()
    replication.add("chat", fresh(("chat",), 1), MemberOptions(owner=OwnerOptions(longest_request_seconds=60.0)))
    await replication.wait_for_owners()
    asker = Asker(replication.queue("chat"))
    relieve_collector()  # as a gateway does
    print(json.dumps({"role": replication.status("chat").role}), flush=True)
    commands: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: commands.put_nowait(sys.stdin.readline()))
    while command := await commands.get():
        order = json.loads(command)
        asker.latencies.clear()
        asker.slots = order["slots"]
        found = await measures[order["kind"]](asker, order)
        role = replication.status("chat").role
        if role != "follower":
            raise SystemExit(f"an asker is {role}, not follower, any more: the machine is too busy for this")
        print(json.dumps(found), flush=True)


Measure = Callable[[Asker, Mapping[str, Any]], Awaitable[dict[str, float]]]
"""What an asker does when it is told to, and what it found."""


async def closed(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """As many as it can make, `open` at a time."""
    began = time.perf_counter()
    asker.again = True
    for _ in range(job["open"]):
        asker.submit()
    await asyncio.sleep(job["seconds"])
    asker.again = False
    seconds = time.perf_counter() - began
    await all_decided(asker)
    return {"decisions": len(asker.latencies), "seconds": seconds}


async def paired(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """At random times, each beside the same asked of a queue in this process."""
    here = Asker(fresh(("chat",), 1)["chat"])
    here.slots = asker.slots
    rng = random.Random(job["seed"])

    def both() -> None:
        for each in rng.sample((asker, here), 2):
            each.submit()

    began = time.perf_counter()
    await at_random_times(job, both)
    seconds = time.perf_counter() - began
    await all_decided(asker)
    there, local = sorted(asker.latencies), sorted(here.latencies)
    return {
        "decisions": len(there),
        "seconds": seconds,
        "added_p50_us": (there[len(there) // 2] - local[len(local) // 2]) * 1e6,
        "added_p99_us": (there[int(len(there) * 0.99)] - local[int(len(local) * 0.99)]) * 1e6,
    }


async def at_random_times(job: Mapping[str, Any], once: Callable[[], None]) -> list[float]:
    """Calls `rate` times a second, for `seconds`, whatever is answered; returns how late each call was, in seconds."""
    due = began = time.perf_counter()
    rng = random.Random(job["seed"])
    late: list[float] = []
    while due < began + job["seconds"]:
        due += rng.expovariate(job["rate"])
        # Timers are coarser than the rate: with a core to itself the asker looks whether it is time.
        while (left := due - time.perf_counter()) > 0:  # noqa: ASYNC110 (time passes without an event)
            await asyncio.sleep(0 if job["spins"] else left)
        late.append(-left)
        once()
        await asyncio.sleep(0)  # who is late still hears what was decided
    return late


async def all_decided(asker: Asker) -> None:
    while asker.submitted:  # noqa: ASYNC110 (nobody tells when the last one is decided)
        await asyncio.sleep(0.001)


class Crowd:
    """So many replicas in one process, each with one request open: what an owner is told comes in many frames."""

    def __init__(self, slots: int) -> None:
        self.decisions = 0
        self.is_over = False
        self._links = 0
        self._slots = slots
        self._number = 0

    def connected(self, link: PeerLink[OnLink]) -> None:
        self._links += 1
        self._say(link, [Announce(f"crowd{self._links}", (), (), (), 0.0, True), self._next()])

    def received(self, link: PeerLink[OnLink], messages: list[OnLink]) -> None:
        for envelope in messages:
            if isinstance(envelope, Envelope):
                for sent in envelope.messages:
                    if isinstance(sent, Sent):
                        self.decisions += 1
                        ended = Released(self.decisions, sent.id, "chat", "team0", 1.0)
                        self._say(link, [ended] if self.is_over else [ended, self._next()])

    def disconnected(self, link: PeerLink[OnLink], reason: str) -> None:
        if not self.is_over:
            raise SystemExit(f"a link of the crowd was lost: {reason}")

    def _next(self) -> Submitted:
        self._number += 1
        return Submitted.of(Request(str(self._number), "team0", slots=self._slots), "chat")

    def _say(self, link: PeerLink[OnLink], messages: list[Message]) -> None:
        link.send(Envelope("chat", 1, True, messages))


async def crowd(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """As many as so many replicas can make that have one request open each."""
    handler = Crowd(asker.slots)
    links: list[PeerLink[OnLink]] = []
    for number in range(job["replicas"]):
        options = LinkOptions(
            replica=f"crowd{number}", secret=SECRET, codecs=CODECS, clock=time.monotonic, nonce=os.urandom
        )
        link = PeerLink(options, handler, dials=True, made=lambda _: None, ended=lambda _: None)
        await asyncio.get_running_loop().create_unix_connection(lambda link=link: link, job["path"])
        links.append(link)
    await asyncio.sleep(job["seconds"])
    handler.is_over = True
    await asyncio.sleep(0.1)  # until what is open is decided
    for link in links:
        link.close("that was all")
    return {"decisions": handler.decisions, "seconds": job["seconds"]}


MEASURES: dict[str, Measure] = {"closed": closed, "paired": paired, "crowd": crowd}


class Replica:
    """Its process, as the bench sees it."""

    def __init__(self, folder: Path, name: str, *, script: str = "replicas.py", **job: object) -> None:
        job |= {"folder": str(folder), "name": name}
        self._popen = subprocess.Popen(
            [sys.executable, str(BENCH / script), "--replica", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._popen.pid
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
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()


def decisions(askers: int, seconds: float) -> dict[str, dict[str, float]]:
    """The rows of so many askers, by kind; with one asker also what a frame costs."""
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

        rows: dict[str, dict[str, float]] = {}
        for kind, slots in KINDS.items():
            closed = {"kind": "closed", "slots": slots, "open": OPEN_AT_ONCE}
            run({**closed, "seconds": 0.5})
            most, cpu = run({**closed, "seconds": seconds})
            made = sum(answer["decisions"] for answer in most)
            rate = made / max(answer["seconds"] for answer in most)
            half_rate = min(rate / 2, HALF_RATE)
            spins = askers < (os.cpu_count() or 1)
            job = {"kind": "paired", "slots": slots, "rate": half_rate / askers, "seconds": seconds, "spins": spins}
            half, half_cpu = run(job)
            half_made = sum(answer["decisions"] for answer in half)
            # On a machine where askers and owner share cores, what the owner's CPU allows is more than what came out.
            rows[kind] = {
                "per_second": rate,
                "cpu_us": cpu / made * 1e6,
                "per_owner_core": made / cpu,
                "half_rate": half_made / max(answer["seconds"] for answer in half),
                "half_load": half_cpu / max(answer["seconds"] for answer in half),
                "half_cpu_us": half_cpu / half_made * 1e6,
                "added_p50_us": statistics.median(answer["added_p50_us"] for answer in half),
                "added_p99_us": max(answer["added_p99_us"] for answer in half),
            }
        if askers == 1:
            one, cpu = run({"kind": "closed", "slots": KINDS["asked"], "open": 1, "seconds": seconds / 2})
            rows["alone"] = {"cpu_us": cpu / one[0]["decisions"] * 1e6}
            path = str(Path(folder) / "owner")
            many, cpu = run(
                {"kind": "crowd", "slots": KINDS["asked"], "replicas": REPLICAS, "path": path, "seconds": seconds}
            )
            rows["crowd"] = {"cpu_us": cpu / many[0]["decisions"] * 1e6}
        return rows


def local_decision_us(seconds: float) -> float:
    """CPU of a decision without a peer: the queue in the same process."""
    queue, number = fresh(("chat",), 1)["chat"], 0
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        number += 1
        queue.submitted(Request(str(number), f"team{number % TEAMS}"))
        queue.released(str(number), 1.0)
    return (time.process_time() - cpu) / number * 1e6


def costs_of(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Costs:
    """Taken apart: of one asker with one request open each decision is a frame, and finds the owner asleep; of many
    askers with one open each it is a frame; with many open hardly any part of one."""
    one = rows["1"]
    decision = one["asked"]["cpu_us"]
    frame = one["crowd"]["cpu_us"] - decision
    wake = one["alone"]["cpu_us"] - one["crowd"]["cpu_us"]
    return Costs(wake * 1e-6, frame * 1e-6, decision * 1e-6, one["lent"]["cpu_us"] * 1e-6)


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


class Apart:
    """Gateways that know nothing of each other, beside as many workers."""

    def __init__(self, gateways: Sequence[Process]) -> None:
        self.gateways = gateways

    def pids(self) -> list[int]:
        return [pid for gateway in self.gateways for pid in gateway.pids()]

    def cpu_seconds(self) -> float:
        return sum(gateway.cpu_seconds() for gateway in self.gateways)


def loaded(urls: Sequence[str], body: Mapping[str, Any], connections: int, seconds: float) -> tuple[int, float]:
    """Requests that were answered, and how many a second: each URL gets its part of the connections."""
    job = {"kind": "closed", "url": " ".join(urls), "keys": [key_of(0), key_of(1)], "body": body}
    found = measured({**job, "connections": connections, "seconds": seconds})
    return found["requests"], found["requests"] / found["seconds"]


Targets = dict[str, tuple[Process | Apart, list[str]]]
"""The gateways of a row, and where they are reached."""


@contextmanager
def gateways(counts: Sequence[int]) -> Generator[tuple[Process, Targets]]:
    """An engine, and before it so many workers, and so many gateways apart."""
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
        alone = [serving(engine, Path(folder), 1) for _ in range(max(counts))]
        for gateway in alone:
            stack.callback(gateway.end)
        targets: Targets = {}
        for count in counts:
            if count > 1:
                workers = serving(engine, Path(folder), count)
                stack.callback(workers.end)
                targets[str(count)] = (workers, [workers.url])
                part = alone[:count]
                targets[f"{count} apart"] = (Apart(part), [gateway.url for gateway in part])
            else:
                targets["1"] = (alone[0], [alone[0].url])
        yield engine, targets


def requests(counts: Sequence[int], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Requests/s and CPU per request, whole answers and streams, interleaved."""
    with gateways(counts) as (_, targets):
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
        for number in range(-1, rounds):
            for name in random.Random(number).sample(list(targets), len(targets)):
                target, urls = targets[name]
                for kind, body, connections in (("whole", WHOLE, CONNECTIONS), ("streamed", STREAMED, STREAMS)):
                    if kind == "streamed" and isinstance(target, Apart):
                        continue
                    before = target.cpu_seconds()
                    made, rate = loaded(urls, body, connections, seconds if number >= 0 else 1.0)
                    cpu = target.cpu_seconds() - before
                    if number >= 0:  # the first round warms up
                        figures[name].setdefault(f"{kind}_per_second", []).append(rate)
                        figures[name].setdefault(f"{kind}_cpu_us", []).append(cpu / made * 1e6)
        return {
            name: {kind: statistics.median(values) for kind, values in rows.items()} for name, rows in figures.items()
        }


# ---------------------------------------------------------------------- what is written


def decisions_table(local_us: float, rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    lines = [
        f"CPU of a decision in the same process: {local_us:.0f} µs. At the owner, asked: with one request open at a "
        f"time {rows['1']['alone']['cpu_us']:.0f} µs, of {REPLICAS} replicas with one open each "
        f"{rows['1']['crowd']['cpu_us']:.0f} µs.",
        "",
        "| askers | | decisions/s that came out | owner's CPU per decision | so one core makes "
        "| at a rate of | load of the owner's core | added p50 | added p99 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for askers, by_kind in rows.items():
        for kind in KINDS:
            row = by_kind[kind]
            lines.append(
                f"| {askers} | {kind} | {row['per_second']:,.0f} | {row['cpu_us']:.1f} µs "
                f"| {row['per_owner_core']:,.0f}/s | {row['half_rate']:,.0f}/s | {row['half_load']:.0%} "
                f"| {row['added_p50_us'] / 1e3:.2f} ms | {row['added_p99_us'] / 1e3:.2f} ms |"
            )
    return lines


def workers_table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [
        "| workers | requests/s | CPU per request | more than one's | CPU per stream of 100 chunks |",
        "| --- | --- | --- | --- | --- |",
    ]
    one = rows["1"]["whole_cpu_us"]
    for name, row in rows.items():
        streamed = f"{row['streamed_cpu_us']:,.0f} µs" if "streamed_cpu_us" in row else ""
        more = f"{row['whole_cpu_us'] / one - 1:+.0%}" if name != "1" else ""
        lines.append(
            f"| {name} | {row['whole_per_second']:,.0f} | {row['whole_cpu_us']:.0f} µs | {more} | {streamed} |"
        )
    return lines


def write(part: str, lines: Sequence[str], *, target: str = "bench-replicas") -> None:
    """Between the markers of that part."""
    begin, end = f"<!-- {part}: begin (make {target}) -->", f"<!-- {part}: end -->"
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    assert rest, f"{PAGE.name} has no line {begin}"
    PAGE.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}", "utf-8")


def stopped(number: int, frame: object) -> None:
    """Ends what was started."""
    sys.exit("stopped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--part", choices=("decisions", "workers", "limit"), help="only this one, and nothing is written"
    )
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        uvloop.run(replica(json.loads(arguments.replica), MEASURES))
        return
    relieve_collector()
    signal.signal(signal.SIGTERM, stopped)
    parts = (arguments.part,) if arguments.part else ("decisions", "workers", "limit")
    result: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} when it began",
    }
    tables: dict[str, list[str]] = {}

    def shows(part: str, lines: list[str]) -> None:
        tables[part] = lines
        print("\n".join([f"\n{part}", *lines]), flush=True)

    if "decisions" in parts or "limit" in parts:
        local_us = local_decision_us(min(1.0, arguments.seconds))
        rows = {
            str(askers): decisions(askers, arguments.seconds) for askers in (ASKERS if "decisions" in parts else (1,))
        }
        result["decisions"] = {"same_process_cpu_us": local_us, **rows}
        shows("decisions", decisions_table(local_us, rows))
        if "limit" in parts:
            costs = costs_of(rows)
            found = simulated(costs)
            result["limit"] = {kind: [asdict(each) for each in each_rate] for kind, each_rate in found.items()}
            shows(
                "limit",
                [
                    f"To be woken costs {costs.wake * 1e6:.0f} µs, a frame {costs.frame * 1e6:.0f} µs, a decision "
                    f"{costs.decision * 1e6:.0f} µs, a charge {costs.charge * 1e6:.0f} µs; {REPLICAS} replicas, "
                    f"{TEAMS} teams.",
                    "",
                    *table(found),
                ],
            )
    if "workers" in parts:
        result["workers"] = requests(WORKERS, arguments.rounds, arguments.seconds)
        shows("workers", workers_table(result["workers"]))
    if arguments.part is None:
        out = BENCH / "results" / "replicas.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        for part, lines in tables.items():
            write(part, [f"{result['at'][:10]}, {result['machine']}.", "", *lines])


if __name__ == "__main__":
    main()
