"""`fairshare doctor --probe` on running engines: the stand-in must show it what a real vLLM shows."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from end_to_end.processes import EngineProcess, eventually, keys_made, started
from fairshare.cli import program
from fairshare.gateway import engine_http
from fairshare.gateway.options import InstanceSpec

CONFIG = """
pools:
  - name: chat
    capacity: 4
    shares: {{search: 1}}
    models: {{small: tiny}}
    instances: [{engine}]
teams:
  - name: search
    keys: [{search}]
"""


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Result]:
    """What it says of an engine, whose idle connections it watches for one second, not for seven."""
    monkeypatch.setattr(engine_http, "KEPT_SECONDS", 1.0)
    _, search = keys_made("--team", "search")

    def examined(engine: str) -> Result:
        config = tmp_path / "fairshare.yaml"
        config.write_text(CONFIG.format(engine=engine, search=search))
        return CliRunner().invoke(program(), ["doctor", "-c", str(config), "--probe"])

    return examined


@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ("priority", 0, "policy probed: priority"),
        ("fcfs", 1, "error priority-ignored"),
    ],
)
def test_the_probe_tells_the_policies_apart_and_leaves_nothing_behind(
    policy: str, code: int, said: str, doctor: Callable[[str], Result]
) -> None:
    with started(lambda: EngineProcess("--max-num-seqs", "8", "--step-ms", "4", "--policy", policy)) as engine:
        result = doctor(engine.url)
        assert said in result.stdout, result.output
        assert "short-keep-alive" not in result.stdout
        assert "ran 8 sequences at once" in result.stdout or "8 seats" in result.stdout
        assert result.exit_code == code
        eventually(lambda: engine.is_idle, "the engine has nothing left of the probe")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--enable-priority-scheduling",), 0, "policy probed: priority"),
        ((), 1, "--enable-priority-scheduling"),
        (("--enable-priority-scheduling", "--schedule-low-priority-values-first"), 1, "policy probed: reversed"),
    ],
)
def test_the_doctor_sees_what_an_sglang_does_and_names_its_flags(
    flags: tuple[str, ...], code: int, said: str, doctor: Callable[[str], Result]
) -> None:
    with started(lambda: EngineProcess("--kind", "sglang", "--max-num-seqs", "8", "--step-ms", "4", *flags)) as engine:
        result = doctor(f"{{url: {engine.url}, kind: sglang}}")
        assert said in result.stdout, result.output
        assert "8 seats" in result.stdout
        assert result.exit_code == code


def test_how_long_an_engine_keeps_an_idle_connection_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seen() -> float | None:
        closed = asyncio.Event()

        async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await asyncio.sleep(0.2)
            writer.close()
            with suppress(ConnectionError):  # nobody waited for that
                await writer.wait_closed()
            closed.set()

        server = await asyncio.start_server(closing, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            kept = await engine_http.kept_open(InstanceSpec(url=f"http://127.0.0.1:{port}"))
            await closed.wait()
            return kept

    kept = asyncio.run(seen())
    assert kept is not None
    assert 0.1 < kept < 5.0
    monkeypatch.setattr(engine_http, "KEPT_SECONDS", 0.1)
    assert asyncio.run(seen()) is None
