"""Which paths the data port serves, and what is particular about each.

Where an engine takes a request's priority was measured on vLLM 0.32: completions, chat and responses take it from the
body and from the header `X-Vllm-Priority` (the header wins); messages only from the header; embeddings, pooling,
rerank and score only from the body; audio, tokenize and detokenize nowhere.
"""

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Whose API an endpoint belongs to: decides the shape of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class BodyKind(StrEnum):
    """How a request's body is encoded."""

    JSON = "json"
    MULTIPART = "multipart"
    NONE = "none"


class Kind(StrEnum):
    """How slots, prompt and usage of a request are read."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    SCORE = "score"
    AUDIO = "audio"
    TOKENS = "tokens"
    MODELS = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path of the data port."""

    name: str
    """Stable, for metrics and records."""
    path: str
    """Also the path at the engine."""
    kind: Kind
    method: str = "POST"
    family: Family = Family.OPENAI
    body: BodyKind = BodyKind.JSON
    takes_slots: bool = True
    """False: it never reaches an engine's scheduler; it is not admitted, counted or charged."""
    priority_in_body: bool = False
    """Whether engines read `priority` from the body. The header is set for every endpoint."""
    streams: bool = False
    """Whether a client may ask for a stream of events."""
    usage_on_request: bool = False
    """Whether a stream carries usage only if it is asked for (`stream_options.include_usage`, or for audio the form
    field `stream_include_usage`)."""
    chat_like: bool = False
    """Whether requests grow a conversation, so that an instance may hold their prefix."""


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="chat",
        path="/v1/chat/completions",
        kind=Kind.CHAT,
        priority_in_body=True,
        streams=True,
        usage_on_request=True,
        chat_like=True,
    ),
    Endpoint(
        name="completions",
        path="/v1/completions",
        kind=Kind.COMPLETION,
        priority_in_body=True,
        streams=True,
        usage_on_request=True,
        chat_like=True,
    ),
    Endpoint(
        name="responses",
        path="/v1/responses",
        kind=Kind.RESPONSES,
        priority_in_body=True,
        streams=True,
        chat_like=True,
    ),
    Endpoint(
        name="messages",
        path="/v1/messages",
        kind=Kind.MESSAGES,
        family=Family.ANTHROPIC,
        streams=True,
        chat_like=True,
    ),
    Endpoint(
        name="count_tokens",
        path="/v1/messages/count_tokens",
        kind=Kind.TOKENS,
        family=Family.ANTHROPIC,
        takes_slots=False,
    ),
    Endpoint(name="embeddings", path="/v1/embeddings", kind=Kind.EMBEDDING, priority_in_body=True),
    Endpoint(name="pooling", path="/pooling", kind=Kind.EMBEDDING, priority_in_body=True),
    Endpoint(name="rerank", path="/v1/rerank", kind=Kind.RERANK, priority_in_body=True),
    Endpoint(name="score", path="/v1/score", kind=Kind.SCORE, priority_in_body=True),
    Endpoint(
        name="transcriptions",
        path="/v1/audio/transcriptions",
        kind=Kind.AUDIO,
        body=BodyKind.MULTIPART,
        streams=True,
        usage_on_request=True,
    ),
    Endpoint(
        name="translations",
        path="/v1/audio/translations",
        kind=Kind.AUDIO,
        body=BodyKind.MULTIPART,
        streams=True,
        usage_on_request=True,
    ),
    Endpoint(name="tokenize", path="/tokenize", kind=Kind.TOKENS, takes_slots=False),
    Endpoint(name="detokenize", path="/detokenize", kind=Kind.TOKENS, takes_slots=False),
    Endpoint(name="models", path="/v1/models", kind=Kind.MODELS, method="GET", body=BodyKind.NONE, takes_slots=False),
)

_BY_PATH: dict[bytes, Endpoint] = {endpoint.path.encode(): endpoint for endpoint in ENDPOINTS}


def find_endpoint(path: bytes) -> Endpoint | None:
    """The endpoint of a request's path, without its query; None: there is none.

    Bytes are compared as they are: `//v1/...` or `%76` is another path to us, and never reaches an engine.
    """
    return _BY_PATH.get(path)
