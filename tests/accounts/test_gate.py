"""Limits and budgets, request by request, on the test's own clock."""

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from fairshare.accounts.gate import DenialCode, Denied, Gate, Reservation, SoftPassed
from fairshare.accounts.service import Tree
from fairshare.storage.accounts import BudgetRow, IncreaseRow, LimitRow, NodeRow, Rules

NODES = (
    NodeRow(id=1, kind="organisation", path="lab", parent_id=None, created_at=0.0),
    NodeRow(id=2, kind="team", path="search", parent_id=1, created_at=0.0),
)
OWNERS = ("key:k", "team:search", "organisation:lab")
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()


def bind(gate: Gate, *rows: LimitRow | BudgetRow, increases: tuple[IncreaseRow, ...] = ()) -> None:
    """These limits and budgets are in force, and no others."""
    budgets = tuple(row for row in rows if isinstance(row, BudgetRow))
    gate.load(Rules(1, None, NODES, (), budgets, increases, ()), NOON)
    limits = [row for row in rows if isinstance(row, LimitRow)]
    for row in limits:
        gate.bound(row, Tree(NODES).owner_name(row))
    for limit_id in gate.limits() - {row.id for row in limits}:
        gate.unbound(limit_id)


def gate(*rows: LimitRow | BudgetRow, **other: Any) -> Gate:
    made = Gate(**other)
    bind(made, *rows)
    return made


def budget(**other: Any) -> BudgetRow:
    values: dict[str, Any] = {"id": 1, "node_id": 2, "period": "day", "time_zone": "UTC", "created_at": 0.0}
    return BudgetRow(**(values | other))


def ask(
    gate: Gate, now: float = NOON, *, tokens: float = 10.0, cost: float = 1.0, model: str = "tiny", tag: str = ""
) -> Reservation | Denied:
    return gate.admit(OWNERS, model=model, tag=tag, tokens=tokens, cost_units=cost, now=now)


def admitted(answer: Reservation | Denied) -> Reservation:
    assert isinstance(answer, Reservation)
    return answer


def denied(answer: Reservation | Denied) -> Denied:
    assert isinstance(answer, Denied)
    return answer


def charge(gate: Gate, cost: float, now: float = NOON, *, model: str = "tiny", tag: str = "", slots: int = 1) -> None:
    gate.charged(OWNERS, model=model, tag=tag, cost_units=cost, completion_tokens=4 * slots, slots=slots, now=now)


def test_without_limits_everything_is_admitted() -> None:
    admitted(ask(gate(), tokens=math.inf, cost=math.inf))


def test_owners_are_bounded_while_a_limit_or_budget_of_one_of_them_is_in_force() -> None:
    it = gate()
    assert not it.is_bounded(OWNERS)
    bind(it, LimitRow(id=1, kind="in_flight", node_id=1, value=1))
    assert it.is_bounded(OWNERS)
    assert not it.is_bounded(("key:k", "team:other"))
    bind(it, budget(hard_cost_units=1.0))
    assert it.is_bounded(OWNERS)
    bind(it)
    assert not it.is_bounded(OWNERS)


def test_requests_per_minute_are_counted_over_the_last_sixty_seconds() -> None:
    it = gate(LimitRow(id=1, kind="requests_per_minute", node_id=2, value=2))
    admitted(ask(it, NOON))
    admitted(ask(it, NOON + 30))
    answer = denied(ask(it, NOON + 40.5))
    assert (answer.code, answer.owner, answer.limit, answer.used) == (DenialCode.RATE_LIMITED, "team:search", 2, 2)
    assert (answer.resets_at, answer.retry_after_seconds) == (NOON + 60, 20.0)
    assert answer.message() == (
        "The limit of requests per minute of team 'search' is 2, and 2 is used. Try again in 20 s."
    )
    admitted(ask(it, NOON + 60))
    denied(ask(it, NOON + 89))
    admitted(ask(it, NOON + 90))


def test_a_refused_request_counts_nowhere() -> None:
    it = gate(
        LimitRow(id=1, kind="in_flight", key_id="k", value=1),
        LimitRow(id=2, kind="requests_per_minute", node_id=1, value=2),
    )
    running = admitted(ask(it))
    for _ in range(5):
        assert denied(ask(it)).code is DenialCode.TOO_MANY_IN_FLIGHT
    running.end(0.0)
    admitted(ask(it))


def test_tokens_are_an_estimate_until_the_request_ends() -> None:
    it = gate(LimitRow(id=1, kind="tokens_per_minute", node_id=2, value=100))
    first = admitted(ask(it, tokens=60.0))
    denied(ask(it, tokens=60.0))
    first.end(tokens=20.0)
    second = admitted(ask(it, tokens=60.0))
    second.end(tokens=90.0)  # more than was thought
    assert denied(ask(it, tokens=1.0)).used == 110
    admitted(ask(it, NOON + 61, tokens=60.0))


def test_a_request_that_ends_after_its_minute_changes_nothing_any_more() -> None:
    it = gate(LimitRow(id=1, kind="tokens_per_minute", node_id=2, value=100))
    first = admitted(ask(it, tokens=60.0))
    admitted(ask(it, NOON + 61, tokens=60.0))
    first.end(tokens=1000.0)
    admitted(ask(it, NOON + 61, tokens=40.0))


def test_a_request_larger_than_the_limit_goes_alone() -> None:
    it = gate(LimitRow(id=1, kind="tokens_per_minute", node_id=2, value=100))
    admitted(ask(it, tokens=5000.0))
    denied(ask(it, NOON + 59, tokens=1.0))
    admitted(ask(it, NOON + 60, tokens=5000.0))


def test_a_limit_of_zero_admits_nothing() -> None:
    for kind in ("tokens_per_minute", "requests_per_minute", "in_flight"):
        denied(ask(gate(LimitRow(id=1, kind=kind, node_id=2, value=0))))


def test_a_hard_budget_counts_what_runs_by_estimate_and_what_ended_as_charged() -> None:
    it = gate(budget(hard_cost_units=3.0))
    first, second = admitted(ask(it)), admitted(ask(it, cost=2.0))
    answer = denied(ask(it))
    # Only estimates are in the way: those who run will end soon.
    assert (answer.used, answer.retry_after_seconds) == (3.0, 1.0)
    second.end(0.0)
    charge(it, 0.5)
    first.end(0.0)
    charge(it, 2.5)
    answer = denied(ask(it, cost=0.0))
    assert (answer.code, answer.limit, answer.used) == (DenialCode.BUDGET_EXHAUSTED, 3.0, 3.0)
    assert answer.retry_after_seconds == 12 * 3600
    assert answer.message() == (
        "The budget (per day, cost units) of team 'search' is 3, and 3 is used. Try again in 43200 s."
    )
    admitted(ask(it, NOON + 12 * 3600))


def test_large_numbers_are_said_in_full() -> None:
    it = gate(budget(hard_cost_units=2_500_000.0))
    charge(it, 2_500_001.25)
    assert "is 2500000, and 2500001.25 is used" in denied(ask(it)).message()


def test_a_total_budget_never_starts_again() -> None:
    it = gate(budget(period="total", hard_cost_units=3.0))
    charge(it, 3.0)
    answer = denied(ask(it, NOON + 1e9))
    assert answer.retry_after_seconds is None
    assert "does not start again" in answer.message()


def test_a_budget_of_a_model_and_tag_counts_those_only() -> None:
    it = gate(budget(hard_cost_units=1.0, model="big", tag="nightly"))
    charge(it, 5.0, model="tiny", tag="nightly")
    charge(it, 5.0, model="big", tag="")
    admitted(ask(it, model="big", tag="nightly"))
    charge(it, 1.0, model="big", tag="nightly")
    assert "model 'big' and tag 'nightly'" in denied(ask(it, model="big", tag="nightly")).message()
    admitted(ask(it))


def test_an_increase_counts_until_it_ends() -> None:
    it = Gate()
    row = budget(hard_cost_units=1.0)
    bind(it, row, increases=(IncreaseRow(id=1, budget_id=1, cost_units=2.0, until=NOON + 10),))
    charge(it, 2.0)
    admitted(ask(it))
    assert denied(ask(it, NOON + 10)).limit == 1.0


def test_a_soft_budget_is_told_once_in_a_period_and_may_make_a_team_borrow() -> None:
    told: list[SoftPassed] = []
    it = gate(budget(soft_cost_units=2.0, borrow_over_soft=True), told=told.append)
    charge(it, 1.0)
    assert it.borrowing(NOON) == frozenset()
    charge(it, 1.0)
    charge(it, 1.0)
    assert [(each.owner, each.used_cost_units) for each in told] == [("team:search", 2.0)]
    assert it.borrowing(NOON) == {"team:search"}
    admitted(ask(it))  # soft is soft
    tomorrow = NOON + 86400
    assert it.borrowing(tomorrow) == frozenset()
    charge(it, 2.0, tomorrow)
    assert len(told) == 2


def test_other_rules_keep_what_was_counted() -> None:
    limit = LimitRow(id=1, kind="requests_per_minute", node_id=2, value=2)
    it = gate(limit, budget(hard_cost_units=5.0))
    admitted(ask(it))
    charge(it, 4.0)
    raised = LimitRow(id=1, kind="requests_per_minute", node_id=2, value=3)
    bind(it, raised, budget(hard_cost_units=4.0), LimitRow(id=2, kind="in_flight", node_id=1, value=9))
    assert denied(ask(it)).code is DenialCode.BUDGET_EXHAUSTED
    bind(it, raised)
    admitted(ask(it))
    admitted(ask(it))
    denied(ask(it))


def test_completions_are_expected_as_long_as_they_were_and_no_longer_than_allowed() -> None:
    it = gate()
    assert it.expected_completion_tokens("tiny", None, 1) == 0.0
    charge(it, 1.0)
    assert it.expected_completion_tokens("tiny", None, 1) == 4.0
    assert it.expected_completion_tokens("tiny", 3, 1) == 3.0
    assert it.expected_completion_tokens("other", None, 1) == 0.0


def test_a_request_for_many_answers_is_expected_to_take_all_of_them() -> None:
    it = gate()
    charge(it, 1.0, slots=10)  # ten answers of four tokens
    assert it.expected_completion_tokens("tiny", None, 1) == 4.0
    assert it.expected_completion_tokens("tiny", None, 100) == 400.0
    assert it.expected_completion_tokens("tiny", 3, 100) == 300.0


def test_a_number_that_another_limit_had_before_counts_from_zero() -> None:
    it = gate(LimitRow(id=1, kind="requests_per_minute", node_id=2, value=1))
    admitted(ask(it))
    denied(ask(it))
    bind(it, LimitRow(id=1, kind="requests_per_minute", node_id=1, value=1))
    admitted(ask(it))
    assert denied(ask(it)).owner == "organisation:lab"
    it.unbound(1)
    it.unbound(1)
    admitted(ask(it))


@pytest.mark.parametrize("now", [NOON - 3600.0, NOON])
def test_a_clock_that_steps_back_admits_no_more(now: float) -> None:
    it = gate(LimitRow(id=1, kind="requests_per_minute", node_id=2, value=1))
    admitted(ask(it, NOON))
    denied(ask(it, now))
