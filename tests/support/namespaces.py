"""Machines of their own on one network: Linux network namespaces, joined by a bridge that may swallow what they say.

Nothing of it has a name: it is gone with the process that made it. File systems are shared, so a Unix socket (the
store's) reaches into every machine.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HUB_ADDRESS = "10.77.0.254"
"""Of the machine to which the others are joined, where the test itself is."""

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Machine:
    """A namespace with an address on the bridge, and a loopback of its own."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number}"
        self._port = f"port{number}"
        self._namespace = _new_namespace()
        there = f"/proc/{os.getpid()}/fd/{self._namespace}"
        _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", there)
        _ip("link", "set", self._port, "master", "bridge0", "up")
        with self.inside():
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{self.address}/24", "dev", "eth0")
            _ip("link", "set", "eth0", "up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets, threads and processes that are made in this block are this machine's, and stay so."""
        before = _current_namespace()
        _enter(self._namespace)
        try:
            yield
        finally:
            _enter(before)
            os.close(before)

    def is_isolated(self, isolated: bool) -> None:
        """Isolated machines hear nothing of each other, only of the hub; nobody tells them (no reset, no error)."""
        _ip("link", "set", self._port, "type", "bridge_slave", "isolated", "on" if isolated else "off")

    def close(self) -> None:
        os.close(self._namespace)


class Network:
    """Several machines, and the hub, into which the thread that makes the network goes until it is closed."""

    def __init__(self, count: int) -> None:
        _can_be_made()
        self._before = _current_namespace()
        _check(_LIBC.unshare(_CLONE_NEWNET))
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge0", "type", "bridge")
        _ip("address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge0")
        _ip("link", "set", "bridge0", "up")
        self.machines = [Machine(number) for number in range(1, count + 1)]

    def cut(self) -> None:
        """What the machines say to each other vanishes silently from now on; the hub hears and is heard."""
        for machine in self.machines:
            machine.is_isolated(True)

    def mend(self) -> None:
        for machine in self.machines:
            machine.is_isolated(False)

    def close(self) -> None:
        _enter(self._before)
        os.close(self._before)
        for machine in self.machines:
            machine.close()


def _can_be_made() -> None:
    """Leave the test out and say so where there may be no namespaces; where something is only missing, CI is red."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        sentence = "there is no ip (iproute2); `make system-deps` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
    # In a process of its own: the refusal leaves nothing behind. A container may have no right to it, even as root.
    made = "ip link add bridge0 type bridge && ip link add one type veth peer name two"
    refused = subprocess.run(["unshare", "-n", "sh", "-c", made], capture_output=True, text=True, timeout=20)
    if refused.returncode != 0:
        pytest.skip(f"this machine allows no network namespaces, bridges or veth pairs ({refused.stderr.strip()})")


def _new_namespace() -> int:
    before = _current_namespace()
    try:
        _check(_LIBC.unshare(_CLONE_NEWNET))
        return _current_namespace()
    finally:
        _enter(before)
        os.close(before)


def _current_namespace() -> int:
    """A descriptor of the namespace of this thread, which keeps it alive."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    _check(_LIBC.setns(namespace, _CLONE_NEWNET))


def _check(code: int) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
