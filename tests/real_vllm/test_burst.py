"""The reservation under a burst, through the gateway, on a real vLLM."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.processes import GatewayProcess, keys_made, started
from real_vllm.burst import CAPACITY, CONFIG, PROMISED_SHARE, Burst, run_burst
from real_vllm.vllm_server import VllmServer, vllm_server

RUNS = (1, 2, 3)


@pytest.fixture(scope="module", params=[CAPACITY, 2 * CAPACITY], ids=["seats=C", "seats=2C"])
def engine(
    request: pytest.FixtureRequest, vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    with vllm_server(
        python=vllm_python,
        model=tiny_model,
        log=tmp_path_factory.mktemp("log") / "burst.log",
        max_num_seqs=request.param,
        arguments=("--scheduling-policy", "priority"),
    ) as server:
        yield server


def burst(engine: VllmServer, mode: str, seed: int, directory: Path) -> Burst:
    """One run on a gateway that knows nothing of the runs before it."""
    a_key, a = keys_made("--team", "a")
    b_key, b = keys_made("--team", "b")
    config = directory / "fairshare.yaml"
    config.write_text(
        CONFIG.format(capacity=CAPACITY, mode=mode, engine=engine.url, max_num_seqs=engine.max_num_seqs, a=a, b=b)
    )
    with started(lambda: GatewayProcess(config)) as gateway:
        result = asyncio.run(
            run_burst(
                url=gateway.url,
                a_key=a_key,
                b_key=b_key,
                mode=mode,
                max_num_seqs=engine.max_num_seqs,
                seed=seed,
            )
        )
        result.recalls = gateway.pool()["recalls"]
        assert gateway.pool()["in_flight"] == 0
        assert gateway.pool()["held"] == 0
    return result


@pytest.mark.parametrize("run", RUNS)
def test_with_hold_the_second_team_gets_its_half_in_every_window_after_the_first(
    engine: VllmServer, run: int, tmp_path: Path, bursts: list[Burst]
) -> None:
    result = burst(engine, "hold", run, tmp_path)
    bursts.append(result)
    # What A borrowed before B came has begun and is not taken back: it runs out within the first window.
    fair = result.b_shares[1:]
    assert len(fair) >= 2, "the backlog must last for some windows to show anything"
    assert min(fair) >= PROMISED_SHARE


@pytest.mark.parametrize("run", RUNS)
def test_with_pass_the_second_team_starves_while_the_first_has_a_backlog(
    engine: VllmServer, run: int, tmp_path: Path, bursts: list[Burst]
) -> None:
    result = burst(engine, "pass", run, tmp_path)
    bursts.append(result)
    # A fast engine with headroom is through A's backlog within two windows: then the first must show it.
    assert min(result.b_shares[1:] or result.b_shares) < PROMISED_SHARE / 2
