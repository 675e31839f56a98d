"""Answers kept to a grammar by a model that knows nothing: JSON, schemas, calls of tools, reasoning before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from server.tiny_server import TEMPLATE, Served, serving, write_chat_model

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 12},
        "done": {"type": "boolean"},
        "tags": {"type": "array", "items": {"const": "x"}, "maxItems": 2},
    },
    "required": ["kind", "count", "done", "tags"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "set_kind", "description": "Sets it.", "parameters": SCHEMA},
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}


def create(served: Served, **settings: Any) -> Any:
    return served.client().chat.completions.create(model="tiny", messages=HELLO, **settings)


@pytest.mark.parametrize("seed", range(4))
def test_json_of_a_schema(served: Served, seed: int) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = create(served, response_format=asked, seed=seed, max_tokens=200, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))


def test_a_json_object_is_an_object_as_far_as_it_goes(served: Served) -> None:
    answer = create(served, response_format={"type": "json_object"}, max_tokens=30, temperature=0)
    content = answer.choices[0].message.content
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(content)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "no text keeps to it"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "Too many items"),
        ({"const": [None] * 100_000}, "panic"),
        ({"type": "string", "pattern": "(" * 5000}, "regex parse error"),
    ],
)
def test_a_schema_that_no_grammar_is_made_of_is_refused_in_a_line(
    served: Served, schema: dict[str, Any], reason: str
) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=reason) as error:
        create(served, response_format=asked, max_tokens=5)
    message = error.value.body["message"]  # type: ignore[index,call-overload]
    assert len(message) < 400
    assert "\n" not in message
    assert "<backtrace>" not in message
    assert "<state>" not in message


def test_a_schema_that_is_none(served: Served) -> None:
    for schema in ({"type": "strange"}, {"$ref": "http://elsewhere/schema"}, {"pattern": "(", "type": "string"}):
        asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as error:
            create(served, response_format=asked)
        assert error.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError):
        create(served, response_format={"type": "json_schema"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required(served: Served, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "set_kind"}}
    answer = create(served, tools=[OTHER, TOOL], tool_choice=choice, max_tokens=300, seed=1, stream=stream)
    if stream:
        name, arguments, reason = "", "", None
        for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        reason = answer.choices[0].finish_reason
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert answer.choices[0].message.content is None
    assert (name, reason) == ("set_kind", "tool_calls")
    jsonschema_rs.validate(SCHEMA, json.loads(arguments))


def test_tools_that_contradict_themselves(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="two tools"):
        create(served, tools=[TOOL, TOOL])
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        create(served, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}})


def test_results_of_calls_are_read(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "stopped"},
    ]
    client = served.client()
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[OTHER], max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len("stopped") + len("<tool_response>")


def test_reasoning_is_told_apart_from_json(tmp_path: Path) -> None:
    template = TEMPLATE.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
    path = write_chat_model(tmp_path / "thinker", template=template)
    with serving(path) as served:
        # The token of </think> is forced, after which the grammar holds.
        end = served.service.running.llm.tokenizer.token_id("</think>")
        asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        answer = create(served, response_format=asked, max_tokens=200, temperature=0, logit_bias={str(end): 100})
        jsonschema_rs.validate(SCHEMA, json.loads(answer.choices[0].message.content))
        free = create(served, max_tokens=10, temperature=0)
        assert free.choices[0].message.content in (None, "")
        assert free.choices[0].message.reasoning_content
        quiet = create(served, max_tokens=3, temperature=0, reasoning_effort="none")
        assert quiet.choices[0].finish_reason == "length"
