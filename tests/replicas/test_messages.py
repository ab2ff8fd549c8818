"""Messages survive the wire, and a newer version's fields do not hurt an older one."""

import msgspec
import pytest

from fairshare.core.decisions import Request
from fairshare.core.priority import ServiceClass, Standing
from fairshare.replicas.messages import (
    Announce,
    Asked,
    Began,
    Codec,
    Envelope,
    Estate,
    LiveGrant,
    Released,
    Sent,
    Submitted,
    Trust,
    Welcome,
)

SUBMITTED = Submitted.of(
    Request("r1", "team", ServiceClass.BATCH, 2, 500, 4000, False, ("http://e0",), "http://e1"), "chat"
)


def test_what_is_said_arrives() -> None:
    grant = LiveGrant(SUBMITTED, "chat", "http://e0", 3, Standing.BORROWING, True)
    announce = Announce("r", (Released(1, "r0", "chat", "team", 1.5),), (grant,), (SUBMITTED,), 12.5)
    said = [
        Envelope("chat", 7, True, (announce, SUBMITTED, Began("r1"))),
        Envelope(
            "chat", 7, False, (Sent("r1", "chat", "http://e0", None, Standing.WITHIN_SHARE, 0.5), Trust(1.0, 4.0))
        ),
        Asked(1, "status", b"{}"),
    ]
    codec = Codec()
    heard = codec.decode(codec.encode(said))
    assert codec.encode(heard) == codec.encode(said)
    first = heard[0]
    assert isinstance(first, Envelope)
    assert isinstance(first.messages[0], Announce)
    request = first.messages[0].held[0].request("x")
    assert (request.team, request.slots, request.service_class) == ("team", 2, ServiceClass.BATCH)
    assert (list(request.preferred_instances), request.state_instance) == (["http://e0"], "http://e1")


def test_an_estate_of_an_older_version_can_be_read() -> None:
    old = msgspec.msgpack.encode([{"r": 3}, {"r": {"chat": {"team": 2}}}])
    estate = msgspec.msgpack.decode(old, type=Estate)
    assert (estate.counted, estate.silent_seconds) == ({"r": 3}, {})


def test_a_welcome_with_a_field_too_many_or_too_few_can_be_read() -> None:
    newer = msgspec.msgpack.encode([20, 1, 0, 2, [], 1.0, 4.0, "of a later version"])
    older = msgspec.msgpack.encode([20, 1, 0, 2, []])
    assert msgspec.msgpack.decode(newer, type=Welcome).trusted_seconds == 4.0
    assert msgspec.msgpack.decode(older, type=Welcome).trusted_seconds == 0.0


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Codec().decode(msgspec.msgpack.encode([["nonsense"]]))
