"""Leases promise, on SQLite and on PostgreSQL alike: one owner at a time, and no write of an old one."""

import asyncio

from sqlalchemy import select, update

from fairshare.storage.database import Database
from fairshare.storage.leases import LeaseRow, LeaseStore
from fairshare.storage.schema import leases
from support.storing import Run

ONE = {"owner": "one", "address": "unix:/one", "seconds": 60.0}
TWO = {"owner": "two", "address": "unix:/two", "seconds": 60.0}


async def end(database: Database) -> None:
    """The leases' time has passed."""
    async with database.writing() as connection:
        await connection.execute(update(leases).values(ends_at=leases.c.ends_at - 1000.0))


def held(lease: LeaseRow) -> tuple[str, int]:
    return lease.owner, lease.epoch


def test_a_lease_is_taken_by_the_first_and_only_by_it(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        first = await store.acquire("chat", **ONE)
        assert held(first) == ("one", 1)
        assert 55.0 < first.left_seconds <= 60.0
        assert held(await store.acquire("chat", **TWO)) == ("one", 1)
        assert held(await store.acquire("code", **TWO)) == ("two", 1)
        assert [(row.lease, held(row), row.address) for row in await store.read()] == [
            ("chat", ("one", 1), "unix:/one"),
            ("code", ("two", 1), "unix:/two"),
        ]

    run(main)


def test_who_asks_for_a_lease_that_another_holds_does_not_wait_for_a_write_nor_make_one(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        async with database.writing() as connection:
            await connection.execute(select(leases).with_for_update())
            assert held(await store.acquire("chat", **TWO)) == ("one", 1)

    run(main)


def test_of_many_who_ask_at_once_one_gets_it(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        got = await asyncio.gather(
            *(store.acquire("chat", owner=f"owner-{n}", address="", seconds=60.0) for n in range(8))
        )
        assert len({held(each) for each in got}) == 1
        assert got[0].epoch == 1

    run(main)


def test_a_lease_that_has_ended_is_taken_with_the_next_epoch_and_not_renewed(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        await end(database)
        assert (await store.renew("chat", epoch=1, seconds=60.0)).left_seconds < 0.0
        assert held(await store.acquire("chat", **TWO)) == ("two", 2)
        assert held(await store.renew("chat", epoch=1, seconds=60.0)) == ("two", 2)

    run(main)


def test_an_owner_renews_its_lease_and_gets_a_new_epoch_when_it_asks_anew(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        renewed = await store.renew("chat", epoch=1, seconds=600.0)
        assert held(renewed) == ("one", 1)
        assert renewed.left_seconds > 590.0
        assert held(await store.acquire("chat", **ONE)) == ("one", 2)

    run(main)


def test_a_lease_that_is_released_is_free_at_once_and_an_old_owner_cannot_release_another_ones(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        await store.release("chat", epoch=1)
        assert held(await store.acquire("chat", **TWO)) == ("two", 2)
        await store.release("chat", epoch=1)
        assert held(await store.acquire("chat", **ONE)) == ("two", 2)

    run(main)


def test_what_an_owner_saved_is_what_its_successor_finds(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        assert await store.save("chat", epoch=1, used={"chat": {"ads": 0.1 + 0.2, "search": 3.0}}, state=b"one")
        assert await store.save("chat", epoch=1, used={"chat": {"ads": 1.5}, "code": {"ads": 7.0}}, state=b"\0two")
        await store.release("chat", epoch=1)
        await store.acquire("chat", **TWO)
        left = await store.left_behind("chat", epoch=2, pools=["chat", "code"])
        assert left is not None
        assert {pool: {team: used for team, (used, _) in by_team.items()} for pool, by_team in left.usage.items()} == {
            "chat": {"ads": 1.5, "search": 3.0},
            "code": {"ads": 7.0},
        }
        assert all(0.0 <= age < 30.0 for by_team in left.usage.values() for _, age in by_team.values())
        assert left.state == b"\0two"

    run(main)


def test_a_write_of_an_old_epoch_is_refused_and_changes_nothing(run: Run) -> None:
    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        await store.save("chat", epoch=1, used={"chat": {"ads": 1.0}}, state=b"first")
        await end(database)
        await store.acquire("chat", **TWO)
        assert not await store.save("chat", epoch=1, used={"chat": {"ads": 9.0, "search": 9.0}}, state=b"late")
        assert await store.left_behind("chat", epoch=1, pools=["chat"]) is None
        left = await store.left_behind("chat", epoch=2, pools=["chat"])
        assert left is not None
        assert list(left.usage["chat"]) == ["ads"]
        assert left.usage["chat"]["ads"][0] == 1.0
        assert left.state == b"first"

    run(main)


def test_a_successor_waits_for_a_write_that_was_begun_before_it(run: Run) -> None:
    """Else it would restore what the write, accepted a moment later, makes old."""

    async def main(database: Database) -> None:
        store = LeaseStore(database)
        await store.acquire("chat", **ONE)
        await end(database)
        async with database.writing() as connection:
            assert await store._fenced(connection, "chat", 1) is not None  # pyright: ignore[reportPrivateUsage]
            taking = asyncio.create_task(store.acquire("chat", **TWO))
            done, _ = await asyncio.wait([taking], timeout=0.2)
            assert not done
        assert held(await taking) == ("two", 2)

    run(main)
