"""The owner of a group of pools: one set of dispatch queues for the requests of all replicas, its own among them.

Pure: messages in, messages out. A session is one link's life; what a replica has is known exactly from its `Announce`,
and from then on by an ordered stream of events. When a session ends, what it had in flight becomes phantoms, and what
it held is forgotten, until the replica announces itself anew.

Most requests are within share while there is room for all, and asking about each costs more than deciding. So an owner
lends: it sends a request with a slot that its replica may use again for the team's next one. Here such a slot is in
flight as long as it is lent. Whoever would not get what it owns because of slots that may be idle elsewhere waits for
as long as it takes to call them back, so no standing is ever decided by a slot that nobody uses.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from fairshare.core.decisions import (
    Decision,
    DispatchQueue,
    Held,
    Mode,
    Recall,
    RefusalReason,
    Refused,
    Send,
)
from fairshare.core.priority import Standing
from fairshare.replicas.messages import (
    Aborted,
    Alive,
    Announce,
    Beat,
    Began,
    CallBack,
    CalledBack,
    Cancelled,
    Denied,
    Estate,
    Kept,
    LiveGrant,
    Message,
    Moved,
    PoolShown,
    Recalled,
    Refresh,
    Released,
    Resigned,
    Returned,
    Sent,
    Submitted,
    Trust,
    Waits,
    Welcome,
)

REMEMBERED_SECONDS = 86_400.0
"""Which charges of a replica that is gone were counted is remembered for so long: it may only be cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOptions:
    """Times, in seconds."""

    longest_request_seconds: float
    """How long a request may run at most: phantoms end after it."""
    gather_seconds: float = 1.0
    """How long a new owner waits for the replicas it inherits before it decides."""
    show_every_seconds: float = 5.0
    """How often replicas are told the usage that they would go on alone from."""


LENT_PART = (1, 2)
"""A slot is lent while its team has at most this part of its whole slots in flight, and the pool of C."""

CALLED_BACK_PART = (3, 4)
"""From this part on what was lent is called back, so that hardly anybody has to wait for it."""


class _Place(Enum):
    GATHERED = 1
    """It came before the owner decides, or waits until slots are called back: not submitted yet."""
    HELD = 2
    SENT = 3


class _Entry:
    """A request of some replica."""

    __slots__ = ("id", "key", "lent", "place", "pool", "queue", "sent_number", "session", "submitted")

    def __init__(self, session: "Session", submitted: Submitted, key: str, queue: DispatchQueue) -> None:
        self.session = session
        self.id = submitted.id
        self.submitted = submitted
        self.key = key
        """Its id in the queue."""
        self.queue = queue
        self.pool = submitted.pool
        """Whose capacity it uses."""
        self.place = _Place.HELD
        self.sent_number = 0
        """The number of the message that told its replica to send it."""
        self.lent: _Lent | None = None
        """Its slot was lent with it."""


@dataclass(slots=True, eq=False)
class Session:
    """One link to a replica, from its `Announce` to its end. The shell makes one for every link."""

    peer: str
    """The replica at the other end."""
    link_number: int
    """What that replica calls the session."""
    replica: str = ""
    """The same as `peer`, once it has announced itself."""
    number: int = 0
    """Of the sessions of this owner."""
    sent: int = 0
    """Messages to it so far."""
    outbox: list[Message] = field(default_factory=list[Message])
    entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])
    aborting: dict[str, list[_Entry]] = field(default_factory=dict[str, list[_Entry]])
    """Recalled requests whose engine's connection is still open."""
    borrows: bool = False
    """Slots may be lent to it."""
    spoken: "list[Session] | None" = None
    """Where it puts itself when there is something to send, so that nobody looks for it among all replicas."""

    def say(self, message: Message) -> None:
        self.sent += 1
        if self.spoken is not None and not self.outbox:
            self.spoken.append(self)
        self.outbox.append(message)


@dataclass(slots=True, eq=False)
class _Lent:
    """Slots of one team that replicas may use again."""

    slots: dict[Session, int] = field(default_factory=dict[Session, int])
    is_called_back: bool = False
    waiting: list[_Entry] = field(default_factory=list[_Entry])
    """Requests of the team that are submitted when all is called back, in the order in which they came."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """Phantoms: slots that a replica had in flight when it was last heard of."""

    pool: str
    team: str
    slots: int
    until: float


class Owner:
    """Decides for all replicas. The shell asks `Keeper.decides` before every call, and sends every session's outbox."""

    def __init__(
        self,
        *,
        epoch: int,
        queues: Mapping[str, DispatchQueue],
        estate: Estate,
        options: OwnerOptions,
        now: float,
        decides_until: Callable[[], float],
    ) -> None:
        """
        Args:
            epoch: of the lease.
            queues: fresh ones, with the usage that the owner before saved.
            estate: what else it saved.
            options: times.
            now: on the pools' clock, seconds.
            decides_until: when the right to decide ends, as it is known when it is asked.
        """
        self.epoch = epoch
        self.queues = queues
        self.repaired_total = 0
        """Grants that a replica turned out not to run any more, without having said that they ended."""
        self._options = options
        self._sessions: dict[str, Session] = {}
        """Replica → its session, once it has announced itself."""
        self._next_number = 1
        self._entries: dict[str, _Entry] = {}
        self._counted: dict[str, int] = dict(estate.counted)
        """Replica → up to which number its charges are in the pools' usage."""
        self._saved: Mapping[str, int] = estate.counted
        """The same of the usage in the store."""
        self._decides_until = decides_until
        self._remembered_until: dict[str, float] = dict.fromkeys(estate.counted, now + REMEMBERED_SECONDS)
        """Replica that is not connected → when it is certain that it will not come back with charges."""
        self._lost: dict[str, list[_Lost]] = {}
        """Replica → what it had in flight and has not announced again."""
        self._lent: dict[str, _Lent] = {}
        """By team, while any slot is lent to it. Only in a group of one pool, where no guests have to be thought of."""
        self._lends = len(queues) == 1 and all(queue.mode is Mode.HOLD for queue in queues.values())
        self._ended: set[str] = set()
        """Replicas whose process has ended for certain: nothing that they had in flight still runs."""
        self._gathers_from: float | None = now
        """None: it decides."""
        self._trusting = {replica: now + seconds for replica, seconds in estate.trusting_seconds.items()}
        """Replica → until when it may carry out what the owner before said."""
        self._trusted: dict[str, float] = {}
        """Replica that is not connected any more → until when it may carry out what this owner said."""
        self._missing: set[str] = set(estate.in_flight)
        """Replicas that the owner before knew, which have not announced themselves yet."""
        self._shown_at = now
        self._resigned = False
        for replica, by_pool in estate.in_flight.items():
            until = now + estate.silent_seconds.get(replica, options.longest_request_seconds)
            lost = [
                _Lost(pool, team, slots, until)
                for pool, by_team in by_pool.items()
                if pool in queues
                for team, slots in by_team.items()
            ]
            self._lost[replica] = lost
            for each in lost:
                queues[each.pool].pool.add_phantoms(each.team, each.slots, until)
        if not self._missing:
            self._gathers_from = None

    # ------------------------------------------------------------------ what others may read

    @property
    def replicas(self) -> int:
        """Those that are connected, this one among them."""
        return max(1, len(self._sessions))

    @property
    def is_gathering(self) -> bool:
        """It has begun, and waits for the replicas that its predecessor knew."""
        return self._gathers_from is not None

    @property
    def _gathers_until(self) -> float | None:
        """When it decides, whoever is still missing: nobody carries out any more what the owner before said."""
        if self._gathers_from is None:
            return None
        trusting = [self._trusting.get(replica, -math.inf) for replica in self._missing]
        return max([self._gathers_from + self._options.gather_seconds, *trusting])

    @property
    def sessions(self) -> Iterable[Session]:
        """Those that have announced themselves."""
        return self._sessions.values()

    def allow(self, longest_request_seconds: float) -> None:
        """From now on requests may run for so long."""
        self._options = replace(self._options, longest_request_seconds=longest_request_seconds)

    # ------------------------------------------------------------------ links

    def disconnected(self, session: Session, now: float) -> None:
        """A link is gone: what its replica has in flight may still run, what it holds is nobody's for now."""
        if self._sessions.get(session.replica) is not session:
            return
        del self._sessions[session.replica]
        until = now + self._options.longest_request_seconds
        self._remembered_until[session.replica] = now + REMEMBERED_SECONDS
        self._trusted[session.replica] = self._decides_until()
        lost = self._lost.setdefault(session.replica, [])
        # All phantoms first: what ends below lets others go.
        for entry in session.entries.values():
            if entry.place is _Place.SENT and session.replica not in self._ended:
                each = _Lost(entry.pool, entry.submitted.team, entry.submitted.slots, until)
                lost.append(each)
                self.queues[each.pool].pool.add_phantoms(each.team, each.slots, until)
        # Then what is held, so that none of it goes when the rest ends.
        for entry in sorted(session.entries.values(), key=lambda entry: entry.place is _Place.SENT):
            self._forget(entry)
        for aborting in session.aborting.values():
            for entry in aborting:
                self._route(entry.queue.aborted(entry.key))
        session.entries.clear()
        session.aborting.clear()
        session.outbox.clear()
        for team in tuple(self._lent):
            self._called_back(session, team)

    def ended(self, replica: str) -> None:
        """The process of a replica has ended, as whoever started it saw: the engines abort what it had in flight.

        Which of its charges were counted stays known. A link to it that is still open says what it has to say.
        """
        if self._resigned:
            return
        self._ended.add(replica)
        self._drop_phantoms(self._lost.pop(replica, ()))
        for queue in self.queues.values():
            self._route(queue.capacity_changed())
        self.does_not_wait_for(replica)

    def does_not_wait_for(self, replica: str) -> None:
        """It cannot announce itself in time, for all that is known; if it does later, it is heard as any other."""
        self._missing.discard(replica)
        if self._gathers_from is not None and not self._missing:
            self._gathered()

    def clear_phantoms(self, pool: str, now: float) -> dict[str, int]:
        """Somebody knows that nothing runs any more of what silent replicas had in flight in a pool.

        Returns:
            Replica → its slots that are free now. One that lives after all is counted again when it announces itself.
        """
        cleared: dict[str, int] = {}
        dropped: list[_Lost] = []
        for replica, lost in tuple(self._lost.items()):
            here = [each for each in lost if each.pool == pool]
            dropped += here
            if slots := sum(each.slots for each in here if each.until > now):
                cleared[replica] = slots
            self._lost[replica] = [each for each in lost if each.pool != pool]
        self._drop_phantoms(dropped)
        self._route(self.queues[pool].capacity_changed())
        return cleared

    def received(self, session: Session, messages: Sequence[Message], now: float) -> None:
        """Messages of a replica came, in order."""
        if self._resigned:
            return
        for message in messages:
            match message:
                case Submitted():
                    self._submitted(session, message)
                case Released():
                    self._released(session, message)
                case Returned():
                    self._returned(session, message)
                case CalledBack():
                    self._called_back(session, message.team)
                case Began():
                    self._began(session, message)
                case Cancelled():
                    self._cancelled(session, message)
                case Aborted():
                    self._aborted(session, message.id)
                case Kept():
                    self._kept(session, message)
                case Moved():
                    self._moved(session, message)
                case Beat():
                    session.say(Trust(message.at, max(0.0, self._decides_until() - now)))
                case Alive():
                    self._alive(session, message)
                case Announce():
                    self._announced(session, message, now)
                case _:
                    pass  # what an owner says is nothing to another one

    def supervised(self, pool: str, event: Callable[[DispatchQueue], list[Decision]]) -> None:
        """Something that concerns no single request happened to a pool (an instance came, C changed, …)."""
        self._route(event(self.queues[pool]))

    def tick(self, now: float) -> None:
        """Time passed: call at `next_deadline()`."""
        if self._resigned:
            return
        if (gathers_until := self._gathers_until) is not None and now >= gathers_until:
            self._gathered()
        for queue in self.queues.values():
            deadline = queue.next_deadline()
            if deadline is not None and deadline <= now:
                self._route(queue.tick())
        for replica, until in tuple(self._remembered_until.items()):
            if until <= now:
                del self._remembered_until[replica]
                self._counted.pop(replica, None)
        for replica, lost in tuple(self._lost.items()):
            if all(each.until <= now for each in lost):
                del self._lost[replica]
        self._trusted = {replica: until for replica, until in self._trusted.items() if until > now}

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing waits for time."""
        deadlines = [deadline for queue in self.queues.values() if (deadline := queue.next_deadline()) is not None]
        if (gathers_until := self._gathers_until) is not None:
            deadlines.append(gathers_until)
        return min(deadlines, default=None)

    def resign(self) -> None:
        """Decide nothing more and tell the replicas."""
        if self._resigned:
            return
        self._resigned = True
        for session in self._sessions.values():
            session.say(Resigned(self.epoch))

    # ------------------------------------------------------------------ what a successor needs

    def legacy(self, now: float) -> tuple[dict[str, dict[str, float]], Estate]:
        """Pool → team → decayed usage (cost units), and what belongs with it: to be saved in one transaction."""
        used = {name: queue.pool.usage()[0] for name, queue in self.queues.items()}
        in_flight: dict[str, dict[str, dict[str, int]]] = {}

        def add(replica: str, pool: str, team: str, slots: int) -> None:
            of_pool = in_flight.setdefault(replica, {}).setdefault(pool, defaultdict(int))
            of_pool[team] += slots

        for replica, session in self._sessions.items():
            in_flight[replica] = {}
            for entry in session.entries.values():
                if entry.place is _Place.SENT:
                    add(replica, entry.pool, entry.submitted.team, entry.submitted.slots)
        silent_seconds: dict[str, float] = {}
        for replica, lost in self._lost.items():
            for each in lost:
                if each.until > now:
                    add(replica, each.pool, each.team, each.slots)
                    silent_seconds[replica] = max(silent_seconds.get(replica, 0.0), each.until - now)
        return used, Estate(dict(self._counted), in_flight, silent_seconds)

    def trusting_seconds(self, now: float) -> dict[str, float]:
        """Replica → for how long it may still carry out what was said to it.

        A successor that owns before this owner's right would have ended must wait for it.
        """
        until = self._trusting | self._trusted | dict.fromkeys(self._sessions, self._decides_until())
        return {replica: at - now for replica, at in until.items() if at > now}

    def saved(self, estate: Estate, now: float) -> None:
        """What `legacy` returned is in the store: the charges in it need not be kept by anybody else."""
        self._saved = estate.counted
        shows = now >= self._shown_at + self._options.show_every_seconds
        if shows:
            self._shown_at = now
        shown = self._shown() if shows else ()
        for replica, session in self._sessions.items():
            session.say(Refresh(estate.counted.get(replica, 0), self.replicas, shown))

    # ------------------------------------------------------------------ messages

    def _announced(self, session: Session, message: Announce, now: float) -> None:
        replica = message.replica
        if (before := self._sessions.get(replica)) is not None:
            self.disconnected(before, now)
        session.replica, session.borrows = replica, message.borrows
        session.number = self._next_number
        self._next_number += 1
        self._sessions[replica] = session
        self._missing.discard(replica)
        self._remembered_until.pop(replica, None)
        saved, trusted_seconds = self._saved.get(replica, 0), max(0.0, self._decides_until() - now)
        session.say(Welcome(self.epoch, saved, self.replicas, self._shown(), message.at, trusted_seconds))
        counted = self._counted.get(replica, 0)
        for charge in message.charges:
            if charge.number > counted:
                counted = charge.number
                self._charge(charge)
        self._counted[replica] = counted
        for grant in message.grants:
            self._adopt(session, grant)
        # Now that they are counted as what they are.
        self._drop_phantoms(self._lost.pop(replica, ()))
        for queue in self.queues.values():
            self._route(queue.capacity_changed())
        for submitted in message.held:
            self._submitted(session, submitted)
        if self._gathers_from is not None and not self._missing:
            self._gathered()

    def _submitted(self, session: Session, message: Submitted) -> None:
        queue = self.queues.get(message.pool)
        if queue is None:
            session.say(Denied(message.id, RefusalReason.NO_INSTANCE, 0, 1, 1.0))
            return
        key = f"{session.number}.{message.id}"
        entry = session.entries[message.id] = self._entries[key] = _Entry(session, message, key, queue)
        if self._gathers_from is not None:
            entry.place = _Place.GATHERED
            return
        self._submit(entry)

    def _submit(self, entry: _Entry) -> None:
        if self._lent and self._waits_for_lent(entry):
            return
        entry.place = _Place.HELD
        self._route(entry.queue.submitted(entry.submitted.request(entry.key)))

    def _began(self, session: Session, message: Began) -> None:
        entry = session.entries.get(message.id)
        if entry is not None and entry.place is _Place.SENT:
            self._route(entry.queue.first_byte(entry.key))

    def _released(self, session: Session, message: Released) -> None:
        self._counted[session.replica] = message.number
        entry = session.entries.pop(message.id, None)
        if entry is not None and entry.place is _Place.SENT:
            del self._entries[entry.key]
            self._route(entry.queue.released(entry.key, message.cost_units))
            self._unlend(entry)
            return
        # It ended while the owner thought it was recalled, or before the owner had heard of it.
        self._charge(message)
        if entry is not None:
            self._forget(entry)

    def _cancelled(self, session: Session, message: Cancelled) -> None:
        entry = session.entries.pop(message.id, None)
        if entry is not None:
            self._forget(entry)

    def _aborted(self, session: Session, request_id: str) -> None:
        aborting = session.aborting.get(request_id)
        if aborting:
            entry = aborting.pop(0)
            if not aborting:
                del session.aborting[request_id]
            self._route(entry.queue.aborted(entry.key))

    def _kept(self, session: Session, message: Kept) -> None:
        request_id = message.grant.request.id
        entry = session.entries.pop(request_id, None)
        if entry is not None:
            self._forget(entry)
        self._aborted(session, request_id)
        self._adopt(session, message.grant)

    def _moved(self, session: Session, message: Moved) -> None:
        entry = session.entries.get(message.id)
        if entry is not None and entry.place is _Place.SENT:
            others = (instance.id for instance in self.queues[entry.pool].snapshot().instances)
            entry.queue.reassigned(entry.key, frozenset(others) - {message.instance_id})

    def _alive(self, session: Session, message: Alive) -> None:
        running = set(message.running)
        leaked = [
            entry
            for entry in session.entries.values()
            if entry.place is _Place.SENT and entry.sent_number <= message.heard and entry.id not in running
        ]
        for entry in leaked:
            self.repaired_total += 1
            del session.entries[entry.id]
            self._forget(entry)

    # ------------------------------------------------------------------ slots that are lent

    def _may_lend(self, entry: _Entry, send: Send) -> bool:
        """Whether there is so much room, for its team and for all, that nobody will soon need this slot."""
        state, pool, (part, whole) = send.grant.state, entry.queue.pool, LENT_PART
        return (
            self._lends
            and entry.session.borrows
            and entry.submitted.slots == 1
            and send.standing is Standing.WITHIN_SHARE
            and state is not None
            and whole * (state.in_flight_slots + state.phantom_slots) <= part * state.reserved
            and whole * (pool.live_slots + pool.phantom_slots) <= part * pool.capacity
            and ((lent := self._lent.get(entry.submitted.team)) is None or not lent.is_called_back)
        )

    def _lend(self, entry: _Entry) -> None:
        lent = entry.lent = self._lent.setdefault(entry.submitted.team, _Lent())
        lent.slots[entry.session] = lent.slots.get(entry.session, 0) + 1
        # What uses it later may have begun, which nobody says: it cannot be recalled.
        entry.queue.first_byte(entry.key)

    def _waits_for_lent(self, entry: _Entry) -> bool:
        """Call back what is lent when it gets tight; whether this request must wait for that.

        It must if it goes beyond its team's whole slots: slots that are lent count, and perhaps nobody uses them.
        """
        pool, slots, (part, whole) = entry.queue.pool, entry.submitted.slots, CALLED_BACK_PART
        if whole * (pool.live_slots + slots) > part * pool.capacity:
            for team in self._lent:
                self._call_back(team)
        lent = self._lent.get(entry.submitted.team)
        if lent is None:
            return False
        state = pool.state(entry.submitted.team)
        taken_slots = state.in_flight_slots + state.phantom_slots + slots
        if whole * taken_slots > part * state.reserved:
            self._call_back(entry.submitted.team)
        # What is reserved may hold a fraction that was rounded up: then the last slot of it is no whole one.
        is_owned = taken_slots < state.reserved or taken_slots <= pool.exact_shares.get(state.name, 0) * pool.capacity
        if is_owned and not lent.waiting:
            return False
        entry.place = _Place.GATHERED
        lent.waiting.append(entry)
        return True

    def _call_back(self, team: str) -> None:
        lent = self._lent[team]
        if not lent.is_called_back:
            lent.is_called_back = True
            for session in lent.slots:
                session.say(CallBack(team))

    def _called_back(self, session: Session, team: str) -> None:
        """That replica uses none of the team's slots again."""
        lent = self._lent.get(team)
        if lent is not None and lent.slots.pop(session, 0) and not lent.slots:
            self._end_lending(team, lent)

    def _returned(self, session: Session, message: Returned) -> None:
        entry = session.entries.pop(message.id, None)
        if entry is not None:
            self._forget(entry)

    def _unlend(self, entry: _Entry) -> None:
        """It has ended; if its slot was lent, it is no more."""
        lent, session = entry.lent, entry.session
        if lent is None or session not in lent.slots:
            return
        lent.slots[session] -= 1
        if not lent.slots[session]:
            del lent.slots[session]
        if not lent.slots:
            self._end_lending(entry.submitted.team, lent)

    def _end_lending(self, team: str, lent: _Lent) -> None:
        del self._lent[team]
        for entry in lent.waiting:
            if self._entries.get(entry.key) is entry:
                self._submit(entry)

    # ------------------------------------------------------------------ inside

    def _adopt(self, session: Session, grant: LiveGrant) -> None:
        """Count what runs already, in the pool whose capacity it uses."""
        queue = self.queues.get(grant.pool)
        if queue is None:
            return
        submitted = grant.request
        key = f"{session.number}.{submitted.id}"
        entry = session.entries[submitted.id] = self._entries[key] = _Entry(session, submitted, key, queue)
        entry.place, entry.pool, entry.sent_number = _Place.SENT, grant.pool, session.sent
        self._route(
            queue.adopted(
                submitted.request(key),
                instance_id=grant.instance_id,
                priority=grant.priority,
                standing=grant.standing,
                began=grant.began,
            )
        )

    def _drop_phantoms(self, found: Iterable[_Lost]) -> None:
        """Those that stood for one replica; others' of the same teams stay, with their ends."""
        for pool_name, team in {(each.pool, each.team) for each in found}:
            pool = self.queues[pool_name].pool
            while pool.drop_phantom(team):
                pass
            for lost in self._lost.values():
                for each in lost:
                    if each.pool == pool_name and each.team == team:
                        pool.add_phantoms(team, each.slots, each.until)

    def _forget(self, entry: _Entry) -> None:
        """Take a request out of its queue, without a charge."""
        del self._entries[entry.key]
        match entry.place:
            case _Place.SENT:
                # Not a number: nothing is to be learned from it.
                self._route(entry.queue.released(entry.key, math.nan))
                self._unlend(entry)
            case _Place.HELD:
                self._route(entry.queue.cancelled(entry.key))
            case _Place.GATHERED:
                pass

    def _charge(self, charge: Released) -> None:
        queue = self.queues.get(charge.pool)
        if queue is not None:
            queue.pool.charge(charge.team, charge.cost_units)

    def _gathered(self) -> None:
        """Begin to decide: whoever could announce itself has."""
        self._gathers_from = None
        self._missing.clear()
        for entry in tuple(self._entries.values()):
            if entry.place is _Place.GATHERED:
                self._submit(entry)

    def _shown(self) -> list[PoolShown]:
        return [PoolShown(name, queue.pool.usage()[0]) for name, queue in self.queues.items()]

    def _route(self, decisions: Iterable[Decision]) -> None:
        """Tell each replica what was decided about its requests."""
        for decision in decisions:
            entry = self._entries.get(decision.request_id)
            if entry is None:
                continue
            session = entry.session
            match decision:
                case Send():
                    entry.place, entry.pool = _Place.SENT, decision.pool
                    lends = self._may_lend(entry, decision)
                    if lends:
                        self._lend(entry)
                    session.say(
                        Sent(
                            entry.id,
                            decision.pool,
                            decision.instance_id,
                            decision.priority,
                            decision.standing,
                            decision.held_seconds,
                            lends,
                        )
                    )
                    entry.sent_number = session.sent
                case Held():
                    session.say(
                        Waits(
                            entry.id,
                            decision.team_held,
                            decision.team_in_flight_slots,
                            decision.reserved_slots,
                            decision.pool_in_flight_slots,
                            decision.capacity_slots,
                        )
                    )
                case Recall():
                    entry.place = _Place.HELD
                    session.aborting.setdefault(entry.id, []).append(entry)
                    session.say(Recalled(entry.id, decision.instance_id, decision.wasted_slot_seconds))
                case Refused():
                    del self._entries[entry.key]
                    del session.entries[entry.id]
                    session.say(
                        Denied(entry.id, decision.reason, decision.found, decision.limit, decision.retry_after_seconds)
                    )
