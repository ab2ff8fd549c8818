"""May this request go on? Decided in memory, at once, from limits and budgets of everything that the key belongs to.

Pure: the caller says what time it is (wall clock). Estimates are reserved when a request is admitted, and replaced by
what it consumed when it ends. What other replicas say that they admitted counts too (`fleet.py` carries it).
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from enum import StrEnum

import msgspec

from fairshare.accounts import periods
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period, Span
from fairshare.accounts.service import Tree
from fairshare.errors import CallerError
from fairshare.storage.accounts import BudgetRow, IncreaseRow, LimitRow, Rules

MINUTE_SECONDS = 60
MEAN_MEMORY = 1.0 / 64
"""The weight of a request in the running mean of completion tokens of a slot."""


class DenialCode(StrEnum):
    """Why a request is not admitted."""

    RATE_LIMITED = "rate_limited"
    TOO_MANY_IN_FLIGHT = "too_many_in_flight"
    BUDGET_EXHAUSTED = "budget_exhausted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The request is not admitted."""

    code: DenialCode
    owner: str
    """Whose limit or budget it is, as `team:search`."""
    what: str
    """What is bounded, in words."""
    limit: float
    used: float
    """Reserved estimates of running requests among it."""
    resets_at: float
    """When it may be admitted; infinite: never by itself."""
    retry_after_seconds: float | None

    def message(self) -> str:
        when = (
            "It does not start again; ask whoever runs fairshare for more."
            if self.retry_after_seconds is None
            else f"Try again in {self.retry_after_seconds:.0f} s."
        )
        kind, _, name = self.owner.partition(":")
        return f"The {self.what} of {kind} {name!r} is {self.limit:.12g}, and {self.used:.12g} is used. {when}"


class WindowCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one replica used of a limit per minute in one second (wall clock)."""

    owner: str
    kind: str
    second: int
    used: float


class InFlightCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many requests of an owner are in flight through one replica."""

    owner: str
    requests: int


class BudgetCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one replica, in its life, charged to a budget in the period that began then."""

    budget_id: int
    begins_at: float
    charged: float
    written: float
    """The part of `charged` that is in the store for certain."""
    reserved: float


class Counted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one replica counted. Every number replaces what was said of the same thing before."""

    windows: list[WindowCount]
    in_flight: list[InFlightCount]
    budgets: list[BudgetCount]


class _Cell:
    """What was used of a window in one second."""

    __slots__ = ("elsewhere", "expired", "here", "said", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.here = 0.0
        self.said = 0.0
        """What other replicas were told of `here`."""
        self.elsewhere: dict[str, float] = {}
        """Other replica → what it used."""
        self.expired = False
        """A request that ends later finds its second gone."""

    @property
    def used(self) -> float:
        return self.here + sum(self.elsewhere.values())


class _Window:
    """A limit per minute: what was used in each of the last sixty seconds."""

    __slots__ = ("_cells", "_touched", "_used", "kind", "limit", "owner")

    def __init__(self, owner: str, kind: LimitKind, touched: "set[_Window]") -> None:
        """`touched`: it puts itself there when something is used here."""
        self.owner = owner
        self.kind = kind
        self.limit = 0
        self._touched = touched
        self._cells: deque[_Cell] = deque()
        """Oldest first."""
        self._used = 0.0

    def deny(self, amount: float, now: float) -> Denied | None:
        self._expire(now)
        # What is larger than the whole limit goes when nothing else was used: it would never fit.
        if self._used + amount <= self.limit or (not self._used and self.limit):
            return None
        excess = self._used + amount - self.limit
        resets_at = now + MINUTE_SECONDS
        for cell in self._cells:
            excess -= cell.used
            if excess <= 0:
                resets_at = cell.second + MINUTE_SECONDS
                break
        what = (
            "limit of requests per minute"
            if self.kind is LimitKind.REQUESTS_PER_MINUTE
            else "limit of tokens per minute"
        )
        return Denied(
            code=DenialCode.RATE_LIMITED,
            owner=self.owner,
            what=what,
            limit=self.limit,
            used=self._used,
            resets_at=resets_at,
            retry_after_seconds=max(1.0, math.ceil(resets_at - now)),
        )

    def use(self, amount: float, now: float) -> _Cell:
        """Returns the cell it went to, to correct it later."""
        cell = self._cell(math.floor(now))
        self.correct(cell, amount)
        return cell

    def correct(self, cell: _Cell, by: float) -> None:
        """What was used in a second turns out to be more or less."""
        if not cell.expired:
            cell.here += by
            self._used += by
            self._touched.add(self)

    def used_elsewhere(self, replica: str, second: int, used: float, now: float) -> None:
        """Another replica says what it used in a second."""
        if abs(now - second) >= MINUTE_SECONDS:
            return  # expired on the way, or its clock is far off
        cell = self._cell(second)
        self._used += used - cell.elsewhere.get(replica, 0.0)
        cell.elsewhere[replica] = used

    def counted(self, *, everything: bool) -> Iterator[WindowCount]:
        """What was used here and is not said yet, which is said now; or everything."""
        for cell in self._cells:
            if everything:
                if cell.here:
                    yield WindowCount(self.owner, self.kind.value, cell.second, cell.here)
            elif cell.here != cell.said:
                cell.said = cell.here
                yield WindowCount(self.owner, self.kind.value, cell.second, cell.here)

    def _cell(self, second: int) -> _Cell:
        cells = self._cells
        place = len(cells)
        while place and cells[place - 1].second > second:
            place -= 1  # the clock of another replica is a little ahead
        if place and cells[place - 1].second == second:
            return cells[place - 1]
        cell = _Cell(second)
        cells.insert(place, cell)
        return cell

    def _expire(self, now: float) -> None:
        oldest = math.floor(now) - MINUTE_SECONDS
        while self._cells and self._cells[0].second <= oldest:
            cell = self._cells.popleft()
            self._used -= cell.used
            cell.expired = True
        if not self._cells:
            self._used = 0.0  # no rounding error lives longer than a minute


class _InFlight:
    """A limit of requests at one time."""

    kind = LimitKind.IN_FLIGHT

    __slots__ = ("_elsewhere", "_total", "_touched", "here", "limit", "owner")

    def __init__(self, owner: str, touched: "set[_InFlight]") -> None:
        self.owner = owner
        self.limit = 0
        self.here = 0
        self._touched = touched
        self._elsewhere: dict[str, int] = {}
        self._total = 0

    def change(self, by: int) -> None:
        self.here += by
        self._total += by
        self._touched.add(self)

    def is_elsewhere(self, replica: str, requests: int) -> None:
        """Another replica says how many are in flight through it."""
        self._total += requests - self._elsewhere.pop(replica, 0)
        if requests:
            self._elsewhere[replica] = requests

    def deny(self, now: float) -> Denied | None:
        if self._total < self.limit:
            return None
        return Denied(
            code=DenialCode.TOO_MANY_IN_FLIGHT,
            owner=self.owner,
            what="limit of requests in flight",
            limit=self.limit,
            used=self._total,
            resets_at=now + 1.0,
            retry_after_seconds=1.0,
        )


_PERIOD_WORDS = {Period.DAY: "per day", Period.WEEK: "per week", Period.MONTH: "per month", Period.TOTAL: "in total"}


class _Share(msgspec.Struct, gc=False):
    """What another replica says that it charged to a budget in this period."""

    said: BudgetCount
    stored: float
    """The part of it that was counted from the store."""


class BudgetScan(msgspec.Struct, frozen=True):
    """Where a budget stood when its sum was asked of the store. `written`: other replica → what it said to be there."""

    begins_at: float
    charged: float
    written: Mapping[str, float]


class BudgetMeter:
    """A budget, and what was charged to it in its period."""

    __slots__ = (
        "_charged",
        "_elsewhere",
        "_increases",
        "_reserved",
        "_stored",
        "_touched",
        "_written",
        "_zone",
        "known",
        "knows_zone",
        "owner",
        "row",
        "span",
        "told",
    )

    def __init__(self, owner: str, row: BudgetRow, now: float, touched: "set[BudgetMeter]") -> None:
        """`touched`: it puts itself there when something is charged or reserved here."""
        self.owner = owner
        self.row = row
        self._touched = touched
        self.knows_zone = True
        """Whether this machine knows its time zone, as the one did where it was added; else days are those of UTC."""
        try:
            self._zone: tzinfo = periods.zone(row.time_zone)
        except CallerError:
            self._zone, self.knows_zone = UTC, False
        self._increases: tuple[IncreaseRow, ...] = ()
        self.span: Span = periods.around(Period(row.period), now, self._zone)
        self._charged = 0.0
        """What ended requests of this process were charged in this period."""
        self._written = 0.0
        """The part of it that is in the store for certain."""
        self._stored = 0.0
        """What the store knew beside it when it was asked."""
        self._reserved = 0.0
        """Estimates of requests that run here."""
        self._elsewhere: dict[str, _Share] = {}
        """Other replica → what it charged."""
        self.known = False
        """Whether what was charged before this process counted, or heard of others, is in `consumed`."""
        self.told = False
        """Whether it was said in this period that the soft amount is passed."""

    @property
    def consumed(self) -> float:
        """Cost units that ended requests were charged in this period, as far as this process knows."""
        others = sum(share.said.charged - share.stored for share in self._elsewhere.values())
        return self._stored + self._charged + others

    @property
    def reserved(self) -> float:
        """Estimates of requests that run, here and elsewhere."""
        return self._reserved + sum(share.said.reserved for share in self._elsewhere.values())

    def reserve(self, by: float) -> None:
        self._reserved = max(0.0, self._reserved + by)
        self._touched.add(self)

    def charge(self, cost_units: float) -> None:
        self._charged += cost_units
        self._touched.add(self)

    def count(self) -> BudgetCount:
        """What other replicas are told."""
        return BudgetCount(self.row.id, self.span.begins_at, self._charged, self._written, self._reserved)

    def is_written(self, before: BudgetCount) -> None:
        """What was charged when `count` was asked is in the store by now."""
        if before.begins_at == self.span.begins_at and before.charged != self._written:
            self._written = before.charged
            self._touched.add(self)

    def charged_elsewhere(self, replica: str, said: BudgetCount, now: float) -> None:
        """Another replica says what it charged."""
        self.start_again_if_over(now)
        if said.begins_at != self.span.begins_at:
            return  # it is in another period, for the moment
        share = self._elsewhere.get(replica)
        if share is not None:
            share.said = said
            return
        # What of it the store knew when this process last asked is not known: it asks again.
        self._elsewhere[replica] = _Share(said, said.written)
        self.known = self.known and not said.charged

    def is_gone(self, replica: str) -> None:
        """Nothing more is heard of another replica: what it wrote is in the store."""
        if self._elsewhere.pop(replica, None) is not None:
            self.known = False

    def scan(self) -> BudgetScan:
        """Before the store is asked."""
        written = {replica: share.said.written for replica, share in self._elsewhere.items()}
        return BudgetScan(self.span.begins_at, self._charged, written)

    def scanned(self, scan: BudgetScan, stored: float) -> None:
        """The store's sum: of this process as far as `scan` had it, of others as far as they said that it is there."""
        if scan.begins_at != self.span.begins_at or scan.written.keys() != self._elsewhere.keys():
            return  # a new period, or a replica came or went meanwhile: it is asked again
        self._stored = stored - scan.charged
        for replica, written in scan.written.items():
            self._elsewhere[replica].stored = written
        self.known = True

    def is_of(self, owner: str, row: BudgetRow) -> bool:
        """Whether a row is this budget; in another store, a backup say, the same id may be another one."""
        mine = self.row
        return self.owner == owner and (mine.period, mine.time_zone, mine.model, mine.tag, mine.created_at) == (
            row.period, row.time_zone, row.model, row.tag, row.created_at
        )  # fmt: skip

    def take(self, row: BudgetRow, increases: Iterable[IncreaseRow]) -> None:
        """The budget was changed."""
        self.row = row
        self._increases = tuple(increases)

    def matches(self, model: str, tag: str) -> bool:
        row = self.row
        return (row.model is None or row.model == model) and (row.tag is None or row.tag == tag)

    def start_again_if_over(self, now: float) -> None:
        if now >= self.span.ends_at:
            self.span = periods.around(Period(self.row.period), now, self._zone)
            self._charged = self._written = self._stored = 0.0
            for share in self._elsewhere.values():
                # Of the new period the store was not asked: all that others say counts.
                said = share.said
                share.said = BudgetCount(said.budget_id, self.span.begins_at, 0.0, 0.0, said.reserved)
                share.stored = 0.0
            self.told = False

    def deny(self, amount: float, now: float) -> Denied | None:
        self.start_again_if_over(now)
        hard = self.hard_cost_units(now)
        if hard is None:
            return None
        consumed = self.consumed
        used = consumed + self.reserved
        if used + amount <= hard and used < hard:
            return None
        ends_at = self.span.ends_at
        if consumed + amount <= hard and consumed < hard:
            ends_at = now + 1.0  # only estimates are in the way, and running requests end soon
        return Denied(
            code=DenialCode.BUDGET_EXHAUSTED,
            owner=self.owner,
            what=f"budget{self._of()} ({_PERIOD_WORDS[Period(self.row.period)]}, cost units)",
            limit=hard,
            used=used,
            resets_at=ends_at,
            retry_after_seconds=None if math.isinf(ends_at) else max(1.0, math.ceil(ends_at - now)),
        )

    def hard_cost_units(self, now: float) -> float | None:
        """What may be charged at most, with what it is increased by for the time; None: it has no end."""
        hard = self.row.hard_cost_units
        return None if hard is None else hard + self._more(now)

    def over_soft(self, now: float) -> bool:
        self.start_again_if_over(now)
        soft = self.row.soft_cost_units
        return soft is not None and self.consumed + self.reserved >= soft + self._more(now)

    def _more(self, now: float) -> float:
        return sum(each.cost_units for each in self._increases if each.until > now)

    def _of(self) -> str:
        parts = [f"{name} {value!r}" for name, value in (("model", self.row.model), ("tag", self.row.tag)) if value]
        return f" for {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftPassed:
    """A budget's soft amount was passed; said once in each period."""

    owner: str
    budget_id: int
    soft_cost_units: float
    used_cost_units: float
    borrows_only: bool
    resets_at: float


class Reservation:
    """What an admitted request holds until it ends."""

    __slots__ = ("_budgets", "_cost_units", "_in_flight", "_token_cells", "_tokens")

    def __init__(
        self,
        in_flight: Sequence[_InFlight],
        token_cells: Sequence[tuple[_Window, _Cell]],
        budgets: Sequence[BudgetMeter],
        tokens: float,
        cost_units: float,
    ) -> None:
        self._in_flight = in_flight
        self._token_cells = token_cells
        self._budgets = budgets
        self._tokens = tokens
        self._cost_units = cost_units

    def end(self, tokens: float) -> None:
        """The request has ended and took so many tokens. (What it was charged comes with `Gate.charged`.)"""
        for meter in self._in_flight:
            meter.change(-1)
        for window, cell in self._token_cells:
            window.correct(cell, tokens - self._tokens)
        for budget in self._budgets:
            budget.reserve(-self._cost_units)


NOTHING_HELD = Reservation((), (), (), 0.0, 0.0)


class Gate:
    """Every limit and budget in force."""

    def __init__(self, *, told: Callable[[SoftPassed], None] = lambda _: None) -> None:
        """`told`: hears when a budget's soft amount is passed."""
        self._told = told
        self._windows: dict[tuple[str, str], _Window] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self._limits: dict[int, _Window | _InFlight] = {}
        self._limits_of: dict[str, list[_Window | _InFlight]] = {}
        self._budgets: dict[int, BudgetMeter] = {}
        self._budgets_of: dict[str, list[BudgetMeter]] = {}
        self._mean_completion: dict[str, float] = {}
        self._new: set[str] = set()
        """Owners of limits and budgets that were not there when `news` was asked."""
        # What changed since other replicas were told; as many as there are meters, at most.
        self._touched_windows: set[_Window] = set()
        self._touched_in_flight: set[_InFlight] = set()
        self._touched_budgets: set[BudgetMeter] = set()

    # ------------------------------------------------------------------ rules

    def bound(self, row: LimitRow, owner: str) -> None:
        """A limit is in force, or has another value. What was counted for it goes on."""
        kind, meter = LimitKind(row.kind), self._limits.get(row.id)
        if meter is None or (meter.owner, meter.kind) != (owner, kind):
            self.unbound(row.id)
            if kind is LimitKind.IN_FLIGHT:
                meter = self._in_flight[owner] = _InFlight(owner, self._touched_in_flight)
                self._limits_of.setdefault(owner, []).insert(0, meter)
            else:
                meter = self._windows[owner, kind] = _Window(owner, kind, self._touched_windows)
                self._limits_of.setdefault(owner, []).append(meter)
            self._limits[row.id] = meter
            self._new.add(owner)
        meter.limit = row.value

    def unbound(self, limit_id: int) -> None:
        """A limit is not in force any more, if it was."""
        meter = self._limits.pop(limit_id, None)
        if meter is None:
            return
        match meter:
            case _InFlight():
                self._in_flight.pop(meter.owner, None)
                self._touched_in_flight.discard(meter)
            case _Window():
                self._windows.pop((meter.owner, meter.kind), None)
                self._touched_windows.discard(meter)
        left = self._limits_of[meter.owner]
        left.remove(meter)
        if not left:
            del self._limits_of[meter.owner]

    def limits(self) -> set[int]:
        """The ids of the limits in force."""
        return set(self._limits)

    def load(self, rules: Rules, now: float) -> None:
        """Other budgets are in force; what was counted goes on where one stays."""
        tree, kept = Tree(rules.nodes), self._budgets
        increases: dict[int, list[IncreaseRow]] = {}
        for increase in rules.increases:
            increases.setdefault(increase.budget_id, []).append(increase)
        self._budgets, self._budgets_of = {}, {}
        for row in rules.budgets:
            owner, meter = tree.owner_name(row), kept.get(row.id)
            if meter is None or not meter.is_of(owner, row):
                meter = BudgetMeter(owner, row, now, self._touched_budgets)
                self._new.add(owner)
            meter.take(row, increases.get(row.id, ()))
            self._budgets[row.id] = meter
            self._budgets_of.setdefault(owner, []).append(meter)
        self._touched_budgets.intersection_update(self._budgets.values())

    def news(self) -> set[str]:
        """Owners of limits and budgets that were not there when this was asked last."""
        new, self._new = self._new, set()
        return new

    # ------------------------------------------------------------------ requests

    def is_bounded(self, owners: Sequence[str]) -> bool:
        """Whether a limit or budget of any of them is in force. If not, `admit` has nothing to ask or to count."""
        return not (self._limits_of.keys().isdisjoint(owners) and self._budgets_of.keys().isdisjoint(owners))

    def expected_completion_tokens(self, model: str, max_tokens: int | None, slots: int) -> float:
        """Of every slot the running mean of the model's last answers, and never more than the request allows."""
        mean = self._mean_completion.get(model, 0.0)
        return slots * (mean if max_tokens is None else min(mean, max(0, max_tokens)))

    def expect(self, completion_tokens: Mapping[str, float]) -> None:
        """Model → completion tokens of a slot, of models of which no answer was seen yet."""
        for model, tokens in completion_tokens.items():
            self._mean_completion.setdefault(model, tokens)

    def admit(
        self, owners: Sequence[str], *, model: str, tag: str, tokens: float, cost_units: float, now: float
    ) -> Reservation | Denied:
        """May a request go on that will take about so much? All limits hold, or nothing is counted."""
        in_flight: list[_InFlight] = []
        windows: list[tuple[_Window, float]] = []
        budgets: list[BudgetMeter] = []
        for owner in owners:
            for limit in self._limits_of.get(owner, ()):
                if isinstance(limit, _InFlight):
                    denied = limit.deny(now)
                    in_flight.append(limit)
                else:
                    amount = 1.0 if limit.kind is LimitKind.REQUESTS_PER_MINUTE else tokens
                    denied = limit.deny(amount, now)
                    windows.append((limit, amount))
                if denied is not None:
                    return denied
            for budget in self._budgets_of.get(owner, ()):
                if budget.matches(model, tag):
                    denied = budget.deny(cost_units, now)
                    if denied is not None:
                        return denied
                    budgets.append(budget)
        if not in_flight and not windows and not budgets:
            return NOTHING_HELD
        token_cells: list[tuple[_Window, _Cell]] = []
        for window, amount in windows:
            cell = window.use(amount, now)
            if window.kind is LimitKind.TOKENS_PER_MINUTE:
                token_cells.append((window, cell))
        for meter in in_flight:
            meter.change(1)
        for budget in budgets:
            budget.reserve(cost_units)
            self._tell_if_over(budget, now)
        return Reservation(in_flight, token_cells, budgets, tokens, cost_units)

    def charged(
        self,
        owners: Iterable[str],
        *,
        model: str,
        tag: str,
        cost_units: float,
        completion_tokens: int,
        slots: int,
        now: float,
    ) -> None:
        """A request has ended and was charged, whether or not its budgets were there when it was admitted."""
        if completion_tokens and model:
            tokens, mean = completion_tokens / max(1, slots), self._mean_completion.get(model)
            self._mean_completion[model] = tokens if mean is None else mean + MEAN_MEMORY * (tokens - mean)
        if not cost_units:
            return
        for owner in owners:
            for budget in self._budgets_of.get(owner, ()):
                if budget.matches(model, tag):
                    budget.start_again_if_over(now)
                    budget.charge(cost_units)
                    self._tell_if_over(budget, now)

    # ------------------------------------------------------------------ budgets

    def unknown_budgets(self) -> list[BudgetMeter]:
        """Budgets of which it is not known what was charged before this process counted."""
        return [budget for budget in self._budgets.values() if not budget.known]

    def budgets(self, owners: Container[str] | None = None) -> list[BudgetMeter]:
        """The budgets of these owners (as `team:search`); None: every budget."""
        return [budget for budget in self._budgets.values() if owners is None or budget.owner in owners]

    def borrowing(self, now: float) -> frozenset[str]:
        """Owners (as `team:search`) over a soft budget that makes them borrow only."""
        return frozenset(
            budget.owner for budget in self._budgets.values() if budget.row.borrow_over_soft and budget.over_soft(now)
        )

    # ------------------------------------------------------------------ other replicas

    def counted(self, *, everything: bool = False) -> Counted:
        """For other replicas: what was counted here since changes were asked for last; or everything, again."""
        if everything:
            return Counted(
                [each for window in self._windows.values() for each in window.counted(everything=True)],
                [InFlightCount(meter.owner, meter.here) for meter in self._in_flight.values() if meter.here],
                self.charges(),
            )
        # A request that ends may touch a limit or budget that is not in force any more.
        counted = Counted(
            [
                each
                for window in self._touched_windows
                if self._windows.get((window.owner, window.kind)) is window
                for each in window.counted(everything=False)
            ],
            [
                InFlightCount(meter.owner, meter.here)
                for meter in self._touched_in_flight
                if self._in_flight.get(meter.owner) is meter
            ],
            [budget.count() for budget in self._touched_budgets if self._budgets.get(budget.row.id) is budget],
        )
        self._touched_windows.clear()
        self._touched_in_flight.clear()
        self._touched_budgets.clear()
        return counted

    def counted_elsewhere(self, replica: str, counted: Counted, now: float) -> None:
        """Another replica says what it counted. What is of limits that are not in force here says nothing."""
        for each in counted.windows:
            window = self._windows.get((each.owner, each.kind))
            if window is not None:
                window.used_elsewhere(replica, each.second, each.used, now)
        for one in counted.in_flight:
            meter = self._in_flight.get(one.owner)
            if meter is not None:
                meter.is_elsewhere(replica, one.requests)
        for said in counted.budgets:
            budget = self._budgets.get(said.budget_id)
            if budget is not None:
                budget.charged_elsewhere(replica, said, now)

    def gone(self, replica: str) -> None:
        """Nothing more is heard of another replica: nothing is in flight there. Minutes end by themselves."""
        for meter in self._in_flight.values():
            meter.is_elsewhere(replica, 0)
        for budget in self._budgets.values():
            budget.is_gone(replica)

    def charges(self) -> list[BudgetCount]:
        """What was charged to each budget here until now; for `written`."""
        return [budget.count() for budget in self._budgets.values()]

    def written(self, before: Iterable[BudgetCount]) -> None:
        """What was charged then is in the store now."""
        for each in before:
            budget = self._budgets.get(each.budget_id)
            if budget is not None:
                budget.is_written(each)

    # ------------------------------------------------------------------ inside

    def _tell_if_over(self, budget: BudgetMeter, now: float) -> None:
        if budget.told or not budget.over_soft(now):
            return
        budget.told = True
        assert budget.row.soft_cost_units is not None
        self._told(
            SoftPassed(
                owner=budget.owner,
                budget_id=budget.row.id,
                soft_cost_units=budget.row.soft_cost_units,
                used_cost_units=budget.consumed + budget.reserved,
                borrows_only=budget.row.borrow_over_soft,
                resets_at=budget.span.ends_at,
            )
        )
