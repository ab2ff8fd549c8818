"""Adaptive capacity in real processes: a cache that is too small for C, a flood, and the time after it."""

from pathlib import Path

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import load, site


def test_c_falls_while_requests_wait_inside_the_engine_and_comes_back_when_none_do(tmp_path: Path) -> None:
    # Room for two or three of the requests that C lets go at once.
    options = ("--max-num-seqs", "16", "--step-ms", "5", "--kv-tokens", "256", "--max-model-len", "200")
    with started(lambda: EngineProcess(*options)) as engine:
        here = site(tmp_path, engine)
        here.config.write_text(here.config.read_text().replace("capacity: 8\n", "capacity: 8\n    trim: true\n"))
        with started(lambda: GatewayProcess(here.config, module="end_to_end.looks_often")) as gateway:
            with load([gateway.url], here.keys["search"], clients=12, tokens=120) as flood:
                eventually(lambda: gateway.pool()["capacity"] < 8, "C falls")
                shown = gateway.pool()
            assert not flood.failures
            (instance,) = shown["instances"]
            assert instance["trimmed"] == 8 - shown["capacity"]
            assert gateway.team("ads")["reserved"] == shown["capacity"] // 2 or shown["capacity"] % 2
            assert "capacity-trimmed" in [finding["id"] for finding in shown["finding_details"]]
            eventually(lambda: gateway.pool()["capacity"] == 8, "C is back")
            assert gateway.team("ads")["reserved"] == 4
