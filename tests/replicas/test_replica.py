"""What a replica keeps while there is nobody to tell it to."""

import math

from fairshare.core.decisions import DispatchQueue, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.replicas.messages import Announce, Released, Resigned, Sent, Welcome
from fairshare.replicas.replica import Replica, ReplicaOptions, ReplicaState


class Alone:
    """A replica of the pool `chat`, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replica = Replica(
            replica="one",
            pools=("chat",),
            local=lambda _: {"chat": self.queue()},
            options=ReplicaOptions(degrade_after_seconds=1.5),
            clock=lambda: self.now,
            soon=lambda: None,
        )

    def queue(self) -> DispatchQueue:
        pool = Pool("chat", 4, {"search": "1/2", "ads": "1/2"}, 0.0, lambda: self.now)
        return make_queue(pool, Mode.HOLD, instances=[Instance(id="a", part_slots=4, seats=8)])

    def degrade(self) -> None:
        self.now += 1.5
        self.replica.tick()
        assert self.replica.state is ReplicaState.DEGRADED

    def serve(self, request_id: str, team: str, cost_units: float) -> None:
        (send,) = self.replica.submitted("chat", Request(request_id, team))
        assert isinstance(send, Send)
        self.replica.released(request_id, cost_units)

    def announced(self) -> list[Released]:
        (announce,) = self.replica.connected()
        assert isinstance(announce, Announce)
        return list(announce.charges)


def test_however_much_it_served_alone_it_announces_one_charge_of_each_team() -> None:
    alone = Alone()
    alone.degrade()
    for number in range(1000):
        alone.serve(f"s{number}", "search", 2.0)
        alone.serve(f"a{number}", "ads", 1.0)
    alone.serve("unknown", "ads", math.nan)
    assert alone.replica.unsaved_charges == 2
    charges = [(charge.number, charge.team, charge.cost_units) for charge in alone.announced()]
    assert charges == [(1999, "search", 2000.0), (2001, "ads", 1000.0)]


def test_it_is_welcome_when_the_owner_has_answered_and_no_longer_when_that_one_resigns() -> None:
    alone = Alone()
    alone.announced()
    assert not alone.replica.is_welcome
    alone.replica.received([Welcome(1, 0, 2, (), alone.now, 10.0)])
    assert alone.replica.is_welcome
    alone.replica.received([Resigned(1)])
    assert not alone.replica.is_welcome


def test_what_one_owner_may_have_counted_goes_into_no_charge_that_the_next_one_hears_of() -> None:
    alone = Alone()
    alone.degrade()
    alone.serve("first", "search", 1.0)
    assert [charge.number for charge in alone.announced()] == [1]
    alone.replica.received([Welcome(1, 0, 2, (), alone.now, 10.0)])
    alone.replica.submitted("chat", Request("second", "search"))
    alone.replica.received([Sent("second", "chat", "a", 0, Standing.WITHIN_SHARE, 0.0)])
    alone.replica.released("second", 2.0)
    alone.replica.disconnected()  # whether the owner counted the two, nobody knows
    alone.degrade()
    alone.serve("third", "search", 4.0)
    alone.serve("fourth", "search", 8.0)
    assert [(charge.number, charge.cost_units) for charge in alone.announced()] == [(1, 1.0), (2, 2.0), (4, 12.0)]
