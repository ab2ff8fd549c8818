"""A seat simulator: engines that run sequences in seats, no KV cache, virtual time. Drives any dispatch queue.

It is obviously simple on purpose: the dispatch rules are judged by what runs here, not by what the queue says of
itself. Each sequence of a request takes one seat for the request's duration; an engine starts waiting sequences in
the order (priority, arrival), and a waiting one never displaces a running one, as in vLLM.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fairshare import Pool, ServiceClass
from fairshare.core.decisions import Decision, Held, HoldOptions, Instance, Mode, Recall, Refused, Request, Send
from fairshare.core.dispatch import make_queue

Draw = Callable[[random.Random], float]


def between(low: float, high: float) -> Draw:
    """Durations drawn uniformly, in seconds."""
    return lambda rng: rng.uniform(low, high)


@dataclass
class Load:
    """One team's clients. Closed loop of `clients`, or a burst of `count`, or Poisson arrivals at `rate` a second."""

    team: str
    duration: Draw
    clients: int = 0
    count: int = 0
    rate: float = 0.0
    start: float = 0.0
    stop: float = float("inf")
    on_off_seconds: tuple[float, float] | None = None
    """Closed loop only: submit for the first, pause for the second, and again."""
    slots: Callable[[random.Random], int] = lambda rng: 1
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    estimated_tokens: int = 0
    streams: bool = True
    """Whether the client sees the first byte when it starts; else only when it ends."""


@dataclass
class Job:
    id: str
    load: Load
    submitted_at: float
    duration: float
    slots: int
    left: int = 0
    sent_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    instance: str = ""
    priority: int = 0
    attempt: int = 0
    waited: float = 0.0
    recalls: int = 0
    refused: str = ""

    @property
    def team(self) -> str:
        return self.load.team


class Engine:
    """Seats of one engine; sequences wait in a heap on (priority, arrival)."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.running: Counter[str] = Counter()
        self.waiting: list[tuple[int, int, str, int]] = []
        self.busy = 0


@dataclass
class World:
    """A pool, its queue, its engines and its clients in virtual time."""

    capacity: int
    shares: Mapping[str, object]
    engines: Mapping[str, tuple[int, int, int | None]] | None = None
    """Name → (part of C, real seats, known seats). Default: one engine, seats = C, known."""
    mode: Mode = Mode.HOLD
    options: HoldOptions = field(default_factory=HoldOptions)
    half_life: float = 0.0
    seed: int = 1
    abort_seconds: float = 0.0
    window_seconds: float = 10.0
    check: Callable[[World], None] | None = None
    cost_per_slot_second: float = 1.0
    scrape_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.rng = random.Random(self.seed)
        self.pool = Pool("pool", self.capacity, self.shares, self.half_life, clock=lambda: self.now)
        layout = self.engines or {"e0": (self.capacity, self.capacity, self.capacity)}
        self.running = {name: Engine(seats) for name, (_, seats, _) in layout.items()}
        self.queue = make_queue(
            self.pool,
            self.mode,
            options=self.options,
            instances=[Instance(id=name, part_slots=part, seats=known) for name, (part, _, known) in layout.items()],
        )
        self.jobs: dict[str, Job] = {}
        self.held: set[str] = set()
        self.in_flight: dict[str, Job] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.slot_seconds: Counter[str] = Counter()
        self.windows: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.idle_slot_seconds_while_held = 0.0
        self.recalled: list[Job] = []
        self.busy_by_team: Counter[str] = Counter()
        if self.scrape_seconds:
            self.at(self.scrape_seconds, self._scrape)

    # -- time

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), what))

    def run(self, loads: Iterable[Load], until: float, stop_when: Callable[[World], bool] | None = None) -> World:
        for load in loads:
            self._start(load)
        while self.events or self.queue.next_deadline() is not None:
            due = self.queue.next_deadline()
            next_event = self.events[0][0] if self.events else float("inf")
            time = min(next_event, due if due is not None else float("inf"))
            if time > until:
                break
            self._pass_time(max(self.now, time))
            if due is not None and due <= next_event:
                self.carry_out(self.queue.tick())
            else:
                heapq.heappop(self.events)[2]()
            if self.check is not None:
                self.check(self)
            if stop_when is not None and stop_when(self):
                return self
        self._pass_time(until)
        return self

    def _pass_time(self, time: float) -> None:
        while self.now < time:
            window = int(self.now // self.window_seconds)
            end = min(time, (window + 1) * self.window_seconds)
            step = end - self.now
            busy = 0
            for team, slots in self.busy_by_team.items():
                self.slot_seconds[team] += slots * step
                self.windows[window][team] += slots * step
                busy += slots
            if self.held:
                self.idle_slot_seconds_while_held += max(0, self.capacity - busy) * step
            self.now = end if end > self.now else time

    def share(self, team: str, start: float, end: float) -> float:
        """The team's part of the slot-seconds that ran in whole windows between two times."""
        windows = range(round(start / self.window_seconds), round(end / self.window_seconds))
        mine = sum(self.windows[w][team] for w in windows)
        return mine / max(1e-12, sum(sum(self.windows[w].values()) for w in windows))

    # -- clients

    def _start(self, load: Load) -> None:
        for _ in range(load.count):
            self.at(load.start, lambda load=load: self.submit(load))
        for _ in range(load.clients):
            self.at(load.start, lambda load=load: self.submit(load))
        if load.rate:
            self.at(load.start + self.rng.expovariate(load.rate), lambda load=load: self._poisson(load))

    def _poisson(self, load: Load) -> None:
        if self.now < load.stop:
            self.submit(load)
            self.at(self.now + self.rng.expovariate(load.rate), lambda: self._poisson(load))

    def _again(self, load: Load) -> None:
        if not load.clients or self.now >= load.stop:
            return
        if load.on_off_seconds is not None:
            on, off = load.on_off_seconds
            into = (self.now - load.start) % (on + off)
            if into >= on:
                self.at(self.now + on + off - into, lambda: self.submit(load))
                return
        self.submit(load)

    def submit(self, load: Load) -> Job:
        job = Job(
            id=f"{load.team}-{next(self.numbers)}",
            load=load,
            submitted_at=self.now,
            duration=load.duration(self.rng),
            slots=load.slots(self.rng),
        )
        self.jobs[job.id] = job
        self.carry_out(
            self.queue.submitted(
                Request(
                    id=job.id,
                    team=job.team,
                    service_class=load.service_class,
                    slots=job.slots,
                    estimated_tokens=load.estimated_tokens,
                    body_bytes=100,
                )
            )
        )
        return job

    def cancel(self, job: Job) -> None:
        """The client leaves."""
        if job.id in self.held:
            self.held.discard(job.id)
            self.carry_out(self.queue.cancelled(job.id))
        elif job.id in self.in_flight:
            self._abort(job)
            self._end(job)

    # -- carrying decisions out

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            job = self.jobs[decision.request_id]
            match decision:
                case Send():
                    self.held.discard(job.id)
                    self._send(job, decision)
                case Held():
                    self.held.add(job.id)
                case Recall():
                    self.recalled.append(job)
                    job.recalls += 1
                    self._abort(job, self.abort_seconds)
                    self.held.add(job.id)
                    self.at(self.now + self.abort_seconds, lambda id=job.id: self.carry_out(self.queue.aborted(id)))
                case Refused():
                    self.held.discard(job.id)
                    job.refused = decision.reason
                    self.at(self.now + decision.retry_after_seconds, lambda load=job.load: self._again(load))

    def _send(self, job: Job, send: Send) -> None:
        job.instance, job.priority, job.sent_at = send.instance_id, send.priority or 0, self.now
        job.left, job.attempt, job.started_at = job.slots, job.attempt + 1, None
        self.in_flight[job.id] = job
        engine = self.running[job.instance]
        for _ in range(job.slots):
            heapq.heappush(engine.waiting, (job.priority, next(self.numbers), job.id, job.attempt))
        # Engines take in what arrived before they choose, so requests of one instant are ordered by priority.
        self.at(self.now, lambda: self._fill(job.instance))

    def _fill(self, name: str) -> None:
        engine = self.running[name]
        while engine.waiting and engine.busy < engine.seats:
            _, _, job_id, attempt = heapq.heappop(engine.waiting)
            job = self.jobs[job_id]
            if job.id not in self.in_flight or job.attempt != attempt:
                continue
            engine.busy += 1
            engine.running[job_id] += 1
            self.busy_by_team[job.team] += 1
            if job.started_at is None:
                job.started_at = self.now
                if job.load.streams:
                    self.carry_out(self.queue.first_byte(job.id))
            self.at(self.now + job.duration, lambda job=job, attempt=attempt: self._sequence_ends(job, attempt))

    def _sequence_ends(self, job: Job, attempt: int) -> None:
        if job.id not in self.in_flight or job.attempt != attempt:
            return
        engine = self.running[job.instance]
        engine.busy -= 1
        engine.running[job.id] -= 1
        self.busy_by_team[job.team] -= 1
        job.left -= 1
        if job.left == 0:
            self._end(job)
        self._fill(job.instance)

    def _abort(self, job: Job, after_seconds: float = 0.0) -> None:
        """The engine runs it until it notices that the connection is closed."""
        name, engine = job.instance, self.running[job.instance]
        ran = engine.running.pop(job.id, 0)
        self.in_flight.pop(job.id, None)
        job.attempt += 1

        def stop() -> None:
            engine.busy -= ran
            self.busy_by_team[job.team] -= ran
            self._fill(name)

        self.at(self.now + after_seconds, stop)

    def _end(self, job: Job) -> None:
        self.in_flight.pop(job.id, None)
        job.ended_at = self.now
        self.running[job.instance].running.pop(job.id, None)
        self.carry_out(self.queue.released(job.id, job.duration * job.slots * self.cost_per_slot_second))
        self._again(job.load)

    def _scrape(self) -> None:
        for name, engine in self.running.items():
            self.carry_out(self.queue.running_seen(name, engine.busy))
        self.at(self.now + self.scrape_seconds, self._scrape)

    # -- measures

    def waits(self, team: str, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds from submission to the first sequence running, of the requests that started."""
        return sorted(
            job.started_at - job.submitted_at
            for job in self.jobs.values()
            if job.team == team and job.started_at is not None and start <= job.submitted_at < end
        )

    def done(self, team: str, service_class: ServiceClass | None = None) -> int:
        return sum(
            job.ended_at is not None and job.team == team and service_class in (None, job.load.service_class)
            for job in self.jobs.values()
        )
