"""`fairshare keys`: the keys that clients show."""

import json
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    keys = typer.Typer(no_args_is_help=True)
    keys.command("new", epilog="Example: fairshare keys new --team search --class batch")(new)
    app.add_typer(keys, name="keys", help="Make keys for clients.", epilog="Example: fairshare keys new --team search")


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

    from fairshare.gateway.identity import hash_key, new_key

    key = new_key(secrets.token_bytes)
    print(f"The key, shown this once; give it to the team:\n\n  {key}\n")
    print("What to store in fairshare.yaml; then reload the gateway with SIGHUP:\n")
    print("teams:")
    print(f"  - name: {json.dumps(team, ensure_ascii=False)}")
    print(f'    keys: [{{sha256: "{hash_key(key).hex()}", class: {service_class}}}]')
