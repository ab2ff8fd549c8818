"""`fairshare doctor`, on engines in memory."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairshare.cli import program
from fairshare.cli.doctor import UNSEEN, UNSEEN_UNLESS_PROBED
from fairshare.gateway import engine_http, host
from fairshare.gateway.engine_http import Failure
from gateway.fake_engines import FakeEngine, FakeNetwork

HEX = hashlib.sha256(b"fs-search").hexdigest()
CONFIG = f"""
pools:
  - {{name: chat, capacity: 16, shares: {{search: 1}}, models: [tiny], instances: [http://one:80, http://two:80]}}
  - {{name: batch, capacity: 4, shares: {{search: 1}}, models: {{big: tiny}}, instances: [http://three:80]}}
teams:
  - name: search
    keys: [{{sha256: "{HEX}"}}]
"""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    info = {"policy": "priority", "max_num_seqs": 64}
    network = FakeNetwork(**{f"{name}:80": FakeEngine(server_info=info) for name in ("one", "two", "three")})
    monkeypatch.setattr(engine_http, "ask", network)
    enough = host.Host(open_files=1 << 20, backlog=4096, ports=28232, cores=8)
    monkeypatch.setattr(host, "look_at_host", lambda: enough)
    return network


def doctor(tmp_path: Path, *arguments: str, config: str = CONFIG) -> tuple[int, list[str]]:
    path = tmp_path / "fairshare.yaml"
    path.write_text(config)
    result = CliRunner().invoke(program(), ["doctor", "-c", str(path), *arguments], catch_exceptions=True)
    return result.exit_code, (result.output or str(result.exception)).splitlines()


def test_engines_in_order_are_shown_with_what_they_are_and_end_with_0(tmp_path: Path, network: FakeNetwork) -> None:
    engine = "vLLM 0.32.0, tiny (2048 tokens), KV cache for 1048576 tokens, 64 seats, policy priority"
    assert doctor(tmp_path) == (
        0,
        [
            "pool chat: 16 slots on 2 engines",
            f"  http://one:80: {engine}",
            f"  http://two:80: {engine}",
            "  nothing to say",
            "pool batch: 4 slots on 1 engine",
            f"  http://three:80: {engine}",
            "  nothing to say",
            "not seen from outside; see how each vLLM is started:",
            *(f"  {line}" for line in (UNSEEN, UNSEEN_UNLESS_PROBED)),
        ],
    )


def test_what_breaks_a_promise_is_said_with_why_and_the_fix_and_ends_with_1(
    tmp_path: Path, network: FakeNetwork
) -> None:
    network["two:80"].server_info = {"policy": "fcfs", "max_num_seqs": 64}
    code, lines = doctor(tmp_path)
    assert code == 1
    at = lines.index("  error priority-ignored: http://two:80 of pool chat runs with --scheduling-policy fcfs.")
    assert lines[at + 1].startswith("    why: It answers 200 and ignores every priority")
    assert lines[at + 2] == "    fix: Restart it with --scheduling-policy priority."


def test_what_is_only_worth_knowing_ends_with_0(tmp_path: Path, network: FakeNetwork) -> None:
    network["one:80"].version = "0.31.0"
    code, lines = doctor(tmp_path)
    assert code == 0
    assert any(line.startswith("  warning versions-differ:") for line in lines)


def test_an_engine_that_is_down_ends_with_1(tmp_path: Path, network: FakeNetwork) -> None:
    network["three:80"].silent = Failure.UNREACHABLE
    code, lines = doctor(tmp_path)
    assert code == 1
    assert "  http://three:80: it is unreachable" in lines


def test_only_the_pools_that_were_asked_for_are_examined(tmp_path: Path, network: FakeNetwork) -> None:
    code, lines = doctor(tmp_path, "--pool", "batch")
    assert (code, lines[0]) == (0, "pool batch: 4 slots on 1 engine")
    assert network["one:80"].asked == []


def test_a_pool_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path, network: FakeNetwork) -> None:
    code, lines = doctor(tmp_path, "--pool", "chats")
    assert code == 1
    assert "has no pool chats; it has chat, batch" in lines[0]


def test_a_configuration_that_cannot_be_used_is_said_as_check_says_it(tmp_path: Path, network: FakeNetwork) -> None:
    code, lines = doctor(tmp_path, config=CONFIG.replace("capacity: 16", "capacity: many"))
    assert code == 1
    assert "pools[0].capacity" in lines[0]
    assert network["one:80"].asked == []


def test_as_json_everything_is_one_object(tmp_path: Path, network: FakeNetwork) -> None:
    network["two:80"].server_info = {"policy": "fcfs", "max_num_seqs": 64}
    code, lines = doctor(tmp_path, "--json")
    found = json.loads("\n".join(lines))
    assert (code, found["sound"], found["here"]) == (1, False, [])
    assert [finding["id"] for finding in found["pools"][0]["findings"]] == ["priority-ignored"]


def test_a_machine_with_too_little_is_said_after_the_pools(
    tmp_path: Path, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "look_at_host", lambda: host.Host(open_files=64, backlog=4096, ports=28232, cores=8))
    code, lines = doctor(tmp_path)
    assert code == 0
    assert lines[lines.index("this machine and the store:") + 1].startswith("  warning few-open-files:")


def test_sources_are_asked_once_and_the_engines_that_they_name_are_looked_at(
    tmp_path: Path, network: FakeNetwork
) -> None:
    pools = (
        "  - {name: chat, capacity_per_instance: 8, shares: {search: 1}, models: [tiny], instances: [{file: e.yaml}]}"
    )
    config = CONFIG.replace(CONFIG[CONFIG.index("  - {name: chat") : CONFIG.index("teams:")], f"{pools}\n")
    (tmp_path / "e.yaml").write_text("[http://one:80, http://two:80]")
    code, lines = doctor(tmp_path, config=config)
    assert (code, lines[0], lines[-1]) == (0, "pool chat: 16 slots on 2 engines", "  nothing to say")
    (tmp_path / "e.yaml").write_text("[http://one:80")
    code, lines = doctor(tmp_path, config=config)
    assert code == 1
    assert lines[0] == "pool chat: 0 slots on 0 engines"
    assert [line.split()[1] for line in lines if line.startswith(("  error", "  warning"))] == [
        "pool-empty:",
        "source-failed:",
    ]
