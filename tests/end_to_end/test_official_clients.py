"""What the official clients of OpenAI and Anthropic can do, sync and async, through the gateway."""

import asyncio
import io
import json
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from end_to_end.conftest import Site
from end_to_end.processes import eventually

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Kiel?"}]
PARAMETERS: Any = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}


class Town(pydantic.BaseModel):
    town: str


def options(site: Site, key: str = "search") -> dict[str, Any]:
    return {"base_url": f"{site.gateway.url}/v1", "api_key": site.keys.get(key, key), "max_retries": 0}


def anthropic_options(site: Site, key: str = "search") -> dict[str, Any]:
    return {"base_url": site.gateway.url, "api_key": site.keys.get(key, key), "max_retries": 0}


def all_is_over(site: Site) -> bool:
    pool = site.gateway.pool()
    return pool["in_flight"] == 0 and pool["held"] == 0 and all(engine.is_idle for engine in site.engines)


# ---------------------------------------------------------------------- OpenAI

OPENAI_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FORCED: Any = {"type": "function", "function": {"name": "weather"}}


def test_openai_tools_whole_and_streamed(site: Site) -> None:
    with openai.OpenAI(**options(site)) as client:
        asked: Any = {"model": "small", "messages": MESSAGES, "tools": OPENAI_TOOLS, "tool_choice": FORCED}
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": ""})
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or ()
        assert streamed.function.arguments == call.function.arguments


def test_openai_structured_output_is_parsed(site: Site) -> None:
    async def main() -> Any:
        async with openai.AsyncOpenAI(**options(site)) as client:
            return await client.chat.completions.parse(model="small", messages=MESSAGES, response_format=Town)

    assert asyncio.run(main()).choices[0].message.parsed == Town(town="")


def test_openai_embeddings_in_base64_and_as_floats_are_the_same_numbers(site: Site) -> None:
    async def floats() -> Any:
        async with openai.AsyncOpenAI(**options(site)) as client:
            return await client.embeddings.create(model="small", input=["red", "blue"], encoding_format="float")

    with openai.OpenAI(**options(site)) as client:
        decoded = client.embeddings.create(model="small", input=["red", "blue"])  # the client asks for base64
    assert [row.embedding for row in decoded.data] == [
        pytest.approx(row.embedding, abs=1e-6) for row in asyncio.run(floats()).data
    ]


def test_openai_responses_whole_and_streamed(site: Site) -> None:
    async def streamed() -> list[Any]:
        async with openai.AsyncOpenAI(**options(site)) as client:
            events = await client.responses.create(model="small", input="Hello", max_output_tokens=5, stream=True)
            return [event async for event in events]

    with openai.OpenAI(**options(site)) as client:
        response = client.responses.create(model="small", input="Hello", max_output_tokens=5)
        assert response.output_text
    events = asyncio.run(streamed())
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


def test_openai_audio_is_transcribed(site: Site) -> None:
    sound = b"RIFF" + bytes(300_000)

    async def main() -> Any:
        async with openai.AsyncOpenAI(**options(site)) as client:
            return await client.audio.transcriptions.create(model="small", file=("a.wav", sound, "audio/wav"))

    with openai.OpenAI(**options(site)) as client:
        heard = client.audio.transcriptions.create(model="small", file=("a.wav", io.BytesIO(sound), "audio/wav"))
    assert heard.text
    assert asyncio.run(main()).text == heard.text


# ---------------------------------------------------------------------- Anthropic


def test_anthropic_messages_whole_and_streamed(site: Site) -> None:
    before = site.gateway.team("search")["usage"]
    with anthropic.Anthropic(**anthropic_options(site)) as client:
        message = client.messages.create(model="small", messages=MESSAGES, max_tokens=6)
        assert message.content[0].type == "text"
        assert message.usage.output_tokens <= 6

    async def streamed() -> Any:
        async with (
            anthropic.AsyncAnthropic(**anthropic_options(site)) as client,
            client.messages.stream(model="small", messages=MESSAGES, max_tokens=6) as stream,
        ):
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, final = asyncio.run(streamed())
    assert text == final.content[0].text
    eventually(lambda: all_is_over(site), "everything released")
    used = sum(each.usage.input_tokens + 2 * each.usage.output_tokens for each in (message, final))
    assert 0 < site.gateway.team("search")["usage"] - before <= used


def test_anthropic_tools_whole_and_streamed(site: Site) -> None:
    asked: Any = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": 50,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    with anthropic.Anthropic(**anthropic_options(site)) as client:
        (block,) = client.messages.create(**asked).content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("weather", {"town": ""})
        with client.messages.stream(**asked) as stream:
            (streamed,) = stream.get_final_message().content
        assert streamed.type == "tool_use"
        assert streamed.input == block.input


def test_anthropics_client_understands_what_is_refused(site: Site) -> None:
    with anthropic.Anthropic(**anthropic_options(site, "fs-unknown")) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model="small", messages=MESSAGES, max_tokens=1)
        assert refused.value.body["type"] == "error"  # type: ignore[index]
    with anthropic.Anthropic(**anthropic_options(site)) as client, pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="huge", messages=MESSAGES, max_tokens=1)


def test_anthropics_client_asks_for_batch_with_a_header_of_ours(site: Site) -> None:
    with anthropic.Anthropic(**anthropic_options(site)) as client:
        raw = client.messages.with_raw_response.create(
            model="small", messages=MESSAGES, max_tokens=1, extra_headers={"x-fairshare-class": "batch"}
        )
    assert raw.headers["x-fairshare-priority"] == "1"
