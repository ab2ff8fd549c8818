"""A gateway and its store, when either is killed, stopped, or told to end."""

import contextlib
import itertools
import json
import os
import resource
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, keys_made, started
from fairshare.gateway.ledger import BATCH_SECONDS
from support.postgres import Postgres

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: 8
    half_life: 0
    shares: {{search: 1/2}}
    models: [tiny]
    instances: [{engine}]
teams:
  - name: search
    keys: [{key}]
store: {store}
"""


class Site:
    def __init__(self, folder: Path, engine: EngineProcess, store: str) -> None:
        self.key, entry = keys_made("--team", "search")
        self.config = folder / "fairshare.yaml"
        self.config.write_text(CONFIG.format(engine=engine.url, key=entry, store=store))

    def ask(self, gateway: GatewayProcess, content: str = "hello", *, request_id: str = "") -> str:
        """Asks, and returns what the engine said."""
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {self.key}", "x-request-id": request_id},
            json={"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with started(lambda: EngineProcess("--step-ms", "1")) as engine:
        yield engine


def written(gateway: GatewayProcess) -> float:
    return gateway.metric("fairshare_ledger_written_total")


def test_a_gateway_that_is_killed_has_its_account_and_usage_when_it_comes_back(
    tmp_path: Path, engine: EngineProcess
) -> None:
    site = Site(tmp_path, engine, "sqlite:accounts.sqlite3")
    with started(lambda: GatewayProcess(site.config)) as gateway:
        for _ in range(3):
            site.ask(gateway)
        eventually(lambda: written(gateway) == 3, "the batch")
        usage = gateway.team("search")["usage"]
        gateway.signal(signal.SIGKILL)
    with started(lambda: GatewayProcess(site.config)) as gateway:
        assert gateway.team("search")["usage"] == usage > 0
        site.ask(gateway)
        gateway.signal(signal.SIGTERM)
        gateway.wait()
    with sqlite3.connect(tmp_path / "accounts.sqlite3") as store:
        rows = store.execute("select team, status, cost_units from account").fetchall()
        (saved,) = store.execute("select cost_units from usage").fetchone()
    store.close()
    assert [row[:2] for row in rows] == [("search", 200)] * 4
    # The account adds up to what the pool was charged.
    assert sum(row[2] for row in rows) == pytest.approx(saved)


def test_a_gateway_that_is_killed_under_load_loses_no_more_than_its_last_batch(
    tmp_path: Path, engine: EngineProcess
) -> None:
    site = Site(tmp_path, engine, "sqlite:accounts.sqlite3")
    answered: list[tuple[str, float]] = []

    def client(number: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            for count in itertools.count():
                site.ask(gateway, request_id=f"r{number}-{count}")
                answered.append((f"r{number}-{count}", time.monotonic()))

    with started(lambda: GatewayProcess(site.config)) as gateway:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: written(gateway) > 20, "some batches")
        killed_at = time.monotonic()
        gateway.signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    with contextlib.closing(sqlite3.connect(tmp_path / "accounts.sqlite3")) as store:
        kept = {name for (name,) in store.execute("select request_id from account")}
        charged, saved = (
            store.execute(f"select sum(cost_units) from {of}").fetchone()[0] for of in ("account", "usage")
        )
    lost = [killed_at - at for name, at in answered if name not in kept]
    assert len(answered) > len(lost)
    # A batch is written once a second; a busy machine gets as much again.
    assert max(lost, default=0.0) < 2 * BATCH_SECONDS
    assert charged == pytest.approx(saved)


def test_a_postgresql_that_is_stopped_delays_the_account_and_nothing_else(
    tmp_path: Path, engine: EngineProcess, postgres: Postgres
) -> None:
    address = postgres.new_database()
    store = f"postgresql://{address.user}@/{address.database}?host={address.host}"
    site = Site(tmp_path, engine, f'"{store}"')
    with started(lambda: GatewayProcess(site.config)) as gateway:
        site.ask(gateway)
        eventually(lambda: written(gateway) == 1, "the first batch")
        processes = backends(postgres, address.database)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            site.ask(gateway)
            eventually(lambda: gateway.metric("fairshare_store_up") == 0, "the outage was noticed")
            assert any("account of requests" in finding for finding in gateway.pool()["findings"])
            site.ask(gateway)
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
        eventually(lambda: written(gateway) == 3, "everything that waited")
        assert gateway.metric("fairshare_store_up") == 1
        assert gateway.metric("fairshare_ledger_dropped_total") == 0
        told = [json.loads(line) for line in gateway.err if '"fairshare.ledger"' in line]
        assert [line["level"] for line in told] == ["error", "warning"]


def backends(postgres: Postgres, database: str) -> list[int]:
    """The server itself, so that nobody new gets in, and the processes that serve this database."""
    serving: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            title = (process / "cmdline").read_bytes().decode()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if parent == postgres.pid and database in title.split():
            serving.append(int(process.name))
    assert serving
    return [postgres.pid, *serving]


class Disk:
    """A folder whose file system is really full when it is told to be: a small one of its own where that may be
    mounted (root), else files that the gateway may not make any longer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
        self._is_mounted = mounted.returncode == 0
        self._filler = folder / "filler"

    def fill(self, gateway: GatewayProcess) -> None:
        if self._is_mounted:
            with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            return
        largest = max(path.stat().st_size for path in self.folder.iterdir())
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def empty(self, gateway: GatewayProcess) -> None:
        if self._is_mounted:
            self._filler.unlink()
        else:
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def close(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


def test_a_full_disk_delays_the_account_and_loses_nothing(tmp_path: Path, engine: EngineProcess) -> None:
    with contextlib.closing(Disk(tmp_path / "disk")) as disk:
        site = Site(tmp_path, engine, "sqlite:disk/accounts.sqlite3")
        asked = 0

        def ask_until_it_is_noticed() -> bool:
            nonlocal asked
            site.ask(gateway)
            asked += 1
            return gateway.metric("fairshare_store_up") == 0

        with started(lambda: GatewayProcess(site.config)) as gateway:
            site.ask(gateway)
            asked += 1
            eventually(lambda: written(gateway) == 1, "the first batch")
            disk.fill(gateway)
            eventually(ask_until_it_is_noticed, "the disk is full")
            for _ in range(3):
                site.ask(gateway)
                asked += 1
            assert written(gateway) < asked
            assert any("account of requests" in finding for finding in gateway.pool()["findings"])
            disk.empty(gateway)
            eventually(lambda: written(gateway) == asked, "everything that waited")
            assert gateway.metric("fairshare_store_up") == 1
            assert gateway.metric("fairshare_ledger_dropped_total") == 0
            gateway.signal(signal.SIGTERM)
            assert gateway.wait() == 0
            told = [json.loads(line) for line in gateway.err if '"fairshare.ledger"' in line]
            assert [line["level"] for line in told] == ["error", "warning"]
        with contextlib.closing(sqlite3.connect(disk.folder / "accounts.sqlite3")) as store:
            assert store.execute("pragma integrity_check").fetchone() == ("ok",)
            count, charged = store.execute("select count(*), sum(cost_units) from account").fetchone()
            (saved,) = store.execute("select cost_units from usage").fetchone()
        assert count == asked
        assert charged == pytest.approx(saved)


ADMIN_PATHS = (
    "/",
    "/metrics",
    "/api/v1/pools",
    "/api/v1/state",
    "/api/v1/requests",
    "/api/v1/explain?of=canary-request",
    "/api/v1/explain?of=search",
    "/api/v1/history?pool=chat&seconds=600",
    "/api/v1/dump",
    "/api/v1/keys",
    "/api/v1/audit",
    "/api/v1/report",
)
"""What the admin port shows: the status page and its state, explanations, the decision log, the dump, the accounts."""


def test_no_secret_and_no_word_of_a_prompt_or_answer_is_anywhere_in_the_store_the_log_or_the_admin_port(
    tmp_path: Path, engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, engine, "sqlite:accounts.sqlite3")
    site.config.write_text(site.config.read_text() + "access_log: access.log\n")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    monkeypatch.setenv("TMPDIR", str(dumps))
    canary = "kanarienvogel-in-the-prompt"
    answers: list[str] = []
    with started(lambda: GatewayProcess(site.config)) as gateway:
        said = site.ask(gateway, canary, request_id="canary-request")
        assert len(said) > 8
        headers = {"Authorization": f"Bearer {site.key}"}
        for body in (b'{"model": "tiny", "messages": "%b"}' % canary.encode(), b"{%b" % canary.encode()):
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", headers=headers, content=body)
            assert answer.status_code == 400
            answers.append(answer.text)
        httpx.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {site.key}x"})
        eventually(lambda: written(gateway) >= 3, "the batch")
        for path in ADMIN_PATHS:
            answer = httpx.get(f"{gateway.admin_url}{path}")
            assert answer.status_code == 200, (path, answer.text)
            answers.append(answer.text)
        with httpx.stream("GET", f"{gateway.admin_url}/api/v1/live") as live:
            answers.append(next(live.iter_text()))
        gateway.signal(signal.SIGUSR1)
        gateway.line(gateway.err, "The decision state was written")
        gateway.signal(signal.SIGTERM)
        gateway.wait()
        log = "\n".join(gateway.err + gateway.out)
    with sqlite3.connect(tmp_path / "accounts.sqlite3") as store:
        dump = "\n".join(store.iterdump())
    store.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"dumps"}
    assert "canary-request" in (tmp_path / "access.log").read_text()
    assert "canary-request" in dump
    secret = site.key.removeprefix("fs-")
    for place in (log, dump, *answers, *(path.read_bytes().decode("latin-1") for path in files)):
        assert canary not in place
        assert said not in place
        assert secret not in place


def test_history_and_old_requests_are_there_after_a_restart(engine: EngineProcess, tmp_path: Path) -> None:
    site = Site(tmp_path, engine, "sqlite:history.sqlite3")

    def history(gateway: GatewayProcess) -> dict[str, Any]:
        answer = httpx.get(f"{gateway.admin_url}/api/v1/history?pool=chat&seconds=172800&team=search")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def explained(gateway: GatewayProcess) -> dict[str, Any]:
        answer = httpx.get(f"{gateway.admin_url}/api/v1/explain?of=asked-before")
        assert answer.status_code == 200, answer.text
        return answer.json()

    with started(lambda: GatewayProcess(site.config)) as gateway:
        site.ask(gateway, request_id="asked-before")
        assert explained(gateway)["steps"][1]["numbers"]["capacity"] == 8
        eventually(lambda: len(history(gateway)["at"]) > 0, "the first look")
        ended_at = history(gateway)["at"][-1]
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    with started(lambda: GatewayProcess(site.config)) as gateway:
        restored = history(gateway)
        assert restored["kept"]
        assert restored["at"][0] >= ended_at - 60.0
        assert restored["teams"]["search"]["owns"][0] == 4.0
        assert [step["what"] for step in explained(gateway)["steps"]] == ["arrived", "sent", "ended"]
        assert "older than the decision log" in explained(gateway)["steps"][1]["sentence"]
