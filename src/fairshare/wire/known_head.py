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

_NEVER = b"\n"
"""No head begins with it."""

MAX_HEADS = 1024
"""Heads that a cache remembers: at most 4 MB, mostly 0.3."""

PATIENCE = 8
"""After so many messages in a row with another head, heads are remembered only now and then."""


class HeadMemory(Generic[Meaning]):
    """Remembers one head with a `Content-Length`, and what it means."""

    __slots__ = ("_after", "_before", "_misses", "meaning")

    def __init__(self) -> None:
        self._before = _NEVER
        self._after = b"\r\n\r\n"
        self._misses = 0
        self.meaning: Meaning | None = None
        """What the remembered head means; None: none is remembered."""

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one message with the remembered head; None: parse it."""
        head, end, body = data.partition(self._after)
        # What is behind a head's last line cannot be inside its first ones, so the first place found is the right one.
        if end and head == b"%b%d" % (self._before, len(body)):
            self._misses = 0
            return body
        return None

    def learn(self, data: bytes, meaning: Meaning) -> bool:
        """A parser has accepted the message with which `data` begins; it means `meaning`, but for its length.

        False: it is not remembered.
        """
        self._misses += 1
        if self._misses > PATIENCE and self._misses % 64:
            return False
        self._before = _NEVER
        parts = _around_length(data)
        if parts is None:
            return False
        self._before, self._after = parts
        self.meaning = meaning
        return True

    def known_elsewhere(self) -> None:
        """The head was another one than the remembered one, but a `HeadCache` had it."""
        self._misses = 0


class HeadCache(Generic[Meaning]):
    """Remembers many heads with a `Content-Length`: those of all connections, learnt last."""

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = MAX_HEADS) -> None:
        self._known: dict[bytes, Meaning] = {}
        """By the head without the digits of its length."""
        self._limit = limit

    def find(self, data: bytes) -> tuple[Meaning, bytes] | None:
        """What its head means, and the body, if `data` is exactly one message with a remembered head."""
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        length = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if length is None:
            return None
        first, last = length.span(1)
        # A head with two lengths has no entry: both would be in it.
        meaning = self._known.get(data[:first] + data[last : end + 4])
        if meaning is None:
            return None
        body = data[end + 4 :]
        return (meaning, body) if data[first:last] == b"%d" % len(body) else None

    def learn(self, data: bytes, meaning: Meaning) -> None:
        """A parser has accepted the message with which `data` begins; it means `meaning`, but for its length."""
        parts = _around_length(data)
        if parts is not None:
            self._known[parts[0] + parts[1]] = meaning
            if len(self._known) > self._limit:
                del self._known[next(iter(self._known))]


def _around_length(data: bytes) -> tuple[bytes, bytes] | None:
    """What is before and behind the digits of a head's length; None: it has not exactly one plain length."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    head = data[: end + 4]
    length = _LENGTH.search(head)
    if length is None or head.lower().count(b"\r\ncontent-length") != 1:
        return None
    return head[: length.start(1)], head[length.end(1) :]
