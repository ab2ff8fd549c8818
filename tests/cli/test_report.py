"""`fairshare report` and `fairshare export`, as a person runs them."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairshare.cli import program
from fairshare.errors import CallerError, OperatorError
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.ledger import LedgerStore
from support.storing import row, write

CONFIG = """
pools: [{name: chat, capacity: 1, shares: {search: 1}, models: [tiny], instances: ["http://127.0.0.1:1"]}]
"""


@pytest.fixture
def config(tmp_path: Path, migrated_file: Path) -> Path:
    (tmp_path / "fairshare.sqlite3").write_bytes(migrated_file.read_bytes())
    path = tmp_path / "fairshare.yaml"
    path.write_text(CONFIG)

    async def fill() -> None:
        database = Database(SqliteFile(tmp_path / "fairshare.sqlite3"))
        await write(LedgerStore(database), [row(10), row(20, team="ads", request_id="näme")])
        await database.close()

    asyncio.run(fill())
    return path


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(program(), [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


JANUARY_1970 = ("--month", "1970-01")


def test_a_table_has_a_row_for_each_team_and_a_total(config: Path) -> None:
    lines = ran("report", "-c", str(config), *JANUARY_1970).splitlines()
    assert lines[0] == "1970-01-01T00:00:00+00:00 until 1970-02-01T00:00:00+00:00 (UTC)"
    by_name = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert (by_name["ads"][0], by_name["search"][0], by_name["total"][0]) == ("1", "1", "2")
    assert by_name["total"][-1] == "0.50"


def test_json_and_parsable2_go_to_standard_output_alone(config: Path) -> None:
    found = json.loads(ran("report", "-c", str(config), *JANUARY_1970, "--format", "json", "--by", "team,model"))
    assert found["total"]["requests"] == 2
    assert ran("report", "-c", str(config), *JANUARY_1970, "--format", "parsable2").splitlines() == [
        "Cluster|Account|Login|Proper Name|Used",
        "chat|ads|||0.25",
        "chat|ads|search/web||0.25",
        "chat|search|||0.25",
        "chat|search|search/web||0.25",
    ]


def test_a_period_is_half_open(config: Path) -> None:
    span = ("--start", "1970-01-01T00:00:10", "--end", "1970-01-01T00:00:20")
    exported = ran("export", "-c", str(config), *span).splitlines()
    assert [json.loads(line)["request_id"] for line in exported] == ["request-10"]
    assert len(ran("export", "-c", str(config), *JANUARY_1970, "--format", "csv").splitlines()) == 3


def test_what_makes_no_sense_is_one_sentence(config: Path, tmp_path: Path) -> None:
    for arguments, error, message in (
        (("--month", "1970-01", "--start", "1970-01-01"), CallerError, "either --month"),
        (("--end", "1970-01-01"), CallerError, "--end needs --start"),
        (("--start", "1970-01-02", "--end", "1970-01-02"), CallerError, "before it begins"),
        (("--format", "parsable2", "--by", "team"), CallerError, "leave out --by"),
    ):
        with pytest.raises(error, match=message):
            ran("report", "-c", str(config), *arguments)
    config.write_text(CONFIG + "store: none\n")
    with pytest.raises(OperatorError, match="store: none"):
        ran("report", "-c", str(config))
