"""The tree of organisations, teams and projects; keys, roles, limits, budgets; and the audit of every change."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import msgspec
from sqlalchemy import ColumnElement, Integer, Table, Text, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fairshare.storage.database import Database
from fairshare.storage.schema import audit, budgets, changes, increases, keys, limits, nodes, operators, secrets

T = TypeVar("T", bound=msgspec.Struct)

LIVE_PAGE = 500
"""Keys, or limits, that are read at once: the event loop must not stop for all of a large site's."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, a team or a project."""

    id: int = 0
    kind: str
    path: str
    """Its name; of a project `team/project`."""
    parent_id: int | None
    models: tuple[str, ...] | None = None
    """Client model names it may use; None: all that its parent may."""
    created_at: float


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A client's key."""

    id: str
    node_id: int
    """The project or team that it speaks for."""
    service_class: str
    models: tuple[str, ...] | None = None
    tag: str = ""
    """Groups keys across teams in reports and budgets."""
    note: str = ""
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    changed_in: int = 0


class SecretRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a client shows for a key, by its SHA-256 (hex)."""

    sha256: str
    key_id: str
    created_at: float
    expires_at: float | None = None


class OperatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key for the admin API, and its role."""

    id: str
    sha256: str
    role: str
    node_id: int | None
    """What the role reaches; None: the whole site."""
    note: str = ""
    created_at: float
    revoked_at: float | None = None


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on the rate of a level, or on what it has in flight."""

    id: int = 0
    kind: str
    node_id: int | None = None
    key_id: str | None = None
    value: int


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a level may be charged in a period."""

    id: int = 0
    node_id: int | None = None
    key_id: str | None = None
    model: str | None = None
    """Only this model's requests count; None: all."""
    tag: str | None = None
    """Only keys with this tag count; None: all."""
    period: str
    time_zone: str
    soft_cost_units: float | None = None
    hard_cost_units: float | None = None
    borrow_over_soft: bool = False
    created_at: float


class IncreaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary increase of a budget."""

    id: int = 0
    budget_id: int
    cost_units: float
    until: float
    """Wall clock."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    id: int
    at: float
    actor: str
    action: str
    target: str
    before: str | None
    after: str | None


class LiveKey(msgspec.Struct, frozen=True):
    """A key and one of its secrets."""

    key: KeyRow
    sha256: str
    secret_expires_at: float | None


class LimitChange(msgspec.Struct, frozen=True):
    """What became of a limit."""

    id: int
    row: LimitRow | None
    """None: it was taken away."""


class Rules(msgspec.Struct, frozen=True):
    """Everything but the keys, of which a large site has a hundred thousand, and the limits, which may be as many."""

    version: int
    newest: AuditRow | None
    """The last change; None: there was none."""
    nodes: tuple[NodeRow, ...]
    operators: tuple[OperatorRow, ...]
    budgets: tuple[BudgetRow, ...]
    increases: tuple[IncreaseRow, ...]
    limits_changed: tuple[LimitChange, ...] | None
    """Since other rules, in their order. None: it is not known, or is too much: keys and limits must all be read."""


_TABLES: Mapping[type[msgspec.Struct], Table] = {
    NodeRow: nodes,
    KeyRow: keys,
    SecretRow: secrets,
    OperatorRow: operators,
    LimitRow: limits,
    BudgetRow: budgets,
    IncreaseRow: increases,
    AuditRow: audit,
}


class Change:
    """One transaction of changes by one person; every change is in the audit."""

    def __init__(self, connection: AsyncConnection, *, actor: str, at: float, version: int) -> None:
        self._connection = connection
        self._is_sqlite = connection.dialect.name == "sqlite"
        self._actor = actor
        self.at = at
        self.version = version
        """What the store's version is when this is committed."""

    async def one(self, of: type[T], /, **equal: object) -> T | None:
        """The row whose columns have these values."""
        found = await _select(self._connection, of, limit=1, equal=equal)
        return found[0] if found else None

    async def all(self, of: type[T], /, **equal: object) -> list[T]:
        return await _select(self._connection, of, equal=equal)

    async def add(self, row: T, *, target: str) -> T:
        """Add a row; one with an id of 0 gets its id."""
        table = _TABLES[type(row)]
        values = _values(row)
        if values.get("id") == 0:
            del values["id"]
        made = await self._connection.execute(insert(table).values(values))
        if values.keys() != _values(row).keys():
            assert made.inserted_primary_key is not None
            row = msgspec.structs.replace(row, id=made.inserted_primary_key[0])
        await self._audit(f"add {table.name}", target, None, row)
        return row

    async def add_many(self, rows: Sequence[T], *, target: Callable[[T], str]) -> list[T]:
        """As `add`, a thousand rows of one kind at once, in their order."""
        if not rows:
            return []
        table = _TABLES[type(rows[0])]
        if _values(rows[0]).get("id") == 0:
            numbers = await self._next_numbers(table, len(rows))
            rows = [msgspec.structs.replace(row, id=number) for row, number in zip(rows, numbers, strict=True)]
        await self._connection.execute(insert(table), [_values(row) for row in rows])
        entries = [self._entry(f"add {table.name}", target(row), None, row) for row in rows]
        await self._connection.execute(insert(audit), entries)
        return list(rows)

    async def replace(self, before: T, after: T, *, target: str, action: str = "") -> None:
        """Change a row; its primary key stays."""
        table = _TABLES[type(before)]
        (key,) = table.primary_key
        await self._connection.execute(update(table).where(key == getattr(before, key.name)).values(_values(after)))
        await self._audit(action or f"change {table.name}", target, before, after)

    async def remove(self, row: msgspec.Struct, *, target: str) -> None:
        table = _TABLES[type(row)]
        (key,) = table.primary_key
        await self._connection.execute(delete(table).where(key == getattr(row, key.name)))
        await self._audit(f"remove {table.name}", target, row, None)

    async def unused_id(self, of: type[msgspec.Struct]) -> int:
        """A number that no row of a table ever had, those that were removed among them."""
        if self._is_sqlite:
            return self.version
        # Programs of 0003 and 0004 take the numbers of the sequence, so it must stay ahead of those given here.
        sequence = _sequence(_TABLES[of])
        ahead = func.setval(sequence, func.greatest(func.nextval(sequence), self.version), type_=Integer)
        return (await self._connection.scalars(select(ahead))).one()

    async def noted(self, action: str, *, target: str) -> None:
        """Put into the audit what was done to something that is not in the store."""
        await self._audit(action, target, None, None)

    async def _next_numbers(self, table: Table, count: int) -> list[int]:
        if self._is_sqlite:
            last = (await self._connection.scalar(select(func.max(table.c.id)))) or 0
            return list(range(last + 1, last + 1 + count))
        numbers = select(func.nextval(_sequence(table), type_=Integer)).select_from(func.generate_series(1, count))
        return list(await self._connection.scalars(numbers))

    async def _audit(
        self, action: str, target: str, before: msgspec.Struct | None, after: msgspec.Struct | None
    ) -> None:
        await self._connection.execute(insert(audit).values(self._entry(action, target, before, after)))

    def _entry(
        self, action: str, target: str, before: msgspec.Struct | None, after: msgspec.Struct | None
    ) -> dict[str, object]:
        return {
            "at": self.at,
            "actor": self._actor,
            "action": action,
            "target": target,
            "before": None if before is None else _shown(before),
            "after": None if after is None else _shown(after),
        }


class AccountStore:
    """Reads and changes the accounts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def generation(self) -> int:
        """Grows when the store is another one: versions, ids and keys of the last one say nothing any more."""
        return self._database.generation

    @asynccontextmanager
    async def changing(self, *, actor: str, at: float, patience_seconds: float | None = None) -> AsyncGenerator[Change]:
        """A transaction of changes: all of them or none. Raises `StoreUnavailable`."""
        async with self._database.writing(patience_seconds=patience_seconds) as connection:
            # The row is locked from here on: changes come one after the other, and versions in their order.
            await connection.execute(update(changes).values(version=changes.c.version + 1))
            version = await connection.scalar(select(changes.c.version))
            yield Change(connection, actor=actor, at=at, version=int(version or 0))

    async def version(self) -> int:
        """Grows with every change. Raises `StoreUnavailable`."""
        async with self._database.reading() as connection:
            return int((await connection.scalar(select(changes.c.version))) or 0)

    async def rules(self, last: Rules | None = None) -> Rules:
        """Everything but keys and limits, and what became of limits since `last`. Raises `StoreUnavailable`.

        The audit says what changed: what did not is not read again, and is the very same object as in `last`.
        """
        async with self._database.reading() as connection:
            version = int((await connection.scalar(select(changes.c.version))) or 0)
            newest = await _select(connection, AuditRow, limit=1, newest_first=True)
            changed, limits_changed = await _changed_since(connection, None if last is None else last.newest)

            async def read(of: type[T], known: tuple[T, ...], **equal: object) -> tuple[T, ...]:
                return tuple(await _select(connection, of, equal=equal)) if _TABLES[of].name in changed else known

            known = last or Rules(0, None, (), (), (), (), None)
            return Rules(
                version,
                newest[0] if newest else None,
                await read(NodeRow, known.nodes),
                await read(OperatorRow, known.operators, revoked_at=None),
                await read(BudgetRow, known.budgets),
                await read(IncreaseRow, known.increases),
                limits_changed,
            )

    async def limits(self) -> AsyncIterator[list[LimitRow]]:
        """Every limit, page by page. Raises `StoreUnavailable`."""
        after = 0
        while page := await self.all(LimitRow, limit=LIVE_PAGE, after=after):
            yield page
            after = page[-1].id

    async def keys_changed(self, *, since: int) -> AsyncIterator[list[LiveKey]]:
        """Keys that changed after a version, with their secrets, page by page. Raises `StoreUnavailable`."""
        after = ""
        is_changed = keys.c.changed_in > since
        query = (
            select(*keys.c, secrets.c.sha256, secrets.c.expires_at.label("secret_expires_at"))
            .join(secrets, secrets.c.key_id == keys.c.id)
            .order_by(secrets.c.sha256)
        )
        async with self._database.reading() as connection:
            few = (await connection.scalars(select(keys.c.id).where(is_changed).limit(LIVE_PAGE + 1))).all()
        # After the start few or none have changed, and SQLite would read all of them in the order of `sha256`.
        is_all = len(few) <= LIVE_PAGE
        query = query.where(keys.c.id.in_(few)) if is_all else query.where(is_changed).limit(LIVE_PAGE)
        while few:
            async with self._database.reading() as connection:
                rows = (await connection.execute(query.where(secrets.c.sha256 > after))).all()
            if rows:
                yield [LiveKey(_row(KeyRow, values[:-2]), *values[-2:]) for values in map(tuple, rows)]
            if is_all or len(rows) < LIVE_PAGE:
                return
            after = rows[-1].sha256

    async def all(
        self,
        of: type[T],
        /,
        *,
        limit: int | None = None,
        after: object = None,
        newest_first: bool = False,
        **equal: object,
    ) -> list[T]:
        """Rows whose columns have these values (a list: one of them), in the order of the primary key.

        `after`: only rows behind this primary key. Raises `StoreUnavailable`.
        """
        async with self._database.reading() as connection:
            return await _select(connection, of, limit=limit, after=after, newest_first=newest_first, equal=equal)

    async def owned(
        self, of: type[T], /, *, within: int | None, limit: int | None, after: object, **equal: object
    ) -> tuple[list[T], list[NodeRow]]:
        """As `all`, what belongs to a node or to one below it (None: to any), and every node, of the same moment."""
        async with self._database.reading() as connection:
            rows = await _select(connection, of, limit=limit, after=after, within=within, equal=equal)
            return rows, await _select(connection, NodeRow)


async def mark_keys_used(connection: AsyncConnection, used: Mapping[str, float]) -> None:
    """When keys were last used (wall clock). Not a change: gateways need not know."""
    statement = (
        update(keys)
        .where(
            keys.c.id == bindparam("key"),
            or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < bindparam("used_at")),
        )
        .values(last_used_at=bindparam("used_at"))
    )
    await connection.execute(statement, [{"key": key, "used_at": at} for key, at in sorted(used.items())])


def _sequence(table: Table) -> ColumnElement[str]:
    """From which PostgreSQL takes the numbers of a table."""
    return func.pg_get_serial_sequence(table.name, "id", type_=Text)


async def _changed_since(
    connection: AsyncConnection, last: AuditRow | None
) -> tuple[frozenset[str], tuple[LimitChange, ...] | None]:
    """The tables that changed behind an entry of the audit, and what became of limits.

    Everything, if the audit has no such entry: this is another store, or an older backup of it.
    """
    if last is None or await _select(connection, AuditRow, equal={"id": last.id}) != [last]:
        return frozenset(table.name for table in _TABLES.values()), None
    actions = (await connection.scalars(select(audit.c.action).where(audit.c.id > last.id).distinct())).all()
    changed = {action.rpartition(" ")[2] for action in actions}
    if budgets.name in changed:
        changed.add(increases.name)  # they go with their budget
    limits_changed: list[LimitChange] = []
    if limits.name in changed:
        entries = select(audit.c.before, audit.c.after).where(
            audit.c.id > last.id, audit.c.action.in_([f"{verb} {limits.name}" for verb in ("add", "change", "remove")])
        )
        rows = (await connection.execute(entries.order_by(audit.c.id).limit(LIVE_PAGE + 1))).all()
        if len(rows) > LIVE_PAGE:
            return frozenset(changed), None
        for before, after in rows:
            row = msgspec.json.decode(after or before, type=LimitRow)
            limits_changed.append(LimitChange(row.id, None if after is None else row))
    return frozenset(changed), tuple(limits_changed)


def _of_node(table: Table, node_id: int) -> ColumnElement[bool]:
    """Whether a row belongs to a node or to one below it: an organisation has teams, and these have projects."""

    def is_within(column: ColumnElement[Any]) -> ColumnElement[bool]:
        teams = select(nodes.c.id).where(nodes.c.parent_id == node_id)
        projects = select(nodes.c.id).where(nodes.c.parent_id.in_(teams))
        return or_(column == node_id, column.in_(teams), column.in_(projects))

    owned = is_within(table.c.node_id)
    if "key_id" in table.c:
        owned = or_(owned, table.c.key_id.in_(select(keys.c.id).where(is_within(keys.c.node_id))))
    return owned


async def _select(
    connection: AsyncConnection,
    kind: type[T],
    *,
    limit: int | None = None,
    after: object = None,
    newest_first: bool = False,
    within: int | None = None,
    equal: Mapping[str, object] | None = None,
) -> list[T]:
    table = _TABLES[kind]
    (key,) = table.primary_key
    query = select(*(table.c[name] for name in kind.__struct_fields__)).order_by(key.desc() if newest_first else key)
    for name, value in (equal or {}).items():
        if isinstance(value, list):
            query = query.where(table.c[name].in_(cast("list[Any]", value)))
        else:
            query = query.where(table.c[name].is_(None) if value is None else table.c[name] == value)
    if within is not None:
        query = query.where(_of_node(table, within))
    if after is not None:
        query = query.where(key < after if newest_first else key > after)
    return [_row(kind, row) for row in await connection.execute(query.limit(limit))]


def _row(kind: type[T], row: Sequence[Any]) -> T:
    values = dict(zip(kind.__struct_fields__, row, strict=True))
    if values.get("models") is not None:
        values["models"] = tuple(json.loads(values["models"]))
    return kind(**values)


def _values(row: msgspec.Struct) -> dict[str, Any]:
    values = msgspec.structs.asdict(row)
    if values.get("models") is not None:
        values["models"] = json.dumps(list(values["models"]), ensure_ascii=False)
    return values


def _shown(row: msgspec.Struct) -> str:
    """A row for the audit. A hash of 256 random bits tells nothing, but nobody needs it there."""
    values = msgspec.structs.asdict(row)
    values.pop("sha256", None)
    return json.dumps(values, ensure_ascii=False)
