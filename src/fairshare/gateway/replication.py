"""This process as a replica: moves bytes between its members and their peers, keeps their time, asks the store.

All that decides is in `fairshare.replicas`. Everything is on the event loop's thread.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from fairshare.accounts.fleet import REPORT_SECONDS, Fleet
from fairshare.clock import Clock, monotonic, wall
from fairshare.core.decisions import Decision, DispatchQueue
from fairshare.core.pool import Pool
from fairshare.gateway.status import PoolStatus, ReplicationStatus
from fairshare.replicas.lease import CallKind, Lease
from fairshare.replicas.link import Codec as MessageCodec
from fairshare.replicas.link import LinkOptions, PeerLink
from fairshare.replicas.member import (
    LeaseCall,
    LeftBehind,
    LoadCall,
    Member,
    MemberOptions,
    Role,
    Router,
    SaveCall,
    StoreCall,
)
from fairshare.replicas.messages import VERSION, Asked, Codec, OnLink, Told
from fairshare.replicas.peers import PeerAddress, PeerPort, PeerTls
from fairshare.storage.database import Database, StoreReplaced, StoreUnavailable
from fairshare.storage.leases import LeaseRow, LeaseStore

log = logging.getLogger("fairshare.replicas")

SHORTEST_TIMER_SECONDS = 0.001
"""A deadline that rounding puts a moment too early must not spin the loop."""

LAST_SAVE_SECONDS = 8.0
"""How long a replica that ends waits at least for the last charges to be saved: if the owner is killed at this moment,
until there is another one."""

FIRST_OWNER_SECONDS = 8.0
"""How long a replica that starts waits for somebody to own its pools: longer than a lease lasts."""

REMEMBERED_ENDS = 256
"""How many of the processes of a machine that ended by themselves are told to a new owner: the last ones."""

HESITATE_SECONDS = 0.25
"""A replica leaves a free lease for so long, for each that it owns, to another that owns fewer: pools are spread."""

MOST_HESITATIONS = 3

SHOW_SECONDS = 1.0
"""How often a replica asks the owner on another machine what its pools look like."""

STALE_SECONDS = 5.0
"""What an owner said longer ago is not shown any more."""

ANSWER_SECONDS = 3.0
"""How long an operator's question may take at the owner."""

Configured = Mapping[str, Mapping[str, str]]
"""Pool → what is configured of it → its value, as text."""


CODECS: dict[int, MessageCodec[OnLink]] = {VERSION: Codec()}
"""The versions of the protocol that this program speaks: the newest, and the one before, if there was one."""


class About(StrEnum):
    """What replicas tell and ask each other beside what the members say."""

    COUNTS = "counts"
    """Told: what a replica counted of limits and budgets, as `Fleet` says it."""
    ENDED = "ended"
    """Told: the names (JSON) of replicas whose process has ended for certain."""
    CONFIGURED = "configured"
    """Told: `Configured` (JSON)."""
    POOLS = "pools"
    """Asked: the state of the pools of a lease, which is named. The answer is JSON of `PoolStatus`."""
    CLEAR_PHANTOMS = "clear phantoms"
    """Asked of an owner: `Member.clear_phantoms` for a pool, which is named. The answer is JSON of what it returns."""


class NotCleared(StrEnum):
    """Why phantoms of a pool were not cleared."""

    NO_OWNER = "no owner"
    """Nobody decides who could be reached."""
    SILENT = "silent"
    """The owner did not answer in time."""
    OLDER = "older"
    """The owner runs a version that does not know the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """Who this replica is, and where."""

    name: str
    """Of this life of this process, unlike any other ever."""
    listen: PeerAddress
    advertise: str | None
    """Where peers reach it; None: where it listens."""
    secret: bytes = field(repr=False)
    tls: PeerTls | None = None


class Replication:
    """One per process: the members of all leases, and their one port."""

    def __init__(
        self,
        spec: ReplicaSpec,
        *,
        database: Database,
        decided: Callable[[str, list[Decision]], None],
        new_queues: Callable[[Sequence[str], int], Mapping[str, DispatchQueue]],
        shown: Callable[[Sequence[str]], Sequence[PoolStatus]] = lambda _: (),
        configured: Callable[[], Configured] = dict,
        clock: Clock = monotonic,
    ) -> None:
        """
        Args:
            shown: the state of these pools, as this process knows it.
            configured: how the pools are configured here.
            database: where leases are.
            decided: `PoolDriver.decided`.
            new_queues: makes fresh queues of these pools over C / n slots, given n.
        """
        self._spec = spec
        self._database = database
        self._store = LeaseStore(database)
        self._decided = decided
        self._new_queues = new_queues
        self._shown = shown
        self._configured = configured
        self._configured_there: dict[str, Configured] = {}
        """Peer → what it told."""
        self._unread: set[tuple[str, str]] = set()
        """Peer, and what it told or asked that could not be read: said once in the log."""
        self._asked: dict[int, asyncio.Future[dict[str, int] | NotCleared]] = {}
        """Questions whose answers are waited for."""
        self._next_question = 1
        self._seen: dict[str, tuple[float, PoolStatus]] = {}
        """Pool → when its owner said what it looks like, and what."""
        self._fleet: Fleet | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.clock = clock
        self._rearms_soon = False
        self._router = Router(self._other)
        self._of_pool: dict[str, _Ports] = {}
        self._ended: list[str] = []
        """Replicas of this machine whose process has ended, the newest last."""
        self._links: dict[str, list[PeerLink[OnLink]]] = {}
        self._address = ""
        self._is_migrated = False
        self._acquiring: list[str] = []
        """Leases that nobody seems to own and that this replica asks for now, in this order."""
        self._calls: set[asyncio.Task[None]] = set()
        self._dialled: dict[str, PeerAddress] = {}
        """Lease → where its owner is."""
        options = LinkOptions[OnLink](
            replica=spec.name, secret=spec.secret, codecs=CODECS, clock=clock, nonce=os.urandom
        )
        self._port = PeerPort(options, self, fraction=random.random, tls=spec.tls)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen for peers. Raises `OperatorError` if the address cannot be used."""
        self._address = str(await self._port.start(self._spec.listen))
        if self._spec.advertise is not None:
            self._address = self._spec.advertise
        self._tasks.append(asyncio.create_task(self._keep_asking()))

    def share_counts(self, fleet: Fleet) -> None:
        """Count limits and budgets together with the other replicas from now on."""
        self._fleet = fleet
        self._tasks.append(asyncio.create_task(self._keep_counting(fleet)))
        for peer in self._links:
            self._tell_all_counts(peer)

    def add(self, lease: str, settings: Mapping[str, DispatchQueue], options: MemberOptions) -> None:
        """A group of pools to share, once `wait_for_owners` is called.

        `settings`: their queues as this process would drive them alone; nobody does.
        """
        ports = _Ports(self, lease)
        member = Member(
            lease=lease,
            replica=self._spec.name,
            address=self._address,
            settings=settings,
            ports=ports,
            options=options,
        )
        ports.take(member)
        self._router.add(member)
        for pool in settings:
            self._of_pool[pool] = ports
        for replica in self._ended:
            member.ended(replica)
        for peer in self._links:
            member.connected(peer)

    def queue(self, pool: str) -> DispatchQueue:
        """What the driver drives for a pool, whoever owns it."""
        return self._of_pool[pool].member.queue(pool)

    def deciding(self, pool: str) -> tuple[Pool, int]:
        """The pool whose queue decides in this process, or the idle one of the settings; and over what part of C."""
        member = self._of_pool[pool].member
        parts = member.status().replicas if member.role is Role.DEGRADED else 1
        return member.queue(pool).pool, parts

    def ended(self, replicas: Iterable[str]) -> None:
        """These processes of this machine have ended, as their parent saw: nothing of theirs runs at an engine."""
        news = [replica for replica in replicas if replica not in self._ended]
        self._ended = [*self._ended, *news][-REMEMBERED_ENDS:]
        self._take_ended(news)
        for peer in self._links:
            self._tell_ended(peer)

    async def clear_phantoms(self, pool: str) -> dict[str, int] | NotCleared:
        """See `Owner.clear_phantoms`, wherever the owner is."""
        member = self._of_pool[pool].member
        if member.owns:
            cleared = member.clear_phantoms(pool)
            self._rearm()
            return NotCleared.NO_OWNER if cleared is None else cleared
        owner = member.status().owner
        if owner not in self._links:
            return NotCleared.NO_OWNER
        number, self._next_question = self._next_question, self._next_question + 1
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(owner, Asked(number, About.CLEAR_PHANTOMS, pool.encode()))
        # Every version answers this. If it is the first that is answered, the owner passed over the one before.
        self.send(owner, Asked(number, About.POOLS, member.lease.encode()))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            return NotCleared.SILENT
        finally:
            del self._asked[number]

    def allow(self, pool: str, longest_request_seconds: float) -> None:
        """See `Member.allow`: what is not heard of counts as phantoms for so long."""
        self._of_pool[pool].member.allow(longest_request_seconds)

    def tell_configured(self) -> None:
        """The configuration changed here."""
        for peer in self._links:
            self._tell_configured(peer)

    async def wait_for_owners(self) -> None:
        """Take part from now on, and wait until somebody decides for every pool, but not for ever: without a store
        there is nobody.

        Not before this process knows which instances there are: it may become the owner at once, and would deny what
        all others could serve.
        """
        for ports in set(self._of_pool.values()):
            ports.begin()
        try:
            async with asyncio.timeout(FIRST_OWNER_SECONDS):
                for ports in set(self._of_pool.values()):
                    await ports.settled.wait()
        except TimeoutError:
            log.error("Nobody owns every pool yet; this replica starts all the same.")

    def hand_over(self) -> None:
        """This replica is going: others own its pools from now on, if there are others."""
        for ports in set(self._of_pool.values()):
            ports.member.drain()
            ports.rearm()

    async def saved(self, patience_seconds: float) -> bool:
        """After `hand_over`: wait until all that was charged here is saved. False: it was not in time."""
        all_ports = set(self._of_pool.values())
        try:
            async with asyncio.timeout(patience_seconds):
                while not all(ports.is_done for ports in all_ports):
                    for ports in all_ports:
                        if ports.member.owns and not ports.member.status().unsaved_charges:
                            ports.member.drain()  # it had taken the lease because nobody else did
                            ports.rearm()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Wait a little until what was charged here is saved, and end."""
        all_ports = set(self._of_pool.values())
        if not await self.saved(LAST_SAVE_SECONDS):
            log.error(
                "%d charges are lost to the usage of teams: no owner saved them in time.",
                sum(ports.member.status().unsaved_charges for ports in all_ports),
            )
        for ports in all_ports:
            ports.stop()
        tasks = [*self._calls, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._port.close()
        await self._database.close()

    # ------------------------------------------------------------------ what it shows

    @property
    def name(self) -> str:
        """Of this life of this process, unlike any other ever."""
        return self._spec.name

    def status(self, pool: str) -> ReplicationStatus:
        """What this replica is to a pool."""
        status = self._of_pool[pool].member.status()
        return ReplicationStatus(
            replica=self._spec.name,
            role=status.role.value,
            owner=status.owner,
            epoch=status.epoch,
            lease=status.lease,
            replicas=status.replicas,
            since_seconds=status.since_seconds,
            unsaved_charges=status.unsaved_charges,
            degraded_grants=status.degraded_grants_total,
            phantom_slots=status.phantom_slots,
            peers=sorted(self._links),
            unreachable=self.unreachable(),
            differing=self._differing(pool),
        )

    def _differing(self, pool: str) -> list[str]:
        """Replicas that have the pool configured differently, each with in what. What only one side knows is alike."""
        here = self._configured().get(pool)
        if here is None:
            return []
        found: list[str] = []
        for peer, pools in sorted(self._configured_there.items()):
            there = pools.get(pool)
            names = [name for name, value in here.items() if (there or {}).get(name, value) != value]
            if names or there is None:
                found.append(f"{peer}: {', '.join(names) or 'it has no such pool'}")
        return found

    def unreachable(self) -> list[str]:
        """The peers that this replica dials in vain, and why."""
        found = [f"{address}: {why}" for address, why in self._port.failures.items()]
        for member in self._router.members:
            owner, address = member.status().owner, self._dialled.get(member.lease)
            there = None if address is None else self._port.answering(address)
            if there is not None and owner not in (there, self._spec.name) and owner not in self._links:
                who = "this replica itself" if there == self._spec.name else f"replica {there}"
                found.append(f"{address}: {who} answers there, and not {owner}; does each advertise its own address?")
        return found

    def seen(self, pool: str) -> PoolStatus | None:
        """A pool as its owner on another machine sees it; None: it is owned here, or the owner is not heard of."""
        if self._of_pool[pool].member.role is not Role.FOLLOWER:
            return None
        at, status = self._seen.get(pool, (float("-inf"), None))
        return status if at + STALE_SECONDS > self.clock() else None

    # ------------------------------------------------------------------ links (`Handler`)

    def connected(self, link: PeerLink[OnLink]) -> None:
        links = self._links.setdefault(link.peer, [])
        links.append(link)
        if len(links) == 1:
            self._begin(link.peer)
            self._rearm()

    def _begin(self, peer: str) -> None:
        """There is a link to say things on, where there was none, or what was on its way on another is lost."""
        self._router.connected(peer)
        self._tell_all_counts(peer)
        self._tell_ended(peer)
        self._tell_configured(peer)

    def disconnected(self, link: PeerLink[OnLink], reason: str) -> None:
        # Whatever was on its way on this link is lost. With a second one both sides begin anew, on that.
        links = self._links[link.peer]
        links.remove(link)
        if not links:
            del self._links[link.peer]
            self._configured_there.pop(link.peer, None)
            self._unread = {(peer, about) for peer, about in self._unread if peer != link.peer}
        self._router.disconnected(link.peer)
        if links:
            self._begin(link.peer)
        self._rearm()

    def received(self, link: PeerLink[OnLink], messages: list[OnLink]) -> None:
        self._router.received(link.peer, messages)
        self.rearm_soon()

    def send(self, peer: str, message: OnLink) -> None:
        links = self._links.get(peer)
        if links:
            links[0].send(message)

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(SHOW_SECONDS)
            for member in self._router.members:
                if member.role is Role.FOLLOWER:
                    self.send(member.status().owner, Asked(0, About.POOLS, member.lease.encode()))

    def _other(self, peer: str, message: Asked | Told) -> None:
        """What members do not look into. A newer version may ask and tell more."""
        try:
            self._hear(peer, message)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Another version says it differently. Nothing of it is needed to share pools, so the link stays.
            if (peer, message.about) not in self._unread:
                self._unread.add((peer, message.about))
                log.warning(
                    "replica %s says %r in a way that this version does not read: %s", peer, message.about, error
                )

    def _hear(self, peer: str, message: Asked | Told) -> None:
        match message:
            case Told(about=About.COUNTS):
                self._hear_counts(peer, message.content)
            case Told(about=About.ENDED):
                self._take_ended(msgspec.json.decode(message.content, type=list[str]))
            case Told(about=About.CONFIGURED):
                self._configured_there[peer] = msgspec.json.decode(message.content, type=dict[str, dict[str, str]])
            case Told(about=About.POOLS):
                self._answer(message.number, NotCleared.OLDER)
                for status in msgspec.json.decode(message.content, type=list[PoolStatus]):
                    self._seen[status.name] = (self.clock(), status)
            case Told(about=About.CLEAR_PHANTOMS):
                cleared = msgspec.json.decode(message.content, type=dict[str, int] | None)
                self._answer(message.number, NotCleared.NO_OWNER if cleared is None else cleared)
            case Asked(about=About.POOLS):
                for member in self._router.members:
                    if member.lease.encode() == message.content and member.owns:
                        self.send(
                            peer, Told(message.number, About.POOLS, msgspec.json.encode(self._shown(member.pools)))
                        )
            case Asked(about=About.CLEAR_PHANTOMS):
                ports = self._of_pool.get(message.content.decode())
                cleared = None if ports is None else ports.member.clear_phantoms(message.content.decode())
                self.send(peer, Told(message.number, About.CLEAR_PHANTOMS, msgspec.json.encode(cleared)))
            case _:
                pass

    def _answer(self, number: int, found: dict[str, int] | NotCleared) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def _tell_configured(self, peer: str) -> None:
        self.send(peer, Told(0, About.CONFIGURED, msgspec.json.encode(self._configured())))

    def _tell_ended(self, peer: str) -> None:
        """The owner may be on another machine, where nobody else saw it."""
        if self._ended:
            self.send(peer, Told(0, About.ENDED, msgspec.json.encode(self._ended)))

    def _take_ended(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            self._router.ended(replica)
        self._rearm()

    async def _keep_counting(self, fleet: Fleet) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._tell_counts(fleet.report(wall()))

    def _tell_counts(self, report: bytes, *, but: str | None = None) -> None:
        for peer in self._links:
            if peer != but:
                self.send(peer, Told(0, About.COUNTS, report))

    def _tell_all_counts(self, peer: str) -> None:
        if self._fleet is not None:
            for report in self._fleet.whole(wall()):
                self.send(peer, Told(0, About.COUNTS, report))

    def _hear_counts(self, peer: str, report: bytes) -> None:
        if self._fleet is None:
            return
        news = self._fleet.hear(report, wall())
        if news:
            self._tell_counts(report, but=peer)

    def rearm_soon(self) -> None:
        """One look at all deadlines for everything that happens within the shortest timer, which none can beat."""
        if not self._rearms_soon:
            self._rearms_soon = True
            asyncio.get_running_loop().call_later(SHORTEST_TIMER_SECONDS, self._rearm)

    def _rearm(self) -> None:
        self._rearms_soon = False
        for ports in set(self._of_pool.values()):
            ports.rearm()

    # ------------------------------------------------------------------ what members ask for

    def dial(self, lease: str, address: str) -> None:
        """The owner of a lease is there."""
        try:
            wanted = PeerAddress.parse(address)
        except ValueError as error:
            log.error("lease %s: its owner cannot be reached: %s", lease, error)
            return
        before = self._dialled.get(lease)
        self._dialled[lease] = wanted
        if before is not None and before not in self._dialled.values():
            self._port.hang_up(before)
        self._port.dial(wanted)

    def fresh_queues(self, pools: Sequence[str], parts: int) -> Mapping[str, DispatchQueue]:
        return self._new_queues(pools, parts)

    def decided(self, pool: str, decisions: list[Decision]) -> None:
        self._decided(pool, decisions)

    def call(self, call: StoreCall, answered: Callable[[StoreCall, Lease | LeftBehind | bool | None], None]) -> None:
        async def carry_out() -> None:
            answer: Lease | LeftBehind | bool | None = None
            try:
                answer = await self._carried_out(call)
            except StoreUnavailable as error:
                if isinstance(error, StoreReplaced):
                    self._is_migrated = False
                log.debug("lease %s: %s", call.lease, error)
            except Exception:
                # Members must go on, whatever one call runs into.
                log.exception("lease %s: asking the store failed inside fairshare", call.lease)
            answered(call, answer)

        task = asyncio.create_task(carry_out())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _carried_out(self, call: StoreCall) -> Lease | LeftBehind | bool:
        if not self._is_migrated:
            await self._database.migrate()
            self._is_migrated = True
        match call:
            case LeaseCall():
                return await self._lease_called(call)
            case LoadCall():
                left = await self._store.left_behind(call.lease, epoch=call.epoch, pools=call.pools)
                return False if left is None else LeftBehind(usage=left.usage, state=left.state)
            case SaveCall():
                return await self._store.save(call.lease, epoch=call.epoch, used=call.used, state=call.state)

    async def _hesitate(self, lease: str) -> None:
        """Let others ask first for a lease that may be free, if this replica owns more than none."""
        members = {member.lease: member for member in self._router.members}
        if members[lease].role is Role.FOLLOWER:
            return  # somebody owns it, and this call only looks whether that is still so
        began = self.clock()
        while True:
            owned = sum(member.role in (Role.OWNER, Role.TAKING) for member in members.values())
            burden = min(owned + self._acquiring.index(lease), MOST_HESITATIONS)
            if self.clock() - began >= burden * HESITATE_SECONDS:
                return
            await asyncio.sleep(HESITATE_SECONDS / 10)

    async def _lease_called(self, call: LeaseCall) -> Lease:
        store, lease = self._store, call.lease
        match call.call.kind:
            case CallKind.ACQUIRE:
                self._acquiring.append(lease)
                try:
                    await self._hesitate(lease)
                    row = await store.acquire(lease, owner=call.owner, address=call.address, seconds=call.seconds)
                finally:
                    self._acquiring.remove(lease)
            case CallKind.RENEW:
                row = await store.renew(lease, epoch=call.call.epoch, seconds=call.seconds)
            case CallKind.RELEASE:
                row = await store.release(lease, epoch=call.call.epoch)
            case CallKind.LOOK:
                row = await store.look(lease)
        return _lease(row)


class _Ports:
    """What one member calls; and its timer."""

    def __init__(self, replication: Replication, lease: str) -> None:
        self._replication = replication
        self._lease = lease
        self.clock = replication.clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_soon = False
        self._role = self._said_role = Role.WAITING
        """What it is, and what the log said last that it is."""
        self._said: tuple[str, int] | None = None
        """The owner, and its epoch, that the log named last."""
        self._has_begun = self._ended = False
        self.member: Member
        self.settled = asyncio.Event()
        """Somebody decides."""

    def take(self, member: Member) -> None:
        self.member = member

    # ------------------------------------------------------------------ `Ports`

    def send(self, peer: str, message: OnLink) -> None:
        self._replication.send(peer, message)

    def decided(self, decisions: list[Decision]) -> None:
        self._replication.decided(self.member.pools[0], decisions)

    def soon(self) -> None:
        if not self._is_soon:
            self._is_soon = True
            asyncio.get_running_loop().call_soon(self._flush)

    def call(self, call: StoreCall) -> None:
        self._replication.call(call, self._answered)

    def owner_is(self, lease: str, owner: str, address: str) -> None:
        self._replication.dial(lease, address)

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        return self._replication.fresh_queues(self.member.pools, parts)

    # ------------------------------------------------------------------ time

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.member.begin()
            self.rearm()

    def tick(self) -> None:
        self.member.tick()
        self.rearm()

    def rearm(self) -> None:
        """One timer, at what comes first; one that is too early only ticks in vain, so it is never moved later."""
        if self._ended or not self._has_begun:
            return
        self._say_role()
        deadline = self.member.next_deadline()
        if self._timer is not None and deadline >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline == float("inf"):
            return
        delay_seconds = max(SHORTEST_TIMER_SECONDS, deadline - self.clock())
        self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._due)
        self._timer_at = deadline

    def stop(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_done(self) -> bool:
        """Nothing of it is lost if the process ends now."""
        return self.member.drained and not self.member.status().unsaved_charges

    def _due(self) -> None:
        self._timer = None
        self.tick()

    def _flush(self) -> None:
        self._is_soon = False
        self.member.flush()
        self._replication.rearm_soon()

    def _answered(self, call: StoreCall, answer: Lease | LeftBehind | bool | None) -> None:
        self.member.answered(call, answer)
        self.rearm()

    def _say_role(self) -> None:
        """One log line for each change of what this replica is to its pools."""
        role = self.member.role
        if role is self._role:
            return
        self._role = role
        if role in (Role.TAKING, Role.WAITING):
            return  # for a moment; one that decides alone asks again and again whether there is an owner
        before, self._said_role = self._said_role, role
        if role in (Role.OWNER, Role.FOLLOWER):
            self.settled.set()
        elif role is before:
            return
        status = self.member.status()
        pools = ", ".join(self.member.pools)
        if role in (Role.OWNER, Role.FOLLOWER):
            owned = (status.owner, status.epoch)
            if owned != self._said or before in (Role.DEGRADED, Role.NO_OWNER):
                who = "This replica" if role is Role.OWNER else f"Replica {status.owner}"
                log.info("%s decides for %s now, epoch %d.", who, pools, status.epoch)
            self._said = owned
            return
        match role:
            case Role.DEGRADED:
                log.error(
                    "Nobody decides for %s who could be reached%s: this replica decides alone, over 1/%d of the slots, "
                    "until there is an owner again.",
                    pools,
                    f" ({'; '.join(unreachable)})" if (unreachable := self._replication.unreachable()) else "",
                    status.replicas,
                )
            case Role.NO_OWNER:
                log.error("There was no owner of %s for too long: new requests are refused (no_owner).", pools)


def _lease(row: LeaseRow | None) -> Lease:
    return Lease(0, "", "", 0.0) if row is None else Lease(row.epoch, row.owner, row.address, row.left_seconds)
