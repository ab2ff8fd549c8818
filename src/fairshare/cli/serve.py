"""`fairshare serve`: the gateway."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fairshare.cli.check import ConfigOption
from fairshare.cli.logs import LogFormat, LogLevel


def register(app: typer.Typer) -> None:
    app.command("serve", epilog="Example: fairshare serve -c fairshare.yaml --log-format json")(serve)


def serve(
    config: ConfigOption = Path("fairshare.yaml"),
    log_format: Annotated[LogFormat, typer.Option("--log-format", help="How log lines look.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="The least that is logged.")] = LogLevel.INFO,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C.

    SIGHUP reads the configuration again; a broken file leaves the old one in force.
    SIGTERM finishes what is running and held, a second SIGTERM ends at once.
    """
    from fairshare.cli import logs
    from fairshare.compose import run

    logs.configure(log_format, log_level)
    run(config, os.environ)
