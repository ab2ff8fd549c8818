"""The program as a whole: its commands, its help, its errors."""

import subprocess
import sys

import click
import pytest
import typer
from typer.testing import CliRunner

from fairshare import cli
from fairshare.errors import OperatorError

RUNNER = CliRunner()


def commands() -> list[list[str]]:
    """The words of every command, those in groups too."""

    def below(command: click.Command, words: list[str]) -> list[list[str]]:
        inner = getattr(command, "commands", {})
        return [words, *(path for name, each in inner.items() for path in below(each, [*words, name]))]

    return below(typer.main.get_command(cli.program()), [])


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_help_of_every_command_shows_an_example_of_it(words: list[str]) -> None:
    shown = RUNNER.invoke(cli.program(), [*words, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert f"Example: {' '.join(['fairshare', *words])}" in shown.output


def test_python_m_fairshare_is_the_same_program() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fairshare", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Example: fairshare serve -c fairshare.yaml" in shown.stdout


def test_showing_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, fairshare.cli; fairshare.cli.program(); "
        "heavy = {'asyncio', 'uvloop', 'httptools', 'starlette', 'uvicorn', 'yaml', 'prometheus_client', 'msgspec'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_the_version_is_the_installed_one() -> None:
    shown = RUNNER.invoke(cli.program(), ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("fairshare 0.")


def test_what_an_operator_must_fix_is_one_sentence_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def fail() -> None:  # pyright: ignore[reportUnusedFunction]
            raise OperatorError("the disk is full; delete something")

        return app

    monkeypatch.setattr(cli, "program", broken)
    monkeypatch.setattr(sys, "argv", ["fairshare"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "fairshare: the disk is full; delete something\n"
