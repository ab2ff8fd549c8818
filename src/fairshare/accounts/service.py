"""Everything that can be done with accounts, for the command line and the admin API alike.

Owners are written `organisation:lab`, `team:search`, `project:search/web` or `key:3f2a...`.
"""

import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, TypeVar

import msgspec

from fairshare.accounts import periods
from fairshare.accounts.kinds import KEY_ID_DIGITS, LARGEST_LIMIT, LONGEST_NAME, LimitKind, is_model_name
from fairshare.accounts.litellm import Taken, TakenKey
from fairshare.accounts.periods import Period
from fairshare.accounts.rights import Act, Actor, Forbidden, Role, allowed, check
from fairshare.clock import Clock
from fairshare.errors import CallerError
from fairshare.storage.accounts import (
    AccountStore,
    AuditRow,
    BudgetRow,
    Change,
    IncreaseRow,
    KeyRow,
    LimitRow,
    NodeRow,
    OperatorRow,
    SecretRow,
)

T = TypeVar("T", bound=msgspec.Struct)
Class = Literal["interactive", "batch"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ID = re.compile(rf"[0-9a-f]{{{KEY_ID_DIGITS}}}")
"""Of a key or an operator. What is none is not asked of the store: PostgreSQL refuses some characters."""

TAKE_OVER_SECONDS = 300.0
"""How long taking over another system may take: a hundred thousand keys and their limits, all or none."""

TAKEN_AT_ONCE = 500

PARENT_KIND = {"organisation": None, "team": "organisation", "project": "team"}


class NotThere(CallerError):
    """There is no such thing."""


class Conflict(CallerError):
    """It cannot be, as things are."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, a team or a project."""

    kind: str
    name: str
    """A project's is `team/project`."""
    parent: str | None
    models: tuple[str, ...] | None
    created_at: float


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A client's key, without what it shows."""

    id: str
    owner: str
    service_class: str
    models: tuple[str, ...] | None
    tag: str
    note: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, and the one time that it is shown."""

    id: str
    key: str


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of an owner."""

    owner: str
    kind: str
    value: int
    id: int
    """Where a page of limits ends."""


class Increase(msgspec.Struct, frozen=True, kw_only=True):
    """More of a budget, for a time."""

    cost_units: float
    until: float


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner may be charged in each period."""

    id: int
    owner: str
    model: str | None
    tag: str | None
    period: str
    time_zone: str
    soft_cost_units: float | None
    hard_cost_units: float | None
    borrow_over_soft: bool
    increases: tuple[Increase, ...]


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody with a role, known by a key for the admin API."""

    id: str
    role: str
    reach: str
    """An owner, or `site`."""
    note: str
    created_at: float


class Accounts:
    """The accounts of a site."""

    def __init__(self, store: AccountStore, *, wall: Clock, new_secret: Callable[[], str]) -> None:
        """`new_secret`: makes what a client shows."""
        self._store = store
        self._wall = wall
        self._new_secret = new_secret

    # ------------------------------------------------------------------ tree

    async def add_node(
        self, actor: Actor, kind: str, name: str, *, parent: str | None = None, models: Sequence[str] | None = None
    ) -> Node:
        """A new organisation, team (`parent`: its organisation) or project (`name`: team/project)."""
        parent_kind = PARENT_KIND[kind]
        if kind == "project":
            parent, slash, last = name.partition("/")
            if not slash:
                raise CallerError(f"a project is written TEAM/PROJECT, found {name!r}")
            _check_name(last, "project")
        else:
            _check_name(name, kind)
        async with self._changing(actor) as (change, tree):
            parent_node = None
            if parent_kind is not None:
                if not parent:
                    raise CallerError(f"a {kind} belongs to a {parent_kind}; say which")
                parent_node = tree.node(parent_kind, parent)
            check(actor, Act.INSIDE, None if parent_node is None else parent_node.id, tree.parents)
            if tree.find(kind, name) is not None:
                raise Conflict(f"there already is a {kind} {name!r}")
            row = await change.add(
                NodeRow(
                    kind=kind,
                    path=name,
                    parent_id=None if parent_node is None else parent_node.id,
                    models=_models(models),
                    created_at=change.at,
                ),
                target=f"{kind}:{name}",
            )
            return tree.with_node(row).shown(row)

    async def set_models(self, actor: Actor, kind: str, name: str, models: Sequence[str] | None) -> Node:
        """Which models a node may use, of those that its parent may; None: all of them."""
        async with self._changing(actor) as (change, tree):
            node = tree.node(kind, name)
            check(actor, Act.FROM_ABOVE, node.id, tree.parents)
            new = msgspec.structs.replace(node, models=_models(models))
            await change.replace(node, new, target=f"{kind}:{name}")
            return tree.shown(new)

    async def remove_node(self, actor: Actor, kind: str, name: str) -> None:
        """Remove a node that has nothing below it. The account of what it used stays."""
        async with self._changing(actor) as (change, tree):
            node = tree.node(kind, name)
            check(actor, Act.FROM_ABOVE, node.id, tree.parents)
            if any(parent == node.id for parent in tree.parents.values()):
                raise Conflict(f"{kind} {name!r} still has something below it; remove that first")
            if await change.one(KeyRow, node_id=node.id) is not None:
                raise Conflict(f"{kind} {name!r} has or had keys, which the account names; revoke them instead")
            if await change.one(OperatorRow, node_id=node.id) is not None:
                raise Conflict(f"{kind} {name!r} has or had operators, which the audit names; revoke them instead")
            for row in [*await change.all(LimitRow, node_id=node.id), *await change.all(BudgetRow, node_id=node.id)]:
                await change.remove(row, target=f"{kind}:{name}")
            await change.remove(node, target=f"{kind}:{name}")

    # Lists are of what the actor may see, and that is what its role reaches. `limit`: at most so many; None: all.

    async def nodes(self, actor: Actor, kind: str, *, limit: int | None = None, after: str = "") -> list[Node]:
        """The nodes of one kind, by name; `after` a name."""
        tree = Tree(await self._store.all(NodeRow))
        seen = sorted(
            (node for node in tree.nodes if node.kind == kind and allowed(actor, Act.SEE, node.id, tree.parents)),
            key=lambda node: node.path,
        )
        return [tree.shown(node) for node in seen if node.path > after][:limit]

    async def reach(self, actor: Actor) -> Node | None:
        """What an actor's role reaches; None: the whole site."""
        if actor.node_id is None:
            return None
        tree = Tree(await self._store.all(NodeRow))
        node = tree.by_id.get(actor.node_id)
        if node is None:
            raise Forbidden(f"what {actor.name} reaches is not there any more")
        return tree.shown(node)

    # ------------------------------------------------------------------ keys

    async def add_key(
        self,
        actor: Actor,
        owner: str,
        *,
        service_class: Class = "interactive",
        models: Sequence[str] | None = None,
        tag: str = "",
        note: str = "",
        expires_at: float | None = None,
    ) -> NewKey:
        """A new key of a team or project; what it shows is never to be seen again."""
        if tag:
            _check_name(tag, "tag")
        _check_note(note)
        async with self._changing(actor) as (change, tree):
            node = tree.owner(owner)
            if node.kind == "organisation":
                raise CallerError("a key belongs to a team or a project, not to a whole organisation")
            check(actor, Act.KEYS, node.id, tree.parents)
            if expires_at is not None and not change.at < expires_at <= periods.LAST:
                raise CallerError("a key must expire in the future, and before the year 9999")
            secret, sha256 = self._secret()
            key = KeyRow(
                id=sha256[:KEY_ID_DIGITS],
                node_id=node.id,
                service_class=service_class,
                models=_models(models),
                tag=tag,
                note=note,
                created_at=change.at,
                expires_at=expires_at,
                changed_in=change.version,
            )
            await change.add(key, target=f"key:{key.id}")
            await change.add(SecretRow(sha256=sha256, key_id=key.id, created_at=change.at), target=f"key:{key.id}")
            return NewKey(id=key.id, key=secret)

    async def rotate_key(self, actor: Actor, key_id: str, *, overlap_seconds: float) -> NewKey:
        """Give a key something new to show; the old goes on for `overlap_seconds`. Limits and the account go on too."""
        if not 0 <= overlap_seconds <= 366 * 86400:
            raise CallerError("the overlap must be between 0 and 366 days")
        async with self._changing(actor) as (change, tree):
            key = await self._live_key(change, key_id)
            check(actor, Act.KEYS, key.node_id, tree.parents)
            if key.expires_at is not None and key.expires_at <= change.at:
                raise Conflict(f"key {key.id} has expired; make a new one")
            ends_at = change.at + overlap_seconds
            for old in await change.all(SecretRow, key_id=key.id):
                if old.expires_at is None or old.expires_at > ends_at:
                    new = msgspec.structs.replace(old, expires_at=ends_at)
                    await change.replace(old, new, target=f"key:{key.id}", action="rotate secrets")
            secret, sha256 = self._secret()
            await change.add(SecretRow(sha256=sha256, key_id=key.id, created_at=change.at), target=f"key:{key.id}")
            new_key = msgspec.structs.replace(key, changed_in=change.version)
            await change.replace(key, new_key, target=f"key:{key.id}", action="rotate keys")
            return NewKey(id=key.id, key=secret)

    async def revoke_key(self, actor: Actor, key_id: str) -> None:
        """From within a second on, the key is not valid any more."""
        async with self._changing(actor) as (change, tree):
            key = await self._live_key(change, key_id)
            check(actor, Act.KEYS, key.node_id, tree.parents)
            new = msgspec.structs.replace(key, revoked_at=change.at, changed_in=change.version)
            await change.replace(key, new, target=f"key:{key.id}", action="revoke keys")

    async def keys(self, actor: Actor, *, limit: int | None = None, after: str | None = None) -> list[Key]:
        """Keys, by id; `after` an id."""
        tree, rows = await self._listed(actor, KeyRow, limit, after)
        return [
            Key(
                id=row.id,
                owner=tree.name(row.node_id),
                service_class=row.service_class,
                models=row.models,
                tag=row.tag,
                note=row.note,
                created_at=row.created_at,
                expires_at=row.expires_at,
                revoked_at=row.revoked_at,
                last_used_at=row.last_used_at,
            )
            for row in rows
        ]

    async def take_over(self, actor: Actor, taken: Taken, *, organisation: str) -> None:
        """Make the teams, keys and limits of another system, all or none; what is there already is left as it is."""
        async with self._changing(actor, patience_seconds=TAKE_OVER_SECONDS) as (change, tree):
            node = tree.node("organisation", organisation)
            check(actor, Act.INSIDE, node.id, tree.parents)
            team_ids: dict[str, int] = {}
            for team in taken.teams:
                old = tree.find("team", team.name)
                if old is not None:
                    if old.parent_id != node.id:
                        raise Conflict(f"there already is a team {team.name!r} in another organisation")
                    team_ids[team.name] = old.id
                    continue
                target = f"team:{team.name}"
                row = NodeRow(
                    kind="team", path=team.name, parent_id=node.id, models=_models(team.models), created_at=change.at
                )
                team_ids[team.name] = (await change.add(row, target=target)).id
                for kind, value in team.limits:
                    limit = LimitRow(kind=kind.value, value=value, node_id=team_ids[team.name])
                    await change.add(limit, target=target)
            for begin in range(0, len(taken.keys), TAKEN_AT_ONCE):
                await self._take_over_keys(change, taken.keys[begin : begin + TAKEN_AT_ONCE], team_ids)

    @staticmethod
    async def _take_over_keys(change: Change, taken: Sequence[TakenKey], team_ids: Mapping[str, int]) -> None:
        known = {row.sha256 for row in await change.all(SecretRow, sha256=[key.sha256 for key in taken])}
        new = [key for key in taken if key.sha256 not in known]
        for row in await change.all(KeyRow, id=[key.id for key in new]):
            raise Conflict(f"there already is another key {row.id}; take it out of the export")
        keys = [
            KeyRow(
                id=key.id,
                node_id=team_ids[key.team],
                service_class="interactive",
                models=_models(key.models),
                note=key.note,
                created_at=change.at,
                expires_at=key.expires_at,
                changed_in=change.version,
            )
            for key in new
        ]
        secrets = [SecretRow(sha256=key.sha256, key_id=key.id, created_at=change.at) for key in new]
        limits = [LimitRow(kind=kind.value, value=value, key_id=key.id) for key in new for kind, value in key.limits]
        await change.add_many(keys, target=lambda key: f"key:{key.id}")
        await change.add_many(secrets, target=lambda secret: f"key:{secret.key_id}")
        await change.add_many(limits, target=lambda limit: f"key:{limit.key_id}")

    # ------------------------------------------------------------------ limits and budgets

    async def set_limit(self, actor: Actor, owner: str, kind: LimitKind, value: int | None) -> None:
        """Bound an owner; None: no bound any more."""
        if value is not None and not 0 <= value <= LARGEST_LIMIT:
            raise CallerError(f"a limit must be between 0 and {LARGEST_LIMIT}, found {value}")
        async with self._changing(actor) as (change, tree):
            node_id, key_id = await self._bounded(actor, change, tree, owner)
            old = await change.one(LimitRow, kind=kind.value, node_id=node_id, key_id=key_id)
            if value is None:
                if old is None:
                    raise NotThere(f"{owner} has no limit of {kind.value}")
                await change.remove(old, target=owner)
            elif old is None:
                await change.add(LimitRow(kind=kind.value, value=value, node_id=node_id, key_id=key_id), target=owner)
            else:
                await change.replace(old, msgspec.structs.replace(old, value=value), target=owner)

    async def limits(self, actor: Actor, *, limit: int | None = None, after: int | None = None) -> list[Limit]:
        """Limits, by id; `after` an id."""
        tree, rows = await self._listed(actor, LimitRow, limit, after)
        return [Limit(owner=tree.owner_name(row), kind=row.kind, value=row.value, id=row.id) for row in rows]

    async def add_budget(
        self,
        actor: Actor,
        owner: str,
        *,
        period: Period,
        time_zone: str = "UTC",
        hard_cost_units: float | None = None,
        soft_cost_units: float | None = None,
        borrow_over_soft: bool = False,
        model: str | None = None,
        tag: str | None = None,
    ) -> int:
        """Bound what an owner may be charged in each period; returns the budget's id."""
        periods.zone(time_zone)
        if hard_cost_units is None and soft_cost_units is None:
            raise CallerError("a budget needs a hard or a soft amount")
        for amount in (hard_cost_units, soft_cost_units):
            if amount is not None and not 0 <= amount <= 1e18:
                raise CallerError(f"an amount must be between 0 and 1e18 cost units, found {amount:g}")
        if hard_cost_units is not None and soft_cost_units is not None and soft_cost_units > hard_cost_units:
            raise CallerError(f"the soft amount {soft_cost_units:g} is above the hard one, {hard_cost_units:g}")
        _models(None if model is None else [model])
        if tag is not None:
            _check_name(tag, "tag")
        if borrow_over_soft and (soft_cost_units is None or owner.startswith("key:") or model or tag):
            raise CallerError(
                "only a budget with a soft amount, over all models and tags, and not of a key, can make its owner "
                "borrow only"
            )
        async with self._changing(actor) as (change, tree):
            node_id, key_id = await self._bounded(actor, change, tree, owner)
            row = await change.add(
                BudgetRow(
                    # Other replicas may still count for a budget that was removed.
                    id=await change.unused_id(BudgetRow),
                    period=period.value,
                    time_zone=time_zone,
                    soft_cost_units=soft_cost_units,
                    hard_cost_units=hard_cost_units,
                    borrow_over_soft=borrow_over_soft,
                    model=model,
                    tag=tag,
                    created_at=change.at,
                    node_id=node_id,
                    key_id=key_id,
                ),
                target=owner,
            )
            return row.id

    async def remove_budget(self, actor: Actor, budget_id: int) -> None:
        async with self._changing(actor) as (change, tree):
            row = await self._budget(actor, change, tree, budget_id)
            await change.remove(row, target=tree.owner_name(row))

    async def increase_budget(self, actor: Actor, budget_id: int, *, cost_units: float, until: float) -> None:
        """More of a budget, hard and soft, until a moment (wall clock)."""
        if not 0 < cost_units <= 1e18:
            raise CallerError(f"an increase must be above 0 and at most 1e18 cost units, found {cost_units:g}")
        async with self._changing(actor) as (change, tree):
            row = await self._budget(actor, change, tree, budget_id)
            if not change.at < until <= periods.LAST:
                raise CallerError("an increase must end in the future, and before the year 9999")
            await change.add(
                IncreaseRow(budget_id=row.id, cost_units=cost_units, until=until), target=tree.owner_name(row)
            )

    async def budgets(self, actor: Actor, *, limit: int | None = None, after: int | None = None) -> list[Budget]:
        """Budgets, by id; `after` an id."""
        tree, rows = await self._listed(actor, BudgetRow, limit, after)
        increases: dict[int, list[Increase]] = {}
        for each in await self._store.all(IncreaseRow):
            more = Increase(cost_units=each.cost_units, until=each.until)
            increases.setdefault(each.budget_id, []).append(more)
        return [
            Budget(
                id=row.id,
                owner=tree.owner_name(row),
                model=row.model,
                tag=row.tag,
                period=row.period,
                time_zone=row.time_zone,
                soft_cost_units=row.soft_cost_units,
                hard_cost_units=row.hard_cost_units,
                borrow_over_soft=row.borrow_over_soft,
                increases=tuple(increases.get(row.id, ())),
            )
            for row in rows
        ]

    # ------------------------------------------------------------------ operators and audit

    async def add_operator(self, actor: Actor, *, role: Role, reach: str, note: str = "") -> NewKey:
        """A key for the admin API. `reach`: an owner, or `site`."""
        _check_note(note)
        async with self._changing(actor) as (change, tree):
            node_id = None if reach == "site" else tree.owner(reach).id
            check(actor, Act.INSIDE, node_id, tree.parents)
            secret, sha256 = self._secret()
            row = OperatorRow(
                id=sha256[:KEY_ID_DIGITS],
                sha256=sha256,
                role=role.value,
                node_id=node_id,
                note=note,
                created_at=change.at,
            )
            await change.add(row, target=f"operator:{row.id}")
            return NewKey(id=row.id, key=secret)

    async def revoke_operator(self, actor: Actor, operator_id: str) -> None:
        async with self._changing(actor) as (change, tree):
            row = None
            if _ID.fullmatch(operator_id):
                row = await change.one(OperatorRow, id=operator_id, revoked_at=None)
            if row is None:
                raise NotThere(f"there is no operator {operator_id[:80]!r}")
            check(actor, Act.INSIDE, row.node_id, tree.parents)
            new = msgspec.structs.replace(row, revoked_at=change.at)
            await change.replace(row, new, target=f"operator:{row.id}", action="revoke operators")

    async def operators(self, actor: Actor, *, limit: int | None = None, after: str | None = None) -> list[Operator]:
        """Operators, by id; `after` an id."""
        tree, rows = await self._listed(actor, OperatorRow, limit, after, revoked_at=None)
        return [
            Operator(
                id=row.id,
                role=row.role,
                reach="site" if row.node_id is None else tree.name(row.node_id),
                note=row.note,
                created_at=row.created_at,
            )
            for row in rows
        ]

    async def audit(self, actor: Actor, *, limit: int, after: int | None = None) -> list[AuditRow]:
        """Changes, newest first; `after` an id. Only for those who see the whole site."""
        check(actor, Act.SEE, None, {})
        return await self._store.all(AuditRow, limit=limit, after=after, newest_first=True)

    # ------------------------------------------------------------------ inside

    @asynccontextmanager
    async def _changing(
        self, actor: Actor, *, patience_seconds: float | None = None
    ) -> "AsyncGenerator[tuple[Change, Tree]]":
        async with self._store.changing(actor=actor.name, at=self._wall(), patience_seconds=patience_seconds) as change:
            yield change, Tree(await change.all(NodeRow))

    def _secret(self) -> tuple[str, str]:
        secret = self._new_secret()
        return secret, hashlib.sha256(secret.encode()).hexdigest()

    @staticmethod
    async def _live_key(change: Change, key_id: str) -> KeyRow:
        key = await change.one(KeyRow, id=key_id) if _ID.fullmatch(key_id) else None
        if key is None:
            raise NotThere(f"there is no key {key_id[:80]!r}")
        if key.revoked_at is not None:
            raise Conflict(f"key {key_id} is revoked")
        return key

    async def _bounded(self, actor: Actor, change: Change, tree: "Tree", owner: str) -> tuple[int | None, str | None]:
        """The node or the key that an owner is, if the actor may bound it."""
        kind, _, name = owner.partition(":")
        if kind == "key":
            key = await self._live_key(change, name)
            check(actor, Act.INSIDE, key.node_id, tree.parents)
            return None, key.id
        node = tree.owner(owner)
        check(actor, Act.FROM_ABOVE, node.id, tree.parents)
        return node.id, None

    async def _budget(self, actor: Actor, change: Change, tree: "Tree", budget_id: int) -> BudgetRow:
        row = await change.one(BudgetRow, id=budget_id)
        if row is None:
            raise NotThere(f"there is no budget {budget_id}")
        await self._bounded(actor, change, tree, tree.owner_name(row))
        return row

    async def _listed(
        self, actor: Actor, of: type[T], limit: int | None, after: object, **equal: object
    ) -> "tuple[Tree, list[T]]":
        """Rows of what an actor's role reaches, in the order of their ids, and the tree that names their owners."""
        rows, nodes = await self._store.owned(of, within=actor.node_id, limit=limit, after=after, **equal)
        return Tree(nodes), rows


class Tree:
    """The nodes of the site."""

    def __init__(self, nodes: Sequence[NodeRow]) -> None:
        self.nodes = tuple(nodes)
        self.by_id = {node.id: node for node in nodes}
        self.parents = {node.id: node.parent_id for node in nodes}
        self._by_name = {(node.kind, node.path): node for node in nodes}

    def find(self, kind: str, name: str) -> NodeRow | None:
        return self._by_name.get((kind, name))

    def node(self, kind: str, name: str) -> NodeRow:
        """Raises `NotThere`."""
        node = self.find(kind, name)
        if node is None:
            raise NotThere(f"there is no {kind} {name[:80]!r}")
        return node

    def owner(self, owner: str) -> NodeRow:
        """The node of `team:search`. Raises `CallerError`."""
        kind, colon, name = owner.partition(":")
        if not colon or kind not in PARENT_KIND:
            raise CallerError(
                f"must be written organisation:NAME, team:NAME or project:TEAM/NAME, found {owner[:80]!r}"
            )
        return self.node(kind, name)

    def name(self, node_id: int) -> str:
        node = self.by_id[node_id]
        return f"{node.kind}:{node.path}"

    def owner_name(self, row: LimitRow | BudgetRow) -> str:
        return f"key:{row.key_id}" if row.node_id is None else self.name(row.node_id)

    def shown(self, row: NodeRow) -> Node:
        return Node(
            kind=row.kind,
            name=row.path,
            parent=None if row.parent_id is None else self.by_id[row.parent_id].path,
            models=row.models,
            created_at=row.created_at,
        )

    def with_node(self, row: NodeRow) -> "Tree":
        return Tree([*self.nodes, row])

    def chain(self, node_id: int) -> list[NodeRow]:
        """A node and those above it, from the bottom up."""
        chain: list[NodeRow] = []
        at: int | None = node_id
        while at is not None:
            chain.append(self.by_id[at])
            at = self.by_id[at].parent_id
        return chain


def _models(models: Sequence[str] | None) -> tuple[str, ...] | None:
    if models is None:
        return None
    for model in models:
        if not is_model_name(model):
            raise CallerError("a model's name must be 1 to 256 printable characters")
    return tuple(dict.fromkeys(models))


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise CallerError(
            f"the name of a {what} must be 1 to {LONGEST_NAME} of A-Z a-z 0-9 . _ -, found {name[:LONGEST_NAME]!r}"
        )


def _check_note(note: str) -> None:
    if len(note) > 200 or not (note.isprintable() or not note):
        raise CallerError("a note must be at most 200 printable characters")
