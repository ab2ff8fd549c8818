"""Sockets that listen."""

import pytest

from fairshare.errors import OperatorError
from fairshare.gateway.listening import bound_to, listening_socket
from fairshare.gateway.options import Address


def test_port_0_becomes_the_port_that_the_operating_system_chose() -> None:
    with listening_socket(Address("127.0.0.1", 0), purpose="the admin port") as listening:
        assert bound_to(listening).host == "127.0.0.1"
        assert bound_to(listening).port > 0


def test_an_address_in_use_is_a_plain_sentence() -> None:
    with listening_socket(Address("127.0.0.1", 0), purpose="the admin port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=f"the admin port cannot listen on 127.0.0.1:{port} \\(address already"):
            listening_socket(Address("127.0.0.1", port), purpose="the admin port")


def test_a_name_that_does_not_resolve_is_a_plain_sentence() -> None:
    with pytest.raises(OperatorError, match="the admin port cannot listen on no such host:1"):
        listening_socket(Address("no such host", 1), purpose="the admin port")
