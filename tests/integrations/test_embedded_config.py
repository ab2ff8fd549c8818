"""The section `fairshare_settings` of another program's file."""

from fractions import Fraction
from pathlib import Path

import pytest

from fairshare.config import ConfigError, load_embedded
from fairshare.core.decisions import Mode
from fairshare.gateway.options import TeamFrom
from howto.pages import blocks


def written(folder: Path, text: str) -> Path:
    (folder / "litellm.yaml").write_text(text)
    return folder / "litellm.yaml"


def problems(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_embedded(written(folder, text), {})
    return "\n".join(raised.value.problems)


def test_the_section_on_the_page_is_read_from_litellms_own_file(tmp_path: Path) -> None:
    (page,) = blocks("litellm.md", "yaml")
    spec = load_embedded(written(tmp_path, page), {})
    assert spec.team_from is TeamFrom.TEAM_ALIAS
    (pool,) = spec.pools
    assert (pool.name, pool.capacity, pool.models, pool.mode) == ("chat", 4, ("tiny",), Mode.HOLD)
    assert pool.shares == {"search": Fraction(3, 4), "ads": Fraction(1, 4)}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    pool = "{name: chat, capacity: 4, shares: {a: 1}, models: [m]%s}"
    section = "fairshare_settings: {pools: [%s]}"
    assert 'unknown key "recall"' in problems(tmp_path, section % (pool % ", hold: {recall: true}"))
    assert 'unknown key "instances"' in problems(tmp_path, section % (pool % ", instances: []"))
    two = pool % "" + ", " + (pool % "").replace("chat", "code")
    assert 'model "m" is in two pools' in problems(tmp_path, section % two)
    assert "no section fairshare_settings" in problems(tmp_path, "model_list: []")
    assert "no section fairshare_settings" in problems(tmp_path, "[1]")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_embedded(tmp_path / "nothing.yaml", {})
