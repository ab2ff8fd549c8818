"""`fairshare keys`."""

import re
from pathlib import Path

from typer.testing import CliRunner

from fairshare.cli import program
from fairshare.config import parse
from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import hash_key

POOL = "pools: [{name: chat, capacity: 1, shares: {}, models: [tiny], instances: [http://h:1]}]\n"


def made(*arguments: str) -> tuple[str, str]:
    """The key that was shown, and the lines to store."""
    result = CliRunner().invoke(program(), ["keys", "new", *arguments])
    assert result.exit_code == 0, result.output
    (key,) = re.findall(r"fs-[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])", result.output)
    return key, result.output[result.output.index("teams:") :]


def test_the_lines_to_store_make_the_shown_key_valid_for_the_team() -> None:
    key, lines = made("--team", 'no "quotes"', "--class", "batch")
    (team,) = parse(POOL + lines, path=Path("f.yaml"), environ={}).gateway.teams
    assert team.name == 'no "quotes"'
    assert team.keys[0].sha256 == hash_key(key)
    assert team.keys[0].service_class is ServiceClass.BATCH


def test_a_key_is_interactive_unless_said_otherwise() -> None:
    _, lines = made("--team", "search")
    (team,) = parse(POOL + lines, path=Path("f.yaml"), environ={}).gateway.teams
    assert team.keys[0].service_class is ServiceClass.INTERACTIVE


def test_no_two_keys_are_equal_and_what_is_stored_is_not_the_key() -> None:
    first, lines = made("--team", "search")
    second, _ = made("--team", "search")
    assert first != second
    assert first not in lines


def test_a_class_that_does_not_exist_is_refused_with_the_ones_that_do() -> None:
    result = CliRunner().invoke(program(), ["keys", "new", "--team", "a", "--class", "urgent"])
    assert result.exit_code == 2
    assert "interactive" in result.output


def test_a_team_whose_name_has_a_line_break_is_refused() -> None:
    result = CliRunner().invoke(program(), ["keys", "new", "--team", "a\nb"])
    assert result.exit_code == 1
    assert "without line breaks" in str(result.exception)
