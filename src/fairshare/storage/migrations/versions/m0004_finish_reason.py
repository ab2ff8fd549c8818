"""Why engines say that they stopped, in the account of requests."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("ledger", sa.Column("finish_reason", sa.Text(), nullable=False, server_default=""))
