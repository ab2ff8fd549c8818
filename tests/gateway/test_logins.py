"""Failed logins: bounded per source, without any word about which keys there were."""

import re

from fairshare.gateway.identity import Identity, StaticDirectory, hash_key
from fairshare.gateway.logins import BURST, MAX_ADDRESSES, SECONDS_PER_TRY, FailedLogins, source_of
from gateway.rig import KEYS, Reply, Rig, run


def test_a_source_may_fail_so_often_at_once_and_then_once_in_a_while() -> None:
    logins = FailedLogins()
    assert [logins.failed("192.0.2.1", 100.0) for _ in range(BURST)] == [None] * BURST
    assert logins.failed("192.0.2.1", 100.0) == SECONDS_PER_TRY
    assert logins.failed("192.0.2.1", 101.0) == SECONDS_PER_TRY - 1.0
    assert logins.failed("192.0.2.1", 100.0 + SECONDS_PER_TRY) is None
    assert logins.failed("192.0.2.1", 100.0 + SECONDS_PER_TRY) == SECONDS_PER_TRY


def test_trying_on_does_not_lock_a_source_out_for_longer() -> None:
    logins = FailedLogins()
    for _ in range(1000):
        logins.failed("192.0.2.1", 100.0)
    assert logins.failed("192.0.2.1", 100.0 + SECONDS_PER_TRY) is None


def test_one_source_does_not_count_for_another() -> None:
    logins = FailedLogins()
    for _ in range(BURST + 1):
        logins.failed("192.0.2.1", 100.0)
    assert logins.failed("192.0.2.2", 100.0) is None


def test_a_hundred_thousand_sources_take_no_more_memory_than_the_bound() -> None:
    logins = FailedLogins()
    for number in range(100_000):
        logins.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 100.0)
    assert len(logins) == MAX_ADDRESSES
    for _ in range(BURST - 1):
        assert logins.failed("10.1.134.159", 100.0) is None  # the last one
    assert logins.failed("10.1.134.159", 100.0) is not None


def test_a_source_is_an_ipv4_address_or_a_network_of_64_bits() -> None:
    assert source_of("192.0.2.1") == source_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert source_of("2001:db8:0:1::1") == source_of("2001:db8:0:1:ffff::2") != source_of("2001:db8:0:2::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth1")
    assert source_of("") == ""


def test_too_many_wrong_keys_are_answered_429_and_a_good_key_still_works() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            replies = [await rig.ask(key=f"fs-guess-{number}") for number in range(BURST + 1)]
            assert [reply.code for reply in replies] == ["invalid_api_key"] * BURST + ["too_many_failed_logins"]
            assert replies[-1].status == 429
            assert int(replies[-1].headers["retry-after"]) > 0
            assert (await rig.ask(key="fs-red")).status == 200
            assert (await rig.ask(key="fs-guess")).status == 429
            assert len(rig.engine.asked) == 1
            rig.later(SECONDS_PER_TRY)
            assert (await rig.ask(key="fs-guess")).status == 401

    run(main)


def test_a_request_without_a_key_is_no_failed_login() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            assert {(await rig.ask(key=None)).status for _ in range(BURST + 5)} == {401}
            assert (await rig.ask(key="fs-guess")).code == "invalid_api_key"

    run(main)


def test_unknown_and_revoked_keys_are_answered_alike() -> None:
    def seen(reply: Reply) -> tuple[int, bytes, bytes]:
        return reply.status, reply.body, re.sub(rb"x-request-id: [^\r]+", b"", reply.raw_head)

    async def main() -> None:
        async with Rig.started() as rig:
            directory = rig.port.directory
            assert isinstance(directory, StaticDirectory)
            assert (await rig.ask(key="fs-red")).status == 200
            left: dict[bytes, Identity] = {hash_key(key): who for key, who in KEYS.items() if key != "fs-red"}
            directory.replace(left)
            revoked, unknown = await rig.ask(key="fs-red"), await rig.ask(key="fs-never")
            assert seen(revoked) == seen(unknown)

    run(main)
