"""TLS on the data port and to engines."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from fairshare.core.decisions import Instance
from fairshare.gateway.engine_http import EngineSilent, Failure, ask
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.tls import engine_context, expires_at, server_context, show
from gateway.hostile_engine import HostileEngine, answer, sends
from gateway.rig import STREAM, Client, Rig, request_bytes, run
from support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serial_of(client: Client) -> str:
    return client.writer.get_extra_info("peercert")["serialNumber"]


def test_a_new_certificate_is_shown_to_new_clients_and_disturbs_nobody_who_is_connected(authority: Authority) -> None:
    async def main() -> None:
        context = server_context(authority.issue())
        async with Rig.started(tls=context) as rig:
            first = await rig.client(authority.client_context())
            await first.send(request_bytes(body=STREAM))
            assert (await first.read()).body.endswith(b"data: [DONE]\n\n")

            show(context, authority.issue())  # other files under the same names
            second = await rig.client(authority.client_context())
            assert serial_of(first) != serial_of(second)
            for client in (first, second):
                await client.send(request_bytes())
                assert (await client.read()).status == 200

    run(main)


def test_a_client_without_tls_gets_nothing(authority: Authority) -> None:
    async def main() -> None:
        context = server_context(authority.issue())
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        async with Rig.started(tls=context) as rig:
            plain = await rig.client()
            await plain.send(request_bytes())
            assert b"HTTP/1.1 200" not in await plain.reader.read()
            assert rig.engine.asked == []

    run(main)


def test_over_tls_too_an_answer_that_ends_the_connection_arrives_whole(authority: Authority) -> None:
    async def main() -> None:
        async with Rig.started(tls=server_context(authority.issue())) as rig:
            client = await rig.client(authority.client_context())
            head = request_bytes(headers={"transfer-encoding": "chunked"}, key="fs-wrong", body=b"")
            await client.send(head + b"5\r\nhello\r\n" + b"0\r\n\r\n")
            assert (await client.read()).code == "invalid_api_key"
            broken = await rig.client(authority.client_context())
            await broken.send(b"NOT HTTP\r\n\r\n")
            assert (await broken.read()).code == "invalid_request"
            assert await broken.at_end()

    run(main)


def put(rig: Rig, engine: HostileEngine, ca_file: Path | None) -> InstanceSpec:
    """The rig's only instance is this engine."""
    rig.driver.instance_removed("chat", rig.engine.url)
    spec = InstanceSpec(url=engine.url, ca_file=ca_file)
    rig.driver.instance_changed("chat", spec, Instance(id=engine.url, part_slots=8))
    return spec


def test_an_engine_is_reached_over_tls_by_requests_and_by_health_checks(authority: Authority) -> None:
    async def main() -> None:
        engine = await HostileEngine(tls=server_context(authority.issue())).start()
        async with Rig.started() as rig:
            spec = put(rig, engine, authority.ca_file)
            for _ in range(3):
                assert (await rig.ask()).status == 200
            assert engine.connections == 1
            engine.script = sends(answer(b"{}"))
            seen = await ask("GET", f"{spec.url}/health", ca_file=spec.ca_file, timeout_seconds=10)
            assert seen.status == 200
            rig.driver.instance_removed("chat", engine.url)
            await engine.stop()

    run(main)


@pytest.mark.parametrize("why", ["signed by another", "for another name", "expired"])
def test_an_engine_whose_certificate_is_not_good_gets_no_request(
    authority: Authority, tmp_path: Path, why: str
) -> None:
    host, days = ("127.0.0.2" if why == "for another name" else "127.0.0.1"), -1.0 if why == "expired" else None
    (tmp_path / "other").mkdir()
    ca_file = Authority(tmp_path / "other").ca_file if why == "signed by another" else authority.ca_file

    async def main() -> None:
        engine = await HostileEngine(tls=server_context(authority.issue(host, days=days))).start()
        async with Rig.started() as rig:
            spec = put(rig, engine, ca_file)
            reply = await rig.ask()
            assert (reply.status, reply.code) == (502, "upstream_unreachable")
            assert "certificate" in reply.json["error"]["message"]
            with pytest.raises(EngineSilent, match="TLS failed") as silent:
                await ask("GET", f"{spec.url}/health", ca_file=spec.ca_file, timeout_seconds=10)
            assert silent.value.failure is Failure.UNREACHABLE
            assert engine.asked == []
            rig.driver.instance_removed("chat", engine.url)
            await engine.stop()
            await asyncio.sleep(0)

    run(main)


def test_without_a_file_engines_are_verified_against_the_systems_roots() -> None:
    context = engine_context(None)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert engine_context(None) is context


def test_the_expiry_of_a_certificate_is_read(authority: Authority) -> None:
    in_ten_days = expires_at(authority.issue(days=10))
    assert in_ten_days == pytest.approx(time.time() + 10 * 86400, abs=120)
    assert expires_at(authority.issue(days=-1)) is None


def test_a_key_that_needs_a_password_is_an_error_and_no_question(authority: Authority) -> None:
    spec = authority.issue()
    key = load_pem_private_key(spec.key.read_bytes(), password=None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    spec.key.write_bytes(locked)
    with pytest.raises(ssl.SSLError):
        server_context(spec)
