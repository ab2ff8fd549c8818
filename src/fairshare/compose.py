"""The composition root: builds a gateway from its settings, starts it, reloads it, drains it, ends it.

Everything that decides runs on one event loop's thread; only the configuration is read on another.
"""

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from fractions import Fraction
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from fairshare import clock
from fairshare.accounts.gate import SoftPassed
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts
from fairshare.config import ConfigError, Settings, instances_in, load
from fairshare.core.decisions import DispatchQueue, Mode
from fairshare.core.dispatch import changed_queue, make_queue
from fairshare.core.pool import Pool
from fairshare.dashboard import status_pages
from fairshare.gateway.access_log import AccessLog
from fairshare.gateway.accounts import LiveAccounts
from fairshare.gateway.accounts_api import AccountsApi
from fairshare.gateway.admin import AdminServer, admin_app
from fairshare.gateway.data_port import DataPort
from fairshare.gateway.discovery.api import InstancesApi
from fairshare.gateway.discovery.keeper import FleetKeeper
from fairshare.gateway.discovery.opening import open_source
from fairshare.gateway.driver import PoolDriver
from fairshare.gateway.engine_http import Failure
from fairshare.gateway.explain import Explainer
from fairshare.gateway.history import History
from fairshare.gateway.identity import StaticDirectory, identities_of, new_key
from fairshare.gateway.instances import Capacity, InstanceSupervisor
from fairshare.gateway.ledger import Ledger
from fairshare.gateway.listening import bound_to, listening_socket, private_socket
from fairshare.gateway.live import Live
from fairshare.gateway.logins import FailedLogins
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.options import GatewaySpec, Level, PoolSpec, StoreSpec, TracingSpec
from fairshare.gateway.phantoms_api import PhantomsApi
from fairshare.gateway.ports import LedgerCounts, Recorders
from fairshare.gateway.replication import ReplicaSpec, Replication
from fairshare.gateway.seat import DRAIN, DUMP, END_AT_ONCE, HEAR_ENDED, RELOAD, Parent, WorkerSeat, replica_name
from fairshare.gateway.state_dump import DumpParts, StateDump, written
from fairshare.gateway.status import BudgetStatus, PoolStatus, pool_status
from fairshare.gateway.status_api import StatusApi, StatusParts
from fairshare.gateway.tls import engine_context, peer_tls, server_context, show, show_to_peers
from fairshare.gateway.webhook import Webhook
from fairshare.replicas.lease import groups
from fairshare.replicas.member import MemberOptions
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.peers import PeerAddress, PeerTls
from fairshare.replicas.replica import ReplicaOptions
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import SqliteFile
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import Database, StoreUnavailable
from fairshare.storage.history import HistoryStore
from fairshare.storage.ledger import LedgerStore

if TYPE_CHECKING:
    from fairshare.gateway.tracing import Tracing

log = logging.getLogger("fairshare")

DESCRIPTORS_PER_REQUEST = 2
"""One connection of the client's, one to the engine."""

COLLECT_AFTER_OBJECTS = 50_000
"""Between two looks for cyclic garbage, so many more objects than were freed must have been made."""

SPARE_DESCRIPTORS = 200
"""For listening sockets, health checks, the admin port and files."""


def run(path: Path, environ: Mapping[str, str], seat: WorkerSeat | None = None) -> None:
    """Serve until SIGTERM or SIGINT; as a worker, until its parent says so, too.

    Raises:
        OperatorError: the gateway cannot start.
    """
    settings = load(path, environ)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, environ, seat))


async def serve(settings: Settings, environ: Mapping[str, str], seat: WorkerSeat | None = None) -> None:
    """Serve until SIGTERM or SIGINT: the first drains, the second ends at once. SIGHUP reads the settings again,
    SIGUSR1 writes a dump of the decision state.

    A worker never ends at once by a signal: a service manager may send it the same one as its parent, which tells it.
    """
    loop = asyncio.get_running_loop()
    ending, at_once, reload_wanted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def end() -> None:
        (at_once if ending.is_set() and seat is None else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, reload_wanted.set)
    parent: Parent | None = None
    if seat is not None:
        # First: from now on nobody else removes the folder in which the seat's files are.
        hears = {
            DRAIN: ending.set,
            END_AT_ONCE: at_once.set,
            RELOAD: reload_wanted.set,
            DUMP: lambda: gateway.dump(),
            HEAR_ENDED: lambda: gateway.hear_ended(),
        }
        parent = Parent(seat, hears)
    gateway = Gateway(settings, seat)
    loop.add_signal_handler(signal.SIGUSR1, gateway.dump)

    try:
        await gateway.start()
        if parent is not None:
            parent.say_ready()
        relieve_collector()
        reloads = asyncio.create_task(_reload_when_wanted(gateway, reload_wanted, settings.path, environ))
        await ending.wait()
        reloads.cancel()
        await _first_of(gateway.drain(), at_once.wait())
    finally:
        await gateway.stop()
        if parent is not None:
            parent.close()


def _tracing(spec: TracingSpec) -> "Tracing":
    # OpenTelemetry is an extra, and takes a third of a second to import.
    from fairshare.gateway.tracing import Tracing

    return Tracing(spec)


def relieve_collector() -> None:
    """Keep the collector of cyclic garbage from going over everything again and again while requests come and go.

    Requests make hundreds of objects but no cycles, so all that it would find at its usual pace is nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


async def _reload_when_wanted(
    gateway: "Gateway", wanted: asyncio.Event, path: Path, environ: Mapping[str, str]
) -> None:
    while True:
        await wanted.wait()
        wanted.clear()
        try:
            await gateway.reload(await asyncio.to_thread(load, path, environ))
        except ConfigError as error:
            for problem in error.problems:
                log.error("%s", problem)
            log.error("The configuration was not reloaded; the one from before stays in force.")
        except Exception:
            # Serving must outlive whatever a reload runs into.
            log.exception("Reloading the configuration failed inside fairshare; parts of it may be in force.")


async def _write_dump(content: bytes) -> None:
    path = await asyncio.to_thread(written, content, process=os.getpid())
    log.info("The decision state was written.", extra={"file": str(path)})


def _dump_written(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("The decision state could not be written: %s", error)


async def _first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Runs them until one is done, and cancels the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Composed:
    """One pool, and what belongs to it."""

    spec: PoolSpec
    """As configured; what instances it has now is in `keeper.spec`."""
    pool: Pool
    """With replicas it only keeps what is configured: what decides is another one, here or elsewhere."""
    queue: DispatchQueue
    """Of that pool."""
    supervisor: InstanceSupervisor
    keeper: FleetKeeper
    driven: DispatchQueue
    """What the driver drives: `queue`, or what stands for it among replicas."""


class _SharedCapacity:
    """C of a pool that replicas share: of what is configured here, and of what decides here now."""

    def __init__(self, configured: Pool, deciding: Callable[[], tuple[Pool, int]]) -> None:
        """`deciding`: the pool that decides, and over what part of C (1/n)."""
        self._configured = configured
        self._deciding = deciding

    @property
    def capacity(self) -> int:
        return self._configured.capacity

    def set_capacity(self, capacity: int) -> int:
        pool, parts = self._deciding()
        if pool is not self._configured:
            pool.set_capacity(part_of(capacity, parts))
        return self._configured.set_capacity(capacity)


def part_of(capacity: int, parts: int) -> int:
    """C of one of so many replicas that decide alone."""
    return capacity if parts == 1 else max(1, capacity // parts)


class Gateway:
    """The parts of one gateway process, wired: `start`, any number of `reload`, `drain`, `stop`."""

    def __init__(self, settings: Settings, seat: WorkerSeat | None = None) -> None:
        """`seat`: it is one of several workers; the parent has its sockets."""
        self._settings = settings
        self._seat = seat
        self._spec = settings.gateway
        self._composed: dict[str, _Composed] = {}
        self._serving = False
        self._ledger: Ledger | None = None
        self._accounts: LiveAccounts | None = None
        self._audit: AccountStore | None = None
        self._history_store: HistoryStore | None = None
        self._ledger_store: LedgerStore | None = None
        self._borrowing: frozenset[str] = frozenset()
        """Owners (as `team:search`) that are over a soft budget and may only borrow."""
        self._teams: tuple[str, ...] = ()
        """Those of the store that have labels."""
        self._webhook = None if self._spec.notify is None else Webhook(self._spec.notify, wall=clock.wall)
        api: AccountsApi | None = None
        if self._spec.store is not None:
            self._ledger, self._accounts, api = self._accounting(self._spec.store)
        self._directory = self._accounts or StaticDirectory.of(self._spec.teams)
        self._metrics = Metrics(self.pools, lambda: self._driver.counters, self._ledger_counts)
        self._access_log = None if self._spec.access_log is None else AccessLog(self._spec.access_log.path)
        self._tracing = None if self._spec.tracing is None else _tracing(self._spec.tracing)
        recorders = (self._metrics, self._ledger, self._accounts, self._access_log, self._tracing)
        self._driver = PoolDriver(recorder=Recorders(*(each for each in recorders if each is not None)))
        self._driver.tracer = self._tracing
        self._driver.on_unreachable = self._unreachable
        self._peer_tls: PeerTls | None = None
        self._replication = self._replicated(self._spec, seat)
        self._history = History(
            store=self._history_store,
            recalls=lambda: self._driver.decisions.recalls,
        )
        self._live = Live(pools=self.pools, budgets=self._budgets, history=self._history, wall=clock.wall)
        self._data_port = DataPort(
            driver=self._driver, directory=self._directory, admission=self._accounts, limits=self._spec.limits
        )
        self._dump = StateDump(
            DumpParts(
                driver=self._driver,
                pools=self.pools,
                budgets=self._budgets,
                ledger=self._ledger_counts,
                wall=clock.wall,
            )
        )
        self._admin_logins = FailedLogins()
        self._admin = AdminServer(
            admin_app(
                pools=self.pools,
                metrics=self._metrics,
                not_ready=self.not_ready,
                pages=status_pages(),
                key=lambda: self._spec.admin.key,
                status=self._status_api().routes(),
                dump=self._dump.routes(),
                instances=[
                    *InstancesApi(self._keeper, self._changed_by).routes(),
                    *PhantomsApi(lambda: list(self._composed), lambda: self._replication, self._changed_by).routes(),
                ],
                accounts=[] if api is None else api.routes(),
                operator=lambda sha256: None if self._accounts is None else self._accounts.operator(sha256),
                logins=self._admin_logins,
                clock=self._driver.clock,
            )
        )
        self._tls: ssl.SSLContext | None = None
        """What the data port shows; None: it speaks plain HTTP."""
        self._admin_serves: asyncio.Task[None] | None = None
        self.listening_at = self._spec.listen
        """Where the data port listens, once it is started."""
        self.admin_at = self._spec.admin.address

    # ------------------------------------------------------------------ what it shows

    def pools(self) -> list[PoolStatus]:
        """The state of every pool, in the order of the configuration."""
        return [self._as_its_owner_sees_it(status) for status in self._pools_here()]

    def _as_its_owner_sees_it(self, status: PoolStatus) -> PoolStatus:
        """With other machines: what is in flight, held and used is known to the owner only."""
        seen = None if self._replication is None else self._replication.seen(status.name)
        if seen is None:
            return status
        return msgspec.structs.replace(
            seen,
            findings=status.findings,
            finding_details=status.finding_details,
            replication=status.replication,
        )

    def _pools_here(self) -> list[PoolStatus]:
        of_the_store = [each.finding() for each in (self._ledger, self._accounts, self._history) if each is not None]
        return [
            pool_status(
                composed.keeper.spec,
                composed.driven.pool,
                composed.driven,
                composed.supervisor,
                findings=[finding for finding in of_the_store if finding is not None],
                replication=None if self._replication is None else self._replication.status(composed.spec.name),
            )
            for composed in (self._composed.get(spec.name) for spec in self._spec.pools)
            if composed is not None
        ]

    def not_ready(self) -> str | None:
        """Why it should get no traffic now; None: it should."""
        if not self._serving:
            return "the gateway is starting or shutting down"
        reports = [report for composed in self._composed.values() for report in composed.supervisor.reports()]
        if not any(report.healthy for report in reports):
            return "no engine is healthy"
        return None

    def dump(self) -> None:
        """Write the decision state to a file, and say where it is."""
        # The file is written on another thread, and may be late: the state is that of now.
        asyncio.create_task(_write_dump(self._dump.encoded())).add_done_callback(_dump_written)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen and serve. Raises `OperatorError` if an address cannot be listened on."""
        spec = self._spec
        for warning in self._settings.warnings:
            log.warning("%s", warning)
        self._data_port.descriptors_allow = _connections_that_fit(spec.limits.max_connections)
        with self._data_socket() as data_socket:
            admin_socket = self._admin_socket()
            # The admin port first: whoever started us can see that we live, and why we are not ready yet.
            self._admin_serves = asyncio.create_task(self._admin.run_on(admin_socket))
            self._metrics.configure(spec)
            if self._replication is not None:
                await self._replication.start()
                self.hear_ended()
            for pool_spec in _fallbacks_first(spec.pools):
                self._add(pool_spec)
            if self._replication is not None:
                self._share(self._replication)
            # Usage first: the first request must not find its team with a clean slate.
            if self._ledger is not None:
                await self._ledger.start()
            if self._accounts is not None:
                await self._accounts.start()
                if self._replication is not None:
                    self._replication.share_counts(self._accounts.share(self._replication.name))
            if self._webhook is not None:
                self._webhook.start()
            await self._live.start()
            for each in (self._access_log, self._tracing):
                if each is not None:
                    each.start()
            await asyncio.gather(*(composed.keeper.start() for composed in self._composed.values()))
            if self._replication is not None:
                await self._replication.wait_for_owners()
            if spec.tls is not None:
                self._tls = server_context(spec.tls)
            self.listening_at = await self._data_port.start(spec.listen, sock=data_socket.dup(), tls=self._tls)
        self._serving = True
        if self._seat is not None:
            log.info("The worker serves.")
            return
        log.info(
            "fairshare %s is ready; its status page is http://%s/",
            version("fairshare"),
            self.admin_at,
            extra={
                "listen": str(self.listening_at),
                "admin": str(self.admin_at),
                "pools": ",".join(pool.name for pool in spec.pools),
            },
        )

    def _data_socket(self) -> socket.socket:
        if self._seat is not None:
            return socket.socket(fileno=self._seat.listening)
        return listening_socket(self._spec.listen, purpose="the data port")

    def _admin_socket(self) -> socket.socket:
        if self._seat is not None:
            return private_socket(self._seat.admin_socket)
        admin_socket = listening_socket(self._spec.admin.address, purpose="the admin port")
        self.admin_at = bound_to(admin_socket)
        return admin_socket

    def hear_ended(self) -> None:
        """Workers of this machine have ended, as the parent saw."""
        if self._seat is not None and self._replication is not None:
            self._replication.ended(self._seat.ended)

    async def drain(self) -> None:
        """Accept nothing more, and let what was accepted finish, up to the limit of the configuration."""
        self._serving = False
        limit_seconds = self._spec.limits.drain_seconds
        drained_by = clock.monotonic() + limit_seconds
        log.info(
            "Draining: %d requests may take up to %g s more; a second signal ends at once.",
            self._driver.open_requests,
            limit_seconds,
        )
        if self._replication is not None:
            self._replication.hand_over()
        await self._data_port.drain(limit_seconds)
        if self._replication is not None:
            # Nobody may own the pools now, while the store is away, say: what is left of the time is for that.
            await self._replication.saved(drained_by - clock.monotonic())

    async def stop(self) -> None:
        """End everything. Afterwards nothing is in flight, held or listening."""
        self._serving = False
        await asyncio.gather(*(composed.keeper.stop() for composed in self._composed.values()))
        await self._data_port.close()
        if self._replication is not None:
            await self._replication.stop()
        await self._live.stop()
        for each in (self._access_log, self._tracing):
            if each is not None:
                await asyncio.to_thread(each.stop)
        if self._webhook is not None:
            await self._webhook.stop()
        if self._accounts is not None:
            await self._accounts.stop()
        if self._ledger is not None:
            await self._ledger.stop()
        if self._seat is not None:
            self._seat.last_metrics.write_bytes(b"".join(self._metrics.exposition()))
        self._admin.stop()
        if self._admin_serves is not None:
            await self._admin_serves
        log.info("Ended.")

    # ------------------------------------------------------------------ reload

    async def reload(self, settings: Settings) -> None:
        """Put other settings in force. What runs and what is held goes on; keys and teams switch at once.

        Raises:
            ConfigError: nothing was changed.
        """
        spec = self._keeping_shared(self._keeping_addresses(settings.gateway))
        for warning in settings.warnings:
            log.warning("%s", warning)
        self._show_certificates(spec)
        wanted = {pool.name for pool in spec.pools}
        added = [pool.name for pool in spec.pools if pool.name not in self._composed]
        removed = [name for name in self._composed if name not in wanted]
        changed = [
            pool.name for pool in spec.pools if pool.name in self._composed and self._composed[pool.name].spec != pool
        ]
        redispatched = self._dispatching_differently(spec.pools)
        for pool_spec in _fallbacks_first(spec.pools):
            if pool_spec.name in added:
                self._add(pool_spec)
            elif pool_spec.name in redispatched:
                self._dispatch_differently(pool_spec)
        self._directory.replace(identities_of(spec.teams))
        self._metrics.configure(spec, self._teams)
        self._data_port.update(spec.limits)
        self._spec = spec
        for name in removed:
            composed = self._composed.pop(name)
            await composed.keeper.stop()
            self._driver.remove_pool(name)
        by_name = {pool.name: pool for pool in spec.pools}
        await asyncio.gather(
            *(self._composed[name].keeper.start() for name in added),
            *(self._change(by_name[name]) for name in changed),
        )
        if self._replication is not None:
            self._replication.tell_configured()
        log.info(
            "The configuration was reloaded: pools added: %s; changed: %s; removed: %s; %d teams, %d keys.",
            ", ".join(added) or "none",
            ", ".join(changed) or "none",
            ", ".join(removed) or "none",
            len(spec.teams),
            sum(len(team.keys) for team in spec.teams),
        )

    def _show_certificates(self, spec: GatewaySpec) -> None:
        """From now on new connections see what the files hold now: they may have other content under the same names."""
        peers = None if spec.replicas is None else spec.replicas.tls
        try:
            # A context changes as it reads. So all is tried before, or what fails would leave some old and some new.
            if spec.tls is not None:
                server_context(spec.tls)
            if peers is not None:
                peer_tls(peers)
        except OSError as error:
            raise ConfigError(
                (
                    f"tls or replicas.tls: a certificate cannot be used ({error}). If replicas changed, the files that "
                    "it named before are needed until the restart.",
                )
            ) from None
        engine_context.cache_clear()
        if self._tls is not None and spec.tls is not None:
            show(self._tls, spec.tls)
        if self._peer_tls is not None and peers is not None:
            show_to_peers(self._peer_tls, peers)

    def _keeping_addresses(self, spec: GatewaySpec) -> GatewaySpec:
        """Addresses stay what they are until a restart; an admin key stays with the address that it guards."""
        old = self._spec
        for name in ("store", "notify", "replicas", "access_log", "tracing"):
            if getattr(spec, name) != getattr(old, name):
                log.warning("%s changed; this needs a restart.", name)
                spec = replace(spec, **{name: getattr(old, name)})
        if (spec.tls is None) != (old.tls is None):
            log.warning("tls was %s; this needs a restart.", "removed" if spec.tls is None else "added")
            spec = replace(spec, tls=old.tls)
        if spec.listen != old.listen:
            log.warning("listen changed from %s to %s; this needs a restart.", old.listen, spec.listen)
        if spec.admin.address != old.admin.address:
            log.warning("admin changed from %s to %s; this needs a restart.", old.admin.address, spec.admin.address)
            return replace(spec, listen=old.listen, admin=old.admin)
        return replace(spec, listen=old.listen)

    def _keeping_shared(self, spec: GatewaySpec) -> GatewaySpec:
        """Which pools there are, and how they dispatch, stays while replicas share them: all must agree on it."""
        old = {pool.name: pool for pool in self._spec.pools}
        new = {pool.name: pool for pool in spec.pools}
        if self._replication is None or (old.keys() == new.keys() and not self._dispatching_differently(spec.pools)):
            return spec
        log.warning(
            "Pools came or went, or their dispatch, hold or fallback changed; with replicas this needs a restart of "
            "each, one after the other. The pools stay as they were; the rest is in force."
        )
        return replace(spec, pools=self._spec.pools)

    def _dispatching_differently(self, pools: Iterable[PoolSpec]) -> set[str]:
        """The running pools whose mode, options or fallback changed."""
        running = {name: composed.spec for name, composed in self._composed.items()}
        return {
            spec.name
            for spec in pools
            if (old := running.get(spec.name)) is not None
            and (old.mode, old.hold, old.fallback) != (spec.mode, spec.hold, spec.fallback)
        }

    async def _change(self, spec: PoolSpec) -> None:
        """Change a running pool; usage and what is in flight stay."""
        composed = self._composed[spec.name]
        composed.spec = spec
        for pool in self._pools_of(composed):
            pool.set_shares(self._shares(spec))
            if pool.half_life_seconds != spec.half_life_seconds:
                pool.set_half_life(spec.half_life_seconds)
        self._driver.update_pool(spec)
        if self._replication is not None:
            self._replication.allow(spec.name, spec.timeouts.longest_request_seconds)
        await composed.keeper.reconfigure(spec)
        self._driver.capacity_changed(spec.name)

    def _dispatch_differently(self, spec: PoolSpec) -> None:
        composed = self._composed[spec.name]
        composed.queue = composed.driven = changed_queue(
            composed.queue, spec.mode, options=spec.hold, fallback=self._fallback_of(spec)
        )
        self._driver.replace_queue(spec.name, composed.queue)

    # ------------------------------------------------------------------ building

    def _accounting(self, spec: StoreSpec) -> tuple[Ledger, LiveAccounts, AccountsApi]:
        database = Database(spec.address)
        self._audit = AccountStore(database)
        self._history_store = HistoryStore(database)
        self._ledger_store = LedgerStore(database)
        ledger = Ledger(
            database,
            pools=self._pools_of_the_ledger,
            wall=clock.wall,
            keep_seconds=spec.keep_seconds,
            names=lambda key_id: None if self._accounts is None else self._accounts.names(key_id),
        )
        accounts = LiveAccounts(
            AccountStore(database),
            ConsumptionStore(database),
            ledger,
            configured=identities_of(self._spec.teams),
            wall=clock.wall,
            ticked=self._accounts_ticked,
            told=self._tell,
        )
        service = Accounts(AccountStore(database), wall=clock.wall, new_secret=lambda: new_key(secrets.token_bytes))
        return ledger, accounts, AccountsApi(service, spec.address, clock.wall)

    def _status_api(self) -> StatusApi:
        return StatusApi(
            StatusParts(
                live=self._live,
                history=self._history,
                explainer=Explainer(
                    log=self._driver.decisions,
                    history=self._history,
                    clock=self._driver.clock,
                    wall=clock.wall,
                    written=None if self._ledger_store is None else self._ledger_store.with_id,
                    alone=self._replication is None,
                ),
                log=self._driver.decisions,
                directory=self._directory,
                budgets_of=self._budgets,
                level_of=self._level,
                team_of=self._team_of_key,
                logins=self._admin_logins,
                clock=self._driver.clock,
            )
        )

    def _budgets(self, owners: Sequence[str] | None = None) -> list[BudgetStatus]:
        return [] if self._accounts is None else self._accounts.budgets(owners)

    def _level(self, pool: str) -> Level | None:
        composed = self._composed.get(pool)
        return None if composed is None else composed.spec.level

    def _team_of_key(self, key_id: str) -> str | None:
        names = None if self._accounts is None else self._accounts.names(key_id)
        return None if names is None else names.team

    def _tell(self, passed: SoftPassed) -> None:
        if self._webhook is not None:
            self._webhook.tell(passed)

    def _accounts_ticked(self) -> None:
        """The store was looked at: other teams may have labels, and others may only borrow."""
        assert self._accounts is not None
        teams = self._accounts.teams()
        if teams is not self._teams:
            self._teams = teams
            self._metrics.configure(self._spec, teams)
        borrowing = self._accounts.borrowing()
        if borrowing != self._borrowing:
            self._borrowing = borrowing
            for name, composed in self._composed.items():
                for pool in self._pools_of(composed):
                    pool.set_shares(self._shares(composed.spec))
                self._driver.capacity_changed(name)

    def _shares(self, spec: PoolSpec) -> dict[str, Fraction]:
        """A pool's shares now: a team that may only borrow owns nothing of it for the time."""
        return {
            team: Fraction(0) if f"{spec.level}:{team}" in self._borrowing else share
            for team, share in spec.shares.items()
        }

    def _ledger_counts(self) -> LedgerCounts | None:
        return None if self._ledger is None else self._ledger.counts()

    def _unreachable(self, pool: str, instance_id: str, failure: Failure, detail: str) -> None:
        composed = self._composed.get(pool)
        if composed is not None:
            composed.supervisor.connection_failed(instance_id, failure, detail)

    def _keeper(self, pool: str) -> FleetKeeper | None:
        composed = self._composed.get(pool)
        return None if composed is None else composed.keeper

    async def _changed_by(self, actor: Actor, action: str, target: str) -> None:
        """Somebody changed a pool by hand. A store that is down must not keep an operator from it."""
        if self._audit is None:
            return
        try:
            async with self._audit.changing(actor=actor.name, at=clock.wall()) as change:
                await change.noted(action, target=target)
        except StoreUnavailable:
            log.warning("%s: %s %s is not in the audit, because the store does not answer", actor.name, action, target)

    def _add(self, spec: PoolSpec) -> None:
        pool = Pool(spec.name, spec.capacity, self._shares(spec), spec.half_life_seconds, self._driver.clock)
        queue = make_queue(pool, spec.mode, options=spec.hold, fallback=self._fallback_of(spec))
        capacity: Capacity = pool
        if self._replication is None:
            self._driver.add_pool(spec, queue)
        else:
            capacity = _SharedCapacity(pool, partial(self._replication.deciding, spec.name))
        supervisor = InstanceSupervisor(
            spec,
            pool=capacity,
            driver=self._driver,
            also_found=lambda: keeper.found(),
            decides=partial(self._decides, spec.name),
        )
        keeper = FleetKeeper(spec, supervisor=supervisor, open_source=partial(open_source, parse=instances_in))
        self._composed[spec.name] = _Composed(spec, pool, queue, supervisor, keeper, queue)
        if self._ledger is not None and self._replication is None:
            self._ledger.restore_usage(pool)

    def _decides(self, pool: str) -> bool:
        """Whether this process decides for the whole pool now."""
        return self._replication is None or self._replication.status(pool).role == "owner"

    # ------------------------------------------------------------------ replicas

    def _replicated(self, spec: GatewaySpec, seat: WorkerSeat | None) -> Replication | None:
        """Shares the pools with other workers of this machine, or with other machines; None: it serves alone."""
        if seat is None and spec.replicas is None:
            return None
        name = replica_name(os.getpid(), secrets.token_hex(4) if seat is None else seat.token)
        if spec.replicas is not None:
            assert spec.store is not None, "the configuration says so"
            listen, advertise, secret = spec.replicas.listen, spec.replicas.advertise, spec.replicas.secret
            self._peer_tls = None if spec.replicas.tls is None else peer_tls(spec.replicas.tls)
            # Each worker of a machine has a port of its own.
            behind = 0 if seat is None else seat.port
            place = PeerAddress(listen.host, listen.port + behind if listen.port else 0)
            if advertise is not None and behind:
                host, _, port = advertise.rpartition(":")
                advertise = f"{host}:{int(port) + behind}"
        else:
            assert seat is not None
            place, advertise, secret = PeerAddress("", 0, str(seat.peer_socket)), None, seat.secret
        if spec.store is not None:
            address = spec.store.address
        else:
            assert seat is not None
            address = SqliteFile(seat.leases)
        return Replication(
            ReplicaSpec(name=name, listen=place, advertise=advertise, secret=secret, tls=self._peer_tls),
            database=Database(address),
            decided=self._driver.decided,
            new_queues=self._new_queues,
            shown=lambda names: [status for status in self._live.last().pools if status.name in names],
            configured=lambda: {name: _configured(each.spec) for name, each in self._composed.items()},
            clock=self._driver.clock,
        )

    def _share(self, replication: Replication) -> None:
        """Every pool belongs to the replicas together from now on."""
        machines = 1 if self._spec.replicas is None else self._spec.replicas.machines
        expected = machines * (1 if self._seat is None else self._seat.workers)
        for lease, names in groups({name: each.spec.fallback for name, each in self._composed.items()}).items():
            members = [self._composed[name] for name in names]
            longest_seconds = max(each.spec.timeouts.longest_request_seconds for each in members)
            options = MemberOptions(
                owner=OwnerOptions(longest_request_seconds=longest_seconds),
                replica=ReplicaOptions(replicas_expected=expected),
            )
            replication.add(lease, {each.spec.name: each.queue for each in members}, options)
        for spec in _fallbacks_first(self._spec.pools):
            composed = self._composed[spec.name]
            composed.driven = replication.queue(spec.name)
            self._driver.add_pool(spec, composed.driven)

    def _new_queues(self, names: Sequence[str], parts: int) -> dict[str, DispatchQueue]:
        """Fresh queues of these pools as they are now, for an owner (parts: 1) or a replica that decides alone."""
        queues: dict[str, DispatchQueue] = {}
        for spec in _fallbacks_first(self._composed[name].spec for name in names):
            composed = self._composed[spec.name]
            capacity = part_of(composed.pool.capacity, parts)
            pool = Pool(spec.name, capacity, self._shares(spec), spec.half_life_seconds, self._driver.clock)
            queues[spec.name] = make_queue(
                pool,
                spec.mode,
                options=spec.hold,
                instances=composed.supervisor.told(),
                fallback=None if spec.fallback is None else queues[spec.fallback],
            )
        return queues

    def _pools_of(self, composed: _Composed) -> set[Pool]:
        """What is configured, and what decides."""
        return {composed.pool, composed.driven.pool}

    def _pools_of_the_ledger(self) -> dict[str, Pool]:
        """Whose usage is saved with the account: with replicas, the owner of a pool saves it, with its epoch."""
        return {} if self._replication is not None else {name: each.pool for name, each in self._composed.items()}

    def _fallback_of(self, spec: PoolSpec) -> DispatchQueue | None:
        return None if spec.fallback is None else self._composed[spec.fallback].queue


def _configured(spec: PoolSpec) -> dict[str, str]:
    """What replicas must have alike of a pool, as text; addresses of engines may be named differently."""
    hold = {f"hold.{name}": str(value) for name, value in asdict(spec.hold).items()} if spec.mode is Mode.HOLD else {}
    return {
        "capacity": str(spec.capacity_per_instance or spec.capacity),
        "half_life": f"{spec.half_life_seconds:g}",
        "shares": ", ".join(f"{team} {share}" for team, share in sorted(spec.shares.items())),
        "models": ", ".join(f"{model} {served}" for model, served in sorted(spec.models.items())),
        "dispatch": str(spec.mode),
        "fallback": str(spec.fallback),
        "cost": str(astuple(spec.cost)),
        "timeouts.longest_request": f"{spec.timeouts.longest_request_seconds:g}",
        **hold,
    }


def _fallbacks_first(pools: Iterable[PoolSpec]) -> list[PoolSpec]:
    """The pools in an order in which a pool comes after its fallback. There is no circle: the configuration says so."""
    by_name = {pool.name: pool for pool in pools}
    ordered: dict[str, PoolSpec] = {}

    def add(pool: PoolSpec) -> None:
        if pool.fallback is not None:
            add(by_name[pool.fallback])
        ordered.setdefault(pool.name, pool)

    for pool in by_name.values():
        add(pool)
    return list(ordered.values())


def _connections_that_fit(max_connections: int) -> int:
    """Raise the limit of open files as far as the machine allows; returns how many clients they are enough for.

    Every open stream takes two. Beyond that clients are told so at once: a process that has none left could not even
    accept a connection to say it.
    """
    needed = DESCRIPTORS_PER_REQUEST * max_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = hard if hard != resource.RLIM_INFINITY else needed
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, allowed), hard))
    if allowed < needed:
        log.warning(
            "limits.max_connections is %d, which may need %d open files, but the system allows %d; raise it "
            "(LimitNOFILE, ulimit -n) or lower max_connections.",
            max_connections,
            needed,
            allowed,
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    # Under a limit as low as this nobody runs a gateway, but it should still say what is wrong.
    spare = min(SPARE_DESCRIPTORS, soft // 2)
    return max(1, (soft - spare) // DESCRIPTORS_PER_REQUEST)
