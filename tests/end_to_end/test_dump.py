"""The decision state of real processes, by signal and by the admin port."""

import json
import signal
import tempfile
from pathlib import Path

import httpx
import pytest

from end_to_end.processes import EngineProcess, GatewayProcess, eventually, started
from end_to_end.sharing import site


def test_usr1_has_every_worker_write_its_state_and_the_admin_port_shows_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A short name: the workers' sockets are in this folder, too.
    with tempfile.TemporaryDirectory(prefix="fs-") as dumps, started(lambda: EngineProcess()) as engine:
        here = site(tmp_path, engine)
        monkeypatch.setenv("TMPDIR", dumps)
        with started(lambda: GatewayProcess(here.config, workers=2)) as gateway:
            by_worker = httpx.get(f"{gateway.admin_url}/api/v1/dump").json()
            assert len(by_worker) == 2
            roles = {dump["pools"][0]["replication"]["role"] for dump in by_worker.values()}
            assert "owner" in roles
            gateway.signal(signal.SIGUSR1)
            said = "The decision state was written."
            eventually(lambda: sum(said in line for line in list(gateway.err)) == 2, "two dumps")
            files = [json.loads(line)["file"] for line in list(gateway.err) if said in line]
            assert {str(Path(file).parent) for file in files} == {dumps}
            assert {json.loads(Path(file).read_text())["process"] for file in files} == {
                dump["process"] for dump in by_worker.values()
            }
