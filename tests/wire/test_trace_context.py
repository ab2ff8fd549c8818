"""A request's place in a trace, by W3C's rules."""

import pytest

from fairshare.wire.trace_context import Trace, continued

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def begun(forwarded: bytes, *, drawn: bool = True) -> tuple[Trace, bytes]:
    return continued(forwarded, random_bits=lambda bits: 0xABC if bits == 64 else 0xDEF, draw=lambda: drawn)


def line(value: str) -> bytes:
    return f"traceparent: {value}\r\n".encode()


def test_a_clients_trace_goes_on_and_the_engine_becomes_a_child_of_ours() -> None:
    before, after = b"accept: */*\r\n", b"tracestate: a=1\r\nuser-agent: x\r\n"
    trace, forwarded = begun(before + line(f"00-{TRACE_ID}-{PARENT_ID}-01") + after, drawn=False)
    assert trace == Trace(trace_id=TRACE_ID, span_id="0000000000000abc", parent_span_id=PARENT_ID, sampled=True)
    assert forwarded == before + line(f"00-{TRACE_ID}-0000000000000abc-01") + after


def test_a_clients_word_on_sampling_holds() -> None:
    trace, forwarded = begun(line(f"00-{TRACE_ID}-{PARENT_ID}-00"), drawn=True)
    assert not trace.sampled
    assert forwarded.endswith(b"-00\r\n")


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    trace, forwarded = begun(line(f"01-{TRACE_ID}-{PARENT_ID}-03-more"))
    assert (trace.trace_id, trace.parent_span_id, trace.sampled) == (TRACE_ID, PARENT_ID, True)
    assert forwarded == line(f"00-{TRACE_ID}-0000000000000abc-01")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01, 00-{TRACE_ID}-{PARENT_ID}-01",
    ],
)
def test_what_is_no_context_is_replaced_with_its_state(value: str) -> None:
    trace, forwarded = begun(b"accept: a\r\n" + line(value) + b"tracestate: a=1\r\nuser-agent: x\r\n", drawn=False)
    assert trace == Trace(trace_id=f"{0xDEF:032x}", span_id=f"{0xABC:016x}", parent_span_id=None, sampled=False)
    assert forwarded == b"accept: a\r\nuser-agent: x\r\n" + line(f"00-{0xDEF:032x}-{0xABC:016x}-00")


@pytest.mark.parametrize("drawn", [True, False])
def test_a_trace_that_begins_here_is_sampled_by_lot(drawn: bool) -> None:
    trace, forwarded = begun(b"accept: a\r\n", drawn=drawn)
    assert trace.sampled is drawn
    assert forwarded == b"accept: a\r\n" + trace.line


def test_an_id_of_zeros_is_never_made() -> None:
    trace, _ = continued(b"", random_bits=lambda _: 0, draw=lambda: True)
    assert trace.trace_id.strip("0")
    assert trace.span_id.strip("0")
