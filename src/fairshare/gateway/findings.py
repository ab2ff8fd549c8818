"""What an operator should know about a pool and its engines: pure rules over what was seen.

One place decides what is worth saying, for the gateway's log, the status page and `fairshare doctor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fairshare.core.decisions import Mode
from fairshare.gateway.kinds import WANTED_THRESHOLD, SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec, PoolSpec
from fairshare.gateway.scrape import EngineFacts

PRIORITY_HEADER_SINCE = (0, 28)
"""The first vLLM release that is known to take X-Vllm-Priority; /v1/messages has no other way to be told."""

PRIORITY_POLICY = "priority"
"""The `--scheduling-policy` that everything here needs."""

FEW_KV_TOKENS_PER_SLOT = 512
"""Below this a slot's part of the KV cache does not hold an ordinary request."""


SEATS_FLAGS = {EngineKind.VLLM: "--max-num-seqs", EngineKind.SGLANG: "--max-running-requests"}

PRIORITY_FLAGS = {
    EngineKind.VLLM: "--scheduling-policy priority",
    EngineKind.SGLANG: "--enable-priority-scheduling --retraction-policy priority "
    f"--priority-scheduling-preemption-threshold {WANTED_THRESHOLD}",
}
"""What an engine of each kind must be started with so that it keeps the order."""

FULL_KV = 0.95
"""KV usage that counts as full: beyond it the next block of some request evicts another."""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """A promise does not hold, or requests fail. `fairshare doctor` exits with 1."""

    WARNING = "warning"
    """Something works worse than it could, or cannot be verified."""


class Health(StrEnum):
    """What the health checks say of an instance."""

    UNKNOWN = "unknown"
    """Not asked yet."""

    HEALTHY = "healthy"

    OUT = "out"
    """It gets nothing new."""

    KEPT = "kept"
    """It fails its checks by being too slow, but no instance is better, so it still gets requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that an operator should know."""

    id: str
    """Stable: tools and alerts may match it."""
    severity: Severity
    pool: str
    instance_id: str | None
    """None: about the pool as a whole."""
    sentence: str
    """What was found."""
    why: str
    """Why it matters."""
    fix: str
    """What to do, exactly."""

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Two findings with the same key say the same thing, maybe with other numbers."""
        return (self.id, self.pool, self.instance_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one instance."""

    health: Health
    trouble: str = ""
    """Why its last check failed, as a part of a sentence; empty: it did not."""
    facts: EngineFacts | None = None
    """None: it never answered."""
    kv_tokens: int | None = None
    waiting_throughout: int | None = None
    """The fewest sequences that waited in the engine's own queue in any of the last scrapes; None: too few scrapes."""
    kv_usage_throughout: float | None = None
    """The lowest KV usage (0 to 1) in any of the last scrapes; None: too few scrapes."""
    trimmed_slots: int = 0
    """By how many slots adaptive capacity holds it below its part of C."""
    overtaken_never: int | None = None
    """In how many cases an urgent request overtook none of the lazier ones that waited there; None: no such case
    beyond what chance allows (see `PriorityWatch`)."""


@dataclass(frozen=True, slots=True)
class _About:
    """Makes findings about one instance, or about the pool."""

    spec: PoolSpec
    instance_id: str | None = None

    @property
    def subject(self) -> str:
        pool = f"pool {self.spec.name}"
        return pool if self.instance_id is None else f"{self.instance_id} of {pool}"

    def error(self, id: str, sentence: str, *, why: str, fix: str) -> Finding:
        return self._finding(id, Severity.ERROR, sentence, why, fix)

    def warning(self, id: str, sentence: str, *, why: str, fix: str) -> Finding:
        return self._finding(id, Severity.WARNING, sentence, why, fix)

    def _finding(self, id: str, severity: Severity, sentence: str, why: str, fix: str) -> Finding:
        return Finding(
            id=id,
            severity=severity,
            pool=self.spec.name,
            instance_id=self.instance_id,
            sentence=sentence,
            why=why,
            fix=fix,
        )


def find(
    spec: PoolSpec, seen: Mapping[str, Seen], *, capacity_slots: int, parts: Mapping[str, int], scrape_window: str
) -> list[Finding]:
    """Every finding about one pool, the gravest first.

    `capacity_slots` is C now and `parts` each accepting instance's part of it; `scrape_window` says in words how long
    the last scrapes reach back.
    """
    found = _about_health(spec, seen, capacity_slots)
    for instance in spec.instances:
        this = seen.get(instance.id)
        if this is None or this.facts is None:
            continue
        about = _About(spec, instance.id)
        # An instance that is out is judged by what it would get: a fault shows before it hurts.
        part = parts.get(instance.id) or max(1, spec.capacity // len(spec.instances))
        found += _about_models(about, this.facts)
        found += _about_policy(about, instance, this.facts, this.overtaken_never)
        if instance.kind is EngineKind.SGLANG:
            found += _about_sglang(about, instance, this.facts)
        found += _about_seats(about, instance, this.facts.max_num_seqs, part)
        found += _about_kv(about, this.kv_tokens, part)
        found += _about_load(about, this, part, scrape_window)
    found += _about_verification(spec, seen)
    found += _about_differences(spec, seen)
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def _about_health(spec: PoolSpec, seen: Mapping[str, Seen], capacity_slots: int) -> list[Finding]:
    found: list[Finding] = []
    for instance_id, this in seen.items():
        about = _About(spec, instance_id)
        if this.health is Health.OUT:
            found.append(
                about.error(
                    "instance-out",
                    f"{about.subject} gets no requests: {this.trouble}.",
                    why=f"C is {capacity_slots} instead of {spec.capacity} slots, and reservations shrink with it.",
                    fix="Start the engine or correct its url; it is taken back by itself when /health answers 200.",
                )
            )
        elif this.health is Health.KEPT:
            found.append(
                about.error(
                    "last-instance-kept",
                    f"{about.subject} fails its health check ({this.trouble}) and still gets requests, because no "
                    "instance of the pool is better.",
                    why="An engine that is only too slow may still serve; without it every request would fail.",
                    fix="Look at the engine's load and log; add instances, or lower the pool's capacity.",
                )
            )
    if seen and all(this.health is Health.OUT for this in seen.values()):
        found.append(
            _About(spec).error(
                "pool-without-instance",
                f"Pool {spec.name} has no instance left: none of its {len(seen)} answers its health check.",
                why="Every request for its models fails until an engine is back.",
                fix="Start an engine of the pool.",
            )
        )
    return found


def _about_models(about: _About, facts: EngineFacts) -> list[Finding]:
    if facts.context_tokens is None:
        return [
            about.warning(
                "models-unknown",
                f"{about.subject} does not say which models it serves: {facts.models_problem or 'no answer'}.",
                why="Whether it can serve the pool's models is not known.",
                fix="If it answers 401, give the instance an api_key_file; otherwise ask it for /v1/models by hand.",
            )
        ]
    missing = sorted(set(about.spec.models.values()) - set(facts.context_tokens))
    if not missing:
        return []
    serves = ", ".join(sorted(facts.context_tokens)) or "no model"
    return [
        about.error(
            "model-not-served",
            f"{about.subject} does not serve {', '.join(missing)}; it serves {serves}.",
            why="Requests for that model get the engine's 404.",
            fix=f"Start it with --served-model-name {missing[0]}, or map the clients' name to the engine's under "
            "the pool's `models`.",
        )
    ]


def _about_policy(
    about: _About, instance: InstanceSpec, facts: EngineFacts, overtaken_never: int | None
) -> list[Finding]:
    if about.spec.mode is Mode.OBSERVE:
        return []  # nothing is sent with a priority
    found: list[Finding] = []
    ignored = None
    if facts.sglang is not None and not facts.sglang.enabled:
        ignored = "runs without --enable-priority-scheduling"
    elif facts.policy is not None and facts.policy != PRIORITY_POLICY:
        ignored = f"runs with --scheduling-policy {facts.policy}"
    elif overtaken_never is not None:
        ignored = (
            f"does not order by priority: in {overtaken_never} cases an urgent request overtook none of the lazier "
            "ones that waited there"
        )
    if ignored is not None:
        found.append(priority_ignored(about.spec, instance, f"{about.subject} {ignored}."))
    release = _release(facts.version) if instance.kind is EngineKind.VLLM else None
    if release is not None and release < PRIORITY_HEADER_SINCE:
        found.append(
            about.warning(
                "priority-header-unknown",
                f"{about.subject} is vLLM {facts.version}, which does not know the header X-Vllm-Priority.",
                why="Requests to /v1/messages run there with priority 0, as if all of them were within share.",
                fix="Upgrade to vLLM 0.28 or newer, or do not use /v1/messages with this pool.",
            )
        )
    return found


def _about_sglang(about: _About, instance: InstanceSpec, facts: EngineFacts) -> list[Finding]:
    found: list[Finding] = []
    if facts.load is None:
        found.append(
            about.warning(
                "load-unknown",
                f"{about.subject} does not show its metrics.",
                why="What runs and waits there is not seen: the probe cannot work, and a queue inside it or a full KV "
                "cache is not noticed.",
                fix="Restart it with --enable-metrics.",
            )
        )
    report = facts.sglang
    if report is None or not report.enabled or about.spec.mode is Mode.OBSERVE:
        return found
    if report.flags.low_values_first != instance.sglang.low_values_first:
        found.append(priority_reversed(about.spec, instance, f"{about.subject} says so of itself."))
    return found + _about_displacing(about, instance, report)


def _about_displacing(about: _About, instance: InstanceSpec, report: SglangReport) -> list[Finding]:
    found: list[Finding] = []
    configured, reported = instance.sglang.preemption_threshold, report.flags.preemption_threshold
    if configured != reported:
        found.append(
            about.error(
                "threshold-differs",
                f"{about.subject} runs with --priority-scheduling-preemption-threshold {reported}, but its "
                f"configuration says {configured}.",
                why="The numbers are spaced for the configured one: an owner may not displace borrowers, or borrowers "
                "evict each other.",
                fix=f"Set preemption_threshold: {reported} for the instance, or restart it with "
                f"--priority-scheduling-preemption-threshold {configured}.",
            )
        )
    if reported < WANTED_THRESHOLD:
        found.append(
            about.warning(
                "priorities-merged",
                f"{about.subject} has a preemption threshold of {reported}, below {WANTED_THRESHOLD}.",
                why="Borrowers of neighbouring ranks and classes share one number, and go in the order they came.",
                fix=f"Restart it with --priority-scheduling-preemption-threshold {WANTED_THRESHOLD}, and set "
                f"preemption_threshold: {WANTED_THRESHOLD}.",
            )
        )
    if not report.displaces:
        found.append(
            about.warning(
                "displacing-off",
                f"{about.subject} runs with --disable-priority-preemption.",
                why="An owner who comes back to a full engine waits until a borrower ends or is recalled.",
                fix="Restart it without that flag.",
            )
        )
    if report.retraction_policy != "priority":
        found.append(
            about.warning(
                "retraction-by-length",
                f"{about.subject} runs with --retraction-policy {report.retraction_policy}.",
                why="When memory is short, whoever has the least output gives way: that can be an owner.",
                fix="Restart it with --retraction-policy priority.",
            )
        )
    return found


def priority_reversed(spec: PoolSpec, instance: InstanceSpec, seen: str) -> Finding:
    """An engine takes the numbers the other way round than configured; the sentence `seen` says how that was seen."""
    about = _About(spec, instance.id)
    wanted = "true" if not instance.sglang.low_values_first else "false"
    does = "lower" if not instance.sglang.low_values_first else "higher"
    restart = "without" if not instance.sglang.low_values_first else "with"
    return about.error(
        "priority-reversed",
        f"{about.subject} runs {does} numbers first, against its configuration. {seen}",
        why="Everything is upside down: borrowers go before owners, and displace them.",
        fix=f"Set low_values_first: {wanted} for the instance, or restart it {restart} "
        "--schedule-low-priority-values-first.",
    )


def priority_ignored(spec: PoolSpec, instance: InstanceSpec, sentence: str) -> Finding:
    """An engine does not order by priority; the sentence says how that was seen."""
    return _About(spec, instance.id).error(
        "priority-ignored",
        sentence,
        why="It answers 200 and ignores every priority: owners wait behind borrowers, and KV pressure evicts anybody.",
        fix=f"Restart it with {PRIORITY_FLAGS[instance.kind]}.",
    )


def _about_seats(about: _About, instance: InstanceSpec, reported: int | None, part: int) -> list[Finding]:
    configured, flag = instance.max_num_seqs, SEATS_FLAGS[instance.kind]
    found: list[Finding] = []
    if configured is not None and reported is not None and configured != reported:
        found.append(
            about.error(
                "seats-differ",
                f"{about.subject} runs with {flag} {reported}, but its configuration says {configured}.",
                why="The gateway goes by what the engine reports.",
                fix=f"Set max_num_seqs: {reported} for the instance, or restart it with {flag} {configured}.",
            )
        )
    seats = reported if reported is not None else configured
    if seats is not None and seats < part:
        found.append(
            about.error(
                "capacity-above-seats",
                f"{about.subject} runs at most {seats} sequences at once, but its part of the capacity is {part}.",
                why="What is sent beyond its seats waits inside the engine, where a reservation cannot reach it.",
                fix=f"Lower the pool's capacity to {seats * len(about.spec.instances)}, or raise {flag} to {2 * part}.",
            )
        )
    elif seats is not None and seats < 2 * part and about.spec.mode is Mode.HOLD:
        found.append(
            about.warning(
                "little-headroom",
                f"{about.subject} has {seats} seats for its {part} slots of the capacity.",
                why="An owner who comes back to a full engine waits until a borrower ends or is recalled; with "
                "headroom it runs at the engine's next step.",
                fix=f"Raise {flag} to {2 * part} and leave the pool's capacity as it is.",
            )
        )
    return found


def _about_kv(about: _About, kv_tokens: int | None, part: int) -> list[Finding]:
    if kv_tokens is None or kv_tokens >= FEW_KV_TOKENS_PER_SLOT * part:
        return []
    return [
        about.warning(
            "capacity-above-kv",
            f"{about.subject} has a KV cache of {kv_tokens} tokens, {kv_tokens // part} for each of its {part} slots.",
            why="Ordinary requests do not fit beside each other: the engine preempts borrowers and computes them "
            "again, and lets nobody in meanwhile.",
            fix="Lower the pool's capacity, or give the engine more KV cache (--gpu-memory-utilization).",
        )
    ]


def _about_load(about: _About, this: Seen, part: int, scrape_window: str) -> list[Finding]:
    found: list[Finding] = []
    if this.trimmed_slots:
        found.append(
            about.warning(
                "capacity-trimmed",
                f"{about.subject} gets {part} of its {part + this.trimmed_slots} slots, because requests waited inside "
                "it (`trim`).",
                why="The capacity is above what the engine runs at once now; reservations are smaller in proportion.",
                fix=f"If it stays so, set the capacity to {part} for each such engine, or give it more KV cache; "
                "when nothing waits there it rises by itself.",
            )
        )
    # In `pass` the engine's queue is where requests are meant to wait.
    if about.spec.mode is Mode.HOLD and this.waiting_throughout:
        found.append(
            about.warning(
                "engine-queue",
                f"Inside {about.subject} requests have waited for {scrape_window}, never fewer than "
                f"{this.waiting_throughout}.",
                why="The capacity is above what the engine runs at once; batch work within its share then waits there "
                "behind other teams' interactive work.",
                fix="Lower the pool's capacity until num_requests_waiting stays at 0, or raise --max-num-seqs if KV "
                "cache is left.",
            )
        )
    if this.kv_usage_throughout is not None and this.kv_usage_throughout >= FULL_KV:
        found.append(
            about.warning(
                "kv-full",
                f"{about.subject} has had its KV cache at {this.kv_usage_throughout:.0%} or more for {scrape_window}.",
                why="The engine preempts running requests and computes them again: borrowers first, but work is lost.",
                fix="Lower the pool's capacity, or give the engine more KV cache (--gpu-memory-utilization).",
            )
        )
    return found


def _about_verification(spec: PoolSpec, seen: Mapping[str, Seen]) -> list[Finding]:
    unverified = [
        instance_id
        for instance_id, this in seen.items()
        if this.facts is not None and this.facts.policy is None and this.overtaken_never is None
    ]
    if not unverified or spec.mode is Mode.OBSERVE:
        return []
    return [
        _About(spec).warning(
            "policy-unverified",
            f"Whether the engines of pool {spec.name} order by priority is not verified: {', '.join(unverified)}.",
            why="An engine started without its flag for priorities answers 200 and ignores every one.",
            fix="Run `fairshare doctor --probe`, again after each change of an engine's flags: it shows the policy "
            "by behaviour.",
        )
    ]


def _about_differences(spec: PoolSpec, seen: Mapping[str, Seen]) -> list[Finding]:
    found: list[Finding] = []
    about = _About(spec)
    known = {instance_id: this.facts for instance_id, this in seen.items() if this.facts is not None}
    for model in sorted(set(spec.models.values())):
        lengths = {
            instance_id: length
            for instance_id, facts in known.items()
            if facts.context_tokens is not None and (length := facts.context_tokens.get(model)) is not None
        }
        if len(set(lengths.values())) > 1:
            each = ", ".join(f"{length} at {instance_id}" for instance_id, length in lengths.items())
            found.append(
                about.warning(
                    "context-lengths-differ",
                    f"The instances of pool {spec.name} take prompts of different lengths for {model}: {each}.",
                    why="Whether a long request is served depends on where it is sent.",
                    fix="Start all of them with the same --max-model-len.",
                )
            )
    versions = sorted({facts.version for facts in known.values() if facts.version is not None})
    if len(versions) > 1:
        found.append(
            about.warning(
                "versions-differ",
                f"The instances of pool {spec.name} run different versions: {', '.join(versions)}.",
                why="The same request can be answered differently; normal while an upgrade rolls.",
                fix="Finish the upgrade.",
            )
        )
    return found


def _release(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version like 0.32.0 or 0.32.1.dev3; None: it is no such thing."""
    parts = (version or "").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])
