"""Which instance a request goes to: a table of instances with their load, ordered by room and by free seats."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from operator import attrgetter

from fairshare.core.decisions import Instance, InstanceStat
from fairshare.core.heap import KeyedHeap

CANDIDATES = 8
"""How many of the emptiest instances with room are looked at for one request.

All of them up to eight instances; beyond that the choice stays O(log n), and an instance of which the team holds the
smallest part is among the eight emptiest or close to it (docs/decisions/0003-which-instance.md).
"""

PREFIX_SLACK = 0.25
"""An instance that likely holds the prefix is taken although the team holds this much more of it than of another.

Measured (docs/decisions/0006-prefix-caches.md): one slot of slack loses hits. It is also the bound on
what prefixes can do to a team: a quarter of an instance, be it a fast or a slow one.
"""


class InstanceLoad:
    """What runs on one instance, in slots."""

    __slots__ = (
        "aborting_slots",
        "accepting",
        "entry",
        "id",
        "known_seats",
        "order",
        "part_slots",
        "removed",
        "running_seen",
        "seats",
        "slots_by_team",
        "taken_slots",
    )

    def __init__(self, instance: Instance, order: int) -> None:
        self.id = instance.id
        self.order = order
        self.accepting = False
        self.removed = False
        self.aborting_slots = 0
        self.taken_slots = 0
        """Slots in flight, and those of recalled requests whose seat may still be taken."""
        self.slots_by_team: dict[str, int] = {}
        self.running_seen = 0
        self.entry: tuple[float, int, InstanceLoad] = (0.0, order, self)
        """Its place in the order by room, while it accepts requests."""
        self.change(instance)

    def change(self, instance: Instance) -> None:
        """Take over its record."""
        if instance.accepting and not self.accepting:
            self.running_seen = 0  # it may have been restarted with other seats
        self.part_slots, self.known_seats = instance.part_slots, instance.seats
        self.accepting, self.removed = instance.accepting, False
        self.set_seats()

    def set_seats(self) -> None:
        """What it could run at most: `max_num_seqs` if known, else the most it was seen to run, at least its part."""
        self.seats = max(self.running_seen, self.part_slots) if self.known_seats is None else self.known_seats

    def part_of(self, team: str) -> float:
        """What a team holds there, over the instance's part of C."""
        return self.slots_by_team.get(team, 0) / self.part_slots

    @property
    def in_flight_slots(self) -> int:
        """Slots of what runs there."""
        return self.taken_slots - self.aborting_slots

    @property
    def free_seats(self) -> int:
        """Seats not taken there; negative when more was sent than it can run."""
        return self.seats - self.taken_slots

    @property
    def room_load(self) -> float:
        """Taken slots over its part of C: below 1 there is room."""
        return self.taken_slots / self.part_slots if self.part_slots else inf

    @property
    def seat_load(self) -> float:
        """Taken slots over seats: below 1 a seat is free."""
        return self.taken_slots / self.seats if self.seats else inf


class InstanceTable:
    """The instances of one pool, with what runs where.

    Up to `CANDIDATES` instances are simply looked at in turn. The orders by room and by free seats serve larger tables;
    a load whose slots changed is noted, and brought to its place in both when somebody asks.
    """

    __slots__ = ("_by_room", "_by_seat", "_loads", "_moved", "_next_order", "accepting", "surplus_slots")

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self.accepting: list[InstanceLoad] = []
        """Those that accept requests, in the order in which they were added; only for reading."""
        self._by_room: list[tuple[float, int, InstanceLoad]] = []
        self._by_seat: KeyedHeap[tuple[float, int]] = KeyedHeap()
        self._moved: set[InstanceLoad] = set()
        self._next_order = 0
        self.surplus_slots = 0
        """Slots taken on accepting instances, minus slots in flight on any: with the live grants, what is taken of C.

        The seats of recalled requests, less what still runs where nothing new may go.
        """
        for instance in instances:
            self.changed(instance)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._loads

    def __getitem__(self, instance_id: str) -> InstanceLoad:
        """Raises: KeyError: no such instance is known."""
        return self._loads[instance_id]

    @property
    def any_accepting(self) -> bool:
        """Whether any instance accepts requests."""
        return bool(self.accepting)

    @property
    def placed_slots(self) -> int:
        """Slots in flight on all instances, also those that accept nothing new. O(instances)."""
        return sum(load.in_flight_slots for load in self._loads.values())

    def changed(self, instance: Instance) -> None:
        """Add an instance, or take over its changed record."""
        load = self._loads.get(instance.id)
        if load is None:
            load = self._loads[instance.id] = InstanceLoad(instance, self._next_order)
            self._next_order += 1
        else:
            self._leave_order(load)
            load.change(instance)
        self._enter_order(load)

    def removed(self, instance_id: str) -> None:
        """The instance is gone; it is forgotten when nothing that was sent there is left."""
        load = self._loads.get(instance_id)
        if load is None:
            return
        self._leave_order(load)
        load.accepting, load.removed = False, True
        self._forget_if_empty(load)

    def running_seen(self, instance_id: str, running: int) -> bool:
        """The instance reported how many sequences it runs. Returns whether its seats grew."""
        load = self._loads.get(instance_id)
        if load is None or running <= load.running_seen:
            return False
        before, load.running_seen = load.seats, running
        load.set_seats()
        self._moved.add(load)
        return load.seats > before

    def place(self, load: InstanceLoad, team: str, slots: int) -> None:
        """Count a request of `team` as in flight there."""
        load.taken_slots += slots
        by_team = load.slots_by_team
        by_team[team] = by_team.get(team, 0) + slots
        if load.accepting:
            self._moved.add(load)
        else:
            self.surplus_slots -= slots

    def take_off(self, load: InstanceLoad, team: str, slots: int, *, aborting: bool = False) -> None:
        """A request of `team` no longer runs there. `aborting`: its seat still counts as taken for a while."""
        left = load.slots_by_team[team] - slots
        if left:
            assert left > 0, f"instance {load.id!r} has fewer slots in flight than were taken off"
            load.slots_by_team[team] = left
        else:
            del load.slots_by_team[team]
        if aborting:
            load.aborting_slots += slots
            self.surplus_slots += slots
            return
        load.taken_slots -= slots
        if load.accepting:
            self._moved.add(load)
        else:
            self.surplus_slots += slots
            self._forget_if_empty(load)

    def abort_ended(self, load: InstanceLoad, slots: int) -> None:
        """The seat of a recalled request is free again."""
        load.aborting_slots -= slots
        load.taken_slots -= slots
        if load.accepting:
            self.surplus_slots -= slots
            self._moved.add(load)
        else:
            self._forget_if_empty(load)

    def with_room(
        self, team: str, preferred: Sequence[str], excluding: frozenset[str] = frozenset()
    ) -> InstanceLoad | None:
        """An instance with room: the one of which the team holds the smallest part; near equals: prefix, then load.

        Near equal is what differs by at most one slot of the instance's part, and for an instance that likely holds
        the prefix by at most `PREFIX_SLACK` of it. None: no instance has room.
        """
        candidates = self.accepting
        if len(candidates) == 1 and not excluding:
            only = candidates[0]
            return only if only.taken_slots < only.part_slots else None
        if len(candidates) > CANDIDATES:
            candidates = self._emptiest(excluding)
        elif excluding:
            candidates = [load for load in candidates if load.id not in excluding]
        best: InstanceLoad | None = None
        smallest = emptiest = inf
        for load in candidates:
            taken_slots, part_slots = load.taken_slots, load.part_slots
            if taken_slots < part_slots:
                part = load.slots_by_team.get(team, 0) / part_slots
                # Of equal parts the emptiest wins, of equally empty ones the first.
                if part < smallest or (part == smallest and taken_slots / part_slots < emptiest):
                    best, smallest, emptiest = load, part, taken_slots / part_slots
        if best is None or not preferred:
            return best
        for instance_id in preferred:
            other = self._loads.get(instance_id)
            if (
                other is None
                or not other.accepting
                or other.taken_slots >= other.part_slots
                or instance_id in excluding
            ):
                continue
            if other.part_of(team) <= smallest + max(PREFIX_SLACK, 1 / other.part_slots):
                return other
        return best

    def emptiest_by_seats(self, excluding: frozenset[str] = frozenset()) -> InstanceLoad | None:
        """The accepting instance with the smallest part of its seats taken; None: no instance accepts requests."""
        if excluding or len(self.accepting) <= CANDIDATES:
            loads = [load for load in self.accepting if load.id not in excluding]
            return min(loads, key=attrgetter("seat_load"), default=None)
        self._restore_orders()
        name = self._by_seat.peek()
        return None if name is None else self._loads[name]

    def expect(self, instance_id: str) -> InstanceLoad:
        """Something runs there: if the instance is not known, it is one that has left already."""
        if instance_id not in self._loads:
            self.changed(Instance(id=instance_id, part_slots=0, accepting=False))
            self._loads[instance_id].removed = True
        return self._loads[instance_id]

    def accepting_with_id(self, instance_id: str) -> InstanceLoad | None:
        """The instance, if it is known and accepts requests."""
        load = self._loads.get(instance_id)
        return load if load is not None and load.accepting else None

    def stats(self) -> tuple[InstanceStat, ...]:
        """A snapshot, in the order in which the instances were added."""
        return tuple(
            InstanceStat(
                id=load.id,
                part_slots=load.part_slots,
                seats=load.seats,
                in_flight_slots=load.in_flight_slots,
                aborting_slots=load.aborting_slots,
                accepting=load.accepting,
            )
            for load in self._loads.values()
        )

    def records(self) -> list[Instance]:
        """Those that were not removed, as they were reported."""
        return [
            Instance(id=load.id, part_slots=load.part_slots, seats=load.known_seats, accepting=load.accepting)
            for load in self._loads.values()
            if not load.removed
        ]

    def _emptiest(self, excluding: frozenset[str]) -> list[InstanceLoad]:
        """The `CANDIDATES` emptiest of their parts, in that order."""
        self._restore_orders()
        return list(islice((load for _, _, load in self._by_room if load.id not in excluding), CANDIDATES))

    def _restore_orders(self) -> None:
        """Bring the loads whose slots changed to their places by room and by seats."""
        for load in self._moved:
            if load.accepting:
                del self._by_room[bisect_left(self._by_room, load.entry)]
                self._insert(load)
        self._moved.clear()

    def _insert(self, load: InstanceLoad) -> None:
        load.entry = (load.room_load, load.order, load)
        insort(self._by_room, load.entry)
        self._by_seat.set(load.id, (load.seat_load, load.order))

    def _leave_order(self, load: InstanceLoad) -> None:
        if load.accepting:
            self.surplus_slots -= load.taken_slots
            self.accepting.remove(load)
            del self._by_room[bisect_left(self._by_room, load.entry)]
            self._by_seat.discard(load.id)

    def _enter_order(self, load: InstanceLoad) -> None:
        if load.accepting:
            self.surplus_slots += load.taken_slots
            insort(self.accepting, load, key=attrgetter("order"))
            self._insert(load)

    def _forget_if_empty(self, load: InstanceLoad) -> None:
        if load.removed and not load.taken_slots:
            del self._loads[load.id]
            self._moved.discard(load)
