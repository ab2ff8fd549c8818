"""fairshare.yaml: what is read, what is refused, and what the messages say."""

import hashlib
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pytest

from fairshare import config
from fairshare.config import ConfigError, Settings, is_loopback, load, parse
from fairshare.core.decisions import BorrowOrder, HoldOptions, Mode
from fairshare.core.priority import ServiceClass
from fairshare.gateway.options import (
    AccessLogSpec,
    Address,
    Balance,
    EngineKind,
    GatewaySpec,
    Limits,
    Timeouts,
    TokenEstimates,
    TracingSpec,
)
from fairshare.storage.address import PostgresServer, SqliteFile
from fairshare.wire.usage import CostWeights
from support.certificates import Authority

HEX = hashlib.sha256(b"fs-search").hexdigest()
OTHER_HEX = hashlib.sha256(b"fs-ads").hexdigest()

SMALLEST = f"""
listen: 127.0.0.1:8080
admin: 127.0.0.1:8081
pools:
  - name: chat
    capacity: 16
    half_life: 7d
    dispatch: hold
    shares: {{search: 26/32, ads: 6/32}}
    models: [tiny]
    instances: [http://127.0.0.1:9001]
teams:
  - name: search
    keys: [{{sha256: "{HEX}", class: interactive}}]
"""

POOL = "pools: [{name: chat, capacity: 16, shares: {a: 1}, models: [m], instances: [http://h:1], %s }]"


def read(text: str, environ: Mapping[str, str] | None = None, path: Path = Path("fairshare.yaml")) -> Settings:
    return parse(text, path=path, environ=environ or {})


def problems(text: str, environ: Mapping[str, str] | None = None, path: Path = Path("f.yaml")) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        read(text, environ, path)
    return raised.value.problems


def only_problem(text: str, environ: Mapping[str, str] | None = None) -> str:
    (problem,) = problems(text, environ)
    return problem


def pool_with(entry: str) -> str:
    return POOL % entry


# --- What is read -------------------------------------------------------------------------------------------------


def test_the_smallest_useful_file_is_read_and_the_rest_has_its_defaults() -> None:
    spec = read(SMALLEST).gateway
    (pool,) = spec.pools
    assert spec.listen == Address("127.0.0.1", 8080)
    assert spec.admin.address == Address("127.0.0.1", 8081)
    assert spec.limits == Limits()
    assert (pool.name, pool.capacity, pool.half_life_seconds, pool.mode) == ("chat", 16, 604800.0, Mode.HOLD)
    assert pool.shares == {"search": Fraction(26, 32), "ads": Fraction(6, 32)}
    assert pool.models == {"tiny": "tiny"}
    assert [instance.url for instance in pool.instances] == ["http://127.0.0.1:9001"]
    assert (pool.balance, pool.fallback, pool.calibrated) == (Balance.PREFIX, None, False)
    assert (pool.hold, pool.timeouts, pool.cost) == (HoldOptions(), Timeouts(), CostWeights())
    (team,) = spec.teams
    assert (team.name, team.models) == ("search", None)
    assert team.keys[0].sha256 == bytes.fromhex(HEX)
    assert team.keys[0].service_class is ServiceClass.INTERACTIVE


def test_defaults_are_the_ones_that_are_documented() -> None:
    hold = HoldOptions()
    assert (hold.batch_every, hold.recall, hold.recall_waste) == (10, True, 0.1)
    assert (hold.max_held, hold.max_held_per_team, hold.max_held_bytes) == (10_000, 2_000, 1 << 30)
    assert hold.longest_wait_seconds == 300.0
    timeouts = Timeouts()
    assert (timeouts.connect_seconds, timeouts.first_byte_seconds) == (2.0, 600.0)
    assert (timeouts.idle_seconds, timeouts.longest_request_seconds) == (600.0, 3600.0)
    limits = Limits()
    assert (limits.max_body_bytes, limits.max_header_bytes) == (64 << 20, 64 << 10)
    assert (limits.header_timeout_seconds, limits.max_connections) == (10.0, 8000)
    cost = CostWeights()
    assert (cost.prompt, cost.cached, cost.completion, cost.unit) == (1, 0.1, 2, "tokens")


def test_every_option_is_read_as_written() -> None:
    text = f"""
listen: 0.0.0.0:80
admin: {{listen: "[::1]:9000", key: "${{ADMIN_KEY}}"}}
limits: {{max_body: 1MiB, max_header: 16KiB, header_timeout: 250ms, max_connections: 10, drain: 1m}}
pools:
  - name: chat
    capacity_per_instance: 8
    half_life: 0
    dispatch: observe
    shares: {{search: 0.1, ads: 0.9}}
    models: {{tiny: org/served, small: org/served-small}}
    instances:
      - {{url: "http://a:9001/", max_num_seqs: 32, api_key: "${{ENGINE_KEY}}", kind: vllm}}
      - http://b/prefix/
    balance: least_loaded
    token_estimates: tokenize
    fallback: spare
    hold: {{borrow_order: weighted, batch_every: 0, recall: false, recall_waste: 0.25, max_held: 1,
            max_held_per_team: 2, max_held_bytes: 2GiB, longest_wait: 1.5h}}
    timeouts: {{connect: 1s, first_byte: 2s, idle: 3s, longest_request: 2d}}
    cost: {{prompt: 0.001, cached: 0, completion: 3, unit: gpu-seconds}}
  - {{name: spare, capacity: 2, shares: {{ads: 1}}, models: {{x: org/served, z: org/served-small}}, instances: [http://c:1]}}
teams:
  - {{name: search, models: [tiny], keys: [{{sha256: "{HEX}", class: batch}}]}}
  - {{name: ads, keys: [{{sha256: "{OTHER_HEX}"}}]}}
"""
    spec = read(text, {"ADMIN_KEY": "admin-secret", "ENGINE_KEY": "engine-secret"}).gateway
    assert (spec.listen, str(spec.admin.address), spec.admin.key) == (
        Address("0.0.0.0", 80),
        "[::1]:9000",
        "admin-secret",
    )
    assert spec.limits == Limits(
        max_body_bytes=1 << 20,
        max_header_bytes=16 << 10,
        header_timeout_seconds=0.25,
        max_connections=10,
        drain_seconds=60.0,
    )
    pool = spec.pools[0]
    assert (pool.capacity, pool.half_life_seconds, pool.mode, pool.fallback) == (16, 0.0, Mode.OBSERVE, "spare")
    assert (pool.balance, pool.token_estimates) == (Balance.LEAST_LOADED, TokenEstimates.TOKENIZE)
    assert pool.shares == {"search": Fraction(1, 10), "ads": Fraction(9, 10)}
    assert pool.models == {"tiny": "org/served", "small": "org/served-small"}
    first, second = pool.instances
    assert (first.url, first.max_num_seqs, first.api_key, first.kind) == (
        "http://a:9001",
        32,
        "engine-secret",
        EngineKind.VLLM,
    )
    assert (second.url, second.max_num_seqs, second.api_key) == ("http://b:80/prefix", None, None)
    assert pool.hold == HoldOptions(
        borrow_order=BorrowOrder.WEIGHTED,
        batch_every=0,
        recall=False,
        recall_waste=0.25,
        max_held=1,
        max_held_per_team=2,
        max_held_bytes=2 << 30,
        longest_wait_seconds=5400.0,
    )
    assert pool.timeouts == Timeouts(
        connect_seconds=1.0, first_byte_seconds=2.0, idle_seconds=3.0, longest_request_seconds=172800.0
    )
    assert pool.cost == CostWeights(prompt=0.001, cached=0.0, completion=3.0, unit="gpu-seconds")
    assert pool.calibrated
    assert spec.teams[0].models == frozenset({"tiny"})
    assert [key.service_class for team in spec.teams for key in team.keys] == [
        ServiceClass.BATCH,
        ServiceClass.INTERACTIVE,
    ]


@pytest.mark.parametrize(
    ("written", "seconds"), [("250ms", 0.25), ("30s", 30.0), ("5m", 300.0), ("1h", 3600.0), ("7d", 604800.0)]
)
def test_a_duration_is_a_number_with_its_unit(written: str, seconds: float) -> None:
    spec = read(pool_with(f"half_life: {written}")).gateway
    assert spec.pools[0].half_life_seconds == seconds


@pytest.mark.parametrize(("written", "size"), [("65536", 65536), ("64KiB", 65536), ("1.5MiB", 1572864)])
def test_a_size_is_bytes_or_has_a_binary_unit(written: str, size: int) -> None:
    text = pool_with("half_life: 7d") + f"\nlimits: {{max_body: {written}}}"
    assert read(text).gateway.limits.max_body_bytes == size


def test_a_share_is_kept_exactly_as_a_person_wrote_it() -> None:
    text = (POOL % "half_life: 7d").replace("{a: 1}", "{a: 0.1, b: 0.2, c: 0.7}")
    shares = read(text).gateway.pools[0].shares
    assert sum(shares.values()) == 1
    assert shares["a"] == Fraction(1, 10)


def test_names_that_yaml_would_turn_into_something_else_are_names_when_quoted() -> None:
    text = (POOL % "half_life: 7d").replace("{a: 1}", '{"no": 1/2, "1:30": 1/4, "1e3": 1/4}')
    assert set(read(text).gateway.pools[0].shares) == {"no", "1:30", "1e3"}


# --- What is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["no", "Yes", "on", "y", "1:30", "1e3", "12", "1.5", "2026-11-30", "~", "null", "0x1F"]
)
def test_a_name_that_yaml_turns_into_something_else_is_an_error_that_shows_the_quotes(name: str) -> None:
    text = (POOL % "half_life: 7d").replace("{a: 1}", f"{{{name}: 1}}")
    problem = only_problem(text)
    assert f"pools[0].shares.{name}: {name} is not text to every YAML reader" in problem
    assert f'write "{name}" with the quotes' in problem


def test_an_unknown_key_names_the_nearest_known_one_and_its_line() -> None:
    text = SMALLEST.replace("capacity: 16", "capacity: 16\n    half_live: 7d")
    assert only_problem(text) == (
        'f.yaml:7: pools[0].half_live: unknown key "half_live"; the nearest known one is "half_life"'
    )


def test_a_key_that_stands_twice_is_an_error_with_both_lines() -> None:
    text = SMALLEST.replace("    capacity: 16\n", "    capacity: 16\n    capacity: 32\n")
    assert '"capacity" stands twice, the second time in line 7 (first in line 6); remove one' in only_problem(text)


def test_a_team_that_stands_twice_in_the_shares_is_an_error() -> None:
    text = SMALLEST.replace("ads: 6/32", "search: 6/32")
    assert '"search" stands twice' in only_problem(text)


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    text = """
listen: 8080
pools:
  - name: a b
    capacity: lots
    half_life: 7
    dispatch: hodl
    shares: {search: 33/32, ads: -1}
    models: []
    instances: [ftp://h]
teams:
  - name: search
    keys: [{sha256: fs-this-is-the-key-itself, class: urgent}]
limits: {max_body: 64MB}
"""
    found = problems(text)
    wheres = [problem.split(": ")[1] for problem in found]
    assert sorted(wheres) == sorted(
        [
            "listen",
            "pools[0].name",
            "pools[0].capacity",
            "pools[0].half_life",
            "pools[0].dispatch",
            "pools[0].shares.search",
            "pools[0].shares.ads",
            "pools[0].models",
            "pools[0].instances[0]",
            "teams[0].keys[0].sha256",
            "teams[0].keys[0].class",
            "limits.max_body",
        ]
    )


@pytest.mark.parametrize(
    ("entry", "where", "message"),
    [
        ("half_life: 7", "half_life", 'written as 250ms, 30s, 5m, 1h or 7d, found "7"'),
        ("half_life: 1:30", "half_life", 'found "1:30"'),
        ("half_life: -7d", "half_life", 'found "-7d"'),
        ("half_life: {}", "half_life", "found a mapping"),
        ("half_life: ", "half_life", "found nothing"),
        ("dispatch: late", "dispatch", 'must be hold or pass or observe, found "late"'),
        ("hold: {recall: yes}", "hold.recall", 'must be true or false, found "yes"'),
        ("hold: {recall_waste: 10%}", "hold.recall_waste", 'found "10%"'),
        ("hold: {recall_waste: 10}", "hold.recall_waste", "must be between 0 and 1"),
        ("hold: {batch_every: -1}", "hold.batch_every", 'found "-1"'),
        ("hold: {max_held: 1e3}", "hold.max_held", 'found "1e3"'),
        ("hold: {longest_wait: 0s}", "hold.longest_wait", "must be longer than 0"),
        ("hold: [recall]", "hold", "found a list"),
        ("timeouts: {connect: 2}", "timeouts.connect", 'found "2"'),
        ("cost: {prompt: nan}", "cost.prompt", 'found "nan"'),
        ("cost: {prompt: -1}", "cost.prompt", 'found "-1"'),
        ("fallback: nowhere", "fallback", 'there is no pool "nowhere"'),
        ("capacity_per_instance: 4", "", 'give either "capacity" or "capacity_per_instance"'),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_was_found(entry: str, where: str, message: str) -> None:
    problem = only_problem(pool_with(entry))
    path = f"pools[0].{where}" if where else "pools[0]"
    assert problem.startswith(f"f.yaml:1: {path}: ")
    assert message in problem


@pytest.mark.parametrize(
    "entry",
    [
        "capacity: {}",
        "half_life: {}d",
        "hold: {{max_held_bytes: {}GiB}}",
        "hold: {{longest_wait: {}h}}",
        "cost: {{prompt: {}}}",
        "shares: {{a: 1/{}}}",
        "shares: {{a: {}}}",
        "shares: {{a: 0.{}}}",
    ],
)
def test_a_number_with_hundreds_or_thousands_of_digits_is_a_wrong_value(entry: str) -> None:
    # Python reads no integer of more than 4300 digits, and no float holds more than 308.
    for digits in (400, 5000):
        key = entry.partition(":")[0]
        text = POOL % entry.format("1" * digits)
        if key in ("capacity", "shares"):
            text = text.replace(f"{key}: {'16' if key == 'capacity' else '{a: 1}'}, ", "", 1)
        assert f"pools[0].{key}" in only_problem(text)


def test_a_secret_file_whose_name_holds_a_zero_byte_is_a_wrong_value() -> None:
    (problem,) = problems(with_instance('api_key_file: "a\\0b"'))
    assert "is no path of a file" in problem


@pytest.mark.parametrize("share", ["1/0", "-0.1", "nan", "inf", "1e-1", "2", "1/2/3", "half", "'٣'"])
def test_a_share_that_is_no_number_between_0_and_1_is_refused(share: str) -> None:
    problem = only_problem((POOL % "half_life: 7d").replace("{a: 1}", f"{{a: {share}}}"))
    assert "pools[0].shares.a: must be a share between 0 and 1" in problem


def test_shares_above_the_whole_pool_are_refused_with_their_sum() -> None:
    problem = only_problem(SMALLEST.replace("ads: 6/32", "ads: 7/32"))
    assert "pools[0].shares: the shares add up to 33/32 (1.03125), more than the whole pool" in problem


def test_shares_that_leave_something_over_are_a_warning() -> None:
    (warning,) = [w for w in read(SMALLEST.replace("ads: 6/32", "ads: 5/32")).warnings if "add up" in w]
    assert "31/32 (0.96875); nobody owns the rest" in warning


@pytest.mark.parametrize("key", ["name", "capacity", "shares", "models", "instances"])
def test_a_missing_key_is_reported_with_an_example(key: str) -> None:
    lines = [line for line in SMALLEST.splitlines() if not line.strip().removeprefix("- ").startswith(f"{key}:")]
    text = "\n".join(lines)
    if key == "name":
        text = text.replace("    capacity: 16", "  - capacity: 16")
        text = text.replace("    keys:", "  - keys:")
    assert any(f'"{key}" is missing; write for example {key}: ' in problem for problem in problems(text))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:9001", "must be an engine's address"),
        ("ftp://h:1", "must be an engine's address"),
        ("http://", "must be an engine's address"),
        ("http://h:99999", "must be an engine's address"),
        ("http://h:1/v1", 'leave out the "/v1"'),
        ("http://h:1/?a=b", "without ? or #"),
        ("http://user:hunter2@h:1", "must not hold a user or password"),
        ("http://user:hunter2@h:99999", "must not hold a user or password"),
        ("user:hunter2@h", "must not hold a user or password"),
    ],
)
def test_an_instance_address_that_cannot_work_is_refused(url: str, message: str) -> None:
    problem = only_problem((POOL % "half_life: 7d").replace("http://h:1", f'"{url}"'))
    assert "pools[0].instances[0]: " in problem
    assert message in problem
    assert "hunter2" not in problem


def test_one_engine_twice_in_a_pool_is_refused() -> None:
    problem = only_problem((POOL % "half_life: 7d").replace("http://h:1", "http://h:1, http://h:1/"))
    assert "http://h:1 is also pools[0].instances[0]" in problem


def test_a_file_that_is_no_yaml_says_where() -> None:
    assert only_problem("listen: 127.0.0.1:8080\npools: [\n\t- a").startswith("f.yaml:3: column ")
    assert "is empty" in only_problem("")
    assert "found a list" in only_problem("- a")
    assert "not valid YAML" in only_problem("a: \x00")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="save the file as UTF-8 text"):
        parse(b"listen: \xff\xfe\xfa", path=Path("f.yaml"), environ={})


def test_a_nesting_bomb_is_refused() -> None:
    problem = only_problem("[" * 100_000)
    assert "nested too deeply" in problem or "maximum nesting depth" in problem


def test_a_file_that_points_at_itself_is_refused() -> None:
    assert "found a list" in only_problem("pools: &a [*a]")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read \\(no such file or directory\\); check the path"):
        load(tmp_path / "nowhere.yaml", {})


# --- What must hold between the sections --------------------------------------------------------------------------


def two_pools(first: str = "", second: str = "") -> str:
    return (
        "pools:\n"
        f"  - {{name: a, capacity: 1, shares: {{t: 1}}, models: {{m: served}}, instances: [http://h:1]{first}}}\n"
        f"  - {{name: b, capacity: 1, shares: {{t: 1}}, models: {{other: served}}, instances: [http://h:2]{second}}}\n"
    )


def test_a_fallback_is_another_pool_whose_engines_serve_the_same_models() -> None:
    assert read(two_pools(", fallback: b")).gateway.pools[0].fallback == "b"
    text = two_pools(", fallback: b").replace("{other: served}", "{other: else}")
    assert 'the engines of "b" do not serve served' in only_problem(text)


def test_a_pool_that_observes_is_no_fallback_and_uses_none() -> None:
    assert '"b" dispatches as observe' in only_problem(two_pools(", fallback: b", ", dispatch: observe"))
    warnings = read(two_pools(", fallback: b, dispatch: observe")).warnings
    assert any("observe does not use its fallback" in warning for warning in warnings)


def test_fallbacks_that_go_round_in_a_circle_are_refused() -> None:
    assert "a → a" in only_problem(two_pools(", fallback: a"))
    first, second = problems(two_pools(", fallback: b", ", fallback: a"))
    assert "pools[0].fallback: the fallbacks go round in a circle (a → b → a)" in first
    assert "pools[1].fallback: the fallbacks go round in a circle (b → a → b)" in second


def test_a_fallback_that_does_not_exist_names_the_nearest_pool() -> None:
    text = two_pools().replace("name: b", "name: spare").replace("[http://h:1]", "[http://h:1], fallback: spar")
    assert 'there is no pool "spar"; did you mean "spare"?' in only_problem(text)


def test_one_model_in_two_pools_is_refused() -> None:
    problem = only_problem(two_pools().replace("other: served", "m: served"))
    assert 'pools[1].models: model "m" is also served by pools[0]' in problem


def test_two_pools_of_one_name_are_refused() -> None:
    assert '"a" is also the name of pools[0]' in only_problem(two_pools().replace("name: b", "name: a"))


def test_one_engine_in_two_pools_is_a_warning() -> None:
    warnings = read(two_pools().replace("h:2", "h:1")).warnings
    assert any('http://h:1 is also in pool "a"' in warning for warning in warnings)


def test_seats_below_the_capacity_are_a_warning() -> None:
    text = (POOL % "half_life: 7d").replace("http://h:1", "{url: http://h:1, max_num_seqs: 8}")
    assert any("run at most 8 sequences (max_num_seqs), but the capacity is 16" in w for w in read(text).warnings)


def test_one_key_for_two_teams_is_refused() -> None:
    text = SMALLEST + f'  - {{name: ads, keys: [{{sha256: "{HEX.upper()}"}}]}}\n'
    assert "teams[1].keys[0]: this key is also teams[0].keys[0]" in only_problem(text)


def test_a_team_that_stands_twice_is_refused() -> None:
    assert '"search" is also the name of teams[0]' in only_problem(SMALLEST + "  - {name: search}\n")


def test_a_team_may_only_be_given_models_that_exist() -> None:
    text = SMALLEST.replace("  - name: search\n", "  - name: search\n    models: [tinny]\n")
    assert 'teams[0].models: no pool serves the model "tinny"; did you mean "tiny"?' in only_problem(text)


def test_teams_without_a_share_and_shares_without_a_key_are_warnings() -> None:
    text = SMALLEST + f'  - {{name: adds, keys: [{{sha256: "{OTHER_HEX}"}}]}}\n  - name: keyless\nstore: none\n'
    warnings = "\n".join(read(text).warnings)
    assert 'team "adds" owns no share of any pool; it only borrows; did you mean "ads"?' in warnings
    assert 'no key belongs to team "ads"' in warnings
    assert 'team "keyless" has no key' in warnings


def test_a_file_without_any_key_is_a_warning() -> None:
    # With a store they may be there.
    assert read(pool_with("half_life: 7d")).warnings == ()
    assert any(
        "every request will be refused" in warning
        for warning in read(pool_with("half_life: 7d") + "\nstore: none").warnings
    )


# --- Secrets ------------------------------------------------------------------------------------------------------


def with_instance(entry: str) -> str:
    return (POOL % "half_life: 7d").replace("http://h:1", f"{{url: http://h:1, {entry}}}")


def test_an_engine_key_comes_from_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text("engine-secret\n")
    (tmp_path / "engine.key").chmod(0o600)
    settings = read(with_instance("api_key_file: engine.key"), path=tmp_path / "fairshare.yaml")
    assert settings.gateway.pools[0].instances[0].api_key == "engine-secret"
    assert not any("engine.key" in warning for warning in settings.warnings)
    assert "engine-secret" not in repr(settings)


def test_two_configurations_in_one_folder_that_keep_to_the_same_store_are_a_warning_with_both_names(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "fairshare.yaml", tmp_path / "second.yaml"
    one.write_text(SMALLEST)
    (tmp_path / "broken.yml").write_text("a: [")
    (tmp_path / "scenario.yaml").write_text("pools: []")
    assert not [text for text in load(one, {}).warnings if "same store" in text]
    other.write_text(SMALLEST)
    (warning,) = [text for text in load(one, {}).warnings if "same store" in text]
    assert warning.startswith(f"{one}: {other} beside it keeps to the same store, fairshare.sqlite3")
    other.write_text(f"store: none\n{SMALLEST}")
    assert not [text for text in load(one, {}).warnings if "same store" in text]


def test_a_secret_file_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text("engine-secret")
    (tmp_path / "engine.key").chmod(0o644)
    settings = read(with_instance("api_key_file: engine.key"), path=tmp_path / "fairshare.yaml")
    assert any("can be used by others (mode 0644); chmod 600" in warning for warning in settings.warnings)


def test_a_secret_that_stands_in_the_file_is_refused_and_not_repeated() -> None:
    problem = only_problem(with_instance("api_key: sk-canary"))
    assert "pools[0].instances[0].api_key: must not stand in this file" in problem
    assert "canary" not in problem


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "ключ"])
def test_a_secret_that_cannot_be_sent_in_a_header_is_refused_and_not_repeated(value: str) -> None:
    problem = only_problem(with_instance("api_key: '${ENGINE_KEY}'"), {"ENGINE_KEY": value})
    assert "the environment variable ENGINE_KEY" in problem
    assert not value or value not in problem


def test_a_secret_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fairshare.yaml"
    (missing,) = problems(with_instance("api_key_file: nowhere"), path=path)
    assert "cannot be read (no such file or directory)" in missing
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (binary,) = problems(with_instance("api_key_file: binary"), path=path)
    assert "is not text" in binary


def test_a_key_pasted_in_place_of_its_hash_is_refused_and_not_repeated() -> None:
    problem = only_problem(SMALLEST.replace(HEX, "fs-canary"))
    assert "must be the key's SHA-256 as 64 hex digits, found 9 characters" in problem
    assert "canary" not in problem


# --- The admin port -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "gateway.example"])
def test_an_admin_port_beyond_loopback_needs_a_key(host: str) -> None:
    text = pool_with("half_life: 7d") + f'\nadmin: "{host}:8081"'
    assert f"{host}:8081 can be reached from other machines, so it needs a key" in only_problem(text)
    with_key = pool_with("half_life: 7d") + f'\nadmin: {{listen: "{host}:8081", key: "${{K}}"}}'
    assert read(with_key, {"K": "secret"}).gateway.admin.key == "secret"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_only_loopback_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_one_port_cannot_be_both() -> None:
    text = pool_with("half_life: 7d") + "\nlisten: 127.0.0.1:8081"
    assert "127.0.0.1:8081 is also the data port" in only_problem(text)


@pytest.mark.parametrize("written", ["8080", ":8080", "host:", "host:port", "h:70000", "::1:80", "http://h:80"])
def test_an_address_is_a_host_and_a_port(written: str) -> None:
    problem = only_problem(pool_with("half_life: 7d") + f'\nlisten: "{written}"')
    assert "listen: must be host:port" in problem


# --- TLS ----------------------------------------------------------------------------------------------------------


def tls_problems(folder: Path, tls: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems and warnings of a file with this `tls` section."""
    try:
        settings = parse(f"tls: {tls}\n{SMALLEST}", path=folder / "fairshare.yaml", environ={})
    except ConfigError as error:
        return error.problems, ()
    assert settings.gateway.tls is not None
    return (), settings.warnings


def test_a_certificate_and_its_key_are_read_beside_the_file(tmp_path: Path) -> None:
    Authority(tmp_path).issue(name="us", days=90)
    assert tls_problems(tmp_path, "{certificate: us.pem, key: us.key}") == ((), ())


def test_what_is_wrong_with_a_certificate_is_said(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue(name="us")
    authority.issue(name="them")
    (tmp_path / "text").write_text("no certificate")
    for tls, said in {
        "{certificate: us.pem, key: them.key}": "them.key is not the key of",
        "{certificate: us.pem, key: gone.key}": "gone.key is not there",
        "{certificate: text, key: us.key}": "no certificate and key in PEM",
        "{certificate: us.pem}": '"key" is missing',
        "us.pem": "must be a mapping",
    }.items():
        problems, _ = tls_problems(tmp_path, tls)
        assert len(problems) == 1
        assert said in problems[0]


def test_a_certificate_that_expires_soon_or_has_expired_and_a_key_that_others_can_read_are_warned_of(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    authority.issue(name="soon", days=10.1)
    authority.issue(name="late", days=-1)
    authority.issue(name="open", days=90).key.chmod(0o644)
    for name, said in {
        "soon": "soon.pem expires in 10 days",
        "late": "late.pem has expired",
        "open": "open.key can be used by others (mode 0644)",
    }.items():
        problems, warnings = tls_problems(tmp_path, f"{{certificate: {name}.pem, key: {name}.key}}")
        assert problems == ()
        assert len(warnings) == 1
        assert said in warnings[0]


def test_an_engine_may_be_reached_over_tls_and_say_who_signs_for_it(tmp_path: Path) -> None:
    ca_file = Authority(tmp_path).ca_file
    (tmp_path / "text").write_text("no certificate")

    def read_with(instance: str) -> GatewaySpec:
        text = SMALLEST.replace("http://127.0.0.1:9001", instance)
        return parse(text, path=tmp_path / "fairshare.yaml", environ={}).gateway

    (plain,) = read_with("https://engine").pools[0].instances
    assert (plain.url, plain.ca_file) == ("https://engine:443", None)
    (own,) = read_with('{url: "https://engine:8000", ca_file: ca.pem}').pools[0].instances
    assert own.ca_file == ca_file
    for instance, said in {
        '{url: "https://engine", ca_file: text}': "text holds no certificate in PEM",
        '{url: "https://engine", ca_file: gone}': "gone is not there",
        '{url: "http://engine", ca_file: ca.pem}': "http://engine:80 is not encrypted",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_with(instance)


# --- Notify -------------------------------------------------------------------------------------------------------


def notify(entry: str) -> str:
    return pool_with("half_life: 7d") + f"\nnotify: {{{entry}}}"


def test_a_webhook_has_an_address_and_a_secret_from_outside() -> None:
    spec = read(notify("url: 'https://h.example/x', secret: '${HOOK}'"), environ={"HOOK": "sign"}).gateway.notify
    assert spec is not None
    assert (spec.url, spec.secret, spec.allow_internal) == ("https://h.example/x", "sign", False)
    assert "sign" not in repr(spec)
    assert "needs a secret" in only_problem(notify("url: 'https://h.example/x'"))


@pytest.mark.parametrize("url", ["ftp://h/x", "https://", "h.example", "https://user:pw@h/x", "https://h:99999/"])
def test_a_webhook_address_that_cannot_work_is_refused_without_repeating_it(url: str) -> None:
    problem = only_problem(notify(f"url: '{url}', secret: '${{HOOK}}'"), {"HOOK": "sign"})
    assert "must be an address such as" in problem
    assert "pw" not in problem


def test_an_access_log_is_a_file_beside_the_configuration_or_standard_error(tmp_path: Path) -> None:
    def access_log(value: str) -> AccessLogSpec | None:
        return read(f"{SMALLEST}\naccess_log: {value}", path=tmp_path / "fairshare.yaml").gateway.access_log

    assert access_log("access.log") == AccessLogSpec(path=tmp_path / "access.log")
    assert access_log("stderr") == AccessLogSpec(path=None)
    assert access_log("none") is None
    assert read(SMALLEST).gateway.access_log is None
    assert "make the folder" in only_problem(f"{SMALLEST}\naccess_log: not-there/access.log")


def test_traces_have_an_address_and_maybe_a_part_that_is_sent() -> None:
    endpoint = "http://collector:4318/v1/traces"
    spec = read(f"{SMALLEST}\ntracing: {{endpoint: '{endpoint}', sample: 0.1}}").gateway.tracing
    assert spec == TracingSpec(endpoint=endpoint, sample=0.1)
    assert read(SMALLEST).gateway.tracing is None
    assert '"endpoint" is missing' in only_problem(f"{SMALLEST}\ntracing: {{sample: 1}}")
    assert "between 0 and 1" in only_problem(f"{SMALLEST}\ntracing: {{endpoint: '{endpoint}', sample: 2}}")
    assert "must be an address such as" in only_problem(f"{SMALLEST}\ntracing: {{endpoint: 'collector:4318'}}")


def test_traces_without_opentelemetry_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(config, "find_spec", find_none)
    text = f"{SMALLEST}\ntracing: {{endpoint: 'http://collector:4318/v1/traces'}}"
    assert "pip install 'fairshare[otel]'" in only_problem(text)


# --- Store --------------------------------------------------------------------------------------------------------


def test_without_a_word_the_store_is_a_file_beside_the_configuration() -> None:
    spec = read(pool_with("half_life: 7d"), path=Path("/etc/fs/fairshare.yaml")).gateway.store
    assert spec is not None
    assert spec.address == SqliteFile(Path("/etc/fs/fairshare.sqlite3"))
    assert read(pool_with("half_life: 7d") + "\nstore: none").gateway.store is None


def test_a_server_gets_its_password_from_outside() -> None:
    entry = "{url: 'postgresql://me@db:5433/accounts', password: '${PW}', keep: 32d}"
    spec = read(pool_with("half_life: 7d") + f"\nstore: {entry}", environ={"PW": "secret"}).gateway.store
    assert spec is not None
    assert spec.address == PostgresServer(host="db", port=5433, database="accounts", user="me", password="secret")
    assert spec.keep_seconds == 32 * 86400
    assert "secret" not in repr(spec) + str(spec.address)
    socket = read(pool_with("half_life: 7d") + "\nstore: 'postgresql://me@/accounts?host=/run/pg'").gateway.store
    assert socket is not None
    assert socket.address == PostgresServer(host="/run/pg", database="accounts", user="me")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("'postgresql://me:hunter2@db/accounts'", "must not hold a password"),
        ("'postgresql://db/accounts'", "must be sqlite:PATH"),
        ("'postgresql://me@db'", "must be sqlite:PATH"),
        ("'postgresql://me@db:x/accounts'", "must be sqlite:PATH"),
        ("'mysql://me@db/accounts'", "must be sqlite:PATH"),
        ("'sqlite:'", "must be sqlite:PATH"),
        ("{url: none, keep: 40d}", "write store: none"),
        ("{keep: 31d}", "must be at least 32d"),
        ("{url: 'sqlite:x', password: '${PW}'}", "has no password"),
    ],
)
def test_a_store_that_cannot_be_is_refused(entry: str, message: str) -> None:
    problem = only_problem(pool_with("half_life: 7d") + f"\nstore: {entry}", {"PW": "secret"})
    assert message in problem
    assert "hunter2" not in problem


def test_isolated_prefixes_need_a_secret_that_cannot_be_guessed(tmp_path: Path) -> None:
    isolated = pool_with("isolate_prefixes: team, prefix_secret: '${SALT}'")
    (pool,) = read(isolated, {"SALT": "5" * 32}).gateway.pools
    assert pool.prefix_secret == b"5" * 32
    assert "555" not in repr(pool)
    assert "must have at least 32 characters" in only_problem(isolated, {"SALT": "5" * 31})
    assert "needs a secret" in only_problem(pool_with("isolate_prefixes: team"))
    assert "isolate_prefixes: team" in only_problem(pool_with("prefix_secret: '${SALT}'"), {"SALT": "5" * 32})
    assert read(pool_with("balance: prefix")).gateway.pools[0].prefix_secret is None


def test_a_whole_number_with_a_zero_in_front_is_refused_because_readers_of_yaml_differ_about_it() -> None:
    with pytest.raises(ConfigError, match='without a zero in front, found "010"'):
        parse(
            "pools: [{name: a, capacity: 010, shares: {}, models: [m], instances: ['http://h:1']}]",
            path=Path("f.yaml"),
            environ={},
        )


def test_adaptive_capacity_needs_hold() -> None:
    text = "pools: [{name: a, capacity: 4, trim: true, shares: {}, models: [m], instances: ['http://h:1']%s}]"
    assert parse(text % "", path=Path("f.yaml"), environ={}).gateway.pools[0].trim
    with pytest.raises(ConfigError, match="trim: needs dispatch: hold, found pass"):
        parse(text % ", dispatch: pass", path=Path("f.yaml"), environ={})


# --- replicas -----------------------------------------------------------------------------------------------------


def replicas(entry: str, store: str = "postgresql://fairshare@db.example/fairshare") -> str:
    return pool_with("half_life: 7d") + f"\nstore: {store}\nreplicas: {{{entry}}}"


SECRET = "0123456789abcdef" * 2


def test_replicas_know_each_other_by_a_secret() -> None:
    entry = "listen: '0.0.0.0:7000', advertise: 'gateway-1:7000', secret: '${PEERS}'"
    spec = read(replicas(entry), environ={"PEERS": SECRET}).gateway.replicas
    assert spec is not None
    assert (str(spec.listen), spec.advertise, spec.secret) == ("0.0.0.0:7000", "gateway-1:7000", SECRET.encode())
    assert SECRET not in repr(spec)


def test_a_pod_tells_its_peers_its_own_address() -> None:
    text = replicas("listen: '0.0.0.0:7000', advertise: '${POD_IP}:7000', secret: '${PEERS}'")
    for address, shown in (("10.0.0.7", "10.0.0.7:7000"), ("fd00::7", "[fd00::7]:7000")):
        spec = read(text, environ={"PEERS": SECRET, "POD_IP": address}).gateway.replicas
        assert spec is not None
        assert spec.advertise == shown
    assert "POD_IP, which is not set" in only_problem(text, {"PEERS": SECRET})


def test_the_peer_link_is_encrypted_with_a_certificate_that_the_authority_of_all_signed(tmp_path: Path) -> None:
    given = Authority(tmp_path).peer()
    text = replicas(
        "listen: 'a:7000', secret: '${PEERS}', machines: 3, tls: {certificate: peer.pem, key: peer.key, ca: ca.pem}"
    )
    settings = parse(text, path=tmp_path / "fairshare.yaml", environ={"PEERS": SECRET})
    spec = settings.gateway.replicas
    assert spec is not None
    assert (spec.machines, spec.tls) == (3, given)
    given.ca.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"replicas\.tls\.ca.*holds no certificate in PEM"):
        parse(text, path=tmp_path / "fairshare.yaml", environ={"PEERS": SECRET})


def test_replicas_need_a_secret_that_cannot_be_guessed_and_a_store() -> None:
    assert "openssl rand" in only_problem(replicas("listen: 'a:7000'"))
    short = replicas("listen: 'a:7000', secret: '${PEERS}'")
    assert "at least 32 characters" in only_problem(short, {"PEERS": SECRET[1:]})
    assert "needs a store" in only_problem(replicas("listen: 'a:7000', secret: '${PEERS}'", "none"), {"PEERS": SECRET})
    nowhere = replicas("listen: 'a:7000', advertise: '0.0.0.0:7000', secret: '${PEERS}'")
    assert "peers can reach" in only_problem(nowhere, {"PEERS": SECRET})
