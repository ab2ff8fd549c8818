"""Clearing phantoms over HTTP, on the admin port: an operator knows that a silent machine is gone for certain."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.accounts.rights import Act, Actor, Forbidden, check
from fairshare.gateway.accounts_api import ACTOR, Operation, json_answer, problem_answer, sentence
from fairshare.gateway.replication import ANSWER_SECONDS, NotCleared, Replication
from fairshare.wire.problems import CONFLICT, FORBIDDEN, NOT_FOUND

log = logging.getLogger("fairshare.replicas")


class PhantomsCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Slots that are free now."""

    slots: int
    replicas: dict[str, int]
    """By the replica that had them when it was last heard of."""


OPERATION = Operation(
    # Not POST: a page of another site can have a browser send that, without a body, to a port that wants no key.
    "DELETE",
    "/api/v1/pools/{name}/phantoms",
    "Free the slots that are kept for requests of replicas that are not heard of.",
    None,
    PhantomsCleared,
)

Noted = Callable[[Actor, str, str], Awaitable[None]]
"""Told who did what to which pool."""


@dataclass(frozen=True, slots=True)
class PhantomsApi:
    """Answers the operation, at whichever replica it is asked."""

    pools: Callable[[], list[str]]
    replication: Callable[[], Replication | None]
    noted: Noted

    def routes(self) -> list[Route]:
        return [Route(OPERATION.path, self._clear, methods=[OPERATION.method])]

    async def _clear(self, request: Request) -> Response:
        actor: Actor = request.scope[ACTOR]
        pool = str(request.path_params["name"])
        try:
            check(actor, Act.INSIDE, None, {})
        except Forbidden as error:
            return problem_answer(FORBIDDEN, sentence(error))
        if pool not in self.pools():
            return problem_answer(NOT_FOUND, f"There is no pool {pool!r}.")
        replication = self.replication()
        if replication is None:
            return problem_answer(CONFLICT, "This gateway serves alone: it has no phantoms of other replicas.")
        replicas = await replication.clear_phantoms(pool)
        if isinstance(replicas, NotCleared):
            return problem_answer(CONFLICT, _why(replicas, pool, replication.status(pool).owner))
        cleared = PhantomsCleared(slots=sum(replicas.values()), replicas=replicas)
        log.warning("%s: cleared %d phantom slots of pool %s %s", actor.name, cleared.slots, pool, replicas)
        await self.noted(actor, "clear phantoms", f"{pool} {cleared.slots} slots")
        return json_answer(msgspec.json.encode(cleared))


def _why(reason: NotCleared, pool: str, owner: str) -> str:
    match reason:
        case NotCleared.NO_OWNER:
            return f"Nobody decides for pool {pool!r} who could be reached; try again."
        case NotCleared.SILENT:
            return (
                f"Replica {owner}, which decides for pool {pool!r}, did not answer within {ANSWER_SECONDS:g} s; nobody "
                "knows whether it cleared them. Try again."
            )
        case NotCleared.OLDER:
            return (
                f"Replica {owner}, which decides for pool {pool!r}, runs an older version of fairshare, which cannot "
                "clear phantoms. Upgrade it; its successor keeps them, and can."
            )
