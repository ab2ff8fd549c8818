"""Looks a pool's engines over once, as `fairshare doctor` does: the gateway's own rules, without a gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from fairshare.clock import Clock
from fairshare.core.decisions import Mode
from fairshare.gateway.engine_http import Ask, EngineSilent, kept_open
from fairshare.gateway.findings import (
    PRIORITY_FLAGS,
    PRIORITY_POLICY,
    Finding,
    Health,
    Seen,
    Severity,
    find,
    priority_ignored,
    priority_reversed,
)
from fairshare.gateway.options import EngineKind, InstanceSpec, PoolSpec
from fairshare.gateway.probe import Policy, Probed, probe
from fairshare.gateway.scrape import ASK_SECONDS, EngineFacts, discover


@dataclass(slots=True, kw_only=True)
class Examined:
    """One instance, as it was found."""

    spec: InstanceSpec
    trouble: str = ""
    """Why it did not answer, as a part of a sentence; empty: it did."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    probed: Probed | None = None
    """None: not probed."""
    kept_seconds: float | None = None
    """After how long it closes an idle connection; None: it keeps it, or that was not probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """One pool, as it was found."""

    spec: PoolSpec
    instances: list[Examined]
    findings: list[Finding]
    """The gravest first."""

    @property
    def sound(self) -> bool:
        """Whether nothing was found that breaks a promise."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


async def examine(
    spec: PoolSpec,
    *,
    ask: Ask,
    with_probe: bool,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    kept: Callable[[InstanceSpec], Awaitable[float | None]] = kept_open,
) -> Examination:
    """Asks every engine of the pool what it tells, probes them one after the other if wanted, and judges.

    `kept`: after how many seconds an engine closes an idle connection; None: it keeps it.
    """
    instances = list(await asyncio.gather(*(_look(ask, instance) for instance in spec.instances)))
    if with_probe:
        reached = [examined for examined in instances if not examined.trouble]
        idle = asyncio.gather(*(kept(examined.spec) for examined in reached if examined.spec.kind is EngineKind.VLLM))
        for examined in reached:
            examined.probed = await _probe(ask, spec, examined, clock, sleep)
        vllms = [examined for examined in reached if examined.spec.kind is EngineKind.VLLM]
        for examined, seconds in zip(vllms, await idle, strict=True):
            examined.kept_seconds = seconds
    return Examination(spec=spec, instances=instances, findings=_judge(spec, instances))


async def _look(ask: Ask, instance: InstanceSpec) -> Examined:
    try:
        answer = await ask(
            "GET",
            f"{instance.url}/health",
            api_key=instance.api_key,
            ca_file=instance.ca_file,
            timeout_seconds=ASK_SECONDS,
        )
    except EngineSilent as silent:
        return Examined(spec=instance, trouble=silent.detail)
    if answer.status != 200:
        return Examined(spec=instance, trouble=f"/health answers {answer.status}")
    return Examined(spec=instance, facts=await discover(ask, instance))


async def _probe(
    ask: Ask, spec: PoolSpec, examined: Examined, clock: Clock, sleep: Callable[[float], Awaitable[None]]
) -> Probed:
    served = examined.facts.context_tokens or {}
    model = next((name for name in spec.models.values() if not served or name in served), None)
    if model is None:
        return Probed(policy=Policy.UNCLEAR, detail="The engine serves none of the pool's models.")
    seats = examined.facts.max_num_seqs
    return await probe(
        ask,
        examined.spec,
        model=model,
        context_tokens=served.get(model),
        seats=seats if seats is not None else examined.spec.max_num_seqs,
        reported=examined.facts.sglang,
        clock=clock,
        sleep=sleep,
    )


def _judge(spec: PoolSpec, instances: list[Examined]) -> list[Finding]:
    capacity = spec.capacity * sum(not examined.trouble for examined in instances) // max(1, len(instances))
    seen = {examined.spec.id: _seen(examined) for examined in instances}
    found = find(spec, seen, capacity_slots=capacity, parts={}, scrape_window="")
    for examined in instances:
        if examined.probed is not None and spec.mode is not Mode.OBSERVE:
            found += _about_probe(spec, examined, examined.probed)
        if examined.kept_seconds is not None:
            found.append(_short_keep_alive(spec, examined, examined.kept_seconds))
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def _seen(examined: Examined) -> Seen:
    facts, probed = examined.facts, examined.probed
    if probed is not None:
        if probed.policy is not Policy.UNCLEAR:
            # What it did is surer than what it says of itself; `_about_probe` says so where it is bad.
            facts = replace(facts, policy=PRIORITY_POLICY)
        if facts.max_num_seqs is None and examined.spec.max_num_seqs is None:
            facts = replace(facts, max_num_seqs=probed.seats)
    return Seen(
        health=Health.OUT if examined.trouble else Health.HEALTHY,
        trouble=examined.trouble,
        facts=None if examined.trouble else facts,
        kv_tokens=facts.load.kv_tokens if facts.load is not None else None,
    )


def _short_keep_alive(spec: PoolSpec, examined: Examined, seconds: float) -> Finding:
    return Finding(
        id="short-keep-alive",
        severity=Severity.WARNING,
        pool=spec.name,
        instance_id=examined.spec.id,
        sentence=f"{examined.spec.id} of pool {spec.name} closes a connection on which nothing was asked for "
        f"{seconds:.1f} s.",
        why="The gateway opens a new one after every such pause, which costs the next request its time.",
        fix="VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60 in the engine's environment.",
    )


def _about_probe(spec: PoolSpec, examined: Examined, probed: Probed) -> list[Finding]:
    subject = f"{examined.spec.id} of pool {spec.name}"
    if probed.policy is Policy.IGNORED:
        sentence = f"{subject} does not order by priority. {probed.detail}"
        return [priority_ignored(spec, examined.spec, sentence)]
    if probed.policy is Policy.REVERSED:
        said = examined.facts.sglang
        if said is not None and said.flags.low_values_first != examined.spec.sglang.low_values_first:
            return []  # what it says of itself is among the findings
        return [priority_reversed(spec, examined.spec, probed.detail)]
    if probed.policy is Policy.UNCLEAR:
        return [
            Finding(
                id="probe-unclear",
                severity=Severity.WARNING,
                pool=spec.name,
                instance_id=examined.spec.id,
                sentence=f"The probe of {subject} showed nothing. {probed.detail}",
                why="Whether it orders by priority stays unverified.",
                fix="Try again while the engine is quiet; start it with "
                f"{PRIORITY_FLAGS[examined.spec.kind]} in any case.",
            )
        ]
    return []
