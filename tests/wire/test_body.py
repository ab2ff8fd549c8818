"""Bodies on their way to an engine: what is read, and that a client's priority never survives."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from fairshare.core.priority import ServiceClass
from fairshare.wire.body import MAX_SLOTS, asks_usage, flag, inspect_body, rewrite_body, whole
from fairshare.wire.endpoints import ENDPOINTS, BodyKind, Endpoint, find_endpoint
from fairshare.wire.problems import INVALID_REQUEST, RequestProblem


def endpoint(path: str) -> Endpoint:
    found = find_endpoint(path.encode())
    assert found is not None
    return found


CHAT = endpoint("/v1/chat/completions")
COMPLETIONS = endpoint("/v1/completions")
RESPONSES = endpoint("/v1/responses")
MESSAGES = endpoint("/v1/messages")
EMBEDDINGS = endpoint("/v1/embeddings")
RERANK = endpoint("/v1/rerank")
SCORE = endpoint("/v1/score")
TOKENIZE = endpoint("/tokenize")
JSON_ENDPOINTS = [one for one in ENDPOINTS if one.body is BodyKind.JSON]


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def rewritten(at: Endpoint, body: bytes, *, priority: int | None = 10, served_name: str | None = None) -> bytes:
    return rewrite_body(at, body, inspect_body(at, body), priority=priority, served_name=served_name)


def all_values(body: bytes, key: str) -> list[object]:
    """Every value that the top level gives to a key, doubled ones too."""
    pairs: list[Any] = json.loads(body, object_pairs_hook=lambda found: found)
    return [value for name, value in pairs if name == key]


def problem_of(at: Endpoint, body: bytes) -> RequestProblem:
    with pytest.raises(RequestProblem) as caught:
        inspect_body(at, body)
    assert caught.value.problem is INVALID_REQUEST
    return caught.value


# Priority.


def test_priority_is_spliced_in_and_no_other_byte_changes() -> None:
    body = b' {"model" : "tiny",\n "seed": 123456789012345678901234567890, "x": 1e400, "y": 1.10}\r\n'
    after = b',"priority":10}'
    assert (
        rewritten(CHAT, body)
        == b' {"model" : "tiny",\n "seed": 123456789012345678901234567890, "x": 1e400, "y": 1.10' + after
    )


@pytest.mark.parametrize(
    "forged",
    [
        '"priority": -5',
        '"pri\\u006frity": -5',
        '"\\u0070\\u0072\\u0069\\u006F\\u0072\\u0069\\u0074\\u0079": -5',
        '"priority": -5, "priority": -6',
        '"priority": -5, "pri\\u006frity": -6',
        '"priority": "-5"',
        '"priority": 1e400',
        '"priority": null',
        '"priority": {"priority": -5}',
        '"priority" \n:\t[-5]',
    ],
)
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("priority", [10, None])
def test_a_forged_priority_never_survives(forged: str, where: str, priority: int | None) -> None:
    model = '"model": "tiny"'
    text = "{" + (f"{forged}, {model}" if where == "first" else f"{model}, {forged}") + "}"
    for at in JSON_ENDPOINTS:
        expected = [priority] if at.priority_in_body and priority is not None else []
        assert all_values(rewritten(at, text.encode(), priority=priority), "priority") == expected


def test_what_merely_looks_like_a_priority_stays() -> None:
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":"\\"priority\\":1","priority":2}],'
        b'"metadata":{"priority":3},"Priority":4,"priority ":5,"priority\\u0000":6}'
    )
    assert rewritten(CHAT, body) == body[:-1] + b',"priority":10}'


def test_no_priority_is_written_where_engines_read_none() -> None:
    body = b'{"model":"tiny","max_tokens":5,"messages":[]}'
    assert rewritten(MESSAGES, body) is body
    assert rewritten(TOKENIZE, body) is body
    assert rewritten(CHAT, body, priority=None) is body


def test_rewriting_the_top_level_keeps_the_bytes_of_every_value() -> None:
    values = (
        b'"big": 123456789012345678901234567890, "huge":1e400 ,"exact":0.1000000000000000055511151231257827,'
        b'"text":"\\u00e9\\/\\ud83d\\ude00", "nested": {"a" : [1, 2],  "a":3}'
    )
    body = b'{"priority":1,"model":"tiny",' + values + b"}"
    after = rewritten(CHAT, body, served_name="served")
    for value in (
        b'"big":123456789012345678901234567890,',
        b'"huge":1e400,',
        b'"exact":0.1000000000000000055511151231257827,',
        b'"text":"\\u00e9\\/\\ud83d\\ude00",',
        b'"nested":{"a" : [1, 2],  "a":3}',
        b'"model":"served"',
    ):
        assert value in after
    assert all_values(after, "priority") == [10]


_keys = st.one_of(
    st.sampled_from(["model", "priority", "stream", "stream_options", "n", "messages", "Priority", "prioritY", "a"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=3)),
    max_leaves=8,
)
_spaces = st.sampled_from(["", "", " ", "\n\t "])


@st.composite
def json_texts(draw: st.DrawFn) -> bytes:
    """Objects with doubled keys, escaped keys and odd spacing."""
    members: list[str] = []
    for _ in range(draw(st.integers(0, 8))):
        key = draw(_keys)
        match key:
            case "model":
                value: object = draw(st.sampled_from(["tiny", "small"]))
            case "stream":
                value = draw(st.sampled_from([True, False, None, 1, 0, "true", "off"]))
            case "stream_options":
                value = draw(
                    st.one_of(
                        st.none(),
                        st.fixed_dictionaries(
                            {},
                            optional={
                                "include_usage": st.sampled_from([True, False, None, "yes", 0]),
                                "continuous_usage_stats": st.booleans(),
                                "other": _values,
                            },
                        ),
                    )
                )
            case "n":
                value = draw(st.sampled_from([1, 6, 2.0, "3", None, True]))
            case _:
                value = draw(_values)
        written = json.dumps(key)
        if draw(st.booleans()):
            written = '"' + "".join(escaped(draw, character) for character in key) + '"'
        space = draw(_spaces)
        members.append(f"{space}{written}{space}:{draw(_spaces)}{json.dumps(value, ensure_ascii=draw(st.booleans()))}")
    return (draw(_spaces) + "{" + ",".join(members) + draw(_spaces) + "}" + draw(_spaces)).encode()


def escaped(draw: st.DrawFn, character: str) -> str:
    if ord(character) > 0xFFFF or draw(st.booleans()):
        return json.dumps(character)[1:-1]
    return f"\\u{ord(character):04x}"


@given(
    json_texts(),
    st.sampled_from(JSON_ENDPOINTS),
    st.one_of(st.none(), st.integers(0, 101)),
    st.sampled_from([None, "tiny", "served"]),
)
def test_any_body_reaches_the_engine_as_it_was_but_for_what_is_ours(
    body: bytes, at: Endpoint, priority: int | None, served_name: str | None
) -> None:
    before = json.loads(body)
    facts = inspect_body(at, body)
    sent = rewrite_body(at, body, facts, priority=priority, served_name=served_name)
    after = json.loads(sent)

    assert all_values(sent, "priority") == ([priority] if at.priority_in_body and priority is not None else [])
    if served_name is not None:
        assert after["model"] == served_name
    if at is CHAT:
        assert facts.slots == max(1, TypeAdapter(int).validate_python(before.get("n") or 1))
    assert facts.model == before.get("model")
    streams = TypeAdapter(bool | None).validate_python(before.get("stream")) or False
    assert facts.stream == (streams and at.streams)
    options = before.get("stream_options") or {}
    if at.usage_on_request:
        assert facts.wants_usage == (TypeAdapter(bool | None).validate_python(options.get("include_usage")) or False)
    if asks_usage(at, facts):
        found = all_values(sent, "stream_options")
        assert len(found) == 1
        kept = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
        assert after["stream_options"] == {**kept, "include_usage": True}
    ours = {"priority"} | ({"stream_options"} if asks_usage(at, facts) else set())
    ours |= {"model"} if served_name is not None else set()
    assert {key: value for key, value in after.items() if key not in ours} == {
        key: value for key, value in before.items() if key not in ours
    }


@given(st.one_of(st.binary(max_size=60), json_texts().flatmap(lambda body: st.sampled_from(mutations(body)))))
def test_what_is_relayed_was_read_as_the_engine_reads_it_and_anything_else_is_refused(body: bytes) -> None:
    try:
        facts = inspect_body(CHAT, body)
        sent = rewrite_body(CHAT, body, facts, priority=7)
    except RequestProblem:
        return
    try:
        parsed = json.loads(sent)
    except ValueError:
        return  # the engine refuses it too
    assert parsed["priority"] == 7
    assert all_values(sent, "priority") == [7]


def mutations(body: bytes) -> list[bytes]:
    middle = len(body) // 2
    return [
        body[:middle],
        body + b"{}",
        body + b"\x00",
        b"\xef\xbb\xbf" + body,
        body[:middle] + b"\xff" + body[middle:],
        body[:middle] + b'"' + body[middle:],
        body[:middle] + b"\\" + body[middle:],
        body.replace(b"{", b"{{", 1),
        body.replace(b":", b":NaN,", 1),
        body.decode().encode("utf-16"),
        body.decode().encode("utf-32-le"),
        b"[" + body + b"]",
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model":"tiny"',
        b'{"model":"tiny"} x',
        b'{"model":"tiny"}{"priority":1}',
        b'{"model":"tiny","x":NaN}',
        b'{"model":"tiny","x":Infinity}',
        b'{"model":"tiny",}',
        b"{'model':'tiny'}",
        b'{"model":"tiny"/**/}',
        b'\xef\xbb\xbf{"model":"tiny"}',
        '{"model":"tiny"}'.encode("utf-16"),
        '{"model":"tiny"}'.encode("utf-16-le"),
        '{"model":"tiny"}'.encode("utf-32"),
        b'{"model":"\xff"}',
        b'{"model":"tiny","x":"\x01"}',
        b'{"model":"tiny","x":01}',
        b'{"model":"tiny","x":"\\ud800"}',
        b'{"model":"tiny","n":1e400}',
        b'{"model":"tiny","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_not_one_json_object_in_utf8_is_refused(body: bytes) -> None:
    assert "body" in problem_of(CHAT, body).message


def test_a_message_about_a_field_names_it_what_was_found_and_what_would_be_right() -> None:
    problem = problem_of(CHAT, b'{"model":"tiny","n":"many"}')
    assert problem.param == "n"
    assert problem.message == "`n` must be a whole number, got 'many'."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ["tiny"]}, "model"),
        ({"model": "tiny", "stream": "perhaps"}, "stream"),
        ({"model": "tiny", "stream": {}}, "stream"),
        ({"model": "tiny", "stream_options": 5}, "stream_options"),
        ({"model": "tiny", "stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
        ({"model": "tiny", "n": [1]}, "n"),
        ({"model": "tiny", "n": 1.5}, "n"),
        ({"model": "tiny", "n": MAX_SLOTS + 1}, "n"),
        ({"model": "tiny", "n": 10**30}, "n"),
    ],
)
def test_a_wrong_field_is_refused_by_name(body: object, param: str) -> None:
    assert problem_of(CHAT, encoded(body)).param == param


def test_a_body_names_its_model_or_none() -> None:
    assert inspect_body(CHAT, b'{"model":"tiny"}').model == "tiny"
    assert inspect_body(CHAT, b'{"model":null}').model is None
    assert inspect_body(CHAT, b"{}").model is None
    assert inspect_body(CHAT, b'{"model":"a","model":"b"}').model == "b"


def test_an_object_without_members_is_rewritten_to_valid_json() -> None:
    assert json.loads(rewritten(CHAT, b" { } ", served_name="served")) == {"model": "served", "priority": 10}
    assert json.loads(rewritten(CHAT, b"{}")) == {"priority": 10}


# Streams.


@pytest.mark.parametrize(
    ("options", "wants"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": None}}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": "on"}}, True),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, False),
    ],
)
@pytest.mark.parametrize("at", [CHAT, COMPLETIONS])
def test_a_stream_always_asks_the_engine_for_usage(at: Endpoint, options: dict[str, object], wants: bool) -> None:
    body = encoded({"model": "tiny", "stream": True, **options})
    facts = inspect_body(at, body)
    assert facts.stream
    assert facts.wants_usage == wants
    assert asks_usage(at, facts) == (not wants)
    sent = json.loads(rewrite_body(at, body, facts, priority=1))
    assert flag(sent["stream_options"]["include_usage"], "")
    if not wants:
        assert "continuous_usage_stats" not in sent["stream_options"]
    else:
        assert sent["stream_options"] == options["stream_options"]


def test_usage_is_not_asked_for_without_a_stream() -> None:
    body = b'{"model":"tiny","stream":false,"stream_options":{"include_usage":false}}'
    assert rewritten(CHAT, body) == body[:-1] + b',"priority":10}'


def test_endpoints_that_do_not_stream_ignore_stream() -> None:
    body = b'{"model":"tiny","stream":true,"input":"x"}'
    assert not inspect_body(EMBEDDINGS, body).stream
    assert inspect_body(RESPONSES, body).stream
    assert rewritten(RESPONSES, body) == body[:-1] + b',"priority":10}'


# Reading as pydantic reads: the engine decides what a value means.

_loose = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["1", "0", "true", "FALSE", "on", "Off", "y", "n", "yes", "t", "F", " 3 ", "3.0", "1_000", "x", ""]
    ),
    st.lists(st.integers(), max_size=1),
)


@given(_loose)
def test_a_flag_means_what_pydantic_says(value: object) -> None:
    try:
        expected = TypeAdapter(bool | None).validate_python(value) or False
    except ValidationError:
        with pytest.raises(RequestProblem):
            flag(value, "stream")
        return
    assert flag(value, "stream") == expected


@given(_loose)
def test_a_whole_number_is_at_least_all_that_pydantic_takes_for_one(value: object) -> None:
    try:
        expected = TypeAdapter(int).validate_python(value)
    except ValidationError:
        return
    assert whole(value) == expected


class _Prompts(BaseModel):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None

    def count(self) -> int:
        if not isinstance(self.prompt, list) or not self.prompt or isinstance(self.prompt[0], int):
            return 1
        return len(self.prompt)


_prompt = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(0, 9), st.booleans(), st.sampled_from(["1", "x", 2.0])), max_size=5),
    st.lists(st.text(max_size=3), max_size=5),
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
)


@given(_prompt, st.sampled_from(["", " ", "\n  "]))
def test_no_prompt_that_the_engine_would_run_goes_uncounted(prompt: object, space: str) -> None:
    text = json.dumps(prompt)
    if text.startswith("["):
        text = "[" + space + text[1:]
    slots = inspect_body(COMPLETIONS, f'{{"model":"tiny","prompt":{space}{text}}}'.encode()).slots
    try:
        ran = _Prompts.model_validate({"prompt": prompt}).count()
    except ValidationError:
        return
    assert slots >= ran
    if isinstance(prompt, list) and all(isinstance(one, str) and not one.isdigit() for one in prompt):
        assert slots == max(1, len(prompt))


# Slots.


@pytest.mark.parametrize(
    ("path", "body", "slots"),
    [
        ("/v1/chat/completions", {}, 1),
        ("/v1/chat/completions", {"n": None}, 1),
        ("/v1/chat/completions", {"n": 6}, 6),
        ("/v1/chat/completions", {"n": "6"}, 6),
        ("/v1/chat/completions", {"n": 6.0}, 6),
        ("/v1/chat/completions", {"n": 0}, 1),
        ("/v1/chat/completions", {"n": -5}, 1),
        ("/v1/chat/completions", {"n": 4, "use_beam_search": True}, 4),
        ("/v1/completions", {"prompt": "x", "n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/completions", {"prompt": [[1, 2], [3], []]}, 3),
        ("/v1/completions", {"prompt": []}, 1),
        ("/v1/completions", {"prompt": [[]]}, 1),
        ("/v1/completions", {"prompt": "x", "n": 2, "best_of": 5}, 5),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 4, "use_beam_search": True}, 8),
        ("/v1/completions", {"prompt_embeds": ["AA", "BB"]}, 2),
        ("/v1/completions", {"prompt": "x", "prompt_embeds": ["AA", "BB"]}, 3),
        ("/v1/responses", {"input": ["a", "b"], "n": 9}, 1),
        ("/v1/messages", {"n": 9}, 1),
        ("/v1/embeddings", {"input": "x"}, 1),
        ("/v1/embeddings", {"input": ["x", "y", "z"]}, 3),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": [[1], [2]]}, 2),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}, 1),
        ("/v1/embeddings", {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        ("/v1/embeddings", {"input": [{"role": "user"}, {"role": "assistant"}]}, 1),
        ("/pooling", {"input": ["x", "y"]}, 2),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]}, 3),
        ("/v1/rerank", {"query": "q", "documents": {"content": []}}, 1),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b", "c"]}, 3),
        ("/v1/score", {"text_1": ["p", "q"], "text_2": ["a", "b"]}, 2),
        ("/v1/score", {"queries": "q", "documents": ["a", "b"]}, 2),
        ("/v1/score", {"queries": "q", "items": ["a", "b"]}, 2),
        ("/v1/score", {"data_1": "q", "data_2": ["a", "b"]}, 2),
        ("/tokenize", {"prompt": ["a", "b"]}, 1),
    ],
)
def test_slots_are_the_sequences_that_the_engine_will_run(path: str, body: dict[str, object], slots: int) -> None:
    assert inspect_body(endpoint(path), encoded({"model": "tiny", **body})).slots == slots


def test_more_sequences_than_any_engine_runs_are_refused_clearly() -> None:
    body = encoded({"model": "tiny", "prompt": ["x"] * 200, "n": 100})
    assert problem_of(COMPLETIONS, body).message == (
        f"The request asks for 20000 sequences at once (n x prompts); the most is {MAX_SLOTS}. Split it."
    )


# The rest.


@pytest.mark.parametrize("at", [one for one in JSON_ENDPOINTS if one.takes_slots and one is not SCORE])
def test_service_tier_flex_means_batch(at: Endpoint) -> None:
    def service_class(tier: object) -> ServiceClass | None:
        return inspect_body(at, encoded({"model": "tiny", "service_tier": tier})).service_class

    assert service_class("flex") is ServiceClass.BATCH
    for tier in ("auto", "default", "priority", None, 5, ["flex"]):
        assert service_class(tier) is None


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"max_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": "5"}, 5),
        ("/v1/chat/completions", {"max_tokens": "lots"}, None),
        ("/v1/chat/completions", {}, None),
        ("/v1/completions", {"max_tokens": 5}, 5),
        ("/v1/responses", {"max_output_tokens": 5}, 5),
        ("/v1/messages", {"max_tokens": 5}, 5),
    ],
)
def test_max_tokens_is_read_under_each_endpoints_name(path: str, body: dict[str, object], expected: int | None) -> None:
    assert inspect_body(endpoint(path), encoded({"model": "tiny", **body})).max_tokens == expected


@pytest.mark.parametrize(
    ("body", "stateful"),
    [
        ({}, True),
        ({"store": True}, True),
        ({"store": False}, False),
        ({"store": None}, False),
        ({"store": "off"}, False),
        ({"store": False, "background": True}, True),
        ({"store": False, "previous_response_id": "resp_1"}, True),
        ({"store": False, "tools": []}, False),
        ({"store": False, "tools": [{"type": "function", "name": "f"}]}, False),
        ({"store": False, "tools": [{"type": "function"}, {"type": "web_search_preview"}]}, True),
        ({"store": False, "tools": [{}]}, True),
        ({"store": False, "tools": ["mcp"]}, True),
    ],
)
def test_a_response_with_state_or_tools_at_the_engine_is_known_as_stateful(
    body: dict[str, object], stateful: bool
) -> None:
    assert inspect_body(RESPONSES, encoded({"model": "tiny", **body})).stateful == stateful


@pytest.mark.parametrize(
    ("at", "key", "value"),
    [
        (CHAT, "messages", [{"role": "user", "content": "hi"}]),
        (COMPLETIONS, "prompt", "hi"),
        (RESPONSES, "input", [{"role": "user"}]),
        (MESSAGES, "messages", [{"role": "user", "content": "hi"}]),
    ],
)
def test_the_prompt_is_given_as_it_was_sent(at: Endpoint, key: str, value: object) -> None:
    facts = inspect_body(at, encoded({"model": "tiny", key: value, "n": 1}))
    assert facts.prompt is not None
    assert bytes(facts.prompt) == encoded(value)
    assert inspect_body(at, b'{"model":"tiny"}').prompt is None


def test_prompt_tokens_are_estimated_from_bytes() -> None:
    text = "word " * 1000
    chat = inspect_body(CHAT, encoded({"model": "tiny", "messages": [{"role": "user", "content": text}]}))
    assert chat.estimated_prompt_tokens == pytest.approx(1250, rel=0.05)
    tokens = inspect_body(COMPLETIONS, encoded({"model": "tiny", "prompt": list(range(1000, 1500))}))
    assert tokens.estimated_prompt_tokens == 500
    lists = inspect_body(COMPLETIONS, encoded({"model": "tiny", "prompt": [list(range(1000, 1100))] * 3}))
    assert lists.estimated_prompt_tokens == 300


def test_an_image_in_base64_is_not_taken_for_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 100_000}}
    body = encoded(
        {"model": "tiny", "messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]}
    )
    assert 1_000 <= inspect_body(CHAT, body).estimated_prompt_tokens < 1_100


def test_reading_a_long_body_does_not_change_what_is_read() -> None:
    body = encoded(
        {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "word " * 50_000}], "n": 2}
    )
    facts = inspect_body(CHAT, body)
    assert (facts.model, facts.stream, facts.slots) == ("tiny", True, 2)
    assert math.isclose(facts.estimated_prompt_tokens, 62_500, rel_tol=0.01)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\xc3"}],"n":2}',
        b'{"model":"tiny","messages":[],"user":"\xf0\x9f","priority":7}',
        b'{"model":"tiny","messages":[],"\xe9":1}',
    ],
)
def test_bytes_that_are_no_utf8_where_we_do_not_look_are_passed_on_and_every_engine_refuses_them(body: bytes) -> None:
    # vLLM reads a body with json.loads and answers 400 to what that cannot decode; its answer goes to the client.
    endpoint = find_endpoint(b"/v1/chat/completions")
    assert endpoint is not None
    facts = inspect_body(endpoint, body)
    sent = rewrite_body(endpoint, body, facts, priority=3)
    with pytest.raises(UnicodeDecodeError):
        json.loads(sent)


@pytest.mark.parametrize(
    "body",
    [b'{"model":"\xff"}', b'{"model":"tiny","service_tier":"\xff"}', b'{"model":"tiny","\xe9":1}'],
)
def test_bytes_that_are_no_utf8_where_we_look_are_a_400_of_ours(body: bytes) -> None:
    endpoint = find_endpoint(b"/v1/chat/completions")
    assert endpoint is not None
    with pytest.raises(RequestProblem) as refused:
        rewrite_body(endpoint, body, inspect_body(endpoint, body), priority=3, served_name="tiny-served")
    assert refused.value.problem.status == 400
