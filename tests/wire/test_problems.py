"""The table of errors: codes are a contract, shapes are those of two APIs, messages say what to do."""

import json

import anthropic
import httpx
import httpx2  # what Anthropic's client is built on
import openai
import pytest

from fairshare.core.decisions import RefusalReason, Refused
from fairshare.errors import CallerError
from fairshare.wire.endpoints import Family
from fairshare.wire.problems import (
    MODEL_NOT_FOUND,
    PROBLEMS,
    Problem,
    RequestProblem,
    anthropic_error,
    anthropic_type,
    error_body,
    error_event,
    missing_model,
    openai_error,
    refusal_message,
    refusal_problem,
    unknown_model,
)

CONTRACT = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "request_too_large": 413,
    "queue_full": 429,
    "held_too_long": 503,
    "no_instance": 503,
    "no_owner": 503,
    "upstream_unreachable": 502,
    "upstream_timeout": 504,
    "invalid_request": 400,
    "shutting_down": 503,
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.code)


def test_the_codes_that_outside_tools_rely_on_keep_their_status() -> None:
    table = {problem.code: problem.status for problem in PROBLEMS}
    assert len(table) == len(PROBLEMS)
    assert {code: table[code] for code in CONTRACT} == CONTRACT


@every_problem
def test_what_may_work_later_says_when_and_what_cannot_does_not(problem: Problem) -> None:
    assert (problem.retry_after_seconds is not None) == (problem.status == 429 or problem.status > 500)


def test_shutting_down_says_to_try_again_in_a_second() -> None:
    assert next(one for one in PROBLEMS if one.code == "shutting_down").retry_after_seconds == 1


@every_problem
def test_an_openai_error_has_openais_shape(problem: Problem) -> None:
    error = json.loads(openai_error(problem, 'say "what"', param="model"))
    assert error == {"error": {"message": 'say "what"', "type": problem.type, "param": "model", "code": problem.code}}


@every_problem
def test_an_anthropic_error_has_anthropics_shape(problem: Problem) -> None:
    error = json.loads(anthropic_error(problem, "what"))
    assert error["type"] == "error"
    assert error["error"]["type"].endswith(("_error", "request_too_large"))
    assert error["error"]["message"] == "what"
    assert error["error"]["code"] == problem.code


def test_anthropics_types_follow_the_status() -> None:
    assert {problem.status: anthropic_type(problem) for problem in PROBLEMS} == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "invalid_request_error",
        405: "invalid_request_error",
        408: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        431: "invalid_request_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }


def test_each_family_gets_its_own_shape() -> None:
    assert error_body(Family.OPENAI, MODEL_NOT_FOUND, "x") == openai_error(MODEL_NOT_FOUND, "x")
    assert error_body(Family.ANTHROPIC, MODEL_NOT_FOUND, "x") == anthropic_error(MODEL_NOT_FOUND, "x")


def test_the_official_openai_client_understands_our_errors() -> None:
    answers = (httpx.Response(one.status, content=openai_error(one, "say what")) for one in PROBLEMS)
    http = httpx.Client(transport=httpx.MockTransport(lambda _: next(answers)), verify=False)
    with openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=0, http_client=http) as client:
        for problem in PROBLEMS:
            with pytest.raises(openai.APIStatusError) as caught:
                client.models.list()
            assert (caught.value.status_code, caught.value.code) == (problem.status, problem.code)
            assert caught.value.type == problem.type
            assert "say what" in str(caught.value)


def test_the_official_anthropic_client_understands_our_errors() -> None:
    answers = (httpx2.Response(one.status, content=anthropic_error(one, "say what")) for one in PROBLEMS)
    http = httpx2.Client(transport=httpx2.MockTransport(lambda _: next(answers)), verify=False)
    with anthropic.Anthropic(api_key="k", base_url="http://test", max_retries=0, http_client=http) as client:
        for problem in PROBLEMS:
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
            assert caught.value.status_code == problem.status
            assert anthropic_type(problem) in str(caught.value)
            assert "say what" in str(caught.value)


def test_an_error_inside_a_stream_begins_on_a_line_of_its_own() -> None:
    event = error_event(Family.OPENAI, MODEL_NOT_FOUND, "x")
    assert event == b"\n\ndata: " + openai_error(MODEL_NOT_FOUND, "x") + b"\n\n"
    event = error_event(Family.ANTHROPIC, MODEL_NOT_FOUND, "x")
    assert event == b"\n\nevent: error\ndata: " + anthropic_error(MODEL_NOT_FOUND, "x") + b"\n\n"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (RefusalReason.QUEUE_FULL, "queue_full"),
        (RefusalReason.TEAM_QUEUE_FULL, "queue_full"),
        (RefusalReason.HELD_BYTES_FULL, "queue_full"),
        (RefusalReason.HELD_TOO_LONG, "held_too_long"),
        (RefusalReason.NO_INSTANCE, "no_instance"),
        (RefusalReason.NO_OWNER, "no_owner"),
    ],
)
def test_every_refusal_of_a_queue_has_a_code_and_a_message_with_its_numbers(reason: RefusalReason, code: str) -> None:
    assert refusal_problem(reason).code == code
    refused = Refused(request_id="r", reason=reason, found=301.5, limit=300, retry_after_seconds=1.0)
    message = refusal_message(refused, pool="chat", team="ads")
    assert "'chat'" in message
    assert "again" in message
    if reason is not RefusalReason.NO_INSTANCE:
        assert "300" in message
        assert "30" in message.replace("300", "")
    if reason is RefusalReason.TEAM_QUEUE_FULL:
        assert "'ads'" in message


def test_every_reason_of_the_core_is_known_here() -> None:
    assert all(refusal_problem(reason) in PROBLEMS for reason in RefusalReason)


def test_a_missing_model_is_a_callers_error_that_names_the_models() -> None:
    problem = missing_model(["b", "a"])
    assert isinstance(problem, CallerError)
    assert isinstance(problem, RequestProblem)
    assert (problem.problem.code, problem.param) == ("invalid_request", "model")
    assert problem.message == "The request has no `model`. Set it to one of: a, b."


def test_an_unknown_model_is_answered_with_the_models_that_there_are() -> None:
    problem = unknown_model("nope", ["b", "a"])
    assert problem.problem is MODEL_NOT_FOUND
    assert problem.message == "There is no model 'nope' here for this key. Use one of: a, b."
    assert "(none)" in unknown_model("nope", []).message
    assert unknown_model("x" * 10_000, ["a"] * 1_000).message.endswith("and 980 more.")
    assert len(unknown_model("x" * 10_000, []).message) < 300
