"""`fairshare check`."""

import hashlib
from pathlib import Path

from typer.testing import CliRunner

from fairshare.cli import program

HEX = hashlib.sha256(b"fs-search").hexdigest()
GOOD = f"""
pools:
  - {{name: chat, capacity: 16, shares: {{search: 1}}, models: [tiny], instances: [http://127.0.0.1:9001]}}
teams:
  - name: search
    keys: [{{sha256: "{HEX}"}}]
"""


def check(path: Path, text: str) -> tuple[int, list[str]]:
    path.write_text(text)
    result = CliRunner().invoke(program(), ["check", "-c", str(path)])
    return result.exit_code, result.output.splitlines()


def test_a_good_file_ends_with_0_and_says_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "fairshare.yaml"
    assert check(path, GOOD) == (0, [f"{path} can be used: 1 pool, 1 engine, 1 team, 1 key."])


def test_warnings_are_shown_and_do_not_fail(tmp_path: Path) -> None:
    path = tmp_path / "fairshare.yaml"
    code, lines = check(path, GOOD.replace("search: 1", "search: 0.5"))
    assert code == 0
    assert lines[0].startswith(f"warning: {path}:3: pools[0].shares: the shares add up to 1/2 (0.5)")
    assert lines[1].startswith(f"{path} can be used")


def test_each_thing_that_is_wrong_is_a_line_and_the_end_is_1(tmp_path: Path) -> None:
    path = tmp_path / "fairshare.yaml"
    code, lines = check(path, GOOD.replace("capacity: 16", "capacity: many").replace("[tiny]", "[]"))
    assert code == 1
    assert [line.split(": ")[1] for line in lines] == ["pools[0].capacity", "pools[0].models"]


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(program(), ["check", "-c", str(tmp_path / "nowhere.yaml")])
    assert result.exit_code == 1
    assert "cannot be read (no such file or directory)" in result.output


def test_the_store_is_tried_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "fairshare.yaml"
    path.write_text(GOOD)
    (tmp_path / "fairshare.sqlite3").write_bytes(b"this is no database, whatever its name says" * 50)
    result = CliRunner().invoke(program(), ["check", "-c", str(path), "--store"])
    assert result.exit_code == 1
    assert "The store cannot be used" in result.output
    assert CliRunner().invoke(program(), ["check", "-c", str(path)]).exit_code == 0
