"""Sockets that listen, bound before anything else is started, so that a taken port is found at once."""

import asyncio
import socket
from pathlib import Path

from fairshare.errors import OperatorError
from fairshare.gateway.options import Address


def listening_socket(address: Address, *, purpose: str, shared: bool = False) -> socket.socket:
    """A bound socket that listens. Raises `OperatorError` if the address cannot be used.

    `shared`: other such sockets of this user may listen there too; each connection goes to one of them.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(place[:2], family=family, backlog=1024, reuse_port=shared)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OperatorError(
            f"{purpose} cannot listen on {address} ({reason}); stop what uses it or configure another address"
        ) from None


def private_socket(path: Path) -> socket.socket:
    """A Unix socket that listens, in a folder that only its owner can enter."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    return listening


def bound_to(listening: socket.socket) -> Address:
    """Where a socket listens; tells the port that the operating system chose."""
    host, port = listening.getsockname()[:2]
    return Address(host, port)


def served_at(server: asyncio.Server) -> Address:
    """Where a server that was just started listens."""
    return bound_to(server.sockets[0])
