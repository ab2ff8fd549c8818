"""Why a request waited or borrowed, and why a team waits now: sentences with the numbers of the moment.

Read from the decision log, the history (LF of every second) and, for requests that are older than the log, the account
of requests. Who asks sees what is theirs: an operator everything; a team its own requests, of others only sums.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from sys import float_info
from typing import Protocol

import msgspec

from fairshare.clock import Clock
from fairshare.core.decisions import RefusalReason
from fairshare.core.priority import BORROW_BASE, RANK_STEP, Standing
from fairshare.core.ranking import level_fairshares, level_key
from fairshare.gateway.decision_log import DecisionLog, Entry, HeldEntry, RecalledEntry, RefusedEntry, SentEntry
from fairshare.gateway.history import borrowed_slots
from fairshare.gateway.identity import Identity
from fairshare.gateway.options import Level
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.gateway.status import BudgetStatus, PoolStatus, TeamStatus
from fairshare.storage.ledger import LedgerRow

RECENT_SECONDS = 300.0
"""What "lately" means."""

MOST_NAMED = 5
"""Teams named in one sentence."""


Numbers = dict[str, int | float | str | None]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    at: float
    """Wall clock."""
    what: str
    """`arrived`, `held`, `sent`, `recalled`, `refused`, `ended`, `running`, `now`, `lately` or `budget`."""
    sentence: str
    numbers: Numbers
    """What the sentence says, for programs."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "why?"."""

    about: str
    """`request` or `team`."""
    name: str
    steps: list[Step]


class Sight(Protocol):
    """What somebody may see."""

    @property
    def sees_names(self) -> bool:
        """Whether others' names and the engines' addresses may be said."""
        ...

    def sees(self, pool: str, team: str, key_id: str) -> bool:
        """Whether a request is theirs to see."""
        ...


class Everything:
    """An operator's."""

    sees_names = True

    def sees(self, pool: str, team: str, key_id: str) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Own:
    """A team's: its own requests, and no name of anybody else."""

    identity: Identity
    level_of: Callable[[str], Level | None]
    """Whose names a pool's shares hold; None: there is no such pool."""
    team_of: Callable[[str], str | None]
    """The team of a key."""

    @property
    def sees_names(self) -> bool:
        return False

    def name_in(self, pool: str) -> str | None:
        """What this pool counts its requests for; None: there is no such pool."""
        level = self.level_of(pool)
        return None if level is None else self.identity.team_at(level)

    def sees(self, pool: str, team: str, key_id: str) -> bool:
        if not pool:  # it was refused before its pool was known; then it is counted for the key's team
            return team == self.identity.team
        if team != self.name_in(pool):
            return False
        # An organisation's row is shared by its teams; their requests are not.
        return self.level_of(pool) is not Level.ORGANISATION or self.team_of(key_id) == self.identity.team


class Levels(Protocol):
    """The history, as far as it is asked here."""

    def levels(self, pool: str, at: float) -> dict[str, float]: ...


class Explainer:
    """Answers "why?". Lives on the event loop's thread."""

    def __init__(
        self,
        *,
        log: DecisionLog,
        history: Levels,
        clock: Clock,
        wall: Clock,
        written: Callable[[str], Awaitable[Sequence[LedgerRow]]] | None = None,
        alone: bool = True,
    ) -> None:
        """
        Args:
            alone: no other process serves the same pools; else the log has only a part of what was decided.
            clock: the pools' clock, which the log is on.
            written: what the account of requests has of a request id, the last first; None: there is no account.
        """
        self._log = log
        self._history = history
        self._clock = clock
        self._wall = wall
        self._written = written
        self._alone = alone

    # ------------------------------------------------------------------ a request

    async def request(self, request_id: str, sight: Sight) -> Explanation | None:
        """What became of a request; None: nothing is known of it, or it is not theirs to see.

        Raises:
            StoreUnavailable: it may be in the account, and the store does not answer.
        """
        return self.lately_seen(request_id, sight) or await self._from_account(request_id, sight)

    def lately_seen(self, request_id: str, sight: Sight) -> Explanation | None:
        """The same from memory."""
        record = self._log.record(request_id, lambda each: sight.sees(each.pool, each.team, each.key_id))
        entries = self._log.of_request(request_id, lambda each: sight.sees(_home(each), each.team, each.key_id))
        entries = _of_one_request(entries, record, self._offset())
        if not entries and record is None:
            return None
        steps = [_arrived(record)] if record is not None else []
        since: float | None = None
        for entry in entries:
            at = entry.at + self._offset()
            match entry:
                case HeldEntry():
                    since = entry.at
                    steps.append(_held(entry, at))
                case SentEntry():
                    steps.append(self._sent(entry, at, since, sight))
                case RecalledEntry():
                    since = entry.at
                    steps.append(_recalled(entry, at, sight))
                case RefusedEntry():
                    steps.append(_refused(entry, at))
        if record is not None:
            if not entries and record.standing is not None:
                steps.append(_sent_by_record(record))
            steps.append(_ended(record))
        else:
            waits = isinstance(entries[-1], HeldEntry | RecalledEntry)
            so_far = self._clock() - entries[-1].at
            sentence = f"It {'still waits' if waits else 'is at its engine'}, for {_seconds(so_far)} now."
            steps.append(Step(at=self._wall(), what="running", sentence=sentence, numbers={"seconds": so_far}))
        return Explanation(about="request", name=request_id, steps=steps)

    def _sent(self, entry: SentEntry, at: float, since: float | None, sight: Sight) -> Step:
        waited = f"after {_seconds(entry.at - since)} " if since is not None else "at once "
        where = f" of pool {entry.pool}, on which pool {entry.home} may fall back" if entry.pool != entry.home else ""
        numbers: Numbers = {
            "waited_seconds": 0.0 if since is None else entry.at - since,
            "standing": entry.standing.value,
            "priority": entry.priority,
            "team_in_flight": entry.team_in_flight_slots,
            "reserved": entry.reserved_slots,
            "pool_in_flight": entry.pool_in_flight_slots,
            "capacity": entry.capacity_slots,
        }
        counts = (
            f"with it, {entry.team} had {_slots(entry.team_in_flight_slots)} in flight and owns "
            f"{entry.reserved_slots}; {entry.pool_in_flight_slots} of the "
            f"{entry.capacity_slots} slots{where} were taken."
        )
        if entry.standing is Standing.WITHIN_SHARE:
            beyond = (
                " What is above that is its turn at the slots made of fractions, or was sent when there was room."
                if entry.team_in_flight_slots > entry.reserved_slots
                else ""
            )
            sentence = f"Sent {waited}within its share: {counts}{beyond}"
        else:
            sentence = f"Sent {waited}on idle capacity: {counts}"
            sentence += self._standing_of(entry, at, sight, numbers)
        if since is not None:
            sentence += self._meanwhile(entry, since, sight)
        return Step(at=at, what="sent", sentence=sentence, numbers=numbers)

    def _standing_of(self, entry: SentEntry, at: float, sight: Sight, numbers: Numbers) -> str:
        """Who was ahead of a borrower."""
        rank = None if entry.priority is None else (entry.priority - BORROW_BASE) // RANK_STEP
        if entry.ranked_by is None:
            levels = self._history.levels(entry.pool, at)  # of that second
            own = levels.get(entry.team)
            ahead = [] if own is None else [(team, level) for team, level in levels.items() if level > own]
        else:
            own, ahead = _ahead_then(entry.team, *entry.ranked_by)
        numbers |= {"rank": rank, "level_fairshare": None if own is None or math.isinf(own) else own}
        words = ""
        if rank is not None:
            words = f" Its rank was {rank} (0: first in line, 9: last)"
            words += "." if own is None else f", its level fairshare {_level(own)}."
        if own is None and ahead:
            words += " It owns nothing of the pool, so the teams that own some come first."
        elif own is not None:
            ahead.sort(key=lambda each: -each[1])
            numbers["teams_ahead"] = len(ahead)
            if ahead and sight.sees_names:
                named = ", ".join(f"{team} ({_level(level)})" for team, level in ahead[:MOST_NAMED])
                more = f" and {len(ahead) - MOST_NAMED} more" if len(ahead) > MOST_NAMED else ""
                words += f" Ahead of it for idle capacity: {named}{more}."
            elif ahead:
                words += f" {_count(len(ahead), 'team')} used less of what they own."
        return words

    def _meanwhile(self, entry: SentEntry, since: float, sight: Sight) -> str:
        """Who went while it waited."""
        counts = self._log.sent_between(entry.pool, since, entry.at)
        if not counts:
            return ""
        at_least = "at least " if since < self._log.began_at or not self._alone else ""
        total = sum(counts.values())
        own = sum(count for (team, _), count in counts.items() if team == entry.team)
        others = {who: count for who, count in counts.items() if who[0] != entry.team}
        parts = [f"{own:,} of its own team"] if own else []
        if sight.sees_names:
            ordered = sorted(others.items(), key=lambda each: -each[1])
            parts += [f"{count} of {team} {_words(standing)}" for (team, standing), count in ordered[:MOST_NAMED]]
            rest = sum(count for _, count in ordered[MOST_NAMED:])
            parts += [f"{rest} of others"] if rest else []
        else:
            for standing in Standing:
                count = sum(count for (_, each), count in others.items() if each is standing)
                parts += [f"{count} of others {_words(standing)}"] if count else []
        return f" While it waited, {at_least}{_count(total, 'other request')} went: {', '.join(parts)}."

    async def _from_account(self, request_id: str, sight: Sight) -> Explanation | None:
        if self._written is None:
            return None
        for row in await self._written(request_id):
            if sight.sees(row.pool, row.team, row.key_id):
                return Explanation(about="request", name=request_id, steps=_from_row(row))
        return None

    # ------------------------------------------------------------------ a team

    def team(
        self, name: str, pools: Sequence[PoolStatus], budgets: Sequence[BudgetStatus], sight: Sight
    ) -> Explanation | None:
        """How a team stands in these pools, now and lately; None: none of them knows it."""
        steps: list[Step] = []
        for pool in pools:
            team = next((team for team in pool.teams if team.team == name), None)
            if team is not None:
                steps += self.standing(pool, team, sight)
        steps += [_budget(budget, self._wall()) for budget in budgets]
        return Explanation(about="team", name=name, steps=steps) if steps else None

    def standing(self, pool: PoolStatus, team: TeamStatus, sight: Sight) -> list[Step]:
        """How a team stands in one pool: why it waits, and who is ahead."""
        steps = [self.now(pool, team, sight)]
        lately = self._lately(pool.name, team.team)
        return steps if lately is None else [*steps, lately]

    def now(self, pool: PoolStatus, team: TeamStatus, sight: Sight) -> Step:
        """The same, of this moment alone."""
        return _now(pool, team, sight, self._wall())

    def _lately(self, pool: str, team: str) -> Step | None:
        since = max(self._clock() - RECENT_SECONDS, self._log.began_at)
        entries = self._log.of_team(team, pool, since=since)
        sent = [entry for entry in entries if isinstance(entry, SentEntry)]
        if not entries:
            return None
        waits = [entry.held_seconds for entry in sent if entry.held_seconds]
        borrowing = sum(entry.standing is Standing.BORROWING for entry in sent)
        recalled = sum(isinstance(entry, RecalledEntry) for entry in entries)
        refused = sum(isinstance(entry, RefusedEntry) for entry in entries)
        return Lately(
            team=team,
            pool=pool,
            seconds=max(1.0, self._clock() - since),
            sent=len(sent),
            borrowing=borrowing,
            waited=len(waits),
            mean_wait_seconds=sum(waits) / len(waits) if waits else 0.0,
            longest_wait_seconds=max(waits, default=0.0),
            recalled=recalled,
            refused=refused,
        ).step(self._wall(), alone=self._alone)

    def _offset(self) -> float:
        """From the pools' clock to wall clock."""
        return self._wall() - self._clock()


# ---------------------------------------------------------------------- several processes


class Lately(msgspec.Struct, frozen=True, kw_only=True):
    """What went of a team in a pool: the numbers of a step `lately`."""

    team: str
    pool: str
    seconds: float
    sent: int
    borrowing: int
    waited: int
    mean_wait_seconds: float
    longest_wait_seconds: float
    recalled: int
    refused: int

    def step(self, at: float, *, alone: bool) -> Step:
        """As a step. `alone`: this machine serves the pool alone."""
        sentence = (
            f"In the last {_seconds(self.seconds)} in pool {self.pool}, {_count(self.sent, 'request')} of {self.team} "
            f"went to engines{'' if alone else ' from this machine'}, {self.sent - self.borrowing:,} within its share "
            f"and {self.borrowing:,} on idle capacity; "
        )
        sentence += (
            f"{self.waited:,} of them had waited, {_seconds(self.mean_wait_seconds)} on average and "
            f"{_seconds(self.longest_wait_seconds)} at most."
            if self.waited
            else "none of them had waited."
        )
        if self.recalled:
            sentence += f" {_count(self.recalled, 'time')} a request was taken back for an owner, uncharged."
        if self.refused:
            sentence += f" {self.refused} were refused."
        return Step(at=at, what="lately", sentence=sentence, numbers=msgspec.to_builtins(self))


def put_together(found: Sequence[Explanation]) -> Explanation:
    """What the workers of one machine, at least one, say of the same request or team.

    A request is told by the one that knows most of it: by that which served it, not one that read the account. Of a
    team all know how it stands, and each knows which requests went through itself.
    """
    first = max(found, key=lambda each: sum(len(step.numbers) for step in each.steps if step.what != "lately"))
    if first.about != "team":
        return first
    lately: dict[str, list[Lately]] = {}
    for step in (step for each in found for step in each.steps if step.what == "lately"):
        numbers = msgspec.convert(step.numbers, Lately)
        lately.setdefault(numbers.pool, []).append(numbers)
    steps: list[Step] = []
    for step in first.steps:
        if step.what != "lately":
            steps.append(step)
        if step.what == "now" and (parts := lately.get(str(step.numbers["pool"]))):
            steps.append(_sum_of(parts).step(step.at, alone=False))
    return Explanation(about=first.about, name=first.name, steps=steps)


def _sum_of(parts: Sequence[Lately]) -> Lately:
    waited = sum(each.waited for each in parts)
    return Lately(
        team=parts[0].team,
        pool=parts[0].pool,
        seconds=max(each.seconds for each in parts),
        sent=sum(each.sent for each in parts),
        borrowing=sum(each.borrowing for each in parts),
        waited=waited,
        mean_wait_seconds=sum(each.mean_wait_seconds * each.waited for each in parts) / max(1, waited),
        longest_wait_seconds=max(each.longest_wait_seconds for each in parts),
        recalled=sum(each.recalled for each in parts),
        refused=sum(each.refused for each in parts),
    )


# ---------------------------------------------------------------------- sentences


def _now(pool: PoolStatus, team: TeamStatus, sight: Sight, now: float) -> Step:
    borrowed = borrowed_slots(team)
    sentence = (
        f"{team.team} owns {team.reserved} of the {_slots(pool.capacity)} of pool {pool.name} "
        f"(share {team.share:.4g}) and has {team.in_flight} in flight"
    )
    sentence += f", {borrowed} of them borrowed." if borrowed else "."
    if team.held:
        sentence += f" {_count(team.held, 'request')} of it {'waits' if team.held == 1 else 'wait'}, the oldest for "
        sentence += f"{_seconds(team.oldest_held_seconds)}: {_why_held(pool, team)}"
    elif team.in_flight or borrowed:
        sentence += " Nothing of it waits."
    if team.usage:
        level = "infinite" if team.level_fairshare is None else _level(team.level_fairshare)
        sentence += f" It has used {team.usage:,.0f} {pool.cost_unit}; level fairshare {level}, rank {team.rank}."
    ahead = [other for other in pool.teams if other.held and other.team != team.team and _is_ahead(other, team)]
    if team.held and ahead:
        if sight.sees_names:
            named = ", ".join(f"{other.team} ({other.held} waiting)" for other in ahead[:MOST_NAMED])
            sentence += f" For idle capacity these come first: {named}."
        else:
            waiting = sum(other.held for other in ahead)
            come = "comes" if len(ahead) == 1 else "come"
            sentence += f" For idle capacity {_count(len(ahead), 'other team')} with {waiting} waiting {come} first."
    numbers: Numbers = {
        "pool": pool.name,
        "capacity": pool.capacity,
        "pool_in_flight": pool.in_flight,
        "reserved": team.reserved,
        "in_flight": team.in_flight,
        "borrowed": borrowed,
        "held": team.held,
        "oldest_held_seconds": team.oldest_held_seconds,
        "usage": team.usage,
        "level_fairshare": team.level_fairshare,
        "rank": team.rank,
        "teams_ahead": len(ahead),
    }
    return Step(at=now, what="now", sentence=sentence, numbers=numbers)


def _why_held(pool: PoolStatus, team: TeamStatus) -> str:
    if pool.capacity == 0 or not any(instance.healthy for instance in pool.instances):
        return "no engine of the pool is healthy."
    own = "it owns nothing here" if not team.reserved else f"its own {_slots(team.reserved)} are in use"
    if team.in_flight < team.reserved:
        own = "the next one takes more slots than are free of its own"
    if pool.in_flight >= pool.capacity:
        return f"{own}, and all {_slots(pool.capacity)} of the pool are taken."
    return f"{own}; {pool.in_flight} of {_slots(pool.capacity)} of the pool are taken."


def _is_ahead(other: TeamStatus, team: TeamStatus) -> bool:
    def level(each: TeamStatus) -> float:
        return math.inf if each.level_fairshare is None else each.level_fairshare

    return level(other) > level(team)


def _ahead_then(
    team: str, shares: Mapping[str, Fraction], used: Sequence[float]
) -> tuple[float | None, list[tuple[str, float]]]:
    """A team's LF and the teams that were ahead of it with theirs, from what its rank was worked out from.

    A team that shares do not name has no LF; everybody was ahead of it.
    """
    parts = [float(share) for share in shares.values()]
    levels = level_fairshares(parts, [min(each, float_info.max) for each in used])
    keys = [level_key(each, part) for each, part in zip(used, parts, strict=True)]
    at = list(shares).index(team) if team in shares else None
    own_key = math.inf if at is None else keys[at]
    ahead = [(name, level) for name, level, key in zip(shares, levels, keys, strict=True) if key < own_key]
    return None if at is None else levels[at], ahead


def _budget(budget: BudgetStatus, now: float) -> Step:
    kind, _, name = budget.owner.partition(":")
    what = "".join(f" for {word} {value}" for word, value in (("model", budget.model), ("tag", budget.tag)) if value)
    period = "in total" if budget.period == "total" else f"this {budget.period}"
    limit = budget.hard if budget.hard is not None else budget.soft
    sentence = f"The budget of {kind} {name}{what}: {budget.used:,.0f} of {limit or 0.0:,.0f} cost units used {period}"
    sentence += f", {budget.left:,.0f} left." if budget.left is not None else " (soft)."
    if budget.borrows_only:
        sentence += " It is over its soft budget and only borrows."
    numbers: Numbers = {"owner": budget.owner, "used": budget.used, "left": budget.left}
    return Step(at=now, what="budget", sentence=sentence, numbers=numbers)


def _arrived(record: RequestRecord) -> Step:
    asked = f" for model {record.model}" if record.model else ""
    pool = f" of pool {record.pool}" if record.pool else ""
    slots = f", {_slots(record.slots)}" if record.slots > 1 else ""
    sentence = (
        f"Asked{asked}{pool} by team {record.team or '(nobody known)'} with key {record.key_id or '(none)'}, "
        f"{record.service_class.name.lower()}{slots}."
    )
    return Step(at=record.arrived_at, what="arrived", sentence=sentence, numbers={"slots": record.slots})


def _held(entry: HeldEntry, at: float) -> Step:
    before = entry.team_held - 1
    sentence = (
        f"Held: {entry.team} had {_slots(entry.team_in_flight_slots)} in flight and owns {entry.whole_slots} whole; "
        f"{entry.pool_in_flight_slots} of the {_slots(entry.capacity_slots)} of pool {entry.pool} were taken, and "
        f"{_count(before, 'request')} of its own team waited before it."
    )
    numbers: Numbers = {
        "team_in_flight": entry.team_in_flight_slots,
        "whole_slots": entry.whole_slots,
        "pool_in_flight": entry.pool_in_flight_slots,
        "capacity": entry.capacity_slots,
        "waiting_before": before,
    }
    return Step(at=at, what="held", sentence=sentence, numbers=numbers)


def _recalled(entry: RecalledEntry, at: float, sight: Sight) -> Step:
    engine = entry.instance_id if sight.sees_names else "its engine"
    sentence = (
        f"Taken back from {engine}, because an owner came and found no free seat; nothing had reached the client. "
        f"{entry.wasted_slot_seconds:.2f} slot-seconds were thrown away and charged to nobody; it waited again, at the "
        "head of its team."
    )
    return Step(at=at, what="recalled", sentence=sentence, numbers={"wasted_slot_seconds": entry.wasted_slot_seconds})


def _refused(entry: RefusedEntry, at: float) -> Step:
    found, limit = f"{entry.found:,.0f}", f"{entry.limit:,.0f}"
    match entry.reason:
        case RefusalReason.QUEUE_FULL:
            why = f"the pool held {found} requests, and may hold {limit}"
        case RefusalReason.TEAM_QUEUE_FULL:
            why = f"{entry.team} had {found} requests waiting, and may have {limit}"
        case RefusalReason.HELD_BYTES_FULL:
            why = f"the bodies that wait took {found} bytes, and may take {limit}"
        case RefusalReason.HELD_TOO_LONG:
            why = f"it had waited {_seconds(entry.found)}, and the longest wait is {_seconds(entry.limit)}"
        case _:
            why = f"no engine of pool {entry.pool} accepted requests"
    numbers: Numbers = {"reason": entry.reason, "found": entry.found, "limit": entry.limit}
    return Step(at=at, what="refused", sentence=f"Refused: {why}.", numbers=numbers)


def _sent_by_record(record: RequestRecord) -> Step:
    waited = f"after it was held for {_seconds(record.held_seconds)}" if record.held_seconds else "without waiting"
    sentence = f"Sent {waited}, {_standing(record.standing)}; the numbers of that moment are not kept any more."
    return Step(
        at=record.arrived_at + (record.sent_seconds or 0.0),
        what="sent",
        sentence=sentence,
        numbers={"waited_seconds": record.held_seconds, "priority": record.priority},
    )


def _ended(record: RequestRecord) -> Step:
    match record.outcome:
        case Outcome.COMPLETED:
            how = f"answered with status {record.status}"
        case Outcome.REFUSED:
            how = f"refused by fairshare with status {record.status}, code {record.reason}"
        case Outcome.FAILED:
            how = f"failed with status {record.status}, {record.reason}"
        case Outcome.CANCELLED:
            how = f"its client did not wait for the end ({record.reason})"
    tokens = ""
    if record.prompt_tokens or record.completion_tokens:
        estimated = " (estimated: the engine's count never came)" if record.estimated else ""
        tokens = (
            f" {record.prompt_tokens:,} prompt and {record.completion_tokens:,} completion tokens{estimated}, charged "
            f"{record.cost_units:,.4g} cost units."
        )
    return Step(
        at=record.arrived_at + record.total_seconds,
        what="ended",
        sentence=f"Ended after {_seconds(record.total_seconds)}: {how}.{tokens}",
        numbers={
            "seconds": record.total_seconds,
            "status": record.status,
            "outcome": record.outcome.value,
            "reason": record.reason,
            "cost_units": record.cost_units,
        },
    )


def _from_row(row: LedgerRow) -> list[Step]:
    """What the account has: no numbers of the moment of the decision."""
    asked = (
        f"Asked for model {row.model} of pool {row.pool} by team {row.team} with key {row.key_id}, {row.service_class}."
    )
    steps = [Step(at=row.arrived_at, what="arrived", sentence=asked, numbers={"slots": row.slots})]
    if row.standing and row.dispatched_at is not None:
        waited = f"after it was held for {_seconds(row.held_seconds)}" if row.held_seconds else "without waiting"
        recalled = f" It was taken back {_count(row.recalls, 'time')} for owners." if row.recalls else ""
        sentence = (
            f"Sent {waited}, {_standing(Standing(row.standing))}.{recalled} "
            "It is older than the decision log, so the numbers of that moment are not kept any more."
        )
        numbers: Numbers = {"waited_seconds": row.held_seconds, "priority": row.priority}
        steps.append(Step(at=row.dispatched_at, what="sent", sentence=sentence, numbers=numbers))
    seconds = row.ended_at - row.arrived_at
    reason = f", {row.reason}" if row.reason else ""
    sentence = (
        f"Ended after {_seconds(seconds)}: {row.finish} with status {row.status}{reason}. "
        f"{row.prompt_tokens:,} prompt and {row.completion_tokens:,} completion tokens, charged "
        f"{row.cost_units:,.4g} cost units."
    )
    steps.append(Step(at=row.ended_at, what="ended", sentence=sentence, numbers={"cost_units": row.cost_units}))
    return steps


def _home(entry: Entry) -> str:
    return entry.home if isinstance(entry, SentEntry) else entry.pool


def _of_one_request(entries: Sequence[Entry], record: RequestRecord | None, offset: float) -> list[Entry]:
    """Of all that carry the id (a client may use it again): those of the last request."""
    if record is not None and (not entries or entries[-1].at + offset <= _ended_at(record) + 1.0):
        # A millisecond of slack: the two clocks are not read at the same time.
        return [entry for entry in entries if entry.at + offset >= record.arrived_at - 0.001]
    last: list[Entry] = []
    for entry in reversed(entries):
        last.append(entry)
        if isinstance(entry, HeldEntry) or (isinstance(entry, SentEntry) and not entry.held_seconds):
            break
    return last[::-1]


def _ended_at(record: RequestRecord) -> float:
    return record.arrived_at + record.total_seconds


def _standing(standing: Standing | None) -> str:
    return "within its share" if standing is Standing.WITHIN_SHARE else "on idle capacity"


def _words(standing: Standing) -> str:
    return "within share" if standing is Standing.WITHIN_SHARE else "borrowing"


def _slots(count: int) -> str:
    return _count(count, "slot")


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _seconds(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def _level(level: float) -> str:
    return "infinite (nothing used)" if math.isinf(level) else f"{level:.3g}"
