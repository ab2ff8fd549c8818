"""The account of every request, and the usage that goes with it."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Select, Table, and_, bindparam, case, delete, func, insert, literal, or_, select, union_all
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import ColumnElement

from fairshare.storage.accounts import mark_keys_used
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.schema import ledger, months, request_owners, request_ways, requests, usage

EXPORT_PAGE = 5000
"""Rows that are read at once: memory stays small, and no transaction stays open for long."""

ROWS_AT_ONCE = 500
"""Rows of one batch that are made, and then inserted, without a pause: 1.5 µs a row to make it, and as much to bind it,
for which SQLite's driver keeps the interpreter to itself. Whatever the event loop has to do waits."""

ROWS_PER_STATEMENT = 50
"""Rows that one statement inserts into SQLite. Its driver gives the interpreter up for each statement that it runs, and
with a busy event loop has to wait for it again. (Before 3.32 SQLite took 999 values in one statement.)"""

DAY_SECONDS = 86400.0

LOOK_SECONDS = 60.0
"""How often a writer looks whether the store still has what it believes it to have."""

REPORT_SECONDS = 120.0
"""How long a sum over the ledger may take; it runs beside everything else."""


class LedgerRow(msgspec.Struct, frozen=True, gc=False):
    """One request. The fields are the columns of the table `ledger`, in their order. Points in time: wall clock."""

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


def _sums_of(table: Table) -> tuple[ColumnElement[Any], ...]:
    """Of rows, what `_SUMMED` names after `failed`."""
    return (
        func.sum(table.c.prompt_tokens),
        func.sum(table.c.cached_tokens),
        func.sum(table.c.completion_tokens),
        func.sum(table.c.cost_units),
        func.sum(func.coalesce(table.c.slots * (table.c.ended_at - table.c.dispatched_at), 0.0)),
    )


def _if_failed(table: Table, count: Any) -> ColumnElement[Any]:
    return func.sum(case((or_(table.c.status >= 400, table.c.finish != "completed"), count), else_=0))


Numbers = tuple[float, int, int, str, *tuple[float | None, ...]]
"""What a request has for itself: a row of `requests` without its last two columns."""

Facts = tuple[str | int, ...]
"""What many requests have in common: a row of `request_owners` or `request_ways` without `id` and `seen_at`."""

Entry = tuple[Numbers, Facts, Facts]
"""One request as it is written: its numbers, whose it was, and which way it went."""


class _Known(dict[Facts, int]):
    """The facts that the store has, with their ids; looking for others gives them one, and `save` writes them.

    The id is made from the facts, so that all replicas give the same one: 63 bits of a hash. Of sites with a million
    different facts, one in twenty million has two that share an id.
    """

    def __init__(self, table: Table, save: Any) -> None:
        super().__init__()
        self._names = [column.name for column in table.c if column.name not in {"id", "seen_at"}]
        self._save = save
        self._unsaved: list[Facts] = []
        self._saved_last = 0
        self._looked_at = 0.0
        self._is_there = select(table.c.id).where(table.c.id == bindparam("saved_last"))
        self._day = -1

    def __missing__(self, facts: Facts) -> int:
        digest = blake2b(msgspec.json.encode(facts), digest_size=8).digest()
        known_by = self[facts] = int.from_bytes(digest) >> 1
        self._unsaved.append(facts)
        return known_by

    async def save(self, connection: AsyncConnection, seen_at: float) -> None:
        if self._unsaved:
            rows = [
                {"id": self[facts], "seen_at": seen_at} | dict(zip(self._names, facts, strict=True))
                for facts in self._unsaved
            ]
            await connection.execute(self._save, sorted(rows, key=itemgetter("id")))
            self._saved_last = rows[-1]["id"]
            self._unsaved.clear()

    async def begin(self, connection: AsyncConnection, now: float) -> None:
        """Once a day everything is new again: what is still used is marked so, and what is not leaves memory."""
        if now // DAY_SECONDS != self._day:
            self._day = now // DAY_SECONDS
            self.forget()
        elif self and not 0.0 <= now - self._looked_at < LOOK_SECONDS:
            self._looked_at = now
            # Whoever restores an older backup under a running gateway takes away what was saved since.
            if await connection.scalar(self._is_there, {"saved_last": self._saved_last}) is None:
                self._unsaved = list(self)

    def forget(self) -> None:
        self.clear()
        self._unsaved.clear()


class MonthsInTheWay(Exception):
    """The period begins or ends inside a month of which only the sums are left."""

    def __init__(self, begins_at: float, ends_at: float) -> None:
        super().__init__(begins_at, ends_at)
        self.begins_at = begins_at
        self.ends_at = ends_at


def _pieces(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    """The entries in lists of at most `size`, each made when it is asked for."""
    rest = iter(entries)
    while piece := list(islice(rest, size)):
        yield piece


class LedgerStore:
    """Reads and writes the account."""

    def __init__(self, database: Database) -> None:
        self._database = database
        is_sqlite = isinstance(database.address, SqliteFile)
        dialect_insert: Any = sqlite.insert if is_sqlite else postgresql.insert
        # Compiled once: binding every row by name costs more than the database does.
        self._insert = str(dialect_insert(requests).on_conflict_do_nothing().compile(database.engine.sync_engine))
        # PostgreSQL's driver sends all rows of a piece at once, without a thread.
        self._many = ROWS_PER_STATEMENT if is_sqlite else 1
        one = f"({', '.join('?' * len(requests.c))})"
        self._insert_many = self._insert.replace(one, ", ".join([one] * self._many))

        def upsert(table: Table, *keys: str, but: Sequence[str]) -> Any:
            made = dialect_insert(table)
            return made.on_conflict_do_update(index_elements=keys, set_={name: made.excluded[name] for name in but})

        self._save_usage = upsert(usage, "pool", "team", but=("cost_units", "as_of"))
        self._owners = _Known(request_owners, upsert(request_owners, "id", but=("seen_at",)))
        self._ways = _Known(request_ways, upsert(request_ways, "id", but=("seen_at",)))

    # ------------------------------------------------------------------ writing

    async def write(
        self, entries: Iterable[Entry], used: Iterable[UsageRow], keys_used: Mapping[str, float], *, now: float
    ) -> None:
        """One batch: requests (each counts once, however often it is written), usage, and when keys were last used.

        One at a time: what a batch that is not finished yet has written is not to be relied on. `now`: wall clock.

        Raises:
            StoreUnavailable: nothing of it was written, or it is unknown whether all of it was; write it again.
        """
        owners, ways = self._owners, self._ways
        try:
            async with self._database.writing() as connection:
                await owners.begin(connection, now)
                await ways.begin(connection, now)
                for piece in _pieces(entries, ROWS_AT_ONCE):
                    rows = [(*numbers, owners[owner], ways[way]) for numbers, owner, way in piece]
                    for statement, values in self._inserts(rows):
                        await connection.exec_driver_sql(statement, values)
                # Everything that replicas may write at once comes behind the rows, in one order: none of them waits for
                # another in a circle.
                await owners.save(connection, now)
                await ways.save(connection, now)
                saved = [msgspec.structs.asdict(row) for row in used]
                if saved:
                    await connection.execute(self._save_usage, saved)
                if keys_used:
                    await mark_keys_used(connection, keys_used)
        except BaseException:
            # What is in the store is not known any more; it may even be another one, from a backup.
            owners.forget()
            ways.forget()
            raise

    def _inserts(self, rows: list[tuple[Any, ...]]) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
        """What inserts rows: statements, each with the values of every time that it is run."""
        many = self._many
        whole = len(rows) - len(rows) % many
        if whole:
            yield self._insert_many, [tuple(chain.from_iterable(rows[at : at + many])) for at in range(0, whole, many)]
        if whole < len(rows):
            yield self._insert, rows[whole:]

    async def usage(self) -> list[UsageRow]:
        """The usage that was saved last. Raises `StoreUnavailable`."""
        async with self._database.reading() as connection:
            return [UsageRow(*row) for row in await connection.execute(select(*usage.c).order_by(*usage.primary_key))]

    # ------------------------------------------------------------------ reading

    async def with_id(self, request_id: str) -> list[LedgerRow]:
        """The last ten requests with an id (clients may use theirs again), the last one first.

        There is no index on it, which would cost every request: this reads back through time until it has them.
        Raises `StoreUnavailable`.
        """
        last_first = _whole(lambda table: [table.c.request_id == request_id], limit=10, newest_first=True)
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            return [LedgerRow(*row) for row in await connection.execute(last_first)]

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
        only = only or {}
        rolled = (
            select(*(months.c[name] for name in by), *(func.sum(months.c[name]) for name in _SUMMED))
            .where(months.c.begins_at >= begins_at, months.c.ends_at <= ends_at, *_by_name(months, only))
            .group_by(*(months.c[name] for name in by))
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
            for query in (*_grouped(by, begins_at=begins_at, ends_at=ends_at, only=only), rolled):
                for row in await connection.execute(query):
                    sums = _sums(row, len(by))
                    if sums.requests:
                        groups[sums.group] = _added(groups.get(sums.group), sums)
        return [groups[group] for group in sorted(groups)]

    async def rows(self, *, begins_at: float, ends_at: float) -> AsyncIterator[list[LedgerRow]]:
        """The requests that ended in [begins_at, ends_at), oldest first, page by page. Raises `StoreUnavailable`."""
        after = (begins_at, -1, -1)
        while True:
            query = _whole(_following(after, ends_at), limit=EXPORT_PAGE)
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
            found = [await connection.scalar(select(func.min(table.c.ended_at))) for table in (requests, ledger)]
        return min((at for at in found if at is not None), default=None)

    # ------------------------------------------------------------------ retention

    async def roll_up(self, *, begins_at: float, ends_at: float) -> int:
        """Replace the rows of one whole month by their sums; returns how many rows went. Raises `StoreUnavailable`.

        All or nothing: what reports say about the month stays what it was.
        """
        columns = [column.name for column in months.c if column.name != "id"]
        gone = 0
        async with self._database.writing(patience_seconds=REPORT_SECONDS) as connection:
            for grouped in _grouped(DIMENSIONS, begins_at=begins_at, ends_at=ends_at, only={}):
                summed = grouped.subquery()
                await connection.execute(
                    insert(months).from_select(columns, select(literal(begins_at), literal(ends_at), *summed.c))
                )
            for table in (requests, ledger):
                within = and_(table.c.ended_at >= begins_at, table.c.ended_at < ends_at)
                gone += (await connection.execute(delete(table).where(within))).rowcount
            for table in (request_owners, request_ways):
                # Every writer marks what it uses once a day, by a clock that may be a little off.
                await connection.execute(delete(table).where(table.c.seen_at < ends_at - 2 * DAY_SECONDS))
        return gone


_ORDER = ("ended_at", "writer", "number")
"""The order of the account."""


def _by_name(table: Table, chosen: Mapping[str, str]) -> list[ColumnElement[bool]]:
    """In a table that has them as columns."""
    return [table.c[name] == value for name, value in chosen.items()]


def _by_id(table: Table, chosen: Mapping[str, str]) -> list[ColumnElement[bool]]:
    """In `requests`."""
    conditions: list[ColumnElement[bool]] = []
    for facts, column in ((request_owners, table.c.owner_id), (request_ways, table.c.way_id)):
        named = [facts.c[name] == value for name, value in chosen.items() if name in facts.c]
        if named:
            conditions.append(column.in_(select(facts.c.id).where(*named)))
    return conditions


def _grouped(
    by: Sequence[str], *, begins_at: float, ends_at: float, only: Mapping[str, str]
) -> tuple[Select[Any], Select[Any]]:
    """The sums of a period by dimensions, then `_SUMMED`: of `requests`, and of `ledger`."""

    def period(table: Table) -> list[ColumnElement[bool]]:
        return [table.c.ended_at >= begins_at, table.c.ended_at < ends_at]

    # First by numbers: sorting a million rows by names takes three times as long.
    few = (
        select(
            requests.c.owner_id,
            requests.c.way_id,
            func.count().label("requests"),
            *(total.label(name) for total, name in zip(_sums_of(requests), _SUMMED[2:], strict=True)),
        )
        .where(*period(requests), *_by_id(requests, only))
        .group_by(requests.c.owner_id, requests.c.way_id)
        .subquery()
    )
    names = {column.name: column for column in (*request_owners.c, *request_ways.c)}
    new = (
        select(
            *(names[name].label(name) for name in by),
            func.sum(few.c.requests).label("requests"),
            _if_failed(request_ways, few.c.requests).label("failed"),
            *(func.sum(few.c[name]).label(name) for name in _SUMMED[2:]),
        )
        .join_from(few, request_owners, request_owners.c.id == few.c.owner_id)
        .join(request_ways, request_ways.c.id == few.c.way_id)
        .group_by(*(names[name] for name in by))
    )
    old = (
        select(
            *(ledger.c[name] for name in by),
            func.count().label("requests"),
            _if_failed(ledger, 1).label("failed"),
            *(total.label(name) for total, name in zip(_sums_of(ledger), _SUMMED[2:], strict=True)),
        )
        .where(*period(ledger), *_by_name(ledger, only))
        .group_by(*(ledger.c[name] for name in by))
    )
    return new, old


def _whole(where: Callable[[Table], list[ColumnElement[bool]]], *, limit: int, newest_first: bool = False) -> Any:
    """Whole rows, the fields of `LedgerRow` in their order, of both tables. Neither is read further than `limit`."""

    def ordered(of: Any, columns: Any) -> Any:
        return of.order_by(*(columns[name].desc() if newest_first else columns[name] for name in _ORDER)).limit(limit)

    few = ordered(select(*requests.c).where(*where(requests)), requests.c).subquery()
    names = {column.name: column for column in (*request_owners.c, *request_ways.c, *few.c)}
    new = (
        select(*(names[name] for name in LedgerRow.__struct_fields__))
        .join_from(few, request_owners, request_owners.c.id == few.c.owner_id)
        .join(request_ways, request_ways.c.id == few.c.way_id)
    )
    old = ordered(select(*ledger.c).where(*where(ledger)), ledger.c).subquery()
    both = union_all(new, select(*old.c)).subquery()
    return ordered(select(*both.c), both.c)


def _following(after: tuple[float, int, int], ends_at: float) -> Callable[[Table], list[ColumnElement[bool]]]:
    """Rows behind a place in the account that ended before a moment."""
    at, writer, number = after

    def where(table: Table) -> list[ColumnElement[bool]]:
        same_time = and_(table.c.ended_at == at, table.c.writer == writer)
        behind = or_(table.c.ended_at > at, and_(table.c.ended_at == at, table.c.writer > writer))
        # The first says nothing more, but from where on the table is to be read.
        return [
            table.c.ended_at >= at,
            table.c.ended_at < ends_at,
            or_(behind, and_(same_time, table.c.number > number)),
        ]

    return where


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
