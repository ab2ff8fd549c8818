"""Two replicas in one process: real peer links on loopback, a real store, and requests that only the test ends."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fairshare.clock import monotonic
from fairshare.core.decisions import Decision, DispatchQueue, Held, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.gateway.replication import About, NotCleared, ReplicaSpec, Replication
from fairshare.gateway.status import PoolStatus
from fairshare.replicas.lease import LeaseOptions
from fairshare.replicas.member import Member, MemberOptions, Role
from fairshare.replicas.messages import Asked, Told
from fairshare.replicas.owner import OwnerOptions
from fairshare.replicas.peers import PeerAddress
from fairshare.replicas.replica import ReplicaOptions
from fairshare.storage.address import SqliteFile
from fairshare.storage.database import Database
from fairshare.storage.leases import LeaseStore
from gateway.rig import run, until
from gateway.statuses import pool_status_of

OPTIONS = MemberOptions(
    lease=LeaseOptions(lease_seconds=1.5, renew_every_seconds=0.3, margin_seconds=0.2, poll_seconds=0.1),
    owner=OwnerOptions(longest_request_seconds=60.0),
    replica=ReplicaOptions(degrade_after_seconds=0.3),
    save_every_seconds=0.05,
)

LOOK_SECONDS = 0.01
"""Between two looks at what replicas do in real time."""

LONG_SECONDS = 20.0

SPREAD = MemberOptions(
    lease=LeaseOptions(lease_seconds=5.0, renew_every_seconds=1.0, poll_seconds=0.1),
    owner=OwnerOptions(longest_request_seconds=60.0),
)
"""A lease is not lost while a slow machine is busy."""


class Side:
    """One replica of the pool `chat`, C = 4: search owns 3 slots, ads 1."""

    def __init__(
        self,
        name: str,
        folder: Path,
        address: PeerAddress | None = None,
        secret: bytes = b"s" * 32,
        advertise: str | None = None,
    ) -> None:
        self.name = name
        self.sent: dict[str, Send] = {}
        self.changed = asyncio.Event()
        self.vanished = False
        self.configured = {"capacity": "4", "shares": "ads 1/4, search 3/4"}
        self.database = Database(SqliteFile(folder / "store.sqlite3"))
        self.replication = Replication(
            ReplicaSpec(
                name=name,
                listen=address or PeerAddress("", 0, str(folder / f"{name}.sock")),
                advertise=advertise,
                secret=secret,
            ),
            database=self.database,
            decided=lambda _, decisions: self.take(decisions),
            new_queues=self.fresh,
            shown=self.shown,
            configured=lambda: {"chat": self.configured},
        )

    @staticmethod
    def fresh(names: Sequence[str], parts: int) -> dict[str, DispatchQueue]:
        pool = Pool("chat", 4 // parts, {"search": "3/4", "ads": "1/4"}, 0.0, monotonic)
        return {"chat": make_queue(pool, Mode.HOLD, instances=[Instance(id="a", part_slots=4, seats=8)])}

    def shown(self, names: Sequence[str]) -> list[PoolStatus]:
        return [pool_status_of(name, held=self.replication.queue(name).snapshot().held) for name in names]

    @property
    def queue(self) -> DispatchQueue:
        return self.replication.queue("chat")

    @property
    def role(self) -> str:
        return self.replication.status("chat").role

    async def start(self) -> None:
        await self.replication.start()
        self.replication.add("chat", self.fresh(("chat",), 1), OPTIONS)
        await self.replication.wait_for_owners()

    def submit(self, request_id: str, team: str = "search") -> None:
        self.take(self.queue.submitted(Request(request_id, team)))

    def end(self, request_id: str, cost_units: float = 1.0) -> None:
        del self.sent[request_id]
        self.take(self.queue.released(request_id, cost_units))

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert isinstance(decision, Send | Held), decision
            if isinstance(decision, Send):
                self.sent[decision.request_id] = decision
        self.changed.set()

    async def has_sent(self, *request_ids: str) -> None:
        while not set(request_ids) <= self.sent.keys():
            self.changed.clear()
            await self.changed.wait()

    async def becomes(self, role: str) -> None:
        await until(lambda: self.role == role, every_seconds=LOOK_SECONDS)


@asynccontextmanager
async def two(folder: Path, *, tcp: bool = False) -> AsyncGenerator[tuple[Side, Side]]:
    """The first owns, the second follows."""
    address = PeerAddress("127.0.0.1", 0) if tcp else None
    owner, other = Side("owner", folder, address), Side("other", folder, address)
    try:
        await owner.start()
        await other.start()
        await other.becomes("follower")
        assert owner.role == "owner"
        yield owner, other
    finally:
        for side in [each for each in (other, owner) if not each.vanished]:
            for request_id in tuple(side.sent):
                side.end(request_id)
            side.replication.hand_over()
            await side.replication.stop()


def test_requests_of_two_replicas_share_one_pool(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            for number in range(3):
                other.submit(f"{number}")
            await other.has_sent("0", "1", "2")
            owner.submit("mine")
            await owner.has_sent("mine")
            assert owner.queue.pool.usage()[1]["search"] == 4
            other.submit("waits")
            owner.submit("urgent", "ads")
            # An owner within its share is never held; the fifth of search waits for a slot, wherever it ends.
            await owner.has_sent("urgent")
            await until(lambda: owner.queue.snapshot().held == 1, every_seconds=LOOK_SECONDS)
            owner.end("mine")
            owner.end("urgent")
            await other.has_sent("waits")

    run(main)


def test_one_that_goes_hands_over_and_its_charges_are_known_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            owner.submit("a")
            await owner.has_sent("a")
            other.submit("b")
            await other.has_sent("b")
            other.end("b", 5.0)
            owner.replication.hand_over()
            await other.becomes("owner")
            await owner.becomes("follower")
            owner.end("a", 2.0)
            await until(lambda: other.queue.pool.usage()[0].get("search") == 7.0, every_seconds=LOOK_SECONDS)
            assert other.replication.status("chat").epoch == 2
            assert other.replication.status("chat").phantom_slots == 0

    run(main)


def test_an_owner_that_vanishes_is_replaced_when_its_lease_ends_and_meanwhile_requests_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            owner.submit("lost")
            await owner.has_sent("lost")
            other.submit("goes on")
            await other.has_sent("goes on")
            while owner.replication.status("chat").unsaved_charges or not await saved_slots(owner, tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await vanish(owner)
            owner.sent.clear()
            await other.becomes("degraded")
            other.submit("alone")
            await other.has_sent("alone")
            await other.becomes("owner")
            # What the one that vanished had in flight may still run.
            assert other.replication.status("chat").phantom_slots == 1
            assert other.queue.pool.usage()[1]["search"] == 3
            other.submit("decided")
            await other.has_sent("decided")
            # What the account of requests says of each.
            told = {request_id: sent.degraded for request_id, sent in other.sent.items()}
            assert told == {"goes on": False, "alone": True, "decided": False}
            other.end("goes on")
            other.end("alone")

    run(main)


def test_a_replica_that_decides_alone_says_why_it_reaches_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        owner, other = Side("owner", tmp_path), Side("other", tmp_path, secret=b"x" * 32)
        await owner.start()
        starting = asyncio.create_task(other.start())
        why = "give every replica the same secret_file"
        await until(
            lambda: any("Nobody decides" in line and why in line for line in caplog.messages),
            every_seconds=LOOK_SECONDS,
        )
        starting.cancel()
        assert any(why in each for each in other.replication.status("chat").unreachable)
        for side in (other, owner):
            await vanish(side)

    run(main)


def test_one_that_goes_while_nobody_owns_waits_until_the_next_owner_has_saved_its_charges(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            other.submit("a")
            await other.has_sent("a")
            await vanish(owner)
            owner.sent.clear()
            other.end("a", 5.0)
            other.replication.hand_over()
            assert not await other.replication.saved(0.01)
            third = Side("third", tmp_path)
            await third.start()
            assert await other.replication.saved(LONG_SECONDS)
            assert third.queue.pool.usage()[0]["search"] == 5.0
            third.replication.hand_over()
            await third.replication.stop()

    run(main)


def test_one_that_asks_again_and_again_whether_there_is_an_owner_says_once_that_it_decides_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two(tmp_path) as (_, other):
            ports = other.replication._of_pool["chat"]  # pyright: ignore[reportPrivateUsage]
            member, status = ports.member, ports.member.status()
            caplog.clear()  # on a slow machine the first owner comes late, and both say so
            for role in (Role.WAITING, Role.DEGRADED, Role.WAITING, Role.DEGRADED, Role.WAITING, Role.FOLLOWER):
                known = SimpleNamespace(role=role, pools=["chat"], status=lambda: status)
                ports.member = cast(Member, known)
                ports._say_role()  # pyright: ignore[reportPrivateUsage]
            ports.member = member

    with caplog.at_level(logging.INFO, "fairshare.replicas"):
        run(main)
    said = [line.split(" ")[0] for line in caplog.messages if "decides for chat now" in line or "alone" in line]
    assert said == ["Nobody", "Replica"]


def test_of_an_owner_that_advertises_the_address_of_another_it_is_said_who_answers_there(tmp_path: Path) -> None:
    async def main() -> None:
        other = Side("other", tmp_path, PeerAddress("127.0.0.1", 0))
        await other.replication.start()
        at = other.replication._address  # pyright: ignore[reportPrivateUsage]
        owner = Side("owner", tmp_path, PeerAddress("127.0.0.1", 0), advertise=at)
        await owner.start()
        other.replication.add("chat", other.fresh(("chat",), 1), OPTIONS)
        starting = asyncio.create_task(other.replication.wait_for_owners())
        await until(lambda: other.role == "degraded", every_seconds=LOOK_SECONDS)
        who = "this replica itself answers there, and not owner"
        assert other.replication.unreachable() == [f"{at}: {who}; does each advertise its own address?"]
        other.submit("alone")
        await other.has_sent("alone")
        starting.cancel()
        for side in (other, owner):
            await vanish(side)

    run(main)


async def saved_slots(side: Side, folder: Path) -> bool:
    """Whether the store knows what it has in flight."""
    database = Database(SqliteFile(folder / "store.sqlite3"))
    try:
        left = await LeaseStore(database).left_behind("chat", epoch=1, pools=["chat"])
        return left is not None and b"search" in left.state
    finally:
        await database.close()


async def vanish(side: Side) -> None:
    """As if its process were killed: it says nothing more, to nobody."""
    replication = side.replication
    for ports in set(replication._of_pool.values()):  # pyright: ignore[reportPrivateUsage]
        ports.stop()
    await replication._port.close()  # pyright: ignore[reportPrivateUsage]
    calls = tuple(replication._calls)  # pyright: ignore[reportPrivateUsage]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await replication._database.close()  # pyright: ignore[reportPrivateUsage]
    side.vanished = True


def test_a_machine_shows_the_pool_as_its_owner_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairshare.gateway.replication.SHOW_SECONDS", 0.05)

    async def main() -> None:
        async with two(tmp_path, tcp=True) as (owner, other):
            for number in range(6):
                owner.submit(str(number))
            while (seen := other.replication.seen("chat")) is None or seen.held == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert seen.held == owner.queue.snapshot().held == 2
            assert owner.replication.seen("chat") is None
            for number in range(4):
                owner.end(str(number))
            await owner.has_sent("4", "5")

    run(main)


def test_phantoms_are_cleared_at_the_owner_whichever_replica_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            third = Side("third", tmp_path)
            await third.start()
            await third.becomes("follower")
            assert await third.replication.clear_phantoms("chat") == {}
            third.submit("lost")
            await third.has_sent("lost")
            await vanish(third)
            await until(lambda: owner.replication.status("chat").phantom_slots, every_seconds=LOOK_SECONDS)
            assert await other.replication.clear_phantoms("chat") == {"third": 1}
            assert owner.replication.status("chat").phantom_slots == 0
            assert await owner.replication.clear_phantoms("chat") == {}

    run(main)


def test_phantoms_last_as_long_as_a_reload_allows_requests_to_run_and_never_less_than_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):
            other.submit("lost")
            await other.has_sent("lost")
            for seconds in (3600.0, 1.0):
                owner.replication.allow("chat", seconds)
            await vanish(other)
            other.sent.clear()
            await until(lambda: owner.replication.status("chat").phantom_slots, every_seconds=LOOK_SECONDS)
            member = owner.replication._of_pool["chat"].member  # pyright: ignore[reportPrivateUsage]
            decides = member._owner  # pyright: ignore[reportPrivateUsage]
            assert decides is not None
            assert 3590.0 < decides.legacy(monotonic())[1].silent_seconds["other"] <= 3600.0

    run(main)


def test_why_phantoms_are_not_cleared_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairshare.gateway.replication.ANSWER_SECONDS", 0.1)

    async def main() -> None:
        async with two(tmp_path) as (owner, other):

            def hears(unless: Callable[[Asked | Told], bool]) -> None:
                """The owner passes over what an older version does not know, or says nothing at all."""
                hear = Replication._hear  # pyright: ignore[reportPrivateUsage]

                def older(peer: str, said: Asked | Told) -> None:
                    if not unless(said):
                        hear(owner.replication, peer, said)

                monkeypatch.setattr(owner.replication, "_hear", older)

            hears(lambda said: said.about == About.CLEAR_PHANTOMS)
            assert await other.replication.clear_phantoms("chat") is NotCleared.OLDER
            hears(lambda said: True)
            assert await other.replication.clear_phantoms("chat") is NotCleared.SILENT
            await vanish(owner)
            await until(lambda: other.role != "follower", every_seconds=LOOK_SECONDS)
            assert await other.replication.clear_phantoms("chat") is NotCleared.NO_OWNER

    run(main)


def test_what_another_version_tells_differently_is_said_once_and_ends_no_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two(tmp_path) as (_, other):
            for _ in range(2):
                for about in (About.CONFIGURED, About.POOLS, About.ENDED, About.COUNTS):
                    other.replication.send("owner", Told(0, about, b"[{}]"))
                other.replication.send("owner", Asked(0, About.CLEAR_PHANTOMS, b"\xff"))
            other.submit("goes on")
            await other.has_sent("goes on")

    with caplog.at_level(logging.WARNING):
        run(main)
    said = [line for line in caplog.messages if "in a way that this version does not read" in line]
    assert [line.split("'")[1] for line in said] == ["configured", "pools", "ended", "clear phantoms"]


def test_replicas_that_are_configured_differently_say_so_until_they_are_alike(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (owner, other):

            async def differ(*found: list[str]) -> None:
                await until(
                    lambda: [side.replication.status("chat").differing for side in (owner, other)] == list(found),
                    every_seconds=LOOK_SECONDS,
                )

            await differ([], [])
            # What only one of two versions knows is no difference.
            other.configured = {"capacity": "8", "shares": "ads 1/2, search 1/2", "new": "1"}
            other.replication.tell_configured()
            await differ(["other: capacity, shares"], ["owner: capacity, shares"])
            other.configured = dict(owner.configured)
            other.replication.tell_configured()
            await differ([], [])

    run(main)


def test_a_free_lease_is_left_to_the_replica_that_owns_fewer(tmp_path: Path) -> None:
    async def main() -> None:
        many, none = Side("many", tmp_path), Side("none", tmp_path)
        sides = (many, none)

        def add(side: Side, lease: str) -> None:
            side.replication.add(lease, {lease: side.fresh((lease,), 1)["chat"]}, SPREAD)

        try:
            for side in sides:
                await side.replication.start()
                await side.database.migrate()  # nobody waits for that below
            for lease in ("a", "b"):
                add(many, lease)
                await many.replication.wait_for_owners()
            for side in sides:
                add(side, "c")
            await asyncio.gather(*(side.replication.wait_for_owners() for side in sides))
            roles = [side.replication.status("c").role for side in sides]
            assert roles == ["follower", "owner"]
        finally:
            for side in sides:
                side.replication.hand_over()
            for side in sides:
                await side.replication.stop()

    run(main)
