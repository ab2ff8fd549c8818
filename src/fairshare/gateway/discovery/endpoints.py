"""The endpoints of one Kubernetes service, from its EndpointSlices. Pure: what the API server sends comes in.

A service has any number of slices, each with some of its endpoints; one endpoint may be in two slices for a moment.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from fairshare.gateway.engine_url import host_in_url
from fairshare.gateway.options import InstanceSpec, KubernetesSource


class Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    """Never true while it terminates; null counts as true."""


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    """All of them are the same endpoint; consumers use the first."""
    conditions: Conditions = Conditions()


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, frozen=True):
    """What is needed of a discovery.k8s.io/v1 EndpointSlice."""

    metadata: Metadata
    addressType: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class EndpointSliceList(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class Status(msgspec.Struct, frozen=True):
    """How the API server says that something is wrong."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class PortUnclear(Exception):
    """Which port is meant cannot be told; the text says why, as a part of a sentence."""


class Endpoints:
    """The slices of one service, as far as the API server told."""

    def __init__(self, source: KubernetesSource) -> None:
        self._source = source
        self._slices: dict[str, EndpointSlice] = {}
        self.version = ""
        """Up to where the server's changes are known; empty: everything must be listed."""

    def listed(self, everything: EndpointSliceList) -> None:
        """The whole truth at a version."""
        self._slices = {each.metadata.name: each for each in everything.items or ()}
        self.version = everything.metadata.resourceVersion

    def changed(self, event: WatchEvent) -> bool:
        """A change since. Returns whether slices changed. Raises `msgspec.MsgspecError`. Not for errors."""
        changed = msgspec.json.decode(event.object, type=EndpointSlice)
        self.version = changed.metadata.resourceVersion or self.version
        match event.type:
            case "ADDED" | "MODIFIED":
                self._slices[changed.metadata.name] = changed
            case "DELETED":
                self._slices.pop(changed.metadata.name, None)
            case _:
                return False
        return True

    def instances(self) -> list[InstanceSpec]:
        """Every ready endpoint. Raises `PortUnclear`."""
        # One family only: a pod with an address of both is in slices of both, and would count twice.
        for family in ("IPv4", "IPv6"):
            slices = [each for each in self._slices.values() if each.addressType == family and each.endpoints]
            if slices:
                return self._instances(slices)
        return []

    def _instances(self, slices: Sequence[EndpointSlice]) -> list[InstanceSpec]:
        template = self._source.template
        return [
            replace(template, url=f"http://{host_in_url(endpoint.addresses[0])}:{port}")
            for each in slices
            for port in [self._port(each)]
            for endpoint in each.endpoints or ()
            if endpoint.conditions.ready is not False and endpoint.addresses
        ]

    def _port(self, of: EndpointSlice) -> int:
        """The port that is meant; slices may differ in the number behind a name."""
        wanted = self._source.port
        ports = [each for each in of.ports or () if each.port is not None]
        fitting = [each for each in ports if wanted is None or wanted in (each.name, str(each.port))]
        numbers = {each.port for each in fitting}
        if len(numbers) == 1:
            (number,) = numbers
            assert number is not None  # those without were left out
            return number
        known = ", ".join(f"{each.name or 'unnamed'} ({each.port})" for each in ports) or "none"
        if wanted is None:
            raise PortUnclear(f"the service must have one port, or the configuration name one of them; it has {known}")
        raise PortUnclear(f"the service has no port {wanted}; it has {known}")
