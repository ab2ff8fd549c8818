"""A client that notes when each thing came, for the tests against a real vLLM."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from real_vllm.vllm_server import MODEL


@dataclass(slots=True, kw_only=True)
class Streamed:
    """What one streamed completion brought; points in time are `time.monotonic`, in seconds."""

    events: list[dict[str, Any]] = field(default_factory=list)
    event_at: list[float] = field(default_factory=list)
    ended_with_done: bool = False

    @property
    def first_at(self) -> float:
        return self.event_at[0]

    @property
    def last_at(self) -> float:
        return self.event_at[-1]

    @property
    def text(self) -> str:
        return "".join(choice.get("text", "") for event in self.events for choice in event["choices"])


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a completion that makes exactly this many tokens, greedily."""
    return {
        "model": MODEL,
        "prompt": "def main(",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    } | more


def several(tokens: int, *, n: int, **more: Any) -> dict[str, Any]:
    """The body of a completion with n sequences; not greedy, because vLLM refuses n > 1 then."""
    return completion(tokens, n=n, temperature=1.0, **more)


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a chat completion that makes exactly this many tokens, greedily."""
    messages = [{"role": "user", "content": "def main("}]
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    } | more


def http_client() -> httpx.AsyncClient:
    """As many connections as asked for, and no deadline shorter than a test's own."""
    return httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(max_connections=None), trust_env=False)


async def stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Streamed:
    """Reads a whole stream; fails the test when the answer is not 200."""
    streamed = Streamed()
    async with client.stream("POST", url, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                streamed.ended_with_done = True
            elif line.startswith("data: "):
                streamed.events.append(json.loads(line.removeprefix("data: ")))
                streamed.event_at.append(time.monotonic())
    return streamed
