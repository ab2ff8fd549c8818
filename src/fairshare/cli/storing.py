"""What the commands that use the store share: opening it, and the options of periods."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    from fairshare.accounts.periods import Span
    from fairshare.storage.database import Database

T = TypeVar("T")

MonthOption = Annotated[
    str | None,
    typer.Option("--month", help="A calendar month, as 2026-11; the default is this month.", metavar="MONTH"),
]
StartOption = Annotated[
    str | None, typer.Option("--start", help="From this date or time on, as 2026-11-01 or 2026-11-01T06:00.")
]
EndOption = Annotated[str | None, typer.Option("--end", help="Until just before this date or time; default: now.")]
ZoneOption = Annotated[
    str, typer.Option("--time-zone", help="In which dates and months are meant, as Europe/Berlin.", metavar="ZONE")
]


def with_store(config: Path, work: "Callable[[Database], Awaitable[T]]") -> T:
    """Runs with the store that a configuration names. Raises `OperatorError` if there is none or it does not answer."""
    import asyncio

    from fairshare.config import load
    from fairshare.storage.database import Database, StoreUnavailable

    spec = load(config, os.environ).gateway.store
    if spec is None:
        raise OperatorError(f"{config} says `store: none`, so there is nothing to read; give it a store")
    address = spec.address

    async def main() -> T:
        database = Database(address)
        try:
            await database.migrate()
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(main())
    except StoreUnavailable as error:
        raise OperatorError(str(error)) from None


def span_of(month: str | None, start: str | None, end: str | None, time_zone: str) -> "Span":
    """The period that the options mean. Raises `CallerError`."""
    from fairshare import clock
    from fairshare.accounts import periods
    from fairshare.errors import CallerError

    where = periods.zone(time_zone)
    now = clock.wall()
    if month is not None and (start is not None or end is not None):
        raise CallerError("give either --month, or --start and --end")
    if month is not None:
        return periods.month(month, where)
    if start is None:
        if end is not None:
            raise CallerError("--end needs --start")
        return periods.around(periods.Period.MONTH, now, where)
    span = periods.Span(periods.point(start, where), now if end is None else periods.point(end, where))
    if span.ends_at <= span.begins_at:
        raise CallerError(f"the period ends ({end or 'now'}) before it begins ({start})")
    return span
