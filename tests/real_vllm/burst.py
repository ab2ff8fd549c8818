"""The burst that late binding exists for, on a real vLLM behind the gateway, and the table of what it did.

Two teams own half of a pool of 16 slots each. Team A sends 100 requests at once. Team B comes right after it and keeps
16 requests in flight all the time. Both stream 50 to 150 tokens per request. While A has requests that wait, both are
entitled to half: B's part of the tokens that come in each window of two seconds says whether it got it. In the first
window what A borrowed before B came runs out; a stream that has begun is never taken back.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from real_vllm.client import completion

CAPACITY = 16
A_REQUESTS = 100
B_IN_FLIGHT = 16
FEWEST_TOKENS = 50
MOST_TOKENS = 150
B_COMES_AFTER_SECONDS = 0.25
WINDOW_SECONDS = 2.0
LONGEST_SECONDS = 180.0
PROMISED_SHARE = 0.48
"""What B must get of each window after the first; half, less what fits in the window's edges."""

CONFIG = """
listen: 127.0.0.1:0
admin: 127.0.0.1:0
pools:
  - name: chat
    capacity: {capacity}
    half_life: 0
    dispatch: {mode}
    shares: {{a: 1/2, b: 1/2}}
    models: [tiny]
    instances: [{{url: "{engine}", max_num_seqs: {max_num_seqs}}}]
teams:
  - name: a
    keys: [{a}]
  - name: b
    keys: [{b}]
"""


@dataclass(slots=True, kw_only=True)
class Burst:
    """What one run brought. Times in seconds since team B came."""

    mode: str
    max_num_seqs: int
    tokens: list[tuple[float, str, int]] = field(default_factory=list)
    """(when it came, team, completion tokens that came)."""
    waited: dict[str, list[float]] = field(default_factory=lambda: {"a": [], "b": []})
    """Team → seconds to each request's first token."""
    backlog_gone_at: float = 0.0
    """When the last of A's requests had its first token."""
    borrowed_gone_at: float = 0.0
    """When the last of the requests ended that A sent as a borrower before B came."""
    recalls: int = 0

    @property
    def windows(self) -> list[tuple[int, int]]:
        """(A's tokens, B's tokens) of each whole window in which A was backlogged."""
        whole = int(self.backlog_gone_at / WINDOW_SECONDS)
        counts = [{"a": 0, "b": 0} for _ in range(whole)]
        for at, team, tokens in self.tokens:
            if 0 <= at < whole * WINDOW_SECONDS:
                counts[int(at / WINDOW_SECONDS)][team] += tokens
        return [(count["a"], count["b"]) for count in counts]

    @property
    def b_shares(self) -> list[float]:
        """B's part of each window's tokens."""
        return [b / (a + b) if a + b else 0.0 for a, b in self.windows]

    @property
    def tokens_per_second(self) -> float:
        return sum(a + b for a, b in self.windows) / (len(self.windows) * WINDOW_SECONDS) if self.windows else 0.0


async def run_burst(*, url: str, a_key: str, b_key: str, mode: str, max_num_seqs: int, seed: int) -> Burst:
    """Runs the load once. Fails when a request is answered with anything but 200, or when it does not end."""
    burst = Burst(mode=mode, max_num_seqs=max_num_seqs)
    sizes = random.Random(seed)
    b_came_at = time.monotonic() + B_COMES_AFTER_SECONDS
    a_waits = A_REQUESTS

    async def one(client: httpx.AsyncClient, team: str, key: str, name: str, tokens: int) -> None:
        nonlocal a_waits
        # Usage on every event: two tokens may come in one event, so events are no count of tokens.
        body = completion(
            tokens,
            prompt=f"{name}: def main(",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        sent_at = time.monotonic()
        seen = 0
        headers = {"authorization": f"Bearer {key}"}
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            went_at = sent_at + float(response.headers["x-fairshare-held-ms"]) / 1000
            borrows = response.headers["x-fairshare-standing"] == "borrowing"
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                count: int = json.loads(line[6:])["usage"]["completion_tokens"]
                if seen == 0 and count:
                    burst.waited[team].append(now - sent_at)
                    if team == "a":
                        a_waits -= 1
                        if a_waits == 0:
                            burst.backlog_gone_at = now - b_came_at
                if count > seen:
                    burst.tokens.append((now - b_came_at, team, count - seen))
                    seen = count
        if team == "a" and borrows and went_at < b_came_at:
            burst.borrowed_gone_at = max(burst.borrowed_gone_at, time.monotonic() - b_came_at)
        assert seen == tokens, f"{name} was to bring {tokens} tokens and brought {seen}"

    async def closed_loop(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while a_waits:
            await one(client, "b", b_key, f"b{number}-{turn}", sizes.randint(FEWEST_TOKENS, MOST_TOKENS))
            turn += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(timeout=LONGEST_SECONDS, limits=limits, trust_env=False) as client,
        asyncio.timeout(LONGEST_SECONDS),
        asyncio.TaskGroup() as group,
    ):
        for number in range(A_REQUESTS):
            group.create_task(one(client, "a", a_key, f"a{number}", sizes.randint(FEWEST_TOKENS, MOST_TOKENS)))
        await asyncio.sleep(B_COMES_AFTER_SECONDS)
        for number in range(B_IN_FLIGHT):
            group.create_task(closed_loop(client, number))
    return burst


def table(bursts: Sequence[Burst]) -> str:
    """The runs as a Markdown table, one line each."""
    head = (
        "| dispatch | `max_num_seqs` | run | B's part of the tokens, per 2 s since it came | least after the "
        "first | what A had borrowed was gone after | tokens/s | longest wait for a first token, A / B | recalls |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(_lines(bursts))


def _lines(bursts: Iterable[Burst]) -> Iterable[str]:
    runs: dict[tuple[str, int], int] = {}
    for burst in bursts:
        run = runs[burst.mode, burst.max_num_seqs] = runs.get((burst.mode, burst.max_num_seqs), 0) + 1
        percents = [100 * share for share in burst.b_shares]
        shown = ", ".join(f"{percent:.1f}" for percent in percents)
        least = f"{min(percents[1:]):.1f} %" if percents[1:] else "–"
        yield (
            f"| `{burst.mode}` | {burst.max_num_seqs} | {run} | {shown} % "
            f"| {least} | {burst.borrowed_gone_at:.1f} s | {burst.tokens_per_second:.0f} "
            f"| {max(burst.waited['a']):.1f} s / {max(burst.waited['b']):.1f} s | {burst.recalls} |\n"
        )
