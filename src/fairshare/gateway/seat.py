"""What the parent of a machine's workers gives to each of them."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

SEAT_VARIABLE = "FAIRSHARE_WORKER"
"""The environment variable in which a worker finds its seat; set by the parent only."""

SECRET_FILE = "secret"
"""In the machine's folder: what its workers prove themselves to each other with."""

LEASES_FILE = "leases.sqlite3"
"""In the machine's folder: where the workers keep their leases if no store is configured."""

DRAIN = b"d"
END_AT_ONCE = b"e"
RELOAD = b"r"
DUMP = b"u"
READY = b"y"


class WorkerSeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker among those of a machine."""

    index: int
    """Its place, from 0."""
    workers: int
    """How many places there are."""
    name: str
    """Tells it from those that had its place before."""
    folder: str
    """Of this worker; its parent is the machine's. For nobody else, and short: Unix sockets are in it."""
    listening: int
    """Descriptor of the socket of the data port."""
    life: int
    """Descriptor of the socket to the parent, see `hear_parent`."""

    @property
    def home(self) -> Path:
        return Path(self.folder)

    @property
    def admin_socket(self) -> Path:
        return self.home / "admin.sock"

    @property
    def peer_socket(self) -> Path:
        return self.home / "peer.sock"

    @property
    def last_metrics(self) -> Path:
        """What it counted until its end, in Prometheus' text."""
        return self.home / "last.prom"

    @property
    def secret(self) -> bytes:
        return (self.home.parent / SECRET_FILE).read_bytes()

    @property
    def leases(self) -> Path:
        return self.home.parent / LEASES_FILE

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()


def seat_in(environ: Mapping[str, str]) -> WorkerSeat | None:
    """The seat of this process; None: it is no worker."""
    text = environ.get(SEAT_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=WorkerSeat)


class Parent:
    """A worker's line to its parent. If the parent is gone, the worker drains and ends."""

    def __init__(self, seat: WorkerSeat, hears: Mapping[bytes, Callable[[], None]]) -> None:
        """`hears`: what to do on `DRAIN`, `END_AT_ONCE`, `RELOAD` and `DUMP`."""
        self._socket = socket.socket(fileno=os.dup(seat.life))
        os.close(seat.life)
        self._socket.setblocking(False)
        self._hears = hears
        asyncio.get_running_loop().add_reader(self._socket, self._readable)

    def say_ready(self) -> None:
        self._socket.send(READY)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _readable(self) -> None:
        try:
            said = self._socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(self._socket)
            said = DRAIN
        for word in said:
            self._hears[bytes((word,))]()
