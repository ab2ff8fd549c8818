"""Recorded loads: CSV or JSON lines with times and token counts, in the formats that are published.

A file is recognised by the names of its columns; see `FORMATS`. Every request becomes a `TraceRow`; which team it
belongs to is decided by a rule (`teams_of`).
"""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fairshare.core.priority import ServiceClass
from fairshare.simulator.scenario import Scenario, ScenarioError, TracePlan

SAMPLES = Path(__file__).with_name("data")
"""The samples that are shipped; their sources and licences are in its README.md."""


class TraceRow(NamedTuple):
    """One request of a trace."""

    at: float
    """Seconds since the first request."""
    client: str
    """Empty if the trace does not say."""
    prompt_tokens: int
    output_tokens: int


class Arrival(NamedTuple):
    """One request of a trace, as a scenario plays it."""

    at: float
    """On the scenario's clock, in seconds."""
    team: str
    prompt_tokens: int
    output_tokens: int
    service_class: ServiceClass
    pool: str


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time. Without a time zone: UTC, since all of a file is in one."""
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _milliseconds(text: str) -> float:
    return float(text) / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A published format: which columns it has, and what they mean."""

    name: str
    at: str
    prompt: str
    output: str
    client: str = ""
    seconds: Callable[[str], float] = _seconds


_Records = list[tuple[int, dict[str, str]]]
"""Requests, each with its line and its columns."""


class _Run(msgspec.Struct, frozen=True):
    responses: list[dict[str, Any]] = []


class _JsonLine(msgspec.Struct, frozen=True):
    """A request, or in the VTC artifact a whole run."""

    result: _Run = _Run()


FORMATS = (
    Format(
        name="Azure LLM inference trace",
        at="TIMESTAMP",
        prompt="ContextTokens",
        output="GeneratedTokens",
    ),
    Format(
        name="BurstGPT",
        at="Timestamp",
        prompt="Request tokens",
        output="Response tokens",
        client="Session ID",
    ),
    Format(
        name="Mooncake",
        at="timestamp",
        prompt="input_length",
        output="output_length",
        seconds=_milliseconds,
    ),
    Format(name="ServeGen", at="timestamp", prompt="input_tokens", output="output_tokens", client="client_id"),
    # The lines of fair_bench/*/all_results_*.jsonl: the requests of a run are in result.responses.
    Format(name="VTC artifact", at="req_time", prompt="prompt_len", output="output_len", client="adapter_dir"),
    Format(name="seconds and tokens", at="t_s", prompt="input_tokens", output="output_tokens", client="client"),
    Format(name="fairshare", at="time", prompt="input_tokens", output="output_tokens", client="team"),
)
"""The first one whose columns are all there is taken; the client's column may be missing."""


def find(file: str, beside: Path | None = None) -> Path:
    """The path of a trace: as given, beside the scenario, or one of the samples."""
    candidates = [Path(file), *([beside / file] if beside is not None else []), SAMPLES / file]
    for path in candidates:
        if path.is_file():
            return path
    raise ScenarioError(
        f"trace {file}: not found as given, beside the scenario or among the samples "
        f"({', '.join(sorted(path.name for path in SAMPLES.glob('*.csv*')))})"
    )


def read(path: Path) -> list[TraceRow]:
    """All requests of a trace, by time; the first one is at 0. Raises `ScenarioError`."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ScenarioError(
            f"{path}: cannot be read ({error}); a trace is CSV or JSON lines, or either gzipped"
        ) from None
    columns, records = (_json_lines if text.lstrip().startswith("{") else _csv)(path, text)
    if not columns:
        raise ScenarioError(f"{path}: is empty; a trace is CSV or JSON lines, or either gzipped")
    layout = recognise(columns)
    if layout is None:
        known = "; ".join(f"{one.name}: {one.at}, {one.prompt}, {one.output}" for one in FORMATS)
        raise ScenarioError(f"{path}: found the columns {', '.join(columns)}, but no known format has these ({known})")
    rows: list[TraceRow] = []
    for line, record in records:
        try:
            row = TraceRow(
                layout.seconds(record[layout.at]),
                record.get(layout.client, ""),
                int(float(record[layout.prompt])),
                int(float(record[layout.output])),
            )
            if not isfinite(row.at):
                raise ValueError(f"its time is {row.at}")
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise ScenarioError(f"{path}:{line}: not a request in the format of {layout.name} ({error})") from None
        # BurstGPT lists failed calls with 0 tokens; there is nothing to run in them.
        if row.prompt_tokens > 0:
            rows.append(row)
    if not rows:
        raise ScenarioError(f"{path}: has no request with a prompt")
    rows.sort(key=lambda row: row.at)
    first = rows[0].at
    return [row._replace(at=row.at - first) for row in rows]


def recognise(columns: Sequence[str]) -> Format | None:
    """The format with these columns."""
    for layout in FORMATS:
        if {layout.at, layout.prompt, layout.output} <= set(columns):
            return layout
    return None


def _csv(path: Path, text: str) -> tuple[Sequence[str], _Records]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        return reader.fieldnames or (), [(reader.line_num, record) for record in reader]
    except csv.Error as error:
        raise ScenarioError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _json_lines(path: Path, text: str) -> tuple[Sequence[str], _Records]:
    records: _Records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=_JsonLine)
            requests = found.result.responses or [msgspec.json.decode(line, type=dict[str, Any])]
        except msgspec.MsgspecError as error:
            raise ScenarioError(f"{path}:{number}: not a JSON object of a request ({error})") from None
        if found.result.responses and records:
            raise ScenarioError(f"{path}:{number}: is another run; keep the one line that is to be played")
        records += [(number, {key: str(value) for key, value in one.items()}) for one in requests]
    return tuple(records[0][1]), records


def teams_of(rows: Iterable[TraceRow], plan: TracePlan, teams: Sequence[str]) -> list[tuple[TraceRow, str]]:
    """Every request with its team, by the plan's rule. Raises `ScenarioError` for a client that has none.

    A client that has a team's name is that team. `hash` spreads all others by a checksum of their names and
    `round-robin` in the order in which they appear; a trace without clients is spread request by request.
    """
    by_client: dict[str, str] = dict(plan.clients)
    assigned: list[tuple[TraceRow, str]] = []
    for index, row in enumerate(rows):
        client = row.client or str(index)
        team = by_client.get(client)
        if team is None:
            team = _team(client, len(by_client), plan, teams)
            by_client[client] = team
        assigned.append((row, team))
    return assigned


def _team(client: str, order: int, plan: TracePlan, teams: Sequence[str]) -> str:
    if client in teams:
        return client
    match plan.teams:
        case "round-robin":
            return teams[order % len(teams)]
        case "hash":
            return teams[zlib.crc32(client.encode()) % len(teams)]
        case "client":
            raise ScenarioError(
                f"trace {plan.file}: its client {client!r} is no team; "
                "name its team under `clients`, or let `teams` be hash or round-robin"
            )


def arrivals(scenario: Scenario, beside: Path | None) -> list[Arrival]:
    """What all traces of a scenario bring, by time."""
    brought: list[Arrival] = []
    idle_teams = [team.name for team in scenario.teams if not team.loads]
    for plan in scenario.traces:
        rows = _played(read(find(plan.file, beside)), plan, scenario.duration)
        teams = plan.only or idle_teams
        if not teams:
            raise ScenarioError(
                f"trace {plan.file}: every team has loads of its own; name the teams that it is split into under `only`"
            )
        service_class = ServiceClass.INTERACTIVE if plan.service_class == "interactive" else ServiceClass.BATCH
        brought += [
            Arrival(row.at, team, row.prompt_tokens, row.output_tokens, service_class, plan.pool)
            for row, team in teams_of(rows, plan, teams)
        ]
    return sorted(brought, key=lambda arrival: arrival.at)


def _played(rows: Sequence[TraceRow], plan: TracePlan, duration_seconds: float) -> list[TraceRow]:
    """The part of a trace that a scenario plays, on the scenario's clock, its lengths cut as planned."""
    played: list[TraceRow] = []
    for row in rows:
        at = (row.at - plan.skip) / plan.speed
        if 0.0 <= at < duration_seconds:
            prompt_tokens = min(row.prompt_tokens, plan.longest_prompt)
            output_tokens = max(1, min(row.output_tokens, plan.longest_output))
            played.append(TraceRow(at, row.client, prompt_tokens, output_tokens))
    return played
