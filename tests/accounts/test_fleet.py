"""Limits and budgets of several replicas together, in virtual time: links with a delay, that break and come back."""

import random
from collections import deque

import msgspec
import pytest

from fairshare.accounts.fleet import REPORT_SECONDS, SILENT_SECONDS, Fleet
from fairshare.accounts.gate import Denied, Gate, Reservation
from fairshare.storage.accounts import BudgetRow, LimitRow, NodeRow, Rules
from fairshare.storage.ledger import Mark

BEGIN = 1_790_000_000.0
MIDNIGHT = 1_790_035_200.0
STEP_SECONDS = 0.125
OWNERS = ("key:k", "team:search")
TEAM = NodeRow(id=1, kind="team", path="search", parent_id=None, created_at=0.0)


def limit(kind: str, value: int) -> LimitRow:
    return LimitRow(id=1, kind=kind, node_id=1, value=value)


def bind(gate: Gate, now: float, *rows: LimitRow | BudgetRow) -> None:
    """These limits and budgets are in force, and no others."""
    budgets = tuple(row for row in rows if isinstance(row, BudgetRow))
    gate.load(Rules(1, None, (TEAM,), (), budgets, (), ()), now)
    for limit_id in gate.limits():
        gate.unbound(limit_id)
    for row in rows:
        if isinstance(row, LimitRow):
            gate.bound(row, "team:search")


class Site:
    """Replicas that are linked through the first one, as followers are with an owner; nothing comes at once."""

    def __init__(
        self, replicas: int, *rows: LimitRow | BudgetRow, delay_seconds: float = 0.25, begin: float = BEGIN
    ) -> None:
        self.now = begin
        self.rows = rows
        self.delay_seconds = delay_seconds
        self.gates: list[Gate] = []
        self.fleets: list[Fleet] = []
        self.links: set[frozenset[int]] = set()
        self._under_way: deque[tuple[float, int, int, bytes]] = deque()
        """When it comes, from whom, to whom, what."""
        self._reported_at = begin
        for _ in range(replicas):
            self.join()
        self.run(2.0)

    def join(self) -> int:
        gate, number = Gate(), len(self.gates)
        bind(gate, self.now, *self.rows)
        self.gates.append(gate)
        self.fleets.append(Fleet(gate, f"replica {number}", written=Mark(number, 0)))
        if number:
            self.link(0, number)
        return number

    def link(self, one: int, other: int) -> None:
        self.links.add(frozenset((one, other)))
        for sender, receiver in ((one, other), (other, one)):
            for content in self.fleets[sender].whole(self.now):
                self._send(sender, receiver, content)

    def cut(self, one: int, other: int) -> None:
        self.links.discard(frozenset((one, other)))
        ends = {one, other}
        self._under_way = deque(each for each in self._under_way if {each[1], each[2]} != ends)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_SECONDS
            while self._under_way and self._under_way[0][0] <= self.now:
                _, sender, receiver, content = self._under_way.popleft()
                if self.fleets[receiver].hear(content, self.now):
                    self._spread(receiver, content, but=sender)
            if self.now >= self._reported_at + REPORT_SECONDS:
                self._reported_at = self.now
                for number, fleet in enumerate(self.fleets):
                    self._spread(number, fleet.report(self.now))

    def ask(self, replica: int, *, tokens: float = 1.0, cost: float = 0.0) -> Reservation | Denied:
        return self.gates[replica].admit(OWNERS, model="m", tag="", tokens=tokens, cost_units=cost, now=self.now)

    def charge(self, replica: int, cost: float) -> None:
        self.gates[replica].charged(
            OWNERS, model="m", tag="", cost_units=cost, completion_tokens=0, slots=1, now=self.now
        )

    def used(self, replica: int) -> float:
        (budget,) = self.gates[replica].budgets()
        return budget.consumed

    def _spread(self, sender: int, content: bytes, *, but: int | None = None) -> None:
        for receiver in range(len(self.fleets)):
            if receiver != but and frozenset((sender, receiver)) in self.links:
                self._send(sender, receiver, content)

    def _send(self, sender: int, receiver: int, content: bytes) -> None:
        self._under_way.append((self.now + self.delay_seconds, sender, receiver, content))


def admitted(answer: Reservation | Denied) -> Reservation:
    assert isinstance(answer, Reservation)
    return answer


def test_a_limit_per_minute_holds_for_all_replicas_together() -> None:
    site = Site(3, limit("requests_per_minute", 6))
    for replica in (0, 1, 2):
        for _ in range(2):
            admitted(site.ask(replica))
    site.run(2.0)
    for replica in (0, 1, 2):
        refusal = site.ask(replica)
        assert isinstance(refusal, Denied)
        assert refusal.used == 6
        assert refusal.retry_after_seconds == 58
    site.run(59.0)
    for replica in (0, 1, 2):
        admitted(site.ask(replica))


def test_tokens_that_turned_out_fewer_are_free_for_other_replicas_too() -> None:
    site = Site(2, limit("tokens_per_minute", 100))
    running = admitted(site.ask(0, tokens=90.0))
    site.run(2.0)
    assert isinstance(site.ask(1, tokens=20.0), Denied)
    running.end(30.0)
    site.run(2.0)
    admitted(site.ask(1, tokens=70.0))
    assert isinstance(site.ask(1, tokens=1.0), Denied)


def test_requests_in_flight_elsewhere_count_until_they_end() -> None:
    site = Site(3, limit("in_flight", 2))
    first, _ = admitted(site.ask(1)), admitted(site.ask(2))
    site.run(2.0)
    assert all(isinstance(site.ask(replica), Denied) for replica in range(3))
    first.end(0.0)
    site.run(2.0)
    admitted(site.ask(0))


@pytest.mark.parametrize("seed", range(8))
def test_a_limit_is_passed_by_no_more_than_what_others_admit_until_they_hear_of_it(seed: int) -> None:
    # The bound of docs/reference/limits.md: in any minute at most the limit, and what the other replicas admitted in
    # the time in which they could not know: one report, and two links (through the owner) and the test's own step each.
    draw = random.Random(seed)
    replicas, most = draw.choice((2, 3, 5)), draw.choice((5, 40))
    site = Site(replicas, limit("requests_per_minute", most), delay_seconds=draw.choice((0.125, 0.5)))
    blind_seconds = REPORT_SECONDS + STEP_SECONDS + 2 * (site.delay_seconds + STEP_SECONDS)
    asked: list[tuple[float, int]] = []
    let_in: list[tuple[float, int]] = []
    for _ in range(round(150 / STEP_SECONDS)):
        site.run(STEP_SECONDS)
        for replica in range(replicas):
            if draw.random() < 0.3:
                asked.append((site.now, replica))
                if isinstance(site.ask(replica), Reservation):
                    let_in.append((site.now, replica))
    reached = 0
    for end, _ in let_in:
        minute = [(at, who) for at, who in let_in if end - 59.0 <= at <= end]
        # The last replica that knew of `most` requests knew of all but those of the blind time before it let one in.
        blind = max(
            sum(1 for at, who in let_in if who != replica and last - blind_seconds <= at <= last)
            for last, replica in minute
        )
        assert len(minute) <= most + blind
        reached = max(reached, len(minute))
    assert len(asked) > reached >= most


def test_a_replica_that_is_new_knows_what_was_used_before_it_came() -> None:
    site = Site(2, limit("requests_per_minute", 4))
    for _ in range(4):
        admitted(site.ask(1))
    site.run(2.0)
    new = site.join()
    site.run(1.0)
    assert isinstance(site.ask(new), Denied)


def test_replicas_that_were_cut_off_agree_again_as_soon_as_they_are_linked() -> None:
    site = Site(3, limit("requests_per_minute", 8))
    site.cut(0, 2)
    for replica in (0, 2, 2):
        admitted(site.ask(replica))
    site.run(3.0)
    assert len([1 for _ in range(9) if isinstance(site.ask(2), Reservation)]) == 6  # it counts alone
    site.link(0, 2)
    site.run(1.0)
    for replica in (0, 1, 2):
        refusal = site.ask(replica)
        assert isinstance(refusal, Denied)
        assert refusal.used == 9


def test_a_replica_that_died_has_nothing_in_flight_after_a_while_but_its_minute_counts() -> None:
    site = Site(3, limit("in_flight", 1))
    admitted(site.ask(2))
    site.run(1.5)
    site.cut(0, 2)
    site.run(SILENT_SECONDS / 2)
    assert isinstance(site.ask(1), Denied)
    site.run(SILENT_SECONDS)
    admitted(site.ask(1))

    site = Site(3, limit("requests_per_minute", 1))
    admitted(site.ask(2))
    site.run(1.5)
    site.cut(0, 2)
    site.run(2 * SILENT_SECONDS)
    assert isinstance(site.ask(1), Denied)


def test_a_lost_report_is_made_good_by_the_next_whole_one() -> None:
    site = Site(2, limit("requests_per_minute", 1))
    admitted(site.ask(1))
    site.fleets[1].report(site.now)  # nobody gets it
    site.run(1.0)
    admitted(site.ask(0))
    site.run(11.0)
    refusal = site.ask(0)
    assert isinstance(refusal, Denied)
    assert refusal.used == 2


def test_a_limit_that_comes_later_counts_what_others_said_before_it_was_known_here() -> None:
    site = Site(2, limit("requests_per_minute", 2))
    bind(site.gates[0], site.now)
    for _ in range(2):
        admitted(site.ask(1))
    site.run(1.0)
    bind(site.gates[0], site.now, *site.rows)
    assert not isinstance(site.ask(0), Denied)
    bind(site.gates[0], site.now)
    bind(site.gates[0], site.now, *site.rows)
    site.fleets[0].rules_changed(site.gates[0].news(), site.now)
    assert isinstance(site.ask(0), Denied)


DAY = BudgetRow(id=1, node_id=1, period="day", time_zone="UTC", created_at=0.0, hard_cost_units=100.0)


def scan(site: Site, replica: int, stored: float) -> None:
    """Its budget is read from a store that holds so much (of others, as far as they said)."""
    (budget,) = site.gates[replica].budgets()
    budget.scanned(budget.scan(), stored)


def test_what_others_charge_is_counted_once_whether_it_comes_from_them_or_from_the_store() -> None:
    site = Site(2, DAY)
    for replica in (0, 1):
        scan(site, replica, 10.0)  # of last week
    site.charge(0, 5.0)
    site.charge(1, 7.0)
    site.run(2.0)
    assert site.used(0) == site.used(1) == 22.0
    # Replica 1 writes what it charged; then replica 2 comes and reads the store.
    site.fleets[1].written_until(Mark(1, 3), site.gates[1].charges())
    site.charge(1, 1.0)
    new = site.join()
    site.run(2.0)
    assert site.gates[new].unknown_budgets()
    assert Mark(1, 3) in site.fleets[new].marks()
    scan(site, new, 17.0)
    assert not site.gates[new].unknown_budgets()
    site.charge(1, 2.0)
    site.charge(new, 0.5)
    site.run(2.0)
    assert [site.used(replica) for replica in range(3)] == [25.5, 25.5, 25.5]


def test_estimates_of_other_replicas_hold_a_budget_and_are_given_back() -> None:
    site = Site(2, DAY)
    running = admitted(site.ask(0, cost=90.0))
    site.run(2.0)
    refusal = site.ask(1, cost=20.0)
    assert isinstance(refusal, Denied)
    assert refusal.retry_after_seconds == 1
    running.end(0.0)
    site.run(2.0)
    admitted(site.ask(1, cost=20.0))


def test_what_a_replica_that_is_gone_had_charged_is_asked_of_the_store() -> None:
    site = Site(2, DAY)
    scan(site, 0, 0.0)
    site.charge(1, 7.0)
    site.run(2.0)
    scan(site, 0, 0.0)
    assert site.used(0) == 7.0
    site.cut(0, 1)
    site.run(2 * SILENT_SECONDS)
    assert site.gates[0].unknown_budgets()
    scan(site, 0, 7.0)
    assert site.used(0) == 7.0


def test_a_new_day_begins_from_nothing_and_counts_what_others_charge_in_it() -> None:
    site = Site(2, DAY, begin=MIDNIGHT - 8.0)
    site.charge(1, 60.0)
    site.run(2.0)
    scan(site, 0, 0.0)
    scan(site, 1, 60.0)
    assert site.used(0) == site.used(1) == 60.0
    site.run(10.0)
    assert site.now > MIDNIGHT
    site.charge(1, 3.0)
    site.charge(0, 1.0)
    site.run(2.0)
    assert site.used(0) == site.used(1) == 4.0
    assert not any(gate.unknown_budgets() for gate in site.gates)


def test_a_report_in_an_unknown_form_is_refused() -> None:
    site = Site(1, DAY)
    with pytest.raises(msgspec.DecodeError):
        site.fleets[0].hear(b"\x93\x01", site.now)


def test_a_report_that_comes_on_two_ways_is_passed_on_once_and_an_older_one_changes_nothing() -> None:
    site = Site(2, limit("in_flight", 5))
    other = Fleet(Gate(), "replica 9", written=Mark(9, 0))
    first, second = other.whole(site.now)[0], other.whole(site.now)[0]
    news = [site.fleets[0].hear(each, site.now) for each in (first, second, second, first)]
    assert news == [True, True, False, False]
    # What comes back to who said it is not news either.
    assert not site.fleets[0].hear(site.fleets[0].report(site.now), site.now)
