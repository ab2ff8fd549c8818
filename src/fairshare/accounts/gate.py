"""May this request go on? Decided in memory, at once, from limits and budgets of everything that the key belongs to.

Pure: the caller says what time it is (wall clock). Estimates are reserved when a request is admitted, and replaced by
what it consumed when it ends.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from enum import StrEnum

from fairshare.accounts import periods
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period, Span
from fairshare.accounts.service import Tree
from fairshare.storage.accounts import BudgetRow, IncreaseRow, LimitRow, Rules

MINUTE_SECONDS = 60
MEAN_MEMORY = 1.0 / 64
"""The weight of a request in the running mean of completion tokens."""


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
        return f"The {self.what} of {kind} {name!r} is {self.limit:g}, and {self.used:g} is used. {when}"


class _Window:
    """A limit per minute: what was used in each of the last sixty seconds."""

    __slots__ = ("_cells", "_used", "kind", "limit", "owner")

    def __init__(self, owner: str, kind: LimitKind) -> None:
        self.owner = owner
        self.kind = kind
        self.limit = 0
        self._cells: deque[list[float]] = deque()
        """[second, used], oldest first."""
        self._used = 0.0

    def deny(self, amount: float, now: float) -> Denied | None:
        self._expire(now)
        # What is larger than the whole limit goes when nothing else was used: it would never fit.
        if self._used + amount <= self.limit or (not self._used and self.limit):
            return None
        excess = self._used + amount - self.limit
        resets_at = now + MINUTE_SECONDS
        for second, used in self._cells:
            excess -= used
            if excess <= 0:
                resets_at = second + MINUTE_SECONDS
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

    def use(self, amount: float, now: float) -> list[float]:
        """Returns the cell it went to, to correct it later."""
        second = math.floor(now)
        if not self._cells or self._cells[-1][0] < second:
            self._cells.append([second, 0.0])
        cell = self._cells[-1]
        self.correct(cell, amount)
        return cell

    def correct(self, cell: list[float], by: float) -> None:
        """What was used in a second turns out to be more or less."""
        if cell[0] >= 0:
            cell[1] += by
            self._used += by

    def _expire(self, now: float) -> None:
        oldest = math.floor(now) - MINUTE_SECONDS
        while self._cells and self._cells[0][0] <= oldest:
            cell = self._cells.popleft()
            self._used -= cell[1]
            cell[0] = -1.0  # a request that ends later finds it gone
        if not self._cells:
            self._used = 0.0  # no rounding error lives longer than a minute


class _InFlight:
    """A limit of requests at one time."""

    __slots__ = ("limit", "now_in_flight", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.limit = 0
        self.now_in_flight = 0

    def deny(self, now: float) -> Denied | None:
        if self.now_in_flight < self.limit:
            return None
        return Denied(
            code=DenialCode.TOO_MANY_IN_FLIGHT,
            owner=self.owner,
            what="limit of requests in flight",
            limit=self.limit,
            used=self.now_in_flight,
            resets_at=now + 1.0,
            retry_after_seconds=1.0,
        )


_PERIOD_WORDS = {Period.DAY: "per day", Period.WEEK: "per week", Period.MONTH: "per month", Period.TOTAL: "in total"}


class BudgetMeter:
    """A budget, and what was charged to it in its period."""

    __slots__ = ("_increases", "_zone", "consumed", "known", "owner", "reserved", "row", "span", "told")

    def __init__(self, owner: str, row: BudgetRow, now: float) -> None:
        self.owner = owner
        self.row = row
        self._zone: tzinfo = periods.zone(row.time_zone)
        self._increases: tuple[IncreaseRow, ...] = ()
        self.span: Span = periods.around(Period(row.period), now, self._zone)
        self.consumed = 0.0
        """Cost units that ended requests were charged in this period, as far as this process knows."""
        self.reserved = 0.0
        """Estimates of requests that run."""
        self.known = False
        """Whether what was charged before this process counted is in `consumed`."""
        self.told = False
        """Whether it was said in this period that the soft amount is passed."""

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
            self.consumed = 0.0
            self.told = False

    def deny(self, amount: float, now: float) -> Denied | None:
        self.start_again_if_over(now)
        hard = self.hard_cost_units(now)
        if hard is None:
            return None
        used = self.consumed + self.reserved
        if used + amount <= hard and used < hard:
            return None
        ends_at = self.span.ends_at
        if self.consumed + amount <= hard and self.consumed < hard:
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
        token_cells: Sequence[tuple[_Window, list[float]]],
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
            meter.now_in_flight -= 1
        for window, cell in self._token_cells:
            window.correct(cell, tokens - self._tokens)
        for budget in self._budgets:
            budget.reserved = max(0.0, budget.reserved - self._cost_units)


NOTHING_HELD = Reservation((), (), (), 0.0, 0.0)


class Gate:
    """Every limit and budget in force."""

    def __init__(self, *, told: Callable[[SoftPassed], None] = lambda _: None) -> None:
        """`told`: hears when a budget's soft amount is passed."""
        self._told = told
        self._windows: dict[tuple[str, str], _Window] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self._budgets: dict[int, BudgetMeter] = {}
        self._by_owner: dict[str, list[_Window | _InFlight | BudgetMeter]] = {}
        self._mean_completion: dict[str, float] = {}

    def load(self, rules: Rules, now: float) -> None:
        """Other rules are in force; what was counted goes on where a limit or budget stays."""
        tree = Tree(rules.nodes)
        limits = {(tree.owner_name(row), row.kind): row for row in rules.limits}
        budgets = {row.id: row for row in rules.budgets}
        self._windows = {
            place: self._windows.get(place) or _Window(place[0], LimitKind(place[1]))
            for place in limits
            if place[1] != LimitKind.IN_FLIGHT
        }
        self._in_flight = {
            owner: self._in_flight.get(owner) or _InFlight(owner)
            for owner, kind in limits
            if kind == LimitKind.IN_FLIGHT
        }
        self._budgets = {
            row.id: self._budgets.get(row.id) or BudgetMeter(tree.owner_name(row), row, now) for row in budgets.values()
        }
        self._set_amounts(limits, budgets, rules.increases)
        self._by_owner = {}
        for meter in (*self._in_flight.values(), *self._windows.values(), *self._budgets.values()):
            self._by_owner.setdefault(meter.owner, []).append(meter)

    def _set_amounts(
        self,
        limits: Mapping[tuple[str, str], LimitRow],
        budgets: Mapping[int, BudgetRow],
        increases: Sequence[IncreaseRow],
    ) -> None:
        for place, window in self._windows.items():
            window.limit = limits[place].value
        for owner, meter in self._in_flight.items():
            meter.limit = limits[owner, LimitKind.IN_FLIGHT.value].value
        for number, budget in self._budgets.items():
            budget.take(budgets[number], (each for each in increases if each.budget_id == number))

    # ------------------------------------------------------------------ requests

    def expected_completion_tokens(self, model: str, max_tokens: int | None) -> float:
        """The running mean of the model's last answers, and never more than the request allows."""
        mean = self._mean_completion.get(model, 0.0)
        return mean if max_tokens is None else min(mean, max(0, max_tokens))

    def admit(
        self, owners: Sequence[str], *, model: str, tag: str, tokens: float, cost_units: float, now: float
    ) -> Reservation | Denied:
        """May a request go on that will take about so much? All limits hold, or nothing is counted."""
        meters = [meter for owner in owners for meter in self._by_owner.get(owner, ())]
        if not meters:
            return NOTHING_HELD
        in_flight: list[_InFlight] = []
        windows: list[tuple[_Window, float]] = []
        budgets: list[BudgetMeter] = []
        for meter in meters:
            match meter:
                case _InFlight():
                    denied = meter.deny(now)
                    in_flight.append(meter)
                case _Window():
                    amount = 1.0 if meter.kind is LimitKind.REQUESTS_PER_MINUTE else tokens
                    denied = meter.deny(amount, now)
                    windows.append((meter, amount))
                case BudgetMeter():
                    if not meter.matches(model, tag):
                        continue
                    denied = meter.deny(cost_units, now)
                    budgets.append(meter)
            if denied is not None:
                return denied
        token_cells: list[tuple[_Window, list[float]]] = []
        for window, amount in windows:
            cell = window.use(amount, now)
            if window.kind is LimitKind.TOKENS_PER_MINUTE:
                token_cells.append((window, cell))
        for meter in in_flight:
            meter.now_in_flight += 1
        for budget in budgets:
            budget.reserved += cost_units
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
        now: float,
    ) -> None:
        """A request has ended and was charged, whether or not its budgets were there when it was admitted."""
        if completion_tokens and model:
            mean = self._mean_completion.get(model)
            self._mean_completion[model] = (
                float(completion_tokens) if mean is None else mean + MEAN_MEMORY * (completion_tokens - mean)
            )
        if not cost_units:
            return
        for owner in owners:
            for meter in self._by_owner.get(owner, ()):
                if isinstance(meter, BudgetMeter) and meter.matches(model, tag):
                    meter.start_again_if_over(now)
                    meter.consumed += cost_units
                    self._tell_if_over(meter, now)

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
