"""A fast engine that computes nothing: what it costs must not hide what a gateway costs.

    python bench/fake_engine.py --port 9001

`max_tokens` of a streamed request is its number of chunks. All open streams get one chunk at each tick, as an engine
sends one token of each running sequence at each step; a stream of 0 chunks stays open until its client leaves.
"""

import argparse
import asyncio
import re
from typing import Any

import httptools
import uvloop

WANTED = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
STREAMS = re.compile(rb'"stream"\s*:\s*true')

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"' + b"word " * 40 + b'"},"logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":40,"total_tokens":80,"completion_tokens":40,"prompt_tokens_details":null}}'
)
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[],'
    b'"usage":{"prompt_tokens":40,"total_tokens":80,"completion_tokens":40}}\n\n'
)
DONE = b"data: [DONE]\n\n"
MODELS = (
    b'{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"bench","max_model_len":4096}]}'
)


def whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
FRAMED_CHUNK = chunk(CHUNK)
FRAMED_END = chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n"
FRAMED_END_WITHOUT_USAGE = chunk(DONE) + b"0\r\n\r\n"
FOREVER = 1 << 60


class Connection(asyncio.Protocol):
    streams: "dict[Connection, int]" = {}  # noqa: RUF012  (one table for all connections of the process)

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = bytearray()
        self.usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        body, self.body = bytes(self.body), bytearray()
        if self.url == b"/v1/models":
            self.transport.write(whole(MODELS))
        elif not body:
            self.transport.write(whole(b"", b"text/plain"))
        elif STREAMS.search(body):
            found = WANTED.search(body)
            self.usage = b'"include_usage"' in body
            self.transport.write(STREAM_HEAD)
            self.streams[self] = int(found[1]) if found and int(found[1]) else FOREVER
            if self.streams[self] == FOREVER:
                self.transport.write(FRAMED_CHUNK)
        else:
            self.transport.write(whole(ANSWER))


def tick() -> None:
    for connection, left in list(Connection.streams.items()):
        if left == FOREVER:
            continue
        if left > 0:
            connection.transport.write(FRAMED_CHUNK)
            Connection.streams[connection] = left - 1
        else:
            del Connection.streams[connection]
            connection.transport.write(FRAMED_END if connection.usage else FRAMED_END_WITHOUT_USAGE)


async def main(port: int, tick_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=4096)
    while True:
        tick()
        await asyncio.sleep(tick_seconds)
        assert server.is_serving()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tick-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    uvloop.run(main(arguments.port, arguments.tick_ms / 1e3))
