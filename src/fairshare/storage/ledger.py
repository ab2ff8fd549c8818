"""The account of every request, and the usage that goes with it."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy import Select, Table, and_, case, delete, func, insert, literal, not_, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ColumnElement

from fairshare.storage.accounts import mark_keys_used
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.schema import ledger, months, usage

EXPORT_PAGE = 5000
"""Rows that are read at once: memory stays small, and no transaction stays open for long."""

ROWS_AT_ONCE = 100
"""Rows of one batch that are inserted without a pause. SQLite's driver keeps the interpreter to itself for as long as
it binds them, 9 µs a row, and whatever the event loop has to do waits."""

REPORT_SECONDS = 120.0
"""How long a sum over the ledger may take; it runs beside everything else."""


class LedgerRow(msgspec.Struct, frozen=True):
    """One request. The fields are the columns of the table, in their order. Points in time: wall clock."""

    writer: int
    number: int
    request_id: str
    arrived_at: float
    dispatched_at: float | None
    first_byte_at: float | None
    ended_at: float
    organisation: str
    team: str
    project: str
    key_id: str
    tag: str
    endpoint: str
    pool: str
    served_by: str
    instance: str
    model: str
    service_class: str
    standing: str
    priority: int | None
    slots: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_units: float
    estimated: bool
    status: int
    finish: str
    reason: str
    held_seconds: float
    recalls: int
    wasted_slot_seconds: float
    client_cancelled: bool
    degraded: bool
    finish_reason: str


class UsageRow(msgspec.Struct, frozen=True):
    """Decayed usage of a team in a pool, cost units, as it was at `as_of` (wall clock)."""

    pool: str
    team: str
    cost_units: float
    as_of: float


class Mark(msgspec.Struct, frozen=True):
    """A place in the account: everything but what `writer` writes from `number` on."""

    writer: int
    number: int


DIMENSIONS = ("organisation", "team", "project", "key_id", "tag", "pool", "model")
"""By what the account can be summed up."""


class Sums(msgspec.Struct, frozen=True):
    """What the requests of one group add up to."""

    group: tuple[str, ...]
    """One value for each dimension that was asked for."""
    requests: int
    failed: int
    """Answered with a status of 400 or more, broken, or left by the client."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_units: float
    slot_seconds: float
    """Slots x time at the engine."""


_SUMMED = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_units", "slot_seconds")
"""The columns of `months` behind its dimensions."""

_SUMS_OF_ROWS: tuple[ColumnElement[Any], ...] = (
    func.count(),
    func.sum(case((or_(ledger.c.status >= 400, ledger.c.finish != "completed"), 1), else_=0)),
    func.sum(ledger.c.prompt_tokens),
    func.sum(ledger.c.cached_tokens),
    func.sum(ledger.c.completion_tokens),
    func.sum(ledger.c.cost_units),
    func.sum(func.coalesce(ledger.c.slots * (ledger.c.ended_at - ledger.c.dispatched_at), 0.0)),
)
"""The same of rows, in the same order."""


class MonthsInTheWay(Exception):
    """The period begins or ends inside a month of which only the sums are left."""

    def __init__(self, begins_at: float, ends_at: float) -> None:
        super().__init__(begins_at, ends_at)
        self.begins_at = begins_at
        self.ends_at = ends_at


def _pieces(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    """The rows in lists of at most `size`, each made when it is asked for."""
    rest = iter(rows)
    while piece := list(islice(rest, size)):
        yield piece


class LedgerStore:
    """Reads and writes the account."""

    def __init__(self, database: Database) -> None:
        self._database = database
        dialect_insert: Any = sqlite.insert if isinstance(database.address, SqliteFile) else postgresql.insert
        # Compiled once: binding every row by name costs more than the database does.
        self._insert = str(dialect_insert(ledger).on_conflict_do_nothing().compile(database.engine.sync_engine))
        save = dialect_insert(usage)
        self._save_usage = save.on_conflict_do_update(
            index_elements=["pool", "team"],
            set_={"cost_units": save.excluded.cost_units, "as_of": save.excluded.as_of},
        )

    # ------------------------------------------------------------------ writing

    async def write(self, rows: Iterable[LedgerRow], used: Iterable[UsageRow], keys_used: Mapping[str, float]) -> None:
        """One batch: rows (each counts once, however often it is written), usage, and when keys were last used.

        Raises:
            StoreUnavailable: nothing of it was written, or it is unknown whether all of it was; write it again.
        """
        async with self._database.writing() as connection:
            for piece in _pieces(map(msgspec.structs.astuple, rows), ROWS_AT_ONCE):
                await connection.exec_driver_sql(self._insert, piece)
            saved = [msgspec.structs.asdict(row) for row in used]
            if saved:
                await connection.execute(self._save_usage, saved)
            if keys_used:
                await mark_keys_used(connection, keys_used)

    async def usage(self) -> list[UsageRow]:
        """The usage that was saved last. Raises `StoreUnavailable`."""
        async with self._database.reading() as connection:
            return [UsageRow(*row) for row in await connection.execute(select(*usage.c).order_by(*usage.primary_key))]

    # ------------------------------------------------------------------ reading

    async def consumed(
        self, *, column: str, value: str, model: str | None, tag: str | None, since: float, until: Iterable[Mark]
    ) -> float:
        """Cost units that one level (a column of the account) was charged since then; of these writers, up to a mark.

        Months of which only the sums are left count if they began since then. Raises `StoreUnavailable`.
        """

        def matches(table: Table, time_column: str) -> list[ColumnElement[bool]]:
            conditions: list[ColumnElement[bool]] = [table.c[column] == value, table.c[time_column] >= since]
            if model is not None:
                conditions.append(table.c.model == model)
            if tag is not None:
                conditions.append(table.c.tag == tag)
            return conditions

        up_to = [not_(and_(ledger.c.writer == mark.writer, ledger.c.number >= mark.number)) for mark in until]
        rows = select(func.sum(ledger.c.cost_units)).where(*matches(ledger, "ended_at"), *up_to)
        rolled = select(func.sum(months.c.cost_units)).where(*matches(months, "begins_at"))
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            return sum([float((await connection.scalar(each)) or 0.0) for each in (rows, rolled)])

    async def with_id(self, request_id: str) -> list[LedgerRow]:
        """The last ten requests with an id (clients may use theirs again), the last one first.

        There is no index on it, which would cost every request: this reads back through time until it has them.
        Raises `StoreUnavailable`.
        """
        last_first = select(*ledger.c).where(ledger.c.request_id == request_id).order_by(ledger.c.ended_at.desc())
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            return [LedgerRow(*row) for row in await connection.execute(last_first.limit(10))]

    async def sums(
        self,
        *,
        begins_at: float,
        ends_at: float,
        by: Sequence[str],
        only: Mapping[str, str] | None = None,
    ) -> list[Sums]:
        """What requests that ended in [begins_at, ends_at) add up to, by dimensions, in the order of the groups.

        Raises:
            StoreUnavailable: the store does not answer.
            MonthsInTheWay: the period cuts a month of which only the sums are left.
        """

        def chosen(table: Table) -> list[ColumnElement[bool]]:
            return [table.c[name] == value for name, value in (only or {}).items()]

        rows = select(*(ledger.c[name] for name in by), *_SUMS_OF_ROWS).where(
            ledger.c.ended_at >= begins_at, ledger.c.ended_at < ends_at, *chosen(ledger)
        )
        rolled = select(*(months.c[name] for name in by), *(func.sum(months.c[name]) for name in _SUMMED)).where(
            months.c.begins_at >= begins_at, months.c.ends_at <= ends_at, *chosen(months)
        )
        cut = select(months.c.begins_at, months.c.ends_at).where(
            months.c.begins_at < ends_at,
            months.c.ends_at > begins_at,
            or_(months.c.begins_at < begins_at, months.c.ends_at > ends_at),
        )
        groups: dict[tuple[str, ...], Sums] = {}
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            in_the_way = (await connection.execute(cut.limit(1))).first()
            if in_the_way is not None:
                raise MonthsInTheWay(*in_the_way)
            for query, table in ((rows, ledger), (rolled, months)):
                grouped = query.group_by(*(table.c[name] for name in by)) if by else query
                for row in await connection.execute(grouped):
                    sums = _sums(row, len(by))
                    if sums.requests:
                        groups[sums.group] = _added(groups.get(sums.group), sums)
        return [groups[group] for group in sorted(groups)]

    async def rows(self, *, begins_at: float, ends_at: float) -> AsyncIterator[list[LedgerRow]]:
        """The requests that ended in [begins_at, ends_at), oldest first, page by page. Raises `StoreUnavailable`."""
        order = (ledger.c.ended_at, ledger.c.writer, ledger.c.number)
        after: tuple[float, int, int] | None = None
        while True:
            query: Select[Any] = (
                select(*ledger.c)
                .where(ledger.c.ended_at >= begins_at, ledger.c.ended_at < ends_at)
                .order_by(*order)
                .limit(EXPORT_PAGE)
            )
            if after is not None:
                query = query.where(_after(order, after))
            async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
                page = [LedgerRow(*row) for row in await connection.execute(query)]
            if page:
                yield page
            if len(page) < EXPORT_PAGE:
                return
            last = page[-1]
            after = (last.ended_at, last.writer, last.number)

    async def oldest(self) -> float | None:
        """When the oldest request of which there is a row ended; None: there is none. Raises `StoreUnavailable`."""
        async with self._database.reading() as connection:
            return await connection.scalar(select(func.min(ledger.c.ended_at)))

    # ------------------------------------------------------------------ retention

    async def roll_up(self, *, begins_at: float, ends_at: float) -> int:
        """Replace the rows of one whole month by their sums; returns how many rows went. Raises `StoreUnavailable`.

        All or nothing: what reports say about the month stays what it was.
        """
        within = and_(ledger.c.ended_at >= begins_at, ledger.c.ended_at < ends_at)
        by = [ledger.c[name] for name in DIMENSIONS]
        summed = (
            select(
                literal(begins_at),
                literal(ends_at),
                *by,
                *_SUMS_OF_ROWS,
            )
            .where(within)
            .group_by(*by)
        )
        columns = [column.name for column in months.c if column.name != "id"]
        async with self._database.writing(patience_seconds=REPORT_SECONDS) as connection:
            await connection.execute(insert(months).from_select(columns, summed))
            return (await connection.execute(delete(ledger).where(within))).rowcount


def _after(order: Sequence[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    """Rows behind these values in this order."""
    first, *rest = order
    if not rest:
        return first > values[0]
    return or_(first > values[0], and_(first == values[0], _after(rest, values[1:])))


def _sums(row: Sequence[Any], dimensions: int) -> Sums:
    requests, failed, prompt, cached, completion, cost_units, slot_seconds = (each or 0 for each in row[dimensions:])
    # PostgreSQL sums up bigints as decimals.
    return Sums(
        tuple(row[:dimensions]),
        int(requests),
        int(failed),
        int(prompt),
        int(cached),
        int(completion),
        float(cost_units),
        float(slot_seconds),
    )


def _added(one: Sums | None, other: Sums) -> Sums:
    if one is None:
        return other
    return Sums(
        one.group,
        one.requests + other.requests,
        one.failed + other.failed,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cost_units + other.cost_units,
        one.slot_seconds + other.slot_seconds,
    )
