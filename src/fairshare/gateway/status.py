"""What a gateway shows of itself: one snapshot of each pool, for the API, the status page and the metrics.

Field names of the JSON are a contract: add to them, do not rename.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fairshare.core.decisions import DispatchQueue, InstanceStat
from fairshare.core.pool import Pool, TeamStat
from fairshare.core.priority import MAX_RANK
from fairshare.gateway.findings import Finding, Severity
from fairshare.gateway.options import PoolSpec

NOTE = "note"
"""The severity of what is as it was configured, and still worth knowing."""


class TeamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One team in one pool. Slots unless it says otherwise."""

    team: str
    share: float
    reserved: int
    in_flight: int
    borrowing: int
    in_flight_tokens: int
    usage: float
    """Decayed consumption, cost units."""
    level_fairshare: float | None
    """None: infinite, the team has used nothing."""
    rank: int
    phantoms: int
    held: int
    """Requests waiting in the gateway."""
    oldest_held_seconds: float


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of one pool."""

    id: str
    healthy: bool
    part: int
    """Its part of the pool's capacity now, slots."""
    seats: int | None
    """What it runs at most, as far as known; None: unknown."""
    in_flight: int
    """Slots that this gateway has there."""
    running: int | None
    """What the engine itself reports to run; None: it has not been asked, or did not say."""
    waiting: int | None
    kv_usage: float | None
    """0 to 1."""
    preemptions: int | None
    """Requests that the engine has evicted since it started, because its KV cache was full."""
    version: str | None
    leaving: bool = False
    """It no longer belongs to the pool and finishes what it runs."""
    trimmed: int = 0
    """By how many slots adaptive capacity holds it below its part."""


class FindingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that an operator should know, as `findings` says it, in its parts."""

    id: str
    """Stable, see `fairshare.gateway.findings`."""
    severity: str
    """`error`: a promise does not hold or requests fail; `warning`: something works worse than it could; `note`."""
    instance: str | None
    """None: about the pool as a whole."""
    sentence: str
    why: str
    fix: str


class BudgetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A budget in its period now. Cost units."""

    owner: str
    """As `team:search`."""
    model: str | None
    """Only what was asked of this model counts; null: all."""
    tag: str | None
    """Likewise, of keys with this tag."""
    period: str
    soft: float | None
    hard: float | None
    """With what it was increased by for the time."""
    used: float
    """Charged in this period."""
    reserved: float
    """Estimates of requests that run."""
    left: float | None
    """Of the hard amount; null: it has none."""
    borrows_only: bool
    """It is over its soft amount, and for that its owner only borrows."""
    resets_at: float | None
    """Wall clock; null: never."""


class ReplicationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who decides for a pool, as this replica sees it."""

    replica: str
    """This one; of this life of its process."""
    role: str
    """`owner`, `taking`, `follower`, `waiting`, `degraded` or `no_owner`, see `fairshare.replicas.member.Role`."""
    owner: str
    """The replica that owns the pool, or did last."""
    epoch: int
    lease: str
    """The pools that `fallback` joins have one lease; its name is the first one's."""
    replicas: int
    """How many share the pool, as far as this one knows."""
    since_seconds: float
    """How long it has been following, waiting, degraded or refusing."""
    unsaved_charges: int
    """Of requests that ended here, which no owner has saved yet."""
    degraded_grants: int
    """Requests that this replica sent without an owner, since its start."""
    phantom_slots: int
    """Of the owner: slots of replicas that it does not hear of."""
    peers: list[str]
    """Replicas that it has a link to."""
    unreachable: list[str]
    """Owners that it cannot reach, and why."""
    differing: list[str] = []
    """Replicas that have the pool configured differently, each with in what."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    name: str
    capacity: int
    """C now; follows the healthy instances."""
    dispatch: str
    in_flight: int
    """Slots, phantoms not among them."""
    held: int
    """Requests waiting in the gateway. In `observe`: that `hold` would have let wait."""
    saturated: bool
    """C or more slots are taken, phantoms among them."""
    teams: list[TeamStatus]
    configured_capacity: int
    """C when every configured instance is healthy."""
    half_life_seconds: float
    """0: usage never decays."""
    fallback: str | None
    models: list[str]
    cost_unit: str
    calibrated: bool
    turn_slots: int
    turns_taken: int
    recalls: int
    """Since start."""
    recalled_slot_seconds: float
    """Engine time that recalls threw away since start; charged to nobody."""
    instances: list[InstanceStatus]
    findings: list[str]
    """What an operator should know, one plain sentence each."""
    finding_details: list[FindingStatus]
    """The same in parts."""
    replication: ReplicationStatus | None = None
    """None: this process serves alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """What health checks and scrapes know of one instance."""

    id: str
    healthy: bool
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    version: str | None = None
    leaving: bool = False
    trimmed_slots: int = 0


class Supervision(Protocol):
    """Watches the instances of one pool."""

    def reports(self) -> Sequence[InstanceReport]: ...

    def found(self) -> Sequence[Finding]: ...


def pool_status(
    spec: PoolSpec,
    pool: Pool,
    queue: DispatchQueue,
    supervision: Supervision,
    *,
    findings: Sequence[str] = (),
    replication: ReplicationStatus | None = None,
) -> PoolStatus:
    """The state of one pool, now. `findings`: what else is to be said, of the store for instance."""
    details = [
        *(_detail("store", Severity.WARNING, sentence) for sentence in findings),
        *(
            FindingStatus(
                id=found.id,
                severity=found.severity,
                instance=found.instance_id,
                sentence=found.sentence,
                why=found.why,
                fix=found.fix,
            )
            for found in supervision.found()
        ),
        *(() if replication is None else _replica_findings(replication)),
        *_own_findings(spec, pool, sum(report.trimmed_slots for report in supervision.reports())),
    ]
    queued = queue.snapshot()
    held = {stat.team: stat for stat in queued.teams}
    stats = list(pool.snapshot())
    # A team without a share shows in the pool only while something of it is in flight; what it has held shows too.
    stats += [_nobody(team) for team in sorted(held.keys() - {stat.team for stat in stats})]
    teams = [
        TeamStatus(
            team=stat.team,
            share=stat.share,
            reserved=stat.reserved,
            in_flight=stat.in_flight,
            borrowing=stat.borrowing,
            in_flight_tokens=stat.in_flight_tokens,
            usage=stat.usage,
            level_fairshare=stat.level_fairshare if math.isfinite(stat.level_fairshare) else None,
            rank=stat.rank,
            phantoms=stat.phantoms,
            held=held[stat.team].held if stat.team in held else 0,
            oldest_held_seconds=held[stat.team].oldest_held_seconds if stat.team in held else 0.0,
        )
        for stat in stats
    ]
    return PoolStatus(
        name=pool.name,
        capacity=pool.capacity,
        dispatch=str(queue.mode),
        in_flight=pool.live_slots,
        held=queued.held,
        saturated=pool.live_slots + pool.phantom_slots >= pool.capacity,
        teams=teams,
        configured_capacity=spec.capacity,
        half_life_seconds=pool.half_life_seconds,
        fallback=spec.fallback,
        models=sorted(spec.models),
        cost_unit=spec.cost.unit,
        calibrated=spec.calibrated,
        turn_slots=queued.turn_slots,
        turns_taken=queued.turns_taken,
        recalls=queued.recalls_total,
        recalled_slot_seconds=queued.recalled_slot_seconds_total,
        instances=_instances(supervision.reports(), queued.instances),
        findings=[f"{detail.sentence} {detail.fix}".rstrip() for detail in details],
        finding_details=details,
        replication=replication,
    )


def _instances(reports: Iterable[InstanceReport], stats: Iterable[InstanceStat]) -> list[InstanceStatus]:
    dispatched = {stat.id: stat for stat in stats}
    instances: list[InstanceStatus] = []
    for report in reports:
        stat = dispatched.get(report.id)
        instances.append(
            InstanceStatus(
                id=report.id,
                healthy=report.healthy,
                part=stat.part_slots if stat is not None else 0,
                seats=stat.seats if stat is not None else None,
                in_flight=stat.in_flight_slots if stat is not None else 0,
                running=report.running,
                waiting=report.waiting,
                kv_usage=report.kv_usage,
                preemptions=report.preemptions,
                version=report.version,
                leaving=report.leaving,
                trimmed=report.trimmed_slots,
            )
        )
    return instances


def _replica_findings(replication: ReplicationStatus) -> list[FindingStatus]:
    found: list[FindingStatus] = []
    since = f"{replication.since_seconds:.0f} s"
    why = f" ({'; '.join(replication.unreachable)})" if replication.unreachable else ""
    if replication.role == "degraded":
        found.append(
            _detail(
                "replica-degraded",
                Severity.ERROR,
                f"This replica has decided alone for {since}, over 1/{replication.replicas} of the slots: it reaches "
                f"no owner of the pool{why}. {replication.degraded_grants} requests were sent so since it started.",
            )
        )
    if replication.role == "no_owner":
        found.append(
            _detail(
                "replica-without-owner",
                Severity.ERROR,
                f"Nobody has owned the pool for too long, as far as this replica sees{why}: it refuses new requests.",
            )
        )
    if replication.phantom_slots:
        found.append(
            _detail(
                "replica-silent",
                Severity.WARNING,
                f"{replication.phantom_slots} slots are kept for requests of replicas that are not heard of; they are "
                "free when those come back, or when the longest request could have ended.",
                "If their machine is gone for certain: fairshare clear-phantoms.",
            )
        )
    if replication.differing:
        found.append(
            _detail(
                "replica-configured-differently",
                Severity.WARNING,
                f"Replicas have this pool configured differently ({'; '.join(replication.differing)}); in force is "
                "what the owner has, and that changes with the owner.",
                "Give all of them the same configuration.",
            )
        )
    return found


def _own_findings(spec: PoolSpec, pool: Pool, trimmed_slots: int) -> list[FindingStatus]:
    found: list[FindingStatus] = []
    # What adaptive capacity took is a finding of the instance.
    if pool.capacity + trimmed_slots < spec.capacity:
        found.append(
            _detail(
                "capacity-reduced",
                Severity.WARNING,
                f"The capacity is {pool.capacity} of the {spec.capacity} configured slots, because not every engine is "
                "healthy; reservations are smaller until the engines are back.",
            )
        )
    if not spec.calibrated:
        found.append(
            _detail(
                "not-calibrated",
                NOTE,
                "Costs are not calibrated: usage counts tokens (prompt 1, cached 0.1, completion 2), not GPU time.",
                "Give the pool its `cost:` to change that.",
            )
        )
    return found


def _detail(id: str, severity: str, sentence: str, fix: str = "") -> FindingStatus:
    return FindingStatus(id=id, severity=severity, instance=None, sentence=sentence, why="", fix=fix)


def _nobody(team: str) -> TeamStat:
    return TeamStat(
        team=team,
        share=0.0,
        reserved=0,
        in_flight=0,
        borrowing=0,
        in_flight_tokens=0,
        usage=0.0,
        level_fairshare=0.0,
        rank=MAX_RANK,
        phantoms=0,
    )
