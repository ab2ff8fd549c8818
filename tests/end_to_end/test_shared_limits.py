"""Workers on SQLite and machines on PostgreSQL, real processes, have limits, budgets, keys and account in common."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import clients_of, site, workers
from end_to_end.test_machines import Machines
from fairshare import clock
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts, NewKey
from fairshare.gateway.identity import new_key
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import PostgresServer, SqliteFile, StoreAddress
from fairshare.storage.database import Database
from fairshare.storage.ledger import LedgerStore
from support.postgres import Postgres
from support.storing import running

ROOT = Actor(name="root")


IN_FORCE_SECONDS = 1.0
"""How soon a change of the accounts must reach running gateways."""


def accounts(database: Database) -> Accounts:
    return Accounts(AccountStore(database), wall=clock.wall, new_secret=lambda: new_key(secrets.token_bytes))


async def bounded(database: Database) -> None:
    """A team with a limit, one with a budget, and one with neither."""
    await database.migrate()
    service = accounts(database)
    await service.add_node(ROOT, "organisation", "lab")
    for team in ("search", "ads", "free"):
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


class Asker:
    """Sends small requests of one team to one process, and counts those that were answered."""

    def __init__(self, client: httpx.Client, url: str, key: str) -> None:
        self._client = client
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self.answered = 0

    def __call__(self) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        answer = self._client.post(f"{self._url}/v1/chat/completions", json=body, headers=self._headers)
        self.answered += answer.status_code == 200
        return answer


def a_limit_is_one(one: Asker, other: Asker) -> None:
    assert [one().status_code for _ in range(6)] == [200] * 6
    eventually(lambda: other().status_code == 429, "the other heard of them")
    assert other().json()["error"]["code"] == "rate_limited"


def a_budget_is_one(one: Asker, other: Asker) -> None:
    while one().status_code == 200:
        pass
    assert one.answered > 1
    said_at = time.monotonic()
    eventually(lambda: other().status_code == 429, "the other heard of it")
    print(f"the budget ended for the other {time.monotonic() - said_at:.1f} s later")
    assert other().json()["error"]["code"] == "budget_exhausted"


def a_key_comes_and_goes_within_a_second(store: StoreAddress, *asking: Callable[[str], int]) -> None:
    """`asking`: what each answers to a key."""
    made: list[NewKey] = []

    async def make(database: Database) -> None:
        made.append(await accounts(database).add_key(ROOT, "team:free"))

    async def revoke(database: Database) -> None:
        await accounts(database).revoke_key(ROOT, made[0].id)

    for change, status in ((make, 200), (revoke, 401)):
        running(store, change)
        # The gateway looks twice a second, and may be in the middle of a look; a busy machine gets as much again.
        until = time.monotonic() + 3 * IN_FORCE_SECONDS
        for ask in asking:
            while (found := ask(made[0].key)) != status:
                assert time.monotonic() < until, found
                time.sleep(0.05)


def models(client: httpx.Client, url: str) -> Callable[[str], int]:
    return lambda key: client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def served(store: StoreAddress) -> int:
    """Requests that the account says were answered with 200."""
    rows = 0

    async def count(database: Database) -> None:
        nonlocal rows
        pages = LedgerStore(database).rows(begins_at=0.0, ends_at=1e12)
        rows = len([row async for page in pages for row in page if row.status == 200 and row.slots])

    running(store, count)
    return rows


def account_is_complete(store: StoreAddress, *askers: Asker) -> None:
    eventually(lambda: served(store) == sum(each.answered for each in askers), "the account has each request once")


def test_what_one_worker_admits_the_other_counts(tmp_path: Path) -> None:
    store = SqliteFile(tmp_path / "store.sqlite3")
    with started(lambda: EngineProcess("--step-ms", "1")) as engine:
        here = site(tmp_path, engine)
        running(store, bounded)
        with started(lambda: GatewayProcess(here.config, workers=2)) as gateway:
            asked: list[Asker] = []
            for team, is_one in (("search", a_limit_is_one), ("ads", a_budget_is_one)):
                with clients(gateway, here.keys[team]) as connected:
                    one, other = (Asker(client, gateway.url, here.keys[team]) for client in connected)
                    is_one(one, other)
                    asked += [one, other]
                    a_key_comes_and_goes_within_a_second(store, *(models(client, gateway.url) for client in connected))
            account_is_complete(store, *asked)


def test_what_one_machine_admits_another_on_the_same_postgresql_counts(tmp_path: Path, postgres: Postgres) -> None:
    with started(lambda: EngineProcess("--step-ms", "1")) as engine, ExitStack() as stack:
        machines = Machines(tmp_path, engine, postgres, stack)
        store = PostgresServer(host=machines.socket_folder, database=machines.database, user="fairshare")
        running(store, bounded)
        client = stack.enter_context(httpx.Client(timeout=30))
        machines.owner()
        # And so the limits are in force.
        a_key_comes_and_goes_within_a_second(store, *(models(client, url) for url in machines.urls))
        asked: list[Asker] = []
        for team, is_one in (("search", a_limit_is_one), ("ads", a_budget_is_one)):
            one, other = (Asker(client, url, machines.keys[team]) for url in machines.urls)
            is_one(one, other)
            asked += [one, other]
        account_is_complete(store, *asked)
