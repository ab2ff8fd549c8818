"""From a run's columns to the figures that are compared, and to tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isnan, nan
from statistics import fmean

from fairshare.simulator import measures
from fairshare.simulator.outcome import Outcome, PoolOutcome, Reign, TeamOutcome, Windows

WINDOW_OUTPUT_TOKENS = 1000
"""Shares are judged in windows of at least this many output tokens: below, one request more or less is points."""

BACKLOGGED = 0.99
"""A team is backlogged in a window if it waits for at least this part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamFigures:
    """One team under one policy. Seconds; NaN where there is nothing to measure."""

    team: str
    share: float
    finished: int
    refused: int
    failed: int
    output_tokens: int
    service_part: float
    """Of all output tokens of the run, 0 to 1."""
    worst_shortfall_points: float
    """The most by which it got less than it owns in a window in which it was backlogged."""
    mean_shortfall_points: float
    judged_windows: int
    first_token_p50: float
    first_token_p99: float
    owner_first_token_p50: float
    """Of requests that ran within share."""
    owner_first_token_p99: float
    longest_wait: float
    longest_borrower_wait: float
    evicted: int
    """Times one of its sequences lost its KV blocks."""
    recalled: int
    returns: int
    reclaim_p50: float
    """From its return until it held its whole slots."""
    reclaim_p99: float
    reclaim_max: float
    unfulfilled_returns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """One pool under one policy."""

    pool: str
    capacity: int
    output_tokens: int
    thrown_away_tokens: int
    recomputed_tokens: int
    evictions: int
    recalls: int
    recalled_part: float
    """Of the pool's slot-seconds, thrown away by recalls."""
    worst_shortfall_points: float
    mean_shortfall_points: float
    judged_windows: int
    slot_shortfall_points: float
    """The worst, in running slots: by how many points of C a backlogged team ran less than share x C."""
    mean_slot_shortfall_points: float
    jain: float
    """Mean over windows with two or more backlogged teams of Jain's index of service over share."""
    vtc_difference: float
    """Largest difference in accumulated service between teams that were backlogged all along, in VTC's units."""
    vtc_bound: float
    """VTC's 2 U for this pool; what VTC promises inside an engine."""
    idle_part: float
    """Of C x time: slots that nothing was sent to while something was held."""
    occupied_part: float
    """Of C: slots that ran in windows in which somebody waited all along."""
    reclaim_p50: float
    reclaim_p99: float
    reclaim_max: float
    unfulfilled_returns: int
    longest_wait: float
    longest_borrower_wait: float
    longest_underserved_wait: float
    """Of any request of a team that got less of all output tokens than it owns."""
    step_seconds: float
    teams: list[TeamFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    scenario: str
    policy: str
    seed: int
    requests: int
    virtual_seconds: float
    pools: list[PoolFigures]
    throughput_to_fcfs: float = nan
    """Output tokens that reached clients over those of FCFS in the same scenario; NaN without an FCFS run."""
    all_tokens_to_fcfs: float = nan
    """The same with prompts: comparable also where policies let different teams through."""
    alone: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    """Team to (p50, p99) of the time to first token without the others."""
    reigns: list[Reign] = field(default_factory=list[Reign])
    """Who decided when, where the scenario has replicas and the policy is `hold`."""
    degraded_grants: int = 0
    """Requests that a replica sent without an owner."""


def figures(
    outcome: Outcome, *, fcfs: Outcome | None = None, alone: dict[str, tuple[float, float]] | None = None
) -> Figures:
    """All figures of a run; `fcfs` is what its throughput is compared with."""
    return Figures(
        scenario=outcome.scenario,
        policy=outcome.policy,
        seed=outcome.seed,
        requests=outcome.requests,
        virtual_seconds=outcome.until - outcome.measured_from,
        pools=[_pool_figures(pool, outcome.until - outcome.measured_from) for pool in outcome.pools],
        throughput_to_fcfs=useful_tokens(outcome) / max(1, useful_tokens(fcfs)) if fcfs is not None else nan,
        all_tokens_to_fcfs=all_tokens(outcome) / max(1, all_tokens(fcfs)) if fcfs is not None else nan,
        alone=alone or {},
        reigns=outcome.reigns,
        degraded_grants=outcome.degraded_grants,
    )


def useful_tokens(outcome: Outcome) -> int:
    """Output tokens, without what was thrown away."""
    return sum(
        sum(team.output_tokens for team in pool.teams.values()) - pool.thrown_away_tokens for pool in outcome.pools
    )


def all_tokens(outcome: Outcome) -> int:
    """Prompt and output tokens, without what was thrown away."""
    return useful_tokens(outcome) + sum(team.prompt_tokens for pool in outcome.pools for team in pool.teams.values())


def first_token_percentiles(outcome: Outcome, team: str) -> tuple[float, float]:
    """(p50, p99) of a team's time to first token, over all pools."""
    seconds = [second for pool in outcome.pools for second in pool.teams[team].first_token_seconds]
    return measures.percentile(seconds, 50), measures.percentile(seconds, 99)


def judged_windows(windows: Windows, *, least_output_tokens: float = WINDOW_OUTPUT_TOKENS) -> list[range]:
    """Adjacent samples put together until each group has enough output tokens."""
    groups: list[range] = []
    begin, tokens = 0, 0.0
    for index, row in enumerate(windows.output_tokens):
        tokens += sum(row)
        if tokens >= least_output_tokens:
            groups.append(range(begin, index + 1))
            begin, tokens = index + 1, 0.0
    return groups


def backlogged_teams(windows: Windows, group: Iterable[int]) -> list[int]:
    """Columns of the teams that waited in all of these samples."""
    rows = list(group)
    return [
        column
        for column in range(len(windows.teams))
        if all(windows.waiting_seconds[row][column] >= BACKLOGGED * windows.lengths[row] for row in rows)
    ]


def _summed(rows: Sequence[Sequence[float]], group: Iterable[int]) -> list[float]:
    picked = [rows[index] for index in group]
    return [sum(column) for column in zip(*picked, strict=True)]


def _shortfalls(pool: PoolOutcome, groups: Sequence[range]) -> dict[str, list[float]]:
    """Team to its shortfall in each window in which it was backlogged, in points of the output tokens."""
    windows = pool.windows
    found: dict[str, list[float]] = {team: [] for team in windows.teams}
    for group in groups:
        served = dict(zip(windows.teams, _summed(windows.output_tokens, group), strict=True))
        owned = {
            windows.teams[column]: pool.shares.get(windows.teams[column], 0.0)
            for column in backlogged_teams(windows, group)
        }
        for team, points in measures.shortfall_points(served, owned).items():
            if owned[team] > 0.0:
                found[team].append(points)
    return found


def _slot_shortfalls(pool: PoolOutcome, groups: Sequence[range]) -> list[float]:
    """Of every owner and window in which it was backlogged, in points of C."""
    windows = pool.windows
    found: list[float] = []
    for group in groups:
        slots = sum(windows.capacity[row] * windows.lengths[row] for row in group)
        ran = _summed(windows.slot_seconds, group)
        for column in backlogged_teams(windows, group):
            share = pool.shares.get(windows.teams[column], 0.0)
            if share > 0.0:
                found.append(max(0.0, 100.0 * (share - ran[column] / slots)))
    return found


def _pool_figures(pool: PoolOutcome, seconds: float) -> PoolFigures:
    windows = pool.windows
    groups = judged_windows(windows)
    shortfalls = _shortfalls(pool, groups)
    slot_shortfalls = _slot_shortfalls(pool, groups)
    every = [points for team in shortfalls.values() for points in team]
    total_tokens = sum(team.output_tokens for team in pool.teams.values())
    returns = [one for team in pool.teams.values() for _, one in team.returns]
    slot_seconds = pool.capacity * seconds
    return PoolFigures(
        pool=pool.pool,
        capacity=pool.capacity,
        output_tokens=total_tokens,
        thrown_away_tokens=pool.thrown_away_tokens,
        recomputed_tokens=pool.recomputed_tokens,
        evictions=pool.evictions,
        recalls=pool.recalls,
        recalled_part=pool.recalled_slot_seconds / slot_seconds,
        worst_shortfall_points=max(every, default=nan),
        mean_shortfall_points=fmean(every) if every else nan,
        judged_windows=len(every),
        slot_shortfall_points=max(slot_shortfalls, default=nan),
        mean_slot_shortfall_points=fmean(slot_shortfalls) if slot_shortfalls else nan,
        jain=_jain(pool, groups),
        vtc_difference=_vtc_difference(pool),
        vtc_bound=2.0 * measures.vtc_bound(pool.longest_prompt_tokens, pool.kv_tokens),
        idle_part=pool.idle_slot_seconds / slot_seconds,
        occupied_part=_occupied_part(pool),
        reclaim_p50=measures.percentile(returns, 50),
        reclaim_p99=measures.percentile(returns, 99),
        reclaim_max=max(returns, default=nan),
        unfulfilled_returns=sum(team.unfulfilled_returns for team in pool.teams.values()),
        longest_wait=max(team.longest_wait_seconds for team in pool.teams.values()),
        longest_borrower_wait=max(team.longest_borrower_wait_seconds for team in pool.teams.values()),
        longest_underserved_wait=max(
            (
                team.longest_wait_seconds
                for team in pool.teams.values()
                if team.submitted and team.output_tokens < team.share * total_tokens
            ),
            default=nan,
        ),
        step_seconds=pool.step_seconds,
        teams=[_team_figures(team, shortfalls[team.team], total_tokens) for team in pool.teams.values()],
    )


def _team_figures(team: TeamOutcome, shortfalls: list[float], total_tokens: int) -> TeamFigures:
    owner = [seconds for seconds, borrowed in zip(team.first_token_seconds, team.borrowed, strict=True) if not borrowed]
    returns = [seconds for _, seconds in team.returns]
    return TeamFigures(
        team=team.team,
        share=team.share,
        finished=team.finished,
        refused=team.refused,
        failed=team.failed,
        output_tokens=team.output_tokens,
        service_part=team.output_tokens / max(1, total_tokens),
        worst_shortfall_points=max(shortfalls, default=nan),
        mean_shortfall_points=fmean(shortfalls) if shortfalls else nan,
        judged_windows=len(shortfalls),
        first_token_p50=measures.percentile(team.first_token_seconds, 50),
        first_token_p99=measures.percentile(team.first_token_seconds, 99),
        owner_first_token_p50=measures.percentile(owner, 50),
        owner_first_token_p99=measures.percentile(owner, 99),
        longest_wait=team.longest_wait_seconds,
        longest_borrower_wait=team.longest_borrower_wait_seconds,
        evicted=team.evicted,
        recalled=team.recalled,
        returns=len(returns),
        reclaim_p50=measures.percentile(returns, 50),
        reclaim_p99=measures.percentile(returns, 99),
        reclaim_max=max(returns, default=nan),
        unfulfilled_returns=team.unfulfilled_returns,
    )


def _service_rows(windows: Windows) -> list[list[float]]:
    return [
        [measures.service(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        for prompts, outputs in zip(windows.prompt_tokens, windows.output_tokens, strict=True)
    ]


def _jain(pool: PoolOutcome, groups: Sequence[range]) -> float:
    windows = pool.windows
    rows = _service_rows(windows)
    found: list[float] = []
    for group in groups:
        owners = [
            column for column in backlogged_teams(windows, group) if pool.shares.get(windows.teams[column], 0.0) > 0.0
        ]
        if len(owners) >= 2:
            served = _summed(rows, group)
            shares = [pool.shares[windows.teams[column]] for column in owners]
            found.append(measures.jain_of_shares([served[column] for column in owners], shares))
    return fmean(found) if found else nan


def _vtc_difference(pool: PoolOutcome) -> float:
    """Over every stretch of windows in which the same two or more owners were backlogged all along."""
    windows = pool.windows
    rows = _service_rows(windows)
    largest, begin = nan, 0
    backlogged = [
        frozenset(c for c in backlogged_teams(windows, (row,)) if pool.shares.get(windows.teams[c], 0.0) > 0.0)
        for row in range(len(rows))
    ]
    borders = [row for row, (before, after) in enumerate(pairwise(backlogged), 1) if before != after]
    for end in (*borders, len(rows)):
        columns = sorted(backlogged[begin]) if rows else []
        if len(columns) >= 2:
            accumulated = [[rows[row][column] for row in range(begin, end)] for column in columns]
            shares = [pool.shares[windows.teams[column]] for column in columns]
            found = measures.largest_difference(accumulated, shares)
            largest = found if isnan(largest) else max(largest, found)
        begin = end
    return largest


def _occupied_part(pool: PoolOutcome) -> float:
    windows = pool.windows
    ran = owned = 0.0
    for row, length in enumerate(windows.lengths):
        if backlogged_teams(windows, (row,)):
            slots = windows.capacity[row] * length
            owned += slots
            ran += min(slots, sum(windows.slot_seconds[row]))
    return ran / owned if owned else nan


# --- Text ---------------------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """A duration in three digits: 12 ms, 1.44 s, 83 s; a dash for NaN."""
    if isnan(seconds):
        return "–"
    if seconds == inf:
        return "never"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds >= 0.0005 else "0"
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:,.{digits}f} s"


def number_text(value: float, digits: int = 2) -> str:
    """A number, or a dash for NaN."""
    return "–" if isnan(value) else f"{value:,.{digits}f}"


def percent_text(part: float, digits: int = 1) -> str:
    """0.5 as 50.0 %, or a dash for NaN."""
    return "–" if isnan(part) else f"{100.0 * part:.{digits}f} %"


def reign_texts(run: Figures) -> list[str]:
    """Who decided for each group of pools; nothing where the run had no replicas."""
    by_pool: dict[str, list[str]] = {}
    for reign in run.reigns:
        by_pool.setdefault(reign.pool, []).append(f"{reign.replica or 'nobody'} from {seconds_text(reign.at)}")
    texts = [f"pool {pool} was decided by {', '.join(reigns)}" for pool, reigns in by_pool.items()]
    return [*texts, f"{run.degraded_grants:,} requests were sent by a replica on its own"] if texts else []


POLICY_COLUMNS = (
    "policy",
    "worst shortfall",
    "mean",
    "in slots",
    "Jain",
    "reclaim p99",
    "longest wait",
    "idle",
    "output",
    "all tokens",
    "recalled",
    "recomputed",
)
"""Shortfalls are in points; output and all tokens against fcfs."""


def reclaim_text(pool: PoolFigures) -> str:
    """The p99 of the returns that led to the whole reservation, and how many never did."""
    never = f" ({pool.unfulfilled_returns} never)" if pool.unfulfilled_returns else ""
    return seconds_text(pool.reclaim_p99) + never


def policy_row(run: Figures, pool: PoolFigures) -> tuple[str, ...]:
    """One line of the table that compares policies."""
    return (
        run.policy,
        number_text(pool.worst_shortfall_points, 1),
        number_text(pool.mean_shortfall_points, 2),
        number_text(pool.slot_shortfall_points, 1),
        number_text(pool.jain, 3),
        reclaim_text(pool),
        seconds_text(pool.longest_wait),
        percent_text(pool.idle_part, 2),
        percent_text(run.throughput_to_fcfs),
        percent_text(run.all_tokens_to_fcfs),
        f"{pool.recalls} ({percent_text(pool.recalled_part)})" if pool.recalls else "0",
        f"{pool.recomputed_tokens:,}",
    )


TEAM_COLUMNS = ("team", "owns", "got", "worst shortfall", "first token p50", "p99", "within share p99", "longest wait")


def team_row(team: TeamFigures) -> tuple[str, ...]:
    """One line of the table of teams."""
    return (
        team.team,
        percent_text(team.share),
        percent_text(team.service_part),
        number_text(team.worst_shortfall_points, 1),
        seconds_text(team.first_token_p50),
        seconds_text(team.first_token_p99),
        seconds_text(team.owner_first_token_p99),
        seconds_text(team.longest_wait),
    )
