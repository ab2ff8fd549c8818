"""What an engine tells about itself."""

import asyncio
from typing import Any

import pytest

from fairshare.gateway.engine_http import Failure
from fairshare.gateway.kinds import SglangFlags, SglangReport
from fairshare.gateway.options import EngineKind, InstanceSpec
from fairshare.gateway.scrape import EngineFacts, EngineLoad, discover, parse_metrics, parse_sglang_metrics
from gateway.fake_engines import FakeEngine, FakeNetwork, metrics_text

SPEC = InstanceSpec(url="http://one")


def discovered(engine: FakeEngine, spec: InstanceSpec = SPEC) -> EngineFacts:
    return asyncio.run(discover(FakeNetwork(one=engine), spec))


def test_the_load_is_read_from_the_metrics() -> None:
    text = metrics_text(running=4, waiting=3, kv_usage=0.25, kv_tokens=2080)
    assert parse_metrics(text) == EngineLoad(
        running=4, waiting=3, kv_usage=0.25, preemptions_total=0, kv_tokens=2080, schedulers=1
    )


def test_several_schedulers_behind_one_port_are_summed() -> None:
    load = parse_metrics(metrics_text(running=4, waiting=2, kv_usage=0.5, kv_tokens=2048, schedulers=2))
    assert load == EngineLoad(running=4, waiting=2, kv_usage=0.5, preemptions_total=0, kv_tokens=2048, schedulers=2)


def test_kv_tokens_come_from_blocks_where_the_engine_does_not_say_them() -> None:
    text = 'vllm:num_requests_running 0.0\nvllm:cache_config_info{block_size="32",num_gpu_blocks="64"} 1.0\n'
    load = parse_metrics(text)
    assert load is not None
    assert load.kv_tokens == 2048


@pytest.mark.parametrize("value", ["NaN", "+Inf", "nonsense", "1e400"])
def test_a_number_that_is_none_counts_as_zero(value: str) -> None:
    load = parse_metrics(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2.0\n")
    assert load is not None
    assert (load.running, load.waiting) == (0, 2)


@pytest.mark.parametrize("text", ["", "process_cpu_seconds_total 3.0\n", "<html>not found</html>", "vllm:num_requests"])
def test_metrics_of_something_else_are_no_load(text: str) -> None:
    assert parse_metrics(text) is None


def test_everything_that_vllm_shows_in_developer_mode_is_found() -> None:
    facts = discovered(FakeEngine(server_info={"policy": "priority", "max_num_seqs": 64, "other": [1]}))
    assert facts == EngineFacts(version="0.32.0", context_tokens={"tiny": 2048}, policy="priority", max_num_seqs=64)
    assert facts.load is not None


def test_what_vllm_shows_by_default_leaves_policy_and_seats_open() -> None:
    assert discovered(FakeEngine()) == EngineFacts(version="0.32.0", context_tokens={"tiny": 2048})


def test_an_engine_that_wants_a_key_gets_it() -> None:
    engine = FakeEngine(api_key="secret")
    assert discovered(engine).models_problem == "it answers 401"
    assert discovered(engine, InstanceSpec(url="http://one", api_key="secret")).context_tokens == {"tiny": 2048}


@pytest.mark.parametrize("info", [{"max_num_seqs": "many"}, {"policy": 3}, []])
def test_answers_of_another_shape_are_not_believed(info: Any) -> None:
    facts = discovered(FakeEngine(server_info=info))
    assert (facts.policy, facts.max_num_seqs) == (None, None)
    assert facts.version == "0.32.0"


def test_an_engine_that_falls_silent_meanwhile_leaves_everything_open() -> None:
    facts = discovered(FakeEngine(silent=Failure.TOO_SLOW))
    assert facts == EngineFacts(models_problem="it is too slow")
    assert facts.load is None


# ---------------------------------------------------------------------- SGLang

SGLANG = InstanceSpec(url="http://one", kind=EngineKind.SGLANG)
SGLANG_METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 5.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",priority="0",tp_rank="0"} 2.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",priority="-22",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",priority="-22",tp_rank="0"} 4.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 0.25
sglang:max_total_num_tokens{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 4096.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 2.0
sglang:num_retracted_reqs{engine_type="unified",model_name="tiny",priority="",tp_rank="0"} 9.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="tiny",priority="0"} 10.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny",priority="-22"} 20.0
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="tiny",priority="0"} 7.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="tiny",priority="0"} 5.0
"""


def sglang_info(**more: Any) -> dict[str, Any]:
    return {
        "version": "0.5.23",
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": False,
        "priority_scheduling_preemption_threshold": 20,
        "disable_priority_preemption": False,
        "retraction_policy": "priority",
        "max_running_requests": 64,
        "internal_states": [{"effective_max_running_requests_per_dp": 48, "other": {"x": 1}}],
    } | more


def sglang_engine(**more: Any) -> FakeEngine:
    return FakeEngine(version=None, metrics=SGLANG_METRICS, sglang_info=sglang_info(**more))


def test_sglangs_load_is_the_whole_and_not_the_sum_of_the_whole_and_its_priorities() -> None:
    assert parse_sglang_metrics(SGLANG_METRICS) == EngineLoad(
        running=5,
        waiting=5,
        kv_usage=0.25,
        preemptions_total=2,
        kv_tokens=4096,
        schedulers=1,
        prompt_tokens_total=30,
        cached_tokens_total=7,
        completion_tokens_total=5,
    )


def test_sglangs_schedulers_are_told_by_their_dp_rank() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{dp_rank="{rank}"}} 2.0\nsglang:token_usage{{dp_rank="{rank}"}} 0.{rank}\n'
        for rank in (3, 4)
    )
    load = parse_sglang_metrics(text)
    assert load is not None
    assert (load.running, load.schedulers, load.kv_usage, load.kv_tokens) == (4, 2, 0.4, None)


def test_the_metrics_of_one_kind_say_nothing_of_the_other() -> None:
    assert parse_sglang_metrics(metrics_text()) is None
    assert parse_metrics(SGLANG_METRICS) is None


def test_sglangs_seats_and_flags_come_from_its_server_info() -> None:
    facts = discovered(sglang_engine(), SGLANG)
    assert facts == EngineFacts(
        version="0.5.23",
        context_tokens={"tiny": 2048},
        policy="priority",
        max_num_seqs=48,
        sglang=SglangReport(
            flags=SglangFlags(preemption_threshold=20), enabled=True, displaces=True, retraction_policy="priority"
        ),
    )
    assert facts.load is not None


@pytest.mark.parametrize(
    ("states", "seats"),
    [
        ([{"effective_max_running_requests_per_dp": 8}] * 2, 16),
        ([{"effective_max_running_requests_per_dp": 8}, {}], 64),
        ([], 64),
    ],
)
def test_sglangs_seats_are_those_of_all_its_schedulers_or_its_flag(states: Any, seats: int) -> None:
    assert discovered(sglang_engine(internal_states=states), SGLANG).max_num_seqs == seats


def test_an_sglang_that_does_not_order_by_priority_says_so() -> None:
    assert discovered(sglang_engine(enable_priority_scheduling=False), SGLANG).policy == "fcfs"


def test_a_vllm_that_is_configured_as_sglang_leaves_everything_open_but_its_models() -> None:
    facts = discovered(FakeEngine(server_info={"policy": "priority", "max_num_seqs": 64}), SGLANG)
    assert facts == EngineFacts(context_tokens={"tiny": 2048})
