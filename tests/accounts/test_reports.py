"""Reports add up, in every form."""

import asyncio
import csv
import io
import json
from datetime import UTC
from pathlib import Path

import pytest

from fairshare.accounts import reports
from fairshare.accounts.forms import Form
from fairshare.accounts.periods import Span, zone
from fairshare.accounts.reports import MEASURES, PARSABLE2_BY, Report
from fairshare.errors import CallerError, OperatorError
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.ledger import LedgerRow, LedgerStore
from support.storing import row, write

ROWS = [
    row(1, cost_units=0.1),
    row(2, cost_units=0.2, project="search/web"),
    row(3, cost_units=0.3, project="search/ads|x"),
    row(4, cost_units=0.4, project="", team="ads", pool="big"),
    row(5, cost_units=0.0, team="ads", status=429, finish="refused"),
]


@pytest.fixture
def store(tmp_path: Path, migrated_file: Path) -> Path:
    path = tmp_path / "fairshare.sqlite3"
    path.write_bytes(migrated_file.read_bytes())
    return path


def made(path: Path, *by: str, only: dict[str, str] | None = None, rows: list[LedgerRow] = ROWS) -> Report:
    async def main() -> Report:
        database = Database(SqliteFile(path))
        try:
            ledger = LedgerStore(database)
            await write(ledger, rows)
            return await reports.report(ledger, Span(0.0, 100.0), where=UTC, by=by, only=only or {})
        finally:
            await database.close()

    return asyncio.run(main())


@pytest.mark.parametrize("by", [(), ("team",), ("key", "model", "tag"), ("organisation", "project", "pool")])
def test_the_total_is_the_sum_of_the_rows_however_they_are_grouped(store: Path, by: tuple[str, ...]) -> None:
    report = made(store, *by)
    assert report.total["requests"] == 5
    assert report.total["failed"] == 1
    assert report.total["cost_units"] == pytest.approx(1.0)
    for name in MEASURES:
        assert report.total[name] == pytest.approx(sum(float(each[name]) for each in report.rows))


def test_only_what_was_asked_for_is_counted(store: Path) -> None:
    assert made(store, "project", only={"team": "search", "pool": "chat"}).total["requests"] == 3


def test_csv_and_json_say_the_same(store: Path) -> None:
    report = made(store, "team", "pool")
    lines = list(csv.DictReader(io.StringIO(reports.write(report, Form.CSV))))
    found = json.loads(reports.write(report, Form.JSON))
    assert [{name: str(value) for name, value in each.items()} for each in found["rows"]] == lines
    assert found["begins_at"] == "1970-01-01T00:00:00+00:00"
    assert found["time_zone"] == "UTC"


def test_the_form_of_sreport_has_a_line_for_each_account_that_holds_the_sum_of_its_logins(store: Path) -> None:
    report = made(store, *PARSABLE2_BY)
    lines = reports.write(report, Form.PARSABLE2).splitlines()
    assert lines[0] == "Cluster|Account|Login|Proper Name|Used"
    cells = [line.split("|") for line in lines[1:]]
    assert all(len(line) == 5 for line in cells)
    accounts = {(line[0], line[1]): float(line[4]) for line in cells if not line[2]}
    assert accounts == {
        ("big", "ads"): 0.4,
        ("chat", "ads"): 0.0,
        ("chat", "search"): pytest.approx(0.6),
    }
    logins = [line for line in cells if line[2] and line[1] == "search"]
    assert sum(float(line[4]) for line in logins) == pytest.approx(0.6)
    assert {line[2] for line in logins} == {"search/web", "search/ads/x"}


def test_a_period_that_cuts_a_rolled_up_month_is_refused_with_what_to_do(store: Path) -> None:
    made(store)

    async def main() -> None:
        database = Database(SqliteFile(store))
        ledger = LedgerStore(database)
        await ledger.roll_up(begins_at=0.0, ends_at=50.0)
        with pytest.raises(OperatorError, match=r"whole month are left \(store.keep\)"):
            await reports.report(ledger, Span(3.0, 100.0), where=UTC, by=(), only={})
        await database.close()

    asyncio.run(main())


def test_what_cannot_be_grouped_or_filtered_by_is_refused() -> None:
    with pytest.raises(CallerError, match="nothing called 'user'"):
        reports.dimensions("team,user")
    with pytest.raises(CallerError, match="twice"):
        reports.dimensions("team,team")
    with pytest.raises(CallerError, match="team=search"):
        reports.filters(["team"])
    assert reports.filters(["team=a=b"]) == {"team": "a=b"}


def test_an_export_has_every_field_but_the_ones_of_the_writer() -> None:
    header = reports.export_header().strip().split(",")
    (line,) = csv.reader(io.StringIO(reports.export_lines([ROWS[0]], as_csv=True)))
    found = json.loads(reports.export_lines([ROWS[0]], as_csv=False))
    assert header == list(found)
    assert len(line) == len(header) == len(LedgerRow.__struct_fields__) - 2
    assert found["request_id"] == "request-1"


def test_the_time_zone_is_in_the_report(store: Path) -> None:
    async def main() -> Report:
        database = Database(SqliteFile(store))
        report = await reports.report(LedgerStore(database), Span(0.0, 1.0), where=zone("Asia/Tokyo"), by=(), only={})
        await database.close()
        return report

    report = asyncio.run(main())
    assert (report.begins_at, report.time_zone) == ("1970-01-01T09:00:00+09:00", "Asia/Tokyo")
    assert report.rows == ()
