"""What the LiteLLM callback does, without LiteLLM: `fairshare.integrations.litellm` makes a callback of it.

LiteLLM 1.108 calls these hooks, all of one request in one task or in its children:

    async_pre_call_hook                       before the router: here the request waits, or is refused
    async_pre_call_deployment_hook            before each attempt: retries and fallbacks come here again
    async_post_call_success_hook              a whole answer
    async_post_call_streaming_iterator_hook   a stream, from its first chunk to its end, however it ends
    async_post_call_failure_hook              nothing could be answered

No hook tells of a client that leaves while its request still waits for the engine, so the end of the request's task
releases whatever is left; and `longest_request` bounds even that.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from fairshare.core.priority import ServiceClass
from fairshare.gateway.options import EmbeddedSpec
from fairshare.integrations.admission import Admission, Admitted, TooWide, TurnedAway
from fairshare.wire.usage import Usage

BYTES_PER_TOKEN = 4
"""For what is charged when no usage comes: a client that left, a stream that broke."""

PRIORITY_HEADER = "x-vllm-priority"

_ASKS_USAGE = frozenset({"acompletion", "completion", "atext_completion", "text_completion"})
"""Calls whose streams carry usage only if it is asked for."""

_VLLM_PROVIDERS = frozenset({"hosted_vllm", "vllm", "openai", "text-completion-openai", "custom_openai", None})
"""LiteLLM's providers that send `extra_body` as it is to an OpenAI-compatible server."""


@dataclass(slots=True, eq=False)
class _Call:
    """One request that holds slots, and what of its answer has been seen."""

    home: Admission
    admitted: Admitted
    team: str
    service_class: ServiceClass
    slots: int
    prompt_tokens: int
    strips_usage: bool
    events: int = 0
    text_bytes: int = 0
    usage: Usage | None = None

    def seen(self, chunk: Any) -> Usage | None:
        """A piece of a stream; returns the usage that it reports."""
        self.events += 1
        found = _usage(chunk)
        if found is not None:
            self.usage = found.joined(self.usage)
        else:
            self.text_bytes += _text_bytes(chunk)
        return found

    def end(self) -> None:
        """Charges what was reported, or what was seen by estimate. Idempotent."""
        if self.usage is not None:
            self.admitted.consumed(self.usage)
        elif self.events:
            tokens = max(self.events, self.text_bytes // BYTES_PER_TOKEN)
            self.admitted.consumed(Usage(prompt_tokens=self.prompt_tokens, completion_tokens=tokens))
        self.admitted.release()


_current: ContextVar[_Call | None] = ContextVar("fairshare_call", default=None)


@dataclass(eq=False)
class Hooks:
    """All pools of one LiteLLM process."""

    options: EmbeddedSpec
    refusal: Callable[[TurnedAway | TooWide], Exception]
    """Makes the exception that LiteLLM answers a refused request with."""
    admissions: dict[str, Admission] = field(init=False)
    """What clients call a model → its pool."""

    def __post_init__(self) -> None:
        admissions = [Admission(pool) for pool in self.options.pools]
        self.admissions = {model: one for one in admissions for model in one.options.models}

    # ------------------------------------------------------------------ before

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any] | None:
        """Waits for a slot of the model's pool. A model of no pool is none of our business."""
        _current.set(None)
        home = self.admissions.get(data.get("model") or "")
        if home is None:
            return None
        _drop_priority(data)
        strips_usage = call_type in _ASKS_USAGE and bool(data.get("stream")) and not _wants_usage(data)
        if strips_usage:
            data["stream_options"] = (data.get("stream_options") or {}) | {"include_usage": True}
        team = str(getattr(user_api_key_dict, self.options.team_from.value, None) or "")
        service_class = _service_class(user_api_key_dict, data)
        slots, prompt_tokens = _slots(data), _prompt_tokens(data)
        admitted = await self._acquire(home, team, service_class, slots, prompt_tokens)
        call = _Call(home, admitted, team, service_class, slots, prompt_tokens, strips_usage)
        _current.set(call)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: call.end())
        return data

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """The router has picked a deployment: say the priority. A fallback to another pool's model moves there."""
        call = _current.get()
        if call is None or call.admitted.released:
            return None
        home = self.admissions.get(_model_group(kwargs) or "", None)
        if home is not call.home and _model_group(kwargs) is not None:
            call.admitted.release()  # nothing runs for it in its own pool any more
            if home is None:
                return None
            call.home = home
            call.admitted = await self._acquire(home, call.team, call.service_class, call.slots, call.prompt_tokens)
        priority = call.admitted.priority
        if priority is None or kwargs.get("custom_llm_provider") not in _VLLM_PROVIDERS:
            return None
        # LiteLLM's own `priority` is another thing: it delays the call in LiteLLM's scheduler.
        return kwargs | {
            "extra_body": (kwargs.get("extra_body") or {}) | {"priority": priority},
            "extra_headers": _without_priority(kwargs.get("extra_headers")) | {PRIORITY_HEADER: str(priority)},
        }

    async def _acquire(
        self, home: Admission, team: str, service_class: ServiceClass, slots: int, prompt_tokens: int
    ) -> Admitted:
        try:
            return await home.acquire(team, service_class, slots=slots, estimated_tokens=prompt_tokens)
        except (TurnedAway, TooWide) as refused:
            raise self.refusal(refused) from refused

    # ------------------------------------------------------------------ after

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> None:
        """A whole answer."""
        call = _current.get()
        if call is not None and not data.get("stream"):
            call.usage = _usage(response)
            call.end()

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        """No answer, or none any more."""
        call = _current.get()
        if call is not None:
            call.end()

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: AsyncIterator[Any], request_data: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        """Passes a stream on, and releases at its end: natural, broken, or because the client left."""
        call = _current.get()
        if call is None:
            async for chunk in response:
                yield chunk
            return
        try:
            async for chunk in response:
                usage = call.seen(chunk)
                if usage is None or not call.strips_usage:
                    yield chunk
                elif _has_choices(chunk):  # some versions put the usage on the last chunk that says something
                    chunk.usage = None
                    yield chunk
        finally:
            call.end()

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any, **_more: Any
    ) -> dict[str, str] | None:
        """The headers that the gateway sends too."""
        call = _current.get()
        if call is None:
            return None
        admitted = call.admitted
        headers = {
            "x-fairshare-pool": admitted.pool,
            "x-fairshare-standing": admitted.standing.value,
            "x-fairshare-held-ms": str(round(admitted.held_seconds * 1000)),
        }
        return headers if admitted.priority is None else headers | {"x-fairshare-priority": str(admitted.priority)}


# ---------------------------------------------------------------------- reading LiteLLM's data


def _drop_priority(data: dict[str, Any]) -> None:
    """A client's own priority never survives: not in the body, and not in headers that LiteLLM was told to forward."""
    data.pop("priority", None)
    for name in ("extra_body", "extra_query"):
        if isinstance(data.get(name), Mapping):
            data[name] = {key: value for key, value in data[name].items() if key != "priority"}
    for name in ("headers", "extra_headers"):
        if isinstance(data.get(name), Mapping):
            data[name] = _without_priority(data[name])


def _without_priority(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (headers or {}).items() if name.lower() != PRIORITY_HEADER}


def _wants_usage(data: Mapping[str, Any]) -> bool:
    options = data.get("stream_options")
    return isinstance(options, Mapping) and bool(cast("Mapping[str, Any]", options).get("include_usage"))


def _service_class(key: Any, data: Mapping[str, Any]) -> ServiceClass:
    """Batch if the key's metadata, the request's header or its `service_tier` says so; nothing makes it urgent."""
    metadata: Any = getattr(key, "metadata", None) or {}
    request: Any = data.get("proxy_server_request") or {}
    headers: Any = request.get("headers") or {}
    asked = {str(name).lower(): value for name, value in headers.items()}.get("x-fairshare-class")
    batch = "batch" in (metadata.get("fairshare_class"), asked) or data.get("service_tier") == "flex"
    return ServiceClass.BATCH if batch else ServiceClass.INTERACTIVE


def _slots(data: Mapping[str, Any]) -> int:
    n = data.get("n")
    prompts = data.get("prompt", data.get("input"))
    many = cast("list[Any]", prompts) if isinstance(prompts, list) else []
    return max(1, n if isinstance(n, int) else 1) * (
        len(many) if many and all(isinstance(one, str | list) for one in many) else 1
    )


def _prompt_tokens(data: Mapping[str, Any]) -> int:
    prompt = data.get("messages") or data.get("prompt") or data.get("input") or ""
    return len(json.dumps(prompt, default=str)) // BYTES_PER_TOKEN


def _model_group(kwargs: Mapping[str, Any]) -> str | None:
    """What the router calls the model of this attempt; None: it was called without a router."""
    for name in ("metadata", "litellm_metadata"):
        metadata = kwargs.get(name)
        if isinstance(metadata, Mapping):
            group = cast("Mapping[str, Any]", metadata).get("model_group")
            if isinstance(group, str):
                return group
    return None


def _of(thing: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", thing).get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _usage(answer: Any) -> Usage | None:
    """What an answer, or a piece of a stream, says was consumed; OpenAI's and Anthropic's names."""
    usage = _of(answer, "usage")
    if usage is None:
        usage = _of(_of(answer, "response"), "usage")  # the last event of a stream of /v1/responses
    if usage is None:
        return None
    prompt = _of(usage, "prompt_tokens")
    prompt = _of(usage, "input_tokens") if prompt is None else prompt
    completion = _of(usage, "completion_tokens")
    completion = _of(usage, "output_tokens") if completion is None else completion
    if not isinstance(prompt, int):
        return None
    details = _of(usage, "prompt_tokens_details") or _of(usage, "input_tokens_details")
    cached = _of(details, "cached_tokens")
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached if isinstance(cached, int) else 0,
        completion_tokens=completion if isinstance(completion, int) else 0,
    )


def _has_choices(chunk: Any) -> bool:
    return any(
        _of(choice, "finish_reason") or _of(_of(choice, "delta"), "content") for choice in _of(chunk, "choices") or ()
    )


def _text_bytes(chunk: Any) -> int:
    if isinstance(chunk, bytes | str):
        return len(chunk)
    size = 0
    for choice in _of(chunk, "choices") or ():
        text = _of(_of(choice, "delta"), "content") or _of(choice, "text")
        size += len(text.encode()) if isinstance(text, str) else 0
    return size
