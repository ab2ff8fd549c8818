"""What the account of requests costs: CPU per record on its way to SQLite, and how long reports over many take.

    python bench/ledger.py --records 1000000
    python bench/ledger.py --records 20000 --batch 200   # of a gateway where so many requests end in a second

Prints microseconds of CPU per record (all threads: what a gateway spends on it beside the request itself, which
bench/gateway.py measures), how late the event loop was meanwhile, and the seconds of each report.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from datetime import UTC
from pathlib import Path
from typing import NamedTuple

from fairshare.accounts import reports
from fairshare.accounts.periods import Span
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.gateway.ledger import BATCH_RECORDS, Ledger
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.ledger import LedgerStore

BEGIN = 1_790_000_000.0
SECONDS_APART = 2.5
"""A million records fill a month."""


def record(number: int) -> RequestRecord:
    return RequestRecord(
        id=f"0123456789abcdef-{number:x}",
        endpoint="/v1/chat/completions",
        key_id=f"{number % 200:012x}",
        team=f"team{number % 20}",
        pool="chat",
        served_by="chat",
        instance_id=f"http://10.0.0.{number % 8}:8000",
        model="a-model-of-some-name",
        standing=Standing.WITHIN_SHARE,
        priority=0,
        slots=1,
        stream=True,
        arrived_at=BEGIN + number * SECONDS_APART,
        sent_seconds=0.001,
        first_byte_seconds=0.1,
        total_seconds=2.0,
        outcome=Outcome.COMPLETED,
        status=200,
        prompt_tokens=200,
        completion_tokens=150,
        cost_units=500.0,
    )


class Lateness:
    """How late the event loop runs what is due: what the writer of the account keeps from the requests."""

    def __init__(self) -> None:
        self.worst_seconds = 0.0

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.worst_seconds = max(self.worst_seconds, time.perf_counter() - due)


class Written(NamedTuple):
    """What writing records took."""

    cpu_us: float
    """CPU of the process for each record, microseconds."""
    per_second: float
    late_seconds: float
    """How late the event loop was: the worst of each batch, the median of these."""


async def opened(database: Database) -> Ledger:
    pool = Pool("chat", 64, {f"team{n}": "1/20" for n in range(20)}, 7 * 86400.0)
    ledger = Ledger(
        database, pools=lambda: {"chat": pool}, wall=time.time, keep_seconds=1e12, max_pending=10**9, batch_seconds=1e9
    )
    await ledger.start()
    return ledger


async def written(ledger: Ledger, count: int, at_once: int) -> Written:
    late = Lateness()
    watching = asyncio.create_task(late.watch())
    latenesses: list[float] = []
    cpu = wall = 0.0
    for first in range(0, count, at_once):
        batch = [record(number) for number in range(first, min(count, first + at_once))]
        await asyncio.sleep(0.002)  # the lateness that making them caused is not of interest
        late.worst_seconds = 0.0
        cpu_begin, wall_begin = time.process_time(), time.perf_counter()
        for each in batch:
            ledger.finished(each)
        await ledger.flush()
        cpu += time.process_time() - cpu_begin
        wall += time.perf_counter() - wall_begin
        latenesses.append(late.worst_seconds)
    watching.cancel()
    return Written(cpu / count * 1e6, count / wall, statistics.median(latenesses))


def alone(count: int, at_once: int) -> float:
    """Microseconds of CPU for each record, where nothing else runs and so many are written at once."""

    async def measured(folder: Path) -> float:
        ledger = await opened(Database(SqliteFile(folder / "bench.sqlite3")))
        took = await written(ledger, count, at_once)
        await ledger.stop()
        return took.cpu_us

    with tempfile.TemporaryDirectory(prefix="fairshare-bench-") as name:
        return asyncio.run(measured(Path(name)))


async def main(count: int, at_once: int, folder: Path) -> None:
    database = Database(SqliteFile(folder / "bench.sqlite3"))
    ledger = await opened(database)
    took = await written(ledger, count, at_once)
    size = sum(path.stat().st_size for path in folder.iterdir())  # noqa: ASYNC240
    print(f"{count} records, {size / count:.0f} bytes each")
    print(f"written with {took.cpu_us:.1f} us of CPU per record, {took.per_second:,.0f} records/s")
    print(f"meanwhile the event loop was late by {took.late_seconds * 1e3:.1f} ms (the worst of each batch, median)")
    store = LedgerStore(database)
    span = Span(BEGIN, BEGIN + count * SECONDS_APART + 3600)
    for by in ((), ("team",), ("team", "key", "model"), ("organisation", "team", "project", "key", "tag", "pool")):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        report = await reports.report(store, span, where=UTC, by=by, only={})
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        print(f"report by {','.join(by) or 'nothing'}: {wall:.2f} s, {cpu:.2f} s of CPU, {len(report.rows)} rows")
        assert report.total["requests"] == count
    begin = time.perf_counter()
    exported = 0
    async for page in store.rows(begins_at=span.begins_at, ends_at=span.ends_at):
        exported += len(reports.export_lines(page, as_csv=False).splitlines())
    print(f"export: {exported / (time.perf_counter() - begin):,.0f} records/s")
    await ledger.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the account of requests costs.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=BATCH_RECORDS, help="records of one transaction")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fairshare-bench-") as name:
        asyncio.run(main(given.records, given.batch, Path(name)))
