"""The policies that ours are compared with: each does what its name says."""

import pytest

from fairshare import Pool
from fairshare.core.decisions import Decision, Held, HoldOptions, Instance, Refused, Request, Send
from fairshare.simulator.policies import (
    GatewayPolicy,
    PolicyName,
    make_policy,
    parse_policies,
)


class Rig:
    """A policy with a clock that says what it is told."""

    def __init__(self, name: PolicyName, shares: dict[str, str], capacity: int = 4, per_minute: float = 1000.0) -> None:
        self.now = 0.0
        pool = Pool("pool", capacity, shares, 0, clock=lambda: self.now)
        instances = [Instance(id="e", part_slots=capacity, seats=capacity)]
        self.policy: GatewayPolicy = make_policy(name, pool, HoldOptions(), instances, per_minute)
        self.count = 0
        self.sent: list[str] = []
        self.held: list[str] = []
        self.refused: list[Refused] = []

    def ask(self, team: str, prompt: int = 10, slots: int = 1) -> str:
        self.count += 1
        name = f"{team}{self.count}"
        self._note(self.policy.submitted(Request(id=name, team=team, slots=slots, estimated_tokens=prompt)))
        return name

    def end(self, name: str, consumed: float = 30.0) -> list[str]:
        """Returns what may go now."""
        before = len(self.sent)
        self._note(self.policy.released(name, consumed))
        return self.sent[before:]

    def _note(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Send():
                    self.sent.append(decision.request_id)
                case Held():
                    self.held.append(decision.request_id)
                case Refused():
                    self.refused.append(decision)
                case _:
                    raise AssertionError(decision)


HALVES = {"a": "1/2", "b": "1/2"}


def test_fcfs_sends_everything_at_once() -> None:
    rig = Rig(PolicyName.FCFS, HALVES)
    assert [rig.ask("a") for _ in range(9)] == rig.sent


def test_a_static_partition_never_lends() -> None:
    rig = Rig(PolicyName.STATIC, HALVES)
    names = [rig.ask("a") for _ in range(3)]
    assert rig.sent == names[:2]
    assert rig.held == names[2:]
    other = rig.ask("b")
    assert rig.sent[-1] == other
    assert rig.end(other) == []
    assert rig.end(names[0]) == [names[2]]


def test_a_static_partition_gives_every_team_one_slot_at_least() -> None:
    rig = Rig(PolicyName.STATIC, {f"t{k}": "1/8" for k in range(8)}, capacity=4)
    assert [rig.ask(f"t{k}") for k in range(8)] == rig.sent


def test_fifo_with_caps_goes_by_arrival_and_skips_teams_at_their_cap() -> None:
    rig = Rig(PolicyName.FIFO_CAPS, {"a": "1/4", "b": "3/4"})
    first, second, third = (rig.ask("a") for _ in range(3))  # the cap of a is 2 x 1 slot
    assert rig.sent == [first, second]
    other = rig.ask("b")
    assert rig.sent[-1] == other
    assert rig.end(other) == []
    assert rig.end(first) == [third]


def test_vtc_serves_the_least_served_backlogged_team_next() -> None:
    rig = Rig(PolicyName.VTC, HALVES, capacity=1)
    running = rig.ask("a")
    waiting = [rig.ask("a"), rig.ask("a")]
    other = rig.ask("b")
    assert rig.end(running, consumed=500.0) == [other]
    assert rig.end(other, consumed=100.0) == [waiting[0]]


def test_vtc_lifts_a_team_that_comes_back() -> None:
    rig = Rig(PolicyName.VTC, HALVES, capacity=1)
    running = rig.ask("a")
    waiting = [rig.ask("a") for _ in range(6)]
    for _ in range(3):  # a is served a lot while b is away
        running = rig.end(running, consumed=1000.0)[0]
    late = [rig.ask("b"), rig.ask("b")]
    # b begins where a is, not 4,000 behind: they take turns from here on.
    assert rig.end(running, consumed=1000.0) == [waiting[3]]
    assert rig.end(waiting[3], consumed=1000.0) == [late[0]]
    assert rig.end(late[0], consumed=1200.0) == [waiting[4]]


def test_weighted_vtc_divides_service_by_share() -> None:
    rig = Rig(PolicyName.WEIGHTED_VTC, {"a": "3/4", "b": "1/4"}, capacity=1)
    running = rig.ask("a")
    for _ in range(40):
        rig.ask("a")
        rig.ask("b")
    order: list[str] = []
    for _ in range(40):
        order += [name[0] for name in rig.end(running, consumed=100.0)]
        running = rig.sent[-1]
    assert order.count("a") == pytest.approx(30, abs=1)


def test_a_rate_limit_answers_429_until_the_teams_next_minute() -> None:
    rig = Rig(PolicyName.RATE_LIMIT, HALVES, per_minute=200.0)
    rig.now = 10.0
    first, second = rig.ask("a", prompt=60), rig.ask("a", prompt=30)  # nothing is known of answers yet
    rig.now = 20.0
    rig.end(first, consumed=60.0 + 2 * 20)  # 80 tokens of 100, with the 30 of the second: 110
    rig.now = 30.0
    rig.ask("a")
    assert [(one.found, one.limit, one.retry_after_seconds) for one in rig.refused] == [(110.0, 100.0, 40.0)]
    rig.ask("b")  # an idle neighbour's part stays unused
    rig.now = 70.0
    assert rig.ask("a", prompt=70) == rig.sent[-1]  # counts with 70 + 20
    rig.end(second, consumed=30.0 + 2 * 90)  # of the minute before
    rig.ask("a")
    assert rig.refused[-1].found == 90.0
    rig.now = 130.0
    assert rig.ask("a", prompt=5000) == rig.sent[-1]  # more than a minute's tokens: a minute of its own
    rig.ask("a")
    assert rig.refused[-1].retry_after_seconds == 60.0


@pytest.mark.parametrize("policy", [PolicyName.VTC, PolicyName.WEIGHTED_VTC])
def test_vtc_expects_of_each_answer_of_a_wide_request_what_one_was_long(policy: PolicyName) -> None:
    rig = Rig(policy, HALVES, capacity=5)
    rig.end(rig.ask("a", slots=4), consumed=10.0 + 2 * 4 * 25)
    rig.end(rig.ask("b"), consumed=10.0 + 2 * 150)
    rig.ask("a", slots=4)
    running = rig.ask("b")
    waiting = [rig.ask("b"), rig.ask("a")]
    # a has 210 and the expected 210, b 310 and 310.
    assert rig.end(running, consumed=10.0 + 2 * 150) == [waiting[1]]


def test_vtc_learns_nothing_of_lengths_from_a_request_that_was_broken_off() -> None:
    rig = Rig(PolicyName.VTC, HALVES, capacity=2)
    rig.end(rig.ask("a"), consumed=10.0 + 2 * 100)
    for _ in range(20):
        rig.end(rig.ask("a"), consumed=0.0)
    rig.end(rig.ask("b"), consumed=140.0)  # b was lifted to a's 210
    rig.ask("a")
    running = rig.ask("b")
    waiting = [rig.ask("a"), rig.ask("b")]
    # a has 210 and the expected 210, b 350.
    assert rig.end(running, consumed=0.0) == [waiting[1]]


def test_an_unknown_policy_is_refused_with_those_that_are_known() -> None:
    assert parse_policies(["all"]) == tuple(PolicyName)
    with pytest.raises(ValueError, match="there is no policy 'lifo'; there are fcfs, pass, hold"):
        parse_policies(["fcfs", "lifo"])
