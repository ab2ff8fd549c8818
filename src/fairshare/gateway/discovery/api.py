"""The instances of the pools over HTTP, on the admin port: who names them, and adding, draining and removing them."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.accounts.rights import Act, Actor, Forbidden, check
from fairshare.errors import CallerError
from fairshare.gateway.accounts_api import (
    ACTOR,
    HEADERS,
    LOCAL,
    Operation,
    Page,
    Refused,
    json_answer,
    problem_answer,
    read_body,
    sentence,
)
from fairshare.gateway.discovery.keeper import FleetKeeper, NotPossible
from fairshare.gateway.engine_url import engine_url
from fairshare.wire.problems import CONFLICT, FORBIDDEN, INVALID_REQUEST, NOT_FOUND

log = logging.getLogger("fairshare.instances")


class InstanceNamed(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that somebody names."""

    url: str
    state: Literal["member", "drained", "waiting", "kept"]
    named_by: list[str]


class InstanceWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance to add; it gets the other settings of the pool's first one."""

    url: str
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] | None = None


class InstanceMeant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance."""

    url: str


_PATH = "/api/v1/pools/{name}/instances"

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", _PATH, "Every instance that somebody names, who, and what it is.", None, list[InstanceNamed]),
    Operation("POST", _PATH, "Add an instance, or take a drained one back.", InstanceWanted, None),
    Operation("POST", f"{_PATH}/drain", "Give an instance nothing new until it is added again.", InstanceMeant, None),
    Operation("POST", f"{_PATH}/remove", "Take back that an instance was added or drained.", InstanceMeant, None),
)
"""Every operation, for the routes, the reference page and their tests."""

Noted = Callable[[Actor, str, str], Awaitable[None]]
"""Told who did what to which instance."""


@dataclass(frozen=True, slots=True)
class InstancesApi:
    """Answers the operations. What they change lasts until the process ends."""

    keeper: Callable[[str], FleetKeeper | None]
    """The keeper of a pool; None: there is no such pool."""
    noted: Noted

    def routes(self) -> list[Route]:
        by_path: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        return [
            Route(path, partial(self._answer, operations), methods=list(operations))
            for path, operations in by_path.items()
        ]

    async def _answer(self, operations: dict[str, Operation], request: Request) -> Response:
        operation = operations["GET" if request.method == "HEAD" else request.method]
        actor: Actor = request.scope[ACTOR]
        try:
            _check(actor, operation)
            name = request.path_params["name"]
            keeper = self.keeper(name)
            if keeper is None:
                return problem_answer(NOT_FOUND, f"There is no pool {name!r}.")
            if operation.method == "GET":
                return json_answer(msgspec.json.encode(Page(_named(keeper))))
            body = await read_body(request, operation.body)
            await self._do(keeper, actor, operation, body)
        except Refused as refused:
            return problem_answer(refused.problem, str(refused))
        except Forbidden as error:
            return problem_answer(FORBIDDEN, sentence(error))
        except NotPossible as error:
            return problem_answer(CONFLICT, sentence(error))
        except CallerError as error:
            return problem_answer(INVALID_REQUEST, sentence(error))
        return Response(status_code=204, headers=HEADERS)

    async def _do(self, keeper: FleetKeeper, actor: Actor, operation: Operation, body: Any) -> None:
        try:
            url = engine_url(body.url)
        except ValueError as error:
            raise CallerError(f"url {error}") from None
        match operation.path.removeprefix(_PATH):
            case "/drain":
                done = "drain instance"
                await keeper.drain(url)
            case "/remove":
                done = "remove instance"
                await keeper.remove(url)
            case _:
                done = "add instance"
                await keeper.add(url, body.max_num_seqs)
        target = f"{keeper.spec.name} {url}"
        log.info("%s: %s %s", actor.name, done, target)
        await self.noted(actor, done, target)


def _check(actor: Actor, operation: Operation) -> None:
    """An engine that somebody adds gets prompts and the engines' key: being on this machine is not enough."""
    check(actor, Act.SEE if operation.method == "GET" else Act.INSIDE, None, {})
    if operation.method != "GET" and actor.name == LOCAL:
        raise Forbidden("changing instances needs a key; give the admin port one (admin: {key_file: FILE})")


def _named(keeper: FleetKeeper) -> list[InstanceNamed]:
    return [
        InstanceNamed(url=named.id, state=named.state.value, named_by=list(named.named_by)) for named in keeper.named()
    ]
