"""What a queue learns of the requests of a team."""

import math

import pytest

from fairshare.core.team_queue import Estimates, learn


@pytest.mark.parametrize("consumed", [math.nan, math.inf, -1.0])
def test_a_request_whose_consumption_cannot_be_charged_teaches_no_duration_either(consumed: float) -> None:
    own, all_teams = Estimates(), Estimates()
    learn(own, all_teams, 2.0, 10.0)
    learn(own, all_teams, 1000.0, consumed)
    assert [(each.seconds, each.cost_units_per_slot) for each in (own, all_teams)] == [(2.0, 10.0)] * 2


def test_means_are_plain_at_first_and_then_follow_the_last_requests() -> None:
    own, all_teams = Estimates(), Estimates()
    learn(own, all_teams, 1.0, 4.0)
    learn(own, all_teams, 3.0, 8.0)
    assert (own.seconds, own.cost_units_per_slot) == (2.0, 6.0)
    for _ in range(200):
        learn(own, all_teams, 5.0, 1.0)
    assert own.seconds == pytest.approx(5.0, abs=0.01)
