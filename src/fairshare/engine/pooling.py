"""Endpoints without generated tokens: embeddings, pooling, scoring and reranking, as vLLM 0.32 answers them.

Vectors and scores follow from the tokens alone; they mean nothing.
"""

import base64
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fairshare.engine.asked import Prompt, check_prompt, content_text, prompts_of
from fairshare.engine.bodies import Body, bad_request, error
from fairshare.engine.text import chat_tokens, detokenize, seed_of, tokenize

_DIMENSIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A valid body of a pooling endpoint."""

    kind: str
    """`embedding`, `pooling`, `score` or `rerank`."""
    model: str | None
    prompts: list[Prompt]
    priority: int
    dimensions: int = _DIMENSIONS
    base64: bool = False
    documents: Sequence[str] = ()
    top_n: int = 0

    def check(self, max_model_len: int) -> None:
        """Raises Refusal for a prompt that the model cannot read."""
        for prompt in self.prompts:
            if not prompt.tokens:
                raise bad_request("The prompt must not be empty")
            check_prompt(prompt, max_model_len)

    def answer(self, answer_id: str, model: str, created: int) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.tokens) for prompt in self.prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
        if self.kind == "rerank":
            scores = [_score(prompt) for prompt in self.prompts]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results = [
                {
                    "index": index,
                    "document": {"text": self.documents[index], "multi_modal": None},
                    "relevance_score": scores[index],
                }
                for index in order[: self.top_n or None]
            ]
            short = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
            return {"id": answer_id, "model": model, "usage": short, "results": results}
        return {
            "id": answer_id,
            "object": "list",
            "created": created,
            "model": model,
            "data": [self._item(index, prompt) for index, prompt in enumerate(self.prompts)],
            "usage": usage,
        }

    def _item(self, index: int, prompt: Prompt) -> dict[str, Any]:
        if self.kind == "score":
            return {"index": index, "object": "score", "score": _score(prompt)}
        dice = random.Random(seed_of(prompt.tokens, 0))
        vector = [dice.uniform(-1.0, 1.0) for _ in range(self.dimensions)]
        shown: Any = vector
        if self.base64:
            shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        return {"index": index, "object": self.kind, "data" if self.kind == "pooling" else "embedding": shown}


def _score(prompt: Prompt) -> float:
    return random.Random(seed_of(prompt.tokens, 0)).random()


def read_input(body: Body, kind: str) -> Pooled:
    """/v1/embeddings and /pooling: `input`, or a chat in `messages`."""
    prompts: list[Prompt] | None = None
    if "input" in body:
        prompts = prompts_of(body.fields["input"])
        if prompts is None:
            for form in ("list", "list", "string", "list"):
                message = f"Input should be a valid {form}"
                body.errors.append(error(f"{form}_type", "body.input", message, body.fields["input"]))
    elif (messages := body.items("messages")) is not None:
        pairs = [_pair(message) for message in messages]
        prompts = [Prompt(chat_tokens(pairs))]
    else:
        body.missing("input")
    dimensions = body.integer("dimensions", _DIMENSIONS, bounds=(1, 65536)) or _DIMENSIONS
    encoding = body.string("encoding_format")
    model, priority = body.string("model"), body.priority()
    body.check()
    return Pooled(
        kind=kind,
        model=model,
        prompts=prompts or [],
        priority=priority,
        dimensions=dimensions,
        base64=encoding == "base64",
    )


def _pair(message: Any) -> tuple[str, str]:
    fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
    return str(fields.get("role", "user")), content_text(fields.get("content"))


def read_score(body: Body) -> Pooled:
    """One against one, one against many, or pair by pair, under any of the names that vLLM knows."""
    left: list[str] = []
    right: list[str] = []
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")):
        if first in body and second in body:
            left, right = _texts(body, first), _texts(body, second)
            break
    else:
        for name in ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2"):
            if name not in body:
                body.missing(name)
    model, priority = body.string("model"), body.priority()
    body.check()
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N")
    return Pooled(kind="score", model=model, prompts=_pairs(left, right), priority=priority)


def read_rerank(body: Body) -> Pooled:
    query = _texts(body, "query") if "query" in body else []
    documents = _texts(body, "documents") if "documents" in body else []
    for name in ("query", "documents"):
        if name not in body:
            body.missing(name)
    top_n = body.integer("top_n", 0, nullable=False, bounds=(0, 2**63 - 1)) or 0
    model, priority = body.string("model"), body.priority()
    body.check()
    return Pooled(
        kind="rerank",
        model=model,
        prompts=_pairs(query * len(documents), documents),
        priority=priority,
        documents=documents,
        top_n=top_n,
    )


def _texts(body: Body, name: str) -> list[str]:
    found = body.fields[name]
    items = cast("list[Any]", found) if isinstance(found, list) else [found]
    texts: list[str] = []
    for item in items:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            texts.append(content_text(cast("dict[str, Any]", item).get("content", cast("Any", item).get("text"))))
        elif isinstance(item, list):
            texts.append(detokenize(cast("list[int]", item)))
        else:
            body.errors.append(error("string_type", f"body.{name}", "Input should be a valid string", item))
    return texts


def _pairs(left: Sequence[str], right: Sequence[str]) -> list[Prompt]:
    return [Prompt(tokenize(a) + tokenize(b)) for a, b in zip(left, right, strict=True)]
