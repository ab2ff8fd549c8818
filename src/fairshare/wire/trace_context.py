"""W3C trace context: which trace a request belongs to, and what its engine is told (https://www.w3.org/TR/trace-context/)."""

import re
from collections.abc import Callable

import msgspec

_TRACEPARENT = re.compile(
    rb"^traceparent: ([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\r\n]*)?\r\n", re.M
)
_CONTEXT_LINES = re.compile(rb"^(?:traceparent|tracestate): [^\r\n]*\r\n", re.M)
_SAMPLED = 1


class Trace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Our span of one request."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    parent_span_id: str | None
    """The client's; None: the trace begins here."""
    sampled: bool
    """Whether anybody wants to see it: the client's word, or drawn by lot if the trace begins here."""

    @property
    def line(self) -> bytes:
        """The header line by which the engine's span becomes a child of ours."""
        return f"traceparent: 00-{self.trace_id}-{self.span_id}-{self.sampled:02x}\r\n".encode()


def continued(forwarded: bytes, *, random_bits: Callable[[int], int], draw: Callable[[], bool]) -> tuple[Trace, bytes]:
    """Our span in the client's trace, or in a new one; and the header lines for the engine, with our span in them.

    Args:
        forwarded: a client's header lines for the engine.
        random_bits: so many random bits.
        draw: whether a trace that begins here is sampled.
    """
    span_id = f"{random_bits(64) or 1:016x}"
    found = _TRACEPARENT.search(forwarded)
    if found is not None and _is_valid(found):
        trace = Trace(
            trace_id=found[2].decode(),
            span_id=span_id,
            parent_span_id=found[3].decode(),
            sampled=bool(int(found[4], 16) & _SAMPLED),
        )
        return trace, forwarded[: found.start()] + trace.line + forwarded[found.end() :]
    # What is no context must not be passed on, and a `tracestate` without one means nothing (section 3.3.1.2 there).
    trace = Trace(trace_id=f"{random_bits(128) or 1:032x}", span_id=span_id, parent_span_id=None, sampled=draw())
    return trace, _CONTEXT_LINES.sub(b"", forwarded) + trace.line


def _is_valid(found: re.Match[bytes]) -> bool:
    version, more = found[1], found[5]
    # A later version may say more behind what we know of; this one may not.
    return (
        version != b"ff" and not (version == b"00" and more) and any(found[2].strip(b"0")) and any(found[3].strip(b"0"))
    )
