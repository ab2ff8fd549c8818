"""Certificates: the one that clients see on the data port, whose certificates engines may show, and those of peers."""

import ssl
from functools import lru_cache
from pathlib import Path

from fairshare.gateway.options import PeerTlsSpec, TlsSpec
from fairshare.replicas.peers import PeerTls


def server_context(spec: TlsSpec) -> ssl.SSLContext:
    """For the data port: TLS 1.2 or newer, HTTP/1.1. Raises `OSError` (`ssl.SSLError`) if the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    show(context, spec)
    return context


def show(context: ssl.SSLContext, spec: TlsSpec) -> None:
    """From now on new connections see this certificate; those that are open keep theirs. Raises `OSError`."""
    # An empty password: a key that needs one is an error, and not a question on the terminal.
    context.load_cert_chain(spec.certificate, spec.key, password="")


def peer_tls(spec: PeerTlsSpec) -> PeerTls:
    """For the peer link: TLS 1.3, each side shows a certificate that `spec.ca` signed. Raises `OSError`."""
    listens, dials = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (listens, dials):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
    tls = PeerTls(listens, dials)
    show_to_peers(tls, spec)
    return tls


def show_to_peers(tls: PeerTls, spec: PeerTlsSpec) -> None:
    """From now on new links show this certificate and trust this `ca` too. Raises `OSError`."""
    for context in (tls.listens, tls.dials):
        context.load_verify_locations(spec.ca)
        show(context, spec)


@lru_cache(maxsize=64)
def engine_context(ca_file: Path | None) -> ssl.SSLContext:
    """For connections to engines: verified, against `ca_file` or else the system's roots. Raises `OSError`.

    Kept, because reading the roots takes longer than a request; `engine_context.cache_clear` reads them again.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def expires_at(spec: TlsSpec) -> float | None:
    """When the certificate expires (Unix time, seconds); None: it has expired, or is not valid yet.

    Read in a handshake with itself, in memory, because the standard library reads certificates of peers only. Raises
    `OSError` if the files cannot be used.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it as it is, whoever signed it
    client.load_verify_locations(spec.certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server_context(spec).wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server)
    for side in (theirs, ours, theirs):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError:
            return None
    certificate = theirs.getpeercert()
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) if certificate else None
