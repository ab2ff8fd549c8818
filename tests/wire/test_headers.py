"""What goes up to an engine, what comes down to a client, and what is refused because it could be read in two ways."""

import json

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.core.priority import ServiceClass, Standing
from fairshare.wire.endpoints import Family
from fairshare.wire.headers import (
    FORWARDED_UP,
    fairshare_lines,
    problem_response,
    read_request_headers,
    read_response_headers,
    request_id,
    status_line,
    upstream_head,
    upstream_opening,
)
from fairshare.wire.problems import (
    INVALID_API_KEY,
    INVALID_REQUEST,
    NO_INSTANCE,
    NOT_FOUND,
    PROBLEMS,
    Problem,
    RequestProblem,
)

CANARY = b"canary-5b1e"


def head_of(
    headers: list[tuple[bytes, bytes]], *, priority: int | None = 10, api_key: str | None = "engine-key"
) -> bytes:
    opening = upstream_opening(
        method="POST", path="/v1/chat/completions", host=b"127.0.0.1:9001", priority=priority, api_key=api_key
    )
    return upstream_head(opening, read_request_headers(headers).forwarded, "id-1", 5)


def parsed(head: bytes) -> dict[bytes, list[bytes]]:
    """A request's headers as the HTTP parser of engines reads them."""
    found: dict[bytes, list[bytes]] = {}

    class Listener:
        def on_header(self, name: bytes, value: bytes) -> None:
            found.setdefault(name.lower(), []).append(value)

    httptools.HttpRequestParser(Listener()).feed_data(head)
    return found


@pytest.mark.parametrize(
    "name",
    [
        b"Authorization",
        b"AUTHORIZATION",
        b"x-api-key",
        b"X-Goog-Api-Key",
        b"api-key",
        b"Cookie",
        b"Proxy-Authorization",
        b"Proxy-Connection",
        b"Proxy-Anything",
        b"X-Vllm-Priority",
        b"x-vLLM-priority",
        b"X-Data-Parallel-Rank",
        b"x-fairshare-class-of-mine",
        b"X-Fairshare-Team",
        b"x-fairshare-priority",
        b"X-Tenant",
        b"X-Forwarded-For",
        b"Forwarded",
        b"Keep-Alive",
        b"TE",
        b"Trailer",
        b"Upgrade",
        b"Expect",
        b"Accept-Encoding",
        b"Host",
        b"X-Amz-Security-Token",
    ],
)
def test_no_credential_cookie_priority_or_connection_header_of_a_client_goes_up(name: bytes) -> None:
    assert CANARY not in head_of([(b"Host", b"gateway"), (name, b"Bearer " + CANARY)])


def test_a_header_that_connection_names_does_not_go_up() -> None:
    headers = [(b"Connection", b"close, TraceParent ,baggage"), (b"traceparent", CANARY), (b"Baggage", CANARY)]
    assert CANARY not in head_of(headers)
    assert CANARY in head_of([(b"Connection", b"keep-alive"), (b"traceparent", CANARY)])


@given(st.lists(st.tuples(st.from_regex(rb"\A[A-Za-z][A-Za-z0-9-]{0,20}\Z"), st.from_regex(rb"\A[!-~]{0,20}\Z"))))
def test_whatever_a_client_sends_the_engine_sees_only_what_is_allowed_and_what_is_ours(
    headers: list[tuple[bytes, bytes]],
) -> None:
    try:
        head = head_of(headers)
    except RequestProblem:
        return
    found = parsed(head)
    ours = {b"host", b"accept-encoding", b"x-request-id", b"x-vllm-priority", b"authorization", b"content-length"}
    assert set(found) <= ours | set(FORWARDED_UP)
    assert all(len(values) == 1 for values in found.values())
    assert found[b"authorization"] == [b"Bearer engine-key"]
    assert found[b"x-vllm-priority"] == [b"10"]
    assert found[b"accept-encoding"] == [b"identity"]


def test_the_head_for_an_engine_is_complete_and_no_more() -> None:
    headers = [(b"Content-Type", b"application/json"), (b"User-Agent", b"curl/8"), (b"Authorization", b"Bearer fs-x")]
    assert head_of(headers) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:9001\r\naccept-encoding: identity\r\n"
        b"x-vllm-priority: 10\r\nauthorization: Bearer engine-key\r\ncontent-type: application/json\r\n"
        b"user-agent: curl/8\r\nx-request-id: id-1\r\ncontent-length: 5\r\n\r\n"
    )


def test_without_a_priority_or_an_engine_key_neither_header_is_sent() -> None:
    found = parsed(head_of([], priority=None, api_key=None))
    assert b"x-vllm-priority" not in found
    assert b"authorization" not in found


def test_a_body_of_unknown_length_goes_up_in_chunks_and_a_get_has_none() -> None:
    def head(method: str) -> dict[bytes, list[bytes]]:
        return parsed(upstream_head(upstream_opening(method=method, path="/x", host=b"h"), b"", "i", None))

    assert head("POST")[b"transfer-encoding"] == [b"chunked"]
    assert b"transfer-encoding" not in head("GET")
    assert b"content-length" not in head("GET")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"Authorization", b"Bearer fs-a")], b"fs-a"),
        ([(b"authorization", b" bearer   fs-a ")], b"fs-a"),
        ([(b"x-api-key", b"fs-a")], b"fs-a"),
        ([(b"X-API-Key", b"fs-a"), (b"Authorization", b"Bearer fs-a")], b"fs-a"),
        ([(b"X-API-Key", b"fs-a"), (b"Authorization", b"Basic Zm9v")], b"fs-a"),
        ([(b"Authorization", b"Basic Zm9v")], None),
        ([(b"Authorization", b"Bearer")], None),
        ([(b"Authorization", b"")], None),
        ([(b"x-api-key", b" ")], None),
    ],
)
def test_the_key_comes_from_either_of_two_headers(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert read_request_headers(headers).key == key


def problem_of(headers: list[tuple[bytes, bytes]]) -> RequestProblem:
    with pytest.raises(RequestProblem) as caught:
        read_request_headers(headers)
    return caught.value


def test_two_different_keys_are_refused() -> None:
    assert problem_of([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")]).problem is INVALID_API_KEY


@pytest.mark.parametrize(
    "name",
    [b"authorization", b"x-api-key", b"x-fairshare-class", b"content-length", b"transfer-encoding", b"content-type"],
)
def test_a_deciding_header_that_comes_twice_is_refused_even_if_both_agree(name: bytes) -> None:
    problem = problem_of([(name, b"batch"), (name.title(), b"batch")])
    assert problem.problem is INVALID_REQUEST
    assert problem.message == f"The header {name.decode()} came twice. Send it once."


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"gzip, chunked")],
        [(b"Transfer-Encoding", b"identity")],
        [(b"Transfer-Encoding", b"chunked, chunked")],
        [(b"Transfer-Encoding", b"xchunked")],
        [(b"Content-Length", b"+5")],
        [(b"Content-Length", b"-5")],
        [(b"Content-Length", b"5, 5")],
        [(b"Content-Length", b"0x5")],
        [(b"Content-Length", b"")],
        [(b"Content-Length", "５".encode())],
        [(b"Content-Length", b"9" * 16)],
    ],
)
def test_a_length_that_two_servers_could_read_in_two_ways_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    assert problem_of(headers).problem is INVALID_REQUEST


def test_lengths_chunks_and_expectations_are_read() -> None:
    assert read_request_headers([(b"Content-Length", b" 12 ")]).content_length == 12
    assert read_request_headers([]).content_length is None
    assert read_request_headers([(b"Transfer-Encoding", b"Chunked")]).chunked
    assert not read_request_headers([]).chunked
    assert read_request_headers([(b"Expect", b"100-Continue")]).expects_continue
    assert not read_request_headers([(b"Expect", b"else")]).expects_continue
    assert read_request_headers([(b"Content-Encoding", b" GZip")]).content_encoding == b"gzip"
    assert read_request_headers([(b"Content-Type", b"application/json")]).content_type == b"application/json"


@pytest.mark.parametrize("value", [b"a\r\nX-Vllm-Priority: 0", b"a\nb", b"a\rb", b"a\x00b"])
def test_a_value_that_would_begin_another_line_goes_neither_up_nor_down(value: bytes) -> None:
    assert problem_of([(b"User-Agent", value)]).problem is INVALID_REQUEST
    if b"\0" not in value:
        assert read_response_headers([(b"x-a", b"1"), (b"x-b", value), (b"x-c", b"2")]).lines == b"x-a: 1\r\nx-c: 2\r\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"interactive", ServiceClass.INTERACTIVE), (b"Batch ", ServiceClass.BATCH)],
)
def test_the_class_header_asks_for_a_class(value: bytes, expected: ServiceClass) -> None:
    assert read_request_headers([(b"X-Fairshare-Class", value)]).service_class is expected


def test_an_unknown_class_is_refused_by_name() -> None:
    assert problem_of([(b"x-fairshare-class", b"urgent")]).message == (
        "`x-fairshare-class` must be interactive or batch, got 'urgent'."
    )
    assert read_request_headers([]).service_class is None


@pytest.mark.parametrize("value", [b"a", b"my-id_1.2", b"Z" * 64])
def test_a_clients_request_id_that_follows_the_rule_is_kept(value: bytes) -> None:
    found = read_request_headers([(b"X-Request-ID", value)]).request_id
    assert found == value
    assert request_id(found, lambda: "new") == value.decode()


@pytest.mark.parametrize("value", [b"", b"Z" * 65, b"a b", b"a/b", b"a\n", "é".encode(), b"a\r\nx: y", b"{}"])
def test_any_other_request_id_is_replaced(value: bytes) -> None:
    assert read_request_headers([(b"x-request-id", value)]).request_id is None
    assert request_id(value, lambda: "new") == "new"


def test_a_request_id_that_came_twice_is_replaced() -> None:
    assert read_request_headers([(b"x-request-id", b"a"), (b"x-request-id", b"a")]).request_id is None


@pytest.mark.parametrize(
    "name",
    [
        b"Set-Cookie",
        b"set-cookie2",
        b"Connection",
        b"Keep-Alive",
        b"Transfer-Encoding",
        b"Trailer",
        b"Upgrade",
        b"Proxy-Authenticate",
        b"WWW-Authenticate",
        b"Authorization",
        b"X-Api-Key",
        b"X-Request-Id",
        b"X-Fairshare-Standing",
        b"X-Vllm-Priority",
    ],
)
def test_what_belongs_to_the_engine_or_its_connection_does_not_come_down(name: bytes) -> None:
    lines = read_response_headers([(b"X-Kept", b"yes"), (name, CANARY), (b"Retry-After", b"3")]).lines
    assert lines == b"x-kept: yes\r\nretry-after: 3\r\n"


def test_a_header_that_the_engines_connection_names_does_not_come_down() -> None:
    lines = read_response_headers([(b"Connection", b"close, X-Hop"), (b"x-hop", CANARY), (b"x-kept", b"yes")]).lines
    assert lines == b"x-kept: yes\r\n"


def test_of_an_engines_headers_length_stream_and_compression_are_read() -> None:
    stream = read_response_headers([(b"Content-Type", b"Text/Event-Stream; charset=utf-8")])
    assert stream.event_stream
    assert stream.content_length is None
    plain = read_response_headers([(b"content-type", b"application/json"), (b"Content-Length", b"17")])
    assert not plain.event_stream
    assert plain.content_length == 17
    assert not plain.encoded
    assert not read_response_headers([(b"content-encoding", b"identity")]).encoded
    packed = read_response_headers([(b"Content-Encoding", b"gzip")])
    assert packed.encoded
    assert packed.lines == b"content-encoding: gzip\r\n"


def test_status_lines_have_their_phrase_and_unknown_ones_none() -> None:
    assert status_line(429) == b"HTTP/1.1 429 Too Many Requests\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"


def test_every_relayed_response_says_pool_standing_priority_and_time_held() -> None:
    assert fairshare_lines("chat", Standing.BORROWING, 10, 0.0126) == (
        b"x-fairshare-pool: chat\r\nx-fairshare-standing: borrowing\r\n"
        b"x-fairshare-priority: 10\r\nx-fairshare-held-ms: 13\r\n"
    )
    within = fairshare_lines("p", Standing.WITHIN_SHARE, None, 0.0)
    assert b"held-ms: 0\r\n" in within
    assert b"standing: within-share\r\n" in within
    assert b"priority" not in within


def split(response: bytes) -> tuple[bytes, bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.code)
@pytest.mark.parametrize("family", list(Family))
def test_an_error_response_is_whole_and_its_length_is_right(problem: Problem, family: Family) -> None:
    head, body = split(problem_response(problem, "what", family=family, request_id="id-1"))
    assert head.startswith(f"HTTP/1.1 {problem.status} ".encode())
    assert f"content-length: {len(body)}".encode() in head
    assert b"x-request-id: id-1" in head
    assert json.loads(body)["error"]["message"] == "what"
    assert (b"retry-after: " in head) == (problem.retry_after_seconds is not None)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.1, b"2"), (60.0, b"60")])
def test_retry_after_is_in_whole_seconds_never_earlier_and_never_zero(seconds: float, header: bytes) -> None:
    assert b"\r\nretry-after: " + header in split(problem_response(NO_INSTANCE, "x", retry_after_seconds=seconds))[0]


def test_an_answer_to_a_head_has_no_body_but_says_its_length() -> None:
    head, body = split(problem_response(NOT_FOUND, "x", head_only=True))
    assert body == b""
    assert b"content-length: 0" not in head


def test_an_error_response_says_whether_the_connection_ends_and_what_is_allowed() -> None:
    head, _ = split(problem_response(INVALID_API_KEY, "x", keep_alive=False, allow="POST"))
    assert b"connection: close" in head
    assert b"allow: POST" in head
    assert b"www-authenticate: Bearer" in head
    assert b"connection" not in split(problem_response(NOT_FOUND, "x"))[0]
