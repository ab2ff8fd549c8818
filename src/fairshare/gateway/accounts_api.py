"""The accounts over HTTP, on the admin port: JSON both ways, one table of operations, and its OpenAPI document.

Who asks is in `scope["fairshare.actor"]`, put there by the admin port's guard.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.accounts import periods, reports
from fairshare.accounts.forms import Form
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period, Span
from fairshare.accounts.reports import Report
from fairshare.accounts.rights import Actor, Forbidden, Role
from fairshare.accounts.service import (
    Accounts,
    Budget,
    Class,
    Conflict,
    Key,
    Limit,
    NewKey,
    Node,
    NotThere,
    Operator,
)
from fairshare.clock import Clock
from fairshare.errors import CallerError, OperatorError
from fairshare.storage.accounts import AuditRow
from fairshare.storage.address import StoreAddress
from fairshare.storage.database import Database, StoreUnavailable
from fairshare.storage.ledger import LedgerStore
from fairshare.wire.problems import (
    CONFLICT,
    FORBIDDEN,
    INVALID_REQUEST,
    NOT_FOUND,
    REQUEST_TOO_LARGE,
    STORE_UNAVAILABLE,
    UNSUPPORTED_MEDIA_TYPE,
    Problem,
    openai_error,
)

ACTOR = "fairshare.actor"
"""The key of the ASGI scope that holds who asks."""

LOCAL = "local"
"""The name of whoever asks from this machine, where no admin key is configured."""

MAX_BODY_BYTES = 1 << 20
MAX_PAGE = 1000
USUAL_PAGE = 100
_MEDIA_TYPES = {Form.JSON: "application/json", Form.CSV: "text/csv", Form.PARSABLE2: "text/plain"}
"""The forms of a report over HTTP."""

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Page(msgspec.Struct, frozen=True):
    """One page of a list."""

    data: Sequence[Any]
    next: str | None = None
    """What to give as `after` for the next page; null: this was the last."""


class NewNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An organisation, team or project to add."""

    name: str
    organisation: str | None = None
    """For a team only: whose it is."""
    models: list[str] | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which models may be used; null: all that the level above may."""

    models: list[str] | None


class KeyWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to make."""

    owner: str
    service_class: Class = "interactive"
    models: list[str] | None = None
    tag: str = ""
    note: str = ""
    expires_at: float | None = None


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to rotate a key."""

    overlap_seconds: float = 86400.0


class LimitWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A limit to set; null: to take away."""

    owner: str
    kind: LimitKind
    value: int | None


class BudgetWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A budget to add."""

    owner: str
    period: Period
    time_zone: str = "UTC"
    hard_cost_units: float | None = None
    soft_cost_units: float | None = None
    borrow_over_soft: bool = False
    model: str | None = None
    tag: str | None = None


class IncreaseWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """More of a budget until a moment (seconds since 1970-01-01 UTC)."""

    cost_units: float
    until: float


class OperatorWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A role to give."""

    role: Role
    reach: str
    note: str = ""


class Made(msgspec.Struct, frozen=True):
    """The number of what was made."""

    id: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the API, read and checked."""

    actor: Actor
    path: dict[str, str]
    query: dict[str, str]
    body: Any

    @property
    def limit(self) -> int:
        limit = self.number("limit", self.query.get("limit", str(USUAL_PAGE)))
        if not 1 <= limit <= MAX_PAGE:
            raise CallerError(f"limit must be between 1 and {MAX_PAGE}, found {limit}")
        return limit

    @property
    def after(self) -> str:
        text = self.query.get("after", "")
        if not text.isprintable():
            raise CallerError("after must be the `next` of the page before")
        return text

    @property
    def after_number(self) -> int | None:
        return self.number("after", self.after) if self.after else None

    def number(self, name: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise CallerError(f"{name} must be a whole number, found {text[:20]!r}")
        return int(text)


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    what: str
    body: type[msgspec.Struct] | None
    answer: Any
    """What it answers with; None: nothing (204)."""
    query: tuple[str, ...] = ()


KINDS = {"organisations": "organisation", "teams": "team", "projects": "project"}
PAGED = ("limit", "after")

OPERATIONS: tuple[Operation, ...] = (
    *(
        operation
        for plural, kind in KINDS.items()
        for article in ["an" if kind == "organisation" else "a"]
        for operation in (
            Operation("GET", f"/api/v1/{plural}", f"Every {kind}, by name.", None, list[Node], PAGED),
            Operation("POST", f"/api/v1/{plural}", f"Add {article} {kind}.", NewNode, Node),
            Operation("PUT", f"/api/v1/{plural}/{{name}}/models", f"Which models the {kind} may use.", Models, Node),
            Operation(
                "DELETE", f"/api/v1/{plural}/{{name}}", f"Remove {article} {kind} with nothing in it.", None, None
            ),
        )
    ),
    Operation("GET", "/api/v1/keys", "Keys, by id.", None, list[Key], PAGED),
    Operation("POST", "/api/v1/keys", "Make a key; it is shown this once.", KeyWanted, NewKey),
    Operation("POST", "/api/v1/keys/{id}/rotate", "Give a key something new to show.", Rotation, NewKey),
    Operation("DELETE", "/api/v1/keys/{id}", "Revoke a key.", None, None),
    Operation("GET", "/api/v1/limits", "Limits, by id.", None, list[Limit], PAGED),
    Operation("PUT", "/api/v1/limits", "Set a limit, or take it away.", LimitWanted, None),
    Operation("GET", "/api/v1/budgets", "Budgets, by id.", None, list[Budget], PAGED),
    Operation("POST", "/api/v1/budgets", "Add a budget.", BudgetWanted, Made),
    Operation("POST", "/api/v1/budgets/{id}/increases", "More of a budget for a time.", IncreaseWanted, None),
    Operation("DELETE", "/api/v1/budgets/{id}", "Take a budget away.", None, None),
    Operation("GET", "/api/v1/operators", "Who has which role, by id.", None, list[Operator], PAGED),
    Operation("POST", "/api/v1/operators", "Give a role; its key is shown this once.", OperatorWanted, NewKey),
    Operation("DELETE", "/api/v1/operators/{id}", "Take a role away.", None, None),
    Operation("GET", "/api/v1/audit", "Changes, newest first.", None, list[AuditRow], PAGED),
    Operation(
        "GET",
        "/api/v1/report",
        "What was used in a period, as `fairshare report` writes it: `format` json, csv or parsable2.",
        None,
        Report,
        ("month", "start", "end", "by", "only", "time_zone", "format"),
    ),
)
"""Every operation, for the routes, the OpenAPI document, the reference page and their tests."""


class AccountsApi:
    """Answers the operations."""

    def __init__(self, accounts: Accounts, store: StoreAddress, wall: Clock) -> None:
        """`store`: where reports are read from."""
        self._accounts = accounts
        self._store = store
        self._wall = wall
        self._reporting = asyncio.Lock()
        self._openapi = msgspec.json.encode(openapi())

    def routes(self) -> list[Route]:
        by_path: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        # A project's name has a slash in it; what is more exact comes first.
        routes = [
            Route(path.replace("{name}", "{name:path}"), partial(self._answer, methods), methods=list(methods))
            for path, methods in sorted(by_path.items(), key=lambda item: -item[0].count("/"))
        ]
        return [Route("/api/v1/openapi.json", self._document), *routes]

    async def _document(self, _: Request) -> Response:
        return json_answer(self._openapi)

    async def _answer(self, methods: dict[str, Operation], request: Request) -> Response:
        operation = methods.get("GET" if request.method == "HEAD" else request.method)
        assert operation is not None  # Starlette answers other methods
        try:
            unknown = request.query_params.keys() - set(operation.query)
            if unknown:
                may = f"use {', '.join(operation.query)}" if operation.query else "there are none"
                raise CallerError(f"{min(unknown)[:40]!r} is no query parameter here; {may}")
            body = await read_body(request, operation.body)
            asked = Asked(request.scope[ACTOR], dict(request.path_params), dict(request.query_params), body)
            answer = await self._do(operation, asked)
        except Refused as refused:
            return problem_answer(refused.problem, str(refused))
        except NotThere as error:
            return problem_answer(NOT_FOUND, sentence(error))
        except Conflict as error:
            return problem_answer(CONFLICT, sentence(error))
        except Forbidden as error:
            return problem_answer(FORBIDDEN, sentence(error))
        except (CallerError, OperatorError) as error:
            return problem_answer(INVALID_REQUEST, sentence(error))
        except StoreUnavailable:
            return problem_answer(STORE_UNAVAILABLE, "The store does not answer now. Try again.")
        if answer is None:
            return Response(status_code=204, headers=HEADERS)
        if isinstance(answer, Response):
            return answer
        return json_answer(msgspec.json.encode(answer), status=201 if operation.method == "POST" else 200)

    async def _do(self, operation: Operation, asked: Asked) -> Any:
        accounts, actor, body = self._accounts, asked.actor, asked.body
        first, _, rest = operation.path.removeprefix("/api/v1/").partition("/")
        if first in KINDS:
            return await self._do_with_node(operation.method, KINDS[first], asked)
        match operation.method, first, rest:
            case "GET", "keys", "":
                keys = await accounts.keys(actor, limit=asked.limit + 1, after=asked.after)
                return _page(keys, asked.limit, lambda key: key.id)
            case "POST", "keys", "":
                values = msgspec.structs.asdict(body)
                return await accounts.add_key(actor, values.pop("owner"), **values)
            case "POST", "keys", _:
                return await accounts.rotate_key(actor, asked.path["id"], overlap_seconds=body.overlap_seconds)
            case "DELETE", "keys", _:
                return await accounts.revoke_key(actor, asked.path["id"])
            case "GET", "limits", _:
                limits = await accounts.limits(actor, limit=asked.limit + 1, after=asked.after_number)
                return _page(limits, asked.limit, lambda limit: str(limit.id))
            case "PUT", "limits", _:
                return await accounts.set_limit(actor, body.owner, body.kind, body.value)
            case "GET", "budgets", _:
                budgets = await accounts.budgets(actor, limit=asked.limit + 1, after=asked.after_number)
                return _page(budgets, asked.limit, lambda budget: str(budget.id))
            case "POST", "budgets", "":
                values = msgspec.structs.asdict(body)
                return Made(await accounts.add_budget(actor, values.pop("owner"), **values))
            case "POST", "budgets", _:
                number = asked.number("the budget", asked.path["id"])
                return await accounts.increase_budget(actor, number, cost_units=body.cost_units, until=body.until)
            case "DELETE", "budgets", _:
                return await accounts.remove_budget(actor, asked.number("the budget", asked.path["id"]))
            case "GET", "operators", _:
                operators = await accounts.operators(actor, limit=asked.limit + 1, after=asked.after)
                return _page(operators, asked.limit, lambda operator: operator.id)
            case "POST", "operators", _:
                return await accounts.add_operator(actor, role=body.role, reach=body.reach, note=body.note)
            case "DELETE", "operators", _:
                return await accounts.revoke_operator(actor, asked.path["id"])
            case "GET", "audit", _:
                rows = await accounts.audit(actor, limit=asked.limit + 1, after=asked.after_number)
                return _page(rows, asked.limit, lambda row: str(row.id))
            case "GET", "report", _:
                return await self._report(asked)
            case _:
                raise AssertionError(f"{operation.method} {operation.path} is in the table and not here")

    async def _do_with_node(self, method: str, kind: str, asked: Asked) -> Any:
        accounts, actor, body = self._accounts, asked.actor, asked.body
        match method:
            case "GET":
                nodes = await accounts.nodes(actor, kind, limit=asked.limit + 1, after=asked.after)
                return _page(nodes, asked.limit, lambda node: node.name)
            case "POST":
                if body.organisation is not None and kind != "team":
                    raise CallerError(f"a {kind} is not added to an organisation; leave that out")
                return await accounts.add_node(actor, kind, body.name, parent=body.organisation, models=body.models)
            case "PUT":
                return await accounts.set_models(actor, kind, asked.path["name"], body.models)
            case _:
                return await accounts.remove_node(actor, kind, asked.path["name"])

    async def _report(self, asked: Asked) -> Response:
        where = periods.zone(asked.query.get("time_zone", "UTC"))
        month, start, end = (asked.query.get(name) for name in ("month", "start", "end"))
        now = self._wall()
        if month is not None and (start is not None or end is not None):
            raise CallerError("give either month, or start and end")
        if month is not None:
            span = periods.month(month, where)
        elif start is not None:
            span = Span(periods.point(start, where), now if end is None else periods.point(end, where))
            if span.ends_at <= span.begins_at:
                raise CallerError(f"the period ends ({end or 'now'}) before it begins ({start})")
        elif end is not None:
            raise CallerError("end needs start")
        else:
            span = periods.around(Period.MONTH, now, where)
        form, wanted = asked.query.get("format", Form.JSON), asked.query.get("by")
        if form not in _MEDIA_TYPES:
            raise CallerError(f"format must be one of {', '.join(_MEDIA_TYPES)}, found {form[:20]!r}")
        if form == Form.PARSABLE2 and wanted is not None:
            raise CallerError("parsable2 has rows of its own; leave out by")
        by = reports.PARSABLE2_BY if form == Form.PARSABLE2 else reports.dimensions(wanted or "team")
        only = reports.filters(part for part in asked.query.get("only", "").split(",") if part)
        reach = await self._accounts.reach(asked.actor)
        if reach is not None and only.setdefault(reach.kind, reach.name) != reach.name:
            raise Forbidden(f"{asked.actor.name} may only see what is of {reach.kind} {reach.name!r}")
        async with self._reporting:  # one after the other: each may read millions of records
            written = await asyncio.to_thread(_reported, self._store, span, where, by, only, Form(form))
        return Response(written, media_type=_MEDIA_TYPES[Form(form)], headers=HEADERS)


def _reported(
    store: StoreAddress, span: Span, where: tzinfo, by: Sequence[str], only: Mapping[str, str], form: Form
) -> bytes:
    """A report as it is sent. For a thread: one of a hundred thousand keys takes seconds, and requests must go on."""

    async def read() -> bytes:
        database = Database(store)
        try:
            found = await reports.report(LedgerStore(database), span, where=where, by=by, only=only)
        finally:
            await database.close()
        return msgspec.json.encode(found) if form is Form.JSON else reports.write(found, form).encode()

    return asyncio.run(read())


class Refused(Exception):
    """A request to the API that is not as it must be."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


async def read_body(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    """The body of a request as a checked record."""
    if kind is None:
        return None
    # A page of another site can send a form without asking, but not this type: its browser asks us first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(UNSUPPORTED_MEDIA_TYPE, "Send a body of the type application/json.")
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise Refused(REQUEST_TOO_LARGE, f"The body is longer than {MAX_BODY_BYTES} bytes.")
        pieces.append(piece)
    try:
        return msgspec.json.decode(b"".join(pieces), type=kind)
    except msgspec.MsgspecError as error:
        raise Refused(INVALID_REQUEST, f"The body is not as it must be: {error}.") from None


def _page(rows: Sequence[Any], limit: int, name: Callable[[Any], str]) -> Page:
    """`rows`: one more than fit, if there are more."""
    return Page(rows[:limit], name(rows[limit - 1]) if len(rows) > limit else None)


def sentence(error: Exception) -> str:
    """What an exception says, as a sentence."""
    text = str(error)
    return text[:1].upper() + text[1:] + "."


def problem_answer(problem: Problem, message: str) -> Response:
    headers = {} if problem.retry_after_seconds is None else {"Retry-After": str(problem.retry_after_seconds)}
    return json_answer(openai_error(problem, message), status=problem.status, headers=headers)


def json_answer(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, media_type="application/json", headers=HEADERS | (headers or {}))


_QUERY_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": USUAL_PAGE},
    "format": {"enum": list(_MEDIA_TYPES), "default": Form.JSON},
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the operations."""
    kinds = [operation.body for operation in OPERATIONS if operation.body] + [
        operation.answer for operation in OPERATIONS if operation.answer is not None
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of)
    inner: dict[str, Any] = {name: {"type": "string"} for name in ("message", "type", "code")} | {"param": {}}
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": list(inner), "properties": inner}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "fairshare accounts", "version": version("fairshare")},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _described(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    described: dict[str, Any] = {
        "summary": operation.what,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        + [
            {"name": name, "in": "query", "schema": _QUERY_SCHEMAS.get(name, {"type": "string"})}
            for name in operation.query
        ],
        "responses": {"default": {"description": "What is wrong.", **_content({"$ref": "#/components/schemas/Error"})}},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, **_content(schema_of[repr(operation.body)])}
    if operation.answer is None:
        described["responses"]["204"] = {"description": "Done."}
    else:
        schema = schema_of[repr(operation.answer)]
        if schema.get("type") == "array":
            next_page = {"type": ["string", "null"]}
            schema = {"type": "object", "properties": {"data": schema, "next": next_page}, "required": ["data", "next"]}
        status = "201" if operation.method == "POST" else "200"
        described["responses"][status] = {"description": "The answer.", **_content(schema)}
        if "format" in operation.query:
            others = {kind: {"schema": {"type": "string"}} for kind in _MEDIA_TYPES.values()}
            described["responses"][status]["content"] = others | described["responses"][status]["content"]
    return described


def _content(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
