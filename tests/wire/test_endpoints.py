"""The table of paths."""

import pytest

from fairshare.wire.endpoints import ENDPOINTS, BodyKind, Family, find_endpoint


def test_every_path_of_the_promise_is_served() -> None:
    paths = {endpoint.path for endpoint in ENDPOINTS}
    assert paths >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/pooling",
        "/v1/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
        "/v1/models",
    }
    assert len(paths) == len({endpoint.name for endpoint in ENDPOINTS}) == len(ENDPOINTS)


def test_an_endpoint_is_found_by_its_exact_path() -> None:
    for endpoint in ENDPOINTS:
        path = endpoint.path.encode()
        assert find_endpoint(path) is endpoint
        assert find_endpoint(path + b"/") is None
        assert find_endpoint(b"/" + path) is None


@pytest.mark.parametrize(
    "path", [b"", b"/", b"*", b"/v1", b"/V1/models", b"/v1/%6dodels", b"/v1/models?x", b"/metrics"]
)
def test_any_other_path_is_none(path: bytes) -> None:
    assert find_endpoint(path) is None


def test_priority_goes_where_engines_were_seen_to_read_it() -> None:
    in_body = {endpoint.name for endpoint in ENDPOINTS if endpoint.priority_in_body}
    assert in_body == {"chat", "completions", "responses", "embeddings", "pooling", "rerank", "score"}


def test_what_never_reaches_the_scheduler_takes_no_slot() -> None:
    free = {endpoint.name for endpoint in ENDPOINTS if not endpoint.takes_slots}
    assert free == {"tokenize", "detokenize", "count_tokens", "models"}


def test_only_anthropics_paths_have_anthropics_errors() -> None:
    assert {endpoint.name for endpoint in ENDPOINTS if endpoint.family is Family.ANTHROPIC} == {
        "messages",
        "count_tokens",
    }


def test_only_audio_is_uploaded_as_a_form() -> None:
    assert {endpoint.name for endpoint in ENDPOINTS if endpoint.body is BodyKind.MULTIPART} == {
        "transcriptions",
        "translations",
    }
