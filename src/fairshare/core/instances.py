"""Which instance a request goes to: a table of instances with their load, ordered by room and by free seats."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

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
        "in_flight_slots",
        "known_seats",
        "order",
        "part_slots",
        "removed",
        "running_seen",
        "slots_by_team",
        "taken_slots",
    )

    def __init__(self, instance: Instance, order: int) -> None:
        self.id = instance.id
        self.order = order
        self.part_slots = instance.part_slots
        self.known_seats = instance.seats
        self.running_seen = 0
        self.accepting = instance.accepting
        self.removed = False
        self.in_flight_slots = 0
        self.aborting_slots = 0
        self.taken_slots = 0
        """Slots in flight, and those of recalled requests whose seat may still be taken."""
        self.slots_by_team: dict[str, int] = {}
        self.entry: tuple[float, int, InstanceLoad] = (0.0, order, self)
        """Its place in the order by room, while it accepts requests."""

    def part_of(self, team: str) -> float:
        """What a team holds there, over the instance's part of C."""
        return self.slots_by_team.get(team, 0) / self.part_slots

    @property
    def seats(self) -> int:
        """What it could run at most: `max_num_seqs` if known, else the most it was seen to run, at least its part."""
        if self.known_seats is not None:
            return self.known_seats
        return max(self.running_seen, self.part_slots)

    @property
    def room_load(self) -> float:
        """Taken slots over its part of C: below 1 there is room."""
        return self.taken_slots / self.part_slots if self.part_slots else float("inf")

    @property
    def seat_load(self) -> float:
        """Taken slots over seats: below 1 a seat is free."""
        seats = self.seats
        return self.taken_slots / seats if seats else float("inf")


class InstanceTable:
    """The instances of one pool, with what runs where."""

    __slots__ = (
        "_by_room",
        "_by_seat",
        "_loads",
        "_next_order",
        "_stale_seats",
        "accepting_taken_slots",
        "placed_slots",
    )

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self._by_room: list[tuple[float, int, InstanceLoad]] = []
        self._by_seat: KeyedHeap[tuple[float, int]] = KeyedHeap()
        self._stale_seats: set[str] = set()
        """Instances whose place by seats is to be renewed when somebody asks: only owners beyond C do."""
        self._next_order = 0
        self.placed_slots = 0
        """Slots in flight on all instances, also those that accept nothing new."""
        self.accepting_taken_slots = 0
        """Slots taken on the instances that accept requests."""
        for instance in instances:
            self.changed(instance)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._loads

    @property
    def any_accepting(self) -> bool:
        """Whether any instance accepts requests."""
        return bool(self._by_room)

    def changed(self, instance: Instance) -> None:
        """Add an instance, or take over its changed record."""
        load = self._loads.get(instance.id)
        if load is None:
            load = self._loads[instance.id] = InstanceLoad(instance, self._next_order)
            self._next_order += 1
        else:
            self._leave_order(load)
            load.part_slots, load.known_seats = instance.part_slots, instance.seats
            if instance.accepting and not load.accepting:
                load.running_seen = 0  # it may have been restarted with other seats
            load.accepting, load.removed = instance.accepting, False
        self._enter_order(load)

    def removed(self, instance_id: str) -> None:
        """The instance is gone; it is forgotten when nothing that was sent there is left."""
        load = self._loads.get(instance_id)
        if load is None:
            return
        self._leave_order(load)
        load.accepting, load.removed = False, True
        self._enter_order(load)
        self._forget_if_empty(load)

    def running_seen(self, instance_id: str, running: int) -> bool:
        """The instance reported how many sequences it runs. Returns whether its seats grew."""
        load = self._loads.get(instance_id)
        if load is None or running <= load.running_seen:
            return False
        before = load.seats
        self._leave_order(load)
        load.running_seen = running
        self._enter_order(load)
        return load.seats > before

    def place(self, instance_id: str, team: str, slots: int) -> None:
        """Count a request of `team` as in flight there."""
        load = self._loads[instance_id]
        load.in_flight_slots += slots
        load.slots_by_team[team] = load.slots_by_team.get(team, 0) + slots
        self.placed_slots += slots
        self._take(load, slots)

    def take_off(self, instance_id: str, team: str, slots: int, *, aborting: bool = False) -> None:
        """A request of `team` no longer runs there. `aborting`: its seat still counts as taken for a while."""
        load = self._loads[instance_id]
        load.in_flight_slots -= slots
        assert load.in_flight_slots >= 0, f"instance {instance_id!r} has fewer slots in flight than were taken off"
        left = load.slots_by_team[team] - slots
        if left:
            load.slots_by_team[team] = left
        else:
            del load.slots_by_team[team]
        self.placed_slots -= slots
        if aborting:
            load.aborting_slots += slots
        else:
            self._take(load, -slots)

    def abort_ended(self, instance_id: str, slots: int) -> None:
        """The seat of a recalled request is free again."""
        load = self._loads[instance_id]
        load.aborting_slots -= slots
        self._take(load, -slots)

    def with_room(self, team: str, preferred: Sequence[str], excluding: frozenset[str] = frozenset()) -> str | None:
        """An instance with room: the one of which the team holds the smallest part; near equals: prefix, then load.

        Near equal is what differs by at most one slot of the instance's part, and for an instance that likely holds
        the prefix by at most `PREFIX_SLACK` of it. None: no instance has room.
        """
        candidates: list[InstanceLoad] = []
        for room_load, _, load in self._by_room:
            if room_load >= 1.0 or len(candidates) == CANDIDATES:
                break
            if load.id not in excluding:
                candidates.append(load)
        if not candidates:
            return None
        if len(candidates) == 1 and not preferred:
            return candidates[0].id
        # Candidates come emptiest first, so among equal parts the emptiest wins.
        best, smallest = candidates[0], candidates[0].part_of(team)
        for load in candidates:
            if smallest > (part := load.part_of(team)):
                best, smallest = load, part
        for instance_id in preferred:
            load = self._loads.get(instance_id)
            if load is None or not load.accepting or load.entry[0] >= 1.0 or instance_id in excluding:
                continue
            if load.part_of(team) <= smallest + max(PREFIX_SLACK, 1 / load.part_slots):
                return instance_id
        return best.id

    def emptiest_by_seats(self, excluding: frozenset[str] = frozenset()) -> InstanceLoad | None:
        """The accepting instance with the smallest part of its seats taken; None: no instance accepts requests."""
        if excluding:
            loads = [load for _, _, load in self._by_room if load.id not in excluding]
            return min(loads, key=lambda load: (load.seat_load, load.order), default=None)
        for instance_id in self._stale_seats:
            load = self._loads.get(instance_id)
            if load is not None and load.accepting:
                self._by_seat.set(instance_id, (load.seat_load, load.order))
        self._stale_seats.clear()
        name = self._by_seat.peek()
        return None if name is None else self._loads[name]

    def accepts(self, instance_id: str) -> bool:
        """Whether the instance is known and accepts requests."""
        load = self._loads.get(instance_id)
        return load is not None and load.accepting

    def free_seats(self, instance_id: str) -> int:
        """Seats not taken there; negative when more was sent than it can run."""
        load = self._loads[instance_id]
        return load.seats - load.taken_slots

    def aborting_slots(self, instance_id: str) -> int:
        """Slots of recalled requests whose seat may still be taken there."""
        return self._loads[instance_id].aborting_slots

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

    def _take(self, load: InstanceLoad, slots: int) -> None:
        """Move an instance whose taken slots change to its place in the order by room."""
        if not load.accepting:
            load.taken_slots += slots
            self._forget_if_empty(load)
            return
        by_room = self._by_room
        del by_room[bisect_left(by_room, load.entry)]
        load.taken_slots += slots
        self.accepting_taken_slots += slots
        load.entry = (load.room_load, load.order, load)
        insort(by_room, load.entry)
        self._stale_seats.add(load.id)

    def _leave_order(self, load: InstanceLoad) -> None:
        if load.accepting:
            self.accepting_taken_slots -= load.taken_slots
            del self._by_room[bisect_left(self._by_room, load.entry)]

    def _enter_order(self, load: InstanceLoad) -> None:
        if not load.accepting:
            self._by_seat.discard(load.id)
            return
        self.accepting_taken_slots += load.taken_slots
        load.entry = (load.room_load, load.order, load)
        insort(self._by_room, load.entry)
        self._stale_seats.add(load.id)

    def _forget_if_empty(self, load: InstanceLoad) -> None:
        if load.removed and not load.taken_slots:
            del self._loads[load.id]
            self._by_seat.discard(load.id)
