"""Heads recognised by their bytes."""

import pytest

from fairshare.wire.known_head import HeadCache, HeadMemory

HEAD = b"POST /v1 HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\nx: y\r\n\r\n%b"


def message(body: bytes) -> bytes:
    return HEAD % (len(body), body)


def test_the_same_head_with_another_length_is_recognised() -> None:
    memory = HeadMemory[str]()
    assert memory.body_of(message(b"abc")) is None
    memory.learn(message(b"abc"), "known")
    for body in (b"abc", b"", b"x" * 12345, b"\r\n\r\nPOST / HTTP/1.1"):
        assert memory.body_of(message(body)) == body
    assert memory.meaning == "known"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        message(b"abc")[:-1],
        message(b"abc") + b"GET",
        message(b"abc").replace(b"host: a", b"host: b"),
        message(b"abc").replace(b"x: y", b"x: z"),
        message(b"abc").replace(b": 3", b": -3"),
        message(b"abc").replace(b": 3", b": +3"),
        message(b"abc").replace(b": 3", b": 3 "),
        message(b"abc").replace(b": 3", b": 0x3"),
        message(b"abc").replace(b": 3", b": "),
        message(b"abc").replace(b": 3", b": 3\r\nContent-Length: 3"),
        message(b"abc").replace(b": 3", b": 3\r\ntransfer-encoding: chunked"),
        message(b"abc").replace(b": 3", b": " + b"0" * 20 + b"3"),
        message(b"abc").replace(b": 3", ": ٣".encode()),
    ],
)
def test_everything_else_is_left_to_the_parser(data: bytes) -> None:
    memory, cache = HeadMemory[str](), HeadCache[str]()
    memory.learn(message(b"abc"), "known")
    cache.learn(message(b"abc"), "known")
    assert memory.body_of(data) is None
    assert cache.find(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nCONTENT-LENGTH: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\n",
    ],
)
def test_a_head_without_one_plain_length_is_not_remembered(data: bytes) -> None:
    memory = HeadMemory[str]()
    memory.learn(message(b"abc"), "known")
    memory.learn(data, "other")
    assert memory.body_of(data) is None
    cache = HeadCache[str]()
    cache.learn(data, "other")
    assert cache.find(data) is None
    assert memory.body_of(message(b"abc")) is None


def test_heads_that_never_come_again_are_soon_not_remembered_any_more() -> None:
    memory = HeadMemory[int]()
    for number in range(64):
        memory.learn(message(b"abc").replace(b"x: y", b"x: %d" % number), number)
    assert memory.meaning == 63  # the 64th is one of those now and then
    for number in range(64, 127):
        memory.learn(message(b"abc").replace(b"x: y", b"x: %d" % number), number)
    assert memory.meaning == 63


def test_a_cache_knows_the_heads_of_many_and_forgets_the_oldest() -> None:
    cache = HeadCache[int](limit=3)
    heads = [message(b"abc").replace(b"x: y", b"x: %d" % number) for number in range(4)]
    for number, data in enumerate(heads):
        cache.learn(data, number)
    assert [cache.find(data) for data in heads] == [None, (1, b"abc"), (2, b"abc"), (3, b"abc")]
    assert cache.find(heads[3].replace(b"Length: 3\r", b"Length: 5\r") + b"de") == (3, b"abcde")


def test_a_head_with_a_second_length_is_not_taken_for_the_one_with_the_first() -> None:
    cache = HeadCache[str]()
    cache.learn(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc", "one")
    for other in (b"content-length: 3\r\ncontent-length: 3", b"content-length: \r\ncontent-length: 3"):
        assert cache.find(b"POST / HTTP/1.1\r\n%b\r\n\r\nabc" % other) is None
