"""The peer link between honest peers and hostile ones, on loopback. Time is the test's."""

import asyncio
import hmac
from pathlib import Path

import msgspec
import pytest

from fairshare.errors import OperatorError
from fairshare.replicas.link import (
    HANDSHAKE_SECONDS,
    KEEP_ALIVE_SECONDS,
    MAGIC,
    MAX_FRAME_BYTES,
    SILENCE_SECONDS,
    Hello,
    PeerLink,
)
from fairshare.replicas.peers import LONGEST_BACKOFF_SECONDS, MAX_STRANGERS, PeerAddress
from replicas.linked import Side, run, two


class Stranger:
    """A peer that writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @staticmethod
    async def of(side: Side) -> "Stranger":
        return Stranger(*await asyncio.open_connection(side.address.host, side.address.port))

    async def frame(self) -> bytes:
        return await self.reader.readexactly(int.from_bytes(await self.reader.readexactly(4)))

    def write(self, content: bytes) -> None:
        self.writer.write(len(content).to_bytes(4) + content)

    async def is_cut(self) -> bool:
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.writer.close()
        return True


def hello(**other: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(Hello(MAGIC, 1, 1, "stranger", b"n" * 32), **other))


# --- honest peers -------------------------------------------------------------------------------------------------


def test_what_is_sent_in_one_turn_of_the_loop_travels_in_one_frame_and_in_order() -> None:
    async def main() -> None:
        async with two() as (one, other):
            for number in range(100):
                other.ear.links[0].send(str(number))
            await one.ear.until(lambda: len(one.ear.lines) == 100)
            assert one.ear.frames == [[str(number) for number in range(100)]]
            one.ear.links[0].send("back")
            await other.ear.until(lambda: other.ear.lines == ["back"])
            assert (one.ear.links[0].peer, other.ear.links[0].peer) == ("two", "one")

    run(main)


def test_a_unix_socket_is_for_its_owner_only_and_gone_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "peer.sock"
        path.write_text("left over by a replica that was killed")
        listens, dials = Side("one"), Side("two")
        assert await listens.listen(PeerAddress.parse(f"unix:{path}")) == PeerAddress("", 0, str(path))
        assert path.stat().st_mode & 0o777 == 0o600
        dials.port.dial(listens.address)
        await listens.ear.until(lambda: bool(listens.ear.links))
        await dials.port.close()
        await listens.port.close()
        assert not path.exists()

    run(main)


def test_messages_larger_than_a_frame_travel_in_several() -> None:
    async def main() -> None:
        async with two() as (one, other):
            long = ["x" * (MAX_FRAME_BYTES // 4)] * 9
            for line in long:
                other.ear.links[0].send(line)
            await one.ear.until(lambda: len(one.ear.lines) == 9)
            assert one.ear.lines == long
            assert len(one.ear.frames) > 1

    run(main)


def test_a_message_that_fits_into_no_frame_ends_the_link_and_says_why() -> None:
    async def main() -> None:
        async with two() as (one, other):
            (link,) = other.ear.links
            link.send("x" * MAX_FRAME_BYTES)
            await other.ear.until(lambda: bool(other.ear.gone))
            assert other.ear.gone[0].endswith("bytes does not fit into a frame")
            await one.ear.until(lambda: bool(one.ear.gone))
            assert one.ear.lines == []

    run(main)


def test_two_versions_speak_the_newest_that_both_know() -> None:
    async def main() -> None:
        async with two(Side(versions=(1, 2)), Side(versions=(2, 3))) as (one, other):
            assert one.ear.links[0].version == other.ear.links[0].version == 2

    run(main)


def test_versions_that_have_nothing_in_common_do_not_connect_and_it_is_said_why() -> None:
    async def main() -> None:
        old, new = Side(versions=(1,)), Side(versions=(3, 4))
        await old.listen()
        new.port.dial(old.address)
        await new.ear.until(lambda: "versions 1 to 1" in new.port.failures.get(old.address, ""))
        assert not old.ear.links
        await new.port.close()
        await old.port.close()

    run(main)


def test_a_link_with_nothing_to_say_is_kept_alive_and_a_silent_peer_is_given_up() -> None:
    async def main() -> None:
        async with two() as (one, other):
            for _ in range(10):
                for side in (one, other):
                    side.clock.now += KEEP_ALIVE_SECONDS
                    side.port.sweep()
                one.ear.links[0].send("heard")
                await other.ear.until(lambda: bool(other.ear.frames))
                other.ear.frames.clear()
            assert one.ear.links
            assert other.ear.links
            one.clock.now += SILENCE_SECONDS + 0.1
            one.port.sweep()
            assert not one.ear.links
            assert "silent for" in one.ear.gone[0]

    run(main)


def test_a_lost_link_is_made_again_and_a_message_for_a_lost_one_goes_nowhere() -> None:
    async def main() -> None:
        async with two() as (one, other):
            lost = other.ear.links[0]
            lost.close("the test cuts it")
            lost.send("nowhere")
            await other.ear.until(lambda: bool(other.ear.links))
            other.ear.links[0].send("again")
            await one.ear.until(lambda: one.ear.lines == ["again"])
            assert other.ear.gone == ["the test cuts it"]

    run(main)


def test_a_peer_that_is_not_there_is_dialled_with_longer_and_longer_pauses() -> None:
    async def main() -> None:
        side, gone = Side(), Side("gone")
        await gone.listen()
        await gone.port.close()
        side.port.dial(gone.address)
        await side.ear.until(lambda: len(side.pauses) >= 8)
        assert side.pauses[:3] == pytest.approx([0.0375, 0.075, 0.15])
        assert side.pauses[7] == LONGEST_BACKOFF_SECONDS * 0.75
        assert "refused" in side.port.failures[gone.address]
        side.port.hang_up(gone.address)
        assert not side.port.failures
        await side.port.close()

    run(main)


def test_an_address_that_is_taken_is_said_so() -> None:
    async def main() -> None:
        one, other = Side(), Side()
        await one.listen()
        with pytest.raises(OperatorError, match=r"replicas\.listen: cannot listen on 127"):
            await other.listen(one.address)
        await one.port.close()

    run(main)


def test_an_address_is_parsed_as_it_is_shown() -> None:
    for text in ("10.0.0.1:7000", "[::1]:7000", "gateway-2:7000", "unix:/run/a/b.sock"):
        assert str(PeerAddress.parse(text)) == text
    with pytest.raises(ValueError, match="host:port"):
        PeerAddress.parse("nowhere")


# --- hostile peers ------------------------------------------------------------------------------------------------


def test_nobody_gets_in_with_another_secret() -> None:
    async def main() -> None:
        one, other = Side(), Side(secret=b"t" * 32)
        await one.listen()
        other.port.dial(one.address)
        await other.ear.until(lambda: len(other.pauses) >= 2)
        assert not one.ear.links
        assert not other.ear.links
        await other.port.close()
        await one.port.close()

    run(main)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x10\x00" + b"x" * 4096,
        b"\x00\x00\x00\x04\x93\xa1x\x01",
        len(hello(magic="other")).to_bytes(4) + hello(magic="other"),
        len(hello(nonce=b"")).to_bytes(4) + hello(nonce=b""),
    ],
)
def test_what_is_no_greeting_ends_the_connection(content: bytes) -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger = await Stranger.of(one)
        stranger.writer.write(content)
        assert await stranger.is_cut()
        assert not one.ear.links
        await one.port.close()

    run(main)


def test_a_proof_cannot_be_shown_back_to_who_made_it() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger = await Stranger.of(one)
        stranger.write(await stranger.frame())  # its own hello
        stranger.write(await stranger.frame())  # its own proof
        assert await stranger.is_cut()
        assert not one.ear.links
        await one.port.close()

    run(main)


def test_nothing_is_read_that_comes_before_or_right_behind_a_wrong_proof() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger = await Stranger.of(one)
        stranger.write(hello())
        for _ in range(3):
            stranger.write(msgspec.msgpack.encode(["a message"]).rjust(32, b"\0"))
        assert await stranger.is_cut()
        assert not one.ear.frames
        await one.port.close()

    run(main)


async def proved(one: Side) -> tuple[Stranger, bytes]:
    """A peer that knows the secret; and its key for frames."""
    stranger = await Stranger.of(one)
    mine = hello()
    stranger.write(mine)
    theirs = await stranger.frame()

    def digest(purpose: str) -> bytes:
        content = msgspec.msgpack.encode([MAGIC, purpose, "dials", mine, theirs])
        return hmac.digest(b"s" * 32, content, "sha256")

    stranger.write(digest("proof"))
    await one.ear.until(lambda: bool(one.ear.links))
    return stranger, digest("frames")


def tagged(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + payload, "sha256")[:16] + payload


def test_a_frame_that_was_altered_or_comes_again_ends_the_link() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        payload = msgspec.msgpack.encode(["hello"])
        for fault in ("altered", "again"):
            stranger, key = await proved(one)
            stranger.write(tagged(key, 0, payload))
            await one.ear.until(lambda: one.ear.lines == ["hello"])
            second = tagged(key, 0, payload) if fault == "again" else tagged(key, 1, payload)[:-1] + b"x"
            stranger.write(second)
            assert await stranger.is_cut()
            await one.ear.until(lambda: not one.ear.links)
            assert one.ear.gone.pop() == "a frame was altered on its way"
            assert one.ear.lines == ["hello"]
            one.ear.frames.clear()
        await one.port.close()

    run(main)


def test_answers_to_what_was_read_at_once_travel_in_one_frame_without_another_turn_of_the_loop() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger, key = await proved(one)
        (link,) = one.ear.links
        await stranger.frame()  # its proof

        def answered(link: PeerLink[str], messages: list[str]) -> None:
            link.send(f"{messages[0]} to you")

        one.ear.received = answered
        asked = [tagged(key, number, msgspec.msgpack.encode([word])) for number, word in enumerate(("hello", "bye"))]
        link.data_received(b"".join(len(each).to_bytes(4) + each for each in asked))
        unsent = tuple(link._unsent)  # pyright: ignore[reportPrivateUsage]
        answers = msgspec.msgpack.decode((await stranger.frame())[16:])
        link.close("that was all")
        assert await stranger.is_cut()
        await one.port.close()
        assert answers == ["hello to you", "bye to you"]
        assert not unsent

    run(main)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x81", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1])])
def test_a_proved_peer_that_sends_no_messages_is_cut(payload: bytes) -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger, key = await proved(one)
        stranger.write(tagged(key, 0, payload))
        assert await stranger.is_cut()
        assert "cannot be read" in one.ear.gone[0]
        await one.port.close()

    run(main)


def test_a_frame_that_says_it_is_huge_is_not_waited_for() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger, _ = await proved(one)
        stranger.writer.write((MAX_FRAME_BYTES + 1).to_bytes(4))
        assert await stranger.is_cut()
        assert "too long" in one.ear.gone[0]
        await one.port.close()

    run(main)


def test_who_says_nothing_is_cut_in_time() -> None:
    async def main() -> None:
        one = Side()
        await one.listen()
        stranger = await Stranger.of(one)
        await stranger.frame()
        one.clock.now += HANDSHAKE_SECONDS + 0.1
        one.port.sweep()
        assert await stranger.is_cut()
        await one.port.close()

    run(main)


def test_strangers_are_few_and_keep_no_peer_out_nor_from_being_dialled() -> None:
    async def main() -> None:
        one, peer, dialled = Side("one"), Side("peer"), Side("dialled")
        await one.listen()
        waiting = [await Stranger.of(one) for _ in range(MAX_STRANGERS)]
        for stranger in waiting:
            await stranger.frame()
        one.port.dial(await dialled.listen())
        peer.port.dial(one.address)
        await one.ear.until(lambda: len(one.ear.links) == 2)
        assert await waiting[0].is_cut()
        assert not one.ear.gone
        for stranger in waiting:
            stranger.writer.close()
        for side in (peer, one, dialled):
            await side.port.close()

    run(main)


def test_a_peer_that_never_reads_is_cut_off_before_its_frames_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairshare.replicas.link.MAX_UNSENT_BYTES", 1 << 20)

    async def main() -> None:
        one = Side()
        await one.listen()
        stranger, _ = await proved(one)
        stranger.writer.transport.pause_reading()  # pyright: ignore
        link = one.ear.links[0]
        for _ in range(200):
            link.send("x" * (1 << 17))
            await asyncio.sleep(0)
        assert one.ear.gone == ["it does not read what it is sent"]
        stranger.writer.close()
        await one.port.close()

    run(main)


def test_a_fault_of_ours_in_handling_a_message_ends_the_link_and_not_the_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with two() as (one, other):
            other.ear.links[0].send("fail")
            await one.ear.until(lambda: bool(one.ear.gone))
            await other.ear.until(lambda: bool(other.ear.gone) and bool(other.ear.links))
            other.ear.links[0].send("works")
            await one.ear.until(lambda: one.ear.lines[-1] == "works")

    run(main)
    assert "could not be handled" in caplog.text


def test_a_peer_that_is_reached_again_is_no_longer_told_of_as_unreachable() -> None:
    async def main() -> None:
        listens, dials = Side("one"), Side("two")
        address = await listens.listen()
        await listens.port.close()
        dials.port.dial(address)
        await dials.ear.until(lambda: "refused" in dials.port.failures.get(address, ""))
        again = Side("one again")
        await again.listen(address)
        await dials.ear.until(lambda: bool(dials.ear.links))
        assert dials.port.failures == {}
        again.ear.links[0].close("a fault")
        await dials.ear.until(lambda: bool(dials.port.failures))
        await dials.port.close()
        await again.port.close()

    run(main)
