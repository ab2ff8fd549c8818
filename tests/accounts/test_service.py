"""What can be done with accounts, by whom; on both backends."""

from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from fairshare.accounts.kinds import LimitKind
from fairshare.accounts.periods import Period
from fairshare.accounts.rights import Act, Actor, Forbidden, Role, allowed
from fairshare.accounts.service import Accounts, Conflict, NotThere
from fairshare.errors import CallerError
from fairshare.storage.accounts import AccountStore, AuditRow, OperatorRow, SecretRow
from fairshare.storage.database import Database
from support.storing import Run

ROOT = Actor(name="root")


class Site:
    def __init__(self, database: Database) -> None:
        self.store = AccountStore(database)
        self.now = 1000.0
        numbers = count(1)
        self.accounts = Accounts(self.store, wall=lambda: self.now, new_secret=lambda: f"fs-secret-{next(numbers)}")

    async def grow(self) -> None:
        """Two organisations; team search of lab, with a project; team ads of firm."""
        for organisation in ("lab", "firm"):
            await self.accounts.add_node(ROOT, "organisation", organisation)
        await self.accounts.add_node(ROOT, "team", "search", parent="lab", models=["tiny"])
        await self.accounts.add_node(ROOT, "team", "ads", parent="firm")
        await self.accounts.add_node(ROOT, "project", "search/web")

    async def actor(self, role: Role, reach: str) -> Actor:
        made = await self.accounts.add_operator(ROOT, role=role, reach=reach)
        (row,) = await self.store.all(OperatorRow, id=made.id)
        return Actor(name=f"operator {made.id}", role=role, node_id=row.node_id)


def on(run: Run, main: Callable[[Site], Awaitable[None]]) -> None:
    async def grown(database: Database) -> None:
        site = Site(database)
        await site.grow()
        await main(site)

    run(grown)


def test_the_tree_is_what_was_added_and_names_are_unique(run: Run) -> None:
    async def main(site: Site) -> None:
        accounts = site.accounts
        assert [(node.name, node.parent) for node in await accounts.nodes(ROOT, "team")] == [
            ("ads", "firm"),
            ("search", "lab"),
        ]
        assert [(node.name, node.parent) for node in await accounts.nodes(ROOT, "project")] == [
            ("search/web", "search")
        ]
        with pytest.raises(Conflict, match="already is a team 'search'"):
            await accounts.add_node(ROOT, "team", "search", parent="firm")
        with pytest.raises(NotThere, match="no organisation 'nowhere'"):
            await accounts.add_node(ROOT, "team", "new", parent="nowhere")
        for name in ("", "a b", "ä", "x" * 65, "a/b"):
            with pytest.raises(CallerError, match="must be 1 to 64"):
                await accounts.add_node(ROOT, "organisation", name)
        with pytest.raises(CallerError, match="TEAM/PROJECT"):
            await accounts.add_node(ROOT, "project", "web")

    on(run, main)


def test_only_what_is_empty_can_be_removed(run: Run) -> None:
    async def main(site: Site) -> None:
        accounts = site.accounts
        with pytest.raises(Conflict, match="something below"):
            await accounts.remove_node(ROOT, "team", "search")
        await accounts.set_limit(ROOT, "project:search/web", LimitKind.IN_FLIGHT, 5)
        await accounts.remove_node(ROOT, "project", "search/web")
        assert await accounts.limits(ROOT) == []
        await accounts.add_key(ROOT, "team:search")
        with pytest.raises(Conflict, match="has or had keys"):
            await accounts.remove_node(ROOT, "team", "search")

    on(run, main)


def test_a_key_is_shown_once_and_only_its_hash_is_kept(run: Run) -> None:
    async def main(site: Site) -> None:
        made = await site.accounts.add_key(ROOT, "project:search/web", service_class="batch", tag="nightly")
        (key,) = await site.accounts.keys(ROOT, limit=10)
        assert (key.id, key.owner, key.service_class, key.tag) == (made.id, "project:search/web", "batch", "nightly")
        audit = await site.store.all(AuditRow)
        secrets = await site.store.all(SecretRow)
        assert made.key not in repr(audit) + repr(secrets) + repr(key)
        assert secrets[0].sha256 not in repr(audit)
        with pytest.raises(CallerError, match="whole organisation"):
            await site.accounts.add_key(ROOT, "organisation:lab")
        with pytest.raises(CallerError, match="in the future"):
            await site.accounts.add_key(ROOT, "team:search", expires_at=1000.0)

    on(run, main)


def test_a_rotated_key_has_two_secrets_for_a_while_and_keeps_its_id(run: Run) -> None:
    async def main(site: Site) -> None:
        made = await site.accounts.add_key(ROOT, "team:search")
        site.now = 2000.0
        rotated = await site.accounts.rotate_key(ROOT, made.id, overlap_seconds=100.0)
        assert rotated.id == made.id
        assert rotated.key != made.key
        again = await site.accounts.rotate_key(ROOT, made.id, overlap_seconds=500.0)
        ends = sorted(secret.expires_at or 0.0 for secret in await site.store.all(SecretRow))
        # The oldest still ends when it was to end; a later rotation never prolongs it.
        assert ends == [0.0, 2100.0, 2500.0]
        await site.accounts.revoke_key(ROOT, again.id)
        with pytest.raises(Conflict, match="revoked"):
            await site.accounts.rotate_key(ROOT, made.id, overlap_seconds=0.0)
        with pytest.raises(NotThere):
            await site.accounts.revoke_key(ROOT, "nothing")

    on(run, main)


def test_a_key_that_has_expired_is_not_rotated_but_can_be_revoked(run: Run) -> None:
    async def main(site: Site) -> None:
        made = await site.accounts.add_key(ROOT, "team:search", expires_at=1500.0)
        site.now = 1500.0
        with pytest.raises(Conflict, match="has expired; make a new one"):
            await site.accounts.rotate_key(ROOT, made.id, overlap_seconds=10.0)
        await site.accounts.revoke_key(ROOT, made.id)

    on(run, main)


def test_what_ends_after_any_calendar_is_refused(run: Run) -> None:
    async def main(site: Site) -> None:
        budget = await site.accounts.add_budget(ROOT, "team:search", period=Period.DAY, hard_cost_units=1.0)
        for moment in (1e300, float("inf"), float("nan"), 253_402_300_800.0):
            with pytest.raises(CallerError, match="before the year 9999"):
                await site.accounts.add_key(ROOT, "team:search", expires_at=moment)
            with pytest.raises(CallerError, match="before the year 9999"):
                await site.accounts.increase_budget(ROOT, budget, cost_units=1.0, until=moment)

    on(run, main)


def test_limits_are_set_changed_and_taken_away(run: Run) -> None:
    async def main(site: Site) -> None:
        accounts = site.accounts
        key = (await accounts.add_key(ROOT, "team:search")).id
        for owner in ("team:search", f"key:{key}"):
            await accounts.set_limit(ROOT, owner, LimitKind.REQUESTS_PER_MINUTE, 5)
            await accounts.set_limit(ROOT, owner, LimitKind.REQUESTS_PER_MINUTE, 7)
        assert [(limit.owner, limit.value) for limit in await accounts.limits(ROOT)] == [
            ("team:search", 7),
            (f"key:{key}", 7),
        ]
        await accounts.set_limit(ROOT, f"key:{key}", LimitKind.REQUESTS_PER_MINUTE, None)
        with pytest.raises(NotThere, match="no limit of requests_per_minute"):
            await accounts.set_limit(ROOT, f"key:{key}", LimitKind.REQUESTS_PER_MINUTE, None)
        with pytest.raises(CallerError, match="between 0 and"):
            await accounts.set_limit(ROOT, "team:search", LimitKind.IN_FLIGHT, -1)

    on(run, main)


def test_budgets_have_amounts_that_make_sense_and_increases_that_end(run: Run) -> None:
    async def main(site: Site) -> None:
        accounts = site.accounts
        number = await accounts.add_budget(
            ROOT, "team:search", period=Period.MONTH, hard_cost_units=10.0, soft_cost_units=8.0, borrow_over_soft=True
        )
        await accounts.increase_budget(ROOT, number, cost_units=5.0, until=1500.0)
        (budget,) = await accounts.budgets(ROOT)
        assert (budget.owner, budget.hard_cost_units, budget.borrow_over_soft) == ("team:search", 10.0, True)
        assert [(each.cost_units, each.until) for each in budget.increases] == [(5.0, 1500.0)]
        for wrong in (
            {},
            {"hard_cost_units": -1.0},
            {"hard_cost_units": float("nan")},
            {"hard_cost_units": 1.0, "soft_cost_units": 2.0},
            {"hard_cost_units": 1.0, "borrow_over_soft": True},
            {"soft_cost_units": 1.0, "borrow_over_soft": True, "tag": "x"},
            {"hard_cost_units": 1.0, "time_zone": "Mars"},
        ):
            with pytest.raises(CallerError):
                await accounts.add_budget(ROOT, "team:search", period=Period.DAY, **wrong)
        with pytest.raises(CallerError, match="in the future"):
            await accounts.increase_budget(ROOT, number, cost_units=5.0, until=900.0)
        await accounts.remove_budget(ROOT, number)
        assert await accounts.budgets(ROOT) == []

    on(run, main)


PARENTS = {1: None, 2: 1, 3: 2, 4: None}
"""Organisation 1, its team 2, its project 3; organisation 4."""


@pytest.mark.parametrize(
    ("role", "reach", "acts"),
    [
        (Role.ADMIN, None, {1: "SKIF", 2: "SKIF", 3: "SKIF", 4: "SKIF", None: "SKIF"}),
        (Role.ADMIN, 1, {1: "SKI", 2: "SKIF", 3: "SKIF", 4: "", None: ""}),
        (Role.ADMIN, 2, {1: "", 2: "SKI", 3: "SKIF", 4: "", None: ""}),
        (Role.MEMBER, 2, {1: "", 2: "SK", 3: "SK", 4: "", None: ""}),
        (Role.VIEWER, 1, {1: "S", 2: "S", 3: "S", 4: "", None: ""}),
    ],
)
def test_a_role_reaches_its_node_and_what_is_below_and_no_admin_sets_its_own_budget(
    role: Role, reach: int | None, acts: dict[int | None, str]
) -> None:
    letters = {"S": Act.SEE, "K": Act.KEYS, "I": Act.INSIDE, "F": Act.FROM_ABOVE}
    actor = Actor(name="a", role=role, node_id=reach)
    for node, expected in acts.items():
        may = "".join(letter for letter, act in letters.items() if allowed(actor, act, node, PARENTS))
        assert may == expected, node


def test_operators_do_what_their_role_allows_and_see_what_it_reaches(run: Run) -> None:
    async def main(site: Site) -> None:
        accounts = site.accounts
        admin = await site.actor(Role.ADMIN, "team:search")
        member = await site.actor(Role.MEMBER, "team:search")
        viewer = await site.actor(Role.VIEWER, "organisation:lab")
        await accounts.add_key(ROOT, "team:ads")
        await accounts.add_node(admin, "project", "search/maps")
        key = await accounts.add_key(member, "project:search/maps")
        assert [each.id for each in await accounts.keys(viewer, limit=10)] == [key.id]
        assert [node.name for node in await accounts.nodes(viewer, "team")] == ["search"]
        await accounts.set_limit(admin, "project:search/maps", LimitKind.IN_FLIGHT, 1)
        for forbidden in (
            accounts.add_key(viewer, "team:search"),
            accounts.add_key(member, "team:ads"),
            accounts.add_node(member, "project", "search/more"),
            accounts.set_limit(admin, "team:search", LimitKind.IN_FLIGHT, 1),
            accounts.add_operator(admin, role=Role.ADMIN, reach="site"),
            accounts.add_operator(member, role=Role.MEMBER, reach="team:search"),
            accounts.audit(admin, limit=5),
        ):
            with pytest.raises(Forbidden):
                await forbidden
        made = await accounts.add_operator(admin, role=Role.ADMIN, reach="project:search/maps")
        await accounts.revoke_operator(ROOT, made.id)
        assert made.id not in {each.id for each in await accounts.operators(ROOT)}

    on(run, main)


def test_the_audit_says_who_did_what_and_when(run: Run) -> None:
    async def main(site: Site) -> None:
        admin = await site.actor(Role.ADMIN, "organisation:lab")
        site.now = 5000.0
        await site.accounts.set_models(admin, "team", "search", ["big"])
        (entry,) = await site.accounts.audit(ROOT, limit=1)
        assert (entry.at, entry.actor, entry.action, entry.target) == (
            5000.0,
            admin.name,
            "change nodes",
            "team:search",
        )
        assert '"tiny"' in (entry.before or "")
        assert '"big"' in (entry.after or "")

    on(run, main)
