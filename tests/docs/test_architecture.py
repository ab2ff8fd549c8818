"""ARCHITECTURE.md has the rooms that there are."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_rooms_are_the_layers_that_imports_point_down_through() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.sub(r"\W", "", layer) for contract in contracts for layer in contract.get("layers", [])]
    (table,) = re.findall(r"^\| room .*\n\|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rooms = [room for row in table.splitlines() for room in re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])]
    assert rooms == [layer for layer in layers if layer != "__main__"]


def test_every_file_that_it_names_is_there_and_it_names_every_file_of_the_core() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE))
    assert [name for name in sorted(named) if not (ROOT / "src" / "fairshare" / name).exists()] == []
    (core,) = re.findall(r"^## The decision core\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    files = {path.name for path in (ROOT / "src" / "fairshare" / "core").glob("[a-z]*.py")}
    assert set(re.findall(r"^\| `(\w+\.py)`", core, re.MULTILINE)) == files
