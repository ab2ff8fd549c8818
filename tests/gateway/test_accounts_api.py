"""The accounts over HTTP: what it answers, who may, and that its document says so."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from fairshare.accounts import reports
from fairshare.accounts.rights import Actor
from fairshare.accounts.service import Accounts
from fairshare.gateway.accounts import LiveAccounts
from fairshare.gateway.accounts_api import OPERATIONS, AccountsApi, openapi
from fairshare.gateway.admin import Document, Pages, admin_app
from fairshare.gateway.ledger import Ledger
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.ports import Counters
from fairshare.storage.accounts import AccountStore
from fairshare.storage.address import StoreAddress
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import Database
from fairshare.storage.ledger import LedgerStore
from gateway.rig import FakeClock
from support.storing import row, write

ADMIN = {"Authorization": "Bearer the-admin-key"}


DOCUMENT: dict[str, Any] = json.loads(json.dumps(openapi()))


def described(method: str, path: str, status: int) -> Draft202012Validator:
    """What the document says of an answer."""
    path = f"/api/v1/{path.partition('?')[0]}"
    for template, operations in DOCUMENT["paths"].items():
        if method.lower() in operations and re.fullmatch(re.sub(r"{\w+}", "[^?]+", template), path):
            answers = operations[method.lower()]["responses"]
            answer = answers.get(str(status)) or answers["default"]
            assert status >= 400 or answer is not answers["default"], (method, path, status)
            schema = answer["content"]["application/json"]["schema"] if "content" in answer else {"type": "null"}
            break
    else:
        assert status >= 400, "what the document does not know is not answered"
        schema = {"$ref": "#/components/schemas/Error"}
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


class Site:
    def __init__(self, address: StoreAddress) -> None:
        self.database = Database(address)
        wall = FakeClock()
        self.wall = wall
        store = AccountStore(self.database)
        secrets = (f"fs-secret-{number}" for number in range(100))
        self.service = Accounts(store, wall=wall, new_secret=lambda: next(secrets))
        ledger = Ledger(self.database, pools=dict, wall=wall, keep_seconds=1e9)
        self.live = LiveAccounts(store, ConsumptionStore(self.database), ledger, configured={}, wall=wall)
        counters = Counters()
        app = admin_app(
            pools=lambda: (),
            metrics=Metrics(lambda: (), lambda: counters),
            not_ready=lambda: None,
            pages=Pages(documents={"/": Document(b"", "text/html")}, content_security_policy=""),
            key=lambda: "the-admin-key",
            accounts=AccountsApi(self.service, address, wall).routes(),
            operator=self.live.operator,
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8081")

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] = ADMIN, expect: int = 200
    ) -> Any:
        answer = await self.client.request(method, f"/api/v1/{path}", json=body, headers=headers)
        assert answer.status_code == expect, answer.text
        said = answer.json() if answer.content else None
        described(method, path, answer.status_code).validate(said)
        return said

    async def operator(self, role: str, reach: str) -> dict[str, str]:
        made = await self.ask("POST", "operators", {"role": role, "reach": reach}, expect=201)
        await self.live._look()  # pyright: ignore[reportPrivateUsage]
        return {"Authorization": f"Bearer {made['key']}"}


def on(address: StoreAddress, main: Callable[[Site], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            site = Site(address)
            await site.ask("POST", "organisations", {"name": "lab"}, expect=201)
            await site.ask("POST", "teams", {"name": "search", "organisation": "lab"}, expect=201)
            await site.ask("POST", "projects", {"name": "search/web", "models": ["tiny"]}, expect=201)
            await main(site)
            await site.client.aclose()
            await site.database.close()

    asyncio.run(bounded())


def test_the_tree_can_be_seen_changed_and_taken_down(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        assert (await site.ask("GET", "teams"))["data"] == [
            {"kind": "team", "name": "search", "parent": "lab", "models": None, "created_at": 1000.0}
        ]
        changed = await site.ask("PUT", "projects/search/web/models", {"models": None})
        assert changed["models"] is None
        await site.ask("DELETE", "projects/search/web", expect=204)
        await site.ask("DELETE", "teams/search", expect=204)
        assert (await site.ask("GET", "teams"))["data"] == []
        refused = await site.ask("DELETE", "teams/search", expect=404)
        assert refused["error"]["message"] == "There is no team 'search'."

    on(address, main)


def test_keys_are_made_listed_page_by_page_rotated_and_revoked(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        made = [
            await site.ask("POST", "keys", {"owner": "team:search", "tag": "nightly"}, expect=201) for _ in range(3)
        ]
        first = await site.ask("GET", "keys?limit=2")
        rest = await site.ask("GET", f"keys?limit=2&after={first['next']}")
        assert rest["next"] is None
        assert [key["id"] for key in first["data"] + rest["data"]] == sorted(key["id"] for key in made)
        assert not any("key" in key or "sha256" in key for key in first["data"])
        rotated = await site.ask("POST", f"keys/{made[0]['id']}/rotate", {}, expect=201)
        assert rotated["key"] != made[0]["key"]
        await site.ask("DELETE", f"keys/{made[0]['id']}", expect=204)
        await site.ask("DELETE", f"keys/{made[0]['id']}", expect=409)

    on(address, main)


def test_every_list_comes_page_by_page(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        owners = ["organisation:lab", "team:search", "project:search/web"]
        for owner in owners:
            await site.ask("PUT", "limits", {"owner": owner, "kind": "in_flight", "value": 4}, expect=204)
            budget = {"owner": owner, "period": "month", "hard_cost_units": 5.0}
            await site.ask("POST", "budgets", budget, expect=201)
            await site.operator("viewer", owner)
        for name in ("ads", "zoo"):
            await site.ask("POST", "teams", {"name": name, "organisation": "lab"}, expect=201)
        for path, count in (("limits", 3), ("budgets", 3), ("operators", 3), ("teams", 3), ("audit", 14)):
            whole = await site.ask("GET", f"{path}?limit=1000")
            assert (len(whole["data"]), whole["next"]) == (count, None), path
            walked, after = [], ""
            while True:
                page = await site.ask("GET", f"{path}?limit=2{after}")
                assert len(page["data"]) <= 2
                walked += page["data"]
                if page["next"] is None:
                    break
                after = f"&after={page['next']}"
            assert walked == whole["data"]

    on(address, main)


def test_limits_budgets_and_the_audit(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        limit = {"owner": "team:search", "kind": "in_flight", "value": 4}
        await site.ask("PUT", "limits", limit, expect=204)
        assert (await site.ask("GET", "limits"))["data"] == [limit | {"id": 1}]
        budget = {"owner": "team:search", "period": "month", "hard_cost_units": 5.0}
        made = await site.ask("POST", "budgets", budget, expect=201)
        more = {"cost_units": 1.0, "until": 2000.0}
        await site.ask("POST", f"budgets/{made['id']}/increases", more, expect=204)
        (shown,) = (await site.ask("GET", "budgets"))["data"]
        assert (shown["owner"], shown["hard_cost_units"], shown["increases"]) == ("team:search", 5.0, [more])
        await site.ask("DELETE", f"budgets/{made['id']}", expect=204)
        audit = await site.ask("GET", "audit?limit=2")
        assert [(each["actor"], each["action"]) for each in audit["data"]] == [
            ("admin key", "remove budgets"),
            ("admin key", "add increases"),
        ]
        assert (await site.ask("GET", f"audit?limit=1&after={audit['next']}"))["data"][0]["action"] == "add budgets"

    on(address, main)


def test_an_operator_does_what_its_role_allows_and_nothing_beyond_the_accounts(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        member = await site.operator("member", "team:search")
        made = await site.ask("POST", "keys", {"owner": "project:search/web"}, headers=member, expect=201)
        assert [key["id"] for key in (await site.ask("GET", "keys", headers=member))["data"]] == [made["id"]]
        assert (await site.ask("GET", "organisations", headers=member))["data"] == []
        refused = await site.ask("POST", "projects", {"name": "search/new"}, headers=member, expect=403)
        assert refused["error"]["code"] == "forbidden"
        await site.ask("GET", "audit", headers=member, expect=403)
        await site.ask("GET", "pools", headers=member, expect=401)
        await site.ask("GET", "keys", headers={"Authorization": "Bearer fs-nothing"}, expect=401)
        await site.ask("GET", "keys", headers={}, expect=401)
        (operator,) = (await site.ask("GET", "operators"))["data"]
        await site.ask("DELETE", f"operators/{operator['id']}", expect=204)
        await site.live._look()  # pyright: ignore[reportPrivateUsage]
        await site.ask("GET", "keys", headers=member, expect=401)

    on(address, main)


def test_what_is_wrong_is_said_in_the_shape_of_every_error(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        for method, path, body, status, code in (
            ("POST", "teams", {"name": "search", "organisation": "lab"}, 409, "conflict"),
            ("POST", "teams", {"name": "new"}, 400, "invalid_request"),
            ("POST", "organisations", {"name": "x", "organisation": "lab"}, 400, "invalid_request"),
            ("POST", "teams", {"nam": "new"}, 400, "invalid_request"),
            ("POST", "keys", {"owner": "team:nowhere"}, 404, "not_found"),
            ("PUT", "limits", {"owner": "team:search", "kind": "speed", "value": 1}, 400, "invalid_request"),
            ("GET", "keys?limit=0", None, 400, "invalid_request"),
            ("GET", f"keys?limit={'9' * 5000}", None, 400, "invalid_request"),
            ("GET", "keys?after=%00", None, 400, "invalid_request"),
            ("GET", "limits?owner=team:search", None, 400, "invalid_request"),
            ("POST", "organisations?limit=1", {"name": "x"}, 400, "invalid_request"),
            ("GET", "report?only=team=%00", None, 400, "invalid_request"),
            ("DELETE", "keys/%00", None, 404, "not_found"),
            ("DELETE", "operators/%00", None, 404, "not_found"),
            (
                "POST",
                "budgets",
                {"owner": "team:search", "period": "day", "hard_cost_units": 1, "model": "\0"},
                400,
                "invalid_request",
            ),
            (
                "POST",
                "budgets",
                {"owner": "team:search", "period": "day", "hard_cost_units": 1, "tag": "a\nb"},
                400,
                "invalid_request",
            ),
            ("PUT", "limits", {"owner": "key:\0", "kind": "in_flight", "value": 1}, 404, "not_found"),
            ("GET", "audit?after=x", None, 400, "invalid_request"),
            ("GET", "report?month=never", None, 400, "invalid_request"),
            ("DELETE", "budgets/x", None, 400, "invalid_request"),
            ("PATCH", "keys", None, 405, "method_not_allowed"),
            ("GET", "nothing", None, 404, "not_found"),
        ):
            answer = await site.ask(method, path, body, expect=status)
            assert answer["error"]["code"] == code, path
        form = await site.client.post("/api/v1/teams", data={"name": "x"}, headers=ADMIN)
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        long = {"name": "x" * (1 << 20)}
        assert (await site.ask("POST", "organisations", long, expect=413))["error"]["code"] == "request_too_large"

    on(address, main)


def test_a_report_is_what_the_command_shows(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        await write(LedgerStore(site.database), [row(10), row(20)])
        report = await site.ask("GET", "report?month=1970-01&by=team,model")
        assert report["total"]["requests"] == 2
        assert report["rows"][0]["model"] == "tiny"
        report = await site.ask("GET", "report?start=1970-01-01&end=1970-01-01T00:00:15&only=team=search,model=tiny")
        assert report["total"]["requests"] == 1
        report = await site.ask("GET", "report?month=1970-01&only=team=ads")
        assert report["total"]["requests"] == 0
        for form, kind, text in (
            ("csv", "text/csv; charset=utf-8", "team,requests"),
            ("parsable2", "text/plain; charset=utf-8", "Cluster|Account|Login|Proper Name|Used\nchat|search|||0.5\n"),
        ):
            answer = await site.client.get(f"/api/v1/report?month=1970-01&format={form}", headers=ADMIN)
            assert answer.headers["content-type"] == kind
            assert answer.text.startswith(text)
        for wrong in (
            "month=1970-01&start=1970-01-01",
            "end=1970-01-01",
            "start=1970-01-02&end=1970-01-01",
            "only=x",
            "format=table",
            "format=parsable2&by=team",
        ):
            await site.ask("GET", f"report?{wrong}", expect=400)

    on(address, main)


def test_a_report_is_made_on_a_thread_of_its_own(address: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    write = reports.write

    def written(*args: Any) -> str:
        threads.append(threading.get_ident())
        return write(*args)

    monkeypatch.setattr(reports, "write", written)

    async def main(site: Site) -> None:
        answer = await site.client.get("/api/v1/report?month=1970-01&format=csv", headers=ADMIN)
        assert answer.status_code == 200
        assert threading.get_ident() not in threads
        assert len(threads) == 1

    on(address, main)


@pytest.mark.parametrize(
    ("reach", "seen"), [("site", 4), ("organisation:lab", 3), ("team:search", 2), ("project:search/web", 1)]
)
def test_an_operator_s_report_is_of_what_its_role_reaches(address: StoreAddress, reach: str, seen: int) -> None:
    async def main(site: Site) -> None:
        rows = [
            row(10),
            row(11, project=""),
            row(12, team="ads", project=""),
            row(13, organisation="firm", team="sales", project=""),
        ]
        await write(LedgerStore(site.database), rows)
        viewer = await site.operator("viewer", reach)
        report = await site.ask("GET", "report?month=1970-01&by=project", headers=viewer)
        assert report["total"]["requests"] == seen
        others = await site.ask(
            "GET",
            "report?month=1970-01&only=organisation=firm,team=sales,project=x",
            headers=viewer,
            expect=200 if seen == 4 else 403,
        )
        assert "rows" not in others or others["rows"] == []

    on(address, main)


def test_a_store_that_does_not_answer_is_said_so(address: StoreAddress) -> None:
    async def main(site: Site) -> None:
        async with site.database.writing() as connection:
            await connection.exec_driver_sql("alter table nodes rename to elsewhere")
        answer = await site.client.get("/api/v1/teams", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert answer.headers["retry-after"] == "5"

    on(address, main)


def test_the_document_has_every_operation_and_every_reference_in_it_leads_somewhere() -> None:
    document = json.loads(json.dumps(openapi()))
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(each.method, each.path) for each in OPERATIONS}
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
            return own.union(*map(references, value.values()))
        return set[str]().union(*map(references, value)) if isinstance(value, list) else set()

    assert {reference.rpartition("/")[2] for reference in references(document)} <= set(schemas)
    assert document["paths"]["/api/v1/keys"]["post"]["responses"]["201"]


@pytest.mark.parametrize("actor", [Actor(name="local")])
def test_without_an_admin_key_the_loopback_port_lets_everybody_in(address: StoreAddress, actor: Actor) -> None:
    async def main(site: Site) -> None:
        counters = Counters()
        app = admin_app(
            pools=lambda: (),
            metrics=Metrics(lambda: (), lambda: counters),
            not_ready=lambda: None,
            pages=Pages(documents={"/": Document(b"", "text/html")}, content_security_policy=""),
            key=lambda: None,
            accounts=AccountsApi(site.service, site.database.address, site.wall).routes(),
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.post("/api/v1/organisations", json={"name": "new"})).status_code == 201
            elsewhere = {"Host": "evil.example"}
            answer = await client.post("/api/v1/organisations", json={"name": "more"}, headers=elsewhere)
            assert answer.status_code == 401
        assert (await site.service.audit(actor, limit=1))[0].actor == actor.name

    on(address, main)


PARTS = {
    "lab": ("organisation:lab", "team:search", "project:search/web", "team:ads"),
    "firm": ("organisation:firm", "team:sales", "project:sales/web"),
}
"""Organisation → everything in it."""


@pytest.mark.parametrize("backend", ["sqlite"])  # rights are none of the store's business
@pytest.mark.parametrize(
    ("role", "reach"),
    [
        ("admin", "organisation:lab"),
        ("admin", "team:search"),
        ("admin", "project:search/web"),
        ("member", "team:search"),
        ("viewer", "organisation:lab"),
    ],
)
def test_whatever_an_operator_tries_nothing_that_it_does_not_reach_changes_or_shows(
    address: StoreAddress, role: str, reach: str
) -> None:
    rng = random.Random(f"{role} {reach}")
    below = {
        "organisation:lab": PARTS["lab"],
        "team:search": PARTS["lab"][1:3],
        "project:search/web": PARTS["lab"][2:3],
    }
    everything = [
        *PARTS["lab"],
        *PARTS["firm"],
        "site",
        "organisation:new",
        "team:new",
        "project:search/new",
        "team:x/y",
    ]

    async def main(site: Site) -> None:
        keys: dict[str, str] = {}
        budgets: dict[int, str] = {}
        operators: dict[str, str] = {}
        for path, body in (
            ("teams", {"name": "ads", "organisation": "lab"}), ("organisations", {"name": "firm"}),
            ("teams", {"name": "sales", "organisation": "firm"}), ("projects", {"name": "sales/web"}),
        ):  # fmt: skip
            await site.ask("POST", path, body, expect=201)
        for owner in [*PARTS["lab"], *PARTS["firm"]]:
            if not owner.startswith("organisation"):
                keys[(await site.ask("POST", "keys", {"owner": owner, "note": owner}, expect=201))["id"]] = owner
            await site.ask("PUT", "limits", {"owner": owner, "kind": "in_flight", "value": 4}, expect=204)
            budget = {"owner": owner, "period": "day", "hard_cost_units": 5.0}
            budgets[(await site.ask("POST", "budgets", budget, expect=201))["id"]] = owner
            made = await site.ask("POST", "operators", {"role": "viewer", "reach": owner}, expect=201)
            operators[made["id"]] = owner
        await write(LedgerStore(site.database), [row(1), row(2, organisation="firm", team="sales", project="")])
        actor = await site.operator(role, reach)

        def owner() -> str:
            return rng.choice([*everything, *(f"key:{key}" for key in keys)])

        def node(kind: str) -> str:
            return rng.choice([each.partition(":")[2] for each in everything if each.startswith(kind)])

        def attempt() -> tuple[str, str, Any]:
            kind = rng.choice(["organisation", "team", "project"])
            return rng.choice([
                ("POST", "teams", {"name": node("team"), "organisation": node("organisation")}),
                ("POST", rng.choice(["organisations", "projects"]), {"name": node(kind)}),
                ("PUT", f"{kind}s/{node(kind)}/models", {"models": rng.choice([None, ["tiny"]])}),
                ("DELETE", f"{kind}s/{node(kind)}", None),
                ("POST", "keys", {"owner": owner()}),
                ("POST", f"keys/{rng.choice(list(keys))}/rotate", {}),
                ("DELETE", f"keys/{rng.choice(list(keys))}", None),
                ("PUT", "limits", {"owner": owner(), "kind": "in_flight", "value": rng.choice([None, 9])}),
                ("POST", "budgets", {"owner": owner(), "period": "day", "hard_cost_units": 9}),
                ("POST", f"budgets/{rng.choice(list(budgets))}/increases", {"cost_units": 1, "until": 5000}),
                ("DELETE", f"budgets/{rng.choice(list(budgets))}", None),
                ("POST", "operators", {"role": rng.choice(["admin", "viewer"]), "reach": owner()}),
                ("DELETE", f"operators/{rng.choice(list(operators))}", None),
            ])  # fmt: skip

        async def table(path: str) -> list[dict[str, Any]]:
            return (await site.ask("GET", f"{path}?limit=1000"))["data"]

        async def elsewhere() -> list[Any]:
            """Everything that it does not reach, and what is set from above."""
            nodes = [each for kind in ("organisations", "teams", "projects") for each in await table(kind)]
            owned = [*await table("keys"), *await table("limits"), *await table("budgets"), *await table("operators")]
            mine = {f"key:{key}" for key, owner in keys.items() if owner in below[reach]}
            may = {*below[reach], *mine, "project:search/new"} if reach != "project:search/web" else {reach, *mine}
            kept = [each for each in nodes if f"{each['kind']}:{each['name']}" not in may | {"team:new"}]
            kept += [each for each in owned if each.get("owner", each.get("reach")) not in may]
            kept += [
                each for each in [*nodes, *await table("limits"), *await table("budgets")]
                if (each.get("owner") or f"{each['kind']}:{each['name']}") == reach
            ]  # fmt: skip
            return kept

        before, done = await elsewhere(), 0
        for _ in range(80):
            method, path, body = attempt()
            answer = await site.client.request(method, f"/api/v1/{path}", json=body, headers=actor)
            assert answer.status_code in (200, 201, 204, 400, 403, 404, 409), (method, path, body, answer.text)
            done += answer.status_code < 300
        assert (done > 0) == (role != "viewer")
        assert await elsewhere() == before
        for path in (
            "organisations",
            "teams",
            "projects",
            "keys",
            "limits",
            "budgets",
            "operators",
            "report?month=1970-01",
        ):
            shown = await site.client.get(f"/api/v1/{path}", headers=actor)
            assert shown.status_code == 200
            for name in ("firm", "sales", *(key for key, owner in keys.items() if owner not in below[reach])):
                assert name not in shown.text, path

    on(address, main)
