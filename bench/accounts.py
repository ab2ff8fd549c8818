"""What a large site's accounts cost: how soon a change is in force, and how late the event loop is for it.

    python bench/accounts.py --keys 100000 --teams 1000

Every key has a limit and every team a budget, in a SQLite file. Prints the start and the look-up of a key, and how soon
a new key, another limit and a revoked key are in force, with what the admin API does for it on the same event loop.
"""

import argparse
import asyncio
import hashlib
import secrets
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from fairshare import clock
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts, NewKey
from fairshare.gateway.accounts import LiveAccounts
from fairshare.gateway.identity import hash_key, new_key
from fairshare.gateway.ledger import Ledger
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import SqliteFile
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import Database
from fairshare.wire.problems import RequestProblem
from ledger import Lateness

T = TypeVar("T")

ROOT = Actor(name="root")
ROUNDS = 5
LOOK_UPS = 100_000


def fill(path: Path, *, keys: int, teams: int) -> None:
    """As `teams` teams with `keys` keys would have it."""
    owners = [(f"{number:012x}", 2 + number % teams) for number in range(keys)]
    with closing(sqlite3.connect(path)) as store:
        store.execute("insert into nodes (id, kind, path, created_at) values (1, 'organisation', 'lab', 1)")
        store.executemany(
            "insert into nodes (id, kind, path, parent_id, created_at) values (?, 'team', ?, 1, 1)",
            ((2 + number, f"team{number}") for number in range(teams)),
        )
        store.executemany(
            "insert into keys (id, node_id, service_class, tag, note, created_at, changed_in) "
            "values (?, ?, 'interactive', '', '', 1, 1)",
            owners,
        )
        store.executemany(
            "insert into secrets (sha256, key_id, created_at) values (?, ?, 1)",
            ((hashlib.sha256(f"fs-{number}".encode()).hexdigest(), f"{number:012x}") for number in range(keys)),
        )
        store.executemany(
            "insert into limits (kind, key_id, value) values ('in_flight', ?, 60)", ((key,) for key, _ in owners)
        )
        store.executemany(
            "insert into budgets (id, node_id, period, time_zone, hard_cost_units, borrow_over_soft, created_at) "
            "values (?, ?, 'month', 'UTC', 1e6, 0, 1)",
            ((1 + number, 2 + number) for number in range(teams)),
        )
        store.execute("insert into audit (at, actor, action, target) values (1, 'bench', 'add nodes', 'lab')")
        store.execute("update changes set version = 1")
        store.commit()


class Bench:
    def __init__(self, path: Path) -> None:
        self.database = Database(SqliteFile(path))
        ledger = Ledger(self.database, pools=dict, wall=clock.wall, keep_seconds=1e9)
        store = AccountStore(self.database)
        self.late = Lateness()
        self.live = LiveAccounts(store, ConsumptionStore(self.database), ledger, configured={}, wall=clock.wall)
        self.service = Accounts(
            AccountStore(Database(SqliteFile(path))),
            wall=clock.wall,
            new_secret=lambda: new_key(secrets.token_bytes),
        )

    async def change(self, what: str, do: Callable[[], Awaitable[T]], is_in_force: Callable[[T], bool]) -> None:
        seconds: list[float] = []
        self.late.worst_seconds = 0.0
        for _ in range(ROUNDS):
            made = await do()
            began = time.perf_counter()
            while not is_in_force(made):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)
            seconds.append(time.perf_counter() - began)
        print(
            f"{what:<14} in force after {statistics.median(seconds):.2f} s (at most {max(seconds):.2f}), "
            f"the event loop at most {self.late.worst_seconds * 1e3:.0f} ms late"
        )

    def admits(self, key: str) -> bool:
        identity = self.live.find(hash_key(key))
        assert identity is not None
        try:
            self.live.admit(identity, model="m", prompt_tokens=1, max_tokens=1, slots=1, cost=None).end(1)
        except RequestProblem:
            return False
        return True

    async def run(self) -> None:
        watching = asyncio.create_task(self.late.watch())
        began, cpu = time.perf_counter(), time.process_time()
        await self.live.start()
        print(f"{'start':<14} {time.perf_counter() - began:.1f} s ({time.process_time() - cpu:.1f} s of CPU)")
        self.late.worst_seconds = 0.0
        await asyncio.sleep(3)
        print(f"{'nothing':<14} the event loop at most {self.late.worst_seconds * 1e3:.0f} ms late in 3 s")
        sha256 = hash_key("fs-7")
        cpu = time.process_time()
        for _ in range(LOOK_UPS):
            self.live.find(sha256)
        print(f"{'look-up':<14} {(time.process_time() - cpu) / LOOK_UPS * 1e6:.2f} us")

        added: list[NewKey] = []

        async def add() -> NewKey:
            added.append(await self.service.add_key(ROOT, "team:team5"))
            return added[-1]

        async def bound() -> bool:
            is_open = self.admits("fs-7")
            await self.service.set_limit(ROOT, f"key:{7:012x}", LimitKind.IN_FLIGHT, 0 if is_open else 60)
            return not is_open

        async def revoke() -> NewKey:
            made = added.pop()
            await self.service.revoke_key(ROOT, made.id)
            return made

        await self.change("key added", add, lambda made: self.live.find(hash_key(made.key)) is not None)
        await self.change("limit changed", bound, lambda is_open: self.admits("fs-7") is is_open)
        await self.change("key revoked", revoke, lambda made: self.live.find(hash_key(made.key)) is None)
        watching.cancel()
        await self.live.stop()


async def main(*, keys: int, teams: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fairshare.sqlite3"
        database = Database(SqliteFile(path))
        await database.migrate()
        await database.close()
        fill(path, keys=keys, teams=teams)
        print(f"{keys} keys with a limit each, {teams} teams with a budget each")
        await Bench(path).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--teams", type=int, default=1000)
    asyncio.run(main(**vars(parser.parse_args())))
