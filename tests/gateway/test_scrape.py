"""What an engine tells about itself."""

import asyncio
from typing import Any

import pytest

from fairshare.gateway.engine_http import Failure
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.scrape import EngineFacts, EngineLoad, discover, parse_metrics
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
