"""What a world keeps of clients, requests, teams, engines and pools while it runs."""

import random
from math import inf

from fairshare.core.decisions import Request
from fairshare.core.pool import Pool
from fairshare.core.trim import Trim
from fairshare.engine.scheduler import Scheduler, SchedulerConfig
from fairshare.simulator.outcome import PoolOutcome, TeamOutcome
from fairshare.simulator.policies import GatewayPolicy
from fairshare.simulator.scenario import Load, PoolPlan

RETURN_SECONDS = 1.0
"""A team returns when its demand reaches its whole slots after having been below for at least this long."""


class Client:
    """One client of a load, or the source of an open loop; with random numbers of its own.

    So what it asks for does not depend on how others are served, and policies are compared on the same requests.
    """

    __slots__ = ("closed", "load", "rng", "team")

    def __init__(self, team: str, load: Load, rng: random.Random) -> None:
        self.team = team
        self.load = load
        self.rng = rng
        self.closed = load.clients > 0

    def pause_end(self, at: float) -> float:
        """The first time from `at` on at which it sends."""
        load = self.load
        at = max(at, load.start)
        if load.on:
            into = (at - load.start) % (load.on + load.off)
            if into >= load.on:
                return at + load.on + load.off - into
        return at


class Call:
    """One request of a client, until it has its answer."""

    __slots__ = (
        "account",
        "asked_at",
        "attempt",
        "borrowed",
        "client",
        "domain",
        "engine",
        "first_token_at",
        "id",
        "outputs",
        "prompt_tokens",
        "request",
        "sequences",
        "started_at",
        "streams",
        "unfinished",
    )

    def __init__(
        self,
        id: str,
        domain: "Domain",
        account: "Account",
        client: Client | None,
        request: Request,
        prompt_tokens: int,
        outputs: list[int],
        streams: bool,
        at: float,
    ) -> None:
        self.id = id
        self.domain = domain
        self.account = account
        self.client = client
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.outputs = outputs
        self.streams = streams
        self.asked_at = at
        self.attempt = 0
        """Grows when it is sent, recalled or broken off: what was under way for an earlier one is void."""
        self.engine: Engine | None = None
        self.sequences: list[Sequence] = []
        self.unfinished = 0
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.borrowed = False


class Sequence:
    """One sequence of a call at an engine."""

    __slots__ = (
        "attempt",
        "call",
        "counted_tokens",
        "engine",
        "id",
        "output_tokens",
        "prompt_counted",
        "running_since",
    )

    def __init__(self, id: str, call: Call, engine: "Engine", output_tokens: int) -> None:
        self.id = id
        self.call = call
        self.engine = engine
        self.attempt = call.attempt
        self.output_tokens = output_tokens
        self.running_since: float | None = None
        self.prompt_counted = False
        self.counted_tokens = 0
        """Tokens of it that are in the windows already."""


class Account:
    """What one team has in one pool now, and since the last sample."""

    __slots__ = (
        "below_since",
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "returned_at",
        "running",
        "slot_seconds",
        "waiting",
        "waiting_seconds",
        "waiting_since",
        "whole_slots",
    )

    def __init__(self, outcome: TeamOutcome) -> None:
        self.outcome = outcome
        self.whole_slots = outcome.whole_slots
        self.running = 0
        self.waiting = 0
        self.waiting_since = 0.0
        self.waiting_seconds = 0.0
        self.slot_seconds = 0.0
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.below_since = -inf
        """Since when its demand is below its whole slots."""
        self.returned_at: float | None = None

    def wait(self, sequences: int, now: float) -> None:
        """More of its sequences wait (or fewer, if negative)."""
        before = self.waiting
        self.waiting += sequences
        if not before:
            self.waiting_since = now
        elif not self.waiting:
            self.waiting_seconds += max(0.0, now - self.waiting_since)

    def demand_rose(self, slots: int, now: float) -> None:
        """It has just submitted a request."""
        demand = self.running + self.waiting
        if demand - slots < self.whole_slots <= demand and now - self.below_since >= RETURN_SECONDS:
            self.returned_at = now

    def demand_fell(self, slots: int, now: float) -> None:
        """A request of it has just ended."""
        demand = self.running + self.waiting
        if demand < self.whole_slots <= demand + slots:
            self.below_since = now
            if self.returned_at is not None:
                self.returned_at = None
                self.outcome.unfulfilled_returns += 1


class Engine:
    """One engine of a pool, and up to when it is certain to stay quiet."""

    __slots__ = ("domain", "index", "instance_id", "scheduler")

    def __init__(self, domain: "Domain", index: int, instance_id: str) -> None:
        self.domain = domain
        self.index = index
        """In the world's list of engines."""
        self.instance_id = instance_id
        self.scheduler: Scheduler


class Domain:
    """One pool with its policy, its engines and what is measured of it."""

    __slots__ = (
        "accounts",
        "capacity",
        "capacity_seconds",
        "config",
        "configured_capacity",
        "engines",
        "healthy",
        "held",
        "in_flight_slots",
        "outcome",
        "plan",
        "policy",
        "pool",
        "touched_at",
        "trims",
    )

    def __init__(self, plan: PoolPlan, config: SchedulerConfig, pool: Pool, outcome: PoolOutcome) -> None:
        self.plan = plan
        self.config = config
        self.pool = pool
        self.policy: GatewayPolicy
        self.engines: dict[str, Engine] = {}
        self.healthy: dict[str, bool] = {}
        self.trims: dict[str, Trim] = {}
        """Of each engine, where the capacity adapts."""
        self.configured_capacity = plan.capacity
        self.capacity = plan.capacity
        self.outcome = outcome
        self.accounts = {team: Account(one) for team, one in outcome.teams.items()}
        self.held = 0
        self.in_flight_slots = 0
        self.touched_at = 0.0
        self.capacity_seconds = 0.0
        """C x time since the last sample."""

    def touch(self, now: float) -> None:
        """Account for C and for idle slots until now; before C changes and anything is sent, held or released."""
        self.capacity_seconds += self.capacity * (now - self.touched_at)
        if self.held:
            idle_slots = self.capacity - self.in_flight_slots
            if idle_slots > 0:
                self.outcome.idle_slot_seconds += idle_slots * (now - self.touched_at)
        self.touched_at = now
