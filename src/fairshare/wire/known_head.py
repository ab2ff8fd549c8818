"""Heads that were parsed before, recognised by their bytes.

Whoever keeps a connection alive sends the same head again and again, but for the body's length. What a head says need
be worked out only once then: the parser has accepted these very bytes, and only the digits of the length differ.
"""

import re
from typing import Generic, TypeVar

Meaning = TypeVar("Meaning")

MAX_LENGTH_DIGITS = 15

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,%d})\r\n" % MAX_LENGTH_DIGITS)

MAX_HEAD_BYTES = 4096
"""A longer head is parsed each time."""

PATIENCE = 8
"""After so many messages in a row with another head, heads are remembered only now and then."""


class HeadMemory(Generic[Meaning]):
    """Remembers one head with a `Content-Length`, and what it means."""

    __slots__ = ("_after", "_before", "_misses", "meaning")

    def __init__(self) -> None:
        self._before = b""
        self._after = b""
        self._misses = 0
        self.meaning: Meaning | None = None
        """What the remembered head means; None: none is remembered."""

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one message with the remembered head; None: parse it."""
        before = self._before
        if not before or not data.startswith(before):
            return None
        digits, _, body = data[len(before) :].partition(self._after)
        if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS or len(body) != int(digits):
            return None
        self._misses = 0
        return body

    def learn(self, data: bytes, meaning: Meaning) -> None:
        """A parser has accepted the message with which `data` begins; it means `meaning`, but for its length."""
        self._misses += 1
        if self._misses > PATIENCE and self._misses % 64:
            return
        self._before = b""
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            return
        head = data[: end + 4]
        length = _LENGTH.search(head)
        if length is not None and head.lower().count(b"\r\ncontent-length") == 1:
            self._before = head[: length.start(1)]
            self._after = head[length.end(1) :]
            self.meaning = meaning
