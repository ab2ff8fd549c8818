"""What an operator is told, and what not: each rule of findings at its edge."""

import ast
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from fairshare.core.decisions import Mode
from fairshare.gateway.findings import Finding, Health, Seen, Severity, find
from fairshare.gateway.kinds import SglangFlags, SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec, PoolSpec
from fairshare.gateway.scrape import EngineFacts, EngineLoad

ONE = "http://one"


def pool(*, capacity: int = 8, mode: Mode = Mode.HOLD, instances: int = 1, **instance: Any) -> PoolSpec:
    names = ["one", "two", "three"][:instances]
    return PoolSpec(
        name="chat",
        capacity=capacity,
        half_life_seconds=0.0,
        mode=mode,
        shares={"a": Fraction(1)},
        models={"client-name": "tiny"},
        instances=tuple(InstanceSpec(url=f"http://{name}", **instance) for name in names),
    )


def facts(**more: Any) -> EngineFacts:
    known: dict[str, Any] = {
        "version": "0.32.0",
        "context_tokens": {"tiny": 2048},
        "policy": "priority",
        "max_num_seqs": 16,
    }
    return EngineFacts(**known | more)


def found(spec: PoolSpec, seen: Mapping[str, Seen]) -> list[Finding]:
    return find(spec, seen, capacity_slots=spec.capacity, parts={}, scrape_window="30 s")


def ids(seen: Seen, **of_pool: Any) -> list[str]:
    return [finding.id for finding in found(pool(**of_pool), {ONE: seen})]


def healthy(**more: Any) -> Seen:
    seen: dict[str, Any] = {"health": Health.HEALTHY, "facts": facts(), "kv_tokens": 1 << 20}
    return Seen(**seen | more)


def test_a_pool_in_order_is_not_talked_about() -> None:
    assert ids(healthy()) == []


@pytest.mark.parametrize(
    ("seen", "of_pool", "expected"),
    [
        (healthy(facts=facts(policy="fcfs")), {}, ["priority-ignored"]),
        (healthy(facts=facts(policy=None)), {}, ["policy-unverified"]),
        (healthy(facts=facts(policy=None), overtaken_never=33), {}, ["priority-ignored"]),
        (healthy(facts=facts(policy="fcfs")), {"mode": Mode.OBSERVE}, []),
        (healthy(facts=facts(policy=None)), {"mode": Mode.OBSERVE}, []),
        (healthy(facts=facts(version="0.24.0")), {}, ["priority-header-unknown"]),
        (healthy(facts=facts(version="0.28.0")), {}, []),
        (healthy(facts=facts(version="1.2.0.dev7")), {}, []),
        (healthy(facts=facts(version="nightly")), {}, []),
        (healthy(facts=facts(max_num_seqs=7)), {}, ["capacity-above-seats"]),
        (healthy(facts=facts(max_num_seqs=8)), {}, ["little-headroom"]),
        (healthy(facts=facts(max_num_seqs=15)), {}, ["little-headroom"]),
        (healthy(facts=facts(max_num_seqs=16)), {}, []),
        (healthy(facts=facts(max_num_seqs=8)), {"mode": Mode.PASS}, []),
        (healthy(facts=facts(max_num_seqs=None)), {}, []),
        (healthy(facts=facts(max_num_seqs=None)), {"max_num_seqs": 7}, ["capacity-above-seats"]),
        (healthy(), {"max_num_seqs": 32}, ["seats-differ"]),
        (healthy(facts=facts(context_tokens={"other": 2048})), {}, ["model-not-served"]),
        (healthy(facts=facts(context_tokens={})), {}, ["model-not-served"]),
        (healthy(facts=facts(context_tokens=None, models_problem="it answers 401")), {}, ["models-unknown"]),
        (healthy(kv_tokens=8 * 512 - 1), {}, ["capacity-above-kv"]),
        (healthy(kv_tokens=8 * 512), {}, []),
        (healthy(waiting_throughout=1), {}, ["engine-queue"]),
        (healthy(waiting_throughout=0), {}, []),
        (healthy(waiting_throughout=1), {"mode": Mode.PASS}, []),
        (healthy(kv_usage_throughout=0.95), {}, ["kv-full"]),
        (healthy(kv_usage_throughout=0.94), {}, []),
        (Seen(health=Health.OUT, trouble="it is gone"), {}, ["instance-out", "pool-without-instance"]),
        (healthy(health=Health.KEPT, trouble="it is slow"), {}, ["last-instance-kept"]),
        (Seen(health=Health.UNKNOWN), {}, []),
    ],
)
def test_each_thing_is_found_at_its_edge_and_not_before(
    seen: Seen, of_pool: dict[str, Any], expected: list[str]
) -> None:
    assert ids(seen, **of_pool) == expected


def test_one_engine_of_several_that_is_out_does_not_leave_the_pool_without_one() -> None:
    spec = pool(instances=2)
    seen = {ONE: Seen(health=Health.OUT, trouble="it is gone"), "http://two": healthy()}
    assert [finding.id for finding in found(spec, seen)] == ["instance-out"]


def test_differences_between_the_engines_of_a_pool_are_found() -> None:
    spec = pool(instances=2)
    seen = {
        ONE: healthy(),
        "http://two": healthy(facts=facts(version="0.33.0", context_tokens={"tiny": 4096})),
    }
    assert [finding.id for finding in found(spec, seen)] == ["context-lengths-differ", "versions-differ"]


def test_the_gravest_come_first() -> None:
    seen = healthy(facts=facts(policy="fcfs"), kv_usage_throughout=1.0)
    assert [finding.severity for finding in found(pool(), {ONE: seen})] == [Severity.ERROR, Severity.WARNING]


def test_a_part_that_an_engine_has_now_counts_and_not_the_one_it_would_have() -> None:
    spec = pool(instances=2)
    seen = {ONE: healthy(facts=facts(max_num_seqs=7)), "http://two": Seen(health=Health.OUT, trouble="it is gone")}
    with_parts = find(spec, seen, capacity_slots=4, parts={ONE: 4}, scrape_window="30 s")
    assert "little-headroom" in [finding.id for finding in with_parts]
    assert "capacity-above-seats" not in [finding.id for finding in with_parts]


def test_every_sentence_names_its_subject_and_says_what_to_do() -> None:
    spec = pool(instances=2, max_num_seqs=32)
    bad = facts(version="0.24.0", policy="fcfs", max_num_seqs=3, context_tokens={"other": 1})
    seen = {
        ONE: healthy(facts=bad, kv_tokens=100, waiting_throughout=2, kv_usage_throughout=0.99),
        "http://two": Seen(health=Health.OUT, trouble="the connection is refused"),
    }
    findings = found(spec, seen)
    assert len(findings) == 9
    assert len({finding.key for finding in findings}) == 9
    for finding in findings:
        assert "chat" in finding.sentence
        assert finding.instance_id is None or finding.instance_id in finding.sentence
        assert all(text.endswith(".") for text in (finding.sentence, finding.why, finding.fix))


LOAD = EngineLoad(running=0, waiting=0, kv_usage=0.0, preemptions_total=0, kv_tokens=1 << 20, schedulers=1)


def sglang(
    low_values_first: bool = False,
    threshold: int = 20,
    enabled: bool = True,
    displaces: bool = True,
    retraction: str = "priority",
    **more: Any,
) -> Seen:
    report = SglangReport(
        flags=SglangFlags(low_values_first=low_values_first, preemption_threshold=threshold),
        enabled=enabled,
        displaces=displaces,
        retraction_policy=retraction,
    )
    policy = "priority" if enabled else "fcfs"
    return healthy(facts=facts(**{"version": "0.5.23", "policy": policy, "sglang": report, "load": LOAD} | more))


@pytest.mark.parametrize(
    ("seen", "expected", "flag"),
    [
        (sglang(), [], ""),
        (sglang(enabled=False), ["priority-ignored"], "--enable-priority-scheduling"),
        (sglang(low_values_first=True), ["priority-reversed"], "without --schedule-low-priority-values-first"),
        (sglang(threshold=30), ["threshold-differs"], "--priority-scheduling-preemption-threshold 20"),
        (sglang(threshold=10), ["threshold-differs", "priorities-merged"], "preemption_threshold: 10"),
        (sglang(displaces=False), ["displacing-off"], "without that flag"),
        (sglang(retraction="length"), ["retraction-by-length"], "--retraction-policy priority"),
        (sglang(load=None), ["load-unknown"], "--enable-metrics"),
        (sglang(max_num_seqs=8), ["little-headroom"], "--max-running-requests to 16"),
        (sglang(max_num_seqs=4), ["capacity-above-seats"], "--max-running-requests to 16"),
    ],
)
def test_each_flag_of_sglang_that_is_wrong_is_named(seen: Seen, expected: list[str], flag: str) -> None:
    spec = pool(kind=EngineKind.SGLANG, sglang=SglangFlags(preemption_threshold=20))
    said = found(spec, {ONE: seen})
    assert [finding.id for finding in said] == expected
    assert not said or flag in said[0].fix
    assert all(finding.why.endswith(".") and finding.fix.endswith(".") for finding in said)


def test_in_observe_the_flags_of_sglang_do_not_matter() -> None:
    spec = pool(kind=EngineKind.SGLANG, mode=Mode.OBSERVE)
    assert found(spec, {ONE: sglang(low_values_first=True, displaces=False)}) == []


def test_every_finding_has_its_row_in_the_reference_and_no_row_is_left_over() -> None:
    root = Path(__file__).resolve().parents[2]
    said: set[str] = set()
    for module in ("findings", "examination", "discovery/fleet"):
        tree = ast.parse((root / "src" / "fairshare" / "gateway" / f"{module}.py").read_text(encoding="utf-8"))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("error", "warning"):
                first = call.args[0]
                assert isinstance(first, ast.Constant)
                said.add(first.value)
            for keyword in call.keywords:
                if keyword.arg == "id" and isinstance(keyword.value, ast.Constant):
                    said.add(keyword.value.value)
    page = (root / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z-]+)` \| (?:error|warning) \|", page, re.MULTILINE))
    # What is not about engines is said elsewhere: of the machine and the store, and of the replicas.
    others = "".join((root / "src/fairshare/gateway" / name).read_text("utf-8") for name in ("host.py", "status.py"))
    assert said == {row for row in rows if f'"{row}"' not in others}
