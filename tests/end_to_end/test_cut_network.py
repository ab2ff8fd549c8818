"""Two gateways, each in a network namespace of its own, while the network between them swallows what they say.

They speak TLS, as machines should.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import Load, load, most_running, site
from support.certificates import Authority
from support.namespaces import HUB_ADDRESS, Machine, Network
from support.postgres import Postgres
from support.relay import Relay

PEER_PORT = 7000


class Placed(GatewayProcess):
    """A gateway on a machine of its own; whoever asks it is there too."""

    def __init__(self, config: Path, machine: Machine) -> None:
        self._machine = machine
        with machine.inside():
            super().__init__(config)

    def pool(self, name: str = "chat") -> dict[str, Any]:
        with self._machine.inside():
            return super().pool(name)

    def metric(self, line_start: str) -> float:
        with self._machine.inside():
            return super().metric(line_start)

    @property
    def role(self) -> str:
        return self.pool()["replication"]["role"]


class Site:
    """Two machines with a gateway each; the engine and the way to the store are where the test is."""

    def __init__(self, folder: Path, postgres: Postgres, stack: ExitStack) -> None:
        database = postgres.new_database(migrated=True)
        self.network = Network(2)
        stack.callback(self.network.close)
        self.engine = stack.enter_context(
            started(lambda: EngineProcess("--max-num-seqs", "16", "--step-ms", "5", "--host", HUB_ADDRESS))
        )
        authority = Authority(folder)
        secret = folder / "peers.key"
        secret.write_text("0123456789abcdef" * 4)
        secret.chmod(0o600)
        self.gateways: list[Placed] = []
        self.stores: list[Relay] = []
        """What each machine reaches the store through."""
        text = ""
        for number, machine in enumerate(self.network.machines):
            store = Relay(f"{database.host}/.s.PGSQL.5432", listen=HUB_ADDRESS)
            stack.callback(store.close)
            self.stores.append(store)
            address = f"postgresql://fairshare@{HUB_ADDRESS}:{store.port}/{database.database}"
            shown = authority.peer(machine.address, name=str(number))
            tls = f"{{certificate: {shown.certificate}, key: {shown.key}, ca: {shown.ca}}}"
            listen = f"{machine.address}:{PEER_PORT}"
            replicas = f"replicas: {{listen: '{listen}', secret_file: {secret}, tls: {tls}}}"
            if not text:
                here = site(folder, self.engine, store="STORE", more="REPLICAS")
                text, self.keys = here.config.read_text(), here.keys
            config = folder / f"{number}.yaml"
            config.write_text(text.replace("STORE", address).replace("REPLICAS", replicas))
            self.gateways.append(
                stack.enter_context(started(lambda: Placed(config, machine)))  # noqa: B023
            )

    @contextmanager
    def flood(self) -> Iterator[list[Load]]:
        """Clients on both machines."""
        with ExitStack() as stack:
            loads: list[Load] = []
            for gateway, machine in zip(self.gateways, self.network.machines, strict=True):
                with machine.inside():
                    loads.append(stack.enter_context(load([gateway.url], self.keys["search"], clients=6)))
            eventually(lambda: all(each.completed > 5 for each in loads), "load")
            yield loads

    def owner(self) -> int:
        """Which of the gateways decides."""
        eventually(lambda: sorted(self.roles()) == ["follower", "owner"], "one owner, whom the other follows")
        return self.roles().index("owner")

    def roles(self) -> list[str]:
        return [gateway.role for gateway in self.gateways]


@pytest.fixture
def machines(tmp_path: Path, postgres: Postgres) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, postgres, stack)


def test_a_peer_link_that_goes_silent_costs_no_request_and_no_promise(machines: Site) -> None:
    with machines.flood() as loads:
        machines.owner()
        machines.network.cut()
        eventually(lambda: sorted(machines.roles()) == ["degraded", "owner"], "one of them goes on alone")
        owner = machines.roles().index("owner")
        decides, asks = machines.gateways[owner], machines.gateways[1 - owner]
        # Nobody told it that the link is gone: it knows by the silence, and says so.
        assert any("silent for" in line and "decides alone" in line for line in list(asks.err))
        eventually(lambda: decides.pool()["replication"]["phantom_slots"] > 0, "the owner keeps what it had in flight")
        # The owner's C, and the half of it that the other may give within share alone.
        assert most_running(machines.engine, 1.0) <= 8 + 4
        before = [each.completed for each in loads]
        eventually(
            lambda: all(each.completed > count + 5 for each, count in zip(loads, before, strict=True)), "both serve"
        )
        machines.network.mend()
        decides = machines.gateways[machines.owner()]
        eventually(lambda: decides.pool()["replication"]["phantom_slots"] == 0, "it has announced what it runs")
        assert most_running(machines.engine, 1.0) <= 8
    assert [each.failures for each in loads] == [[], []]
    for gateway in machines.gateways:
        eventually(lambda: gateway.metric("fairshare_unsaved_charges") == 0, "every charge is saved")  # noqa: B023


@pytest.mark.replicas
def test_an_owner_that_hears_neither_its_peer_nor_the_store_gives_way_and_serves_its_part(machines: Site) -> None:
    with machines.flood() as loads:
        owner = machines.owner()
        before, after = machines.gateways[owner], machines.gateways[1 - owner]
        machines.network.cut()
        machines.stores[owner].cut()
        eventually(lambda: after.role == "owner", "the other one takes the lease")
        eventually(lambda: before.role == "degraded", "the old owner goes on alone")
        assert after.pool()["replication"]["epoch"] == 2
        assert most_running(machines.engine, 2.0) <= 8 + 4
        machines.network.mend()
        machines.stores[owner].mend()
        eventually(lambda: before.role == "follower", "the old owner follows")
        eventually(lambda: after.pool()["replication"]["phantom_slots"] == 0, "it has announced what it runs")
        assert most_running(machines.engine, 1.0) <= 8
    assert [each.failures for each in loads] == [[], []]
    for gateway in machines.gateways:
        eventually(lambda: gateway.metric("fairshare_unsaved_charges") == 0, "every charge is saved")  # noqa: B023
