"""What a calibration found, for people and for programs."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from fairshare.calibration.fitting import Weight
from fairshare.calibration.measuring import NOISY, Calibration, Limits, Plan, Step

COLUMNS = (
    "at once",
    "prompt tok/s",
    "output tok/s",
    "spread",
    "first token p95",
    "per token p95",
    "KV",
    "waiting",
    "preempted",
    "",
)

UNSURE = 0.25
"""A weight whose 95 % confidence interval reaches further than this part of it is not known, and not given."""


def row(step: Step, capacity: int | None, knee: int | None) -> tuple[str, ...]:
    """One line of the table."""
    seconds = sum(one.work.seconds for one in step.windows)
    notes = [
        "C" if step.concurrency == capacity else "",
        "knee" if step.concurrency == knee else "",
        f"{step.verdict}: {', '.join(step.broke)}" if step.broke else "",
    ]
    return (
        str(step.concurrency),
        f"{sum(one.work.prompt_tokens for one in step.windows) / seconds:.0f}",
        f"{sum(one.work.completion_tokens for one in step.windows) / seconds:.0f}",
        f"{step.spread:.1%}" if isfinite(step.spread) else "–",
        _milliseconds([one.first_token_seconds for one in step.windows]),
        _milliseconds([one.per_token_seconds for one in step.windows]),
        f"{max(one.kv_usage for one in step.windows):.0%}",
        f"{sum(one.waiting for one in step.windows) / len(step.windows):.1f}",
        str(sum(one.preemptions for one in step.windows)),
        "; ".join(note for note in notes if note),
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    known = [each for each in seconds if isfinite(each)]
    return f"{1000 * max(known):.0f} ms" if known else "–"


def sentences(made: Calibration, plan: Plan) -> list[str]:
    """The answer, and how sure it is."""
    said: list[str] = []
    if made.stopped:
        said.append(f"Broken off: {made.stopped}. What follows rests on what was measured until then.")
    if made.capacity is None:
        broke = ", ".join(made.steps[0].broke) if made.steps else "nothing was measured"
        said.append(f"No C: even one request at a time is not sustained ({broke}). Give wider limits.")
    elif made.tried_up_to:
        said.append(f"C is at least {made.capacity}: the highest that was tried; try more with --max-concurrency.")
    elif made.stopped and not any(step.broke for step in made.steps):
        said.append(f"C is at least {made.capacity}: nothing above it was measured.")
    else:
        kept = max(step.concurrency for step in made.steps if not step.broke)
        above = next(step for step in made.steps if step.concurrency > made.capacity and step.broke)
        ran = ", the most that the engine ran at once" if kept > made.capacity else ""
        said.append(
            f"C is {made.capacity}{ran}; at {above.concurrency} it is no longer sustained: {', '.join(above.broke)}."
        )
    if made.unclear_up_to is not None:
        said.append(
            f"Not sure: up to {made.unclear_up_to} some windows kept everything and others did not, so C is between "
            f"{made.capacity or 0} and {made.unclear_up_to}; a longer --step tells more."
        )
    noisy = [str(step.concurrency) for step in made.steps if isfinite(step.spread) and step.spread > NOISY]
    if noisy:
        said.append(
            f"Noisy: throughput varied by more than {NOISY:.0%} between the windows of {', '.join(noisy)} at once; "
            "a longer --step makes the figures steadier."
        )
    if plan.with_weights and made.capacity is not None:
        said += _about_weights(made)
    return said


def _about_weights(made: Calibration) -> list[str]:
    weights = made.weights
    if weights is None or weights.prompt is None or weights.completion is None:
        return ["No cost weights: too few windows without preemption and waiting."]
    said = [
        f"The cost of a {kind} token is not known: {_shown(weight)} (95 %), too small beside the rest or too noisy, so "
        "no `cost` is written below; a longer --step tells more."
        for kind, weight in (("prompt", weights.prompt), ("completion", weights.completion))
        if not _is_known(weight)
    ]
    if weights.cached is None:
        said.append(
            "The cost of a cached token was not measured, because the engine cached nothing; a tenth of a computed "
            "one's is taken for it."
        )
    elif not _cached_is_known(weights.cached, weights.prompt):
        said.append(
            f"The cost of a cached token is not known: {_shown(weights.cached)} (95 %) reaches above that of a "
            "computed one; a tenth of a computed one's is taken for it."
        )
    if made.others_seen:
        said.append("Others used the engine meanwhile, so the weights hold for their requests and these together.")
    return said


def _is_known(weight: Weight) -> bool:
    return weight.margin <= UNSURE * weight.value


def _cached_is_known(cached: Weight, prompt: Weight) -> bool:
    """It may well be nothing at all, but never more than a computed token."""
    return cached.value + cached.margin <= prompt.value


def _shown(weight: Weight) -> str:
    return f"{weight.value:.3g} ± {weight.margin:.2g} GPU-seconds"


def weight_rows(made: Calibration) -> list[tuple[str, str, str]]:
    """What costs, GPU-seconds, and the 95 % confidence interval of it."""
    if made.weights is None:
        return []
    kinds = {
        "prompt token": made.weights.prompt,
        "cached token": made.weights.cached,
        "completion token": made.weights.completion,
        "request beside them": made.weights.request,
    }
    return [
        (kind, "–", "–")
        if weight is None
        else (
            kind,
            f"{weight.value:.3e}",
            f"{max(0.0, weight.value - weight.margin):.3e} to {weight.value + weight.margin:.3e}",
        )
        for kind, weight in kinds.items()
    ]


def config_lines(made: Calibration) -> list[str]:
    """What to paste into a pool of fairshare.yaml; of the costs nothing that is not known."""
    if made.capacity is None:
        return []
    lines = [f"capacity_per_instance: {made.capacity}"]
    weights = made.weights
    if weights is None or weights.prompt is None or weights.completion is None:
        return lines
    if _is_known(weights.prompt) and _is_known(weights.completion):
        known = weights.cached is not None and _cached_is_known(weights.cached, weights.prompt)
        cached = weights.cached.value if weights.cached is not None and known else weights.prompt.value / 10
        # Not in exponents: a person reads this file.
        prompt, cached_text, completion = (
            f"{each:.9f}" for each in (weights.prompt.value, cached, weights.completion.value)
        )
        lines.append(f"cost: {{prompt: {prompt}, cached: {cached_text}, completion: {completion}, unit: GPU-seconds}}")
    return lines


def as_json(made: Calibration, limits: Limits) -> dict[str, Any]:
    """All figures; NaN becomes null."""
    return {
        "capacity": made.capacity,
        "at_least": made.tried_up_to,
        "unclear_up_to": made.unclear_up_to,
        "knee": made.knee,
        "stopped": made.stopped or None,
        "others_seen": made.others_seen,
        "limits": {
            "first_token_seconds": limits.first_token_seconds,
            "per_token_seconds": limits.per_token_seconds,
        },
        "weights": made.weights,
        "steps": [
            {
                "concurrency": step.concurrency,
                "verdict": step.verdict,
                "broke": step.broke,
                "tokens_per_second": step.tokens_per_second,
                "spread": step.spread if isfinite(step.spread) else None,
                "windows": step.windows,
            }
            for step in made.steps
        ],
        "config": config_lines(made),
    }
