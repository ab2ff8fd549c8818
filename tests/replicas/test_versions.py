"""Version 1 of the peer protocol stays what it is: a program reads what others of that version say, older and newer.

What is frozen here was written down when version 1 was. A field may be added at the end, with a default; what needs
more is another version of the protocol. A new kind of message is said only to a peer that said that it knows it.
"""

from collections.abc import Iterator

import msgspec
import pytest

from fairshare.core.decisions import RefusalReason
from fairshare.core.priority import ServiceClass, Standing
from fairshare.replicas import messages
from fairshare.replicas.messages import (
    VERSION,
    Aborted,
    Alive,
    Announce,
    Asked,
    Beat,
    Began,
    Cancelled,
    Codec,
    Denied,
    Envelope,
    Estate,
    Kept,
    LiveGrant,
    Moved,
    OnLink,
    PoolShown,
    Recalled,
    Refresh,
    Released,
    Resigned,
    Sent,
    Submitted,
    Told,
    Trust,
    Waits,
    Welcome,
)
from support.next_version import NextCodec

FROZEN: dict[str, tuple[int | None, str]] = {
    "Submitted": (
        1,
        "id pool team service_class slots estimated_tokens body_bytes recallable preferred_instances state_instance",
    ),
    "Began": (2, "id"),
    "Released": (3, "number id pool team cost_units"),
    "Cancelled": (4, "id"),
    "Aborted": (5, "id"),
    "Kept": (6, "grant"),
    "Moved": (7, "id instance_id"),
    "Announce": (8, "replica charges grants held at"),
    "Alive": (9, "heard running"),
    "Beat": (10, "at"),
    "Welcome": (20, "epoch saved replicas pools at trusted_seconds"),
    "Refresh": (21, "saved replicas pools"),
    "Sent": (22, "id pool instance_id priority standing held_seconds"),
    "Waits": (23, "id team_held team_in_flight_slots reserved_slots pool_in_flight_slots capacity_slots"),
    "Recalled": (24, "id instance_id wasted_slot_seconds"),
    "Denied": (25, "id reason found limit retry_after_seconds"),
    "Resigned": (26, "epoch"),
    "Trust": (27, "at trusted_seconds"),
    "Asked": (40, "number about content"),
    "Told": (41, "number about content"),
    "Envelope": (50, "lease session to_owner messages"),
    "LiveGrant": (None, "request pool instance_id priority standing began"),
    "PoolShown": (None, "pool usage"),
    "Estate": (None, "counted in_flight silent_seconds"),
}
"""Kind → its tag on the wire and its fields, in order."""

SUBMITTED = Submitted("r1", "chat", "search", ServiceClass.BATCH, 2, 300, 4096, True, ["a", "b"], None)
GRANT = LiveGrant(SUBMITTED, "chat", "a", 11, Standing.BORROWING, True)
CHARGE = Released(7, "r0", "chat", "search", 12.5)
SHOWN = PoolShown("chat", {"search": 1.5})
EVERYTHING: list[OnLink] = [
    Envelope(
        "chat",
        3,
        True,
        [
            Announce("gw-1", [CHARGE], [GRANT], [SUBMITTED], 9.5),
            SUBMITTED,
            Began("r1"),
            CHARGE,
            Cancelled("r2"),
            Aborted("r1"),
            Kept(GRANT),
            Moved("r1", "b"),
            Alive(4, ["r1"]),
            Beat(10.5),
        ],
    ),
    Envelope(
        "chat",
        3,
        False,
        [
            Welcome(5, 6, 2, [SHOWN], 9.5, 4.25),
            Refresh(7, 2, []),
            Sent("r1", "chat", "a", None, Standing.WITHIN_SHARE, 0.5),
            Waits("r2", 1, 2, 3, 4, 5),
            Recalled("r1", "a", 0.75),
            Denied("r2", RefusalReason.QUEUE_FULL, 10.0, 10.0, 1.0),
            Trust(10.5, 4.0),
            Resigned(5),
        ],
    ),
    Asked(1, "pools", b"chat"),
    Told(1, "pools", b"[]"),
]

FRAME = bytes.fromhex(
    "949532a46368617403c39a9608a467772d3191960307a27230a463686174a6736561726368cb402900000000000091969b01a27231a4"
    "63686174a67365617263680102cd012ccd1000c392a161a162c0a463686174a1610ba9626f72726f77696e67c3919b01a27231a46368"
    "6174a67365617263680102cd012ccd1000c392a161a162c0cb40230000000000009b01a27231a463686174a67365617263680102cd01"
    "2ccd1000c392a161a162c09202a27231960307a27230a463686174a6736561726368cb40290000000000009204a272329205a2723192"
    "06969b01a27231a463686174a67365617263680102cd012ccd1000c392a161a162c0a463686174a1610ba9626f72726f77696e67c393"
    "07a27231a16293090491a27231920acb40250000000000009532a46368617403c29897140506029192a46368617481a6736561726368"
    "cb3ff8000000000000cb4023000000000000cb401100000000000094150702909716a27231a463686174a161c0ac77697468696e2d73"
    "68617265cb3fe00000000000009717a2723201020304059418a27231a161cb3fe80000000000009619a27232aa71756575655f66756c"
    "6ccb4024000000000000cb4024000000000000cb3ff0000000000000931bcb4025000000000000cb4010000000000000921a05942801"
    "a5706f6f6c73c40463686174942901a5706f6f6c73c4025b5d"
)
"""The same as version 1 said it."""

ESTATE = bytes.fromhex("9381a467772d310781a467772d3181a46368617481a67365617263680281a467772d32cb403e800000000000")
"""What an owner of version 1 left in the store."""


@pytest.mark.parametrize("name", FROZEN)
def test_fields_are_only_added_at_the_end_with_a_default(name: str) -> None:
    tag, fields = FROZEN[name]
    kind = getattr(messages, name)
    assert kind.__struct_config__.tag == tag
    assert kind.__struct_config__.array_like
    assert not kind.__struct_config__.forbid_unknown_fields
    frozen = fields.split()
    assert list(kind.__struct_fields__[: len(frozen)]) == frozen
    added = kind.__struct_fields__[len(frozen) :]
    assert len(kind.__struct_defaults__) >= len(added)
    assert msgspec.NODEFAULT not in kind.__struct_defaults__[len(kind.__struct_defaults__) - len(added) :]


def test_what_a_program_of_version_1_says_is_read() -> None:
    assert VERSION == 1
    assert Codec().decode(FRAME) == EVERYTHING
    assert {type(each).__name__ for each in all_said()} == FROZEN.keys() - {"LiveGrant", "PoolShown", "Estate"}


def test_what_an_owner_of_version_1_left_in_the_store_is_read() -> None:
    left = msgspec.msgpack.decode(ESTATE, type=Estate)
    assert left == Estate({"gw-1": 7}, {"gw-1": {"chat": {"search": 2}}}, {"gw-2": 30.5})


def test_what_a_newer_program_adds_at_the_end_is_passed_over() -> None:
    assert Codec().decode(NextCodec().encode(EVERYTHING)) == EVERYTHING


def test_words_that_an_older_program_does_not_know_are_not_said_in_version_1() -> None:
    assert {each.value for each in RefusalReason} == {
        "queue_full",
        "team_queue_full",
        "held_bytes_full",
        "held_too_long",
        "no_instance",
        "no_owner",
    }
    assert {each.value for each in Standing} == {"within-share", "borrowing"}
    assert {each.value for each in ServiceClass} == {0, 1}


def all_said() -> Iterator[object]:
    for each in EVERYTHING:
        yield each
        if isinstance(each, Envelope):
            yield from each.messages
