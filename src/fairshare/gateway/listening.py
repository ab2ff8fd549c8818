"""Sockets that listen, bound before anything else is started, so that a taken port is found at once."""

import socket

from fairshare.errors import OperatorError
from fairshare.gateway.options import Address


def listening_socket(address: Address, *, purpose: str) -> socket.socket:
    """A bound socket that listens. Raises `OperatorError` if the address cannot be used."""
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(place[:2], family=family, backlog=1024)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OperatorError(
            f"{purpose} cannot listen on {address} ({reason}); stop what uses it or configure another address"
        ) from None


def bound_to(listening: socket.socket) -> Address:
    """Where a socket listens; tells the port that the operating system chose."""
    host, port = listening.getsockname()[:2]
    return Address(host, port)
