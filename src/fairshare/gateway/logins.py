"""Bounds wrong keys per source address. A good key is served whatever else comes from its address.

Keys have 256 random bits, so nobody guesses one: this tells the owner of a client with a wrong key, or of a scanner, to
stop trying, and shows in the metrics as what it is.
"""

import ipaddress

BURST = 20
"""Wrong keys that an address may send at once."""

SECONDS_PER_TRY = 3.0
"""And then one more in this time."""

MAX_ADDRESSES = 10_000
"""Addresses remembered, those that failed last: about 1 MB. Who has more to try from is not slowed down by this."""


class FailedLogins:
    """Failed logins by source address, each a bucket that leaks one try every `SECONDS_PER_TRY`; bounded."""

    __slots__ = ("_limit", "_paid_at")

    def __init__(self, limit: int = MAX_ADDRESSES) -> None:
        self._paid_at: dict[str, float] = {}
        """Source → when all its failures are forgotten."""
        self._limit = limit

    def __len__(self) -> int:
        return len(self._paid_at)

    def failed(self, address: str, now: float) -> float | None:
        """A wrong key came. None: say so; else it is one too many, and this is after how many seconds to try again.

        What is one too many does not count, so a client that goes on trying is not locked out for longer.
        """
        source = source_of(address)
        paid_at = max(now, self._paid_at.pop(source, now))
        wait_seconds = paid_at + SECONDS_PER_TRY - (now + BURST * SECONDS_PER_TRY)
        if wait_seconds <= 0.0:
            paid_at += SECONDS_PER_TRY
        self._paid_at[source] = paid_at
        if len(self._paid_at) > self._limit:
            del self._paid_at[next(iter(self._paid_at))]
        return wait_seconds if wait_seconds > 0.0 else None


def source_of(address: str) -> str:
    """What counts as one source: an IPv4 address, or the /64 that a site with IPv6 has to itself."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
