"""What adaptive capacity brings on the stand-in engine, in real time: the load of scenarios/kv-tight.yaml.

The cache holds ten average requests and C says 16. Two teams own half each and both flood, one of them with batch work.
`make bench-trim`; docs/howto/adaptive-capacity.md has the figures.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from end_to_end.processes import EngineProcess, GatewayProcess, keys_made, started

CLIENTS = 24
LENGTHS = 50, 150
ENGINE = "--max-num-seqs", "16", "--kv-tokens", "1504", "--max-model-len", "1000", "--step-ms", "10", "--token-us", "20"
CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: 16
    trim: {trim}
    half_life: 0
    shares: {{interactive: 1/2, batch: 1/2}}
    models: [tiny]
    instances: [{engine}]
teams:
  - name: interactive
    keys: [{interactive}]
  - name: batch
    keys: [{batch}]
store: none
"""


def measured(*, trim: bool, warm_up_seconds: float, seconds: float) -> dict[str, float]:
    """One run: the batch team's part of what was used, tokens made a second, preemptions, C at the end."""
    keys, entries = {}, {}
    for team in ("interactive", "batch"):
        keys[team], entries[team] = keys_made("--team", team, "--class", team)
    with tempfile.TemporaryDirectory() as folder, started(lambda: EngineProcess(*ENGINE)) as engine:
        config = Path(folder) / "fairshare.yaml"
        config.write_text(CONFIG.format(trim=str(trim).lower(), engine=engine.url, **entries))
        with started(lambda: GatewayProcess(config)) as gateway:
            return asyncio.run(_flooded(gateway, engine, keys, warm_up_seconds, seconds))


async def _flooded(
    gateway: GatewayProcess, engine: EngineProcess, keys: dict[str, str], warm_up_seconds: float, seconds: float
) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        clients = [
            asyncio.create_task(_client(http, gateway.url, key, random.Random(number)))
            for key in keys.values()
            for number in range(CLIENTS)
        ]
        await asyncio.sleep(warm_up_seconds)
        before, begun_at = await asyncio.to_thread(_seen, gateway, engine), time.monotonic()
        await asyncio.sleep(seconds)
        after, took_seconds = await asyncio.to_thread(_seen, gateway, engine), time.monotonic() - begun_at
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    failed = [each for each in ended if isinstance(each, Exception)]
    if failed:
        raise SystemExit(f"{len(failed)} clients failed, the first with: {failed[0]!r}")
    used = {name: after[name] - before[name] for name in after}
    return {
        "batch": used["batch"] / (used["batch"] + used["interactive"]),
        "tokens_per_second": used["tokens"] / took_seconds,
        "preemptions": used["preemptions"],
        "capacity": after["capacity"],
    }


async def _client(http: httpx.AsyncClient, url: str, key: str, rng: random.Random) -> None:
    while True:
        output = rng.randint(*LENGTHS)
        body = {
            "model": "tiny",
            "prompt": rng.choices(range(300, 1900), k=rng.randint(*LENGTHS)),
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass


def _seen(gateway: GatewayProcess, engine: EngineProcess) -> dict[str, float]:
    pool: dict[str, Any] = gateway.pool()
    return {
        **{team["team"]: float(team["usage"]) for team in pool["teams"]},
        "capacity": float(pool["capacity"]),
        "tokens": engine.gauge("vllm:generation_tokens_total"),
        "preemptions": engine.gauge("vllm:num_preemptions_total"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds of load before it is measured")
    parser.add_argument("--seconds", type=float, default=80.0, help="seconds that are measured")
    options = parser.parse_args()
    print("| | batch within share gets | tokens/s | preemptions | C at the end |\n| --- | ---: | ---: | ---: | ---: |")
    for trim in (False, True):
        found = measured(trim=trim, warm_up_seconds=options.warm_up, seconds=options.seconds)
        print(
            f"| `trim: {str(trim).lower()}` | {found['batch']:.1%} | {found['tokens_per_second']:.0f} | "
            f"{found['preemptions']:.0f} | {found['capacity']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
