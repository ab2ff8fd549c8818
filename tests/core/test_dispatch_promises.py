"""Promises of `hold` that the walk of `test_hold_properties` does not look at: who is next, and who gives way."""

import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare import ServiceClass
from support.desk import BATCH, INTERACTIVE, Desk

TEAMS = "ABDE"
WEIGHTS = st.lists(st.integers(1, 9), min_size=4, max_size=4)
CLASSES = st.sampled_from([INTERACTIVE, BATCH])

several = settings(max_examples=60, deadline=None)


@several
@given(st.lists(st.tuples(st.sampled_from(TEAMS), st.integers(1, 4)), max_size=30), st.integers(1, 9))
def test_whoever_borrows_goes_while_fewer_than_c_slots_are_taken(asked: list[tuple[str, int]], capacity: int) -> None:
    """So the pool is passed by the width of one request less one, whatever is asked for and ends."""
    desk = Desk(capacity, dict.fromkeys(TEAMS, "1/8"), seats=1000)
    taken: dict[str, int] = {}
    for number, (team, slots) in enumerate(asked):
        said = desk.submit(team, name=str(number), slots=slots)
        if number % 3 == 2 and taken:
            ended = min(taken)
            del taken[ended]
            said += desk.release(ended)
        for word, request_id in (each.split() for each in said):
            if word == "borrow":
                assert sum(taken.values()) < capacity
            if word in ("borrow", "own"):
                taken[request_id] = asked[int(request_id)][1]


@several
@given(WEIGHTS, st.lists(st.integers(0, 2000), min_size=4, max_size=4), st.permutations(TEAMS))
def test_idle_capacity_goes_to_the_best_exact_level_fairshare_and_of_equals_to_the_oldest(
    weights: list[int], used: list[int], arrivals: list[str]
) -> None:
    total = 8 * sum(weights)  # nobody owns a whole slot, and all turns are taken
    shares = {team: Fraction(weight, total) for team, weight in zip(TEAMS, weights, strict=True)}
    desk = Desk(8, shares)
    desk.submit("stranger", 8)
    assert desk.submit("A") == ["own A1"]
    for team, cost_units in zip(TEAMS, used, strict=True):
        desk.pool.set_usage(team, float(cost_units))
    for team in arrivals:
        assert desk.submit(team, name=team) == [f"hold {team}"]
    consumed = dict(zip(TEAMS, used, strict=True))
    best = sorted(TEAMS, key=lambda team: (consumed[team] / float(shares[team]), arrivals.index(team)))
    said = desk.release(*(f"stranger{number}" for number in range(1, 6)))
    assert [each.split()[1] for each in said if each.startswith("borrow")] == best


@several
@given(st.lists(CLASSES, max_size=40), st.sampled_from([0, 1, 2, 10]))
def test_a_teams_requests_go_interactive_first_each_in_order_and_every_nth_is_batch(
    classes: list[ServiceClass], batch_every: int
) -> None:
    desk = Desk(1, {"A": 1}, seats=1, batch_every=batch_every)
    lines: dict[ServiceClass, list[str]] = {INTERACTIVE: [], BATCH: []}
    desk.submit("A", name="first")
    for number, service_class in enumerate(classes):
        desk.submit("A", name=str(number), of=service_class)
        lines[service_class].append(str(number))
    running = "first"
    for sent in range(1, len(classes) + 1):
        batch_first = batch_every and sent % batch_every == batch_every - 1
        line = next(
            lines[each] for each in ((BATCH, INTERACTIVE) if batch_first else (INTERACTIVE, BATCH)) if lines[each]
        )
        expected = line.pop(0)
        assert desk.release(running) == [f"own {expected}"]
        running = expected


@several
@given(st.lists(st.tuples(st.sampled_from("ABD"), st.booleans()), min_size=8, max_size=8))
def test_an_owner_takes_back_what_was_sent_last_by_whoever_is_most_above_its_share(
    running: list[tuple[str, bool]],
) -> None:
    """A owns 1, B 2 and D 3 of 8 slots, all of which run; E, which owns 2, comes."""
    owns = {"A": 1, "B": 2, "D": 3}
    desk = Desk(8, {**{team: f"{own}/8" for team, own in owns.items()}, "E": "2/8"}, seats=8)
    for number, (team, begun) in enumerate(running):
        assert len(desk.submit(team, name=str(number))) == 1
        if begun:
            desk.first_byte(str(number))
    above = {team: sum(each == team for each, _ in running) - own for team, own in owns.items()}
    victims = [
        number
        for team in sorted(owns, key=lambda team: (-above[team], team))
        if above[team] > 0
        for number in reversed(range(8))
        if running[number] == (team, False)
    ]
    expected = [f"recall {victims[0]}", "own E1"] if victims else ["own E1"]
    assert desk.submit("E") == expected


@several
@given(
    st.lists(st.tuples(st.sampled_from(TEAMS), st.integers(0, 40)), max_size=40),
    st.integers(0, 6),
    st.integers(0, 4),
    st.integers(0, 120),
)
def test_no_more_is_held_than_the_bounds_say_and_what_is_refused_leaves_nothing(
    asked: list[tuple[str, int]], most: int, most_of_team: int, most_bytes: int
) -> None:
    desk = Desk(1, {"A": 1}, max_held=most, max_held_per_team=most_of_team, max_held_bytes=most_bytes)
    desk.submit("X")
    for team, size in asked:
        desk.submit(team, body_bytes=size)
        stat = desk.queue.snapshot()
        assert stat.held <= most
        assert stat.held_bytes <= most_bytes
        assert all(each.held <= most_of_team for each in stat.teams)
    assert len(desk.queue._entries) == desk.queue.snapshot().held + desk.pool.live_slots


@several
@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=12), st.floats(1.0, 40.0))
def test_whoever_waits_too_long_is_told_so_at_that_moment(pauses: list[float], longest: float) -> None:
    desk = Desk(1, {"A": 1}, longest_wait_seconds=longest)
    desk.submit("A", name="first")
    due: list[tuple[str, float]] = []
    told: list[str] = []
    for number, pause in enumerate(pauses):
        told += desk.submit("A", name=str(number))
        due.append((f"refuse {number}", desk.time.now + longest))
        told += desk.wait(pause)
        expected = [word for word, at in due if at <= desk.time.now]
        assert [word for word in told if word.startswith("refuse")] == expected
    assert math.isfinite(desk.queue.next_deadline() or 0.0)
