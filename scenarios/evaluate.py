"""Writes docs/evaluation.md and its pictures: `make evaluate`.

Runs every scenario in this directory that the template names, under every policy. What stands in the template
(evaluation.md.in) is written by hand; it asks for figures in these ways:

    @scenario NAME          the scenario's title as a heading, what it is, and what was promised
    @picture NAME KIND      a picture: share, queue, first-token or reclaim
    @policies NAME          the table that compares policies
    @teams NAME POLICY      the table of teams under one policy
    @alone NAME             times to first token with the others and without them
    @reigns NAME            who decided when, under hold+recall, where there are replicas
    @windows NAME FROM TO   what each team ran in each window of these seconds, under hold+recall
    @summary                all scenarios under hold+recall, against the targets
    @converges NAME A B     what A had of what A and B used, half-life by half-life
    @differences            VTC's accumulated difference and the longest wait of a borrower, all scenarios
    @roundtrip              what it costs that a freed seat is refilled one step later
    {NAME POLICY FIELD}     one figure of the (first) pool, for example {burst-s1 pass worst_shortfall_points}
"""

import argparse
import re
import sys
import time
from math import isnan, nan
from pathlib import Path
from typing import Any

import msgspec

from fairshare.simulator import measures, report, traces
from fairshare.simulator.outcome import Outcome
from fairshare.simulator.plots import draw
from fairshare.simulator.policies import PolicyName, parse_policies
from fairshare.simulator.report import Figures, PoolFigures
from fairshare.simulator.runner import compare
from fairshare.simulator.scenario import Scenario, load, parse
from fairshare.simulator.world import World

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "evaluation.md.in"
PAGE = HERE.parent / "docs" / "evaluation.md"
PICTURES = HERE.parent / "docs" / "evaluation"
CACHE = HERE.parent / "build" / "evaluation.json"

OURS = PolicyName.HOLD_RECALL
WORST_POINTS, MEAN_POINTS, FIRST_TOKEN_RATIO, IDLE_PART, THROUGHPUT = 2.0, 1.0, 1.2, 0.00005, 0.99
"""The targets; an idle part below is 0.00 %."""

COMMAND = re.compile(r"^@(\w+) ?(.*)$", re.MULTILINE)
FIGURE = re.compile(r"\{([a-z0-9-]+) ([a-z+-]+) ([a-z0-9_.]+)\}")


def evaluate(name: str, pictures: set[str]) -> list[Figures]:
    """Run one scenario under all policies and draw the pictures that the template shows."""
    path = HERE / f"{name}.yaml"
    scenario = load(path)
    policies = parse_policies(scenario.policies or ["all"])
    begun_at = time.monotonic()
    comparison = compare(scenario, policies, clock=time.process_time, arrivals=traces.arrivals(scenario, HERE))
    requests = sum(run.requests for run in comparison.runs)
    print(f"{name}: {requests} requests in {time.monotonic() - begun_at:.1f} s", flush=True)
    for picture in draw(comparison, PICTURES, prefix=f"{name}-"):
        if picture.stem not in pictures:
            picture.unlink()
    return comparison.runs


class Page:
    """The template's questions, answered from the figures."""

    def __init__(self, figures: dict[str, list[Figures]]) -> None:
        self.figures = figures
        self.scenarios = {name: load(HERE / f"{name}.yaml") for name in figures}

    def run(self, name: str, policy: str) -> Figures:
        return next(run for run in self.figures[name] if run.policy == policy)

    def answer(self, command: str, words: list[str]) -> str:
        match command:
            case "scenario":
                return self.scenario(*words)
            case "picture":
                name, kind = words
                return f"![{self.scenarios[name].title}: {kind.replace('-', ' ')}](evaluation/{name}-{kind}.png)"
            case "policies":
                runs = self.figures[words[0]]
                return table(report.POLICY_COLUMNS, [report.policy_row(run, run.pools[0]) for run in runs], OURS)
            case "teams":
                pool = self.run(*words).pools[0]
                return table(report.TEAM_COLUMNS, [report.team_row(team) for team in pool.teams])
            case "alone":
                return self.alone(words[0])
            case "reigns":
                return f"Under `{OURS}`: {'; '.join(report.reign_texts(self.run(words[0], OURS)))}."
            case "windows":
                return windows(words[0], float(words[1]), float(words[2]))
            case "summary":
                return self.summary()
            case "converges":
                return converges(*words)
            case "differences":
                return self.differences()
            case "roundtrip":
                return round_trip()
            case _:
                raise ValueError(f"{TEMPLATE}: there is no @{command}")

    def scenario(self, name: str) -> str:
        scenario = self.scenarios[name]
        about, promise = (" ".join(text.split()) for text in (scenario.about, scenario.promise))
        return f"### {scenario.title}\n\n`scenarios/{name}.yaml`. {about}\n\n**Promised:** {promise}"

    def alone(self, name: str) -> str:
        rows: list[tuple[str, ...]] = []
        for run in self.figures[name]:
            for team in run.pools[0].teams:
                if team.team in run.alone:
                    _, p99 = run.alone[team.team]
                    flood = team.owner_first_token_p99
                    ratio = report.number_text(first_token_ratio(run))
                    rows.append((run.policy, team.team, *map(report.seconds_text, (p99, flood)), ratio))
        return table(("policy", "team", "p99 alone", "p99 within share, with the others", "ratio"), rows, OURS)

    def summary(self) -> str:
        rows: list[tuple[str, ...]] = []
        for name, scenario in self.scenarios.items():
            run = self.run(name, OURS)
            fcfs = self.run(name, PolicyName.FCFS).pools[0] if name in self.figures else None
            pool = run.pools[0]
            rows.append(
                (
                    f"[{scenario.title}](#{anchor(scenario)})",
                    judged(pool.worst_shortfall_points, WORST_POINTS, 1),
                    judged(pool.mean_shortfall_points, MEAN_POINTS, 2),
                    judged(pool.slot_shortfall_points, WORST_POINTS, 1),
                    report.number_text(fcfs.worst_shortfall_points if fcfs else nan, 1),
                    judged(first_token_ratio(run), FIRST_TOKEN_RATIO, 2),
                    report.reclaim_text(pool),
                    bold_if(report.percent_text(pool.idle_part, 2), pool.idle_part >= IDLE_PART),
                    bold_if(report.percent_text(run.all_tokens_to_fcfs), run.all_tokens_to_fcfs < THROUGHPUT),
                )
            )
        columns = (
            "scenario",
            "worst shortfall",
            "mean",
            "worst in slots",
            "fcfs: worst",
            "first token, to alone",
            "reclaim p99",
            "idle",
            "tokens",
        )
        return table(columns, rows)

    def differences(self) -> str:
        """Scenarios in which two owners waited together long enough to differ."""
        compared = (PolicyName.FCFS, PolicyName.PASS, OURS, PolicyName.WEIGHTED_VTC)
        rows: list[tuple[str, ...]] = []
        for name, scenario in self.scenarios.items():
            pools = [self.run(name, policy).pools[0] for policy in compared]
            if not isnan(pools[2].vtc_difference):
                rows.append(
                    (
                        scenario.title,
                        *(report.number_text(pool.vtc_difference / 1000, 1) for pool in pools),
                        report.number_text(pools[2].vtc_bound / 1000, 0),
                        report.seconds_text(pools[2].longest_borrower_wait),
                        report.seconds_text(pools[2].longest_underserved_wait),
                    )
                )
        columns = (
            "scenario",
            *compared,
            "VTC's bound 2 U",
            f"longest wait of a borrower, {OURS}",
            "of an underserved team",
        )
        return table(columns, rows)

    def value(self, name: str, policy: str, field: str) -> str:
        run = self.run(name, policy)
        found: Any = run
        if not hasattr(run, field.split(".")[0]):
            found = run.pools[0]
        for part in field.split("."):
            if isinstance(found, PoolFigures) and not hasattr(found, part):
                found = next(team for team in found.teams if team.team == part)
            else:
                found = getattr(found, part)
        last = field.rsplit(".", 1)[-1]
        if last.endswith("points"):
            return report.number_text(found, 1)
        if last.endswith(("part", "to_fcfs")):
            return report.percent_text(found)
        if isinstance(found, int):
            return f"{found:,}"
        return report.number_text(found, 3) if last == "jain" else report.seconds_text(found)

    def fill(self, template: str) -> str:
        text = COMMAND.sub(lambda match: self.answer(match[1], match[2].split()), template)
        return FIGURE.sub(lambda match: self.value(*match.groups()), text)


ROUND_TRIP = """
title: round trip
duration: {duration}
warm_up: 10s
window: 5s
pools: [{{capacity: {capacity}, engines: {{max_num_seqs: 16, headroom: {headroom}}}}}]
teams:
  - {{name: owner, share: 1/2, loads: [{{clients: 9, on: 5s, off: 25s, start: 20s, prompt: 20, output: {output}}}]}}
  - {{name: borrower, share: 1/2, loads: [{{clients: 64, prompt: 20, output: {output}}}]}}
"""


def round_trip() -> str:
    """Output tokens against FCFS with 16 seats, for short, usual and long answers."""
    rows: list[tuple[str, ...]] = []
    settings = ((16, 1, OURS), (16, 2, OURS), (17, 2, OURS), (18, 2, OURS))
    for mean, output, duration in ((10, "5-15", "5m"), (100, "50-150", "5m"), (1000, "500-1500", "10m")):

        def run(
            capacity: int,
            headroom: int,
            policy: PolicyName,
            only_team: str | None = None,
            output: str = output,
            duration: str = duration,
        ) -> Outcome:
            text = ROUND_TRIP.format(capacity=capacity, headroom=headroom, output=output, duration=duration)
            return World(parse(text), policy, only_team=only_team).run()

        fcfs = report.useful_tokens(run(16, 1, PolicyName.FCFS, "borrower"))
        for capacity, headroom, policy in settings:
            alone = run(capacity, headroom, policy, "borrower")
            windows = alone.pools[0].windows
            running = sum(map(sum, windows.slot_seconds)) / sum(windows.lengths)
            owner = run(capacity, headroom, policy).pools[0].teams["owner"]
            rows.append(
                (
                    f"{mean:,}",
                    str(capacity),
                    str(16 * headroom),
                    report.percent_text(report.useful_tokens(alone) / fcfs),
                    report.number_text(running, 2),
                    report.seconds_text(measures.percentile([seconds for _, seconds in owner.returns], 99)),
                )
            )
    return table(("mean output", "C", "max_num_seqs", "output against fcfs", "running", "reclaim p99"), rows)


def windows(name: str, begin: float, end: float) -> str:
    """Slots that ran in each window, team by team."""
    scenario = load(HERE / f"{name}.yaml")
    pool = World(scenario, OURS, arrivals=traces.arrivals(scenario, HERE)).run().pools[0]
    rows: list[tuple[str, ...]] = []
    for closed, length, slots in zip(pool.windows.ends, pool.windows.lengths, pool.windows.slot_seconds, strict=True):
        if begin < closed <= end:
            ran = [report.number_text(seconds / length, 1) for seconds in slots]
            rows.append((f"{closed - length:g}–{closed:g} s", *ran))
    owned = [f"{team} (owns {pool.shares[team] * pool.capacity:g})" for team in pool.windows.teams]
    return table(("window", *owned), rows)


def converges(name: str, one: str, other: str) -> str:
    """What the first of two borrowers had of what both used: in each half-life, and of usage as it decays."""
    scenario = load(HERE / f"{name}.yaml")
    half_life = scenario.pools[0].half_life
    columns: list[list[str]] = []
    for policy in (OURS, PolicyName.HOLD_WEIGHTED):
        windows = World(scenario, policy).run().pools[0].windows
        used = dict.fromkeys((one, other), 0.0)
        in_this_half_life = dict(used)
        cells: list[str] = []
        for end, length, prompts, outputs in zip(
            windows.ends, windows.lengths, windows.prompt_tokens, windows.output_tokens, strict=True
        ):
            for team in used:
                column = windows.teams.index(team)
                service = measures.service(prompts[column], outputs[column])
                used[team] = used[team] * 0.5 ** (length / half_life) + service
                in_this_half_life[team] += service
            if (end / half_life).is_integer():
                parts = [pair[one] / max(1.0, sum(pair.values())) for pair in (in_this_half_life, used)]
                cells.append(" / ".join(map(report.percent_text, parts)))
                in_this_half_life = dict.fromkeys(used, 0.0)
        columns.append(cells)
    rows = [(f"{number}", *cells) for number, cells in enumerate(zip(*columns, strict=True), 1)]
    return table(("half-life", str(OURS), str(PolicyName.HOLD_WEIGHTED)), rows)


def anchor(scenario: Scenario) -> str:
    """What repositories call a heading in links."""
    return re.sub(r"[^a-z0-9 -]", "", scenario.title.lower()).replace(" ", "-")


def first_token_ratio(run: Figures) -> float:
    """The p99 within share with the others to that without them, of the team that the scenario compares; else NaN."""
    teams = [team for pool in run.pools for team in pool.teams if team.team in run.alone]
    return max((team.owner_first_token_p99 / run.alone[team.team][1] for team in teams), default=nan)


def judged(value: float, limit: float, digits: int) -> str:
    """A figure, in bold where it misses its target."""
    return bold_if(report.number_text(value, digits), value > limit)


def bold_if(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]], marked: str | None = None) -> str:
    """A Markdown table; the row that begins with `marked` is in bold."""
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for row in rows:
        cells = [f"**{cell}**" for cell in row] if row[0] == marked else list(row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cached() -> dict[str, list[Figures]]:
    """The figures of the last run; JSON has no NaN, so null stands for it."""

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restored(one) for key, one in value.items()}
        if isinstance(value, list):
            return [restored(one) for one in value]
        return nan if value is None else value

    return msgspec.convert(restored(msgspec.json.decode(CACHE.read_bytes())), dict[str, list[Figures]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only these again, the rest is taken from the last run")
    names = parser.parse_args().names
    template = TEMPLATE.read_text(encoding="utf-8")
    commands = [(command, words.split()) for command, words in COMMAND.findall(template)]
    wanted = [words[0] for command, words in commands if command == "scenario"]
    pictures = {f"{words[0]}-{words[1]}" for command, words in commands if command == "picture"}
    if unknown := set(names) - set(wanted):
        sys.exit(f"{TEMPLATE} has no scenario {', '.join(sorted(unknown))}")
    figures = cached() if names else {}
    for name in wanted:
        if not names or name in names or name not in figures:
            figures[name] = evaluate(name, pictures)
            # After each: naming any scenario goes on with an interrupted run.
            CACHE.parent.mkdir(exist_ok=True)
            CACHE.write_bytes(msgspec.json.encode(figures))
    figures = {name: figures[name] for name in wanted}
    PAGE.write_text(Page(figures).fill(template), encoding="utf-8")
    for path in PICTURES.glob("*.png"):
        if path.stem not in pictures:
            path.unlink()
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
