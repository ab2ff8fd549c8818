"""A fake Kubernetes API server for one resource: it lists and watches as a real one does, and can be made to misbehave.

Real in it: resource versions that only grow, a watch that begins behind the version it is asked for, bookmarks only for
whom asks, `410 Gone` for versions that are no longer remembered (as a status of the answer, or as an event of a stream
that has begun), selectors, bearer tokens, `timeoutSeconds`, HTTP/1.1 with chunks that need not end where lines do.
"""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User

TOKEN = "a-token"


def endpoint_slice(name: str, *addresses: str, service: str = "vllm", **more: Any) -> dict[str, Any]:
    """Addresses that end with ! are not ready, with ~ they terminate (and are not ready)."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [address.rstrip("!~")],
                "conditions": {
                    "ready": not address.endswith(("!", "~")),
                    "serving": not address.endswith("!"),
                    "terminating": address.endswith("~"),
                },
            }
            for address in addresses
        ],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        **more,
    }


class ApiServer:
    """EndpointSlices of the namespace `models`."""

    def __init__(self) -> None:
        self.version = 100
        self.slices: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 0
        """Changes up to this version are no longer remembered."""
        self.asked: list[dict[str, str]] = []
        """The query of every list and watch, in order."""
        self.refuse: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers."""
        self.chunk_bytes = 1 << 16
        self.ends_watches = False
        """Every watch ends at once, as behind a broken proxy."""
        self._changed = asyncio.Condition()
        self._streams: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    # ------------------------------------------------------------------ what a test does

    async def __aenter__(self) -> "ApiServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        async with self._changed:
            self.ends_watches = True
            self._changed.notify_all()

    def config(self, token: str = TOKEN) -> SingleConfig:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return SingleConfig(
            context_name="test",
            context=Context(cluster="test", namespace="models"),
            cluster=Cluster(server=f"http://127.0.0.1:{port}"),
            user=User(token=token),
        )

    async def put(self, each: dict[str, Any]) -> None:
        name = each["metadata"]["name"]
        await self._change("MODIFIED" if name in self.slices else "ADDED", each)
        self.slices[name] = each

    async def delete(self, name: str) -> None:
        await self._change("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        self.version += 7
        await self._event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self.version)}})

    async def error(self, code: int, message: str) -> None:
        """An error inside the streams that are open."""
        await self._event("ERROR", {"kind": "Status", "status": "Failure", "code": code, "message": message})

    async def forget(self) -> None:
        """Compacts: nobody can watch from where it was."""
        self.version += 1
        self.oldest = self.version
        await self.error(410, "too old resource version")

    def cut(self) -> None:
        """Breaks every connection, in the middle of whatever it says."""
        for stream in tuple(self._streams):
            stream.transport.abort()

    async def cut_inside_a_line(self) -> None:
        line = json.dumps({"type": "MODIFIED", "object": endpoint_slice("a", "10.9.9.9")})[:60].encode()
        for stream in tuple(self._streams):
            stream.write(b"%x\r\n%s\r\n" % (len(line), line))
            await stream.drain()
            stream.close()

    async def watched(self, times: int) -> None:
        """Waits until so many watches have begun."""
        async with self._changed:
            await self._changed.wait_for(lambda: sum("watch" in query for query in self.asked) >= times)

    @property
    def lists(self) -> int:
        return sum("watch" not in query for query in self.asked)

    # ------------------------------------------------------------------ inside

    async def _change(self, kind: str, each: dict[str, Any]) -> None:
        self.version += 1
        each["metadata"]["resourceVersion"] = str(self.version)
        await self._event(kind, each)

    async def _event(self, kind: str, what: dict[str, Any]) -> None:
        async with self._changed:
            self.log.append((self.version, kind, json.loads(json.dumps(what))))
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._streams.discard(writer)
            writer.close()

    async def _answer(self, head: list[str], writer: asyncio.StreamWriter) -> None:
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert (method, parts.path) == ("GET", "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices")
        async with self._changed:
            self.asked.append(query)
            self._changed.notify_all()
        status, more = 200, {}
        if self.refuse:
            status, more = self.refuse.pop(0)
        elif headers.get("authorization") != f"Bearer {TOKEN}":
            status = 401
        elif "watch" in query and int(query["resourceVersion"]) < self.oldest:
            status = 410
        if status != 200:
            body = json.dumps({"kind": "Status", "code": status, "reason": "Test", "message": f"status {status}"})
            lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in more.items())]
            writer.write("\r\n".join([*lines, "", body]).encode())
        elif "watch" in query:
            await self._watch(query, writer)
        else:
            items = [each for each in self.slices.values() if self._selected(each, query)]
            body = json.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": items or None})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    async def _watch(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        since, sent = int(query["resourceVersion"]), 0
        begun_at = len(self.log)
        while not self.ends_watches:
            for place, (version, kind, what) in enumerate(self.log[sent:], sent):
                stale = place < begun_at and kind in {"ERROR", "BOOKMARK"}
                unwanted = kind == "BOOKMARK" and query.get("allowWatchBookmarks") != "true"
                if (version <= since and kind not in {"ERROR"}) or stale or unwanted:
                    continue
                if kind not in {"BOOKMARK", "ERROR"} and not self._selected(what, query):
                    continue
                line = (json.dumps({"type": kind, "object": what}) + "\n").encode()
                for at in range(0, len(line), self.chunk_bytes):
                    piece = line[at : at + self.chunk_bytes]
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)
                if kind == "ERROR":
                    writer.write(b"0\r\n\r\n")
                    return
            sent = len(self.log)
            async with self._changed:
                while len(self.log) == sent and not self.ends_watches and not writer.is_closing():
                    await self._changed.wait()
            if writer.is_closing():
                raise ConnectionResetError
        writer.write(b"0\r\n\r\n")

    def _selected(self, each: dict[str, Any], query: dict[str, str]) -> bool:
        name, _, value = query["labelSelector"].partition("=")
        return each["metadata"]["labels"].get(name) == value
