"""What follows each kind of source. A client library is imported only when a configuration needs it."""

from fairshare.gateway.discovery.source import Source
from fairshare.gateway.discovery.watched_file import FileFollower, Parse
from fairshare.gateway.options import DnsSource, FileSource, InstanceSource, KubernetesSource, SrvSource


def open_source(source: InstanceSource, *, parse: Parse) -> Source:
    """`parse` reads the files that list instances."""
    match source:
        case DnsSource() | SrvSource():
            from fairshare.gateway.discovery.dns import DnsFollower

            return DnsFollower(source)
        case FileSource():
            return FileFollower(source, parse=parse)
        case KubernetesSource():
            from fairshare.gateway.discovery.kubernetes import KubernetesFollower

            return KubernetesFollower(source)
