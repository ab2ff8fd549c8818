"""Leases: which replica decides for a group of pools, and what it leaves to its successor.

Points in time are on the database's clock, which all replicas share. Whatever an owner writes carries the epoch of its
lease, and the lease's row is locked in the same transaction: a write of an old epoch is refused, and one that was
accepted is seen by whoever takes the lease next.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.schema import DOUBLE, leases, usage

PATIENCE_SECONDS = 2.0
"""How long a transaction about a lease may take: an owner must know in time whether it still is one."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """The right to decide for a group of pools, as the store has it."""

    lease: str
    """Its name."""
    epoch: int
    """Grows with every owner, never falls."""
    owner: str
    """The replica that holds it, or held it last."""
    address: str
    """Where that replica listens for its peers."""
    left_seconds: float
    """Until it ends, as it was read; 0 or less: it has ended."""


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner before saved last."""

    usage: Mapping[str, Mapping[str, tuple[float, float]]]
    """Pool → team → decayed usage in cost units, and how many seconds ago it was that."""
    state: bytes
    """What went with it; empty: nothing was ever saved."""


class LeaseStore:
    """Reads and writes leases. Every method raises `StoreUnavailable`; then it is unknown whether a write was made."""

    def __init__(self, database: Database) -> None:
        self._database = database
        is_sqlite = isinstance(database.address, SqliteFile)
        self._dialect_insert: Any = sqlite.insert if is_sqlite else postgresql.insert
        # Not PostgreSQL's `now()`, which is when the transaction began: it may have waited for a lock since.
        self._now: ColumnElement[float] = literal_column(
            "((julianday('now') - 2440587.5) * 86400.0)"
            if is_sqlite
            else "cast(extract(epoch from clock_timestamp()) as double precision)",
            DOUBLE,
        )

    # ------------------------------------------------------------------ leases

    async def read(self) -> list[LeaseRow]:
        """Every lease that there ever was, also those that have ended."""
        async with self._database.reading(patience_seconds=PATIENCE_SECONDS) as connection:
            return [_lease(row) for row in await connection.execute(select(*self._columns()).order_by(leases.c.lease))]

    async def acquire(self, lease: str, *, owner: str, address: str, seconds: float) -> LeaseRow:
        """Take a lease, with a new epoch, if nobody else holds it. Returns the lease that is in force then.

        An owner that asks again gets a new epoch too: it may have forgotten what it did in the old one.
        """
        # Nearly always somebody does, and all followers ask: none of them need lock what the owner renews.
        held = await self.look(lease)
        if held is not None and held.left_seconds > 0.0 and held.owner != owner:
            return held
        take = self._dialect_insert(leases).values(
            lease=lease, epoch=1, owner=owner, address=address, state=b"", ends_at=self._now + seconds
        )
        take = take.on_conflict_do_update(
            index_elements=["lease"],
            set_={
                "epoch": leases.c.epoch + 1,
                "owner": take.excluded.owner,
                "address": take.excluded.address,
                "ends_at": self._now + seconds,
            },
            where=(leases.c.ends_at <= self._now) | (leases.c.owner == owner),
        )
        async with self._database.writing(patience_seconds=PATIENCE_SECONDS) as connection:
            await connection.execute(take)
            return await self._in_force(connection, lease)

    async def renew(self, lease: str, *, epoch: int, seconds: float) -> LeaseRow:
        """Let a lease that has not ended go on for so long from now. Returns the lease that is in force then.

        One that has ended is not renewed, even if nobody took it: its owner has stopped deciding and takes a new one.
        """
        renewal = (
            update(leases)
            .where(leases.c.lease == lease, leases.c.epoch == epoch, leases.c.ends_at > self._now)
            .values(ends_at=self._now + seconds)
            .returning(*self._columns())
        )
        async with self._database.writing(patience_seconds=PATIENCE_SECONDS) as connection:
            row = (await connection.execute(renewal)).first()
            return await self._in_force(connection, lease) if row is None else _lease(row)

    async def release(self, lease: str, *, epoch: int) -> LeaseRow | None:
        """End a lease now, so that another replica need not wait for it; nothing, if it is not in force.

        Returns the lease that is in force then; None: there never was one.
        """
        async with self._database.writing(patience_seconds=PATIENCE_SECONDS) as connection:
            await connection.execute(
                update(leases)
                .where(leases.c.lease == lease, leases.c.epoch == epoch, leases.c.ends_at > self._now)
                .values(ends_at=self._now)
            )
            return await self._found(connection, lease)

    async def look(self, lease: str) -> LeaseRow | None:
        """The lease that is in force, or was last; None: there never was one."""
        async with self._database.reading(patience_seconds=PATIENCE_SECONDS) as connection:
            return await self._found(connection, lease)

    # ------------------------------------------------------------------ what goes with them

    async def save(self, lease: str, *, epoch: int, used: Mapping[str, Mapping[str, float]], state: bytes) -> bool:
        """Save usage and what goes with it, in one transaction. False: nothing was saved, there is a newer owner.

        Args:
            used: pool → team → decayed usage now, cost units.
            state: replaces what was saved before.
        """
        save_usage = self._dialect_insert(usage)
        save_usage = save_usage.on_conflict_do_update(
            index_elements=["pool", "team"],
            set_={"cost_units": save_usage.excluded.cost_units, "as_of": save_usage.excluded.as_of},
        )
        async with self._database.writing(patience_seconds=PATIENCE_SECONDS) as connection:
            now = await self._fenced(connection, lease, epoch)
            if now is None:
                return False
            rows = [
                {"pool": pool, "team": team, "cost_units": cost_units, "as_of": now}
                for pool, by_team in sorted(used.items())
                for team, cost_units in sorted(by_team.items())
            ]
            if rows:
                await connection.execute(save_usage, rows)
            await connection.execute(update(leases).where(leases.c.lease == lease).values(state=state))
            return True

    async def left_behind(self, lease: str, *, epoch: int, pools: Sequence[str]) -> LeftBehind | None:
        """What the owners before saved last; read it once the lease is held. None: there is a newer owner."""
        async with self._database.writing(patience_seconds=PATIENCE_SECONDS) as connection:
            now = await self._fenced(connection, lease, epoch)
            if now is None:
                return None
            rows = (await connection.execute(select(usage).where(usage.c.pool.in_(pools)))).all()
            used: dict[str, dict[str, tuple[float, float]]] = {}
            for row in rows:
                used.setdefault(row.pool, {})[row.team] = (row.cost_units, max(0.0, now - row.as_of))
            state = await connection.scalar(select(leases.c.state).where(leases.c.lease == lease))
            return LeftBehind(usage=used, state=state or b"")

    # ------------------------------------------------------------------ inside

    def _columns(self) -> Iterable[ColumnElement[Any]]:
        return (
            leases.c.lease,
            leases.c.epoch,
            leases.c.owner,
            leases.c.address,
            (leases.c.ends_at - self._now).label("left_seconds"),
        )

    async def _found(self, connection: AsyncConnection, lease: str) -> LeaseRow | None:
        row = (await connection.execute(select(*self._columns()).where(leases.c.lease == lease))).first()
        return None if row is None else _lease(row)

    async def _in_force(self, connection: AsyncConnection, lease: str) -> LeaseRow:
        row = await self._found(connection, lease)
        assert row is not None, "a lease that was just asked for has a row"
        return row

    async def _fenced(self, connection: AsyncConnection, lease: str, epoch: int) -> float | None:
        """Lock the lease, so that no other epoch begins before this transaction ends. The time; None: one has begun."""
        held = select(self._now).where(leases.c.lease == lease, leases.c.epoch == epoch).with_for_update()
        return await connection.scalar(held)


def _lease(row: Sequence[Any]) -> LeaseRow:
    return LeaseRow(lease=row[0], epoch=row[1], owner=row[2], address=row[3], left_seconds=float(row[4]))
