"""The failures that late binding exists for, on the stand-in engine's scheduler: `pass` has them and `hold` has not.

The engine has 16 seats, so does the pool; a team's part is of the tokens made in each window of time. The same loads
on vLLM's own scheduler class and on a real server gave the same picture (docs/proof.md).
"""

from collections.abc import Mapping
from functools import cache

import pytest

from fairshare.core.decisions import Mode
from support.coupled import Clients, Coupled

HALVES: Mapping[str, str] = {"A": "1/2", "B": "1/2"}


@cache
def burst(mode: Mode, requests: int, seconds: float, window_seconds: float) -> Coupled:
    """A bursts; B keeps 16 in flight. Each owns half."""
    loads = [Clients(team="A", burst=requests), Clients(team="B", loop=16)]
    return Coupled(mode, HALVES, window_seconds=window_seconds).run(loads, seconds)


def test_pass_starves_an_owner_behind_a_neighbours_burst() -> None:
    assert max(burst(Mode.PASS, 100, 14, 1.0).windows("B", 2, 6)) == 0.0


def test_hold_gives_an_owner_its_half_in_every_second_of_a_neighbours_burst() -> None:
    coupled = burst(Mode.HOLD, 100, 14, 1.0)
    assert min(coupled.windows("B", 0, 13)) >= 0.48
    assert max(coupled.times_to_first_token("B")) < 2.0


def test_holding_costs_no_throughput() -> None:
    made = [sum(burst(mode, 1000, 60, 5.0).marks[-1].values()) for mode in (Mode.PASS, Mode.HOLD)]
    assert made[1] == pytest.approx(made[0], rel=0.005)


def test_pass_starves_an_owner_for_as_long_as_the_backlog_is() -> None:
    assert max(burst(Mode.PASS, 1000, 60, 5.0).windows("B", 5, 60)) < 0.01


def test_hold_gives_an_owner_its_half_however_long_the_backlog_is() -> None:
    assert min(burst(Mode.HOLD, 1000, 60, 5.0).windows("B", 0, 60)) >= 0.48


@cache
def late_owner(mode: Mode) -> Coupled:
    """B bursts 300; five seconds later A bursts 60. Each owns half."""
    return Coupled(mode, HALVES).run([Clients(team="B", burst=300), Clients(team="A", burst=60, start=5.0)], 16)


def test_pass_gives_an_owner_who_comes_late_its_first_requests_only() -> None:
    assert max(late_owner(Mode.PASS).windows("A", 8, 14)) < 0.01


def test_hold_gives_an_owner_who_comes_late_its_half_from_the_next_second_on() -> None:
    # In the first, what B borrowed before A came runs out: streams that have begun cannot be taken back.
    windows = late_owner(Mode.HOLD).windows("A", 5, 13)
    assert windows[0] > 0.25
    assert min(windows[1:]) >= 0.48


@pytest.mark.parametrize("mode", [Mode.PASS, Mode.HOLD])
def test_an_owner_within_its_share_hardly_waits_beside_a_flood(mode: Mode) -> None:
    coupled = Coupled(mode, HALVES).run([Clients(team="A", loop=64), Clients(team="B", rate=3.0)], 60)
    waits = coupled.times_to_first_token("B")
    assert waits[len(waits) * 95 // 100] < 0.35
    # The flood's own requests keep their order: none overtakes the others by far.
    waits = coupled.times_to_first_token("A")
    assert waits[-1] < 1.35 * waits[len(waits) // 2]


@cache
def two_loops(mode: Mode) -> list[float]:
    """A keeps 64 in flight and B 16; each owns half. A's part of every five seconds."""
    loads = [Clients(team="A", loop=64), Clients(team="B", loop=16)]
    return Coupled(mode, HALVES, window_seconds=5.0).run(loads, 60).windows("A", 0, 60)


def test_pass_swings_from_one_team_to_the_other() -> None:
    """The order of ranks flips, and a whole cohort of one team drains before the other's."""
    assert min(two_loops(Mode.PASS)) < 0.1
    assert max(two_loops(Mode.PASS)) > 0.9


def test_hold_does_not_swing() -> None:
    assert min(two_loops(Mode.HOLD)) >= 0.48
    assert max(two_loops(Mode.HOLD)) <= 0.52


@cache
def weekend(mode: Mode) -> list[float]:
    """A owns 13/16 and is alone for a minute; then B, which owns 3/16, floods. A's part of every ten seconds since."""
    loads = [Clients(team="A", loop=64), Clients(team="B", loop=48, start=60.0)]
    return Coupled(mode, {"A": "13/16", "B": "3/16"}, window_seconds=10.0).run(loads, 120).windows("A", 60, 120)


def test_pass_makes_an_owner_pay_with_its_own_for_the_idle_capacity_it_used() -> None:
    assert weekend(Mode.PASS)[0] < 0.1
    assert weekend(Mode.PASS)[1] < 0.5


def test_hold_never_takes_from_an_owner_what_it_owns() -> None:
    assert min(weekend(Mode.HOLD)) >= 0.8
    assert max(weekend(Mode.HOLD)) <= 0.83


def test_with_headroom_an_owner_who_comes_late_waits_for_no_seat() -> None:
    loads = [Clients(team="B", loop=64), Clients(team="A", loop=8, start=5.0)]
    coupled = Coupled(Mode.HOLD, HALVES, max_num_seqs=32).run(loads, 20)
    # One step of 24 running requests and up to eight prompts, and the step that ran when they came.
    assert max(coupled.times_to_first_token("A")) < 0.06
    # Its eight run all the time; between two of its requests B borrows the slot, and there are 17 for a while.
    assert min(coupled.windows("A", 6, 20)) >= 8 / 17
