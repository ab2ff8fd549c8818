"""A replica's own part in a group of pools: what it has, whom it asks, and how it goes on when there is nobody to ask.

Pure. The gateway drives one `SharedQueue` per pool as it would drive the pool's dispatch queue. While there is an owner
every event goes there and the decisions come back; without one the replica waits for a moment and then decides itself,
over its part of C, for a bounded time (degraded). Whatever it did then it announces to the next owner.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fairshare.core.decisions import (
    Decision,
    DispatchQueue,
    Held,
    Instance,
    Mode,
    QueueStat,
    Recall,
    RefusalReason,
    Refused,
    Request,
    Send,
)
from fairshare.core.pool import Grant, Pool
from fairshare.core.priority import Standing, within_share_priority
from fairshare.core.usage import countable_cost_units
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How long a replica does without an owner, in seconds."""

    degrade_after_seconds: float = 1.5
    """So long new requests wait for an owner; then the replica decides itself."""
    degraded_longest_seconds: float = 300.0
    """So long it decides itself; then it refuses what is new and what it holds."""
    alive_every_seconds: float = 5.0
    """Between two lists of what runs."""
    replicas_expected: int = 1
    """How many share a pool with this one among them, as long as no owner has said it."""
    beat_every_seconds: float = 1.0
    """Between two questions how long the owner may be trusted."""
    lent_seconds: float = 1.0
    """A slot that was lent serves for so long, with whatever it has begun by then."""
    idle_seconds: float = 0.025
    """One that served nothing for so long (up to twice as long, as it is looked for) is given back."""


class ReplicaState(Enum):
    """Who decides about this replica's requests."""

    FOLLOWING = "following"
    """The owner."""
    WAITING = "waiting"
    """Nobody, for a moment: requests wait."""
    DEGRADED = "degraded"
    """The replica itself, over its part of the pool."""
    REFUSING = "refusing"
    """Nobody, and for too long."""


class _Slot:
    """A slot that the owner lent: it may serve one request of its team after the other."""

    __slots__ = ("id", "instance_id", "until")

    def __init__(self, id: str, until: float) -> None:
        self.id = id
        """Of the request with which it was lent: under this the owner knows it, whatever it serves."""
        self.until = until
        """When it begins nothing any more."""
        self.instance_id = ""
        """Where it is, while it is free."""


class _FreeSlots:
    """Lent slots of one team that serve nothing now, the one that ended last at the end."""

    __slots__ = ("slots", "unused")

    def __init__(self) -> None:
        self.slots: list[_Slot] = []
        self.unused = 0
        """So many, from the beginning, have served nothing since they were last looked at."""

    def take(self) -> _Slot:
        slot = self.slots.pop()
        self.unused = min(self.unused, len(self.slots))
        return slot


class _Mine:
    """A request of this replica that has not ended."""

    __slots__ = (
        "began",
        "instance_id",
        "known_to",
        "pool",
        "priority",
        "request",
        "sent",
        "slot",
        "standing",
        "submitted",
    )

    def __init__(self, request: Request, submitted: Submitted) -> None:
        self.request = request
        self.submitted = submitted
        self.sent = False
        """Whether it was sent to an engine; else it is held."""
        self.began = False
        self.pool = submitted.pool
        """Whose capacity it uses."""
        self.known_to = submitted.pool
        """The pool whose local queue has it, while degraded."""
        self.instance_id = ""
        self.priority: int | None = None
        self.standing = Standing.BORROWING
        self.slot: _Slot | None = None
        """The one that was lent, if it uses such a one."""

    @property
    def owners_id(self) -> str:
        """Under which the owner knows what it uses."""
        return self.request.id if self.slot is None else self.slot.id

    def grant(self) -> LiveGrant:
        return LiveGrant(self.submitted, self.pool, self.instance_id, self.priority, self.standing, self.began)


class Replica:
    """All requests of one replica in a group of pools."""

    def __init__(
        self,
        *,
        replica: str,
        pools: Sequence[str],
        local: Callable[[int], Mapping[str, DispatchQueue]],
        options: ReplicaOptions,
        clock: Callable[[], float],
        soon: Callable[[], None],
    ) -> None:
        """
        Args:
            replica: the name of this life of this process.
            pools: of the group.
            local: makes fresh queues of the group's pools over C / n, given n; they know their instances.
            options: times.
            clock: the pools' clock, seconds.
            soon: called when there is something in the outbox: send it in this turn.
        """
        self.name = replica
        self.state = ReplicaState.WAITING
        self.since = clock()
        """When it came into this state."""
        self.epoch = 0
        """Of the last owner that it followed."""
        self.replicas = options.replicas_expected
        """How many there were, as the last owner said."""
        self.degraded_grants_total = 0
        self._options = options
        self._clock = clock
        self._soon = soon
        self._make_local = local
        self._local: Mapping[str, DispatchQueue] = {}
        """While degraded."""
        self._alone_since = clock()
        self._is_welcome = False
        """The owner that it announced itself to has answered: it is one."""
        self._shown: Sequence[PoolShown] = ()
        self._mine: dict[str, _Mine] = {}
        self._charges: dict[int, Released] = {}
        """By number: all that are not known to be saved."""
        self._charged = 0
        self._untold: dict[tuple[str, str], int] = {}
        """Pool and team → the number of their charge that no owner has been told of."""
        self._outbox: list[Message] = []
        self._free: dict[tuple[str, str], _FreeSlots] = {}
        """By pool and team."""
        self._free_looked_at = math.inf
        """When free slots are looked for that nobody uses, and what could wait so long is said."""
        self._heard = 0
        self._alive_at = 0.0
        self._beat_at = 0.0
        self._trusts_until = math.inf
        """What arrives before was decided by an owner that had the right to."""
        self._instances: dict[str, dict[str, Instance]] = {pool: {} for pool in pools}
        self._exchange: Callable[[list[Message]], list[Message]] | None = None
        self._supervised: Callable[[str, Callable[[DispatchQueue], list[Decision]]], None] | None = None
        self._owned: Callable[[str], DispatchQueue] | None = None

    def queue(self, pool: str, settings: DispatchQueue) -> "SharedQueue":
        """What the gateway drives for a pool.

        `settings`: a queue of the pool that nobody drives, for who asks about mode and pool while no other is at hand.
        """
        return SharedQueue(self, pool, settings)

    @property
    def unsaved_charges(self) -> int:
        """Charges that it keeps until an owner has saved them."""
        return len(self._charges)

    @property
    def is_welcome(self) -> bool:
        """The owner that it asks is one: it has answered."""
        return self.state is ReplicaState.FOLLOWING and self._is_welcome

    @property
    def requests(self) -> int:
        """That have not ended."""
        return len(self._mine)

    # ------------------------------------------------------------------ the owner

    def begin(self) -> None:
        """It is alone from now on, if there is nobody; not while its process was getting ready."""
        self._alone_since = self.since = self._clock()

    def own(
        self,
        exchange: Callable[[list[Message]], list[Message]],
        supervised: Callable[[str, Callable[[DispatchQueue], list[Decision]]], None],
        owned: Callable[[str], DispatchQueue],
    ) -> list[Decision]:
        """This process is the owner: messages are exchanged at once, without a link.

        Args:
            exchange: gives the owner messages, returns what it says to this replica.
            supervised: `Owner.supervised`.
            owned: the owner's queue of a pool.
        """
        self._outbox = self.connected()
        self._exchange, self._supervised, self._owned = exchange, supervised, owned
        return self.settle()

    def connected(self) -> list[Message]:
        """There is a link to the owner: what to say on it first. Whatever follows is in `take_outbox`."""
        now = self._clock()
        self._forget_slots()
        self._local = {}
        self._is_welcome = False
        self._enter(ReplicaState.FOLLOWING, now)
        self._heard = 0
        self._alive_at = now + self._options.alive_every_seconds
        self._beat_at = now + self._options.beat_every_seconds
        self._trusts_until = math.inf
        self._outbox.clear()
        self._untold.clear()
        return [
            Announce(
                self.name,
                tuple(self._charges.values()),
                tuple(mine.grant() for mine in self._mine.values() if mine.sent),
                tuple(mine.submitted for mine in self._mine.values() if not mine.sent),
                now,
                True,
            )
        ]

    def disconnected(self) -> None:
        """The owner is out of reach, or is none any more."""
        if self.state is not ReplicaState.FOLLOWING:
            return
        self._exchange = self._supervised = self._owned = None
        self._outbox.clear()
        self._forget_slots()
        now = self._clock()
        if self._is_welcome:
            # Else it only asked one that is no owner, and has been alone all the time.
            self._alone_since = now
        self._enter(ReplicaState.WAITING, now)

    def take_outbox(self) -> list[Message]:
        """What to send on the link now."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def settle(self) -> list[Decision]:
        """Exchange everything with the owner in this process, if it is here."""
        decisions: list[Decision] = []
        while self._exchange is not None:
            said = self._exchange(self.take_outbox())
            if not said:
                break
            decisions += self.received(said)
        return decisions

    def received(self, messages: Iterable[Message]) -> list[Decision]:
        """The owner said something. If the state is not `FOLLOWING` afterwards, hang up and look for another."""
        decisions: list[Decision] = []
        now = self._clock()
        for message in messages:
            if self._exchange is None and now >= self._trusts_until:
                self.disconnected()
            if self.state is not ReplicaState.FOLLOWING:
                break
            self._heard += 1
            match message:
                case Sent():
                    self._sent(message, now, decisions)
                case CallBack():
                    self._call_back(message.team)
                case Waits():
                    self._waits(message, decisions)
                case Recalled():
                    self._recalled(message, decisions)
                case Denied():
                    self._denied(message, decisions)
                case Welcome():
                    if message.epoch < self.epoch:
                        self.disconnected()  # an owner of the past that does not know it yet
                        break
                    self.epoch = message.epoch
                    self._is_welcome = True
                    self._trusts_until = message.at + message.trusted_seconds
                    self._refreshed(message)
                case Trust():
                    self._trusts_until = message.at + message.trusted_seconds
                case Refresh():
                    self._refreshed(message)
                case Resigned():
                    self.disconnected()
                case _:
                    pass
        return decisions

    def tick(self) -> list[Decision]:
        """Time passed: call at `next_deadline()`."""
        now = self._clock()
        if self.state is ReplicaState.FOLLOWING:
            if self._exchange is None and now >= self._trusts_until:
                self.disconnected()
                return []
            if now >= self._beat_at:
                self._beat_at = now + self._options.beat_every_seconds
                self._say(Beat(now))
            if now >= self._alive_at:
                self._alive_at = now + self._options.alive_every_seconds
                running = [mine.owners_id for mine in self._mine.values() if mine.sent]
                running += [slot.id for free in self._free.values() for slot in free.slots]
                self._say(Alive(self._heard, running))
            if now >= self._free_looked_at:
                self._look_at_free(now)
            return self.settle()
        if self.state is ReplicaState.WAITING and now >= self._alone_since + self._options.degrade_after_seconds:
            return self._degrade(now)
        if self.state is ReplicaState.DEGRADED:
            if now >= self._alone_until:
                return self._refuse(now)
            decisions: list[Decision] = []
            for local in self._local.values():
                deadline = local.next_deadline()
                if deadline is not None and deadline <= now:
                    decisions += local.tick()
            return self._decided(decisions)
        return []

    @property
    def _alone_until(self) -> float:
        """When it stops to decide alone, whoever it has asked in vain meanwhile."""
        return self._alone_since + self._options.degrade_after_seconds + self._options.degraded_longest_seconds

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing waits for time."""
        match self.state:
            case ReplicaState.FOLLOWING:
                due = min(self._alive_at, self._beat_at, self._free_looked_at)
                return due if self._exchange is not None else min(due, self._trusts_until)
            case ReplicaState.WAITING:
                return self._alone_since + self._options.degrade_after_seconds
            case ReplicaState.DEGRADED:
                deadlines = [local.next_deadline() for local in self._local.values()]
                return min([self._alone_until, *(deadline for deadline in deadlines if deadline is not None)])
            case ReplicaState.REFUSING:
                return None

    # ------------------------------------------------------------------ events of requests, from `SharedQueue`

    def submitted(self, pool: str, request: Request) -> list[Decision]:
        if request.id in self._mine:
            raise ValueError(f"request {request.id!r} was submitted already and is not finished")
        submitted = Submitted.of(request, pool)
        mine = self._mine[request.id] = _Mine(request, submitted)
        match self.state:
            case ReplicaState.FOLLOWING:
                if self._free and (slot := self._take_free(pool, request)) is not None:
                    mine.slot, mine.instance_id = slot, slot.instance_id
                    mine.priority, mine.standing = within_share_priority(request.service_class), Standing.WITHIN_SHARE
                    return [self._send(mine, 0.0)]
                self._say(submitted)
                return self.settle()
            case ReplicaState.WAITING:
                return []
            case ReplicaState.DEGRADED:
                return self._decided(self._local[pool].submitted(request))
            case ReplicaState.REFUSING:
                return [self._refused(mine, self._clock())]

    def first_byte(self, request_id: str) -> list[Decision]:
        mine = self._mine.get(request_id)
        if mine is None or not mine.sent or mine.began:
            return []
        mine.began = True
        if self.state is ReplicaState.FOLLOWING:
            if mine.slot is not None:
                return []  # the owner takes what is lent for begun
            self._say(Began(request_id))
            return self.settle()
        if self.state is ReplicaState.DEGRADED:
            return self._decided(self._local[mine.known_to].first_byte(request_id))
        return []

    def released(self, request_id: str, cost_units: float) -> list[Decision]:
        mine = self._mine.pop(request_id, None)
        if mine is None:
            return []
        slot = mine.slot
        keeps = slot is not None and self._clock() < slot.until
        was_lent = slot is not None and slot.id != request_id
        # Without an id it is a charge. Nor has a request ended whose slot served another one after it: the owner would
        # learn from its life how long the team's requests take.
        charge = self._charge("" if keeps or was_lent else request_id, mine, cost_units)
        if keeps:
            self._keep(mine, charge)
            return []
        if self.state is ReplicaState.FOLLOWING:
            self._say(charge)
            if slot is not None and was_lent:
                self._say(Returned(slot.id))
            return self.settle()
        if self.state is ReplicaState.DEGRADED:
            return self._decided(self._local[mine.known_to].released(request_id, cost_units))
        return []

    def _charge(self, ended_id: str, mine: _Mine, cost_units: float) -> Released:
        """Number what a request consumed, and keep it until it is saved.

        Without an owner it goes into one charge of its pool and team: there may be minutes of them, and all that is
        kept is announced at once.
        """
        self._charged += 1
        pool, team = mine.pool, mine.submitted.team
        if self.state is not ReplicaState.FOLLOWING:
            before = self._charges.pop(self._untold.get((pool, team), 0), None)
            if before is not None:
                cost_units = countable_cost_units(before.cost_units) + countable_cost_units(cost_units)
            self._untold[pool, team] = self._charged
        charge = self._charges[self._charged] = Released(self._charged, ended_id, pool, team, cost_units)
        return charge

    def cancelled(self, request_id: str) -> list[Decision]:
        mine = self._mine.get(request_id)
        if mine is None or mine.sent:
            return []
        del self._mine[request_id]
        if self.state is ReplicaState.FOLLOWING:
            self._say(Cancelled(request_id))
            return self.settle()
        if self.state is ReplicaState.DEGRADED:
            return self._decided(self._local[mine.known_to].cancelled(request_id))
        return []

    def aborted(self, pool: str, request_id: str) -> list[Decision]:
        if self.state is ReplicaState.FOLLOWING:
            self._say(Aborted(request_id))
            return self.settle()
        if self.state is ReplicaState.DEGRADED:
            mine = self._mine.get(request_id)
            known_to = pool if mine is None else mine.known_to
            return self._decided(self._local[known_to].aborted(request_id))
        return []

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        mine = self._mine.get(request_id)
        if mine is None or not mine.sent:
            return None
        if self.state is ReplicaState.DEGRADED:
            instance_id = self._local[mine.known_to].reassigned(request_id, excluding)
        else:
            instance_id = self._other_instance(mine, excluding | {mine.instance_id})
        if instance_id is not None:
            mine.instance_id = instance_id
            if self.state is ReplicaState.FOLLOWING:
                self._say(Moved(mine.owners_id, instance_id))
        return instance_id

    def supervise(self, pool: str, event: Callable[[DispatchQueue], list[Decision]]) -> list[Decision]:
        """Something that concerns no single request happened to a pool."""
        if self._supervised is not None:
            self._supervised(pool, event)
            return self.settle()
        if self.state is ReplicaState.DEGRADED:
            return self._decided(event(self._local[pool]))
        return []

    def instance_changed(self, pool: str, instance: Instance) -> list[Decision]:
        self._instances[pool][instance.id] = instance
        if not instance.accepting:
            self._leave_instance(pool, instance.id)
        return self.supervise(pool, lambda queue: queue.instance_changed(instance))

    def instance_removed(self, pool: str, instance_id: str) -> list[Decision]:
        self._instances[pool].pop(instance_id, None)
        self._leave_instance(pool, instance_id)
        return self.supervise(pool, lambda queue: queue.instance_removed(instance_id))

    def deciding(self, pool: str) -> DispatchQueue | None:
        """The queue in this process that decides now; None: it is elsewhere, or nobody decides."""
        return self._owned(pool) if self._owned is not None else self._local.get(pool)

    # ------------------------------------------------------------------ what the owner said

    def _sent(self, message: Sent, now: float, decisions: list[Decision]) -> None:
        mine = self._mine.get(message.id)
        if mine is None or mine.sent:
            return  # it ended, or goes on where it is: the owner hears of that
        mine.pool, mine.instance_id = message.pool, message.instance_id
        mine.priority, mine.standing = message.priority, message.standing
        if message.lent:
            mine.slot = _Slot(message.id, now + self._options.lent_seconds)
        decisions.append(self._send(mine, message.held_seconds))

    def _send(self, mine: _Mine, held_seconds: float) -> Send:
        mine.sent, mine.began = True, False
        request, priority, standing = mine.request, mine.priority, mine.standing
        return Send(
            request_id=request.id,
            pool=mine.pool,
            instance_id=mine.instance_id,
            grant=Grant.remote(
                request.team,
                0 if priority is None else priority,
                standing is Standing.BORROWING,
                False,
                _reported_by_the_shell,
            ),
            priority=priority,
            standing=standing,
            held_seconds=held_seconds,
        )

    def _waits(self, message: Waits, decisions: list[Decision]) -> None:
        if message.id in self._mine:
            decisions.append(
                Held(
                    request_id=message.id,
                    team_held=message.team_held,
                    team_in_flight_slots=message.team_in_flight_slots,
                    reserved_slots=message.reserved_slots,
                    pool_in_flight_slots=message.pool_in_flight_slots,
                    capacity_slots=message.capacity_slots,
                )
            )

    def _recalled(self, message: Recalled, decisions: list[Decision]) -> None:
        mine = self._mine.get(message.id)
        if mine is None or not mine.sent:
            # It ended meanwhile, as the owner hears; nothing of it is left at the engine.
            self._say(Aborted(message.id))
            return
        if mine.began:
            self._say(Kept(mine.grant()))
            return
        mine.sent = False
        decisions.append(
            Recall(
                request_id=message.id,
                instance_id=mine.instance_id,
                wasted_slot_seconds=message.wasted_slot_seconds,
            )
        )

    def _denied(self, message: Denied, decisions: list[Decision]) -> None:
        mine = self._mine.get(message.id)
        if mine is None or mine.sent:
            return
        del self._mine[message.id]
        decisions.append(
            Refused(
                request_id=message.id,
                reason=message.reason,
                found=message.found,
                limit=message.limit,
                retry_after_seconds=message.retry_after_seconds,
            )
        )

    def _refreshed(self, message: Welcome | Refresh) -> None:
        self.replicas = message.replicas
        if message.pools:
            self._shown = message.pools
        for number in tuple(self._charges):  # in order
            if number > message.saved:
                break
            del self._charges[number]

    # ------------------------------------------------------------------ slots that were lent

    def _keep(self, mine: _Mine, charge: Released) -> None:
        """Its slot is free for the team's next request here; the owner hears of the charge with what is said next."""
        assert mine.slot is not None
        mine.slot.instance_id = mine.instance_id
        free = self._free.get((mine.pool, mine.submitted.team))
        if free is None:
            free = self._free[mine.pool, mine.submitted.team] = _FreeSlots()
        free.slots.append(mine.slot)
        self._outbox.append(charge)
        if self._free_looked_at == math.inf:
            self._free_looked_at = self._clock() + self._options.idle_seconds
            self._soon()  # whoever keeps the time learns of it

    def _take_free(self, pool: str, request: Request) -> _Slot | None:
        """A slot for this request, about which the owner need not be asked; None: there is none that it can use."""
        free = self._free.get((pool, request.team))
        if free is None or not free.slots or request.slots != 1:
            return None
        slot, now = free.slots[-1], self._clock()
        if now >= self._trusts_until or now >= slot.until:
            return None
        if request.state_instance is not None and request.state_instance != slot.instance_id:
            return None
        if request.preferred_instances and slot.instance_id not in request.preferred_instances:
            return None
        return free.take()

    def _look_at_free(self, now: float) -> None:
        """Give back what served nothing since the last look, and say what could wait."""
        for place, free in tuple(self._free.items()):
            self._give_back(free.slots[: free.unused])
            del free.slots[: free.unused]
            free.unused = len(free.slots)
            if not free.slots:
                del self._free[place]
        if self._outbox:
            self._soon()
        self._free_looked_at = now + self._options.idle_seconds if self._free else math.inf

    def _give_back(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            self._say(Returned(slot.id))

    def _call_back(self, team: str) -> None:
        for (pool, name), free in tuple(self._free.items()):
            if name == team:
                self._give_back(free.slots)
                del self._free[pool, name]
        for mine in self._mine.values():
            if mine.slot is not None and mine.submitted.team == team:
                mine.slot.until = -math.inf
        self._say(CalledBack(team))

    def _leave_instance(self, pool: str, instance_id: str) -> None:
        """It gets nothing new: slots there serve no more."""
        for (name, _), free in self._free.items():
            if name == pool:
                self._give_back(slot for slot in free.slots if slot.instance_id == instance_id)
                free.slots = [slot for slot in free.slots if slot.instance_id != instance_id]
                free.unused = min(free.unused, len(free.slots))
        for mine in self._mine.values():
            if mine.slot is not None and mine.pool == pool and mine.instance_id == instance_id:
                mine.slot.until = -math.inf

    def _forget_slots(self) -> None:
        """Nobody lends any more; what runs is announced as what it is."""
        self._free.clear()
        self._free_looked_at = math.inf
        for mine in self._mine.values():
            mine.slot = None

    # ------------------------------------------------------------------ without an owner

    def _degrade(self, now: float) -> list[Decision]:
        """Decide alone from now on: over a part of C, in which all counts that this replica has running."""
        self._enter(ReplicaState.DEGRADED, now)
        local = self._local = self._make_local(self.replicas)
        for shown in self._shown:
            if (queue := local.get(shown.pool)) is not None:
                for team, cost_units in shown.usage.items():
                    queue.pool.set_usage(team, cost_units)
        decisions: list[Decision] = []
        for mine in self._mine.values():
            mine.known_to = mine.pool if mine.sent else mine.submitted.pool
            if mine.sent:
                decisions += local[mine.known_to].adopted(
                    mine.request,
                    instance_id=mine.instance_id,
                    priority=mine.priority,
                    standing=mine.standing,
                    began=mine.began,
                )
        for mine in tuple(self._mine.values()):
            if not mine.sent:
                decisions += local[mine.known_to].submitted(mine.request)
        return self._decided(decisions)

    def _decided(self, decisions: list[Decision]) -> list[Decision]:
        """Remember what a local queue decided."""
        for decision in decisions:
            mine = self._mine.get(decision.request_id)
            if mine is None:
                continue
            match decision:
                case Send():
                    self.degraded_grants_total += 1
                    decision.degraded = True
                    mine.sent, mine.began = True, False
                    mine.pool, mine.instance_id = decision.pool, decision.instance_id
                    mine.priority, mine.standing = decision.priority, decision.standing
                case Recall():
                    mine.sent = False
                case Refused():
                    del self._mine[decision.request_id]
                case Held():
                    pass
        return decisions

    def _refuse(self, now: float) -> list[Decision]:
        """Too long alone: what runs may end, everything else is refused."""
        self._enter(ReplicaState.REFUSING, now)
        self._local = {}
        return [self._refused(mine, now) for mine in tuple(self._mine.values()) if not mine.sent]

    def _refused(self, mine: _Mine, now: float) -> Refused:
        del self._mine[mine.request.id]
        return Refused(
            request_id=mine.request.id,
            reason=RefusalReason.NO_OWNER,
            found=now - self._alone_since,
            limit=self._options.degraded_longest_seconds,
            retry_after_seconds=5.0,
        )

    def _say(self, message: Message) -> None:
        self._outbox.append(message)
        if self._exchange is None:
            self._soon()

    def _other_instance(self, mine: _Mine, excluding: frozenset[str]) -> str | None:
        """The instance with the fewest of this replica's own requests: it knows of no others."""
        mine_there = {
            instance_id: 0
            for instance_id, instance in self._instances.get(mine.pool, {}).items()
            if instance.accepting and instance_id not in excluding
        }
        for other in self._mine.values():
            if other.sent and other.instance_id in mine_there:
                mine_there[other.instance_id] += 1
        return min(mine_there, key=mine_there.__getitem__, default=None)

    def _enter(self, state: ReplicaState, now: float) -> None:
        if state is not self.state:
            self.state, self.since = state, now


def _reported_by_the_shell(cost_units: float) -> None:
    """A remote grant's release: `Replica.released` says it to the owner."""


class SharedQueue:
    """A pool's dispatch queue, wherever it is: a `DispatchQueue` whose decisions may come later."""

    def __init__(self, replica: Replica, pool: str, settings: DispatchQueue) -> None:
        self._replica = replica
        self._pool = pool
        self._settings = settings

    @property
    def _here(self) -> DispatchQueue:
        return self._replica.deciding(self._pool) or self._settings

    @property
    def pool(self) -> Pool:
        return self._here.pool

    @property
    def mode(self) -> Mode:
        return self._settings.mode

    def submitted(self, request: Request) -> list[Decision]:
        return self._replica.submitted(self._pool, request)

    def first_byte(self, request_id: str) -> list[Decision]:
        return self._replica.first_byte(request_id)

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        return self._replica.released(request_id, consumed_cost_units)

    def cancelled(self, request_id: str) -> list[Decision]:
        return self._replica.cancelled(request_id)

    def aborted(self, request_id: str) -> list[Decision]:
        return self._replica.aborted(self._pool, request_id)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        return self._replica.reassigned(request_id, excluding)

    def adopted(
        self, request: Request, *, instance_id: str, priority: int | None, standing: Standing, began: bool
    ) -> list[Decision]:
        raise NotImplementedError("a shared pool's requests come from its replicas, which announce them")

    def capacity_changed(self) -> list[Decision]:
        return self._replica.supervise(self._pool, lambda queue: queue.capacity_changed())

    def instance_changed(self, instance: Instance) -> list[Decision]:
        return self._replica.instance_changed(self._pool, instance)

    def instance_removed(self, instance_id: str) -> list[Decision]:
        return self._replica.instance_removed(self._pool, instance_id)

    def running_seen(self, instance_id: str, running: int) -> list[Decision]:
        return self._replica.supervise(self._pool, lambda queue: queue.running_seen(instance_id, running))

    def tick(self) -> list[Decision]:
        return self._replica.tick()

    def next_deadline(self) -> float | None:
        return self._replica.next_deadline()

    def snapshot(self) -> QueueStat:
        return self._here.snapshot()
