"""The store's accounts in a running gateway: keys come, go and expire; limits and budgets hold over restarts."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts, Tree
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass
from fairshare.gateway.accounts import LiveAccounts
from fairshare.gateway.identity import Identity, hash_key
from fairshare.gateway.ledger import Ledger
from fairshare.gateway.options import Level
from fairshare.gateway.ports import Outcome, RequestRecord, Reservation
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import StoreAddress
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import Database, StoreReplaced
from fairshare.wire.problems import RequestProblem
from fairshare.wire.usage import CostWeights
from gateway.rig import FakeClock

ROOT = Actor(name="root")
STATIC = {hash_key("fs-static"): Identity("static", "search", ServiceClass.BATCH)}


class Site:
    """One gateway's view, looked after by hand: nothing here waits for time."""

    def __init__(self, address: StoreAddress) -> None:
        self.wall = FakeClock()
        self.database = Database(address)
        numbers = count(1)
        self.service = Accounts(AccountStore(self.database), wall=self.wall, new_secret=lambda: f"fs-{next(numbers)}")
        self.pool = Pool("chat", 4, {"search": "1"}, 0, self.wall)
        self.ledger = Ledger(
            self.database,
            pools=lambda: {"chat": self.pool},
            wall=self.wall,
            keep_seconds=1e9,
            names=lambda key_id: self.live.names(key_id),
        )
        self.ticks = 0
        self.live = LiveAccounts(
            AccountStore(self.database),
            ConsumptionStore(self.database),
            self.ledger,
            configured=STATIC,
            wall=self.wall,
            ticked=self._ticked,
        )

    def _ticked(self) -> None:
        self.ticks += 1

    async def grow(self) -> None:
        await self.service.add_node(ROOT, "organisation", "lab", models=["tiny", "big"])
        await self.service.add_node(ROOT, "team", "search", parent="lab")
        await self.service.add_node(ROOT, "project", "search/web", models=["tiny", "other"])

    async def look(self) -> None:
        await self.live._look()  # pyright: ignore[reportPrivateUsage]
        await self.live._count()  # pyright: ignore[reportPrivateUsage]

    def find(self, key: str) -> Identity | None:
        return self.live.find(hash_key(key))

    def admit(self, key: str, **other: Any) -> Reservation:
        identity = self.find(key)
        assert identity is not None
        values: dict[str, Any] = {
            "model": "tiny",
            "prompt_tokens": 10,
            "max_tokens": 5,
            "slots": 1,
            "cost": CostWeights(),
        }
        return self.live.admit(identity, **(values | other))

    def finish(self, key: str, cost_units: float) -> None:
        identity = self.find(key)
        assert identity is not None
        record = RequestRecord(
            id="r",
            endpoint="/v1/completions",
            key_id=identity.key_id,
            team=identity.team,
            model="tiny",
            pool="chat",
            served_by="chat",
            arrived_at=self.wall(),
            total_seconds=0.0,
            outcome=Outcome.COMPLETED,
            cost_units=cost_units,
            completion_tokens=4,
            slots=1,
        )
        self.ledger.finished(record)
        self.live.finished(record)

    async def end(self) -> None:
        await self.ledger.flush()
        await self.database.close()


def on(address: StoreAddress, main: Callable[[Site], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            site = Site(address)
            await site.grow()
            await main(site)
            await site.end()

    asyncio.run(bounded())


def test_a_key_works_from_the_next_look_on_and_knows_what_it_belongs_to(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "project:search/web", service_class="batch", tag="nightly")
        assert site.find(made.key) is None
        await site.look()
        assert site.find(made.key) == Identity(
            made.id,
            "search",
            ServiceClass.BATCH,
            frozenset({"tiny"}),  # what every level allows
            "lab",
            "search/web",
            "nightly",
            (f"key:{made.id}", "project:search/web", "team:search", "organisation:lab"),
        )
        assert site.find("fs-unknown") is None
        names = site.live.names(made.id)
        assert names is not None
        assert (names.organisation, names.team, names.project, names.tag) == ("lab", "search", "search/web", "nightly")
        assert site.live.teams() == ("search",)

    on(address, main)


def test_revoked_expired_and_rotated_keys_end_when_they_should(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        expiring = await site.service.add_key(ROOT, "team:search", expires_at=site.wall() + 10)
        rotated = await site.service.add_key(ROOT, "team:search")
        revoked = await site.service.add_key(ROOT, "team:search")
        await site.look()
        assert all(site.find(made.key) for made in (expiring, rotated, revoked))
        new = await site.service.rotate_key(ROOT, rotated.id, overlap_seconds=5)
        await site.service.revoke_key(ROOT, revoked.id)
        await site.look()
        assert site.find(revoked.key) is None
        assert site.find(new.key) == site.find(rotated.key)
        site.wall.now += 5
        assert site.find(rotated.key) is None  # no look was needed
        assert site.find(new.key) is not None
        assert site.find(expiring.key) is not None
        site.wall.now += 5
        assert site.find(expiring.key) is None

    on(address, main)


def test_a_key_of_the_configuration_stays_valid_and_is_bounded_as_its_team_is(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        before = site.find("fs-static")
        assert before is not None
        assert before.owners == ()
        await site.service.set_limit(ROOT, "organisation:lab", LimitKind.IN_FLIGHT, 1)
        await site.look()
        running = site.admit("fs-static")
        with pytest.raises(RequestProblem) as refused:
            site.admit("fs-static")
        assert (refused.value.problem.code, refused.value.retry_after_seconds) == ("too_many_in_flight", 1.0)
        assert "organisation 'lab'" in refused.value.message
        running.end(15)
        site.admit("fs-static").end(15)
        site.live.replace({})
        assert site.find("fs-static") is None

    on(address, main)


def test_a_budget_counts_what_was_charged_before_it_was_known_here_once(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "project:search/web")
        await site.look()
        site.finish(made.key, 30.0)
        await site.ledger.flush()
        site.finish(made.key, 40.0)  # not written yet
        await site.service.add_budget(ROOT, "team:search", period=Period.TOTAL, hard_cost_units=100.0)
        await site.look()
        site.finish(made.key, 20.0)
        await site.look()
        site.admit(made.key, prompt_tokens=5, max_tokens=0).end(0)
        with pytest.raises(RequestProblem) as refused:
            site.admit(made.key, prompt_tokens=11, max_tokens=0)
        assert refused.value.problem.code == "budget_exhausted"
        assert "is 100, and 90 is used" in refused.value.message
        running = site.admit(made.key, prompt_tokens=4, max_tokens=0)
        (shown,) = site.live.budgets(["team:search"])
        assert (shown.hard, shown.used, shown.reserved, shown.left) == (100.0, 90.0, 4.0, 6.0)
        assert (shown.period, shown.resets_at, shown.borrows_only) == ("total", None, False)
        assert site.live.budgets(["team:ads"]) == []
        running.end(0)

        await site.ledger.flush()
        again = Site(address)
        await again.ledger.flush()
        await again.look()
        with pytest.raises(RequestProblem, match="is 100, and 90 is used"):
            again.admit(made.key, prompt_tokens=11, max_tokens=0)
        await again.end()

    on(address, main)


def test_a_pool_counts_a_key_at_its_own_level() -> None:
    full = Identity("k", "search", ServiceClass.BATCH, organisation="lab", project="search/web")
    bare = Identity("k", "search", ServiceClass.BATCH)
    assert [full.team_at(level) for level in Level] == ["lab", "search", "search/web"]
    assert [bare.team_at(level) for level in Level] == ["search"] * 3


def test_a_request_that_ran_when_its_budget_was_made_is_charged_to_it(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "project:search/web")
        await site.look()
        running = site.admit(made.key)
        await site.service.add_budget(
            ROOT, "team:search", period=Period.TOTAL, soft_cost_units=7.0, borrow_over_soft=True
        )
        await site.look()
        assert site.live.borrowing() == frozenset()
        running.end(12)
        site.finish(made.key, 7.0)
        # Pools may share among projects.
        assert site.live.borrowing() == {"team:search", "project:search/web"}

    on(address, main)


def test_many_budgets_are_counted_with_one_look_at_the_account_for_each_level_and_period(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float, int]] = []
    since = ConsumptionStore.since

    async def counted(self: ConsumptionStore, begins_at: float, *, values: set[str], **other: Any) -> Any:
        asked.append((other["column"], begins_at, len(values)))
        return await since(self, begins_at, values=values, **other)

    async def main(site: Site) -> None:
        for team in ("ads", "maps"):
            await site.service.add_node(ROOT, "team", team, parent="lab")
        keys = [(await site.service.add_key(ROOT, f"team:{team}")).key for team in ("search", "ads", "maps")]
        await site.look()
        for key, cost in zip(keys, (1.0, 2.0, 4.0), strict=True):
            site.finish(key, cost)
        for owner in ("team:search", "team:ads", "team:maps", "organisation:lab"):
            await site.service.add_budget(ROOT, owner, period=Period.TOTAL, hard_cost_units=9.0)
        await site.service.add_budget(ROOT, "team:ads", period=Period.TOTAL, hard_cost_units=9.0, model="big")
        await site.service.add_budget(ROOT, "team:ads", period=Period.TOTAL, hard_cost_units=9.0, model="tiny")
        monkeypatch.setattr(ConsumptionStore, "since", counted)
        await site.look()
        assert sorted(asked) == [("organisation", 0.0, 1), ("team", 0.0, 3)]
        assert [budget.used for budget in site.live.budgets()] == [1.0, 2.0, 4.0, 7.0, 0.0, 2.0]

    on(address, main)


@pytest.mark.parametrize("backend", ["sqlite"])
def test_another_file_in_the_place_of_the_store_brings_its_own_keys_and_budgets(
    tmp_path: Path, address: StoreAddress, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fairshare.sqlite3"

    async def main(site: Site) -> None:
        await site.ledger.flush()
        early = await site.service.add_key(ROOT, "team:search")
        await site.service.add_budget(ROOT, "team:search", period=Period.MONTH, hard_cost_units=1e6)
        await site.look()
        with closing(sqlite3.connect(path)) as store, closing(sqlite3.connect(tmp_path / "backup")) as backup:
            store.backup(backup)
        site.finish(early.key, 7.0)
        await site.service.add_node(ROOT, "team", "late", parent="lab")
        late = await site.service.add_key(ROOT, "team:late")
        await site.look()
        assert site.find(late.key) is not None

        async def replaced(content: bytes | None) -> None:
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            await site.look()
            assert "as they were read last" in (site.live.finding() or "")
            assert site.find(early.key) is not None
            with pytest.raises(StoreReplaced) as raised:
                await site.ledger.flush()
            site.ledger._failed(raised.value)  # pyright: ignore[reportPrivateUsage]
            await site.ledger.flush()
            await site.look()
            assert site.live.finding() is None

        await replaced((tmp_path / "backup").read_bytes())
        assert site.find(late.key) is None
        assert site.find(early.key) is not None
        assert [budget.used for budget in site.live.budgets()] == [7.0]  # what was charged here is still known
        site.finish(early.key, 1.0)

        await replaced(None)
        assert site.find(early.key) is None
        assert site.find("fs-static") is not None
        assert site.live.budgets() == []
        await site.grow()
        made = await site.service.add_key(ROOT, "project:search/web")
        await site.look()
        found = site.find(made.key)
        assert found is not None
        assert found.project == "search/web"

    on(address, main)
    assert "inside fairshare" not in caplog.text


def test_a_key_that_is_newer_than_the_rules_counts_from_the_next_look_on(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        await site.look()
        before = await AccountStore(site.database).rules()
        await site.service.add_node(ROOT, "team", "ads", parent="lab")
        made = await site.service.add_key(ROOT, "team:ads")
        await site.look()
        assert site.find(made.key) is not None
        site.live._take(before, Tree(before.nodes))  # pyright: ignore[reportPrivateUsage]
        assert site.find(made.key) is None
        await site.look()
        assert site.find(made.key) is not None

    on(address, main)


def test_a_change_costs_nothing_for_keys_that_nobody_shows_then(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_again: list[bytes] = []
    identified = LiveAccounts._identified  # pyright: ignore[reportPrivateUsage]

    def counted(self: LiveAccounts, sha256: bytes) -> Any:
        made_again.append(sha256)
        return identified(self, sha256)

    async def main(site: Site) -> None:
        keys = [await site.service.add_key(ROOT, "project:search/web") for _ in range(3)]
        await site.look()
        for key in keys:
            assert site.find(key.key) is not None
        await site.service.revoke_key(ROOT, keys[1].id)
        await site.service.set_models(ROOT, "team", "search", ["tiny"])
        monkeypatch.setattr(LiveAccounts, "_identified", counted)
        await site.look()
        assert made_again == []
        named = site.live.names(keys[0].id)
        assert named is not None
        assert named.models == {"tiny"}
        # A request that runs when its key is revoked is still charged to whom it was of.
        revoked = site.live.names(keys[1].id)
        assert revoked is not None
        assert revoked.project == "search/web"
        assert site.live.names("never shown") is None
        for _ in range(2):
            site.live.names(keys[0].id)
        assert len(made_again) == 2

    on(address, main)


def test_answers_are_expected_to_be_as_long_after_a_start_as_they_were_before(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "team:search")
        await site.service.add_budget(ROOT, "team:search", period=Period.TOTAL, hard_cost_units=100.0)
        await site.look()
        site.finish(made.key, 0.0)  # with four tokens
        await site.ledger.flush()
        again = Site(address)
        await again.look()
        running = again.admit(made.key, prompt_tokens=10, max_tokens=5, slots=2)
        (budget,) = again.live.budgets()
        assert budget.reserved == 10 + 2 * 4 * 2
        running.end(0)
        await again.end()

    on(address, main)


def test_a_budget_that_comes_is_counted_at_once(address: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own task would look for it within half a second, too, but a change is to be in force within one."""

    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "team:search")
        await site.look()
        site.finish(made.key, 3.0)
        monkeypatch.setattr("fairshare.gateway.accounts.POLL_SECONDS", 1e6)
        await site.live.start()
        counted = asyncio.Event()
        count = site.live._count_budgets  # pyright: ignore[reportPrivateUsage]

        async def noted() -> None:
            await count()
            if site.live.budgets():
                counted.set()

        monkeypatch.setattr(site.live, "_count_budgets", noted)
        await site.service.add_budget(ROOT, "team:search", period=Period.TOTAL, hard_cost_units=9.0)
        await site.live._look()  # pyright: ignore[reportPrivateUsage]
        await counted.wait()
        assert [budget.used for budget in site.live.budgets()] == [3.0]
        await site.live.stop()

    on(address, main)


def test_limits_come_change_and_go_and_what_they_counted_goes_on(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "team:search")
        await site.look()
        owner = f"key:{made.id}"

        async def bound(value: int | None) -> None:
            await site.service.set_limit(ROOT, owner, LimitKind.REQUESTS_PER_MINUTE, value)
            await site.look()

        await bound(1)
        site.admit(made.key)
        with pytest.raises(RequestProblem, match="is 1, and 1 is used"):
            site.admit(made.key)
        await bound(2)
        site.admit(made.key)
        with pytest.raises(RequestProblem, match="is 2, and 2 is used"):
            site.admit(made.key)
        await bound(None)
        site.admit(made.key)
        # A project that comes, is bounded and goes between two looks leaves nothing behind.
        await site.service.add_node(ROOT, "project", "search/short")
        await site.service.set_limit(ROOT, "project:search/short", LimitKind.IN_FLIGHT, 0)
        await site.service.remove_node(ROOT, "project", "search/short")
        await site.service.add_node(ROOT, "project", "search/long")
        await site.look()
        long = await site.service.add_key(ROOT, "project:search/long")
        await site.look()
        site.admit(long.key)

    on(address, main)


@pytest.mark.parametrize("backend", ["sqlite"])
def test_a_limit_and_a_time_zone_that_this_version_does_not_know_hold_up_no_other_change(
    tmp_path: Path, address: StoreAddress
) -> None:
    async def main(site: Site) -> None:
        made, revoked = [await site.service.add_key(ROOT, "team:search") for _ in range(2)]
        await site.service.set_limit(ROOT, "team:search", LimitKind.IN_FLIGHT, 9)
        number = await site.service.add_budget(ROOT, "team:search", period=Period.DAY, hard_cost_units=500.0)
        await site.look()
        with closing(sqlite3.connect(tmp_path / "fairshare.sqlite3")) as store:
            store.execute("insert into limits (kind, node_id, value) select 'per_year', node_id, 1 from limits")
            store.execute("update budgets set time_zone = 'Mars/Base', created_at = 1")
            store.execute(
                "insert into audit (at, actor, action, target, after) select 2, 'newer', 'add limits', 'team:search', "
                "json_object('id', id, 'kind', kind, 'node_id', node_id, 'key_id', null, 'value', 1) from limits "
                "where kind = 'per_year'"
            )
            store.execute("insert into audit (at, actor, action, target) values (2, 'newer', 'change budgets', 'x')")
            store.commit()
        await site.service.revoke_key(ROOT, revoked.id)
        await site.look()
        assert site.find(revoked.key) is None
        site.admit(made.key).end(0)
        (budget,) = site.live.budgets()
        assert budget.resets_at == 86400.0
        assert "Budgets in Mars/Base begin at midnight UTC here" in (site.live.finding() or "")
        await site.service.remove_budget(ROOT, number)
        await site.look()
        assert site.live.finding() is None

    on(address, main)


@pytest.mark.parametrize("backend", ["sqlite"])
def test_an_older_backup_that_changed_further_than_this_gateway_saw_is_read_whole(
    tmp_path: Path, address: StoreAddress
) -> None:
    path = tmp_path / "fairshare.sqlite3"

    async def main(site: Site) -> None:
        bounded, free = [await site.service.add_key(ROOT, "team:search") for _ in range(2)]
        await site.service.set_limit(ROOT, f"key:{bounded.id}", LimitKind.IN_FLIGHT, 0)
        await site.look()
        with closing(sqlite3.connect(path)) as store, closing(sqlite3.connect(tmp_path / "backup")) as backup:
            store.backup(backup)
        late = await site.service.add_key(ROOT, "team:search")
        await site.service.set_limit(ROOT, f"key:{free.id}", LimitKind.IN_FLIGHT, 0)
        await site.service.set_limit(ROOT, f"key:{bounded.id}", LimitKind.IN_FLIGHT, None)
        await site.look()
        assert site.find(late.key) is not None
        site.admit(bounded.key)
        with closing(sqlite3.connect(tmp_path / "backup")) as backup, closing(sqlite3.connect(path)) as store:
            backup.backup(store)  # into the same file, as `.restore` does
        for number in range(5):
            await site.service.add_node(ROOT, "team", f"new-{number}", parent="lab")
        await site.look()
        assert site.find(late.key) is None
        site.admit(free.key)
        with pytest.raises(RequestProblem, match="in flight"):
            site.admit(bounded.key)

    on(address, main)


def test_a_key_is_revoked_while_the_account_of_requests_waits_for_the_store(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "team:search")
        await site.service.add_budget(ROOT, "team:search", period=Period.MONTH, hard_cost_units=100.0)
        await site.live._look()  # pyright: ignore[reportPrivateUsage]
        assert site.find(made.key) is not None
        async with site.ledger._writing:  # pyright: ignore[reportPrivateUsage]
            counting = asyncio.create_task(site.live._count())  # pyright: ignore[reportPrivateUsage]
            await site.service.revoke_key(ROOT, made.id)
            await site.live._look()  # pyright: ignore[reportPrivateUsage]
            assert site.find(made.key) is None
            assert not counting.done()
        await counting
        assert [budget.used for budget in site.live.budgets()] == [0.0]

    on(address, main)


@pytest.mark.parametrize("backend", ["sqlite"])
def test_while_the_store_is_away_what_was_read_last_stays_in_force(
    tmp_path: Path, address: StoreAddress, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(site: Site) -> None:
        made = await site.service.add_key(ROOT, "team:search")
        await site.look()
        with closing(sqlite3.connect(tmp_path / "fairshare.sqlite3")) as other:
            other.execute("alter table changes rename to elsewhere")
            await site.look()
            await site.look()
            assert site.find(made.key) is not None
            assert "as they were read last" in (site.live.finding() or "")
            other.execute("alter table elsewhere rename to changes")
        await site.look()
        assert site.live.finding() is None
        assert site.ticks == 4

    on(address, main)
    assert [line.levelname for line in caplog.records if line.name == "fairshare.accounts"] == ["ERROR", "WARNING"]
