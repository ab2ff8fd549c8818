"""Random pools and loads: does every team that floods get what it owns?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from fairshare import ServiceClass
from fairshare.core.decisions import BorrowOrder, HoldOptions
from support.seats import Draw, Load, World, between

REQUESTS = 200
"""Over a run of so many of its requests a team is measured."""

WIDEST = 6
"""Slots of the widest requests. Engines have seats for one above their part: it must be able to run at once."""


@dataclass
class Case:
    """A random pool with its loads, and how long to run it."""

    seed: int
    world: World
    loads: list[Load]
    flooding: list[str]
    owns: dict[str, float]
    """Slots."""
    seconds: float

    def run(self) -> dict[str, float]:
        """Slot-seconds of each flooding team over what it owns."""
        self.world.run(self.loads, self.seconds)
        return {team: self.world.slot_seconds[team] / (self.owns[team] * self.seconds) for team in self.flooding}

    def __str__(self) -> str:
        world, owns = self.world, {team: round(own, 3) for team, own in sorted(self.owns.items())}
        return f"seed {self.seed}: C={world.capacity} flooding={self.flooding} owns={owns} engines={world.engines}"


def _drawn(rng: random.Random, mean: float) -> tuple[Draw, float]:
    """A distribution of durations with about this mean, and its real mean."""
    kind = rng.choice(["even", "even", "spread", "two kinds", "tail"])
    if kind == "even":
        return between(0.8 * mean, 1.2 * mean), mean
    if kind == "spread":
        return between(0.1 * mean, 1.9 * mean), mean
    if kind == "two kinds":  # one in five is ten times as long
        return lambda draw: mean * (3.5 if draw.random() < 0.2 else 0.375), mean
    return lambda draw: min(8.0, 0.5 * draw.paretovariate(1.5)) * mean, 1.2 * mean


def _widths(rng: random.Random, own: float) -> tuple[Callable[[random.Random], int], float]:
    """Widths of a team's requests, and their mean."""
    widest = max(2, math.ceil(2 * own))
    widths = rng.choice([[1], [min(WIDEST, widest)], [1, 1, 1, min(4, widest)], [min(2, widest), min(3, widest)]])
    return lambda draw: draw.choice(widths), sum(widths) / len(widths)


def random_case(seed: int, most_requests: int, *, wide: bool | None = None) -> Case:
    """A pool of 2 to 60 teams and 1 to 64 slots, drawn again until about `most_requests` requests are enough."""
    rng = random.Random(seed)
    while (case := _draw(rng, seed, most_requests, rng.random() < 0.3 if wide is None else wide)) is None:
        pass
    return case


def _draw(rng: random.Random, seed: int, most_requests: int, wide: bool) -> Case | None:
    count = round(math.exp(rng.uniform(math.log(2), math.log(60))))
    capacity = round(math.exp(rng.uniform(0, math.log(64))))
    names = [f"t{number}" for number in range(count)]
    weights = rng.choice(
        [
            [1] * count,
            [rng.randint(1, 10) for _ in names],
            [rng.randint(1, 1000) for _ in names],
            [1000, *[rng.randint(1, 30) for _ in names[1:]]],
        ]
    )
    promised_percent = rng.choice([100, 100, 100, 95, 80, 55])
    total = Fraction(sum(weights)) / Fraction(promised_percent, 100)
    shares = {name: weight / total for name, weight in zip(names, weights, strict=True)}
    owns = {name: float(share * capacity) for name, share in shares.items()}
    how_many = rng.choice([0.3, 0.7, 1.0, 1.0])
    flooding = [name for name in names if rng.random() < how_many] or names[:1]
    same_mean = rng.random() < 0.5
    loads: list[Load] = []
    seconds = rate = 0.0
    for name in names:
        duration, mean = _drawn(rng, 10.0 if same_mean else rng.choice([2.0, 10.0, 30.0]))
        slots, width = _widths(rng, owns[name]) if wide else ((lambda draw: 1), 1.0)
        streams = rng.random() < 0.7
        seconds = max(seconds, REQUESTS * mean)  # a turn is passed on so often, whoever holds it
        if name in flooding:
            # Always more is held than it owns, even if it has all of the pool in flight.
            clients = math.ceil((capacity + 2 * owns[name]) / width) + 6
            parts = rng.choice([[1.0], [1.0], [0.5, 0.5], [0.1, 0.9]])
            for part, service_class in zip(parts, ServiceClass, strict=False):
                loads.append(
                    Load(
                        name,
                        duration,
                        clients=math.ceil(part * clients),
                        slots=slots,
                        service_class=service_class,
                        streams=streams,
                    )
                )
            seconds = max(seconds, 1.05 * REQUESTS * width * mean / owns[name])
        elif rng.random() < 0.5:
            on_off = (rng.choice([3.0, 60.0]), rng.choice([10.0, 100.0]))
            clients = math.ceil(rng.choice([0.5, 1.0, 3.0]) * owns[name] / width)
            loads.append(Load(name, duration, clients=clients, on_off_seconds=on_off, slots=slots, streams=streams))
        else:
            arrivals = rng.choice([0.3, 0.9, 1.5]) * owns[name] / (mean * width)
            loads.append(Load(name, duration, rate=arrivals, slots=slots, streams=streams))
        rate += max(owns[name], capacity / count) / (mean * width)
    if seconds * rate > most_requests:
        return None
    instances = rng.randint(1, min(3, capacity))
    parts = [capacity // instances + (number < capacity % instances) for number in range(instances)]
    factor, known = (2, True) if wide else rng.choice([(1, True), (2, True), (2, False)])
    seats = [max(factor * part, part + WIDEST if wide else 0) for part in parts]
    world = World(
        capacity,
        shares,
        engines={f"e{n}": (part, seats[n], seats[n] if known else None) for n, part in enumerate(parts)},
        options=HoldOptions(
            borrow_order=rng.choice(list(BorrowOrder)),
            recall=rng.random() < 0.8,
            longest_wait_seconds=1e9,
            max_held=10**6,
            max_held_per_team=10**6,
        ),
        half_life=rng.choice([0.0, 86400.0]),
        seed=seed,
        abort_seconds=0.05,
        window_seconds=1e9,
        scrape_seconds=0.0 if known else 5.0,
    )
    return Case(seed, world, loads, flooding, owns, seconds)
