"""Migrations expand before they contract: what a program of the version before needs stays, while both versions run.

`COMPATIBLE_REVISION` names the oldest program that can use a store of the newest revision. From there on every step
only adds: tables, and columns that an old program's INSERT may leave out. Whoever contracts raises it, and may do so
only for what no program of the version before uses any more.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from fairshare.storage.database import MIGRATIONS
from fairshare.storage.schema import COMPATIBLE_REVISION

Step = Callable[[Operations], object]

STEPS = sorted(ScriptDirectory(str(MIGRATIONS)).walk_revisions(), key=lambda step: step.revision)


def steps_after(connection: Connection, monkeypatch: pytest.MonkeyPatch, revision: str) -> list[tuple[str, Step]]:
    """Those that are not part of a store of that revision; the others are carried out."""
    left: list[tuple[str, Step]] = []
    for step in STEPS:

        def run(operations: Operations, step: object = step) -> None:
            module = step.module  # type: ignore[attr-defined]
            monkeypatch.setattr(module, "op", operations)
            module.upgrade()

        if step.revision <= revision:
            run(operations(connection))
        else:
            left.append((step.revision, run))
    return left


def operations(connection: Connection) -> Operations:
    return Operations(MigrationContext.configure(connection))


def shape(connection: Connection) -> dict[str, dict[str, tuple[str, bool, bool]]]:
    """Table → column → its type, whether it may be NULL, and whether an INSERT may leave it out."""
    found = inspect(connection)
    return {
        table: {
            column["name"]: (
                str(column["type"]),
                bool(column["nullable"]),
                bool(column["nullable"]) or column["default"] is not None,
            )
            for column in found.get_columns(table)
        }
        for table in found.get_table_names()
    }


def rules(connection: Connection) -> dict[str, list[object]]:
    """What the tables refuse."""
    found = inspect(connection)
    return {
        table: [
            found.get_pk_constraint(table),
            found.get_unique_constraints(table),
            found.get_check_constraints(table),
            found.get_foreign_keys(table),
            [index for index in found.get_indexes(table) if index["unique"]],
        ]
        for table in found.get_table_names()
    }


def contractions(connection: Connection, steps: Sequence[tuple[str, Step]]) -> list[str]:
    """What each step takes from, or wants of, a program that does not know it."""
    said: list[str] = []
    for revision, step in steps:
        before, rules_before = shape(connection), rules(connection)
        step(operations(connection))
        after, rules_after = shape(connection), rules(connection)
        for table, columns in before.items():
            if table not in after:
                said.append(f"{revision}: table {table} is gone")
                continue
            for column, known in columns.items():
                if after[table].get(column) != known:
                    said.append(f"{revision}: {table}.{column} was {known}, is {after[table].get(column, 'gone')}")
            said += [
                f"{revision}: an INSERT that does not know {table}.{column} fails"
                for column in after[table].keys() - columns.keys()
                if not after[table][column][2]
            ]
            if rules_after[table] != rules_before[table]:
                said.append(f"{revision}: {table} refuses something else than before")
    return said


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'store.sqlite3'}")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_every_step_since_the_oldest_program_that_may_run_only_adds(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contractions(connection, steps_after(connection, monkeypatch, COMPATIBLE_REVISION)) == []


@pytest.mark.parametrize(
    ("contracts", "said"),
    [
        (lambda op: op.drop_table("history"), "table history is gone"),
        (lambda op: op.drop_column("usage", "as_of"), "usage.as_of was"),
        (lambda op: op.alter_column("usage", "team", new_column_name="name"), "usage.team was"),
        (lambda op: op.rename_table("usage", "used"), "table usage is gone"),
        (lambda op: op.execute("create unique index one on ledger (request_id)"), "ledger refuses something else"),
    ],
)
def test_a_step_that_contracts_is_found(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, contracts: Step, said: str
) -> None:
    for _, step in steps_after(connection, monkeypatch, COMPATIBLE_REVISION):
        step(operations(connection))
    assert said in contractions(connection, [("9999", contracts)])[0]


def test_a_column_that_an_old_program_does_not_fill_must_fill_itself(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(op: Operations) -> None:
        op.add_column("leases", sa.Column("kept", sa.Text()))
        op.add_column("leases", sa.Column("counted", sa.Integer(), nullable=False, server_default="0"))
        with op.batch_alter_table("usage") as batch:
            batch.add_column(sa.Column("wanted", sa.Integer(), nullable=False))

    for _, step in steps_after(connection, monkeypatch, COMPATIBLE_REVISION):
        step(operations(connection))
    assert contractions(connection, [("9999", needs)]) == ["9999: an INSERT that does not know usage.wanted fails"]
