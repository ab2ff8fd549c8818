"""Pictures of a comparison: shares over time, queues, time to first token, reclaim times. Needs the extra `plots`."""

# matplotlib's types leave its keyword arguments open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairshare.errors import OperatorError
from fairshare.simulator.outcome import PoolOutcome
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.report import seconds_text
from fairshare.simulator.runner import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7a5195")
"""Of the first teams, in the scenario's order; told apart also by people who do not see all colours (Okabe and Ito)."""

OTHERS_COLOUR = "#b8bcc2"
INK = "#2b2f36"
FAINT = "#8a9099"
GRID = "#e6e8eb"
MOST_POINTS = 160
"""Along an axis of time; longer runs are averaged, so that lines stay readable and files small."""

SHOWN_POLICIES = (PolicyName.FCFS, PolicyName.PASS, PolicyName.HOLD_RECALL)
"""Side by side, if they were run."""


def draw(
    comparison: Comparison, directory: Path, *, prefix: str = "", kind: Literal["png", "svg"] = "png"
) -> list[Path]:
    """Write the pictures of a comparison; returns their paths. Raises `OperatorError` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise OperatorError("pictures need matplotlib; install it with: pip install 'fairshare[plots]'") from None
    directory.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        "font.size": 9.0,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlesize": 10.0,
        "axes.titleweight": "bold",
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.hashsalt": "fairshare",
        "svg.fonttype": "none",
    }
    written: list[Path] = []
    with matplotlib.rc_context(style):
        for name, figure in _figures(comparison, Figure):
            path = directory / f"{prefix}{name}.{kind}"
            # No date and no version inside: the same run gives the same file.
            figure.savefig(path, dpi=110, metadata={"Software": None} if kind == "png" else {"Date": None})
            written.append(path)
    return written


def _figures(comparison: Comparison, figure_type: "type[Figure]") -> "Iterator[tuple[str, Figure]]":
    shown = [policy for policy in SHOWN_POLICIES if policy in comparison.outcomes] or list(comparison.outcomes)[:3]
    for number, plan in enumerate(comparison.scenario.pools):
        pools = {policy: comparison.outcomes[policy].pools[number] for policy in comparison.outcomes}
        teams = _Teams(next(iter(pools.values())))
        suffix = f"-{plan.name}" if len(comparison.scenario.pools) > 1 else ""
        yield f"share{suffix}", _shares(figure_type, shown, pools, teams)
        yield f"queue{suffix}", _queues(figure_type, shown, pools, teams)
        yield f"first-token{suffix}", _first_tokens(figure_type, pools, teams)
        if any(team.returns for pool in pools.values() for team in pool.teams.values()):
            yield f"reclaim{suffix}", _reclaims(figure_type, pools)


class _Teams:
    """Which teams get a colour of their own: the largest; all others are shown together."""

    def __init__(self, pool: PoolOutcome) -> None:
        names = pool.windows.teams
        by_size = sorted(names, key=lambda team: -pool.shares.get(team, 0.0))
        own = names if len(names) <= len(COLOURS) else [team for team in names if team in by_size[: len(COLOURS) - 1]]
        self.names = list(own)
        self.groups = [[names.index(team)] for team in own]
        self.colours: list[str] = list(COLOURS[: len(own)])
        self.owned = [pool.shares.get(team, 0.0) for team in own]
        others = [team for team in names if team not in own]
        if others:
            self.names.append(f"{len(others)} others")
            self.groups.append([names.index(team) for team in others])
            self.colours.append(OTHERS_COLOUR)
            self.owned.append(sum(pool.shares.get(team, 0.0) for team in others))

    def columns(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """One list over time for each shown team."""
        return [[sum(row[column] for column in group) for row in rows] for group in self.groups]


def _thinned(times: Sequence[float], columns: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """Neighbours averaged until there are at most MOST_POINTS."""
    step = -(-len(times) // MOST_POINTS)
    if step <= 1:
        return list(times), columns
    starts = range(0, len(times) - step + 1, step)
    return (
        [times[start + step - 1] for start in starts],
        [[sum(column[start : start + step]) / step for start in starts] for column in columns],
    )


def _time_axis(axes: "Axes", last_seconds: float) -> float:
    """Label the axis in the unit that suits; returns its length in seconds."""
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):
        if last_seconds >= 2.5 * seconds or unit == "seconds":
            axes.set_xlabel(unit)
            return seconds
    return 1.0


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(figure: "Figure", axes: "Axes", teams: _Teams) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=8.5,
        handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _panels(figure_type: "type[Figure]", count: int, height: float) -> "tuple[Figure, list[Axes]]":
    figure = figure_type(figsize=(3.1 * count + 0.5, height), layout="constrained")
    axes = [figure.add_subplot(1, count, 1)]
    axes += [figure.add_subplot(1, count, number, sharey=axes[0]) for number in range(2, count + 1)]
    for one in axes[1:]:
        one.tick_params(labelleft=False)
    return figure, axes


def _shares(
    figure_type: "type[Figure]", shown: Sequence[PolicyName], pools: dict[PolicyName, PoolOutcome], teams: _Teams
) -> "Figure":
    figure, panels = _panels(figure_type, len(shown), 3.0)
    for axes, policy in zip(panels, shown, strict=True):
        windows = pools[policy].windows
        times, columns = _thinned(windows.ends, teams.columns(windows.output_tokens))
        seconds = _time_axis(axes, times[-1] if times else 1.0)
        x = [time / seconds for time in times]
        totals = [max(1e-9, sum(values)) for values in zip(*columns, strict=True)]
        parts = [[100.0 * value / total for value, total in zip(column, totals, strict=True)] for column in columns]
        # A step per window, from the window's begin to its end.
        x = [max(0.0, 2 * x[0] - x[1]) if len(x) > 1 else 0.0, *x]
        parts = [[column[0], *column] for column in parts]
        axes.stackplot(
            x, *parts, colors=teams.colours, labels=teams.names, linewidth=0.0, alpha=0.92, step="pre"
        )  # fmt: skip
        border = 0.0
        for owned in teams.owned[:-1]:
            border += 100.0 * owned
            axes.axhline(border, color="white", linewidth=2.4)
            axes.axhline(border, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
        axes.set_title(policy, loc="left")
        axes.set_ylim(0, 100)
        axes.set_xlim(x[0] if x else 0, x[-1] if x else 1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of output tokens")
    _legend(figure, panels[0], teams)
    figure.suptitle("Share of service over time; dashed: what each owns", x=0.01, ha="left", fontsize=9, color=INK)
    return figure


def _queues(
    figure_type: "type[Figure]", shown: Sequence[PolicyName], pools: dict[PolicyName, PoolOutcome], teams: _Teams
) -> "Figure":
    figure = figure_type(figsize=(3.1 * len(shown) + 0.5, 4.2), layout="constrained")
    grid = figure.subplots(2, len(shown), sharex="col", sharey="row", squeeze=False)
    for number, policy in enumerate(shown):
        windows = pools[policy].windows
        for row, samples in enumerate((windows.running, windows.waiting)):
            axes: Axes = grid[row, number]
            times, columns = _thinned(windows.ends, teams.columns(samples))
            seconds = _time_axis(axes, times[-1] if times else 1.0)
            x = [time / seconds for time in times]
            for column, colour, name in zip(columns, teams.colours, teams.names, strict=True):
                axes.plot(x, column, color=colour, linewidth=1.5, label=name)
            _plain(axes)
            if row == 0:
                axes.set_xlabel("")
                axes.set_title(policy, loc="left")
                axes.plot(x, _thinned(windows.ends, [list(windows.capacity)])[1][0], color=INK, linewidth=1.0,
                          linestyle=(0, (4, 3)), label="C")  # fmt: skip
    for axes in grid[:, 0]:
        axes.set_ylim(bottom=0)
    grid[0, 0].set_ylabel("running sequences")
    grid[1, 0].set_ylabel("waiting sequences")
    _legend(figure, grid[0, 0], teams)
    return figure


def _first_tokens(figure_type: "type[Figure]", pools: dict[PolicyName, PoolOutcome], teams: _Teams) -> "Figure":
    """For each policy and team a bar from the median to the 99th percentile, on a logarithmic axis."""
    from fairshare.simulator.measures import percentile

    count = len(teams.names)
    figure = figure_type(figsize=(7.6, 0.7 + len(pools) * (0.16 + 0.11 * count)), layout="constrained")
    axes = figure.add_subplot()
    for row, pool in enumerate(pools.values()):
        names = pool.windows.teams
        for number, group in enumerate(teams.groups):
            seconds = [second for column in group for second in pool.teams[names[column]].first_token_seconds]
            low, high = percentile(seconds, 50), percentile(seconds, 99)
            if isnan(low):
                continue
            y = row + (number - (count - 1) / 2) * 0.72 / count
            colour = teams.colours[number]
            axes.plot([low, high], [y, y], color=colour, linewidth=2.4, solid_capstyle="butt")
            axes.plot([low], [y], "o", color=colour, markersize=4.5, label=teams.names[number] if row == 0 else None)
            axes.plot([high], [y], "|", color=colour, markersize=8, markeredgewidth=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
    axes.set_yticks(range(len(pools)), list(pools))
    axes.set_ylim(len(pools) - 0.45, -0.55)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time to first token: dot median, bar to the 99th percentile")
    _legend(figure, axes, teams)
    return figure


def _reclaims(figure_type: "type[Figure]", pools: dict[PolicyName, PoolOutcome]) -> "Figure":
    """For each policy every return of an owner as a dot, with the median and the 99th percentile in words."""
    from fairshare.simulator.measures import percentile

    figure = figure_type(figsize=(7.6, 0.8 + 0.3 * len(pools)), layout="constrained")
    axes = figure.add_subplot()
    for row, pool in enumerate(pools.values()):
        seconds = sorted(one for team in pool.teams.values() for _, one in team.returns)
        never = sum(team.unfulfilled_returns for team in pool.teams.values())
        shown = [max(one, 1e-3) for one in seconds[:: -(-len(seconds) // 400) or 1]]
        axes.plot(shown, [row] * len(shown), "o", color=COLOURS[0], alpha=0.35, markersize=5, markeredgewidth=0)
        words = f"p50 {seconds_text(percentile(seconds, 50))}, p99 {seconds_text(percentile(seconds, 99))}"
        if never:
            words = f"{never} of {never + len(seconds)} never; p99 {seconds_text(percentile(seconds, 99))}"
        axes.text(1.02, row, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
    axes.set_yticks(range(len(pools)), list(pools))
    axes.set_ylim(len(pools) - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("from an owner's return until it holds its whole slots (less than 1 ms: at 1 ms)")
    return figure
