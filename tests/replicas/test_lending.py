"""Slots that an owner lends: what costs no question, and that nobody gets less for it."""

from fairshare.core.decisions import Decision, DispatchQueue, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.replicas.messages import (
    Announce,
    CallBack,
    Estate,
    Message,
    Released,
    Returned,
    Sent,
    Submitted,
)
from fairshare.replicas.owner import Owner, OwnerOptions, Session
from fairshare.replicas.replica import Replica, ReplicaOptions


class Site:
    """An owner of a pool of 16 slots, and replicas that are linked to it by `exchange` only."""

    def __init__(
        self,
        *replicas: str,
        pools: tuple[str, ...] = ("chat",),
        mode: Mode = Mode.HOLD,
        shares: tuple[str, str, str] = ("1/2", "1/4", "1/4"),
    ) -> None:
        self.now = 0.0
        self.shares: dict[str, str] = dict(zip(("search", "ads", "mail"), shares, strict=True))
        self.instances = [Instance(id="a", part_slots=8, seats=16), Instance(id="b", part_slots=8, seats=16)]
        self.owner = Owner(
            epoch=1,
            queues={pool: self.queue(pool, mode) for pool in pools},
            estate=Estate({}, {}),
            options=OwnerOptions(longest_request_seconds=60.0),
            now=0.0,
            decides_until=lambda: 100.0,
        )
        self.replicas = {name: self.replica(name, pools) for name in replicas}
        self.sessions = {name: Session(name, 1) for name in replicas}
        for name, replica in self.replicas.items():
            self.owner.received(self.sessions[name], replica.connected(), self.now)
            self.exchange(name)

    def queue(self, pool: str, mode: Mode = Mode.HOLD) -> DispatchQueue:
        return make_queue(Pool(pool, 16, self.shares, None, lambda: self.now), mode, instances=self.instances)

    def replica(self, name: str, pools: tuple[str, ...]) -> Replica:
        options = ReplicaOptions(lent_seconds=1.0, idle_seconds=0.02)
        return Replica(
            replica=name, pools=pools, local=lambda _: {}, options=options, clock=lambda: self.now, soon=lambda: None
        )

    def hears(self, name: str) -> list[Message]:
        """The owner hears what the replica has to say; returns its answers."""
        said = self.replicas[name].take_outbox()
        if said:
            self.owner.received(self.sessions[name], said, self.now)
        session = self.sessions[name]
        answers, session.outbox = session.outbox, []
        return answers

    def exchange(self, *names: str) -> list[Decision]:
        """Everything that these have to say, until there is nothing more."""
        decisions: list[Decision] = []
        while answers := [(name, said) for name in names if (said := self.hears(name))]:
            for name, said in answers:
                decisions += self.replicas[name].received(said)
        return decisions

    def submit(self, name: str, request_id: str, team: str = "search", slots: int = 1) -> list[Decision]:
        return self.replicas[name].submitted("chat", Request(request_id, team, slots=slots))

    def lend(self, name: str, team: str, count: int = 1) -> None:
        """So many free slots of the team are at a replica."""
        ids = [f"{name} {team} {number}" for number in range(count)]
        for request_id in ids:
            self.submit(name, request_id, team)
        assert len(self.exchange(name)) == count
        for request_id in ids:
            self.replicas[name].released(request_id, 1.0)

    @property
    def in_flight(self) -> dict[str, int]:
        return {stat.team: stat.in_flight for stat in self.owner.queues["chat"].pool.snapshot() if stat.in_flight}


def test_a_slot_that_was_lent_serves_the_teams_next_request_without_a_question() -> None:
    site = Site("one")
    site.lend("one", "search")
    site.exchange("one")
    (send,) = site.submit("one", "next")
    assert isinstance(send, Send)
    assert (send.standing, send.priority, send.pool) == (Standing.WITHIN_SHARE, 0, "chat")
    assert site.replicas["one"].first_byte("next") == []
    assert site.replicas["one"].take_outbox() == []
    assert site.in_flight == {"search": 1}


def test_it_serves_no_other_team_and_no_wide_request() -> None:
    site = Site("one")
    site.lend("one", "search")
    assert site.submit("one", "other", "ads") == []
    assert site.submit("one", "wide", slots=2) == []


def test_it_serves_no_request_that_goes_on_from_a_state_or_a_prefix_elsewhere() -> None:
    site = Site("one")
    site.lend("one", "search")
    replica = site.replicas["one"]
    assert replica.submitted("chat", Request("state", "search", state_instance="b")) == []
    assert replica.submitted("chat", Request("prefix", "search", preferred_instances=("b",))) == []
    assert len(replica.submitted("chat", Request("here", "search", preferred_instances=("b", "a")))) == 1


def test_a_slot_that_nobody_uses_is_given_back_soon() -> None:
    site = Site("one")
    site.lend("one", "search", 2)
    site.exchange("one")
    assert site.in_flight == {"search": 2}
    for _ in range(2):
        assert site.replicas["one"].next_deadline() == site.now + 0.02
        site.now += 0.02
        site.replicas["one"].tick()
        site.exchange("one")
    assert site.in_flight == {}
    assert site.submit("one", "next") == []


def test_a_slot_that_is_used_again_and_again_is_given_back_after_a_second_all_the_same() -> None:
    site = Site("one")
    site.lend("one", "search")
    while site.submit("one", f"at {site.now:.2f}"):
        site.now += 0.01
        site.replicas["one"].released(f"at {site.now - 0.01:.2f}", 1.0)
    assert 0.99 < site.now < 1.02


def test_every_request_on_a_lent_slot_is_charged_once_and_in_order() -> None:
    site = Site("one")
    site.lend("one", "search")
    for number in range(10):
        assert len(site.submit("one", f"next {number}")) == 1
        site.replicas["one"].released(f"next {number}", 2.0)
    site.exchange("one")
    usage, in_flight = site.owner.queues["chat"].pool.usage()
    assert (usage["search"], in_flight["search"]) == (21.0, 1)
    assert site.owner.legacy(site.now)[1].counted == {"one": 11}


def test_from_a_slot_that_served_several_requests_the_owner_learns_no_duration() -> None:
    site = Site("one")
    site.lend("one", "search")
    site.submit("one", "next")
    site.now = 1.5
    site.replicas["one"].released("next", 2.0)
    # The second request ended, and the slot is given back: they say nothing of how long the first one ran.
    charges = [Released(number, "", "chat", "search", float(number)) for number in (1, 2)]
    assert site.replicas["one"].take_outbox() == [*charges, Returned("one search 0")]


def test_from_a_request_with_which_a_slot_was_lent_and_that_alone_used_it_the_owner_learns() -> None:
    site = Site("one")
    site.submit("one", "long")
    site.exchange("one")
    site.now = 1.5
    site.replicas["one"].released("long", 1.0)
    assert site.replicas["one"].take_outbox() == [Released(1, "long", "chat", "search", 1.0)]


def test_nobody_is_told_to_borrow_because_of_slots_that_are_lent_and_free() -> None:
    site = Site("one", "two")
    site.lend("one", "search", 4)
    for number in range(8):
        site.submit("two", str(number))
    answers = site.hears("two")
    # Four go at once. The others must not be decided while four of the team's eight slots are free elsewhere.
    assert [type(answer) for answer in answers] == [Sent] * 4
    site.replicas["two"].received(answers)
    site.exchange("one")
    sends = site.exchange("two")
    assert [send.standing for send in sends if isinstance(send, Send)] == [Standing.WITHIN_SHARE] * 4
    assert site.in_flight == {"search": 8}
    assert site.submit("one", "next") == [], "what was called back serves nothing"


def test_nobody_is_told_to_borrow_because_of_a_lent_slot_where_a_reservation_holds_a_rounded_fraction() -> None:
    # search owns 2.75 slots, and 3 are reserved for it; the one turn of the pool is held by ads, which owns 2.25.
    site = Site("one", "two", shares=("11/64", "9/64", "44/64"))
    for number in range(3):
        site.submit("two", f"ads {number}", "ads")
    assert len(site.exchange("two")) == 3
    site.lend("one", "search")
    site.exchange("one")
    site.submit("two", "first")
    site.submit("two", "second")
    (first,) = site.exchange("two")
    (second,) = [sent for sent in site.exchange("one", "two") if isinstance(sent, Send)]
    assert isinstance(first, Send)
    assert [first.standing, second.standing] == [Standing.WITHIN_SHARE] * 2
    assert site.in_flight == {"ads": 3, "search": 2}


def test_what_is_in_use_is_called_back_too_and_its_slot_ends_with_it() -> None:
    site = Site("one", "two")
    for number in range(4):
        site.submit("one", f"runs {number}")
    site.exchange("one")
    for number in range(8):
        site.submit("two", str(number))
    site.hears("two")
    assert site.in_flight == {"search": 8}, "four wait until it is clear that the others' slots are in use"
    site.exchange("one")
    borrows = [send.standing for send in site.exchange("two") if isinstance(send, Send)]
    assert borrows == [Standing.BORROWING] * 4
    site.replicas["one"].released("runs 0", 1.0)
    site.exchange("one")
    assert site.in_flight == {"search": 11}
    assert site.submit("one", "next") == []


def test_a_pool_that_fills_calls_back_what_is_lent_to_any_team() -> None:
    site = Site("one", "two")
    site.lend("one", "mail")
    for number in range(12):
        site.submit("two", str(number), "ads")
    site.exchange("two")
    assert any(isinstance(message, CallBack) for message in site.sessions["one"].outbox)
    site.exchange("one")
    assert site.in_flight == {"ads": 12}


def test_nothing_is_lent_beyond_half_of_what_a_team_owns_or_half_of_the_pool() -> None:
    site = Site("one", "two")
    for number in range(5):
        site.submit("one", str(number))
    assert [answer.lent for answer in site.hears("one") if isinstance(answer, Sent)] == [True] * 4 + [False]
    for number in range(4):
        site.submit("two", str(number), "ads")
    site.hears("two")
    site.submit("two", "mail", "mail")
    (answer,) = (answer for answer in site.hears("two") if isinstance(answer, Sent))
    assert not answer.lent


def test_nothing_is_lent_where_requests_of_other_pools_may_come_or_the_mode_is_not_hold() -> None:
    for site in (Site("one", pools=("chat", "other")), Site("one", mode=Mode.PASS)):
        site.submit("one", "1")
        (answer,) = site.hears("one")
        assert isinstance(answer, Sent)
        assert not answer.lent


def test_nothing_is_lent_to_a_replica_of_a_version_that_does_not_know_of_it() -> None:
    site = Site()
    session = Session("old", 1)
    request = Submitted.of(Request("1", "search"), "chat")
    site.owner.received(session, [Announce("old", (), (), ()), request], 0.0)
    (sent,) = (message for message in session.outbox if isinstance(message, Sent))
    assert not sent.lent


def test_without_a_link_no_lent_slot_serves_and_the_owner_takes_them_for_taken() -> None:
    site = Site("one")
    site.lend("one", "search")
    site.replicas["one"].disconnected()
    assert site.submit("one", "next") == []
    site.owner.disconnected(site.sessions["one"], 0.0)
    assert site.owner.queues["chat"].pool.phantom_slots == 1


def test_who_waits_for_slots_of_a_replica_that_is_lost_is_decided_at_once() -> None:
    site = Site("one", "two")
    site.lend("one", "search", 4)
    for number in range(5):
        site.submit("two", str(number))
    site.exchange("two")
    assert site.in_flight == {"search": 8}
    site.owner.disconnected(site.sessions["one"], 0.0)
    sends = [send for send in site.exchange("two") if isinstance(send, Send)]
    assert [send.standing for send in sends] == [Standing.BORROWING], "phantoms count as the team's"


def test_an_owner_that_may_not_be_trusted_any_more_lends_nothing() -> None:
    site = Site("one")
    site.now = 99.8
    site.lend("one", "search")
    site.now = 100.0
    assert site.submit("one", "next") == []


def test_at_an_instance_that_takes_nothing_new_no_lent_slot_serves() -> None:
    site = Site("one")
    replica = site.replicas["one"]
    site.submit("one", "runs")
    site.exchange("one")
    site.lend("one", "search", 3)
    replica.instance_changed("chat", Instance(id="a", part_slots=8, seats=16, accepting=False))
    replica.released("runs", 1.0)
    sends = [send for number in range(3) for send in site.submit("one", str(number)) if isinstance(send, Send)]
    assert {send.instance_id for send in sends} == {"b"}
    replica.instance_removed("chat", "b")
    for number in range(3):
        replica.released(str(number), 1.0)
    assert site.submit("one", "next") == []


def test_a_lent_slot_is_not_taken_for_a_grant_that_leaked_whatever_it_serves() -> None:
    site = Site("one")
    site.lend("one", "search", 2)
    site.submit("one", "next")
    site.now = 5.0
    site.replicas["one"].tick()
    site.exchange("one")
    assert site.owner.repaired_total == 0


def test_a_request_on_a_lent_slot_that_moves_is_counted_where_it_is() -> None:
    site = Site("one")
    for instance in site.instances:
        site.replicas["one"].instance_changed("chat", instance)
    site.lend("one", "search")
    (send,) = site.submit("one", "next")
    assert isinstance(send, Send)
    other = site.replicas["one"].reassigned("next", frozenset((send.instance_id,)))
    site.exchange("one")
    there = {stat.id: stat.in_flight_slots for stat in site.owner.queues["chat"].snapshot().instances}
    assert there == {other: 1, send.instance_id: 0}
    site.replicas["one"].released("next", 1.0)
    (again,) = site.submit("one", "again")
    assert isinstance(again, Send)
    assert again.instance_id == other
