"""Takes over teams and keys from an export of LiteLLM's database.

LiteLLM keeps the SHA-256 of each key (`hash_token` of its proxy), as we do, so that keys go on working. What it kept in
another form cannot be taken over, and is said.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import Any, cast

import msgspec

from fairshare.accounts.kinds import KEY_ID_DIGITS, LARGEST_LIMIT, LONGEST_NAME, LimitKind
from fairshare.errors import CallerError

_HASH = re.compile(r"[0-9a-f]{64}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

TEAMS = "LiteLLM_TeamTable"
TOKENS = "LiteLLM_VerificationToken"
WITHOUT_TEAM = "litellm"
"""The team of keys that have none."""


class TakenTeam(msgspec.Struct, frozen=True, kw_only=True):
    """A team to make."""

    name: str
    models: tuple[str, ...] | None
    limits: tuple[tuple[LimitKind, int], ...]


class TakenKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key to take over."""

    id: str
    sha256: str
    team: str
    models: tuple[str, ...] | None
    note: str
    expires_at: float | None
    limits: tuple[tuple[LimitKind, int], ...]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What can be taken over, and one sentence for each thing that cannot."""

    teams: tuple[TakenTeam, ...]
    keys: tuple[TakenKey, ...]
    left_out: tuple[str, ...]


def read(text: bytes, *, now: float) -> Taken:
    """An export: a JSON object of tables, `{"LiteLLM_TeamTable": [...], "LiteLLM_VerificationToken": [...]}`.

    Raises:
        CallerError: it is something else.
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or TOKENS not in found:
        raise CallerError(f'must be a JSON object of tables: {{"{TEAMS}": [...], "{TOKENS}": [...]}}')
    tables = cast("Mapping[str, Any]", found)
    left_out: list[str] = []
    names: dict[str, str] = {}
    taken = {WITHOUT_TEAM}
    teams = [_team(row, names, taken, left_out) for row in _rows(tables.get(TEAMS))]
    keys: dict[str, TakenKey] = {}
    for row in _rows(tables.get(TOKENS)):
        key = _key(row, names, left_out, now=now)
        if key is not None and keys.setdefault(key.id, key) is not key:
            left_out.append(f"key {key.note!r} has the id of another one, {key.id}; make a new one")
    if any(key.team == WITHOUT_TEAM for key in keys.values()):
        teams.append(TakenTeam(name=WITHOUT_TEAM, models=None, limits=()))
    return Taken(teams=tuple(teams), keys=tuple(keys.values()), left_out=tuple(left_out))


def _rows(table: object) -> list[Mapping[str, Any]]:
    listed = cast("list[object]", table) if isinstance(table, list) else []
    return [cast("Mapping[str, Any]", row) for row in listed if isinstance(row, dict)]


def _team(row: Mapping[str, Any], names: dict[str, str], taken: set[str], left_out: list[str]) -> TakenTeam:
    wanted = str(row.get("team_alias") or row.get("team_id") or "team")
    name = _NOT_IN_NAMES.sub("-", wanted).strip("-._")[: LONGEST_NAME - 8] or "team"
    unique = next(each for each in chain([name], (f"{name}-{n}" for n in count(2))) if each not in taken)
    taken.add(unique)
    names[str(row.get("team_id"))] = unique
    if unique != wanted:
        left_out.append(f"team {wanted!r} is called {unique!r} here")
    _say_of_budget(row, f"team {unique!r}", left_out)
    if row.get("blocked"):
        left_out.append(f"team {unique!r} was blocked; its keys are not taken over")
        names[str(row.get("team_id"))] = ""
    return TakenTeam(name=unique, models=_models(row.get("models")), limits=_limits(row, f"team {unique!r}", left_out))


def _key(row: Mapping[str, Any], names: Mapping[str, str], left_out: list[str], *, now: float) -> TakenKey | None:
    sha256 = str(row.get("token") or "")
    shown = str(row.get("key_alias") or row.get("key_name") or sha256[:8])
    team_id = row.get("team_id")
    team = WITHOUT_TEAM if not team_id else names.get(str(team_id))
    if not _HASH.fullmatch(sha256):
        left_out.append(f"key {shown!r} is not kept as a SHA-256; make a new one")
        return None
    if row.get("blocked") or team == "":
        left_out.append(f"key {shown!r} was blocked")
        return None
    if team is None:
        left_out.append(f"key {shown!r} belongs to team {team_id!r}, which is not in the export")
        return None
    expires_at = _time(row.get("expires"))
    if row.get("expires") and expires_at is None:
        left_out.append(f"key {shown!r} expires at something that is no time; it is not taken over")
        return None
    if expires_at is not None and expires_at <= now:
        left_out.append(f"key {shown!r} has expired")
        return None
    _say_of_budget(row, f"key {shown!r}", left_out)
    note = "".join(character for character in shown if character.isprintable())[:200]
    return TakenKey(
        id=sha256[:KEY_ID_DIGITS],
        sha256=sha256,
        team=team,
        models=_models(row.get("models")),
        note=note,
        expires_at=expires_at,
        limits=_limits(row, f"key {shown!r}", left_out),
    )


def _say_of_budget(row: Mapping[str, Any], whose: str, left_out: list[str]) -> None:
    if row.get("max_budget") is not None:
        left_out.append(
            f"the budget of {whose} is in dollars ({str(row['max_budget'])[:40]!r}); give it one in cost units"
        )


def _models(value: object) -> tuple[str, ...] | None:
    listed = cast("list[object]", value) if isinstance(value, list) else []
    names = tuple(str(each) for each in listed)
    # What LiteLLM's words for "everything" mean.
    return None if not names or {"all-team-models", "all-proxy-models"} & set(names) else names


def _limits(row: Mapping[str, Any], whose: str, left_out: list[str]) -> tuple[tuple[LimitKind, int], ...]:
    columns: Iterable[tuple[str, LimitKind]] = (
        ("rpm_limit", LimitKind.REQUESTS_PER_MINUTE),
        ("tpm_limit", LimitKind.TOKENS_PER_MINUTE),
        ("max_parallel_requests", LimitKind.IN_FLIGHT),
    )
    limits: list[tuple[LimitKind, int]] = []
    for name, kind in columns:
        value = str(row.get(name))  # some exports write large numbers as text
        if value.isascii() and value.isdigit() and len(value) <= 15 and int(value) <= LARGEST_LIMIT:
            limits.append((kind, int(value)))
        elif row.get(name) is not None:
            left_out.append(f"{name} of {whose} is {value[:40]!r}, which is no limit here")
    return tuple(limits)


def _time(value: object) -> float | None:
    from datetime import UTC, datetime

    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
