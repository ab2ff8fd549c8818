"""A dispatch queue before the stand-in engine's scheduler, in virtual time: tokens per team and window."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fairshare import Pool
from fairshare.core.apportion import Share
from fairshare.core.decisions import Decision, HoldOptions, Instance, Mode, Recall, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.engine.scheduler import Event, Scheduler, SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Clients:
    """One team's load: a burst of `burst` requests, a closed loop of `loop` clients, or `rate` arrivals a second."""

    team: str
    burst: int = 0
    loop: int = 0
    rate: float = 0.0
    start: float = 0.0


@dataclass
class Call:
    """One request: what it asks for and when things happened to it."""

    clients: Clients
    prompt_tokens: int
    output_tokens: int
    submitted_at: float
    first_token_at: float | None = None
    done: bool = False


class Coupled:
    """C = 16 slots over one engine of a step of 10 ms + 20 us a token; prompts and outputs of 50 to 150 tokens."""

    def __init__(
        self, mode: Mode, shares: Mapping[str, Share], *, max_num_seqs: int = 16, window_seconds: float = 1.0
    ) -> None:
        self.rng = random.Random(1)
        self.now = 0.0
        self.pool = Pool("pool", 16, shares, 0.0, clock=lambda: self.now)
        engine = Instance(id="engine", part_slots=16, seats=max_num_seqs)
        self.queue = make_queue(self.pool, mode, options=HoldOptions(abort_grace_seconds=0.0), instances=[engine])
        self.engine = Scheduler(SchedulerConfig(max_num_seqs=max_num_seqs))
        self.window_seconds = window_seconds
        self.calls: dict[str, Call] = {}
        self.arrivals: list[tuple[float, int, Clients]] = []
        self.numbers = itertools.count()
        self.done_tokens: Counter[str] = Counter()
        self.marks: list[Counter[str]] = [Counter()]
        """Tokens of each team at the end of each window."""

    def run(self, clients: Iterable[Clients], until: float) -> Coupled:
        for each in clients:
            for _ in range(each.burst + each.loop):
                self._arrive(each.start, each)
            if each.rate:
                self._arrive(each.start + self.rng.expovariate(each.rate), each)
        while self.now < until:
            mark_at = len(self.marks) * self.window_seconds
            arrival_at = self.arrivals[0][0] if self.arrivals else until
            deadline = self.queue.next_deadline()
            events = self.engine.advance(min(mark_at, arrival_at, until, until if deadline is None else deadline))
            self.now = max(self.now, self.engine.now)
            for event in events:
                self._happened(event)
            if deadline is not None and deadline <= self.now:
                self._carry_out(self.queue.tick())
            while self.arrivals and self.arrivals[0][0] <= self.now:
                _, _, who = heapq.heappop(self.arrivals)
                self._submit(who)
                if who.rate:
                    self._arrive(self.now + self.rng.expovariate(who.rate), who)
            if mark_at <= self.now:
                self.marks.append(self._tokens())
        return self

    def share(self, team: str, start: float, end: float) -> float:
        """The team's part of the tokens between two ends of windows."""
        first, last = (self.marks[round(at / self.window_seconds)] for at in (start, end))
        made = {name: last[name] - first[name] for name in last}
        return made.get(team, 0) / sum(made.values())

    def windows(self, team: str, start: float, end: float) -> list[float]:
        """The team's part of the tokens in each window between."""
        numbers = range(round(start / self.window_seconds), round(end / self.window_seconds))
        return [self.share(team, n * self.window_seconds, (n + 1) * self.window_seconds) for n in numbers]

    def times_to_first_token(self, team: str) -> list[float]:
        return sorted(
            call.first_token_at - call.submitted_at
            for call in self.calls.values()
            if call.clients.team == team and call.first_token_at is not None
        )

    def _arrive(self, at: float, clients: Clients) -> None:
        heapq.heappush(self.arrivals, (at, next(self.numbers), clients))

    def _submit(self, clients: Clients) -> None:
        request_id = f"{clients.team}-{len(self.calls)}"
        self.calls[request_id] = Call(clients, self.rng.randint(50, 150), self.rng.randint(50, 150), self.now)
        self._carry_out(self.queue.submitted(Request(id=request_id, team=clients.team)))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            call = self.calls[decision.request_id]
            if isinstance(decision, Send):
                self.engine.add(
                    decision.request_id,
                    prompt_tokens=call.prompt_tokens,
                    output_tokens=call.output_tokens,
                    priority=decision.priority or 0,
                )
            elif isinstance(decision, Recall):
                self.engine.abort(decision.request_id)
                self._carry_out(self.queue.aborted(decision.request_id))

    def _happened(self, event: Event) -> None:
        call = self.calls[event.request_id]
        if call.first_token_at is None:
            call.first_token_at = self.now
            self._carry_out(self.queue.first_byte(event.request_id))
        if event.finished:
            call.done = True
            self.done_tokens[call.clients.team] += call.output_tokens
            self._carry_out(self.queue.released(event.request_id, call.prompt_tokens + 2 * call.output_tokens))
            if call.clients.loop:
                self._submit(call.clients)

    def _tokens(self) -> Counter[str]:
        tokens = Counter(self.done_tokens)
        for request_id in self.engine.running + self.engine.waiting:
            tokens[self.calls[request_id].clients.team] += self.engine.generated(request_id)
        return tokens
