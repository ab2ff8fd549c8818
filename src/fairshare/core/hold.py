"""Late binding: requests wait here and are stamped when they leave for an engine (`dispatch: hold`).

An engine cannot change a request's priority once it has it, and a waiting request never displaces a running one in
vLLM. So a request stamped on arrival carries a standing that is soon wrong, and behind a backlog the reservation
collapses. A held request is stamped when a slot is free for it, with what is true then.

Who goes, in this order, in the same call in which a slot, a turn or capacity becomes free:

1. Owners: whatever fits in its team's whole slots, floor(share x C), at once, also when C slots are taken.
2. Turns: the fractions that whole slots leave over, held in turn by the smallest tag (start-time fair queueing).
3. Borrowers, only while fewer than C slots are taken: first a wide request of a team that was owed the slots it could
   not use (see `_TeamQueue.credit_slot_seconds`), then by the pool's borrow order.

Points in time are on the pool's clock, in seconds. A tag is virtual time, in slot-seconds per owned slot.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import ref

from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
    Held,
    HoldOptions,
    Instance,
    Mode,
    QueueStat,
    Recall,
    RefusalReason,
    Refused,
    Request,
    Send,
    TeamQueueStat,
)
from fairshare.core.heap import KeyedHeap
from fairshare.core.instances import InstanceLoad, InstanceTable
from fairshare.core.priority import ServiceClass, Standing, borrow_priority, within_share_priority

if TYPE_CHECKING:
    from fairshare.core.pool import Grant, Pool, TeamState

RECALL_WINDOW_SECONDS = 300.0
"""How deep the bucket of recall waste is: `recall_waste` of the pool's slot-seconds over five minutes."""

ESTIMATE_MEMORY_REQUESTS = 16
"""A team's estimates are the running mean over about this many of its last requests."""

CREDIT_LIMIT_REQUESTS = 8
"""A team that waits for room with a wide request is owed at most this many such requests."""

PASSED_PART = 0.1
"""How fast a team whose narrow requests pass a wide one pays for it: a tenth of its whole slots."""

TURN_DEBT_LIMIT_REQUESTS = 8
"""After wide requests, turns are left free for at most the time of this many requests of the pool."""

PAID_SLOT_SECONDS = 1e-6
"""A debt this small is paid: a deadline worked out from it may be early by the rounding of the clock."""

WEIGHTED_LF_BOUNDS = (0.5, 2.0)
"""`borrow_order: weighted` lets LF change a team's weight by at most this much."""


class SendKind(Enum):
    """By which right a request is sent."""

    OWNER = "whole slots"
    TURN = "turn slot"
    WIDE = "wide request of an owner"
    BORROWER = "idle capacity"


class _Estimates:
    """Running means of the last requests: plain means at first, then exponential."""

    __slots__ = ("cost_count", "cost_units_per_slot", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        """How long a request holds a slot."""
        self.cost_count = 0
        self.cost_units_per_slot = 0.0

    def add(self, seconds: float, cost_units_per_slot: float) -> None:
        """Add a request that ended. Of a consumption that cannot be charged (NaN, say) nothing is learned."""
        if self.count < ESTIMATE_MEMORY_REQUESTS:
            self.count += 1
        self.seconds += (seconds - self.seconds) / self.count
        if 0.0 <= cost_units_per_slot < math.inf:
            if self.cost_count < ESTIMATE_MEMORY_REQUESTS:
                self.cost_count += 1
            self.cost_units_per_slot += (cost_units_per_slot - self.cost_units_per_slot) / self.cost_count


class _Entry:
    """A request that is held or dispatched."""

    __slots__ = (
        "began",
        "estimate_slot_seconds",
        "grant",
        "held_since",
        "home",
        "instance_id",
        "kind",
        "queue",
        "recalled",
        "request",
        "sent_at",
        "sequence",
        "team",
        "too_late_at",
        "waited_seconds",
        "weight",
    )

    # Set when it is held.
    held_since: float
    """When it began to wait, the last time."""
    too_late_at: float
    """When it will have waited too long."""
    # Set when it is sent.
    team: "_TeamQueue"
    """The record of its team in `queue`."""
    grant: "Grant"
    instance_id: str
    kind: SendKind
    sent_at: float
    began: bool
    """Whether the client has received something."""
    weight: float
    """What its tag was divided by; 0: it moved no tag."""
    estimate_slot_seconds: float
    """What its tag was moved by, times `weight`."""

    def __init__(self, request: Request, home: "HoldQueue", sequence: int) -> None:
        self.request = request
        self.home = home
        """The queue it was submitted to."""
        self.queue: HoldQueue | None = None
        """The queue whose capacity it uses (its home's or the fallback's); None: held."""
        self.sequence = sequence
        self.waited_seconds = 0.0
        """How long it was held before it was sent."""
        self.recalled = False


_Lane = OrderedDict[int, _Entry]


class _Line:
    """Held requests of one team and class, first come first served; one lane per width beside the whole line."""

    __slots__ = ("entries", "lanes", "widths")

    def __init__(self) -> None:
        self.entries: _Lane = OrderedDict()
        self.lanes: dict[int, _Lane] = {}
        self.widths: list[int] = []
        """The lanes' widths in slots, narrowest first: whoever sends requests of a thousand widths delays nobody."""

    def add(self, entry: _Entry) -> None:
        slots = entry.request.slots
        lane = self.lanes.get(slots)
        if lane is None:
            lane = self.lanes[slots] = OrderedDict()
            insort(self.widths, slots)
        self.entries[entry.sequence] = lane[entry.sequence] = entry
        # A recalled request is older than those behind it; recalls come last sent first, so each goes to the front.
        if entry.recalled:
            self.entries.move_to_end(entry.sequence, last=False)
            lane.move_to_end(entry.sequence, last=False)

    def remove(self, entry: _Entry) -> None:
        slots = entry.request.slots
        lane = self.lanes[slots]
        del self.entries[entry.sequence], lane[entry.sequence]
        if not lane:
            del self.lanes[slots]
            del self.widths[bisect_left(self.widths, slots)]

    def first(self, widest_slots: int | None = None) -> _Entry | None:
        """The oldest request, of those that are at most `widest_slots` wide."""
        if not self.entries:
            return None
        oldest = next(iter(self.entries.values()))
        if widest_slots is None or oldest.request.slots <= widest_slots:
            return oldest
        found: _Entry | None = None
        for slots in self.widths:
            if slots > widest_slots:
                break
            entry = next(iter(self.lanes[slots].values()))
            if found is None or entry.sequence < found.sequence:
                found = entry
        return found


class _TeamQueue:
    """What the queue knows of one team."""

    __slots__ = (
        "batch",
        "borrow_end_tag",
        "borrow_floor",
        "credit_at",
        "credit_rate_slots",
        "credit_slot_seconds",
        "estimates",
        "fraction",
        "held",
        "held_bytes",
        "held_slots",
        "interactive",
        "lines",
        "name",
        "own_slots",
        "recallable",
        "recalled",
        "sent",
        "state",
        "turn_end_tag",
        "turn_floor",
        "turn_slots",
        "whole_slots",
        "wide_counts",
        "wide_slots",
        "wide_waits",
    )

    def __init__(self, name: str, state: "TeamState") -> None:
        self.name = name
        self.state = state
        self.whole_slots = 0
        self.fraction = 0.0
        self.own_slots = 0.0
        self.recalled = _Line()
        self.interactive = _Line()
        self.batch = _Line()
        self.lines = (self.recalled, self.interactive, self.batch)
        self.held = 0
        self.held_slots = 0
        self.held_bytes = 0
        self.sent = 0
        """Requests sent, for the turn of its batch requests (`batch_every`)."""
        self.estimates = _Estimates()
        self.turn_slots = 0
        """Slots of the request that holds a turn for it; not counted against its whole slots."""
        self.turn_end_tag = 0.0
        self.turn_floor = 0.0
        """Virtual time when it last began to hold requests. Its tag is never below: idling earns no hoard.

        While it goes on holding requests the floor stays, so that corrections of its end tag are not cut off.
        """
        self.borrow_end_tag = 0.0
        self.borrow_floor = 0.0
        self.recallable: OrderedDict[str, _Entry] = OrderedDict()
        """Its dispatched requests that may be taken back, in the order they were sent."""
        self.credit_slot_seconds = 0.0
        """Slot-seconds of its whole slots that it is owed because its next request is wider than what is left of them.

        Grows with the whole slots it cannot use while such a request waits, shrinks with what it holds above them.
        At 0 or above, its wide request goes before all borrowers, so that over time the team gets exactly what it
        owns, whatever the width. Below 0, it took more than it owns and waits (or borrows) until that is paid back.
        Narrow requests that fit are never held for it, so they may pass it; then a debt shrinks as `PASSED_PART` says,
        and at 0 the wide one goes at its turn. Else a team's own narrow load would starve it for ever.
        """
        self.credit_rate_slots = 0.0
        self.credit_at = 0.0
        self.wide_waits = False
        self.wide_slots = 0
        """Slots of its requests that went by this right."""
        self.wide_counts = False
        """Whether any of the numbers about wide requests may be other than 0."""

    @property
    def is_idle(self) -> bool:
        return not self.held and not self.turn_slots and not self.recallable and not self.credit_slot_seconds

    def counted_slots(self) -> int:
        """Slots counted against its whole slots: in flight and phantoms, without the turn."""
        return self.state.in_flight_slots + self.state.phantom_slots - self.turn_slots

    @property
    def turn_tag(self) -> float:
        return max(self.turn_floor, self.turn_end_tag)

    @property
    def borrow_tag(self) -> float:
        return max(self.borrow_floor, self.borrow_end_tag)

    def line(self, entry: _Entry) -> _Line:
        if entry.recalled:
            return self.recalled
        return self.interactive if entry.request.service_class is ServiceClass.INTERACTIVE else self.batch

    def next(self, batch_every: int, widest_slots: int | None = None) -> _Entry | None:
        """Its next request, of those at most `widest_slots` wide: recalled, then interactive, then batch, each FIFO.

        Every `batch_every`-th request is its oldest batch request: otherwise a team's own interactive load would
        starve its batch for ever.
        """
        entry = self.recalled.first(widest_slots)
        if entry is not None:
            return entry
        if batch_every and self.sent % batch_every == batch_every - 1:
            return self.batch.first(widest_slots) or self.interactive.first(widest_slots)
        return self.interactive.first(widest_slots) or self.batch.first(widest_slots)

    def oldest_sequence(self) -> int:
        """Sequence number of its oldest held request."""
        return min([next(iter(line.entries)) for line in self.lines if line.entries])


class HoldQueue:
    """The dispatch queue of a pool in `hold` mode; see the module's text and `DispatchQueue` for its events."""

    mode = Mode.HOLD

    def __init__(
        self,
        pool: "Pool",
        *,
        options: HoldOptions | None = None,
        instances: Iterable[Instance] = (),
        fallback: "HoldQueue | None" = None,
    ) -> None:
        self._pool = pool
        self._pool_name = pool.name
        self._options = options = options or HoldOptions()
        self._is_weighted = options.borrow_order is BorrowOrder.WEIGHTED
        self._instances = InstanceTable(instances)
        self._fallback = fallback
        self._guests: tuple[ref[HoldQueue], ...] = ()
        """The queues that fall back on this one. One that a reload replaced is gone when its last request has ended."""
        if fallback is not None:
            fallback._guests = (*map(ref, fallback._live_guests()), ref(self))
        self._teams: dict[str, _TeamQueue] = {}
        self._entries: dict[str, _Entry] = {}
        self._held: OrderedDict[str, _Entry] = OrderedDict()
        """Held requests by the time since when they are held."""
        self._held_again: KeyedHeap[float] = KeyedHeap()
        """Those of them that were taken back, by the time at which they will have waited too long in all."""
        self._held_bytes = 0
        self._next_sequence = 0
        self._changed = pool.watch()
        self._generation = -1
        self._turn_slots = 0
        self._turns_taken = 0
        self._turn_held_slots = 0
        """Slots of the requests that hold a turn: more than the turns when some are wide."""
        self._turn_debt_slot_seconds = 0.0
        """What wide requests took above the slots of the turns.

        Until it is paid back no turn is given. Else turns that are always held by wide requests would take a multiple
        of what the fractions add up to, at the cost of those who own whole slots and wait for room.
        """
        self._turn_debt_at = 0.0
        self._turn_virtual_time = 0.0
        self._borrow_virtual_time = 0.0
        self._turn_waiters: KeyedHeap[tuple[float, int]] = KeyedHeap()
        self._borrowers: KeyedHeap[tuple[float, int]] = KeyedHeap()
        self._wide_owed: KeyedHeap[int] = KeyedHeap()
        self._wide_due: KeyedHeap[float] = KeyedHeap()
        self._above: KeyedHeap[float] = KeyedHeap()
        """Teams above their reservation that have something to recall; most above its share first."""
        self._consumed: dict[str, float] = {}
        self._consumed_total = 0.0
        self._shares_total = 0.0
        self._estimates = _Estimates()
        """Of all teams."""
        self._aborting: dict[str, deque[tuple[str, int]]] = {}
        self._abort_ends: deque[tuple[float, str, int]] = deque()
        self._due_at = math.inf
        """Before this no held request has waited too long and no seat of a recalled one is free (pool clock)."""
        self._came_due = False
        """Whether time alone changed something that `_dispatch` has not seen yet."""
        now = pool.begin()
        self._waste_slot_seconds = self._waste_limit()
        self._waste_at = now
        self.recalls_total = 0
        self.recalled_slot_seconds_total = 0.0
        self._rebuild(now)

    @property
    def pool(self) -> "Pool":
        """The pool in which grants are counted."""
        return self._pool

    # ------------------------------------------------------------------ events

    def submitted(self, request: Request) -> list[Decision]:
        """A request arrived: `Send`, `Held` or `Refused`; others' decisions may follow.

        Raises:
            ValueError: `slots` is below 1, or a request with this id is not finished.
        """
        request_id, slots = request.id, request.slots
        if slots < 1:
            raise ValueError(f"slots of request {request_id!r} must be at least 1, got {slots}")
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} was submitted already and is not finished")
        now = self._pool.begin()
        decisions: list[Decision] = self._due(now) if now >= self._due_at else []
        accepting = self._instances.accepting
        if not accepting and self._fallback is None:
            decisions.append(self._refused(request_id, RefusalReason.NO_INSTANCE, 0, 1))
            return decisions
        team = self._teams.get(request.team) or self._team(request.team)
        entry = self._entries[request_id] = _Entry(request, self, self._next_sequence)
        self._next_sequence += 1
        changed = self._changed
        # The short way of what most requests are, an owner's with nothing of its team held: what `_pump` would do with
        # it, without asking what else may go. The team stays within its own, so nothing changes in `_above`.
        if accepting and not changed and slots <= team.whole_slots - team.counted_slots() and self._is_simple(team):
            self._dispatch_entry(team, entry, SendKind.OWNER, now, decisions)
            if len(changed) > 1:  # somebody was taken back for it
                decisions += self._pump(now)
            else:
                changed.clear()
            return decisions
        only_waits = self._only_waits(team, request)
        self._hold(team, entry, now)
        if only_waits:
            changed.clear()
        else:
            decisions += self._pump(now)
        if entry.queue is None:
            refusal = self._beyond_bounds(team, request)
            if refusal is None:
                decisions.append(self._held_decision(team, entry))
            else:
                self._drop(entry, now)
                self._refresh_changed(now, decisions)
                decisions.append(refusal)
        return decisions

    def first_byte(self, request_id: str) -> list[Decision]:
        """The client received something: the request can no longer be recalled."""
        entry = self._entries.get(request_id)
        if entry is not None and (queue := entry.queue) is not None and not entry.began:
            entry.began = True
            if entry.team.recallable.pop(request_id, None) is not None and queue._above.priorities:
                queue._refresh_above(entry.team)
        return []

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        """The engine has finished with a dispatched request. Idempotent; unknown and held requests change nothing."""
        now = self._pool.begin()
        decisions: list[Decision] = self._due(now) if now >= self._due_at else []
        entry = self._entries.get(request_id)
        if entry is None or (queue := entry.queue) is None:
            return decisions + self._pump(now)
        queue._end(entry, consumed_cost_units, now if queue is self else queue._pool.begin(), recalled=False)
        del self._entries[request_id]
        # The short way when nobody waits: bring up to date the one team that changed.
        if queue is self and not self._held and len(self._changed) == 1 and not (self._guests and self._guests_wait()):
            team = entry.team
            if self._is_simple(team):
                self._changed.clear()
                if self._above.priorities:
                    self._refresh_above(team)
                self._forget_if_idle(team)
                return decisions
        return decisions + self._pump_with(queue, now)

    def cancelled(self, request_id: str) -> list[Decision]:
        """The client of a held request left: it is gone at once. For a dispatched one nothing happens yet."""
        now = self._pool.begin()
        decisions = self._due(now)
        if request_id in self._held:
            self._drop(self._entries[request_id], now)
        return decisions + self._pump(now)

    def aborted(self, request_id: str) -> list[Decision]:
        """The engine's connection of a recalled request is closed; its seat is free `abort_grace_seconds` later."""
        now = self._pool.begin()
        decisions = self._due(now)
        for queue in (self, self._fallback):
            if queue is None:
                continue
            waiting = queue._aborting.get(request_id)
            if not waiting:
                continue
            instance_id, slots = waiting.popleft()
            if not waiting:
                del queue._aborting[request_id]
            ends_at = (now if queue is self else queue._pool.begin()) + queue._options.abort_grace_seconds
            queue._abort_ends.append((ends_at, instance_id, slots))
            queue._due_at = min(queue._due_at, ends_at)
            queue._end_aborts(ends_at - queue._options.abort_grace_seconds)
            return decisions + self._pump_with(queue, now)
        return decisions + self._pump(now)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        """Move a dispatched request's grant to another instance, never one of `excluding`. None: there is no other."""
        entry = self._entries.get(request_id)
        if entry is None or entry.queue is None:
            return None
        queue, request = entry.queue, entry.request
        excluding |= {entry.instance_id}
        instances = queue._instances
        other = instances.with_room(request.team, request.preferred_instances, excluding)
        if other is None and (other := instances.emptiest_by_seats(excluding)) is None:
            return None
        instances.take_off(entry.instance_id, request.team, request.slots)
        instances.place(other.id, request.team, request.slots)
        entry.instance_id = other.id
        return other.id

    def adopted(
        self, request: Request, *, instance_id: str, priority: int | None, standing: Standing, began: bool
    ) -> list[Decision]:
        """Count a request that runs already. It keeps its standing; within share but above its team's whole slots, it
        holds the team's turn.

        Raises:
            ValueError: a request with this id is not finished.
        """
        if request.id in self._entries:
            raise ValueError(f"request {request.id!r} was submitted already and is not finished")
        now = self._pool.begin()
        decisions: list[Decision] = self._due(now) if now >= self._due_at else []
        team = self._teams.get(request.team) or self._team(request.team)
        entry = self._entries[request.id] = _Entry(request, self, self._next_sequence)
        self._next_sequence += 1
        entry.weight = 0.0
        borrowing = standing is Standing.BORROWING
        grant = self._pool.record(
            team.name,
            now=now,
            priority=0 if priority is None else priority,
            borrowing=borrowing,
            slots=request.slots,
            estimated_tokens=request.estimated_tokens,
        )
        self._instances.expect(instance_id)
        kind = SendKind.BORROWER if borrowing else SendKind.OWNER
        if not borrowing and team.fraction and not team.turn_slots and self._within_slots(team) > team.whole_slots:
            kind = SendKind.TURN
            entry.weight, entry.estimate_slot_seconds = team.fraction, 0.0
            self._take_turn(team, request.slots, now)
        self._sent(team, entry, kind, instance_id, grant, now)
        if began:
            entry.began = True
            team.recallable.pop(request.id, None)
        return decisions + self._pump(now)

    def capacity_changed(self) -> list[Decision]:
        """The pool's C, shares or half-life changed."""
        return self.tick()

    def instance_changed(self, instance: Instance) -> list[Decision]:
        """An instance is new, or its record changed."""
        now = self._pool.begin()
        decisions = self._due(now)
        if not self._instances.any_accepting:
            self._changed.update(team.name for team in self._teams.values() if team.held)
        self._instances.changed(instance)
        return decisions + self._pump(now)

    def instance_removed(self, instance_id: str) -> list[Decision]:
        """An instance is gone; what was sent there is still to be released."""
        now = self._pool.begin()
        decisions = self._due(now)
        self._instances.removed(instance_id)
        return decisions + self._pump(now)

    def running_seen(self, instance_id: str, running: int) -> list[Decision]:
        """An instance reported `num_requests_running`."""
        self._instances.running_seen(instance_id, running)
        return []

    def tick(self) -> list[Decision]:
        """Time passed, or the pool was changed from outside."""
        now = self._pool.begin()
        return self._due(now) + self._pump(now)

    def next_deadline(self) -> float | None:
        """When the longest wait ends, a recalled seat is free, a wide request is due or a phantom ends."""
        wide_due = self._wide_due.priorities
        if not (self._held or self._guests or self._abort_ends):
            return None  # the most common answer, asked for at every event
        deadline = math.inf
        if self._held:
            deadline = self._next_too_late().too_late_at
        if self._pool.phantom_slots and (self._held or self._guests_wait()):
            phantom_end = self._pool.next_phantom_end()
            if phantom_end is not None and phantom_end < deadline:
                deadline = phantom_end
        if self._abort_ends and self._abort_ends[0][0] < deadline:
            deadline = self._abort_ends[0][0]
        if wide_due and (due := self._wide_due.first_priority()) is not None and due < deadline:
            deadline = due
        if self._turn_debt_slot_seconds and self._turn_waiters.priorities and self._instances.accepting:
            spare_slots = self._turn_slots - self._turn_held_slots
            if spare_slots > 0:
                deadline = min(deadline, self._turn_debt_at + self._turn_debt_slot_seconds / spare_slots)
        return deadline if deadline < math.inf else None

    def snapshot(self) -> QueueStat:
        """What is held and where things run, now. O(teams + instances)."""
        now = self._pool.begin()
        teams = tuple(
            TeamQueueStat(
                team=team.name,
                held=team.held,
                held_slots=team.held_slots,
                held_bytes=team.held_bytes,
                oldest_held_seconds=now - self._oldest_held_since(team),
            )
            for team in self._teams.values()
            if team.held
        )
        return QueueStat(
            mode=self.mode,
            held=len(self._held),
            held_bytes=self._held_bytes,
            teams=teams,
            instances=self._instances.stats(),
            recalls_total=self.recalls_total,
            recalled_slot_seconds_total=self.recalled_slot_seconds_total,
            turn_slots=self._turn_slots,
            turns_taken=self._turns_taken,
        )

    # ------------------------------------------------------------------ arriving, waiting, leaving the queue

    def _beyond_bounds(self, team: _TeamQueue, request: Request) -> Refused | None:
        """Whether the request that has just been held is more than may be held."""
        options = self._options
        if len(self._held) > options.max_held:
            return self._refused(request.id, RefusalReason.QUEUE_FULL, len(self._held) - 1, options.max_held)
        if team.held > options.max_held_per_team:
            return self._refused(request.id, RefusalReason.TEAM_QUEUE_FULL, team.held - 1, options.max_held_per_team)
        if self._held_bytes > options.max_held_bytes:
            return self._refused(request.id, RefusalReason.HELD_BYTES_FULL, self._held_bytes, options.max_held_bytes)
        return None

    def _refused(self, request_id: str, reason: RefusalReason, found: float, limit: float) -> Refused:
        """A refusal; try again when about one slot of the pool is expected to be free, between 1 and 60 seconds."""
        capacity = self._pool.capacity
        per_slot_seconds = self._estimates.seconds * max(1, len(self._held)) / capacity if capacity else 5.0
        return Refused(
            request_id=request_id,
            reason=reason,
            found=found,
            limit=limit,
            retry_after_seconds=min(60.0, max(1.0, math.ceil(per_slot_seconds))),
        )

    def _held_decision(self, team: _TeamQueue, entry: _Entry) -> Held:
        return Held(
            request_id=entry.request.id,
            team_held=team.held,
            team_in_flight_slots=team.state.in_flight_slots,
            reserved_slots=team.whole_slots,
            pool_in_flight_slots=self._pool.live_slots,
            capacity_slots=self._pool.capacity,
        )

    def _is_simple(self, team: _TeamQueue) -> bool:
        """Whether nothing but this team's own numbers changes when a request of it comes or goes."""
        return not (
            team.held
            or team.wide_counts
            or self._is_weighted
            or self._came_due
            or self._wide_due.priorities
            or self._turn_debt_slot_seconds
            or self._generation != self._pool.generation
        )

    def _only_waits(self, team: _TeamQueue, request: Request) -> bool:
        """The short way under load: a narrow request behind others of its team changes nobody's place.

        Nothing has changed since the others were left waiting, so there is no room for it either.
        """
        return not (
            not team.held
            or request.slots != 1
            or team.wide_waits
            or self._changed
            or self._came_due
            or self._wide_due.priorities
            or self._turn_debt_slot_seconds
            or self._fallback is not None
            or self._generation != self._pool.generation
        )

    def _guests_wait(self) -> bool:
        """Whether a queue that falls back on this one has something to do."""
        return any(guest._held or guest._changed for guest in self._live_guests())

    def _live_guests(self) -> "list[HoldQueue]":
        return [guest for known in self._guests if (guest := known()) is not None]

    def _hold(self, team: _TeamQueue, entry: _Entry, now: float) -> None:
        entry.queue = None
        entry.held_since = now
        team.line(entry).add(entry)
        if not team.held:
            team.turn_floor, team.borrow_floor = self._turn_virtual_time, self._borrow_virtual_time
        team.held += 1
        team.held_slots += entry.request.slots
        team.held_bytes += entry.request.body_bytes
        self._held[entry.request.id] = entry
        entry.too_late_at = now + self._options.longest_wait_seconds - entry.waited_seconds
        if entry.recalled:
            self._held_again.set(entry.request.id, entry.too_late_at)
        if entry.too_late_at < self._due_at:
            self._due_at = entry.too_late_at
        self._held_bytes += entry.request.body_bytes
        self._changed.add(team.name)

    def _unhold(self, team: _TeamQueue, entry: _Entry, now: float) -> None:
        team.line(entry).remove(entry)
        team.held -= 1
        team.held_slots -= entry.request.slots
        team.held_bytes -= entry.request.body_bytes
        del self._held[entry.request.id]
        if entry.recalled:
            self._held_again.discard(entry.request.id)
        self._held_bytes -= entry.request.body_bytes
        entry.waited_seconds += now - entry.held_since
        self._changed.add(team.name)

    def _drop(self, entry: _Entry, now: float) -> None:
        """A held request leaves for good."""
        self._unhold(self._teams[entry.request.team], entry, now)
        del self._entries[entry.request.id]

    def _due(self, now: float) -> list[Decision]:
        """What time alone brings: seats of recalled requests, and requests that waited too long."""
        decisions: list[Decision] = []
        self._end_aborts(now)
        limit = self._options.longest_wait_seconds
        self._due_at = self._abort_ends[0][0] if self._abort_ends else math.inf
        while self._held:
            entry = self._next_too_late()
            if entry.too_late_at > now:
                self._due_at = min(self._due_at, entry.too_late_at)
                break
            waited = entry.waited_seconds + now - entry.held_since
            self._drop(entry, now)
            self._came_due = True
            decisions.append(self._refused(entry.request.id, RefusalReason.HELD_TOO_LONG, waited, limit))
        return decisions

    def _next_too_late(self) -> _Entry:
        """Of the held requests (there are some) the one that will have waited too long first."""
        first = next(iter(self._held.values()))  # of those that were never taken back, none is earlier than this
        if self._held_again.priorities:
            again = self._held[self._some(self._held_again)]
            if again.too_late_at < first.too_late_at:
                return again
        return first

    def _end_aborts(self, now: float) -> None:
        while self._abort_ends and self._abort_ends[0][0] <= now:
            _, instance_id, slots = self._abort_ends.popleft()
            self._instances.abort_ended(instance_id, slots)
            self._came_due = True

    # ------------------------------------------------------------------ deciding

    def _pump(self, now: float) -> list[Decision]:
        """Send everything that may go, then offer what is left of the pool to the queues that fall back on it."""
        decisions: list[Decision] = []
        self._dispatch(now, decisions)
        for guest in self._live_guests() if self._guests else ():
            # A recalled guest waits again in its own queue, which has to hear of it.
            if guest._changed or (guest._held and self._has_guest_room(1)):
                guest._dispatch(guest._pool.begin(), decisions)
        return decisions

    def _pump_with(self, queue: "HoldQueue", now: float) -> list[Decision]:
        """Pump this queue, and the fallback in which a request of it has just ended."""
        if queue is self:
            return self._pump(now)
        decisions = self._pump(now)
        return decisions + queue._pump(queue._pool.begin())

    def _dispatch(self, now: float, decisions: list[Decision]) -> None:
        self._came_due = False
        if self._generation != self._pool.generation:
            self._rebuild(now)
        self._refresh_changed(now, decisions)
        if self._wide_due.priorities:
            self._credit_due(now)
        while self._instances.accepting:
            if self._turn_waiters.priorities and self._turn_is_free(now):
                team = self._teams[self._some(self._turn_waiters)]
                self._send(team, self._next_entry(team), SendKind.TURN, now, decisions)
            elif self._has_room():
                if self._wide_owed.priorities:
                    team = self._teams[self._some(self._wide_owed)]
                    self._send(team, self._next_entry(team), SendKind.WIDE, now, decisions)
                elif self._borrowers.priorities:
                    team = self._teams[self._some(self._borrowers)]
                    self._send(team, self._next_entry(team), SendKind.BORROWER, now, decisions)
                else:
                    break
            else:
                break
            self._refresh_changed(now, decisions)
            if self._wide_due.priorities:
                self._credit_due(now)
        if self._fallback is not None:
            self._send_to_fallback(now, decisions)

    def _turn_is_free(self, now: float) -> bool:
        if self._turns_taken >= self._turn_slots:
            return False
        if self._turn_debt_slot_seconds or self._turn_held_slots > self._turn_slots:
            self._settle_turn_debt(now)
        if self._turn_debt_slot_seconds:
            return False
        return not self._pool.phantom_slots or self._turns_taken + self._phantom_turns() < self._turn_slots

    def _phantom_turns(self) -> int:
        """Turns that phantoms may hold: of what a team has above its whole slots, one may be there by its turn.

        Given away meanwhile, more than C would be within share.
        """
        turns = 0
        for name in self._pool.exact_shares:
            team = self._teams.get(name) or self._team(name)
            phantom_slots = team.state.phantom_slots
            if phantom_slots and team.fraction and not team.turn_slots:
                turns += self._within_slots(team) + phantom_slots > team.whole_slots
        return turns

    @staticmethod
    def _within_slots(team: _TeamQueue) -> int:
        """Slots in flight that use the team's whole slots."""
        return team.state.in_flight_slots - team.state.borrowing_slots - team.turn_slots - team.wide_slots

    def _settle_turn_debt(self, now: float) -> None:
        """Bring the debt of the turns up to date, before what they hold changes."""
        over_slots = self._turn_held_slots - self._turn_slots
        debt = self._turn_debt_slot_seconds + over_slots * (now - self._turn_debt_at)
        limit = TURN_DEBT_LIMIT_REQUESTS * self._pool_seconds() * self._turn_slots
        self._turn_debt_slot_seconds = min(debt, limit) if debt > PAID_SLOT_SECONDS else 0.0
        self._turn_debt_at = now

    def _has_room(self) -> bool:
        """Whether fewer than C slots are taken where C is.

        Live grants and recalled seats, never phantoms (they would stop a pool whose engines are empty), and nothing
        that still runs on an instance which no longer counts in C.
        """
        return self._pool.live_slots + self._instances.surplus_slots < self._pool.capacity

    def _refresh_changed(self, now: float, decisions: list[Decision]) -> None:
        """Bring every team that changed up to date, and send what its whole slots take."""
        changed = self._changed
        while changed:
            # In the order of names: the order of a set depends on the hash seed, and a run must be repeatable.
            names = sorted(changed) if len(changed) > 1 else (changed.pop(),)
            changed.clear()
            for name in names:
                if self._is_weighted:
                    self._note_consumption(name)
                team = self._teams.get(name)
                if team is not None:
                    self._refresh(team, now, decisions)

    def _refresh(self, team: _TeamQueue, now: float, decisions: list[Decision]) -> None:
        if not team.state.share:
            self._renew_state(team)
        free_slots = team.whole_slots - team.counted_slots()
        if team.held and free_slots > 0 and self._instances.accepting:
            while free_slots > 0:
                entry, kind = team.next(self._options.batch_every, free_slots), SendKind.OWNER
                if entry is None:
                    break
                if team.wide_waits and self._credit(team, now) >= 0.0 and self._has_room():
                    entry = self._next_entry(team)
                    kind = SendKind.OWNER if entry.request.slots <= free_slots else SendKind.WIDE
                self._send(team, entry, kind, now, decisions)
                free_slots = team.whole_slots - team.counted_slots()
        if team.wide_counts or team.held_slots > team.held:
            self._refresh_credit(team, free_slots, now)
        self._refresh_above(team)
        if not team.held:
            if team.name in self._borrowers.priorities:
                self._turn_waiters.discard(team.name)
                self._borrowers.discard(team.name)
            self._forget_if_idle(team)
            return
        oldest = team.oldest_sequence()
        if team.fraction > 0.0 and not team.turn_slots:
            self._turn_waiters.set(team.name, (team.turn_tag, oldest))
        else:
            self._turn_waiters.discard(team.name)
        self._borrowers.set(team.name, (self._borrow_priority(team), oldest))

    def _borrow_priority(self, team: _TeamQueue) -> float:
        """Where the team stands among borrowers, smallest first; share 0 last."""
        if self._is_weighted and team.state.share:
            return team.borrow_tag
        return team.state.borrow_key

    def _refresh_credit(self, team: _TeamQueue, free_slots: int, now: float) -> None:
        """Account for a wide request that waits beside whole slots it does not fit in, or that narrow ones pass."""
        waits = team.held_slots > team.held and self._instances.any_accepting
        entry = self._next_entry(team) if waits else None
        owed_at_most = CREDIT_LIMIT_REQUESTS * entry.request.slots * self._expected_seconds(team) if entry else 0.0
        # Whoever has no whole slots (any more) is owed nothing and owes nothing.
        team.credit_slot_seconds = min(owed_at_most, self._credit(team, now)) if team.whole_slots else 0.0
        team.credit_at = now
        # What it holds above its whole slots is a debt only as far as wide requests brought it there, not borrowing.
        rate_slots = max(free_slots, -team.wide_slots)
        counts = bool(waits or team.wide_slots or team.credit_slot_seconds)
        team.credit_rate_slots = float(rate_slots) if counts and team.whole_slots else 0.0
        team.wide_waits, team.wide_counts = waits, counts
        self._wide_owed.discard(team.name)
        self._wide_due.discard(team.name)
        if entry is None or free_slots <= 0:
            return
        if team.credit_slot_seconds >= 0.0:
            self._wide_owed.set(team.name, entry.sequence)
        else:
            self._wide_due.set(team.name, now - team.credit_slot_seconds / team.credit_rate_slots)

    def _credit(self, team: _TeamQueue, now: float) -> float:
        """What the team is owed now, in slot-seconds."""
        if team.credit_rate_slots or not team.wide_waits:
            return team.credit_slot_seconds + team.credit_rate_slots * (now - team.credit_at)
        # All its whole slots are used, by narrow requests that pass: this only pays a debt and earns nothing.
        paid = PASSED_PART * team.whole_slots * (now - team.credit_at)
        return min(team.credit_slot_seconds + paid, max(0.0, team.credit_slot_seconds))

    def _credit_due(self, now: float) -> None:
        while (due := self._wide_due.first_priority()) is not None and due <= now:
            name = self._some(self._wide_due)
            self._wide_due.discard(name)
            team = self._teams[name]
            team.credit_slot_seconds, team.credit_at = 0.0, now
            self._wide_owed.set(name, self._next_entry(team).sequence)

    def _send(self, team: _TeamQueue, entry: _Entry, kind: SendKind, now: float, decisions: list[Decision]) -> None:
        """Send a held request to an instance of this pool."""
        self._unhold(team, entry, now)
        self._dispatch_entry(team, entry, kind, now, decisions)

    def _dispatch_entry(
        self, team: _TeamQueue, entry: _Entry, kind: SendKind, now: float, decisions: list[Decision]
    ) -> None:
        """Grant a request that is not held (any more) the standing that is true now."""
        request, pool = entry.request, self._pool
        slots = request.slots
        team.sent += 1
        borrowing = kind is SendKind.BORROWER
        if borrowing:
            priority = borrow_priority(pool.rank(team.name), request.service_class)
        else:
            priority = within_share_priority(request.service_class)
        instance_id = self._place(entry, kind, now, decisions)
        entry.weight = 0.0
        if kind is not SendKind.OWNER:
            self._count_right(team, entry, kind, now)
        estimates = team.estimates if team.estimates.cost_count else self._estimates
        grant = pool.record(
            team.name,
            now=now,
            priority=priority,
            borrowing=borrowing,
            slots=slots,
            estimated_tokens=request.estimated_tokens,
            provisional_cost_units=slots * estimates.cost_units_per_slot,
        )
        self._sent(team, entry, kind, instance_id, grant, now)
        decisions.append(
            Send(
                request_id=request.id,
                pool=self._pool_name,
                instance_id=instance_id,
                grant=grant,
                priority=priority,
                standing=Standing.BORROWING if borrowing else Standing.WITHIN_SHARE,
                held_seconds=entry.waited_seconds,
            )
        )

    def _count_right(self, team: _TeamQueue, entry: _Entry, kind: SendKind, now: float) -> None:
        """Count what a request uses that goes by another right than its team's whole slots, and move its team's tag."""
        slots = entry.request.slots
        entry.estimate_slot_seconds = slots * self._expected_seconds(team)
        if kind is SendKind.TURN:
            start_tag = team.turn_tag
            self._turn_virtual_time = max(self._turn_virtual_time, start_tag)
            entry.weight = team.fraction
            team.turn_end_tag = start_tag + entry.estimate_slot_seconds / entry.weight
            self._take_turn(team, slots, now)
        elif kind is SendKind.WIDE:
            team.wide_slots += slots
            team.wide_counts = True
        elif self._is_weighted and team.state.share > 0.0:
            start_tag = team.borrow_tag
            self._borrow_virtual_time = max(self._borrow_virtual_time, start_tag)
            low, high = WEIGHTED_LF_BOUNDS
            entry.weight = team.state.share * min(high, max(low, self._level_fairshare(team)))
            team.borrow_end_tag = start_tag + entry.estimate_slot_seconds / entry.weight

    def _take_turn(self, team: _TeamQueue, slots: int, now: float) -> None:
        team.turn_slots = slots
        self._settle_turn_debt(now)
        self._turns_taken += 1
        self._turn_held_slots += slots

    def _sent(
        self, team: _TeamQueue, entry: _Entry, kind: SendKind, instance_id: str, grant: "Grant", now: float
    ) -> None:
        """Count a request as running here; `team` is this queue's record, the request may be a guest's."""
        request = entry.request
        entry.queue = self
        entry.team = team
        entry.kind = kind
        entry.grant = grant
        entry.instance_id = instance_id
        entry.sent_at = now
        entry.began = False
        self._instances.place(instance_id, request.team, request.slots)
        if not team.state.share:
            self._renew_state(team)
        if request.recallable and self._options.recall:
            team.recallable[request.id] = entry

    def _place(self, entry: _Entry, kind: SendKind, now: float, decisions: list[Decision]) -> str:
        """Choose the instance; for an owner without a free seat, take a borrower back (one decision with sending)."""
        request, instances = entry.request, self._instances
        if request.state_instance is not None and instances.accepts(request.state_instance):
            return request.state_instance
        roomy = instances.with_room(request.team, request.preferred_instances)
        # Below C no owner waits for a seat; and a wide request that passes its team's own slots recalls nobody.
        if kind is SendKind.BORROWER or kind is SendKind.WIDE:
            return (roomy or self._emptiest()).id
        needed_seats = request.slots if kind is SendKind.OWNER else 1
        if roomy is not None and roomy.seats - roomy.taken_slots >= needed_seats:
            return roomy.id
        emptiest = self._emptiest()
        if not self._options.recall or emptiest.seats - emptiest.taken_slots >= needed_seats:
            return emptiest.id
        # Taken back in this event, to a turn of its team: no chain of recalls.
        if not (entry.recalled and entry.held_since == now):
            instance_id = self._recall_for(request, needed_seats, now, decisions)
            if instance_id is not None:
                return instance_id
        return (roomy or emptiest).id

    def _emptiest(self) -> InstanceLoad:
        emptiest = self._instances.emptiest_by_seats()
        assert emptiest is not None, "a request is sent only while an instance accepts requests"
        return emptiest

    def _recall_for(self, request: Request, needed_seats: int, now: float, decisions: list[Decision]) -> str | None:
        """Take back what seats `request` on one instance; returns that instance, None if nothing can be recalled."""
        instance_id: str | None = None
        # The first victim decides the instance; a wide owner may need more seats there.
        for _ in range(needed_seats):
            victim = self._victim(request.team, instance_id, now)
            if victim is None:
                break
            instance_id = victim.instance_id
            self._take_back(victim, now, decisions)
            if self._instances.free_seats(instance_id) + self._instances.aborting_slots(instance_id) >= needed_seats:
                break
        return instance_id

    def _victim(self, for_team: str, instance_id: str | None, now: float) -> _Entry | None:
        """Of the team most above its share now, the request sent last that leaves the team its own.

        Only on `instance_id` if one is given, and only if what would be thrown away is within the waste budget.
        """
        self._fill_waste(now)
        passed_over: list[_TeamQueue] = []
        victim: _Entry | None = None
        while victim is None and (name := self._above.peek()) is not None:
            team = self._teams[name]
            if name != for_team:
                victim = self._last_sent(team, instance_id, now)
            if victim is None:
                passed_over.append(team)
                self._above.discard(name)
        for team in passed_over:
            self._refresh_above(team)
        return victim

    def _last_sent(self, team: _TeamQueue, instance_id: str | None, now: float) -> _Entry | None:
        above_slots = team.state.in_flight_slots - team.turn_slots - team.whole_slots
        for entry in reversed(team.recallable.values()):
            slots = entry.request.slots
            if now - entry.sent_at > self._waste_slot_seconds:
                break  # those sent before it would throw away even more
            if (
                entry.kind is not SendKind.TURN
                and slots <= above_slots
                and slots * (now - entry.sent_at) <= self._waste_slot_seconds
                and (
                    entry.instance_id == instance_id or (not instance_id and self._instances.accepts(entry.instance_id))
                )
            ):
                return entry
        return None

    def _take_back(self, entry: _Entry, now: float, decisions: list[Decision]) -> None:
        """Recall a dispatched request: its grant ends uncharged and it waits again at the head of its team."""
        wasted = entry.request.slots * (now - entry.sent_at)
        self._waste_slot_seconds -= wasted
        self.recalls_total += 1
        self.recalled_slot_seconds_total += wasted
        instance_id = entry.instance_id
        self._aborting.setdefault(entry.request.id, deque()).append((instance_id, entry.request.slots))
        self._end(entry, 0.0, now, recalled=True)
        home = entry.home
        home_now = now if home is self else home._pool.begin()
        entry.recalled = True
        home._hold(home._team(entry.request.team), entry, home_now)
        decisions.append(Recall(request_id=entry.request.id, instance_id=instance_id, wasted_slot_seconds=wasted))

    def _end(self, entry: _Entry, consumed_cost_units: float, now: float, *, recalled: bool) -> None:
        """Settle a dispatched request of this pool: seat, turn, tags, estimates, charge."""
        request, team = entry.request, entry.team
        slots = request.slots
        slot_seconds = slots * (now - entry.sent_at)
        self._instances.take_off(entry.instance_id, request.team, slots, aborting=recalled)
        team.recallable.pop(request.id, None)
        if entry.kind is SendKind.TURN:
            team.turn_slots = 0
            self._settle_turn_debt(now)
            self._turns_taken -= 1
            self._turn_held_slots -= slots
            team.turn_end_tag += (slot_seconds - entry.estimate_slot_seconds) / entry.weight
        elif entry.kind is SendKind.WIDE:
            team.wide_slots -= slots
        elif entry.weight:
            team.borrow_end_tag += (slot_seconds - entry.estimate_slot_seconds) / entry.weight
        self._pool.settle(entry.grant, consumed_cost_units, now=now)
        if not recalled:
            seconds, cost_units_per_slot = slot_seconds / slots, consumed_cost_units / slots
            team.estimates.add(seconds, cost_units_per_slot)
            self._estimates.add(seconds, cost_units_per_slot)

    def _refresh_above(self, team: _TeamQueue) -> None:
        """Keep the order in which teams are recalled from: most slots above its share first."""
        if team.recallable and team.state.in_flight_slots - team.turn_slots > team.whole_slots:
            self._above.set(team.name, team.own_slots - team.state.in_flight_slots)
        elif self._above.priorities:
            self._above.discard(team.name)

    # ------------------------------------------------------------------ fallback

    def _has_guest_room(self, slots: int) -> bool:
        """Whether another pool's request may run here: nothing of our own waits, and `try_acquire` would take it."""
        pool = self._pool
        if self._held or not self._instances.any_accepting or not self._has_room():
            return False
        return pool.live_slots + pool.phantom_slots + min(slots, pool.capacity) <= pool.capacity

    def _send_to_fallback(self, now: float, decisions: list[Decision]) -> None:
        """Let the next borrowers use the fallback's free room; an owner never goes there (it is never held)."""
        while self._borrowers.priorities:
            team = self._teams[self._some(self._borrowers)]
            entry = self._next_entry(team)
            self._send_one_to_fallback(team, entry, now, decisions)
            if entry.queue is None:
                break
            self._refresh_changed(now, decisions)

    def _send_one_to_fallback(self, team: _TeamQueue, entry: _Entry, now: float, decisions: list[Decision]) -> None:
        """Send a held request to the fallback pool, with its standing there; without room it stays held."""
        request, fallback = entry.request, self._fallback
        if fallback is None or request.state_instance is not None or not fallback._has_guest_room(request.slots):
            return
        there = fallback._pool.begin()
        grant = fallback._pool.try_acquire(
            request.team, request.service_class, request.estimated_tokens, slots=request.slots
        )
        if grant is None:
            return
        self._unhold(team, entry, now)
        team.sent += 1
        entry.weight = 0.0
        instance_id = (fallback._instances.with_room(request.team, ()) or fallback._emptiest()).id
        fallback._sent(fallback._team(request.team), entry, SendKind.BORROWER, instance_id, grant, there)
        fallback._refresh_changed(there, decisions)
        decisions.append(
            Send(
                request_id=request.id,
                pool=fallback._pool.name,
                instance_id=instance_id,
                grant=grant,
                priority=grant.priority,
                standing=Standing.BORROWING if grant.borrowing else Standing.WITHIN_SHARE,
                held_seconds=entry.waited_seconds,
            )
        )

    # ------------------------------------------------------------------ bookkeeping

    def _team(self, name: str) -> _TeamQueue:
        team = self._teams.get(name)
        if team is None:
            team = self._teams[name] = _TeamQueue(name, self._pool.state(name))
            self._set_own(team)
        return team

    def _renew_state(self, team: _TeamQueue) -> None:
        """Ask for the pool's record of a team without a share again; others' is replaced only by `_rebuild`."""
        team.state = self._pool.state(team.name)

    def _set_own(self, team: _TeamQueue) -> None:
        own = self._pool.exact_shares.get(team.name, Fraction(0)) * self._pool.capacity
        team.whole_slots = math.floor(own)
        team.fraction = float(own - team.whole_slots)
        team.own_slots = float(own)

    def _rebuild(self, now: float) -> None:
        """The pool's capacity, shares or scale of usage changed: everything that is ordered by them is set anew."""
        pool = self._pool
        self._fill_waste(now)
        self._generation = pool.generation
        capacity = pool.capacity
        owns = [share * capacity for share in pool.exact_shares.values()]
        self._settle_turn_debt(now)
        # Rounded up: a part of a slot that the fractions leave belongs to those who own it, and all that is owned is
        # at most C (docs/decisions/0002-who-goes-next.md).
        self._turn_slots = math.ceil(sum(owns, Fraction(0))) - sum(math.floor(own) for own in owns)
        self._shares_total = float(sum(pool.exact_shares.values(), Fraction(0)))
        self._consumed_total = 0.0
        self._consumed.clear()
        if self._is_weighted:
            for name in pool.exact_shares:
                self._note_consumption(name)
        for heap in (self._turn_waiters, self._borrowers, self._above):
            heap.clear()
        for team in list(self._teams.values()):
            team.state = pool.state(team.name)
            had_fraction, had_own = team.fraction > 0.0, team.own_slots > 0.0
            self._set_own(team)
            # While it could not take part its tag stood still: waiting for nothing earns no hoard either.
            if not had_fraction:
                team.turn_floor = self._turn_virtual_time
            if not had_own:
                team.borrow_floor = self._borrow_virtual_time
            if team.is_idle:
                self._forget_if_idle(team)
            else:
                self._changed.add(team.name)

    def _note_consumption(self, name: str) -> None:
        """Keep the sum of what the pool's teams consumed, for the LF of `weighted`."""
        if name not in self._pool.exact_shares:
            return
        state = self._pool.state(name)
        consumed = state.scaled_usage + state.scaled_provisional
        self._consumed_total += consumed - self._consumed.get(name, 0.0)
        self._consumed[name] = consumed

    def _level_fairshare(self, team: _TeamQueue) -> float:
        """LF = S / U over the pool's teams, with provisional charges."""
        consumed = self._consumed[team.name]
        if consumed <= 0.0:
            return math.inf
        return team.state.share / self._shares_total * self._consumed_total / consumed

    def _forget_if_idle(self, team: _TeamQueue) -> None:
        """Names that nobody configured leave nothing behind; teams with a share keep their tags and estimates."""
        if not team.own_slots and team.is_idle and not team.state.in_flight_slots and not team.state.share:
            self._teams.pop(team.name, None)

    def _expected_seconds(self, team: _TeamQueue) -> float:
        """How long a request of the team holds a slot: its own mean, else the pool's, else one second."""
        return team.estimates.seconds if team.estimates.count else self._pool_seconds()

    def _pool_seconds(self) -> float:
        return self._estimates.seconds if self._estimates.count else 1.0

    def _waste_limit(self) -> float:
        return self._options.recall_waste * self._pool.capacity * RECALL_WINDOW_SECONDS

    def _fill_waste(self, now: float) -> None:
        rate_slots = self._options.recall_waste * self._pool.capacity
        filled = self._waste_slot_seconds + rate_slots * max(0.0, now - self._waste_at)
        self._waste_slot_seconds = min(self._waste_limit(), filled)
        self._waste_at = now

    def held_team(self, request_id: str) -> str | None:
        """The team of a held request; None: no request of this id is held."""
        entry = self._held.get(request_id)
        return None if entry is None else entry.request.team

    def _oldest_held_since(self, team: _TeamQueue) -> float:
        """When its oldest request would have begun to wait, had it not been away at an engine meanwhile."""
        entries = (line.first() for line in team.lines)
        return min(entry.held_since - entry.waited_seconds for entry in entries if entry is not None)

    @staticmethod
    def _some(heap: "KeyedHeap[float] | KeyedHeap[int] | KeyedHeap[tuple[float, int]]") -> str:
        name = heap.peek()
        assert name is not None, "looked for a team in an empty heap"
        return name

    def _next_entry(self, team: _TeamQueue) -> _Entry:
        entry = team.next(self._options.batch_every)
        assert entry is not None, f"team {team.name!r} is queued but holds nothing"
        return entry
