"""What the status page shows of the last days: one row per pool and minute."""

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite

from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.schema import history


class HistoryRow(msgspec.Struct, frozen=True):
    """One pool in one minute."""

    pool: str
    began_at: float
    """Wall clock."""
    sample: str
    """JSON; what is in it is the matter of whoever writes and reads it."""


class HistoryStore:
    """Reads and writes it. Every method raises `StoreUnavailable`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        dialect_insert: Any = sqlite.insert if isinstance(database.address, SqliteFile) else postgresql.insert
        save = dialect_insert(history)
        self._save = save.on_conflict_do_update(
            index_elements=["pool", "began_at"], set_={"sample": save.excluded.sample}
        )

    async def save(self, rows: Iterable[HistoryRow], *, forget_before: float) -> None:
        """Write minutes, the same one again if need be, and forget those that began before then (wall clock)."""
        values = [msgspec.structs.asdict(row) for row in rows]
        async with self._database.writing() as connection:
            if values:
                await connection.execute(self._save, values)
            await connection.execute(delete(history).where(history.c.began_at < forget_before))

    async def since(self, began_at: float) -> list[HistoryRow]:
        """Every minute that began then or later (wall clock), the oldest first."""
        ordered = select(*history.c).where(history.c.began_at >= began_at).order_by(history.c.began_at, history.c.pool)
        async with self._database.reading() as connection:
            return [HistoryRow(*row) for row in await connection.execute(ordered)]
