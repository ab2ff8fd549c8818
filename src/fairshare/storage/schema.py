"""The tables of the store, as both backends have them.

Points in time are wall clock, seconds since 1970-01-01 UTC. `migrations/` makes these tables; a test compares the two.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

REVISION = "0005"
"""The last of the `migrations/`: what a store that is up to date says."""

COMPATIBLE_REVISION = "0003"
"""The oldest revision whose programs can use such a store too: what came since only added to it. So replicas of two
versions run side by side; what is taken away goes one version later."""

DOUBLE: Double[float] = Double()

changes = Table(
    "changes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)
"""One row. `version` grows with every change of what gateways must know; they poll it."""

compatibility = Table(
    "compatibility",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", Text, nullable=False),
)
"""One row: the oldest revision whose programs can use this store (`COMPATIBLE_REVISION` of the newest program)."""

nodes = Table(
    "nodes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("parent_id", Integer, ForeignKey("nodes.id")),
    Column("path", Text, nullable=False),
    Column("models", Text),
    Column("created_at", DOUBLE, nullable=False),
    UniqueConstraint("kind", "path", name="nodes_kind_path"),
    CheckConstraint("kind in ('organisation', 'team', 'project')", name="nodes_kind"),
)
"""Organisation → team → project. `path`: its name; a project's is `team/project`. `models`: JSON list; NULL: all."""

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node_id", Integer, ForeignKey("nodes.id"), nullable=False, index=True),
    Column("service_class", Text, nullable=False),
    Column("models", Text),
    Column("tag", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("created_at", DOUBLE, nullable=False),
    Column("expires_at", DOUBLE),
    Column("revoked_at", DOUBLE),
    Column("last_used_at", DOUBLE),
    Column("changed_in", BigInteger, nullable=False, index=True),
)
"""Keys of clients. `id` names the key in records and outlives a rotation. `changed_in`: the version (see `changes`)
that changed it last, so that gateways read only what is new."""

secrets = Table(
    "secrets",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("key_id", Text, ForeignKey("keys.id"), nullable=False, index=True),
    Column("created_at", DOUBLE, nullable=False),
    Column("expires_at", DOUBLE),
)
"""What clients show for a key, as SHA-256 (hex). While a key is rotated it has two."""

operators = Table(
    "operators",
    metadata,
    Column("id", Text, primary_key=True),
    Column("sha256", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("node_id", Integer, ForeignKey("nodes.id")),
    Column("note", Text, nullable=False),
    Column("created_at", DOUBLE, nullable=False),
    Column("revoked_at", DOUBLE),
    CheckConstraint("role in ('admin', 'member', 'viewer')", name="operators_role"),
)
"""Keys for the admin API. `node_id`: what the role reaches; NULL: the whole site."""

limits = Table(
    "limits",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("node_id", Integer, ForeignKey("nodes.id")),
    Column("key_id", Text, ForeignKey("keys.id")),
    Column("value", BigInteger, nullable=False),
    CheckConstraint("(node_id is null) <> (key_id is null)", name="limits_one_owner"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("node_id", Integer, ForeignKey("nodes.id")),
    Column("key_id", Text, ForeignKey("keys.id")),
    Column("model", Text),
    Column("tag", Text),
    Column("period", Text, nullable=False),
    Column("time_zone", Text, nullable=False),
    Column("soft_cost_units", DOUBLE),
    Column("hard_cost_units", DOUBLE),
    Column("borrow_over_soft", Boolean, nullable=False),
    Column("created_at", DOUBLE, nullable=False),
    CheckConstraint("(node_id is null) <> (key_id is null)", name="budgets_one_owner"),
    CheckConstraint("period in ('day', 'week', 'month', 'total')", name="budgets_period"),
)

increases = Table(
    "increases",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("budget_id", Integer, ForeignKey("budgets.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("cost_units", DOUBLE, nullable=False),
    Column("until", DOUBLE, nullable=False),
)
"""Temporary increases of budgets; each ends by itself."""

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", DOUBLE, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("before", Text),
    Column("after", Text),
)
"""Who changed what, when: JSON of before and after; NULL: there was nothing, or is nothing left."""

requests = Table(
    "requests",
    metadata,
    Column("ended_at", DOUBLE, nullable=False),
    Column("writer", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("arrived_at", DOUBLE, nullable=False),
    Column("dispatched_at", DOUBLE),
    Column("first_byte_at", DOUBLE),
    Column("priority", Integer),
    Column("slots", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_units", DOUBLE, nullable=False),
    Column("held_seconds", DOUBLE, nullable=False),
    Column("recalls", Integer, nullable=False),
    Column("wasted_slot_seconds", DOUBLE, nullable=False),
    # No foreign keys: looking each up costs as much as the row. They are written in the transaction of their first row.
    Column("owner_id", BigInteger, nullable=False),
    Column("way_id", BigInteger, nullable=False),
    # By time first: a period lies together, so that a report over it reads nothing else.
    PrimaryKeyConstraint("ended_at", "writer", "number"),
    sqlite_with_rowid=False,
)
"""One row per request, numbers almost only: what many requests have in common is in the next two tables, because
binding a column costs more than the database does. `writer` is drawn by each gateway process, `number` counts its rows:
a batch that is written again after a lost answer of the database changes nothing. The view `account` shows it whole."""

request_owners = Table(
    "request_owners",
    metadata,
    Column("id", BigInteger, autoincrement=False),
    Column("organisation", Text, nullable=False),
    Column("team", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("tag", Text, nullable=False),
    Column("seen_at", DOUBLE, nullable=False),
    PrimaryKeyConstraint("id"),
    sqlite_with_rowid=False,
)
"""Whose requests they were, as it was called then. `id` is made from what the row says, so that replicas agree without
asking. `seen_at`: not more than a day before the last request that refers to it was written."""

request_ways = Table(
    "request_ways",
    metadata,
    Column("id", BigInteger, autoincrement=False),
    Column("endpoint", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("served_by", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("service_class", Text, nullable=False),
    Column("standing", Text, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("status", Integer, nullable=False),
    Column("finish", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("client_cancelled", Boolean, nullable=False),
    Column("degraded", Boolean, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("seen_at", DOUBLE, nullable=False),
    PrimaryKeyConstraint("id"),
    sqlite_with_rowid=False,
)
"""Where requests went and how they ended. `id` and `seen_at` as of `request_owners`."""

ledger = Table(
    "ledger",
    metadata,
    Column("writer", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("arrived_at", DOUBLE, nullable=False),
    Column("dispatched_at", DOUBLE),
    Column("first_byte_at", DOUBLE),
    Column("ended_at", DOUBLE, nullable=False),
    Column("organisation", Text, nullable=False),
    Column("team", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("tag", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("served_by", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("service_class", Text, nullable=False),
    Column("standing", Text, nullable=False),
    Column("priority", Integer),
    Column("slots", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_units", DOUBLE, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("status", Integer, nullable=False),
    Column("finish", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("held_seconds", DOUBLE, nullable=False),
    Column("recalls", Integer, nullable=False),
    Column("wasted_slot_seconds", DOUBLE, nullable=False),
    Column("client_cancelled", Boolean, nullable=False),
    Column("degraded", Boolean, nullable=False),
    # With a default: programs of revision 0003 write rows without it.
    Column("finish_reason", Text, nullable=False, server_default=""),
    # By time first: a period lies together, so that a report over it reads nothing else.
    PrimaryKeyConstraint("ended_at", "writer", "number"),
    sqlite_with_rowid=False,
)
"""Requests as versions before 0005 wrote them, and still write beside newer replicas; it is only read."""

months = Table(
    "months",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("begins_at", DOUBLE, nullable=False),
    Column("ends_at", DOUBLE, nullable=False),
    Column("organisation", Text, nullable=False),
    Column("team", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("tag", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_units", DOUBLE, nullable=False),
    Column("slot_seconds", DOUBLE, nullable=False),
    Index("months_begins_at", "begins_at"),
)
"""What is left of ledger rows older than the retention: sums of whole months."""

usage = Table(
    "usage",
    metadata,
    Column("pool", Text, primary_key=True),
    Column("team", Text, primary_key=True),
    Column("cost_units", DOUBLE, nullable=False),
    Column("as_of", DOUBLE, nullable=False),
)
"""Decayed usage of each team in each pool, as it was at `as_of`."""

history = Table(
    "history",
    metadata,
    Column("pool", Text, primary_key=True),
    Column("began_at", DOUBLE, primary_key=True),
    Column("sample", Text, nullable=False),
)
"""What a pool did in one minute, for the status page, as JSON; the last two days of it."""

leases = Table(
    "leases",
    metadata,
    Column("lease", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("ends_at", DOUBLE, nullable=False),
    Column("state", LargeBinary, nullable=False),
)
"""Which replica decides for a group of pools. `ends_at`: on the clock of the database. `epoch` only grows, so rows
stay. `state`: what the owner saved for its successor beside usage."""
