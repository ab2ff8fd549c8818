"""The real LiteLLM proxy with the callback in it, before a stand-in engine; processes on loopback."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from end_to_end.processes import EngineProcess

ROOT = Path(__file__).parents[2]
START_SECONDS = 150.0
"""LiteLLM imports for half a minute on a busy machine."""
LITELLM = ROOT / ".venv-litellm" / "bin" / "litellm"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """`litellm --config ...`; what it logs is in `log`."""

    def __init__(self, config: str, engine: EngineProcess, folder: Path) -> None:
        settings: dict[str, Any] = yaml.safe_load(config.replace("http://127.0.0.1:9001", engine.url))
        settings.setdefault("general_settings", {})["custom_auth"] = "site_auth.user_api_key_auth"
        (folder / "litellm.yaml").write_text(json.dumps(settings))
        (folder / "site_auth.py").write_text((Path(__file__).parent / "site_auth.py").read_text())
        self.log = folder / "litellm.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(LITELLM), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ
                | {
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "NO_PROXY": "*",
                    "PYTHONUNBUFFERED": "1",
                    "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}",
                },
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not self._answers():
                assert time.monotonic() < deadline, f"LiteLLM does not answer; its log:\n{self.log.read_text()}"
                time.sleep(0.2)
        except BaseException:
            self.end()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health/liveliness").status_code == 200
        except httpx.TransportError:
            return False

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def litellm(config: str, engine: EngineProcess, folder: Path) -> Iterator[Proxy]:
    proxy = Proxy(config, engine, folder)
    try:
        yield proxy
    finally:
        proxy.end()
