"""A random search over pools and loads for a team that floods and does not get what it owns.

2 to 60 teams, C 1 to 64, one to three instances; floods, on-off and Poisson loads; requests of seconds to minutes, with
short and long teams in one pool and heavy tails; batch and interactive; both borrow orders.

Narrow requests get their own with or without headroom. With wide requests engines need headroom (`max_num_seqs` of 2 C,
and room for the widest request above their part of C): an engine of four seats runs a request of six in two goes, and
its last sequences keep seats that count for the team and do nothing for it (see `test_dispatch_under_load.py`).

A few dozen cases run with all tests; `make search-dispatch SEEDS=1000` runs many, and larger ones; FROM=1000 goes on.
"""

import os
import statistics

from support.search import random_case

SEEDS, FROM = int(os.environ.get("SEEDS", "0")), int(os.environ.get("FROM", "0"))


def search(seeds: range, most_requests: int, *, wide: bool) -> None:
    of_own: list[float] = []
    for seed in seeds:
        case = random_case(seed, most_requests, wide=wide)
        measured = case.run()
        team = min(measured, key=lambda name: measured[name])
        assert measured[team] >= 0.9, f"{team} gets {measured[team]:.3f} of its own in {case}"
        of_own += measured.values()
    assert statistics.median(of_own) >= 0.99


def test_every_flooding_team_gets_its_own() -> None:
    search(range(FROM, FROM + (SEEDS or 25)), 20_000 if SEEDS else 1500, wide=False)


def test_every_flooding_team_gets_its_own_beside_wide_requests() -> None:
    search(range(FROM, FROM + (SEEDS or 25)), 20_000 if SEEDS else 1500, wide=True)
