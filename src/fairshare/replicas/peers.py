"""Where a replica meets its peers: it listens for those that dial it, and keeps dialling those it wants to reach."""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from fairshare.errors import OperatorError
from fairshare.replicas.link import HANDSHAKE_SECONDS, Handler, LinkOptions, Message, PeerLink

log = logging.getLogger("fairshare.replicas")

SWEEP_SECONDS = 0.1

CONNECT_SECONDS = 2.0

FIRST_BACKOFF_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 1.0
"""Between two attempts to reach a peer; drawn between half of it and all of it."""

MAX_STRANGERS = 64
"""Connections from elsewhere that have not proved anything yet. For one more, the one that has waited longest goes: a
peer proves itself at once, so nobody keeps peers out by holding on to connections."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a replica listens for its peers."""

    host: str
    """A name or an IP address. Of a Unix socket: empty."""
    port: int
    path: str = ""
    """Of a Unix socket."""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> "PeerAddress":
        """The opposite of `str`. Raises `ValueError`."""
        if text.startswith("unix:"):
            return PeerAddress("", 0, text.removeprefix("unix:"))
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"a peer's address is host:port or unix:/path, got {text!r}")
        return PeerAddress(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class PeerTls:
    """How links over TCP are encrypted. Both sides show certificates, and verify each other's."""

    listens: ssl.SSLContext
    dials: ssl.SSLContext
    """Whoever dials an address wants its host in the certificate."""


class PeerPort(Generic[Message]):
    """All links of one replica. Everything on the event loop's thread."""

    def __init__(
        self,
        options: LinkOptions[Message],
        handler: Handler[Message],
        *,
        fraction: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: PeerTls | None = None,
    ) -> None:
        """
        Args:
            fraction: a random number in [0, 1), for the jitter of attempts.
            tls: None: links are authenticated, but not encrypted. Unix sockets never are.
        """
        self._options = options
        self._handler = handler
        self._fraction = fraction
        self._sleep = sleep
        self._tls = tls
        self._links: dict[PeerLink[Message], None] = {}
        """In the order in which they were made."""
        self._server: asyncio.Server | None = None
        self._socket_path: Path | None = None
        self._dialling: dict[PeerAddress, asyncio.Task[None]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._attempts: dict[PeerAddress, PeerLink[Message]] = {}
        """The newest link to each peer that is dialled, whatever it came to."""
        self._failures: dict[PeerAddress, str] = {}
        """How the one before ended, or this one."""

    @property
    def failures(self) -> dict[PeerAddress, str]:
        """Why a peer that is dialled cannot be reached now."""
        return {address: why for address, why in self._failures.items() if not self._attempts[address].is_up}

    def answering(self, address: PeerAddress) -> str | None:
        """The replica that has proved itself at an address that is dialled; None: nobody has."""
        link = self._attempts.get(address)
        return link.peer if link is not None and link.is_up else None

    # ------------------------------------------------------------------ life

    async def start(self, address: PeerAddress) -> PeerAddress:
        """Listen. Returns where, with the port that the operating system chose.

        Raises:
            OperatorError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        try:
            if address.path:
                self._socket_path = Path(address.path)
                self._socket_path.unlink(missing_ok=True)
                # The folder keeps others out too; there is no moment in which they could get in.
                mask = os.umask(0o177)
                try:
                    self._server = await loop.create_unix_server(self._accepted, address.path)
                finally:
                    os.umask(mask)
            else:
                self._server = await loop.create_server(
                    self._accepted,
                    address.host,
                    address.port,
                    ssl=None if self._tls is None else self._tls.listens,
                    ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_SECONDS,
                )
                host, port = self._server.sockets[0].getsockname()[:2]
                address = PeerAddress(host, port)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OperatorError(f"replicas.listen: cannot listen on {address} ({reason})") from None
        self._sweeping = asyncio.create_task(self._keep_sweeping())
        return address

    async def close(self) -> None:
        """Hear and say nothing more."""
        tasks = [*self._dialling.values(), *([] if self._sweeping is None else [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._dialling.clear()
        if self._server is not None:
            self._server.close()
        for link in tuple(self._links):
            link.close("this replica ended")
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ dialling

    def dial(self, address: PeerAddress) -> None:
        """Keep a link to a peer: whenever there is none, it is dialled again, with longer and longer pauses."""
        if address not in self._dialling:
            self._dialling[address] = asyncio.create_task(self._keep_dialling(address), name=f"dial {address}")

    def hang_up(self, address: PeerAddress) -> None:
        """No more link to that peer."""
        task = self._dialling.pop(address, None)
        if task is not None:
            task.cancel()
        self._failures.pop(address, None)
        self._attempts.pop(address, None)

    async def _keep_dialling(self, address: PeerAddress) -> None:
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            link = await self._linked_once(address)
            if link.was_up:
                backoff_seconds = FIRST_BACKOFF_SECONDS
            await self._sleep(backoff_seconds * (0.5 + 0.5 * self._fraction()))
            backoff_seconds = min(2.0 * backoff_seconds, LONGEST_BACKOFF_SECONDS)

    async def _linked_once(self, address: PeerAddress) -> PeerLink[Message]:
        """Dial once, and stay until the link is gone, or there was none."""
        ended = asyncio.Event()
        link = self._attempts[address] = self._new_link(dials=True, ended=lambda _: ended.set())
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connect(address, link)
            await ended.wait()
            self._failures[address] = link.reason
            if self._tls is not None and not link.peer:
                # In TLS 1.3 who dials is through before the other side looks at its certificate, and is not told why.
                self._failures[address] += " before it greeted: it may not trust our certificate (its dates, its ca)"
        except TimeoutError:
            self._failures[address] = "it does not answer"
        except ssl.SSLCertVerificationError as error:
            self._failures[address] = f"its certificate is not trusted ({error.verify_message.lower().rstrip('.')})"
        except OSError as error:
            self._failures[address] = (error.strerror or str(error)).lower()
        finally:
            link.close("it is no longer needed")
        return link

    async def _connect(self, address: PeerAddress, link: PeerLink[Message]) -> None:
        loop = asyncio.get_running_loop()
        if address.path:
            await loop.create_unix_connection(lambda: link, address.path)
        else:
            context = None if self._tls is None else self._tls.dials
            await loop.create_connection(lambda: link, address.host, address.port, ssl=context)

    # ------------------------------------------------------------------ inside

    def sweep(self) -> None:
        """Keep every link alive, and end those whose peer is silent."""
        now = self._options.clock()
        for link in tuple(self._links):
            link.sweep(now)

    async def _keep_sweeping(self) -> None:
        while True:
            await self._sleep(SWEEP_SECONDS)
            self.sweep()

    def _accepted(self) -> PeerLink[Message]:
        return self._new_link(dials=False, ended=lambda _: None)

    def _new_link(self, *, dials: bool, ended: Callable[[PeerLink[Message]], None]) -> PeerLink[Message]:
        def gone(link: PeerLink[Message]) -> None:
            self._links.pop(link, None)
            ended(link)

        return PeerLink(self._options, self._handler, dials=dials, made=self._made, ended=gone)

    def _made(self, link: PeerLink[Message]) -> None:
        self._links[link] = None
        strangers = [each for each in self._links if not (each.dials or each.is_up or each.reason)]
        if len(strangers) > MAX_STRANGERS:
            strangers[0].close(f"it did not prove itself, and {MAX_STRANGERS} others want to")
