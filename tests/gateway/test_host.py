"""What doctor says of the machine and of the store."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fairshare.config import parse
from fairshare.gateway.host import Host, examine_store, judge_host, look_at_host
from fairshare.storage.schema import REVISION

ENOUGH = Host(open_files=1 << 20, backlog=4096, ports=28232, cores=8)
CONFIG = "pools: [{name: a, capacity: 1, shares: {}, models: [m], instances: ['http://h:1']}]"


def spec_in(path: Path):
    return parse(CONFIG, path=path / "fairshare.yaml", environ={}).gateway


def test_a_machine_with_enough_of_everything_has_no_findings(tmp_path: Path) -> None:
    assert judge_host(ENOUGH, spec_in(tmp_path)) == []


def test_each_limit_that_is_too_low_is_said_with_the_line_that_mends_it(tmp_path: Path) -> None:
    poor = Host(open_files=1024, backlog=128, ports=100, cores=1)
    found = {finding.id: finding for finding in judge_host(poor, spec_in(tmp_path))}
    assert list(found) == ["few-open-files", "short-backlog", "few-ports", "one-core"]
    assert "LimitNOFILE=16200" in found["few-open-files"].fix
    assert found["short-backlog"].fix == "sysctl -w net.core.somaxconn=4096"


def test_what_a_machine_does_not_say_and_unlimited_files_are_no_finding(tmp_path: Path) -> None:
    assert judge_host(replace(ENOUGH, backlog=None, ports=None, open_files=-1), spec_in(tmp_path)) == []


def test_this_machine_says_something() -> None:
    assert look_at_host().cores >= 1


def test_a_store_that_is_no_database_is_an_error_and_one_that_is_not_there_yet_is_left_alone(tmp_path: Path) -> None:
    def ids() -> list[str]:
        return [finding.id for finding in asyncio.run(examine_store(spec_in(tmp_path), wall=lambda: 0.0))]

    assert ids() == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "fairshare.sqlite3").write_bytes(b"this is no database, whatever its name says" * 50)
    assert ids() == ["store-unusable"]


def test_a_store_that_waits_for_an_upgrade_or_is_too_new_is_said(tmp_path: Path, migrated_file: Path) -> None:
    path = tmp_path / "fairshare.sqlite3"
    path.write_bytes(migrated_file.read_bytes())

    def found_at(revision: str, compatible: str) -> list[tuple[str, str]]:
        with closing(sqlite3.connect(path)) as store, store:
            store.execute("update alembic_version set version_num = ?", (revision,))
            store.execute("update compatibility set revision = ?", (compatible,))
        found = asyncio.run(examine_store(spec_in(tmp_path), wall=lambda: 0.0))
        return [(finding.id, finding.severity.value) for finding in found]

    assert found_at(REVISION, REVISION) == []
    assert found_at("0001", "0001") == [("store-older", "warning")]
    assert found_at("9999", REVISION) == []
    assert found_at("9999", "9998") == [("store-too-new", "error")]
