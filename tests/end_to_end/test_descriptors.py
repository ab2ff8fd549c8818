"""Descriptors run out: clients are told so, it is counted, and when there are some again all goes on."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from end_to_end.conftest import Written
from end_to_end.processes import GatewayProcess, eventually, started

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def ask(gateway: GatewayProcess, written: Written) -> httpx.Response:
    headers = {"authorization": f"Bearer {written.keys['search']}"}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=30)


def connect(gateway: GatewayProcess) -> socket.socket:
    url = urlsplit(gateway.url)
    assert url.hostname is not None
    assert url.port is not None
    return socket.create_connection((url.hostname, url.port), timeout=10)


@pytest.fixture
def small(written: Written) -> Iterator[GatewayProcess]:
    with started(lambda: GatewayProcess(written.config, open_files=120)) as gateway:
        yield gateway


def test_more_clients_than_there_are_files_for_are_told_so_and_counted(small: GatewayProcess, written: Written) -> None:
    assert ask(small, written).status_code == 200
    with ExitStack() as open_sockets:
        idle = [open_sockets.enter_context(connect(small)) for _ in range(60)]
        eventually(lambda: small.metric("fairshare_connections_refused_total") >= 30, "refusals are counted")
        told = idle[-1].recv(65536)
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b'"too_many_connections"' in told
        # Those who are connected are served, and the admin port answers.
        first = idle[0]
        first.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % key(written))
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
    eventually(lambda: small.metric("fairshare_connections ") <= 1, "the clients have left")
    assert ask(small, written).status_code == 200


def test_when_the_last_file_is_gone_requests_are_answered_503_and_no_engine_is_blamed(written: Written) -> None:
    with started(lambda: GatewayProcess(written.config)) as gateway, ExitStack() as open_sockets:
        clients = [open_sockets.enter_context(connect(gateway)) for _ in range(20)]
        eventually(lambda: gateway.metric("fairshare_connections ") >= 20, "they are connected")
        taken = {int(path.name) for path in Path(f"/proc/{gateway.pid}/fd").iterdir()}
        next_one = next(number for number in count() if number not in taken)
        hard = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (next_one, hard))
        body = json.dumps(CHAT).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % key(written)
        for client in clients:
            client.sendall(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answers = [client.recv(65536) for client in clients]
        # What health checks and this test's own questions give back serves one or the other.
        assert all(answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 200 ")) for answer in answers), answers
        assert any(b'"too_many_connections"' in answer for answer in answers)
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (hard, hard))
        eventually(lambda: ask(gateway, written).status_code == 200, "there are files again")
        assert gateway.metric("fairshare_descriptors_exhausted_total") >= 1
        assert gateway.metric("fairshare_instance_up") == 2
        assert gateway.metric("fairshare_in_flight") == 0


def test_when_no_file_is_left_to_accept_with_new_clients_are_closed_and_nobody_else_notices(written: Written) -> None:
    with started(lambda: GatewayProcess(written.config)) as gateway, ExitStack() as open_sockets:
        connected = open_sockets.enter_context(connect(gateway))
        models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % key(written)
        connected.sendall(models)
        assert connected.recv(65536).startswith(b"HTTP/1.1 200 ")
        taken = {int(path.name) for path in Path(f"/proc/{gateway.pid}/fd").iterdir()}
        next_one = next(number for number in count() if number not in taken)
        hard = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (next_one, hard))
        answers: list[bytes] = []
        for _ in range(30):
            client = open_sockets.enter_context(connect(gateway))
            try:
                client.sendall(models)
                answers.append(client.recv(65536))
            except ConnectionError:
                answers.append(b"")
        # What health checks give back lets one or another in; the rest is closed at once, and nobody is left waiting.
        assert all(not answer or answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")) for answer in answers), answers
        assert answers.count(b"") >= 15
        connected.sendall(models)
        assert connected.recv(65536).startswith(b"HTTP/1.1 200 ")
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (hard, hard))
        eventually(lambda: ask(gateway, written).status_code == 200, "there are files again")
        assert gateway.metric("fairshare_in_flight") == 0


def key(written: Written) -> bytes:
    return written.keys["search"].encode()
