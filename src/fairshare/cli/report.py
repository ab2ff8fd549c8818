"""`fairshare report` and `fairshare export`: what was used, by whom."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.accounts.forms import Form
from fairshare.cli.check import ConfigOption
from fairshare.cli.storing import EndOption, MonthOption, StartOption, ZoneOption, span_of, with_store
from fairshare.errors import CallerError

if TYPE_CHECKING:
    from fairshare.accounts.reports import Report
    from fairshare.storage.database import Database


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    app.command("report", epilog="Example: fairshare report --month 2026-11 --by organisation,team")(report)
    app.command("export", epilog="Example: fairshare export --month 2026-11 --format csv > november.csv")(export)


def report(
    config: ConfigOption = Path("fairshare.yaml"),
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="Rows by organisation, team, project, key, tag, pool, model: one or several with commas. "
            "Default: team; for parsable2 always pool,team,project.",
            metavar="WHAT",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only these requests, as team=search; may be given several times."),
    ] = None,
    month: MonthOption = None,
    start: StartOption = None,
    end: EndOption = None,
    time_zone: ZoneOption = "UTC",
    form: Annotated[
        Form,
        typer.Option("--format", help="parsable2: as Slurm's `sreport --parsable2` writes account utilization."),
    ] = Form.TABLE,
) -> None:
    """Show what requests that ended in a period used. Needs no running gateway."""
    from fairshare.accounts import periods, reports
    from fairshare.storage.ledger import LedgerStore

    if form is Form.PARSABLE2:
        if by is not None:
            raise CallerError("--format parsable2 has rows of its own; leave out --by")
        grouped = reports.PARSABLE2_BY
    else:
        grouped = reports.dimensions("team" if by is None else by)
    conditions = reports.filters(only or [])
    span = span_of(month, start, end, time_zone)

    async def read(database: "Database") -> "Report":
        return await reports.report(
            LedgerStore(database), span, where=periods.zone(time_zone), by=grouped, only=conditions
        )

    found = with_store(config, read)
    if form is Form.TABLE:
        _show(found)
    else:
        sys.stdout.write(reports.write(found, form))


def export(
    config: ConfigOption = Path("fairshare.yaml"),
    month: MonthOption = None,
    start: StartOption = None,
    end: EndOption = None,
    time_zone: ZoneOption = "UTC",
    form: Annotated[
        ExportFormat, typer.Option("--format", help="One JSON object per line, or CSV.")
    ] = ExportFormat.JSONL,
) -> None:
    """Write the record of every request that ended in a period to standard output, oldest first."""
    from fairshare.accounts import reports
    from fairshare.storage.ledger import LedgerStore

    span = span_of(month, start, end, time_zone)
    as_csv = form is ExportFormat.CSV

    async def stream(database: "Database") -> None:
        if as_csv:
            sys.stdout.write(reports.export_header())
        async for page in LedgerStore(database).rows(begins_at=span.begins_at, ends_at=span.ends_at):
            sys.stdout.write(reports.export_lines(page, as_csv=as_csv))

    with_store(config, stream)


def _show(found: "Report") -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fairshare.accounts.reports import MEASURES

    # A file or pipe has no width: the table must not be cut there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"{found.begins_at} until {found.ends_at} ({found.time_zone})")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    for number, name in enumerate(found.by):
        table.add_column(name, footer="total" if number == 0 else "", overflow="fold")
    for name in MEASURES:
        table.add_column(name.replace("_", " "), footer=_number(found.total[name]), justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(escape(str(row[name])) or "-" for name in found.by), *(_number(row[name]) for name in MEASURES))
    console.print(table)


def _number(value: str | int | float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
