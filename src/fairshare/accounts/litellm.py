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

from fairshare.accounts.kinds import KEY_ID_DIGITS, LARGEST_LIMIT, LONGEST_NAME, LimitKind, is_model_name
from fairshare.errors import CallerError

_HASH = re.compile(r"[0-9a-f]{64}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

TEAMS = "LiteLLM_TeamTable"
TOKENS = "LiteLLM_VerificationToken"
BOUNDS = (
    "tpd_limit", "budget_id", "budget_limits", "model_max_budget", "allowed_routes", "key_type", "permissions",
    "policies", "access_group_ids", "object_permission_id", "organization_id", "project_id", "agent_id", "aliases",
    "config", "router_settings", "model_id",
)  # fmt: skip
"""Columns of keys and teams that bound them, or change what they do, in a way that nothing here does."""

BOUNDS_IN_METADATA = ("model_rpm_limit", "model_tpm_limit", "guardrails", "tags")
"""The same, in the column `metadata`."""

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
    others = sorted(name for name, rows in tables.items() if name not in (TEAMS, TOKENS) and _rows(rows))
    if others:
        left_out.append(f"nothing of the tables {', '.join(map(repr, others))} is taken over")
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
    _say_of_bounds(row, f"team {unique!r}", left_out)
    if row.get("blocked"):
        left_out.append(f"team {unique!r} was blocked; its keys are not taken over")
        names[str(row.get("team_id"))] = ""
    return TakenTeam(
        name=unique,
        models=_models(row.get("models"), f"team {unique!r}", left_out),
        limits=_limits(row, f"team {unique!r}", left_out),
    )


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
    _say_of_bounds(row, f"key {shown!r}", left_out)
    models = _models(row.get("models"), f"key {shown!r}", left_out)
    if models is None and not team_id and row.get("user_id"):
        left_out.append(f"key {shown!r} could use the models of user {row['user_id']!r}; here it can use all")
    note = "".join(character for character in shown if character.isprintable())[:200]
    return TakenKey(
        id=sha256[:KEY_ID_DIGITS],
        sha256=sha256,
        team=team,
        models=models,
        note=note,
        expires_at=expires_at,
        limits=_limits(row, f"key {shown!r}", left_out),
    )


def _say_of_budget(row: Mapping[str, Any], whose: str, left_out: list[str]) -> None:
    if row.get("max_budget") is not None:
        left_out.append(
            f"the budget of {whose} is in dollars ({str(row['max_budget'])[:40]!r}); give it one in cost units"
        )


def _say_of_bounds(row: Mapping[str, Any], whose: str, left_out: list[str]) -> None:
    metadata = row.get("metadata")
    inside = cast("Mapping[str, Any]", metadata if isinstance(metadata, dict) else {})
    found = [name for name in BOUNDS if row.get(name)] + [name for name in BOUNDS_IN_METADATA if inside.get(name)]
    if found:
        left_out.append(
            f"{whose} has {', '.join(found)}, which mean nothing here; bound it in another way if it must be"
        )


def _models(value: object, whose: str, left_out: list[str]) -> tuple[str, ...] | None:
    listed = cast("list[object]", value) if isinstance(value, list) else []
    names = [str(each) for each in listed]
    # What LiteLLM's words for "everything" mean.
    if not names or {"all-team-models", "all-proxy-models"} & set(names):
        return None
    usable = tuple(name for name in names if is_model_name(name))
    if len(usable) < len(names):
        left_out.append(f"{whose} may use models that cannot be called here; they are left out of its list")
    return usable


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
