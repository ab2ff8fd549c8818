"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

DOUBLE: sa.Double[float] = sa.Double()


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", DOUBLE, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "changes",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "ledger",
        sa.Column("writer", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("arrived_at", DOUBLE, nullable=False),
        sa.Column("dispatched_at", DOUBLE, nullable=True),
        sa.Column("first_byte_at", DOUBLE, nullable=True),
        sa.Column("ended_at", DOUBLE, nullable=False),
        sa.Column("organisation", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("served_by", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("service_class", sa.Text(), nullable=False),
        sa.Column("standing", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=True),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_units", DOUBLE, nullable=False),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("finish", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("held_seconds", DOUBLE, nullable=False),
        sa.Column("recalls", sa.Integer(), nullable=False),
        sa.Column("wasted_slot_seconds", DOUBLE, nullable=False),
        sa.Column("client_cancelled", sa.Boolean(), nullable=False),
        sa.Column("degraded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("ended_at", "writer", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "months",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("begins_at", DOUBLE, nullable=False),
        sa.Column("ends_at", DOUBLE, nullable=False),
        sa.Column("organisation", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_units", DOUBLE, nullable=False),
        sa.Column("slot_seconds", DOUBLE, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("months_begins_at", "months", ["begins_at"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("created_at", DOUBLE, nullable=False),
        sa.CheckConstraint("kind in ('organisation', 'team', 'project')", name="nodes_kind"),
        sa.ForeignKeyConstraint(
            ["parent_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("kind", "path", name="nodes_kind_path"),
    )
    op.create_table(
        "usage",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("cost_units", DOUBLE, nullable=False),
        sa.Column("as_of", DOUBLE, nullable=False),
        sa.PrimaryKeyConstraint("pool", "team"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=False),
        sa.Column("service_class", sa.Text(), nullable=False),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", DOUBLE, nullable=False),
        sa.Column("expires_at", DOUBLE, nullable=True),
        sa.Column("revoked_at", DOUBLE, nullable=True),
        sa.Column("last_used_at", DOUBLE, nullable=True),
        sa.Column("changed_in", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_keys_changed_in"), "keys", ["changed_in"], unique=False)
    op.create_index(op.f("ix_keys_node_id"), "keys", ["node_id"], unique=False)
    op.create_table(
        "operators",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", DOUBLE, nullable=False),
        sa.Column("revoked_at", DOUBLE, nullable=True),
        sa.CheckConstraint("role in ('admin', 'member', 'viewer')", name="operators_role"),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_table(
        "budgets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("tag", sa.Text(), nullable=True),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("time_zone", sa.Text(), nullable=False),
        sa.Column("soft_cost_units", DOUBLE, nullable=True),
        sa.Column("hard_cost_units", DOUBLE, nullable=True),
        sa.Column("borrow_over_soft", sa.Boolean(), nullable=False),
        sa.Column("created_at", DOUBLE, nullable=False),
        sa.CheckConstraint("period in ('day', 'week', 'month', 'total')", name="budgets_period"),
        sa.CheckConstraint("(node_id is null) <> (key_id is null)", name="budgets_one_owner"),
        sa.ForeignKeyConstraint(
            ["key_id"],
            ["keys.id"],
        ),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "limits",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Integer(), nullable=True),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(node_id is null) <> (key_id is null)", name="limits_one_owner"),
        sa.ForeignKeyConstraint(
            ["key_id"],
            ["keys.id"],
        ),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "secrets",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("created_at", DOUBLE, nullable=False),
        sa.Column("expires_at", DOUBLE, nullable=True),
        sa.ForeignKeyConstraint(
            ["key_id"],
            ["keys.id"],
        ),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_index(op.f("ix_secrets_key_id"), "secrets", ["key_id"], unique=False)
    op.create_table(
        "increases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("budget_id", sa.Integer(), nullable=False),
        sa.Column("cost_units", DOUBLE, nullable=False),
        sa.Column("until", DOUBLE, nullable=False),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_increases_budget_id"), "increases", ["budget_id"], unique=False)
    op.execute("insert into changes (id, version) values (1, 0)")
