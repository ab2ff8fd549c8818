"""Several replicas of the gateway in virtual time: the very machines of `fairshare.replicas`, links, and one store.

To the world each pool is a policy like any other (`ReplicatedPool`), except that decisions may come later: what is
under way between replicas and to the store are events of the cluster, which `tick` brings about one by one.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from fairshare.core.decisions import (
    Decision,
    DispatchQueue,
    Held,
    Instance,
    Mode,
    Recall,
    RefusalReason,
    Refused,
    Request,
    Send,
)
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.replicas.lease import CallKind, Lease, groups
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
from fairshare.replicas.messages import OnLink
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.replica import ReplicaOptions, SharedQueue
from fairshare.simulator.outcome import Reign
from fairshare.simulator.policies import PolicyName, hold_options
from fairshare.simulator.scenario import OWNER, PoolPlan, Replicas

STORE_SECONDS = 0.004
"""A call to the store and its answer."""

TIMER_SECONDS = 0.001
"""A replica's timers are not finer than this."""


RETRY_SECONDS = 1.0
"""A client that finds no replica at all tries again after it."""


@dataclass(slots=True)
class _Row:
    """What the store has of one lease."""

    epoch: int = 0
    owner: str = ""
    ends_at: float = -inf
    used: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    state: bytes = b""
    saved_at: float = 0.0


class _Store:
    """Leases and what owners saved, as `fairshare.storage.leases` keeps them; never down."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def carry_out(self, call: StoreCall, now: float) -> Lease | LeftBehind | bool:
        row = self._rows.setdefault(call.lease, _Row())
        match call:
            case LeaseCall():
                self._lease(row, call, now)
                return Lease(row.epoch, row.owner, row.owner, row.ends_at - now)
            case LoadCall():
                if call.epoch != row.epoch:
                    return False
                age_seconds = now - row.saved_at
                usage = {
                    pool: {team: (cost_units, age_seconds) for team, cost_units in by_team.items()}
                    for pool, by_team in row.used.items()
                }
                return LeftBehind(usage=usage, state=row.state)
            case SaveCall():
                if call.epoch != row.epoch:
                    return False
                row.used, row.state, row.saved_at = call.used, call.state, now
                return True

    @staticmethod
    def _lease(row: _Row, call: LeaseCall, now: float) -> None:
        mine = row.epoch == call.call.epoch and row.ends_at > now
        match call.call.kind:
            case CallKind.ACQUIRE:
                if row.ends_at <= now or row.owner == call.owner:
                    row.epoch, row.owner, row.ends_at = row.epoch + 1, call.owner, now + call.seconds
            case CallKind.RENEW:
                if mine:
                    row.ends_at = now + call.seconds
            case CallKind.RELEASE:
                if mine:
                    row.ends_at = now
            case CallKind.LOOK:
                pass


class _Replica:
    """One life of one gateway process: the shell of its members (`fairshare.replicas.member.Ports`)."""

    def __init__(self, cluster: "Cluster", place: int, life: int) -> None:
        self._cluster = cluster
        self.name = f"replica-{place}" if not life else f"replica-{place}.{life}"
        self.place = place
        self.lives = True
        self.links: set[str] = set()
        self.router = Router(lambda peer, message: None)
        self.parts: dict[str, int] = {}
        """Lease to the number of parts of the queues that this process made last."""
        self.due = cluster.clock()
        self._flushes = False
        for lease, pools in cluster.groups.items():
            settings = self.new_queues(lease, 1)
            member = Member(
                lease=lease,
                replica=self.name,
                address=self.name,
                settings=settings,
                ports=self,
                options=cluster.options,
            )
            self.router.add(member)
            for pool in pools:
                for instance in cluster.instances[pool].values():
                    member.queue(pool).instance_changed(instance)

    def queue(self, pool: str) -> SharedQueue:
        return next(member for member in self.router.members if pool in member.pools).queue(pool)

    def does(self, event: Callable[[], list[Decision] | None]) -> None:
        """Everything that happens in the process: then what it says goes out, and its timer is set."""
        if not self.lives:
            return
        cluster = self._cluster
        said = event()
        if said:
            cluster.said += said
        while self._flushes:
            self._flushes = False
            for member in self.router.members:
                member.flush()
        deadline = min(member.next_deadline() for member in self.router.members)
        self.due = max(deadline, cluster.clock() + TIMER_SECONDS)
        for member in self.router.members:
            cluster.see_who_decides(self, member)

    def tick(self) -> None:
        for member in self.router.members:
            if member.next_deadline() <= self._cluster.clock():
                member.tick()

    # ------------------------------------------------------------------ Ports

    def clock(self) -> float:
        return self._cluster.clock()

    def send(self, peer: str, message: OnLink) -> None:
        receiver = self._cluster.living.get(peer)  # None: it died, and this side does not know it yet
        if receiver is not None and peer in self.links:
            self._cluster.later(self._cluster.link_seconds, receiver, lambda: self._reach(receiver, message))

    def _reach(self, receiver: "_Replica", message: OnLink) -> None:
        if self.name in receiver.links:
            receiver.router.received(self.name, (message,))

    def decided(self, decisions: list[Decision]) -> None:
        self._cluster.said += decisions

    def soon(self) -> None:
        self._flushes = True

    def call(self, call: StoreCall) -> None:
        cluster = self._cluster

        def arrives() -> None:
            answer = cluster.store.carry_out(call, cluster.clock())
            cluster.later(STORE_SECONDS / 2.0, self, lambda: member.answered(call, answer))

        member = next(one for one in self.router.members if one.lease == call.lease)
        cluster.later(STORE_SECONDS / 2.0, self, arrives)

    def owner_is(self, lease: str, owner: str, address: str) -> None:
        peer = self._cluster.living.get(owner)
        if peer is None or owner in self.links:
            return
        # One way and back, until both sides know each other.
        self._cluster.later(2.0 * self._cluster.link_seconds, self, lambda: self._linked(peer))

    def _linked(self, peer: "_Replica") -> None:
        if not peer.lives or peer.name in self.links:
            return
        self.links.add(peer.name)
        peer.links.add(self.name)
        self.router.connected(peer.name)
        peer.does(lambda: peer.router.connected(self.name))

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        self.parts[lease] = parts
        return self._cluster.new_queues(lease, parts)


class Cluster:
    """All replicas. Its pools are what the world drives; time is the world's."""

    def __init__(
        self,
        plan: Replicas,
        policy: PolicyName,
        pools: Sequence[tuple[PoolPlan, Pool, Sequence[Instance]]],
        clock: Callable[[], float],
    ) -> None:
        """`pools`: plan, shares and C (the pool itself counts nothing), and the instances of each."""
        self.clock = clock
        self.link_seconds = plan.link
        self.store = _Store()
        self.options = MemberOptions(
            owner=OwnerOptions(longest_request_seconds=plan.longest_request),
            replica=ReplicaOptions(replicas_expected=plan.count),
        )
        self.said: list[Decision] = []
        """Decisions that the world has not been told yet."""
        self.reigns: list[Reign] = []
        self._degraded_grants = 0
        """Of lives that are over."""
        self.groups = groups({each.name: each.fallback or None for each, _, _ in pools})
        self.instances = {each.name: {one.id: one for one in instances} for each, _, instances in pools}
        self._policy = policy
        self._plans = {each.name: each for each, _, _ in pools}
        self._pools = {each.name: pool for each, pool, _ in pools}
        self._events: list[tuple[float, int, _Replica, Callable[[], None]]] = []
        self._numbers = count()
        self._decides: dict[str, _Replica | None] = dict.fromkeys(self.groups)
        self.living: dict[str, _Replica] = {}
        self._turn: deque[_Replica] = deque()
        """Those that live; the first gets the next request."""
        self._lives = [0] * plan.count
        """Of each replica, how often it has begun."""
        self._at: dict[str, _Replica] = {}
        """Where each request is that has not ended."""
        self._recalled: dict[str, list[_Replica]] = {}
        """Requests whose connections to engines are being closed."""
        for place in range(plan.count):
            self.start(place)

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        """Fresh queues of a group, each over its C / parts."""
        made: dict[str, DispatchQueue] = {}

        def make(name: str) -> DispatchQueue:
            if name not in made:
                plan, shares = self._plans[name], self._pools[name].exact_shares
                pool = Pool(name, self._part(name, parts), shares, plan.half_life, clock=self.clock)
                made[name] = make_queue(
                    pool,
                    Mode.HOLD,
                    options=hold_options(self._policy, plan.hold.options()),
                    instances=self.instances[name].values(),
                    fallback=make(plan.fallback) if plan.fallback else None,
                )
            return made[name]

        return {name: make(name) for name in self.groups[lease]}

    # ------------------------------------------------------------------ time

    def later(self, seconds: float, replica: _Replica, what: Callable[[], None]) -> None:
        """In that time the replica does it, if it lives then."""
        heapq.heappush(self._events, (self.clock() + seconds, next(self._numbers), replica, what))

    def next_due(self) -> float:
        due = min((replica.due for replica in self._turn), default=inf)
        return min(due, self._events[0][0]) if self._events else due

    def step(self) -> list[Decision]:
        """What is due first: a message, an answer of the store, or a timer."""
        now = self.clock()
        if self._events and self._events[0][0] <= now:
            _, _, replica, what = heapq.heappop(self._events)
            replica.does(what)
        else:
            for replica in sorted(self._turn, key=lambda one: one.place):
                if replica.due <= now:
                    replica.does(replica.tick)
        return self.take()

    def take(self) -> list[Decision]:
        """What was decided since it was asked last."""
        said, self.said = self.said, []
        for decision in said:
            match decision:
                case Refused():
                    self._at.pop(decision.request_id, None)
                case Recall():
                    self._recalled.setdefault(decision.request_id, []).append(self._at[decision.request_id])
                case Send() | Held():
                    pass
        return said

    # ------------------------------------------------------------------ requests

    def submitted(self, pool: str, request: Request) -> list[Decision]:
        """A request goes to the next replica that lives, in turn, as a load balancer does it."""
        if not self._turn:
            reason = RefusalReason.NO_OWNER
            return [Refused(request_id=request.id, reason=reason, found=0, limit=0, retry_after_seconds=RETRY_SECONDS)]
        replica = self._turn[0]
        self._turn.rotate(-1)
        self._at[request.id] = replica
        replica.does(lambda: replica.queue(pool).submitted(request))
        return self.take()

    def began(self, pool: str, request_id: str) -> list[Decision]:
        replica = self._at[request_id]
        replica.does(lambda: replica.queue(pool).first_byte(request_id))
        return self.take()

    def released(self, pool: str, request_id: str, consumed_cost_units: float) -> list[Decision]:
        replica = self._at.pop(request_id)
        replica.does(lambda: replica.queue(pool).released(request_id, consumed_cost_units))
        return self.take()

    def aborted(self, pool: str, request_id: str) -> list[Decision]:
        """The connection of a request that was recalled is closed; nobody counts it where its replica is dead."""
        recalled = self._recalled[request_id]
        replica = recalled.pop(0)
        if not recalled:
            del self._recalled[request_id]
        replica.does(lambda: replica.queue(pool).aborted(request_id))
        return self.take()

    def reassigned(self, pool: str, request_id: str, excluding: frozenset[str]) -> str | None:
        replica, found = self._at[request_id], None

        def moves() -> None:
            nonlocal found
            found = replica.queue(pool).reassigned(request_id, excluding)

        replica.does(moves)
        return found

    # ------------------------------------------------------------------ pools

    def capacity_changed(self, pool: str) -> list[Decision]:
        """Every replica sees it by itself."""
        lease = next(lease for lease, pools in self.groups.items() if pool in pools)

        def changes(replica: _Replica) -> list[Decision]:
            queue = replica.queue(pool)
            queue.pool.set_capacity(self._part(pool, replica.parts[lease]))
            return queue.capacity_changed()

        return self._each(changes)

    def instance_changed(self, pool: str, instance: Instance) -> list[Decision]:
        self.instances[pool][instance.id] = instance
        return self._each(lambda replica: replica.queue(pool).instance_changed(instance))

    def _part(self, pool: str, parts: int) -> int:
        capacity = self._pools[pool].capacity
        return capacity if parts == 1 else max(1, capacity // parts)

    def _each(self, event: Callable[[_Replica], list[Decision]]) -> list[Decision]:
        for replica in tuple(self._turn):
            replica.does(lambda replica=replica: event(replica))
        return self.take()

    # ------------------------------------------------------------------ lives

    def kill(self, which: int | str) -> tuple[int, list[str]] | None:
        """End a replica's process at once: by its number, or the owner of the first pool's.

        Returns its number and the requests that were in it; None: it is dead already, or there is no owner.
        """
        if which == OWNER:
            victim = next(iter(self._decides.values()))
        else:
            victim = next((replica for replica in self._turn if replica.place == which), None)
        if victim is None:
            return None
        victim.lives = False
        del self.living[victim.name]
        self._turn.remove(victim)
        for lease, owner in self._decides.items():
            if owner is victim:
                self._reigns(lease, None)
        self._degraded_grants += _degraded_grants(victim)
        for peer in [self.living[name] for name in sorted(victim.links)]:
            self.later(self.link_seconds, peer, lambda peer=peer: self._hangs_up(peer, victim.name))
        lost = [request_id for request_id, replica in self._at.items() if replica is victim]
        for request_id in lost:
            del self._at[request_id]
        return victim.place, lost

    def start(self, place: int) -> None:
        """A replica begins, with nothing of what an earlier life of it knew."""
        life = self._lives[place]
        self._lives[place] += 1
        replica = _Replica(self, place, life)
        self.living[replica.name] = replica
        self._turn.append(replica)

    @staticmethod
    def _hangs_up(peer: _Replica, name: str) -> None:
        peer.links.discard(name)
        peer.router.disconnected(name)

    def see_who_decides(self, replica: _Replica, member: Member) -> None:
        decides = self._decides[member.lease] is replica
        if member.role is Role.OWNER and not decides:
            self._reigns(member.lease, replica)
        elif member.role is not Role.OWNER and decides:
            self._reigns(member.lease, None)

    def _reigns(self, lease: str, replica: _Replica | None) -> None:
        self._decides[lease] = replica
        self.reigns.append(Reign(float(self.clock()), lease, "" if replica is None else replica.name))

    @property
    def degraded_grants(self) -> int:
        """Requests that replicas sent on their own, over all lives."""
        return self._degraded_grants + sum(map(_degraded_grants, self._turn))


def _degraded_grants(replica: _Replica) -> int:
    return sum(member.status().degraded_grants_total for member in replica.router.members)


class ReplicatedPool:
    """A pool of a cluster, as a `GatewayPolicy`: each request stays with the replica that it came to."""

    def __init__(self, cluster: Cluster, pool: str) -> None:
        self._cluster = cluster
        self._pool = pool

    def submitted(self, request: Request) -> list[Decision]:
        return self._cluster.submitted(self._pool, request)

    def first_byte(self, request_id: str) -> list[Decision]:
        return self._cluster.began(self._pool, request_id)

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        return self._cluster.released(self._pool, request_id, consumed_cost_units)

    def aborted(self, request_id: str) -> list[Decision]:
        return self._cluster.aborted(self._pool, request_id)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        return self._cluster.reassigned(self._pool, request_id, excluding)

    def capacity_changed(self) -> list[Decision]:
        return self._cluster.capacity_changed(self._pool)

    def instance_changed(self, instance: Instance) -> list[Decision]:
        return self._cluster.instance_changed(self._pool, instance)

    def tick(self) -> list[Decision]:
        return self._cluster.step()

    def next_deadline(self) -> float | None:
        return self._cluster.next_due()
