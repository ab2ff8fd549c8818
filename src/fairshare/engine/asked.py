"""From a request body to what the engine is asked to generate, with vLLM's checks in vLLM's order."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from fairshare.engine.bodies import Body, Refusal, bad_request, error, invalid
from fairshare.engine.text import Script, chat_tokens, instance_text, recite, tokenize, write

_COMPLETION_MAX_TOKENS = 16
"""What /v1/completions makes when it is not told how many (OpenAI's default, and vLLM's)."""


class Family(StrEnum):
    """Which API's words an answer has."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    given_as_text: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A valid body of a generating endpoint; what depends on the model is not checked yet."""

    family: Family
    model: str | None
    prompts: list[Prompt]
    n: int = 1
    max_tokens: int | None = None
    """None: as many as the model's length leaves."""
    max_tokens_name: str = "max_tokens"
    """The field it came from, for messages."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    include_stop: bool = False
    temperature: float | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    echo: bool = False
    recited: str | None = None
    """An answer that is given: arguments of a forced tool, or an instance of a JSON schema."""
    tool: str | None = None
    """The function that must be called."""
    tool_named: bool = False
    """Whether the request named that function (else: any)."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be generated: the sequences of prompt 0, then of prompt 1, ..."""

    asked: Asked
    prompts: list[list[int]]
    scripts: list[Script]
    max_tokens: int

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.asked.n]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def plan(asked: Asked, max_model_len: int) -> Plan:
    """Raises Refusal for what the model cannot do."""
    if not asked.prompts:
        if asked.family is Family.COMPLETION:
            raise bad_request("You must pass at least one prompt")
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if asked.max_tokens is not None and asked.max_tokens > max_model_len:
        raise bad_request(
            f"{asked.max_tokens_name}={asked.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            asked.max_tokens_name,
            asked.max_tokens,
        )
    for prompt in asked.prompts:
        check_prompt(prompt, max_model_len)
    if asked.n < 1:
        raise bad_request(f"n must be at least 1, got {asked.n}.")
    if asked.temperature is not None and asked.temperature < 0:
        raise bad_request(
            f"temperature must be non-negative, got {asked.temperature}.", "temperature", asked.temperature
        )
    if asked.temperature == 0 and asked.n > 1:
        raise bad_request(f"n must be 1 when using greedy sampling, got {asked.n}.")
    scripts: list[Script] = []
    longest = 0
    for prompt in asked.prompts:
        room = max_model_len - len(prompt.tokens)
        max_tokens = room if asked.max_tokens is None else min(room, asked.max_tokens)
        if max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
        longest = max(longest, max_tokens)
        scripts += [_script(asked, prompt.tokens, choice, max_tokens) for choice in range(asked.n)]
    return Plan(asked, [prompt.tokens for prompt in asked.prompts], scripts, longest)


def _script(asked: Asked, prompt: Sequence[int], choice: int, max_tokens: int) -> Script:
    if asked.recited is not None:
        return recite(asked.recited, max_tokens=max_tokens)
    return write(
        prompt,
        choice,
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens,
        ignore_eos=asked.ignore_eos,
        stop=asked.stop,
        include_stop=asked.include_stop,
    )


def check_prompt(prompt: Prompt, max_model_len: int) -> None:
    found = len(prompt.tokens)
    if found <= max_model_len:
        return
    # A text is not tokenised further than one token beyond the limit, so its real length is not known.
    if prompt.given_as_text:
        found = max_model_len + 1
    at_least = "at least " if found == max_model_len + 1 else ""
    raise bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{at_least}{found} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        found,
    )


# ---------------------------------------------------------------------- chat


def read_chat(body: Body) -> Asked:
    messages = _messages(body)
    common = _common(body)
    max_tokens, name = body.integer("max_tokens"), "max_tokens"
    if (more_exact := body.integer("max_completion_tokens")) is not None:
        max_tokens, name = more_exact, "max_completion_tokens"
    include_usage, continuous = _stream_options(body, common["stream"])
    body.check()
    recited = _schema_of(body.fields.get("response_format"))
    tool, named = _forced_tool(body)
    if tool is not None:
        recited = instance_text(_parameters(body.fields["tools"], tool))
    return Asked(
        family=Family.CHAT,
        prompts=[Prompt(chat_tokens(messages))] if messages else [],
        max_tokens=max_tokens,
        max_tokens_name=name,
        include_usage=include_usage,
        continuous_usage=continuous,
        recited=recited,
        tool=tool,
        tool_named=named,
        fields=body.fields,
        **common,
    )


def _common(body: Body) -> dict[str, Any]:
    """Fields that chat and completions share."""
    return {
        "model": body.string("model"),
        "n": _or_one(body.integer("n", 1)),
        "min_tokens": body.integer("min_tokens", 0, nullable=False) or 0,
        "ignore_eos": body.flag("ignore_eos", nullable=False),
        "stop": body.strings("stop"),
        "include_stop": body.flag("include_stop_str_in_output", nullable=False),
        "temperature": body.number("temperature"),
        "stream": body.flag("stream"),
        "priority": body.priority(),
        "echo": body.flag("echo"),
    }


def _or_one(value: int | None) -> int:
    return 1 if value is None else value


def _stream_options(body: Body, stream: bool) -> tuple[bool, bool]:
    options = body.mapping("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    inner = Body(options, "body.stream_options")
    include = inner.flag("include_usage")
    continuous = inner.flag("continuous_usage_stats")
    body.errors += inner.errors
    return include, include and continuous


def _messages(body: Body) -> list[tuple[str, str]]:
    found = body.items("messages")
    if found is None:
        if "messages" not in body:
            body.missing("messages")
        return []
    messages: list[tuple[str, str]] = []
    for index, message in enumerate(found):
        loc = f"body.messages.{index}"
        if not isinstance(message, dict):
            body.errors.append(error("dict_type", loc, "Input should be a valid dictionary", message))
            continue
        fields = cast("dict[str, Any]", message)
        if not isinstance(fields.get("role"), str):
            body.errors.append(error("missing", f"{loc}.role", "Field required", fields))
            continue
        text = content_text(fields.get("content"))
        if fields.get("tool_calls"):
            text += json.dumps(fields["tool_calls"])
        messages.append((fields["role"], text))
    return messages


def content_text(content: Any) -> str:
    """The text of a message; parts are joined by a line break, other media are one word."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if not isinstance(part, dict):
            texts.append(str(part))
            continue
        fields = cast("dict[str, Any]", part)
        text = fields.get("text", fields.get("content"))
        texts.append(content_text(text) if text is not None else f"<{fields.get('type', 'part')}>")
    return "\n".join(texts)


def _schema_of(response_format: Any) -> str | None:
    """The answer that a response format forces; None: it is free."""
    if not isinstance(response_format, dict):
        return None
    fields = cast("dict[str, Any]", response_format)
    if fields.get("type") == "json_object":
        return "{}"
    if fields.get("type") != "json_schema":
        return None
    inner = fields.get("json_schema", fields)  # /v1/responses has the schema beside the type
    return instance_text(cast("dict[str, Any]", inner).get("schema", {})) if isinstance(inner, dict) else "{}"


def _forced_tool(body: Body) -> tuple[str | None, bool]:
    """The function that must be called, and whether it was named."""
    choice = body.fields.get("tool_choice")
    tools = body.fields.get("tools")
    if choice is None or choice in ("none", "auto"):
        return None, False
    if not tools:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    names = _tool_names(tools)
    if choice == "required":
        return (names[0] if names else None), False
    name = None
    if isinstance(choice, dict):
        fields = cast("dict[str, Any]", choice)
        name = cast("dict[str, Any]", fields.get("function", fields)).get("name")
    if name not in names:
        raise bad_request("The tool specified in `tool_choice` does not match any of the specified `tools`")
    return name, True


def _tool_names(tools: Any) -> list[str]:
    return [tool["name"] for tool in _functions(tools)]


def _functions(tools: Any) -> list[dict[str, Any]]:
    """Function records of any API: OpenAI nests them, responses and Anthropic do not."""
    if not isinstance(tools, list):
        raise invalid(error("list_type", "body.tools", "Input should be a valid list", tools))
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(cast("list[Any]", tools)):
        fields = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
        function = fields.get("function", fields)
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise invalid(error("missing", f"body.tools.{index}.function.name", "Field required", tool))
        found.append(cast("dict[str, Any]", function))
    return found


def _parameters(tools: Any, name: str) -> Any:
    for function in _functions(tools):
        if function["name"] == name:
            return function.get("parameters", function.get("input_schema", {}))
    raise AssertionError(f"tool {name!r} was found before")


# ---------------------------------------------------------------------- completions


def read_completion(body: Body) -> Asked:
    common = _common(body)
    max_tokens = body.integer("max_tokens", None if "max_tokens" in body else _COMPLETION_MAX_TOKENS)
    found = body.fields.get("prompt")
    prompts = _prompts(body, found) if found is not None and found != "" else []
    include_usage, continuous = _stream_options(body, common["stream"])
    body.check()
    if found is None or found == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return Asked(
        family=Family.COMPLETION,
        prompts=prompts,
        max_tokens=max_tokens,
        include_usage=include_usage,
        continuous_usage=continuous,
        recited=_schema_of(body.fields.get("response_format")),
        fields=body.fields,
        **common,
    )


def _prompts(body: Body, found: Any) -> list[Prompt]:
    prompts = prompts_of(found)
    if prompts is None:
        for kind in ("list", "list", "string", "list"):  # pydantic names every form a prompt could have
            body.errors.append(error(f"{kind}_type", "body.prompt", f"Input should be a valid {kind}", found))
        return []
    return prompts


def prompts_of(found: Any) -> list[Prompt] | None:
    """A text, a list of texts, a list of token ids or a list of such lists; None: something else."""
    if isinstance(found, str):
        return [Prompt(tokenize(found))]
    if not isinstance(found, list):
        return None
    items = cast("list[Any]", found)
    if items and all(_is_token(item) for item in items):
        return [Prompt(items, given_as_text=False)]
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            prompts.append(Prompt(tokenize(item)))
        elif isinstance(item, list) and all(_is_token(token) for token in cast("list[Any]", item)):
            prompts.append(Prompt(cast("list[int]", item), given_as_text=False))
        else:
            return None
    return prompts


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


# ---------------------------------------------------------------------- responses


def read_responses(body: Body) -> Asked:
    messages: list[tuple[str, str]] = []
    instructions = body.string("instructions")
    if instructions:
        messages.append(("system", instructions))
    given = body.fields.get("input")
    if "input" not in body:
        body.missing("input")
    elif isinstance(given, str):
        messages.append(("user", given))
    elif isinstance(given, list):
        for item in cast("list[Any]", given):
            fields = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
            text = content_text(fields.get("content", fields.get("output", fields.get("arguments", ""))))
            messages.append((str(fields.get("role", fields.get("type", "user"))), text))
    else:
        body.errors.append(error("string_type", "body.input", "Input should be a valid string", given))
        body.errors.append(error("list_type", "body.input", "Input should be a valid list", given))
    model = body.string("model")
    max_tokens = body.integer("max_output_tokens")
    temperature = body.number("temperature")
    stream = body.flag("stream")
    priority = body.priority()
    ignore_eos = body.flag("ignore_eos", nullable=False)
    background, store = body.flag("background"), body.flag("store", True)
    body.check()
    if store and background:
        raise Refusal(
            400,
            "invalid_request_error",
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To "
            "enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
            "the vLLM server.",
            "background",
        )
    if body.fields.get("previous_response_id") is not None:
        raise no_response(str(body.fields["previous_response_id"]))
    text_options = body.fields.get("text")
    recited = _schema_of(cast("dict[str, Any]", text_options).get("format")) if isinstance(text_options, dict) else None
    tool, named = _forced_tool(body)
    if tool is not None:
        recited = instance_text(_parameters(body.fields["tools"], tool))
    return Asked(
        family=Family.RESPONSES,
        model=model,
        prompts=[Prompt(chat_tokens(messages))],
        max_tokens=max_tokens,
        max_tokens_name="max_output_tokens",
        ignore_eos=ignore_eos,
        temperature=temperature,
        stream=stream,
        priority=priority,
        recited=recited,
        tool=tool,
        tool_named=named,
        fields=body.fields,
    )


def no_response(response_id: str) -> Refusal:
    """Responses are not stored (vLLM's default)."""
    return Refusal(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


# ---------------------------------------------------------------------- messages (Anthropic)


def read_messages(body: Body, *, counting: bool = False) -> Asked:
    """Priority is no field of this API: whatever the body says is ignored."""
    messages = _messages(body)
    if system := content_text(body.fields.get("system")):
        messages.insert(0, ("system", system))
    model = body.string("model")
    if "model" not in body:
        body.missing("model")
    max_tokens = body.integer("max_tokens")
    if "max_tokens" not in body and not counting:
        body.missing("max_tokens")
    stop = body.strings("stop_sequences")
    temperature = body.number("temperature")
    stream = body.flag("stream")
    body.check()
    tool = _anthropic_tool(body)
    return Asked(
        family=Family.MESSAGES,
        model=model,
        prompts=[Prompt(chat_tokens(messages))] if messages else [],
        max_tokens=max_tokens,
        max_tokens_name="max_completion_tokens",
        stop=stop,
        temperature=temperature,
        stream=stream,
        recited=None if tool is None else instance_text(_parameters(body.fields["tools"], tool)),
        tool=tool,
        tool_named=True,
        fields=body.fields,
    )


def _anthropic_tool(body: Body) -> str | None:
    choice, tools = body.fields.get("tool_choice"), body.fields.get("tools")
    if not isinstance(choice, dict) or not tools:
        return None
    fields = cast("dict[str, Any]", choice)
    names = _tool_names(tools)
    if fields.get("type") == "any" and names:
        return names[0]
    if fields.get("type") == "tool" and fields.get("name") in names:
        return fields["name"]
    return None
