"""An admin port over pools that a test makes up, as a gateway serves it, in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fairshare.core.decisions import Held, Request, Send
from fairshare.core.pool import Grant, Pool
from fairshare.core.priority import Standing
from fairshare.dashboard import status_pages
from fairshare.gateway.admin import AdminServer, admin_app
from fairshare.gateway.decision_log import DecisionLog
from fairshare.gateway.explain import Explainer
from fairshare.gateway.history import History
from fairshare.gateway.identity import Identity, StaticDirectory, hash_key
from fairshare.gateway.listening import bound_to, listening_socket
from fairshare.gateway.live import Live
from fairshare.gateway.logins import FailedLogins
from fairshare.gateway.metrics import Metrics
from fairshare.gateway.options import Address, Level
from fairshare.gateway.ports import Counters, Outcome, RequestRecord
from fairshare.gateway.status import BudgetStatus, PoolStatus
from fairshare.gateway.status_api import StatusApi, StatusParts


class Desk:
    """What the admin port shows; a test changes it while it is shown."""

    def __init__(
        self,
        pools: Sequence[PoolStatus],
        *,
        budgets: Sequence[BudgetStatus] = (),
        identities: dict[str, Identity] | None = None,
        level: Level = Level.TEAM,
        past_seconds: int = 0,
        past: Callable[[int], Sequence[PoolStatus]] | None = None,
    ) -> None:
        self.pools = list(pools)
        self.budgets = list(budgets)
        self.admin_key: str | None = None
        self.log = DecisionLog(time.monotonic)
        self.history = History(recalls=lambda: self.log.recalls)
        self.logins = FailedLogins()
        self.live = Live(pools=lambda: self.pools, budgets=lambda: self.budgets, history=self.history, wall=time.time)
        now = time.time()
        for second in range(past_seconds, 0, -1):
            self.history.add(now - second, past(second) if past else self.pools)
        explainer = Explainer(log=self.log, history=self.history, clock=time.monotonic, wall=time.time)
        self.directory = StaticDirectory({hash_key(key): each for key, each in (identities or {}).items()})
        parts = StatusParts(
            live=self.live,
            history=self.history,
            explainer=explainer,
            log=self.log,
            directory=self.directory,
            budgets_of=lambda owners: [budget for budget in self.budgets if budget.owner in owners],
            level_of=lambda pool: level if any(each.name == pool for each in self.pools) else None,
            team_of=lambda key_id: next(
                (each.team for each in (identities or {}).values() if each.key_id == key_id), None
            ),
            logins=self.logins,
            clock=time.monotonic,
        )
        self.app = admin_app(
            pools=lambda: self.pools,
            metrics=Metrics(lambda: self.pools, Counters),
            not_ready=lambda: None,
            pages=status_pages(),
            key=lambda: self.admin_key,
            status=StatusApi(parts).routes(),
            logins=self.logins,
        )

    def waited(
        self,
        request_id: str,
        team: str,
        *,
        key_id: str = "",
        pool: str = "chat",
        held_seconds: float = 1.5,
        usage: Mapping[str, float] | None = None,
    ) -> None:
        """A request that was held, then borrowed, then answered. `usage`: of the pool's teams, each of which owns the
        same; None: another replica decided."""
        counted = Pool(pool, 16, {each: Fraction(1, len(usage or ())) for each in usage or ()}, 0.0)
        for each, cost_units in (usage or {}).items():
            counted.set_usage(each, cost_units)
        counted.rank(team)
        decided = Decided(request_id, key_id, team, pool)
        self.log.held(
            decided,
            Held(
                request_id=request_id,
                team_held=3,
                team_in_flight_slots=8,
                reserved_slots=8,
                pool_in_flight_slots=16,
                capacity_slots=16,
            ),
        )
        grant = Grant.remote(team, 20, True, True, lambda _: None)
        if usage is not None:
            grant = counted.record(
                counted.state(team), now=0.0, priority=20, borrowing=True, provisional_cost_units=1000.0
            )
        send = Send(
            request_id=request_id,
            pool=pool,
            instance_id="http://127.0.0.1:9001",
            grant=grant,
            priority=20,
            standing=Standing.BORROWING,
            held_seconds=held_seconds,
        )
        self.log.sent(decided, send, counted)
        self.log.finished(
            RequestRecord(
                id=request_id,
                endpoint="/v1/chat/completions",
                key_id=key_id,
                team=team,
                pool=pool,
                served_by=pool,
                instance_id="http://127.0.0.1:9001",
                model="tiny",
                standing=Standing.BORROWING,
                priority=20,
                slots=1,
                arrived_at=time.time() - 3.0,
                sent_seconds=held_seconds,
                total_seconds=3.0,
                held_seconds=held_seconds,
                outcome=Outcome.COMPLETED,
                status=200,
                prompt_tokens=40,
                completion_tokens=60,
                cost_units=160.0,
            )
        )


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


class _Home:
    def __init__(self, name: str) -> None:
        self.spec = _Named(name)


class Decided:
    def __init__(self, id: str, key_id: str, team: str, pool: str) -> None:
        self.request = Request(id=id, team=team)
        self.id = id
        self.key_id = key_id
        self.home = _Home(pool)


@contextmanager
def serving(desk: Desk, port: int = 0) -> Iterator[str]:
    """Serves it; yields its address."""
    listening = listening_socket(Address("127.0.0.1", port), purpose="the admin port")
    url = f"http://{bound_to(listening)}"
    server = AdminServer(desk.app)

    async def main() -> None:
        await desk.live.start()
        try:
            await server.run_on(listening)
        finally:
            await desk.live.stop()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        yield url
    finally:
        server.stop()
        thread.join()
