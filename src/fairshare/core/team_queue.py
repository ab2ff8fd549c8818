"""What a hold queue knows of one team: its requests that wait, in order, and its rights in numbers."""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING

from fairshare.core.decisions import Request
from fairshare.core.priority import ServiceClass

if TYPE_CHECKING:
    from fairshare.core.hold import HoldQueue
    from fairshare.core.instances import InstanceLoad
    from fairshare.core.pool import Grant, TeamState

ESTIMATE_MEMORY_REQUESTS = 16
"""A team's estimates are the running mean over about this many of its last requests."""


class SendKind(Enum):
    """By which right a request is sent."""

    OWNER = "whole slots"
    TURN = "turn slot"
    WIDE = "wide request of an owner"
    BORROWER = "idle capacity"


class Estimates:
    """Running means of the last requests: plain means at first, then exponential."""

    __slots__ = ("cost_units_per_slot", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        """Requests that they are of, up to `ESTIMATE_MEMORY_REQUESTS`."""
        self.seconds = 0.0
        """How long a request holds a slot."""
        self.cost_units_per_slot = 0.0

    def add(self, seconds: float, cost_units_per_slot: float) -> None:
        if self.count < ESTIMATE_MEMORY_REQUESTS:
            self.count += 1
        self.seconds += (seconds - self.seconds) / self.count
        self.cost_units_per_slot += (cost_units_per_slot - self.cost_units_per_slot) / self.count


def learn(own: Estimates, all_teams: Estimates, seconds: float, cost_units_per_slot: float) -> None:
    """Add a request that ended to its team's estimates and to those of all teams of its queue.

    From one whose consumption cannot be charged (NaN, say) nothing is learned: nobody saw its end, or it was another's.
    """
    if 0.0 <= cost_units_per_slot < math.inf:
        own.add(seconds, cost_units_per_slot)
        all_teams.add(seconds, cost_units_per_slot)


class Entry:
    """A request that is held or dispatched."""

    __slots__ = (
        "estimate_slot_seconds",
        "grant",
        "held_since",
        "home",
        "instance",
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
    team: "TeamQueue"
    """The record of its team in `queue`."""
    grant: "Grant"
    instance: "InstanceLoad"
    kind: SendKind
    sent_at: float
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


Lane = OrderedDict[int, Entry]


class Line:
    """Held requests of one team and class, first come first served; one lane per width beside the whole line."""

    __slots__ = ("entries", "lanes", "widths")

    def __init__(self) -> None:
        self.entries: Lane = OrderedDict()
        self.lanes: dict[int, Lane] = {}
        self.widths: list[int] = []
        """The lanes' widths in slots, narrowest first: whoever sends requests of a thousand widths delays nobody."""

    def add(self, entry: Entry) -> None:
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

    def remove(self, entry: Entry) -> None:
        slots = entry.request.slots
        lane = self.lanes[slots]
        del self.entries[entry.sequence], lane[entry.sequence]
        if not lane:
            del self.lanes[slots]
            del self.widths[bisect_left(self.widths, slots)]

    def first(self, widest_slots: int | None = None) -> Entry | None:
        """The oldest request, of those that are at most `widest_slots` wide."""
        if not self.entries:
            return None
        oldest = next(iter(self.entries.values()))
        if widest_slots is None or oldest.request.slots <= widest_slots:
            return oldest
        found: Entry | None = None
        for slots in self.widths:
            if slots > widest_slots:
                break
            entry = next(iter(self.lanes[slots].values()))
            if found is None or entry.sequence < found.sequence:
                found = entry
        return found


class TeamQueue:
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
        "phantoms_hold_turn",
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
        self.recalled = Line()
        self.interactive = Line()
        self.batch = Line()
        self.lines = (self.recalled, self.interactive, self.batch)
        self.held = 0
        self.held_slots = 0
        self.held_bytes = 0
        self.sent = 0
        """Requests sent, for the turn of its batch requests (`batch_every`)."""
        self.estimates = Estimates()
        self.turn_slots = 0
        """Slots of the request that holds a turn for it; not counted against its whole slots."""
        self.turn_end_tag = 0.0
        self.turn_floor = 0.0
        """Virtual time when it last began to hold requests. Its tag is never below: idling earns no hoard.

        While it goes on holding requests the floor stays, so that corrections of its end tag are not cut off.
        """
        self.borrow_end_tag = 0.0
        self.borrow_floor = 0.0
        self.recallable: OrderedDict[str, Entry] = OrderedDict()
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
        self.phantoms_hold_turn = False

    @property
    def is_idle(self) -> bool:
        return not (
            self.held or self.turn_slots or self.phantoms_hold_turn or self.recallable or self.credit_slot_seconds
        )

    @property
    def free_slots(self) -> int:
        """Its whole slots less those in flight and phantoms, its turn not counted; negative when it has more."""
        state = self.state
        return self.whole_slots + self.turn_slots - state.in_flight_slots - state.phantom_slots

    @property
    def within_slots(self) -> int:
        """Slots in flight that use its whole slots."""
        return self.state.in_flight_slots - self.state.borrowing_slots - self.turn_slots - self.wide_slots

    def phantoms_may_hold_turn(self) -> bool:
        """Whether what it has above its whole slots, with its phantoms, may be there by its turn."""
        phantom_slots = self.state.phantom_slots
        if not phantom_slots or not self.fraction or self.turn_slots:
            return False
        return self.within_slots + phantom_slots > self.whole_slots

    @property
    def turn_tag(self) -> float:
        return max(self.turn_floor, self.turn_end_tag)

    @property
    def borrow_tag(self) -> float:
        return max(self.borrow_floor, self.borrow_end_tag)

    def line(self, entry: Entry) -> Line:
        if entry.recalled:
            return self.recalled
        return self.interactive if entry.request.service_class is ServiceClass.INTERACTIVE else self.batch

    def next(self, batch_every: int, widest_slots: int | None = None) -> Entry | None:
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
