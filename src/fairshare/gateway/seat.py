"""What the parent of a machine's workers gives to each of them."""

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fairshare.errors import OperatorError

SEAT_VARIABLE = "FAIRSHARE_WORKER"
"""The environment variable in which a worker finds its seat; set by the parent only."""

log = logging.getLogger("fairshare.workers")

FOLDER_PREFIX = "fairshare-"
"""Of the names of machines' folders, among all that is temporary."""

SECRET_FILE = "secret"
"""In the machine's folder: what its workers prove themselves to each other with."""

LEASES_FILE = "leases.sqlite3"
"""In the machine's folder: where the workers keep their leases if no store is configured."""

ENDED_FILE = "ended.json"
"""In the machine's folder: the names of the replicas that its workers were, and that ended, the newest last."""

DRAIN = b"d"
END_AT_ONCE = b"e"
RELOAD = b"r"
DUMP = b"u"
HEAR_ENDED = b"x"
"""`WorkerSeat.ended` has one more."""
READY = b"y"


class WorkerSeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker among those of a machine."""

    index: int
    """Its place, from 0."""
    workers: int
    """How many places there are."""
    name: str
    """Tells it from those that had its place before."""
    port: int
    """How far behind the first of the machine's ports for peers its own is: no two that live have the same."""
    token: str
    """Makes the name of its replica unlike any other ever."""
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

    @property
    def ended(self) -> list[str]:
        """Replicas whose process has ended, as the parent saw."""
        path = self.home.parent / ENDED_FILE
        return msgspec.json.decode(path.read_bytes(), type=list[str]) if path.exists() else []

    def leave(self) -> None:
        """Without a parent, which would do it: remove what is this worker's; the last one that lives removes it all."""
        shutil.rmtree(self.home, ignore_errors=True)
        machine = self.home.parent
        if not _has_living_workers(machine):
            shutil.rmtree(machine, ignore_errors=True)

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()


@contextmanager
def machine_folder() -> Generator[Path]:
    """The folder of one machine's workers, for the parent; gone with it."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        taken = _taken(folder)
        try:
            # Last: whoever looks for what is left behind passes over a folder without it.
            secret = folder / SECRET_FILE
            secret.touch(mode=0o600)
            secret.write_bytes(secrets.token_bytes(32))
            yield folder
        finally:
            os.close(taken)


def _remove_abandoned() -> None:
    """Where a parent and its workers were killed at once, nobody was left to remove their folder."""
    for secret in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{SECRET_FILE}"):
        machine = secret.parent
        try:
            is_ours = machine.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue  # another one that starts was faster
        if is_ours and not _lives(machine) and not _has_living_workers(machine):
            shutil.rmtree(machine, ignore_errors=True)
            log.info("Removed %s: the gateway that it belonged to was killed.", machine)


def _taken(folder: Path) -> int:
    """Take a folder: a descriptor, which the system closes when this process ends, also if it is killed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _has_living_workers(machine: Path) -> bool:
    return any(_lives(path) for path in machine.glob("*") if path.is_dir())


def _lives(folder: Path) -> bool:
    """Whether a process has taken this folder and has not ended, however."""
    try:
        taken = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False  # it leaves, too
    try:
        fcntl.flock(taken, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(taken)
    return False


def replica_name(pid: int, token: str) -> str:
    """What this process is called among replicas; `token` is of this life of it."""
    return f"{socket.gethostname()}-{pid}-{token}"


def seat_in(environ: Mapping[str, str]) -> WorkerSeat | None:
    """The seat of this process; None: it is no worker."""
    text = environ.get(SEAT_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=WorkerSeat)


class Parent:
    """A worker's line to its parent. If the parent is gone, the worker drains and ends."""

    def __init__(self, seat: WorkerSeat, hears: Mapping[bytes, Callable[[], None]]) -> None:
        """`hears`: what to do on `DRAIN`, `END_AT_ONCE`, `RELOAD`, `DUMP` and `HEAR_ENDED`.

        Raises:
            OperatorError: the parent is gone, and the last of its workers has removed the seat.
        """
        self._seat = seat
        self._is_gone = False
        try:
            self._taken = _taken(seat.home)
        except FileNotFoundError:
            raise OperatorError("the process that started this worker was killed meanwhile") from None
        self._socket = socket.socket(fileno=os.dup(seat.life))
        os.close(seat.life)
        self._socket.setblocking(False)
        self._hears = hears
        asyncio.get_running_loop().add_reader(self._socket, self._readable)

    def say_ready(self) -> None:
        self._socket.send(READY)

    def close(self) -> None:
        """This worker ends."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        os.close(self._taken)
        if self._is_gone:
            self._seat.leave()

    def _readable(self) -> None:
        try:
            said = self._socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._is_gone = True
            said = DRAIN
        for word in said:
            self._hears[bytes((word,))]()
