"""What LiteLLM kept goes on working where its form allows, and what does not is said."""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event

from fairshare.accounts import litellm
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts
from fairshare.errors import CallerError
from fairshare.storage.accounts import AccountStore
from fairshare.storage.database import Database
from support.storing import Run

NOW = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
KEY = "sk-of-a-client"
HASH = hashlib.sha256(KEY.encode()).hexdigest()


def other_hash(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def export(teams: list[dict[str, Any]], tokens: list[dict[str, Any]]) -> bytes:
    return json.dumps({"LiteLLM_TeamTable": teams, "LiteLLM_VerificationToken": tokens}).encode()


TEAM = {"team_id": "t-1", "team_alias": "Search & Co", "models": ["tiny"], "rpm_limit": 60, "max_budget": 12.5}
TOKEN = {
    "token": HASH,
    "key_alias": "web",
    "team_id": "t-1",
    "models": ["all-team-models"],
    "tpm_limit": 5000,
    "max_parallel_requests": 4,
    "expires": "2027-01-01T00:00:00Z",
}


def test_teams_and_keys_are_read_with_their_models_and_limits() -> None:
    taken = litellm.read(export([TEAM], [TOKEN]), now=NOW)
    (team,) = taken.teams
    (key,) = taken.keys
    assert (team.name, team.models, team.limits) == (
        "Search-Co",
        ("tiny",),
        ((LimitKind.REQUESTS_PER_MINUTE, 60),),
    )
    assert (key.sha256, key.team, key.models, key.note) == (HASH, "Search-Co", None, "web")
    assert key.expires_at == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert key.limits == ((LimitKind.TOKENS_PER_MINUTE, 5000), (LimitKind.IN_FLIGHT, 4))
    assert taken.left_out == (
        "team 'Search & Co' is called 'Search-Co' here",
        "the budget of team 'Search-Co' is in dollars ('12.5'); give it one in cost units",
    )


def test_what_cannot_be_taken_over_is_said_and_left_out() -> None:
    tokens = [
        {"token": "sk-in-clear", "key_alias": "clear"},
        {"token": other_hash(1), "key_alias": "gone", "expires": "2020-01-01 00:00:00"},
        {"token": other_hash(2), "key_alias": "odd", "expires": "soon"},
        {"token": other_hash(3), "key_alias": "stopped", "blocked": True},
        {"token": other_hash(4), "key_alias": "lost", "team_id": "t-9"},
        {"token": other_hash(5), "key_alias": "of-blocked", "team_id": "t-2"},
        {"token": other_hash(6), "key_alias": "free"},
    ]
    blocked = {"team_id": "t-2", "team_alias": "b", "blocked": True}
    taken = litellm.read(export([blocked], tokens), now=NOW)
    assert [(key.note, key.team) for key in taken.keys] == [("free", "litellm")]
    assert [team.name for team in taken.teams] == ["b", "litellm"]
    told = "\n".join(taken.left_out)
    for name in ("clear", "gone", "odd", "stopped", "lost", "of-blocked"):
        assert f"key {name!r}" in told
    assert "sk-in-clear" not in told


def test_teams_that_would_have_the_same_name_get_different_ones() -> None:
    teams = [{"team_id": str(n), "team_alias": alias} for n, alias in enumerate(["a b", "a-b", "???", "litellm"])]
    names = [team.name for team in litellm.read(export(teams, []), now=NOW).teams]
    assert names == ["a-b", "a-b-2", "team", "litellm-2"]


def test_numbers_may_be_text_and_what_is_no_limit_is_said() -> None:
    odd = {
        "token": other_hash(1),
        "key_alias": "odd",
        "rpm_limit": 10**30,
        "tpm_limit": 5.5,
        "max_parallel_requests": True,
        "max_budget": "\x1b[31m",
    }
    taken = litellm.read(
        export([], [odd, {"token": other_hash(2), "tpm_limit": "9000000000", "rpm_limit": None}]), now=NOW
    )
    assert [key.limits for key in taken.keys] == [(), ((LimitKind.TOKENS_PER_MINUTE, 9_000_000_000),)]
    assert len(taken.left_out) == 4
    assert "\x1b" not in "".join(taken.left_out)
    assert "tpm_limit of key 'odd' is '5.5', which is no limit here" in taken.left_out


def test_of_keys_with_one_id_the_first_is_taken_over_and_the_others_are_said() -> None:
    tokens = [{"token": "a" * 12 + digit * 52, "key_alias": digit} for digit in "bc"]
    taken = litellm.read(export([], tokens), now=NOW)
    assert [key.note for key in taken.keys] == ["b"]
    assert taken.left_out == ("key 'c' has the id of another one, aaaaaaaaaaaa; make a new one",)


def test_thousands_of_teams_may_have_one_name() -> None:
    teams = [{"team_id": str(n), "team_alias": "x" * 80} for n in range(3000)]
    names = [team.name for team in litellm.read(export(teams, []), now=NOW).teams]
    assert len(set(names)) == 3000
    assert max(map(len, names)) <= 64


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b'{"LiteLLM_TeamTable": []}', b"[" * 200_000])
def test_what_is_no_export_is_refused(text: bytes) -> None:
    with pytest.raises(CallerError, match="JSON object of tables"):
        litellm.read(text, now=NOW)


def test_what_is_taken_over_twice_is_there_once(run: Run) -> None:
    async def main(database: Database) -> None:
        accounts = Accounts(AccountStore(database), wall=lambda: NOW, new_secret=lambda: "unused")
        root = Actor(name="root")
        await accounts.add_node(root, "organisation", "lab")
        taken = litellm.read(export([TEAM], [TOKEN]), now=NOW)
        for _ in range(2):
            await accounts.take_over(root, taken, organisation="lab")
        (key,) = await accounts.keys(root, limit=10)
        assert (key.id, key.owner) == (HASH[:12], "team:Search-Co")
        assert len(await accounts.limits(root)) == 3
        live = [each async for page in AccountStore(database).keys_changed(since=0) for each in page]
        # The gateway hashes what the client shows in the same way, so the old key opens the door.
        assert [each.sha256 for each in live] == [hashlib.sha256(KEY.encode()).hexdigest()]

    run(main)


def test_what_bounded_a_key_or_team_in_a_way_that_is_not_taken_over_is_said() -> None:
    team = {
        "team_id": "t",
        "team_alias": "ads",
        "models": ["tiny", "a\nb"],
        "policies": ["strict"],
        "router_settings": {},
    }
    tokens = [
        {"token": other_hash(1), "key_alias": "web", "team_id": "t", "allowed_routes": ["/v1/embeddings"],
         "tpd_limit": 5, "config": {}, "metadata": {"model_rpm_limit": {"tiny": 1}, "colour": "red"}},
        {"token": other_hash(2), "key_alias": "own", "user_id": "someone", "models": []},
        {"token": other_hash(3), "key_alias": "odd", "models": [""]},
    ]  # fmt: skip
    tables = {
        "LiteLLM_TeamTable": [team], "LiteLLM_VerificationToken": tokens,
        "LiteLLM_UserTable": [{"user_id": "someone"}], "LiteLLM_BudgetTable": [],
    }  # fmt: skip
    taken = litellm.read(json.dumps(tables).encode(), now=NOW)
    assert taken.left_out == (
        "nothing of the tables 'LiteLLM_UserTable' is taken over",
        "team 'ads' has policies, which mean nothing here; bound it in another way if it must be",
        "team 'ads' may use models that cannot be called here; they are left out of its list",
        "key 'web' has tpd_limit, allowed_routes, model_rpm_limit, which mean nothing here; bound it in another way "
        "if it must be",
        "key 'own' could use the models of user 'someone'; here it can use all",
        "key 'odd' may use models that cannot be called here; they are left out of its list",
    )
    assert taken.teams[0].models == ("tiny",)
    # An empty list is not "all", as it is for LiteLLM.
    assert [key.models for key in taken.keys] == [None, None, ()]


def test_a_large_export_takes_few_statements_however_many_keys_it_has(run: Run) -> None:
    tokens = [{"token": other_hash(number), "tpm_limit": number} for number in range(1200)]

    async def main(database: Database) -> None:
        accounts = Accounts(AccountStore(database), wall=lambda: NOW, new_secret=lambda: "")
        root = Actor(name="root")
        await accounts.add_node(root, "organisation", "lab")
        statements: list[str] = []
        event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *said: statements.append(said[2]))
        for _ in range(2):  # what is there already stays
            await accounts.take_over(root, litellm.read(export([], tokens), now=NOW), organisation="lab")
        assert len(statements) < 100
        limits = {limit.owner: limit.value for limit in await accounts.limits(root)}
        assert limits == {f"key:{other_hash(number)[:12]}": number for number in range(1200)}

    run(main)
