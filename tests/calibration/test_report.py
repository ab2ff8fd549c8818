"""What is said of a calibration, and the lines to paste."""

from fairshare.calibration.fitting import Weight, Weights, Work, fit_weights, non_negative
from fairshare.calibration.measuring import Calibration, Limits, Plan
from fairshare.calibration.report import config_lines, sentences

PLAN = Plan(limits=Limits(), step_seconds=1.0, windows=2, most=8, with_weights=True, gpus=1)


def weights(prompt: float, cached: float | None, completion: float) -> Weights:
    return Weights(
        prompt=Weight(value=prompt, error=0.0),
        cached=None if cached is None else Weight(value=cached, error=0.0),
        completion=Weight(value=completion, error=0.0),
    )


def test_the_lines_to_paste_hold_what_was_measured() -> None:
    made = Calibration(capacity=8, tried_up_to=True, weights=weights(2e-4, 1e-5, 2e-3))
    assert config_lines(made) == [
        "capacity_per_instance: 8",
        "cost: {prompt: 0.000200000, cached: 0.000010000, completion: 0.002000000, unit: GPU-seconds}",
    ]


def test_a_cached_token_that_seems_dearer_than_a_computed_one_is_noise_and_said_to_be() -> None:
    made = Calibration(capacity=8, tried_up_to=True, weights=weights(2e-4, 5e-4, 2e-3))
    assert "cached: 0.000020000" in config_lines(made)[1]
    assert any("cannot be told" in sentence for sentence in sentences(made, PLAN))


def test_an_exact_mixture_is_taken_apart_and_a_negative_weight_is_never_given() -> None:
    rows = [
        Work(seconds=2e-4 * p + 1e-5 * k + 2e-3 * c, prompt_tokens=p, cached_tokens=k, completion_tokens=c)
        for p, k, c in ((1000, 0, 900), (4000, 0, 300), (200, 0, 1500), (10, 3000, 80), (500, 900, 700), (900, 10, 30))
    ]
    found = fit_weights(rows, gpus=1)
    assert found is not None
    assert found.prompt is not None
    assert found.cached is not None
    assert abs(found.prompt.value - 2e-4) < 1e-9
    assert abs(found.cached.value - 1e-5) < 1e-9
    assert non_negative([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0]) == [1.5, 0.0]


def test_too_few_windows_tell_no_weights() -> None:
    assert fit_weights([], gpus=1) is None
