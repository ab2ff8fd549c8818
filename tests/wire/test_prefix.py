"""Keys of prefixes: alike as far as two prompts are alike, whatever comes behind."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fairshare.wire.prefix import BOUNDARIES, FULL_BYTES, LONGEST_BYTES, STEP_BYTES, prefix_keys


def messages(*contents: str) -> bytes:
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]
    return json.dumps(turns).encode()


def shared(left: bytes, right: bytes, model: str = "m") -> int:
    """How many keys of the two prompts agree, from the shortest prefix on."""
    agreeing = 0
    for one, other in zip(prefix_keys(model, left), prefix_keys(model, right), strict=False):
        if one != other:
            break
        agreeing += 1
    return agreeing


def test_the_next_turn_of_a_conversation_has_the_keys_of_the_last_one() -> None:
    first = prefix_keys("m", messages("a" * 3000))
    assert len(first) == 2
    assert prefix_keys("m", messages("a" * 3000, "b" * 3000, "c" * 10))[:2] == first


def test_prompts_that_differ_early_share_no_key() -> None:
    assert shared(messages("red " * 1000), messages("blue" * 1000)) == 0


def test_a_shared_beginning_shares_the_keys_up_to_where_the_prompts_part() -> None:
    system = "You are helpful. " * 150  # 2,550 bytes
    assert shared(messages(system, "red " * 500), messages(system, "blue" * 500)) == 2


def test_a_short_prompt_has_no_key_and_a_long_one_not_many() -> None:
    assert prefix_keys("m", b"x" * (STEP_BYTES - 1)) == []
    assert len(prefix_keys("m", b"x" * STEP_BYTES)) == 1
    assert len(prefix_keys("m", b"x" * (64 << 20))) == len(BOUNDARIES) < 25
    assert BOUNDARIES[-1][1] <= LONGEST_BYTES


def test_models_share_nothing() -> None:
    assert prefix_keys("m", b"x" * 2000)[0] != prefix_keys("n", b"x" * 2000)[0]


def test_keys_are_the_same_in_every_process() -> None:
    assert prefix_keys("m", b"x" * 1024) == [prefix_keys("m", memoryview(b"x" * 1024))[0]] == [KEY_OF_1024_X]


KEY_OF_1024_X = 4141566401


@given(st.integers(0, FULL_BYTES - 1))
def test_every_byte_of_the_first_4_kib_counts(position: int) -> None:
    prompt = b"x" * FULL_BYTES
    other = bytearray(prompt)
    other[position] ^= 1
    assert shared(prompt, bytes(other)) == position // STEP_BYTES
