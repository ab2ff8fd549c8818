"""What a vLLM 0.32 server writes: the JSON objects and event streams of each API, field for field.

Pure: a `Telling` is told what the engine made and returns bytes. Nothing here waits.
"""

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairshare.engine.asked import Family, Plan
from fairshare.engine.text import detokenize

FINGERPRINT = "vllm-0.32.0-fairshare"

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Progress of one choice: what is new, and how it ended."""

    choice: int
    tokens: int
    finish_reason: str | None


@dataclass(slots=True)
class _Choice:
    tokens: int = 0
    shown: int = 0
    """Characters of its text that have been sent; only where a stop string could hold some back."""
    finish_reason: str | None = None


@dataclass(slots=True)
class Telling:
    """One answer while it comes into being."""

    plan: Plan
    id: str
    model: str
    created: int
    block_size: int | None
    """With prefix caching: for the cached tokens that a prompt leaves behind."""
    prompt_details: bool
    cached_tokens: int = 0
    _choices: list[_Choice] = field(default_factory=list[_Choice])
    _sequence: int = 0
    _item_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(8)}")
    _tool_id: str = field(default_factory=lambda: f"chatcmpl-tool-{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        self._choices = [_Choice() for _ in self.plan.scripts]

    def add(self, told: Told) -> str:
        """Notes what is new; returns the text that may be shown now."""
        choice, script = self._choices[told.choice], self.plan.scripts[told.choice]
        before = choice.tokens
        choice.tokens += told.tokens
        choice.finish_reason = told.finish_reason or choice.finish_reason
        if script.plain:
            return "".join(script.pieces[before : choice.tokens])
        text = script.text(choice.tokens)
        new, choice.shown = text[choice.shown :], max(choice.shown, len(text))
        return new

    # ------------------------------------------------------------------ shared

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    def _text(self, index: int) -> str:
        return self.plan.scripts[index].text(self._choices[index].tokens)

    def _stop_reason(self, index: int) -> str | None:
        script = self.plan.scripts[index]
        return script.stop_reason if self._choices[index].tokens >= script.tokens else None

    def _tool_done(self, index: int) -> bool:
        return self.plan.asked.tool is not None and self._choices[index].finish_reason == "stop"

    def _finish_reason(self, index: int) -> str | None:
        # A named tool ends with "stop", any other with "tool_calls".
        reason = self._choices[index].finish_reason
        return "tool_calls" if self._tool_done(index) and not self.plan.asked.tool_named else reason

    def _usage(self, prompt: int, completion: int) -> dict[str, Any]:
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _created_cache_tokens(self) -> int:
        if self.block_size is None:
            return 0
        full = len(self.plan.prompts[0]) // self.block_size * self.block_size
        return max(0, full - self.cached_tokens)

    def _full_usage(self, *, counts_created: bool) -> dict[str, Any]:
        details: dict[str, Any] | None = None
        if self.prompt_details:
            details = {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self._created_cache_tokens() if counts_created else None,
                "multimodal_tokens": None,
            }
        usage = self._usage(self.plan.prompt_tokens, self.completion_tokens)
        return usage | {"prompt_tokens_details": details, "completion_tokens_details": None}

    def _stream_usage(self, *, counts_created: bool) -> dict[str, Any]:
        usage = self._usage(self.plan.prompt_tokens, self.completion_tokens)
        if self.prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens} | (
                {"created_cache_tokens": self._created_cache_tokens()} if counts_created else {}
            )
        return usage

    # ------------------------------------------------------------------ one answer

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        match self.plan.asked.family:
            case Family.CHAT:
                return self._chat()
            case Family.COMPLETION:
                return self._completion()
            case Family.RESPONSES:
                return self._response(finished=True)
            case Family.MESSAGES:
                return self._message()

    def _chat(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index in range(len(self._choices)):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._text(index),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
            }
            if self._tool_done(index):
                message["content"] = None
                message["tool_calls"] = [
                    {
                        "id": f"chatcmpl-tool-{secrets.token_hex(8)}",
                        "type": "function",
                        "function": {"name": self.plan.asked.tool, "arguments": self._text(index)},
                    }
                ]
            message["reasoning"] = None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": self._finish_reason(index),
                    "stop_reason": self._stop_reason(index),
                    "token_ids": None,
                    "routed_experts": None,
                }
            )
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._full_usage(counts_created=True),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _completion(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "text": self._echo(index) + self._text(index),
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": self._stop_reason(index),
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._full_usage(counts_created=False),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _echo(self, index: int) -> str:
        return detokenize(self.plan.prompt_of(index)) if self.plan.asked.echo else ""

    def _message(self) -> dict[str, Any]:
        stop_reason, stop_sequence = self._anthropic_stop()
        content: dict[str, Any] = {"type": "text", "text": self._text(0)}
        if self._tool_done(0):
            content = {
                "type": "tool_use",
                "id": self._tool_id,
                "name": self.plan.asked.tool,
                "input": json.loads(self._text(0)),
            }
        answer: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [content],
            "model": self.model,
        }
        if stop_reason is not None:
            answer["stop_reason"] = stop_reason
        if stop_sequence is not None:
            answer["stop_sequence"] = stop_sequence
        return answer | {"usage": self._anthropic_usage()}

    def _anthropic_stop(self) -> tuple[str | None, str | None]:
        reason, stop = self._choices[0].finish_reason, self._stop_reason(0)
        if reason == "length":
            return "max_tokens", None
        if reason != "stop":
            return None, None
        if self._tool_done(0):
            return "tool_use", None
        return ("stop_sequence", stop) if stop is not None else ("end_turn", None)

    def _anthropic_usage(self) -> dict[str, Any]:
        prompt, cached = self.plan.prompt_tokens, self.cached_tokens if self.prompt_details else 0
        if not self.prompt_details:
            return {"input_tokens": prompt, "output_tokens": self.completion_tokens}
        created = self._created_cache_tokens()
        return {
            "input_tokens": max(0, prompt - cached - created),
            "output_tokens": self.completion_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }

    def _response(self, *, finished: bool) -> dict[str, Any]:
        fields = self.plan.asked.fields
        reason = self._choices[0].finish_reason
        status, incomplete = "in_progress", None
        if finished:
            status = {"length": "incomplete", "abort": "cancelled"}.get(reason or "", "completed")
            incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage: dict[str, Any] | None = None
        if finished:
            prompt, output = self.plan.prompt_tokens, self.completion_tokens
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {
                    "cached_tokens": self.cached_tokens,
                    "cache_write_tokens": self._created_cache_tokens(),
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": output,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": prompt + output,
            }
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": incomplete,
            "instructions": fields.get("instructions"),
            "metadata": fields.get("metadata"),
            "model": self.model,
            "object": "response",
            "output": [self._output_item()] if finished else [],
            "parallel_tool_calls": True,
            "temperature": fields.get("temperature", 1.0),
            "tool_choice": fields.get("tool_choice", "none"),
            "tools": fields.get("tools", []),
            "top_p": fields.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": self.plan.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": fields.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": fields.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _output_item(self) -> dict[str, Any]:
        if self._tool_done(0):
            return self._function_call(self._text(0), "completed")
        content: dict[str, Any] = {
            "annotations": [],
            "text": self._text(0),
            "type": "output_text",
            "logprobs": None,
        }
        return {
            "id": self._item_id,
            "content": [content],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }

    def _function_call(self, arguments: str, status: str) -> dict[str, Any]:
        return {
            "arguments": arguments,
            "call_id": self._tool_id.replace("chatcmpl-tool-", "call_"),
            "name": self.plan.asked.tool,
            "type": "function_call",
            "id": self._item_id.replace("msg_", "fc_"),
            "status": status,
        }

    # ------------------------------------------------------------------ streams

    def begin(self) -> Iterable[bytes]:
        """What is sent when the first token is there, before it."""
        match self.plan.asked.family:
            case Family.CHAT:
                return self._chat_begin()
            case Family.COMPLETION:
                return ()
            case Family.RESPONSES:
                return self._response_begin()
            case Family.MESSAGES:
                return self._message_begin()

    def go_on(self, told: Told) -> Iterable[bytes]:
        """Events for what is new."""
        text = self.add(told)
        match self.plan.asked.family:
            case Family.CHAT:
                return (self._chat_chunk(told.choice, text),)
            case Family.COMPLETION:
                return (self._completion_chunk(told, text),)
            case Family.RESPONSES:
                return self._response_delta(text)
            case Family.MESSAGES:
                return self._message_delta(text)

    def end(self) -> Iterable[bytes]:
        """Events after the last token."""
        match self.plan.asked.family:
            case Family.CHAT:
                usage = self._chat_usage_chunk() if self.plan.asked.include_usage else b""
                return (usage, b"data: [DONE]\n\n")
            case Family.COMPLETION:
                usage = self._completion_usage_chunk() if self.plan.asked.include_usage else b""
                return (usage, b"data: [DONE]\n\n")
            case Family.RESPONSES:
                return self._response_end()
            case Family.MESSAGES:
                return self._message_end()

    def _chunk(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chat_begin(self) -> Iterable[bytes]:
        for index in range(len(self._choices)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk("chat.completion.chunk", [choice])
            if self.plan.asked.continuous_usage:
                chunk["usage"] = self._usage(self.plan.prompt_tokens, 0) | {"completion_tokens_details": None}
            yield _data(chunk | {"prompt_token_ids": None, "prompt_text": None})
            if self.plan.asked.tool is not None:
                call = {
                    "id": f"chatcmpl-tool-{secrets.token_hex(8)}",
                    "type": "function",
                    "index": 0,
                    "function": {"name": self.plan.asked.tool},
                }
                yield self._chat_delta(index, {"content": None, "tool_calls": [call]}, 0)

    def _chat_chunk(self, index: int, text: str) -> bytes:
        choice = self._choices[index]
        if self.plan.asked.tool is None:
            return self._chat_delta(index, {"content": text}, choice.tokens)
        call = {"index": 0, "function": {"arguments": text}}
        delta: dict[str, Any] = {"content": None, "tool_calls": [call]} if text else {}
        return self._chat_delta(index, delta, choice.tokens)

    def _chat_delta(self, index: int, delta: dict[str, Any], tokens: int) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None}
        finish_reason = self._finish_reason(index)
        choice["finish_reason"] = finish_reason
        if finish_reason is not None:
            choice["stop_reason"] = self._stop_reason(index)
        choice["token_ids"] = None
        chunk = self._chunk("chat.completion.chunk", [choice])
        return self._closed_chunk(chunk, finish_reason, self.plan.prompt_tokens, tokens, details=True)

    def _closed_chunk(
        self, chunk: dict[str, Any], finish_reason: str | None, prompt: int, tokens: int, *, details: bool
    ) -> bytes:
        if finish_reason is not None and not self.plan.asked.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if self.plan.asked.continuous_usage:
            chunk["usage"] = self._usage(prompt, tokens) | ({"completion_tokens_details": None} if details else {})
        return _data(chunk)

    def _chat_usage_chunk(self) -> bytes:
        chunk = self._chunk("chat.completion.chunk", [])
        return _data(chunk | {"usage": self._stream_usage(counts_created=True), "system_fingerprint": FINGERPRINT})

    def _completion_chunk(self, told: Told, text: str) -> bytes:
        index = told.choice
        choice = self._choices[index]
        if choice.tokens == told.tokens:  # its first tokens
            text = self._echo(index) + text
        chunk = self._chunk(
            "text_completion",
            [
                {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": self._stop_reason(index) if choice.finish_reason else None,
                    "prompt_token_ids": None,
                    "token_ids": None,
                }
            ],
        )
        prompt = len(self.plan.prompt_of(index))
        return self._closed_chunk(chunk, choice.finish_reason, prompt, choice.tokens, details=False)

    def _completion_usage_chunk(self) -> bytes:
        chunk = self._chunk("text_completion", [])
        return _data(chunk | {"usage": self._stream_usage(counts_created=False), "system_fingerprint": FINGERPRINT})

    def _message_begin(self) -> Iterable[bytes]:
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.plan.prompt_tokens, "output_tokens": 0},
        }
        yield _event("message_start", {"type": "message_start", "message": message})
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.plan.asked.tool is not None:
            block = {"type": "tool_use", "id": self._tool_id, "name": self.plan.asked.tool, "input": {}}
        yield _event("content_block_start", {"type": "content_block_start", "content_block": block, "index": 0})

    def _message_delta(self, text: str) -> Iterable[bytes]:
        if not text:
            return ()
        delta = {"type": "text_delta", "text": text}
        if self.plan.asked.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return (_event("content_block_delta", {"type": "content_block_delta", "delta": delta, "index": 0}),)

    def _message_end(self) -> Iterable[bytes]:
        stop_reason, stop_sequence = self._anthropic_stop()
        yield _event("content_block_stop", {"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        yield _event("message_delta", {"type": "message_delta", "delta": delta, "usage": self._anthropic_usage()})
        yield _event("message_stop", {"type": "message_stop"})

    def _response_event(self, kind: str, **fields: Any) -> bytes:
        data = fields | {"sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return _event(kind, dict(sorted(data.items())))  # in vLLM's order

    def _response_begin(self) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._response_event(kind, response=self._response(finished=False))
        if self.plan.asked.tool is not None:
            item = self._function_call("", "in_progress")
            yield self._response_event("response.output_item.added", item=item, output_index=0)
            return
        item: dict[str, Any] = {
            "id": self._item_id,
            "content": [],
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
            "phase": None,
        }
        yield self._response_event("response.output_item.added", item=item, output_index=0)
        part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        yield self._response_event("response.content_part.added", **self._place(), part=part)

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _response_delta(self, text: str) -> Iterable[bytes]:
        if not text:
            return ()
        if self.plan.asked.tool is not None:
            kind = "response.function_call_arguments.delta"
            return (self._response_event(kind, delta=text, item_id=self._item_id, output_index=0),)
        return (self._response_event("response.output_text.delta", **self._place(), delta=text, logprobs=[]),)

    def _response_end(self) -> Iterable[bytes]:
        text = self._text(0)
        item = self._output_item()
        if self.plan.asked.tool is not None:
            item = self._function_call(text, "completed")
            yield self._response_event(
                "response.function_call_arguments.done",
                arguments=text,
                item_id=self._item_id,
                name=self.plan.asked.tool,
                output_index=0,
            )
        else:
            part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
            yield self._response_event("response.output_text.done", **self._place(), logprobs=[], text=text)
            yield self._response_event("response.content_part.done", **self._place(), part=part)
        yield self._response_event("response.output_item.done", item=item, output_index=0)
        yield self._response_event("response.completed", response=self._response(finished=True))


def _data(fields: dict[str, Any]) -> bytes:
    return b"data: " + encode(fields) + b"\n\n"


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(fields) + b"\n\n"
