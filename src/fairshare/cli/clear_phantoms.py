"""`fairshare clear-phantoms`: free the slots that are kept for a machine that is gone."""

from typing import Annotated

import typer

from fairshare.cli.asking import USUAL_ADMIN, AdminOption, KeyFileOption, admin_key, decoded, fetch


def register(app: typer.Typer) -> None:
    app.command("clear-phantoms", epilog="Example: fairshare clear-phantoms chat --admin http://127.0.0.1:8081")(
        clear_phantoms
    )


def clear_phantoms(
    pool: Annotated[str, typer.Argument(help="The pool, by its name.")],
    admin: AdminOption = USUAL_ADMIN,
    key_file: KeyFileOption = None,
) -> None:
    """Free the slots of a pool that are kept for silent replicas: when their machine is gone for certain."""
    from urllib.parse import quote

    from fairshare.gateway.phantoms_api import PhantomsCleared

    path = f"/api/v1/pools/{quote(pool, safe='')}/phantoms"
    cleared = decoded(fetch(admin, path, admin_key(key_file), method="DELETE"), PhantomsCleared, admin)
    for replica, slots in sorted(cleared.replicas.items()):
        print(f"{replica}: {slots} slots")
    print(f"{cleared.slots} slots of pool {pool} are free.")
