"""What binds where replicas are: of a request with more workers, of a decision that is asked, and of the time it waits.

    make bench-replicas-profile                                        # some five minutes; docs/scaling.md's profiles
    make bench-replicas-profile BENCH="--seconds 3 --part asked"       # prints one of them

Part "requests": gateways behind real connections, as part "workers" of `make bench-replicas`; beside CPU per request
where it went (`perf` takes samples), and what the kernel counted: how often the event loops slept and were woken, how
often they were taken off a core. Once wherever the kernel puts them, once all gateways on one core with engine and load
on the other. Beside them one gateway with fewer connections, which finds as few of them ready in a turn of its event
loop as one of several.
Part "decision": an asked decision at its owner, part by part: the same bytes through the same code without sockets,
then real processes; and the Python instructions of a decision on both sides.
Part "asked": an owner with a core to itself, and 1, 2 or 4 askers that share the other and ask 10,000 times a second
together, at random times. In turn with it the same from a peer that only sends back what it is sent, over the same kind
of socket: what the sockets and the askers' own core take.
"""

import argparse
import asyncio
import hmac
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import uvloop

from fairshare.compose import relieve_collector
from fairshare.core.decisions import Request
from fairshare.gateway.replication import CODECS, ReplicaSpec, Replication
from fairshare.replicas.link import LENGTH_BYTES, TAG_BYTES, LinkOptions, PeerLink
from fairshare.replicas.member import MemberOptions
from fairshare.replicas.messages import VERSION, Announce, Envelope, Estate, Message, OnLink, Released, Sent, Submitted
from fairshare.replicas.owner import Owner, OwnerOptions, Session
from fairshare.replicas.peers import PeerAddress
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from gateway import CONNECTIONS, WHOLE
from processes import BENCH, Process
from relay import counting
from replicas import (
    ASKERS,
    HALF_RATE,
    KINDS,
    MEASURES,
    OPEN_AT_ONCE,
    SECRET,
    TEAMS,
    Apart,
    Asker,
    Measure,
    Replica,
    all_decided,
    at_random_times,
    closed,
    fresh,
    gateways,
    loaded,
    replica,
    stopped,
    write,
)

ASKED_SLOTS = KINDS["asked"]
FRAMES = (1, 16)
"""Decisions in a frame."""
REPEATS = 5
DECISIONS = 4_000
SAVED_SECONDS = 2.5
"""After so long an asker has heard that what it charged is saved."""
ECHOED = b"?" + bytes(99)
"""As long as a frame with one question. The peer sends it back."""
UNANSWERED = b"." + bytes(99)
"""As a frame with one release. The peer reads it."""

ROWS = (
    ("1", CONNECTIONS),
    ("1", CONNECTIONS // 2),
    ("1", CONNECTIONS // 4),
    ("2", CONNECTIONS),
    ("2 apart", CONNECTIONS),
    ("4", CONNECTIONS),
    ("4 apart", CONNECTIONS),
    ("1", 4 * CONNECTIONS),
    ("4", 4 * CONNECTIONS),
)
PINNED = (
    ("1", CONNECTIONS),
    ("1", CONNECTIONS // 4),
    ("4", CONNECTIONS),
    ("4 apart", CONNECTIONS),
)


# ---------------------------------------------------------------------- part "requests"


@dataclass(frozen=True, slots=True)
class Spent:
    """What processes took, in seconds, and what happened to their main threads, as the kernel counted."""

    cpu: float
    waited: float
    """Could run, and had no core."""
    wakes: float
    """Slept, because there was nothing to do."""
    preempted: float
    """Taken off a core."""

    @staticmethod
    def of(pids: Sequence[int]) -> "Spent":
        cpu = waited = wakes = preempted = 0
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                ran, queued, _ = (thread / "schedstat").read_text().split()
                cpu, waited = cpu + int(ran), waited + int(queued)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                wakes += int(value) if name == "voluntary_ctxt_switches" else 0
                preempted += int(value) if name == "nonvoluntary_ctxt_switches" else 0
        return Spent(cpu / 1e9, waited / 1e9, wakes, preempted)

    def since(self, before: "Spent", requests: int) -> "Spent":
        """Of each of so many requests."""
        return Spent(*((getattr(self, f.name) - getattr(before, f.name)) / requests for f in fields(Spent)))


class Where(StrEnum):
    """What a processor was in when a sample was taken."""

    PYTHON = "Python"
    EVENT_LOOP = "uvloop"
    KERNEL = "kernel"
    LIBRARIES = "other libraries"

    @staticmethod
    def of(binary: str) -> "Where":
        if binary.startswith("["):  # as `perf` names the kernel, but for what the kernel maps into every process
            return Where.LIBRARIES if binary == "[vdso]" else Where.KERNEL
        if "python3" in binary and "cpython" not in binary:
            return Where.PYTHON
        return Where.EVENT_LOOP if binary.startswith("loop.cpython") else Where.LIBRARIES


class Samples:
    """Where processes spend their CPU between `__enter__` and `__exit__`, by `perf`: a thousand looks a second."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.parts: dict[Where, float] = dict.fromkeys(Where, 0.0)
        """Of their CPU; together 1."""
        self._pids = ",".join(map(str, pids))

    def __enter__(self) -> "Samples":
        self._file = tempfile.NamedTemporaryFile(prefix="fairshare-bench-", suffix=".perf")
        # Of the clock, not of the processor's counters: virtual machines have none.
        what = ["-q", "-e", "cpu-clock", "-F", "999", "-o", self._file.name, "-p", self._pids]
        self._perf = subprocess.Popen(["perf", "record", *what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._perf.send_signal(signal.SIGINT)
        self._perf.wait()
        shown = ["--stdio", "-q", "--sort", "dso", "-F", "overhead,dso", "-t", ";"]
        report = subprocess.run(["perf", "report", "-i", self._file.name, *shown], capture_output=True, text=True)
        self._file.close()
        for line in report.stdout.splitlines():
            part, found, binary = line.partition(";")
            if found:
                self.parts[Where.of(binary.strip())] += float(part.strip().rstrip("%")) / 100.0


def pin(pids: Sequence[int], cores: set[int]) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def placed(targets: Mapping[str, tuple[Process | Apart, list[str]]], engine: Process, *, is_pinned: bool) -> None:
    """All gateways on the last core, engine and load (which inherits from here) on the others; or all anywhere."""
    cores = set(range(os.cpu_count() or 1))
    last = {max(cores)}
    for target, _ in targets.values():
        pin(target.pids(), last if is_pinned else cores)
    for pids in (engine.pids(), [os.getpid()]):
        pin(pids, cores - last if is_pinned and len(cores) > 1 else cores)


def requests(rounds: int, seconds: float) -> dict[str, Any]:
    """Per row, medians of the rounds; and what gateways cost that have nothing to do."""
    found: dict[str, Any] = {}
    with gateways((1, 2, 4)) as (engine, targets):
        for placement, rows in (("anywhere", ROWS), ("one core", PINNED)):
            placed(targets, engine, is_pinned=placement == "one core")
            figures: dict[tuple[str, int], list[dict[str, float]]] = {row: [] for row in rows}
            for number in range(-1, rounds):
                for name, connections in rows:
                    target, urls = targets[name]
                    before = Spent.of(target.pids())
                    with Samples(target.pids()) as samples:
                        made, rate = loaded(urls, WHOLE, connections, seconds if number >= 0 else 0.5)
                    spent = asdict(Spent.of(target.pids()).since(before, made))
                    if number >= 0:  # the first round warms up
                        figures[name, connections].append({"per_second": rate, **spent, **samples.parts})
            found[placement] = [
                {
                    "gateways": name,
                    "connections": connections,
                    **{figure: statistics.median(row[figure] for row in each) for figure in each[0]},
                }
                for (name, connections), each in figures.items()
            ]
        placed(targets, engine, is_pinned=False)
        idle_seconds = 2.0 * seconds
        before = {name: Spent.of(target.pids()) for name, (target, _) in targets.items()}
        time.sleep(idle_seconds)
        found["idle"] = {
            name: {
                "cores": (after := Spent.of(target.pids()).since(before[name], 1)).cpu / idle_seconds,
                "wakes_per_second": after.wakes / idle_seconds,
            }
            for name, (target, _) in targets.items()
        }
    return found


def requests_table(found: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for placement, said in (("anywhere", "Anywhere"), ("one core", "All gateways on one core")):
        one = found[placement][0]["cpu"]
        lines += [
            f"{said}:",
            "",
            f"| gateways | connections | requests/s | CPU per request | more than one's | {' | '.join(Where)} "
            "| requests per wake-up | taken off a core, of 1,000 requests | waited for a core |",
            f"| --- | --- | --- | --- | --- |{' --- |' * len(Where)} --- | --- | --- |",
        ]
        for row in found[placement]:
            more = f"{row['cpu'] / one - 1:+.0%}" if row["cpu"] != one else ""
            where = " | ".join(f"{row[each] * row['cpu'] * 1e6:.0f} µs" for each in Where)
            lines.append(
                f"| {row['gateways']} | {row['connections']} | {row['per_second']:,.0f} | {row['cpu'] * 1e6:.0f} µs "
                f"| {more} | {where} "
                f"| {1 / row['wakes']:.1f} | {row['preempted'] * 1e3:.0f} | {row['waited'] * 1e6:.0f} µs |"
            )
        lines.append("")
    lines += ["Idle:", "", "| gateways | of a core, together | wake-ups/s, together |", "| --- | --- | --- |"]
    for name, row in found["idle"].items():
        lines.append(f"| {name} | {row['cores']:.1%} | {row['wakes_per_second']:.0f} |")
    return lines


# ---------------------------------------------------------------------- part "decision"


class Memory:
    """A transport whose peer takes everything at once."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        raise AssertionError("a link in memory was cut")

    def taken(self) -> bytes:
        written, self.written = self.written, b""
        return written


class Unheard:
    """A side of a link that does not look at what it is told."""

    def connected(self, link: PeerLink[OnLink]) -> None:
        pass

    def received(self, link: PeerLink[OnLink], messages: list[OnLink]) -> None:
        pass

    def disconnected(self, link: PeerLink[OnLink], reason: str) -> None:
        raise AssertionError(reason)


def said(number: int, decisions: int) -> list[Message]:
    """What an asker says in a turn that keeps as many open: those before have ended, and as many are asked for."""
    messages: list[Message] = []
    for each in range(number, number + decisions):
        before = each - decisions
        if before >= 0:
            messages.append(Released(before + 1, str(before), "chat", f"team{before % TEAMS}", 1.0))
        messages.append(Submitted.of(Request(str(each), f"team{each % TEAMS}", slots=ASKED_SLOTS), "chat"))
    return messages


class OwnerInMemory:
    """A real owner, and a link on which an asker's frames are handed to it."""

    def __init__(self, owner: Replication, folder: Path) -> None:
        options = {"secret": SECRET, "codecs": CODECS, "clock": time.monotonic, "nonce": os.urandom}

        def ignore(_: PeerLink[OnLink]) -> None:
            pass

        self.ours = PeerLink(LinkOptions(replica="owner", **options), owner, dials=False, made=ignore, ended=ignore)
        self.theirs = PeerLink(
            LinkOptions(replica="asker", **options), Unheard(), dials=True, made=ignore, ended=ignore
        )
        self.out, self.back = Memory(), Memory()
        self.theirs.connection_made(cast("asyncio.Transport", self.out))
        self.ours.connection_made(cast("asyncio.Transport", self.back))
        for _ in range(2):
            to_owner, to_asker = self.out.taken(), self.back.taken()
            self.ours.data_received(to_owner)
            self.theirs.data_received(to_asker)
        assert self.ours.is_up, self.ours.reason
        assert self.theirs.is_up, self.theirs.reason

    async def frame(self, messages: Sequence[Message]) -> bytes:
        """What the asker's link makes of them."""
        self.theirs.send(Envelope("chat", 1, True, messages))
        await asyncio.sleep(0)
        return self.out.taken()

    async def heard(self, frames: Sequence[bytes]) -> list[bytes]:
        """What the owner answers to each, in a turn of the event loop for each."""
        answers: list[bytes] = []
        for frame in frames:
            self.ours.data_received(frame)
            await asyncio.sleep(0)
            answers.append(self.back.taken())
        return answers


def payloads(written: bytes) -> Iterator[bytes]:
    """Of each frame in it."""
    while written:
        end = LENGTH_BYTES + int.from_bytes(written[:LENGTH_BYTES])
        if payload := written[LENGTH_BYTES + TAG_BYTES : end]:
            yield payload
        written = written[end:]


def sent(spoken: Iterable[Sequence[OnLink]]) -> int:
    """How many requests an owner let go."""
    envelopes = (each for on_link in spoken for each in on_link if isinstance(each, Envelope))
    return sum(isinstance(message, Sent) for envelope in envelopes for message in envelope.messages)


def best_us(work: Callable[[], object], decisions: int) -> float:
    """CPU of a decision, the best of several."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        best = min(best, (time.thread_time() - began) / decisions * 1e6)
    return best


async def owner_parts(per_frame: int) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds of a decision (a question, its answer, its end), and instructions by file."""
    with tempfile.TemporaryDirectory() as folder:
        owner = Replication(
            ReplicaSpec(name="owner", listen=PeerAddress("", 0, f"{folder}/owner"), advertise=None, secret=SECRET),
            database=Database(SqliteFile(Path(folder) / "store.sqlite3")),
            decided=lambda _, decisions: None,
            new_queues=fresh,
        )
        await owner.start()
        owner.add("chat", fresh(("chat",), 1), MemberOptions(owner=OwnerOptions(longest_request_seconds=60.0)))
        await owner.wait_for_owners()
        memory = OwnerInMemory(owner, Path(folder))
        await memory.heard([await memory.frame([Announce("asker", (), (), (), 0.0, True)])])

        number, all_in, turn = 0, float("inf"), float("inf")
        messages: list[list[Message]] = []
        frames: list[bytes] = []
        answers: list[bytes] = []
        for _ in range(REPEATS):
            messages = [said(each, per_frame) for each in range(number, number + DECISIONS, per_frame)]
            number += DECISIONS
            frames = [await memory.frame(each) for each in messages]
            began = time.thread_time()
            answers = await memory.heard(frames)
            all_in = min(all_in, (time.thread_time() - began) / DECISIONS * 1e6)
            began = time.thread_time()
            for _ in frames:
                await asyncio.sleep(0)
            turn = min(turn, (time.thread_time() - began) / DECISIONS * 1e6)
        counts: Counter[str] = Counter()
        few = [await memory.frame(said(number + each * per_frame, per_frame)) for each in range(100)]
        sys.settrace(counting(counts))
        decided = await memory.heard(few)
        sys.settrace(None)
        await owner.stop()

    codec = CODECS[VERSION]
    heard = [payload for frame in frames for payload in payloads(frame)]
    replies = [payload for answer in answers for payload in payloads(answer)]
    spoken = [codec.decode(reply) for reply in replies]
    keyed = hmac.new(bytes(32), digestmod="sha256")

    def authenticate() -> None:
        for payload in (*heard, *replies):
            mac = keyed.copy()
            mac.update((0).to_bytes(8) + payload)
            mac.digest()

    def decide(owned: Owner, session: Session) -> None:
        for each in messages:
            owned.received(session, each, 0.0)
            session.outbox.clear()

    def queue_alone() -> None:
        queue = fresh(("chat",), 1)["chat"]
        for each in range(DECISIONS):
            queue.submitted(Request(str(each), f"team{each % TEAMS}", slots=ASKED_SLOTS))
            queue.released(str(each), 1.0)

    def owner_alone() -> float:
        options = OwnerOptions(longest_request_seconds=60.0)
        owned = Owner(
            epoch=1,
            queues=fresh(("chat",), 1),
            estate=Estate({}, {}),
            options=options,
            now=0.0,
            decides_until=lambda: 1e9,
        )
        session = Session("asker", 1)
        owned.received(session, [Announce("asker", (), (), (), 0.0, True)], 0.0)
        began = time.thread_time()
        decide(owned, session)
        return (time.thread_time() - began) / DECISIONS * 1e6

    parts = {
        "a turn of the event loop": turn,
        "authenticate": best_us(authenticate, DECISIONS),
        "decode": best_us(lambda: [codec.decode(payload) for payload in heard], DECISIONS),
        "encode": best_us(lambda: [codec.encode(each) for each in spoken], DECISIONS),
        "the dispatch queue": (queue := best_us(queue_alone, DECISIONS)),
        "the owner's books of its replicas": min(owner_alone() for _ in range(REPEATS)) - queue,
    }
    parts["link, lease and timers"] = all_in - sum(parts.values())
    decisions = sent(codec.decode(payload) for answer in decided for payload in payloads(answer))
    if sent(spoken) != DECISIONS or decisions != len(few) * per_frame:
        raise SystemExit("the owner lost its lease: the machine is too busy for this")
    return parts, Counter({file: round(n / decisions) for file, n in counts.items() if file.startswith("fairshare/")})


async def local(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """As `closed`, of a queue in this process."""
    here = Asker(fresh(("chat",), 1)["chat"])
    here.slots = asker.slots
    return await closed(here, job)


async def counted(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """The instructions of a decision at the asker, by file."""
    measure = ASKER_MEASURES[job["measure"]]
    await measure(asker, {**job, "seconds": 0.3})  # afterwards nothing is met for the first time
    await asyncio.sleep(SAVED_SECONDS)
    asker.latencies.clear()
    counts: Counter[str] = Counter()
    sys.settrace(counting(counts))
    found = await measure(asker, job)
    sys.settrace(None)
    return {file: n / found["decisions"] for file, n in counts.items() if file.startswith("fairshare/")}


def decision(seconds: float) -> dict[str, Any]:
    """What a decision costs, where."""
    found: dict[str, Any] = {"owner": {}, "instructions": {}, "processes": {}}
    for per_frame in FRAMES:
        parts, counts = uvloop.run(owner_parts(per_frame))
        found["owner"][per_frame] = parts
        found["instructions"][f"asked, at the owner, {per_frame} in a frame"] = counts
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        owner = started(stack, folder, "owner")
        asker = started(stack, folder, "asker")
        for case, kind, slots in [("in one process", "local", 1), *((kind, "closed", n) for kind, n in KINDS.items())]:
            case += "" if kind == "local" else ", at the asker"
            job = {"kind": "counted", "measure": kind, "slots": slots, "open": OPEN_AT_ONCE, "seconds": SAVED_SECONDS}
            asker.ask(job)
            found["instructions"][case] = asker.answer()
        cases = [("in one process", "local", 1, OPEN_AT_ONCE)] + [
            (f"{kind}, {opened} open", "closed", slots, opened)
            for kind, slots in KINDS.items()
            for opened in (1, OPEN_AT_ONCE)
        ]
        for case, kind, slots, opened in cases:
            job = {"kind": kind, "slots": slots, "open": opened, "seconds": seconds}
            asker.ask({**job, "seconds": 0.3})
            asker.answer()
            before = Spent.of([owner.pid]), Spent.of([asker.pid])
            with Samples([owner.pid]) as samples:
                asker.ask(job)
                made = asker.answer()["decisions"]
            at_owner, at_asker = (
                Spent.of([each.pid]).since(then, made) for each, then in zip((owner, asker), before, strict=True)
            )
            found["processes"][case] = {
                "owner_cpu_us": at_owner.cpu * 1e6,
                "owner_wakes": at_owner.wakes,
                **{where: part * at_owner.cpu * 1e6 for where, part in samples.parts.items()},
                "asker_cpu_us": at_asker.cpu * 1e6,
            }
    return found


PACKAGES = {
    "fairshare/core/": "decide (`core`)",
    "fairshare/replicas/owner.py": "the owner's books (`replicas/owner.py`)",
    "fairshare/replicas/replica.py": "the asker's books (`replicas/replica.py`)",
    "fairshare/replicas/member.py": "lease (`replicas/member.py`, `lease.py`)",
    "fairshare/replicas/lease.py": "lease (`replicas/member.py`, `lease.py`)",
    "fairshare/replicas/": "link and messages (`replicas/link.py`, `messages.py`)",
    "fairshare/gateway/": "links and timers of the process (`gateway/replication.py`)",
}


def by_package(counts: Mapping[str, float]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for file, count in counts.items():
        name = next((name for prefix, name in PACKAGES.items() if file.startswith(prefix)), "else")
        totals[name] += round(count)
    return totals


def decision_table(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "At the owner, asked, CPU of a decision:",
        "",
        f"| | {' | '.join(f'{n} in a frame' for n in FRAMES)} |",
        f"| --- |{' --- |' * len(FRAMES)}",
    ]
    parts = [found["owner"][n] for n in FRAMES]
    lines += [
        *(f"| {name} | {' | '.join(f'{each[name]:.1f} µs' for each in parts)} |" for name in parts[0]),
        f"| **without sockets** | {' | '.join(f'{sum(each.values()):.1f} µs' for each in parts)} |",
        "",
        "Real processes, CPU of a decision:",
        "",
        f"| | at the owner | {' | '.join(Where)} | wake-ups of the owner | at the asker |",
        f"| --- | --- |{' --- |' * len(Where)} --- | --- |",
    ]
    for case, row in found["processes"].items():
        if case == "in one process":
            lines.append(f"| {case} | |{' |' * len(Where)} | {row['asker_cpu_us']:.1f} µs |")
            continue
        lines.append(
            f"| {case} | {row['owner_cpu_us']:.1f} µs | {' | '.join(f'{row[where]:.1f} µs' for where in Where)} "
            f"| {row['owner_wakes']:.2f} | {row['asker_cpu_us']:.1f} µs |"
        )
    columns = {case: by_package(counts) for case, counts in found["instructions"].items()}
    lines += [
        "",
        "Python instructions of a decision:",
        "",
        f"| | {' | '.join(columns)} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for name in dict.fromkeys(PACKAGES.values()):
        lines.append(f"| {name} | {' | '.join(f'{each[name]:,}' if each[name] else '' for each in columns.values())} |")
    lines.append(f"| **together** | {' | '.join(f'{each.total():,}' for each in columns.values())} |")
    return lines


# ---------------------------------------------------------------------- part "asked"


class EchoPeer(asyncio.Protocol):
    """Sends back what it is sent, unless it is `UNANSWERED`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        whole = len(self._received) // len(ECHOED) * len(ECHOED)
        now, self._received = self._received[:whole], self._received[whole:]
        echoed = now[:: len(ECHOED)].count(ECHOED[:1])
        if echoed:
            self._transport.write(ECHOED * echoed)


async def echo(job: Mapping[str, Any]) -> None:
    """The peer's process."""
    os.sched_setaffinity(0, {job["core"]})
    server = await asyncio.get_running_loop().create_unix_server(EchoPeer, job["path"])
    print("listens", flush=True)
    await server.serve_forever()


class Echoes(asyncio.Protocol):
    """An asker of that peer: one frame there, one back, and one more there."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self._sent_at: deque[float] = deque()
        self._received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def submit(self) -> None:
        self._sent_at.append(time.perf_counter())
        self.transport.write(ECHOED)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received_bytes += len(data)
        while self._received_bytes >= len(ECHOED):
            self._received_bytes -= len(ECHOED)
            self.latencies.append(now - self._sent_at.popleft())
            asyncio.get_running_loop().call_soon(self.transport.write, UNANSWERED)

    @property
    def all_heard(self) -> bool:
        return not self._sent_at


async def paced(asker: Asker, job: Mapping[str, Any]) -> dict[str, float]:
    """At random times, of the owner or of the peer that echoes."""
    began = time.perf_counter()
    if job["of"] == "owner":
        late = await at_random_times(job, asker.submit)
        seconds = time.perf_counter() - began
        await all_decided(asker)
        latencies = asker.latencies
    else:
        _, echoes = await asyncio.get_running_loop().create_unix_connection(Echoes, job["path"])
        late = await at_random_times(job, echoes.submit)
        seconds = time.perf_counter() - began
        while not echoes.all_heard:  # noqa: ASYNC110 (nobody tells when the last one is back)
            await asyncio.sleep(0.001)
        echoes.transport.close()
        latencies = echoes.latencies
    latencies, late = sorted(latencies), sorted(late)
    return {
        "decisions": len(latencies),
        "per_second": len(latencies) / seconds,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[int(len(latencies) * 0.99)] * 1e6,
        "late_p99_us": late[int(len(late) * 0.99)] * 1e6,
    }


def started(stack: ExitStack, folder: str, name: str, **job: object) -> Replica:
    process = Replica(Path(folder), name, script="replicas_profile.py", **job)
    stack.callback(process.end)
    return process


def asked(askers: int, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Of the owner and of the peer that echoes, medians of the rounds; of several askers the slowest."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("owner and askers need a core each")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = f"{folder}/echo"
        job = json.dumps({"path": path, "core": cores[0]})
        command = [sys.executable, str(BENCH / "replicas_profile.py"), "--echo", job]
        peer = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(peer.wait)
        stack.callback(peer.kill)
        assert peer.stdout is not None
        peer.stdout.readline()
        owner = started(stack, folder, "owner", core=cores[0])
        others = [started(stack, folder, f"asker{number}", core=cores[1]) for number in range(askers)]
        pids = {"owner": owner.pid, "echo": peer.pid}
        order = {"kind": "paced", "slots": ASKED_SLOTS, "rate": HALF_RATE / askers, "path": path, "spins": askers == 1}
        figures: dict[str, list[dict[str, float]]] = {"owner": [], "echo": []}
        for number in range(-1, rounds):
            for of, pid in pids.items():
                before = Spent.of([pid])
                for seed, asker in enumerate(others, 100 * number):
                    asker.ask({**order, "of": of, "seed": seed, "seconds": seconds if number >= 0 else 0.5})
                answers = [asker.answer() for asker in others]
                spent = Spent.of([pid]).since(before, sum(answer["decisions"] for answer in answers))
                if number >= 0:  # the first round warms up
                    rate = sum(answer["per_second"] for answer in answers)
                    slowest = {name: max(answer[name] for answer in answers) for name in SLOWEST}
                    cpu = {"per_second": rate, "cpu_us": spent.cpu * 1e6, "load": spent.cpu * rate}
                    figures[of].append(slowest | cpu)
    return {
        of: {name: statistics.median(each[name] for each in rows) for name in rows[0]} for of, rows in figures.items()
    }


SLOWEST = ("p50_us", "p99_us", "late_p99_us")


def asked_table(found: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[str]:
    lines = [
        "| askers | | at a rate of | p50 | p99 | CPU of an exchange | load of its core "
        "| the asker itself was late, p99 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for askers, rows in found.items():
        for of, name in (("owner", "asked, of the owner"), ("echo", "sent back by a peer that does nothing else")):
            row = rows[of]
            lines.append(
                f"| {askers} | {name} | {row['per_second']:,.0f}/s | {row['p50_us'] / 1e3:.2f} ms "
                f"| {row['p99_us'] / 1e3:.2f} ms | {row['cpu_us']:.0f} µs | {row['load']:.0%} "
                f"| {row['late_p99_us'] / 1e3:.2f} ms |"
            )
        added = [(rows["owner"][part] - rows["echo"][part]) / 1e3 for part in ("p50_us", "p99_us")]
        lines.append(f"| {askers} | **added** | | **{added[0]:.2f} ms** | **{added[1]:.2f} ms** | | | |")
    return lines


# ---------------------------------------------------------------------- all of it

ASKER_MEASURES: dict[str, Measure] = {**MEASURES, "local": local, "counted": counted, "paced": paced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--part", choices=("requests", "decision", "asked"), help="only this one, and nothing is written"
    )
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        uvloop.run(replica(json.loads(arguments.replica), ASKER_MEASURES))
        return
    if arguments.echo:
        uvloop.run(echo(json.loads(arguments.echo)))
        return
    if arguments.part != "asked" and shutil.which("perf") is None:
        parser.error("perf takes the samples; install it (Debian: linux-perf), or measure --part asked only")
    relieve_collector()
    signal.signal(signal.SIGTERM, stopped)
    began = (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} when it began."
    )
    parts: dict[str, Callable[[], list[str]]] = {
        "decision": lambda: decision_table(decision(arguments.seconds)),
        "asked": lambda: asked_table({n: asked(n, arguments.rounds, arguments.seconds) for n in ASKERS}),
        "requests": lambda: requests_table(requests(arguments.rounds, arguments.seconds)),
    }
    for part, table in parts.items():
        if arguments.part in (None, part):
            lines = [began, "", *table()]
            print("\n".join([f"\n{part}", *lines]), flush=True)
            if arguments.part is None:
                write(f"profile of {part}", lines, target="bench-replicas-profile")


if __name__ == "__main__":
    main()
