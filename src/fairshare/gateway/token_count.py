"""Counts a prompt's tokens by asking its engine, beside the request (`token_estimates: tokenize`).

The count is needed only if a request is cut and its engine's own count never comes. So nothing waits for it: it is
asked for when the request is sent, and what has not come by the end of the request is not used.
"""

import asyncio
from collections.abc import Callable

import msgspec

from fairshare.gateway.engine_http import Ask, EngineSilent, ask
from fairshare.gateway.options import InstanceSpec
from fairshare.wire.endpoints import Kind

MOST_AT_ONCE = 32
"""Questions that may be open; while they are, requests keep the estimate from their bytes."""

LONGEST_SECONDS = 5.0


class _Counted(msgspec.Struct):
    count: int


class TokenCounter:
    """Asks engines; everything on the event loop's thread."""

    def __init__(self, ask: Ask = ask) -> None:
        self._ask = ask
        self._asking: set[asyncio.Task[None]] = set()

    def count(self, spec: InstanceSpec, question: bytes, counted: Callable[[int], None]) -> None:
        """Ask an engine for the tokens of a prompt (see `question_for`); `counted` is told if it answers in time."""
        if len(self._asking) < MOST_AT_ONCE:
            task = asyncio.get_running_loop().create_task(self._count(spec, question, counted))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _count(self, spec: InstanceSpec, question: bytes, counted: Callable[[int], None]) -> None:
        try:
            answer = await self._ask(
                "POST",
                f"{spec.url}/tokenize",
                api_key=spec.api_key,
                ca_file=spec.ca_file,
                body=question,
                timeout_seconds=LONGEST_SECONDS,
            )
            count = msgspec.json.decode(answer.body, type=_Counted).count
        except (EngineSilent, msgspec.DecodeError):
            return  # the estimate from the bytes stays
        if answer.status == 200 and count >= 0:
            counted(count)

    async def close(self) -> None:
        """Give up what is still asked."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


def question_for(kind: Kind, served_name: str, prompt: bytes | memoryview) -> bytes | None:
    """The body for `/tokenize`; None: it cannot be asked about prompts of this kind, or about several at once."""
    raw = bytes(prompt)
    if kind is Kind.CHAT:
        return b'{"model":%b,"messages":%b}' % (msgspec.json.encode(served_name), raw)
    if kind is Kind.COMPLETION and raw.startswith(b'"'):
        return b'{"model":%b,"prompt":%b}' % (msgspec.json.encode(served_name), raw)
    return None
