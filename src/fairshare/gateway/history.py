"""What each pool did in the last seconds, hours and days: bounded rings in memory, and whole minutes in the store.

A frame is one step of time. It costs 20 bytes per team that it shows, so a pool of a hundred teams takes about 9 MB for
two days, whatever its load.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean
from typing import Protocol

import msgspec

from fairshare.gateway.status import PoolStatus, TeamStatus
from fairshare.storage.database import StoreUnavailable
from fairshare.storage.history import HistoryRow

log = logging.getLogger("fairshare.history")

STEPS_SECONDS = (1.0, 10.0, 60.0)
"""The steps of the rings."""

KEPT_SECONDS = (600.0, 7200.0, 172800.0)
"""How far back each reaches: ten minutes, two hours, two days."""

MOST_TEAMS = 200
"""Teams in one frame: those that own something first, then those that do something."""

MOST_POINTS = 720
"""Points of one answer."""

MOST_POINTS_BY_TEAM = 120
"""The same, where every team is in the answer."""

LONGEST_BY_TEAM_SECONDS = KEPT_SECONDS[1]
"""How far back such an answer reaches: it is made on the event loop that relays requests."""

NOTHING = (0.0, 0.0, 0.0, 0.0)


class Series(msgspec.Struct, kw_only=True):
    """What a team, or a pool as a whole, did: one number for each point in time, the mean over the step."""

    owns: list[float]
    """Slots that are its own."""
    within: list[float]
    """Slots in flight that are its own."""
    borrowing: list[float]
    """Slots in flight beyond that."""
    held: list[float]
    """Requests that waited in the gateway."""
    recalled: list[float]
    """Requests that were taken back from engines: the sum over the step."""


class PoolHistory(msgspec.Struct, kw_only=True):
    """What the status page draws."""

    pool: str
    step_seconds: float
    """From one point to the next; points that are older than the ring of this step are further apart."""
    kept: bool
    """Whether it survives a restart."""
    at: list[float]
    """When each step ended, wall clock."""
    capacity: list[float]
    """C."""
    total: Series | None
    """The pool as a whole."""
    teams: dict[str, Series]


class _Kept(msgspec.Struct, kw_only=True):
    """A minute as the store has it."""

    capacity: float
    teams: dict[str, list[float]]
    """Owns, within, borrowing, held, recalled; of a team that did nothing only what it owns."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One step of one pool."""

    ended_at: float
    """Wall clock."""
    capacity: float
    teams: tuple[str, ...]
    """The same object in frame after frame, while the same teams are shown."""
    owns: tuple[float, ...]
    """Likewise."""
    doing: "array[float]"
    """Within, borrowing, held and recalled of each team."""
    levels: "array[float]"
    """LF of each team when the step ended (infinite: it has used nothing); empty: not known any more."""
    total: tuple[float, float, float, float, float]
    """Owns, within, borrowing, held, recalled of all teams, also of those that have no room in the frame."""

    def of(self, team: str) -> tuple[float, ...]:
        """Owns, within, borrowing, held, recalled."""
        try:
            index = self.teams.index(team)
        except ValueError:
            return (0.0, *NOTHING)
        return (self.owns[index], *self.doing[4 * index : 4 * index + 4])


@dataclass(slots=True)
class _Ring:
    """Frames of one step, and what the next one is made of."""

    step_seconds: float
    frames: deque[Frame]
    gathered: list[Frame] = field(default_factory=lambda: list[Frame]())


class _PoolRings:
    """Everything of one pool."""

    def __init__(self) -> None:
        self.rings = [
            _Ring(step, deque(maxlen=round(kept / step)))
            for step, kept in zip(STEPS_SECONDS, KEPT_SECONDS, strict=True)
        ]

    def add(self, frame: Frame) -> Frame | None:
        """A second has ended. Returns the minute, if it ended with it."""
        self.rings[0].frames.append(frame)
        minute: Frame | None = None
        for ring in self.rings[1:]:
            gathered = ring.gathered
            if gathered and _step(gathered[-1], ring) != _step(frame, ring):
                ended = self._end(ring)
                minute = ended if ring is self.rings[-1] else None
            ring.gathered.append(frame)
        return minute

    def end_minute(self) -> Frame | None:
        """The minute so far, as it would be if it ended now."""
        gathered = self.rings[-1].gathered
        return merged(gathered) if gathered else None

    @staticmethod
    def _end(ring: _Ring) -> Frame:
        frame = merged(ring.gathered)
        ring.frames.append(frame)
        ring.gathered.clear()
        return frame

    def frames(self, since: float, most_points: int) -> tuple[float, list[Frame]]:
        """The step of the finest ring that reaches back so far in so many points, and its frames; before them those
        of coarser ones."""
        finest = self.rings[0].frames
        span_seconds = finest[-1].ended_at - since if finest else 0.0
        chosen = next(
            (
                index
                for index, (step, kept) in enumerate(zip(STEPS_SECONDS, KEPT_SECONDS, strict=True))
                if span_seconds <= kept and span_seconds / step <= most_points
            ),
            len(self.rings) - 1,
        )
        found: list[Frame] = []
        until = float("inf")
        for ring in self.rings[chosen:]:
            found = [frame for frame in ring.frames if since < frame.ended_at < until] + found
            if found:
                until = found[0].ended_at - ring.step_seconds / 2
        gathered = self.rings[chosen].gathered
        if gathered:
            found.append(merged(gathered))
        return self.rings[chosen].step_seconds, found


class Minutes(Protocol):
    """Keeps whole minutes (`fairshare.storage.history.HistoryStore`)."""

    async def save(self, rows: Iterable[HistoryRow], *, forget_before: float) -> None: ...

    async def since(self, began_at: float) -> list[HistoryRow]: ...


class History:
    """The history of every pool. Lives on the event loop's thread."""

    def __init__(
        self,
        *,
        store: Minutes | None = None,
        recalls: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        """
        Args:
            store: where whole minutes are kept; None: nothing survives a restart.
            recalls: how many requests of (pool, team) were taken back since the start, as far as they went through
                this process.
        """
        self._store = store
        self._recalls = recalls
        self._recalls_seen: dict[tuple[str, str], int] = {}
        self._total_seen: dict[str, int] = {}
        """Pool → how many of its requests had been taken back."""
        self._pools: dict[str, _PoolRings] = {}
        self._unsaved: dict[tuple[str, float], str] = {}
        self._is_restored = store is None
        self._failure: str | None = None

    @property
    def is_kept(self) -> bool:
        return self._store is not None

    def finding(self) -> str | None:
        """What is wrong with it, for the status page."""
        if self._failure is None:
            return None
        return f"The history of the status page is not being saved ({self._failure}); it is in memory until then."

    # ------------------------------------------------------------------ seconds

    def add(self, now: float, statuses: Sequence[PoolStatus]) -> None:
        """A second has ended (`now`: wall clock)."""
        recalls = self._recalls()
        for status in statuses:
            rings = self._pools.get(status.name)
            if rings is None:
                rings = self._pools[status.name] = _PoolRings()
            last = rings.rings[0].frames[-1] if rings.rings[0].frames else None
            minute = rings.add(self._frame(now, status, last, recalls))
            if minute is not None and self._store is not None:
                self._remember(status.name, minute)
        self._recalls_seen = dict(recalls)
        present = {status.name for status in statuses}
        for gone in self._pools.keys() - present:
            del self._pools[gone]

    def _frame(
        self, now: float, status: PoolStatus, last: Frame | None, recalls: Mapping[tuple[str, str], int]
    ) -> Frame:
        shown = status.teams if len(status.teams) <= MOST_TEAMS else _foremost(status.teams)
        teams = tuple(team.team for team in shown)
        owns = tuple(float(team.reserved) for team in shown)
        if last is not None:
            teams = last.teams if teams == last.teams else teams
            owns = last.owns if owns == last.owns else owns
        doing = array("f")
        for team in shown:
            place = (status.name, team.team)
            borrowing = borrowed_slots(team)
            recalled = recalls.get(place, 0) - self._recalls_seen.get(place, 0) if recalls else 0
            doing.extend((team.in_flight - borrowing, borrowing, team.held, recalled))
        borrowing = sum(map(borrowed_slots, status.teams))
        # Of all replicas; a new owner counts from 0 again.
        recalled = max(0, status.recalls - self._total_seen.get(status.name, status.recalls))
        self._total_seen[status.name] = status.recalls
        return Frame(
            ended_at=now,
            capacity=float(status.capacity),
            teams=teams,
            owns=owns,
            doing=doing,
            levels=array("f", [float("inf") if t.level_fairshare is None else t.level_fairshare for t in shown]),
            total=(
                float(sum(team.reserved for team in status.teams)),
                float(status.in_flight - borrowing),
                float(borrowing),
                float(status.held),
                float(recalled),
            ),
        )

    # ------------------------------------------------------------------ answers

    def nothing(self, name: str) -> PoolHistory:
        """The history of a pool that is new."""
        return self._answer(name, STEPS_SECONDS[0], (), (), with_total=True, most_points=MOST_POINTS)

    def pool(
        self, name: str, *, since: float, teams: Sequence[str] = (), with_total: bool = True
    ) -> PoolHistory | None:
        """What a pool, and some of its teams, did since then (wall clock); None: there is no such pool."""
        rings = self._pools.get(name)
        if rings is None:
            return None
        step_seconds, frames = rings.frames(since, MOST_POINTS)
        return self._answer(name, step_seconds, frames, teams, with_total=with_total, most_points=MOST_POINTS)

    def by_team(self, name: str, *, since: float) -> PoolHistory | None:
        """The same of every team, in fewer points and at most two hours back."""
        rings = self._pools.get(name)
        if rings is None:
            return None
        now = rings.rings[0].frames[-1].ended_at if rings.rings[0].frames else since
        step_seconds, frames = rings.frames(max(since, now - LONGEST_BY_TEAM_SECONDS), MOST_POINTS_BY_TEAM)
        teams = dict.fromkeys(team for frame in reversed(frames) for team in frame.teams)
        return self._answer(name, step_seconds, frames, list(teams), with_total=True, most_points=MOST_POINTS_BY_TEAM)

    def _answer(
        self,
        name: str,
        step_seconds: float,
        frames: Sequence[Frame],
        teams: Sequence[str],
        *,
        with_total: bool,
        most_points: int,
    ) -> PoolHistory:
        group = max(1, -(-len(frames) // most_points))
        return PoolHistory(
            pool=name,
            step_seconds=step_seconds * group,
            kept=self.is_kept,
            at=[round(frames[min(at + group, len(frames)) - 1].ended_at, 1) for at in range(0, len(frames), group)],
            capacity=_means([frame.capacity for frame in frames], group),
            total=_series([frame.total for frame in frames], group) if with_total else None,
            teams={team: _series([frame.of(team) for frame in frames], group) for team in teams},
        )

    def levels(self, pool: str, at: float) -> dict[str, float]:
        """LF of every team of a pool, as it was then (wall clock), to the second of the last ten minutes and to ten
        seconds of the last two hours; empty: not known any more."""
        rings = self._pools.get(pool)
        if rings is None:
            return {}
        for ring in rings.rings[:2]:
            for frame in reversed(ring.frames):
                if frame.ended_at <= at:
                    if at - frame.ended_at <= 2 * ring.step_seconds and frame.levels:
                        return dict(zip(frame.teams, frame.levels, strict=True))
                    break
        return {}

    # ------------------------------------------------------------------ store

    async def restore(self, now: float) -> None:
        """Read the minutes of the last two days (`now`: wall clock). A store that does not answer is asked again by
        `save`."""
        if self._store is None or self._is_restored:
            return
        try:
            rows = await self._store.since(now - KEPT_SECONDS[-1])
        except StoreUnavailable as error:
            self._failed(error)
            return
        self._is_restored = True
        before: dict[str, list[Frame]] = {}
        for row in rows:
            restored = _restored(row, now)
            if restored is not None:
                before.setdefault(row.pool, []).append(restored)
        for pool, restored in before.items():
            frames = self._pools.setdefault(pool, _PoolRings()).rings[-1].frames
            # Minutes of this process are newer than all that were read.
            mine = [frame for frame in frames if frame.ended_at > restored[-1].ended_at]
            frames.clear()
            frames.extend((*restored, *mine))

    async def save(self, now: float, *, with_last: bool = False) -> None:
        """Write the minutes that have ended (and, `with_last`, the one that has not) and forget the oldest."""
        if self._store is None:
            return
        await self.restore(now)
        if with_last:
            for name, rings in self._pools.items():
                minute = rings.end_minute()
                if minute is not None:
                    self._remember(name, minute)
        if not self._unsaved or not self._is_restored:
            return
        saved = dict(self._unsaved)
        rows = [HistoryRow(pool, began_at, sample) for (pool, began_at), sample in saved.items()]
        try:
            await self._store.save(rows, forget_before=now - KEPT_SECONDS[-1])
        except StoreUnavailable as error:
            self._failed(error)
            return
        for place, sample in saved.items():
            if self._unsaved.get(place) == sample:
                del self._unsaved[place]
        self._failure = None

    def _remember(self, pool: str, minute: Frame) -> None:
        minute_seconds = STEPS_SECONDS[-1]
        began_at = minute.ended_at // minute_seconds * minute_seconds
        teams: dict[str, list[float]] = {}
        for index, (team, owns) in enumerate(zip(minute.teams, minute.owns, strict=True)):
            doing = [round(value, 2) for value in minute.doing[4 * index : 4 * index + 4]]
            if any(doing):
                teams[team] = [round(owns, 2), *doing]
            elif owns:
                teams[team] = [round(owns, 2)]
        self._unsaved[pool, began_at] = _encode(_Kept(capacity=minute.capacity, teams=teams)).decode()
        while len(self._unsaved) > len(self._pools) * KEPT_SECONDS[-1] / minute_seconds:
            del self._unsaved[next(iter(self._unsaved))]

    def _failed(self, error: StoreUnavailable) -> None:
        if self._failure is None:
            log.warning("%s; the history of the status page waits in memory.", error)
        self._failure = str(error)


def borrowed_slots(team: TeamStatus) -> int:
    """Slots that a team would have to give back.

    Its `borrowing` is what was sent with that standing, which may be more: a team that runs far above what it owns has
    each of its next requests sent as a borrower, also when older ones within its share have ended since.
    """
    return max(0, min(team.borrowing, team.in_flight - team.reserved))


def merged(frames: Sequence[Frame]) -> Frame:
    """Several steps as one: means, and the sum of what was recalled. Whoever shows in one of them shows in it."""
    last = frames[-1]
    if len(frames) == 1:
        return last
    count = len(frames)
    sums: dict[str, list[float]] = {team: [0.0] * 5 for team in last.teams}
    total, capacity = [0.0] * 5, 0.0
    for frame in frames:
        capacity += frame.capacity
        for index, value in enumerate(frame.total):
            total[index] += value
        doing = frame.doing
        for index, (team, owns) in enumerate(zip(frame.teams, frame.owns, strict=True)):
            into = sums.get(team)
            if into is None:
                into = sums[team] = [0.0] * 5
            into[0] += owns
            at = 4 * index
            into[1] += doing[at]
            into[2] += doing[at + 1]
            into[3] += doing[at + 2]
            into[4] += doing[at + 3]
    teams = last.teams if len(sums) == len(last.teams) else tuple(sums)
    owns = tuple(each[0] / count for each in sums.values())
    doing = array("f")
    for each in sums.values():
        doing.extend((each[1] / count, each[2] / count, each[3] / count, each[4]))
    return Frame(
        ended_at=last.ended_at,
        capacity=capacity / count,
        teams=teams,
        owns=last.owns if owns == last.owns else owns,
        doing=doing,
        levels=last.levels if len(last.levels) == len(teams) else array("f"),
        total=(total[0] / count, total[1] / count, total[2] / count, total[3] / count, total[4]),
    )


def _step(frame: Frame, ring: _Ring) -> float:
    return frame.ended_at // ring.step_seconds


def _foremost(teams: Sequence[TeamStatus]) -> list[TeamStatus]:
    """The teams that are worth a place in a frame, in the order they came."""
    first = sorted(teams, key=lambda team: (-team.reserved, -team.share, -team.in_flight, -team.held))[:MOST_TEAMS]
    kept = {team.team for team in first}
    return [team for team in teams if team.team in kept]


def _series(values: Sequence[Sequence[float]], group: int) -> Series:
    columns = list(zip(*values, strict=True)) if values else [(), (), (), (), ()]
    owns, within, borrowing, held = (_means(column, group) for column in columns[:4])
    return Series(owns=owns, within=within, borrowing=borrowing, held=held, recalled=_sums(columns[4], group))


def _means(values: Sequence[float], group: int) -> list[float]:
    if group == 1:
        return [round(value, 2) for value in values]
    return [round(mean(values[at : at + group]), 2) for at in range(0, len(values), group)]


def _sums(values: Sequence[float], group: int) -> list[float]:
    return [round(sum(values[at : at + group]), 2) for at in range(0, len(values), group)]


def _restored(row: HistoryRow, now: float) -> Frame | None:
    try:
        kept = _decoder.decode(row.sample)
    except msgspec.MsgspecError:
        return None
    teams = {team: [*values, 0.0, 0.0, 0.0, 0.0][:5] for team, values in kept.teams.items() if values}
    columns = list(zip(*teams.values(), strict=True)) or [(), (), (), (), ()]
    return Frame(
        # What was written at the end of a process is a part of a minute.
        ended_at=min(now, row.began_at + STEPS_SECONDS[-1]),
        capacity=kept.capacity,
        teams=tuple(teams),
        owns=columns[0],
        doing=array("f", [value for values in teams.values() for value in values[1:]]),
        levels=array("f"),
        total=(sum(columns[0]), sum(columns[1]), sum(columns[2]), sum(columns[3]), sum(columns[4])),
    )


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Kept)
