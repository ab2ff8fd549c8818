"""Limits and budgets of several replicas together: what each counted, and what it hears of the others. Pure.

Each replica says twice a second what it counted since (`Fleet.report`), and now and then all of it, so that a report
that was lost is made good. Every number is absolute and replaces what was said before, so hearing it twice, or on two
ways, changes nothing. Replicas are linked through the owners of their pools, not each with each: what is new is passed
on, and carries the name of the replica that counted it.

Until the others have heard of a request they may admit another in its place. So a limit is passed by no more than what
the other replicas admit between two reports and on the way of one; and by replicas that are cut off from each other, by
what each of them admits alone.
"""

from collections.abc import Container, Sequence

import msgspec

from fairshare.accounts.gate import MINUTE_SECONDS, BudgetCount, Counted, Gate, InFlightCount, WindowCount
from fairshare.storage.ledger import Mark

REPORT_SECONDS = 0.5
"""How often each replica says what it counted."""

WHOLE_EVERY = 20
"""Every so many reports hold everything: what was lost on the way is made good."""

SILENT_SECONDS = 10.0
"""A replica of which nothing was heard for so long has nothing in flight any more."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What one replica counted; or, passed on to one that is new, all that another knows of it."""

    replica: str
    number: int
    """Grows with each report of a replica."""
    whole: bool
    counted: Counted
    """Everything that is not zero, or what changed since the report before."""
    written: Mark
    """Up to where its account of requests is in the store, as `BudgetCount.written` says."""


class _Other:
    """What another replica said."""

    __slots__ = ("budgets", "heard_at", "in_flight", "number", "windows", "written")

    def __init__(self) -> None:
        self.number = -1
        self.heard_at = 0.0
        self.written = Mark(0, 0)
        self.windows: dict[tuple[str, str, int], WindowCount] = {}
        self.in_flight: dict[str, InFlightCount] = {}
        self.budgets: dict[int, BudgetCount] = {}

    def take(self, counted: Counted) -> None:
        for each in counted.windows:
            self.windows[each.owner, each.kind, each.second] = each
        for one in counted.in_flight:
            self.in_flight[one.owner] = one
        for said in counted.budgets:
            self.budgets[said.budget_id] = said

    def forget_before(self, second: float) -> None:
        self.windows = {place: each for place, each in self.windows.items() if each.second > second}
        self.in_flight = {owner: one for owner, one in self.in_flight.items() if one.requests}

    def counted(self) -> Counted:
        return Counted(list(self.windows.values()), list(self.in_flight.values()), list(self.budgets.values()))


class Fleet:
    """What the gate of this replica counts, and what it hears of others. `now`: wall clock; replicas must agree on it
    within seconds."""

    def __init__(self, gate: Gate, replica: str, *, written: Mark) -> None:
        """`replica`: the name of this life of this process, unlike any other. `written`: where its account begins."""
        self._gate = gate
        self._replica = replica
        self._written = written
        self._number = 0
        self._others: dict[str, _Other] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)

    # ------------------------------------------------------------------ to others

    def report(self, now: float) -> bytes:
        """What all others must hear, every `REPORT_SECONDS`; also forgets of whom nothing is heard."""
        for replica in [name for name, other in self._others.items() if other.heard_at + SILENT_SECONDS < now]:
            del self._others[replica]
            self._gate.gone(replica)
        self._number += 1
        return self._own(whole=self._number % WHOLE_EVERY == 0)

    def whole(self, now: float) -> list[bytes]:
        """What a replica that is newly linked must hear: everything of this one, and of all whom it heard."""
        self._number += 1
        reports = [self._own(whole=True)]
        for name, other in self._others.items():
            other.forget_before(now - MINUTE_SECONDS)
            reports.append(self._encoder.encode(Report(name, other.number, True, other.counted(), other.written)))
        return reports

    def _own(self, *, whole: bool) -> bytes:
        counted = self._gate.counted(everything=whole)
        return self._encoder.encode(Report(self._replica, self._number, whole, counted, self._written))

    # ------------------------------------------------------------------ from others

    def hear(self, content: bytes, now: float) -> bool:
        """A report came; whether it must be passed on to all others.

        Raises:
            msgspec.DecodeError: it is none that this version can read.
        """
        report = self._decoder.decode(content)
        if report.replica == self._replica:
            return False
        other = self._others.get(report.replica)
        if other is None:
            if not report.whole:
                return False  # changes of something unknown; all of it comes with the link, or with a later report
            other = self._others[report.replica] = _Other()
        if report.number <= other.number:
            return False
        if report.whole:
            for owner in other.in_flight.keys() - {one.owner for one in report.counted.in_flight}:
                self._gate.counted_elsewhere(report.replica, Counted([], [InFlightCount(owner, 0)], []), now)
            other.forget_before(now - MINUTE_SECONDS)
            other.in_flight.clear()
        other.number, other.heard_at, other.written = report.number, now, report.written
        other.take(report.counted)
        self._gate.counted_elsewhere(report.replica, report.counted, now)
        return True

    def rules_changed(self, new: Container[str], now: float) -> None:
        """These owners have limits or budgets that are new to the gate: what others counted of them holds too."""
        for name, other in self._others.items():
            counted = other.counted()
            windows = [each for each in counted.windows if each.owner in new]
            in_flight = [one for one in counted.in_flight if one.owner in new]
            self._gate.counted_elsewhere(name, Counted(windows, in_flight, counted.budgets), now)

    # ------------------------------------------------------------------ the store

    def written_until(self, mark: Mark, charges: Sequence[BudgetCount]) -> None:
        """The account of requests is in the store up to this mark; `charges`: what budgets had been charged there."""
        self._written = mark
        self._gate.written(charges)

    def marks(self) -> list[Mark]:
        """Up to where others said that their account is in the store."""
        return [other.written for other in self._others.values()]
