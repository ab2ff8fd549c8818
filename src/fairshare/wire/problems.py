"""The one table of the errors that fairshare itself answers with: status, stable code, shape, `Retry-After`.

An engine's own errors are never rewritten; they pass through. What is here has OpenAI's shape
(`{"error": {"message", "type", "param", "code"}}`), or Anthropic's on Anthropic's endpoints.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from fairshare.core.decisions import RefusalReason, Refused
from fairshare.errors import CallerError
from fairshare.wire.endpoints import Family


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of error. `code` and `status` are a contract with clients: add rows, never rename."""

    code: str
    status: int
    type: str
    """OpenAI's error type: whose fault it is."""
    retry_after_seconds: int | None = None
    """What `Retry-After` says unless more is known; None: trying again cannot help."""


_CALLER = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"

INVALID_REQUEST = Problem("invalid_request", 400, _CALLER)
INVALID_API_KEY = Problem("invalid_api_key", 401, _CALLER)
MODEL_NOT_FOUND = Problem("model_not_found", 404, _CALLER)
NOT_FOUND = Problem("not_found", 404, _CALLER)
FORBIDDEN = Problem("forbidden", 403, _CALLER)
"""Admin port: the role does not reach this."""
METHOD_NOT_ALLOWED = Problem("method_not_allowed", 405, _CALLER)
REQUEST_TIMEOUT = Problem("request_timeout", 408, _CALLER)
"""The client did not send its headers or body in time."""
CONFLICT = Problem("conflict", 409, _CALLER)
"""Admin port: it cannot be, as things are."""
REQUEST_TOO_LARGE = Problem("request_too_large", 413, _CALLER)
UNSUPPORTED_MEDIA_TYPE = Problem("unsupported_media_type", 415, _CALLER)
HEADERS_TOO_LARGE = Problem("headers_too_large", 431, _CALLER)
QUEUE_FULL = Problem("queue_full", 429, _RATE, retry_after_seconds=1)
TOO_MANY_FAILED_LOGINS = Problem("too_many_failed_logins", 429, _RATE, retry_after_seconds=10)
RATE_LIMITED = Problem("rate_limited", 429, _RATE, retry_after_seconds=1)
TOO_MANY_IN_FLIGHT = Problem("too_many_in_flight", 429, _RATE, retry_after_seconds=1)
BUDGET_EXHAUSTED = Problem("budget_exhausted", 429, _RATE, retry_after_seconds=3600)
"""`Retry-After` says when the budget starts again, where it does."""
INTERNAL_ERROR = Problem("internal_error", 500, _SERVER)
"""A fault of fairshare itself."""
UPSTREAM_UNREACHABLE = Problem("upstream_unreachable", 502, _SERVER, retry_after_seconds=1)
UPSTREAM_BROKE = Problem("upstream_broke", 502, _SERVER, retry_after_seconds=1)
"""The engine's answer ended early or made no sense as HTTP."""
HELD_TOO_LONG = Problem("held_too_long", 503, _SERVER, retry_after_seconds=5)
NO_INSTANCE = Problem("no_instance", 503, _SERVER, retry_after_seconds=5)
NO_OWNER = Problem("no_owner", 503, _SERVER, retry_after_seconds=5)
NO_WORKER = Problem("no_worker", 503, _SERVER, retry_after_seconds=1)
"""Admin port: none of the machine's workers answers. Clients never see it."""
STORE_UNAVAILABLE = Problem("store_unavailable", 503, _SERVER, retry_after_seconds=5)
"""Admin port: the store does not answer. Clients never see it."""
SHUTTING_DOWN = Problem("shutting_down", 503, _SERVER, retry_after_seconds=1)
TOO_MANY_CONNECTIONS = Problem("too_many_connections", 503, _SERVER, retry_after_seconds=1)
UPSTREAM_TIMEOUT = Problem("upstream_timeout", 504, _SERVER, retry_after_seconds=1)

PROBLEMS: tuple[Problem, ...] = (
    INVALID_REQUEST,
    INVALID_API_KEY,
    MODEL_NOT_FOUND,
    FORBIDDEN,
    NOT_FOUND,
    METHOD_NOT_ALLOWED,
    REQUEST_TIMEOUT,
    CONFLICT,
    REQUEST_TOO_LARGE,
    UNSUPPORTED_MEDIA_TYPE,
    HEADERS_TOO_LARGE,
    QUEUE_FULL,
    TOO_MANY_FAILED_LOGINS,
    RATE_LIMITED,
    TOO_MANY_IN_FLIGHT,
    BUDGET_EXHAUSTED,
    INTERNAL_ERROR,
    UPSTREAM_UNREACHABLE,
    UPSTREAM_BROKE,
    HELD_TOO_LONG,
    NO_INSTANCE,
    NO_OWNER,
    NO_WORKER,
    STORE_UNAVAILABLE,
    SHUTTING_DOWN,
    TOO_MANY_CONNECTIONS,
    UPSTREAM_TIMEOUT,
)
"""Every row, for the reference page and its test."""


class RequestProblem(CallerError):
    """A request that cannot be served as it is: the problem to answer with, which parameter is wrong, when to retry."""

    def __init__(
        self, problem: Problem, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.problem = problem
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


def missing_model(models: Iterable[str]) -> RequestProblem:
    """The request names no model; `models` are those that the key may use."""
    return RequestProblem(
        INVALID_REQUEST, f"The request has no `model`. Set it to one of: {_listed(models)}.", param="model"
    )


def unknown_model(model: str, models: Iterable[str]) -> RequestProblem:
    """There is no such model, or the key may not use it (the answer does not say which)."""
    return RequestProblem(
        MODEL_NOT_FOUND,
        f"There is no model {_shown(model)} here for this key. Use one of: {_listed(models)}.",
        param="model",
    )


def _listed(models: Iterable[str]) -> str:
    names = sorted(models)
    listed = ", ".join(names[:20]) or "(none)"
    return f"{listed} and {len(names) - 20} more" if len(names) > 20 else listed


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")


def refusal_problem(reason: RefusalReason) -> Problem:
    """The problem that answers a queue's refusal.

    The three bounds of a queue share one code: to a client they are the same ("later"); the message says which.
    """
    match reason:
        case RefusalReason.QUEUE_FULL | RefusalReason.TEAM_QUEUE_FULL | RefusalReason.HELD_BYTES_FULL:
            return QUEUE_FULL
        case RefusalReason.HELD_TOO_LONG:
            return HELD_TOO_LONG
        case RefusalReason.NO_INSTANCE:
            return NO_INSTANCE
        case RefusalReason.NO_OWNER:
            return NO_OWNER
        case _:
            assert_never(reason)


def refusal_message(refused: Refused, *, pool: str, team: str) -> str:
    """What a client is told about a queue's refusal: what is wrong, what was found, what to do."""
    found, limit = refused.found, refused.limit
    match refused.reason:
        case RefusalReason.QUEUE_FULL:
            return (
                f"Pool {pool!r} already holds {found:.0f} waiting requests (limit {limit:.0f}). Try again after"
                " the time in Retry-After."
            )
        case RefusalReason.TEAM_QUEUE_FULL:
            return (
                f"Team {team!r} already has {found:.0f} requests waiting in pool {pool!r} (limit {limit:.0f})."
                " Send fewer requests at once, or try again after the time in Retry-After."
            )
        case RefusalReason.HELD_BYTES_FULL:
            return (
                f"The requests that wait in pool {pool!r} take {found:.0f} bytes (limit {limit:.0f}). Try again"
                " after the time in Retry-After."
            )
        case RefusalReason.HELD_TOO_LONG:
            return (
                f"The request waited {found:.1f} s for a slot of pool {pool!r} (limit {limit:.1f} s). Try again"
                " after the time in Retry-After."
            )
        case RefusalReason.NO_INSTANCE:
            return (
                f"No instance of pool {pool!r} accepts requests now. Try again after the time in Retry-After; if it"
                " lasts, tell whoever runs the engines."
            )
        case RefusalReason.NO_OWNER:
            return (
                f"No replica of the gateway has decided for pool {pool!r} for {found:.0f} s, and this one may go on"
                f" alone for {limit:.0f} s only. Try again after the time in Retry-After; if it lasts, tell whoever"
                " runs the gateway: its replicas do not reach their store."
            )
        case _:
            assert_never(refused.reason)


def openai_error(problem: Problem, message: str, *, param: str | None = None) -> bytes:
    """The body of an error in OpenAI's shape."""
    return _encode(
        {"error": {"message": message, "type": problem.type, "param": param, "code": problem.code}},
    )


def anthropic_error(problem: Problem, message: str, *, param: str | None = None) -> bytes:
    """The body of an error in Anthropic's shape; `code` and `param` ride along, Anthropic's clients ignore them."""
    error = {"type": anthropic_type(problem), "message": message, "code": problem.code, "param": param}
    return _encode({"type": "error", "error": error})


def anthropic_type(problem: Problem) -> str:
    """Anthropic's error type for a problem (docs.anthropic.com, "Errors")."""
    match problem.status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 413:
            return "request_too_large"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case 504:
            return "timeout_error"
        case status if status >= 500:
            return "api_error"
        case _:
            return "invalid_request_error"


def error_body(family: Family, problem: Problem, message: str, *, param: str | None = None) -> bytes:
    """The body of an error in the shape that the endpoint's clients understand (`application/json`)."""
    match family:
        case Family.OPENAI:
            return openai_error(problem, message, param=param)
        case Family.ANTHROPIC:
            return anthropic_error(problem, message, param=param)
        case _:
            assert_never(family)


def error_event(family: Family, problem: Problem, message: str) -> bytes:
    """The same as an SSE event, for a stream that has begun and cannot go on. Starts on a line of its own.

    It begins with a blank line: the stream may have been cut inside an event, which this ends (clients then see one
    event that is no JSON, as they would see a cut one, and the error after it).
    """
    match family:
        case Family.OPENAI:
            return b"\n\ndata: " + openai_error(problem, message) + b"\n\n"
        case Family.ANTHROPIC:
            return b"\n\nevent: error\ndata: " + anthropic_error(problem, message) + b"\n\n"
        case _:
            assert_never(family)


_encode = msgspec.json.Encoder().encode
