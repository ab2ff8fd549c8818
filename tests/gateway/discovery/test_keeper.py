"""The keeper between sources, operators and what watches the instances. Sources say what a test has them say."""

import asyncio
from collections.abc import Sequence, Set
from fractions import Fraction

import pytest

from fairshare.gateway.discovery import keeper
from fairshare.gateway.discovery.keeper import FleetKeeper, NotPossible, look_once
from fairshare.gateway.discovery.source import Told
from fairshare.gateway.options import DnsSource, InstanceSource, InstanceSpec, PoolSpec
from gateway.discovery.hearing import run


class Scripted:
    """A source that a test speaks through."""

    missing_seconds = 0.0

    def __init__(self) -> None:
        self.told: Told | None = None
        self.first: list[str] | None = []
        """What it answers at once; None: nothing."""

    async def follow(self, told: Told) -> None:
        self.told = told
        if self.first is not None:
            self.answers(*self.first)
        await asyncio.Event().wait()

    def answers(self, *names: str) -> None:
        assert self.told is not None
        self.told.answered([InstanceSpec(url=f"http://{name}:80") for name in names])


class Supervisor:
    """Accepts whatever it is told of at once, but for those that are sick."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.sick: set[str] = set()
        self.spec: PoolSpec | None = None
        self.running = False
        self.told_more = asyncio.Event()

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def reconfigure(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.told.append(("".join(instance.url[7] for instance in spec.instances), spec.capacity))
        self.told_more.set()

    def log_findings(self) -> None: ...

    @property
    def accepting(self) -> Set[str]:
        return {each.id for each in (self.spec.instances if self.spec else ())} - self.sick

    async def hears(self, count: int) -> None:
        while len(self.told) < count:
            self.told_more.clear()
            await self.told_more.wait()


def pool(
    *sources: InstanceSource, configured: Sequence[str] = (), per: int | None = 4, capacity: int = 0, models: str = "m"
) -> PoolSpec:
    return PoolSpec(
        name="chat",
        capacity=capacity or (per or 0) * len(configured),
        capacity_per_instance=per,
        half_life_seconds=0.0,
        shares={"a": Fraction(1)},
        models={models: models},
        instances=tuple(InstanceSpec(url=f"http://{name}:80", api_key="key") for name in configured),
        sources=sources,
    )


def dns(name: str) -> DnsSource:
    return DnsSource(url=f"http://{name}:80", template=InstanceSpec(url=""))


class World:
    def __init__(self, spec: PoolSpec) -> None:
        self.scripted = {source: Scripted() for source in spec.sources}
        self.supervisor = Supervisor()
        self.naps: list[float] = []
        self.keeper = FleetKeeper(
            spec, supervisor=self.supervisor, open_source=self.open, clock=lambda: 0.0, sleep=self._sleep
        )

    def open(self, source: InstanceSource) -> Scripted:
        return self.scripted.setdefault(source, Scripted())

    async def _sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        if seconds == 1.0:  # a step; tests speak instead
            await asyncio.Event().wait()


def test_at_start_the_first_answers_are_heard_and_c_follows_the_number_of_instances() -> None:
    async def scenario() -> None:
        spec = pool(dns("one"), dns("two"), configured="z")
        world = World(spec)
        world.scripted[spec.sources[0]].first = ["a", "b"]
        world.scripted[spec.sources[1]].first = ["c"]
        await world.keeper.start()
        assert world.supervisor.told == [("zabc", 16)]
        world.scripted[spec.sources[0]].answers("b")
        await world.supervisor.hears(2)
        assert world.supervisor.told[1] == ("zbc", 12)
        await world.keeper.stop()
        assert not world.supervisor.running

    run(scenario)


def test_a_list_that_is_far_too_long_leaves_the_last_good_one_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(keeper, "MOST_INSTANCES", 2)
        spec = pool(dns("one"))
        world = World(spec)
        world.scripted[spec.sources[0]].first = ["a", "b"]
        await world.keeper.start()
        world.scripted[spec.sources[0]].answers("a", "b", "c")
        assert [finding.id for finding in world.keeper.found()] == ["source-failed"]
        assert "it names 3 instances, more than 2" in world.keeper.found()[0].sentence
        assert {named.id for named in world.keeper.named()} == {"http://a:80", "http://b:80"}
        await world.keeper.stop()

    run(scenario)


def test_a_source_that_says_nothing_keeps_a_start_for_a_few_seconds_only() -> None:
    async def scenario() -> None:
        spec = pool(dns("one"))
        world = World(spec)
        silent = world.scripted[spec.sources[0]]
        silent.first = None
        await world.keeper.start()
        assert world.naps[0] == 5.0
        assert world.keeper.spec.capacity == 0
        silent.answers("a")
        await world.supervisor.hears(1)
        assert world.supervisor.told == [("a", 4)]
        await world.keeper.stop()

    run(scenario)


def test_old_instances_leave_in_the_moment_in_which_a_new_one_accepts() -> None:
    async def scenario() -> None:
        spec = pool(dns("one"))
        world = World(spec)
        source = world.scripted[spec.sources[0]]
        source.first = ["a"]
        await world.keeper.start()
        source.answers("b")
        await world.supervisor.hears(3)
        assert world.supervisor.told == [("a", 4), ("ba", 8), ("b", 4)]
        await world.keeper.stop()

    run(scenario)


def test_a_reload_follows_new_sources_drops_old_ones_and_goes_on_with_those_that_stay() -> None:
    async def scenario() -> None:
        one, two, three = dns("one"), dns("two"), dns("three")
        world = World(pool(one, two))
        world.scripted[one].first, world.scripted[two].first = ["a"], ["b"]
        world.scripted[three] = Scripted()
        world.scripted[three].first = ["c"]
        await world.keeper.start()
        kept = world.scripted[two].told
        await world.keeper.reconfigure(pool(two, three, per=5, models="other"))
        assert world.supervisor.told[-1] == ("bc", 10)
        assert world.supervisor.spec is not None
        assert world.supervisor.spec.models == {"other": "other"}
        assert world.scripted[two].told is kept
        await world.keeper.stop()

    run(scenario)


def test_operators_add_drain_and_remove_and_c_follows_in_a_pool_without_sources_too() -> None:
    async def scenario() -> None:
        world = World(pool(configured="abc", per=None, capacity=16))
        await world.supervisor.reconfigure(world.keeper.spec)
        await world.keeper.start()
        await world.keeper.drain("http://a:80")
        assert world.supervisor.told[-1] == ("bc", 10)
        await world.keeper.add("http://d:80", 8)
        assert world.supervisor.told[-1] == ("bcd", 16)
        assert world.keeper.spec.instances[-1] == InstanceSpec(url="http://d:80", api_key="key", max_num_seqs=8)
        await world.keeper.add("http://a:80", None)
        assert world.supervisor.told[-1] == ("abcd", 21)
        await world.keeper.remove("http://d:80")
        assert world.supervisor.told[-1] == ("abc", 16)
        await world.keeper.stop()

    run(scenario)


def test_what_operators_cannot_do_is_refused_with_what_to_do() -> None:
    async def scenario() -> None:
        world = World(pool(configured="ab"))
        await world.supervisor.reconfigure(world.keeper.spec)
        await world.keeper.start()
        with pytest.raises(NotPossible, match="has no instance http://x:80; it has http://a:80, http://b:80"):
            await world.keeper.drain("http://x:80")
        with pytest.raises(NotPossible, match="named by the configuration or a source, not by an operator; drain it"):
            await world.keeper.remove("http://a:80")
        world.supervisor.sick = {"http://b:80"}
        with pytest.raises(NotPossible, match="last instance of pool chat that gets requests; add another"):
            await world.keeper.drain("http://a:80")
        await world.keeper.drain("http://b:80")
        assert world.supervisor.told[-1] == ("a", 4)
        await world.keeper.stop()

    run(scenario)


def test_looking_once_names_the_instances_and_says_what_is_wrong_with_a_source() -> None:
    async def scenario() -> None:
        spec = pool(dns("one"), dns("two"), configured="z")

        class Broken(Scripted):
            async def follow(self, told: Told) -> None:
                told.failed("nobody answers")
                await asyncio.Event().wait()

        good = Scripted()
        good.first = ["a"]
        now, found = await look_once(spec, lambda source: good if source == spec.sources[0] else Broken())
        assert [instance.url for instance in now.instances] == ["http://z:80", "http://a:80"]
        assert now.capacity == 8
        assert [finding.id for finding in found] == ["source-failed"]
        assert "nobody answers" in found[0].sentence

    run(scenario)
