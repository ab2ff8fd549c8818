"""The stand-in's tokens and its pseudo-text: a token is four bytes of UTF-8, and the text follows from the prompt.

Nothing here pretends to be smart. Equal prompts give equal answers, so a run can be repeated and a prompt cached.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

TOKEN_BYTES = 4
VOCABULARY = 1 << 33
"""Token ids are below this: a marker bit in front of at most four bytes."""

_WORDS = [a + b + c + " " for a in "bdfgklmnprstvz" for b in "aeiou" for c in "klmnrst"]
_NATURAL_TOKENS = 256
"""Longest answer of a request that lets the model end by itself."""


def tokenize(text: str) -> list[int]:
    """Ids of the text's tokens; `detokenize` gives the text back."""
    data = text.encode("utf-8", "surrogatepass")
    return [_token(data[start : start + TOKEN_BYTES]) for start in range(0, len(data), TOKEN_BYTES)]


def detokenize(tokens: Sequence[int]) -> str:
    """The text of tokens; ids that are no tokens become replacement characters."""
    return b"".join(token_bytes(token) for token in tokens).decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """The bytes of a token; of an id that is no token, a byte that is no text."""
    length = (token.bit_length() - 1) // 8
    if not 0 < length <= TOKEN_BYTES or token >> 8 * length != 1:
        return b"\xff"
    return (token - (1 << 8 * length)).to_bytes(length, "big")


def _token(data: bytes) -> int:
    return (1 << 8 * len(data)) + int.from_bytes(data, "big")


def chat_tokens(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Tokens of a chat prompt. Each part is tokenised by itself, so the next turn begins with the same tokens."""
    tokens: list[int] = []
    for role, text in messages:
        tokens += tokenize(f"<s>{role}: ")
        tokens += tokenize(text)
    tokens += tokenize("<s>assistant: ")
    return tokens


def seed_of(prompt: Sequence[int], choice: int) -> int:
    """What the answer to a prompt follows from."""
    return hash((choice, *prompt)) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Script:
    """What one sequence will say, token by token. The last token of a sequence that ends by itself has no text."""

    pieces: list[str]
    """Text of each token that is shown."""
    tokens: int
    """Tokens it takes, with the one that ends it."""
    finish_reason: str
    stop_reason: str | None = None
    hold_back: int = 0
    """Characters that are not shown until more comes, because they could begin a stop string."""
    cut: int | None = None
    """Characters that are shown in all, where a stop string ends the text."""

    @property
    def plain(self) -> bool:
        """Whether what is seen is just the pieces one after the other."""
        return self.hold_back == 0 and self.cut is None

    def text(self, tokens: int) -> str:
        """What is to be seen after so many tokens."""
        text = "".join(self.pieces[:tokens])
        if tokens >= self.tokens:
            return text if self.cut is None else text[: self.cut]
        return text[: max(0, len(text) - self.hold_back)]


def write(
    prompt: Sequence[int],
    choice: int,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop: Sequence[str] = (),
    include_stop: bool = False,
) -> Script:
    """The answer to a prompt: `max_tokens` tokens with `ignore_eos`, else as many as follow from the prompt."""
    dice = random.Random(seed_of(prompt, choice))
    natural = max(dice.randint(1, _NATURAL_TOKENS), min_tokens + 1)
    ends_itself = not ignore_eos and natural <= max_tokens
    tokens = natural if ends_itself else max_tokens
    pieces = dice.choices(_WORDS, k=tokens - ends_itself)
    script = Script(pieces, tokens, "stop" if ends_itself else "length")
    return _stopped(script, stop, min_tokens, include_stop) if stop else script


def recite(text: str, *, max_tokens: int) -> Script:
    """An answer that is given (ASCII): cut at `max_tokens`, else ended by a token without text."""
    pieces = [text[start : start + TOKEN_BYTES] for start in range(0, len(text), TOKEN_BYTES)]
    if len(pieces) + 1 <= max_tokens:
        return Script(pieces, len(pieces) + 1, "stop")
    return Script(pieces[:max_tokens], max_tokens, "length")


def _stopped(script: Script, stop: Sequence[str], min_tokens: int, include_stop: bool) -> Script:
    """The script ended by the first token that completes a stop string."""
    hold_back = 0 if include_stop else max(map(len, stop)) - 1
    text = ""
    for count, piece in enumerate(script.pieces, 1):
        before, text = len(text), text + piece
        if count <= min_tokens:
            continue
        # A stop string counts where a character of this token completes it; the one that is complete first wins.
        found = [(text.find(s, max(0, before - len(s) + 1)), s) for s in stop]
        ends = [(at + len(s), s) for at, s in found if at >= 0]
        if ends:
            end, which = min(ends, key=lambda pair: pair[0])
            cut = end if include_stop else end - len(which)
            return Script(script.pieces[:count], count, "stop", which, hold_back, cut)
    return Script(script.pieces, script.tokens, script.finish_reason, None, hold_back)


def instance_of(schema: Any) -> Any:
    """A smallest value that is valid under a JSON schema, of the parts that structured outputs use."""
    return _instance(schema, cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}, 0)


def instance_text(schema: Any) -> str:
    return json.dumps(instance_of(schema))


def _instance(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > 50:
        return {} if depth <= 50 else None
    node = cast("Mapping[str, Any]", schema)
    if "const" in node:
        return node["const"]
    if node.get("enum"):
        return node["enum"][0]
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = cast("Mapping[str, Any]", target).get(part) if isinstance(target, Mapping) else None
        return _instance(target, root, depth + 1)
    for choice in ("anyOf", "oneOf", "allOf"):
        if node.get(choice):
            return _instance(node[choice][0], root, depth + 1)
    kind = node.get("type", "object" if "properties" in node else None)
    if isinstance(kind, list):
        kind = cast("list[Any]", kind)[0] if kind else None
    match kind:
        case "string":
            return "x" * int(node.get("minLength", 0))
        case "integer":
            return int(node.get("minimum", node.get("exclusiveMinimum", -1) + 1))
        case "number":
            return node.get("minimum", node.get("exclusiveMinimum", -1) + 1)
        case "boolean":
            return False
        case "null":
            return None
        case "array":
            return [_instance(node.get("items", {}), root, depth + 1) for _ in range(int(node.get("minItems", 0)))]
        case _:
            properties = cast("Mapping[str, Any]", node.get("properties", {}))
            return {name: _instance(properties.get(name, {}), root, depth + 1) for name in node.get("required", [])}
