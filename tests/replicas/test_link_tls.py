"""The peer link over TLS: nobody between two replicas reads it, and both sides show who they are."""

import ssl
from pathlib import Path

import pytest

from fairshare.gateway.tls import peer_tls
from fairshare.replicas.peers import PeerAddress, PeerTls
from replicas.linked import Side, run
from support.certificates import Authority
from support.relay import Relay


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(listens: Side, dials: Side) -> str:
    """Why the second cannot reach the first."""
    said = ""

    async def main() -> None:
        nonlocal said
        await listens.listen()
        dials.port.dial(listens.address)
        await dials.ear.until(lambda: bool(dials.port.failures))
        said = dials.port.failures[listens.address]
        assert not listens.ear.links
        assert not dials.ear.links
        await dials.port.close()
        await listens.port.close()

    run(main)
    return said


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_with_tls_nobody_between_two_replicas_reads_what_they_say(authority: Authority, is_encrypted: bool) -> None:
    tls = peer_tls(authority.peer()) if is_encrypted else None

    async def main() -> None:
        one, other = Side("one", tls=tls), Side("two", tls=tls)
        await one.listen()
        between = Relay((one.address.host, one.address.port))
        other.port.dial(PeerAddress("127.0.0.1", between.port))
        await other.ear.until(lambda: bool(other.ear.links))
        other.ear.links[0].send("kanarienvogel")
        await one.ear.until(lambda: one.ear.lines == ["kanarienvogel"])
        assert other.port.failures == {}
        await other.port.close()
        await one.port.close()
        between.close()
        assert (b"kanarienvogel" in between.carried) is not is_encrypted

    run(main)


def test_a_replica_whose_certificate_somebody_else_signed_is_not_trusted_by_either_side(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    ours, theirs = peer_tls(authority.peer()), peer_tls(Authority(tmp_path / "other").peer())
    assert "its certificate is not trusted (self-signed certificate in" in refusal(Side(tls=theirs), Side(tls=ours))
    # One that trusts us, but whom we do not trust.
    spy = peer_tls(authority.peer(name="spy"))
    foreign = Authority(tmp_path / "other").issue(name="foreign")
    spy.dials.load_cert_chain(foreign.certificate, foreign.key)
    assert "may not trust our certificate" in refusal(Side(tls=ours), Side(tls=spy))


def test_a_certificate_that_has_expired_is_refused_on_both_sides_and_it_is_said_so(authority: Authority) -> None:
    current, old = peer_tls(authority.peer()), peer_tls(authority.peer(name="old", days=-1))
    assert "not trusted (certificate has expired)" in refusal(Side(tls=old), Side(tls=current))
    assert "may not trust our certificate" in refusal(Side(tls=current), Side(tls=old))


def test_a_certificate_of_another_host_is_refused_by_whoever_dials(authority: Authority) -> None:
    elsewhere, here = peer_tls(authority.peer("gateway-2.internal", name="elsewhere")), peer_tls(authority.peer())
    assert "not valid for '127.0.0.1'" in refusal(Side(tls=elsewhere), Side(tls=here))


def test_a_replica_without_a_certificate_gets_nowhere(authority: Authority) -> None:
    tls = peer_tls(authority.peer())
    dials = ssl.create_default_context(cafile=authority.ca_file)
    assert "may not trust our certificate" in refusal(Side(tls=tls), Side(tls=PeerTls(tls.listens, dials)))
    assert refusal(Side(tls=tls), Side())
    assert "wrong version number" in refusal(Side(), Side(tls=tls))


def test_the_secret_is_wanted_of_a_replica_with_a_certificate_too(authority: Authority) -> None:
    tls = peer_tls(authority.peer())
    assert "does not know this site's secret" in refusal(Side(tls=tls), Side(secret=b"x" * 32, tls=tls))
