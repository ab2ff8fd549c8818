"""The admin port: what it answers, and to whom."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from dashboard.admin_port import Desk
from fairshare.core.priority import ServiceClass
from fairshare.gateway import live
from fairshare.gateway.admin import AdminServer, Document, Pages, admin_app
from fairshare.gateway.identity import Identity
from fairshare.gateway.listening import listening_socket
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.options import Address
from fairshare.gateway.ports import Counters
from fairshare.gateway.status import PoolStatus
from fairshare.gateway.status_api import OPERATOR_PATHS, TEAM_PATHS
from gateway.statuses import instance_status, pool_status_of, team_status

PAGES = Pages(
    documents={"/": Document(b"<!doctype html><title>status</title>", "text/html")},
    content_security_policy="default-src 'none'",
)
KEY = "an-admin-key"


def get(
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    pools: Sequence[PoolStatus] = (),
    not_ready: str | None = None,
    method: str = "GET",
    host: str = "127.0.0.1:8081",
) -> httpx.Response:
    app = admin_app(
        pools=lambda: pools,
        metrics=Metrics(lambda: pools, Counters),
        not_ready=lambda: not_ready,
        pages=PAGES,
        key=lambda: key,
    )

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def test_a_running_gateway_is_healthy_and_is_ready_when_it_can_serve() -> None:
    assert get("/healthz").json() == {"status": "ok"}
    assert get("/readyz").json() == {"status": "ready"}
    answer = get("/readyz", not_ready="no engine is healthy")
    assert (answer.status_code, answer.json()) == (503, {"status": "not ready", "reason": "no engine is healthy"})
    assert get("/healthz", not_ready="no engine is healthy").status_code == 200


def test_pools_have_exactly_the_shape_that_outside_tools_rely_on() -> None:
    pool = pool_status_of(
        "chat",
        in_flight=3,
        held=2,
        saturated=True,
        teams=[team_status("search", in_flight=3, borrowing=1, usage=12.5, level_fairshare=0.75, rank=1, held=2)],
        instances=[instance_status("http://127.0.0.1:9001")],
        findings=["One thing."],
    )
    (shown,) = get("/api/v1/pools", pools=[pool]).json()
    contract: dict[str, Any] = {
        "name": "chat",
        "capacity": 16,
        "dispatch": "hold",
        "in_flight": 3,
        "held": 2,
        "saturated": True,
    }
    assert {name: shown[name] for name in contract} == contract
    assert shown["teams"] == [
        {
            "team": "search",
            "share": 0.5,
            "reserved": 8,
            "in_flight": 3,
            "borrowing": 1,
            "in_flight_tokens": 0,
            "usage": 12.5,
            "level_fairshare": 0.75,
            "rank": 1,
            "phantoms": 0,
            "held": 2,
            "oldest_held_seconds": 0.0,
        }
    ]
    assert shown["instances"][0]["id"] == "http://127.0.0.1:9001"
    assert shown["findings"] == ["One thing."]


def test_an_infinite_level_fairshare_is_null() -> None:
    body = get("/api/v1/pools", pools=[pool_status_of("chat", teams=[team_status("search")])]).text
    assert json.loads(body)[0]["teams"][0]["level_fairshare"] is None
    assert '"level_fairshare":null' in body


def test_metrics_are_in_the_format_of_prometheus() -> None:
    answer = get("/metrics", pools=[pool_status_of("chat")])
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'fairshare_capacity{pool="chat"} 16.0' in answer.text


def test_the_status_page_may_load_nothing_from_elsewhere() -> None:
    answer = get("/")
    assert answer.content == PAGES.documents["/"].content
    assert answer.headers["content-security-policy"] == PAGES.content_security_policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


def test_what_is_not_there_and_what_is_not_possible_say_so_in_openai_shape() -> None:
    missing = get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    refused = get("/api/v1/pools", method="POST")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in refused.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/pools", "/nowhere"])
def test_with_an_admin_key_nothing_but_health_answers_without_it(path: str) -> None:
    basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    wrong = base64.b64encode(b"anyone:wrong").decode()
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {wrong}"},
        {"Authorization": "Basic ???"},
    ):
        answer = get(path, key=KEY, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert KEY not in answer.text
    expected = 404 if path == "/nowhere" else 200
    assert get(path, key=KEY, headers={"Authorization": f"Bearer {KEY}"}).status_code == expected
    assert get(path, key=KEY, headers={"Authorization": f"Basic {basic}"}).status_code == expected


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_key_and_no_name(path: str) -> None:
    assert get(path, key=KEY, host="gateway.example").status_code == 200
    assert get(path, host="gateway.example").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8081", "127.0.0.1:8081", "[::1]:8081", "10.0.0.1"])
def test_without_a_key_localhost_and_addresses_are_answered(host: str) -> None:
    assert get("/api/v1/pools", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:8081", "localhost.attacker.example", ""])
def test_without_a_key_a_web_page_that_resolves_its_own_name_to_loopback_reads_nothing(host: str) -> None:
    assert get("/api/v1/pools", headers={"Host": host}).status_code == 401


def test_the_server_answers_on_its_socket_and_ends_when_told() -> None:
    app = admin_app(
        pools=lambda: (), metrics=Metrics(lambda: (), Counters), not_ready=lambda: None, pages=PAGES, key=lambda: None
    )

    async def run() -> int:
        listening = listening_socket(Address("127.0.0.1", 0), purpose="the admin port")
        port = listening.getsockname()[1]
        server = AdminServer(app)
        serving = asyncio.create_task(server.run_on(listening))
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{port}/healthz")
        server.stop()
        await serving
        assert listening.fileno() == -1
        return answer.status_code

    assert asyncio.run(run()) == 200


# --- the status API -----------------------------------------------------------------------------------------------


def ask(desk: Desk, path: str, key: str | None = None) -> httpx.Response:
    async def asked() -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(desk.app), base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(asked())


def desk() -> Desk:
    return Desk(
        [pool_status_of("chat", teams=[team_status("search", in_flight=3)])],
        identities={"fs-search": Identity("k", "search", ServiceClass.INTERACTIVE)},
        past_seconds=30,
    )


@pytest.mark.parametrize("path", OPERATOR_PATHS)
def test_what_shows_every_team_needs_the_admin_key(path: str) -> None:
    at = desk()
    at.admin_key = KEY
    assert ask(at, path).status_code == 401
    assert ask(at, path, "fs-search").status_code == 401


@pytest.mark.parametrize("path", TEAM_PATHS)
def test_what_shows_a_team_needs_a_team_s_key_and_no_other(path: str) -> None:
    at = desk()
    at.admin_key = KEY
    assert ask(at, path).status_code == 401
    assert ask(at, path, KEY).status_code == 401
    assert ask(desk(), path).status_code == 401, "also where there is no admin key"


def test_the_page_of_teams_is_served_without_a_key_and_the_status_page_is_not() -> None:
    at = desk()
    at.admin_key = KEY
    assert ask(at, "/team").status_code == 200
    assert ask(at, "/assets/style.css").headers["content-type"].startswith("text/css")
    assert ask(at, "/assets/../index.html").status_code in (401, 404)
    assert ask(at, "/assets/nothing.js").status_code == 401
    assert ask(at, "/").status_code == 401


def test_wrong_admin_keys_are_bounded_per_address_and_the_right_one_is_always_served() -> None:
    at = desk()
    at.admin_key = KEY
    answers = [ask(at, "/api/v1/state", "wrong") for _ in range(22)]
    assert [answer.status_code for answer in answers[:20]] == [401] * 20
    assert (answers[-1].status_code, answers[-1].json()["error"]["code"]) == (429, "too_many_failed_logins")
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert ask(at, "/api/v1/team", "fs-wrong").status_code == 429, "one bound for both kinds of keys"
    assert ask(at, "/api/v1/state", KEY).status_code == 200
    assert ask(at, "/api/v1/team", "fs-search").status_code == 200


def test_history_answers_for_a_pool_a_team_and_every_team() -> None:
    at = desk()
    pool = ask(at, "/api/v1/history?pool=chat&seconds=20&team=search").json()
    assert (pool["pool"], pool["kept"], len(pool["at"])) == ("chat", False, len(pool["teams"]["search"]["within"]))
    assert 15 <= len(pool["at"]) <= 21
    assert set(ask(at, "/api/v1/history?pool=chat&by=team").json()["teams"]) == {"search"}
    assert ask(at, "/api/v1/history?pool=nowhere").status_code == 404
    assert ask(at, "/api/v1/history").status_code == 400
    for wrong in ("0", "-1", "1e3", "many", "²", "9" * 40):
        assert ask(at, f"/api/v1/history?pool=chat&seconds={wrong}").status_code == 400


def test_requests_are_filtered_and_bounded() -> None:
    at = desk()
    for number in range(60):
        at.waited(f"r{number}", "search" if number % 2 else "ads", held_seconds=number % 3)
    assert [row["id"] for row in ask(at, "/api/v1/requests?most=2").json()] == ["r59", "r58"]
    assert len(ask(at, "/api/v1/requests").json()) == 50
    assert {row["team"] for row in ask(at, "/api/v1/requests?team=ads").json()} == {"ads"}
    assert all(row["held_seconds"] for row in ask(at, "/api/v1/requests?only=waited").json())


def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 0)
    answer = ask(desk(), "/api/v1/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")


def test_teams_cannot_take_every_stream_from_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_FOR_TEAMS", 0)
    at = desk()
    assert ask(at, "/api/v1/team/live", "fs-search").status_code == 503
    assert not at.live.is_full(for_teams=False)
