"""One replica's whole part in one lease: keeper, owner and replica, wired. The shell moves bytes and keeps time.

Everything happens on one thread. `Ports` are called from inside and must not call back, except `decided`, which is the
last thing that a step does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import msgspec

from fairshare.core.decisions import Decision, DispatchQueue
from fairshare.replicas.lease import Call, Follows, Keeper, Lease, LeaseEvent, LeaseOptions, Lost, Won
from fairshare.replicas.lease import Role as LeaseRole
from fairshare.replicas.messages import Announce, Asked, Envelope, Estate, Message, OnLink, Resigned, Told
from fairshare.replicas.owner import Owner, OwnerOptions, Session
from fairshare.replicas.replica import Replica, ReplicaOptions, ReplicaState, SharedQueue

JOIN_SECONDS = 1.0
"""A replica that announced itself and got no welcome for so long looks for the owner again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """All times of one lease."""

    lease: LeaseOptions = field(default_factory=LeaseOptions)
    owner: OwnerOptions
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    save_every_seconds: float = 1.0


# ---------------------------------------------------------------------- calls to the store


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """Take, renew, release or read the lease. Answer: the `Lease` in force."""

    lease: str
    call: Call
    owner: str
    address: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadCall:
    """Read what the owner before saved. Answer: `LeftBehind`, or False: there is a newer epoch."""

    lease: str
    epoch: int
    pools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveCall:
    """Save usage and state in one transaction. Answer: True, or False: there is a newer epoch."""

    lease: str
    epoch: int
    used: Mapping[str, Mapping[str, float]]
    """Pool → team → decayed usage now, cost units."""
    state: bytes


StoreCall = LeaseCall | LoadCall | SaveCall


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """What the owner before saved last."""

    usage: Mapping[str, Mapping[str, tuple[float, float]]]
    """Pool → team → (usage in cost units as it was, how many seconds ago)."""
    state: bytes
    """Empty: nothing was ever saved."""


class Role(Enum):
    """Who decides, as this replica sees it; what the status page shows."""

    OWNER = "owner"
    TAKING = "taking"
    """It has the lease and reads what its predecessor saved."""
    FOLLOWER = "follower"
    WAITING = "waiting"
    """There is no owner, for a moment: new requests wait."""
    DEGRADED = "degraded"
    NO_OWNER = "no_owner"
    """Degraded for too long: new requests are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """What an operator wants to know of one lease at one replica."""

    lease: str
    role: Role
    owner: str
    epoch: int
    since_seconds: float
    """How long it has been in this role (as far as waiting, degraded and refusing go)."""
    requests: int
    unsaved_charges: int
    degraded_grants_total: int
    replicas: int
    phantom_slots: int
    repaired_total: int


class Ports(Protocol):
    """What a member calls; the shell's part."""

    def clock(self) -> float:
        """The pools' clock, seconds. Runs on while the process is stopped."""
        ...

    def send(self, peer: str, message: OnLink) -> None:
        """On the link to that replica; dropped if there is none."""
        ...

    def decided(self, decisions: list[Decision]) -> None:
        """For the driver: decisions that do not answer one of its calls."""
        ...

    def soon(self) -> None:
        """Call `Member.flush` in this turn of the event loop: there is something to send."""
        ...

    def call(self, call: StoreCall) -> None:
        """Start it; its answer goes to `Member.answered`. At most one of each kind is open at a time."""
        ...

    def owner_is(self, lease: str, owner: str, address: str) -> None:
        """Keep a link to that replica from now on."""
        ...

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        """Fresh pools and queues of the lease as this process knows them now, over max(1, C // parts) slots each."""
        ...


class Member:
    """Drive `queue(pool)`; call `tick` when `next_deadline` comes; report links, messages and answers."""

    def __init__(
        self,
        *,
        lease: str,
        replica: str,
        address: str,
        settings: Mapping[str, DispatchQueue],
        ports: Ports,
        options: MemberOptions,
    ) -> None:
        """
        Args:
            lease: the name of the group of pools.
            replica: of this life of this process, unlike any other ever.
            address: where this replica listens for its peers.
            settings: pool → a queue that nobody drives, see `Replica.queue`.
            ports: the shell.
            options: times.
        """
        self.lease = lease
        self._name = replica
        self._address = address
        self._ports = ports
        self._options = options
        self._keeper = Keeper(options.lease, replica=replica)
        self._owner: Owner | None = None
        self._loop = Session(replica, 0)
        """The owner's session with the replica in this process."""
        self._sessions: dict[str, Session] = {}
        """While it owns: the newest session of each peer."""
        self._spoken: list[Session] = []
        """Those of them in which something was said that is not sent."""
        self._replica = Replica(
            replica=replica,
            pools=tuple(settings),
            local=lambda parts: ports.new_queues(lease, parts),
            options=options.replica,
            clock=ports.clock,
            soon=ports.soon,
        )
        self._queues = {pool: self._replica.queue(pool, queue) for pool, queue in settings.items()}
        self._linked: set[str] = set()
        self._ended: set[str] = set()
        """Replicas whose process has ended for certain; what it tells the owner that it becomes."""
        self._owner_lost = "", math.inf
        """The owner that it could not reach any more, and since when it has dialled it in vain."""
        self._session_number = 0
        self._joined: str | None = None
        """The owner that it announced itself to."""
        self._is_declined = False
        """That one said that it is none: it is not asked again before something is new."""
        self._welcome_until = float("inf")
        self._lease_called_at = 0.0
        self._loading = False
        self._load_at = 0.0
        self._saving: Estate | None = None
        self._last_save: tuple[SaveCall, Estate] | None = None
        """To be made when the one that is open is answered."""
        self._save_at = 0.0
        self._saved_state, self._saved_at = b"", -math.inf
        """What this owner saved last, and when: the same again need not be."""
        self._is_draining = False

    # ------------------------------------------------------------------ what others may read

    @property
    def pools(self) -> Sequence[str]:
        return tuple(self._queues)

    def queue(self, pool: str) -> SharedQueue:
        """The pool's dispatch queue, for the driver; the same for ever, whoever owns the pool."""
        return self._queues[pool]

    @property
    def owns(self) -> bool:
        """Whether it decides for all replicas."""
        return self._owner is not None

    @property
    def role(self) -> Role:
        if self._owner is not None:
            return Role.OWNER
        if self._keeper.role is LeaseRole.OWNER:
            return Role.TAKING
        match self._replica.state:
            case ReplicaState.FOLLOWING:
                return Role.FOLLOWER if self._replica.is_welcome else Role.WAITING
            case ReplicaState.WAITING:
                return Role.WAITING
            case ReplicaState.DEGRADED:
                return Role.DEGRADED
            case ReplicaState.REFUSING:
                return Role.NO_OWNER

    def status(self) -> MemberStatus:
        owner, replica = self._owner, self._replica
        phantom_slots = 0 if owner is None else sum(queue.pool.phantom_slots for queue in owner.queues.values())
        return MemberStatus(
            lease=self.lease,
            role=self.role,
            owner=self._keeper.owner,
            epoch=self._keeper.epoch,
            since_seconds=self._ports.clock() - replica.since,
            requests=replica.requests,
            unsaved_charges=replica.unsaved_charges,
            degraded_grants_total=replica.degraded_grants_total,
            replicas=replica.replicas if owner is None else owner.replicas,
            phantom_slots=phantom_slots,
            repaired_total=0 if owner is None else owner.repaired_total,
        )

    @property
    def drained(self) -> bool:
        """After `drain`: it has nothing to hand over any more."""
        return self._is_draining and self._saving is None and self._keeper.has_released

    @property
    def _saves_last(self) -> bool:
        """While it hands over: the last state is saved before the lease is given back."""
        return self._is_draining and self._saving is not None

    def next_deadline(self) -> float:
        """When to call `tick` next (the pools' clock, seconds); infinity: not before something happens."""
        deadlines = [self._welcome_until]
        if not self._saves_last:
            deadlines.append(self._keeper.next_due())
        if (own := self._replica.next_deadline()) is not None:
            deadlines.append(own)
        if self._keeper.role is LeaseRole.OWNER and self._owner is None and not self._loading:
            deadlines.append(self._load_at)
        if self._owner is not None:
            if self._saving is None:
                deadlines.append(self._save_at)
            if (due := self._owner.next_deadline()) is not None:
                deadlines.append(due)
        return min(deadlines)

    # ------------------------------------------------------------------ what happened

    def begin(self) -> None:
        """This process is ready to decide and to serve."""
        self._replica.begin()
        self.tick()

    def tick(self) -> None:
        """Time passed."""
        now = self._ports.clock()
        self._took(self._keeper.tick(now), now)
        if self._owner is not None:
            self._owner.tick(now)
            if self._saving is None and now >= self._save_at:
                self._save(now)
        elif self._keeper.role is LeaseRole.OWNER and not self._loading and now >= self._load_at:
            self._loading = True
            self._ports.call(LoadCall(self.lease, self._keeper.epoch, tuple(self._queues)))
        if now >= self._welcome_until:
            self._leave(now)
        self._join(now)
        decisions = self._replica.tick()
        self._see_whether_left(now)
        if not self._saves_last:
            call = self._keeper.next_call(now)
            if call is not None:
                self._lease_called_at = now
                seconds = self._options.lease.lease_seconds
                self._ports.call(LeaseCall(self.lease, call, self._name, self._address, seconds))
        self._join(now)
        self._finish(decisions)

    def connected(self, peer: str) -> None:
        """There is a link to that replica, where there was none."""
        self._linked.add(peer)
        if peer == self._owner_lost[0]:
            self._owner_lost = "", math.inf
        self._is_declined = False
        self._join(self._ports.clock())
        self._finish([])

    def disconnected(self, peer: str) -> None:
        """The last link to that replica is gone."""
        now = self._ports.clock()
        self._linked.discard(peer)
        if peer == self._keeper.owner:
            self._owner_lost = peer, now
        session = self._sessions.pop(peer, None)
        if session is not None and self._owner is not None and self._keeper.decides(now):
            self._owner.disconnected(session, now)
        if peer == self._joined:
            self._leave(now)
        self._finish(self._replica.settle())

    def ended(self, replica: str) -> None:
        """The process of that replica has ended for certain."""
        if replica in self._ended:
            return
        self._ended.add(replica)
        if self._owner is not None and self._keeper.decides(self._ports.clock()):
            self._owner.ended(replica)
        self._finish(self._replica.settle())

    def clear_phantoms(self, pool: str) -> dict[str, int] | None:
        """See `Owner.clear_phantoms`. None: this replica does not decide."""
        now = self._ports.clock()
        if self._owner is None or not self._keeper.decides(now):
            return None
        cleared = self._owner.clear_phantoms(pool, now)
        self._save_at = now  # nor may a successor find them
        self._finish(self._replica.settle())
        return cleared

    def received(self, peer: str, envelope: Envelope) -> None:
        """A replica said something about this lease."""
        now = self._ports.clock()
        if events := self._keeper.tick(now):
            self._took(events, now)
        decisions: list[Decision] = []
        if envelope.to_owner:
            self._asked(peer, envelope, now)
            if self._loop.outbox:  # hardly ever: what others say leads to few decisions about the owner's own requests
                decisions = self._replica.settle()
        elif peer == self._joined and envelope.session == self._session_number:
            self._welcome_until = float("inf")
            decisions = self._replica.received(envelope.messages)
            self._see_whether_left(now)
        self._finish(decisions)

    def answered(self, call: StoreCall, answer: Lease | LeftBehind | bool | None) -> None:
        """The store answered. None: it failed, and nobody knows whether the call was carried out."""
        now = self._ports.clock()
        match call:
            case LeaseCall():
                lease = answer if isinstance(answer, Lease) else None
                self._is_declined = self._is_declined and lease is None
                self._took(self._keeper.answered(call.call, self._lease_called_at, lease, now), now)
                if lease is not None and self._joined == lease.owner and self._welcome_until == math.inf:
                    self._keeper.calm(lease, now)
            case LoadCall():
                self._loading = False
                self._load_at = now + self._options.lease.poll_seconds
                if isinstance(answer, LeftBehind) and call.epoch == self._keeper.epoch and self._keeper.decides(now):
                    self._finish(self._begin(answer, now))
                    return
            case SaveCall():
                estate, self._saving = self._saving, None
                is_current = call.epoch == self._keeper.epoch and self._keeper.decides(now)
                if answer is True and estate is not None and self._owner is not None and is_current:
                    self._saved_state, self._saved_at = call.state, now
                    self._owner.saved(estate, now)
                if self._last_save is not None:
                    (last, self._saving), self._last_save = self._last_save, None
                    self._ports.call(last)
        self._join(now)
        self._finish(self._replica.settle())

    def allow(self, longest_request_seconds: float) -> None:
        """Requests may run for so long from now on, and those that run for as long as was allowed before."""
        owner = self._options.owner
        if longest_request_seconds > owner.longest_request_seconds:
            owner = replace(owner, longest_request_seconds=longest_request_seconds)
            self._options = replace(self._options, owner=owner)
            if self._owner is not None:
                self._owner.allow(longest_request_seconds)

    def drain(self) -> None:
        """Hand the lease over at once, and never take it again; what runs here goes on under the next owner."""
        now = self._ports.clock()
        self._is_draining = True
        owner = self._owner if self._keeper.decides(now) else None
        if owner is not None:
            save, estate = self._state_of(owner, now, hands_over=True)
            if self._saving is None:
                self._saving = estate
                self._ports.call(save)
            else:
                self._last_save = (save, estate)
        self._took(self._keeper.resign(now), now)
        self._finish([])

    # ------------------------------------------------------------------ as an owner

    def _begin(self, left_behind: LeftBehind, now: float) -> list[Decision]:
        """Decide from now on."""
        queues = self._ports.new_queues(self.lease, 1)
        for name, by_team in left_behind.usage.items():
            if (queue := queues.get(name)) is not None:
                rate = queue.pool.decay_rate
                for team, (cost_units, age_seconds) in by_team.items():
                    queue.pool.set_usage(team, cost_units * math.exp(-rate * age_seconds))
        estate = msgspec.msgpack.decode(left_behind.state, type=Estate) if left_behind.state else Estate({}, {})
        self._owner = owner = Owner(
            epoch=self._keeper.epoch,
            queues=queues,
            estate=estate,
            options=self._options.owner,
            now=now,
            decides_until=lambda: self._keeper.decides_until,
        )
        for replica in self._ended:
            owner.ended(replica)
        before, at = self._owner_lost
        if now - at >= self._options.owner.gather_seconds:
            owner.does_not_wait_for(before)
        self._save_at = now
        self._saved_state, self._saved_at = b"", -math.inf
        self._loop = Session(self._name, 0)
        self._sessions = {}

        def exchange(messages: list[Message]) -> list[Message]:
            loop = self._loop
            at = self._ports.clock()
            if messages and self._keeper.decides(at):
                owner.received(loop, messages, at)
                self._ports.soon()
            said, loop.outbox = loop.outbox, []
            return said

        def supervised(pool: str, event: Callable[[DispatchQueue], list[Decision]]) -> None:
            if self._keeper.decides(self._ports.clock()):
                owner.supervised(pool, event)
                self._ports.soon()

        return self._replica.own(exchange, supervised, queues.__getitem__)

    def _asked(self, peer: str, envelope: Envelope, now: float) -> None:
        """A replica asks; who does not decide says so."""
        if self._owner is None or not self._keeper.decides(now):
            self._decline(peer, envelope)
            return
        session = self._sessions.get(peer)
        if session is None or session.link_number < envelope.session:
            if not (envelope.messages and isinstance(envelope.messages[0], Announce)):
                # The rest of a session whose beginning this owner never saw, or forgot with another link.
                self._decline(peer, envelope)
                return
            if session is not None:
                self._owner.disconnected(session, now)
            session = self._sessions[peer] = Session(peer, envelope.session, spoken=self._spoken)
        if session.link_number == envelope.session:
            self._owner.received(session, envelope.messages, now)

    def _decline(self, peer: str, envelope: Envelope) -> None:
        resigned = Resigned(self._keeper.epoch)
        self._ports.send(peer, Envelope(self.lease, envelope.session, False, (resigned,)))

    def _save(self, now: float) -> None:
        if self._owner is None:
            return
        self._save_at = now + self._options.save_every_seconds
        save, estate = self._state_of(self._owner, now)
        # Every charge changes the state; without one the store can tell usage, which only decays, from what it has.
        if save.state != self._saved_state or now >= self._saved_at + self._options.owner.show_every_seconds:
            self._saving = estate
            self._ports.call(save)

    def _state_of(self, owner: Owner, now: float, *, hands_over: bool = False) -> tuple[SaveCall, Estate]:
        used, estate = owner.legacy(now)
        if hands_over:  # else nobody can own before that time is over
            drift = 1.0 + self._options.lease.clock_drift
            trusting = {replica: seconds * drift for replica, seconds in owner.trusting_seconds(now).items()}
            estate = msgspec.structs.replace(estate, trusting_seconds=trusting)
        return SaveCall(self.lease, owner.epoch, used, msgspec.msgpack.encode(estate)), estate

    def _dismiss(self, now: float) -> None:
        """It decides no more."""
        owner, self._owner = self._owner, None
        self._replica.disconnected()
        if owner is not None:
            owner.resign()
            self._flush_spoken()
        self._sessions = {}

    # ------------------------------------------------------------------ as a follower

    def _join(self, now: float) -> None:
        """Announce to the owner, if there is one to reach and it was not done yet."""
        owner = self._keeper.owner
        if self._keeper.role is LeaseRole.OWNER or self._joined is not None or owner not in self._linked:
            return
        if self._replica.state is ReplicaState.FOLLOWING or self._is_declined:
            return
        self._session_number += 1
        self._joined = owner
        self._welcome_until = now + JOIN_SECONDS
        announce = self._replica.connected()
        self._ports.send(owner, Envelope(self.lease, self._session_number, True, announce))

    def _see_whether_left(self, now: float) -> None:
        if self._joined is not None and self._replica.state is not ReplicaState.FOLLOWING:
            self._is_declined = True
            self._leave(now)

    def _leave(self, now: float) -> None:
        self._joined = None
        self._welcome_until = float("inf")
        self._replica.disconnected()
        self._keeper.look_again(now)

    # ------------------------------------------------------------------ inside

    def _took(self, events: list[LeaseEvent], now: float) -> None:
        for event in events:
            match event:
                case Won():
                    self._joined = None
                    self._welcome_until = float("inf")
                    self._replica.disconnected()
                    self._load_at = now
                case Lost():
                    self._dismiss(now)
                case Follows():
                    if event.owner != self._owner_lost[0]:
                        self._owner_lost = "", math.inf  # it is dialled no more, so nobody knows
                    if self._joined not in (None, event.owner):
                        self._leave(now)
                    self._ports.owner_is(self.lease, event.owner, event.address)

    def _finish(self, decisions: list[Decision]) -> None:
        """The end of a step: send what is to be said, then tell the driver, who may begin the next."""
        self._flush()
        if decisions:
            self._ports.decided(decisions)

    def flush(self) -> None:
        """After the driver's own calls of the queues: send what they gave to say. Call it once per turn of the loop."""
        self._finish(self._replica.settle())

    def _flush(self) -> None:
        if self._spoken:
            self._flush_spoken()
        if self._joined is not None and self._replica.state is ReplicaState.FOLLOWING:
            messages = self._replica.take_outbox()
            if messages:
                self._ports.send(self._joined, Envelope(self.lease, self._session_number, True, messages))

    def _flush_spoken(self) -> None:
        for session in self._spoken:
            if session.outbox and self._sessions.get(session.peer) is session:
                said, session.outbox = session.outbox, []
                self._ports.send(session.peer, Envelope(self.lease, session.link_number, False, said))
        self._spoken.clear()


class Router:
    """Gives what comes over peer links to the members it is for."""

    def __init__(self, other: Callable[[str, Asked | Told], None]) -> None:
        """`other`: takes what no member looks into, with the replica that said it."""
        self._members: dict[str, Member] = {}
        self._other = other

    def add(self, member: Member) -> None:
        self._members[member.lease] = member

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members.values())

    def connected(self, peer: str) -> None:
        for member in self._members.values():
            member.connected(peer)

    def disconnected(self, peer: str) -> None:
        for member in self._members.values():
            member.disconnected(peer)

    def ended(self, replica: str) -> None:
        for member in self._members.values():
            member.ended(replica)

    def received(self, peer: str, messages: Sequence[OnLink]) -> None:
        for message in messages:
            if isinstance(message, Envelope):
                member = self._members.get(message.lease)
                if member is not None:
                    member.received(peer, message)
            else:
                self._other(peer, message)
