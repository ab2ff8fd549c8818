"""What the store promises, on SQLite and on PostgreSQL alike."""

import asyncio
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, delete, event, func, insert, select

from fairshare.accounts.reports import EXPORTED
from fairshare.storage.accounts import (
    AccountStore,
    AuditRow,
    BudgetRow,
    IncreaseRow,
    KeyRow,
    LimitChange,
    LimitRow,
    NodeRow,
    SecretRow,
)
from fairshare.storage.address import SqliteFile, StoreAddress
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import MIGRATIONS, Database, StoreTooNew, StoreUnavailable
from fairshare.storage.history import HistoryRow, HistoryStore
from fairshare.storage.ledger import (
    DIMENSIONS,
    LOOK_SECONDS,
    LedgerRow,
    LedgerStore,
    Mark,
    MonthsInTheWay,
    Sums,
    UsageRow,
)
from fairshare.storage.schema import (
    COMPATIBLE_REVISION,
    REVISION,
    ledger,
    metadata,
    request_owners,
    request_ways,
    requests,
)
from support.postgres import Postgres
from support.storing import Run, row, running, write

# --- tables -------------------------------------------------------------------------------------------------------


def test_the_migrations_make_exactly_the_tables_of_the_schema(run: Run) -> None:
    def differences(connection: Connection) -> list[Any]:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)

    async def main(database: Database) -> None:
        async with database.reading() as connection:
            assert await connection.run_sync(differences) == []

    run(main)


def test_a_sqlite_file_is_for_its_owner_only_and_is_not_made_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "odd name?#%41.sqlite3"

    async def main() -> None:
        database = Database(SqliteFile(path))
        with pytest.raises(StoreUnavailable, match="unable to open"):
            await AccountStore(database).version()
        assert not path.exists()
        await database.migrate()
        assert path.stat().st_mode & 0o777 == 0o600
        assert await AccountStore(database).version() == 0
        await database.close()

    asyncio.run(main())


OPEN_AND_CLOSE = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1])
store.execute("update changes set version = version + 1")
store.commit()
store.close()
"""
"""As a command does beside a gateway. The last connection that is closed takes the log away with it."""


def test_a_program_that_closes_a_sqlite_store_leaves_the_log_to_those_who_have_it_open(
    tmp_path: Path, migrated_file: Path
) -> None:
    path = Path(shutil.copy(migrated_file, tmp_path / "fairshare.sqlite3"))

    async def main() -> None:
        first, second = Database(SqliteFile(path)), Database(SqliteFile(path))
        for version, database in enumerate((first, second, first), start=1):
            await database.migrate()
            assert await AccountStore(first).version() == version - 1
            command = [sys.executable, "-c", OPEN_AND_CLOSE, str(path)]
            await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
            assert path.with_name("fairshare.sqlite3-wal").exists()
        assert await AccountStore(first).version() == 3
        await first.close()
        await second.close()

    asyncio.run(main())


def test_many_processes_may_migrate_at_once(empty: StoreAddress) -> None:
    async def main() -> None:
        databases = [Database(empty) for _ in range(3)]
        await asyncio.gather(*(database.migrate() for database in databases))
        assert await AccountStore(databases[0]).version() == 0
        for database in databases:
            await database.close()

    asyncio.run(main())


def test_a_store_to_which_a_newer_version_only_added_is_used_and_another_one_is_refused(run: Run) -> None:
    async def main(database: Database) -> None:
        async with database.writing() as connection:
            await connection.exec_driver_sql("update alembic_version set version_num = '9999'")
        await database.migrate()
        async with database.writing() as connection:
            await connection.exec_driver_sql("update compatibility set revision = '9998'")
        with pytest.raises(StoreTooNew, match="revision 9999"):
            await database.migrate()

    run(main)


def test_a_migrated_store_says_which_versions_can_use_it(run: Run) -> None:
    async def main(database: Database) -> None:
        async with database.reading() as connection:
            said = (await connection.exec_driver_sql("select id, revision from compatibility")).all()
        assert [tuple(row) for row in said] == [(1, COMPATIBLE_REVISION)]

    run(main)


def test_the_fields_of_a_ledger_row_are_the_columns_in_their_order() -> None:
    assert tuple(column.name for column in ledger.c) == LedgerRow.__struct_fields__


def test_the_view_of_the_account_shows_what_was_written_before_and_after_its_rows_became_numbers(run: Run) -> None:
    async def main(database: Database) -> None:
        await write(LedgerStore(database), [row(2)])
        async with database.writing() as connection:
            await connection.execute(insert(ledger).values(msgspec.structs.asdict(row(1))))
        shown = ", ".join(EXPORTED)
        async with database.reading() as connection:
            seen = await connection.exec_driver_sql(f"select {shown} from account order by ended_at")
            assert [tuple(each) for each in seen] == [
                tuple(getattr(row(number), name) for name in EXPORTED) for number in (1, 2)
            ]
            assert set(seen.keys()) == set(EXPORTED)

    run(main)


def test_the_revision_of_the_schema_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


# --- ledger -------------------------------------------------------------------------------------------------------


async def exported(store: LedgerStore, begins_at: float = 0.0, ends_at: float = 1e15) -> list[LedgerRow]:
    return [row async for page in store.rows(begins_at=begins_at, ends_at=ends_at) for row in page]


def test_what_is_written_comes_back_as_it_was(run: Run) -> None:
    rows = [
        row(1),
        row(2, dispatched_at=None, first_byte_at=None, priority=None, standing="", status=429, finish="refused"),
        row(3, cost_units=0.1 + 0.2, client_cancelled=True, degraded=True, estimated=True, tag="näçht"),
        row(2**40, writer=2**62 + 1, prompt_tokens=2**40),
    ]

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, [*rows])
        assert await exported(store) == [
            *sorted(rows, key=lambda each: (each.ended_at, each.writer)),
        ]

    run(main)


def test_rows_of_a_batch_are_made_as_they_are_written_so_that_other_tasks_run_in_between(run: Run) -> None:
    async def main(database: Database) -> None:
        made = 0
        seen: set[int] = set()

        def rows() -> Iterator[LedgerRow]:
            nonlocal made
            for made in range(1, 1138):
                yield row(made)

        async def looks() -> None:
            while True:
                seen.add(made)
                await asyncio.sleep(0)

        store = LedgerStore(database)
        looking = asyncio.create_task(looks())
        await write(store, rows())
        looking.cancel()
        assert seen == {0, 500, 1000, 1137}
        assert [each.number for each in await exported(store)] == [*range(1, 1138)]

    run(main)


def test_sqlite_gets_fifty_rows_with_one_statement_and_postgresql_all_of_a_piece_at_once(run: Run) -> None:
    async def main(database: Database) -> None:
        runs: list[int] = []

        def runs_of(_conn: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
            if statement.startswith("INSERT INTO requests "):
                runs.append(len(parameters) if many else 1)

        event.listen(database.engine.sync_engine, "before_cursor_execute", runs_of)
        await write(LedgerStore(database), [row(number) for number in range(637)])
        assert runs == ([10, 2, 37] if isinstance(database.address, SqliteFile) else [500, 137])

    run(main)


def test_a_batch_that_is_written_twice_counts_once(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, [row(1), row(2)])
        await write(store, [row(1), row(2), row(3)])
        assert [each.number for each in await exported(store)] == [1, 2, 3]

    run(main)


def test_what_a_batch_that_failed_had_in_common_is_written_with_the_next(run: Run) -> None:
    def rows() -> Iterator[LedgerRow]:
        yield from (row(number) for number in range(1, 300))
        raise ZeroDivisionError

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        with pytest.raises(ZeroDivisionError):
            await write(store, rows())
        assert await exported(store) == []
        await write(store, [row(1)])
        assert await exported(store) == [row(1)]

    run(main)


def test_what_an_older_backup_took_away_is_written_again(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, [row(1)])
        await write(store, [row(2, tag="late", status=503)])
        async with database.writing() as connection:  # as the backup has it
            await connection.execute(delete(requests).where(requests.c.number == 2))
            await connection.execute(delete(request_owners).where(request_owners.c.tag == "late"))
            await connection.execute(delete(request_ways).where(request_ways.c.status == 503))
        rows = [row(3), row(4, tag="late", status=503)]
        await write(store, rows)
        await write(store, [row(5)], now=LOOK_SECONDS)
        # The next look brings back what rows before it have in common, too.
        assert await exported(store) == [row(1), *rows, row(5)]

    run(main)


def test_two_gateways_write_what_their_requests_have_in_common_once(run: Run) -> None:
    async def main(database: Database) -> None:
        ours, theirs = LedgerStore(database), LedgerStore(database)
        await asyncio.gather(
            write(ours, [row(1), row(3, tag="x")]),
            write(theirs, [row(2, writer=2), row(4, writer=2, status=503)]),
        )
        assert [each.number for each in await exported(ours)] == [1, 2, 3, 4]
        async with database.reading() as connection:
            assert await connection.scalar(select(func.count()).select_from(request_owners)) == 2
            assert await connection.scalar(select(func.count()).select_from(request_ways)) == 2

    run(main)


def test_gateways_that_write_the_same_in_another_order_never_wait_for_each_other_in_a_circle(run: Run) -> None:
    async def main(database: Database) -> None:
        tags = [f"t{number}" for number in range(600)]

        def rows(writer: int, tags: list[str]) -> list[LedgerRow]:
            return [row(number, writer=writer, tag=tag) for number, tag in enumerate(tags, start=1)]

        stores = LedgerStore(database), LedgerStore(database)
        for day in range(3):
            now = day * 86400.0
            await asyncio.gather(
                write(stores[0], rows(2 * day, tags), [], {}, now=now),
                write(stores[1], rows(2 * day + 1, tags[::-1]), [], {}, now=now),
            )
        assert len(await exported(stores[0])) == 3600

    run(main)


def test_what_no_request_has_in_common_any_more_goes_with_a_later_month(run: Run) -> None:
    days = 86400.0

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        for day, key in ((0, "gone"), (0, "stays"), (20, "stays"), (40, "stays")):
            at = day * days + 10
            await write(store, [row(day + len(key), ended_at=at, key_id=key)], [], {}, now=at)
        assert await store.roll_up(begins_at=0.0, ends_at=31 * days) == 3
        assert [each.key_id for each in await exported(store)] == ["stays"]
        async with database.reading() as connection:
            assert (await connection.scalars(select(request_owners.c.key_id))).all() == ["stays"]

    run(main)


def test_usage_is_what_was_saved_last(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, [], [UsageRow("chat", "ads", 1.5, 10.0), UsageRow("chat", "search", 2.0, 10.0)], {}, now=0.0)
        await write(store, [], [UsageRow("chat", "ads", 0.1 + 0.2, 11.0)], {}, now=0.0)
        assert await store.usage() == [
            UsageRow("chat", "ads", 0.1 + 0.2, 11.0),
            UsageRow("chat", "search", 2.0, 10.0),
        ]

    run(main)


def test_sums_are_half_open_in_time_and_group_as_asked(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(
            store,
            [
                row(9),
                row(10),
                row(11, team="ads", status=503, finish="refused", dispatched_at=None, cost_units=0.0),
                row(12, finish="cancelled"),
                row(20),
            ],
        )
        assert await store.sums(begins_at=10, ends_at=20, by=["team"]) == [
            Sums(("ads",), 1, 1, 10, 4, 5, 0.0, 0.0),
            Sums(("search",), 2, 1, 20, 8, 10, 0.5, 4.0),
        ]
        assert await store.sums(begins_at=10, ends_at=20, by=[], only={"team": "ads"}) == [
            Sums((), 1, 1, 10, 4, 5, 0.0, 0.0)
        ]
        assert await store.sums(begins_at=100, ends_at=200, by=[]) == []

    run(main)


def test_an_export_is_in_pages_and_loses_nothing_where_times_are_equal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairshare.storage.ledger.EXPORT_PAGE", 3)

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, [row(number, ended_at=5.0) for number in range(1, 9)])
        assert [each.number for each in await exported(store)] == list(range(1, 9))

    run(main)


def test_what_was_charged_is_counted_up_to_marks_by_model_and_tag(run: Run) -> None:
    async def main(database: Database) -> None:
        rows = [row(1), row(2, model="big"), row(3, tag="nightly"), row(3, writer=9), row(4, team="ads")]
        await write(LedgerStore(database), rows)
        old = row(5, writer=7, tag="nightly", cost_units=2.0)
        async with database.writing() as connection:
            await connection.execute(insert(ledger).values(msgspec.structs.asdict(old)))

        async def consumed(
            begins_at: float = 0.0, *values: str, column: str = "team", until: list[Mark] | None = None
        ) -> list[tuple[str, str, float]]:
            found = await ConsumptionStore(database).since(
                begins_at, column=column, values=values or ("search",), until=until or []
            )
            return sorted((each.model, each.tag, each.cost_units) for of in found.values() for each in of)

        whole = [("big", "", 0.25), ("tiny", "", 0.5), ("tiny", "nightly", 0.25), ("tiny", "nightly", 2.0)]
        assert await consumed() == whole
        assert await consumed(until=[Mark(5, 0), Mark(1, 4)]) == whole
        assert await consumed(until=[Mark(1, 3), Mark(7, 5)]) == [("big", "", 0.25), ("tiny", "", 0.5)]
        assert await consumed(until=[Mark(1, 3), Mark(9, 3), Mark(7, 0)]) == [("big", "", 0.25), ("tiny", "", 0.25)]
        assert await consumed(3.0) == [("tiny", "", 0.25), ("tiny", "nightly", 0.25), ("tiny", "nightly", 2.0)]
        assert await consumed(3.5, "search", "ads") == [("tiny", "", 0.25), ("tiny", "nightly", 2.0)]
        assert await consumed(3.5, "lab", column="organisation") == [("tiny", "", 0.25), ("tiny", "nightly", 2.0)]
        assert await consumed(0.0, "nobody") == []

    run(main)


def test_how_long_answers_were_is_the_mean_of_a_slot_in_the_last_requests(run: Run) -> None:
    async def main(database: Database) -> None:
        rows = [
            row(1, completion_tokens=1000),
            row(2, completion_tokens=30, slots=3),
            row(3, completion_tokens=20, slots=1),
            row(4, completion_tokens=7, slots=1, model="big"),
            row(5, completion_tokens=0),
            row(6, completion_tokens=9, slots=0),
        ]
        consumption = ConsumptionStore(database)
        assert await consumption.completions(last=3) == {}
        await write(LedgerStore(database), rows)
        assert await consumption.completions(last=3) == {"tiny": 15.0, "big": 7.0}

    run(main)


def test_a_month_that_was_rolled_up_adds_up_to_what_it_was(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(
            store,
            [row(n, team="ads" if n % 3 else "search", project=f"p{n % 2}") for n in range(1, 31)],
            [],
            {},
            now=0.0,
        )
        before = await store.sums(begins_at=0, ends_at=100, by=DIMENSIONS)
        assert await store.roll_up(begins_at=10, ends_at=20) == 10
        assert await store.sums(begins_at=0, ends_at=100, by=DIMENSIONS) == before
        assert len(await exported(store)) == 20
        assert await store.oldest() == 1.0
        consumption = ConsumptionStore(database)
        for begins_at, charged in ((0.0, 7.5), (10.0, 5.25), (11.0, 2.75)):  # a month counts whole or not at all
            consumed = await consumption.since(begins_at, column="organisation", values=["lab"], until=[])
            assert sum(each.cost_units for each in consumed["lab"]) == pytest.approx(charged)
        with pytest.raises(MonthsInTheWay):
            await store.sums(begins_at=15, ends_at=100, by=[])
        assert (await store.sums(begins_at=10, ends_at=20, by=[]))[0].requests == 10

    run(main)


# --- accounts -----------------------------------------------------------------------------------------------------


def lab() -> NodeRow:
    return NodeRow(kind="organisation", path="lab", parent_id=None, created_at=1.0, models=("tiny", "bïg"))


def key(node_id: int, name: str = "k1", version: int = 1) -> KeyRow:
    return KeyRow(id=name, node_id=node_id, service_class="batch", created_at=1.0, changed_in=version)


def budget_of(node_id: int, **other: Any) -> BudgetRow:
    return BudgetRow(node_id=node_id, period="day", time_zone="UTC", hard_cost_units=5.0, created_at=1.0, **other)


def test_changes_are_all_or_nothing_and_every_one_is_in_the_audit(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=5.0) as change:
            node = await change.add(lab(), target="lab")
            await change.replace(node, msgspec.structs.replace(node, models=None), target="lab")

        async def fail_half_way() -> None:
            async with store.changing(actor="ann", at=6.0) as change:
                await change.remove(msgspec.structs.replace(node, models=None), target="lab")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_half_way()
        assert await store.version() == 1
        assert await store.all(NodeRow) == [msgspec.structs.replace(lab(), id=node.id, models=None)]
        audit = await store.all(AuditRow)
        assert [(each.at, each.actor, each.action, each.target) for each in audit] == [
            (5.0, "ann", "add nodes", "lab"),
            (5.0, "ann", "change nodes", "lab"),
        ]
        assert audit[0].before is None
        assert audit[0].after == audit[1].before
        assert audit[1].after is not None
        assert '"models": null' in audit[1].after

    run(main)


def test_concurrent_changes_come_one_after_the_other(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)

        async def add(name: str) -> int:
            async with store.changing(actor="ann", at=1.0) as change:
                await change.add(NodeRow(kind="organisation", path=name, parent_id=None, created_at=1.0), target=name)
                return change.version

        assert sorted(await asyncio.gather(*(add(f"o{n}") for n in range(5)))) == [1, 2, 3, 4, 5]

    run(main)


def test_only_keys_that_changed_are_read_again_each_with_all_its_secrets(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairshare.storage.accounts.LIVE_PAGE", 2)

    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
            for n in range(5):
                await change.add(key(node.id, f"k{n}", change.version), target="k")
                await change.add(SecretRow(sha256=f"hash{n}", key_id=f"k{n}", created_at=1.0), target="k")
        async with store.changing(actor="ann", at=2.0) as change:
            old = key(node.id, "k3", 1)
            new = msgspec.structs.replace(old, changed_in=change.version, revoked_at=2.0)
            await change.replace(old, new, target="k3")
            await change.add(SecretRow(sha256="hash9", key_id="k3", created_at=1.0, expires_at=7.0), target="k3")

        async def changed(since: int) -> list[tuple[str, str, float | None]]:
            return [
                (each.sha256, each.key.id, each.secret_expires_at)
                async for page in store.keys_changed(since=since)
                for each in page
            ]

        assert [each[0] for each in await changed(0)] == [f"hash{n}" for n in (0, 1, 2, 3, 4, 9)]
        assert await changed(1) == [("hash3", "k3", None), ("hash9", "k3", 7.0)]
        assert await changed(2) == []

    run(main)


def test_when_a_key_was_last_used_only_moves_forward_and_is_no_change(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
            await change.add(key(node.id), target="k1")
        ledger_store = LedgerStore(database)
        await write(ledger_store, [], [], {"k1": 50.0, "unknown": 50.0}, now=0.0)
        await write(ledger_store, [], [], {"k1": 40.0}, now=0.0)
        assert [each.last_used_at for each in await store.all(KeyRow)] == [50.0]
        assert await store.version() == 1

    run(main)


def test_rules_are_read_whole_and_an_increase_goes_with_its_budget(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
            limit = await change.add(LimitRow(kind="in_flight", node_id=node.id, value=3), target="lab")
            budget = await change.add(budget_of(node.id), target="lab")
            increase = await change.add(IncreaseRow(budget_id=budget.id, cost_units=2.0, until=9.0), target="lab")
        rules = await store.rules()
        assert (rules.version, rules.budgets, rules.increases) == (1, (budget,), (increase,))
        assert [row async for page in store.limits() for row in page] == [limit]
        async with store.changing(actor="ann", at=2.0) as change:
            await change.remove(budget, target="lab")
        assert (await store.rules()).increases == ()

    run(main)


def test_of_the_rules_only_what_changed_since_is_read_again(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
            limit = await change.add(LimitRow(kind="in_flight", node_id=node.id, value=3), target="lab")
            budget = await change.add(budget_of(node.id), target="lab")
            await change.add(IncreaseRow(budget_id=budget.id, cost_units=2.0, until=9.0), target="lab")
        first = await store.rules()
        assert first.limits_changed is None

        async with store.changing(actor="ann", at=2.0) as change:
            await change.add(key(node.id, "k1", change.version), target="k1")
        second = await store.rules(first)
        assert (second.version, second.limits_changed) == (2, ())
        assert second.nodes is first.nodes
        assert second.budgets is first.budgets
        assert second.increases is first.increases
        assert second.operators is first.operators

        async with store.changing(actor="ann", at=3.0) as change:
            other = await change.add(LimitRow(kind="in_flight", key_id="k1", value=4), target="k1")
            more = msgspec.structs.replace(other, value=5)
            await change.replace(other, more, target="k1")
            await change.remove(limit, target="lab")
        third = await store.rules(second)
        assert third.limits_changed == (
            LimitChange(other.id, other), LimitChange(other.id, more), LimitChange(limit.id, None)
        )  # fmt: skip
        assert third.nodes is first.nodes

        async with store.changing(actor="ann", at=4.0) as change:
            await change.remove(budget, target="lab")
        fourth = await store.rules(third)
        assert (fourth.budgets, fourth.increases, fourth.limits_changed) == ((), (), ())

    run(main)


def test_rules_of_a_store_with_another_past_are_read_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairshare.storage.accounts.LIVE_PAGE", 2)

    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
            for kind in ("requests_per_minute", "tokens_per_minute"):
                await change.add(LimitRow(kind=kind, node_id=node.id, value=3), target="lab")
        rules = await store.rules()
        assert (await store.rules(rules)).limits_changed == ()
        assert [len(page) async for page in store.limits()] == [2]
        async with store.changing(actor="ann", at=2.0) as change:
            keys = [key(node.id, f"k{number}", 2) for number in range(3)]
            await change.add_many(keys, target=lambda each: each.id)
            added = await change.add_many(
                [LimitRow(kind="in_flight", key_id=each.id, value=4) for each in keys],
                target=lambda each: each.key_id or "",
            )
        assert [row async for page in store.limits() for row in page][2:] == added
        # More than can be read at once: all of them are read, page by page.
        assert (await store.rules(rules)).limits_changed is None

        rules = await store.rules()
        assert rules.newest is not None
        assert (rules.newest.target, rules.newest.action) == ("k2", "add limits")
        assert '"value": 4' in (rules.newest.after or "")
        async with database.writing() as connection:
            await connection.exec_driver_sql(f"update audit set at = 5 where id = {rules.newest.id}")
        assert (await store.rules(rules)).limits_changed is None

    run(main)


def test_a_number_of_a_budget_is_never_given_again_also_beside_programs_that_let_the_database_give_it(
    run: Run,
) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            node = await change.add(lab(), target="lab")
        given: list[int] = []

        async def add(*, old: bool, fails: bool = False) -> BudgetRow:
            async with store.changing(actor="ann", at=1.0) as change:
                number = 0 if old else await change.unused_id(BudgetRow)
                row = await change.add(budget_of(node.id, id=number), target="lab")
                assert row.id not in given
                if fails:
                    raise ZeroDivisionError
            given.append(row.id)
            return row

        for old in (True, False, False, True, False, True):
            await add(old=old)
        last = await add(old=False)
        async with store.changing(actor="ann", at=1.0) as change:
            await change.remove(last, target="lab")
        await add(old=False)
        # PostgreSQL does not give numbers of changes that failed again either, so they run ahead of the changes.
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                await add(old=True, fails=True)
        await add(old=True)
        for _ in range(25):
            await add(old=False)

    run(main)


def test_what_belongs_to_a_node_is_what_it_and_those_below_have(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            numbers: dict[str, int] = {}
            for kind, path, parent in (
                ("organisation", "lab", None), ("team", "search", "lab"), ("project", "search/web", "search"),
                ("team", "ads", "lab"), ("organisation", "firm", None), ("team", "sales", "firm"),
            ):  # fmt: skip
                row = NodeRow(kind=kind, path=path, parent_id=numbers.get(parent or ""), created_at=1.0)
                node = numbers[path] = (await change.add(row, target=path)).id
                await change.add(LimitRow(kind="in_flight", node_id=node, value=1), target=path)
                if kind != "organisation":
                    await change.add(key(node, path), target=path)
                    await change.add(LimitRow(kind="in_flight", key_id=path, value=1), target=path)

        async def owned(path: str | None) -> tuple[list[str], int]:
            within = None if path is None else numbers[path]
            keys, nodes = await store.owned(KeyRow, within=within, limit=None, after=None)
            assert len(nodes) == 6
            return [each.id for each in keys], len(
                (await store.owned(LimitRow, within=within, limit=None, after=None))[0]
            )

        assert await owned(None) == (["ads", "sales", "search", "search/web"], 10)
        assert await owned("lab") == (["ads", "search", "search/web"], 7)
        assert await owned("search") == (["search", "search/web"], 4)
        assert await owned("search/web") == (["search/web"], 2)
        rows, _ = await store.owned(KeyRow, within=numbers["lab"], limit=1, after="ads")
        assert [each.id for each in rows] == ["search"]

    run(main)


def test_pages_follow_the_primary_key_in_both_directions(run: Run) -> None:
    async def main(database: Database) -> None:
        store = AccountStore(database)
        async with store.changing(actor="ann", at=1.0) as change:
            for name in "abcd":
                await change.add(NodeRow(kind="organisation", path=name, parent_id=None, created_at=1.0), target=name)
        first = await store.all(NodeRow, limit=2)
        assert [each.path for each in first] == ["a", "b"]
        assert [each.path for each in await store.all(NodeRow, limit=2, after=first[-1].id)] == ["c", "d"]
        newest = await store.all(AuditRow, limit=3, newest_first=True)
        assert [each.target for each in newest] == ["d", "c", "b"]
        assert [each.target for each in await store.all(AuditRow, after=newest[-1].id, newest_first=True)] == ["a"]
        assert [each.path for each in await store.all(NodeRow, path=["a", "d"])] == ["a", "d"]

    run(main)


# --- backup -------------------------------------------------------------------------------------------------------


def test_a_backup_of_a_store_in_use_restores_to_what_it_was(
    address: StoreAddress, run: Run, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the very commands of docs/operations-store.md."""
    rows = [row(number) for number in range(1, 200)]
    copy: list[StoreAddress] = []

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        await write(store, rows, [UsageRow("chat", "search", 7.0, 1.0)], {}, now=0.0)
        async with database.reading():
            copy.append(await asyncio.to_thread(backed_up, address, tmp_path, request))
        await write(store, [row(500)])

    run(main)

    async def restored(database: Database) -> None:
        await database.migrate()
        store = LedgerStore(database)
        assert await exported(store) == rows
        assert await store.usage() == [UsageRow("chat", "search", 7.0, 1.0)]

    running(copy[0], restored)


PAGE = Path(__file__).parents[2] / "docs" / "operations-store.md"


def commands(program: str) -> list[list[str]]:
    """The commands of the page that begin with a program's name."""
    found = [shlex.split(line) for line in PAGE.read_text().splitlines() if line.startswith(f"    {program} ")]
    assert found, program
    return found


def backed_up(address: StoreAddress, folder: Path, request: pytest.FixtureRequest) -> StoreAddress:
    if isinstance(address, SqliteFile):
        assert address.path == folder / "fairshare.sqlite3", "as the page has it"
        (python,) = commands("python3")
        subprocess.run([sys.executable, *python[1:]], cwd=folder, check=True, timeout=30)
        return SqliteFile(folder / "backup.sqlite3")
    postgres: Postgres = request.getfixturevalue("postgres")
    fresh = postgres.new_database()
    dump = f"/tmp/{Path(address.host).name}-{address.database}.dump"
    where = ("-h", address.host, "-U", address.user)
    (save,), (restore,) = commands("pg_dump"), commands("pg_restore")
    assert (save[-1], restore[-1]) == ("fairshare", "fairshare.dump")
    try:
        saving = [each.replace("=fairshare.dump", f"={dump}") for each in save[1:-1]]
        postgres.tool("pg_dump", *where, *saving, address.database)
        restoring = [each.replace("=fairshare", f"={fresh.database}") for each in restore[1:-1]]
        postgres.tool("pg_restore", *where, *restoring, dump)
    finally:
        Path(dump).unlink(missing_ok=True)
    return fresh


# --- history ------------------------------------------------------------------------------------------------------


def test_minutes_of_history_come_back_in_order_and_the_same_minute_again_replaces_it(run: Run) -> None:
    async def main(database: Database) -> None:
        store = HistoryStore(database)
        await store.save([HistoryRow("chat", 120.0, "b"), HistoryRow("chat", 60.0, "a")], forget_before=0.0)
        await store.save([HistoryRow("chat", 120.0, "c"), HistoryRow("batch", 120.0, "d")], forget_before=0.0)
        assert await store.since(60.0) == [
            HistoryRow("chat", 60.0, "a"),
            HistoryRow("batch", 120.0, "d"),
            HistoryRow("chat", 120.0, "c"),
        ]
        assert [row.sample for row in await store.since(61.0)] == ["d", "c"]

    run(main)


def test_history_that_is_too_old_is_forgotten(run: Run) -> None:
    async def main(database: Database) -> None:
        store = HistoryStore(database)
        await store.save([HistoryRow("chat", minute * 60.0, "") for minute in range(10)], forget_before=0.0)
        await store.save([], forget_before=300.0)
        assert [row.began_at for row in await store.since(0.0)] == [300.0, 360.0, 420.0, 480.0, 540.0]

    run(main)


def test_the_last_requests_with_an_id_come_back_newest_first(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LedgerStore(database)
        rows = [row(number, request_id="again" if number % 2 else f"r{number}") for number in range(30)]
        await write(store, rows)
        found = await store.with_id("again")
        assert [each.number for each in found] == [29, 27, 25, 23, 21, 19, 17, 15, 13, 11]
        assert await store.with_id("never") == []

    run(main)
