"""What budgets were charged, for many of them with one look at the account; and how long answers were lately."""

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from sqlalchemy import Select, Table, and_, func, not_, select
from sqlalchemy.sql import ColumnElement

from fairshare.storage.database import Database
from fairshare.storage.ledger import REPORT_SECONDS, Mark
from fairshare.storage.schema import ledger, months, request_owners, request_ways, requests


class Consumed(msgspec.Struct, frozen=True):
    """What was charged for one model and tag."""

    model: str
    tag: str
    cost_units: float


class ConsumptionStore:
    """Reads it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def since(
        self, begins_at: float, *, column: str, values: Collection[str], until: Iterable[Mark]
    ) -> dict[str, list[Consumed]]:
        """What these values of a column of the account were charged since then; of the writers of marks, up to those.

        Months of which only the sums are left count if they began since then. Raises `StoreUnavailable`.
        """

        def up_to(table: Table) -> list[ColumnElement[bool]]:
            marks = [and_(table.c.writer == mark.writer, table.c.number >= mark.number) for mark in until]
            return [table.c.ended_at >= begins_at, *(not_(mark) for mark in marks)]

        def summed(table: Table, where: list[ColumnElement[bool]]) -> Select[Any, Any, Any, Any]:
            named = table.c[column], table.c.model, table.c.tag
            is_asked = table.c[column].in_(values)
            return select(*named, func.sum(table.c.cost_units)).where(*where, is_asked).group_by(*named)

        until = list(until)
        owners = select(request_owners.c.id).where(request_owners.c[column].in_(values))
        # First by numbers, as reports do.
        few = (
            select(requests.c.owner_id, requests.c.way_id, func.sum(requests.c.cost_units).label("cost_units"))
            .where(*up_to(requests), requests.c.owner_id.in_(owners))
            .group_by(requests.c.owner_id, requests.c.way_id)
            .subquery()
        )
        named = request_owners.c[column], request_ways.c.model, request_owners.c.tag
        new = (
            select(*named, func.sum(few.c.cost_units))
            .join_from(few, request_owners, request_owners.c.id == few.c.owner_id)
            .join(request_ways, request_ways.c.id == few.c.way_id)
            .group_by(*named)
        )
        found: dict[str, list[Consumed]] = {}
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            for query in (new, summed(ledger, up_to(ledger)), summed(months, [months.c.begins_at >= begins_at])):
                for value, model, tag, cost_units in await connection.execute(query):
                    found.setdefault(value, []).append(Consumed(model, tag, cost_units or 0.0))
        return found

    async def completions(self, *, last: int) -> dict[str, float]:
        """Model → completion tokens of a slot, the mean of its requests among the last. Raises `StoreUnavailable`."""
        few = (
            select(requests.c.way_id, (requests.c.completion_tokens * 1.0 / requests.c.slots).label("tokens"))
            .where(requests.c.completion_tokens > 0, requests.c.slots > 0)
            .order_by(requests.c.ended_at.desc())
            .limit(last)
            .subquery()
        )
        query = (
            select(request_ways.c.model, func.avg(few.c.tokens))
            .join_from(few, request_ways, request_ways.c.id == few.c.way_id)
            .group_by(request_ways.c.model)
        )
        async with self._database.reading(patience_seconds=REPORT_SECONDS) as connection:
            return {model: float(tokens) for model, tokens in await connection.execute(query)}
