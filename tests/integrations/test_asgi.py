"""The ASGI middleware around an application that does as it is told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import pytest

from fairshare.core.decisions import HoldOptions
from fairshare.gateway.options import EmbeddedPool
from fairshare.integrations.admission import Admission
from fairshare.integrations.asgi import FairshareMiddleware
from fairshare.wire.usage import Usage


class Site:
    """One slot; the application waits for `gate` and answers with the body that it read."""

    def __init__(self, **options: int) -> None:
        pool = EmbeddedPool(
            name="chat",
            capacity=1,
            shares={"red": Fraction(1)},
            half_life_seconds=0.0,
            hold=HoldOptions(max_held=1),
        )
        self.admission = Admission(pool)
        self.gate = asyncio.Event()
        self.app = FairshareMiddleware(self._serve, admission=self.admission, team=lambda scope: "red", **options)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await self.gate.wait()
        if body == b"fail":
            raise RuntimeError
        if "fairshare" in scope.get("state", {}):
            scope["state"]["fairshare"].consumed(Usage(prompt_tokens=7))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    @property
    def in_flight(self) -> int:
        return sum(self.admission.pool.usage()[1].values())


class Call:
    def __init__(self, site: Site, body: bytes = b"hi", path: str = "/v1/chat/completions") -> None:
        self.sent: list[Any] = []
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.task = asyncio.ensure_future(site.app(scope, self.incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_request_waits_and_its_body_arrives_whole() -> None:
    async def main() -> None:
        site = Site()
        first, second = Call(site), Call(site, b"second")
        await settle()
        assert (site.in_flight, site.admission.held) == (1, 1)
        site.gate.set()
        await asyncio.gather(first.task, second.task)
        assert second.sent[1]["body"] == b"second"
        assert (b"x-fairshare-standing", b"within-share") in second.sent[0]["headers"]
        assert (site.in_flight, site.admission.pool.usage()[0]["red"]) == (0, 14.0)

    run(main)


def test_a_client_that_leaves_while_it_waits_loses_its_place() -> None:
    async def main() -> None:
        site = Site()
        first, second = Call(site), Call(site)
        await settle()
        second.incoming.put_nowait({"type": "http.disconnect"})
        await second.task
        assert (site.admission.held, second.sent) == (0, [])
        site.gate.set()
        await first.task
        assert site.in_flight == 0

    run(main)


def test_an_application_that_fails_or_is_cancelled_frees_its_slot() -> None:
    async def main() -> None:
        site = Site()
        cancelled = Call(site)
        await settle()
        cancelled.task.cancel()
        await asyncio.gather(cancelled.task, return_exceptions=True)
        assert site.in_flight == 0
        site.gate.set()
        with pytest.raises(RuntimeError):
            await Call(site, b"fail").task
        assert site.in_flight == 0

    run(main)


@pytest.mark.parametrize("turns", range(5))
def test_a_request_that_is_cancelled_as_its_turn_comes_frees_its_slot(turns: int) -> None:
    async def main() -> None:
        site = Site()
        running, waiting = Call(site), Call(site)
        await settle()
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.task.cancel()
        await asyncio.gather(waiting.task, return_exceptions=True)
        assert (site.in_flight, site.admission.held) == (0, 0)

    run(main)


@pytest.mark.parametrize("turns", range(4))
def test_a_request_that_is_cancelled_as_it_comes_frees_its_slot(turns: int) -> None:
    async def main() -> None:
        site = Site()
        call = Call(site)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        assert (site.in_flight, site.admission.held) == (0, 0)

    run(main)


def test_a_server_whose_receive_fails_as_the_turn_comes_frees_the_slot() -> None:
    async def main() -> None:
        site = Site()
        running = Call(site)
        await settle()
        broken = asyncio.Event()

        async def receive() -> Any:
            await broken.wait()
            raise OSError

        async def send(message: Any) -> None: ...

        scope: Any = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        waiting = asyncio.ensure_future(site.app(scope, receive, send))
        await settle()
        running.task.cancel()
        broken.set()
        await asyncio.gather(running.task, waiting, return_exceptions=True)
        assert isinstance(waiting.exception(), OSError)
        assert (site.in_flight, site.admission.held) == (0, 0)

    run(main)


def test_a_full_queue_is_answered_as_the_gateway_does_and_other_paths_pass() -> None:
    async def main() -> None:
        site = Site()
        running = [Call(site), Call(site)]
        await settle()
        refused = Call(site)
        await refused.task
        assert refused.sent[0]["status"] == 429
        assert b"retry-after" in dict(refused.sent[0]["headers"])
        assert json.loads(refused.sent[1]["body"])["error"]["code"] == "queue_full"
        site.gate.set()
        other = Call(site, path="/v1/models")
        await asyncio.gather(other.task, *(one.task for one in running))
        assert other.sent[0]["headers"] == []

    run(main)


def test_of_a_body_whose_request_waits_no_more_is_kept_than_the_bound() -> None:
    async def main() -> None:
        site = Site(max_body_bytes=4)
        first, large = Call(site), Call(site, b"12345")
        await large.task
        assert large.sent[0]["status"] == 413
        error = json.loads(large.sent[1]["body"])["error"]
        assert (error["code"], "max_body_bytes, 4 bytes" in error["message"]) == ("request_too_large", True)
        fits = Call(site, b"1234")
        await settle()
        assert (site.in_flight, site.admission.held) == (1, 1)
        site.gate.set()
        await asyncio.gather(first.task, fits.task)
        assert fits.sent[1]["body"] == b"1234"

    run(main)
