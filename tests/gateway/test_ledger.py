"""The account of requests on its way to the store: batches, outages, overflow, restored usage."""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass, Standing
from fairshare.gateway.identity import Identity
from fairshare.gateway.ledger import BATCH_RECORDS, RETENTION_SECONDS, Ledger, decayed
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.storage.accounts import AccountStore, KeyRow
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database, StoreReplaced, StoreUnavailable
from fairshare.storage.ledger import LedgerRow, LedgerStore, UsageRow
from gateway.rig import FakeClock, run, until


def record(number: int = 1, **other: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": f"r{number}",
        "endpoint": "/v1/completions",
        "key_id": "k",
        "team": "red",
        "pool": "chat",
        "served_by": "chat",
        "instance_id": "http://e",
        "model": "tiny",
        "standing": Standing.BORROWING,
        "priority": 10,
        "slots": 1,
        "arrived_at": 100.0,
        "sent_seconds": 1.0,
        "first_byte_seconds": 1.5,
        "total_seconds": 4.0,
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cost_units": 2.0,
    }
    return RequestRecord(**(values | other))


class Site:
    """A ledger over a SQLite file and one pool, and eyes on both."""

    def __init__(self, path: Path, pools: Mapping[str, Pool] | None = None, **options: Any) -> None:
        self.path = path
        self.wall = FakeClock()
        self.pool = Pool("chat", 4, {"red": "1/2", "blue": "1/2"}, 100.0, self.wall)
        self.pools: dict[str, Pool] = {"chat": self.pool} if pools is None else dict(pools)
        self.ledger = Ledger(
            Database(SqliteFile(path), patience_seconds=1.0),
            pools=lambda: self.pools,
            wall=self.wall,
            keep_seconds=options.pop("keep_seconds", 1e9),
            **options,
        )

    async def written(self) -> list[LedgerRow]:
        database = Database(SqliteFile(self.path))
        try:
            pages = LedgerStore(database).rows(begins_at=0.0, ends_at=1e12)
            return [row async for page in pages for row in page]
        finally:
            await database.close()


def replace(path: Path, content: bytes | None = None) -> None:
    """Deletes the file, and puts another one in its place."""
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def rows_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as store:
        return store.execute("select count(*) from account").fetchone()[0]


@pytest.fixture
def path(tmp_path: Path, migrated_file: Path) -> Path:
    path = tmp_path / "fairshare.sqlite3"
    path.write_bytes(migrated_file.read_bytes())
    return path


def test_a_record_becomes_a_row_with_all_that_it_says(path: Path) -> None:
    async def main() -> None:
        names = Identity("k", "vision", ServiceClass.BATCH, None, "lab", "vision/ocr", "nightly")
        site = Site(path, names=lambda key: names if key == "k" else None)
        await site.ledger.start()
        site.ledger.finished(
            record(
                1,
                served_by="large",
                service_class=ServiceClass.BATCH,
                priority=21,
                slots=6,
                held_seconds=0.25,
                cached_tokens=2,
                estimated=True,
                status=502,
                outcome=Outcome.FAILED,
                reason="engine_error",
                recalls=7,
                wasted_slot_seconds=0.5,
                degraded=True,
                finish_reason="length",
            )
        )
        site.ledger.finished(
            record(
                2,
                key_id="static",
                outcome=Outcome.CANCELLED,
                sent_seconds=None,
                first_byte_seconds=None,
                standing=None,
                priority=None,
                status=0,
            )
        )
        await site.ledger.stop()
        first, second = sorted(await site.written(), key=lambda row: row.number)
        assert first == LedgerRow(
            writer=first.writer,
            number=0,
            request_id="r1",
            arrived_at=100.0,
            dispatched_at=101.0,
            first_byte_at=101.5,
            ended_at=104.0,
            organisation="lab",
            team="vision",
            project="vision/ocr",
            key_id="k",
            tag="nightly",
            endpoint="/v1/completions",
            pool="chat",
            served_by="large",
            instance="http://e",
            model="tiny",
            service_class="batch",
            standing="borrowing",
            priority=21,
            slots=6,
            prompt_tokens=3,
            cached_tokens=2,
            completion_tokens=5,
            cost_units=2.0,
            estimated=True,
            status=502,
            finish="failed",
            reason="engine_error",
            held_seconds=0.25,
            recalls=7,
            wasted_slot_seconds=0.5,
            client_cancelled=False,
            degraded=True,
            finish_reason="length",
        )
        assert (second.writer, second.number, second.ended_at) == (first.writer, 1, 104.0)
        assert (second.organisation, second.team, second.project, second.tag) == ("", "red", "", "")
        assert (second.dispatched_at, second.first_byte_at, second.standing, second.priority) == (None, None, "", None)
        assert (second.service_class, second.finish, second.client_cancelled) == ("interactive", "cancelled", True)
        assert (second.estimated, second.degraded, second.finish_reason) == (False, False, "")

    run(main)


def test_a_key_has_the_names_that_it_has_when_its_requests_are_written(path: Path) -> None:
    async def main() -> None:
        project = "vision/ocr"
        site = Site(
            path, names=lambda key: Identity(key, "vision", ServiceClass.BATCH, None, "lab", project, "nightly")
        )
        await site.ledger.start()
        for number in range(2):
            site.ledger.finished(record(number))
        await site.ledger.flush()
        project = "vision/faces"
        site.ledger.finished(record(2))
        await site.ledger.stop()
        assert [row.project for row in await site.written()] == ["vision/ocr", "vision/ocr", "vision/faces"]

    run(main)


def test_usage_is_saved_with_the_records_that_made_it_and_restored_with_its_decay(path: Path) -> None:
    async def main() -> None:
        site = Site(path)
        await site.ledger.start()
        site.pool.charge("red", 8.0)
        site.pool.charge("blue", 5.0)
        site.ledger.finished(record(1, team="red"))
        await site.ledger.stop()

        later = Site(path)
        later.wall.now += 200.0  # two half-lives
        await later.ledger.start()
        usage = later.pool.usage()[0]
        assert usage["red"] == pytest.approx(2.0)
        assert usage["blue"] == 0.0  # no record of blue's, so nothing was charged that the account does not have
        await later.ledger.stop()

    run(main)


def test_a_pool_that_a_reload_adds_gets_its_saved_usage_once(path: Path) -> None:
    async def main() -> None:
        site = Site(path)
        await site.ledger.start()
        site.pool.charge("red", 8.0)
        site.ledger.finished(record(1))
        await site.ledger.stop()

        later = Site(path, pools={})
        await later.ledger.start()
        for _ in range(2):
            later.ledger.restore_usage(later.pool)
        assert later.pool.usage()[0]["red"] == pytest.approx(8.0)
        await later.ledger.stop()

    run(main)


def test_saved_usage_decays_by_the_wall_clock_and_never_grows() -> None:
    row = UsageRow("chat", "red", 8.0, 1000.0)
    assert decayed(row, now=1300.0, half_life_seconds=100.0) == 1.0
    assert decayed(row, now=900.0, half_life_seconds=100.0) == 8.0
    assert decayed(row, now=9000.0, half_life_seconds=0.0) == 8.0


def test_keys_are_marked_as_used(path: Path) -> None:
    async def main() -> None:
        database = Database(SqliteFile(path))
        store = AccountStore(database)
        async with database.writing() as connection:
            await connection.exec_driver_sql(
                "insert into nodes (id, kind, path, created_at) values (1, 'team', 'red', 0)"
            )
        async with store.changing(actor="a", at=0.0) as change:
            await change.add(KeyRow(id="k", node_id=1, service_class="batch", created_at=0.0), target="k")
        site = Site(path)
        await site.ledger.start()
        site.ledger.finished(record(1))
        await site.ledger.stop()
        assert [key.last_used_at for key in await store.all(KeyRow)] == [100.0]
        await database.close()

    run(main)


def test_a_locked_store_loses_nothing_and_is_told_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairshare.storage.database.LOCK_WAIT_SECONDS", 0.01)

    async def main() -> None:
        site = Site(path, batch_seconds=0.01)
        await site.ledger.start()
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("begin immediate")
            site.ledger.finished(record(1))
            await until(lambda: not site.ledger.counts().store_is_up, every_seconds=0.001)
            finding = site.ledger.finding()
            assert finding is not None
            assert "locked" in finding
            assert "1 records wait" in finding
            site.ledger.finished(record(2))
            with pytest.raises(StoreUnavailable):
                await site.ledger.flush()
            other.execute("rollback")
        other.close()
        await until(lambda: site.ledger.counts().store_is_up, every_seconds=0.001)
        assert site.ledger.finding() is None
        await site.ledger.stop()
        assert [row.request_id for row in await site.written()] == ["r1", "r2"]

    with caplog.at_level(logging.WARNING, "fairshare.ledger"):
        run(main)
    assert [line.levelname for line in caplog.records] == ["ERROR", "WARNING"]


def test_a_full_store_takes_the_records_again_when_there_is_room(path: Path) -> None:
    async def main() -> None:
        site = Site(path)
        await site.ledger.start()

        async def pages(limit: int) -> None:
            async with site.ledger._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
                await connection.exec_driver_sql(f"pragma max_page_count = {limit}")

        # SQLite answers "database or disk is full" beyond this many pages, as it does on a full disk.
        await pages(1)
        for number in range(BATCH_RECORDS):
            site.ledger.finished(record(number, detail="x"))
        with pytest.raises(StoreUnavailable, match="full"):
            await site.ledger.flush()
        assert site.ledger.counts().pending == BATCH_RECORDS
        await pages(1_000_000)
        await site.ledger.flush()
        await site.ledger.stop()
        assert len(await site.written()) == BATCH_RECORDS

    run(main)


def test_what_overflows_is_counted_and_what_waits_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        site = Site(tmp_path / "missing" / "fairshare.sqlite3", max_pending=3)
        await site.ledger.start()
        for number in range(5):
            site.ledger.finished(record(number))
        counts = site.ledger.counts()
        assert (counts.store_is_up, counts.pending, counts.dropped_total) == (False, 3, 2)
        assert "2 are lost" in (site.ledger.finding() or "")
        # It appears, and everything that waited goes there; usage of before would be restored now.
        site.path.parent.mkdir()
        await site.ledger.flush()
        assert site.ledger.counts().store_is_up
        assert "2 records of requests were lost" in (site.ledger.finding() or "")
        await site.ledger.stop()
        assert [row.request_id for row in await site.written()] == ["r0", "r1", "r2"]

    run(main)


def test_many_records_are_written_before_the_interval_is_over(path: Path) -> None:
    async def main() -> None:
        site = Site(path, batch_seconds=1000.0)
        await site.ledger.start()
        for number in range(BATCH_RECORDS):
            site.ledger.finished(record(number))
        await until(lambda: not site.ledger.counts().pending, every_seconds=0.001)
        await site.ledger.stop()
        assert site.ledger.counts().written_total == BATCH_RECORDS

    run(main)


def test_a_mark_is_behind_every_record_so_far(path: Path) -> None:
    async def main() -> None:
        site = Site(path)
        await site.ledger.start()
        site.ledger.finished(record(1))
        await site.ledger.flush()
        site.ledger.finished(record(2))
        mark = site.ledger.mark()
        site.ledger.finished(record(3))
        await site.ledger.stop()
        rows = await site.written()
        assert [row.request_id for row in rows if row.number < mark.number] == ["r1", "r2"]
        assert {row.writer for row in rows} == {mark.writer}

    run(main)


def test_months_that_are_old_enough_are_rolled_up(path: Path) -> None:
    async def main() -> None:
        site = Site(path, batch_seconds=0.01, keep_seconds=10 * 86400.0)
        site.wall.now = 45 * 86400.0  # 15 February 1970
        await site.ledger.start()
        site.ledger.finished(record(1, arrived_at=86400.0))
        site.ledger.finished(record(2, arrived_at=40 * 86400.0))
        await until(lambda: not site.ledger.counts().pending, every_seconds=0.001)
        site.wall.now += RETENTION_SECONDS
        await until(lambda: rows_of(path) == 1, every_seconds=0.001)
        await site.ledger.stop()
        assert [row.request_id for row in await site.written()] == ["r2"]

    run(main)


@pytest.mark.parametrize("other_file", [False, True], ids=["deleted", "replaced"])
def test_a_store_whose_file_goes_is_noticed_and_the_file_that_is_there_then_goes_on(
    path: Path, migrated_file: Path, caplog: pytest.LogCaptureFixture, other_file: bool
) -> None:
    other = migrated_file.read_bytes() if other_file else None

    async def main() -> None:
        site = Site(path, batch_seconds=1e6)
        await site.ledger.start()
        site.pool.charge("red", 8.0)
        site.ledger.finished(record(1))
        await site.ledger.flush()
        replace(path, other)
        site.ledger.finished(record(2))
        with pytest.raises(StoreReplaced) as raised:
            await site.ledger.flush()
        site.ledger._failed(raised.value)  # pyright: ignore[reportPrivateUsage]
        assert not site.ledger.counts().store_is_up
        assert "1 records of requests that this gateway had written" in caplog.text
        await site.ledger.flush()
        assert site.ledger.counts().store_is_up
        assert "restore a backup" in (site.ledger.finding() or "")
        assert [row.request_id for row in await site.written()] == ["r2"]
        assert [error.levelname for error in caplog.records].count("ERROR") == 1
        replace(path)
        site.ledger.finished(record(3))
        await site.ledger.stop()
        assert [row.request_id for row in await site.written()] == ["r3"]
        again = Site(path)
        await again.ledger.start()
        assert again.pool.usage()[0]["red"] == pytest.approx(8.0)
        await again.ledger.stop()

    run(main)


def test_a_deleted_file_is_noticed_without_a_record_to_write_and_is_made_anew(path: Path) -> None:
    async def main() -> None:
        site = Site(path, batch_seconds=0.001)
        await site.ledger.start()
        await until(lambda: site.ledger.counts().store_is_up, every_seconds=0.001)
        replace(path)
        await until(lambda: site.ledger.finding() is not None and site.ledger.counts().store_is_up, every_seconds=0.001)
        assert rows_of(path) == 0
        await site.ledger.stop()

    run(main)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_gateway_that_ends_while_a_batch_is_being_written_loses_nothing(path: Path) -> None:
    """A transaction that is cut off keeps the file locked, and what is written last would wait for it in vain."""

    async def main() -> None:
        for times in range(30):  # each time a little later
            site = Site(path, batch_seconds=0.0)
            await site.ledger.start()
            for number in range(700):
                site.ledger.finished(record(number))
            await until(site.ledger._database.engine.pool.checkedout)  # type: ignore[attr-defined]
            for _ in range(100 * times):
                await asyncio.sleep(0)
            await site.ledger.stop()
            assert rows_of(path) == 700 * (times + 1)

    run(main)
