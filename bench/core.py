"""What one decision costs in the core: `make bench-core`.

Each figure is the best of several runs (the least disturbed), interleaved over the sizes, in µs of CPU. The baseline is
the same number of calls that take a lock and change two dictionaries: the least that any such bookkeeping costs here.
"""

import argparse
import time
from collections.abc import Callable
from threading import Lock

from rich.console import Console
from rich.table import Table

from fairshare import Pool
from fairshare.core.decisions import Decision, HoldOptions, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue

TEAMS = (10, 100, 1_000, 10_000)
HELD = (100, 1_000, 10_000, 100_000)
CALLS = 2_000


def timed(work: Callable[[int], None], calls: int = CALLS) -> float:
    """CPU µs per call."""
    began = time.process_time()
    for number in range(calls):
        work(number)
    return (time.process_time() - began) / calls * 1e6


def baseline() -> Callable[[int], None]:
    lock, first, second = Lock(), dict[int, int](), dict[int, float]()

    def work(number: int) -> None:
        for _ in range(2):
            with lock:
                first[number & 15] = first.get(number & 15, 0) + 1
                second[number & 15] = second.get(number & 15, 0.0) + 1.0

    return work


def acquire_release(teams: int) -> Callable[[int], None]:
    """Every request borrows and is charged, so that ranks move all the time."""
    names = [f"team{number:05}" for number in range(teams)]
    pool = Pool("bench", teams // 2, dict.fromkeys(names, f"1/{teams}"), 3600.0)

    def work(number: int) -> None:
        pool.acquire(names[number * 7919 % teams]).release(1.0 + number % 13)

    return work


def dispatch(teams: int, held: int, *, whole_slots: int = 0) -> Callable[[int], None]:
    """One request ends, the next of `held` goes, and a new one arrives: three events of a saturated pool.

    With `whole_slots` each team owns that many and nothing waits: a request arrives, begins and ends within share.
    """
    names = [f"team{number:05}" for number in range(teams)]
    capacity = max(64, teams * whole_slots)
    pool = Pool("bench", capacity, dict.fromkeys(names, f"1/{teams}"), 3600.0)
    queue = make_queue(
        pool,
        Mode.HOLD,
        options=HoldOptions(max_held=1 << 20, max_held_per_team=1 << 20),
        instances=[Instance(id=f"engine{number}", part_slots=capacity // 4, seats=capacity) for number in range(4)],
    )
    running: list[str] = []
    ids = iter(range(1 << 60))

    def take(decisions: list[Decision]) -> None:
        running.extend(decision.request_id for decision in decisions if isinstance(decision, Send))

    def arrive(number: int) -> None:
        take(queue.submitted(Request(id=str(next(ids)), team=names[number * 7919 % teams])))

    for number in range(capacity + held if not whole_slots else 0):
        arrive(number)
    turn = [0]

    def saturated(number: int) -> None:
        ended = running[turn[0]]
        turn[0] += 1
        take(queue.released(ended, 1.0 + number % 13))
        queue.first_byte(running[-1])
        arrive(number)

    def within_share(number: int) -> None:
        arrive(number)
        queue.first_byte(running[-1])
        queue.released(running.pop(), 1.0)

    return within_share if whole_slots else saturated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds: int = parser.parse_args().rounds
    cases: dict[str, Callable[[int], None]] = {"baseline: lock and two dictionaries, twice": baseline()}
    cases |= {f"acquire + release, {teams:,} teams": acquire_release(teams) for teams in TEAMS}
    cases |= {
        f"hold: arrive, begin, end within share, {teams:,} teams": dispatch(teams, 0, whole_slots=2) for teams in TEAMS
    }
    cases |= {f"hold: end, next, arrive, 10 teams, {held:,} held": dispatch(10, held) for held in HELD}
    cases |= {f"hold: end, next, arrive, 1,000 teams, {held:,} held": dispatch(1_000, held) for held in HELD}
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, work in cases.items():
            best[name] = min(best[name], timed(work))
    base = next(iter(best.values()))
    table = Table("case", "µs of CPU", "x baseline")
    for name, value in best.items():
        table.add_row(name, f"{value:.2f}", f"{value / base:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
