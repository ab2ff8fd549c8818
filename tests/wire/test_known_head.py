"""Heads recognised by their bytes."""

import pytest

from fairshare.wire.known_head import HeadMemory

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
    memory = HeadMemory[str]()
    memory.learn(message(b"abc"), "known")
    assert memory.body_of(data) is None


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
    assert memory.body_of(message(b"abc")) is None


def test_heads_that_never_come_again_are_soon_not_remembered_any_more() -> None:
    memory = HeadMemory[int]()
    for number in range(64):
        memory.learn(message(b"abc").replace(b"x: y", b"x: %d" % number), number)
    assert memory.meaning == 63  # the 64th is one of those now and then
    for number in range(64, 127):
        memory.learn(message(b"abc").replace(b"x: y", b"x: %d" % number), number)
    assert memory.meaning == 63
