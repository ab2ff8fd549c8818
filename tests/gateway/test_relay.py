"""A request's way through the gateway when nothing goes wrong."""

import pytest

from fairshare.core.decisions import Decision, Request, Send
from fairshare.core.priority import Standing
from fairshare.gateway.ports import Outcome
from gateway.hostile_engine import DONE, event, usage_event
from gateway.rig import STREAM, Rig, request_bytes, run


def test_a_completion_comes_back_as_the_engine_wrote_it_and_is_charged() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask()
            assert reply.status == 200
            assert reply.json["choices"][0]["message"]["content"] == "hello"
            assert reply.headers["x-fairshare-pool"] == "chat"
            assert reply.headers["x-fairshare-standing"] == "within-share"
            assert reply.headers["x-fairshare-priority"] == "0"
            assert reply.headers["x-fairshare-held-ms"] == "0"
            assert "x-fairshare-explain" not in reply.headers
            assert reply.headers["x-request-id"]
            record = await rig.kept.wait(1)
            assert (record.prompt_tokens, record.completion_tokens, record.cost_units) == (10, 5, 20.0)
            assert (record.team, record.pool, record.model) == ("red", "chat", "tiny")
            assert (record.outcome, record.status, record.estimated) == (Outcome.COMPLETED, 200, False)
            assert record.standing is Standing.WITHIN_SHARE
            assert (record.finish_reason, record.degraded) == ("stop", False)
            assert rig.pool.usage()[0]["red"] == 20.0

    run(main)


def test_a_stream_is_relayed_byte_for_byte_without_the_usage_event_that_was_not_asked_for() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask(body=STREAM)
            assert reply.body == event("hel") + event("lo") + event("", finish="stop") + DONE
            assert rig.engine.asked[0].json["stream_options"] == {"include_usage": True}
            record = await rig.kept.wait(1)
            assert (record.prompt_tokens, record.completion_tokens, record.stream) == (10, 5, True)
            assert record.finish_reason == "stop"

    run(main)


def test_a_stream_keeps_the_usage_event_that_was_asked_for() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            reply = await rig.ask(body=STREAM | {"stream_options": {"include_usage": True}})
            assert usage_event() in reply.body

    run(main)


def test_requests_share_a_kept_alive_connection_on_both_sides() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            client = await rig.client()
            for _ in range(3):
                await client.send(request_bytes())
                assert (await client.read()).status == 200
            assert rig.engine.connections == 1
            assert rig.driver.counters.connections_total == 1

    run(main)


def test_a_request_that_was_sent_without_the_pools_owner_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            queue = rig.queue
            submitted = queue.submitted

            def alone(request: Request) -> list[Decision]:
                decisions = submitted(request)
                for decision in decisions:
                    if isinstance(decision, Send):
                        decision.degraded = True
                return decisions

            monkeypatch.setattr(type(queue), "submitted", lambda _, request: alone(request))
            await rig.ask()
            monkeypatch.undo()
            await rig.ask()
            await rig.kept.wait(2)
            assert [record.degraded for record in rig.records] == [True, False]

    run(main)
