"""Where the store is."""

from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import URL


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


def driver_url(address: StoreAddress) -> URL:
    """The address as SQLAlchemy wants it, the password in it."""
    match address:
        case SqliteFile():
            return URL.create("sqlite+aiosqlite", database=str(address.path))
        case PostgresServer():
            return URL.create(
                "postgresql+asyncpg",
                username=address.user,
                password=address.password,
                host=None if address.host.startswith("/") else address.host,
                port=None if address.host.startswith("/") else address.port,
                database=address.database,
                # asyncpg takes the folder of a socket as a host; in a URL only the query can carry it.
                query={"host": address.host, "port": str(address.port)} if address.host.startswith("/") else {},
            )
