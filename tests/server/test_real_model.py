"""The demo model behind `ete serve`, asked by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from edge_transformer import LLM
from paths import smollm2_path
from server.test_lifecycle import process
from server.tiny_server import Served

pytestmark = pytest.mark.real_model

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """What the model is asked to fill in."""

    name: str
    country: str
    capital: bool


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with process(smollm2_path()) as (_, served):
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


def test_an_answer_is_that_of_the_engine(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=PARIS, temperature=0)
    with LLM(smollm2_path()) as llm:
        generation = llm.generate(PARIS)
    assert answer.choices[0].message.content == generation.text == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(generation.ids)


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=PARIS, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France is Paris."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_async_streams_equal_those_alone(served: Served, client: openai.OpenAI) -> None:
    def settings(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Tell me about the number {number}."}]
        return {"model": "tiny", "messages": messages, "seed": number, "max_tokens": 24}

    async def ask(asking: openai.AsyncOpenAI, number: int) -> str:
        stream = await asking.chat.completions.create(**settings(number), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as asking:
            return await asyncio.gather(*(ask(asking, number) for number in range(8)))

    together = asyncio.run(ask_all())
    alone = [client.chat.completions.create(**settings(number)).choices[0].message.content for number in range(8)]
    assert together == alone


def test_a_parsed_schema(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
    answer = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=City, temperature=0, max_tokens=120
    )
    city = answer.choices[0].message.parsed
    assert city is not None
    assert city.name == "Paris"


def test_json_mode(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write the name of a city as JSON."}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, response_format={"type": "json_object"}, temperature=0, max_tokens=120
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    settings: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
    }
    if stream:
        with client.chat.completions.stream(**settings) as events:
            final = events.get_final_completion()
    else:
        final = client.chat.completions.create(**settings)
    assert final.choices[0].finish_reason == "tool_calls"
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Rome"
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=40
    )
    assert answer.choices[0].message.content


def test_a_text_goes_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="One, two, three,", temperature=0, max_tokens=4)
    assert answer.choices[0].text == " four, five,"
