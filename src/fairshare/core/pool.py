"""One capacity domain: who has what in flight, what everybody consumed, and the standing of the next request."""

# A grant and its pool are one unit, and the pool's lock guards both.
# pyright: reportPrivateUsage=false

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from itertools import count
from math import inf, isnan
from operator import attrgetter
from sys import float_info
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Self

from fairshare.clock import Clock, monotonic
from fairshare.core.apportion import Share, apportion_exact, checked_capacity, exact_shares
from fairshare.core.priority import MAX_RANK, ServiceClass, borrow_priority, within_share_priority
from fairshare.core.ranking import Ladder, level_fairshares, level_key
from fairshare.core.usage import UsageScale, countable_cost_units, half_life_seconds, halved

MOST_IDLE_STRANGERS = 1_000
"""Idle teams that no shares ever named, of which a pool keeps the usage; the longest idle one is forgotten first.

Such usage decides nothing (their rank is always `MAX_RANK`), and callers can make names up without end.
"""

_REMOTE_RELEASE = Lock()
"""Held only to find out which call of a remote grant's `release` is the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamStat:
    """A snapshot of one team in a pool."""

    team: str
    share: float
    reserved: int
    """Within-share slots, see `apportion`."""
    in_flight: int
    """Slots of its open grants; phantoms are not among them."""
    borrowing: int
    """Those of its slots in flight that borrow."""
    in_flight_tokens: int
    """Estimated tokens of its open grants."""
    usage: float
    """Decayed consumption of its finished requests, in cost units."""
    level_fairshare: float
    """S / U as it ranks borrowers: U also holds the provisional charge of what a dispatch queue has sent."""
    rank: int
    phantoms: int
    """Slots counted in flight without a grant: a failover's safety margin, a silent replica's requests."""


class TeamState:
    """What a pool knows of one team. Only the pool writes it; a dispatch queue may read it."""

    __slots__ = (
        "borrowing_slots",
        "ever_listed",
        "exact_share",
        "in_flight_slots",
        "in_flight_tokens",
        "key",
        "key_is_stale",
        "listed",
        "lots",
        "name",
        "phantom_slots",
        "reserved",
        "scaled_provisional",
        "scaled_usage",
        "share",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = 0.0
        self.exact_share = Fraction(0)
        self.reserved = 0
        self.listed = False
        """Whether the pool's shares name it (if with a share of 0)."""
        self.ever_listed = False
        self.in_flight_slots = 0
        self.borrowing_slots = 0
        self.in_flight_tokens = 0
        self.phantom_slots = 0
        self.lots: list[tuple[float, int]] = []
        """Phantoms: (until, slots), by end; one lot for each end."""
        self.scaled_usage = 0.0
        self.scaled_provisional = 0.0
        """Expected consumption of what a dispatch queue has sent and nobody has settled."""
        self.key = inf
        """The level on which the ladder has it (listed teams)."""
        self.key_is_stale = False

    @property
    def borrow_key(self) -> float:
        """(usage + provisional charges) / share, scaled and not rounded: lower means a better LF. Share 0: infinity."""
        return (self.scaled_usage + self.scaled_provisional) / self.share if self.share else inf

    @property
    def has_something_to_show(self) -> bool:
        """Whether a team without a share appears in snapshots."""
        return self.in_flight_slots > 0 or self.phantom_slots > 0 or self.scaled_usage > 0.0


class Grant:
    """The decision for one request. `release` must be called when the request has finished, well or not.

    As a context manager it releases itself, charging 0 if the block did not say more.
    """

    __slots__ = (
        "_pool",
        "_provisional",
        "_shift",
        "_state",
        "borrowing",
        "estimated_tokens",
        "priority",
        "saturated",
        "slots",
        "team",
    )

    def __init__(
        self,
        team: str,
        priority: int,
        borrowing: bool,
        saturated: bool,
        slots: int = 1,
        estimated_tokens: int = 0,
        pool: "Pool | None" = None,
        state: TeamState | None = None,
        provisional: float = 0.0,
        shift: float = 0.0,
    ) -> None:
        self.team = team
        self.priority = priority
        """What to tell the engine; lower runs earlier."""
        self.borrowing = borrowing
        """False: within share."""
        self.saturated = saturated
        """The pool had C or more slots in flight before this request."""
        self.slots = slots
        self.estimated_tokens = estimated_tokens
        self._pool = pool
        self._state = state
        """Its team's record while it is open in `pool`."""
        self._provisional = provisional
        """Its provisional charge, as the usage scale had it when `shift_half_lives` was `_shift`."""
        self._shift = shift

    @staticmethod
    def remote(team: str, priority: int, borrowing: bool, saturated: bool, release: Callable[[float], None]) -> "Grant":
        """A grant decided elsewhere (by the replica that owns the pool); no local pool counts it.

        The first `release` calls `release` with the consumption: negative, NaN and infinite values as 0.
        """
        return _RemoteGrant(team, priority, borrowing, saturated, release)

    @property
    def state(self) -> TeamState | None:
        """What its pool knows of its team; None: it is released, or of another process."""
        return self._state

    def release(self, consumed: float) -> None:
        """End the request and charge what it consumed (cost units; negative, NaN and infinite values count as 0).

        Idempotent: only the first call counts, from whatever thread. Usage is charged from consumption, never from
        time in flight: a request that waits in the engine's queue consumes nothing, and charging it would make a
        flooding team look as consumed as the team it starves.
        """
        if self._pool is not None:
            self._pool.settle(self, consumed, now=self._pool.begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release(0.0)

    def __repr__(self) -> str:
        standing = "borrowing" if self.borrowing else "within share"
        return f"<Grant {self.team!r} {standing} priority={self.priority} slots={self.slots}>"


class _RemoteGrant(Grant):
    """See `Grant.remote`."""

    __slots__ = ("_tell",)

    def __init__(
        self, team: str, priority: int, borrowing: bool, saturated: bool, tell: Callable[[float], None]
    ) -> None:
        super().__init__(team, priority, borrowing, saturated)
        self._tell: Callable[[float], None] | None = tell

    def release(self, consumed: float) -> None:
        with _REMOTE_RELEASE:
            tell, self._tell = self._tell, None
        if tell is not None:
            tell(countable_cost_units(consumed))


class Pool:
    """Tracks one capacity domain. Thread-safe; every method is atomic.

    `acquire` and `release` cost O(log teams): usage is kept in scaled form, so decay costs nothing per team, and
    a charge only marks its team's level as stale until somebody needs a rank (see `Ladder` for what that costs).
    O(teams) are `snapshot`, `usage`, `reserved`, the `set_` methods but `set_usage`, and one call in 64 half-lives.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        shares: Mapping[str, Share],
        half_life: float | timedelta | None,
        clock: Clock | None = monotonic,
    ) -> None:
        """A pool of `capacity` slots, owned in the given shares.

        Args:
            name: for people and metrics.
            capacity: C, the slots it sustains; 0 is an elastic pool without instances.
            shares: team to share, see `apportion`; they sum to at most 1.
            half_life: of usage, in seconds or as a timedelta; 0 or None: usage never decays.
            clock: seconds; if it steps back, no time passes until it has caught up. None: the monotonic clock.

        Raises:
            ValueError: a negative capacity, a bad share or a bad half-life.
        """
        self._name = name
        self._lock = Lock()
        self._clock = clock or monotonic
        self._now = self._clock()
        self._scale = UsageScale(half_life_seconds(half_life), self._now)
        self._states: dict[str, TeamState] = {}
        self._idle_strangers: OrderedDict[str, None] = OrderedDict()
        """Unlisted, never listed teams with nothing in flight, the longest idle first."""
        self.live_slots = 0
        """Slots of open grants; no phantoms. As of the last reading of the clock. Only the pool writes it."""
        self.phantom_slots = 0
        """Slots counted in flight without a grant. Only the pool writes it."""
        self._phantom_ends: list[tuple[float, int, TeamState]] = []
        """A heap of (until, tie breaker, team), one for each lot; of lots dropped early some may linger."""
        self._tie_breaker = count()
        self._next_due_at = self._scale.rebase_at
        """Until then the passing of time changes nothing but the usage scale."""
        self._watchers: list[set[str]] = []
        self._stale: list[TeamState] = []
        """Listed teams whose level the ladder does not have."""
        self._ladder = Ladder(())
        self._ranked_by: dict[str, float] = {}
        """Listed team → scaled usage with provisional charges, as the ladder has it; in the order of the shares."""
        self.generation = 0
        """Grows whenever capacity, shares, half-life or the usage scale changed: stored keys and reservations are stale
        then. Only the pool writes it.
        """
        self._capacity = checked_capacity(capacity)
        self._given_shares: dict[str, Share] = {}
        self._exact_shares: dict[str, Fraction] = {}
        self._replace_shares(shares)

    # What it is

    @property
    def name(self) -> str:
        """The pool's name."""
        return self._name

    @property
    def clock(self) -> Clock:
        """The clock it was given, in seconds."""
        return self._clock

    @property
    def capacity(self) -> int:
        """C, in slots."""
        return self._capacity

    @property
    def half_life_seconds(self) -> float:
        """Half-life of usage; 0.0: no decay."""
        return self._scale.half_life_seconds

    @property
    def decay_rate(self) -> float:
        """ln 2 / half-life, in 1/s; 0.0: no decay."""
        return self._scale.decay_rate

    def reserved(self) -> dict[str, int]:
        """The within-share slots of each team that the shares name, by name."""
        with self._lock:
            return {team: self._states[team].reserved for team in sorted(self._exact_shares)}

    def snapshot(self) -> list[TeamStat]:
        """The current state of every team by name; teams without a share only while they have anything to show."""
        with self._lock:
            now = self._advance()
            self._refresh_ladder()
            listed = [self._states[team] for team in self._exact_shares]
            fairshares = dict(
                zip(
                    self._exact_shares,
                    level_fairshares(
                        [state.share for state in listed],
                        [min(state.scaled_usage + state.scaled_provisional, float_info.max) for state in listed],
                    ),
                    strict=True,
                )
            )
            return [
                TeamStat(
                    team=state.name,
                    share=state.share,
                    reserved=state.reserved,
                    in_flight=state.in_flight_slots,
                    borrowing=state.borrowing_slots,
                    in_flight_tokens=state.in_flight_tokens,
                    usage=self._scale.cost_units(state.scaled_usage, now),
                    level_fairshare=fairshares.get(state.name, 0.0),
                    rank=self._ladder.rank(state.key) if state.listed else MAX_RANK,
                    phantoms=state.phantom_slots,
                )
                for state in self._shown()
            ]

    def usage(self) -> tuple[dict[str, float], dict[str, int]]:
        """Every team's decayed usage (cost units) and slots in flight, phantoms included: what an owner persists."""
        with self._lock:
            now = self._advance()
            shown = self._shown()
            return (
                {state.name: self._scale.cost_units(state.scaled_usage, now) for state in shown},
                {state.name: state.in_flight_slots + state.phantom_slots for state in shown},
            )

    # Requests

    def acquire(
        self,
        team: str,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        estimated_tokens: int = 0,
        *,
        slots: int = 1,
    ) -> Grant:
        """Record a new request of a team in flight and decide its standing, once.

        Within share if the team's slots in flight (phantoms too) and this request's fit in its reservation, else
        borrowing. A team that the shares do not name has a share of 0: it can only borrow.

        Raises:
            ValueError: `slots` is below 1.
        """
        _check_slots(slots)
        with self._lock:
            self._advance()
            return self._decide(team, service_class, estimated_tokens, slots)

    def try_acquire(
        self,
        team: str,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        estimated_tokens: int = 0,
        *,
        slots: int = 1,
    ) -> Grant | None:
        """`acquire` only if the pool has room: slots in flight (phantoms too) + min(slots, C) <= C; else None.

        Decided and recorded as one step: a fallback that moves a request here never pushes this pool past C, so two
        saturated pools cannot hand requests to each other. A pool of capacity 0 has no room.

        Raises:
            ValueError: `slots` is below 1.
        """
        _check_slots(slots)
        with self._lock:
            self._advance()
            room = self._capacity - self.live_slots - self.phantom_slots
            if room <= 0 or min(slots, self._capacity) > room:
                return None
            return self._decide(team, service_class, estimated_tokens, slots)

    def adopt(self, team: str, priority: int, borrowing: bool, estimated_tokens: int = 0, *, slots: int = 1) -> Grant:
        """Count a request decided before (by a previous owner, or without one) as in flight; returns its grant.

        Nothing is decided: `priority` and `borrowing` are what the request already runs with.

        Raises:
            ValueError: `slots` is below 1.
        """
        _check_slots(slots)
        with self._lock:
            self._advance()
            return self._count(self._state(team), priority, borrowing, estimated_tokens, slots)

    # Usage and phantoms

    def charge(self, team: str, consumed: float) -> None:
        """Add consumption (cost units) to a team's usage without a grant: a request that this pool never counted.

        Negative, NaN and infinite values count as 0.
        """
        with self._lock:
            now = self._advance()
            if cost_units := countable_cost_units(consumed):
                state = self._state(team)
                self._add_usage(state, cost_units, now)
                self._changed(state)

    def set_usage(self, team: str, usage: float) -> None:
        """Set a team's decayed usage (cost units), as restored from a previous owner.

        Negative, NaN and infinite values count as 0.
        """
        with self._lock:
            now = self._advance()
            state = self._state(team)
            state.scaled_usage = self._scale.scaled(countable_cost_units(usage), now)
            if not state.key_is_stale:
                self._mark_stale(state)
            self._changed(state)

    def add_phantoms(self, team: str, n: int, until: float) -> None:
        """Count n slots of a team as in flight until a time on the pool's clock, without grants.

        They stand for requests that may still run but that nobody can release: their replica died, or a previous
        owner had them in flight.

        Raises:
            ValueError: n is negative, or `until` is NaN.
        """
        if n < 0:
            raise ValueError(f"phantoms of team {team!r} must be 0 or more slots, got {n}")
        if isnan(until):
            raise ValueError(f"phantoms of team {team!r} need a time to end, got NaN")
        with self._lock:
            now = self._advance()
            if n == 0 or until <= now:
                return
            state = self._state(team)
            at = bisect_right(state.lots, (until, 0))
            if at < len(state.lots) and state.lots[at][0] == until:
                state.lots[at] = (until, state.lots[at][1] + n)
            else:
                state.lots.insert(at, (until, n))
                heapq.heappush(self._phantom_ends, (until, next(self._tie_breaker), state))
                self._set_next_due()
            state.phantom_slots += n
            self.phantom_slots += n
            self._changed(state)

    def drop_phantom(self, team: str) -> bool:
        """Remove the one of the team's phantoms (slots) that would last longest; whether there was one.

        For a request it stood for that turned out to have a live grant after all.
        """
        with self._lock:
            self._advance()
            state = self._states.get(team)
            if state is None or not state.lots:
                return False
            until, slots = state.lots[-1]
            if slots > 1:
                state.lots[-1] = (until, slots - 1)
            else:
                state.lots.pop()
                self._trim_phantom_ends()
            self._remove_phantom_slots(state, 1)
            return True

    # Changes while it runs

    def set_capacity(self, capacity: int) -> int:
        """Change C and the reservations that follow from it; returns the previous C.

        Requests in flight keep their standing; new ones are judged against the new reservations and C.

        Raises:
            ValueError: it is negative.
        """
        capacity = checked_capacity(capacity)
        with self._lock:
            self._advance()
            previous, self._capacity = self._capacity, capacity
            self._reserve()
            return previous

    def set_shares(self, shares: Mapping[str, Share]) -> dict[str, Share]:
        """Change who owns what; returns the previous shares as they were given.

        Usage and what is in flight stay, also of a team that the new shares do not name: it has a share of 0 now.

        Raises:
            ValueError: a bad share; nothing has changed then.
        """
        with self._lock:
            self._advance()
            previous = self._given_shares
            self._replace_shares(shares)
            return previous

    def set_half_life(self, half_life: float | timedelta | None) -> float:
        """Change how fast usage decays from now on; returns the previous half-life in seconds (0.0: no decay).

        Raises:
            ValueError: it is negative, NaN or infinite.
        """
        seconds = half_life_seconds(half_life)
        with self._lock:
            now = self._advance()
            previous = self._scale.half_life_seconds
            factor = self._scale.restart(seconds, now)
            for state in self._states.values():
                state.scaled_usage *= factor
                state.scaled_provisional *= factor
            self._rescaled()
            return previous

    # For dispatch queues. One event is one `begin()`, whose reading is passed on: all of it happens at one time.

    def begin(self) -> float:
        """Read the clock, once for a whole event, and let what is due happen; returns now (never less than before)."""
        now = self._clock()
        # Nothing is due, so nothing needs the lock: a thread that is overtaken here sets the time back by that moment,
        # and whatever depends on the time reads the clock itself.
        if self._now < now < self._next_due_at:
            self._now = now
            return now
        with self._lock:
            return self._advance_to(now)

    def state(self, team: str) -> TeamState:
        """The record of a team. Ask again in every event: that of an idle team without a share may be replaced."""
        with self._lock:
            return self._state(team)

    def record(
        self,
        state: TeamState,
        *,
        now: float,
        priority: int,
        borrowing: bool,
        slots: int = 1,
        estimated_tokens: int = 0,
        provisional_cost_units: float = 0.0,
    ) -> Grant:
        """Count a grant that the queue decided.

        The provisional charge counts in level fairshare and rank, never in usage, until the grant is settled.

        Raises:
            ValueError: `slots` is below 1.
        """
        if slots < 1:
            _check_slots(slots)
        with self._lock:
            if not state.listed:
                state = self._state(state.name)  # that of an idle stranger may have been forgotten
            scaled = self._scale.scaled(provisional_cost_units, now) if 0.0 < provisional_cost_units < inf else 0.0
            return self._count(state, priority, borrowing, estimated_tokens, slots, scaled)

    def settle(self, grant: Grant, consumed: float, *, now: float) -> None:
        """What `Grant.release` does, at the caller's reading of the clock. Idempotent."""
        with self._lock:
            state = grant._state
            if state is None:
                return
            grant._state = None
            slots = grant.slots
            state.in_flight_slots -= slots
            state.in_flight_tokens -= grant.estimated_tokens
            if grant.borrowing:
                state.borrowing_slots -= slots
            self.live_slots -= slots
            if provisional := state.scaled_provisional:
                if state.in_flight_slots:
                    scaled, moved_half_lives = grant._provisional, self._scale.shift_half_lives - grant._shift
                    left = provisional - (scaled * 2.0**-moved_half_lives if moved_half_lives else scaled)
                    state.scaled_provisional = left if left > 0.0 else 0.0
                else:
                    state.scaled_provisional = 0.0  # what rounding would leave of a sum of nothing
                if not state.key_is_stale:
                    self._mark_stale(state)
            if 0.0 < consumed < inf:  # as `countable_cost_units` says
                self._add_usage(state, consumed, now)
            self._changed(state)

    def rank(self, team: str) -> int:
        """The number of teams ahead of this one, see `Ladder.rank`; `MAX_RANK` for a team that shares do not name."""
        with self._lock:
            return self._rank(self._states.get(team))

    def ranked_by(self, most_teams: int) -> "tuple[Mapping[str, Fraction], tuple[float, ...]] | None":
        """What the last `rank` was worked out from: team to share, and in the same order their usage with provisional
        charges, scaled. For the thread that asked for the rank. None: there are more teams than that."""
        used = self._ranked_by
        return (self._exact_shares, tuple(used.values())) if len(used) <= most_teams else None

    def borrow_key(self, team: str) -> float:
        """The team's `TeamState.borrow_key`; infinity if the pool does not know it."""
        with self._lock:
            state = self._states.get(team)
            return inf if state is None else state.borrow_key

    @property
    def exact_shares(self) -> Mapping[str, Fraction]:
        """Team to share; replaced, not changed, by `set_shares`."""
        return MappingProxyType(self._exact_shares)

    def next_phantom_end(self) -> float | None:
        """When the next phantoms end (pool clock); None: there are none."""
        with self._lock:
            return self._phantom_ends[0][0] if self._phantom_ends else None

    def watch(self) -> set[str]:
        """A set to which the names of teams are added when their usage, counts, phantoms or share change from now on.

        The caller drains it for as long as the pool lives.
        """
        with self._lock:
            changed: set[str] = set()
            self._watchers.append(changed)
            return changed

    # All below: the lock is held

    def _advance(self) -> float:
        return self._advance_to(self._clock())

    def _advance_to(self, now: float) -> float:
        if not self._now < now < inf:  # it stepped back (or says NaN): no time passed
            return self._now
        self._now = now
        if now >= self._next_due_at:
            self._catch_up(now)
        return now

    def _catch_up(self, now: float) -> None:
        ends = self._phantom_ends
        while ends and ends[0][0] <= now:
            _, _, state = heapq.heappop(ends)
            ended = 0
            while state.lots and state.lots[0][0] <= now:
                ended += state.lots.pop(0)[1]
            if ended:
                self._remove_phantom_slots(state, ended)
        self._trim_phantom_ends()
        if now >= self._scale.rebase_at and (half_lives := self._scale.rebase(now)):
            for state in list(self._states.values()):
                state.scaled_usage = halved(state.scaled_usage, half_lives)
                state.scaled_provisional = halved(state.scaled_provisional, half_lives)
                if state.ever_listed and not state.listed:
                    self._keep_or_forget(state)
            self._rescaled()
        self._set_next_due()

    def _set_next_due(self) -> None:
        ends_at = self._phantom_ends[0][0] if self._phantom_ends else inf
        self._next_due_at = min(ends_at, self._scale.rebase_at)

    def _rescaled(self) -> None:
        """Every scaled number was multiplied: rounded levels cannot follow, nor can keys that a queue keeps."""
        self._build_ladder()
        self.generation += 1
        self._set_next_due()

    def _state(self, team: str) -> TeamState:
        state = self._states.get(team)
        if state is None:
            state = self._states[team] = TeamState(team)
            self._keep_or_forget(state)
        return state

    def _decide(self, team: str, service_class: ServiceClass, estimated_tokens: int, slots: int) -> Grant:
        state = self._state(team)
        if state.in_flight_slots + state.phantom_slots + slots <= state.reserved:
            return self._count(state, within_share_priority(service_class), False, estimated_tokens, slots)
        priority = borrow_priority(self._rank(state), service_class)
        return self._count(state, priority, True, estimated_tokens, slots)

    def _count(
        self,
        state: TeamState,
        priority: int,
        borrowing: bool,
        estimated_tokens: int,
        slots: int,
        provisional: float = 0.0,
    ) -> Grant:
        live_slots = self.live_slots
        saturated = live_slots + self.phantom_slots >= self._capacity
        state.in_flight_slots += slots
        state.in_flight_tokens += estimated_tokens
        if borrowing:
            state.borrowing_slots += slots
        self.live_slots = live_slots + slots
        if provisional:
            total = state.scaled_provisional + provisional
            state.scaled_provisional = total if total < inf else float_info.max
            if not state.key_is_stale:
                self._mark_stale(state)
        self._changed(state)
        shift = self._scale.shift_half_lives
        return Grant(
            state.name, priority, borrowing, saturated, slots, estimated_tokens, self, state, provisional, shift
        )

    def _add_usage(self, state: TeamState, cost_units: float, now: float) -> None:
        scaled = state.scaled_usage + self._scale.scaled(cost_units, now)
        state.scaled_usage = scaled if scaled < inf else float_info.max
        if not state.key_is_stale:
            self._mark_stale(state)

    def _remove_phantom_slots(self, state: TeamState, slots: int) -> None:
        state.phantom_slots -= slots
        self.phantom_slots -= slots
        self._changed(state)

    def _trim_phantom_ends(self) -> None:
        """Take off the top of the heap what is not there any more; rebuild the heap if that is most of it."""
        ends = self._phantom_ends
        if len(ends) > 2 * self.phantom_slots + 64:  # a lot has at least one slot
            teams = dict.fromkeys(state for _, _, state in ends)
            ends[:] = [(until, next(self._tie_breaker), state) for state in teams for until, _ in state.lots]
            heapq.heapify(ends)
        while ends and not (ends[0][2].lots and ends[0][2].lots[0][0] == ends[0][0]):
            heapq.heappop(ends)

    def _keep_or_forget(self, state: TeamState) -> None:
        """Decide whether the record of a team without a share stays."""
        busy = state.in_flight_slots or state.phantom_slots
        if state.ever_listed:
            # There are as many of these as config files named, and they may come back: kept while they have usage.
            if not busy and not state.scaled_usage:
                del self._states[state.name]
        elif busy:
            self._idle_strangers.pop(state.name, None)
        else:
            self._idle_strangers[state.name] = None
            self._idle_strangers.move_to_end(state.name)
            if len(self._idle_strangers) > MOST_IDLE_STRANGERS:
                forgotten, _ = self._idle_strangers.popitem(last=False)
                del self._states[forgotten]

    def _changed(self, state: TeamState) -> None:
        if not state.listed:
            self._keep_or_forget(state)
        for changed in self._watchers:
            changed.add(state.name)

    def _shown(self) -> list[TeamState]:
        shown = (state for state in self._states.values() if state.listed or state.has_something_to_show)
        return sorted(shown, key=attrgetter("name"))

    # Shares, reservations and levels

    def _replace_shares(self, shares: Mapping[str, Share]) -> None:
        exact = exact_shares(shares)
        touched = [self._states[team] for team in self._exact_shares]
        for state in touched:
            state.listed = False
            state.exact_share, state.share, state.reserved = Fraction(0), 0.0, 0
        for team, share in exact.items():
            state = self._states.setdefault(team, TeamState(team))
            self._idle_strangers.pop(team, None)
            state.listed = state.ever_listed = True
            state.exact_share, state.share = share, float(share)
            touched.append(state)
        self._given_shares, self._exact_shares = dict(shares), exact
        for state in touched:
            self._changed(state)
        self._build_ladder()
        self._reserve()

    def _reserve(self) -> None:
        for team, slots in apportion_exact(self._capacity, self._exact_shares).items():
            self._states[team].reserved = slots
        self.generation += 1

    def _rank(self, state: TeamState | None) -> int:
        if state is None or not state.listed:
            return MAX_RANK
        if self._stale:
            self._refresh_ladder()
        return self._ladder.rank(state.key)

    def _mark_stale(self, state: TeamState) -> None:
        """The ladder has an old level of a team that was not stale yet."""
        if state.listed:
            state.key_is_stale = True
            self._stale.append(state)

    def _refresh_ladder(self) -> None:
        """Give the ladder the levels of the teams that were charged since somebody last needed a rank."""
        if len(self._stale) > 16 and len(self._stale) > len(self._exact_shares) // 8:
            self._build_ladder()  # sorting all is cheaper than so many moves
            return
        for state in self._stale:
            old_key = state.key
            self._set_key(state)
            self._ladder.move(old_key, state.key)
        self._stale.clear()

    def _build_ladder(self) -> None:
        self._stale.clear()
        self._ranked_by = {}
        listed = [self._states[team] for team in self._exact_shares]
        for state in listed:
            self._set_key(state)
        self._ladder = Ladder(state.key for state in listed)

    def _set_key(self, state: TeamState) -> None:
        used = self._ranked_by[state.name] = state.scaled_usage + state.scaled_provisional
        state.key = level_key(used, state.share)
        state.key_is_stale = False


def _check_slots(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"slots must be 1 or more, got {slots}")
