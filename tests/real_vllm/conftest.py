"""Fixtures of the tests against a real vLLM: `make test-vllm` runs them, `make test` leaves them out.

The engine runs in a virtual environment of its own (`.venv-vllm`), the tests in the project's.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_vllm.vllm_server import VllmServer, vllm_server

REPOSITORY = Path(__file__).resolve().parents[2]
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"

SMALL_KV = ("--block-size", "32", "--num-gpu-blocks-override", "65")
"""64 usable blocks (one is the null block) of 32 tokens, 2048 tokens in all: preemption is easily provoked."""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real_vllm)
            # A server that starts within a test's set-up takes up to minutes.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    if not VLLM_PYTHON.exists():
        pytest.fail("there is no .venv-vllm; run `make test-vllm`, which makes it")
    return VLLM_PYTHON


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    generator = Path(__file__).with_name("tiny_model.py")
    subprocess.run([str(vllm_python), str(generator), str(directory)], check=True, timeout=120)
    return directory


@pytest.fixture(scope="session")
def priority_server(
    vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Four seats, KV for 2048 tokens, `--scheduling-policy priority`, and /server_info open."""
    with vllm_server(
        python=vllm_python,
        model=tiny_model,
        log=tmp_path_factory.mktemp("log") / "priority.log",
        max_num_seqs=4,
        arguments=("--scheduling-policy", "priority", *SMALL_KV),
        developer_mode=True,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def fcfs_server(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Four seats and vLLM's default policy; /server_info is closed, as it is by default."""
    with vllm_server(
        python=vllm_python,
        model=tiny_model,
        log=tmp_path_factory.mktemp("log") / "fcfs.log",
        max_num_seqs=4,
        arguments=("--num-gpu-blocks-override", "64"),
    ) as server:
        yield server
