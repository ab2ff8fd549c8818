"""Whatever is done to a pool, in whatever order, it is what the plain rules of `naive_pool` say."""

from dataclasses import dataclass
from fractions import Fraction
from math import inf, nan

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from core.naive_pool import NaiveGrant, NaivePool, countable
from fairshare import Grant, Pool, ServiceClass

STEP_SECONDS = 128
HALF_LIVES = st.sampled_from([0, 64, 128])
"""Divisors of the step: usage is halved a whole number of times and both sides are exact."""

SHARES = st.sampled_from(
    [
        {"a": Fraction(13, 16), "b": Fraction(3, 16)},
        {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(0)},
        {"c": Fraction(1)},
        {name: Fraction(1, 16) for name in "abcdefghijkl"},
        {name: Fraction(1 + index % 3, 32) for index, name in enumerate("lkjihgfedcba")},
        {},
    ]
)
EVERY_TEAM = [*"abcdefghijkl", "stranger", "nobody"]
TEAMS = st.sampled_from([*"aaabbbc", *EVERY_TEAM])
"""Mostly the same few, so that one thing meets another."""
SLOTS = st.sampled_from([1, 1, 2, 6])
CAPACITIES = st.sampled_from([0, 1, 2, 5, 10, 16, 20])
CLASSES = st.sampled_from(ServiceClass)
CONSUMED = st.one_of(st.integers(0, 60), st.sampled_from([-1.0, nan, inf, -inf, 0.5]))


@dataclass(eq=False)
class Pair:
    real: Grant
    naive: NaiveGrant


class PoolMachine(RuleBasedStateMachine):
    grants = Bundle("grants")

    def read_clock(self) -> float:
        return self.clock

    @initialize(
        capacity=CAPACITIES,
        shares=SHARES,
        half_life=HALF_LIVES,
        usages=st.permutations([0, 0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]),
        phantoms=st.lists(st.tuples(TEAMS, st.integers(1, 3), st.integers(1, 4)), max_size=6),
    )
    def start(
        self,
        capacity: int,
        shares: dict[str, Fraction],
        half_life: int,
        usages: list[int],
        phantoms: list[tuple[str, int, int]],
    ) -> None:
        self.clock = 0.0
        self.pool = Pool("p", capacity, shares, half_life, self.read_clock)
        self.naive = NaivePool(capacity, shares, half_life)
        self.changed = self.pool.watch()
        self.seen = self.facts()
        self.charged: set[str] = set()
        for team, usage in zip(EVERY_TEAM, usages, strict=False):
            self.set_usage(team, usage)
        for team, n, steps in phantoms:
            self.add_phantoms(team, n, steps)

    # Time

    @rule(steps=st.sampled_from([1, 1, 2, 3, 40, 70]))
    def time_passes(self, steps: int) -> None:
        self.clock += steps * STEP_SECONDS
        self.naive.clock_says(self.clock)

    @rule(steps=st.integers(1, 3))
    def the_clock_steps_back(self, steps: int) -> None:
        self.clock -= steps * STEP_SECONDS

    # Requests

    @rule(target=grants, team=TEAMS, service_class=CLASSES, tokens=st.integers(0, 9), slots=SLOTS)
    def acquire(self, team: str, service_class: ServiceClass, tokens: int, slots: int) -> Pair:
        certain = self.naive.ranks_are_certain()
        naive = self.naive.acquire(team, service_class, tokens, slots)
        return self.same(self.pool.acquire(team, service_class, tokens, slots=slots), naive, certain)

    @rule(target=grants, team=TEAMS, service_class=CLASSES, tokens=st.integers(0, 9), slots=SLOTS)
    def try_acquire(self, team: str, service_class: ServiceClass, tokens: int, slots: int):
        certain = self.naive.ranks_are_certain()
        naive = self.naive.try_acquire(team, service_class, tokens, slots)
        real = self.pool.try_acquire(team, service_class, tokens, slots=slots)
        if real is None or naive is None:
            assert real is naive is None
            return multiple()
        return self.same(real, naive, certain)

    @rule(target=grants, team=TEAMS, priority=st.integers(0, 101), borrowing=st.booleans(), slots=SLOTS)
    def adopt(self, team: str, priority: int, borrowing: bool, slots: int) -> Pair:
        naive = self.naive.adopt(team, priority, borrowing, 7, slots)
        return self.same(self.pool.adopt(team, priority, borrowing, 7, slots=slots), naive)

    @rule(target=grants, team=TEAMS, borrowing=st.booleans(), slots=SLOTS, expected=CONSUMED)
    def record(self, team: str, borrowing: bool, slots: int, expected: float) -> Pair:
        naive = self.naive.adopt(team, 3, borrowing, 0, slots)
        self.naive.expect(naive, expected)
        real = self.pool.record(
            self.pool.state(team),
            now=self.pool.begin(),
            priority=3,
            borrowing=borrowing,
            slots=slots,
            provisional_cost_units=expected,
        )
        return self.same(real, naive)

    def same(self, real: Grant, naive: NaiveGrant, certain: bool = True) -> Pair:
        assert (real.team, real.slots, real.estimated_tokens) == (naive.team, naive.slots, naive.tokens)
        assert (real.borrowing, real.saturated) == (naive.borrowing, naive.saturated)
        assert real.priority == naive.priority or not certain
        return Pair(real, naive)

    @rule(pair=grants, consumed=CONSUMED)
    def release(self, pair: Pair, consumed: float) -> None:
        """Also of one that was released before: it changes nothing."""
        self.naive.release(pair.naive, consumed)
        pair.real.release(consumed)

    @rule(pair=consumes(grants), consumed=CONSUMED)
    def settle_twice(self, pair: Pair, consumed: float) -> None:
        self.naive.release(pair.naive, consumed)
        self.pool.settle(pair.real, consumed, now=self.pool.begin())
        self.pool.settle(pair.real, 99.0, now=self.pool.begin())

    @rule(pair=consumes(grants))
    def leave_the_context(self, pair: Pair) -> None:
        self.naive.release(pair.naive, 0.0)
        with pair.real:
            pass

    # Usage, phantoms and changes

    @rule(team=TEAMS, consumed=CONSUMED)
    def charge(self, team: str, consumed: float) -> None:
        self.naive.charge(team, consumed)
        if countable(consumed):
            self.charged.add(team)
        self.pool.charge(team, consumed)

    @rule(team=TEAMS, usage=CONSUMED)
    def set_usage(self, team: str, usage: float) -> None:
        self.naive.set_usage(team, usage)
        self.charged.add(team)
        self.pool.set_usage(team, usage)

    @rule(team=TEAMS, n=st.integers(0, 3), steps=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.0, 2.5, 60.0]))
    def add_phantoms(self, team: str, n: int, steps: float) -> None:
        until = self.naive.now + steps * STEP_SECONDS
        self.naive.add_phantoms(team, n, until)
        self.pool.add_phantoms(team, n, until)

    @rule(team=TEAMS)
    def drop_phantom(self, team: str) -> None:
        assert self.pool.drop_phantom(team) == self.naive.drop_phantom(team)

    @rule(capacity=CAPACITIES)
    def set_capacity(self, capacity: int) -> None:
        generation = self.pool.generation
        assert self.pool.set_capacity(capacity) == self.naive.capacity
        self.naive.capacity = capacity
        assert self.pool.generation > generation

    @rule(shares=SHARES)
    def set_shares(self, shares: dict[str, Fraction]) -> None:
        generation = self.pool.generation
        assert self.pool.set_shares(shares) == self.naive.shares
        self.naive.shares = shares
        assert self.pool.generation > generation

    @rule(half_life=HALF_LIVES)
    def set_half_life(self, half_life: int) -> None:
        generation = self.pool.generation
        assert self.pool.set_half_life(half_life) == self.naive.half_life
        self.naive.half_life = half_life
        assert self.pool.generation > generation

    # What must be true after every step

    def facts(self) -> dict[str, tuple[object, ...]]:
        """What a watcher is told about."""
        return {
            team: (
                self.naive.in_flight(team),
                self.naive.phantom_slots(team),
                sum(grant.borrowing for grant in self.naive.grants if grant.team == team),
                self.naive.shares.get(team),
            )
            for team in EVERY_TEAM
        }

    @invariant()
    def snapshots_are_the_same(self) -> None:
        snapshot = self.pool.snapshot()
        naive = self.naive
        reserved = naive.reserved()
        assert [stat.team for stat in snapshot] == naive.teams_to_show()
        certain = naive.ranks_are_certain()
        fairshares, ranks = naive.level_fairshares(), naive.ranks()
        for stat in snapshot:
            of_team = [grant for grant in naive.grants if grant.team == stat.team]
            assert stat.share == naive.shares.get(stat.team, 0)
            assert stat.reserved == reserved.get(stat.team, 0)
            assert stat.in_flight == naive.in_flight(stat.team)
            assert stat.borrowing == sum(grant.slots for grant in of_team if grant.borrowing)
            assert stat.in_flight_tokens == sum(grant.tokens for grant in of_team)
            assert stat.phantoms == naive.phantom_slots(stat.team)
            assert stat.usage == pytest.approx(float(naive.usage.get(stat.team, 0)), rel=1e-12, abs=0)
            assert stat.level_fairshare == pytest.approx(fairshares.get(stat.team, 0.0), rel=1e-12)
            assert stat.rank == ranks.get(stat.team, 9) or not certain
            assert stat.rank == self.pool.rank(stat.team)
        assert self.pool.reserved() == reserved

    @invariant()
    def usage_counts_phantoms_in_flight(self) -> None:
        usage, in_flight = self.pool.usage()
        assert list(usage) == list(in_flight) == self.naive.teams_to_show()
        for team in usage:
            assert usage[team] == pytest.approx(float(self.naive.usage.get(team, 0)), rel=1e-12, abs=0)
            assert in_flight[team] == self.naive.in_flight(team) + self.naive.phantom_slots(team)

    @invariant()
    def a_dispatch_queue_sees_the_same(self) -> None:
        naive = self.naive
        assert self.pool.begin() == naive.now
        assert self.pool.live_slots == sum(grant.slots for grant in naive.grants)
        assert self.pool.phantom_slots == len(naive.phantoms)
        assert self.pool.next_phantom_end() == min((phantom.until for phantom in naive.phantoms), default=None)
        assert self.pool.exact_shares == naive.shares
        facts = self.facts()
        changed = {team for team, fact in facts.items() if fact != self.seen[team]}
        assert changed | self.charged <= self.changed
        self.changed.clear()
        self.charged.clear()
        self.seen = facts
        fairshares = naive.level_fairshares()
        best_first = [fairshares[team] for team in sorted(fairshares, key=self.pool.borrow_key)]
        assert best_first == pytest.approx(sorted(best_first, reverse=True), rel=1e-12)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
