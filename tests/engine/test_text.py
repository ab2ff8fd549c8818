"""Tokens, pseudo-text and instances of schemas."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.engine.text import (
    VOCABULARY,
    chat_tokens,
    detokenize,
    instance_of,
    recite,
    tokenize,
    write,
)


@given(st.text())
def test_every_text_is_its_tokens_and_four_bytes_are_one(text: str) -> None:
    tokens = tokenize(text)
    assert detokenize(tokens) == text
    assert len(tokens) == -(-len(text.encode()) // 4)
    assert all(0 <= token < VOCABULARY for token in tokens)


@given(st.lists(st.integers(0, VOCABULARY * 2)))
def test_ids_that_are_no_tokens_still_have_some_text(tokens: list[int]) -> None:
    assert isinstance(detokenize(tokens), str)


def test_the_next_turn_of_a_chat_begins_with_the_tokens_of_the_last_one() -> None:
    first = chat_tokens([("user", "hi")])
    reply = write(first, 0, max_tokens=9, ignore_eos=True)
    said = "".join(reply.pieces)
    second = chat_tokens([("user", "hi"), ("assistant", said), ("user", "go on")])
    assert second[: len(first) + 9] == first + tokenize(said)


@given(st.integers(1, 600), st.integers(0, 600), st.booleans(), st.integers(0, 3))
def test_an_answer_has_all_tokens_or_ends_by_itself_before(
    max_tokens: int, min_tokens: int, ignore_eos: bool, choice: int
) -> None:
    script = write([1, 2], choice, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos)
    assert script.tokens <= max_tokens
    assert script == write([1, 2], choice, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos)
    if script.finish_reason == "length":
        assert script.tokens == max_tokens == len(script.pieces)
    else:
        assert not ignore_eos
        assert min_tokens < script.tokens == len(script.pieces) + 1


@given(
    st.lists(st.text("aeiklmnort ", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 60),
    st.booleans(),
    st.integers(0, 50),
)
def test_a_stop_string_ends_the_text_at_the_first_place_where_a_token_completes_one(
    stop: list[str], min_tokens: int, include: bool, choice: int
) -> None:
    plain = write([5], choice, max_tokens=200, ignore_eos=True)
    script = write([5], choice, max_tokens=200, ignore_eos=True, stop=stop, min_tokens=min_tokens, include_stop=include)
    expected, tokens, matched = "".join(plain.pieces), 200, None
    for count in range(min_tokens + 1, 201):
        before, text = "".join(plain.pieces[: count - 1]), "".join(plain.pieces[:count])
        found = [(text.find(s, max(0, len(before) - len(s) + 1)), s) for s in stop]
        ends = [(at + len(s), s) for at, s in found if at >= 0]
        if ends:
            end, matched = min(ends, key=lambda pair: pair[0])
            expected, tokens = text[: end if include else end - len(matched)], count
            break
    assert (script.tokens, script.stop_reason) == (tokens, matched)
    assert script.text(script.tokens) == expected
    seen = [script.text(count) for count in range(script.tokens + 1)]
    assert all(expected.startswith(text) for text in seen), "what was shown is never taken back"


def test_a_given_answer_is_cut_at_max_tokens() -> None:
    assert recite('{"a": 1}', max_tokens=3).text(3) == '{"a": 1}'
    assert recite('{"a": 1}', max_tokens=3).finish_reason == "stop"
    cut = recite('{"a": 1}', max_tokens=2)
    assert (cut.finish_reason, cut.text(2)) == ("length", '{"a": 1}')
    assert recite('{"a": 1}', max_tokens=1).text(1) == '{"a"'


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({"type": "string"}, ""),
        ({"type": "string", "minLength": 3}, "xxx"),
        ({"enum": ["b", "c"]}, "b"),
        ({"const": 7}, 7),
        ({"type": "integer"}, 0),
        ({"type": "integer", "minimum": 4}, 4),
        ({"type": "integer", "exclusiveMinimum": 4}, 5),
        ({"type": "number"}, 0),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["integer", "null"]}, 0),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}, {"a": ""}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 1}}}, 1),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": []}, {}),
        (True, {}),
    ],
)
def test_a_schema_has_a_smallest_instance(schema: Any, instance: Any) -> None:
    assert instance_of(schema) == instance


def test_a_schema_without_end_is_cut() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    assert json.loads(json.dumps(instance_of(endless))).keys() == {"a"}
