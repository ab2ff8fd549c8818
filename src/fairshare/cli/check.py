"""`fairshare check`: is the configuration usable?"""

import os
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE", show_default=True)
]


def register(app: typer.Typer) -> None:
    app.command("check", epilog="Example: fairshare check -c fairshare.yaml")(check)


def check(config: ConfigOption = Path("fairshare.yaml")) -> None:
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
    keys = sum(len(team.keys) for team in spec.teams)
    engines = _count(sum(len(pool.instances) for pool in spec.pools), "engine")
    sources = sum(len(pool.sources) for pool in spec.pools)
    print(
        f"{config} can be used: {_count(len(spec.pools), 'pool')}, "
        f"{engines}{' and ' + _count(sources, 'source') + ' of more' if sources else ''}, "
        f"{_count(len(spec.teams), 'team')}, {_count(keys, 'key')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
