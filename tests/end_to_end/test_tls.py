"""The gateway as a process, with TLS to its clients and to its engine; certificates renewed by SIGHUP."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from end_to_end.processes import GatewayProcess, keys_made, started
from support.certificates import Authority

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
tls: {{certificate: server.pem, key: server.key}}
pools:
  - name: chat
    capacity: 8
    shares: {{search: 1}}
    models: [tiny]
    instances: [http://127.0.0.1:1]
teams:
  - name: search
    keys: [{key}]
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def gateway(authority: Authority) -> Iterator[tuple[GatewayProcess, str]]:
    key, entry = keys_made("--team", "search")
    authority.issue()
    config = authority.folder / "fairshare.yaml"
    config.write_text(CONFIG.format(key=entry))
    with started(lambda: GatewayProcess(config)) as process:
        yield process, key


def test_sighup_shows_the_new_certificate_and_a_broken_one_leaves_the_old_in_force(
    gateway: tuple[GatewayProcess, str], authority: Authority
) -> None:
    process, key = gateway
    url = urlsplit(process.url)
    assert url.hostname is not None
    assert url.port is not None
    shown = (url.hostname, url.port)
    with httpx.Client(verify=authority.client_context(), headers={"authorization": f"Bearer {key}"}) as client:
        models = f"https://{url.netloc}/v1/models"
        assert client.get(models).status_code == 200
        first = ssl.get_server_certificate(shown, ca_certs=str(authority.ca_file))
        authority.issue()
        process.reload()
        second = ssl.get_server_certificate(shown, ca_certs=str(authority.ca_file))
        assert second != first
        (authority.folder / "server.key").write_text("no key")
        process.reload()
        assert any("was not reloaded" in line for line in process.err)
        assert ssl.get_server_certificate(shown, ca_certs=str(authority.ca_file)) == second
        assert client.get(models).status_code == 200  # on the connection from before
