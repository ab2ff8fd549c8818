"""The store's accounts as the data path sees them: keys by hash, and the gate of limits and budgets, all in memory.

One task looks for changes twice a second. While the store is away, what was read last stays in force.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from math import fsum, isinf
from typing import NamedTuple, assert_never

from fairshare.accounts.fleet import Fleet
from fairshare.accounts.gate import (
    NOTHING_HELD,
    BudgetMeter,
    BudgetScan,
    DenialCode,
    Denied,
    Gate,
    Reservation,
    SoftPassed,
)
from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.rights import Actor, Role
from fairshare.accounts.service import Tree
from fairshare.clock import Clock
from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import Identity
from fairshare.gateway.ledger import Ledger
from fairshare.gateway.ports import RequestRecord
from fairshare.gateway.status import BudgetStatus
from fairshare.storage.accounts import AccountStore, LimitRow, LiveKey, Rules
from fairshare.storage.consumption import ConsumptionStore
from fairshare.storage.database import StoreUnavailable
from fairshare.wire.problems import (
    BUDGET_EXHAUSTED,
    RATE_LIMITED,
    TOO_MANY_IN_FLIGHT,
    Problem,
    RequestProblem,
)
from fairshare.wire.usage import CostWeights, Usage

log = logging.getLogger("fairshare.accounts")

POLL_SECONDS = 0.5
"""How often it looks for changes; they are in force within a second."""

_KINDS = frozenset(kind.value for kind in LimitKind)

EXPECTED_FROM = 2000
"""Of how many requests the length of answers is known at a start."""

COUNTED_AT_ONCE = 500
"""Budgets whose sums one look at the account brings."""

COLUMN_OF = {"key": "key_id", "project": "project", "team": "team", "organisation": "organisation"}
"""Kind of owner → column of the account."""


class _Seen(NamedTuple):
    """A key that was shown."""

    identity: Identity
    sha256: bytes
    taken: int
    """How often rules had been taken when `identity` was made."""


class LiveAccounts:
    """The keys of the configuration and of the store (a `Directory`), and what bounds them (it is a `Recorder` too)."""

    def __init__(
        self,
        accounts: AccountStore,
        consumption: ConsumptionStore,
        ledger: Ledger,
        *,
        configured: Mapping[bytes, Identity],
        wall: Clock,
        ticked: Callable[[], None] = lambda: None,
        told: Callable[[SoftPassed], None] = lambda _: None,
    ) -> None:
        """`ticked`: called after every look at the store, on the event loop. `told`: hears of soft budgets passed."""
        self._accounts = accounts
        self._consumption = consumption
        self._ledger = ledger
        self._configured = dict(configured)
        self._wall = wall
        self._ticked = ticked
        self._told = told
        self._gate = Gate(told=self._tell)
        self._fleet: Fleet | None = None
        self._rules: Rules | None = None
        self._taken = 0
        """How often rules were taken."""
        self._generation = accounts.generation
        self._tree = Tree(())
        self._teams: tuple[str, ...] = ()
        self._operators: dict[bytes, Actor] = {}
        self._live: dict[bytes, LiveKey] = {}
        self._identities: dict[bytes, tuple[Identity, float]] = {}
        """Key → who it is, and until when (wall clock). Made when a key is first seen, gone when anything changes."""
        self._by_key_id: dict[str, _Seen] = {}
        """Key id → what was shown for it last. Of requests that run when their key ends, the owner stays known."""
        self._is_away = False
        self._without_zone: str | None = None
        self._uncounted = asyncio.Event()
        """There may be budgets of which it is not known what they were charged."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ directory

    def find(self, sha256: bytes) -> Identity | None:
        found = self._identities.get(sha256)
        if found is None:
            found = self._identified(sha256)
            if found is None:
                return None
            self._identities[sha256] = found
            self._by_key_id[found[0].key_id] = _Seen(found[0], sha256, self._taken)
        identity, ends_at = found
        return identity if self._wall() < ends_at else None

    def replace(self, identities: Mapping[bytes, Identity]) -> None:
        """The keys of the configuration are others."""
        self._configured = dict(identities)
        self._identities.clear()

    def names(self, key_id: str) -> Identity | None:
        """Whom the account names as the owner of a key; as it is called now."""
        seen = self._by_key_id.get(key_id)
        if seen is None:
            return None
        if seen.taken != self._taken:
            # One by one: a site's hundred thousand keys at once would keep the event loop for most of a second.
            found = self._identified(seen.sha256)
            seen = _Seen(seen.identity if found is None else found[0], seen.sha256, self._taken)
            self._by_key_id[key_id] = seen
        return seen.identity

    def teams(self) -> tuple[str, ...]:
        """Every team of the store; the same object until there are others."""
        return self._teams

    def operator(self, sha256: bytes) -> Actor | None:
        """Who has a role, by the SHA-256 of the key that they show."""
        return self._operators.get(sha256)

    # ------------------------------------------------------------------ gate

    def admit(
        self,
        identity: Identity,
        *,
        model: str,
        prompt_tokens: int,
        max_tokens: int | None,
        slots: int,
        cost: CostWeights | None,
    ) -> Reservation:
        """Let a request in. `max_tokens`: of each slot. `cost`: what its pool charges; None: it is charged nothing.

        Raises:
            RequestProblem: a limit or budget is in the way.
        """
        if not self._gate.is_bounded(identity.owners):
            return NOTHING_HELD
        completion_tokens = 0.0 if cost is None else self._gate.expected_completion_tokens(model, max_tokens, slots)
        usage = Usage(prompt_tokens, 0, round(completion_tokens))
        answer = self._gate.admit(
            identity.owners,
            model=model,
            tag=identity.tag,
            tokens=prompt_tokens + completion_tokens,
            cost_units=0.0 if cost is None else cost.cost_units(usage),
            now=self._wall(),
        )
        if isinstance(answer, Denied):
            raise RequestProblem(
                _problem(answer.code), answer.message(), retry_after_seconds=answer.retry_after_seconds
            )
        return answer

    def finished(self, record: RequestRecord) -> None:
        identity = self.names(record.key_id)
        if identity is not None:
            self._gate.charged(
                identity.owners,
                model=record.model,
                tag=identity.tag,
                cost_units=record.cost_units,
                completion_tokens=record.completion_tokens,
                slots=record.slots,
                now=self._wall(),
            )

    def budgets(self, owners: Container[str] | None = None) -> list[BudgetStatus]:
        """The budgets of these owners (as `team:search`) as they are now; None: every budget."""
        now = self._wall()
        return [_shown(budget, now) for budget in self._gate.budgets(owners)]

    def borrowing(self) -> frozenset[str]:
        """Owners (as `team:search`) that may only borrow now: they, or what they belong to, are over a soft budget."""
        over = self._gate.borrowing(self._wall())
        if not over:
            return over
        names: set[str] = set()
        below: set[int | None] = set()
        for node in self._tree.nodes:  # by id, so that what a node belongs to comes before it
            name = f"{node.kind}:{node.path}"
            if name in over or node.parent_id in below:
                names.add(name)
                below.add(node.id)
        return frozenset(names)

    def share(self, replica: str) -> Fleet:
        """Limits and budgets are counted together with other replicas from now on; this one has that name."""
        self._fleet = Fleet(self._gate, replica, written=self._ledger.mark())
        return self._fleet

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Read everything, and look for changes from now on. A store that does not answer is asked again."""
        await self._look()
        await self._count()
        self._ticked()  # some may be over a soft budget
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self._keep_counting())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def finding(self) -> str | None:
        """What is wrong, for the status page."""
        if self._is_away:
            return "Keys, limits and budgets are as they were read last: the store does not answer."
        return self._without_zone

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._look()

    async def _keep_counting(self) -> None:
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._uncounted.wait()
            except TimeoutError:
                pass
            self._uncounted.clear()
            await self._count()

    async def _look(self) -> None:
        """Follow what was changed in the store."""
        try:
            last = self._rules
            version = await self._accounts.version()
            if last is None or version != last.version or self._accounts.generation != self._generation:
                await self._load()
            if self._is_away:
                self._is_away = False
                log.warning("The store answers again; keys, limits and budgets are up to date.")
        except StoreUnavailable as error:
            if not self._is_away:
                self._is_away = True
                log.error("%s; keys, limits and budgets stay as they were read last.", error)
        except Exception:
            # Looking must outlive whatever one look runs into.
            log.exception("Reading the accounts failed inside fairshare; what was read last stays in force.")
        self._ticked()

    async def _count(self) -> None:
        """Follow what budgets were charged. Apart, as it may wait long for the account, and a revoked key must not."""
        try:
            await self._count_budgets()
            if self._fleet is not None:
                await self._say_what_is_written(self._fleet)
        except StoreUnavailable:
            pass  # it is told by whoever looks for changes, and by the ledger
        except Exception:
            log.exception("Counting budgets failed inside fairshare; they count what was charged here meanwhile.")

    async def _load(self) -> None:
        last, generation = self._rules, self._accounts.generation
        rules = await self._accounts.rules(last if generation == self._generation else None)
        # Another file, or an older backup: what is not in it does not hold any more.
        is_other = rules.limits_changed is None
        tree = self._tree if last is not None and rules.nodes is last.nodes else Tree(rules.nodes)
        keys = {} if is_other else self._live
        # Newer keys than these rules may come along; the next look reads them again.
        async for page in self._accounts.keys_changed(since=0 if is_other or last is None else last.version):
            for live in page:
                sha256 = bytes.fromhex(live.sha256)
                if live.key.revoked_at is None:
                    keys[sha256] = live
                else:
                    keys.pop(sha256, None)
                self._identities.pop(sha256, None)
        if rules.limits_changed is None:
            await self._read_limits(tree)
        else:
            for changed in rules.limits_changed:
                self._bound(changed.id, changed.row, tree)
        if last is None:
            # Else whatever comes at once after a start would be expected to answer nothing.
            self._gate.expect(await self._consumption.completions(last=EXPECTED_FROM))
        self._live, self._generation = keys, generation
        self._take(rules, tree)

    async def _read_limits(self, tree: Tree) -> None:
        gone = self._gate.limits()
        async for page in self._accounts.limits():
            for row in page:
                gone.discard(row.id)
                self._bound(row.id, row, tree)
        for limit_id in gone:
            self._gate.unbound(limit_id)

    def _bound(self, limit_id: int, row: LimitRow | None, tree: Tree) -> None:
        # A limit of a node that is newer than the rules comes again with the next look. Newer versions, which may run
        # beside this one, may know kinds that it does not.
        is_of_somebody = row is not None and (row.node_id is None or row.node_id in tree.by_id)
        if row is not None and is_of_somebody and row.kind in _KINDS:
            self._gate.bound(row, tree.owner_name(row))
        else:
            self._gate.unbound(limit_id)

    def _take(self, rules: Rules, tree: Tree) -> None:
        """All that is not a key or a limit, as far as it is other than before."""
        last, self._rules, now = self._rules, rules, self._wall()
        self._taken += 1
        if tree is not self._tree:
            self._tree = tree
            self._teams = tuple(node.path for node in tree.nodes if node.kind == "team")
            self._identities.clear()
        if last is None or (rules.nodes, rules.budgets, rules.increases) != (last.nodes, last.budgets, last.increases):
            self._gate.load(rules, now)
            self._uncounted.set()
            zones = {each.row.time_zone for each in self._gate.budgets() if not each.knows_zone}
            self._without_zone = (
                f"Budgets in {', '.join(sorted(zones))} begin at midnight UTC here: this machine does not know such "
                "time zones. Install newer time zone data (tzdata), and restart."
                if zones
                else None
            )
        new = self._gate.news()
        if self._fleet is not None and new:
            self._fleet.rules_changed(new, now)
        if last is None or rules.operators is not last.operators:
            self._operators = {
                bytes.fromhex(row.sha256): Actor(name=f"operator {row.id}", role=Role(row.role), node_id=row.node_id)
                for row in rules.operators
            }

    async def _count_budgets(self) -> None:
        """Learn what budgets that are new here were charged already, and by replicas that are."""
        unknown = self._gate.unknown_budgets()
        if not unknown:
            return
        # From these marks on requests are counted as they end, or as others say; up to them the store knows.
        marks = [self._ledger.mark(), *(() if self._fleet is None else self._fleet.marks())]
        alike: dict[tuple[str, float], list[tuple[BudgetMeter, BudgetScan]]] = {}
        for budget in unknown:
            asked = COLUMN_OF[budget.owner.partition(":")[0]], budget.span.begins_at
            alike.setdefault(asked, []).append((budget, budget.scan()))
        await self._ledger.flush()
        for (column, begins_at), budgets in alike.items():
            for first in range(0, len(budgets), COUNTED_AT_ONCE):
                some = budgets[first : first + COUNTED_AT_ONCE]
                names = {budget.owner.partition(":")[2] for budget, _ in some}
                consumed = await self._consumption.since(begins_at, column=column, values=names, until=marks)
                for budget, scan in some:
                    charged = consumed.get(budget.owner.partition(":")[2], ())
                    budget.scanned(
                        scan, fsum(each.cost_units for each in charged if budget.matches(each.model, each.tag))
                    )

    async def _say_what_is_written(self, fleet: Fleet) -> None:
        """Others count from the store what this replica says to be there."""
        mark, charges = self._ledger.mark(), self._gate.charges()
        if charges:
            await self._ledger.flush()
            fleet.written_until(mark, charges)

    # ------------------------------------------------------------------ inside

    def _identified(self, sha256: bytes) -> tuple[Identity, float] | None:
        configured = self._configured.get(sha256)
        if configured is not None:
            return self._configured_identity(configured), float("inf")
        live = self._live.get(sha256)
        if live is None or live.key.node_id not in self._tree.by_id:
            return None  # a key that is newer than the rules counts from the next look on
        key = live.key
        chain = self._tree.chain(key.node_id)
        paths = {node.kind: node.path for node in chain}
        identity = Identity(
            key_id=key.id,
            team=paths["team"],
            service_class=ServiceClass[key.service_class.upper()],
            models=_allowed(key.models, *(node.models for node in chain)),
            organisation=paths["organisation"],
            project=paths.get("project", ""),
            tag=key.tag,
            owners=(f"key:{key.id}", *(f"{node.kind}:{node.path}" for node in chain)),
        )
        ends_at = min(end for end in (key.expires_at, live.secret_expires_at, float("inf")) if end is not None)
        return identity, ends_at

    def _configured_identity(self, identity: Identity) -> Identity:
        """A key of the configuration is bounded as its team is, if the store has that team."""
        node = self._tree.find("team", identity.team)
        if node is None:
            return identity
        chain = self._tree.chain(node.id)
        return Identity(
            key_id=identity.key_id,
            team=identity.team,
            service_class=identity.service_class,
            models=_allowed(identity.models, *(node.models for node in chain)),
            organisation=chain[-1].path,
            owners=(f"key:{identity.key_id}", *(f"{node.kind}:{node.path}" for node in chain)),
        )

    def _tell(self, passed: SoftPassed) -> None:
        self._told(passed)
        kind, _, name = passed.owner.partition(":")
        log.warning(
            "%s %r is over its soft budget %d: %.12g of %.12g cost units are used%s.",
            kind,
            name,
            passed.budget_id,
            passed.used_cost_units,
            passed.soft_cost_units,
            "; from now on it only borrows" if passed.borrows_only else "",
        )


def _allowed(*lists: "tuple[str, ...] | frozenset[str] | None") -> frozenset[str] | None:
    """The models that every level allows; None: all."""
    allowed: frozenset[str] | None = None
    for models in lists:
        if models is not None:
            allowed = frozenset(models) if allowed is None else allowed & frozenset(models)
    return allowed


def _shown(budget: BudgetMeter, now: float) -> BudgetStatus:
    over_soft = budget.over_soft(now)  # starts a new period, if the last one is over
    hard = budget.hard_cost_units(now)
    return BudgetStatus(
        owner=budget.owner,
        model=budget.row.model,
        tag=budget.row.tag,
        period=budget.row.period,
        soft=budget.row.soft_cost_units,
        hard=hard,
        used=budget.consumed,
        reserved=budget.reserved,
        left=None if hard is None else max(0.0, hard - budget.consumed - budget.reserved),
        borrows_only=over_soft and budget.row.borrow_over_soft,
        resets_at=None if isinf(budget.span.ends_at) else budget.span.ends_at,
    )


def _problem(code: DenialCode) -> Problem:
    match code:
        case DenialCode.RATE_LIMITED:
            return RATE_LIMITED
        case DenialCode.TOO_MANY_IN_FLIGHT:
            return TOO_MANY_IN_FLIGHT
        case DenialCode.BUDGET_EXHAUSTED:
            return BUDGET_EXHAUSTED
        case _:
            assert_never(code)
