"""Streams of server-sent events on their way from an engine to a client.

Bytes are relayed as they come. An event is looked into only if it carries one of a few marks (`"usage"`, `"error"`,
`"abort"`, a finish reason, `[DONE]`); in JSON an unescaped quote begins or ends a string, so text that speaks of usage
carries no mark, and if it does, parsing decides. One kind of event can be taken out: the usage event that the client
did not ask for.
"""

import re
from functools import lru_cache

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fairshare.wire.usage import AnswerFields, Usage, answer_fields, reported_failure, reported_finish, reported_usage

MAX_EVENT_BYTES = 262_144
"""A longer event is relayed without a look into it, so that an upstream that never ends one costs no memory."""

_ORDINARY_ENDS = (
    b'"finish_reason":null,"token_ids":null}]}\n\n',
    b'"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n',
    b'"finish_reason":null}]}\n\n',
)
"""How the event of one generated piece ends (vLLM 0.32 chat and completions; older ones). Such an event has a choice,
so it is not the usage event; it is not finished, so not aborted; and errors have no choices."""

_FRAMED_ENDS = tuple(end + b"\r\n" for end in _ORDINARY_ENDS)
"""The same at the end of a chunk with its frame (RFC 9112, 7.1)."""

_MARK = re.compile(rb'"(?:usage|error|abort|message_stop|finish_reason"\s*:\s*)"')

_EOL = rb"(?:\r\n|\n|\r(?!\n))"
_EVENT_END = re.compile(_EOL + _EOL)
_LINE_END = re.compile(_EOL)

_SAMPLED_EVENTS = 8
"""Events in which a text is looked for, to learn how many bytes of an event are not text."""

_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "text", "thinking", "partial_json")

_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode

_LAST_TYPES = frozenset({"message_stop", "response.completed", "response.failed", "response.incomplete"})


@lru_cache(4096)
def _chunk_size_line(framed_bytes: int) -> bytes:
    """The first line of a chunk that has so many bytes with its frame, as engines write it.

    Where no chunk has so many, a line feed, with which none begins.
    """
    for digits in range(1, 9):
        payload_bytes = framed_bytes - digits - 4
        line = b"%x\r\n" % max(0, payload_bytes)
        if payload_bytes > 0 and len(line) == digits + 2:
            return line
    return b"\n"


class StreamTail:
    """Watches one stream go by. `feed` each piece of the body, relay what it returns, and `finish` at the end.

    Relayed bytes do not depend on how the stream is split into pieces. In the common case (whole events without a
    mark) the very object that came in is returned. Without `strip_usage` what is returned is always what came in;
    with it, an event that is not complete is held until it is (at most `MAX_EVENT_BYTES`).
    """

    __slots__ = (
        "_drop_line_feed",
        "_envelope_bytes",
        "_event_bytes",
        "_fast",
        "_overlong",
        "_partial",
        "_strip_usage",
        "_unsampled",
        "ended",
        "events",
        "failure",
        "finish_reason",
        "usage",
    )

    def __init__(self, *, strip_usage: bool) -> None:
        """`strip_usage`: the client did not ask for the usage event, so it is taken out."""
        self._strip_usage = strip_usage
        self._partial = bytearray()
        """The event that is not complete yet (after `_overlong`: only its last byte)."""
        self._overlong = False
        self._drop_line_feed = False
        """A stripped event ended in a lone CR so far; if an LF comes next, it belongs to it."""
        self._fast = False
        """At the beginning of an event, with nothing kept and the envelope known."""
        self._unsampled = _SAMPLED_EVENTS
        self._envelope_bytes = 0
        self._event_bytes = 0
        self.events = 0
        """Events that carried a piece of the answer."""
        self.usage: Usage | None = None
        """What the engine reported so far; None: nothing yet."""
        self.failure: str | None = None
        """The engine's error inside the stream, or its abort; None: neither."""
        self.finish_reason = ""
        """Why it stopped, one of `FINISH_REASONS`; empty: it did not say (yet)."""
        self.ended = False
        """The stream's own last event was seen (`[DONE]`, `message_stop`, `response.completed` ...)."""

    @property
    def text_bytes(self) -> int:
        """Bytes of generated text that went by, about: all bytes less what surrounds the text of a typical event."""
        return max(0, self._event_bytes - self.events * self._envelope_bytes)

    def passes(self, framed: bytes) -> bool:
        """Whether this is one whole chunk with its frame (RFC 9112, 7.1) that may be relayed as it came.

        It may if its payload is one ordinary event, as nearly all are; it is counted then. Else nothing is done with
        it: `feed` the payload of whatever it is.
        """
        if self._fast and framed.endswith(_FRAMED_ENDS):
            size = len(framed)
            size_line = _chunk_size_line(size)
            # One line, so one event: its first line feed is the one before the last byte.
            if framed.startswith(size_line) and framed.find(b"\n", len(size_line)) == size - 4:
                self.events += 1
                self._event_bytes += size - len(size_line) - 2
                return True
        return False

    def feed(self, chunk: bytes) -> bytes:
        """What to relay of the next piece of the stream, now. Empty: nothing yet."""
        if self._fast:
            # One line, so one event: its first line feed is the one before the last byte.
            if chunk.endswith(_ORDINARY_ENDS) and chunk.find(b"\n") == len(chunk) - 2:
                self.events += 1
                self._event_bytes += len(chunk)
                return chunk
            if chunk.endswith((b"}\n\n", b"}\r\n\r\n")) and _MARK.search(chunk) is None:
                self.events += chunk.count(b"data:")
                self._event_bytes += len(chunk)
                return chunk
        relayed = self._feed_events(chunk)
        self._fast = not self._partial and not self._drop_line_feed and not self._overlong and not self._unsampled
        return relayed if self._strip_usage else chunk

    def finish(self) -> bytes:
        """The upstream's body has ended (or was cut): what is left to relay. `usage` and `failure` are final."""
        rest = bytes(self._partial)
        self._partial.clear()
        if not rest or self._overlong:
            return b""
        keep = self._look_into(rest)
        return rest if keep and self._strip_usage else b""

    def _feed_events(self, chunk: bytes) -> bytes:
        """Takes whole events out of what is there; returns what may go to a client that waits for whole events."""
        if self._drop_line_feed and chunk:
            self._drop_line_feed = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if self._overlong:
            return self._pass_overlong(chunk)
        # An end may straddle the seam; the last byte of its first line end is enough to find it.
        search_from = max(0, len(self._partial) - 1)
        self._partial += chunk
        buffer = self._partial
        size = len(buffer)
        kept: list[bytes] = []
        start = 0
        while start < size:
            first = buffer[start]
            if first in b"\r\n":
                # A blank line where an event could begin.
                kept.append(bytes(buffer[start : start + 1]))
                start += 1
                continue
            # A comment (keep-alive) ends with its line: it must not wait for an event.
            pattern = _LINE_END if first == ord(":") else _EVENT_END
            end = pattern.search(buffer, max(start, search_from))
            if end is None:
                break
            event = bytes(buffer[start : end.end()])
            start = end.end()
            if first == ord(":") or len(event) > MAX_EVENT_BYTES or self._look_into(event):
                kept.append(event)
            elif event.endswith(b"\r"):
                self._drop_line_feed = start == size
        del buffer[:start]
        if len(buffer) > MAX_EVENT_BYTES:
            kept.append(bytes(buffer))
            del buffer[:-1]
            self._overlong = True
        return b"".join(kept)

    def _pass_overlong(self, chunk: bytes) -> bytes:
        """Relays what is left of an event that is too long to look into, and what comes after it."""
        seam = len(self._partial)
        self._partial += chunk
        end = _EVENT_END.search(self._partial)
        if end is None:
            del self._partial[:-1]
            return chunk
        rest_from = end.end() - seam
        self._overlong = False
        self._partial.clear()
        return chunk[:rest_from] + self._feed_events(chunk[rest_from:])

    def _look_into(self, event: bytes) -> bool:
        """Learns from one event; whether it is relayed."""
        if not self._unsampled and (event.endswith(_ORDINARY_ENDS) or _MARK.search(event) is None):
            if event.rstrip(b"\r\n").endswith(b"[DONE]"):
                self.ended = True
            else:
                self.events += 1
                self._event_bytes += len(event)
            return True
        data = b"\n".join(line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:"))
        if data == b"[DONE]":
            self.ended = True
            return True
        fields = answer_fields(data)
        if fields is None:
            return True
        if fields.choices or fields.delta is not UNSET:
            self.events += 1
            self._event_bytes += len(event)
        if self._unsampled:
            self._sample(event, fields)
        if fields.type in _LAST_TYPES:
            self.ended = True
        self.finish_reason = reported_finish(fields) or self.finish_reason
        failure = reported_failure(fields)
        if failure is not None:
            self.failure = self.failure or failure
            return True
        usage = reported_usage(fields)
        if usage is None:
            return True
        self.usage = usage if self.usage is None else self.usage.joined(usage)
        return bool(fields.choices) or not self._strip_usage

    def _sample(self, event: bytes, fields: AnswerFields) -> None:
        """Learns how many bytes of an event surround its text, from the first one that has a text."""
        self._unsampled -= 1
        text_bytes = _text_bytes(fields)
        if text_bytes > 0:
            self._unsampled = 0
            self._envelope_bytes = len(event) - text_bytes
        elif not self._envelope_bytes or len(event) < self._envelope_bytes:
            self._envelope_bytes = len(event)


def _text_bytes(fields: AnswerFields) -> int:
    """Bytes of the generated text in one event, as JSON writes it."""
    if not fields.choices:
        # A text in `/v1/responses`, an object in Anthropic's stream.
        return _string_bytes(fields.delta) or _member_bytes(fields.delta)
    choice = fields.choices[0]
    return _string_bytes(choice.text) or _member_bytes(choice.delta)


def _string_bytes(value: Raw | UnsetType) -> int:
    if not isinstance(value, Raw):
        return 0
    text = memoryview(value)
    return len(text) - 2 if text[0] == ord('"') else 0


def _member_bytes(value: Raw | UnsetType) -> int:
    if not isinstance(value, Raw):
        return 0
    try:
        members = _decode_members(value)
    except msgspec.DecodeError:
        return 0
    return sum(_string_bytes(members[key]) for key in _TEXT_KEYS if key in members)
