"""What a gateway costs, beside vllm-router (Rust), LiteLLM (optional) and the direct path, interleaved in one run.

    make bench                    # the table below, and bench/results/gateway.json
    make bench BENCH="--rounds 3 --seconds 4 --litellm"
    make bench BENCH="--ledger"   # what the account of requests is of the gateway's CPU, and nothing else

CPU is the gateway process's own (and its children's), from the kernel's accounting. A streamed chunk's cost is what a
streamed request costs beyond a whole one, over its chunks. Added latency is paired: the same request to the gateway and
straight to the engine, in random order, at half the rate at which the slower of the two gateways saturates here.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ledger as bench_ledger
from fairshare.gateway.ledger import BATCH_RECORDS
from fairshare.simulator import traces
from processes import BENCH, PEERS, Load, Process, free_ports, measured

CHUNKS = 100
STREAMS = 40
CONNECTIONS = 32
OPEN_STREAMS = (1000, 5000, 9000)
BUSY_STREAMS, BUSY_TICK_MS = 80, 2
"""As many streams at once, each with a piece at every tick, as make a gateway busy."""
TRACE = "azure2023_conv.csv.gz"
"""The lengths of whose answers the mix has."""
MIX = 997
"""Streams of different lengths in the mix; a prime number, so that every connection comes to all of them."""
WHOLE = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me something about fair queueing, please. " * 8}],
    "max_tokens": 40,
}
STREAMED = {**WHOLE, "stream": True, "max_tokens": CHUNKS}


Store = Literal["none", "accounts", "ledger"]
SERVE = (sys.executable, "-m", "fairshare", "serve", "--log-level", "warning", "-c")
SERVE_WITHOUT_LEDGER = (sys.executable, str(BENCH / "without_ledger.py"), *SERVE[3:])


def key_of(number: int) -> str:
    return f"fs-bench-{number:06d}"


def fairshare(
    engine: Process,
    folder: Path,
    *,
    teams: int = 2,
    keys_per_team: int = 1,
    store: Store = "none",
    command: Sequence[str] = SERVE,
) -> tuple[Process, list[str]]:
    """The gateway with everything on: keys, hold, accounting of usage, metrics. Access log off, as by default.

    `command`: what starts it, but for the path of its settings. `store`: it has a SQLite file, which `vllm-router` has
    nothing like, for accounts and limits only, or (`ledger`) it also writes every request there.
    """
    port, admin = free_ports(2)
    names = [f"team{number}" for number in range(teams)]
    keys = [key_of(number) for number in range(teams * keys_per_team)]
    config: dict[str, Any] = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "limits": {"max_connections": 10_000},
        "store": "none" if store == "none" else {},
        "pools": [
            {
                "name": "chat",
                "capacity": 10_000,
                "half_life": "7d",
                "dispatch": "hold",
                "shares": dict.fromkeys(names, f"1/{teams}"),
                "models": ["tiny"],
                "instances": [{"url": engine.url, "max_num_seqs": 20_000}],
            }
        ],
        "teams": [
            {
                "name": name,
                "keys": [
                    {"sha256": hashlib.sha256(key.encode()).hexdigest()}
                    for key in keys[number * keys_per_team : (number + 1) * keys_per_team]
                ],
            }
            for number, name in enumerate(names)
        ],
    }
    name = f"fairshare-{teams}-{keys_per_team}{'' if store == 'none' else '-' + store}"
    (folder / name).mkdir(exist_ok=True)  # a store lies beside the settings
    path = folder / name / "fairshare.yaml"
    path.write_bytes(msgspec.json.encode(config))
    process = Process(
        name,
        [*(SERVE_WITHOUT_LEDGER if store == "accounts" else command), str(path)],
        f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{admin}/readyz",
    )
    return process, keys


def vllm_router(engine: Process) -> Process:
    port, prometheus = free_ports(2)
    options = f"--port {port} --worker-urls {engine.url} --prometheus-port {prometheus}"
    return Process(
        "vllm-router",
        [str(PEERS / "vllm-router"), *f"--host 127.0.0.1 {options} --policy round_robin --log-level error".split()],
        f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{port}/health",
    )


def litellm(engine: Process, folder: Path) -> Process:
    (port,) = free_ports(1)
    config = folder / "litellm.yaml"
    model = {"model": "hosted_vllm/tiny", "api_base": f"{engine.url}/v1"}
    config.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": model}]}))
    return Process(
        "litellm",
        [str(PEERS / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
        f"http://127.0.0.1:{port}",
        health_url=f"http://127.0.0.1:{port}/health/liveliness",
    )


class Target:
    """What is measured, with what was measured of it, a list of rounds each."""

    def __init__(self, process: Process, keys: list[str]) -> None:
        self.process, self.keys = process, keys
        self.figures: dict[str, list[float]] = {}

    @property
    def name(self) -> str:
        return self.process.name

    def add(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)

    def median(self, figure: str) -> float | None:
        return statistics.median(self.figures[figure]) if self.figures.get(figure) else None

    def job(self, kind: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"kind": kind, "url": self.process.url, "keys": self.keys[:1000], "body": body, **more}

    def rest(self) -> None:
        """Wait until what was asked of it is done to the end: a ledger still writes, and belongs to what made it."""
        for _ in range(50):
            before = self.process.cpu_seconds()
            time.sleep(0.2)
            if self.process.cpu_seconds() - before < 0.02:
                return

    def round(self, seconds: float) -> None:
        """One round: whole answers, then streams."""
        before = self.process.cpu_seconds()
        whole = measured(self.job("closed", WHOLE, connections=CONNECTIONS, seconds=seconds))
        self.rest()
        per_request = (self.process.cpu_seconds() - before) / whole["requests"]
        self.add("requests_per_second", whole["requests"] / whole["seconds"])
        self.add("cpu_us_per_request", per_request * 1e6)
        before = self.process.cpu_seconds()
        streamed = measured(self.job("closed", STREAMED, connections=STREAMS, seconds=seconds))
        self.rest()
        spent = self.process.cpu_seconds() - before - per_request * streamed["requests"]
        self.add("cpu_us_per_chunk", spent / (streamed["requests"] * CHUNKS) * 1e6)


def latencies(targets: list[Target], engine: Process, seconds: float, seed: int) -> float:
    """Added latency of each target at the same rate: half of what the slower of the gateways can do here."""
    able = [rate for target in targets if target.name != "litellm" and (rate := target.median("requests_per_second"))]
    rate = min(able) / 4  # a pair is two requests, of which the engine and the client pay too
    for target in random.Random(seed).sample(targets, len(targets)):
        at = rate if target.name != "litellm" else (target.median("requests_per_second") or 1.0) / 4
        job = target.job("paired", WHOLE, direct=engine.url, rate=at, seconds=seconds, seed=seed)
        added = measured(job)
        for name in ("p50", "p95", "p99"):
            target.add(f"added_ms_{name}", added[name] * 1e3)
    return rate


def memory(start: Any, sizes: tuple[int, ...]) -> dict[str, float]:
    """Bytes per open stream, a fresh process for each number of streams."""
    found: dict[str, float] = {}
    for number in sizes:
        with ended(start()) as target:
            measured(target.job("closed", WHOLE, connections=8, seconds=1.0))
            before = target.process.resident_bytes()
            load = Load(target.job("open", {**STREAMED, "max_tokens": 0}, connections=number))
            load.line()
            found[f"memory_kb_per_stream_{number}"] = (target.process.resident_bytes() - before) / number / 1e3
            load.end()
    return found


class LedgerLoad(NamedTuple):
    """A load under which gateways with and without an account of requests are compared."""

    name: str
    job: dict[str, Any]

    def round(self, targets: Sequence[Target], seconds: float) -> None:
        for target in targets:
            before = target.process.cpu_seconds()
            done = measured({**target.job("closed", STREAMED, seconds=seconds), **self.job})
            target.rest()
            target.add(self.name, (target.process.cpu_seconds() - before) / done["requests"] * 1e6)
            target.add(self.rate, done["requests"] / done["seconds"])

    @property
    def rate(self) -> str:
        return f"{self.name}: requests/s"


def ledger_loads() -> list[LedgerLoad]:
    outputs = [row.output_tokens for row in traces.read(traces.find(TRACE))]
    mix = random.Random(1).sample(outputs, MIX)
    busy = {"connections": BUSY_STREAMS}
    return [
        LedgerLoad("whole answers", {"body": WHOLE, "connections": CONNECTIONS}),
        LedgerLoad("10 pieces", busy | {"max_tokens": [10]}),
        LedgerLoad("100 pieces", busy | {"max_tokens": [100]}),
        LedgerLoad(f"a trace's, {statistics.mean(mix):.0f} on average", busy | {"max_tokens": mix}),
    ]


def shares(loads: Sequence[LedgerLoad], none: Target, accounts: Target, ledger: Target) -> Table:
    """What a request costs, and what of it is the account: by the difference, and by what it costs on its own."""
    shown = Table(box=box.MARKDOWN)
    for column in ("load", "per s", "no store", "accounts", "ledger", "difference", "of all", "alone", "of all"):
        shown.add_column(column, justify="left" if column == "load" else "right")
    for load in loads:
        costs, per_second = ledger.figures[load.name], ledger.median(load.rate) or 1.0
        more = [with_it - without for with_it, without in zip(costs, accounts.figures[load.name], strict=True)]
        low, middle, high = statistics.quantiles(more, n=4) if len(more) > 1 else more * 3
        at_once = min(BATCH_RECORDS, round(per_second))
        alone = bench_ledger.alone(10 * at_once, at_once)
        whole = statistics.median(costs)
        shown.add_row(
            load.name,
            f"{per_second:,.0f}",
            *(f"{statistics.median(target.figures[load.name]):,.0f}" for target in (none, accounts, ledger)),
            f"{middle:,.1f} ({low:,.0f} to {high:,.0f})",
            f"{middle / whole:.1%}",
            f"{alone:,.1f}",
            f"{alone / whole:.1%}",
        )
    return shown


@contextmanager
def ended(target: Target) -> Iterator[Target]:
    try:
        yield target
    finally:
        target.process.end()


def table(targets: list[Target], reference: str) -> Table:
    figures = sorted({figure for target in targets for figure in target.figures})
    shown = Table(title=f"medians; in brackets the ratio to {reference}")
    shown.add_column("figure")
    for target in targets:
        shown.add_column(target.name, justify="right")
    base = next(target for target in targets if target.name == reference)
    for figure in figures:
        cells = []
        for target in targets:
            value, against = target.median(figure), base.median(figure)
            ratio = f" ({value / against:.2f})" if value is not None and against and target is not base else ""
            cells.append("-" if value is None else f"{value:,.2f}{ratio}")
        shown.add_row(figure, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM too (make peers-litellm installs it)")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--ledger", action="store_true", help="only what the account of requests costs (minutes)")
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "gateway.json")
    given = parser.parse_args()
    console = Console(width=130 if given.ledger else None)
    rng = random.Random(given.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is ended
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairshare-bench-")))
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(BENCH / "fake_engine.py"), "--port", str(port)]
        command += ["--tick-ms", str(BUSY_TICK_MS)] if given.ledger else []
        engine = Process("direct", command, url, health_url=url + "/health")
        stack.callback(engine.end)

        def ours(teams: int = 2, keys_per_team: int = 1, *, store: Store = "none") -> Target:
            return Target(*fairshare(engine, folder, teams=teams, keys_per_team=keys_per_team, store=store))

        if given.ledger:
            loads = ledger_loads()
            kept: tuple[Store, ...] = ("none", "accounts", "ledger")
            compared = [ours(10, 1, store=store) for store in kept]
            for target in compared:
                stack.callback(target.process.end)
            with Progress(console=console) as progress:
                work = progress.add_task("rounds", total=given.rounds * len(loads))
                for _ in range(given.rounds):
                    for load in loads:
                        progress.update(work, description=load.name)
                        load.round(rng.sample(compared, len(compared)), given.seconds)
                        progress.advance(work)
            console.print("CPU, us per request; of the difference the median over the rounds, and its quartiles")
            console.print(shares(loads, *compared))
            return

        def router() -> Target:
            return Target(vllm_router(engine), ["none"])

        targets = [ours(), router(), Target(engine, ["none"])]
        scaled = [ours(10, 1), ours(1000, 1), ours(10, 10_000), ours(10, 1, store="ledger")]
        if given.litellm:
            targets.append(Target(litellm(engine, folder), ["none"]))
        for target in [*targets, *scaled]:
            if target.process is not engine:
                stack.callback(target.process.end)
        with Progress(console=console) as progress:
            work = progress.add_task("rounds", total=given.rounds * (len(targets) + len(scaled) + 1))
            for number in range(given.rounds):
                everything = [*targets, *scaled]
                for target in rng.sample(everything, len(everything)):
                    progress.update(work, description=f"round {number + 1}: {target.name}")
                    target.round(given.seconds)
                    progress.advance(work)
                rate = latencies([t for t in targets if t.process is not engine], engine, given.seconds, number)
                progress.advance(work)
            if not given.no_memory:
                work = progress.add_task("memory", total=2)
                for target, start in ((targets[0], ours), (targets[1], router)):
                    for figure, value in memory(start, OPEN_STREAMS).items():
                        target.add(figure, value)
                    progress.advance(work)
        console.print(table(targets, "vllm-router"))
        console.print(table(scaled, scaled[0].name))
        result = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))},
            "python": platform.python_version(),
            "fairshare": version("fairshare"),
            "pairs_per_second": rate,
            "rounds": given.rounds,
            "seconds": given.seconds,
            "medians": {
                t.name: {figure: t.median(figure) for figure in sorted(t.figures)} for t in [*targets, *scaled]
            },
            "rounds_measured": {t.name: t.figures for t in [*targets, *scaled]},
        }
        given.out.parent.mkdir(exist_ok=True)
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        console.print(f"written: {given.out}")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
