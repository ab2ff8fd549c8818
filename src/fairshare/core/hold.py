"""Late binding: requests wait here and are stamped when they leave for an engine (`dispatch: hold`).

An engine cannot change a request's priority once it has it, and a waiting request never displaces a running one in
vLLM. So a request stamped on arrival carries a standing that is soon wrong, and behind a backlog the reservation
collapses. A held request is stamped when a slot is free for it, with what is true then.

Who goes, in this order, in the same call in which a slot, a turn or capacity becomes free:

1. Owners: whatever fits in its team's whole slots, floor(share x C), at once, also when C slots are taken.
2. Turns: the fractions that whole slots leave over, held in turn by the smallest tag (start-time fair queueing).
3. Borrowers, only while fewer than C slots are taken: first a wide request of a team that was owed the slots it could
   not use (see `TeamQueue.credit_slot_seconds`), then by the pool's borrow order.

Points in time are on the pool's clock, in seconds. A tag is virtual time, in slot-seconds per owned slot.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
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
from fairshare.core.priority import Standing, borrow_priority, within_share_priority
from fairshare.core.team_queue import Entry, Estimates, SendKind, TeamQueue, learn

if TYPE_CHECKING:
    from fairshare.core.pool import Pool

RECALL_WINDOW_SECONDS = 300.0
"""How deep the bucket of recall waste is: `recall_waste` of the pool's slot-seconds over five minutes."""

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


PASS_OPTIONS = HoldOptions(recall=False, batch_every=0, borrow_order=BorrowOrder.LEVEL_FAIRSHARE)
"""In `pass` nothing is taken back and nothing is ordered."""

# A member that is asked of its class costs twenty times a name of the module (docs/performance.md).
_OWNER, _TURN, _WIDE, _BORROWER = SendKind.OWNER, SendKind.TURN, SendKind.WIDE, SendKind.BORROWER
_HOLD, _PASS = Mode.HOLD, Mode.PASS
_WITHIN_SHARE, _BORROWING = Standing.WITHIN_SHARE, Standing.BORROWING


class HoldQueue:
    """The dispatch queue of a pool in `hold` mode; see the module's text and `DispatchQueue` for its events.

    In `pass` mode every request goes to an engine at once, with the standing it has on arrival. In flight is then what
    engines run and what waits in them. For comparison, and for engines whose own queue must order everything: behind a
    backlog the reservation does not hold (docs/proof.md).
    """

    def __init__(
        self,
        pool: "Pool",
        *,
        mode: Mode = Mode.HOLD,
        options: HoldOptions | None = None,
        instances: Iterable[Instance] = (),
        fallback: "HoldQueue | None" = None,
    ) -> None:
        self._pool = pool
        self._pool_name = pool.name
        self._instances = InstanceTable(instances)
        self._alone: set[HoldQueue] = {self}
        """For weak references to this queue: a compiled class cannot have any."""
        self._guests: tuple[ref[set[HoldQueue]], ...] = ()
        """The queues that fall back on this one. One that a reload removed is gone when its last request has ended."""
        self._fallback: HoldQueue | None = None
        self._teams: dict[str, TeamQueue] = {}
        self._entries: dict[str, Entry] = {}
        self._held: OrderedDict[str, Entry] = OrderedDict()
        """Held requests by the time since when they are held."""
        self._held_again: KeyedHeap[float] = KeyedHeap()
        """Those of them that were taken back, by the time at which they will have waited too long in all."""
        self._held_bytes = 0
        self._next_sequence = 0
        self._changed = pool.watch()
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
        self._phantom_turns = 0
        """Turns that phantoms may hold, one for a team. Given away meanwhile, more than C would be within share."""
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
        self._estimates = Estimates()
        """Of all teams."""
        self._aborting: dict[str, deque[tuple[HoldQueue, InstanceLoad, int]]] = {}
        """Of requests of this queue that are being taken back: where from, and their slots."""
        self._abort_ends: deque[tuple[float, InstanceLoad, int]] = deque()
        self._due_at = math.inf
        """Before this no held request has waited too long and no seat of a recalled one is free (pool clock)."""
        self._calm = False
        """Whether time alone changes nothing of what the last `_dispatch` decided: no debt is paid, nothing came due.

        Only then are the short ways taken.
        """
        self.recalls_total = 0
        self.recalled_slot_seconds_total = 0.0
        self.reconfigure(mode, options, fallback)
        now = pool.begin()
        self._waste_slot_seconds = self._waste_limit()
        self._waste_at = now
        self._rebuild(now)

    def reconfigure(self, mode: Mode, options: HoldOptions | None, fallback: "HoldQueue | None") -> None:
        """Dispatch differently from now on; what is held and what runs stays. Then report `capacity_changed`."""
        self.mode = mode
        self._options = options = PASS_OPTIONS if mode is _PASS else options or HoldOptions()
        self._is_weighted = options.borrow_order is BorrowOrder.WEIGHTED
        if fallback is not self._fallback:
            if self._fallback is not None:
                self._fallback._guests = tuple(
                    ref(guest._alone) for guest in self._fallback._live_guests() if guest is not self
                )
            if fallback is not None:
                fallback._guests = (*(ref(guest._alone) for guest in fallback._live_guests()), ref(self._alone))
            self._fallback = fallback
        for entry in self._held.values():
            entry.too_late_at = self._too_late_at(entry)
            if entry.recalled:
                self._held_again.set(entry.request.id, entry.too_late_at)
        if mode is _HOLD:  # `pass` gives no turns
            self._count_turns_above(self._pool.begin())
        else:  # nor does anybody wait for room there, so that nothing is owed
            for team in self._teams.values():
                team.credit_slot_seconds = team.credit_rate_slots = 0.0
                team.wide_waits, team.wide_counts = False, team.wide_slots > 0
            self._wide_owed.clear()
            self._wide_due.clear()
        self._generation = -1
        self._calm = False

    @property
    def pool(self) -> "Pool":
        """The pool in which grants are counted."""
        return self._pool

    def instances(self) -> list[Instance]:
        """The records of its instances, as they were reported."""
        return self._instances.records()

    # ------------------------------------------------------------------ events

    def submitted(self, request: Request) -> list[Decision]:
        """A request arrived: `Send`, `Held` or `Refused`; others' decisions may follow.

        Raises:
            ValueError: `slots` is below 1, or a request with this id is not finished.
        """
        request_id, slots, entries, pool = request.id, request.slots, self._entries, self._pool
        if slots < 1:
            raise ValueError(f"slots of request {request_id!r} must be at least 1, got {slots}")
        if request_id in entries:
            raise ValueError(f"request {request_id!r} was submitted already and is not finished")
        now = pool.begin()
        # The short way of what most requests are: nothing of its team is held, an instance has room, and it is an
        # owner's, which goes whatever else is true, or the next borrower's. It moves nobody else's place.
        changed, team = self._changed, self._teams.get(request.team)
        if (
            team is not None
            and not team.held
            and self._calm
            and now < self._due_at
            and not changed
            and not team.wide_counts
            and self._generation == pool.generation
            and request.state_instance is None
            and (load := self._instances.with_room(request.team, request.preferred_instances)) is not None
            and (kind := self._right_at_once(team, slots, load)) is not None
        ):
            entry = entries[request_id] = Entry(request, self, self._next_sequence)
            self._next_sequence += 1
            team.sent += 1
            send = self._send(team, entry, kind, load, now)
            changed.clear()
            if kind is _BORROWER:
                self._refresh_above(team)
            if self._is_weighted:
                self._note_consumption(request.team)
            return [send]
        decisions: list[Decision] = self._due(now) if now >= self._due_at else []
        if not self._instances.accepting and self._fallback is None:
            decisions.append(self._refused(request_id, RefusalReason.NO_INSTANCE, 0, 1))
            return decisions
        team = team or self._team(request.team)
        entry = entries[request_id] = Entry(request, self, self._next_sequence)
        self._next_sequence += 1
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
        if entry is not None and (queue := entry.queue) is not None:
            team = entry.team
            if team.recallable.pop(request_id, None) is not None and queue._above.priorities:
                queue._refresh_above(team)
        return []

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        """The engine has finished with a dispatched request. Idempotent; unknown and held requests change nothing."""
        now = self._pool.begin()
        decisions: list[Decision] = self._due(now) if now >= self._due_at else []
        entry = self._entries.get(request_id)
        if entry is None or (queue := entry.queue) is None:
            return decisions + self._pump(now)
        del self._entries[request_id]
        team, changed = entry.team, self._changed
        nothing_changed = not changed
        queue._end(entry, consumed_cost_units, now if queue is self else queue._pool.begin(), recalled=False)
        # The short way when nobody waits: bring up to date the one team that changed.
        if (
            not self._held
            and self._calm
            and nothing_changed
            and queue is self
            and not team.wide_counts
            and not team.state.phantom_slots
            and self._generation == self._pool.generation
            and not (self._guests and self._guests_wait())
        ):
            changed.clear()
            if self._is_weighted:
                self._note_consumption(team.name)
            if self._above.priorities:
                self._refresh_above(team)
            if not team.own_slots:
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
        waiting = self._aborting.get(request_id)
        if not waiting:
            return decisions + self._pump(now)
        queue, load, slots = waiting.popleft()
        if not waiting:
            del self._aborting[request_id]
        there = now if queue is self else queue._pool.begin()
        ends_at = there + queue._options.abort_grace_seconds
        queue._abort_ends.append((ends_at, load, slots))
        queue._due_at = min(queue._due_at, ends_at)
        queue._end_aborts(there)
        return decisions + self._pump_with(queue, now)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        """Move a dispatched request's grant to another instance, never one of `excluding`. None: there is no other."""
        entry = self._entries.get(request_id)
        if entry is None or entry.queue is None:
            return None
        request, instances = entry.request, entry.queue._instances
        excluding |= {entry.instance.id}
        other = instances.with_room(request.team, request.preferred_instances, excluding)
        if other is None and (other := instances.emptiest_by_seats(excluding)) is None:
            return None
        instances.take_off(entry.instance, request.team, request.slots)
        instances.place(other, request.team, request.slots)
        entry.instance = other
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
        entry = self._entries[request.id] = Entry(request, self, self._next_sequence)
        self._next_sequence += 1
        kind = _BORROWER if standing is _BORROWING else _OWNER
        self._send(team, entry, kind, self._instances.expect(instance_id), now, 0 if priority is None else priority)
        self._count_as_turn_if_above(team, entry, now)
        if began:
            team.recallable.pop(request.id, None)
        return decisions + self._pump(now)

    def capacity_changed(self) -> list[Decision]:
        """The pool's C, shares or half-life changed."""
        return self.tick()

    def instance_changed(self, instance: Instance) -> list[Decision]:
        """An instance is new, or its record changed."""
        now = self._pool.begin()
        decisions = self._due(now)
        if not self._instances.accepting:
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
        if (due := self._wide_due.first_priority()) is not None and due < deadline:
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

    def _beyond_bounds(self, team: TeamQueue, request: Request) -> Refused | None:
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

    def _held_decision(self, team: TeamQueue, entry: Entry) -> Held:
        return Held(
            request_id=entry.request.id,
            team_held=team.held,
            team_in_flight_slots=team.state.in_flight_slots,
            reserved_slots=team.whole_slots,
            pool_in_flight_slots=self._pool.live_slots,
            capacity_slots=self._pool.capacity,
        )

    def _right_at_once(self, team: TeamQueue, slots: int, load: InstanceLoad) -> SendKind | None:
        """By which right a request goes at once to an instance with room, if nothing of its team is held and nothing
        has changed; None: that is for the long way to say."""
        if slots <= team.free_slots:
            fits = load.seats - load.taken_slots >= slots and (self.mode is _HOLD or self._fits(team, slots))
            return _OWNER if fits else None
        if slots == 1 and not self._held and self.mode is _HOLD and not self._is_weighted and team.state.share:
            no_turn = not team.fraction or team.turn_slots or self._turns_taken >= self._turn_slots
            return _BORROWER if no_turn and self._has_room() else None
        return None

    def _only_waits(self, team: TeamQueue, request: Request) -> bool:
        """The short way under load: a narrow request behind others of its team changes nobody's place.

        Nothing has changed since the others were left waiting, so there is no room for it either.
        """
        return (
            self._calm
            and team.held > 0
            and request.slots == 1
            and not team.wide_waits
            and not self._changed
            and self._fallback is None
            and self._generation == self._pool.generation
        )

    def _guests_wait(self) -> bool:
        """Whether a queue that falls back on this one has something to do."""
        return any(guest._held or guest._changed for guest in self._live_guests())

    def _live_guests(self) -> "list[HoldQueue]":
        return [guest for known in self._guests for guest in known() or ()]

    def _hold(self, team: TeamQueue, entry: Entry, now: float) -> None:
        entry.held_since = now
        team.line(entry).add(entry)
        if not team.held:
            team.turn_floor, team.borrow_floor = self._turn_virtual_time, self._borrow_virtual_time
        team.held += 1
        team.held_slots += entry.request.slots
        team.held_bytes += entry.request.body_bytes
        self._held[entry.request.id] = entry
        entry.too_late_at = self._too_late_at(entry)
        if entry.recalled:
            self._held_again.set(entry.request.id, entry.too_late_at)
        if entry.too_late_at < self._due_at:
            self._due_at = entry.too_late_at
        self._held_bytes += entry.request.body_bytes
        self._changed.add(team.name)

    def _too_late_at(self, entry: Entry) -> float:
        """When a held request will have waited too long, in all: a recall does not start it anew."""
        return entry.held_since + self._options.longest_wait_seconds - entry.waited_seconds

    def _unhold(self, team: TeamQueue, entry: Entry, now: float) -> None:
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

    def _drop(self, entry: Entry, now: float) -> None:
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
            self._calm = False
            decisions.append(self._refused(entry.request.id, RefusalReason.HELD_TOO_LONG, waited, limit))
        return decisions

    def _next_too_late(self) -> Entry:
        """Of the held requests (there are some) the one that will have waited too long first."""
        first = next(iter(self._held.values()))  # of those that were never taken back, none is earlier than this
        if self._held_again.priorities:
            again = self._held[self._some(self._held_again)]
            if again.too_late_at < first.too_late_at:
                return again
        return first

    def _end_aborts(self, now: float) -> None:
        while self._abort_ends and self._abort_ends[0][0] <= now:
            _, load, slots = self._abort_ends.popleft()
            self._instances.abort_ended(load, slots)
            self._calm = False

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
        if self._generation != self._pool.generation:
            self._rebuild(now)
        if self.mode is _PASS:
            self._send_all(now, decisions)
            self._calm = True
            return
        self._refresh_changed(now, decisions)
        if self._wide_due.priorities:
            self._credit_due(now)
        while self._instances.accepting:
            if self._turn_waiters.priorities and self._turn_is_free(now):
                name, kind = self._some(self._turn_waiters), _TURN
            elif not self._has_room():
                break
            elif self._wide_owed.priorities:
                name, kind = self._some(self._wide_owed), _WIDE
            elif self._borrowers.priorities:
                name, kind = self._some(self._borrowers), _BORROWER
            else:
                break
            team = self._teams[name]
            self._send_held(team, self._next_entry(team), kind, now, decisions)
            self._refresh_changed(now, decisions)
            if self._wide_due.priorities:
                self._credit_due(now)
        if self._fallback is not None:
            self._send_to_fallback(self._fallback, now, decisions)
        self._calm = not (self._wide_due.priorities or self._turn_debt_slot_seconds)

    def _send_all(self, now: float, decisions: list[Decision]) -> None:
        """What `pass` does with all that waits, in the order of arrival: nothing but an instance can be missing."""
        while self._held:
            team = self._teams[next(iter(self._held.values())).request.team]
            entry = self._next_entry(team)
            self._renew_state(team)
            fits = self._fits(team, entry.request.slots)
            if not fits and self._fallback is not None and not self._has_room():
                self._send_one_to_fallback(team, entry, self._fallback, now, decisions)
                if entry.queue is not None:
                    continue
            if not self._instances.accepting:
                break
            self._send_held(team, entry, _OWNER if fits else _BORROWER, now, decisions)
        for name in self._changed:
            if (changed := self._teams.get(name)) is not None:
                self._forget_if_idle(changed)
        self._changed.clear()

    def _fits(self, team: TeamQueue, slots: int) -> bool:
        """Whether a request is an owner's: in `hold` by the whole slots, in `pass` by the pool's reservation."""
        if self.mode is _HOLD:
            return slots <= team.free_slots
        return team.state.in_flight_slots + team.state.phantom_slots + slots <= team.state.reserved

    def _turn_is_free(self, now: float) -> bool:
        if self._turns_taken >= self._turn_slots:
            return False
        if self._turn_debt_slot_seconds or self._turn_held_slots > self._turn_slots:
            self._settle_turn_debt(now)
        if self._turn_debt_slot_seconds:
            return False
        return self._turns_taken + self._phantom_turns < self._turn_slots

    def _refresh_phantom_turn(self, team: TeamQueue) -> None:
        may_hold = team.phantoms_may_hold_turn()
        self._phantom_turns += may_hold - team.phantoms_hold_turn
        team.phantoms_hold_turn = may_hold

    def _settle_turn_debt(self, now: float) -> None:
        """Bring the debt of the turns up to date, before what they hold changes."""
        over_slots = self._turn_held_slots - self._turn_slots
        debt = self._turn_debt_slot_seconds + over_slots * (now - self._turn_debt_at)
        limit = TURN_DEBT_LIMIT_REQUESTS * self._pool_seconds() * self._turn_slots
        self._turn_debt_slot_seconds = min(debt, limit) if debt > PAID_SLOT_SECONDS else 0.0
        self._turn_debt_at = now
        if self._turn_debt_slot_seconds:
            self._calm = False

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
                if team is None and self._pool.phantom_slots and name in self._pool.exact_shares:
                    team = self._team(name)  # its phantoms may hold a turn
                if team is not None:
                    self._refresh(team, now, decisions)

    def _refresh(self, team: TeamQueue, now: float, decisions: list[Decision]) -> None:
        if not team.state.share:
            self._renew_state(team)
        free_slots = team.free_slots
        if team.held and free_slots > 0 and self._instances.accepting:
            while free_slots > 0:
                entry, kind = team.next(self._options.batch_every, free_slots), _OWNER
                if entry is None:
                    break
                if team.wide_waits and self._credit(team, now) >= 0.0 and self._has_room():
                    entry = self._next_entry(team)
                    kind = _OWNER if entry.request.slots <= free_slots else _WIDE
                self._send_held(team, entry, kind, now, decisions)
                free_slots = team.free_slots
        if team.state.phantom_slots or team.phantoms_hold_turn:
            self._refresh_phantom_turn(team)
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

    def _borrow_priority(self, team: TeamQueue) -> float:
        """Where the team stands among borrowers, smallest first; share 0 last."""
        if self._is_weighted and team.state.share:
            return team.borrow_tag
        return team.state.borrow_key

    def _refresh_credit(self, team: TeamQueue, free_slots: int, now: float) -> None:
        """Account for a wide request that waits beside whole slots it does not fit in, or that narrow ones pass."""
        waits = team.held_slots > team.held and bool(self._instances.accepting)
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
            self._calm = False
            self._wide_due.set(team.name, now - team.credit_slot_seconds / team.credit_rate_slots)

    def _credit(self, team: TeamQueue, now: float) -> float:
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

    def _send_held(self, team: TeamQueue, entry: Entry, kind: SendKind, now: float, decisions: list[Decision]) -> None:
        """Send a held request to an instance of this pool."""
        self._unhold(team, entry, now)
        team.sent += 1
        load = self._place(entry, kind, now, decisions)
        decisions.append(self._send(team, entry, kind, load, now))

    def _send(
        self, team: TeamQueue, entry: Entry, kind: SendKind, load: InstanceLoad, now: float, priority: int | None = None
    ) -> Send:
        """Grant a request that is not held (any more) the standing that is true now, and count it as running here.

        `team` is this queue's record of its team; the request may be a guest's. `priority`: decided before.
        """
        request, pool, slots = entry.request, self._pool, entry.request.slots
        borrowing = kind is _BORROWER
        if priority is not None:
            entry.weight = 0.0
        elif kind is _OWNER:
            entry.weight, priority = 0.0, within_share_priority(request.service_class)
        else:
            if borrowing:
                priority = borrow_priority(pool.rank(team.name), request.service_class)
            else:
                priority = within_share_priority(request.service_class)
            self._count_right(team, entry, kind, now)
        estimates = team.estimates if team.estimates.count else self._estimates
        grant = pool.record(
            team.state,
            now=now,
            priority=priority,
            borrowing=borrowing,
            slots=slots,
            estimated_tokens=request.estimated_tokens,
            provisional_cost_units=slots * estimates.cost_units_per_slot,
        )
        entry.queue, entry.team, entry.kind, entry.grant = self, team, kind, grant
        entry.instance, entry.sent_at = load, now
        self._instances.place(load, request.team, slots)
        if not team.state.share:
            self._renew_state(team)
        if request.recallable:
            team.recallable[request.id] = entry
        standing = _BORROWING if borrowing else _WITHIN_SHARE
        return Send(request.id, self._pool_name, load.id, grant, priority, standing, entry.waited_seconds)

    def _count_right(self, team: TeamQueue, entry: Entry, kind: SendKind, now: float) -> None:
        """Count what a request uses that goes by another right than its team's whole slots, and move its team's tag."""
        slots = entry.request.slots
        entry.weight, entry.estimate_slot_seconds = 0.0, slots * self._expected_seconds(team)
        if kind is _TURN:
            start_tag = team.turn_tag
            self._turn_virtual_time = max(self._turn_virtual_time, start_tag)
            entry.weight = team.fraction
            team.turn_end_tag = start_tag + entry.estimate_slot_seconds / entry.weight
            self._take_turn(team, slots, now)
        elif kind is _WIDE:
            team.wide_slots += slots
            team.wide_counts = True
        elif self._is_weighted and team.state.share > 0.0:
            start_tag = team.borrow_tag
            self._borrow_virtual_time = max(self._borrow_virtual_time, start_tag)
            low, high = WEIGHTED_LF_BOUNDS
            entry.weight = team.state.share * min(high, max(low, self._level_fairshare(team)))
            team.borrow_end_tag = start_tag + entry.estimate_slot_seconds / entry.weight

    def _take_turn(self, team: TeamQueue, slots: int, now: float) -> None:
        team.turn_slots = slots
        self._settle_turn_debt(now)
        self._turns_taken += 1
        self._turn_held_slots += slots

    def _count_turns_above(self, now: float, only: TeamQueue | None = None) -> None:
        """What runs here already above its team's whole slots holds its team's turn: of each team, or of one."""
        for queue in (self, *self._live_guests()):
            for entry in queue._entries.values():
                if entry.queue is self and (only is None or entry.team is only):
                    self._count_as_turn_if_above(entry.team, entry, now)

    def _count_as_turn_if_above(self, team: TeamQueue, entry: Entry, now: float) -> None:
        """What runs within share above its team's whole slots, as somebody else decided, holds its team's turn."""
        owns = entry.kind is _OWNER and team.fraction > 0.0
        if owns and not team.turn_slots and team.within_slots > team.whole_slots:
            entry.kind = _TURN
            # Its team's tag moves by what it runs from now on.
            entry.weight, entry.estimate_slot_seconds = team.fraction, entry.request.slots * (now - entry.sent_at)
            self._take_turn(team, entry.request.slots, now)

    def _place(self, entry: Entry, kind: SendKind, now: float, decisions: list[Decision]) -> InstanceLoad:
        """Choose the instance; for an owner without a free seat, take a borrower back (one decision with sending)."""
        request, instances = entry.request, self._instances
        if request.state_instance is not None:
            state_load = instances.accepting_with_id(request.state_instance)
            if state_load is not None:
                return state_load
        roomy = instances.with_room(request.team, request.preferred_instances)
        # Below C no owner waits for a seat; and a wide request that passes its team's own slots recalls nobody.
        if kind is _BORROWER or kind is _WIDE:
            return roomy or self._emptiest()
        needed_seats = request.slots if kind is _OWNER else 1
        if roomy is not None and roomy.free_seats >= needed_seats:
            return roomy
        emptiest = self._emptiest()
        if not self._options.recall or emptiest.free_seats >= needed_seats:
            return emptiest
        # Taken back in this event, to a turn of its team: no chain of recalls.
        if not (entry.recalled and entry.held_since == now):
            load = self._recall_for(request, needed_seats, now, decisions)
            if load is not None:
                return load
        return roomy or emptiest

    def _emptiest(self) -> InstanceLoad:
        emptiest = self._instances.emptiest_by_seats()
        assert emptiest is not None, "a request is sent only while an instance accepts requests"
        return emptiest

    def _recall_for(
        self, request: Request, needed_seats: int, now: float, decisions: list[Decision]
    ) -> InstanceLoad | None:
        """Take back what seats `request` on one instance; returns that instance, None if nothing can be recalled."""
        load: InstanceLoad | None = None
        # The first victim decides the instance; a wide owner may need more seats there.
        for _ in range(needed_seats):
            victim = self._victim(request.team, load, now)
            if victim is None:
                break
            load = victim.instance
            self._take_back(victim, now, decisions)
            if load.free_seats + load.aborting_slots >= needed_seats:
                break
        return load

    def _victim(self, for_team: str, load: InstanceLoad | None, now: float) -> Entry | None:
        """Of the team most above its share now, the request sent last that leaves the team its own.

        Only on the instance that is given, and only if what would be thrown away is within the waste budget.
        """
        self._fill_waste(now)
        passed_over: list[TeamQueue] = []
        victim: Entry | None = None
        while victim is None and (name := self._above.peek()) is not None:
            team = self._teams[name]
            if name != for_team:
                victim = self._last_sent(team, load, now)
            if victim is None:
                passed_over.append(team)
                self._above.discard(name)
        for team in passed_over:
            self._refresh_above(team)
        return victim

    def _last_sent(self, team: TeamQueue, load: InstanceLoad | None, now: float) -> Entry | None:
        above_slots = team.state.in_flight_slots - team.turn_slots - team.whole_slots
        for entry in reversed(team.recallable.values()):
            slots = entry.request.slots
            if now - entry.sent_at > self._waste_slot_seconds:
                break  # those sent before it would throw away even more
            if (
                entry.kind is not _TURN
                and slots <= above_slots
                and slots * (now - entry.sent_at) <= self._waste_slot_seconds
                and (entry.instance is load or (load is None and entry.instance.accepting))
            ):
                return entry
        return None

    def _take_back(self, entry: Entry, now: float, decisions: list[Decision]) -> None:
        """Recall a dispatched request: its grant ends uncharged and it waits again at the head of its team."""
        wasted = entry.request.slots * (now - entry.sent_at)
        self._waste_slot_seconds -= wasted
        self.recalls_total += 1
        self.recalled_slot_seconds_total += wasted
        home, load = entry.home, entry.instance
        home._aborting.setdefault(entry.request.id, deque()).append((self, load, entry.request.slots))
        self._end(entry, 0.0, now, recalled=True)
        home_now = now if home is self else home._pool.begin()
        entry.recalled = True
        entry.queue = None
        home._hold(home._team(entry.request.team), entry, home_now)
        decisions.append(Recall(request_id=entry.request.id, instance_id=load.id, wasted_slot_seconds=wasted))

    def _end(self, entry: Entry, consumed_cost_units: float, now: float, *, recalled: bool) -> None:
        """Settle a dispatched request of this pool: seat, turn, tags, estimates, charge."""
        request, team, kind = entry.request, entry.team, entry.kind
        slots, seconds = request.slots, now - entry.sent_at
        self._instances.take_off(entry.instance, request.team, slots, aborting=recalled)
        team.recallable.pop(request.id, None)
        if kind is not _OWNER:
            self._give_back_right(team, entry, slots * seconds, now)
        self._pool.settle(entry.grant, consumed_cost_units, now=now)
        if kind is _TURN and team.within_slots > team.whole_slots:  # after a failover, or a change of shares
            self._count_turns_above(now, only=team)
        if not recalled:
            learn(team.estimates, self._estimates, seconds, consumed_cost_units / slots)

    def _give_back_right(self, team: TeamQueue, entry: Entry, slot_seconds: float, now: float) -> None:
        """What `_count_right` counted ends, and its team's tag becomes what it would be had the truth been known."""
        slots = entry.request.slots
        if entry.kind is _TURN:
            team.turn_slots = 0
            self._settle_turn_debt(now)
            self._turns_taken -= 1
            self._turn_held_slots -= slots
            team.turn_end_tag += (slot_seconds - entry.estimate_slot_seconds) / entry.weight
        elif entry.kind is _WIDE:
            team.wide_slots -= slots
        elif entry.weight:
            team.borrow_end_tag += (slot_seconds - entry.estimate_slot_seconds) / entry.weight

    def _refresh_above(self, team: TeamQueue) -> None:
        """Keep the order in which teams are recalled from: most slots above its share first."""
        above = team.state.in_flight_slots - team.turn_slots > team.whole_slots
        if above and team.recallable and self._options.recall:
            self._above.set(team.name, team.own_slots - team.state.in_flight_slots)
        elif self._above.priorities:
            self._above.discard(team.name)

    # ------------------------------------------------------------------ fallback

    def _has_guest_room(self, slots: int) -> bool:
        """Whether another pool's request may run here: nothing of our own waits, and `try_acquire` would take it."""
        pool = self._pool
        if self._held or not self._instances.accepting or not self._has_room():
            return False
        return pool.live_slots + pool.phantom_slots + min(slots, pool.capacity) <= pool.capacity

    def _send_to_fallback(self, fallback: "HoldQueue", now: float, decisions: list[Decision]) -> None:
        """Let the next borrowers use the fallback's free room; an owner never goes there (it is never held)."""
        while self._borrowers.priorities:
            team = self._teams[self._some(self._borrowers)]
            entry = self._next_entry(team)
            self._send_one_to_fallback(team, entry, fallback, now, decisions)
            if entry.queue is None:
                break
            self._refresh_changed(now, decisions)

    def _send_one_to_fallback(
        self, team: TeamQueue, entry: Entry, fallback: "HoldQueue", now: float, decisions: list[Decision]
    ) -> None:
        """Send a held request to the fallback pool, with its standing there; without room it stays held."""
        request = entry.request
        if request.state_instance is not None or not fallback._has_guest_room(request.slots):
            return
        there = fallback._pool.begin()
        if fallback._generation != fallback._pool.generation:
            fallback._rebuild(there)
        self._unhold(team, entry, now)
        team.sent += 1
        guest = fallback._team(request.team)
        fallback._renew_state(guest)
        # By its whole slots there, as if it had been sent to that pool: a turn is not for guests, it is waited for.
        kind = _OWNER if fallback._fits(guest, request.slots) else _BORROWER
        load = fallback._instances.with_room(request.team, ()) or fallback._emptiest()
        decisions.append(fallback._send(guest, entry, kind, load, there))
        fallback._refresh_changed(there, decisions)

    # ------------------------------------------------------------------ bookkeeping

    def _team(self, name: str) -> TeamQueue:
        team = self._teams.get(name)
        if team is None:
            team = self._teams[name] = TeamQueue(name, self._pool.state(name))
            self._set_own(team)
        return team

    def _renew_state(self, team: TeamQueue) -> None:
        """Ask for the pool's record of a team without a share again; others' is replaced only by `_rebuild`."""
        team.state = self._pool.state(team.name)

    def _set_own(self, team: TeamQueue) -> None:
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
        if pool.phantom_slots:
            self._changed.update(name for name in pool.exact_shares if pool.state(name).phantom_slots)

    def _note_consumption(self, name: str) -> None:
        """Keep the sum of what the pool's teams consumed, for the LF of `weighted`."""
        if name not in self._pool.exact_shares:
            return
        state = self._pool.state(name)
        consumed = state.scaled_usage + state.scaled_provisional
        self._consumed_total += consumed - self._consumed.get(name, 0.0)
        self._consumed[name] = consumed

    def _level_fairshare(self, team: TeamQueue) -> float:
        """LF = S / U over the pool's teams, with provisional charges."""
        consumed = self._consumed[team.name]
        if consumed <= 0.0:
            return math.inf
        return team.state.share / self._shares_total * self._consumed_total / consumed

    def _forget_if_idle(self, team: TeamQueue) -> None:
        """Names that nobody configured leave nothing behind; teams with a share keep their tags and estimates."""
        if not team.own_slots and team.is_idle and not team.state.in_flight_slots and not team.state.share:
            self._teams.pop(team.name, None)

    def _expected_seconds(self, team: TeamQueue) -> float:
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

    def _oldest_held_since(self, team: TeamQueue) -> float:
        """When its oldest request would have begun to wait, had it not been away at an engine meanwhile."""
        entries = (line.first() for line in team.lines)
        return min(entry.held_since - entry.waited_seconds for entry in entries if entry is not None)

    @staticmethod
    def _some(heap: "KeyedHeap[float] | KeyedHeap[int] | KeyedHeap[tuple[float, int]]") -> str:
        name = heap.peek()
        assert name is not None, "looked for a team in an empty heap"
        return name

    def _next_entry(self, team: TeamQueue) -> Entry:
        entry = team.next(self._options.batch_every)
        assert entry is not None, f"team {team.name!r} is queued but holds nothing"
        return entry
