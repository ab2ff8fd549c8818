"""The decision log is bounded, and finds again what it was told."""

from fractions import Fraction

from dashboard.admin_port import Decided
from fairshare.core.decisions import Held, Recall, RefusalReason, Refused, Send
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing
from fairshare.gateway.decision_log import DecisionLog, HeldEntry, RecalledEntry, RefusedEntry, SentEntry
from fairshare.gateway.ports import Outcome, RequestRecord


class Site:
    def __init__(self, most_requests: int = 20_000) -> None:
        self.now = 0.0
        self.log = DecisionLog(lambda: self.now, most_requests=most_requests)
        self.pool = Pool("chat", 16, {"red": 0.5}, 0.0)

    def sent(self, request_id: str, team: str = "red") -> None:
        grant = self.pool.acquire(team)
        send = Send(
            request_id=request_id,
            pool="chat",
            instance_id="http://a:1",
            grant=grant,
            priority=grant.priority,
            standing=Standing.BORROWING if grant.borrowing else Standing.WITHIN_SHARE,
            held_seconds=0.0,
        )
        self.log.sent(Decided(request_id, "key", team, "home"), send, self.pool)

    def finished(self, request_id: str) -> None:
        self.log.finished(
            RequestRecord(id=request_id, endpoint="/", arrived_at=0.0, total_seconds=0.0, outcome=Outcome.COMPLETED)
        )


def test_memory_is_bounded_by_requests() -> None:
    site = Site(most_requests=10)
    for number in range(100):
        site.now = float(number)
        site.sent(str(number))
        site.finished(str(number))
    assert [record.id for record in site.log.records(most=100)] == [str(number) for number in range(99, 89, -1)]
    assert site.log.began_at == 80.0
    assert site.log.of_request("79") == []
    assert site.log.record("5") is None


def test_what_a_borrower_s_rank_was_worked_out_from_is_kept_as_it_was() -> None:
    site = Site()
    site.pool.set_usage("red", 100.0)
    site.pool.acquire("red", slots=16)
    site.sent("r")
    site.pool.set_usage("red", 900.0)
    site.pool.set_shares({"blue": 1})
    site.pool.rank("blue")
    (entry,) = site.log.of_request("r")
    assert isinstance(entry, SentEntry)
    assert entry.ranked_by == ({"red": Fraction(1, 2)}, (100.0,))


def test_it_is_not_kept_for_very_many_teams_nor_for_owners() -> None:
    site = Site()
    site.sent("owner")
    site.pool.set_shares({f"team{number}": Fraction(1, 101) for number in range(101)})
    site.sent("borrower", "stranger")
    assert [entry.ranked_by for entry in site.log.last(2) if isinstance(entry, SentEntry)] == [None, None]


def test_every_kind_of_decision_comes_back_as_it_was() -> None:
    site = Site()
    decided = Decided("r", "key", "red", "chat")
    site.log.held(
        decided,
        Held(
            request_id="r",
            team_held=2,
            team_in_flight_slots=3,
            reserved_slots=4,
            pool_in_flight_slots=5,
            capacity_slots=6,
        ),
    )
    site.now = 1.0
    site.sent("r")
    site.log.recalled(decided, Recall(request_id="r", instance_id="http://a:1", wasted_slot_seconds=0.5))
    site.log.refused(
        decided,
        Refused(request_id="r", reason=RefusalReason.HELD_TOO_LONG, found=9.0, limit=8.0, retry_after_seconds=1.0),
    )
    held, sent, recalled, refused = site.log.of_request("r")
    assert isinstance(held, HeldEntry)
    assert (held.team_held, held.team_in_flight_slots, held.whole_slots) == (2, 3, 4)
    assert (held.pool_in_flight_slots, held.capacity_slots) == (5, 6)
    assert isinstance(sent, SentEntry)
    assert (sent.at, sent.pool, sent.home, sent.key_id, sent.instance_id) == (1.0, "chat", "home", "key", "http://a:1")
    assert (sent.team_in_flight_slots, sent.reserved_slots, sent.pool_in_flight_slots, sent.capacity_slots) == (
        1,
        8,
        1,
        16,
    )
    assert isinstance(recalled, RecalledEntry)
    assert recalled.wasted_slot_seconds == 0.5
    assert isinstance(refused, RefusedEntry)
    assert (refused.reason, refused.found, refused.limit) == ("held_too_long", 9.0, 8.0)
    assert site.log.recalls == {("chat", "red"): 1}


def test_who_was_sent_in_a_span_of_time_is_counted_by_team_and_standing() -> None:
    site = Site()
    for number in range(12):
        site.now = float(number)
        site.sent(str(number), "red" if number < 10 else "blue")
    assert site.log.sent_between("chat", 5.0, 11.0) == {
        ("red", Standing.WITHIN_SHARE): 3,
        ("red", Standing.BORROWING): 2,
        ("blue", Standing.BORROWING): 1,
    }
    assert site.log.sent_between("other", 0.0, 100.0) == {}
    assert len(site.log.of_team("blue", "home", since=0.0)) == 2
    assert site.log.of_team("blue", "chat", since=0.0) == []
