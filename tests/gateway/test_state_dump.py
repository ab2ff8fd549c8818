"""A dump holds what decisions depend on, and nothing that must not leave the process."""

import json
from typing import Any

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.accounts.rights import Actor
from fairshare.core.decisions import Mode
from fairshare.gateway.admin import Pages, admin_app
from fairshare.gateway.identity import hash_key
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.ports import Counters, LedgerCounts
from fairshare.gateway.state_dump import DUMP_PATH, DumpParts, StateDump, written
from gateway.hostile_engine import forever
from gateway.rig import KEYS, STREAM, Rig, request_bytes, run
from gateway.statuses import pool_status_of


def of(rig: Rig) -> StateDump:
    return StateDump(
        DumpParts(
            driver=rig.driver,
            pools=lambda: [pool_status_of("chat")],
            budgets=list,
            ledger=lambda: LedgerCounts(store_is_up=True, pending=3, written_total=5, dropped_total=0),
            wall=lambda: 1_796_025_600.0,
        )
    )


def test_a_dump_has_what_is_held_and_sent_and_decided_and_no_key_and_no_prompt() -> None:
    async def main() -> None:
        async with Rig.started(mode=Mode.HOLD, capacity=2) as rig:
            secret = "the moon is made of cheese"
            body = STREAM | {"messages": [{"role": "user", "content": secret}]}
            await rig.ask("/v1/chat/completions", body | {"stream": False})
            rig.engine.script = forever
            clients = [await rig.client() for _ in range(4)]
            for client in clients:
                await client.send(request_bytes(body=body))
            await rig.held(2)
            content = of(rig).encoded()
            dump = json.loads(content)
            assert dump["at"] == "2026-11-30T08:00:00.000Z"
            assert [(each["team"], each["place"]) for each in dump["requests"]] == [("red", "sent")] * 2 + [
                ("red", "held")
            ] * 2
            assert dump["queues"]["chat"]["held"] == 2
            assert dump["queues"]["chat"]["teams"][0]["team"] == "red"
            assert [each["what"] for each in dump["decisions"][:2]] == ["held", "held"]
            assert dump["decisions"][0]["decision"]["capacity_slots"] == 2
            assert [each["outcome"] for each in dump["records"]] == ["completed"]
            assert dump["pools"][0]["name"] == "chat"
            assert dump["counters"]["open_requests"] == 4
            assert dump["ledger"]["pending"] == 3
            for unwanted in (secret, "engine-secret", *KEYS):
                assert unwanted.encode() not in content
            assert msgspec.json.encode(dump)
            for client in clients:
                client.leave()

    run(main)


def test_a_dump_is_written_where_only_its_owner_may_read_it() -> None:
    path = written(b"{}", process=4711)
    try:
        assert path.read_bytes() == b"{}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.name.startswith("fairshare-dump-4711-")
    finally:
        path.unlink()


def test_only_the_admin_key_gets_a_dump_and_no_operator_of_the_accounts() -> None:
    async def nothing(_: Request) -> Response:
        return Response()

    class Empty(StateDump):
        def encoded(self) -> bytes:
            return b"{}"

    no_parts: Any = None
    app = admin_app(
        pools=lambda: (),
        metrics=Metrics(lambda: (), Counters),
        not_ready=lambda: None,
        pages=Pages(documents={}, content_security_policy=""),
        key=lambda: "admin-secret",
        dump=Empty(no_parts).routes(),
        accounts=[Route("/api/v1/teams", nothing)],
        operator=lambda sha256: Actor(name="somebody") if sha256 == hash_key("operator-secret") else None,
    )

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:

            async def status(path: str, key: str) -> int:
                return (await client.get(path, headers={"Authorization": f"Bearer {key}"})).status_code

            assert await status("/api/v1/teams", "operator-secret") == 200
            assert await status(DUMP_PATH, "operator-secret") == 401
            assert await status(DUMP_PATH, "admin-secret") == 200
            assert (await client.get(DUMP_PATH)).status_code == 401

    run(main)
