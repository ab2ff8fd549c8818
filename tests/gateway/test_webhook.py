"""Who is told of a budget, how it is signed, and where it may never be sent."""

import asyncio
import hashlib
import hmac
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from fairshare.accounts.gate import SoftPassed
from fairshare.gateway.options import WebhookSpec
from fairshare.gateway.webhook import MAX_WAITING, Webhook, may_be_called, signature

PASSED = SoftPassed(
    owner="team:search",
    budget_id=3,
    soft_cost_units=5.0,
    used_cost_units=6.0,
    borrows_only=True,
    resets_at=float("inf"),
)


class Receiver:
    """Answers each POST with the next status."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.came = asyncio.Event()
        self.done = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        self.asked.append((headers, body))
        self.came.set()
        status = next(self._statuses)
        writer.write(b"HTTP/1.1 %d x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n" % status)
        await writer.drain()
        writer.close()
        if status != 503:
            self.done.set()


def sent(monkeypatch: pytest.MonkeyPatch, *statuses: int, allow_internal: bool = True, secret: str = "s") -> Receiver:
    """Tells a receiver of one event, until it answered with something else than 503."""
    monkeypatch.setattr("fairshare.gateway.webhook.PAUSES_SECONDS", (0.0, 0.0))
    receiver: list[Receiver] = []

    async def main() -> None:
        receiver.append(Receiver(*statuses))
        server = await asyncio.start_server(receiver[0].serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = WebhookSpec(url=f"http://127.0.0.1:{port}/hook?a=b", secret=secret, allow_internal=allow_internal)
        webhook = Webhook(spec, wall=lambda: 1700.9)
        async with asyncio.timeout(20):
            await webhook._send(PASSED)  # pyright: ignore[reportPrivateUsage]
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    return receiver[0]


def test_an_event_is_signed_json(monkeypatch: pytest.MonkeyPatch) -> None:
    ((headers, body),) = sent(monkeypatch, 204, secret="the-secret").asked
    event = json.loads(body)
    assert (event["event"], event["owner"], event["budget"]) == ("budget_soft_passed", "team:search", 3)
    assert event["resets_at"] is None
    expected = hmac.new(b"the-secret", b"1700." + body, hashlib.sha256).hexdigest()
    assert headers["x-fairshare-signature"] == f"t=1700,v1={expected}"
    assert signature("other", 1700, body) != headers["x-fairshare-signature"]


def test_what_fails_is_tried_again_as_the_same_event(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sent(monkeypatch, 503, 503, 200).asked
    assert len({json.loads(body)["id"] for _, body in asked}) == 1
    assert len(asked) == 3


def test_it_is_given_up_after_the_last_try(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asked = sent(monkeypatch, 503, 503, 503, 200).asked
    assert len(asked) == 3
    assert "was not told of budget 3: it answers with status 503" in caplog.text


@pytest.mark.parametrize("status", [302, 400, 410])
def test_what_another_try_cannot_help_and_a_redirect_are_not_followed_up(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    assert len(sent(monkeypatch, status, 200).asked) == 1


@pytest.mark.parametrize("answer", [b"x" * 200_000, b"", b"HTTP/1.1\r\n", b"HTTP/1.1 2x0 \xff\r\n", b"\r\n"])
def test_an_answer_that_is_none_is_a_failure_like_others(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr("fairshare.gateway.webhook.PAUSES_SECONDS", (0.0, 0.0))
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        webhook = Webhook(WebhookSpec(url=url, secret="s", allow_internal=True), wall=lambda: 0.0)
        async with asyncio.timeout(20):
            await webhook._send(PASSED)  # pyright: ignore[reportPrivateUsage]
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    assert asked == 3


def test_an_internal_address_is_not_even_connected_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sent(monkeypatch, 200, allow_internal=False).asked == []
    assert "an internal address; see notify.allow_internal" in caplog.text


@pytest.mark.parametrize(
    ("address", "public", "internal"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1::1", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("100.64.0.1", False, True),
        ("::1", False, True),
        ("fec0::1", False, True),
        ("fd12::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("100.100.100.200", False, False),
        ("fd00:ec2::254", False, False),
        ("fd20:ce::254", False, False),
        ("fd00:42::42", False, False),
        ("fd00:c1::a9fe:a9fe", False, False),
        ("::ffff:0:10.0.0.1", False, False),
        ("168.63.129.16", False, False),
        ("192.0.0.192", False, False),
        ("::127.0.0.1", False, False),
        ("64:ff9b:1::a9fe:a9fe", False, False),
        ("fe80::1%eth0", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:7f00:1::", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
    ],
)
def test_where_it_may_be_sent(address: str, public: bool, internal: bool) -> None:
    assert may_be_called(address, allow_internal=False) == public
    assert may_be_called(address, allow_internal=True) == internal


def test_telling_never_waits_and_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    webhook = Webhook(WebhookSpec(url="http://h", secret="s"), wall=lambda: 0.0)
    for _ in range(MAX_WAITING + 1):
        webhook.tell(PASSED)
    assert "that of budget 3 is lost" in caplog.text


def test_events_go_out_one_by_one_while_it_runs() -> None:
    async def main() -> None:
        receiver = Receiver(200)
        server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        webhook = Webhook(WebhookSpec(url=url, secret="s", allow_internal=True), wall=lambda: 0.0)
        webhook.start()
        webhook.tell(PASSED)
        async with asyncio.timeout(20):
            await receiver.done.wait()
        await webhook.stop()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_what_waits_at_the_end_is_tried_once_more_and_what_still_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairshare.gateway.webhook.PAUSES_SECONDS", (1e6,))

    async def main() -> Receiver:
        receiver = Receiver(503, 200, 200, 503)
        server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
        spec = WebhookSpec(
            url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", secret="s", allow_internal=True
        )
        webhook = Webhook(spec, wall=lambda: 0.0)
        webhook.start()
        for budget_id in (1, 2, 3, 4):
            webhook.tell(replace(PASSED, budget_id=budget_id))
        async with asyncio.timeout(20):
            await receiver.came.wait()
            await webhook.stop()
        server.close()
        await server.wait_closed()
        return receiver

    receiver = asyncio.run(main())
    # The first one failed, and waited for its next try.
    assert [json.loads(body)["budget"] for _, body in receiver.asked] == [1, 1, 2, 3]
    assert "was not told of 2 budgets before the end: it answers with status 503" in caplog.text


def connected(monkeypatch: pytest.MonkeyPatch, *resolutions: list[str], allow_internal: bool) -> list[tuple[Any, ...]]:
    """What is connected to when a name is something else each time that it is asked for."""
    monkeypatch.setattr("fairshare.gateway.webhook.PAUSES_SECONDS", (0.0,) * (len(resolutions) - 1))
    connections: list[tuple[Any, ...]] = []
    answers = iter(resolutions)

    async def resolve(_: object, host: str, port: int, **__: object) -> list[Any]:
        assert (host, port) == ("hook.example", 443)
        return [(None, None, None, "", (address, port)) for address in next(answers)]

    async def connect(address: str, port: int, **tls: Any) -> Any:
        connections.append((address, port, tls["server_hostname"], tls["ssl"] is not None))
        raise ConnectionRefusedError

    async def main() -> None:
        spec = WebhookSpec(url="https://hook.example/x", secret="s", allow_internal=allow_internal)
        await Webhook(spec, wall=lambda: 0.0)._send(PASSED)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    asyncio.run(main())
    return connections


@pytest.mark.parametrize(
    ("addresses", "allow_internal"),
    [
        (["93.184.216.34", "169.254.169.254"], True),
        (["93.184.216.34", "::ffff:169.254.169.254"], True),
        (["2606:2800:220:1::1", "10.0.0.1"], False),
        (["::ffff:127.0.0.1"], False),
    ],
)
def test_a_name_of_which_one_address_may_not_be_called_is_not_called_at_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, addresses: list[str], allow_internal: bool
) -> None:
    assert connected(monkeypatch, addresses, allow_internal=allow_internal) == []
    assert "an internal address" in caplog.text


def test_a_name_that_becomes_another_address_meanwhile_is_looked_at_each_time_and_called_where_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolutions = ["93.184.216.34"], ["93.184.216.35"], ["127.0.0.1"]
    assert connected(monkeypatch, *resolutions, allow_internal=False) == [
        ("93.184.216.34", 443, "hook.example", True),
        ("93.184.216.35", 443, "hook.example", True),
    ]
