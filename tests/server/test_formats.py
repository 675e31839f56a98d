"""Reasoning and calls of tools taken out of answers, whatever pieces their text comes in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from edge_transformer.server.answer_format import AnswerFormat, Delta
from edge_transformer.server.tool_syntax import describe_tools, tool_syntax
from edge_transformer.text.chat_template import ChatTemplate

FUNCTIONS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}}},
}
HERMES = "{{ tools }}<tool_call>"
TAGGED = "{{ tools }}<tool_call><function=x>"
LLAMA = '{{ tools }}{"name": x, "parameters": y}'


def read(answer_format: AnswerFormat, text: str, seed: int) -> tuple[dict[str, Any], str]:
    """The message that pieces of `text` add up to, and the finish reason."""
    draw = random.Random(seed)
    parser = answer_format.parser()
    deltas: list[Delta] = []
    rest = text
    while rest:
        count = draw.choice([1, 1, 2, 5, 40])
        deltas += parser.push(rest[:count])
        rest = rest[count:]
    deltas += parser.finish()
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in deltas:
        message["content"] += delta.content or ""
        message["reasoning"] += delta.reasoning or ""
        for call in delta.calls:
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], call["function"]["arguments"]])
            else:
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    message["calls"] = [(name, json.loads(arguments)) for name, arguments in message["calls"]]
    return message, parser.finish_reason("stop")


def syntax_of(template: str) -> AnswerFormat:
    return AnswerFormat(tools=tool_syntax(ChatTemplate({"default": template}, {}), FUNCTIONS))


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}<"}]}}'
ADDED = ("add", {"a": 1, "b": [2, {"c": "}<"}]})

CALLS = [
    (HERMES, "only text, 1 < 2 <tool", "only text, 1 < 2 <tool", []),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
    (HERMES, f"  Let me see.\n\n<tool_call>{ADD}</tool_call>\n", "Let me see.", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "", [ADDED, ADDED]),
    (HERMES, '<tool_call>{"arguments": {"a": 3}, "name": "add"}</tool_call>', "", [("add", {"a": 3})]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 3}"}</tool_call>', "", [("add", {"a": 3})]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (HERMES, '<tool_call>{"name": "say", "arguments": {"text": "a \\" </tool_call> b"}}</tool_call>', "",
     [("say", {"text": 'a " </tool_call> b'})]),
    (HERMES, "<tool_call>not JSON</tool_call> and on", "<tool_call>not JSON</tool_call> and on", []),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (TAGGED, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n"
     "</function>\n</tool_call>", "", [("add", {"a": 1, "b": [2]})]),
    (TAGGED, "Yes.\n<tool_call>\n<function=say>\n<parameter=text>\n12 <b>\nline\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "Yes.",
     [("say", {"text": "12 <b>\nline"}), ("now", {})]),
    (TAGGED, "<tool_call>\nadd 1", "<tool_call>\nadd 1", []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "",
     [("add", {"a": 1}), ("now", {})]),
    (LLAMA, "{1, 2} is a set", "{1, 2} is a set", []),
    (LLAMA, "Hello {name}", "Hello {name}", []),
    ("[TOOL_CALLS] {{ tools }}", f"[{ADD}]", "", [ADDED]),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("template", "text", "content", "calls"), CALLS)
def test_calls_are_taken_out(template: str, text: str, content: str, calls: list[object], seed: int) -> None:
    message, reason = read(syntax_of(template), text, seed)
    assert message == {"content": content, "reasoning": "", "calls": calls}
    assert reason == ("tool_calls" if calls else "stop")


REASONING = [
    (True, "I think.\n</think>\n\nYes.", "I think.", "Yes."),
    (False, "<think>\nI think.\n</think>\n\nYes.\n", "I think.", "Yes.\n"),
    (False, "\n<think>\n\n</think>\n\nYes <think> no", "", "Yes <think> no"),
    (False, "Plain </think> text", "", "Plain </think> text"),
    (True, "never ends </thin", "never ends </thin", ""),
    (False, "<thin", "", "<thin"),
    (False, "  code\n", "", "code\n"),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), REASONING)
def test_reasoning_is_taken_out(inside: bool, text: str, reasoning: str, content: str, seed: int) -> None:
    message, _ = read(AnswerFormat(reasons=True, in_reasoning=inside), text, seed)
    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_reasoning_before_a_call() -> None:
    answer_format = AnswerFormat(reasons=True, tools=syntax_of(HERMES).tools)
    text = f"<think>\nI need add.\n</think>\n\n<tool_call>\n{ADD}\n</tool_call>"
    for seed in range(8):
        message, reason = read(answer_format, text, seed)
        assert message == {"content": "", "reasoning": "I need add.", "calls": [ADDED]}
        assert reason == "tool_calls"


def test_other_text_passes_as_it_is() -> None:
    text = "  <think> <tool_call> \n "
    assert read(AnswerFormat(), text, 1)[0]["content"] == text


def test_a_template_without_tools_gets_them_described() -> None:
    syntax = tool_syntax(ChatTemplate({"default": "{{ messages }}"}, {}), FUNCTIONS)
    assert syntax is not None
    assert not syntax.described
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    system, assistant, tool = describe_tools(messages, [{"type": "function", "function": {"name": "add"}}])
    assert system["content"].startswith("Be kind.")
    assert '{"type": "function", "function": {"name": "add"}}' in system["content"]
    assert assistant["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert tool == {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}


def test_a_template_of_unknown_ways_is_told_apart() -> None:
    assert tool_syntax(ChatTemplate({"default": "{{ tools }} call them somehow"}, {}), FUNCTIONS) is None
