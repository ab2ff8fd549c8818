"""Fixtures of the tests against a real vLLM: `make test-vllm` runs them, `make test` leaves them out.

The engine runs in a virtual environment of its own (`.venv-vllm`), the tests in the project's.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from real_vllm.burst import Burst, table
from real_vllm.vllm_server import VllmServer, vllm_server

REPOSITORY = Path(__file__).resolve().parents[2]
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"

PROOF = REPOSITORY / "docs" / "proof.md"
BURSTS = pytest.StashKey[list[Burst]]()

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


@pytest.fixture(scope="session")
def bursts(request: pytest.FixtureRequest) -> list[Burst]:
    """Every run of the burst; printed at the end, and written into docs/proof.md with `--write-proof`."""
    return request.config.stash[BURSTS]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-proof", action="store_true", help="write what was measured into docs/proof.md")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BURSTS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = sorted(config.stash[BURSTS], key=lambda burst: (burst.mode, burst.max_num_seqs))
    if not measured:
        return
    terminalreporter.section("the burst on a real vLLM")
    terminalreporter.write(table(measured))
    if config.getoption("--write-proof"):
        write_section(PROOF, "burst-on-vllm", machine_line() + "\n\n" + table(measured))


def machine_line() -> str:
    """What the figures were measured on, and when, in one line."""
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    today = datetime.now(UTC).date().isoformat()
    return (
        f"Measured {today} on {os.cpu_count()} cores of {processor}; the engine has one core, the gateway and the "
        f"clients share the others. Load average at the end, with other work: {os.getloadavg()[1]:.1f}."
    )


def write_section(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the page's two markers of that name."""
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end: {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}", encoding="utf-8")
