"""`fairshare calibrate`: how many requests at once does an engine sustain, and what does a token cost?"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    from fairshare.calibration.measuring import Calibration, Now, Plan, Progress
    from fairshare.calibration.work import Workload
    from fairshare.gateway.options import InstanceSpec
    from fairshare.simulator.lengths import Lengths

DEFAULT_PROMPT, DEFAULT_OUTPUT = "100-900", "50-350"

EXAMPLE = "fairshare calibrate http://127.0.0.1:9001 --prompt 500 --output 200 --max-time-per-token 50ms"


def register(app: typer.Typer) -> None:
    app.command("calibrate", epilog=f"Example: {EXAMPLE}")(calibrate)


def calibrate(
    url: Annotated[str, typer.Argument(help="The engine, as http://host:port.", metavar="URL")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="What the engine calls the model; the only one it serves if not given."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Take the lengths from this recorded load.", metavar="FILE")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help=f"Tokens of a prompt: 500, or {DEFAULT_PROMPT} (the default).")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", help=f"Tokens of an answer: 200, or {DEFAULT_OUTPUT} (the default).")
    ] = None,
    max_ttft: Annotated[
        str | None, typer.Option("--max-ttft", help="The time to first token that C must keep (p95), as 2s.")
    ] = None,
    max_time_per_token: Annotated[
        str | None,
        typer.Option("--max-time-per-token", help="The time per output token that C must keep (p95), as 50ms."),
    ] = None,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", min=1, help="Try no more than this.")] = 256,
    step: Annotated[str, typer.Option("--step", help="How long each concurrency is measured.")] = "20s",
    windows: Annotated[
        int, typer.Option("--windows", min=2, help="Parts of a step; their differences show the noise.")
    ] = 4,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of the engine, for the cost in GPU-seconds.")] = 1,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Leave out the cost of tokens.")] = False,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file with the engine's key.", metavar="FILE")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option("--ca-file", help="Who may have signed an https engine's certificate.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another draw of the same lengths.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - is standard output.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw a picture there (needs the extra `plots`).", metavar="FILE")
    ] = None,
) -> None:
    """Measure an engine: C, the concurrency that it sustains, and what a token costs.

    Loads the engine for minutes, from one request at a time upwards, with requests that go behind all others. Stops by
    itself where others would be hurt; Ctrl-C ends it and leaves nothing running. Ends with 1 if no C was found.
    """
    import asyncio

    import msgspec

    from fairshare import clock
    from fairshare.calibration import report
    from fairshare.calibration.measuring import Limits, Plan
    from fairshare.calibration.measuring import calibrate as measure
    from fairshare.calibration.target import HttpTarget

    spec = _instance(url, api_key_file, ca_file)
    lengths = _lengths(trace, prompt, output)
    limits = Limits(
        first_token_seconds=_seconds("--max-ttft", max_ttft),
        per_token_seconds=_seconds("--max-time-per-token", max_time_per_token),
    )
    step_seconds = _seconds("--step", step) or 0.0
    if step_seconds <= 0.0:
        raise OperatorError("--step must be longer than 0")
    plan = Plan(
        limits=limits,
        step_seconds=step_seconds,
        windows=windows,
        most=max_concurrency,
        with_weights=not no_weights,
        gpus=gpus,
    )

    async def main() -> "tuple[Calibration, Workload]":
        from fairshare.calibration.work import Workload

        name, context_tokens = await _model(spec, model)
        workload = Workload(lengths, context_tokens=context_tokens, seed=seed)
        target = HttpTarget(spec, model=name, clock=clock.monotonic, idle_seconds=max(60.0, 4 * step_seconds))
        with _progress() as progress:
            return await measure(target, workload, plan, clock=clock.monotonic, progress=progress), workload

    try:
        made, workload = asyncio.run(main())
    except KeyboardInterrupt:
        raise OperatorError("ended; nothing of the measurement is left at the engine") from None
    if json is None or str(json) != "-":
        _show(made, plan, workload)
    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(report.as_json(made, limits)), indent=1) + b"\n"
        if str(json) == "-":
            sys.stdout.buffer.write(text)
        else:
            json.write_bytes(text)
    if plot is not None:
        from fairshare.calibration.picture import draw

        draw(made, plot)
    if made.capacity is None or made.stopped:
        raise typer.Exit(1)


def _instance(url: str, api_key_file: Path | None, ca_file: Path | None) -> "InstanceSpec":
    from fairshare.gateway.engine_url import engine_url
    from fairshare.gateway.options import InstanceSpec

    try:
        checked = engine_url(url)
    except ValueError as error:
        raise OperatorError(f"URL {error}") from None
    try:
        api_key = None if api_key_file is None else api_key_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--api-key-file: {api_key_file} cannot be read ({error})") from None
    if api_key == "":
        raise OperatorError(f"--api-key-file: {api_key_file} is empty; it must hold the engine's key")
    return InstanceSpec(url=checked, api_key=api_key, ca_file=ca_file)


def _lengths(
    trace: Path | None, prompt: str | None, output: str | None
) -> "Sequence[tuple[int, int]] | tuple[Lengths, Lengths]":
    from fairshare.simulator import traces
    from fairshare.simulator.lengths import Lengths, parse_lengths

    if trace is not None:
        if prompt is not None or output is not None:
            raise OperatorError("give either --trace, or --prompt and --output")
        return [(row.prompt_tokens, max(1, row.output_tokens)) for row in traces.read(traces.find(str(trace)))]

    def parsed(option: str, text: str) -> Lengths:
        try:
            lengths = parse_lengths(int(text) if text.isdecimal() else text)
        except ValueError as error:
            raise OperatorError(f"{option} {error}") from None
        if lengths.high < 1:
            raise OperatorError(f"{option} must be at least 1 token, found {text}")
        return lengths

    return parsed("--prompt", prompt or DEFAULT_PROMPT), parsed("--output", output or DEFAULT_OUTPUT)


def _seconds(option: str, text: str | None) -> float | None:
    from fairshare.simulator.scenario import duration_seconds

    if text is None:
        return None
    try:
        return duration_seconds(text)
    except ValueError as error:
        raise OperatorError(f"{option} {error}") from None


async def _model(spec: "InstanceSpec", wanted: str | None) -> tuple[str, int | None]:
    """What the engine calls the model, and its context."""
    from fairshare.gateway.engine_http import EngineSilent, ask
    from fairshare.gateway.scrape import ASK_SECONDS, discover

    try:
        await ask("GET", f"{spec.url}/health", ca_file=spec.ca_file, timeout_seconds=ASK_SECONDS)
    except EngineSilent as silent:
        raise OperatorError(
            f"{spec.url} does not answer: {silent.detail}; start the engine or correct the url"
        ) from None
    served = await discover(ask, spec)
    if served.context_tokens is None:
        problem = served.models_problem or "no answer"
        advice = "; give the engine's key with --api-key-file" if "401" in problem else ""
        raise OperatorError(f"{spec.url} does not say which models it serves: {problem}{advice}")
    names = list(served.context_tokens)
    if wanted is None and len(names) == 1:
        wanted = names[0]
    if wanted is None or wanted not in served.context_tokens:
        found = "several models" if wanted is None else f"no model {wanted}"
        raise OperatorError(f"{spec.url} serves {found}; give one of these with --model: {', '.join(names)}")
    return wanted, served.context_tokens[wanted]


@contextmanager
def _progress() -> "Generator[Progress]":
    """A bar on a terminal, else one line for each step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        said = ""

        def print_step(now: "Now") -> None:
            nonlocal said
            if now.what != said:
                said = now.what
                console.print(f"step {int(now.done) + 1} of at most {now.expected}: {now.what}")

        yield print_step
        return
    shown = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn()
    with Progress(*shown, console=console, transient=True) as bar:
        task = bar.add_task("measuring", steps="")

        def move_bar(now: "Now") -> None:
            bar.update(
                task,
                description=f"measuring {now.what}",
                completed=now.done,
                total=now.expected,
                steps=f"step {int(now.done) + 1} of at most {now.expected}",
                refresh=True,
            )

        yield move_bar


def _show(made: "Calibration", plan: "Plan", workload: "Workload") -> None:
    from fairshare.calibration import report
    from fairshare.cli.storing import show_table

    show_table(report.COLUMNS, (report.row(step, made.capacity, made.knee) for step in made.steps))
    for sentence in report.sentences(made, plan):
        print(sentence)
    if workload.cut:
        print(
            f"{workload.cut} of {workload.drawn} requests did not fit into the model's context and were cut: "
            "the load is lighter than the one that was asked for."
        )
    if rows := report.weight_rows(made):
        show_table(("cost of a", "GPU-seconds", "95 % confidence"), rows)
    if lines := report.config_lines(made):
        print("\nFor the pool in fairshare.yaml, if all its engines are like this one:\n")
        for line in lines:
            print(f"    {line}")
