"""What a request's JSON body says, and the body that goes to the engine.

What the *engine* parses decides. vLLM parses with Python's `json` (the last of doubled keys wins) and coerces with
pydantic ("6" is an int, "on" a bool), so the same is done here wherever it decides about slots, streams or priority.

Why a client's `priority` cannot survive: a body is relayed only if the strict decoder accepts it. JSON's grammar gives
such a body one reading, in which the decoder (which undoes escapes in keys) says whether the top level has any member
called `priority`. If it has, or if another member must change, the top level alone is written anew from the members'
raw values, each key once; otherwise our members are spliced in before the last `}`, where they would also win over
an earlier one. In both ways values are copied byte for byte and never re-encoded: big integers, 1e400, escapes and
spacing arrive as they were sent.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fairshare.core.priority import ServiceClass
from fairshare.wire.endpoints import Endpoint, Kind
from fairshare.wire.problems import INVALID_REQUEST, RequestProblem

PREPARED = 1024
"""Members to add to bodies that are kept ready, those used last."""

MAX_SLOTS = 16_384
"""Most sequences that one request may ask for: vLLM's own bound on `n` (`VLLM_MAX_N_SEQUENCES`)."""

BYTES_PER_TOKEN = 4
"""For estimates of prompts without a tokenizer; English text has about 4 to 5, JSON and code 3 to 4."""

ATTACHMENT_TOKENS = 1_000
"""What an image or sound in base64 counts for in estimates: its bytes say little about its tokens."""

_ATTACHMENT_SEARCH_BYTES = 16_384
"""Smaller bodies hold no attachment worth a search."""

_ATTACHMENT = re.compile(rb"[A-Za-z0-9+/_-]{1024,}={0,2}")

_DEEP = "The body nests deeper than the gateway reads. Send a flatter one."


class BodyFacts(msgspec.Struct, gc=False):
    """What the gateway needs to know of a request's body. Nothing of it is trusted for more than it says."""

    model: str | None
    """What the client calls it; None: it named none."""
    stream: bool = False
    """The client asked for a stream of events, and the endpoint has them."""
    slots: int = 1
    """Sequences it takes at the engine: `n` x prompts. At least 1."""
    max_tokens: int | None = None
    """Most tokens that one sequence may generate; None: unknown or not said."""
    estimated_prompt_tokens: int = 0
    """From the body's bytes; for display, and for charging a request that was cut."""
    prompt: Raw | None = None
    """The prompt's JSON as sent, for prefix hashing of chat-like endpoints. A view of the body."""
    has_priority: bool = False
    """The top level has a `priority` (in any disguise), which must go."""
    cache_salt: Raw | UnsetType = UNSET
    """The client's own salt for the prefix cache, its JSON as sent. A view of the body."""
    service_class: ServiceClass | None = None
    """BATCH if `service_tier` is `flex`; None: the body asks for none."""
    stateful: bool = False
    """It may keep or use state, or run tools, at the engine (`/v1/responses`): it must not be sent twice."""
    previous_response_id: str | None = None
    """The answer that it goes on from, which only the instance that gave it knows (`/v1/responses`)."""
    wants_usage: bool = False
    """The client's own `stream_options` ask for the usage event, so it must stay in the stream."""
    stream_options: dict[str, Any] | None = None
    """The client's own, if it sent an object."""
    has_stream_options: bool = False
    """The top level has a member `stream_options`, be it null."""


class _Common(msgspec.Struct, gc=False):
    model: Any = None
    priority: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET


class _Generating(_Common, gc=False):
    stream: Any = None
    max_tokens: Any = None
    service_tier: Any = None


class _Chat(_Generating, gc=False):
    messages: Raw | UnsetType = UNSET
    stream_options: Any = UNSET
    max_completion_tokens: Any = None
    n: Any = None


class _Completion(_Generating, gc=False):
    prompt: Raw | UnsetType = UNSET
    stream_options: Any = UNSET
    n: Any = None
    best_of: Any = None
    prompt_embeds: Raw | UnsetType = UNSET


class _Responses(_Generating, gc=False):
    input: Raw | UnsetType = UNSET
    max_output_tokens: Any = None
    store: Any = True
    background: Any = None
    tools: Raw | UnsetType = UNSET
    previous_response_id: Any = None


class _Messages(_Generating, gc=False):
    messages: Raw | UnsetType = UNSET


class _Embedding(_Common, gc=False):
    input: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    service_tier: Any = None


class _Rerank(_Common, gc=False):
    documents: Raw | UnsetType = UNSET
    service_tier: Any = None


class _Score(_Common, gc=False):
    text_1: Raw | UnsetType = UNSET
    text_2: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    items: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET
    data_2: Raw | UnsetType = UNSET
    service_tier: Any = None


class _Tool(msgspec.Struct, gc=False):
    type: Any = None


_decode_common = msgspec.json.Decoder(_Common).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_responses = msgspec.json.Decoder(_Responses).decode
_decode_messages = msgspec.json.Decoder(_Messages).decode
_decode_embedding = msgspec.json.Decoder(_Embedding).decode
_decode_rerank = msgspec.json.Decoder(_Rerank).decode
_decode_score = msgspec.json.Decoder(_Score).decode
_decode_elements = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_encode = msgspec.json.Encoder().encode


def inspect_body(endpoint: Endpoint, body: bytes) -> BodyFacts:
    """Read what the gateway needs from a JSON body.

    Raises `RequestProblem` (invalid_request) if it is no JSON object in UTF-8, or a field that the gateway must
    understand is wrong. Everything else is the engine's to judge.
    """
    try:
        return _READERS[endpoint.kind](body)
    except msgspec.DecodeError as error:
        raise _not_an_object(error) from None
    except RecursionError:
        raise RequestProblem(INVALID_REQUEST, _DEEP) from None


def rewrite_body(
    endpoint: Endpoint,
    body: bytes,
    facts: BodyFacts,
    priority: int | None,
    served_name: str | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """The body for the engine: our priority (None: no priority at all), the served model name, usage asked for.

    `facts` is what `inspect_body` said of this very body. `served_name` None: the client's name stays. `cache_salt`
    (of `fairshare.wire.salt`) takes the place of the client's own; None: the client's stays.
    Everything else keeps its bytes. Raises `RequestProblem` if the top level cannot be written anew.
    """
    rename = served_name is not None and served_name != facts.model
    ask_usage = facts.stream and asks_usage(endpoint, facts)
    if not endpoint.priority_in_body:
        priority = None
    salts_anew = cache_salt is not None and facts.cache_salt is not UNSET
    if facts.has_priority or rename or facts.model is None or (ask_usage and facts.has_stream_options) or salts_anew:
        return _rewrite_members(
            body,
            priority=priority,
            served_name=served_name,
            stream_options=usage_asked(facts.stream_options) if ask_usage else None,
            cache_salt=cache_salt,
        )
    if priority is None and not ask_usage and cache_salt is None:
        return body
    # After a valid object only white space follows its last brace.
    return body[: body.rindex(b"}")] + _added_members(priority, ask_usage, cache_salt)


@lru_cache(PREPARED)
def _added_members(priority: int | None, ask_usage: bool, cache_salt: str | None) -> bytes:
    """Our members, and the brace that ends the object. It names a model, so a comma is right before ours."""
    added = b"" if cache_salt is None else b',"cache_salt":"%b"' % cache_salt.encode()
    if priority is not None:
        added += b',"priority":%d' % priority
    return added + (b',"stream_options":{"include_usage":true}}' if ask_usage else b"}")


def asks_usage(endpoint: Endpoint, facts: BodyFacts) -> bool:
    """Whether the engine is asked for the stream's usage event on our own account, so that it must be stripped."""
    return facts.stream and endpoint.usage_on_request and not facts.wants_usage


def usage_asked(stream_options: dict[str, Any] | None) -> dict[str, Any]:
    """`stream_options` that ask for one usage event at the end, and none before; the client's others stay."""
    options = dict(stream_options or {})
    options.pop("continuous_usage_stats", None)
    options["include_usage"] = True
    return options


def _rewrite_members(
    body: bytes,
    *,
    priority: int | None,
    served_name: str | None,
    stream_options: dict[str, Any] | None,
    cache_salt: str | None,
) -> bytes:
    try:
        members: dict[str, Any] = _decode_members(body)
    except msgspec.DecodeError as error:
        raise _not_an_object(error) from None
    except RecursionError:
        raise RequestProblem(INVALID_REQUEST, _DEEP) from None
    members.pop("priority", None)
    if served_name is not None:
        members["model"] = served_name
    if stream_options is not None:
        members["stream_options"] = stream_options
    if cache_salt is not None:
        members["cache_salt"] = cache_salt
    if priority is not None:
        members["priority"] = priority
    return _encode(members)


def _chat_facts(body: bytes) -> BodyFacts:
    fields = _decode_chat(body)
    messages = fields.messages
    limit = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    # In the order of its fields: nearly all requests are chats, and names in a call cost a dictionary each time.
    facts = BodyFacts(
        _model(fields.model),
        fields.stream is True or flag(fields.stream, "stream"),
        1 if fields.n is None else _slots(_count(fields.n, "n"), "n"),
        None if limit is None else whole(limit),
        _estimated_tokens(body),
        messages if isinstance(messages, Raw) else None,
        fields.priority is not UNSET,
        fields.cache_salt,
    )
    if fields.service_tier is not None:
        facts.service_class = _service_class(fields.service_tier)
    if fields.stream_options is not UNSET:
        _read_stream_options(fields.stream_options, facts)
    return facts


def _completion_facts(body: bytes) -> BodyFacts:
    fields = _decode_completion(body)
    prompt = fields.prompt
    prompts, tokens = _prompts(prompt, body)
    if isinstance(fields.prompt_embeds, Raw):
        embedded = _length(fields.prompt_embeds)
        prompts = embedded if prompt is UNSET else prompts + embedded
    # vLLM's beam search runs `n` beams, so it adds nothing; `best_of` was another count of sequences in older ones.
    sequences = max(_count(fields.n, "n"), _count(fields.best_of, "best_of"))
    facts = BodyFacts(
        model=_model(fields.model),
        stream=fields.stream is True or flag(fields.stream, "stream"),
        slots=_slots(sequences * prompts, "n x prompts"),
        max_tokens=whole(fields.max_tokens),
        estimated_prompt_tokens=tokens,
        prompt=prompt if isinstance(prompt, Raw) else None,
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )
    if fields.service_tier is not None:
        facts.service_class = _service_class(fields.service_tier)
    if fields.stream_options is not UNSET:
        _read_stream_options(fields.stream_options, facts)
    return facts


def _responses_facts(body: bytes) -> BodyFacts:
    fields = _decode_responses(body)
    # OpenAI's default of `store` is true, and vLLM's too, so only an explicit false is known to leave nothing.
    stateful = (
        flag(fields.store, "store")
        or flag(fields.background, "background")
        or fields.previous_response_id is not None
        or (isinstance(fields.tools, Raw) and _has_builtin_tools(fields.tools))
    )
    return BodyFacts(
        model=_model(fields.model),
        stream=flag(fields.stream, "stream"),
        service_class=_service_class(fields.service_tier),
        max_tokens=whole(fields.max_output_tokens),
        estimated_prompt_tokens=_estimated_tokens(body),
        stateful=stateful,
        previous_response_id=fields.previous_response_id if isinstance(fields.previous_response_id, str) else None,
        prompt=fields.input if isinstance(fields.input, Raw) else None,
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )


def _messages_facts(body: bytes) -> BodyFacts:
    fields = _decode_messages(body)
    return BodyFacts(
        model=_model(fields.model),
        stream=flag(fields.stream, "stream"),
        service_class=_service_class(fields.service_tier),
        max_tokens=whole(fields.max_tokens),
        estimated_prompt_tokens=_estimated_tokens(body),
        prompt=fields.messages if isinstance(fields.messages, Raw) else None,
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )


def _embedding_facts(body: bytes) -> BodyFacts:
    fields = _decode_embedding(body)
    prompts, tokens = _prompts(fields.input, body)
    # vLLM takes conversations too: a list of messages is one, a list of such lists is several.
    conversations, _ = _prompts(fields.messages, body)
    return BodyFacts(
        model=_model(fields.model),
        slots=_slots(max(prompts, conversations), "input"),
        service_class=_service_class(fields.service_tier),
        estimated_prompt_tokens=tokens,
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )


def _rerank_facts(body: bytes) -> BodyFacts:
    fields = _decode_rerank(body)
    return BodyFacts(
        model=_model(fields.model),
        slots=_slots(_length(fields.documents), "documents"),
        service_class=_service_class(fields.service_tier),
        estimated_prompt_tokens=_estimated_tokens(body),
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )


def _score_facts(body: bytes) -> BodyFacts:
    fields = _decode_score(body)
    # One side may be a single text that is scored against each of the other.
    pairs = max(
        _length(side)
        for side in (
            fields.text_1,
            fields.text_2,
            fields.queries,
            fields.documents,
            fields.items,
            fields.data_1,
            fields.data_2,
        )
    )
    return BodyFacts(
        model=_model(fields.model),
        slots=_slots(pairs, "pairs"),
        service_class=_service_class(fields.service_tier),
        estimated_prompt_tokens=_estimated_tokens(body),
        has_priority=fields.priority is not UNSET,
        cache_salt=fields.cache_salt,
    )


def _common_facts(body: bytes) -> BodyFacts:
    fields = _decode_common(body)
    return BodyFacts(model=_model(fields.model), has_priority=fields.priority is not UNSET)


_READERS: dict[Kind, Callable[[bytes], BodyFacts]] = {
    Kind.CHAT: _chat_facts,
    Kind.COMPLETION: _completion_facts,
    Kind.RESPONSES: _responses_facts,
    Kind.MESSAGES: _messages_facts,
    Kind.EMBEDDING: _embedding_facts,
    Kind.RERANK: _rerank_facts,
    Kind.SCORE: _score_facts,
    Kind.TOKENS: _common_facts,
    Kind.AUDIO: _common_facts,
    Kind.MODELS: _common_facts,
}


def _read_stream_options(options: object, facts: BodyFacts) -> None:
    facts.has_stream_options = True
    if options is None:
        return
    if not isinstance(options, dict):
        raise RequestProblem(
            INVALID_REQUEST,
            f"`stream_options` must be an object or null, got {_shown(options)}.",
            param="stream_options",
        )
    known: dict[str, Any] = options  # pyright: ignore[reportUnknownVariableType]
    facts.stream_options = known
    facts.wants_usage = flag(known.get("include_usage"), "stream_options.include_usage")


def _model(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise RequestProblem(INVALID_REQUEST, f"`model` must be a string, got {_shown(value)}.", param="model")


_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def flag(value: object, name: str) -> bool:
    """A bool as pydantic reads it (docs.pydantic.dev, "Booleans"); null is the default, false."""
    if value is None or value is False:
        return False
    if value is True:
        return True
    if isinstance(value, str):
        word = value.lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    elif isinstance(value, int | float) and value in (0, 1):
        return value == 1
    raise RequestProblem(INVALID_REQUEST, f"`{name}` must be true or false, got {_shown(value)}.", param=name)


def whole(value: object) -> int | None:
    """An int as pydantic reads it (3, 3.0, "3", true), or None if it is none."""
    if isinstance(value, int):
        return value if type(value) is int else int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and len(value) <= 32:
        try:
            return int(value)
        except ValueError:
            try:
                return whole(float(value))
            except ValueError:
                return None
    return None


def _count(value: object, name: str) -> int:
    """How many sequences a field asks for; null: 1. What is below 1 is the engine's to refuse."""
    if value is None:
        return 1
    count = whole(value)
    if count is None:
        raise RequestProblem(INVALID_REQUEST, f"`{name}` must be a whole number, got {_shown(value)}.", param=name)
    return max(1, count)


def _slots(slots: int, name: str) -> int:
    if slots > MAX_SLOTS:
        raise RequestProblem(
            INVALID_REQUEST,
            f"The request asks for {slots} sequences at once ({name}); the most is {MAX_SLOTS}. Split it.",
            param=name if name.isidentifier() else None,
        )
    return max(1, slots)


def _length(value: Raw | UnsetType) -> int:
    """Elements of a JSON array; 1 for anything else."""
    if not isinstance(value, Raw) or memoryview(value)[0] != ord("["):
        return 1
    return max(1, len(_decode_elements(value)))


def _prompts(value: Raw | UnsetType, body: bytes) -> tuple[int, int]:
    """Number of prompts, and their estimated tokens.

    A string is one prompt, a list of strings or of lists is as many as it has elements. A list that begins with a
    number can only be read as the tokens of one prompt, one that begins with an object as one conversation.
    """
    if not isinstance(value, Raw):
        return 1, _estimated_tokens(body)
    text = memoryview(value)
    if text[0] != ord("["):
        return 1, _estimated_tokens(body)
    first = next((byte for byte in text[1:] if byte not in b" \t\r\n"), 0)
    if first == ord('"'):
        return max(1, len(_decode_elements(value))), _estimated_tokens(body)
    prompts = max(1, len(_decode_elements(value))) if first == ord("[") else 1
    return prompts, min(bytes(text).count(b",") + 1, _estimated_tokens(body))


def _estimated_tokens(body: bytes) -> int:
    if len(body) < _ATTACHMENT_SEARCH_BYTES:
        return len(body) // BYTES_PER_TOKEN
    rest, attachments = _ATTACHMENT.subn(b"", body)
    return len(rest) // BYTES_PER_TOKEN + attachments * ATTACHMENT_TOKENS


def _service_class(tier: object) -> ServiceClass | None:
    return ServiceClass.BATCH if tier == "flex" else None


def _has_builtin_tools(tools: Raw) -> bool:
    """Whether any tool is run by the engine's side instead of the client's; if in doubt, yes."""
    if memoryview(tools)[0] != ord("["):
        return False
    try:
        return any(tool.type != "function" for tool in _decode_tools(tools))
    except msgspec.DecodeError:
        return True


def _not_an_object(error: msgspec.DecodeError) -> RequestProblem:
    return RequestProblem(
        INVALID_REQUEST,
        f"The body must be one JSON object in UTF-8, without NaN, Infinity or lone surrogates; found: {error}.",
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
