"""What the commands that use the store share: opening it, and the options of periods."""

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    from fairshare.accounts.periods import Span
    from fairshare.accounts.rights import Actor
    from fairshare.accounts.service import Accounts
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


def with_accounts(config: Path, work: "Callable[[Accounts, Actor], Awaitable[T]]") -> T:
    """Runs with the accounts of a site, as somebody who may do everything: whoever can use the store can."""
    import pwd
    import secrets

    from fairshare import clock
    from fairshare.accounts.rights import Actor
    from fairshare.accounts.service import Accounts
    from fairshare.gateway.identity import new_key
    from fairshare.storage.accounts import AccountStore

    try:
        user = pwd.getpwuid(os.getuid()).pw_name  # not what the environment says: this is for the audit
    except KeyError:  # a container's user may have no name
        user = f"user {os.getuid()}"
    actor = Actor(name=f"{user} (command line)")
    return with_store(
        config,
        lambda database: work(
            Accounts(AccountStore(database), wall=clock.wall, new_secret=lambda: new_key(secrets.token_bytes)), actor
        ),
    )


def listed(text: str | None) -> list[str] | None:
    """`a,b` as a list; None: not given."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def show_table(columns: "Sequence[str]", rows: "Iterable[Sequence[object]]") -> None:
    """A plain table on standard output."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A file or pipe has no width: the table must not be cut there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("-" if value is None or value == "" else escape(str(value)) for value in row))
    console.print(table)


def when(at: float | None) -> str:
    """A moment as UTC, or nothing."""
    from datetime import UTC

    from fairshare.accounts.periods import shown

    return "" if at is None else shown(at, UTC)
