"""Watches the engines of one pool: health, load, what they tell of themselves; C and its parts follow.

One loop per instance asks /health, and every other time /metrics. An instance that fails is taken out, for longer each
time it fails again soon; C = floor(capacity x accepting / configured) follows through the pool and its queue.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from fairshare import clock as clocks
from fairshare.clock import Clock
from fairshare.core.apportion import apportion
from fairshare.core.decisions import Instance
from fairshare.core.trim import Trim
from fairshare.gateway.engine_http import Ask, EngineSilent, Failure, ask
from fairshare.gateway.findings import Finding, Health, Seen, Severity, find
from fairshare.gateway.options import InstanceSpec, PoolSpec
from fairshare.gateway.priority_watch import PriorityWatch
from fairshare.gateway.scrape import ASK_SECONDS, EngineFacts, EngineLoad, discover, scrape
from fairshare.gateway.status import InstanceReport

log = logging.getLogger("fairshare.instances")

CHECK_SECONDS = 1.0
"""From the end of one health check to the next."""

SCRAPE_EVERY = 2
"""A scrape accompanies every n-th health check: it costs the engine more than the check does."""

FAILURES_TO_TAKE_OUT = 3
"""Failed checks in a row; one may be a hiccup of a busy engine."""

OUT_SECONDS = 1.0
"""How long an instance stays out at least, the first time; doubled each time it fails again soon."""

LONGEST_OUT_SECONDS = 60.0

FORGIVEN_SECONDS = 60.0
"""Being healthy this long halves the time out again."""

SCRAPES_KEPT = 15

SCRAPE_WINDOW = f"{SCRAPES_KEPT * SCRAPE_EVERY * CHECK_SECONDS:.0f} s"
"""How long the kept scrapes reach back, in words."""


class Driver(Protocol):
    """What the supervisor tells the data path (see `PoolDriver`)."""

    @property
    def watch(self) -> PriorityWatch: ...

    def instance_changed(self, pool: str, spec: InstanceSpec, instance: Instance) -> None: ...

    def instance_removed(self, pool: str, instance_id: str) -> None: ...

    def running_seen(self, pool: str, instance_id: str, running: int) -> None: ...

    def capacity_changed(self, pool: str) -> None: ...

    def models_seen(self, pool: str, instance_id: str, context_tokens: Mapping[str, int]) -> None: ...

    def cut_instance(self, pool: str, instance_id: str) -> int: ...

    def slots_at(self, pool: str, instance_id: str) -> int: ...

    def runs_at(self, instance_id: str) -> bool: ...


class Capacity(Protocol):
    """C of one pool (see `Pool`)."""

    @property
    def capacity(self) -> int: ...

    def set_capacity(self, capacity: int) -> int: ...


@dataclass(slots=True)
class InstanceHealth:
    """Whether one instance is fit to get requests, from its health checks. Pure; `now` on one monotone clock."""

    fit: bool = False
    """An instance that has not been asked yet gets nothing."""
    failures: int = 0
    """Failed checks in a row."""
    failure: Failure | None = None
    """How the last check failed; None: it did not."""
    trouble: str = ""
    """The same as a part of a sentence."""
    times_out: int = 0
    """How often it was taken out lately; long health halves what follows from it."""
    out_until: float = 0.0
    fit_since: float = 0.0

    @property
    def answers(self) -> bool:
        """Its last check was answered well; it may still have to stay out for a while."""
        return self.failure is None and self.times_out > 0

    def succeeded(self, now: float) -> None:
        """A check was answered well."""
        self.failures = 0
        self.failure = None
        self.trouble = ""
        if not self.fit and now >= self.out_until:
            self.fit = True
            self.fit_since = now

    def failed(self, now: float, failure: Failure, trouble: str) -> None:
        """A check was answered badly or not at all."""
        self.failures += 1
        self.failure = failure
        self.trouble = trouble
        if self.fit and self.failures >= FAILURES_TO_TAKE_OUT:
            self.fit = False
            forgiven = int((now - self.fit_since) / FORGIVEN_SECONDS)
            self.times_out = max(0, self.times_out - forgiven) + 1
            self.out_until = now + min(LONGEST_OUT_SECONDS, OUT_SECONDS * 2.0 ** (self.times_out - 1))


@dataclass(slots=True, eq=False)
class _Watched:
    """One instance and all that is known of it."""

    spec: InstanceSpec
    health: InstanceHealth = field(default_factory=InstanceHealth)
    checks: int = 0
    facts: EngineFacts | None = None
    """None: it never answered, or it was silent since and may have come back with other flags."""
    loads: deque[EngineLoad] = field(default_factory=lambda: deque[EngineLoad](maxlen=SCRAPES_KEPT))
    trim: Trim = field(default_factory=Trim)
    """What adaptive capacity takes of its part; nothing where the pool has it off."""
    told: Instance | None = None
    """What the data path was told last."""
    news: bool = False
    """It was scraped, or discovered, and the data path does not know yet."""
    task: "asyncio.Task[None] | None" = None
    leaves_by: float = 0.0
    """While it leaves: when nothing that was sent there can still run."""

    @property
    def seats(self) -> int | None:
        """What the engine reports counts before what the configuration says."""
        reported = self.facts.max_num_seqs if self.facts is not None else None
        return reported if reported is not None else self.spec.max_num_seqs

    @property
    def load(self) -> EngineLoad | None:
        return self.loads[-1] if self.loads else None


class InstanceSupervisor:
    """Keeps one pool's capacity and instances true to what the engines do. Everything on the event loop's thread."""

    def __init__(
        self,
        spec: PoolSpec,
        *,
        pool: Capacity,
        driver: Driver,
        ask: Ask = ask,
        clock: Clock = clocks.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        also_found: Callable[[], Sequence[Finding]] = lambda: (),
        decides: Callable[[], bool] = lambda: True,
    ) -> None:
        """`decides`: whether this process knows all requests of the pool; a replica that asks another one does not."""
        self._spec = spec
        self._decides = decides
        self._also_found = also_found
        self._pool = pool
        self._driver = driver
        self._watch = driver.watch
        self._ask = ask
        self._clock = clock
        self._sleep = sleep
        self._watched = {instance.id: _Watched(instance) for instance in spec.instances}
        self._leaving: dict[str, _Watched] = {}
        """Instances that no longer belong to the pool and still run something."""
        self._accepting: set[str] = set()
        self._whole_parts: dict[str, int] = {}
        """Of the accepting instances, before any trim."""
        self._parts: dict[str, int] = {}
        self._logged: dict[tuple[str, str, str | None], Finding] = {}
        self._running = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Asks every instance once, tells the data path, then keeps watching. Takes as long as the slowest answer."""
        self._running = True
        await self._check_all(self._watched.values())
        for watched in self._watched.values():
            self._keep_watching(watched)

    async def stop(self) -> None:
        """Stops watching; what was told stays."""
        self._running = False
        watching = [*self._watched.values(), *self._leaving.values()]
        tasks = [watched.task for watched in watching if watched.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reconfigure(self, spec: PoolSpec) -> None:
        """A reload: instances come and go, the capacity may be another. New instances are asked before they count.

        An instance whose settings changed under the same url keeps its health.
        """
        self._spec = spec
        wanted = {instance.id: instance for instance in spec.instances}
        for instance_id in [known for known in self._watched if known not in wanted]:
            self._leave(instance_id)
        new: list[_Watched] = []
        for instance_id, instance in wanted.items():
            watched = self._watched.get(instance_id)
            if watched is None and (watched := self._leaving.pop(instance_id, None)) is not None:
                self._watched[instance_id] = watched  # it came back before its last request ended
            if watched is None:
                watched = self._watched[instance_id] = _Watched(instance)
                new.append(watched)
            elif watched.spec != instance:
                watched.spec = instance
                watched.told = None
        if not spec.trim:
            for watched in self._watched.values():
                watched.trim = Trim()
        # In the order of the configuration, which is the order of reports.
        self._watched = {instance_id: self._watched[instance_id] for instance_id in wanted}
        await self._check_all(new)
        if self._running:
            for watched in new:
                self._keep_watching(watched)

    def _leave(self, instance_id: str) -> None:
        """It gets nothing new; while something runs there it is still watched, so that its death is noticed."""
        watched = self._watched.pop(instance_id)
        if watched.told is None or not self._driver.runs_at(instance_id):
            self._forget(watched)
            return
        watched.leaves_by = self._clock() + self._spec.timeouts.longest_request_seconds
        watched.told = Instance(id=instance_id, part_slots=0, seats=watched.seats, accepting=False)
        self._leaving[instance_id] = watched
        self._driver.instance_changed(self._spec.name, watched.spec, watched.told)

    def _check_leaving(self, watched: _Watched) -> None:
        instance_id = watched.spec.id
        if not watched.health.fit:
            self._cut(instance_id)
        if not self._driver.runs_at(instance_id) or self._clock() >= watched.leaves_by:
            del self._leaving[instance_id]
            self._forget(watched)

    def _forget(self, watched: _Watched) -> None:
        if watched.task is not None:
            watched.task.cancel()
        self._watch.remove(watched.spec.id)
        if watched.told is not None:
            self._driver.instance_removed(self._spec.name, watched.spec.id)

    def _keep_watching(self, watched: _Watched) -> None:
        watched.task = asyncio.create_task(self._loop(watched), name=f"watch {watched.spec.id}")

    async def _loop(self, watched: _Watched) -> None:
        while True:
            await self._sleep(CHECK_SECONDS)
            try:
                await self.check(watched.spec.id)
            except Exception:
                # The watch must outlive whatever one check runs into; the next one is a second away.
                log.exception("checking %s failed inside fairshare", watched.spec.id)

    def told(self) -> list[Instance]:
        """The instances as the data path knows them, for a queue that takes over from another."""
        return [watched.told for watched in self._watched.values() if watched.told is not None]

    # ------------------------------------------------------------------ checks

    async def check(self, instance_id: str) -> None:
        """One health check of one instance, and what follows from it."""
        watched = self._watched.get(instance_id) or self._leaving[instance_id]
        await self._ask_health(watched)
        if self._watched.get(instance_id) is watched:  # not removed meanwhile
            self._settle()
        elif self._leaving.get(instance_id) is watched:
            self._check_leaving(watched)

    def connection_failed(self, instance_id: str, failure: Failure, trouble: str) -> None:
        """The data path could not connect to an instance: counts as a failed check, and is quicker than one."""
        watched = self._watched.get(instance_id)
        if watched is not None and watched.health.fit:
            self._failed(watched, failure, trouble)
            if not watched.health.fit:
                self._settle()

    async def _check_all(self, many: Iterable[_Watched]) -> None:
        await asyncio.gather(*(self._ask_health(watched) for watched in many))
        self._settle()

    async def _ask_health(self, watched: _Watched) -> None:
        spec = watched.spec
        watched.checks += 1
        try:
            answer = await self._ask(
                "GET", f"{spec.url}/health", api_key=spec.api_key, ca_file=spec.ca_file, timeout_seconds=ASK_SECONDS
            )
        except EngineSilent as silent:
            if silent.failure is not Failure.NOT_ASKED:
                self._failed(watched, silent.failure, silent.detail)
            return
        if answer.status != 200:
            # vLLM answers 503 when its engine process has died; nothing it answers then is an answer.
            self._failed(watched, Failure.BROKEN, f"/health answers {answer.status}")
            return
        if watched.facts is None:
            watched.facts = await discover(self._ask, spec)
            self._saw(watched, watched.facts.load)
        elif watched.checks % SCRAPE_EVERY == 0:
            self._saw(watched, await scrape(self._ask, spec))
        watched.health.succeeded(self._clock())

    def _failed(self, watched: _Watched, failure: Failure, trouble: str) -> None:
        watched.health.failed(self._clock(), failure, trouble)
        if failure is not Failure.TOO_SLOW:
            # It may have been restarted with other flags; what it did before says nothing about it now.
            watched.facts = None
            watched.loads.clear()
            watched.trim = Trim()
            self._watch.forget(watched.spec.id)

    def _saw(self, watched: _Watched, load: EngineLoad | None) -> None:
        watched.news = True
        if load is None:
            watched.loads.clear()
            watched.trim.silent()
            return
        watched.loads.append(load)
        part_slots = self._whole_parts.get(watched.spec.id)
        if self._spec.trim and not self._decides():
            watched.trim.silent()  # nobody can tell here whether a queue is of requests beyond the part
        elif self._spec.trim and part_slots is not None:
            in_flight_slots = self._driver.slots_at(self._spec.name, watched.spec.id)
            watched.trim.scraped(load.waiting, in_flight_slots=in_flight_slots, part_slots=part_slots)

    # ------------------------------------------------------------------ what follows

    def _settle(self) -> None:
        """Tells pool and data path what is true now, if it is not what they were told, and logs what is new."""
        name = self._spec.name
        accepting = self._those_accepting()
        capacity = self._spec.capacity * len(accepting) // max(1, len(self._watched))
        even = Fraction(1, max(1, len(accepting)))
        self._whole_parts = apportion(capacity, dict.fromkeys(accepting, even))
        self._parts = {
            instance_id: self._watched[instance_id].trim.effective(part)
            for instance_id, part in self._whole_parts.items()
        }
        capacity = sum(self._parts.values())
        lost = self._accepting - accepting
        self._accepting = accepting

        changed = self._pool.capacity != capacity
        if changed:
            self._pool.set_capacity(capacity)
        for instance_id, watched in self._watched.items():
            instance = Instance(
                id=instance_id,
                part_slots=self._parts.get(instance_id, 0),
                seats=watched.seats,
                accepting=instance_id in accepting,
            )
            if instance != watched.told:
                watched.told = instance
                self._driver.instance_changed(name, watched.spec, instance)
        if changed:
            self._driver.capacity_changed(name)
        for watched in self._watched.values():
            if watched.news:
                watched.news = False
                self._tell_news(watched)
        for instance_id in lost & self._watched.keys():
            self._cut(instance_id)
        self.log_findings()

    def _cut(self, instance_id: str) -> None:
        cut = self._driver.cut_instance(self._spec.name, instance_id)
        if cut:
            log.warning("%d silent requests at %s were cut or sent elsewhere", cut, instance_id)

    def _tell_news(self, watched: _Watched) -> None:
        if watched.facts is not None and watched.facts.context_tokens is not None:
            lengths = {model: length for model, length in watched.facts.context_tokens.items() if length is not None}
            self._driver.models_seen(self._spec.name, watched.spec.id, lengths)
        if watched.load is not None:
            self._driver.running_seen(self._spec.name, watched.spec.id, watched.load.running)
            # Several schedulers behind one port order their own queues only.
            self._watch.know(watched.spec.id, seats=watched.seats if watched.load.schedulers == 1 else None)

    def _those_accepting(self) -> set[str]:
        """The fit instances; when there is none, those that answer again and only have not been out long enough; when
        there is none of these, those that are only too slow: taking out the last one helps nobody.
        """
        fit = {instance_id for instance_id, watched in self._watched.items() if watched.health.fit}
        fit = fit or {instance_id for instance_id, watched in self._watched.items() if watched.health.answers}
        if fit:
            return fit
        return {
            instance_id
            for instance_id, watched in self._watched.items()
            if watched.health.failure is Failure.TOO_SLOW and watched.facts is not None
        }

    # ------------------------------------------------------------------ what is said

    def found(self) -> list[Finding]:
        """What an operator should know about the pool now, the gravest first."""
        found = find(
            self._spec,
            {instance_id: self._seen(watched) for instance_id, watched in self._watched.items()},
            capacity_slots=self._pool.capacity,
            parts=self._parts,
            scrape_window=SCRAPE_WINDOW,
        )
        return sorted([*found, *self._also_found()], key=lambda finding: finding.severity is not Severity.ERROR)

    @property
    def accepting(self) -> Set[str]:
        """The instances that get requests."""
        return self._accepting

    def reports(self) -> list[InstanceReport]:
        """What is known of each instance, in the order of the configuration; those that leave come last."""
        return [
            InstanceReport(
                id=instance_id,
                healthy=instance_id in self._accepting,
                running=watched.load.running if watched.load is not None else None,
                waiting=watched.load.waiting if watched.load is not None else None,
                kv_usage=watched.load.kv_usage if watched.load is not None else None,
                preemptions=watched.load.preemptions_total if watched.load is not None else None,
                version=watched.facts.version if watched.facts is not None else None,
                leaving=instance_id in self._leaving,
                trimmed_slots=self._trimmed(watched),
            )
            for instance_id, watched in (*self._watched.items(), *self._leaving.items())
        ]

    def _seen(self, watched: _Watched) -> Seen:
        loads = watched.loads if len(watched.loads) == SCRAPES_KEPT else ()
        return Seen(
            health=self._health_of(watched),
            trouble=watched.health.trouble,
            facts=watched.facts,
            kv_tokens=watched.load.kv_tokens if watched.load is not None else None,
            waiting_throughout=min((load.waiting for load in loads), default=None),
            trimmed_slots=self._trimmed(watched),
            kv_usage_throughout=min((load.kv_usage for load in loads), default=None),
            overtaken_never=self._watch.contradictions(watched.spec.id),
        )

    def _trimmed(self, watched: _Watched) -> int:
        """By how many slots it is held below its part of C now."""
        instance_id = watched.spec.id
        return self._whole_parts.get(instance_id, 0) - self._parts.get(instance_id, 0)

    def _health_of(self, watched: _Watched) -> Health:
        if watched.health.fit:
            return Health.HEALTHY
        if watched.spec.id in self._accepting:
            return Health.KEPT
        return Health.OUT if watched.checks else Health.UNKNOWN

    def log_findings(self) -> None:
        """Each finding once when it appears, and once when it is gone."""
        now = {finding.key: finding for finding in self.found()}
        for key, finding in now.items():
            if key not in self._logged:
                level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
                log.log(level, "%s: %s %s %s", finding.id, finding.sentence, finding.why, finding.fix)
        for key, finding in self._logged.items():
            if key not in now:
                log.info("%s is over: %s", finding.id, finding.sentence)
        self._logged = now
