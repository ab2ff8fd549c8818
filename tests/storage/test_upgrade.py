"""A store of any older version, with something in every table, is brought up to date and has all that it had."""

from typing import Any

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import BigInteger, Connection, Float, Integer, LargeBinary, MetaData, Table, insert, select

from fairshare.storage.address import SqliteFile, StoreAddress
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import MIGRATIONS, Database
from fairshare.storage.ledger import DIMENSIONS, LedgerRow, LedgerStore
from fairshare.storage.schema import REVISION, ledger
from support.storing import Run, row, running, write

CONFIG = Config()
CONFIG.set_main_option("script_location", str(MIGRATIONS))
REVISIONS = sorted(each.revision for each in ScriptDirectory.from_config(CONFIG).walk_revisions())

CHOSEN: dict[str, dict[str, Any]] = {
    # What the rules of the tables want.
    "nodes": {"kind": "organisation", "parent_id": None},
    "operators": {"role": "viewer"},
    "limits": {"key_id": None},
    "budgets": {"key_id": None, "period": "month"},
}


def upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def tables(connection: Connection) -> list[Table]:
    """Those that there are, each behind those that it refers to."""
    metadata = MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def one_row(table: Table) -> dict[str, Any]:
    """A value for every column, no two alike where that is possible."""

    def value(number: int, kind: object) -> Any:
        match kind:
            case Float():
                return number + 0.1
            case BigInteger():
                return 2**40 + number
            case Integer():
                return number
            case LargeBinary():
                return b"\x00\xff"
            case _:
                return f"nächste {number}" if str(kind) != "BOOLEAN" else True

    row = {column.name: value(number, column.type) for number, column in enumerate(table.c, start=1)}
    for column in table.c:
        for key in column.foreign_keys:
            # The one row that is there; ids come first, so theirs is 1.
            row[column.name] = 1 if isinstance(key.column.type, Integer) else "nächste 1"
    return row | CHOSEN.get(table.name, {})


def contents(connection: Connection, of: dict[str, list[str]]) -> dict[str, list[tuple[Any, ...]]]:
    found = {table.name: table for table in tables(connection)}
    return {
        name: [tuple(each) for each in connection.execute(select(*(found[name].c[column] for column in columns)))]
        for name, columns in of.items()
    }


@pytest.fixture(params=REVISIONS[:-1])
def older(request: pytest.FixtureRequest, empty: StoreAddress) -> StoreAddress:
    """A store at an older revision."""

    async def make(database: Database) -> None:
        async with database.writing() as connection:
            await connection.run_sync(upgrade, request.param)

    if isinstance(empty, SqliteFile):
        empty.path.touch()
    running(empty, make)
    return empty


def test_a_store_of_every_older_version_is_upgraded_with_all_that_is_in_it(older: StoreAddress) -> None:
    before: dict[str, list[tuple[Any, ...]]] = {}
    columns: dict[str, list[str]] = {}

    def fill(connection: Connection) -> None:
        for table in tables(connection):
            if connection.execute(select(table)).first() is None:
                connection.execute(table.insert().values(one_row(table)))
            columns[table.name] = [column.name for column in table.c]
        before.update(contents(connection, columns))

    async def main(database: Database) -> None:
        async with database.writing() as connection:
            await connection.run_sync(fill)
        await database.migrate()
        async with database.reading() as connection:
            after = await connection.run_sync(contents, columns)
            revision = await connection.exec_driver_sql("select version_num from alembic_version")
            assert revision.scalar() == REVISION
        # What says which versions can use the store is the newest program's to say.
        assert {name: rows for name, rows in after.items() if name != "compatibility"} == {
            name: rows for name, rows in before.items() if name != "compatibility"
        }
        assert len(before["ledger"]) == len(before["keys"]) == len(before["audit"]) == 1
        # And it works.
        store = LedgerStore(database)
        await write(store, [row(2)])
        assert [each async for page in store.rows(begins_at=0, ends_at=3) for each in page] == [row(2)]

    running(older, main)


def test_what_programs_of_older_versions_write_meanwhile_is_in_every_sum_once(run: Run) -> None:
    """Replicas of two versions run side by side during an upgrade. The oldest write no `finish_reason`; all before
    revision 0005 write into `ledger`."""

    async def main(database: Database) -> None:
        store = LedgerStore(database)
        theirs, ours = row(1, finish_reason=""), row(2)
        await write(store, [ours])
        async with database.writing() as connection:
            values = msgspec.structs.asdict(theirs)
            del values["finish_reason"]
            await connection.execute(insert(ledger).values(values))

        async def exported() -> list[LedgerRow]:
            return [each async for page in store.rows(begins_at=0, ends_at=3) for each in page]

        assert await exported() == [theirs, ours]
        assert await store.with_id("request-1") == [theirs]
        assert await store.oldest() == 1.0
        before = await store.sums(begins_at=0, ends_at=3, by=DIMENSIONS)
        assert [(each.requests, each.cost_units, each.slot_seconds) for each in before] == [(2, 0.5, 4.0)]
        consumed = await ConsumptionStore(database).since(0.0, column="team", values=["search", "ads"], until=[])
        assert {team: [(each.model, each.cost_units) for each in of] for team, of in consumed.items()} == {
            "search": [("tiny", 0.25), ("tiny", 0.25)]
        }
        assert await store.roll_up(begins_at=0, ends_at=3) == 2
        assert await exported() == []
        assert await store.sums(begins_at=0, ends_at=3, by=DIMENSIONS) == before

    run(main)
