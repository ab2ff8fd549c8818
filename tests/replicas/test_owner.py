"""The owner and replicas whose process has ended for certain."""

import msgspec

from fairshare.core.decisions import DispatchQueue, Instance, Mode, Request
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.replicas.messages import Announce, Estate, LiveGrant, Sent, Submitted
from fairshare.replicas.owner import Owner, OwnerOptions, Session


def queue() -> DispatchQueue:
    pool = Pool("chat", 4, {"search": "3/4", "ads": "1/4"}, 0.0, lambda: 0.0)
    return make_queue(pool, Mode.HOLD, instances=[Instance(id="a", part_slots=4, seats=8)])


def owner(estate: Estate) -> Owner:
    return Owner(
        epoch=2,
        queues={"chat": queue()},
        estate=estate,
        options=OwnerOptions(longest_request_seconds=60.0),
        now=0.0,
        decides_until=lambda: 1e9,
    )


def in_flight_slots(decides: Owner) -> int:
    return sum(each.in_flight for each in decides.queues["chat"].pool.snapshot())


def phantom_slots(decides: Owner) -> int:
    return decides.queues["chat"].pool.phantom_slots


LEFT = Estate({"dead": 7, "silent": 3}, {"dead": {"chat": {"search": 2}}, "silent": {"chat": {"search": 1}}})


def test_of_a_replica_that_has_ended_no_phantoms_stay_and_those_of_a_silent_one_do() -> None:
    decides = owner(LEFT)
    assert phantom_slots(decides) == 3
    decides.ended("dead")
    assert phantom_slots(decides) == 1
    assert decides.legacy(0.0)[1].in_flight == {"silent": {"chat": {"search": 1}}}


def test_which_charges_of_a_replica_that_has_ended_were_counted_stays_known() -> None:
    decides = owner(LEFT)
    decides.ended("dead")
    assert decides.legacy(0.0)[1].counted["dead"] == 7


def test_a_new_owner_does_not_wait_for_a_replica_that_has_ended() -> None:
    decides = owner(LEFT)
    decides.ended("dead")
    assert decides.is_gathering
    decides.ended("silent")
    assert not decides.is_gathering


def test_what_a_replica_that_has_ended_had_in_flight_is_free_when_its_link_is_gone_too() -> None:
    decides = owner(Estate({}, {}))
    for name, slots_left in (("dead", 0), ("silent", 1)):
        session = Session(name, 1)
        submitted = Submitted.of(Request("1", "search"), "chat")
        grant = LiveGrant(submitted, "chat", "a", None, Standing.WITHIN_SHARE, True)
        decides.received(session, [Announce(name, (), [grant], ())], 0.0)
        if name == "dead":
            decides.ended(name)
        assert in_flight_slots(decides) == 1
        decides.disconnected(session, 0.0)
        assert (in_flight_slots(decides), phantom_slots(decides)) == (0, slots_left)


def test_phantoms_that_an_operator_clears_are_gone_also_for_a_successor_and_one_that_lives_is_counted_again() -> None:
    decides = owner(LEFT)
    assert decides.clear_phantoms("chat", 1.0) == {"dead": 2, "silent": 1}
    assert phantom_slots(decides) == 0
    assert decides.clear_phantoms("chat", 1.0) == {}
    _, estate = decides.legacy(1.0)
    assert not any(slots for by_pool in estate.in_flight.values() for slots in by_pool.values())
    assert estate.counted == LEFT.counted
    session = Session("silent", 1)
    grant = LiveGrant(Submitted.of(Request("1", "search"), "chat"), "chat", "a", None, Standing.WITHIN_SHARE, True)
    decides.received(session, [Announce("silent", (), [grant], ())], 2.0)
    assert (in_flight_slots(decides), phantom_slots(decides)) == (1, 0)


def test_a_team_whose_phantoms_are_cleared_has_its_share_again() -> None:
    decides = owner(Estate({}, {"gone": {"chat": {"search": 3}}}))
    decides.tick(2.0)
    session = Session("here", 1)
    decides.received(session, [Announce("here", (), (), ())], 2.0)
    standings: list[Standing] = []
    for number in range(2):
        decides.received(session, [Submitted.of(Request(str(number), "search"), "chat")], 2.0)
        standings += [message.standing for message in session.outbox if isinstance(message, Sent)]
        session.outbox.clear()
        decides.clear_phantoms("chat", 2.0)
    assert standings == [Standing.BORROWING, Standing.WITHIN_SHARE]


def test_after_a_lease_was_given_back_a_new_owner_waits_for_who_may_carry_out_what_was_said_before() -> None:
    decides = owner(msgspec.structs.replace(LEFT, trusting_seconds={"silent": 4.0, "heard": 9.0}))
    decides.ended("dead")
    decides.tick(3.9)
    assert decides.is_gathering
    assert decides.next_deadline() == 4.0
    decides.tick(4.0)
    assert not decides.is_gathering


def test_for_who_cannot_carry_it_out_any_more_it_waits_no_longer_than_for_any_other() -> None:
    decides = owner(msgspec.structs.replace(LEFT, trusting_seconds={"silent": 4.0}))
    decides.received(Session("silent", 1), [Announce("silent", (), (), ())], 0.5)
    assert decides.is_gathering
    decides.tick(1.0)
    assert not decides.is_gathering


def test_an_owner_that_goes_says_who_may_still_carry_out_what_it_said() -> None:
    decides = Owner(
        epoch=2,
        queues={"chat": queue()},
        estate=Estate({}, {}, {}, {"never heard": 2.0}),
        options=OwnerOptions(longest_request_seconds=60.0),
        now=0.0,
        decides_until=lambda: 4.5,
    )
    for name in ("stays", "gone"):
        decides.received(Session(name, 1), [Announce(name, (), (), ())], 0.0)
    (gone,) = (session for session in decides.sessions if session.replica == "gone")
    decides.disconnected(gone, 0.0)
    assert decides.trusting_seconds(1.0) == {"never heard": 1.0, "stays": 3.5, "gone": 3.5}
    assert decides.trusting_seconds(5.0) == {}
