"""The history of pools: bounded rings, answers in bounded points, minutes that survive a restart."""

import asyncio
import tracemalloc

import msgspec

from fairshare.gateway.history import KEPT_SECONDS, MOST_POINTS, MOST_TEAMS, History
from fairshare.gateway.status import PoolStatus
from fairshare.storage.database import StoreUnavailable
from fairshare.storage.history import HistoryRow
from gateway.statuses import pool_status_of, team_status


def chat(in_flight: int = 0, *, held: int = 0, borrowing: int = 0, capacity: int = 16) -> PoolStatus:
    red = team_status("red", in_flight=in_flight, borrowing=borrowing, held=held, level_fairshare=0.5)
    return pool_status_of("chat", capacity=capacity, in_flight=in_flight, held=held, teams=[red, team_status("blue")])


class Shelf:
    """Minutes in memory; may be away."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, float], str] = {}
        self.is_away = False

    async def save(self, rows: "list[HistoryRow]", *, forget_before: float) -> None:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        self.rows |= {(row.pool, row.began_at): row.sample for row in rows}
        self.rows = {place: sample for place, sample in self.rows.items() if place[1] >= forget_before}

    async def since(self, began_at: float) -> list[HistoryRow]:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return [HistoryRow(*place, sample) for place, sample in sorted(self.rows.items()) if place[1] >= began_at]


def test_the_last_ten_minutes_have_a_point_for_each_second() -> None:
    history = History()
    for second in range(1, 701):
        history.add(float(second), [chat(second % 8)])
    answer = history.pool("chat", since=100.0, teams=["red"])
    assert answer is not None
    assert (len(answer.at), answer.step_seconds, answer.at[-1]) == (600, 1.0, 700.0)
    assert answer.teams["red"].within[-3:] == [2.0, 3.0, 4.0]
    assert answer.total is not None
    assert answer.total.owns[-1] == 16.0


def test_older_steps_are_means_and_what_was_taken_back_is_their_sum() -> None:
    recalls = {("chat", "red"): 0}
    history = History(recalls=lambda: recalls)
    for second in range(7200):
        recalls["chat", "red"] += second % 2
        history.add(float(second), [chat(4 if second % 2 else 0, held=2)])
    answer = history.pool("chat", since=0.0, teams=["red"])
    assert answer is not None
    assert answer.step_seconds == 10.0
    red = answer.teams["red"]
    assert set(red.within[:-1]) == {2.0}
    assert set(red.held[:-1]) == {2.0}
    assert set(red.recalled[:-1]) == {5.0}


def test_what_all_replicas_took_back_counts_from_the_first_look_also_when_another_one_owns_the_pool() -> None:
    history = History(recalls=dict)
    for second, recalls in enumerate((7, 7, 9, 0, 2)):
        history.add(float(second), [msgspec.structs.replace(chat(4), recalls=recalls)])
    answer = history.pool("chat", since=-1.0)
    assert answer is not None
    assert answer.total is not None
    assert answer.total.recalled == [0.0, 0.0, 2.0, 0.0, 2.0]


def test_what_a_team_would_have_to_give_back_is_borrowed() -> None:
    history = History()
    history.add(1.0, [chat(12, borrowing=12)])
    answer = history.pool("chat", since=0.0, teams=["red"])
    assert answer is not None
    assert (answer.teams["red"].within, answer.teams["red"].borrowing) == ([8.0], [4.0])


def test_memory_and_answers_stay_bounded() -> None:
    few = pool_status_of("few", teams=[team_status("red", in_flight=1), team_status("blue", held=3)])
    history = History()
    tracemalloc.start()
    for second in range(700):
        history.add(float(second), [few])
    before = tracemalloc.get_traced_memory()[0]
    for second in range(700, 1400):
        history.add(float(second), [few])
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000, "after ten minutes only the coarse rings grow"
    teams = [team_status(f"team-{n}", in_flight=n % 5, held=n % 3, share=0.01) for n in range(400)]
    status = pool_status_of("chat", teams=teams, in_flight=800, held=400)
    for second in range(300):
        history.add(float(second), [status])
    by_team = history.by_team("chat", since=0.0)
    assert by_team is not None
    assert len(by_team.teams) == MOST_TEAMS
    assert len(by_team.at) <= 120
    assert by_team.total is not None
    assert by_team.total.held[-1] == 400.0, "teams without room in a frame are in the sum"


def test_two_days_fit_in_one_answer() -> None:
    history = History()
    for minute in range(3000):
        history.add(minute * 60.0, [chat(minute % 7)])
    answer = history.pool("chat", since=3000 * 60.0 - KEPT_SECONDS[-1], teams=["red"])
    assert answer is not None
    assert 500 < len(answer.at) <= MOST_POINTS
    assert answer.at == sorted(set(answer.at))


def test_level_fairshare_is_known_to_the_second() -> None:
    history = History()
    for second in range(100):
        history.add(float(second), [chat(1)])
    assert history.levels("chat", 50.5) == {"red": 0.5, "blue": float("inf")}
    assert history.levels("chat", -5.0) == {}
    assert history.levels("nobody", 50.0) == {}


def test_a_team_that_comes_later_was_not_there_before() -> None:
    one = pool_status_of("chat", teams=[team_status("red", in_flight=2)], in_flight=2)
    two = pool_status_of("chat", teams=[team_status("blue", in_flight=4)], in_flight=4)
    history = History()
    history.add(1.0, [one])
    history.add(2.0, [two])
    answer = history.pool("chat", since=0.0, teams=["red", "blue"])
    assert answer is not None
    assert answer.teams["red"].within == [2.0, 0.0]
    assert answer.teams["blue"].within == [0.0, 4.0]


def test_a_pool_that_is_gone_leaves_nothing() -> None:
    history = History()
    history.add(1.0, [chat()])
    history.add(2.0, [])
    assert history.pool("chat", since=0.0) is None


def test_minutes_survive_a_restart_and_go_on() -> None:
    async def main() -> None:
        shelf = Shelf()
        first = History(store=shelf)
        await first.restore(0.0)
        for second in range(600, 790):
            first.add(float(second), [chat(6, held=3)])
        await first.save(790.0, with_last=True)
        second_life = History(store=shelf)
        await second_life.restore(800.0)
        for second in range(800, 900):
            second_life.add(float(second), [chat(2)])
        answer = second_life.pool("chat", since=800.0 - 7200.0, teams=["red"])
        assert answer is not None
        assert answer.kept
        assert answer.at == sorted(answer.at)
        assert (answer.teams["red"].within[0], answer.teams["red"].held[0]) == (6.0, 3.0)
        assert answer.teams["red"].within[-1] == 2.0

    asyncio.run(main())


def test_a_store_that_is_away_is_said_and_gets_its_minutes_later() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.is_away = True
        history = History(store=shelf)
        for second in range(200):
            history.add(float(second), [chat(1)])
        await history.save(200.0)
        assert history.finding() == (
            "The history of the status page is not being saved (the store is away); it is in memory until then."
        )
        shelf.is_away = False
        await history.save(201.0)
        assert history.finding() is None
        assert sorted(began_at for _, began_at in shelf.rows) == [0.0, 60.0, 120.0]

    asyncio.run(main())


def test_what_the_store_holds_of_another_version_is_left_alone() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.rows = {("chat", 0.0): "{}", ("chat", 60.0): "nonsense"}
        history = History(store=shelf)
        await history.restore(100.0)
        assert history.pool("chat", since=0.0) is None

    asyncio.run(main())
