"""Names are looked up at a real DNS server, in this process, over UDP and TCP."""

import asyncio
import struct
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
from dns.asyncresolver import Resolver

from fairshare.gateway.discovery.dns import EMPTY_SECONDS, LONGEST_SECONDS, DnsFollower
from fairshare.gateway.options import DnsSource, InstanceSpec, SrvSource
from gateway.discovery.hearing import Heard, following, run

ENGINE = InstanceSpec(url="", max_num_seqs=32, api_key="secret")


class Server(asyncio.DatagramProtocol):
    """Answers from a table: (name, kind) to a time to live and records; a name that is not there does not exist."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self.truncates = False
        self.asked: list[tuple[str, str, str]] = []

    def answer(self, wire: bytes, way: str) -> bytes:
        question = dns.message.from_wire(wire)
        asked = question.question[0]
        name, kind = asked.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(asked.rdtype)
        self.asked.append((name, kind, way))
        answer = dns.message.make_response(question)
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif not any(known == name for known, _ in self.table):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif self.truncates and way == "udp":
            answer.flags |= dns.flags.TC
        elif (name, kind) in self.table:
            ttl, records = self.table[name, kind]
            if records:
                answer.answer.append(dns.rrset.from_text(asked.name, ttl, "IN", kind, *records))
        return answer.to_wire()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(self.answer(data, "udp"), addr)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        answer = self.answer(await reader.readexactly(length), "tcp")
        writer.write(struct.pack("!H", len(answer)) + answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving():
    server = Server()
    tcp = await asyncio.start_server(server.serve_tcp, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", port))

    def resolver() -> Resolver:
        made = Resolver(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = port
        return made

    try:
        yield server, resolver
    finally:
        udp.close()
        tcp.close()


def by_name(resolver: Any) -> Any:
    source = DnsSource(url="http://engines.test:8000/vllm", template=ENGINE)
    return lambda heard: DnsFollower(source, resolver=resolver, sleep=heard.sleep)


def test_every_address_is_an_instance_and_the_name_is_asked_again_when_its_time_to_live_ends() -> None:
    async def scenario() -> None:
        async with serving() as (server, resolver), following(by_name(resolver)) as heard:
            server.table["engines.test", "A"] = (7, ["127.0.0.2", "127.0.0.1"])
            await heard.slept(1)
            server.table["engines.test", "A"] = (0, ["127.0.0.3"])
            heard.wake()
            await heard.slept(2)
            server.table["engines.test", "A"] = (86400, ["127.0.0.3"])
            heard.wake()
            await heard.slept(3)
            assert [sorted(said) for said in heard.said] == [
                ["http://127.0.0.1:8000/vllm", "http://127.0.0.2:8000/vllm"],
                ["http://127.0.0.3:8000/vllm"],
                ["http://127.0.0.3:8000/vllm"],
            ]
            assert heard.sleeps == [7.0, 1.0, LONGEST_SECONDS]

    run(scenario)


def test_an_engine_with_addresses_of_both_families_counts_once() -> None:
    async def scenario() -> None:
        async with serving() as (server, resolver), following(by_name(resolver)) as heard:
            server.table["engines.test", "A"] = (5, ["127.0.0.1"])
            server.table["engines.test", "AAAA"] = (5, ["::1"])
            await heard.slept(1)
            server.table["engines.test", "A"] = (5, [])
            heard.wake()
            await heard.slept(2)
            assert heard.said == [["http://127.0.0.1:8000/vllm"], ["http://[::1]:8000/vllm"]]

    run(scenario)


def test_a_name_that_does_not_exist_is_an_empty_answer_and_a_server_that_fails_is_a_failure() -> None:
    async def scenario() -> None:
        async with serving() as (server, resolver), following(by_name(resolver)) as heard:
            await heard.slept(1)
            server.rcode = dns.rcode.SERVFAIL
            for count in (2, 3):
                heard.wake()
                await heard.slept(count)
            assert heard.said[0] == []
            assert all("SERVFAIL" in str(said) for said in heard.said[1:])
            assert heard.sleeps == [EMPTY_SECONDS, 1.0, 2.0]
            server.rcode = None
            server.table["engines.test", "A"] = (5, ["127.0.0.1"])
            heard.wake()
            await heard.slept(4)
            assert heard.said[3] == ["http://127.0.0.1:8000/vllm"]

    run(scenario)


def test_a_list_too_long_for_one_datagram_is_asked_for_over_tcp() -> None:
    async def scenario() -> None:
        async with serving() as (server, resolver), following(by_name(resolver)) as heard:
            server.truncates = True
            server.table["engines.test", "A"] = (
                5,
                [f"127.0.{high}.{low}" for high in range(4) for low in range(1, 255)],
            )
            await heard.slept(1)
            assert len(heard.said[0]) == 4 * 254
            assert [way for _, _, way in server.asked] == ["udp", "tcp"]

    run(scenario)


def test_the_targets_of_the_lowest_priority_of_an_srv_name_are_instances() -> None:
    async def scenario() -> None:
        source = SrvSource(name="_vllm._tcp.engines.test", scheme="https", template=ENGINE)

        def follower(heard: Heard) -> DnsFollower:
            return DnsFollower(source, resolver=resolver, sleep=heard.sleep)

        async with serving() as (server, resolver), following(follower) as heard:
            server.table[source.name, "SRV"] = (
                9,
                ["10 5 8001 one.test.", "10 0 8002 two.test.", "20 0 8003 standby.test."],
            )
            await heard.slept(1)
            server.table[source.name, "SRV"] = (9, ["0 0 0 ."])
            heard.wake()
            await heard.slept(2)
            assert [sorted(said) for said in heard.said] == [["https://one.test:8001", "https://two.test:8002"], []]
            assert heard.sleeps == [9.0, 9.0]

    run(scenario)
