"""The gateway as a whole, in this process: start, reload, drain, end. Engines are scripted; nothing waits for time."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairshare.compose import Gateway
from fairshare.config import ConfigError, Settings, parse
from fairshare.errors import OperatorError
from fairshare.gateway.listening import bound_to, listening_socket
from fairshare.gateway.options import Address, GatewaySpec, PeerTlsSpec, ReplicasSpec, StoreSpec, WebhookSpec
from fairshare.gateway.status import PoolStatus
from fairshare.storage.address import SqliteFile
from gateway.hostile_engine import Asked, HostileEngine, Wire, answer, completion
from gateway.rig import Client, Reply, open_sockets, request_bytes, run, until
from support.certificates import Authority

KEYS = {team: f"fs-{team}" for team in ("red", "blue")}


class Engine(HostileEngine):
    """Healthy, idle by its own account, and answers completions when `gate` is open."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.gate = asyncio.Event()
        self.gate.set()
        self.healthy = asyncio.Event()
        self.healthy.set()
        self.completions: list[Asked] = []
        self._asked_more = asyncio.Condition()

    async def _answer(self, asked: Asked, wire: Wire) -> None:
        match asked.path:
            case "/health":
                await self.healthy.wait()
                await wire.send(answer(b""))
            case "/metrics":
                await wire.send(answer(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"))
            case "/v1/models":
                await wire.send(answer(b'{"data": [{"id": "tiny", "max_model_len": 2048}]}'))
            case "/v1/chat/completions":
                async with self._asked_more:
                    self.completions.append(asked)
                    self._asked_more.notify_all()
                await self.gate.wait()
                await wire.send(answer(completion()))
            case _:
                await wire.send(answer(b"{}", status="404 Not Found"))

    async def asked_for_completions(self, count: int) -> None:
        async with self._asked_more:
            await self._asked_more.wait_for(lambda: len(self.completions) >= count)


def team(name: str) -> str:
    return f'{{name: {name}, keys: [{{sha256: "{hashlib.sha256(KEYS[name].encode()).hexdigest()}"}}]}}'


def settings(*pools: str, teams: tuple[str, ...] = ("red", "blue"), rest: str = "") -> Settings:
    text = "\n".join(
        [
            "listen: 127.0.0.1:0",
            "store: none",
            rest or "admin: 127.0.0.1:0",
            "pools:",
            *(f"  - {{{pool}}}" for pool in pools),
            "teams:",
            *(f"  - {team(name)}" for name in teams),
        ]
    )
    return parse(text, path=Path("fairshare.yaml"), environ={"KEY": "admin-secret", "OTHER": "other-secret"})


def pool(engine: HostileEngine, more: str = "", *, name: str = "chat", capacity: int = 4, model: str = "tiny") -> str:
    shares = "" if "shares" in more else ", shares: {red: 1/2, blue: 1/2}"
    return f"name: {name}, capacity: {capacity}, models: {{{model}: tiny}}, instances: ['{engine.url}']{shares}{more}"


class Running:
    """A gateway that runs, and its clients."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.clients: list[Client] = []

    async def send(self, team: str = "red", model: str = "tiny") -> Client:
        """Send a request on a connection of its own, and do not wait for the answer."""
        at = self.gateway.listening_at
        client = Client(*await asyncio.open_connection(at.host, at.port))
        self.clients.append(client)
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        await client.send(request_bytes(body=body, key=KEYS[team]))
        return client

    async def ask(self, team: str = "red", model: str = "tiny") -> Reply:
        client = await self.send(team, model)
        reply = await client.read()
        client.leave()
        return reply

    def pool(self, name: str = "chat") -> PoolStatus:
        return {status.name: status for status in self.gateway.pools()}[name]

    async def admin(self, path: str, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://{self.gateway.admin_at}{path}", headers=headers)

    async def held(self, count: int) -> None:
        """Waits until so many are held."""
        await until(lambda: self.pool().held == count)


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[Engine]]:
    started = [Engine() for _ in range(count)]
    for engine in started:
        await engine.start()
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()


@asynccontextmanager
async def running(first: Settings) -> AsyncIterator[Running]:
    gateway = Gateway(first)
    running = Running(gateway)
    try:
        await gateway.start()
        yield running
    finally:
        for client in running.clients:
            client.leave()
        await gateway.stop()
    assert all(status.in_flight == 0 and status.held == 0 for status in gateway.pools())


def test_a_started_gateway_is_ready_serves_and_counts() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine))) as it:
            assert (await it.admin("/readyz")).json() == {"status": "ready"}
            reply = await it.ask()
            assert (reply.status, reply.headers["x-fairshare-pool"]) == (200, "chat")
            red = next(status for status in it.pool().teams if status.team == "red")
            assert red.usage == pytest.approx(10 * 1 + 5 * 2, rel=1e-3)
            assert 'fairshare_requests_total{class="interactive",code="200"' in (await it.admin("/metrics")).text
            assert "<title>fairshare</title>" in (await it.admin("/")).text

    run(main)


def test_it_is_not_ready_before_the_start_and_while_no_engine_is_healthy() -> None:
    async def main() -> None:
        async with engines(1) as (engine,):
            await engine.stop()
            gateway = Gateway(settings(pool(engine)))
            assert gateway.not_ready() == "the gateway is starting or shutting down"
            async with running(settings(pool(engine))) as it:
                assert (await it.admin("/healthz")).status_code == 200
                assert (await it.admin("/readyz")).json()["reason"] == "no engine is healthy"
                assert it.pool().capacity == 0
                assert (await it.ask()).code == "no_instance"

    run(main)


def test_a_port_in_use_is_found_before_anything_is_started() -> None:
    async def main() -> None:
        async with engines(1) as (engine,):
            with listening_socket(Address("127.0.0.1", 0), purpose="the test") as taken:
                sockets = len(open_sockets())
                gateway = Gateway(settings(pool(engine), rest=f"admin: {bound_to(taken)}"))
                with pytest.raises(OperatorError, match="the admin port cannot listen on"):
                    await gateway.start()
                await gateway.stop()
                assert len(open_sockets()) == sockets
            assert engine.asked == []

    run(main)


def test_a_reload_changes_capacity_shares_and_half_life_and_keeps_usage_and_what_runs() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine))) as it:
            await it.ask()
            engine.gate.clear()
            client = await it.send()
            await engine.asked_for_completions(2)
            changed = pool(engine, ", half_life: 1h, shares: {red: 1/4, blue: 3/4}", capacity=8)
            await it.gateway.reload(settings(changed))
            status = it.pool()
            assert (status.capacity, status.half_life_seconds, status.in_flight) == (8, 3600.0, 1)
            assert {each.team: each.reserved for each in status.teams} == {"red": 2, "blue": 6}
            assert next(each.usage for each in status.teams if each.team == "red") > 19
            engine.gate.set()
            assert (await client.read()).status == 200

    run(main)


def test_a_reload_switches_keys_at_once() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine), teams=("red",))) as it:
            assert (await it.ask("blue")).code == "invalid_api_key"
            await it.gateway.reload(settings(pool(engine), teams=("blue",)))
            assert (await it.ask("blue")).status == 200
            assert (await it.ask("red")).code == "invalid_api_key"

    run(main)


def test_a_reload_adds_and_removes_pools_and_instances() -> None:
    async def main() -> None:
        async with engines(2) as (first, second), running(settings(pool(first))) as it:
            added = pool(second, name="more", model="other")
            await it.gateway.reload(settings(pool(first), added))
            assert (await it.ask(model="other")).headers["x-fairshare-pool"] == "more"
            both = pool(first).replace(f"'{first.url}'", f"'{first.url}', '{second.url}'")
            await it.gateway.reload(settings(both))
            assert [status.name for status in it.gateway.pools()] == ["chat"]
            assert (await it.ask(model="other")).code == "model_not_found"
            assert [(each.id, each.part) for each in it.pool().instances] == [(first.url, 2), (second.url, 2)]

    run(main)


def test_switching_to_observe_lets_go_what_is_held_and_needs_no_restart() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine, capacity=2))) as it:
            engine.gate.clear()
            clients = [await it.send() for _ in range(4)]
            await engine.asked_for_completions(2)
            await it.held(2)
            await it.gateway.reload(settings(pool(engine, ", dispatch: observe", capacity=2)))
            await engine.asked_for_completions(4)
            assert it.pool().dispatch == "observe"
            priorities = [asked.json.get("priority") for asked in engine.completions]
            assert priorities[2:] == [None, None]
            engine.gate.set()
            assert [(await client.read()).status for client in clients] == [200] * 4
            assert it.pool().in_flight == 0
            await it.gateway.reload(settings(pool(engine, capacity=2)))
            assert (await it.ask()).headers["x-fairshare-priority"] == "0"

    run(main)


def test_a_reload_that_changes_how_a_pool_dispatches_keeps_what_runs_and_what_is_held() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine, capacity=2))) as it:
            engine.gate.clear()
            clients = [await it.send() for _ in range(4)]
            await it.held(2)
            await it.gateway.reload(settings(pool(engine, ", hold: {batch_every: 5}", capacity=2)))
            assert (it.pool().held, it.pool().in_flight) == (2, 2)
            engine.gate.set()
            assert [(await client.read()).status for client in clients] == [200] * 4
            assert len(engine.completions) == 4

    run(main)


def test_a_reload_may_give_a_pool_a_fallback_and_take_it_away() -> None:
    async def main() -> None:
        async with engines(2) as (first, second):
            spare = pool(second, name="spare", model="other")
            alone = ", shares: {red: 1}"
            async with running(settings(pool(first, alone, capacity=1), spare)) as it:
                first.gate.clear()
                clients = [await it.send() for _ in range(2)]
                await it.held(1)
                await it.gateway.reload(settings(pool(first, alone + ", fallback: spare", capacity=1), spare))
                assert (await clients[1].read()).status == 200
                assert len(second.completions) == 1
                await it.gateway.reload(settings(pool(first, alone, capacity=1)))
                assert [status.name for status in it.gateway.pools()] == ["chat"]
                first.gate.set()
                assert (await clients[0].read()).status == 200

    run(main)


def test_a_pool_keeps_up_with_a_fallback_whose_queue_was_replaced() -> None:
    async def main() -> None:
        async with engines(3) as (first, second, third):
            chat = pool(first, ", shares: {red: 1}, fallback: spare", capacity=1)
            changed = ", hold: {batch_every: 5}"
            async with running(settings(chat, pool(second, name="spare", model="other"))) as it:
                await it.gateway.reload(settings(chat, pool(second, changed, name="spare", model="other")))
                await it.gateway.reload(settings(chat, pool(third, changed, name="spare", model="other")))
                first.gate.clear()
                clients = [await it.send() for _ in range(2)]
                assert (await clients[1].read()).status == 200
                assert (len(second.completions), len(third.completions)) == (0, 1)
                first.gate.set()
                assert (await clients[0].read()).status == 200

    run(main)


def test_addresses_stay_until_a_restart_and_the_admin_key_stays_with_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def with_admin(engine: HostileEngine, admin: str) -> Settings:
        return settings(pool(engine), rest=f"admin: {admin}")

    async def main() -> None:
        async with engines(1) as (engine,):
            first = with_admin(engine, "{listen: 127.0.0.1:0, key: '${KEY}'}")
            async with running(first) as it:
                assert (await it.admin("/api/v1/pools")).status_code == 401
                assert (await it.admin("/api/v1/pools", "admin-secret")).status_code == 200
                await it.gateway.reload(with_admin(engine, "{listen: 127.0.0.1:0, key: '${OTHER}'}"))
                assert (await it.admin("/api/v1/pools", "admin-secret")).status_code == 401
                assert (await it.admin("/api/v1/pools", "other-secret")).status_code == 200
                with caplog.at_level(logging.WARNING, "fairshare"):
                    await it.gateway.reload(with_admin(engine, "127.0.0.1:1"))
                assert "admin changed from 127.0.0.1:0 to 127.0.0.1:1; this needs a restart." in caplog.text
                assert (await it.admin("/api/v1/pools")).status_code == 401
                assert "secret" not in caplog.text

    run(main)


def test_what_needs_a_restart_is_said_at_a_reload_and_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine))) as it:
            same = settings(pool(engine))
            store = StoreSpec(address=SqliteFile(tmp_path / "other.sqlite3"), keep_seconds=1e9)
            notify = WebhookSpec(url="https://hooks.example/x", secret="s")
            with caplog.at_level(logging.WARNING, "fairshare"):
                await it.gateway.reload(replace(same, gateway=replace(same.gateway, store=store, notify=notify)))
            assert "store changed; this needs a restart." in caplog.text
            assert "notify changed; this needs a restart." in caplog.text
            assert not (tmp_path / "other.sqlite3").exists()

    run(main)


def test_draining_finishes_what_was_accepted_held_requests_too_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with engines(1) as (engine,), running(settings(pool(engine, capacity=1))) as it:
            engine.gate.clear()
            clients = [await it.send() for _ in range(2)]
            await it.held(1)
            draining = asyncio.create_task(it.gateway.drain())
            await until(lambda: it.gateway.not_ready() is not None)
            with pytest.raises(ConnectionRefusedError):
                await it.send()
            assert (await it.admin("/readyz")).status_code == 503
            engine.gate.set()
            assert [(await client.read()).status for client in clients] == [200, 200]
            await draining

    run(main)


def test_what_does_not_finish_in_time_is_told_that_the_gateway_shuts_down() -> None:
    async def main() -> None:
        async with engines(1) as (engine,):
            limited = settings(pool(engine, capacity=1), rest="admin: 127.0.0.1:0\nlimits: {drain: 0s}")
            async with running(limited) as it:
                engine.gate.clear()
                clients = [await it.send() for _ in range(2)]
                await it.held(1)
                await it.gateway.drain()
                for client in clients:
                    reply = await client.read()
                    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "shutting_down", "1")

    run(main)


def test_many_pools_that_fall_back_on_each_other_are_built_in_any_order() -> None:
    async def main() -> None:
        async with engines(1) as (engine,):
            chain = ["a", "b", "c"]
            pools: list[str] = []
            for name, fallback in zip(chain, [*chain[1:], None], strict=True):
                more = "" if fallback is None else f", fallback: {fallback}"
                pools.append(pool(engine, more, name=name, model=f"tiny-{name}"))
            async with running(settings(*pools)) as it:
                assert [status.fallback for status in it.gateway.pools()] == ["b", "c", None]
                reordered: list[Any] = [pools[2], pools[0], pools[1]]
                await it.gateway.reload(settings(*reordered))
                assert [status.name for status in it.gateway.pools()] == ["c", "a", "b"]

    run(main)


def test_a_team_over_its_soft_budget_only_borrows_until_it_has_more(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine()
        await engine.start()
        text = "\n".join(
            [
                "listen: 127.0.0.1:0",
                "admin: 127.0.0.1:0",
                f"pools: [{{{pool(engine)}}}]",
                f"teams: [{team('red')}, {team('blue')}]",
            ]
        )
        try:
            async with running(parse(text, path=tmp_path / "fairshare.yaml", environ={})) as it:
                api = f"http://{it.gateway.admin_at}/api/v1"
                async with httpx.AsyncClient() as client:

                    async def reserved() -> int:
                        """What red owns after the next look at the store."""
                        accounts = it.gateway._accounts  # pyright: ignore[reportPrivateUsage]
                        assert accounts is not None
                        await accounts._look()  # pyright: ignore[reportPrivateUsage]
                        return next(each.reserved for each in it.gateway.pools()[0].teams if each.team == "red")

                    for path, body in (
                        ("organisations", {"name": "lab"}),
                        ("teams", {"name": "red", "organisation": "lab"}),
                        (
                            "budgets",
                            {"owner": "team:red", "period": "day", "soft_cost_units": 1, "borrow_over_soft": True},
                        ),
                    ):
                        answer = await client.post(f"{api}/{path}", json=body)
                        assert answer.status_code == 201, answer.text
                    number = answer.json()["id"]
                    assert await reserved() == 2
                    assert (await it.ask("red")).status == 200
                    assert await reserved() == 0
                    reply = await it.ask("red")
                    assert reply.headers["x-fairshare-standing"] == "borrowing"
                    assert (await client.delete(f"{api}/budgets/{number}")).status_code == 204
                    assert await reserved() == 2
                    assert (await it.ask("red")).headers["x-fairshare-standing"] == "within-share"
        finally:
            await engine.stop()

    run(main)


def test_a_limit_in_flight_is_held_by_a_request_until_it_ends_and_no_longer(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine()
        await engine.start()
        text = "\n".join(
            [
                "listen: 127.0.0.1:0",
                "admin: 127.0.0.1:0",
                f"pools: [{{{pool(engine)}}}]",
                f"teams: [{team('red')}, {team('blue')}]",
            ]
        )
        try:
            async with running(parse(text, path=tmp_path / "fairshare.yaml", environ={})) as it:
                api = f"http://{it.gateway.admin_at}/api/v1"
                async with httpx.AsyncClient() as client:
                    await client.post(f"{api}/organisations", json={"name": "lab"})
                    await client.post(f"{api}/teams", json={"name": "red", "organisation": "lab"})
                    limit = {"owner": "team:red", "kind": "in_flight", "value": 1}
                    assert (await client.put(f"{api}/limits", json=limit)).status_code == 204
                accounts = it.gateway._accounts  # pyright: ignore[reportPrivateUsage]
                assert accounts is not None
                await accounts._look()  # pyright: ignore[reportPrivateUsage]
                for _ in range(3):
                    assert (await it.ask("red")).status == 200
                asked = len(engine.completions)
                engine.gate.clear()
                first = await it.send("red")
                await engine.asked_for_completions(asked + 1)
                refused = await it.ask("red")
                assert (refused.status, refused.code) == (429, "too_many_in_flight")
                assert refused.headers["retry-after"] == "1"
                engine.gate.set()
                assert (await it.ask("blue")).status == 200  # its own team's limits only
                assert (await first.read()).status == 200
                assert (await it.ask("red")).status == 200
        finally:
            await engine.stop()

    run(main)


def test_a_reload_with_one_certificate_that_cannot_be_used_shows_none_of_the_others(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def main() -> None:
        async with engines(1) as (engine,):
            alone = settings(pool(engine)).gateway
            same = shared(tmp_path, replace(alone, tls=authority.issue()), authority.peer())
            async with running(same) as it:

                async def serial() -> str:
                    at, context = it.gateway.listening_at, authority.client_context()
                    client = Client(*await asyncio.open_connection(at.host, at.port, ssl=context))
                    client.leave()
                    return client.writer.get_extra_info("peercert")["serialNumber"]

                first = await serial()
                authority.issue()
                authority.peer().key.write_text("no key")
                with pytest.raises(ConfigError, match="a certificate cannot be used"):
                    await it.gateway.reload(same)
                assert await serial() == first
                authority.peer()
                await it.gateway.reload(same)
                assert await serial() != first

    run(main)


def shared(folder: Path, spec: GatewaySpec, tls: PeerTlsSpec | None = None) -> Settings:
    """The same as one of several replicas."""
    store = StoreSpec(address=SqliteFile(folder / "store.sqlite3"), keep_seconds=1e9)
    replicas = ReplicasSpec(listen=Address("127.0.0.1", 0), secret=b"s" * 32, tls=tls)
    return Settings(folder / "fairshare.yaml", replace(spec, store=store, replicas=replicas), ())


def test_a_replica_decides_for_nobody_before_it_has_asked_its_engines_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with engines(1) as (engine,):
            engine.healthy.clear()
            gateway = Gateway(shared(tmp_path, settings(pool(engine)).gateway))
            starting = asyncio.create_task(gateway.start())
            await until(lambda: bool(engine.asked))
            replication = gateway._replication  # pyright: ignore[reportPrivateUsage]
            assert replication is not None
            before = replication.status("chat").role, bool(replication._calls)  # pyright: ignore[reportPrivateUsage]
            engine.healthy.set()
            await starting
            after = replication.status("chat").role
            await gateway.stop()
            assert (before, after) == (("waiting", False), "owner")

    run(main)
