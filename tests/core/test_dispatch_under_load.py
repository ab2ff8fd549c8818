"""`hold` under the loads that broke earlier versions of its rules, in virtual time on the seat simulator.

Each test says what the load is, what an earlier rule made of it, and asserts what this one does.
"""

from collections.abc import Callable

import pytest

from fairshare import ServiceClass
from fairshare.core.decisions import BorrowOrder, HoldOptions, Instance, Mode
from support.desk import Desk
from support.seats import Load, World, between

HOUR = 3600.0
AROUND_10_S = between(5, 15)
HALVES = {"A": "1/2", "B": "1/2"}


def flood(team: str, clients: int = 20, duration: Callable[..., float] = AROUND_10_S, **more: object) -> Load:
    return Load(team, duration, clients=clients, **more)  # pyright: ignore[reportArgumentType]


def always(seconds: float) -> Callable[..., float]:
    return lambda rng: seconds


def test_two_teams_share_a_pool_of_one_slot() -> None:
    """By name, the remainder slot went to one of them for ever: 100 and 0 %."""
    world = World(1, HALVES, window_seconds=4000).run([flood("A"), flood("B")], 4000)
    assert 0.495 < world.share("A", 0, 4000) < 0.505


def test_sixty_teams_get_their_own_of_sixteen_slots() -> None:
    """With fixed remainders 44 of them got nothing for ever, and 16 got 3.75 times their own."""
    names = [f"team {number:02}" for number in range(60)]
    world = World(16, dict.fromkeys(names, "1/60"), window_seconds=8000)
    world.run([flood(name, 2) for name in names], 8000)
    of_own = [60 * world.share(name, 0, 8000) for name in names]
    assert min(of_own) > 0.99
    assert max(of_own) < 1.01


def test_fractions_of_slots_are_owned_exactly() -> None:
    """26/32 and 6/32 of ten slots: rounded to whole slots they got 80 and 20 %."""
    world = World(10, {"A": "26/32", "B": "6/32"}, window_seconds=8000).run([flood("A"), flood("B")], 8000)
    assert world.share("A", 0, 8000) == pytest.approx(26 / 32, abs=0.002)


def test_a_restart_with_phantoms_leaves_nothing_idle() -> None:
    """Phantoms in the room test: 599 s of the whole pool idle."""
    world = World(16, HALVES, engines={"e0": (16, 32, 32)})
    for team in HALVES:
        world.pool.add_phantoms(team, 8, until=600.0)
    world.run([flood("A"), flood("B")], 900)
    assert world.idle_slot_seconds_while_held == 0.0
    assert world.share("A", 600, 900) == pytest.approx(0.5, abs=0.01)


def test_recalls_hit_the_team_that_is_above_its_share_and_never_in_a_chain() -> None:
    """A is at its 8 of 16, stamped as borrowing; D borrows 8. By stamp: 12 recalls, 8 of them from A."""
    world = World(16, {"A": "8/16", "B": "4/16", "D": "4/16"}, abort_seconds=0.05)
    short = Load("A", always(10), count=8, streams=False)
    long = Load("A", always(100), count=8, streams=False)
    world.run([short, long, Load("D", always(100), count=8, start=20, streams=False)], 30)
    assert [stat.borrowing for stat in world.pool.snapshot() if stat.team == "A"] == [8]
    world.run([Load("B", always(10), count=4, start=30, streams=False)], 60)
    assert [job.team for job in world.recalled] == ["D"] * 4
    assert max(world.waits("B")) == pytest.approx(0.05)


def test_an_owner_does_not_wait_for_what_was_sent_before_capacity_was_cut() -> None:
    """C goes from 16 to 8 while A runs 16 long requests; B's four owners waited 49 s each."""
    world = World(16, HALVES, abort_seconds=0.05)

    def cut() -> None:
        world.pool.set_capacity(8)
        world.carry_out(world.queue.instance_changed(Instance(id="e0", part_slots=8, seats=16)))
        world.carry_out(world.queue.capacity_changed())

    world.at(10, cut)
    world.run([Load("A", always(60), count=16, streams=False), Load("B", always(10), count=4, start=11)], 100)
    assert len(world.recalled) == 4
    assert max(world.waits("B")) < 0.1


def toggling_owner(seats: int, recall_waste: float) -> World:
    """B owns half: twelve requests of a second, every four seconds; A floods with 20 s that show nothing until done."""
    world = World(16, HALVES, engines={"e0": (16, seats, seats)}, options=HoldOptions(recall_waste=recall_waste))
    bursts = [Load("B", always(1), count=12, start=start) for start in range(10, 600, 4)]
    return world.run([flood("A", 32, always(20), streams=False), *bursts], 600)


def thrown_away(world: World) -> float:
    """The part of the pool's slot-seconds that recalls threw away."""
    return world.queue.snapshot().recalled_slot_seconds_total / (world.capacity * world.now)


def test_an_owner_who_toggles_cannot_have_more_thrown_away_than_the_budget() -> None:
    """Without a budget a third of the pool was destroyed. 10 % over 600 s and a bucket of 300 s: 15 % at most."""
    assert thrown_away(toggling_owner(16, 1.0)) > 0.25
    assert 0.05 < thrown_away(toggling_owner(16, 0.1)) <= 0.15


def test_with_headroom_an_owner_who_toggles_waits_for_nothing_and_destroys_nothing() -> None:
    world = toggling_owner(32, 0.1)
    assert thrown_away(world) == 0.0
    # Eight of each burst are owners and run at once; the other four borrow, or wait for the first eight.
    waits = world.waits("B")
    assert waits[len(waits) * 8 // 12 - 1] == 0.0
    assert waits[-1] <= 1.0


def test_seats_that_nobody_told_are_learned_from_what_engines_report() -> None:
    """The engine has 64 seats and nobody said so: 266 needless recalls.

    Whoever streams is immune, so owners run beside it, the next scrape shows it, and later owners recall nobody. Where
    nothing streams nothing is learned, and the recall budget is what bounds the needless ones.
    """

    def recalls(*loads: Load) -> int:
        world = World(16, HALVES, engines={"e0": (16, 64, None)}, scrape_seconds=1.0)
        return len(world.run([*loads, Load("B", AROUND_10_S, rate=0.6)], 600).recalled)

    assert recalls(flood("A", 40)) == 0
    assert recalls(flood("A", 20), flood("A", 20, streams=False)) < 10
    assert recalls(flood("A", 40, streams=False)) > 100


WIDE = {"A": "12/16", "B": "4/16"}


def test_a_team_that_sends_only_wide_requests_gets_its_own() -> None:
    """B sends n = 6 and owns 4 of 16. Wide requests that must fit: B got nothing, 24.6 % of the pool idle for ever."""
    world = World(16, WIDE, engines={"e0": (16, 32, 32)}, window_seconds=3000)
    world.run([flood("A"), flood("B", slots=lambda rng: 6)], 3000)
    assert world.share("B", 0, 3000) == pytest.approx(0.25, abs=0.01)
    assert world.idle_slot_seconds_while_held == 0.0


def test_without_headroom_wide_requests_leave_holes_that_are_small() -> None:
    """With 16 seats the six sequences of a request start and end apart, and some of them wait for a seat."""
    world = World(16, WIDE, window_seconds=3000)
    world.run([flood("A"), flood("B", slots=lambda rng: 6)], 3000)
    assert 0.19 < world.share("B", 0, 3000) < 0.25
    assert world.idle_slot_seconds_while_held / (16 * 3000) < 0.07


def test_an_owner_goes_to_the_instance_on_which_a_seat_becomes_free() -> None:
    """Two instances of 8: the owner went to a full one while the recall freed the other, 55 s beside a free seat."""
    world = World(16, HALVES, engines={"e0": (8, 8, 8), "e1": (8, 8, 8)}, abort_seconds=0.05)
    world.run([flood("A", 16, always(60), streams=False), Load("B", always(5), count=8, start=5)], 30)
    assert max(world.waits("B")) == pytest.approx(0.05)
    assert len(world.recalled) == 8


@pytest.mark.parametrize(("batch_every", "part"), [(10, 0.1), (0, 0.0)])
def test_a_teams_own_interactive_load_does_not_starve_its_batch(batch_every: int, part: float) -> None:
    """Strictly interactive first, a team's batch got nothing in 600 s; every tenth costs interactive little."""
    world = World(16, {"A": 1}, options=HoldOptions(batch_every=batch_every))
    batch = flood("A", 8, between(1, 3), service_class=ServiceClass.BATCH, start=0.5)
    world.run([flood("A", 48, between(1, 3)), batch], 600)
    done = world.done("A", ServiceClass.BATCH)
    assert done / world.done("A") == pytest.approx(part, abs=0.005)
    waits = [
        job.started_at - job.submitted_at
        for job in world.jobs.values()
        if job.started_at is not None and job.load.service_class is ServiceClass.INTERACTIVE
    ]
    assert sorted(waits)[len(waits) // 2] < 4.8  # 4.0 s without batch


def test_a_borrower_uses_the_fallback_pool_at_any_time() -> None:
    """Tried on arrival only, a burst waited beside an idle pool: 600 slot-seconds idle next door."""
    spare = Desk(8, {"S": 1}, name="spare")
    chat = Desk(8, HALVES, fallback=spare)
    spare.submit("S", 8)
    chat.submit("A", 88)
    running, waited = [f"A{number}" for number in range(1, 9)], 0.0
    guests: list[str] = []
    for turn in range(20):  # every request takes ten seconds; the spare pool's own end at 20 s
        spare.time.now = 10.0 * (turn + 1)
        waited += 10.0 * chat.held()
        if turn < 1:
            guests = [f"S{number}" for number in range(1, 9)]
            said = chat.release(*running)
        else:
            said = spare.release(*guests) if turn == 1 else []
            said += chat.release(*running)
        running = [word.split()[1] for word in said]
    assert chat.held() == 0
    assert waited / 88 == pytest.approx(31.8, abs=0.1)  # 50 s without the spare pool


def weekend(order: BorrowOrder) -> World:
    """A and B own a quarter each. A is alone on an idle pool for 48 h; then both flood, half the pool is nobody's."""
    world = World(
        16,
        {"A": "1/4", "B": "1/4", "D": "1/2"},
        engines={"e0": (16, 32, 32)},
        half_life=7 * 24 * HOUR,
        options=HoldOptions(borrow_order=order, longest_wait_seconds=1000 * HOUR),
        window_seconds=HOUR,
    )
    long = between(0.5 * HOUR, 1.5 * HOUR)
    return world.run([flood("A", 20, long), flood("B", 20, long, start=48 * HOUR)], 160 * HOUR)


def test_after_a_weekend_of_idle_capacity_level_fairshare_evens_out_and_leaves_the_owner_its_own() -> None:
    """Slurm's way: who consumed 48 h of the pool alone gets none of the idle half for days, and always its own."""
    world = weekend(BorrowOrder.LEVEL_FAIRSHARE)
    for start in range(52, 120, 4):
        assert world.share("A", start * HOUR, (start + 4) * HOUR) == pytest.approx(0.25, abs=0.01)
    assert world.share("A", 156 * HOUR, 160 * HOUR) == pytest.approx(0.5, abs=0.05)


def test_after_a_weekend_of_idle_capacity_weighted_gives_everybody_a_part_of_it() -> None:
    world = weekend(BorrowOrder.WEIGHTED)
    parts = [world.share("A", (48 + hour) * HOUR, (48 + hour + 8) * HOUR) for hour in (2, 24, 56, 104)]
    assert parts[0] > 0.28
    assert parts == sorted(parts)
    assert 0.45 < parts[-1] < 0.5


def test_a_max_tokens_that_is_far_too_high_changes_nothing() -> None:
    """Estimates from a `max_tokens` left 100 times too high: 21 instead of 50 % for the first 100 s."""
    world = World(3, HALVES, window_seconds=100)
    world.run([flood("A", estimated_tokens=100_000), flood("B", estimated_tokens=1_000)], 400)
    assert world.share("A", 0, 100) == pytest.approx(0.5, abs=0.05)
    assert world.share("A", 0, 400) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("mode", [Mode.HOLD, Mode.PASS])
def test_all_that_was_submitted_is_served_once(mode: Mode) -> None:
    world = World(4, HALVES, mode=mode).run([Load("A", AROUND_10_S, count=50), Load("B", AROUND_10_S, count=50)], 500)
    assert world.done("A") == world.done("B") == 50
    assert world.pool.live_slots == 0
