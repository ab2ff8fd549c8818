"""Asks a pool's dispatch queue for one request at a time, on the event loop of the program around it.

    async with admission.admit("search") as admitted:
        answer = await call_the_engine(priority=admitted.priority)
        admitted.consumed(Usage(prompt_tokens=..., completion_tokens=...))

Unlike the gateway it does not know the engines: all of them are one place with C slots, whoever is around picks the
engine, and a request that was sent is not taken back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

from fairshare import clock as clocks
from fairshare.clock import Clock
from fairshare.core.decisions import Decision, Instance, Refused, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import ServiceClass, Standing
from fairshare.errors import TryElsewhere
from fairshare.gateway.options import EmbeddedPool
from fairshare.wire.body import MAX_SLOTS
from fairshare.wire.problems import INVALID_REQUEST, Problem, refusal_message, refusal_problem
from fairshare.wire.usage import CostWeights, Usage

log = logging.getLogger("fairshare.integrations")

_ENGINES = "engines"


class TurnedAway(TryElsewhere):
    """The queue is full, or the request waited too long."""

    def __init__(self, refused: Refused, *, pool: str, team: str) -> None:
        super().__init__(refusal_message(refused, pool=pool, team=team))
        self.problem: Problem = refusal_problem(refused.reason)
        self.retry_after_seconds = max(1, round(refused.retry_after_seconds))


class TooWide(ValueError):
    """A request asks for more sequences at once than any may, or for none."""

    problem: Problem = INVALID_REQUEST


class Admitted:
    """A request that may run now. Somebody must call `release`, however it ends; all calls but the first do nothing."""

    def __init__(self, pool: str, team: str, send: Send, end: Callable[[float], None], cost: CostWeights) -> None:
        self.pool = pool
        self.team = team
        self.priority: int | None = send.priority
        """For vLLM with `--scheduling-policy priority`; None (`observe`): tell it nothing."""
        self.standing: Standing = send.standing
        self.held_seconds = send.held_seconds
        self._end: Callable[[float], None] | None = end
        self._cost = cost
        self._consumed: Usage | None = None

    @property
    def released(self) -> bool:
        return self._end is None

    def consumed(self, usage: Usage) -> None:
        """What it has consumed by now; the last word before `release` is charged."""
        self._consumed = usage

    def release(self) -> None:
        """The engine has finished with it, well or not: its slots are free, and its team is charged."""
        end, self._end = self._end, None
        if end is not None:
            end(0.0 if self._consumed is None else self._cost.cost_units(self._consumed))


class Admission:
    """One pool. Everything on one event loop."""

    def __init__(self, options: EmbeddedPool, *, clock: Clock = clocks.monotonic) -> None:
        self.options = options
        self.pool = Pool(options.name, options.capacity, options.shares, options.half_life_seconds, clock)
        # Nothing is recalled: a body that was handed over cannot be fetched back from the program around us.
        hold = replace(options.hold, recall=False)
        engines = Instance(id=_ENGINES, part_slots=options.capacity)
        self._queue = make_queue(self.pool, options.mode, options=hold, instances=(engines,))
        self._clock = clock
        self._numbers = count(1)
        self._undecided: dict[str, asyncio.Future[Send | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Requests that wait now."""
        return self._queue.snapshot().held

    @asynccontextmanager
    async def admit(
        self,
        team: str,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        *,
        slots: int = 1,
        estimated_tokens: int = 0,
    ) -> AsyncGenerator[Admitted]:
        """As `acquire`, and released at the end of the block, whatever happens in it."""
        admitted = await self.acquire(team, service_class, slots=slots, estimated_tokens=estimated_tokens)
        try:
            yield admitted
        finally:
            admitted.release()

    async def acquire(
        self,
        team: str,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        *,
        slots: int = 1,
        estimated_tokens: int = 0,
    ) -> Admitted:
        """Waits until the request may run. Cancelling gives its place up.

        Args:
            slots: sequences that it runs at once; more than C are fine, as in the gateway, to the same bound.

        Raises:
            TurnedAway: the queue is full, or it waited `longest_wait`.
            TooWide: `slots` is below 1, or above what one request may ask for.
        """
        if not 1 <= slots <= MAX_SLOTS:
            raise TooWide(f"slots must be from 1 to {MAX_SLOTS}, got {slots}; split the request")
        request = Request(
            id=str(next(self._numbers)),
            team=team,
            service_class=service_class,
            slots=slots,
            estimated_tokens=estimated_tokens,
            recallable=False,
        )
        undecided = self._undecided[request.id] = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(self._queue.submitted(request))
            decision = await undecided
        except BaseException:
            if self._undecided.pop(request.id, None) is not None:
                self._carry_out(self._queue.cancelled(request.id))
            elif undecided.done() and not undecided.cancelled() and isinstance(undecided.result(), Send):
                self._carry_out(self._queue.released(request.id, 0.0))  # it was sent and cancelled in the same turn
            raise
        if isinstance(decision, Refused):
            raise TurnedAway(decision, pool=self.options.name, team=team)
        return self._admitted(request, decision)

    def _admitted(self, request: Request, send: Send) -> Admitted:
        def end(cost_units: float) -> None:
            bound.cancel()
            self._carry_out(self._queue.released(request.id, cost_units))

        admitted = Admitted(self.options.name, request.team, send, end, self.options.cost)

        def overdue() -> None:
            log.warning(
                "pool %s: a request of team %s was not released in %g s (longest_request); its slots are free again",
                self.options.name,
                request.team,
                self.options.longest_request_seconds,
            )
            admitted.release()

        bound = asyncio.get_running_loop().call_later(self.options.longest_request_seconds, overdue)
        return admitted

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        waiting = list(decisions)
        for decision in waiting:  # grows while it is walked
            if isinstance(decision, Send | Refused):
                undecided = self._undecided.pop(decision.request_id)
                if not undecided.cancelled():
                    undecided.set_result(decision)
                elif isinstance(decision, Send):
                    waiting += self._queue.released(decision.request_id, 0.0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._queue.next_deadline()
        if deadline is not None:
            delay_seconds = max(0.001, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_seconds, self.tick)

    def tick(self) -> None:
        """Time passed: turn away who waited too long. Its own timer calls it."""
        self._carry_out(self._queue.tick())
