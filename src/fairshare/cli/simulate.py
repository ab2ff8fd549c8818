"""`fairshare simulate`: what a plan would do, before anybody buys GPUs."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from fairshare.simulator.runner import Comparison, Progress
    from fairshare.simulator.scenario import Scenario

QUIET_SECONDS = 5.0
"""Without a terminal, runs shorter than this say nothing on the way."""


def register(app: typer.Typer) -> None:
    app.command("simulate", epilog="Example: fairshare simulate scenarios/burst-s1.yaml --plots pictures")(simulate)


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario file; scenarios/ has examples.", metavar="FILE")],
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="What to compare; may be given several times, `all` for everything. Default: what the scenario says, "
            "else the engine's fcfs, pass and hold+recall.",
            metavar="NAME",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Play this recorded load instead of the scenario's own (CSV or JSON lines, also gzipped)."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Another draw of the same load.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - is standard output.")] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="Draw pictures into this directory (needs the extra `plots`).", metavar="DIR"),
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Pictures as SVG instead of PNG.")] = False,
) -> None:
    """Run a scenario in virtual time: gateway decisions as in production, engines with vLLM's scheduling rules.

    The same file and seed give the same figures every time. Every policy sees the same requests.
    """
    import msgspec

    from fairshare import clock
    from fairshare.errors import OperatorError
    from fairshare.simulator import traces
    from fairshare.simulator.policies import PolicyName, parse_policies
    from fairshare.simulator.runner import compare
    from fairshare.simulator.scenario import TracePlan, load

    plan = load(scenario)
    if trace is not None:
        given = plan.traces[0] if plan.traces else TracePlan(file="")
        plan = msgspec.structs.replace(plan, traces=[msgspec.structs.replace(given, file=str(trace))])
    names = policies or plan.policies or [PolicyName.FCFS, PolicyName.PASS, PolicyName.HOLD_RECALL]
    try:
        wanted = parse_policies(names)
    except ValueError as error:
        raise OperatorError(f"--policy: {error}") from None
    arrivals = traces.arrivals(plan, scenario.parent)
    with _progress() as progress:
        comparison = compare(plan, wanted, clock=clock.monotonic, seed=seed, arrivals=arrivals, progress=progress)
    if json is None or str(json) != "-":
        _show(plan, comparison)
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(comparison.runs), indent=1) + b"\n"
        if str(json) == "-":
            sys.stdout.buffer.write(text)
        else:
            json.write_bytes(text)
    if plots is not None:
        from fairshare.simulator.plots import draw

        for path in draw(comparison, plots, kind="svg" if svg else "png"):
            print(path)


def _show(plan: "Scenario", comparison: "Comparison") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fairshare.simulator import report

    # A file or pipe has no width: the table must not be cut there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(f"[bold]{plan.title}[/bold]  seed {comparison.seed}, {plan.duration:g} s of virtual time")
    if plan.promise:
        console.print(f"promise: {plan.promise}")

    def table(title: str, columns: tuple[str, ...], rows: "Iterable[tuple[str, ...]]") -> None:
        made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(columns):
            made.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            made.add_row(*row)
        console.print(made)

    for number, pool in enumerate(comparison.runs[0].pools):
        name = f"pool {pool.pool}, C = {pool.capacity}"
        table(
            f"{name}: shortfall in points of service while backlogged, output and all tokens against fcfs",
            report.POLICY_COLUMNS,
            (report.policy_row(run, run.pools[number]) for run in comparison.runs),
        )
        last = comparison.runs[-1]
        table(f"teams under {last.policy}", report.TEAM_COLUMNS, map(report.team_row, last.pools[number].teams))
    for run in comparison.runs:
        for text in report.reign_texts(run):
            console.print(f"{run.policy}: {text}")
        if plan.replicas is not None and not run.reigns:
            console.print(f"{run.policy}: one gateway that does not fail; replicas are for the policies that are hold")
    for team, (p50, p99) in comparison.runs[-1].alone.items():
        console.print(f"{team} alone: first token p50 {report.seconds_text(p50)}, p99 {report.seconds_text(p99)}")


@contextmanager
def _progress() -> "Generator[Progress]":
    """A bar on a terminal, else a line for every quarter of a run that takes long."""
    from fairshare import clock

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bars

        with Bars(console=Console(stderr=True), transient=True) as bars:
            tasks: dict[str, object] = {}

            def show(run: str, part: float) -> None:
                if run not in tasks:
                    tasks[run] = bars.add_task(run, total=1.0)
                bars.update(tasks[run], completed=part)  # pyright: ignore[reportArgumentType]

            yield show
        return

    begun_at = clock.monotonic()
    quarters: dict[str, int] = {}

    def tell(run: str, part: float) -> None:
        quarter = int(4 * part)
        elapsed_seconds = clock.monotonic() - begun_at
        if quarter > quarters.get(run, 0):
            quarters[run] = quarter
            if elapsed_seconds > QUIET_SECONDS:
                print(f"{run}: {25 * quarter} % after {elapsed_seconds:.0f} s", file=sys.stderr, flush=True)

    yield tell
