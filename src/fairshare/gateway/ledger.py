"""The account of every request, on its way to the store.

The data path only appends to a list. One task writes, in batches; a store that is slow, full, locked or dead makes the
list longer, up to a bound, and what comes beyond it is counted and lost. Usage is saved in the same transaction as the
records that made it, so the two agree whenever the process dies.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC
from itertools import islice
from operator import attrgetter

from fairshare.accounts.periods import months_to_roll_up, shown
from fairshare.clock import Clock
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import Identity
from fairshare.gateway.ports import LedgerCounts, Outcome, RequestRecord
from fairshare.storage.database import Database, StoreReplaced, StoreUnavailable
from fairshare.storage.ledger import Entry, Facts, LedgerStore, Mark, UsageRow

log = logging.getLogger("fairshare.ledger")

BATCH_SECONDS = 1.0
"""How often records are written: what a SIGKILL may lose."""

BATCH_RECORDS = 2500
"""Records per transaction; so many that wait are written at once."""

MAX_PENDING = 50_000
"""Records that wait at most (about 1 KiB each)."""

LONGEST_BACKOFF_SECONDS = 5.0
"""How long it waits at most before it tries a store again that failed."""

RETENTION_SECONDS = 3600.0
"""How often it looks for months that are old enough to be rolled up."""

LAST_WRITE_SECONDS = 5.0
"""How long the end of the gateway may wait for the store."""


KEY_USED_SECONDS = 60.0
"""How often the store is told of a key that it was used again; each time costs as much as several records."""

_CLASS_NAMES = {each: each.name.lower() for each in ServiceClass}
_CANCELLED = Outcome.CANCELLED
_KEY_USED = attrgetter("key_id", "arrived_at")
_CHARGED = attrgetter("served_by", "team")


class Ledger:
    """Takes the records of finished requests (a `Recorder`), and keeps them. Lives on the event loop's thread."""

    def __init__(
        self,
        database: Database,
        *,
        pools: Callable[[], Mapping[str, Pool]],
        wall: Clock,
        keep_seconds: float,
        names: Callable[[str], Identity | None] = lambda _: None,
        max_pending: int = MAX_PENDING,
        batch_seconds: float = BATCH_SECONDS,
    ) -> None:
        """
        Args:
            pools: whose usage is saved and restored.
            keep_seconds: how long records are kept; then whole months are replaced by their sums.
            names: whom a key id stands for, if it is of an account.
        """
        self._database = database
        self._store = LedgerStore(database)
        self._pools = pools
        self._wall = wall
        self._keep_seconds = keep_seconds
        self._names = names
        self._max_pending = max_pending
        self._batch_seconds = batch_seconds
        self._pending: deque[RequestRecord] = deque()
        self._writer = secrets.randbits(63)
        self._first_number = 0
        """The number of the first record that waits."""
        self._dropped_total = 0
        self._is_open = False
        self._failure: str | None = None
        self._file_lost: str | None = None
        """What went with a file of the store that was deleted or replaced while it was open."""
        self._many_wait = asyncio.Event()
        self._writing = asyncio.Lock()
        self._saved_usage: dict[tuple[str, str], UsageRow] = {}
        """What the store had when it was opened, for pools that are not there yet."""
        self._keys_told: dict[str, float] = {}
        """When the store was last told that a key was used (wall clock)."""
        self._retention_at = 0.0
        """When to look for old months again (wall clock)."""
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ what others may read

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            store_is_up=self._is_open and self._failure is None,
            pending=len(self._pending),
            written_total=self._first_number,
            dropped_total=self._dropped_total,
        )

    def finding(self) -> str | None:
        """What is wrong with it, for the status page."""
        if self._failure is not None:
            lost = f"; {self._dropped_total} are lost" if self._dropped_total else ""
            return (
                f"The account of requests is not being written ({self._failure}): {len(self._pending)} records wait in "
                f"memory, at most {self._max_pending}{lost}. Requests are served; look at the store."
            )
        if self._file_lost is not None:
            return self._file_lost
        if self._dropped_total:
            return f"{self._dropped_total} records of requests were lost while the store was away; reports lack them."
        return None

    def mark(self) -> Mark:
        """The place in the account where the next record goes."""
        return Mark(self._writer, self._first_number + len(self._pending))

    # ------------------------------------------------------------------ records

    def finished(self, record: RequestRecord) -> None:
        pending = self._pending
        if len(pending) >= self._max_pending:
            self._dropped_total += 1
            return
        pending.append(record)
        if len(pending) == BATCH_RECORDS:
            self._many_wait.set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the store and restore usage; then keep writing. A store that does not answer is tried again and again.

        Raises:
            StoreTooNew: a newer fairshare has migrated the store.
        """
        try:
            await self._open()
        except StoreUnavailable as error:
            self._failed(error)
        self._task = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        """Write what waits, as far as the store takes it in time, and close."""
        if self._task is not None:
            try:
                async with asyncio.timeout(LAST_WRITE_SECONDS):
                    # Not in the middle of a write: a transaction that is cut off keeps a SQLite file locked, and what
                    # is written last would wait for it in vain.
                    async with self._writing:
                        self._task.cancel()
                    try:
                        await self.flush()
                    except StoreReplaced as error:
                        self._failed(error)
                        await self.flush()
            except (StoreUnavailable, TimeoutError):
                if self._pending:
                    log.error(
                        "%d records of requests are lost: the store did not take them at the end.", len(self._pending)
                    )
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._database.close()

    def restore_usage(self, pool: Pool) -> None:
        """Add to a pool what its teams had used when the store was last written, decayed until now."""
        now = self._wall()
        for row in [row for row in self._saved_usage.values() if row.pool == pool.name]:
            pool.charge(row.team, decayed(row, now=now, half_life_seconds=pool.half_life_seconds))
            del self._saved_usage[row.pool, row.team]

    async def flush(self) -> None:
        """Write everything that waits. Raises `StoreUnavailable`."""
        async with self._writing:
            if self._is_open:
                self._database.examine_file()
            else:
                await self._open()
            while self._pending:
                await self._write_batch()
            self._works()

    # ------------------------------------------------------------------ inside

    async def _open(self) -> None:
        await self._database.migrate()
        self._store = LedgerStore(self._database)  # what the last one knew to be written was written into another file
        if self._file_lost is not None:
            # The pools know better than whatever the file that is there now says of their usage.
            await self._store.write((), self._usage_of_all(), {}, now=self._wall())
            self._is_open = True
            return
        self._saved_usage = {(row.pool, row.team): row for row in await self._store.usage()}
        self._is_open = True
        for pool in self._pools().values():
            self.restore_usage(pool)

    async def _keep_writing(self) -> None:
        backoff_seconds = self._batch_seconds
        while True:
            await self._wait(backoff_seconds if self._failure is not None else self._batch_seconds)
            try:
                await self.flush()
                await self._roll_up_old_months()
                backoff_seconds = self._batch_seconds
            except StoreUnavailable as error:
                self._failed(error)
                backoff_seconds = min(2 * backoff_seconds, LONGEST_BACKOFF_SECONDS)
            except Exception:
                # Whatever is wrong with one batch: the task must live, and the records wait.
                log.exception("Writing the account of requests failed inside fairshare.")
                self._failure = "a fault of fairshare; its log has the details"
                backoff_seconds = LONGEST_BACKOFF_SECONDS

    async def _wait(self, seconds: float) -> None:
        """Until it is time to write, or, if the store works, so much waits that it should be written now."""
        if self._failure is not None:
            await asyncio.sleep(seconds)
            return
        self._many_wait.clear()
        if len(self._pending) < BATCH_RECORDS:
            try:
                async with asyncio.timeout(seconds):
                    await self._many_wait.wait()
            except TimeoutError:
                pass

    async def _write_batch(self) -> None:
        batch = list(islice(self._pending, BATCH_RECORDS))
        now, told = self._wall(), self._keys_told
        used = dict(map(_KEY_USED, batch))
        used.pop("", None)
        news = {key: at for key, at in used.items() if abs(now - told.get(key, 0.0)) >= KEY_USED_SECONDS}
        await self._store.write(self._entries(batch), self._usage_of(batch), news, now=now)
        told.update(dict.fromkeys(news, now))
        for _ in batch:
            self._pending.popleft()
        self._first_number += len(batch)

    async def _roll_up_old_months(self) -> None:
        now = self._wall()
        if now < self._retention_at:
            return
        self._retention_at = now + RETENTION_SECONDS
        oldest = await self._store.oldest()
        if oldest is None:
            return
        for month in months_to_roll_up(oldest=oldest, now=now, keep_seconds=self._keep_seconds):
            gone = await self._store.roll_up(begins_at=month.begins_at, ends_at=month.ends_at)
            if gone:
                log.info(
                    "Rolled up the %d records of %s: only their sums are left.", gone, shown(month.begins_at, UTC)[:7]
                )

    def _usage_of(self, batch: Iterable[RequestRecord]) -> list[UsageRow]:
        """The usage, now, of every team that a batch may have charged."""
        charged = set(map(_CHARGED, batch))
        now, pools = self._wall(), self._pools()
        usage = {name: pools[name].usage()[0] for name in {name for name, _ in charged} if name in pools}
        return [
            UsageRow(name, team, usage[name].get(team, 0.0), now) for name, team in sorted(charged) if name in usage
        ]

    def _usage_of_all(self) -> list[UsageRow]:
        now = self._wall()
        return [
            UsageRow(name, team, units, now)
            for name, pool in self._pools().items()
            for team, units in sorted(pool.usage()[0].items())
        ]

    def _entries(self, batch: Iterable[RequestRecord]) -> Iterator[Entry]:
        """What is written of each record, made when it is asked for. Most of what an account costs is here."""
        writer, number = self._writer, self._first_number
        owners: dict[tuple[str, str], Facts] = {}
        for record in batch:
            arrived_at, sent_seconds, first_byte_seconds, outcome = (
                record.arrived_at, record.sent_seconds, record.first_byte_seconds, record.outcome,
            )  # fmt: skip
            asked_by = record.key_id, record.team
            owner = owners.get(asked_by)
            if owner is None:
                owner = owners[asked_by] = self._owner(*asked_by)
            yield (
                (
                    arrived_at + record.total_seconds,
                    writer,
                    number,
                    record.id,
                    arrived_at,
                    None if sent_seconds is None else arrived_at + sent_seconds,
                    None if first_byte_seconds is None else arrived_at + first_byte_seconds,
                    record.priority,
                    record.slots,
                    record.prompt_tokens,
                    record.cached_tokens,
                    record.completion_tokens,
                    record.cost_units,
                    record.held_seconds,
                    record.recalls,
                    record.wasted_slot_seconds,
                ),
                owner,
                (
                    record.endpoint,
                    record.pool,
                    record.served_by,
                    record.instance_id,
                    record.model,
                    _CLASS_NAMES[record.service_class],
                    record.standing or "",
                    record.estimated,
                    record.status,
                    outcome,
                    record.reason,
                    outcome is _CANCELLED,
                    record.degraded,
                    record.finish_reason,
                ),
            )
            number += 1

    def _owner(self, key_id: str, team: str) -> Facts:
        names = self._names(key_id)
        if names is None:
            return "", team, "", key_id, ""
        return names.organisation, names.team, names.project, key_id, names.tag

    def _failed(self, error: StoreUnavailable) -> None:
        if isinstance(error, StoreReplaced) and self._is_open:
            self._is_open = False
            self._file_lost = (
                f"{str(error)[0].upper()}{str(error)[1:]}: what was in it is lost, {self._first_number} records of "
                "requests that this gateway had written, and its accounts, keys and leases; usage in memory is kept. "
                "The file that is there now goes on. To get the old one back, stop the gateway and restore a backup."
            )
            log.error("%s %d records wait in memory; requests are served.", self._file_lost, len(self._pending))
        elif self._failure is None:
            log.error("%s; records of requests wait in memory, requests are served.", error)
        self._failure = str(error)

    def _works(self) -> None:
        if self._failure is not None:
            self._failure = None
            log.warning("The store answers again; %d records of requests were lost meanwhile.", self._dropped_total)


def decayed(row: UsageRow, *, now: float, half_life_seconds: float) -> float:
    """Saved usage at `now` (wall clock). A wall clock that stepped back: no time passed."""
    elapsed_seconds = max(0.0, now - row.as_of)
    return row.cost_units * 2.0 ** (-elapsed_seconds / half_life_seconds) if half_life_seconds else row.cost_units
