"""`fairshare doctor`: do the engines do what the configuration needs?"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairshare.cli.check import ConfigOption

if TYPE_CHECKING:
    from fairshare.gateway.examination import Examination, Examined
    from fairshare.gateway.findings import Finding
    from fairshare.gateway.options import PoolSpec


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: fairshare doctor -c fairshare.yaml --probe")(doctor)


def doctor(
    config: ConfigOption = Path("fairshare.yaml"),
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also load each engine for a few seconds, to see by its behaviour whether it orders by priority, "
            "and how long it keeps an idle connection.",
        ),
    ] = False,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", help="Only this pool; may be given several times.", metavar="NAME")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write all of it as one JSON object instead of sentences.")
    ] = False,
) -> None:
    """Ask every engine of a configuration what it is, and say what is wrong: what, why it matters, what to do.

    Needs no running gateway. Ends with 1 if something breaks a promise or fails requests, and with 0 if not.
    """
    import asyncio
    from dataclasses import replace
    from functools import partial

    from fairshare import clock
    from fairshare.config import ConfigError, instances_in, load
    from fairshare.errors import OperatorError
    from fairshare.gateway.discovery.keeper import look_once
    from fairshare.gateway.discovery.opening import open_source
    from fairshare.gateway.engine_http import ask
    from fairshare.gateway.examination import Examination, examine
    from fairshare.gateway.findings import Severity
    from fairshare.gateway.host import examine_store, judge_host, look_at_host
    from fairshare.gateway.options import EngineKind

    try:
        settings = load(config, os.environ)
    except ConfigError as error:
        for problem in error.problems:
            print(problem)
        raise typer.Exit(1) from None
    pools = settings.gateway.pools
    unknown = sorted(set(pool or ()) - {spec.name for spec in pools})
    if unknown:
        known = ", ".join(spec.name for spec in pools)
        raise OperatorError(f"{config} has no pool {', '.join(unknown)}; it has {known}")

    async def examine_all(wanted: "list[PoolSpec]") -> bool:
        here = [*judge_host(look_at_host(), settings.gateway), *await examine_store(settings.gateway, wall=clock.wall)]
        sound = all(finding.severity is not Severity.ERROR for finding in here)
        examinations: list[Examination] = []
        for spec in wanted:
            # One pool after the other: two pools may share an engine, and a probe needs it alone.
            now, of_sources = await look_once(spec, partial(open_source, parse=instances_in))
            examination = await examine(now, ask=ask, with_probe=probe, clock=clock.monotonic)
            found = sorted([*of_sources, *examination.findings], key=lambda each: each.severity is not Severity.ERROR)
            examination = replace(examination, findings=found)
            sound = sound and examination.sound
            examinations.append(examination)
            if not as_json:
                _show(examination)
        if as_json:
            print(_json(here, examinations, sound))
            return sound
        if any(instance.kind is EngineKind.VLLM for spec in wanted for instance in spec.instances):
            print("not seen from outside; see how each vLLM is started:")
            for line in (UNSEEN,) if probe else (UNSEEN, UNSEEN_UNLESS_PROBED):
                print(f"  {line}")
        if here:
            print("this machine and the store:")
            _show_findings(here)
        return sound

    if not asyncio.run(examine_all([spec for spec in pools if not pool or spec.name in pool])):
        raise typer.Exit(1)


UNSEEN = "--shutdown-timeout 60: without it a vLLM that is told to stop cuts what runs, or leaves it open and silent"
"""How a vLLM should be started, where nothing that it answers or does says whether it was."""

UNSEEN_UNLESS_PROBED = (
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60 in its environment: its default closes idle connections after 5 s, so that the "
    "gateway opens new ones (--probe looks)"
)


def _show(examination: "Examination") -> None:
    spec = examination.spec
    count = len(spec.instances)
    print(f"pool {spec.name}: {spec.capacity} slots on {count} {'engine' if count == 1 else 'engines'}")
    for examined in examination.instances:
        print(f"  {examined.spec.url}: {_summary(examined)}")
    _show_findings(examination.findings)
    if not examination.findings:
        print("  nothing to say")


def _show_findings(findings: "Iterable[Finding]") -> None:
    for finding in findings:
        print(f"  {finding.severity} {finding.id}: {finding.sentence}")
        print(f"    why: {finding.why}")
        print(f"    fix: {finding.fix}")


def _json(here: "list[Finding]", examinations: "list[Examination]", sound: bool) -> str:
    import msgspec

    pools = [
        {
            "pool": examination.spec.name,
            "capacity": examination.spec.capacity,
            "instances": [
                {"url": examined.spec.url, "found": _summary(examined), "trouble": examined.trouble or None}
                for examined in examination.instances
            ],
            "findings": examination.findings,
        }
        for examination in examinations
    ]
    return msgspec.json.format(msgspec.json.encode({"sound": sound, "here": here, "pools": pools}), indent=1).decode()


def _summary(examined: "Examined") -> str:
    if examined.trouble:
        return examined.trouble
    from fairshare.gateway.scrape import ENGINE_NAMES

    facts, probed = examined.facts, examined.probed
    said = [f"{ENGINE_NAMES[examined.spec.kind]} {facts.version}" if facts.version is not None else "version unknown"]
    for model, context_tokens in (facts.context_tokens or {}).items():
        said.append(f"{model} ({context_tokens} tokens)" if context_tokens is not None else model)
    if facts.load is not None and facts.load.kv_tokens is not None:
        said.append(f"KV cache for {facts.load.kv_tokens} tokens")
    if facts.max_num_seqs is not None:
        said.append(f"{facts.max_num_seqs} seats")
    elif probed is not None and probed.seats is not None:
        said.append(f"ran {probed.seats} sequences at once")
    if probed is not None:
        said.append(f"policy probed: {probed.policy}")
    elif facts.policy is not None:
        said.append(f"policy {facts.policy}")
    else:
        said.append("policy unverified")
    return ", ".join(said)
