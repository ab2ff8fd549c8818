"""Runs a scenario under several policies, on the same requests, and compares them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from fairshare.clock import Clock
from fairshare.simulator.outcome import Outcome
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.report import Figures, figures, first_token_percentiles
from fairshare.simulator.scenario import Scenario
from fairshare.simulator.traces import Arrival
from fairshare.simulator.world import World

Progress = Callable[[str, float], None]
"""Told which run it is, and how much of it is done (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scenario under several policies."""

    scenario: Scenario
    seed: int
    outcomes: dict[PolicyName, Outcome]
    runs: list[Figures]


def tokens_per_minute(fcfs: Outcome) -> float:
    """What an operator would set: what the pool did per minute under the same load without any limits."""
    teams = [team for pool in fcfs.pools for team in pool.teams.values()]
    tokens = sum(team.prompt_tokens + team.output_tokens for team in teams)
    return tokens / ((fcfs.until - fcfs.measured_from) / 60.0)


def compare(
    scenario: Scenario,
    policies: Iterable[PolicyName],
    *,
    clock: Clock,
    seed: int | None = None,
    arrivals: Sequence[Arrival] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Run every policy. FCFS is run in any case: throughput and rate limits are measured by it.

    clock: tells how long the runs took; nothing else depends on it.
    """
    wanted = tuple(dict.fromkeys(policies))
    seed = scenario.seed if seed is None else seed

    def run(policy: PolicyName, limit: float = inf, only_team: str | None = None) -> Outcome:
        name = policy if only_team is None else f"{policy}, {only_team} alone"
        world = World(scenario, policy, seed=seed, arrivals=arrivals, tokens_per_minute=limit, only_team=only_team)
        begun_at = clock()

        def told(now: float) -> None:
            if progress is not None:
                progress(name, min(1.0, now / scenario.duration))

        outcome = world.run(told)
        outcome.wall_seconds = clock() - begun_at
        return outcome

    fcfs = run(PolicyName.FCFS)
    limit = tokens_per_minute(fcfs)
    outcomes = {policy: fcfs if policy is PolicyName.FCFS else run(policy, limit) for policy in wanted}
    alone = {
        team.name: first_token_percentiles(run(PolicyName.FCFS, only_team=team.name), team.name)
        for team in scenario.teams
        if team.alone
    }
    runs = [figures(outcome, fcfs=fcfs, alone=alone) for outcome in outcomes.values()]
    return Comparison(scenario, seed, outcomes, runs)
