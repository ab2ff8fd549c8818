"""Drives the dispatch queues: reports what happened, carries out what they decide. One `PoolDriver` per process.

Everything runs on the event loop's thread. A request is known to its home queue (the one it was submitted to) by
`Request.id`; events always go there, also when the fallback's capacity serves it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from fairshare import clock as clocks
from fairshare.clock import Clock
from fairshare.core.decisions import Decision, DispatchQueue, Held, Instance, Recall, Refused, Request, Send
from fairshare.gateway.affinity import PrefixMemory, ResponseMemory
from fairshare.gateway.decision_log import DecisionLog
from fairshare.gateway.engine_http import Failure
from fairshare.gateway.options import Balance, InstanceSpec, PoolSpec
from fairshare.gateway.ports import CoarseTime, Counters, Recorder, RequestRecord, Tracer
from fairshare.gateway.priority_watch import PriorityWatch
from fairshare.gateway.token_count import TokenCounter
from fairshare.gateway.upstream import InstanceConnections
from fairshare.wire.problems import INTERNAL_ERROR, NO_INSTANCE, UPSTREAM_BROKE, Problem

log = logging.getLogger("fairshare.gateway")

UPSTREAM_IDLE_SECONDS = 30.0
"""Idle connections to engines are closed after this long; most engines close theirs after 5 s."""

MEASURE_MEMORY = 1.0 - 1.0 / 64
"""What is measured is measured over about the last 64 requests."""

ASSUMED_BYTES_PER_TOKEN = 4.0
"""Until a model has been measured."""

ASSUMED_TOKENS_PER_SLOT_SECOND = 30.0
"""Until an instance has been measured."""

SHORTEST_TIMER_SECONDS = 0.001
"""A deadline that rounding puts a moment too early must not spin the loop."""


class Place(Enum):
    """Where the dispatch queue has a request."""

    NOWHERE = "nowhere"
    """The queue does not know it: not submitted, refused, ended, or it takes no slot."""

    HELD = "held"
    SENT = "sent"


# A member of an enumeration that is asked of its class takes as long as ten names of the module (CPython 3.11).
_NOWHERE, _HELD, _SENT = Place.NOWHERE, Place.HELD, Place.SENT
_PREFIX = Balance.PREFIX


class Driven(Protocol):
    """A request, as the driver sees it."""

    request: Request
    prefix_keys: Sequence[int]
    """Of its prompt's beginnings, if its pool balances by them (`DrivenPool.balances_by_prefix`)."""
    home: "DrivenPool"
    queue: DispatchQueue
    """The queue that decides about it: its pool's when it arrived, or by which a reload replaced that one."""
    place: Place
    """Set by the driver only."""
    began: bool
    """Whether the client has received something of its answer."""
    instance_id: str
    """The instance it was sent to last."""
    heard_at: float
    """When its engine last sent something for it, or it was sent (coarse time)."""
    ends_at: float
    """When it must have ended (coarse time)."""

    @property
    def silence_limit_seconds(self) -> float:
        """How long its engine may be silent now."""
        ...

    @property
    def id(self) -> str:
        """As its client sees it; two requests may have the same."""
        ...

    @property
    def key_id(self) -> str:
        """Whose key came with it."""
        ...

    def wait(self, held: Held) -> None:
        """It is held; the next call is another."""
        ...

    def send(self, send: Send) -> None:
        """Send it to an engine."""
        ...

    def send_unqueued(self) -> None:
        """Send it to any instance: it takes no slot."""
        ...

    def recall(self, recall: Recall) -> None:
        """Take it back from its engine; report `PoolDriver.aborted` when the connection is closed."""
        ...

    def refuse(self, refused: Refused) -> None:
        """Tell the client that it is not served, and end."""
        ...

    def overdue(self, now: float) -> None:
        """It was silent or alive for too long: end it."""
        ...

    def engine_silent(self) -> None:
        """Its engine is taken for dead: try another if nothing came yet, else end it."""
        ...

    def fail(self, problem: Problem, message: str, *, engine_worked: bool = False) -> None:
        """End it now with this error, whatever it is doing.

        `engine_worked`: its engine is not at fault, so what it has done by now is charged, by estimate.
        """
        ...


class Ratio:
    """A ratio of sums over about the last 64 samples: long requests count for more than short ones."""

    __slots__ = ("_above", "_assumed", "_below")

    def __init__(self, assumed: float) -> None:
        self._above = 0.0
        self._below = 0.0
        self._assumed = assumed

    def add(self, above: float, below: float) -> None:
        if above > 0.0 and below > 0.0:
            self._above = self._above * MEASURE_MEMORY + above
            self._below = self._below * MEASURE_MEMORY + below

    @property
    def measured(self) -> float | None:
        return self._above / self._below if self._below else None

    @property
    def value(self) -> float:
        return self._above / self._below if self._below else self._assumed


class DrivenPool:
    """A pool as the data path sees it: its options, its queue, the connections to its engines, what was measured."""

    def __init__(self, spec: PoolSpec, queue: DispatchQueue) -> None:
        self.spec = spec
        self.queue = queue
        self.instances: dict[str, InstanceConnections] = {}
        self.accepting: dict[str, InstanceConnections] = {}
        """Those that may get new requests."""
        self.context_tokens: dict[str, dict[str, int]] = {}
        """Instance id → what the engine calls a model → its `max_model_len`."""
        self.prefixes = PrefixMemory()
        self.responses = ResponseMemory()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0
        self.related: tuple[DrivenPool, ...] = (self,)
        """It, its fallback and those that fall back on it: whose timers an event here may set."""
        self._bytes_per_token: dict[str, Ratio] = {}
        self._tokens_per_slot_second: dict[str, Ratio] = {}
        self._turn = 0

    def balances_by_prefix(self) -> bool:
        return self.spec.balance is _PREFIX and len(self.instances) > 1

    def bytes_per_token(self, model: str) -> Ratio:
        """Relayed text bytes per completion token of a configured model."""
        ratio = self._bytes_per_token.get(model)
        if ratio is None:
            ratio = self._bytes_per_token[model] = Ratio(ASSUMED_BYTES_PER_TOKEN)
        return ratio

    def tokens_per_slot_second(self, instance_id: str) -> Ratio:
        """Completion tokens per second that one slot of an instance makes."""
        ratio = self._tokens_per_slot_second.get(instance_id)
        if ratio is None:
            ratio = self._tokens_per_slot_second[instance_id] = Ratio(ASSUMED_TOKENS_PER_SLOT_SECOND)
        return ratio

    def next_instance(self, excluding: frozenset[str]) -> str | None:
        """An accepting instance for a request that takes no slot, in turn; None: there is none."""
        candidates = [instance_id for instance_id in self.accepting if instance_id not in excluding]
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def forget_instance(self, instance_id: str) -> None:
        self.accepting.pop(instance_id, None)
        self.context_tokens.pop(instance_id, None)
        self._tokens_per_slot_second.pop(instance_id, None)
        connections = self.instances.pop(instance_id, None)
        if connections is not None:
            connections.retire()


def _nobody_is_told(pool: str, instance_id: str, failure: Failure, detail: str) -> None:
    """Without a supervisor."""


class PoolDriver:
    """Owns the queues, and every request from its arrival to its end."""

    def __init__(self, *, recorder: Recorder, clock: Clock = clocks.monotonic, wall: Clock = clocks.wall) -> None:
        self.clock = clock
        """The pools' clock: the queues' deadlines are on it."""
        self.wall = wall
        self.coarse = CoarseTime(clock())
        self._sweep_gap_seconds = 0.0
        """Between the last two sweeps: what was heard carries the time of the sweep before, it is that late."""
        self.counters = Counters()
        self.token_counter = TokenCounter()
        self.watch = PriorityWatch()
        """Sees every request that an engine is told a priority for."""
        self.draining = False
        """It takes no new connections: answers that begin now say that theirs closes."""
        self.tracer: Tracer | None = None
        """None: no traces are made."""
        self.decisions = DecisionLog(clock)
        """What was decided about the last requests."""
        self.on_unreachable: Callable[[str, str, Failure, str], None] = _nobody_is_told
        """Told of every failed attempt to connect: pool, instance, how it failed, what was found."""
        self._recorder = recorder
        self._pools: dict[str, DrivenPool] = {}
        self._by_model: dict[str, DrivenPool] = {}
        self._exchanges: dict[str, Driven] = {}
        self._to_do: deque[Decision] = deque()
        self._carrying_out = False
        self._all_ended: asyncio.Event | None = None
        """Somebody waits for the end of every request."""

    # ------------------------------------------------------------------ pools and instances

    def add_pool(self, spec: PoolSpec, queue: DispatchQueue) -> None:
        """A pool is new (start or reload). Its instances come with `instance_changed`.

        Raises:
            ValueError: a pool of this name is driven already.
        """
        if spec.name in self._pools:
            raise ValueError(f"pool {spec.name!r} is driven already; remove it first")
        self._pools[spec.name] = DrivenPool(spec, queue)
        self._index()

    def update_pool(self, spec: PoolSpec) -> None:
        """A reload changed models, timeouts or cost: new requests use them, running ones keep theirs.

        Capacity, shares and half-life are changed in the `Pool`; then call `capacity_changed`.
        """
        self._pools[spec.name].spec = spec
        self._index()

    def replace_queue(self, name: str, queue: DispatchQueue) -> None:
        """A reload changed how a pool dispatches: `queue` (see `changed_queue`) has what the old one held and sent."""
        pool = self._pools[name]
        pool.queue = queue
        for exchange in self._of(pool):
            exchange.queue = queue
        self._carry_out(pool, queue.capacity_changed())

    def remove_pool(self, name: str) -> None:
        """A reload dropped a pool: it gets nothing new, what it holds is refused, what runs may finish."""
        pool = self._pools.pop(name)
        pool.related = (pool,)
        self._index()
        for exchange in self._of(pool):
            if exchange.place is Place.HELD:
                exchange.fail(NO_INSTANCE, f"Pool {name!r} was taken out of service. Ask for another model.")
        for instance_id in tuple(pool.instances):
            pool.forget_instance(instance_id)
        self._disarm(pool)

    def instance_changed(self, pool: str, spec: InstanceSpec, instance: Instance) -> None:
        """An instance is new, or its record changed; carries out what follows."""
        driven = self._pools[pool]
        connections = driven.instances.get(instance.id)
        if connections is None or connections.spec != spec:
            if connections is not None:
                connections.retire()
            connections = InstanceConnections(
                spec,
                counters=self.counters,
                coarse=self.coarse,
                unreachable=lambda failure, detail: self.on_unreachable(pool, spec.id, failure, detail),
            )
            driven.instances[instance.id] = connections
        if instance.accepting:
            driven.accepting[instance.id] = connections
        else:
            driven.accepting.pop(instance.id, None)
        self._carry_out(driven, driven.queue.instance_changed(instance))

    def instance_removed(self, pool: str, instance_id: str) -> None:
        """An instance is gone for good; what it runs may finish."""
        driven = self._pools[pool]
        driven.forget_instance(instance_id)
        self._carry_out(driven, driven.queue.instance_removed(instance_id))

    def running_seen(self, pool: str, instance_id: str, running: int) -> None:
        """An instance reported `num_requests_running`."""
        driven = self._pools[pool]
        self._carry_out(driven, driven.queue.running_seen(instance_id, running))

    def capacity_changed(self, pool: str) -> None:
        """The pool's C, shares or half-life were changed in its `Pool`."""
        driven = self._pools[pool]
        self._carry_out(driven, driven.queue.capacity_changed())

    def decided(self, pool: str, decisions: list[Decision]) -> None:
        """The queue of a pool decided something without having been called: another replica's owner did."""
        driven = self._pools.get(pool)
        if driven is not None:
            self._carry_out(driven, decisions)

    def models_seen(self, pool: str, instance_id: str, context_tokens: Mapping[str, int]) -> None:
        """An instance reported its models: what the engine calls each → its `max_model_len`."""
        self._pools[pool].context_tokens[instance_id] = dict(context_tokens)

    def cut_instance(self, pool: str, instance_id: str, *, silent_seconds: float = 1.0) -> int:
        """An instance failed its health check: cut at once what it has sent nothing for in the last `silent_seconds`.

        A stream that has begun ends with an error event; a request of which nothing came goes to another instance, or
        is answered 502. What still flows goes on. Returns how many were cut.
        """
        since = self.coarse.now - silent_seconds - self._sweep_gap_seconds
        cut = 0
        for exchange in tuple(self._exchanges.values()):
            is_there = exchange.instance_id == instance_id and exchange.home.spec.name == pool
            is_silent = exchange.place is not Place.HELD and exchange.heard_at <= since
            if is_there and is_silent and self._is_open(exchange):
                exchange.engine_silent()
                cut += 1
        return cut

    def slots_at(self, pool: str, instance_id: str) -> int:
        """What this gateway has in flight at an instance of a pool, in slots."""
        instances = self._pools[pool].queue.snapshot().instances
        return next((each.in_flight_slots for each in instances if each.id == instance_id), 0)

    def runs_at(self, instance_id: str) -> bool:
        """Whether anything that was sent to an instance has not ended."""
        return any(
            exchange.instance_id == instance_id and exchange.place is not Place.HELD
            for exchange in self._exchanges.values()
        )

    # ------------------------------------------------------------------ what others may read

    @property
    def pools(self) -> Mapping[str, DrivenPool]:
        return self._pools

    def pool_of_model(self, model: str) -> DrivenPool | None:
        """The pool that serves what clients call `model`."""
        return self._by_model.get(model)

    @property
    def models(self) -> Mapping[str, DrivenPool]:
        """What clients may call models → the pool that serves each."""
        return self._by_model

    @property
    def open_requests(self) -> int:
        return len(self._exchanges)

    def open_exchanges(self) -> tuple[Driven, ...]:
        """Every request that has arrived and not ended, the oldest first."""
        return tuple(self._exchanges.values())

    def serving_pool(self, name: str, home: DrivenPool) -> DrivenPool | None:
        """The pool whose capacity a request of `home` uses; None: it was removed since."""
        return home if name == home.spec.name else self._pools.get(name)

    # ------------------------------------------------------------------ events of requests

    def submit(self, exchange: Driven) -> None:
        """A request has arrived: ask its queue."""
        self._open(exchange)
        exchange.place = _HELD
        if exchange.prefix_keys:
            home = exchange.home
            exchange.request.preferred_instances = home.prefixes.preferred(exchange.prefix_keys, home.accepting)
        self._carry_out(exchange.home, exchange.queue.submitted(exchange.request))

    def submit_unqueued(self, exchange: Driven) -> None:
        """A request that takes no slot has arrived: no queue has a say in it."""
        self._open(exchange)
        exchange.send_unqueued()

    def first_byte(self, exchange: Driven) -> None:
        """The first byte of its answer goes to the client."""
        if exchange.place is _SENT:
            self.watch.first_byte(exchange.request.id, now=self.clock())
            self._carry_out(exchange.home, exchange.queue.first_byte(exchange.request.id))

    def aborted(self, exchange: Driven) -> None:
        """The engine's connection of a recalled request is closed."""
        self.watch.ended(exchange.request.id)
        self._carry_out(exchange.home, exchange.queue.aborted(exchange.request.id))

    def reassigned(self, exchange: Driven, excluding: frozenset[str]) -> str | None:
        """Its instance could not be reached: another one, or None."""
        self.watch.ended(exchange.request.id)
        if exchange.place is Place.NOWHERE:
            return exchange.home.next_instance(excluding)
        other = exchange.queue.reassigned(exchange.request.id, excluding)
        if other is not None and exchange.prefix_keys:
            exchange.home.prefixes.sent(exchange.prefix_keys, other)
        return other

    def ended(self, exchange: Driven, record: RequestRecord) -> None:
        """The one place where a request ends: its grant is released, or its wait is over; and its record is written.

        Promise P6 hangs on this being called exactly once for every request that was submitted.
        """
        del self._exchanges[exchange.request.id]
        self.watch.ended(exchange.request.id)
        self.counters.open_requests -= 1
        if self._all_ended is not None and not self._exchanges:
            self._all_ended.set()
        queue, place = exchange.queue, exchange.place
        exchange.place = _NOWHERE
        decisions: list[Decision] = []
        if place is _SENT:
            decisions = queue.released(exchange.request.id, record.cost_units)
        elif place is _HELD:
            decisions = queue.cancelled(exchange.request.id)
        if self._to_do:
            decisions += self._undo(exchange, record)
        self.record(record)
        self._carry_out(exchange.home, decisions)

    def record(self, record: RequestRecord) -> None:
        """Hand over the record of a request that ended."""
        self.decisions.finished(record)
        try:
            self._recorder.finished(record)
        except Exception:
            log.exception("the record of request %s was lost", record.id, extra={"request_id": record.id})

    # ------------------------------------------------------------------ time

    def sweep(self) -> None:
        """Once a second or so: end what is overdue, tick queues whose deadline has passed, close idle connections."""
        now = self.clock()
        self._sweep_gap_seconds, self.coarse.now = now - self.coarse.now, now
        for exchange in tuple(self._exchanges.values()):
            silent_since = exchange.heard_at + self._sweep_gap_seconds
            late = silent_since + exchange.silence_limit_seconds < now or exchange.ends_at < now
            if late and self._is_open(exchange):
                exchange.overdue(now)
        for pool in tuple(self._pools.values()):
            if pool.timer is not None and pool.timer_at <= now:
                self._tick(pool)
            for connections in pool.instances.values():
                connections.sweep(now - UPSTREAM_IDLE_SECONDS)

    async def wait_until_all_ended(self) -> None:
        while self._exchanges:
            self._all_ended = asyncio.Event()
            await self._all_ended.wait()

    def fail_all(self, problem: Problem, message: str) -> None:
        """End every request now, with this error where the client can still be told."""
        for exchange in tuple(self._exchanges.values()):
            if self._is_open(exchange):
                exchange.fail(problem, message, engine_worked=True)

    def close(self) -> None:
        """End everything at once; after it nothing is in flight and every connection to an engine is closing."""
        self.fail_all(UPSTREAM_BROKE, "The gateway was closed.")
        for pool in self._pools.values():
            self._disarm(pool)
            for connections in pool.instances.values():
                connections.close()

    async def wait_until_closed(self) -> None:
        """After `close`: until every connection to an engine is gone."""
        await self.token_counter.close()
        for pool in self._pools.values():
            for connections in pool.instances.values():
                await connections.wait_until_closed()

    # ------------------------------------------------------------------ inside

    def _open(self, exchange: Driven) -> None:
        self._exchanges[exchange.request.id] = exchange
        self.counters.open_requests += 1

    def _is_open(self, exchange: Driven) -> bool:
        """Whether it has not ended: the end of one request may end others, while a loop goes over all of them."""
        return exchange.request.id in self._exchanges

    def _carry_out(self, pool: DrivenPool, decisions: list[Decision]) -> None:
        """Do what a queue decided, in order. What follows from doing it is done after it, never inside it."""
        if decisions:
            to_do = self._to_do
            to_do += decisions
            if not self._carrying_out:
                self._carrying_out = True
                try:
                    while to_do:
                        self._do(to_do.popleft())
                finally:
                    self._carrying_out = False
        # What happens to a guest sets deadlines at home and where it ran: it waits there again, its seat is free here.
        for related in pool.related:
            deadline = related.queue.next_deadline()
            if deadline is not None:  # seldom, and this is asked at every event
                self._arm(related, deadline)

    def _undo(self, exchange: Driven, record: RequestRecord) -> list[Decision]:
        """It ended while decisions about it waited to be carried out: its queue has it in another place than we."""
        queue, request_id = exchange.queue, exchange.request.id
        decisions: list[Decision] = []
        for decision in tuple(self._to_do):
            if decision.request_id == request_id:
                if isinstance(decision, Send):
                    decisions += queue.released(request_id, record.cost_units)
                elif isinstance(decision, Recall):
                    decisions += queue.cancelled(request_id)
                    decisions += queue.aborted(request_id)
        return decisions

    def _do(self, decision: Decision) -> None:
        exchange = self._exchanges.get(decision.request_id)
        if exchange is None:
            return  # it ended since; `_undo` saw to it
        try:
            match decision:
                case Send():
                    exchange.place = _SENT
                    serving = self.serving_pool(decision.pool, exchange.home)
                    if serving is not None:
                        self.decisions.sent(exchange, decision, serving.queue.pool)
                    if exchange.prefix_keys and decision.pool == exchange.home.spec.name:
                        exchange.home.prefixes.sent(exchange.prefix_keys, decision.instance_id)
                    exchange.send(decision)
                case Recall():
                    exchange.place = Place.HELD
                    self.decisions.recalled(exchange, decision)
                    exchange.recall(decision)
                case Refused():
                    exchange.place = Place.NOWHERE
                    self.decisions.refused(exchange, decision)
                    exchange.refuse(decision)
                case Held():
                    self.decisions.held(exchange, decision)
                    exchange.wait(decision)
        except Exception:
            log.exception(
                "request %s: could not carry out %s",
                exchange.id,
                type(decision).__name__,
                extra={"request_id": exchange.id},
            )
            if self._is_open(exchange):
                exchange.fail(INTERNAL_ERROR, "fairshare failed to serve this request; its log says why.")

    def _arm(self, pool: DrivenPool, deadline: float) -> None:
        """One timer per queue. A timer that is too early only ticks in vain, so it is never moved later."""
        if pool.timer is None or deadline < pool.timer_at:
            if pool.timer is not None:
                pool.timer.cancel()
            delay_seconds = max(SHORTEST_TIMER_SECONDS, deadline - self.clock())
            pool.timer = asyncio.get_running_loop().call_later(delay_seconds, self._tick, pool)
            pool.timer_at = deadline

    def _tick(self, pool: DrivenPool) -> None:
        self._disarm(pool)
        self._carry_out(pool, pool.queue.tick())

    @staticmethod
    def _disarm(pool: DrivenPool) -> None:
        if pool.timer is not None:
            pool.timer.cancel()
            pool.timer = None

    def _of(self, pool: DrivenPool) -> list[Driven]:
        return [exchange for exchange in self._exchanges.values() if exchange.home is pool]

    def _index(self) -> None:
        """Pools came, went or changed: who serves which model, and who shares capacity with whom."""
        pools = self._pools.values()
        self._by_model = {model: pool for pool in reversed(pools) for model in pool.spec.models}
        for pool in pools:
            name, fallback = pool.spec.name, pool.spec.fallback
            pool.related = (
                pool,
                *(other for other in pools if other.spec.fallback == name or other.spec.name == fallback),
            )
