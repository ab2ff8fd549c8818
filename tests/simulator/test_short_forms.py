"""A short form of every scenario of the evaluation: exact, and within what is promised.

The exact figures are in short_forms.json. After a change that moves them on purpose, `python
tests/simulator/test_short_forms.py` writes them anew; commit them only if you can say why each one moved.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairshare.simulator import traces
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.report import Figures, figures
from fairshare.simulator.scenario import load
from fairshare.simulator.world import World

SCENARIOS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))}
EXACT = Path(__file__).with_name("short_forms.json")

SLOTS_WITHIN_POINTS = {
    # Shortfall in running slots, in points of C, in the worst window: the target is 2.
    "batch-interactive": 2.0,
    "borrowers": 2.0,
    "burst-s1": 2.0,
    "burst-s2-headroom": 2.0,
    "hundred-teams": 2.0,
    "lost-instance": 2.0,
    "mooncake": 2.0,
    "reclaim": 2.0,
    "servegen": 2.0,
    "sixty-teams": 2.0,
    "steady-owner": 2.0,
    "toggling-headroom": 2.0,
    "vtc-arena": 2.0,
    "weekend": 2.0,
    "wide": 2.0,
}
"""Scenarios whose promise is that the reservation holds in every window; the others say why not."""


def short_form(name: str, policy: PolicyName = PolicyName.HOLD_RECALL) -> Figures:
    scenario = load(SCENARIOS[name])
    scenario = msgspec.structs.replace(scenario, duration=scenario.short)
    world = World(scenario, policy, arrivals=traces.arrivals(scenario, None))
    return figures(world.run())


def exact(run: Figures) -> dict[str, Any]:
    pool = run.pools[0]
    figures = {
        "requests": run.requests,
        "output tokens": pool.output_tokens,
        "finished": sum(team.finished for team in pool.teams),
        "recalls": pool.recalls,
        "recomputed tokens": pool.recomputed_tokens,
        "worst shortfall": round(pool.worst_shortfall_points, 6),
        "worst in slots": round(pool.slot_shortfall_points, 6),
        "reclaim p99": round(pool.reclaim_p99, 6),
        "longest wait": round(pool.longest_wait, 6),
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in figures.items()}


SHORT = [name for name, path in SCENARIOS.items() if load(path).short]


@pytest.fixture(scope="module")
def runs() -> dict[str, Figures]:
    return {}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_form_gives_exactly_these_figures(name: str, runs: dict[str, Figures]) -> None:
    runs[name] = short_form(name)
    assert exact(runs[name]) == json.loads(EXACT.read_text())[name]


@pytest.mark.parametrize("name", SLOTS_WITHIN_POINTS)
def test_a_backlogged_team_runs_what_it_owns_in_every_window(name: str, runs: dict[str, Figures]) -> None:
    pool = (runs.get(name) or short_form(name)).pools[0]
    assert not pool.slot_shortfall_points > SLOTS_WITHIN_POINTS[name]


@pytest.mark.parametrize("name", [name for name in SHORT if load(SCENARIOS[name]).replicas is None])
def test_no_slot_is_idle_while_anybody_waits(name: str, runs: dict[str, Figures]) -> None:
    pool = (runs.get(name) or short_form(name)).pools[0]
    # Without headroom and a recall under way, the seat of a recalled request is not free yet.
    assert pool.idle_part <= (0.001 if pool.recalls else 0.0)


def test_an_owner_holds_its_reservation_one_step_and_one_abort_after_it_came_back(runs: dict[str, Figures]) -> None:
    pool = (runs.get("reclaim") or short_form("reclaim")).pools[0]
    assert pool.recalls > 50
    assert pool.unfulfilled_returns == 0
    assert pool.reclaim_max <= pool.step_seconds + 0.001


def test_the_waste_of_recalls_stays_within_its_budget(runs: dict[str, Figures]) -> None:
    pool = (runs.get("toggling") or short_form("toggling")).pools[0]
    bucket_seconds, seconds = 300.0, 180.0
    assert pool.recalled_part <= 0.1 * (1 + bucket_seconds / seconds)
    assert pool.recalled_part > 0.2  # it was used up: this load wants more


def test_headroom_needs_no_recall(runs: dict[str, Figures]) -> None:
    pool = (runs.get("toggling-headroom") or short_form("toggling-headroom")).pools[0]
    assert (pool.recalls, pool.thrown_away_tokens) == (0, 0)


def test_adaptive_capacity_gives_batch_within_its_share_what_it_owns_where_the_cache_is_too_small(
    runs: dict[str, Figures],
) -> None:
    fixed = (runs.get("kv-tight") or short_form("kv-tight")).pools[0]
    adaptive = (runs.get("kv-tight-trim") or short_form("kv-tight-trim")).pools[0]
    parts = (
        {team.team: team.service_part for team in fixed.teams},
        {team.team: team.service_part for team in adaptive.teams},
    )
    assert parts[0]["batch"] < 0.18
    assert parts[1]["batch"] > 0.45
    assert adaptive.output_tokens > 0.985 * fixed.output_tokens
    assert adaptive.evictions < 0.8 * fixed.evictions


def test_standing_decided_on_arrival_loses_the_reservation_behind_a_backlog() -> None:
    assert short_form("burst-s1", PolicyName.PASS).pools[0].worst_shortfall_points == 50.0


if __name__ == "__main__":
    EXACT.write_text(json.dumps({name: exact(short_form(name)) for name in SHORT}, indent=1) + "\n")
