"""Watching a pool's engines: who gets requests, what C is, what is said. No network and no clock but the test's."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from fairshare.core.decisions import Instance, Mode
from fairshare.core.pool import Pool
from fairshare.gateway.engine_http import Failure
from fairshare.gateway.instances import (
    FAILURES_TO_TAKE_OUT,
    LONGEST_OUT_SECONDS,
    SCRAPE_EVERY,
    SCRAPES_KEPT,
    InstanceSupervisor,
)
from fairshare.gateway.options import InstanceSpec, PoolSpec
from fairshare.gateway.priority_watch import PriorityWatch
from gateway.fake_engines import FakeEngine, FakeNetwork, metrics_text


class RecordingDriver:
    """Notes what the data path is told."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.watch = PriorityWatch()
        self.instances: dict[str, Instance] = {}
        self.changes: list[Instance] = []
        self.removed: list[str] = []
        self.running: dict[str, int] = {}
        self.capacities: list[int] = []
        self.models: dict[str, dict[str, int]] = {}
        self.cut: list[str] = []
        self.in_flight: dict[str, int] = {}
        self.busy: set[str] = set()
        """Where something runs."""

    def slots_at(self, pool: str, instance_id: str) -> int:
        return self.in_flight.get(instance_id, 0)

    def runs_at(self, instance_id: str) -> bool:
        return instance_id in self.busy

    def instance_changed(self, pool: str, spec: InstanceSpec, instance: Instance) -> None:
        assert pool == "chat"
        assert spec.id == instance.id
        self.instances[instance.id] = instance
        self.changes.append(instance)

    def instance_removed(self, pool: str, instance_id: str) -> None:
        self.removed.append(instance_id)
        del self.instances[instance_id]

    def running_seen(self, pool: str, instance_id: str, running: int) -> None:
        assert instance_id in self.instances, "the queue must know the instance first"
        self.running[instance_id] = running

    def capacity_changed(self, pool: str) -> None:
        self.capacities.append(self.pool.capacity)

    def models_seen(self, pool: str, instance_id: str, context_tokens: Mapping[str, int]) -> None:
        self.models[instance_id] = dict(context_tokens)

    def cut_instance(self, pool: str, instance_id: str) -> int:
        self.cut.append(instance_id)
        return 1

    @property
    def accepting(self) -> dict[str, int]:
        return {id: instance.part_slots for id, instance in self.instances.items() if instance.accepting}


class World:
    """A supervisor, its engines, and time."""

    def __init__(self, network: FakeNetwork, spec: PoolSpec) -> None:
        self.now = 1000.0
        self.network = network
        self.pool = Pool(spec.name, spec.capacity, spec.shares, spec.half_life_seconds, clock=lambda: self.now)
        self.driver = RecordingDriver(self.pool)
        self.decides = True
        self.supervisor = InstanceSupervisor(
            spec,
            pool=self.pool,
            driver=self.driver,
            ask=network,
            clock=lambda: self.now,
            sleep=self._never,
            decides=lambda: self.decides,
        )

    async def _never(self, seconds: float) -> None:
        await asyncio.Event().wait()

    async def rounds(self, count: int, *, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            for report in self.supervisor.reports():
                await self.supervisor.check(report.id)

    def ids(self) -> list[str]:
        return [finding.id for finding in self.supervisor.found()]


def pool_spec(*names: str, capacity: int = 16, mode: Mode = Mode.HOLD, **instance: Any) -> PoolSpec:
    return PoolSpec(
        name="chat",
        capacity=capacity,
        half_life_seconds=0.0,
        mode=mode,
        shares={"a": Fraction(1, 2), "b": Fraction(1, 2)},
        models={"client-name": "tiny"},
        instances=tuple(InstanceSpec(url=f"http://{name}", **instance) for name in names),
    )


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_at_start_every_engine_that_answers_gets_its_part_and_what_it_tells_is_known() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(metrics=metrics_text(running=3)), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        assert world.driver.accepting == {"http://one": 8, "http://two": 8}
        assert world.driver.models["http://one"] == {"tiny": 2048}
        assert world.driver.running == {"http://one": 3, "http://two": 0}
        assert [report.version for report in world.supervisor.reports()] == ["0.32.0", "0.32.0"]
        assert world.pool.capacity == 16
        await world.supervisor.stop()

    run(scenario())


def test_c_follows_the_engines_that_are_up_and_its_parts_stay_whole() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine(), three=FakeEngine())
        world = World(network, pool_spec("one", "two", "three"))
        await world.supervisor.start()
        assert sorted(world.driver.accepting.values()) == [5, 5, 6]

        network["two"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT - 1)
        assert world.pool.capacity == 16
        await world.rounds(1)
        assert world.pool.capacity == 10  # floor(16 x 2 / 3)
        assert world.driver.accepting == {"http://one": 5, "http://three": 5}
        assert world.driver.instances["http://two"] == Instance(id="http://two", part_slots=0, accepting=False)
        assert world.driver.capacities == [10]
        assert world.driver.cut == ["http://two"]

        network["two"].silent = None
        await world.rounds(2)
        assert world.pool.capacity == 16
        assert world.driver.capacities == [10, 16]
        await world.supervisor.stop()

    run(scenario())


def test_one_failed_check_changes_nothing() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        told = len(world.driver.changes)
        for failure in (Failure.TOO_SLOW, Failure.BROKEN, Failure.UNREACHABLE):
            network["one"].silent = failure
            await world.rounds(1)
            network["one"].silent = None
            await world.rounds(1)
        assert len(world.driver.changes) == told
        assert world.pool.capacity == 16
        await world.supervisor.stop()

    run(scenario())


def test_an_engine_that_keeps_failing_stays_out_longer_each_time_and_is_forgiven_when_it_is_well() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()

        async def fails_and_returns() -> float:
            network["one"].silent = Failure.UNREACHABLE
            await world.rounds(FAILURES_TO_TAKE_OUT)
            out_at = world.now
            network["one"].silent = None
            while "http://one" not in world.driver.accepting:
                await world.rounds(1)
            return world.now - out_at

        assert [await fails_and_returns() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert [await fails_and_returns() for _ in range(3)][-1] <= LONGEST_OUT_SECONDS
        await world.rounds(1, seconds=3600.0)
        assert await fails_and_returns() == 1.0
        await world.supervisor.stop()

    run(scenario())


def test_a_pool_whose_last_engine_is_unreachable_has_none_and_says_so() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine())
        world = World(network, pool_spec("one"))
        await world.supervisor.start()
        network["one"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT)
        assert world.driver.accepting == {}
        assert world.pool.capacity == 0
        assert world.ids() == ["instance-out", "pool-without-instance"]
        await world.supervisor.stop()

    run(scenario())


def test_a_last_engine_that_answers_again_is_taken_back_at_once_however_often_it_failed() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        for seconds in (20, 20, 20, 20, 1):  # it is out for 16 s in the end
            network["one"].silent = Failure.UNREACHABLE
            await world.rounds(FAILURES_TO_TAKE_OUT)
            network["one"].silent = None
            await world.rounds(seconds)
        assert set(world.driver.accepting) == {"http://two"}
        network["two"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT)
        assert set(world.driver.accepting) == {"http://one"}
        await world.supervisor.stop()

    run(scenario())


def test_connections_that_the_data_path_cannot_make_take_an_engine_out_before_its_next_check() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        for _ in range(FAILURES_TO_TAKE_OUT - 1):
            world.supervisor.connection_failed("http://one", Failure.UNREACHABLE, "the connection is refused")
        assert len(world.driver.accepting) == 2
        world.supervisor.connection_failed("http://one", Failure.UNREACHABLE, "the connection is refused")
        assert set(world.driver.accepting) == {"http://two"}
        assert world.pool.capacity == 8
        await world.rounds(2)  # the engine answers its checks
        assert len(world.driver.accepting) == 2
        world.supervisor.connection_failed("http://gone", Failure.UNREACHABLE, "")
        await world.supervisor.stop()

    run(scenario())


def test_the_last_engine_is_out_for_no_longer_than_until_it_answers_a_check() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine())
        world = World(network, pool_spec("one"))
        await world.supervisor.start()
        for _ in range(6):
            for _ in range(FAILURES_TO_TAKE_OUT):
                world.supervisor.connection_failed("http://one", Failure.UNREACHABLE, "the connection is refused")
            await world.rounds(1)
            assert set(world.driver.accepting) == {"http://one"}
        await world.supervisor.stop()

    run(scenario())


def test_an_engine_that_we_have_no_file_left_to_ask_is_not_blamed() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine())
        world = World(network, pool_spec("one"))
        await world.supervisor.start()
        network["one"].silent = Failure.NOT_ASKED
        await world.rounds(10)
        assert set(world.driver.accepting) == {"http://one"}
        assert "instance-out" not in world.ids()
        await world.supervisor.stop()

    run(scenario())


def test_a_last_engine_that_is_only_too_slow_keeps_its_requests_and_that_is_said() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        network["one"].silent = Failure.UNREACHABLE
        network["two"].silent = Failure.TOO_SLOW
        await world.rounds(FAILURES_TO_TAKE_OUT)
        assert world.driver.accepting == {"http://two": 8}
        assert "last-instance-kept" in world.ids()
        # As soon as another one is well, the slow one is out.
        network["one"].silent = None
        await world.rounds(3)
        assert world.driver.accepting == {"http://one": 8}
        assert "last-instance-kept" not in world.ids()
        await world.supervisor.stop()

    run(scenario())


def test_an_engine_whose_process_died_behind_its_port_is_out() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        network["one"].health_status = 503
        await world.rounds(FAILURES_TO_TAKE_OUT)
        assert world.driver.accepting == {"http://two": 8}
        assert "/health answers 503" in world.supervisor.found()[0].sentence
        await world.supervisor.stop()

    run(scenario())


def test_a_gateway_that_starts_before_its_engines_takes_them_in_when_they_come() -> None:
    async def scenario() -> None:
        network = FakeNetwork()
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        assert world.pool.capacity == 0
        network.engines["http://two"] = FakeEngine()
        await world.rounds(1)
        assert world.driver.accepting == {"http://two": 8}
        await world.supervisor.stop()

    run(scenario())


def test_seats_come_from_the_engine_before_the_configuration() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(server_info={"policy": "priority", "max_num_seqs": 32}), two=FakeEngine())
        world = World(network, pool_spec("one", "two", max_num_seqs=64))
        await world.supervisor.start()
        assert {id: instance.seats for id, instance in world.driver.instances.items()} == {
            "http://one": 32,
            "http://two": 64,
        }
        assert "seats-differ" in world.ids()
        await world.supervisor.stop()

    run(scenario())


def test_an_engine_that_came_back_is_asked_again_what_it_is() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(server_info={"policy": "priority", "max_num_seqs": 32}))
        world = World(network, pool_spec("one"))
        await world.supervisor.start()
        assert world.ids() == []
        network["one"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT)
        network["one"].silent = None
        network["one"].server_info = {"policy": "fcfs", "max_num_seqs": 32}
        await world.rounds(2)
        assert world.ids() == ["priority-ignored"]
        await world.supervisor.stop()

    run(scenario())


def test_waiting_inside_the_engine_is_reported_when_it_lasts_and_only_where_it_should_not_be() -> None:
    async def scenario(mode: Mode) -> list[str]:
        network = FakeNetwork(one=FakeEngine(server_info={"policy": "priority", "max_num_seqs": 32}))
        world = World(network, pool_spec("one", mode=mode))
        await world.supervisor.start()
        network["one"].metrics = metrics_text(running=16, waiting=2)
        await world.rounds(2 * (SCRAPES_KEPT - 1))
        assert world.ids() == []
        await world.rounds(2)
        lasting = world.ids()
        network["one"].metrics = metrics_text(running=16)
        await world.rounds(2)
        assert world.ids() == []
        await world.supervisor.stop()
        return lasting

    assert asyncio.run(scenario(Mode.HOLD)) == ["engine-queue"]
    assert asyncio.run(scenario(Mode.PASS)) == []


def test_each_finding_is_logged_once_when_it_comes_and_once_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(server_info={"policy": "priority"}), two=FakeEngine())
        network["two"].server_info = {"policy": "priority"}
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        network["two"].silent = Failure.UNREACHABLE
        await world.rounds(10)
        network["two"].silent = None
        await world.rounds(10)
        await world.supervisor.stop()

    with caplog.at_level(logging.INFO, logger="fairshare.instances"):
        run(scenario())
    said = [record.getMessage().split(":")[0] for record in caplog.records if "instance-out" in record.getMessage()]
    assert said == ["instance-out", "instance-out is over"]


def test_a_reload_brings_and_takes_instances_and_changes_c() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(), two=FakeEngine(), three=FakeEngine())
        world = World(network, pool_spec("one", "two"))
        await world.supervisor.start()
        await world.supervisor.reconfigure(pool_spec("two", "three", capacity=20))
        assert world.driver.removed == ["http://one"]
        assert world.driver.accepting == {"http://two": 10, "http://three": 10}
        assert world.pool.capacity == 20
        assert [report.id for report in world.supervisor.reports()] == ["http://two", "http://three"]
        asked = len(network["one"].asked)
        await world.rounds(3)
        assert len(network["one"].asked) == asked
        await world.supervisor.stop()

    run(scenario())


def test_an_instance_that_leaves_gets_nothing_new_and_is_forgotten_when_its_last_request_has_ended() -> None:
    async def scenario() -> None:
        world = World(FakeNetwork(one=FakeEngine(), two=FakeEngine()), pool_spec("one", "two", capacity=16))
        await world.supervisor.start()
        world.driver.busy.add("http://one")
        await world.supervisor.reconfigure(pool_spec("two", capacity=8))
        assert world.driver.accepting == {"http://two": 8}
        assert world.pool.capacity == 8
        assert world.driver.removed == []
        assert [(report.id, report.leaving) for report in world.supervisor.reports()] == [
            ("http://two", False),
            ("http://one", True),
        ]
        await world.rounds(5)
        assert world.driver.removed == []
        world.driver.busy.clear()
        await world.rounds(1)
        assert world.driver.removed == ["http://one"]
        assert [report.id for report in world.supervisor.reports()] == ["http://two"]
        await world.supervisor.stop()

    run(scenario())


def test_what_runs_at_an_instance_that_leaves_is_cut_when_that_dies_and_waited_for_no_longer_than_it_may_take() -> None:
    async def scenario() -> None:
        world = World(FakeNetwork(one=FakeEngine(), two=FakeEngine()), pool_spec("one", "two"))
        await world.supervisor.start()
        world.driver.busy.add("http://one")
        spec = pool_spec("two")
        await world.supervisor.reconfigure(spec)
        world.network["one"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT)
        assert world.driver.cut == ["http://one"]
        await world.rounds(1, seconds=spec.timeouts.longest_request_seconds)
        assert world.driver.removed == ["http://one"]
        await world.supervisor.stop()

    run(scenario())


def test_an_instance_that_comes_back_before_its_last_request_has_ended_gets_requests_at_once() -> None:
    async def scenario() -> None:
        world = World(FakeNetwork(one=FakeEngine(), two=FakeEngine()), pool_spec("one", "two"))
        await world.supervisor.start()
        world.driver.busy.add("http://one")
        await world.supervisor.reconfigure(pool_spec("two"))
        await world.supervisor.reconfigure(pool_spec("one", "two"))
        assert set(world.driver.accepting) == {"http://one", "http://two"}
        assert world.driver.removed == []
        await world.supervisor.stop()

    run(scenario())


def test_an_instance_whose_settings_changed_keeps_its_health_and_the_data_path_hears_of_them() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine())
        world = World(network, pool_spec("one"))
        await world.supervisor.start()
        await world.supervisor.reconfigure(pool_spec("one", max_num_seqs=64))
        assert world.driver.instances["http://one"] == Instance(id="http://one", part_slots=16, seats=64)
        assert world.driver.removed == []
        await world.supervisor.stop()

    run(scenario())


def test_the_loop_checks_again_and_outlives_a_fault_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine())
        world = World(network, pool_spec("one"))
        checks = asyncio.Semaphore(0)

        async def sleep(seconds: float) -> None:
            await checks.acquire()

        world.supervisor = InstanceSupervisor(
            pool_spec("one"), pool=world.pool, driver=world.driver, ask=network, clock=lambda: world.now, sleep=sleep
        )
        await world.supervisor.start()
        network["one"].metrics = metrics_text(running=9)

        def broken(pool: str, instance_id: str, running: int) -> None:
            raise RuntimeError("planted")

        driver_running_seen = world.driver.running_seen
        world.driver.running_seen = broken  # type: ignore[method-assign]
        checks.release()
        for _ in range(20):
            await asyncio.sleep(0)
        world.driver.running_seen = driver_running_seen  # type: ignore[method-assign]
        for _ in range(2):
            checks.release()
            for _ in range(20):
                await asyncio.sleep(0)
        assert world.driver.running == {"http://one": 9}
        await world.supervisor.stop()
        asked = len(network["one"].asked)
        checks.release()
        await asyncio.sleep(0)
        assert len(network["one"].asked) == asked

    run(scenario())
    assert "failed inside fairshare" in caplog.text


def test_an_engine_with_several_schedulers_is_not_judged_by_its_order() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(metrics=metrics_text(schedulers=2)), two=FakeEngine())
        world = World(network, pool_spec("one", "two", max_num_seqs=4))
        await world.supervisor.start()
        assert {id: instance.seats for id, instance in world.driver.watch._instances.items()} == {
            "http://one": None,
            "http://two": 4,
        }
        await world.supervisor.stop()

    run(scenario())


# --- Adaptive capacity --------------------------------------------------------------------------------------------


def test_with_trim_a_part_falls_while_requests_wait_inside_the_engine_and_reservations_follow() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(metrics=metrics_text(waiting=4)), two=FakeEngine())
        world = World(network, replace(pool_spec("one", "two"), trim=True))
        await world.supervisor.start()
        await world.rounds(4 * SCRAPE_EVERY)
        assert world.driver.accepting == {"http://one": 6, "http://two": 8}
        assert (world.pool.capacity, world.pool.reserved()) == (14, {"a": 7, "b": 7})
        assert world.driver.capacities[-1] == 14
        assert [report.trimmed_slots for report in world.supervisor.reports()] == [2, 0]
        trimmed = next(finding for finding in world.supervisor.found() if finding.id == "capacity-trimmed")
        assert trimmed.sentence.startswith("http://one of pool chat gets 6 of its 8 slots")

        network["one"].metrics = metrics_text()
        await world.rounds(12 * SCRAPE_EVERY)
        assert world.driver.accepting == {"http://one": 8, "http://two": 8}
        assert "capacity-trimmed" not in world.ids()
        await world.supervisor.stop()

    run(scenario())


def test_without_trim_a_queue_inside_an_engine_changes_no_part() -> None:
    async def scenario() -> None:
        world = World(FakeNetwork(one=FakeEngine(metrics=metrics_text(waiting=4))), pool_spec("one"))
        await world.supervisor.start()
        await world.rounds(10 * SCRAPE_EVERY)
        assert world.driver.accepting == {"http://one": 16}
        await world.supervisor.stop()

    run(scenario())


def test_what_the_gateway_sent_beyond_a_part_does_not_make_it_fall() -> None:
    async def scenario() -> None:
        world = World(
            FakeNetwork(one=FakeEngine(metrics=metrics_text(waiting=4))), replace(pool_spec("one"), trim=True)
        )
        world.driver.in_flight["http://one"] = 17
        await world.supervisor.start()
        await world.rounds(10 * SCRAPE_EVERY)
        assert world.driver.accepting == {"http://one": 16}
        await world.supervisor.stop()

    run(scenario())


def test_a_replica_that_does_not_decide_trims_nothing_and_keeps_what_it_had_trimmed() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(metrics=metrics_text(waiting=4)))
        world = World(network, replace(pool_spec("one"), trim=True))
        await world.supervisor.start()
        await world.rounds(3 * SCRAPE_EVERY)
        had = world.pool.capacity
        assert had < 16
        world.decides = False
        await world.rounds(10 * SCRAPE_EVERY)
        assert world.pool.capacity == had
        world.decides = True
        await world.rounds(2 * SCRAPE_EVERY)
        assert world.pool.capacity == had  # what it saw before is not mixed with what it sees now
        await world.rounds(SCRAPE_EVERY)
        assert world.pool.capacity == had - 1
        await world.supervisor.stop()

    run(scenario())


def test_a_reload_without_trim_and_a_restarted_engine_give_the_part_back() -> None:
    async def scenario() -> None:
        network = FakeNetwork(one=FakeEngine(metrics=metrics_text(waiting=4)))
        spec = replace(pool_spec("one"), trim=True)
        world = World(network, spec)
        await world.supervisor.start()
        await world.rounds(4 * SCRAPE_EVERY)
        assert world.pool.capacity == 14
        await world.supervisor.reconfigure(replace(spec, trim=False))
        assert world.pool.capacity == 16

        await world.supervisor.reconfigure(spec)
        await world.rounds(4 * SCRAPE_EVERY)
        assert world.pool.capacity < 16
        network["one"].silent = Failure.UNREACHABLE
        await world.rounds(FAILURES_TO_TAKE_OUT)
        network["one"].silent = None
        network["one"].metrics = metrics_text()
        await world.rounds(4)
        assert world.pool.capacity == 16
        await world.supervisor.stop()

    run(scenario())
