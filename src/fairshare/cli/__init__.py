"""The program `fairshare`: one file per command, listed here.

A command's module imports what is heavy inside its function, so that `fairshare --help` stays quick.
"""

import sys
from typing import Annotated

import typer

from fairshare.cli import (
    accounts,
    calibrate,
    check,
    clear_phantoms,
    demo,
    doctor,
    engine,
    explain,
    keys,
    report,
    serve,
    simulate,
    status,
    top,
)
from fairshare.errors import FairshareError

COMMANDS = (
    serve,
    check,
    doctor,
    status,
    top,
    explain,
    clear_phantoms,
    keys,
    accounts,
    report,
    demo,
    engine,
    simulate,
    calibrate,
)
"""Each has `register(app)`; the order is the one of `fairshare --help`."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from fairshare.core import hold

        compiled = "" if hold.__file__.endswith(".py") else " (compiled)"
        print(f"fairshare {version('fairshare')}{compiled}")
        raise typer.Exit


def program() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="fairshare",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(
        help="A reservation with borrowing for GPU pools that serve language models with vLLM.",
        epilog="Example: fairshare serve -c fairshare.yaml",
    )
    def options(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
        ] = False,
    ) -> None: ...

    for command in COMMANDS:
        command.register(app)
    return app


def main() -> None:
    """Run the program. What a person must fix is one plain sentence and exit code 1, never a traceback."""
    try:
        program()()
    except FairshareError as error:
        print(f"fairshare: {error}", file=sys.stderr)
        sys.exit(1)
