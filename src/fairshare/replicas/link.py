"""The peer link: one authenticated connection between two replicas, over TCP or a Unix socket.

Bytes: frames, each a length (4 bytes, big-endian) and so many bytes. Both sides first send a hello (who, which
versions, a nonce) and then a proof that they know the site's secret: an HMAC over both hellos and the side. Nothing
else is read before the proof is right. From then on a frame is a tag and messages; the tag is an HMAC under a key of
this connection and direction over the frame's number and content, so nobody between the two can alter, insert or replay
one. What is sent in one turn of the event loop travels in one frame.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from fairshare.clock import Clock

log = logging.getLogger("fairshare.replicas")

Message = TypeVar("Message")

MAGIC = "fairshare-peer"
NONCE_BYTES = 32
TAG_BYTES = 16
LENGTH_BYTES = 4

MAX_HELLO_BYTES = 1024
"""The longest frame of a peer that has not proved anything."""

MAX_FRAME_BYTES = 8 << 20

MAX_UNSENT_BYTES = 32 << 20
"""A peer that leaves so much unread is cut off; it gets everything it needs when it comes back."""

HANDSHAKE_SECONDS = 3.0
"""From the connection to the proof."""

KEEP_ALIVE_SECONDS = 0.5
"""A side that has had nothing to say for so long sends an empty frame."""

SILENCE_SECONDS = 2.0
"""A peer of which nothing came for so long is taken for gone."""


class Codec(Protocol[Message]):
    """Messages of one version of the protocol, to bytes and back."""

    def encode(self, messages: Sequence[Message]) -> bytes: ...

    def decode(self, payload: bytes) -> list[Message]:
        """Raises `msgspec.MsgspecError` if they are none."""
        ...


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What each side says first."""

    magic: str
    oldest_version: int
    newest_version: int
    replica: str
    nonce: bytes


class Handler(Protocol[Message]):
    """Hears of one side's links. Called on the event loop's thread."""

    def connected(self, link: "PeerLink[Message]") -> None:
        """The peer has proved itself; from now on messages may be sent."""
        ...

    def received(self, link: "PeerLink[Message]", messages: list[Message]) -> None:
        """One frame of messages came."""
        ...

    def disconnected(self, link: "PeerLink[Message]", reason: str) -> None:
        """A link that was `connected` is gone."""
        ...


class LinkOptions(msgspec.Struct, Generic[Message], frozen=True, kw_only=True):
    """What all links of one replica have in common."""

    replica: str
    """Who we are."""
    secret: bytes
    codecs: dict[int, Codec[Message]]
    """Version of the protocol → its messages."""
    clock: Clock
    nonce: Callable[[int], bytes]


class PeerLink(asyncio.Protocol, Generic[Message]):
    """One connection. `send` any number of messages once it is `connected`."""

    def __init__(
        self,
        options: LinkOptions[Message],
        handler: Handler[Message],
        *,
        dials: bool,
        made: Callable[["PeerLink[Message]"], None],
        ended: Callable[["PeerLink[Message]"], None],
    ) -> None:
        """`made`, `ended`: the connection was, whatever it came to."""
        self._options = options
        self._handler = handler
        self.dials = dials
        """This side asked for the connection."""
        self._made = made
        self._ended = ended
        self._hello = msgspec.msgpack.encode(
            Hello(MAGIC, min(options.codecs), max(options.codecs), options.replica, options.nonce(NONCE_BYTES))
        )
        self._peer_hello = b""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[Message] = []
        self._is_reading = False
        """What is said meanwhile answers what came, and goes when all of that is read: it needs no other turn."""
        self._codec: Codec[Message] | None = None
        self._tags_out: _Tags | None = None
        self._tags_in: _Tags | None = None
        self._began_at = 0.0
        self._heard_at = 0.0
        self._said_at = 0.0
        self.peer = ""
        """The replica at the other end, once it has proved itself."""
        self.version = 0
        """The newest version of the protocol that both sides speak."""
        self.is_up = False
        self.was_up = False
        self.reason = ""
        """Why it was closed."""

    # ------------------------------------------------------------------ sending

    def send(self, message: Message) -> None:
        """Sent with whatever else is sent in this turn of the event loop. Lost if the link is down."""
        if not self.is_up:
            return
        if not self._unsent and not self._is_reading:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def close(self, reason: str) -> None:
        """Cut the connection at once; what was not sent is lost."""
        if self._transport is not None and not self.reason:
            self.reason = reason
            self._transport.abort()
            if self.is_up:
                self.is_up = False
                self._unsent.clear()
                self._handler.disconnected(self, reason)

    def sweep(self, now: float) -> None:
        """Call it a few times a second: keeps the link alive, and ends it when the peer is silent."""
        if self._transport is None or self.reason:
            return
        if not self.is_up:
            if now - self._began_at > HANDSHAKE_SECONDS:
                self.close("it did not prove itself in time")
        elif now - self._heard_at > SILENCE_SECONDS:
            self.close(f"it was silent for {now - self._heard_at:.1f} s")
        elif now - self._said_at >= KEEP_ALIVE_SECONDS and not self._unsent:
            self._write_messages([])

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._began_at = self._heard_at = self._said_at = self._options.clock()
        self._made(self)
        self._write(self._hello)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._options.clock()
        buffer: bytes | bytearray = data  # whole frames, nearly always: no need to copy them once more
        if self._received:
            buffer = self._received
            buffer += data
        self._is_reading = True
        start, size = 0, len(buffer)
        # A peer is asked for one thing after the other: nothing behind a wrong proof is looked at.
        while (begin := start + LENGTH_BYTES) <= size and not self.reason:
            length = int.from_bytes(buffer[start:begin])
            if length > (MAX_FRAME_BYTES if self.is_up else MAX_HELLO_BYTES):
                self.close(f"a frame of {length} bytes is too long")
                break
            end = begin + length
            if end > size:
                break
            self._frame(bytes(buffer[begin:end]))
            start = end
        self._is_reading = False
        self._flush()
        if self.reason:
            self._received.clear()
        elif isinstance(buffer, bytearray):
            del buffer[:start]
        elif start < size:
            self._received += buffer[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.reason:
            self.reason = "the connection was closed" if exc is None else f"the connection broke ({exc})"
            if self.is_up:
                self.is_up = False
                self._unsent.clear()
                self._handler.disconnected(self, self.reason)
        self._ended(self)

    # ------------------------------------------------------------------ inside

    def _frame(self, content: bytes) -> None:
        if self.is_up:
            self._take_messages(content)
        elif not self._peer_hello:
            self._take_hello(content)
        else:
            self._take_proof(content)

    def _take_hello(self, content: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(content, type=Hello)
        except msgspec.MsgspecError:
            self.close("it did not greet as a replica does")
            return
        if hello.magic != MAGIC or len(hello.nonce) != NONCE_BYTES:
            self.close("it did not greet as a replica does")
            return
        ours = self._options.codecs
        version = min(max(ours), hello.newest_version)
        if version < max(min(ours), hello.oldest_version):
            self.close(
                f"it speaks versions {hello.oldest_version} to {hello.newest_version} of the protocol, we speak "
                f"{min(ours)} to {max(ours)}; run two adjacent versions of fairshare at most"
            )
            return
        self.version = version
        self._peer_hello = content
        self.peer = hello.replica
        self._write(self._digest("proof", of_us=True))

    def _take_proof(self, content: bytes) -> None:
        if not hmac.compare_digest(content, self._digest("proof", of_us=False)):
            self.close("it does not know this site's secret; give every replica the same secret_file")
            return
        self._codec = self._options.codecs[self.version]
        self._tags_out = _Tags(self._digest("frames", of_us=True))
        self._tags_in = _Tags(self._digest("frames", of_us=False))
        self.is_up = self.was_up = True
        self._handler.connected(self)

    def _take_messages(self, content: bytes) -> None:
        assert self._codec is not None
        assert self._tags_in is not None
        payload = content[TAG_BYTES:]
        if not hmac.compare_digest(content[:TAG_BYTES], self._tags_in.next(payload)):
            self.close("a frame was altered on its way")
            return
        if not payload:
            return
        try:
            messages = self._codec.decode(payload)
        except msgspec.MsgspecError as error:
            self.close(f"a message cannot be read ({error})")
            return
        try:
            self._handler.received(self, messages)
        except Exception:
            # Both sides start from what is true when they meet again.
            log.exception("a message of replica %s could not be handled", self.peer)
            self.close("a message could not be handled; the log says why")

    def _flush(self) -> None:
        if self._unsent and self.is_up:
            messages, self._unsent = self._unsent, []
            self._write_messages(messages)

    def _write_messages(self, messages: list[Message]) -> None:
        assert self._codec is not None
        assert self._tags_out is not None
        payload = self._codec.encode(messages) if messages else b""
        if len(payload) > MAX_FRAME_BYTES - TAG_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self._write_messages(messages[:half])
            self._write_messages(messages[half:])
            return
        if len(payload) > MAX_FRAME_BYTES - TAG_BYTES:
            self.close(f"a message of {len(payload)} bytes does not fit into a frame")
            return
        self._write(self._tags_out.next(payload) + payload)

    def _write(self, content: bytes) -> None:
        assert self._transport is not None
        if self.reason:
            return
        self._said_at = self._options.clock()
        self._transport.write(len(content).to_bytes(LENGTH_BYTES) + content)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close("it does not read what it is sent")

    def _digest(self, purpose: str, *, of_us: bool) -> bytes:
        """Bound to both hellos and to the side that it is of, so that no side's can be shown to it as the other's."""
        side = "dials" if self.dials is of_us else "listens"
        first, second = (self._hello, self._peer_hello) if self.dials else (self._peer_hello, self._hello)
        content = msgspec.msgpack.encode([MAGIC, purpose, side, first, second])
        return hmac.digest(self._options.secret, content, "sha256")


class _Tags:
    """The tags of one direction's frames, one after the other."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        """Copied for each frame: to look the algorithm up anew costs as much as to use it."""
        self._number = 0

    def next(self, payload: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8) + payload)
        self._number += 1
        return mac.digest()[:TAG_BYTES]
