"""What a member asks of the store, and how often: a replica with nothing to do leaves it alone."""

from collections.abc import Mapping

from fairshare.core.decisions import Decision, DispatchQueue, Held, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.replicas.lease import CallKind, Lease
from fairshare.replicas.member import LeaseCall, LeftBehind, LoadCall, Member, MemberOptions, SaveCall, StoreCall
from fairshare.replicas.messages import Announce, Envelope, Message, OnLink, Released, Submitted, Welcome
from fairshare.replicas.owner import OwnerOptions

OPTIONS = MemberOptions(owner=OwnerOptions(longest_request_seconds=60.0))


class Shell:
    """The `Ports` of a member, whose store answers when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[StoreCall] = []
        self.said: list[tuple[str, OnLink]] = []
        self.sent: list[str] = []
        self.member = Member(
            lease="chat", replica="me", address="here", settings=self.new_queues("chat", 1), ports=self, options=OPTIONS
        )

    def clock(self) -> float:
        return self.now

    def send(self, peer: str, message: OnLink) -> None:
        self.said.append((peer, message))

    def decided(self, decisions: list[Decision]) -> None:
        self.sent += [decision.request_id for decision in decisions if isinstance(decision, Send)]

    def soon(self) -> None:
        pass

    def call(self, call: StoreCall) -> None:
        self.calls.append(call)

    def owner_is(self, lease: str, owner: str, address: str) -> None:
        pass

    def new_queues(self, lease: str, parts: int) -> Mapping[str, DispatchQueue]:
        pool = Pool("chat", 8 // parts, {"red": "1"}, None, self.clock)
        return {"chat": make_queue(pool, Mode.HOLD, instances=[Instance(id="engine", part_slots=8, seats=8)])}

    def until(self, at: float, lease: Lease) -> list[StoreCall]:
        """What it asks of a store that has this lease and carries everything out, up to then."""
        asked: list[StoreCall] = []
        while True:
            while self.calls:
                call = self.calls.pop(0)
                asked.append(call)
                match call:
                    case LeaseCall():
                        self.member.answered(call, lease)
                    case LoadCall():
                        self.member.answered(call, LeftBehind(usage={}, state=b""))
                    case SaveCall():
                        self.member.answered(call, True)
            if (due := self.member.next_deadline()) > at:
                self.now = at
                return asked
            self.now = max(self.now, due)
            self.member.tick()

    def hears(self, peer: str, *messages: Message) -> list[tuple[str, str]]:
        """What it says when a replica says this: to whom, and of which kind."""
        self.said.clear()
        self.member.received(peer, Envelope("chat", 1, True, messages))
        return [
            (to, type(message).__name__)
            for to, envelope in self.said
            if isinstance(envelope, Envelope)
            for message in envelope.messages
        ]


def saves(calls: list[StoreCall]) -> int:
    return sum(isinstance(call, SaveCall) for call in calls)


def looks(calls: list[StoreCall]) -> int:
    return sum(isinstance(call, LeaseCall) and call.call.kind is CallKind.ACQUIRE for call in calls)


def test_an_owner_that_has_nothing_new_to_save_saves_only_what_its_replicas_are_shown() -> None:
    shell = Shell()
    mine = Lease(1, "me", "here", 5.0)
    assert saves(shell.until(1.5, mine)) == 1
    assert saves(shell.until(11.5, mine)) == 2  # every five seconds

    queue = shell.member.queue("chat")
    assert [decision.request_id for decision in queue.submitted(Request("a", "red"))] == ["a"]
    assert saves(shell.until(12.5, mine)) == 1
    assert saves(shell.until(14.5, mine)) == 0
    queue.released("a", 7.0)
    (save,) = [call for call in shell.until(15.5, mine) if isinstance(call, SaveCall)]
    assert save.used == {"chat": {"red": 7.0}}
    assert shell.member.status().unsaved_charges == 0


def test_what_could_not_be_saved_is_tried_again() -> None:
    shell = Shell()
    mine = Lease(1, "me", "here", 5.0)
    shell.until(2.5, mine)
    shell.member.queue("chat").submitted(Request("a", "red"))
    shell.now = shell.member.next_deadline()
    shell.member.tick()
    for call in shell.calls:
        shell.member.answered(call, None if isinstance(call, SaveCall) else mine)
    assert saves(shell.calls) == 1
    shell.calls.clear()
    assert saves(shell.until(4.5, mine)) == 1


def test_a_follower_whose_owner_answers_seldom_asks_the_store() -> None:
    shell = Shell()
    other = Lease(1, "other", "there", 5.0)
    assert looks(shell.until(2.1, other)) == 5  # nobody answers yet: every half second
    shell.member.connected("other")
    (to, announce) = shell.said.pop()
    assert to == "other"
    assert isinstance(announce, Envelope)
    shell.member.received("other", Envelope("chat", announce.session, False, (Welcome(1, 0, 2, (), shell.now, 60.0),)))
    assert looks(shell.until(12.1, other)) == 5  # every two

    shell.member.disconnected("other")
    assert looks(shell.until(12.2, other)) == 1
    assert looks(shell.until(14.2, other)) == 4


def test_a_follower_asks_when_the_lease_ends_that_its_owner_does_not_renew() -> None:
    shell = Shell()
    shell.until(0.1, Lease(1, "other", "there", 5.0))
    shell.member.connected("other")
    (_, announce) = shell.said.pop()
    assert isinstance(announce, Envelope)
    shell.member.received("other", Envelope("chat", announce.session, False, (Welcome(1, 0, 2, (), shell.now, 60.0),)))
    ends_soon = Lease(1, "other", "there", 0.75)
    assert looks(shell.until(0.6, ends_soon)) == 1  # at 0.5
    assert looks(shell.until(1.2, ends_soon)) == 0
    assert looks(shell.until(1.3, ends_soon)) == 1


def test_what_an_owner_says_is_sent_once_and_only_to_whom_it_is_said() -> None:
    shell = Shell()
    shell.until(0.5, Lease(1, "me", "here", 5.0))
    for peer in ("one", "two"):
        shell.member.connected(peer)
        assert shell.hears(peer, Announce(peer, (), (), (), 0.0, False)) == [(peer, "Welcome")]
    asked = [Submitted.of(Request(name, "red", slots=4), "chat") for name in "abc"]
    assert shell.hears("one", asked[0]) == [("one", "Sent")]
    assert shell.hears("two", asked[1], asked[2]) == [("two", "Sent"), ("two", "Waits")]
    assert shell.hears("one", Released(1, "a", "chat", "red", 1.0)) == [("two", "Sent")]

    shell.member.disconnected("two")
    shell.member.connected("two")
    again = Envelope("chat", 2, True, (Announce("two", (), (), (asked[2],), 0.0, False),))
    shell.said.clear()
    shell.member.received("two", again)
    assert [(to, envelope.session) for to, envelope in shell.said if isinstance(envelope, Envelope)] == [("two", 2)]


def test_an_owners_own_request_goes_when_another_replicas_ends() -> None:
    shell = Shell()
    shell.until(0.5, Lease(1, "me", "here", 5.0))
    shell.member.connected("one")
    shell.hears("one", Announce("one", (), (), (), 0.0, False))
    shell.hears("one", Submitted.of(Request("a", "red", slots=8), "chat"))
    (held,) = shell.member.queue("chat").submitted(Request("b", "red"))
    assert isinstance(held, Held)
    assert not shell.sent
    shell.hears("one", Released(1, "a", "chat", "red", 1.0))
    assert shell.sent == ["b"]
