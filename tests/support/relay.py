"""A TCP relay that a test puts between two processes, to cut or delay what they say to each other."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any

MOST_CARRIED_BYTES = 1 << 20


class Relay:
    """Listens and passes bytes on to one place, on a thread of its own."""

    def __init__(self, target: tuple[str, int] | str, *, listen: str = "127.0.0.1") -> None:
        """`target`: host and port, or the path of a Unix socket."""
        self._target = target
        self._is_cut = False
        self._delay_seconds = 0.0
        self.carried = bytearray()
        """What went through, both ways; its last `MOST_CARRIED_BYTES`."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        listening = socket.create_server((listen, 0))
        self.port: int = listening.getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, sock=listening))

    def cut(self) -> None:
        """Nobody gets through, and what was connected no longer is."""
        self._is_cut = True

        async def abort() -> None:
            for writer in tuple(self._writers):
                writer.transport.abort()

        self._do(abort())

    def mend(self) -> None:
        self._is_cut = False

    def delay(self, seconds: float) -> None:
        """Everything from the target takes so much longer from now on."""
        self._delay_seconds = seconds

    def close(self) -> None:
        self.cut()
        self._server.close()
        self._do(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            if isinstance(self._target, str):
                there, back = await asyncio.open_unix_connection(self._target)
            else:
                there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back, is_answer=False), self._pump(there, writer, is_answer=True))
        self._writers -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        try:
            while data := await reader.read(65536):
                if is_answer and self._delay_seconds:
                    await asyncio.sleep(self._delay_seconds)
                self.carried += data
                del self.carried[:-MOST_CARRIED_BYTES]
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
