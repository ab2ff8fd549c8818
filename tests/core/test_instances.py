"""The instance table: where a request goes, by hand and against a list that is searched from end to end."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fairshare.core.decisions import Instance, InstanceStat
from fairshare.core.instances import CANDIDATES, PREFIX_SLACK, InstanceTable


def chosen_for(
    instances: InstanceTable, team: str, preferred: Sequence[str] = (), excluding: frozenset[str] = frozenset()
) -> str | None:
    load = instances.with_room(team, preferred, excluding)
    return None if load is None else load.id


def table(*parts: int, seats: int | None = None) -> InstanceTable:
    """Instances e0, e1, ... with these parts of C."""
    return InstanceTable(Instance(id=f"e{n}", part_slots=part, seats=seats) for n, part in enumerate(parts))


def test_a_request_goes_where_its_team_holds_the_smallest_part() -> None:
    instances = table(8, 8)
    for _ in range(4):
        instances.place(instances["e0"], "a", 1)
    for _ in range(6):
        instances.place(instances["e1"], "b", 1)
    assert chosen_for(instances, "a") == "e1"
    assert chosen_for(instances, "b") == "e0"


def test_a_table_made_of_the_records_of_another_has_the_same_records() -> None:
    records = [Instance(id="e0", part_slots=2, seats=5), Instance(id="e1", part_slots=3, accepting=False)]
    assert InstanceTable(InstanceTable(records).records()).records() == records


def test_parts_are_compared_and_not_counts() -> None:
    instances = table(4, 16)
    instances.place(instances["e0"], "a", 2)
    instances.place(instances["e1"], "a", 4)
    assert chosen_for(instances, "a") == "e1"  # 4/16 < 2/4


def test_of_equal_parts_the_emptiest_instance_is_taken() -> None:
    instances = table(8, 8)
    instances.place(instances["e0"], "b", 3)
    instances.place(instances["e1"], "b", 1)
    assert chosen_for(instances, "a") == "e1"


def test_the_prompts_prefix_decides_between_near_equals_only() -> None:
    instances = table(8, 8)
    instances.place(instances["e1"], "a", 2)
    assert chosen_for(instances, "a", ["e1"]) == "e1"  # a quarter of its part more is near
    instances.place(instances["e1"], "a", 1)
    assert chosen_for(instances, "a", ["e1"]) == "e0"  # more is not


def test_of_small_instances_one_slot_more_is_near() -> None:
    instances = table(2, 2)
    instances.place(instances["e1"], "a", 1)
    assert chosen_for(instances, "a", ["e1"]) == "e1"


def test_the_first_preferred_instance_with_room_is_taken() -> None:
    instances = table(1, 8, 8)
    instances.place(instances["e0"], "b", 1)
    assert chosen_for(instances, "a", ["e0", "unknown", "e2", "e1"]) == "e2"


def test_a_preferred_instance_is_looked_at_even_if_it_is_not_among_the_emptiest() -> None:
    instances = table(*[8] * (CANDIDATES + 1))
    instances.place(instances["e0"], "b", 1)
    assert chosen_for(instances, "a", ["e0"]) == "e0"


def test_without_room_there_is_no_instance() -> None:
    instances = table(2, 2)
    for name in ("e0", "e1"):
        instances.place(instances[name], "a", 2)
    assert chosen_for(instances, "b", ["e1"]) is None


def test_an_instance_without_a_part_of_the_capacity_has_no_room() -> None:
    assert chosen_for(table(0), "a", ["e0"]) is None


def test_excluded_instances_are_not_chosen() -> None:
    instances = table(4, 4, 4)
    assert chosen_for(instances, "a", ["e0"], frozenset({"e0", "e1"})) == "e2"
    assert chosen_for(instances, "a", (), frozenset({"e0", "e1", "e2"})) is None
    emptiest = instances.emptiest_by_seats(frozenset({"e0"}))
    assert emptiest is not None
    assert emptiest.id == "e1"


def test_a_wide_request_may_fill_more_than_is_left() -> None:
    instances = table(4, seats=8)
    instances.place(instances["e0"], "a", 3)
    assert chosen_for(instances, "a") == "e0"
    instances.place(instances["e0"], "a", 4)
    assert chosen_for(instances, "a") is None
    assert instances["e0"].free_seats == 1


def test_seats_are_max_num_seqs_if_known() -> None:
    instances = table(4, seats=2)
    instances.running_seen("e0", 64)
    assert instances["e0"].free_seats == 2


def test_unknown_seats_are_the_most_it_was_seen_to_run_and_at_least_its_part() -> None:
    instances = table(4)
    assert instances["e0"].free_seats == 4
    assert not instances.running_seen("e0", 3)
    assert instances["e0"].free_seats == 4
    assert instances.running_seen("e0", 7)
    assert not instances.running_seen("e0", 5)
    assert instances["e0"].free_seats == 7
    assert not instances.running_seen("unknown", 9)


def test_an_instance_that_comes_back_may_have_other_seats() -> None:
    instances = table(4)
    instances.running_seen("e0", 7)
    instances.changed(Instance(id="e0", part_slots=4, accepting=False))
    instances.changed(Instance(id="e0", part_slots=4))
    assert instances["e0"].free_seats == 4


def test_the_seat_of_a_recalled_request_stays_taken_until_its_abort_ends() -> None:
    instances = table(2, seats=2)
    instances.place(instances["e0"], "a", 2)
    instances.take_off(instances["e0"], "a", 2, aborting=True)
    assert chosen_for(instances, "b") is None
    assert (instances["e0"].free_seats, instances["e0"].aborting_slots, instances.placed_slots) == (0, 2, 0)
    assert instances.surplus_slots == 2
    instances.abort_ended(instances["e0"], 2)
    assert (instances["e0"].free_seats, instances["e0"].aborting_slots) == (2, 0)
    assert chosen_for(instances, "b") == "e0"


def test_an_instance_that_accepts_nothing_is_not_chosen_and_keeps_what_it_runs() -> None:
    instances = table(4, 4)
    instances.place(instances["e0"], "a", 1)
    instances.changed(Instance(id="e0", part_slots=4, accepting=False))
    assert chosen_for(instances, "b", ["e0"]) == "e1"
    assert instances.accepting_with_id("e0") is None
    assert (instances.placed_slots, instances.surplus_slots) == (1, -1)
    instances.changed(Instance(id="e1", part_slots=4, accepting=False))
    assert instances.emptiest_by_seats() is None
    assert not instances.any_accepting


def test_what_runs_where_nothing_new_may_go_takes_nothing_of_the_capacity() -> None:
    instances = table(4, 4)
    instances.changed(Instance(id="e0", part_slots=4, accepting=False))
    instances.place(instances["e0"], "a", 2)
    instances.place(instances["e0"], "a", 1)
    assert (instances.placed_slots, instances.surplus_slots) == (3, -3)
    instances.take_off(instances["e0"], "a", 2)
    instances.take_off(instances["e0"], "a", 1, aborting=True)
    assert (instances.placed_slots, instances.surplus_slots) == (0, 0)


def test_a_removed_instance_is_forgotten_when_its_last_request_ends() -> None:
    instances = table(4, 4)
    instances.place(instances["e0"], "a", 2)
    instances.place(instances["e1"], "a", 3)
    instances.removed("e0")
    instances.removed("unknown")
    emptiest = instances.emptiest_by_seats()
    assert emptiest is not None
    assert emptiest.id == "e1"
    assert "e0" in instances
    instances.take_off(instances["e0"], "a", 2, aborting=True)
    assert "e0" in instances
    instances.abort_ended(instances["e0"], 2)
    assert "e0" not in instances
    assert [stat.id for stat in instances.stats()] == ["e1"]


def test_instances_that_come_and_go_leave_nothing_behind() -> None:
    instances = table(4)
    for number in range(100):
        instances.changed(Instance(id=f"x{number}", part_slots=4))
        instances.place(instances[f"x{number}"], "a", 1)
        instances.removed(f"x{number}")
        instances.take_off(instances[f"x{number}"], "a", 1)
    assert (len(instances._loads), len(instances._moved), len(instances._by_room)) == (1, 0, 1)


def test_an_instance_may_be_removed_and_come_back_while_it_runs_something() -> None:
    instances = table(4)
    instances.place(instances["e0"], "a", 2)
    instances.removed("e0")
    instances.changed(Instance(id="e0", part_slots=6, seats=12))
    instances.take_off(instances["e0"], "a", 2)
    assert instances.stats() == (
        InstanceStat(id="e0", part_slots=6, seats=12, in_flight_slots=0, aborting_slots=0, accepting=True),
    )


def test_more_cannot_be_taken_off_than_was_placed() -> None:
    instances = table(4)
    instances.place(instances["e0"], "a", 1)
    with pytest.raises(AssertionError, match="fewer slots in flight"):
        instances.take_off(instances["e0"], "a", 2)


@dataclass
class Naive:
    """One instance of the plain model."""

    part: int
    seats: int | None
    accepting: bool = True
    seen: int = 0
    placed: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    aborting: list[int] = field(default_factory=list[int])
    removed: bool = False

    @property
    def taken(self) -> int:
        return sum(slots for _, slots in self.placed) + sum(self.aborting)

    @property
    def most(self) -> int:
        return self.seats if self.seats is not None else max(self.part, self.seen)

    def part_of(self, team: str) -> float:
        return sum(slots for name, slots in self.placed if name == team) / self.part


@pytest.mark.parametrize("seed", range(40))
def test_a_small_table_is_a_list_that_is_searched_from_end_to_end(seed: int) -> None:
    compare_run(seed, "abcde", events=150)


@pytest.mark.parametrize("seed", range(30))
def test_of_a_large_table_the_emptiest_with_room_are_looked_at(seed: int) -> None:
    compare_run(seed, "abcdefghijklmnopqrst", events=250)


def compare_run(seed: int, ids: str, *, events: int) -> None:
    """Random events on instances of these names; after each, all answers are compared with the plain model's."""
    rng = random.Random(seed)
    instances = InstanceTable(())
    naive: dict[str, Naive] = {}
    for _ in range(events):
        what = rng.choice(["change", "remove", "seen", "place", "place", "place", "end", "abort end"])
        name = rng.choice(ids)
        known = naive.get(name)
        if what == "change":
            seats, accepting = rng.choice([None, 0, 2, 6]), rng.random() < 0.7
            record = Instance(id=name, part_slots=rng.randint(0, 4), seats=seats, accepting=accepting)
            instances.changed(record)
            if known is None:
                naive[name] = Naive(record.part_slots, record.seats, record.accepting)
            else:
                if record.accepting and not known.accepting:
                    known.seen = 0
                known.part, known.seats, known.accepting = record.part_slots, record.seats, record.accepting
                known.removed = False
        elif what == "remove":
            instances.removed(name)
            if known is not None:
                known.accepting, known.removed = False, True
        elif what == "seen":
            running = rng.randint(0, 9)
            instances.running_seen(name, running)
            if known is not None:
                known.seen = max(known.seen, running)
        elif what == "place" and known is not None and known.accepting:
            team, slots = rng.choice("xy"), rng.randint(1, 3)
            instances.place(instances[name], team, slots)
            known.placed.append((team, slots))
        elif what == "end" and known is not None and known.placed:
            team, slots = known.placed.pop()
            recalled = rng.random() < 0.5
            instances.take_off(instances[name], team, slots, aborting=recalled)
            if recalled:
                known.aborting.append(slots)
        elif what == "abort end" and known is not None and known.aborting:
            instances.abort_ended(instances[name], known.aborting.pop())
        naive = {key: value for key, value in naive.items() if not value.removed or value.taken}
        preferred = rng.sample(ids, rng.randint(0, 2))
        compare(instances, naive, preferred, excluded=set(rng.sample(ids, rng.randint(0, 3))))


def compare(instances: InstanceTable, naive: dict[str, Naive], preferred: list[str], excluded: set[str]) -> None:
    accepting = {name: known for name, known in naive.items() if known.accepting}
    assert instances.any_accepting == bool(accepting)
    assert instances.placed_slots == sum(slots for known in naive.values() for _, slots in known.placed)
    taken_slots = sum(known.taken for known in accepting.values())
    assert instances.surplus_slots == taken_slots - instances.placed_slots
    assert [(stat.id, stat.seats, stat.in_flight_slots + stat.aborting_slots) for stat in instances.stats()] == [
        (name, known.most, known.taken) for name, known in naive.items()
    ]
    for name in naive:
        assert (instances.accepting_with_id(name) is not None) == (name in accepting)
        assert instances[name].free_seats == naive[name].most - naive[name].taken
    for excluding in (frozenset[str](), frozenset(excluded)):
        eligible = {name: known for name, known in accepting.items() if name not in excluding}
        emptiest = instances.emptiest_by_seats(excluding)
        loads = {name: known.taken / known.most if known.most else float("inf") for name, known in eligible.items()}
        assert (emptiest is None) == (not eligible)
        assert emptiest is None or loads[emptiest.id] == min(loads.values())
        chosen = chosen_for(instances, "x", preferred, excluding)
        roomy = {name: known for name, known in eligible.items() if known.taken < known.part}
        assert (chosen is None) == (not roomy)
        if chosen is None:
            continue
        if len(accepting) > CANDIDATES:
            emptiest_first = sorted(roomy, key=lambda name: roomy[name].taken / roomy[name].part)
        else:
            emptiest_first = list(roomy)
        looked_at = {name: roomy[name] for name in emptiest_first[:CANDIDATES]}
        smallest = min(known.part_of("x") for known in looked_at.values())
        nearer = [
            name for name, known in roomy.items() if known.part_of("x") <= smallest + max(PREFIX_SLACK, 1 / known.part)
        ]
        wanted = [name for name in preferred if name in nearer]
        if wanted:
            assert chosen == wanted[0]
        else:
            assert chosen == min(
                (name for name, known in looked_at.items() if known.part_of("x") == smallest),
                key=lambda name: looked_at[name].taken / looked_at[name].part,
            )
