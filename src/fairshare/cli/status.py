"""`fairshare status`: what a running gateway is doing."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    from rich.table import Table

    from fairshare.gateway.status import InstanceStatus, PoolStatus, TeamStatus

TIMEOUT_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    app.command("status", epilog="Example: fairshare status --admin http://127.0.0.1:8081")(status)


def status(
    admin: Annotated[
        str, typer.Option("--admin", help="The gateway's admin port.", metavar="URL")
    ] = "http://127.0.0.1:8081",
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            help="A file with the admin key; else the environment variable FAIRSHARE_ADMIN_KEY, if it is set.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of /api/v1/pools as it is.")] = False,
) -> None:
    """Show the pools of a running gateway: who owns, uses, borrows and waits."""
    body = _fetch(f"{admin.rstrip('/')}/api/v1/pools", _admin_key(key_file))
    if as_json:
        print(body.decode())
        return

    import msgspec
    from rich.console import Console

    from fairshare.gateway.status import PoolStatus

    try:
        pools = msgspec.json.decode(body, type=list[PoolStatus])
    except msgspec.MsgspecError:
        raise OperatorError(f"{admin} does not answer like the admin port of a fairshare gateway") from None
    console = Console(highlight=False, soft_wrap=True)
    for pool in pools:
        _show(console.print, pool)


def _admin_key(key_file: Path | None) -> str | None:
    if key_file is None:
        return os.environ.get("FAIRSHARE_ADMIN_KEY")
    try:
        return key_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "no text").lower() if isinstance(error, OSError) else "not text"
        raise OperatorError(f"the admin key cannot be read from {key_file} ({reason})") from None


def _fetch(url: str, key: str | None) -> bytes:
    import http.client
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise OperatorError(f'--admin must be an address such as http://127.0.0.1:8081, found "{url}"')
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy: the admin port is near, and a key must not go elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise OperatorError(f"{url} refuses the admin key; give the right one with --key-file") from None
        raise OperatorError(f"{url} answers with status {error.code}; is this a fairshare admin port?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        detail = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        raise OperatorError(f"{url} cannot be reached ({str(detail).lower()}); is the gateway running?") from None


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
            "healthy" if instance.healthy else "unhealthy",
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
