"""Starts and stops real vLLM servers for the tests in this folder, each on one core of this machine."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL = "tiny"
CORES = os.sched_getaffinity(0)
"""What this process may use, before an engine takes one."""

START_SECONDS = 300.0
"""A start takes about 40 s on one core, and more than a minute when nothing is in the page cache yet."""

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """A running server and the settings that tests look at."""

    url: str
    max_num_seqs: int
    log: Path


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def a_core_for_the_engine() -> Iterator[int]:
    """The last core that this process may use; inside the block the process does not use it, if there is another.

    One core of its own keeps the engine's speed the same whatever gateway and clients do, and comparable between runs.
    """
    before = os.sched_getaffinity(0)
    core = max(CORES)
    os.sched_setaffinity(0, CORES - {core} or CORES)
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)


def run_on(core: int, command: list[str], *, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the command in a process group of its own, bound to a core."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    # Threads and processes that the engine makes later inherit this; nothing has been made yet.
    os.sched_setaffinity(process.pid, {core})
    return process


def wait_until_healthy(process: subprocess.Popen[bytes], *, url: str, log: Path) -> None:
    """Returns when /health answers 200; `RuntimeError` with the end of the log when it ends or takes too long."""
    deadline_at = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline_at:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with code {process.returncode}; the end of {log}:\n{log_tail(log)}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM was not healthy after {START_SECONDS:.0f} s; the end of {log}:\n{log_tail(log)}")


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and every process it made."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def vllm_server(
    *,
    python: Path,
    model: Path,
    log: Path,
    max_num_seqs: int,
    arguments: tuple[str, ...] = (),
    developer_mode: bool = False,
) -> Iterator[VllmServer]:
    """A server that is healthy inside the block and gone after it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # float32: with bfloat16 vLLM picks AMX kernels wherever the CPU shows the flag, and virtual machines that show it
    # without letting programs use it end the engine at its first request.
    # `vllm serve` looks up its version under the name vllm and fails with the CPU distribution; the module works.
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager"),
        *("--max-num-seqs", str(max_num_seqs), "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", *arguments),
    ]
    environment = ENVIRONMENT | ({"VLLM_SERVER_DEV_MODE": "1"} if developer_mode else {})
    with a_core_for_the_engine() as core:
        process = run_on(core, command, log=log, environment=environment)
        try:
            wait_until_healthy(process, url=url, log=log)
            yield VllmServer(url=url, max_num_seqs=max_num_seqs, log=log)
        finally:
            end_group(process)


async def gauge(client: httpx.AsyncClient, url: str, name: str) -> float:
    """The value of one metric of the engine, summed over its labels."""
    text = (await client.get(f"{url}/metrics")).text
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not values:
        raise LookupError(f"the engine at {url} has no metric {name}")
    return sum(values)


async def until(client: httpx.AsyncClient, url: str, name: str, value: float, *, within_seconds: float = 20.0) -> float:
    """Waits until the metric has the value; returns the seconds it took. `TimeoutError` says what it was instead."""
    begun_at = time.monotonic()
    while True:
        found = await gauge(client, url, name)
        elapsed_seconds = time.monotonic() - begun_at
        if found == value:
            return elapsed_seconds
        if elapsed_seconds > within_seconds:
            raise TimeoutError(f"{name} was {found:g} and not {value:g} after {within_seconds:g} s")
        await asyncio.sleep(0.02)
