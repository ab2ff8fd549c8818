"""The account of requests in rows of numbers, and a view of all of it. What is in `ledger` stays there, and is read."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

DOUBLE: sa.Double[float] = sa.Double()

OWNER = ("organisation", "team", "project", "key_id", "tag")
WAY = ("endpoint", "pool", "served_by", "instance", "model", "service_class", "standing")
NUMBERS = ("priority", "slots", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_units")
END = ("estimated", "status", "finish", "reason")
HELD = ("held_seconds", "recalls", "wasted_slot_seconds")
LAST = ("client_cancelled", "degraded", "finish_reason")


def texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("ended_at", DOUBLE, nullable=False),
        sa.Column("writer", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("arrived_at", DOUBLE, nullable=False),
        sa.Column("dispatched_at", DOUBLE),
        sa.Column("first_byte_at", DOUBLE),
        sa.Column("priority", sa.Integer()),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_units", DOUBLE, nullable=False),
        sa.Column("held_seconds", DOUBLE, nullable=False),
        sa.Column("recalls", sa.Integer(), nullable=False),
        sa.Column("wasted_slot_seconds", DOUBLE, nullable=False),
        sa.Column("owner_id", sa.BigInteger(), nullable=False),
        sa.Column("way_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("ended_at", "writer", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "request_owners",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        *texts(*OWNER),
        sa.Column("seen_at", DOUBLE, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "request_ways",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        *texts(*WAY),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        *texts("finish", "reason"),
        sa.Column("client_cancelled", sa.Boolean(), nullable=False),
        sa.Column("degraded", sa.Boolean(), nullable=False),
        *texts("finish_reason"),
        sa.Column("seen_at", DOUBLE, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    times = ("request_id", "arrived_at", "dispatched_at", "first_byte_at", "ended_at")
    shown = ", ".join((*times, *OWNER, *WAY, *NUMBERS, *END, *HELD, *LAST))
    op.execute(
        f"create view account as select {shown} from requests "
        "join request_owners on request_owners.id = owner_id join request_ways on request_ways.id = way_id "
        f"union all select {shown} from ledger"
    )
