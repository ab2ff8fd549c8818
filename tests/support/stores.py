"""Fixtures: stores of both backends. A folder of tests imports them in its conftest."""

import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fairshare.storage.address import SqliteFile, StoreAddress
from fairshare.storage.database import Database
from support.postgres import Postgres
from support.storing import Run, running


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def empty(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreAddress]:
    """A store without tables."""
    if backend == "sqlite":
        yield SqliteFile(tmp_path / "fairshare.sqlite3")
    else:
        yield from _database(request, migrated=False)


@pytest.fixture
def address(
    backend: str, tmp_path: Path, migrated_file: Path, request: pytest.FixtureRequest
) -> Iterator[StoreAddress]:
    """A store with its tables."""
    if backend == "sqlite":
        yield SqliteFile(Path(shutil.copy(migrated_file, tmp_path / "fairshare.sqlite3")))
    else:
        yield from _database(request, migrated=True)


def _database(request: pytest.FixtureRequest, *, migrated: bool) -> Iterator[StoreAddress]:
    postgres: Postgres = request.getfixturevalue("postgres")
    made = postgres.new_database(migrated=migrated)
    yield made
    postgres.drop(made)


@pytest.fixture
def run(address: StoreAddress) -> Run:
    """Runs a coroutine function with the store."""

    def with_database(main: Callable[[Database], Awaitable[None]]) -> None:
        running(address, main)

    return with_database
