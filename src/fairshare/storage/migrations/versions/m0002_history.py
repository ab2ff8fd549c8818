"""What the status page shows of the last days."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

DOUBLE: sa.Double[float] = sa.Double()


def upgrade() -> None:
    op.create_table(
        "history",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("began_at", DOUBLE, nullable=False),
        sa.Column("sample", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("pool", "began_at"),
    )
