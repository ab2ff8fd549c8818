"""Connections to engines, at the moments that an engine cannot be told to choose."""

import asyncio
from typing import cast

import pytest

from fairshare.gateway import upstream
from fairshare.gateway.options import InstanceSpec
from fairshare.gateway.ports import CoarseTime, Counters
from fairshare.gateway.upstream import InstanceConnections, Listener, UpstreamConnection
from gateway.hostile_engine import HostileEngine
from gateway.rig import run

pytestmark = pytest.mark.skipif(not upstream.__file__.endswith(".py"), reason="compiled classes have no subclasses")


class GivesUp(InstanceConnections):
    """Whoever asked for a connection leaves in the moment in which it is made."""

    attempt: asyncio.Task[None] | None = None

    def opened(self, connection: UpstreamConnection) -> None:
        super().opened(connection)
        assert self.attempt is not None
        self.attempt.cancel()


def test_a_connection_that_is_made_in_the_moment_in_which_it_is_given_up_is_closed_and_forgotten() -> None:
    async def main() -> None:
        engine, counters = await HostileEngine().start(), Counters()
        connections = GivesUp(InstanceSpec(url=engine.url), counters=counters, coarse=CoarseTime(0.0))
        connections.attempt = connections.connect(cast("Listener", None), 5.0)
        await asyncio.wait([connections.attempt])
        assert counters.upstream_connects_total == 1
        assert counters.upstream_connections == 0
        connections.close()
        await connections.wait_until_closed()
        await engine.stop()

    run(main)
