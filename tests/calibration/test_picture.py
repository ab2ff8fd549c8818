"""The picture of a calibration."""

from pathlib import Path

import pytest

from calibration.stand_in import calibrated
from fairshare.calibration.picture import draw
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.errors import OperatorError
from fairshare.simulator.lengths import Lengths

pytest.importorskip("matplotlib")


def test_the_picture_shows_the_figures_of_every_step_and_c(tmp_path: Path) -> None:
    config = SchedulerConfig(max_num_seqs=6, step_seconds=0.05, token_seconds=500e-6)
    made, _ = calibrated(config, prompt=Lengths(low=50, high=50), output=Lengths(low=20, high=40))
    draw(made, tmp_path / "found.svg")
    drawn = (tmp_path / "found.svg").read_text()
    # Letters are drawn as shapes, each text with a comment that holds it.
    for text in ("C = 6", "tokens/s", "milliseconds", "requests at once", "first token, p95", "per token, p95"):
        assert f"<!-- {text} -->" in drawn
    draw(made, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = SchedulerConfig(max_num_seqs=2, step_seconds=0.05, token_seconds=500e-6)
    made, _ = calibrated(config, prompt=Lengths(low=5, high=5), output=Lengths(low=20, high=40), step_seconds=2.0)
    with pytest.raises(OperatorError, match=r"must end with .png, .svg or .pdf"):
        draw(made, tmp_path / "found.gif")
