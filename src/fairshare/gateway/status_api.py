"""What the status page, `fairshare top` and `fairshare explain` ask for, on the admin port.

Two sets of routes. Those of operators stand behind the admin key and show everything. Those of teams stand behind a
client's key, and every answer is made for its `Identity`: its own rows, its own requests, of others only sums.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fairshare.clock import Clock
from fairshare.gateway.decision_log import DecisionLog
from fairshare.gateway.explain import Everything, Explainer, Explanation, Own, Sight
from fairshare.gateway.history import KEPT_SECONDS, History
from fairshare.gateway.identity import Directory, Identity
from fairshare.gateway.live import Live
from fairshare.gateway.logins import FailedLogins
from fairshare.gateway.options import Level
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.gateway.status import BudgetStatus, TeamStatus
from fairshare.storage.database import StoreUnavailable
from fairshare.wire.problems import (
    INVALID_API_KEY,
    INVALID_REQUEST,
    NOT_FOUND,
    STORE_UNAVAILABLE,
    TOO_MANY_CONNECTIONS,
    TOO_MANY_FAILED_LOGINS,
    Problem,
    openai_error,
)

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

OPERATOR_PATHS = ("/api/v1/state", "/api/v1/live", "/api/v1/history", "/api/v1/requests", "/api/v1/explain")
"""They need the admin key."""

TEAM_PATHS = (
    "/api/v1/team",
    "/api/v1/team/live",
    "/api/v1/team/history",
    "/api/v1/team/requests",
    "/api/v1/team/explain",
)
"""They need a client's key, and no admin key."""

MOST_REQUESTS = 200
USUAL_REQUESTS = 50
USUAL_SECONDS = KEPT_SECONDS[0]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended."""

    id: str
    at: float
    """When it came, wall clock."""
    team: str
    pool: str
    model: str
    service_class: str
    standing: str | None
    priority: int | None
    slots: int
    held_seconds: float
    first_byte_seconds: float | None
    total_seconds: float
    recalls: int
    outcome: str
    status: int
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cost_units: float
    estimated: bool


class OwnPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as a team sees it."""

    name: str
    capacity: int
    in_flight: int
    """Of all teams."""
    held: int
    """Of all teams."""
    saturated: bool
    dispatch: str
    models: list[str]
    """Those that the key may use."""
    cost_unit: str
    half_life_seconds: float
    team: TeamStatus
    """Its own row."""
    sentence: str
    """How it stands now, and why it waits if it does."""


class OwnState(msgspec.Struct, frozen=True, kw_only=True):
    """What a team's own view shows."""

    at: float
    """Wall clock."""
    team: str
    key_id: str
    service_class: str
    """The most the key may ask for."""
    history_kept: bool
    pools: list[OwnPool]
    budgets: Sequence[BudgetStatus]
    """Whatever bounds the key: its own, and its project's, team's and organisation's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusParts:
    """What the answers are made of."""

    live: Live
    history: History
    explainer: Explainer
    log: DecisionLog
    directory: Directory
    budgets_of: Callable[[Sequence[str]], Sequence[BudgetStatus]]
    """The budgets of owners, as `team:search`."""
    level_of: Callable[[str], Level | None]
    """Whose names a pool's shares hold; None: there is no such pool."""
    team_of: Callable[[str], str | None]
    """The team of a key."""
    logins: FailedLogins
    clock: Clock


class _Asked(Exception):
    """The answer is an error."""

    def __init__(self, problem: Problem, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def response(self) -> Response:
        headers = dict(HEADERS)
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, ceil(self.retry_after_seconds)))
        if self.problem is INVALID_API_KEY:
            headers["WWW-Authenticate"] = "Bearer"
        body = openai_error(self.problem, self.message)
        return Response(body, self.problem.status, media_type="application/json", headers=headers)


class StatusApi:
    """The routes. Handlers are coroutines, so they run on the event loop's thread."""

    def __init__(self, parts: StatusParts) -> None:
        self._parts = parts
        self._encode = msgspec.json.Encoder().encode

    def routes(self) -> list[Route]:
        handlers = (self._state, self._live, self._history, self._requests, self._explain)
        own = (self._own_state, self._own_live, self._own_history, self._own_requests, self._own_explain)
        return [
            Route(path, _answering(handler))
            for path, handler in zip((*OPERATOR_PATHS, *TEAM_PATHS), (*handlers, *own), strict=True)
        ]

    # ------------------------------------------------------------------ operators

    async def _state(self, _: Request) -> Response:
        return self._json(self._parts.live.state())

    async def _live(self, _: Request) -> Response:
        return self._stream(self._parts.live.encoded)

    async def _history(self, request: Request) -> Response:
        query = request.query_params
        pool = _needed(query, "pool")
        since = self._parts.live.last().at - _seconds(query)
        history = self._parts.history
        found = (
            history.by_team(pool, since=since)
            if query.get("by") == "team"
            else history.pool(pool, since=since, teams=query.getlist("team")[:20])
        )
        if found is None and self._parts.level_of(pool) is None:
            raise _Asked(NOT_FOUND, f"There is no pool {pool[:80]!r}.")
        return self._json(found or history.nothing(pool))

    async def _requests(self, request: Request) -> Response:
        query = request.query_params
        team, pool = query.get("team"), query.get("pool")
        return self._rows(query, lambda record: (not team or record.team == team) and (not pool or record.pool == pool))

    async def _explain(self, request: Request) -> Response:
        of = _needed(request.query_params, "of")
        sight = Everything()
        state = self._parts.live.last()
        teams = [budget for budget in state.budgets if budget.owner.partition(":")[2] == of]
        known = self._parts.explainer.lately_seen(of, sight) or self._parts.explainer.team(
            of, state.pools, teams, sight
        )
        return await self._explained(of, known, sight)

    # ------------------------------------------------------------------ teams

    async def _own_state(self, request: Request) -> Response:
        return self._json(self._own(self._identity(request)))

    async def _own_live(self, request: Request) -> Response:
        self._identity(request)
        sha256 = hashlib.sha256(_key_of(request) or b"").digest()

        def render() -> bytes | None:
            # A key that was revoked ends its stream.
            identity = self._parts.directory.find(sha256)
            return None if identity is None else self._encode(self._own(identity))

        return self._stream(render, for_teams=True)

    async def _own_history(self, request: Request) -> Response:
        own = self._sight(self._identity(request))
        query = request.query_params
        pool = _needed(query, "pool")
        name = own.name_in(pool)
        since = self._parts.live.last().at - _seconds(query)
        found = None if name is None else self._parts.history.pool(pool, since=since, teams=[name], with_total=False)
        if name is None:
            raise _Asked(NOT_FOUND, f"There is no pool {pool[:80]!r}.")
        return self._json(found or self._parts.history.nothing(pool))

    async def _own_requests(self, request: Request) -> Response:
        own = self._sight(self._identity(request))
        return self._rows(request.query_params, lambda each: own.sees(each.pool, each.team, each.key_id))

    async def _own_explain(self, request: Request) -> Response:
        identity = self._identity(request)
        own = self._sight(identity)
        of = request.query_params.get("of") or identity.team
        known = self._parts.explainer.lately_seen(of, own)
        if known is None and of == identity.team:
            known = self._own_standing(identity, own)
        return await self._explained(of, known, own)

    def _own_standing(self, identity: Identity, own: Own) -> Explanation | None:
        """In each pool under the name that it has there."""
        explainer, budgets = self._parts.explainer, self._parts.budgets_of(identity.owners)
        steps = [
            step
            for pool in self._parts.live.last().pools
            for team in pool.teams
            if team.team == own.name_in(pool.name)
            for step in explainer.standing(pool, team, own)
        ]
        of_budgets = explainer.team("", (), budgets, own)
        steps += of_budgets.steps if of_budgets is not None else []
        return Explanation(about="team", name=identity.team, steps=steps) if steps else None

    def _own(self, identity: Identity) -> OwnState:
        own = self._sight(identity)
        state = self._parts.live.last()
        return OwnState(
            at=state.at,
            team=identity.team,
            key_id=identity.key_id,
            service_class=identity.service_class.name.lower(),
            history_kept=state.history_kept,
            pools=[
                OwnPool(
                    name=pool.name,
                    capacity=pool.capacity,
                    in_flight=pool.in_flight,
                    held=pool.held,
                    saturated=pool.saturated,
                    dispatch=pool.dispatch,
                    models=[model for model in pool.models if identity.models is None or model in identity.models],
                    cost_unit=pool.cost_unit,
                    half_life_seconds=pool.half_life_seconds,
                    team=team,
                    sentence=self._parts.explainer.now(pool, team, own).sentence,
                )
                for pool in state.pools
                for team in pool.teams
                if team.team == own.name_in(pool.name)
            ],
            budgets=self._parts.budgets_of(identity.owners),
        )

    def _sight(self, identity: Identity) -> Own:
        return Own(identity, self._parts.level_of, self._parts.team_of)

    def _identity(self, request: Request) -> Identity:
        """Who asks, as on the data port: found by the hash of the key; wrong keys are bounded per address."""
        given = _key_of(request)
        if given is None:
            raise _Asked(INVALID_API_KEY, "This needs a team's key, as a bearer token.")
        identity = self._parts.directory.find(hashlib.sha256(given).digest())
        if identity is not None:
            return identity
        address = request.client.host if request.client is not None else ""
        wait_seconds = self._parts.logins.failed(address, self._parts.clock())
        if wait_seconds is None:
            raise _Asked(INVALID_API_KEY, "The key is not valid. Ask whoever runs fairshare for one.")
        raise _Asked(
            TOO_MANY_FAILED_LOGINS,
            "Too many requests with keys that are not valid came from your address. Try again in "
            f"{ceil(wait_seconds)} s.",
            retry_after_seconds=wait_seconds,
        )

    # ------------------------------------------------------------------ both

    async def _explained(self, of: str, known: Explanation | None, sight: Sight) -> Response:
        if known is None:
            try:
                known = await self._parts.explainer.request(of, sight)
            except StoreUnavailable as error:
                raise _Asked(
                    STORE_UNAVAILABLE, f"It is not among the last requests, and {error}. Try again later."
                ) from None
        if known is None:
            raise _Asked(
                NOT_FOUND,
                f"Nothing is known of a request or team {of[:80]!r}: not among the last requests of this gateway, and "
                "not in the account of requests. Take the id from the header x-request-id.",
            )
        return self._json(known)

    def _rows(self, query: Mapping[str, str], wanted: Callable[[RequestRecord], bool]) -> Response:
        most = most_rows(query)
        if query.get("only") == "waited":
            records = self._parts.log.records(most=most, wanted=lambda each: wanted(each) and _waited(each))
        else:
            records = self._parts.log.records(most=most, wanted=wanted)
        return self._json([_row(record) for record in records])

    def _stream(self, render: Callable[[], bytes | None], *, for_teams: bool = False) -> Response:
        if self._parts.live.is_full(for_teams=for_teams):
            raise _Asked(TOO_MANY_CONNECTIONS, "Too many pages watch this gateway. Close one.")
        return StreamingResponse(
            self._parts.live.events(render),
            media_type="text/event-stream",
            headers=HEADERS | {"X-Accel-Buffering": "no"},
        )

    def _json(self, value: Any) -> Response:
        return Response(self._encode(value), media_type="application/json", headers=HEADERS)


def most_rows(query: Mapping[str, str]) -> int:
    """How many requests are asked for."""
    return min(MOST_REQUESTS, _whole(query, "most", USUAL_REQUESTS))


def _answering(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except _Asked as asked:
            return asked.response()

    return answer


def _waited(record: RequestRecord) -> bool:
    return bool(record.held_seconds or record.recalls or record.outcome is Outcome.REFUSED)


def _row(record: RequestRecord) -> RequestRow:
    return RequestRow(
        id=record.id,
        at=record.arrived_at,
        team=record.team,
        pool=record.pool,
        model=record.model,
        service_class=record.service_class.name.lower(),
        standing=None if record.standing is None else record.standing.value,
        priority=record.priority,
        slots=record.slots,
        held_seconds=record.held_seconds,
        first_byte_seconds=record.first_byte_seconds,
        total_seconds=record.total_seconds,
        recalls=record.recalls,
        outcome=record.outcome.value,
        status=record.status,
        reason=record.reason,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cost_units=record.cost_units,
        estimated=record.estimated,
    )


def _key_of(request: Request) -> bytes | None:
    """The key of a bearer token."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return credentials.strip().encode("latin-1") or None if scheme.lower() == "bearer" else None


def _needed(query: Mapping[str, str], name: str) -> str:
    value = query.get(name, "")
    if not value:
        raise _Asked(INVALID_REQUEST, f"The query needs `{name}`.")
    return value


def _seconds(query: Mapping[str, str]) -> float:
    return float(min(KEPT_SECONDS[-1], _whole(query, "seconds", int(USUAL_SECONDS))))


def _whole(query: Mapping[str, str], name: str, usual: int) -> int:
    text = query.get(name)
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 9 and int(text)):
        raise _Asked(INVALID_REQUEST, f"`{name}` must be a whole number above 0, got {text[:40]!r}.")
    return int(text)
