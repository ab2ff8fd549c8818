"""What a pool withstands: many threads at once, and callers who make team names up."""

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from fairshare import Grant, Pool
from fairshare.core.pool import MOST_IDLE_STRANGERS

THREADS = 8
ROUNDS = 300


@pytest.fixture
def _threads_switch_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _in_threads(*jobs: Callable[[], None]) -> None:
    """Run all at once, started by a barrier; what one of them raises is raised here."""
    barrier = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout=30)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("_threads_switch_all_the_time")
def test_nothing_is_lost_when_many_threads_acquire_release_and_look() -> None:
    pool = Pool("p", 4, {f"t{n}": "1/12" for n in range(12)}, 0)
    kept: list[Grant] = []

    def work() -> None:
        for n in range(ROUNDS):
            team = f"t{n % 13}"  # t12 is a stranger
            grant = pool.acquire(team, estimated_tokens=2, slots=2)
            recorded = pool.record(pool.state(team), now=0.0, priority=0, borrowing=True, provisional_cost_units=1)
            pool.add_phantoms(team, 1, until=float("inf"))
            grant.release(1)
            recorded.release(1)
            pool.charge(team, 1)
            pool.drop_phantom(team)
        kept.append(pool.acquire("t0"))

    def look() -> None:
        for _ in range(30):
            for stat in pool.snapshot():
                assert 0 <= stat.borrowing <= stat.in_flight <= 3 * THREADS + THREADS
            pool.usage()
            pool.set_capacity(5)

    _in_threads(*[work] * THREADS, look)
    usage, in_flight = pool.usage()
    assert sum(usage.values()) == 3 * THREADS * ROUNDS
    assert in_flight == {f"t{n}": 0 for n in range(12)} | {"t0": THREADS, "t12": 0}
    assert (pool.live_slots, pool.phantom_slots) == (THREADS, 0)
    assert all(stat.in_flight_tokens == 0 for stat in pool.snapshot())
    for grant in kept:
        grant.release(0)
    assert pool.live_slots == 0
    assert [pool.borrow_key(f"t{n}") for n in range(12)] == pytest.approx([usage[f"t{n}"] * 12 for n in range(12)])


@pytest.mark.usefixtures("_threads_switch_all_the_time")
def test_try_acquire_from_many_threads_never_passes_capacity() -> None:
    pool = Pool("p", 5, {"a": 1}, 0)
    taken: list[Grant] = []

    def work() -> None:
        taken.extend(grant for _ in range(ROUNDS) if (grant := pool.try_acquire("a")))

    _in_threads(*[work] * THREADS)
    assert len(taken) == pool.live_slots == 5


@pytest.mark.usefixtures("_threads_switch_all_the_time")
def test_a_grant_released_by_many_threads_at_once_is_released_once() -> None:
    pool = Pool("p", 5, {"a": 1}, 0)
    for _ in range(50):
        grant = pool.acquire("a")
        _in_threads(*[lambda grant=grant: grant.release(1)] * 4)
    assert pool.usage() == ({"a": 50}, {"a": 0})


@pytest.mark.usefixtures("_threads_switch_all_the_time")
def test_a_remote_grant_released_by_many_threads_at_once_is_released_once() -> None:
    released: list[float] = []
    for _ in range(50):
        grant = Grant.remote("a", 0, False, False, released.append)
        _in_threads(*[lambda grant=grant: grant.release(1)] * 4)
    assert released == [1] * 50


def _settle_soon(pool: Pool, name: str) -> None:
    now = pool.begin()
    pool.settle(
        pool.record(pool.state(name), now=now, priority=100, borrowing=True, provisional_cost_units=1), 1, now=now
    )


def _phantom_and_drop(pool: Pool, name: str) -> None:
    pool.add_phantoms(name, 1, until=float("inf"))
    pool.drop_phantom(name)


@pytest.mark.parametrize(
    "use",
    [
        lambda pool, name: pool.acquire(name).release(1),
        lambda pool, name: pool.adopt(name, 100, True).release(1),
        lambda pool, name: pool.charge(name, 1),
        lambda pool, name: pool.set_usage(name, 1),
        lambda pool, name: pool.state(name),
        lambda pool, name: pool.rank(name),
        lambda pool, name: pool.borrow_key(name),
        _phantom_and_drop,
        _settle_soon,
    ],
    ids=["acquire", "adopt", "charge", "set_usage", "state", "rank", "borrow_key", "phantoms", "record"],
)
def test_made_up_names_do_not_grow_memory(use: Callable[[Pool, str], object]) -> None:
    pool = Pool("p", 4, {"a": 1}, 60)
    tracemalloc.start()
    for n in range(2 * MOST_IDLE_STRANGERS):
        use(pool, f"made-up-{n:06}")
    half, _ = tracemalloc.get_traced_memory()
    for n in range(2 * MOST_IDLE_STRANGERS, 6 * MOST_IDLE_STRANGERS):
        use(pool, f"made-up-{n:06}")
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert full - half < 64 * 1024
    assert len(pool.snapshot()) <= MOST_IDLE_STRANGERS + 1


def test_a_hundred_thousand_made_up_names_leave_a_thousand_and_the_newest() -> None:
    pool = Pool("p", 4, {"a": 1}, 60)
    open_grant = pool.acquire("first")
    for n in range(100_000):
        pool.acquire(f"made-up-{n}").release(1)
    shown = {stat.team for stat in pool.snapshot()}
    assert len(shown) == MOST_IDLE_STRANGERS + 2
    assert {"a", "first", "made-up-99999", f"made-up-{100_000 - MOST_IDLE_STRANGERS}"} <= shown
    open_grant.release(1)


def test_the_stranger_that_was_idle_longest_is_forgotten_first() -> None:
    pool = Pool("p", 4, {}, 60)
    for n in range(MOST_IDLE_STRANGERS):
        pool.charge(f"s{n}", 1)
    pool.charge("s0", 1)
    pool.charge("one-more", 1)
    shown = {stat.team for stat in pool.snapshot()}
    assert "s0" in shown
    assert "s1" not in shown
    assert len(shown) == MOST_IDLE_STRANGERS


def test_what_is_recorded_with_a_forgotten_strangers_record_counts_for_that_stranger() -> None:
    pool = Pool("chat", 4, {"a": 1}, 0, clock=lambda: 0.0)
    state = pool.state("stranger")
    pool.acquire("stranger").release(1.0)
    for number in range(MOST_IDLE_STRANGERS):
        pool.acquire(f"other {number}").release(1.0)
    assert pool.state("stranger") is not state
    grant = pool.record(state, now=0.0, priority=31, borrowing=True)
    assert pool.state("stranger").in_flight_slots == 1
    grant.release(1.0)
    assert pool.state("stranger").in_flight_slots == 0


def test_a_stranger_that_got_a_share_is_never_forgotten() -> None:
    pool = Pool("p", 4, {}, 60)
    pool.charge("new", 1)
    pool.set_shares({"new": 1})
    for n in range(MOST_IDLE_STRANGERS + 1):
        pool.charge(f"s{n}", 1)
    assert pool.rank("new") == 0
    assert "new" in pool.usage()[0]


def test_charges_between_two_ranks_are_remembered_once_for_each_team() -> None:
    pool = Pool("p", 4, {"a": 0.5, "b": 0.5}, 60)
    for _ in range(1000):
        pool.charge("a", 1)
    assert len(pool._stale) == 1  # pyright: ignore[reportPrivateUsage]
