"""What is said of a calibration, and the lines to paste."""

import pytest

from fairshare.calibration.fitting import Weight, Weights, Work, fit_weights, non_negative, students_t
from fairshare.calibration.measuring import Calibration, Limits, Plan
from fairshare.calibration.report import config_lines, sentences

PLAN = Plan(limits=Limits(), step_seconds=1.0, windows=2, most=8, with_weights=True, gpus=1)


def weights(prompt: float, cached: float | None, completion: float, *, prompt_margin: float = 0.0) -> Weights:
    return Weights(
        prompt=Weight(value=prompt, margin=prompt_margin),
        cached=None if cached is None else Weight(value=cached, margin=0.0),
        completion=Weight(value=completion, margin=0.0),
        request=None,
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
    assert any("cached token is not known" in sentence for sentence in sentences(made, PLAN))


def test_a_weight_that_is_not_known_is_not_given() -> None:
    made = Calibration(capacity=8, tried_up_to=True, weights=weights(2e-4, 1e-5, 2e-3, prompt_margin=1e-4))
    assert config_lines(made) == ["capacity_per_instance: 8"]
    said = [sentence for sentence in sentences(made, PLAN) if "prompt token is not known" in sentence]
    assert said == [
        "The cost of a prompt token is not known: 0.0002 ± 0.0001 GPU-seconds (95 %), too small beside the rest or too "
        "noisy, so no `cost` is written below; a longer --step tells more."
    ]


MIXTURES = (
    (1000, 0, 900, 30),
    (4000, 0, 300, 12),
    (200, 0, 1500, 40),
    (10, 3000, 80, 70),
    (500, 900, 700, 5),
    (900, 10, 30, 20),
    (700, 20, 600, 90),
    (100, 100, 900, 3),
    (2500, 0, 40, 10),
)


def works(slower: float = 1.0) -> list[Work]:
    """What takes exactly 200 us, 10 us and 2 ms for a token of each kind and 5 ms for a request; the last one
    `slower` times as long."""
    exact = [2e-4 * p + 1e-5 * k + 2e-3 * c + 5e-3 * r for p, k, c, r in MIXTURES]
    seconds = [*exact[:-1], slower * exact[-1]]
    return [
        Work(seconds=took, prompt_tokens=p, cached_tokens=k, completion_tokens=c, requests=r)
        for took, (p, k, c, r) in zip(seconds, MIXTURES, strict=True)
    ]


def test_an_exact_mixture_is_taken_apart_and_a_negative_weight_is_never_given() -> None:
    found = fit_weights(works(), gpus=2)
    assert found is not None
    for weight, exact in (
        (found.prompt, 2e-4),
        (found.cached, 1e-5),
        (found.completion, 2e-3),
        (found.request, 5e-3),
    ):
        assert weight is not None
        assert abs(weight.value - 2 * exact) < 1e-9
        assert weight.margin < 1e-9
    assert non_negative([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0]) == [1.5, 0.0]


def test_one_window_in_which_the_machine_did_something_else_does_not_decide() -> None:
    found = fit_weights(works(slower=1.5), gpus=1)
    assert found is not None
    assert found.prompt is not None
    assert found.completion is not None
    assert abs(found.prompt.value - 2e-4) < 1e-6
    assert abs(found.completion.value - 2e-3) < 1e-5


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (6, 2.447), (16, 2.120), (60, 2.000)])
def test_intervals_are_as_wide_as_students_t_says(freedom: int, quantile: float) -> None:
    assert students_t(freedom) == pytest.approx(quantile, rel=0.02)


def test_too_few_windows_tell_no_weights() -> None:
    assert fit_weights([], gpus=1) is None
