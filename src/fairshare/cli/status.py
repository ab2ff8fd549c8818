"""`fairshare status`: what a running gateway is doing."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.asking import USUAL_ADMIN, AdminOption, KeyFileOption, admin_key, decoded, fetch

if TYPE_CHECKING:
    from rich.table import Table

    from fairshare.gateway.status import InstanceStatus, PoolStatus, TeamStatus


def register(app: typer.Typer) -> None:
    app.command("status", epilog="Example: fairshare status --admin http://127.0.0.1:8081")(status)


def status(
    admin: AdminOption = USUAL_ADMIN,
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of /api/v1/pools as it is.")] = False,
) -> None:
    """Show the pools of a running gateway: who owns, uses, borrows and waits."""
    body = fetch(admin, "/api/v1/pools", admin_key(key_file))
    if as_json:
        print(body.decode())
        return

    from rich.console import Console

    from fairshare.gateway.status import PoolStatus

    console = Console(highlight=False, soft_wrap=True)
    for pool in decoded(body, list[PoolStatus], admin):
        _show(console.print, pool)


def _show(show: "Callable[[str | Table], None]", pool: "PoolStatus") -> None:
    state = "saturated" if pool.saturated else "has room"
    show(
        f"[bold]{_literal(pool.name)}[/bold]: {pool.in_flight} of {pool.capacity} slots in flight ({state}), "
        f"{pool.held} held, {pool.recalls} recalled, dispatch {_literal(pool.dispatch)}"
    )
    show(_team_table(pool.teams))
    show(_instance_table(pool.instances))
    for finding in pool.findings:
        show(f"  ! {_literal(finding)}")
    show("")


def _team_table(teams: "Iterable[TeamStatus]") -> "Table":
    table = _table("team", "share", "owns", "in flight", "borrows", "held", "usage", "LF", "rank", "phantoms")
    for team in teams:
        table.add_row(
            _literal(team.team),
            f"{team.share:.4g}",
            str(team.reserved),
            str(team.in_flight),
            str(team.borrowing),
            str(team.held),
            f"{team.usage:,.0f}",
            "∞" if team.level_fairshare is None else f"{team.level_fairshare:.3g}",
            str(team.rank),
            str(team.phantoms),
        )
    return table


def _instance_table(instances: "Iterable[InstanceStatus]") -> "Table":
    table = _table("engine", "health", "part", "seats", "in flight", "runs", "waits", "KV")
    for instance in instances:
        table.add_row(
            _literal(instance.id),
            "leaving" if instance.leaving else "healthy" if instance.healthy else "unhealthy",
            str(instance.part),
            _known(instance.seats),
            str(instance.in_flight),
            _known(instance.running),
            _known(instance.waiting),
            "?" if instance.kv_usage is None else f"{instance.kv_usage:.0%}",
        )
    return table


def _table(first: str, *others: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=8)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _literal(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)
