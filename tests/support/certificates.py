"""Certificates made for a test."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from fairshare.gateway.options import PeerTlsSpec, TlsSpec


@dataclass
class Authority:
    """A certificate authority of its own; its files are in a folder of the test."""

    folder: Path

    def __post_init__(self) -> None:
        self._ca = trustme.CA()
        self.ca_file = self.folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, host: str = "127.0.0.1", *, name: str = "server", days: float | None = None) -> TlsSpec:
        """A certificate for `host` and its key, in files called by `name`; `days` until it expires."""
        expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
        issued = self._ca.issue_cert(host, not_before=datetime(2020, 1, 1, tzinfo=UTC), not_after=expires)
        spec = TlsSpec(certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        spec.certificate.write_bytes(chain)
        issued.private_key_pem.write_to_path(str(spec.key))
        spec.key.chmod(0o600)
        return spec

    def peer(self, host: str = "127.0.0.1", *, name: str = "peer", days: float | None = None) -> PeerTlsSpec:
        """The same for a replica, which trusts whoever this authority signed."""
        spec = self.issue(host, name=name, days=days)
        return PeerTlsSpec(certificate=spec.certificate, key=spec.key, ca=self.ca_file)

    def client_context(self) -> ssl.SSLContext:
        """Trusts this authority and no other."""
        return ssl.create_default_context(cafile=self.ca_file)
