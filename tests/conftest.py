"""Fixtures that several folders of tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairshare.storage.address import SqliteFile
from support.postgres import Postgres
from support.storing import migrate


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for the whole run, started for the first test that asks."""
    server = Postgres()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables, to copy: making them takes longer than most tests do."""
    path = tmp_path_factory.mktemp("store") / "fairshare.sqlite3"
    migrate(SqliteFile(path))
    return path


def pytest_configure() -> None:
    # Whoever is started by a shell in the background ignores Ctrl-C, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write transcripts in tests/scenarios anew; read the difference"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes: the longest file must not be the one that ends last
        items.sort(key=lambda item: item.path.name != "test_simulated.py")
