"""One admin port for several workers, each with the real admin application behind a Unix socket."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.core import GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fairshare.gateway.admin import AdminServer, Document, Pages, admin_app
from fairshare.gateway.explain import Explanation, Lately, Step
from fairshare.gateway.machine import MachineAdmin, Member
from fairshare.gateway.merged import Totals
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.ports import Counters
from fairshare.gateway.status_api import RequestRow
from gateway.rig import run
from gateway.statuses import pool_status_of


@dataclass
class Worker:
    """The admin side of one worker."""

    name: str
    folder: Path
    connections: int = 0
    not_ready: str | None = None
    key: str | None = None
    knows: str = ""
    asked: list[str] = field(default_factory=list[str])
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    """What its status routes answer by path; None: 404."""

    @property
    def member(self) -> Member:
        return Member(self.name, self.folder / self.name)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        async def changed(request: Request) -> Response:
            self.asked.append(f"{request.method} {request.url.path} {(await request.body()).decode()}")
            return JSONResponse({}, 200)

        async def one(request: Request) -> Response:
            found = request.path_params["id"] == self.knows
            return JSONResponse({"worker": self.name}, 200 if found else 404)

        async def status(request: Request) -> Response:
            found = self.answers.get(request.url.path)
            if isinstance(found, bytes):
                return Response(found, media_type="text/event-stream")
            return Response(msgspec.json.encode(found), 404 if found is None else 200)

        app = admin_app(
            pools=lambda: [pool_status_of("chat")],
            metrics=Metrics(lambda: (), lambda: Counters(open_connections=self.connections)),
            not_ready=lambda: self.not_ready,
            pages=Pages({"/": Document(b"<p>page", "text/html")}, "default-src 'none'"),
            key=lambda: self.key,
            status=[
                Route(path, status) for path in ("/api/v1/state", "/api/v1/live", "/api/v1/requests", "/api/v1/explain")
            ],
            instances=[Route("/api/v1/pools/{pool}/instances", changed, methods=["POST"])],
            accounts=[Route("/api/v1/requests/{id}", one)],
        )
        server = AdminServer(app)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.member.socket))
        listening.listen()
        task = asyncio.create_task(server.run_on(listening))
        try:
            yield
        finally:
            server.stop()
            await task


@asynccontextmanager
async def machine(*workers: Worker, dead: tuple[Worker, ...] = ()) -> AsyncGenerator[httpx.AsyncClient]:
    admin = MachineAdmin(
        lambda: [worker.member for worker in (*dead, *workers)],
        ended=Totals(),
        own_metrics=lambda: [GaugeMetricFamily("fairshare_workers", "Help.", len(workers))],
        findings=lambda: ["A worker is missing."] if dead else [],
    )
    async with asyncio.timeout(20):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(admin.app),
            base_url="http://127.0.0.1",  # pyright: ignore
        ) as client:
            if not workers:
                yield client
                return
            first, *others = workers
            async with first.serving():
                if others:
                    async with others[0].serving():
                        yield client
                else:
                    yield client


def test_metrics_are_the_sum_of_all_workers_and_those_of_the_machine(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Worker("one", tmp_path, connections=3), Worker("two", tmp_path, connections=4)
        async with machine(one, two) as client:
            text = (await client.get("/metrics")).text
            assert "fairshare_connections 7.0" in text
            assert "fairshare_workers 2.0" in text

    run(main)


def test_a_worker_that_is_dead_is_left_out_and_the_pools_say_so(tmp_path: Path) -> None:
    async def main() -> None:
        one, dead = Worker("one", tmp_path, connections=3), Worker("dead", tmp_path)
        async with machine(one, dead=(dead,)) as client:
            assert "fairshare_connections 3.0" in (await client.get("/metrics")).text
            (pool,) = (await client.get("/api/v1/pools")).json()
            assert pool["name"] == "chat"
            assert pool["findings"][0] == "A worker is missing."
            assert (await client.get("/")).text == "<p>page"

    run(main)


def test_a_worker_that_hangs_delays_an_answer_but_does_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairshare.gateway.machine.ANSWER_SECONDS", 0.5)

    async def main() -> None:
        hangs = Worker("hangs", tmp_path)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(hangs.member.socket))
            listening.listen()
            async with machine(Worker("one", tmp_path, connections=3), dead=(hangs,)) as client:
                assert "fairshare_connections 3.0" in (await client.get("/metrics")).text

    run(main)


def test_the_machine_is_ready_if_one_worker_is(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Worker("one", tmp_path, not_ready="no engine is healthy"), Worker("two", tmp_path)
        async with machine(one, two) as client:
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            two.not_ready = one.not_ready
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.json()["reason"]) == (503, "no engine is healthy")

    run(main)


def test_without_a_worker_it_still_answers_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with machine() as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).json()["reason"] == "no worker runs"
            for path in ("/api/v1/pools", "/", "/api/v1/keys"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert "fairshare_workers 0.0" in (await client.get("/metrics")).text

    run(main)


def test_who_may_not_see_a_worker_may_not_see_all_of_them(tmp_path: Path) -> None:
    async def main() -> None:
        workers = Worker("one", tmp_path, key="secret"), Worker("two", tmp_path, key="secret")
        async with machine(*workers) as client:
            for path in ("/metrics", "/api/v1/pools", "/"):
                refused = await client.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
                assert "WWW-Authenticate" in refused.headers
                allowed = await client.get(path, headers={"Authorization": "Bearer secret"})
                assert allowed.status_code == 200
            assert (await client.get("/readyz")).status_code == 200

    run(main)


def test_a_web_page_that_has_its_own_name_resolve_here_is_refused_as_by_one_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with machine(Worker("one", tmp_path)) as client:
            assert (await client.get("/api/v1/pools", headers={"Host": "evil.example"})).status_code == 401

    run(main)


def test_what_changes_the_instances_reaches_every_worker(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = Worker("one", tmp_path), Worker("two", tmp_path)
        async with machine(one, two) as client:
            body: dict[str, Any] = {"url": "http://127.0.0.1:9"}
            assert (await client.post("/api/v1/pools/chat/instances", json=body)).status_code == 200
            assert one.asked == two.asked
            method, path, sent = one.asked[0].split(" ", 2)
            assert (method, path, json.loads(sent)) == ("POST", "/api/v1/pools/chat/instances", body)

    run(main)


def test_what_only_one_worker_knows_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with machine(Worker("one", tmp_path), Worker("two", tmp_path, knows="42")) as client:
            assert (await client.get("/api/v1/requests/42")).json() == {"worker": "two"}
            assert (await client.get("/api/v1/requests/43")).status_code == 404

    run(main)


def row(id: str, at: float) -> RequestRow:
    return RequestRow(
        id=id,
        at=at,
        team="red",
        pool="chat",
        model="tiny",
        service_class="interactive",
        standing="within-share",
        priority=0,
        slots=1,
        held_seconds=0.0,
        first_byte_seconds=0.1,
        total_seconds=1.0,
        recalls=0,
        outcome="completed",
        status=200,
        reason="",
        prompt_tokens=1,
        completion_tokens=1,
        cost_units=3.0,
        estimated=False,
    )


def test_the_last_requests_are_those_of_all_workers_the_newest_first(tmp_path: Path) -> None:
    async def main() -> None:
        one = Worker("one", tmp_path, answers={"/api/v1/requests": [row("d", 4.0), row("a", 1.0)]})
        two = Worker("two", tmp_path, answers={"/api/v1/requests": [row("c", 3.0), row("b", 2.0)]})
        async with machine(one, two) as client:
            rows = (await client.get("/api/v1/requests", params={"most": "3"})).json()
            assert [row["id"] for row in rows] == ["d", "c", "b"]

    run(main)


def explanation(about: str, *steps: Step) -> Explanation:
    return Explanation(about=about, name="red", steps=list(steps))


def lately(sent: int, waited: int, mean: float, longest: float) -> Step:
    return Lately(
        team="red",
        pool="chat",
        seconds=300.0,
        sent=sent,
        borrowing=1,
        waited=waited,
        mean_wait_seconds=mean,
        longest_wait_seconds=longest,
        recalled=1,
        refused=0,
    ).step(7.0, alone=False)


def test_what_went_of_a_team_is_added_up_and_how_it_stands_is_said_once(tmp_path: Path) -> None:
    async def main() -> None:
        now = Step(at=7.0, what="now", sentence="It has 8 in flight.", numbers={"pool": "chat"})
        one = Worker("one", tmp_path, answers={"/api/v1/explain": explanation("team", now, lately(10, 1, 8.0, 8.0))})
        two = Worker("two", tmp_path, answers={"/api/v1/explain": explanation("team", now, lately(5, 3, 4.0, 6.0))})
        async with machine(one, two) as client:
            told = (await client.get("/api/v1/explain", params={"of": "red"})).json()
            assert [step["sentence"] for step in told["steps"]] == [
                "It has 8 in flight.",
                "In the last 5 min in pool chat, 15 requests of red went to engines from this machine, 13 within its "
                "share and 2 on idle capacity; 4 of them had waited, 5 s on average and 8 s at most. 2 times a request "
                "was taken back for an owner, uncharged.",
            ]

    run(main)


def test_a_request_is_told_by_the_worker_that_served_it_not_by_one_that_read_the_account(tmp_path: Path) -> None:
    async def main() -> None:
        read = explanation("request", Step(at=1.0, what="sent", sentence="Read.", numbers={"priority": 0}))
        served = explanation(
            "request", Step(at=1.0, what="sent", sentence="Served.", numbers={"priority": 0, "rank": 1})
        )
        one = Worker("one", tmp_path, answers={"/api/v1/explain": read})
        two = Worker("two", tmp_path, answers={"/api/v1/explain": served})
        async with machine(one, two) as client:
            told = (await client.get("/api/v1/explain", params={"of": "r"})).json()
            assert told["steps"][0]["sentence"] == "Served."
            one.answers = two.answers = {}
            assert (await client.get("/api/v1/explain", params={"of": "r"})).status_code == 404

    run(main)


def test_a_worker_that_is_gone_shows_in_the_state_and_in_every_event_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        state = {"at": 1.0, "pools": [{"name": "chat", "findings": ["Own."], "finding_details": [{"id": "own"}]}]}
        events = b"".join(b"data: " + msgspec.json.encode({**state, "at": at}) + b"\n\n" for at in (1.0, 2.0))
        one = Worker("one", tmp_path, answers={"/api/v1/state": state, "/api/v1/live": events})
        async with machine(one, dead=(Worker("dead", tmp_path),)) as client:
            (pool,) = (await client.get("/api/v1/state")).json()["pools"]
            assert pool["findings"] == ["A worker is missing.", "Own."]
            assert [detail["id"] for detail in pool["finding_details"]] == ["worker-gone", "own"]
            shown = (await client.get("/api/v1/live")).text.split("\n\n")
            assert [json.loads(event.removeprefix("data: "))["at"] for event in shown[:-1]] == [1.0, 2.0]
            assert all("A worker is missing." in event for event in shown[:-1])
        async with machine(Worker("two", tmp_path, answers=one.answers)) as client:
            assert (await client.get("/api/v1/live")).content == events

    run(main)
