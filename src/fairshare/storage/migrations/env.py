"""Alembic's entry: runs the steps in the transaction that `fairshare.storage.database` opened."""

from alembic import context

from fairshare.storage.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
