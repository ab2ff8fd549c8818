"""Reports: what was used, by whom. Rows add up to the total, and to what the pools were charged."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo

import msgspec

from fairshare.accounts import periods
from fairshare.accounts.forms import Form
from fairshare.accounts.periods import Span
from fairshare.errors import CallerError, OperatorError
from fairshare.storage.ledger import LedgerRow, LedgerStore, MonthsInTheWay, Sums

COLUMNS: Mapping[str, str] = {
    "organisation": "organisation",
    "team": "team",
    "project": "project",
    "key": "key_id",
    "tag": "tag",
    "pool": "pool",
    "model": "model",
}
"""What reports call a dimension → the column of the account."""

MEASURES = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "slot_seconds", "cost_units")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What requests that ended in a period add up to."""

    begins_at: str
    ends_at: str
    time_zone: str
    by: tuple[str, ...]
    rows: tuple[Mapping[str, str | int | float], ...]
    total: Mapping[str, int | float]


def dimensions(text: str) -> tuple[str, ...]:
    """`team,model` → dimensions. Raises `CallerError`."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if name not in COLUMNS:
            raise CallerError(f"there is nothing called {name[:80]!r} to group by; use {', '.join(COLUMNS)}")
    if len(set(names)) < len(names):
        raise CallerError(f"{text!r} names something twice")
    return names


def filters(texts: Iterable[str]) -> dict[str, str]:
    """`team=search` → conditions on dimensions. Raises `CallerError`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise CallerError(f"must be written as team=search, found {text!r}")
        dimensions(name)
        if not value.isprintable():
            raise CallerError(f"what {name} must be has to be printable, found {value[:40]!r}")
        found[name] = value
    return found


async def report(
    store: LedgerStore, span: Span, *, where: tzinfo, by: Sequence[str], only: Mapping[str, str]
) -> Report:
    """The report of a period, a row for each combination of dimensions.

    Raises:
        StoreUnavailable: the store does not answer.
        OperatorError: the period cuts a month of which only the sums are left.
    """
    try:
        found = await store.sums(
            begins_at=span.begins_at,
            ends_at=span.ends_at,
            by=[COLUMNS[name] for name in by],
            only={COLUMNS[name]: value for name, value in only.items()},
        )
    except MonthsInTheWay as error:
        rolled = Span(error.begins_at, error.ends_at)
        raise OperatorError(
            f"of {periods.shown(rolled.begins_at, where)} to {periods.shown(rolled.ends_at, where)} only the sums of "
            "the whole month are left (store.keep); choose a period that holds all of it or nothing, in UTC"
        ) from None
    return Report(
        begins_at=periods.shown(span.begins_at, where),
        ends_at=periods.shown(span.ends_at, where),
        time_zone=str(where),
        by=tuple(by),
        rows=tuple(dict(zip(by, sums.group, strict=True)) | _measures(sums) for sums in found),
        total={name: _total(getattr(sums, name) for sums in found) for name in MEASURES},
    )


def write(report: Report, form: Form) -> str:
    """A report as text, for every form but the table, which the command line draws."""
    match form:
        case Form.JSON:
            return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
        case Form.CSV:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow([*report.by, *MEASURES])
            writer.writerows([row[name] for name in (*report.by, *MEASURES)] for row in report.rows)
            return text.getvalue()
        case Form.PARSABLE2:
            return _parsable2(report)
        case Form.TABLE:
            raise AssertionError("a table is drawn, not written")


PARSABLE2_BY = ("pool", "team", "project")
"""What a report must be grouped by to be written as Slurm writes it."""


def _parsable2(report: Report) -> str:
    """Cluster is the pool, account the team, login the project; `Used` is in cost units, not in minutes.

    As in Slurm, the line of an account (without a login) holds the sum of the lines below it.
    """
    assert report.by == PARSABLE2_BY
    lines = ["Cluster|Account|Login|Proper Name|Used"]
    for pool, team in dict.fromkeys((row["pool"], row["team"]) for row in report.rows):
        rows = [row for row in report.rows if (row["pool"], row["team"]) == (pool, team)]
        used = math.fsum(float(row["cost_units"]) for row in rows)
        lines.append("|".join([*map(_field, (pool, team)), "", "", repr(used)]))
        lines += [
            "|".join([*map(_field, (pool, team, row["project"])), "", repr(float(row["cost_units"]))])
            for row in rows
            if row["project"]
        ]
    return "\n".join(lines) + "\n"


def _field(value: str | int | float) -> str:
    return str(value).replace("|", "/")


def _measures(sums: Sums) -> dict[str, int | float]:
    return {name: getattr(sums, name) for name in MEASURES}


def _total(values: Iterable[int | float]) -> int | float:
    listed = list(values)
    return math.fsum(listed) if any(isinstance(value, float) for value in listed) else sum(listed)


EXPORTED = tuple(name for name in LedgerRow.__struct_fields__ if name not in {"writer", "number"})
"""The fields of an exported record."""


def export_header() -> str:
    return ",".join(EXPORTED) + "\n"


def export_lines(rows: Iterable[LedgerRow], *, as_csv: bool) -> str:
    """Records as lines of JSON or CSV. Points in time are seconds since 1970-01-01 UTC."""
    if not as_csv:
        return "".join(
            msgspec.json.encode({name: getattr(row, name) for name in EXPORTED}).decode() + "\n" for row in rows
        )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([getattr(row, name) for name in EXPORTED] for row in rows)
    return text.getvalue()
