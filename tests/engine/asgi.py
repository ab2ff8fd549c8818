"""A client that talks to an ASGI application without a socket, and can leave at any moment."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class Call:
    """One request; it begins at once."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self._gone = asyncio.Event()
        sent = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        all_headers = {"content-type": "application/json"} | (headers or {})
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in all_headers.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self._requests: list[Message] = [{"type": "http.request", "body": sent, "more_body": False}]
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message["body"]:
            self.chunks.append(message["body"])

    def leave(self) -> None:
        """Closes the connection."""
        self._gone.set()

    async def done(self) -> "Call":
        await self.task
        return self

    @property
    def text(self) -> str:
        return b"".join(self.chunks).decode()

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[Any]:
        """Data of the events of a stream, without [DONE]."""
        data = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(item) for item in data if item != "[DONE]"]


async def until(condition: Any) -> None:
    """Lets other tasks run until the condition holds; no time passes in it."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")
