"""Tells a site's own system when a budget's soft amount is passed: one signed POST for each, tried again if it fails.

Whoever starts again, and every replica, tells of a budget that is over its soft amount: the `id` of the event comes
from the budget, its soft amount and its period, so a receiver knows it again.

The name comes from the configuration, but its address from whoever runs the DNS: what it resolves to must pass
`may_be_called`, and exactly that address is connected to. Redirects are not followed.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import ssl
from urllib.parse import urlsplit

import msgspec

from fairshare.accounts.gate import SoftPassed
from fairshare.clock import Clock
from fairshare.gateway.options import WebhookSpec

log = logging.getLogger("fairshare.webhook")

EVENT = "budget_soft_passed"
MAX_WAITING = 1000
"""Events that wait to be sent; more are lost, and said."""

TRY_SECONDS = 10.0
"""How long one try may take."""

PAUSES_SECONDS = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Between the tries; after the last try the event is given up."""

LAST_SECONDS = 3.0
"""How long what waits may still take when the gateway ends."""

_FAILURES = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)

_NEVER = (
    # Where clouds keep what a machine may know about itself, keys among it, and ways to write IPv4 in IPv6.
    ipaddress.ip_network("169.254.0.0/16"),
    ipaddress.ip_network("100.100.100.200/32"),
    ipaddress.ip_network("168.63.129.16/32"),
    ipaddress.ip_network("192.0.0.0/24"),
    ipaddress.ip_network("fd00:ec2::/32"),
    ipaddress.ip_network("fd00:42::42/128"),
    ipaddress.ip_network("fd00:c1::a9fe:a9fe/128"),
    ipaddress.ip_network("fd20:ce::254/128"),
    ipaddress.ip_network("fe80::/10"),
    ipaddress.ip_network("::/96"),
    ipaddress.ip_network("::ffff:0:0:0/96"),
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("2002::/16"),
    ipaddress.ip_network("2001::/32"),
)


class _Failed(Exception):
    """One try did not succeed. `final`: another would not either."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Webhook:
    """Sends events, one after the other."""

    def __init__(self, spec: WebhookSpec, *, wall: Clock) -> None:
        self._spec = spec
        self._wall = wall
        # Made once: reading the authorities that this machine trusts takes tens of milliseconds.
        self._tls = ssl.create_default_context() if spec.url.lower().startswith("https:") else None
        self._waiting: asyncio.Queue[SoftPassed] = asyncio.Queue(MAX_WAITING)
        self._sending: SoftPassed | None = None
        self._task: asyncio.Task[None] | None = None

    def tell(self, passed: SoftPassed) -> None:
        """Take an event. Never waits."""
        try:
            self._waiting.put_nowait(passed)
        except asyncio.QueueFull:
            log.error("Too many events wait for the webhook; that of budget %d is lost.", passed.budget_id)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_sending())

    async def stop(self) -> None:
        """End; what waits is tried once more. After a restart the budgets that are over are told of again."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        left = [] if self._sending is None else [self._sending]
        while not self._waiting.empty():
            left.append(self._waiting.get_nowait())
        try:
            async with asyncio.timeout(LAST_SECONDS):
                while left:
                    await self._post(_body(left[0]))
                    del left[0]
        except (_Failed, *_FAILURES) as error:
            reason = str(error) or type(error).__name__
            log.error("The webhook was not told of %d budgets before the end: %s.", len(left), reason)

    async def _keep_sending(self) -> None:
        while True:
            self._sending = await self._waiting.get()
            await self._send(self._sending)
            self._sending = None

    async def _send(self, passed: SoftPassed) -> None:
        body = _body(passed)
        for pause_seconds in (*PAUSES_SECONDS, None):
            try:
                async with asyncio.timeout(TRY_SECONDS):
                    await self._post(body)
                return
            except (_Failed, *_FAILURES) as error:
                reason = str(error) or type(error).__name__
                if pause_seconds is None or (isinstance(error, _Failed) and error.final):
                    log.error("The webhook was not told of budget %d: %s.", passed.budget_id, reason)
                    return
                log.warning("The webhook failed (%s); it is tried again in %g s.", reason, pause_seconds)
            await asyncio.sleep(pause_seconds)

    async def _post(self, body: bytes) -> None:
        parts = urlsplit(self._spec.url)
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = await self._address(host, port)
        reader, writer = await asyncio.open_connection(
            address,
            port,
            ssl=self._tls,
            server_hostname=host if secure else None,
        )
        try:
            at = int(self._wall())
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            head = (
                f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\nx-fairshare-event: {EVENT}\r\n"
                f"x-fairshare-signature: {signature(self._spec.secret, at, body)}\r\n\r\n"
            )
            writer.write(head.encode("ascii") + body)
            await writer.drain()
            line = await reader.readuntil(b"\r\n")
        finally:
            writer.close()
        words = line.split(b" ")
        if len(words) < 2 or not words[1].isdigit():
            raise _Failed("it does not answer in HTTP")
        status = int(words[1])
        if not 200 <= status < 300:
            raise _Failed(f"it answers with status {status}", final=status < 500 and status not in (408, 429))

    async def _address(self, host: str, port: int) -> str:
        """The address to connect to, if everything that the name stands for may be called."""
        loop = asyncio.get_running_loop()
        found = [entry[4][0] for entry in await loop.getaddrinfo(host, port, type=1)]
        for address in found:
            if not may_be_called(str(address), allow_internal=self._spec.allow_internal):
                raise _Failed(f"{host} is {address}, an internal address; see notify.allow_internal", final=True)
        if not found:
            raise _Failed(f"{host} has no address")
        return str(found[0])


def _body(passed: SoftPassed) -> bytes:
    known_by = f"{passed.budget_id} {passed.soft_cost_units!r} {passed.resets_at!r}"
    return msgspec.json.encode(
        {
            "event": EVENT,
            "id": hashlib.sha256(known_by.encode()).hexdigest()[:32],
            "owner": passed.owner,
            "budget": passed.budget_id,
            "soft_cost_units": passed.soft_cost_units,
            "used_cost_units": passed.used_cost_units,
            "borrows_only": passed.borrows_only,
            "resets_at": None if passed.resets_at == float("inf") else passed.resets_at,
        }
    )


def may_be_called(address: str, *, allow_internal: bool) -> bool:
    """Whether an address may be connected to: a public one, or, if the operator says so, an internal one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return allow_internal
    if ip.is_multicast or ip.is_unspecified or any(ip.version == net.version and ip in net for net in _NEVER):
        return False
    # `is_global` does not know the site-local addresses that IPv6 once had.
    return allow_internal or (ip.is_global and not (isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local))


def signature(secret: str, at: int, body: bytes) -> str:
    """`t=<seconds>,v1=<hex>`: HMAC-SHA256 over the time, a dot, and the body. A receiver refuses old times."""
    made = hmac.new(secret.encode(), b"%d.%b" % (at, body), hashlib.sha256)
    return f"t={at},v1={made.hexdigest()}"
