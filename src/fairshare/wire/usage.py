"""Tokens that a request consumed, as engines report them, and what they cost."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

AUDIO_TOKENS_PER_SECOND = 50
"""For engines that report an upload's seconds only: Whisper's encoder makes 1,500 positions of 30 s
(arXiv 2212.04356)."""

MAX_ANSWER_BYTES = 1 << 20
"""Of an answer that is longer, only the end is kept."""

ANSWER_END_BYTES = 16_384
"""How much of a long answer's end is kept; `usage` is there in every engine's field order."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one request consumed."""

    prompt_tokens: int = 0
    """All tokens of the prompt, those from the prefix cache too."""
    cached_tokens: int = 0
    """How many of the prompt's tokens came from the prefix cache."""
    completion_tokens: int = 0

    def joined(self, later: "Usage | None") -> "Usage":
        """What two reports of one request say together: counts only grow, and each report may leave some out."""
        if later is None:
            return self
        return Usage(
            max(self.prompt_tokens, later.prompt_tokens),
            max(self.cached_tokens, later.cached_tokens),
            max(self.completion_tokens, later.completion_tokens),
        )


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Cost units per token."""

    prompt: float = 1.0
    """Per prompt token that was computed."""
    cached: float = 0.1
    """Per prompt token that came from the prefix cache."""
    completion: float = 2.0
    """Per generated token."""
    unit: str = "tokens"
    """What a cost unit is, for people."""

    def cost_units(self, usage: Usage) -> float:
        """What a request consumed, in cost units. Cached tokens are part of the prompt's."""
        computed_tokens = usage.prompt_tokens - usage.cached_tokens
        return (
            self.prompt * computed_tokens
            + self.cached * usage.cached_tokens
            + self.completion * usage.completion_tokens
        )


class UsageFields(msgspec.Struct, gc=False):
    """`usage` of every endpoint's answer; each endpoint fills some."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None
    seconds: Any = None


class ChoiceFields(msgspec.Struct, gc=False):
    """One choice of a chat or text completion, whole or a piece of it."""

    finish_reason: Any = None
    delta: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET


class MessageFields(msgspec.Struct, gc=False):
    """The message that Anthropic's `message_start` begins."""

    usage: UsageFields | None = None


class AnswerFields(msgspec.Struct, gc=False):
    """What is read of an answer, or of one event of a stream, whatever the endpoint."""

    usage: UsageFields | None = None
    choices: list[ChoiceFields] | None = None
    error: Any = None
    type: Any = None
    response: "AnswerFields | None" = None
    """In the events of `/v1/responses`."""
    message: "MessageFields | str | None" = None
    """In Anthropic's `message_start`; a text in errors."""
    status: Any = None
    stop_reason: Any = None
    delta: Raw | UnsetType = UNSET


class _StopFields(msgspec.Struct, gc=False):
    """`delta` of Anthropic's `message_delta`."""

    stop_reason: Any = None


class _PlainDetails(msgspec.Struct, gc=False):
    cached_tokens: Annotated[int, Meta(ge=0, lt=10**15)] | None = None


class _PlainUsage(msgspec.Struct, gc=False):
    prompt_tokens: Annotated[int, Meta(gt=0, lt=10**15)]
    completion_tokens: Annotated[int, Meta(ge=0, lt=10**15)] | None = None
    prompt_tokens_details: _PlainDetails | None = None
    input_tokens: None = None
    output_tokens: None = None
    cache_read_input_tokens: None = None
    cache_creation_input_tokens: None = None


class _PlainChoice(msgspec.Struct, gc=False):
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class _PlainAnswer(msgspec.Struct, gc=False):
    """An answer as nearly all are: counted in OpenAI's way, and neither failed nor aborted. The decoder sees to it."""

    usage: _PlainUsage
    choices: list[_PlainChoice] | None = None
    error: None = None
    response: None = None
    message: None = None
    stop_reason: None = None
    status: None = None


FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "abort", "error", "other")
"""Why an engine says that it stopped, whatever the endpoint calls it; other words are `other`."""

_FINISH_REASONS = {name: name for name in FINISH_REASONS} | {
    "function_call": "tool_calls",
    # Anthropic's
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    # `status` in `/v1/responses`
    "completed": "stop",
    "incomplete": "length",
    "failed": "error",
    "cancelled": "abort",
}

_MOST_TOKENS = 1e15
"""A count that is not below this is none."""

_decode_answer = msgspec.json.Decoder(AnswerFields).decode
_decode_usage = msgspec.json.Decoder(UsageFields).decode
_decode_plain = msgspec.json.Decoder(_PlainAnswer).decode
_decode_stop = msgspec.json.Decoder(_StopFields).decode


def answer_fields(data: bytes | bytearray) -> AnswerFields | None:
    """What is read of an answer's JSON; None: it is none, or not in a known shape."""
    try:
        return _decode_answer(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def reported_usage(fields: AnswerFields) -> Usage | None:
    """The usage in an answer or event, wherever its endpoint puts it; None: it reports none."""
    if fields.usage is not None:
        return _usage(fields.usage)
    if fields.response is not None and fields.response.usage is not None:
        return _usage(fields.response.usage)
    if isinstance(fields.message, MessageFields) and fields.message.usage is not None:
        return _usage(fields.message.usage)
    return None


def reported_failure(fields: AnswerFields) -> str | None:
    """Why the engine's own words mean that the request failed although the status is 200; None: they do not."""
    error = fields.error
    if error is None and fields.response is not None:
        error = fields.response.error
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return f"engine error: {str(message)[:200]}"  # pyright: ignore[reportUnknownArgumentType]
    # A vLLM that is told to stop ends what runs with "abort", in a 200 and with [DONE].
    if fields.choices is not None and any(choice.finish_reason == "abort" for choice in fields.choices):
        return "engine aborted: finish_reason is abort"
    if fields.stop_reason == "abort":
        return "engine aborted: stop_reason is abort"
    return None


def reported_finish(fields: AnswerFields) -> str:
    """Why the engine says that it stopped, one of `FINISH_REASONS`, of the last choice; empty: it does not say."""
    reason: object = None
    if fields.choices:
        reason = fields.choices[-1].finish_reason
    elif fields.type == "message_delta" and isinstance(fields.delta, Raw):
        try:
            reason = _decode_stop(fields.delta).stop_reason
        except (msgspec.DecodeError, RecursionError):
            return ""
    elif fields.stop_reason is not None:
        reason = fields.stop_reason
    else:
        reason = fields.status if fields.response is None else fields.response.status
        if reason in ("in_progress", "queued"):
            return ""
    return _FINISH_REASONS.get(reason, "other") if isinstance(reason, str) else ""


def read_answer(body: bytes | bytearray) -> tuple[Usage | None, str | None, str]:
    """What a whole answer reports: usage, why it failed although the status is 200 (None: nothing), why it stopped."""
    try:
        answer = _decode_plain(body)
    except (msgspec.DecodeError, RecursionError):
        fields = answer_fields(body)
        if fields is None:
            return None, None, ""
        return reported_usage(fields), reported_failure(fields), reported_finish(fields)
    plain = answer.usage
    prompt, details = plain.prompt_tokens, plain.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    finish_reason = answer.choices[-1].finish_reason if answer.choices else None
    usage = Usage(prompt, cached if cached < prompt else prompt, plain.completion_tokens or 0)
    return usage, None, finish_reason or ""


class AnswerTail:
    """Watches an answer that is not a stream of events go by; at its end says what it consumed.

    Keeps a copy of up to `MAX_ANSWER_BYTES`; of a longer answer only the end.
    """

    __slots__ = ("_body", "_long", "failure", "finish_reason", "usage")

    def __init__(self) -> None:
        self._body = bytearray()
        self._long = False
        self.usage: Usage | None = None
        """What the engine reported; None: nothing (yet)."""
        self.failure: str | None = None
        """Why it failed although the status is 200; None: it did not."""
        self.finish_reason = ""
        """Why it stopped, one of `FINISH_REASONS`; empty: it did not say."""

    def feed(self, chunk: bytes) -> None:
        """A piece of the answer's body went by."""
        self._body += chunk
        if len(self._body) > (ANSWER_END_BYTES * 2 if self._long else MAX_ANSWER_BYTES):
            self._long = True
            del self._body[:-ANSWER_END_BYTES]

    def finish(self) -> None:
        """The answer is complete (or was cut): read `usage` and `failure`."""
        body, self._body = self._body, bytearray()
        if self._long:
            self.usage = _usage_near_end(body)
            return
        self.usage, self.failure, self.finish_reason = read_answer(body)


_USAGE_KEY = re.compile(rb'(?<!\\)"usage"\s*:\s*(\{(?:[^{}]++|\{[^{}]*+\})*+\})')


def _usage_near_end(end: bytearray) -> Usage | None:
    """The last `usage` object in the end of a long answer.

    An unescaped quote begins a string in JSON, so a text that merely contains `"usage":` does not match.
    """
    found = None
    for match in _USAGE_KEY.finditer(end):
        found = match[1]
    if found is None:
        return None
    try:
        return _usage(_decode_usage(found))
    except msgspec.DecodeError:
        return None


def _usage(fields: UsageFields) -> Usage | None:
    prompt = _tokens(fields.prompt_tokens)
    cached = _detail(fields.prompt_tokens_details)
    if fields.input_tokens is not None:
        prompt = _tokens(fields.input_tokens)
        cached = _detail(fields.input_tokens_details)
    completion = _tokens(fields.completion_tokens if fields.output_tokens is None else fields.output_tokens)
    if fields.prompt_tokens is None and fields.input_tokens is None:
        if fields.seconds is not None:
            prompt = _tokens(fields.seconds) * AUDIO_TOKENS_PER_SECOND
        elif fields.total_tokens is not None:
            prompt = max(0, _tokens(fields.total_tokens) - completion)
        elif fields.output_tokens is None and fields.completion_tokens is None:
            return None
    if fields.cache_read_input_tokens is not None or fields.cache_creation_input_tokens is not None:
        # Anthropic's convention: `input_tokens` are those that were neither read from the cache nor written to it.
        cached = _tokens(fields.cache_read_input_tokens)
        prompt += cached + _tokens(fields.cache_creation_input_tokens)
    return Usage(prompt, min(cached, prompt), completion)


def _tokens(value: object) -> int:
    """A count from an engine; anything that is not a positive finite number counts 0."""
    if isinstance(value, int | float) and 0 < value < _MOST_TOKENS:
        return int(value)
    return 0


def _detail(details: object) -> int:
    return _tokens(details.get("cached_tokens")) if isinstance(details, dict) else 0  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
