"""This program as its next version could be: `python -m support.next_version serve ...`, beside today's.

It speaks a version of the peer protocol that today's does not know, and today's with a field more at the end of every
message; its store has one revision more, which adds to it and is needed by it. It says so by its `--version`.
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fairshare.gateway import replication
from fairshare.replicas.messages import VERSION, Codec, OnLink
from fairshare.storage import database, schema

REVISION = f"{int(schema.REVISION) + 1:04}"

MIGRATION = f'''"""What the next version adds."""

import sqlalchemy as sa
from alembic import op

revision = "{REVISION}"
down_revision = "{schema.REVISION}"


def upgrade() -> None:
    op.add_column("leases", sa.Column("next_version", sa.Text(), nullable=False, server_default="added"))
    op.create_table("of_the_next_version", sa.Column("id", sa.Integer(), primary_key=True))
'''

ENVELOPE_TAG = 50


class NextCodec(Codec):
    """Every message, and what it travels in, has a field more."""

    def encode(self, messages: Sequence[OnLink]) -> bytes:
        said: list[list[Any]] = msgspec.msgpack.decode(super().encode(messages))
        for message in said:
            if message[0] == ENVELOPE_TAG:
                for each in message[-1]:
                    each.append("of the next version")
            message.append("of the next version")
        return msgspec.msgpack.encode(said)


def become_next(folder: Path) -> None:
    """`folder`: for the migrations."""
    migrations = folder / "migrations"
    shutil.copytree(database.MIGRATIONS, migrations)
    (migrations / "versions" / f"m{REVISION}_next.py").write_text(MIGRATION)
    database.MIGRATIONS = migrations
    database.REVISION = REVISION
    replication.CODECS = {VERSION: NextCodec(), VERSION + 1: NextCodec()}


if __name__ == "__main__":
    from fairshare.cli import main

    with tempfile.TemporaryDirectory(prefix="next-") as folder:
        become_next(Path(folder))
        sys.exit(main())
