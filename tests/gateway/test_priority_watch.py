"""Noticing in passing that an engine ignores priority, on simulated engines: no clock, no network."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from fairshare.gateway.priority_watch import CASES, PriorityWatch

ENGINE = "http://engine"


@dataclass(order=True)
class Job:
    key: tuple[float, int]
    id: str = field(compare=False)
    priority: int = field(compare=False)
    prefill_seconds: float = field(compare=False)
    decode_seconds: float = field(compare=False)


@dataclass
class Engine:
    """Seats and a queue. Tells the watch what a gateway would see, first bytes late by the prompt and by jitter."""

    watch: PriorityWatch
    seats: int
    by_priority: bool
    random: random.Random
    jitter_seconds: float = 0.02
    highest_first: bool = False
    now: float = 0.0
    waiting: list[Job] = field(default_factory=list)
    running: int = 0
    agenda: list[tuple[float, int, str, str]] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    count: int = 0

    def send(
        self,
        priority: int,
        *,
        team: str,
        prompt_size: int = 100,
        prefill_seconds: float = 0.02,
        decode_seconds: float = 1.0,
        streaming: bool = True,
    ) -> None:
        self.count += 1
        order = (-priority if self.highest_first else priority) if self.by_priority else 0
        job = Job((order, self.count), f"r{self.count}", priority, prefill_seconds, decode_seconds)
        self.jobs[job.id] = job
        self.watch.sent(
            job.id,
            instance_id=ENGINE,
            team=team,
            priority=priority,
            slots=1,
            prompt_size=prompt_size,
            streaming=streaming,
            now=self.now,
        )
        heapq.heappush(self.waiting, job)
        self._admit()

    def _admit(self) -> None:
        while self.waiting and self.running < self.seats:
            job = heapq.heappop(self.waiting)
            self.running += 1
            first_byte_at = self.now + job.prefill_seconds
            seen_at = first_byte_at + self.random.random() * self.jitter_seconds
            self._plan(seen_at, job.id, "first byte")
            self._plan(first_byte_at + job.decode_seconds + self.jitter_seconds, job.id, "end")

    def _plan(self, at: float, job_id: str, what: str) -> None:
        heapq.heappush(self.agenda, (at, len(self.agenda), job_id, what))

    def run_until(self, at: float) -> None:
        while self.agenda and self.agenda[0][0] <= at:
            self.now, _, job_id, what = heapq.heappop(self.agenda)
            if what == "first byte":
                self.watch.first_byte(job_id, now=self.now)
            else:
                self.watch.ended(job_id)
                self.running -= 1
                self._admit()
        self.now = at


def engine(*, by_priority: bool, seats: int = 4, seed: int = 1, **more: float) -> Engine:
    watch = PriorityWatch()
    watch.know(ENGINE, seats=seats)
    return Engine(watch=watch, seats=seats, by_priority=by_priority, random=random.Random(seed), **more)


def quiet_then_busy(run: Engine, *, seconds: float = 300.0, urgent: dict[str, float] | None = None) -> None:
    """Urgent requests on an idle engine, then the same beside a lazy backlog that is always a dozen deep."""
    urgent = urgent or {}
    for _ in range(20):
        run.send(0, team="owner", **urgent)
        run.run_until(run.now + 2.0)
    end_at = run.now + seconds
    while run.now < end_at:
        while len(run.waiting) < 12:
            run.send(10 + 10 * run.random.randrange(3), team="borrower")
        run.send(0, team="owner", **urgent)
        run.run_until(run.now + 1.0)


def test_an_engine_that_ignores_priority_is_found_out() -> None:
    run = engine(by_priority=False)
    quiet_then_busy(run)
    assert (run.watch.contradictions(ENGINE) or 0) >= CASES


def test_an_engine_that_takes_the_highest_number_first_is_found_out() -> None:
    run = engine(by_priority=True)
    run.highest_first = True
    for _ in range(20):
        run.send(0, team="owner")
        run.run_until(run.now + 2.0)
    for _ in range(60):
        run.send(0, team="owner")
        for _ in range(30):
            run.send(10, team="borrower")
            run.run_until(run.now + 0.1)
        # The backlog ends for a moment, or the urgent ones would never answer and nothing would be known.
        run.run_until(run.now + 30.0)
        for _ in range(16):
            run.send(10, team="borrower")
        run.send(0, team="owner")
        run.run_until(run.now + 30.0)
    assert (run.watch.contradictions(ENGINE) or 0) >= CASES


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_orders_by_priority_is_never_accused_whatever_its_prompts_and_network(seed: int) -> None:
    run = engine(by_priority=True, seats=4 + seed, seed=seed, jitter_seconds=0.2)
    for _ in range(20):
        run.send(0, team="owner")
        run.run_until(run.now + 2.0)
    end_at = run.now + 600.0
    while run.now < end_at:
        while len(run.waiting) < 15:
            long = run.random.random() < 0.3
            run.send(
                10 + 10 * run.random.randrange(4),
                team=f"borrower {run.random.randrange(3)}",
                prompt_size=5000 if long else 50,
                prefill_seconds=run.random.random() * (5.0 if long else 0.1),
                decode_seconds=run.random.random() * 3.0,
                streaming=run.random.random() < 0.8,
            )
        long = run.random.random() < 0.5
        run.send(
            run.random.choice((0, 0, 1, 10)),
            team="owner",
            prompt_size=5000 if long else 50,
            prefill_seconds=run.random.random() * (8.0 if long else 0.1),
            decode_seconds=run.random.random(),
        )
        run.run_until(run.now + run.random.random())
    assert run.watch.contradictions(ENGINE) is None


def test_long_prompts_of_the_urgent_ones_beside_cached_prompts_of_the_lazy_ones_prove_nothing() -> None:
    # Every urgent request is let in first and gives its first byte last: its prompt takes 20 s, theirs nothing.
    long = {"prompt_size": 20_000, "prefill_seconds": 20.0}
    run = engine(by_priority=True, jitter_seconds=0.0)
    for _ in range(20):
        run.send(0, team="owner", **long)
        run.run_until(run.now + 25.0)
    for _ in range(60):
        for _ in range(16):
            run.send(10, team="borrower", prompt_size=20_000)
        run.send(0, team="owner", **long)
        run.run_until(run.now + 25.0)
    assert run.watch.contradictions(ENGINE) is None


def test_lazy_requests_that_compute_their_prompts_did_not_wait_so_nobody_passed() -> None:
    run = engine(by_priority=True, seats=8, jitter_seconds=0.0)
    for _ in range(20):
        run.send(0, team="owner")
        run.run_until(run.now + 2.0)
    for _ in range(60):
        for _ in range(8):
            run.send(10, team="borrower", prefill_seconds=5.0)
        run.run_until(run.now + 0.1)
        run.send(0, team="owner")
        run.run_until(run.now + 20.0)
    assert run.watch.contradictions(ENGINE) is None


def test_an_engine_that_orders_some_of_the_time_is_not_accused() -> None:
    run = engine(by_priority=False)
    quiet_then_busy(run)
    run.by_priority = True
    quiet_then_busy(run, seconds=30.0)
    assert run.watch.contradictions(ENGINE) is None


def test_other_seats_mean_another_engine() -> None:
    run = engine(by_priority=False)
    quiet_then_busy(run)
    run.watch.know(ENGINE, seats=8)
    assert run.watch.contradictions(ENGINE) is None


def test_long_prompts_that_were_never_seen_on_a_free_engine_prove_nothing() -> None:
    run = engine(by_priority=True, jitter_seconds=0.0)
    for _ in range(20):
        run.send(0, team="owner")
        run.run_until(run.now + 2.0)
    for _ in range(100):
        while len(run.waiting) < 12:
            run.send(10, team="borrower")
        run.send(0, team="owner", prompt_size=20_000, prefill_seconds=20.0)
        run.run_until(run.now + 25.0)
    assert run.watch.contradictions(ENGINE) is None


def test_without_sure_knowledge_of_the_seats_nothing_is_said() -> None:
    run = engine(by_priority=False)
    run.watch.know(ENGINE, seats=None)
    quiet_then_busy(run)
    assert run.watch.contradictions(ENGINE) is None


def test_seats_that_are_fewer_than_believed_make_no_case_of_prompts_that_are_being_computed() -> None:
    run = engine(by_priority=False)
    run.watch.know(ENGINE, seats=400)
    quiet_then_busy(run)
    assert run.watch.contradictions(ENGINE) is None


def test_a_restarted_engine_starts_with_a_clean_record() -> None:
    run = engine(by_priority=False)
    quiet_then_busy(run)
    run.watch.forget(ENGINE)
    assert run.watch.contradictions(ENGINE) is None


def test_a_request_that_is_recalled_is_forgotten_until_it_is_sent_again() -> None:
    watch = PriorityWatch()
    watch.know(ENGINE, seats=1)
    for _ in range(2):
        watch.sent("r", instance_id=ENGINE, team="a", priority=0, slots=1, prompt_size=1, streaming=True, now=0.0)
        watch.ended("r")
    watch.first_byte("r", now=1.0)
    watch.ended("r")
    assert watch.contradictions(ENGINE) is None


def test_removing_an_instance_forgets_its_requests() -> None:
    run = engine(by_priority=False)
    quiet_then_busy(run, seconds=20.0)
    run.watch.remove(ENGINE)
    run.run_until(run.now + 100.0)
    assert run.watch.contradictions(ENGINE) is None
