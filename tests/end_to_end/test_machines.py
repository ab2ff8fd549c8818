"""Two gateways that share their pools over a PostgreSQL and a TCP peer link, as two machines would, while things break.

Each takes as long as leases do: `make test-replicas`.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import load, most_running, site
from end_to_end.test_store import backends
from support.postgres import Postgres
from support.relay import Relay

LEASE_SECONDS = 5.0


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "5")) as engine:
        yield engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Machines:
    """Two gateways, and a relay before the store and before each of them."""

    def __init__(
        self,
        folder: Path,
        engine: EngineProcess,
        postgres: Postgres,
        stack: ExitStack,
        *,
        longest_request: str = "20s",
        run: bool = True,
    ) -> None:
        database = postgres.new_database(migrated=True)
        self.database = database.database
        self.postgres = postgres
        self.socket_folder = database.host
        self.store = Relay(f"{database.host}/.s.PGSQL.5432")
        stack.callback(self.store.close)
        secret = folder / "peers.key"
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o600)
        self._stack = stack
        self.configs: list[Path] = []
        self.links: list[Relay] = []
        self.gateways: list[GatewayProcess] = []
        self.keys: dict[str, str] = {}
        for name in ("one", "two"):
            port = free_port()
            link = Relay(("127.0.0.1", port))
            stack.callback(link.close)
            self.links.append(link)
            home = folder / name
            home.mkdir()
            replicas = f"{{listen: 127.0.0.1:{port}, advertise: 127.0.0.1:{link.port}, secret_file: {secret}}}"
            store = f"postgresql://fairshare@127.0.0.1:{self.store.port}/{self.database}"
            here = site(home, engine, store=store, more=f"replicas: {replicas}", longest_request=longest_request)
            if self.keys:
                # One site: the same keys everywhere.
                here.config.write_text(here.config.read_text().replace(_teams(here.config), self._teams))
            else:
                self.keys, self._teams = here.keys, _teams(here.config)
            self.configs.append(here.config)
            if run:
                self.start(here.config)

    def start(self, config: Path, *, module: str = "fairshare") -> GatewayProcess:
        gateway = self._stack.enter_context(started(lambda: GatewayProcess(config, module=module)))
        self.gateways.append(gateway)
        return gateway

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def role(self, gateway: GatewayProcess) -> str:
        return gateway.pool()["replication"]["role"]

    def epoch(self, gateway: GatewayProcess) -> int:
        return gateway.pool()["replication"]["epoch"]

    def owner(self) -> GatewayProcess:
        """The one that decides."""
        found: list[GatewayProcess] = []

        def one() -> bool:
            found[:] = [gateway for gateway in self.gateways if self.role(gateway) == "owner"]
            return len(found) == 1

        eventually(one, "one owner")
        return found[0]

    def rows(self, query: str) -> list[str]:
        """What the store answers, a line for each row."""
        arguments = ("-h", self.socket_folder, "-U", "fairshare", "-d", self.database, "-Atc", query)
        return self.postgres.tool("psql", *arguments).decode().splitlines()

    def other(self) -> GatewayProcess:
        owner = self.owner()
        return next(gateway for gateway in self.gateways if gateway is not owner)


def _teams(config: Path) -> str:
    text = config.read_text()
    return text[text.index("teams:") : text.index("store:")]


@pytest.fixture
def machines(tmp_path: Path, engine: EngineProcess, postgres: Postgres) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, engine, postgres, stack)


@pytest.mark.replicas
def test_two_machines_keep_one_promise_and_one_that_ends_hands_over_without_a_failed_request(
    machines: Machines, engine: EngineProcess
) -> None:
    with load(machines.urls, machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        assert most_running(engine, 2.0) <= 8
        # Both show what only the owner knows.
        for gateway in machines.gateways:
            eventually(lambda: gateway.pool()["held"] > 0 and gateway.pool()["in_flight"] >= 4, "both see")  # noqa: B023
    assert not flood.failures
    owner, other = machines.owner(), machines.other()
    with load([other.url], machines.keys["search"], clients=6) as rest:
        eventually(lambda: rest.completed > 5, "load")
        owner.signal(signal.SIGTERM)
        eventually(lambda: machines.role(other) == "owner", "the other decides")
        assert owner.wait() == 0
        before = rest.completed
        eventually(lambda: rest.completed > before + 10, "load after it")
    assert not rest.failures
    assert other.metric("fairshare_degraded_requests_total") == 0
    assert machines.epoch(other) == 2
    agrees_with_the_account(machines, other)


@pytest.mark.replicas
def test_nothing_that_machines_tell_each_other_or_the_store_has_a_word_of_a_request_or_a_key(
    machines: Machines,
) -> None:
    said: list[str] = []
    for gateway in machines.gateways:
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {machines.keys['search']}"},
            json={"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "kanarienvogel"}]},
            timeout=30,
        )
        assert answer.status_code == 200
        said.append(answer.json()["choices"][0]["message"]["content"])
        eventually(lambda: gateway.metric("fairshare_ledger_written_total") == 1, "its record")  # noqa: B023
    between = b"".join(bytes(link.carried) for link in machines.links)
    assert b"search" in machines.store.carried
    assert b"chat" in between
    carried = bytes(machines.store.carried) + between
    for word in ("kanarienvogel", machines.keys["search"].removeprefix("fs-"), *said):
        assert word.encode() not in carried


def agrees_with_the_account(machines: Machines, owner: GatewayProcess) -> None:
    """The pool's usage (without decay) is what the account of all machines adds up to: each charge counts once."""
    eventually(lambda: owner.pool()["in_flight"] == 0, "nothing is in flight")
    query = "select coalesce(sum(cost_units), 0) from account where team = 'search'"

    def equal() -> bool:
        charged = float(machines.rows(query)[0])
        return owner.team("search")["usage"] == pytest.approx(charged, rel=1e-9)

    eventually(equal, "usage is what the account adds up to")


def settled(machines: Machines) -> None:
    for gateway in machines.gateways:
        eventually(lambda: gateway.metric("fairshare_unsaved_charges") == 0, "every charge is saved")  # noqa: B023
    agrees_with_the_account(machines, machines.owner())


@pytest.mark.replicas
def test_an_owner_that_is_stopped_past_its_lease_decides_nothing_when_it_goes_on(
    machines: Machines, engine: EngineProcess
) -> None:
    owner, other = machines.owner(), machines.other()
    with load([other.url], machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        owner.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        eventually(lambda: machines.role(other) == "owner", "the other takes the lease")
        taken_after = time.monotonic() - stopped_at
        owner.signal(signal.SIGCONT)
        eventually(lambda: machines.role(owner) == "follower", "the old owner follows")
        assert machines.epoch(owner) == machines.epoch(other) == 2
        assert most_running(engine, 2.0) <= 8
    print(f"taken after {taken_after:.1f} s")
    assert taken_after < LEASE_SECONDS + 3.0
    assert not flood.failures
    settled(machines)


@pytest.mark.replicas
def test_without_a_store_both_go_on_alone_for_a_while_and_come_together_again(
    machines: Machines, engine: EngineProcess
) -> None:
    with load(machines.urls, machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        processes = backends(machines.postgres, machines.database)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            for gateway in machines.gateways:
                eventually(lambda: machines.role(gateway) == "degraded", "it goes on alone")  # noqa: B023
                assert any("decided alone" in finding for finding in gateway.pool()["findings"])
                assert gateway.metric("fairshare_degraded{") == 1
            # Each over its half of C, and what was in flight before.
            assert most_running(engine, 2.0) <= 8 + 4
            before = flood.completed
            eventually(lambda: flood.completed > before + 20, "requests are served")
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
        back_at = time.monotonic()
        machines.owner()
        eventually(
            lambda: all(gateway.metric("fairshare_degraded{") == 0 for gateway in machines.gateways), "no longer alone"
        )
        print(f"together again after {time.monotonic() - back_at:.1f} s")
        assert most_running(engine, 2.0) <= 8
    assert not flood.failures
    settled(machines)


@pytest.mark.replicas
def test_a_replica_that_is_cut_off_goes_on_alone_over_its_part_and_is_counted_as_phantoms(
    machines: Machines, engine: EngineProcess
) -> None:
    owner, other = machines.owner(), machines.other()
    link = machines.links[machines.gateways.index(owner)]
    with load(machines.urls, machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        link.cut()
        eventually(lambda: machines.role(other) == "degraded", "it goes on alone")
        assert machines.role(owner) == "owner"
        assert most_running(engine, 2.0) <= 8 + 4
        link.mend()
        eventually(lambda: machines.role(other) == "follower", "it follows again")
        eventually(lambda: owner.pool()["replication"]["phantom_slots"] == 0, "it has announced what it runs")
        assert most_running(engine, 2.0) <= 8
    assert not flood.failures
    settled(machines)


@pytest.mark.replicas
def test_a_store_that_answers_seconds_late_costs_no_request(machines: Machines, engine: EngineProcess) -> None:
    with load(machines.urls, machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        machines.store.delay(3.0)
        before = flood.completed
        # Renewals fail, the lease ends: nobody decides for the other, and neither does the other for it.
        eventually(lambda: flood.completed > before + 60, "requests are served")
        assert most_running(engine, 2.0) <= 8 + 4
        machines.store.delay(0.0)
        machines.owner()
        eventually(
            lambda: all(gateway.metric("fairshare_degraded{") == 0 for gateway in machines.gateways), "no longer alone"
        )
    assert not flood.failures
    settled(machines)


@pytest.mark.replicas
def test_an_owner_that_is_killed_takes_only_its_own_requests_with_it(machines: Machines, engine: EngineProcess) -> None:
    owner, other = machines.owner(), machines.other()
    with load([other.url], machines.keys["search"], clients=12) as flood:
        eventually(lambda: flood.completed > 10, "load")
        owner.signal(signal.SIGKILL)
        killed_at = time.monotonic()
        eventually(lambda: machines.role(other) == "owner", "the other takes the lease")
        print(f"owned again after {time.monotonic() - killed_at:.1f} s")
        with load([other.url], machines.keys["ads"], clients=4) as owned:
            eventually(lambda: owned.completed > 8, "the other team's share")
        assert not owned.failures
    assert not flood.failures


@pytest.mark.replicas
def test_a_machine_that_starts_while_the_store_is_away_decides_over_its_part_only(
    tmp_path: Path, engine: EngineProcess
) -> None:
    (tmp_path / "peers.key").write_text("0123456789abcdef" * 4)
    (tmp_path / "peers.key").chmod(0o600)
    nobody = f"postgresql://fairshare@127.0.0.1:{free_port()}/fairshare"
    replicas = "replicas: {listen: '127.0.0.1:0', secret_file: peers.key, machines: 4}"
    here = site(tmp_path, engine, store=nobody, more=replicas)
    with started(lambda: GatewayProcess(here.config)) as gateway:
        assert any("decided alone" in found and "1/4 of the slots" in found for found in gateway.pool()["findings"])
        with load([gateway.url], here.keys["search"], clients=8) as alone:
            eventually(lambda: alone.completed > 8, "requests are served")
            assert most_running(engine, 2.0) <= 8 // 4
    assert not alone.failures
