"""Promise P6 in the gateway: whatever happens in whatever order, every request ends exactly once.

No socket and no waiting: transports are stand-ins, and what a real loop would do later (closing, connecting) happens
when the test says so, so that every order can come up.
"""

import asyncio
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairshare.core.decisions import Decision, HoldOptions, Instance, Mode, Refused, Request
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.gateway.data_port import ClientConnection, DataPort
from fairshare.gateway.driver import PoolDriver
from fairshare.gateway.options import InstanceSpec, PoolSpec, Timeouts
from fairshare.gateway.upstream import InstanceConnections, Listener, Loss, UpstreamConnection
from fairshare.wire.problems import SHUTTING_DOWN
from gateway.hostile_engine import DONE, END, STREAM_HEAD, answer, chunk, completion, event, usage_event
from gateway.rig import FakeClock, Kept, directory, request_bytes

ENGINES = ("http://a:1", "http://b:1")


class StandInTransport:
    """Remembers what was written; closing is delivered by the test."""

    def __init__(self, world: "World", protocol: asyncio.Protocol) -> None:
        self.world = world
        self.protocol = protocol
        self.written = b""
        self.closing = False
        self.reading = True
        protocol.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        assert not self.gone, "wrote to a connection that is gone"
        self.written += data

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.world.closing.append(self)

    abort = close

    def write_eof(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.closing

    gone = False

    def lose(self, exc: Exception | None = None) -> None:
        if not self.gone:
            self.gone = self.closing = True
            self.protocol.connection_lost(exc)

    def set_write_buffer_limits(self, **_: int) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class StandInConnect:
    """An attempt to connect."""

    def __init__(self, world: "World", home: InstanceConnections, listener: Listener) -> None:
        self.world, self.home, self.listener = world, home, listener
        world.connects.append(self)

    def cancel(self) -> None:
        if self in self.world.connects:
            self.world.connects.remove(self)

    def finish(self, ok: bool) -> None:
        self.world.connects.remove(self)
        if ok:
            connection = UpstreamConnection(self.home)
            self.world.upstreams.append(StandInTransport(self.world, connection))
            self.listener.connected(connection)
        else:
            self.listener.lost(Loss.UNREACHABLE, anything_came=False, reused=False, detail="refused")


class CountingQueue:
    """A real dispatch queue, and how often each request was submitted and ended."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.submissions: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.queue, name)
        if not callable(method):
            return method

        def call(*args: Any) -> Any:
            result = method(*args)
            if isinstance(result, list):
                self._note(result)
            return result

        return call

    def _note(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Refused):
                self.ends[decision.request_id] += 1

    def submitted(self, request: Request) -> list[Decision]:
        self.submissions[request.id] += 1
        decisions = self.queue.submitted(request)
        self._note(decisions)
        return decisions

    def released(self, request_id: str, consumed: float) -> list[Decision]:
        self.ends[request_id] += 1
        decisions = self.queue.released(request_id, consumed)
        self._note(decisions)
        return decisions

    def cancelled(self, request_id: str) -> list[Decision]:
        self.ends[request_id] += 1
        decisions = self.queue.cancelled(request_id)
        self._note(decisions)
        return decisions


class World:
    """Clients, engines and time."""

    def __init__(self, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.kept = Kept()
        self.closing: list[StandInTransport] = []
        self.connects: list[StandInConnect] = []
        self.upstreams: list[StandInTransport] = []
        self.clients: list[StandInTransport] = []
        self.sent = 0
        monkeypatch.setattr(
            InstanceConnections, "connect", lambda home, listener, timeout: StandInConnect(self, home, listener)
        )
        shares = {"red": Fraction(1, 2), "blue": Fraction(1, 2)}
        self.pool = Pool("chat", 2, shares, 0.0, self.clock)
        hold = HoldOptions(max_held=5, longest_wait_seconds=200.0, recall_waste=1.0)
        self.queue = CountingQueue(make_queue(self.pool, mode, options=hold))
        self.driver = PoolDriver(recorder=self.kept, clock=self.clock, wall=lambda: 0.0)
        timeouts = Timeouts(first_byte_seconds=30.0, idle_seconds=30.0, longest_request_seconds=500.0)
        self.driver.add_pool(
            PoolSpec(
                name="chat",
                capacity=2,
                half_life_seconds=0.0,
                shares=shares,
                models={"tiny": "tiny"},
                instances=(),
                timeouts=timeouts,
            ),
            self.queue,  # type: ignore[arg-type]
        )
        self.port = DataPort(driver=self.driver, directory=directory())
        for url in ENGINES:
            self.instance(url, accepting=True)

    def instance(self, url: str, *, accepting: bool) -> None:
        self.driver.instance_changed(
            "chat", InstanceSpec(url=url), Instance(id=url, part_slots=1, seats=1, accepting=accepting)
        )

    def step(self, draw: Any) -> None:
        """One thing happens."""
        busy = [t for t in self.upstreams if not t.closing and t.protocol._listener is not None]  # type: ignore[attr-defined]
        open_clients = [t for t in self.clients if not t.closing]
        happenings: list[tuple[str, Any]] = [("arrive", None), ("time", None), ("instance", None), ("cut", None)]
        happenings += [("more", client) for client in open_clients[:3]]
        happenings += [("leave", client) for client in open_clients[:3]]
        happenings += [("block", client) for client in open_clients[:2]]
        happenings += [("engine", upstream) for upstream in busy] * 3
        happenings += [("lost", upstream) for upstream in self.upstreams[-3:] if not upstream.gone]
        happenings += [("connect", connect) for connect in self.connects] * 3
        happenings += [("close", transport) for transport in self.closing] * 2
        what, who = draw(st.sampled_from(happenings))
        match what:
            case "arrive":
                client = StandInTransport(self, ClientConnection(self.port))
                self.clients.append(client)
                self.ask(client, draw)
            case "more":
                self.ask(who, draw)
            case "leave":
                who.lose()
            case "block":
                who.protocol.pause_writing()
                if draw(st.booleans()):
                    who.protocol.resume_writing()
            case "engine":
                self.engine_says(who, draw)
            case "lost":
                who.lose(draw(st.sampled_from([None, ConnectionResetError()])))
            case "connect":
                who.finish(draw(st.integers(0, 3)) > 0)
            case "close":
                self.closing.remove(who)
                who.lose()
            case "time":
                self.clock.now += draw(st.sampled_from([0.06, 1.0, 31.0, 250.0, 501.0]))
                self.port.sweep()
            case "instance":
                url = draw(st.sampled_from(ENGINES))
                match draw(st.integers(0, 3)):
                    case 0:
                        self.driver.instance_removed("chat", url)
                    case number:
                        self.instance(url, accepting=number > 1)
            case _:
                self.driver.cut_instance("chat", draw(st.sampled_from(ENGINES)), silent_seconds=0.5)

    def ask(self, client: StandInTransport, draw: Any) -> None:
        body = {"model": "tiny", "messages": [], "stream": draw(st.booleans())}
        client.protocol.data_received(request_bytes(body=body, key=draw(st.sampled_from(["fs-red", "fs-blue"]))))

    def engine_says(self, upstream: StandInTransport, draw: Any) -> None:
        heads = [answer(completion()), STREAM_HEAD, STREAM_HEAD + chunk(event("a")), b"HTTP", b"garbage\r\n\r\n"]
        heads.append(answer(b"{}", status="500 Oh"))
        bodies = [chunk(event("b")), chunk(usage_event()) + chunk(DONE) + END, b"zz"]
        begun = upstream.protocol._head_bytes > 0  # type: ignore[attr-defined]
        upstream.protocol.data_received(draw(st.sampled_from(bodies if begun else heads)))

    def end(self, draw: Any) -> None:
        """The gateway shuts down; then everything that is closing is closed."""
        self.driver.fail_all(SHUTTING_DOWN, "bye")
        while self.closing:
            self.closing.pop().lose()
        for client in self.clients:
            client.lose()
        for upstream in self.upstreams:
            upstream.lose()
        self.clock.now += 1.0
        self.driver.sweep()

    def check(self) -> None:
        assert self.driver.open_requests == 0
        assert self.driver.counters.open_requests == 0
        assert self.driver.counters.open_connections == 0
        assert self.driver.counters.upstream_connections == 0
        assert not self.connects
        assert self.pool.live_slots == 0
        stat = self.queue.snapshot()
        assert (stat.held, stat.held_bytes) == (0, 0)
        assert [(i.in_flight_slots, i.aborting_slots) for i in stat.instances] == [(0, 0)] * len(stat.instances)
        assert set(self.queue.submissions.values()) <= {1}
        assert self.queue.ends == self.queue.submissions
        ended = Counter(record.id for record in self.kept.records if record.pool)
        assert ended == self.queue.submissions
        charged = sum(record.cost_units for record in self.kept.records)
        assert sum(self.pool.usage()[0].values()) == pytest.approx(charged)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), mode=st.sampled_from([Mode.HOLD, Mode.PASS]))
def test_every_request_ends_exactly_once_whatever_happens(data: st.DataObject, mode: Mode) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            world = World(mode, monkeypatch)
            for _ in range(data.draw(st.integers(5, 40))):
                world.step(data.draw)
            world.end(data.draw)
            world.check()

    asyncio.run(main())
