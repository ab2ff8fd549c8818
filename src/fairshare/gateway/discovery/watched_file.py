"""Instances from a file that may change at any time; looked at once a second."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fairshare.errors import OperatorError
from fairshare.gateway.discovery.source import Told
from fairshare.gateway.options import FileSource, InstanceSpec

LOOK_SECONDS = 1.0
"""Between two looks. A look costs one `stat`, and works on network file systems and on Kubernetes' mounted ConfigMaps,
whose links are replaced, where notifications of changes do not."""

MAX_FILE_BYTES = 1 << 20

Parse = Callable[[bytes, FileSource], Sequence[InstanceSpec]]
"""Reads the text of such a file. Raises `OperatorError`, whose text says all that is wrong."""


class FileFollower:
    """Follows one file, which should be written beside and then renamed; a broken one leaves the last list in force."""

    missing_seconds = 0.0

    def __init__(
        self, source: FileSource, *, parse: Parse, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._source = source
        self._parse = parse
        self._sleep = sleep
        self._seen: tuple[int, ...] | str = ""
        """What the file looked like last, or why it could not be looked at."""

    async def follow(self, told: Told) -> None:
        """Look again and again; only what changed is told."""
        while True:
            # In a thread: a network file system may hang, and nothing else may wait for it.
            await asyncio.to_thread(self._look, told, asyncio.get_running_loop())
            await self._sleep(LOOK_SECONDS)

    def _look(self, told: Told, loop: asyncio.AbstractEventLoop) -> None:
        try:
            seen, text = _read_if_changed(self._source.path, self._seen)
            if text is None:
                return
            self._seen = seen
            instances = self._parse(text, self._source)
        except OSError as error:
            reason = f"it cannot be read ({error.strerror or error})"
            if reason != self._seen:
                self._seen = reason
                loop.call_soon_threadsafe(told.failed, reason)
        except OperatorError as error:
            loop.call_soon_threadsafe(told.failed, "; ".join(str(error).splitlines()))
        else:
            loop.call_soon_threadsafe(told.answered, instances)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read_if_changed(path: Path, seen: tuple[int, ...] | str) -> tuple[tuple[int, ...], bytes | None]:
    """What the file looks like, and what is in it if that is not what was `seen`. Raises `OSError`."""
    # A pipe in its place must not keep the thread, and with it the end of the process, waiting for a writer.
    with open(path, "rb", opener=_open_at_once) as file:
        stat = os.fstat(file.fileno())
        looks = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)
        if looks == seen:
            return looks, None
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise OSError(f"it is longer than {MAX_FILE_BYTES} bytes")
    return looks, text
