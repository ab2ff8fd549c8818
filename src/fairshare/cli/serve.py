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
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Processes that serve the data port.")] = 1,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C.

    SIGHUP reads the configuration again; a broken file leaves the old one in force.
    SIGTERM finishes what is running and held, a second SIGTERM ends at once.
    With several workers, one that dies is started again, and SIGUSR2 replaces one after the other.
    """
    from fairshare.cli import logs
    from fairshare.gateway.seat import seat_in

    seat = seat_in(os.environ)
    logs.configure(log_format, log_level, {} if seat is None else {"worker": seat.index})
    if seat is None and workers > 1:
        from fairshare.workers import run_workers

        again = ["serve", "-c", str(config), "--log-format", log_format, "--log-level", log_level]
        run_workers(config, os.environ, count=workers, arguments=again)
    else:
        from fairshare.compose import run

        run(config, os.environ, seat)
