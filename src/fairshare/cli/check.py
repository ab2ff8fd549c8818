"""`fairshare check`: is the configuration usable?"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairshare.gateway.options import GatewaySpec

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE", show_default=True)
]


def register(app: typer.Typer) -> None:
    app.command("check", epilog="Example: fairshare check -c fairshare.yaml")(check)


def check(
    config: ConfigOption = Path("fairshare.yaml"),
    store: Annotated[
        bool, typer.Option("--store", help="Also try the store: does it answer, and may it be written to?")
    ] = False,
) -> None:
    """Check a configuration and all that it names.

    Prints one plain sentence for each thing that is wrong, and ends with 1 if the gateway would not start with it.
    """
    from fairshare.config import ConfigError, load

    try:
        settings = load(config, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            print(problem)
        raise typer.Exit(1) from None
    for warning in settings.warnings:
        print(f"warning: {warning}")
    spec = settings.gateway
    if store:
        _try_store(spec)
    keys = sum(len(team.keys) for team in spec.teams)
    engines = _count(sum(len(pool.instances) for pool in spec.pools), "engine")
    sources = sum(len(pool.sources) for pool in spec.pools)
    print(
        f"{config} can be used: {_count(len(spec.pools), 'pool')}, "
        f"{engines}{' and ' + _count(sources, 'source') + ' of more' if sources else ''}, "
        f"{_count(len(spec.teams), 'team')}, {_count(keys, 'key')}."
    )


def _try_store(spec: "GatewaySpec") -> None:
    """Ends with 1 if the store cannot be used."""
    import asyncio

    from fairshare import clock
    from fairshare.gateway.findings import Severity
    from fairshare.gateway.host import examine_store

    found = asyncio.run(examine_store(spec, wall=clock.wall))
    for finding in found:
        print(f"{'' if finding.severity is Severity.ERROR else 'warning: '}{finding.sentence} {finding.fix}")
    if any(finding.severity is Severity.ERROR for finding in found):
        raise typer.Exit(1)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
