"""Keeps one pool's instances true to what its configuration, its sources and its operators name."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Protocol

from fairshare import clock as clocks
from fairshare.clock import Clock
from fairshare.errors import CallerError
from fairshare.gateway.discovery.fleet import Fleet, Named, SourceState
from fairshare.gateway.discovery.source import Source, pause_seconds
from fairshare.gateway.findings import Finding
from fairshare.gateway.options import InstanceSource, InstanceSpec, PoolSpec

log = logging.getLogger("fairshare.instances")

STEP_SECONDS = 1.0
"""Between two looks at what time has changed; what a source says is looked at when it says it."""

FIRST_ANSWER_SECONDS = 5.0
"""How long a start waits for the first answer of each source. Then it goes on without: the answer may come later."""

Open = Callable[[InstanceSource], Source]
"""Makes what follows a source."""


class Supervisor(Protocol):
    """What watches the instances themselves (see `InstanceSupervisor`)."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reconfigure(self, spec: PoolSpec) -> None: ...

    def log_findings(self) -> None: ...

    @property
    def accepting(self) -> Set[str]: ...


MOST_INSTANCES = 1000
"""Of one source. Each instance is asked for its state over connections of its own: a list that went wrong must not take
every open file, and the time of every pool."""


class NotPossible(CallerError):
    """What an operator wants cannot be done to the fleet as it is."""


@dataclass(slots=True, eq=False)
class _Followed:
    """One source, and what follows it."""

    source: InstanceSource
    state: SourceState
    heard: asyncio.Event
    """It has said something."""
    task: "asyncio.Task[None]"


class _Ear:
    """Hears one source, on the event loop's thread."""

    def __init__(self, state: SourceState, clock: Clock, heard: asyncio.Event, changed: asyncio.Event) -> None:
        self._state = state
        self._clock = clock
        self._heard = heard
        self._changed = changed

    def answered(self, instances: Iterable[InstanceSpec]) -> None:
        named = tuple(instances)
        if len(named) > MOST_INSTANCES:
            self.failed(f"it names {len(named)} instances, more than {MOST_INSTANCES}")
            return
        self._state.answer(named, self._clock())
        self._heard.set()
        self._changed.set()

    def failed(self, trouble: str) -> None:
        self._state.trouble = trouble
        self._heard.set()
        self._changed.set()


class FleetKeeper:
    """Starts and stops with its pool, and tells the supervisor which instances there are. On the loop's thread."""

    def __init__(
        self,
        spec: PoolSpec,
        *,
        supervisor: Supervisor,
        open_source: Open,
        clock: Clock = clocks.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._configured = spec
        self._supervisor = supervisor
        self._open = open_source
        self._clock = clock
        self._sleep = sleep
        self._followed: list[_Followed] = []
        self._fleet = Fleet(spec.name, spec.instances, ())
        self._changed = asyncio.Event()
        self._applying = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.spec = spec.with_instances(spec.instances)
        """The pool with the instances that it has now."""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Hears the first answers, has every instance asked once, then keeps following."""
        self.spec = await self.first_look()
        if self.spec != self._configured:
            await self._supervisor.reconfigure(self.spec)
        await self._supervisor.start()
        self._task = asyncio.create_task(self._keep(), name=f"fleet of {self.spec.name}")

    async def first_look(self) -> PoolSpec:
        """Begins to follow; the pool with the instances of the first answers."""
        self._follow(self._configured)
        await self._first_answers()
        return self._members()

    async def stop(self) -> None:
        """Follows nothing any more; what was told stays."""
        tasks = [followed.task for followed in self._followed] + ([] if self._task is None else [self._task])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._supervisor.stop()

    async def reconfigure(self, spec: PoolSpec) -> None:
        """A reload. Sources that stay are followed on; what operators did stays."""
        self._configured = spec
        self._follow(spec)
        await self._first_answers()
        await self._apply(even_if_equal=True)

    def _follow(self, spec: PoolSpec) -> None:
        known = {followed.source: followed for followed in self._followed}
        for source, followed in known.items():
            if source not in spec.sources:
                followed.task.cancel()
        self._followed = [known.get(source) or self._start_following(source) for source in spec.sources]
        self._fleet.reconfigure(spec.instances, [followed.state for followed in self._followed])

    def _start_following(self, source: InstanceSource) -> _Followed:
        follower = self._open(source)
        state = SourceState(name=str(source), missing_seconds=follower.missing_seconds)
        heard = asyncio.Event()
        ear = _Ear(state, self._clock, heard, self._changed)
        return _Followed(source, state, heard, asyncio.create_task(_follow_for_ever(follower, ear), name=str(source)))

    async def _first_answers(self) -> None:
        if self._followed:
            heard = asyncio.gather(*(followed.heard.wait() for followed in self._followed))
            await self._first_of(heard, self._sleep(FIRST_ANSWER_SECONDS))

    async def _keep(self) -> None:
        while True:
            await self._first_of(self._changed.wait(), self._sleep(STEP_SECONDS))
            self._changed.clear()
            try:
                await self._apply()
            except Exception:
                # The fleet must outlive whatever one step runs into; the next one is a second away.
                log.exception("following the instances of pool %s failed inside fairshare", self.spec.name)

    @staticmethod
    async def _first_of(*waits: Awaitable[object]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ what follows

    async def _apply(self, *, even_if_equal: bool = False) -> None:
        """Take members in and let them go until nothing changes: one that is taken in may let another go."""
        async with self._applying:
            while (spec := self._members()) != self.spec or even_if_equal:
                self._log(spec)
                self.spec, even_if_equal = spec, False
                await self._supervisor.reconfigure(spec)
        self._supervisor.log_findings()

    def _members(self) -> PoolSpec:
        return self._configured.with_instances(self._fleet.step(self._clock(), self._supervisor.accepting))

    def _log(self, spec: PoolSpec) -> None:
        before, now = ({instance.id for instance in each.instances} for each in (self.spec, spec))
        for instance_id in sorted(now - before):
            log.info("%s belongs to pool %s now; it gets requests when it answers", instance_id, spec.name)
        for instance_id in sorted(before - now):
            log.info("%s leaves pool %s; what it runs may finish", instance_id, spec.name)

    def found(self) -> list[Finding]:
        """What an operator should know of where the instances come from."""
        return self._fleet.found()

    # ------------------------------------------------------------------ what operators want

    async def add(self, url: str, max_num_seqs: int | None) -> None:
        """Add an instance, with the pool's usual settings, or take a drained one back."""
        first = next(iter((*self._configured.instances, *(source.template for source in self._configured.sources))))
        self._fleet.add(replace(first, url=url, max_num_seqs=max_num_seqs))
        await self._apply()

    async def drain(self, instance_id: str) -> None:
        """Take a member out until it is added again; what it runs may finish. Raises `NotPossible`."""
        self._check_known(instance_id, self.spec.instances)
        self._check_not_last(instance_id)
        self._fleet.drain(instance_id)
        await self._apply()

    async def remove(self, instance_id: str) -> None:
        """Take back what `add` and `drain` did. Raises `NotPossible`."""
        if instance_id not in self._fleet.added and instance_id not in self._fleet.drained:
            self._check_known(instance_id, self.spec.instances)
            raise NotPossible(f"{instance_id} is named by the configuration or a source, not by an operator; drain it")
        if instance_id in self._fleet.added:
            self._check_not_last(instance_id)
        self._fleet.remove(instance_id)
        await self._apply()

    def _check_known(self, instance_id: str, known: Iterable[InstanceSpec]) -> None:
        ids = [each.id for each in known]
        if instance_id not in ids:
            raise NotPossible(f"pool {self.spec.name} has no instance {instance_id}; it has {', '.join(ids) or 'none'}")

    def _check_not_last(self, instance_id: str) -> None:
        if self._supervisor.accepting <= {instance_id} and instance_id in self._supervisor.accepting:
            raise NotPossible(
                f"{instance_id} is the last instance of pool {self.spec.name} that gets requests; add another"
            )

    def named(self) -> list[Named]:
        """Every instance that anybody names, and who."""
        return self._fleet.named()


class _Nobody:
    """Watches no instances."""

    accepting: Set[str] = frozenset()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reconfigure(self, spec: PoolSpec) -> None: ...

    def log_findings(self) -> None: ...


async def look_once(spec: PoolSpec, open_source: Open) -> tuple[PoolSpec, list[Finding]]:
    """The pool with the instances that its sources name now, and what is to be said of the sources."""
    keeper = FleetKeeper(spec, supervisor=_Nobody(), open_source=open_source)
    try:
        return await keeper.first_look(), keeper.found()
    finally:
        await keeper.stop()


async def _follow_for_ever(follower: Source, ear: _Ear) -> None:
    """A follower handles what it expects; whatever else happens is said, and tried again."""
    failures = 0
    while True:
        try:
            await follower.follow(ear)
        except Exception as error:
            log.exception("following a source of instances failed inside fairshare")
            ear.failed(f"following it failed inside fairshare ({type(error).__name__})")
        failures += 1
        await asyncio.sleep(pause_seconds(failures))
