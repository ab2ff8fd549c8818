"""A dump holds what decisions depend on, and nothing that must not leave the process."""

import json

import msgspec

from fairshare.core.decisions import Mode
from fairshare.gateway.ports import LedgerCounts
from fairshare.gateway.state_dump import DumpParts, StateDump, written
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
