"""Connections and transactions: the same for a SQLite file and for PostgreSQL.

SQLite: WAL, so that readers never wait for the writer; a write transaction takes the one write lock at its begin, so
that it never fails half way. Every wait is bounded, whatever the store does.
"""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, event, inspect
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from fairshare.errors import OperatorError, TryElsewhere
from fairshare.storage.address import PostgresServer, SqliteFile, StoreAddress
from fairshare.storage.schema import REVISION

LOCK_WAIT_SECONDS = 2.0
"""How long a statement waits for another process that has the SQLite file locked."""

PATIENCE_SECONDS = 5.0
"""How long one transaction may take before the store counts as not answering."""

MIGRATIONS = Path(__file__).parent / "migrations"

_MIGRATION_LOCK = 0x6661_6972
"""The advisory lock of PostgreSQL under which one process at a time migrates."""


class StoreUnavailable(TryElsewhere):
    """The store cannot be reached, is full, locked or broken now; a later try may succeed."""


class StoreReplaced(StoreUnavailable):
    """The SQLite file was deleted, moved away or replaced while it was open. `migrate` goes on with what is there."""


class Fit(StrEnum):
    """What the tables of a store are to this version."""

    EMPTY = "empty"
    OLDER = "older"
    """They are upgraded when a gateway starts."""
    READY = "ready"
    TOO_NEW = "too new"
    """A newer version did more than add to them."""


class StoreTooNew(OperatorError):
    """A newer fairshare has migrated the store."""


class Database:
    """A pool of connections to the store. `reading` and `writing` are transactions."""

    def __init__(self, address: StoreAddress, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.address = address
        self._patience_seconds = patience_seconds
        self._engine = _engine(address)
        self.generation = 0
        """Grows when another SQLite file has taken the place of the one that was open."""
        self._file: tuple[int, int] | None = None
        """Which SQLite file was opened: its device and inode. It keeps them while a connection has it open."""
        self._beside: dict[Path, tuple[int, int] | None] = {}
        """The files that SQLite keeps beside it, as they were last seen."""

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    @asynccontextmanager
    async def reading(self, *, patience_seconds: float | None = None) -> AsyncGenerator[AsyncConnection]:
        """A transaction that only reads. Raises `StoreUnavailable`."""
        async with self._transaction(write=False, patience_seconds=patience_seconds) as connection:
            yield connection

    @asynccontextmanager
    async def writing(self, *, patience_seconds: float | None = None) -> AsyncGenerator[AsyncConnection]:
        """A transaction that writes: all of it or nothing. Raises `StoreUnavailable`."""
        async with self._transaction(write=True, patience_seconds=patience_seconds) as connection:
            yield connection

    async def migrate(self) -> None:
        """Bring the tables to what this version needs. Several processes may do it at once.

        Raises:
            StoreUnavailable: the store does not answer.
            StoreTooNew: it was migrated by a newer version that did more than add to it.
        """
        if isinstance(self.address, SqliteFile):
            if self._file is not None and _identity(self.address.path) != self._file:
                for path, identity in self._beside.items():
                    # SQLite would replay a log that belongs to the file that is gone into the one that is there now.
                    if identity is not None and _identity(path) == identity:
                        path.unlink(missing_ok=True)
                self.generation += 1
                await self._engine.dispose()  # its connections write into a file that nobody finds any more
            _create_private(self.address.path)
            self._file = _identity(self.address.path)
        async with self.reading() as connection:
            if (await connection.run_sync(fit))[0] is Fit.READY:
                return
        async with self.writing(patience_seconds=60.0) as connection:
            if isinstance(self.address, PostgresServer):
                await connection.exec_driver_sql(f"select pg_advisory_xact_lock({_MIGRATION_LOCK})")
            await connection.run_sync(_upgrade, str(self.address))

    def examine_file(self) -> None:
        """SQLite itself does not notice, and goes on writing into a file without a name.

        Raises:
            StoreReplaced: another file is in the place of the one that was opened, or none.
        """
        if self._file is None or not isinstance(self.address, SqliteFile):
            return
        found = _identity(self.address.path)
        if found != self._file:
            what = "deleted" if found is None else "replaced by another file"
            raise StoreReplaced(f"the store {self.address} was {what} while it was open")
        beside = (self.address.path.with_name(self.address.path.name + end) for end in ("-wal", "-shm"))
        self._beside = {path: _identity(path) for path in beside}

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def _transaction(self, *, write: bool, patience_seconds: float | None) -> AsyncGenerator[AsyncConnection]:
        try:
            self.examine_file()
            async with asyncio.timeout(patience_seconds or self._patience_seconds):
                async with self._engine.connect() as connection:
                    await connection.execution_options(fairshare_write=write)
                    if not write and isinstance(self.address, PostgresServer):
                        # Everything that one transaction reads is of one moment, as SQLite has it anyway.
                        await connection.execution_options(isolation_level="REPEATABLE READ")
                    async with connection.begin():
                        yield connection
            if write:
                self.examine_file()
        except TimeoutError:
            raise StoreUnavailable(f"the store {self.address} did not answer in time") from None
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(f"the store {self.address} failed: {_reason(error)}") from error


def _driver_url(address: StoreAddress) -> URL:
    """The address as SQLAlchemy wants it, the password in it."""
    match address:
        case SqliteFile():
            # Never created by opening it: `migrate` does that, for its owner only.
            path = quote(str(address.path.absolute()))
            return URL.create("sqlite+aiosqlite", database=f"file:{path}", query={"mode": "rw", "uri": "true"})
        case PostgresServer():
            return URL.create(
                "postgresql+asyncpg",
                username=address.user,
                password=address.password,
                host=None if address.host.startswith("/") else address.host,
                port=None if address.host.startswith("/") else address.port,
                database=address.database,
                # asyncpg takes the folder of a socket as a host; in a URL only the query can carry it.
                query={"host": address.host, "port": str(address.port)} if address.host.startswith("/") else {},
            )


def _reason(error: Exception) -> str:
    """What the database said, without the statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(cause).split())
    # SQLAlchemy's wrapper of asyncpg's errors puts the class first.
    return text.rpartition(">: ")[2][:200] or type(cause).__name__


def _engine(address: StoreAddress) -> AsyncEngine:
    match address:
        case SqliteFile():
            engine = create_async_engine(
                _driver_url(address),
                connect_args={"timeout": LOCK_WAIT_SECONDS},
                pool_size=4,
                hide_parameters=True,
            )
            event.listen(engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
            return engine
        case PostgresServer():
            return create_async_engine(
                _driver_url(address),
                connect_args={"timeout": PATIENCE_SECONDS, "server_settings": {"application_name": "fairshare"}},
                pool_size=4,
                pool_recycle=300,
                hide_parameters=True,
            )


def _prepare_sqlite(connection: Any, _: object) -> None:
    # Ours begins and ends transactions, not the driver, which would begin late and without the lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={int(LOCK_WAIT_SECONDS * 1000)}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("fairshare_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _create_private(path: Path) -> None:
    """The file, for its owner only: it names teams and says what they use.

    One that is there is not opened: closing it would take the locks from every connection of this process (POSIX has it
    so), and the next program to close the store would then delete the log under the connections that are left.
    """
    try:
        if path.exists():
            if not os.access(path, os.R_OK | os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            os.close(os.open(path.resolve(), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass  # another process made it meanwhile
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise StoreUnavailable(f"the store {path} cannot be written ({reason})") from None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at a path; None: there is none, or it cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _revision(connection: Connection) -> str | None:
    """How far the store was migrated; None: not at all."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.exec_driver_sql("select version_num from alembic_version").scalar()


def fit(connection: Connection) -> tuple[Fit, str | None]:
    """What the store is to this version, and its revision. One to which a newer version only added is ready."""
    revision = _revision(connection)
    if revision is None:
        return Fit.EMPTY, None
    if revision <= REVISION:
        return Fit.READY if revision == REVISION else Fit.OLDER, revision
    needed = str(connection.exec_driver_sql("select revision from compatibility").scalar())
    return Fit.READY if needed <= REVISION else Fit.TOO_NEW, revision


def _upgrade(connection: Connection, shown: str) -> None:
    # Heavy, and seldom needed.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    current = _revision(connection)
    if current is not None and current not in known:
        raise StoreTooNew(
            f"the store {shown} was upgraded by a newer fairshare (revision {current}); "
            "run that version, or restore the backup from before the upgrade"
        )
    command.upgrade(config, "head")
