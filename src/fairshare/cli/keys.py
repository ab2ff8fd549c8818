"""`fairshare keys`: the keys that clients show. `new` makes one for the configuration, the others work on the store."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fairshare.cli.check import ConfigOption
from fairshare.cli.storing import listed, show_table, when, with_accounts

CONFIG = Path("fairshare.yaml")

KeyArgument = Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.", metavar="KEY")]


def register(app: typer.Typer) -> None:
    keys = typer.Typer(no_args_is_help=True)
    keys.command("new", epilog="Example: fairshare keys new --team search --class batch")(new)
    keys.command("add", epilog="Example: fairshare keys add project:search/web --expires 90d")(add)
    keys.command("list", epilog="Example: fairshare keys list")(show)
    keys.command("rotate", epilog="Example: fairshare keys rotate 3f2a9c417b5e --overlap 24h")(rotate)
    keys.command("revoke", epilog="Example: fairshare keys revoke 3f2a9c417b5e")(revoke)
    app.add_typer(keys, name="keys", help="Keys for clients.", epilog="Example: fairshare keys new --team search")


def new(
    team: Annotated[str, typer.Option("--team", help="The team that the key speaks for.", metavar="TEAM")],
    service_class: Annotated[
        Literal["interactive", "batch"],
        typer.Option("--class", help="The most the key may ask for; an interactive key may also ask for batch."),
    ] = "interactive",
) -> None:
    """Make a key: shows it once, and what to store of it.

    Nothing is written anywhere. Only the SHA-256 belongs into the configuration.
    """
    import secrets

    from fairshare.errors import OperatorError
    from fairshare.gateway.identity import hash_key, new_key

    if not team.isprintable() or team != team.strip() or not team:
        raise OperatorError(f"--team must be a name without line breaks or spaces around it, found {team!r}")
    key = new_key(secrets.token_bytes)
    print(f"The key, shown this once; give it to the team:\n\n  {key}\n")
    print("What to store in fairshare.yaml; then reload the gateway with SIGHUP:\n")
    print("teams:")
    print(f"  - name: {json.dumps(team, ensure_ascii=False)}")
    print(f'    keys: [{{sha256: "{hash_key(key).hex()}", class: {service_class}}}]')


def add(
    owner: Annotated[str, typer.Argument(help="Whom it speaks for: team:NAME or project:TEAM/NAME.", metavar="OWNER")],
    config: ConfigOption = CONFIG,
    service_class: Annotated[
        Literal["interactive", "batch"],
        typer.Option("--class", help="The most the key may ask for; an interactive key may also ask for batch."),
    ] = "interactive",
    models: Annotated[str | None, typer.Option("--models", help="Only these models, with commas.")] = None,
    tag: Annotated[str, typer.Option("--tag", help="Groups keys across teams in reports and budgets.")] = "",
    note: Annotated[str, typer.Option("--note", help="Whose it is.")] = "",
    expires: Annotated[
        str | None, typer.Option("--expires", help="After this time, as 90d; never if not given.", metavar="TIME")
    ] = None,
) -> None:
    """Make a key in the store, shown once. It is valid at a running gateway within a second."""
    from fairshare import clock
    from fairshare.accounts import periods

    expires_at = None if expires is None else clock.wall() + periods.duration(expires)
    made = with_accounts(
        config,
        lambda accounts, actor: accounts.add_key(
            actor,
            owner,
            service_class=service_class,
            models=listed(models),
            tag=tag,
            note=note,
            expires_at=expires_at,
        ),
    )
    print(f"Key {made.id} of {owner}, shown this once; give it to them:\n\n  {made.key}\n")


def show(config: ConfigOption = CONFIG) -> None:
    """Show every key of the store, without what it shows."""
    keys = with_accounts(config, lambda accounts, actor: accounts.keys(actor))
    show_table(
        ("key", "owner", "class", "models", "tag", "note", "expires", "revoked", "last used"),
        (
            (
                key.id,
                key.owner,
                key.service_class,
                "all" if key.models is None else ", ".join(key.models),
                key.tag,
                key.note,
                when(key.expires_at),
                when(key.revoked_at),
                when(key.last_used_at),
            )
            for key in keys
        ),
    )


def rotate(
    key: KeyArgument,
    config: ConfigOption = CONFIG,
    overlap: Annotated[
        str, typer.Option("--overlap", help="How long what was shown before still works.", metavar="TIME")
    ] = "24h",
) -> None:
    """Give a key something new to show; its id, limits and budgets stay."""
    from fairshare.accounts import periods

    seconds = periods.duration(overlap)
    made = with_accounts(config, lambda accounts, actor: accounts.rotate_key(actor, key, overlap_seconds=seconds))
    print(f"Key {made.id} is rotated; the old one works for {overlap} more. The new one, shown this once:\n")
    print(f"  {made.key}\n")


def revoke(key: KeyArgument, config: ConfigOption = CONFIG) -> None:
    """End a key: at a running gateway it is refused within a second."""
    with_accounts(config, lambda accounts, actor: accounts.revoke_key(actor, key))
    print(f"Key {key} is revoked.")
