"""`fairshare serve --workers N`: the process that starts the workers, watches them and answers on the admin port.

Workers are replicas, as machines are; this process decides nothing about requests. Each worker listens on a socket of
its own for the one address (SO_REUSEPORT: the operating system spreads the connections). This process opens these
sockets and keeps them, so that a worker that is replaced leaves no connection behind.
"""

import asyncio
import itertools
import logging
import secrets
import shutil
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
import uvloop
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fairshare import clock
from fairshare.config import ConfigError, Settings, load
from fairshare.errors import OperatorError
from fairshare.gateway.admin import AdminServer
from fairshare.gateway.listening import bound_to, listening_socket
from fairshare.gateway.machine import MachineAdmin, Member, WorkerSilent, fetched
from fairshare.gateway.merged import PoolJson, Totals, deciding_workers
from fairshare.gateway.metrics import WORKER_DEATHS, WORKERS
from fairshare.gateway.options import Address
from fairshare.gateway.replication import REMEMBERED_ENDS
from fairshare.gateway.seat import (
    DRAIN,
    DUMP,
    END_AT_ONCE,
    ENDED_FILE,
    HEAR_ENDED,
    LEASES_FILE,
    RELOAD,
    SEAT_VARIABLE,
    WorkerSeat,
    machine_folder,
    replica_name,
)
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database, StoreTooNew, StoreUnavailable

log = logging.getLogger("fairshare.workers")

LONG_LIFE_SECONDS = 30.0
"""A worker that lived so long is started again at once when it dies."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

POLL_SECONDS = 1.0
"""How often the workers' counters are read: what a worker counted since is lost when it is killed."""

HANGS_SECONDS = 5.0
"""A worker that has not answered for so long is a finding."""

SPARE_SECONDS = 10.0
"""Beyond the drain's limit, before a worker that does not end is killed."""


LONGEST_FOLDER = 80
"""Characters: a Unix socket's name has 107 at most, and the workers' are below this folder."""


@dataclass(slots=True)
class Restarts:
    """When a worker that died is started again. Pure."""

    in_a_row: int = 0
    """Deaths of workers that had not lived long."""

    def died(self, *, lived_seconds: float) -> float:
        """A worker died; how many seconds to wait before the next: none the first time."""
        self.in_a_row = 1 if lived_seconds >= LONG_LIFE_SECONDS else self.in_a_row + 1
        if self.in_a_row == 1:
            return 0.0
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (self.in_a_row - 2))


@dataclass(slots=True, eq=False)
class _Worker:
    """One process."""

    seat: WorkerSeat
    process: Process
    life: socket.socket
    started_at: float
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    shown: str = ""
    """Its metrics, as it showed them last."""
    silent_since: float | None = None
    """Since when it has not answered; None: it answers."""

    def say(self, word: bytes) -> None:
        with suppress(OSError):  # it is gone, as its end tells
            self.life.send(word)


@dataclass(slots=True, eq=False)
class _Place:
    """A place for one worker."""

    index: int
    listening: socket.socket | None = None
    worker: _Worker | None = None
    restarts: Restarts = field(default_factory=Restarts)
    trouble: str = ""
    """How the worker that should be here ended."""


def run_workers(path: Path, environ: Mapping[str, str], *, count: int, arguments: Sequence[str]) -> None:
    """Serve with several workers until SIGTERM or SIGINT.

    Args:
        arguments: what a worker is started with, behind `fairshare`.

    Raises:
        OperatorError: an address cannot be listened on, or no worker could start.
    """
    parent = Workers(path, environ, arguments, count)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(parent.run())


class Workers:
    """The workers of one machine."""

    def __init__(self, path: Path, environ: Mapping[str, str], arguments: Sequence[str], count: int) -> None:
        self._path = path
        self._environ = environ
        self._arguments = arguments
        self._settings: Settings = load(path, environ)
        self._places = [_Place(index) for index in range(count)]
        self._living: set[_Worker] = set()
        self._ports: set[int] = set()
        """Which of the machine's ports for peers are taken, counted from the first."""
        self._folder = Path()
        self._listen: Address = self._settings.gateway.listen
        self._started = 0
        self._deaths = 0
        self._deciding: list[str] = []
        """Names of workers that decide for pools, as they were polled last."""
        self._ended = Totals()
        self._ended_replicas: list[str] = []
        self._ending = False
        self._ever_ready = False
        """Whether a worker could start with this configuration at all; from then on whoever dies is started again."""
        self._all_ready = asyncio.Event()
        self._none_starts = asyncio.Event()
        self._admin = AdminServer(
            MachineAdmin(self._members, ended=self._ended, own_metrics=self._own_metrics, findings=self._findings).app
        )

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Until SIGTERM or SIGINT: the first drains, the second ends at once.

        SIGHUP has every worker read the configuration again, SIGUSR1 has each write a dump of its state; SIGUSR2
        replaces the workers, one after the other.
        """
        loop = asyncio.get_running_loop()
        ending, replacing = asyncio.Event(), asyncio.Event()

        def end() -> None:
            self._say_to_all(END_AT_ONCE if ending.is_set() else DRAIN)
            ending.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR1, self._say_to_all, DUMP)
        loop.add_signal_handler(signal.SIGUSR2, replacing.set)
        with (
            machine_folder() as folder,
            listening_socket(self._settings.gateway.admin.address, purpose="the admin port") as admin_socket,
        ):
            self._folder = folder
            if len(str(folder)) > LONGEST_FOLDER:
                raise OperatorError(
                    f"the folder for temporary files is too long for the names of the workers' sockets ({folder}); set "
                    "TMPDIR to a shorter one"
                )
            await self._migrate()
            admin_at = bound_to(admin_socket)
            admin_serves = asyncio.create_task(self._admin.run_on(admin_socket.dup()))
            # Sockets that are shared would join those of another gateway that listens there; one that is not tells.
            listening_socket(self._listen, purpose="the data port").close()
            for place in self._places:
                self._open(place)
            tasks = [
                asyncio.create_task(each)
                for each in (
                    *(self._keep(place) for place in self._places),
                    self._keep_polling(),
                    self._replace_whenever(replacing),
                )
            ]
            saying = asyncio.create_task(self._say_when_ready(admin_at))
            watches = [asyncio.create_task(event.wait()) for event in (ending, self._none_starts)]
            try:
                done, _ = await asyncio.wait((*watches, *tasks), return_when=asyncio.FIRST_COMPLETED)
                self._ending = True
                await self._end_all()
            finally:
                for worker in self._living:
                    worker.process.kill()
                for task in (saying, *tasks, *watches):
                    task.cancel()
                await asyncio.gather(saying, *tasks, *watches, return_exceptions=True)
                self._admin.stop()
                await admin_serves
                for place in self._places:
                    self._close(place)
        for task in done.intersection(tasks):
            await task  # a fault of ours
        if self._none_starts.is_set():
            raise OperatorError("no worker could start; what they logged says why")
        log.info("Ended.")

    async def _migrate(self) -> None:
        """Bring the store to what this version needs before several workers find it empty or old at once."""
        store = self._settings.gateway.store
        database = Database(SqliteFile(self._folder / LEASES_FILE) if store is None else store.address)
        try:
            await database.migrate()
        except (StoreUnavailable, StoreTooNew) as error:
            # The workers say so too, and know which of it they can do without.
            log.debug("%s", error)
        finally:
            await database.close()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(worker) for worker in self._living))

    async def _end(self, worker: _Worker) -> None:
        """It drains and ends; one that hangs does not."""
        worker.say(DRAIN)
        limit_seconds = self._settings.gateway.limits.drain_seconds + SPARE_SECONDS
        try:
            async with asyncio.timeout(limit_seconds):
                await worker.gone.wait()
        except TimeoutError:
            log.error(
                "Worker %d (process %d) has not ended within %g s and is killed.",
                worker.seat.index,
                worker.process.pid,
                limit_seconds,
            )
            with suppress(ProcessLookupError):  # it has ended just now
                worker.process.kill()
            await worker.gone.wait()

    async def _say_when_ready(self, admin_at: Address) -> None:
        await self._all_ready.wait()
        log.info(
            "fairshare %s is ready with %d workers; its status page is http://%s/",
            version("fairshare"),
            len(self._places),
            admin_at,
            extra={
                "listen": str(self._listen),
                "admin": str(admin_at),
                "pools": ",".join(pool.name for pool in self._settings.gateway.pools),
            },
        )

    def _say_to_all(self, word: bytes) -> None:
        for worker in self._living:
            worker.say(word)

    def _reload(self) -> None:
        """Each worker reads the configuration; what this process needs of it, it reads too."""
        with suppress(ConfigError):  # the workers say what is wrong with it, and it stays as it was
            self._settings = load(self._path, self._environ)
        self._say_to_all(RELOAD)

    # ------------------------------------------------------------------ workers

    async def _keep(self, place: _Place) -> None:
        """Have a worker in this place, whatever happens to it."""
        while not self._ending:
            worker = place.worker = place.worker or await self._start(place)
            await worker.gone.wait()
            if place.worker is not worker:
                continue  # it was replaced, and ended as it was told
            place.worker = None
            if self._ending:
                break
            if not self._ever_ready and not worker.ready.is_set():
                self._none_starts.set()
                await asyncio.Event().wait()
            self._deaths += 1
            place.trouble = _how_it_ended(worker.process.returncode)
            pause_seconds = place.restarts.died(lived_seconds=clock.monotonic() - worker.started_at)
            log.error(
                "Worker %d (process %d) %s; another one is started %s.",
                place.index,
                worker.process.pid,
                place.trouble,
                f"in {pause_seconds:g} s" if pause_seconds else "at once",
            )
            if pause_seconds:
                # The operating system must not give it connections that nobody takes.
                self._close(place)
                await asyncio.sleep(pause_seconds)
                self._open(place)

    async def _start(self, place: _Place) -> _Worker:
        self._started += 1
        name = f"{place.index}-{self._started}"
        # Not its place's: there are two workers in one while it is replaced.
        port = next(number for number in itertools.count() if number not in self._ports)
        self._ports.add(port)
        folder = self._folder / name
        folder.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        assert place.listening is not None
        seat = WorkerSeat(
            index=place.index,
            workers=len(self._places),
            name=name,
            port=port,
            token=secrets.token_hex(4),
            folder=str(folder),
            listening=place.listening.fileno(),
            life=theirs.fileno(),
        )
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "fairshare",
                *self._arguments,
                env={**self._environ, SEAT_VARIABLE: seat.encoded()},
                pass_fds=(seat.listening, seat.life),
                # Ctrl-C in a terminal is for this process, which tells them.
                start_new_session=True,
            )
        worker = _Worker(seat, process, ours, clock.monotonic())
        self._living.add(worker)
        asyncio.get_running_loop().add_reader(ours, self._hear, worker)
        asyncio.create_task(self._bury(worker)).add_done_callback(_tell_fault)
        return worker

    def _hear(self, worker: _Worker) -> None:
        try:
            said = worker.life.recv(64)
        except OSError:
            said = b""
        if said:
            worker.ready.set()
            self._ever_ready = True
            self._places[worker.seat.index].trouble = ""
            if self._ready() == len(self._places):
                self._all_ready.set()
        else:
            asyncio.get_running_loop().remove_reader(worker.life)

    async def _bury(self, worker: _Worker) -> None:
        """Wait for its end, and keep what it had counted."""
        await worker.process.wait()
        asyncio.get_running_loop().remove_reader(worker.life)
        worker.life.close()
        self._living.discard(worker)
        self._ports.discard(worker.seat.port)
        last = worker.seat.last_metrics
        self._ended.add(last.read_text("utf-8") if last.exists() else worker.shown)
        shutil.rmtree(worker.seat.home, ignore_errors=True)
        self._tell_ended(replica_name(worker.process.pid, worker.seat.token))
        worker.gone.set()

    def _tell_ended(self, replica: str) -> None:
        """Its sockets to engines are closed, so they abort what it ran: no owner keeps slots for it."""
        self._ended_replicas = [*self._ended_replicas, replica][-REMEMBERED_ENDS:]
        # Whole or not at all: a worker that starts may be reading it.
        new = self._folder / f"{ENDED_FILE}.new"
        new.write_bytes(msgspec.json.encode(self._ended_replicas))
        new.replace(self._folder / ENDED_FILE)
        self._say_to_all(HEAR_ENDED)

    async def _replace_whenever(self, wanted: asyncio.Event) -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            if all([await self._replace(place) for place in self._places]):
                log.info("Every worker was replaced.")

    async def _replace(self, place: _Place) -> bool:
        """A new worker takes the place; when it is ready, the old one drains and ends. False: the old one stays."""
        old = place.worker
        if old is None or place.listening is None:
            return True  # a new one is on its way anyway
        new = await self._start(place)
        ready, gone = (asyncio.create_task(event.wait()) for event in (new.ready, new.gone))
        await asyncio.wait((ready, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, gone):
            task.cancel()
        if new.gone.is_set():
            log.error("Worker %d was not replaced: the new one %s.", place.index, _how_it_ended(new.process.returncode))
            return False
        if place.worker is old:
            place.worker = new
            await self._end(old)
        else:
            new.say(DRAIN)  # the old one died meanwhile, and there is another
        return True

    # ------------------------------------------------------------------ sockets

    def _open(self, place: _Place) -> None:
        place.listening = listening_socket(self._listen, purpose="the data port", shared=True)
        # Whoever comes next listens where the first does, also if the operating system chose the port.
        self._listen = bound_to(place.listening)

    @staticmethod
    def _close(place: _Place) -> None:
        if place.listening is not None:
            place.listening.close()
            place.listening = None

    # ------------------------------------------------------------------ what it shows

    def _members(self) -> list[Member]:
        """Those that are ready, first those that decide for pools."""
        ready = [worker for worker in self._living if worker.ready.is_set()]
        ready.sort(key=lambda worker: (worker.seat.name not in self._deciding, worker.seat.index))
        return [Member(worker.seat.name, worker.seat.admin_socket) for worker in ready]

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            polled = [worker for worker in self._living if worker.ready.is_set()]
            shown = await asyncio.gather(*(self._poll(worker) for worker in polled))
            pools = {worker.seat.name: each for worker, each in zip(polled, shown, strict=True) if each is not None}
            self._deciding = list(deciding_workers(pools).values())

    async def _poll(self, worker: _Worker) -> list[PoolJson] | None:
        """The pools as it shows them; None: it does not answer."""
        asked_at = clock.monotonic()
        try:
            worker.shown = (await self._ask(worker, "/metrics")).decode()
            pools = msgspec.json.decode(await self._ask(worker, "/api/v1/pools"), type=list[PoolJson])
        except WorkerSilent:
            if worker.silent_since is None:
                worker.silent_since = asked_at
            return None
        worker.silent_since = None
        return pools

    async def _ask(self, worker: _Worker, path: str) -> bytes:
        headers = [(b"Host", b"localhost")]
        key = self._settings.gateway.admin.key
        if key is not None:
            headers.append((b"Authorization", f"Bearer {key}".encode()))
        async with fetched(worker.seat.admin_socket, "GET", path, headers) as answer:
            if answer.status != 200:
                raise WorkerSilent(f"it answers {answer.status}")
            return await answer.read()

    def _ready(self) -> int:
        return sum(place.worker is not None and place.worker.ready.is_set() for place in self._places)

    def _own_metrics(self) -> list[Metric]:
        return [
            GaugeMetricFamily(WORKERS.name, WORKERS.help, self._ready()),
            CounterMetricFamily(WORKER_DEATHS.name, WORKER_DEATHS.help, self._deaths),
        ]

    def _findings(self) -> list[str]:
        now = clock.monotonic()
        found = [
            f"Worker {worker.seat.index} (process {worker.process.pid}) has not answered for {seconds:.0f} s: what is "
            "connected to it waits. If that does not end, kill it; another one is started at once."
            for worker in sorted(self._living, key=lambda worker: worker.seat.index)
            if (seconds := 0.0 if worker.silent_since is None else now - worker.silent_since) >= HANGS_SECONDS
        ]
        found += [
            f"Worker {place.index} {place.trouble} and is not back yet ({place.restarts.in_a_row} deaths in a row); "
            "the others serve. The log says why it ended."
            for place in self._places
            if place.trouble
        ]
        return found


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _tell_fault(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("Watching a worker failed inside fairshare.", exc_info=error)
