"""Clearing phantoms over HTTP: who may, and what is answered."""

import asyncio
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from fairshare.accounts.rights import Actor, Role
from fairshare.gateway.accounts_api import ACTOR
from fairshare.gateway.phantoms_api import OPERATION, PhantomsApi
from fairshare.gateway.replication import NotCleared, Replication

SITE = Actor(name="admin key")


async def noted(actor: Actor, action: str, target: str) -> None:
    pytest.fail(f"{actor.name}: {action} {target}")


def status(actor: Actor, method: str = OPERATION.method, pool: str = "chat") -> int:
    """What a gateway that serves the pool chat alone answers."""
    return asked(actor, method, pool).status_code


def asked(
    actor: Actor, method: str = OPERATION.method, pool: str = "chat", replication: Replication | None = None
) -> httpx.Response:
    app = Starlette(routes=PhantomsApi(lambda: ["chat"], lambda: replication, noted).routes())

    async def as_actor(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, ACTOR: actor}, receive, send)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(as_actor), base_url="http://127.0.0.1") as client:
            return await client.request(method, OPERATION.path.format(name=pool))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "actor", [Actor(name="admin of a team", node_id=3), Actor(name="viewer of the site", role=Role.VIEWER)]
)
def test_who_is_no_admin_of_the_site_clears_nothing(actor: Actor) -> None:
    assert status(actor) == 403


def test_a_page_of_another_site_cannot_have_a_browser_ask_for_it_without_leave() -> None:
    # GET, HEAD and POST are what it may send across sites without asking first (the Fetch standard, 4.10).
    assert [status(SITE, method) for method in ("GET", "HEAD", "POST")] == [405] * 3


class Refuses:
    """Replicas of which the owner clears nothing."""

    def __init__(self, why: NotCleared) -> None:
        self._why = why

    async def clear_phantoms(self, pool: str) -> NotCleared:
        return self._why

    def status(self, pool: str) -> SimpleNamespace:
        return SimpleNamespace(owner="gw-1")


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (NotCleared.NO_OWNER, "Nobody decides for pool 'chat' who could be reached; try again."),
        (NotCleared.SILENT, "Replica gw-1, which decides for pool 'chat', did not answer within 3 s"),
        (NotCleared.OLDER, "Replica gw-1, which decides for pool 'chat', runs an older version of fairshare"),
    ],
)
def test_why_nothing_was_cleared_is_said(why: NotCleared, said: str) -> None:
    answer = asked(SITE, replication=cast(Replication, Refuses(why)))
    assert answer.status_code == 409
    assert answer.json()["error"]["message"].startswith(said)


def test_a_pool_that_is_not_there_and_a_gateway_that_serves_alone_are_said() -> None:
    assert [status(SITE, pool="other"), status(SITE)] == [404, 409]
