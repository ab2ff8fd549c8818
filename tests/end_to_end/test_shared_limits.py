"""Two workers of one gateway, real processes, count limits and budgets as one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import clients_of, site, workers
from fairshare import clock
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from support.storing import running

ROOT = Actor(name="root")


async def bounded(database: Database) -> None:
    """A team with a limit, and one with a budget."""
    await database.migrate()
    service = Accounts(AccountStore(database), wall=clock.wall, new_secret=lambda: "")
    await service.add_node(ROOT, "organisation", "lab")
    for team in ("search", "ads"):
        await service.add_node(ROOT, "team", team, parent="lab")
    await service.set_limit(ROOT, "team:search", LimitKind.REQUESTS_PER_MINUTE, 6)
    await service.add_budget(ROOT, "team:ads", period=Period.MONTH, time_zone="UTC", hard_cost_units=60.0)


class Client:
    """Asks over connections of its own, one for each request that is to reach another worker."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self._gateway = gateway
        self._key = key
        self._open: list[tuple[int, httpx.Client]] = []

    def of_every_worker(self) -> list[httpx.Client]:
        """One connection to each worker: the operating system gives them out, so they are opened until each has one."""
        found: dict[int, httpx.Client] = {}
        while len(found) < 2:
            before = {pid: clients_of(pid, self._gateway.url) for pid in workers(self._gateway)}
            client = httpx.Client(headers={"Authorization": f"Bearer {self._key}"}, timeout=30)
            client.get(f"{self._gateway.url}/v1/models")
            after = {pid: clients_of(pid, self._gateway.url) for pid in workers(self._gateway)}
            (pid,) = [pid for pid in after if after[pid] > before[pid]]
            self._open.append((pid, client))
            found.setdefault(pid, client)
        return list(found.values())

    def close(self) -> None:
        for _, client in self._open:
            client.close()


@contextmanager
def clients(gateway: GatewayProcess, key: str) -> Iterator[list[httpx.Client]]:
    client = Client(gateway, key)
    try:
        yield client.of_every_worker()
    finally:
        client.close()


def ask(client: httpx.Client, gateway: GatewayProcess) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    return client.post(f"{gateway.url}/v1/chat/completions", json=body)


def test_what_one_worker_admits_the_other_counts(tmp_path: Path) -> None:
    with started(lambda: EngineProcess("--step-ms", "1")) as engine:
        here = site(tmp_path, engine)
        running(SqliteFile(tmp_path / "store.sqlite3"), bounded)
        with started(lambda: GatewayProcess(here.config, workers=2)) as gateway:
            with clients(gateway, here.keys["search"]) as (one, other):
                assert [ask(one, gateway).status_code for _ in range(6)] == [200] * 6
                eventually(lambda: ask(other, gateway).status_code == 429, "the other worker heard of them")
                refused = ask(other, gateway)
                assert refused.json()["error"]["code"] == "rate_limited"
            with clients(gateway, here.keys["ads"]) as (one, other):
                charged = 0
                while ask(one, gateway).status_code == 200:
                    charged += 1
                assert charged > 1
                said_at = time.monotonic()
                eventually(lambda: ask(other, gateway).status_code == 429, "the other worker heard of it")
                print(f"the budget ended for the other worker {time.monotonic() - said_at:.1f} s later")
                assert ask(other, gateway).json()["error"]["code"] == "budget_exhausted"
