"""Instances from DNS: the addresses of a name, or the targets of an SRV name; asked again when a time to live ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import cast
from urllib.parse import urlsplit

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdata import Rdata
from dns.resolver import NXDOMAIN

from fairshare.gateway.discovery.source import Told, pause_seconds
from fairshare.gateway.engine_url import host_in_url
from fairshare.gateway.options import DnsSource, InstanceSpec, SrvSource

SHORTEST_SECONDS = 1.0
"""Between two questions, however short the time to live."""

LONGEST_SECONDS = 60.0
"""Between two questions, however long the time to live: engines come and go more often than addresses."""

EMPTY_SECONDS = 5.0
"""Until the next question after an answer without records, which has no time to live."""

MISSING_SECONDS = 30.0
"""How long an instance stays that answers no longer name: some servers answer with a part of a long list, in turn."""

ANSWER_SECONDS = 5.0
"""How long servers may take together."""


class DnsFollower:
    """Follows one name."""

    missing_seconds = MISSING_SECONDS

    def __init__(
        self,
        source: DnsSource | SrvSource,
        *,
        resolver: Callable[[], Resolver] = Resolver,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`resolver` makes one from the system's configuration, which may change."""
        self._source = source
        self._resolver = resolver
        self._sleep = sleep

    async def follow(self, told: Told) -> None:
        """Ask again and again."""
        failures = 0
        while True:
            try:
                instances, seconds = await self._look()
            except DNSException as error:
                failures += 1
                told.failed(_trouble(error))
                seconds = pause_seconds(failures)
            else:
                failures = 0
                told.answered(instances)
            await self._sleep(seconds)

    async def _look(self) -> tuple[list[InstanceSpec], float]:
        """The instances, and when to look again. Raises `DNSException`."""
        source = self._source
        if isinstance(source, SrvSource):
            records, seconds = await self._records(source.name, "SRV")
            return [
                replace(source.template, url=f"{source.scheme}://{host_in_url(host)}:{port}")
                for host, port in _targets(records)
            ], seconds
        parts = urlsplit(source.url)
        assert parts.hostname is not None  # the configuration was checked
        # One family only: an engine with an address of both would count twice.
        for family in ("A", "AAAA"):
            records, seconds = await self._records(parts.hostname, family)
            if records:
                break
        return [
            replace(source.template, url=f"{parts.scheme}://{host_in_url(address)}:{parts.port}{parts.path}")
            for address in records
        ], seconds

    async def _records(self, name: str, kind: str) -> tuple[list[str], float]:
        """Records as text, none if there is no such name, and for how long they hold. Raises `DNSException`."""
        try:
            answer = await self._resolver().resolve(
                name, kind, raise_on_no_answer=False, search=True, lifetime=ANSWER_SECONDS
            )
        except NXDOMAIN:
            return [], EMPTY_SECONDS
        if answer.rrset is None:
            return [], EMPTY_SECONDS
        records = cast("Iterable[Rdata]", answer.rrset)
        return (
            [str(record) for record in records],
            min(LONGEST_SECONDS, max(SHORTEST_SECONDS, float(answer.rrset.ttl))),
        )


def _targets(records: list[str]) -> list[tuple[str, int]]:
    """Host and port of each target of the lowest priority: the others are for when these are gone (RFC 2782).

    Weights are not used: instances are chosen by load.
    """
    split = [record.split() for record in records]
    lowest = min((int(priority) for priority, *_ in split), default=0)
    return [
        (target.rstrip("."), int(port))
        for priority, _, port, target in split
        if int(priority) == lowest and target != "."  # "." means that there is decidedly no such service
    ]


def _trouble(error: DNSException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
