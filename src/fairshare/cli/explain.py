"""`fairshare explain`: why a request waited or borrowed, and how a team stands."""

from pathlib import Path
from typing import Annotated

import typer

from fairshare.cli.asking import USUAL_ADMIN, AdminOption, KeyFileOption, admin_key, decoded, fetch, key_in


def register(app: typer.Typer) -> None:
    app.command("explain", epilog="Example: fairshare explain search --admin http://127.0.0.1:8081")(explain)


def explain(
    what: Annotated[
        str, typer.Argument(help="A request's id (the header x-request-id of its answer), or a team.", metavar="WHAT")
    ],
    admin: AdminOption = USUAL_ADMIN,
    key_file: KeyFileOption = None,
    team_key_file: Annotated[
        Path | None,
        typer.Option(
            "--team-key-file",
            help="A file with a team's key: ask as that team, for its own requests, without the admin key.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of the gateway as it is.")] = False,
) -> None:
    """Say why a request waited or borrowed, or why a team waits now, in sentences with the numbers of the moment."""
    if team_key_file is None:
        body = fetch(admin, "/api/v1/explain", admin_key(key_file), {"of": what})
    else:
        body = fetch(admin, "/api/v1/team/explain", key_in(team_key_file, what="team's key"), {"of": what})
    if as_json:
        print(body.decode())
        return

    from datetime import datetime

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fairshare.gateway.explain import Explanation

    explanation = decoded(body, Explanation, admin)
    table = Table.grid(padding=(0, 2, 0, 0))
    for ratio in (None, None, 1):
        table.add_column(ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for step in explanation.steps:
        at = datetime.fromtimestamp(step.at).astimezone().strftime("%H:%M:%S")
        table.add_row(Text(at, style="dim"), Text(step.what, style="bold"), Text(step.sentence))
    console = Console(highlight=False)
    console.print(Text(f"{explanation.about} {explanation.name}", style="bold"), table)
