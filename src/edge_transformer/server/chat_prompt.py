"""From a chat request to the tokens the model continues, and how its answer is to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from msgspec import to_builtins

from edge_transformer.engine.answer import Constraint
from edge_transformer.engine.llm import LLM
from edge_transformer.server.answer_format import THINK, THINK_END, AnswerFormat
from edge_transformer.server.errors import invalid
from edge_transformer.server.grammar import AfterMark, Grammars, json_grammar
from edge_transformer.server.messages import template_messages
from edge_transformer.server.parameters import too_long
from edge_transformer.server.prompt_text import encode_prompt, refuse_endless
from edge_transformer.server.schema import ChatRequest, NamedTool, TokenizeRequest
from edge_transformer.server.tool_syntax import ANY_OBJECT, ToolSyntax, describe_tools, tool_syntax
from edge_transformer.text.chat_template import ChatTemplate, missing_chat_template


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    ids: list[int]
    format: AnswerFormat


def chat_prompt(llm: LLM, grammars: Grammars, request: ChatRequest) -> ChatPrompt:
    """Renders and encodes: takes as long as the conversation is. Raises ApiError, TextError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    template = _template(llm)
    functions = _functions(request)
    syntax = _syntax(template, functions, request)
    messages = template_messages(request.messages)
    tools: list[Any] | None = None
    if syntax is not None:
        tools = [to_builtins(tool) for tool in request.tools or ()]
        tools = [{**tool, "function": _without_nulls(tool["function"])} for tool in tools]
        if not syntax.described:
            messages, tools = describe_tools(messages, tools), None
    reasons = any(THINK_END in source for source in template.templates.values())
    text = template.render(messages, tools=tools, variables=_variables(request, reasons))
    ids = encode_prompt(llm, text, "messages", add_bos=False)
    if len(ids) + 1 > llm.context_length:
        raise too_long(len(ids), llm.context_length, "messages")
    if not ids:
        raise invalid("the conversation has no token to start from", "messages")
    in_reasoning = reasons and text.rstrip().endswith(THINK)
    constraints = _constraints(llm, grammars, request, syntax, functions, in_reasoning)
    return ChatPrompt(ids, AnswerFormat(reasons, in_reasoning, syntax, constraints))


def tokens_of(llm: LLM, request: TokenizeRequest) -> list[int]:
    """The tokens of a text or of a chat, also of one that the context does not hold. Raises ApiError, TextError."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.prompt is not None:
        text, param = request.prompt, "prompt"
        add_bos = False if request.add_special_tokens is False else None
    else:
        text, param = _template(llm).render(template_messages(request.messages or [])), "messages"
        add_bos = False
    refuse_endless(llm, text, param)
    return llm.tokenizer.encode(text, add_bos=add_bos)


def _template(llm: LLM) -> ChatTemplate:
    if llm.chat_template is None:
        raise missing_chat_template(llm.path)
    return llm.chat_template


def _variables(request: ChatRequest, reasons: bool) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if not reasons:
            if request.reasoning_effort == "none":  # what it does anyway
                return variables
            effort = f"this model does not reason; leave reasoning_effort {request.reasoning_effort!r} out"
            raise invalid(effort, "reasoning_effort")
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables


def _functions(request: ChatRequest) -> dict[str, dict[str, Any]]:
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(request.tools or ()):
        name = tool.function.name
        if name in functions:
            raise invalid(f"two tools are named {name!r}", f"tools[{index}].function.name")
        functions[name] = dict(tool.function.parameters or ANY_OBJECT)
    return functions


def _syntax(template: ChatTemplate, functions: dict[str, dict[str, Any]], request: ChatRequest) -> ToolSyntax | None:
    """How calls are written, where any may be made."""
    choice = request.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
        return None
    if isinstance(choice, NamedTool) and choice.function.name not in functions:
        raise invalid(f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice")
    if choice == "none":
        return None
    syntax = tool_syntax(template, functions)
    if syntax is None:
        raise invalid("this model's template writes calls of tools in a way that is not read here", "tools")
    return syntax


def _constraints(
    llm: LLM,
    grammars: Grammars,
    request: ChatRequest,
    syntax: ToolSyntax | None,
    functions: dict[str, dict[str, Any]],
    in_reasoning: bool,
) -> Sequence[Constraint]:
    """What keeps the answers to JSON, or to calls of the functions there are; nothing where neither is asked."""
    choices = request.n or 1
    grammar, param = _response_grammar(request)
    choice = request.tool_choice
    if syntax is not None:
        if isinstance(choice, NamedTool):
            functions = {choice.function.name: functions[choice.function.name]}
        if choice not in (None, "auto"):
            one = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
            grammar, param = syntax.calls_grammar(functions, one), "tools"
        elif grammar is None:
            if not syntax.open_mark:
                return ()
            matcher = grammars.matcher(LLMatcher.grammar_from_lark(syntax.call_grammar(functions)), "tools")
            again = request.parallel_tool_calls is not False
            return [AfterMark(llm, syntax.open_mark, matcher.copy(), again) for _ in range(choices)]
        if param == "tools":
            grammar = LLMatcher.grammar_from_lark(grammar or "")
    if grammar is None:
        return ()
    matcher = grammars.matcher(grammar, param)
    if in_reasoning:
        return [AfterMark(llm, THINK_END, matcher.copy(), again=False) for _ in range(choices)]
    return [matcher.copy() for _ in range(choices)]


def _response_grammar(request: ChatRequest) -> tuple[str | None, str]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None, ""
    if asked.type == "json_object":
        return json_grammar(ANY_OBJECT, "response_format"), "response_format"
    param = "response_format.json_schema.schema"
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", param)
    return json_grammar(asked.json_schema.schema, param), param


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
