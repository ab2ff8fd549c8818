"""The salt of a team's prefixes."""

import json
import re

import pytest

from fairshare.wire.body import inspect_body, rewrite_body
from fairshare.wire.endpoints import ENDPOINTS, BodyKind, Endpoint, find_endpoint
from fairshare.wire.prefix import prefix_keys
from fairshare.wire.salt import cache_salt

SECRET = b"0" * 32
CHAT = find_endpoint(b"/v1/chat/completions")
SALTED = [one for one in ENDPOINTS if one.body is BodyKind.JSON and one.takes_slots]


def test_a_salt_is_what_vllm_takes() -> None:
    for team in ("search", "ä/@\\\0", "x" * 500):
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", cache_salt(SECRET, team, b'"own"'))


def test_the_same_salt_needs_the_same_secret_team_and_own_salt() -> None:
    salts = {
        cache_salt(secret, team, own)
        for secret in (SECRET, b"1" * 32)
        for team in ("a", "ab", 'a"b"')
        for own in (b"", b'"b"', b'""', b"null")
    }
    assert len(salts) == 2 * 3 * 4
    assert cache_salt(SECRET, "a", b'"b"') == cache_salt(SECRET, "a", b'"b"')


def test_a_team_cannot_stretch_its_name_into_its_own_salt() -> None:
    assert cache_salt(SECRET, "a", b"b") != cache_salt(SECRET, "ab")


@pytest.mark.parametrize("at", SALTED, ids=lambda at: at.name)
@pytest.mark.parametrize(
    "own",
    ["", '"cache_salt":"theirs",', '"cache\\u005fsalt":"theirs",', '"cache_salt":"a","cache_salt":["theirs"],'],
)
def test_our_salt_is_the_only_one_that_reaches_the_engine(at: Endpoint, own: str) -> None:
    body = ('{"model":"tiny",' + own + '"messages":[],"input":"x","prompt":"x"}').encode()
    facts = inspect_body(at, body)
    for priority in (None, 11):
        sent = rewrite_body(at, body, facts, priority=priority, cache_salt="ours")
        pairs = json.loads(sent, object_pairs_hook=list)
        assert [value for name, value in pairs if name == "cache_salt"] == ["ours"]
        assert b"theirs" not in sent
        assert json.loads(sent)["model"] == "tiny"


def test_without_isolation_a_clients_salt_stays() -> None:
    assert CHAT is not None
    body = b'{"model":"tiny","cache_salt":"theirs","messages":[]}'
    assert rewrite_body(CHAT, body, inspect_body(CHAT, body), priority=None) == body


def test_a_salt_changes_every_key_of_a_prefix_and_the_same_salt_gives_the_same_keys() -> None:
    prompt = b"x" * 5000
    plain, salted, other = (prefix_keys("m", prompt, salt) for salt in (None, "s", "t"))
    assert len({*plain, *salted, *other}) == 3 * len(plain)
    assert salted == prefix_keys("m", prompt, "s")
