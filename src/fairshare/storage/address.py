"""Where the store is."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A SQLite file of this machine."""

    path: Path

    def __str__(self) -> str:
        return f"sqlite:{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresServer:
    """A database of a PostgreSQL server."""

    host: str
    """A name, an address, or the folder of a Unix socket."""
    port: int = 5432
    database: str
    user: str
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"postgresql://{self.user}@{self.host}:{self.port}/{self.database}"


StoreAddress = SqliteFile | PostgresServer
