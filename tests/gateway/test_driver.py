"""The driver alone, with requests that do as a test says."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from fairshare.core.decisions import Held, Instance, Mode, Recall, Refused, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.gateway.driver import DrivenPool, Place, PoolDriver, Ratio
from fairshare.gateway.options import InstanceSpec, PoolSpec
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.wire.problems import Problem
from gateway.rig import FakeClock, Kept

URL = "http://a:1"


class StandIn:
    """A request without client or engine."""

    def __init__(self, driver: PoolDriver, name: str, *, ends_at: float = 1e9) -> None:
        self.driver = driver
        self.request = Request(id=name, team="red")
        self.id = name
        self.key_id = "key"
        self.prefix_keys: tuple[int, ...] = ()
        self.home: DrivenPool = driver.pools["chat"]
        self.queue = self.home.queue
        self.place = Place.NOWHERE
        self.began = False
        self.instance_id = ""
        self.heard_at = 0.0
        self.silence_limit_seconds = 1e9
        self.ends_at = ends_at
        self.prefix_keys: tuple[int, ...] = ()
        self.told: list[str] = []
        self.on_send: Callable[[], None] = lambda: None

    def wait(self, held: Held) -> None: ...

    def end(self, told: str, cost_units: float = 0.0) -> None:
        self.told.append(told)
        record = RequestRecord(
            id=self.request.id,
            endpoint="",
            arrived_at=0.0,
            total_seconds=0.0,
            outcome=Outcome.COMPLETED,
            cost_units=cost_units,
        )
        self.driver.ended(self, record)  # type: ignore[arg-type]

    def send(self, send: Send) -> None:
        self.instance_id = send.instance_id
        self.told.append("sent")
        self.on_send()

    def recall(self, recall: Recall) -> None:
        self.told.append("recalled")
        self.driver.aborted(self)  # type: ignore[arg-type]

    def refuse(self, refused: Refused) -> None:
        self.end("refused")

    def overdue(self, now: float) -> None:
        self.end("overdue")

    def engine_silent(self) -> None:
        self.end("cut")

    def fail(self, problem: Problem, message: str, *, engine_worked: bool = False) -> None:
        self.end(problem.code)


def on_a_driver(main: Callable[[PoolDriver, Pool, FakeClock, Kept], None], *, capacity: int = 2) -> None:
    """Runs `main` beside one pool of red's with one instance."""

    async def on_loop() -> None:
        clock, kept = FakeClock(), Kept()
        shares = {"red": Fraction(1)}
        pool = Pool("chat", capacity, shares, 0.0, clock)
        driver = PoolDriver(recorder=kept, clock=clock, wall=lambda: 0.0)
        spec = PoolSpec(
            name="chat", capacity=capacity, half_life_seconds=0.0, shares=shares, models={"tiny": "tiny"}, instances=()
        )
        driver.add_pool(spec, make_queue(pool, Mode.HOLD))
        driver.instance_changed("chat", InstanceSpec(url=URL), Instance(id=URL, part_slots=capacity))
        main(driver, pool, clock, kept)
        assert driver.open_requests == 0
        assert pool.live_slots == 0
        assert driver.pools["chat"].queue.snapshot().held == 0
        driver.close()

    asyncio.run(on_loop())


def submitted(driver: PoolDriver, *names: str, **kwargs: Any) -> list[StandIn]:
    standins = [StandIn(driver, name, **kwargs) for name in names]
    for standin in standins:
        driver.submit(standin)  # type: ignore[arg-type]
    return standins


def test_a_freed_slot_goes_to_the_next_in_the_same_turn() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        a, b, c = submitted(driver, "a", "b", "c")
        assert [s.place for s in (a, b, c)] == [Place.SENT, Place.SENT, Place.HELD]
        a.end("done", 7.0)
        assert c.told == ["sent"]
        assert pool.usage()[0]["red"] == 7.0
        b.end("done")
        c.end("done")

    on_a_driver(main)


def test_a_sweep_ends_each_overdue_request_once_although_the_end_of_one_ends_others() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        # When the first ends, the queue looks at the time and refuses the third, which the sweep has yet to come to.
        a, b, c = submitted(driver, "a", "b", "c", ends_at=1500.0)
        clock.now += 501.0
        driver.sweep()
        assert (a.told, b.told, c.told) == (["sent", "overdue"], ["sent", "overdue"], ["refused"])
        assert len(kept.records) == 3

    on_a_driver(main)


def test_no_silence_is_taken_for_longer_than_it_was() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        driver.sweep()
        (a,) = submitted(driver, "a", ends_at=1e9)
        a.silence_limit_seconds = 1.0
        clock.now += 0.9
        a.heard_at = driver.coarse.now  # heard now, and stamped with the time of the last sweep
        clock.now += 0.5
        driver.sweep()
        assert a.told == ["sent"]
        clock.now += 1.0
        driver.sweep()
        assert a.told == ["sent", "overdue"]

    on_a_driver(main)


def test_a_request_that_ends_while_the_decision_to_send_it_waits_gives_its_slot_back() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        a, b, c, d = submitted(driver, "a", "b", "c", "d")
        c.on_send = lambda: d.end("left")  # the client of d leaves between the two decisions
        pool.set_capacity(4)
        driver.capacity_changed("chat")
        assert c.told == ["sent"]
        assert d.told == ["left"]
        assert pool.live_slots == 3
        for standin in (a, b, c):
            standin.end("done")

    on_a_driver(main)


def test_a_fault_while_sending_ends_that_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        def breaks() -> None:
            raise RuntimeError("a fault of ours")

        a, b, c, d = submitted(driver, "a", "b", "c", "d")
        c.on_send = breaks
        a.end("done")
        assert c.told == ["sent", "internal_error"]
        assert d.told == ["sent"]  # the slot was free again
        b.end("done")
        d.end("done")

    with caplog.at_level(logging.ERROR):
        on_a_driver(main)
    assert "a fault of ours" in caplog.text


def test_a_recorder_that_raises_loses_its_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        def breaks(record: RequestRecord) -> None:
            raise RuntimeError("disk full")

        kept.finished = breaks  # type: ignore[method-assign]
        (a,) = submitted(driver, "a")
        a.end("done", 3.0)
        assert pool.usage()[0]["red"] == 3.0

    on_a_driver(main)
    assert "disk full" in caplog.text


def test_ending_all_ends_those_too_that_the_ends_of_others_set_going() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        standins = submitted(driver, *"abcdefgh")
        driver.fail_all(Problem("shutting_down", 503, "x"), "bye")
        assert all(standin.told[-1] == "shutting_down" for standin in standins)
        assert len(kept.records) == 8

    on_a_driver(main)


def test_a_deadline_of_the_queue_is_kept_by_the_sweep_at_the_latest() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        a, b = submitted(driver, "a", "b")
        clock.now += 301.0
        driver.sweep()
        assert b.told == ["refused"]
        a.end("done")

    on_a_driver(main, capacity=1)


def test_the_end_of_a_guest_that_was_taken_back_sets_the_timers_of_both_pools() -> None:
    def main(driver: PoolDriver, pool: Pool, clock: FakeClock, kept: Kept) -> None:
        spare = driver.pools["chat"]
        home_pool = Pool("home", 1, {"red": Fraction(0)}, 0.0, clock)
        spec = replace(spare.spec, name="home", shares={"red": Fraction(0)}, fallback="chat")
        driver.add_pool(spec, make_queue(home_pool, Mode.HOLD, fallback=spare.queue))
        owners = submitted(driver, "a")
        guest = StandIn(driver, "guest")
        guest.request = Request(id="guest", team="blue")
        guest.home = driver.pools["home"]
        guest.queue = guest.home.queue
        driver.submit(guest)  # type: ignore[arg-type]
        assert guest.told == ["sent"]
        owners += submitted(driver, "b")
        assert guest.told == ["sent", "recalled"]
        assert spare.timer is not None  # when the guest's seat is free
        assert guest.home.timer is not None  # when it has waited too long
        for standin in (*owners, guest):
            standin.end("done")
        driver.remove_pool("home")

    on_a_driver(main)


def test_a_ratio_follows_about_its_last_64_samples_and_starts_with_what_is_assumed() -> None:
    ratio = Ratio(4.0)
    assert (ratio.value, ratio.measured) == (4.0, None)
    ratio.add(0.0, 0.0)
    assert ratio.measured is None
    ratio.add(10.0, 5.0)
    assert ratio.value == 2.0
    for _ in range(640):
        ratio.add(30.0, 10.0)
    assert ratio.value == pytest.approx(3.0, rel=1e-3)
