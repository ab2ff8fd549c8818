"""What the README shows works as it stands there."""

import re
from pathlib import Path
from typing import Any

from fairshare.config import parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return found


def test_the_library_example_runs_and_charges_the_team() -> None:
    shown: dict[str, Any] = {}
    exec(compile(block("python"), "README.md", "exec"), shown)
    pool = shown["pool"]
    assert shown["priority"] == 0
    assert {stat.team: (stat.reserved, round(stat.usage)) for stat in pool.snapshot()} == {
        "ads": (3, 321),
        "search": (13, 0),
    }


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    settings = parse(block("yaml"), path=tmp_path / "fairshare.yaml", environ={})
    assert [pool.name for pool in settings.gateway.pools] == ["chat"]
    assert settings.warnings == ()


def test_the_measured_rows_stand_in_the_table_they_are_from() -> None:
    rows = re.findall(r"^\| (?:standing|fairshare) .*\| ([0-9., ]+ %) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    proof = (ROOT / "docs" / "proof.md").read_text()
    assert [row for row in rows if f"| {row} |" not in proof] == []


def test_every_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), (
                    f"{page.relative_to(ROOT)} links to {target}, which is not there"
                )
