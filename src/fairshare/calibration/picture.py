"""A picture of a calibration: throughput and latency over concurrency. Needs the extra `plots`."""

# matplotlib's types leave its keyword arguments open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from math import nan
from pathlib import Path

from fairshare.calibration.measuring import Calibration
from fairshare.errors import OperatorError

BLUE, ORANGE, FAINT = "#0072b2", "#e69f00", "#8a9099"


def draw(made: Calibration, path: Path) -> None:
    """Writes PNG, SVG or PDF, by the path's ending. Raises `OperatorError` for another one, or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OperatorError("a picture needs matplotlib; install it with: pip install 'fairshare[plots]'") from None
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise OperatorError(f"{path}: a picture's name must end with .png, .svg or .pdf")
    figure = Figure(figsize=(7.0, 5.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    at = [step.concurrency for step in made.steps]
    for step in made.steps:
        each = [(one.work.prompt_tokens + one.work.completion_tokens) / one.work.seconds for one in step.windows]
        above.plot([step.concurrency] * len(each), each, ".", color=FAINT)
    above.plot(at, [step.tokens_per_second for step in made.steps], "o-", color=BLUE)
    above.set_ylabel("tokens/s")
    above.set_ylim(bottom=0.0)
    slowest = [max((one.per_token_seconds for one in step.windows), default=nan) * 1e3 for step in made.steps]
    first = [max((one.first_token_seconds for one in step.windows), default=nan) * 1e3 for step in made.steps]
    below.plot(at, slowest, "o-", color=BLUE, label="per token, p95")
    below.plot(at, first, "s--", color=ORANGE, label="first token, p95")
    below.set_ylabel("milliseconds")
    below.set_yscale("log")
    below.set_xlabel("requests at once")
    below.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if made.capacity is not None:
            axes.axvline(made.capacity, color=FAINT, linestyle=":")
    if made.capacity is not None:
        above.set_title(f"C = {made.capacity}{' or more' if made.tried_up_to else ''}", loc="left")
    figure.savefig(path, dpi=150)
