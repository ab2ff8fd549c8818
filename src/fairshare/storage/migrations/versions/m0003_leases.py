"""Replicas: leases, and which versions can share the store."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

DOUBLE: sa.Double[float] = sa.Double()


def upgrade() -> None:
    op.create_table(
        "compatibility",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("insert into compatibility (id, revision) values (1, '0003')")
    op.create_table(
        "leases",
        sa.Column("lease", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("ends_at", DOUBLE, nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("lease"),
    )
