"""How the families write calls of tools: told from the model's chat template, which taught it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_transformer.server.call_reader import CallReader, JsonCallReader, TaggedCallReader
from edge_transformer.server.grammar import JSON_LAYOUT
from edge_transformer.text.chat_template import ChatTemplate

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

Functions = Mapping[str, Mapping[str, Any]]
"""Name to JSON schema of the parameters."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """open_mark, close_mark: what stands around a call; both empty where a call is the whole answer. reader: for one
    call. grammar: of one call without its marks, of these functions, in llguidance's Lark. described: the template
    describes tools by itself.
    """

    open_mark: str
    close_mark: str
    reader: Callable[[], CallReader]
    grammar: Callable[[Functions], str]
    described: bool = True

    def calls_grammar(self, functions: Functions, one: bool) -> str:
        """The grammar of an answer that calls: once, or as often as it likes."""
        marked = f"{_quoted(self.open_mark + self._gap)} call {_quoted(self._gap + self.close_mark)}"
        if not self.open_mark:
            return f"%llguidance {{}}\nstart: call\n{self.grammar(functions)}"
        many = "start: marked" if one else 'start: marked ("\\n" marked)*'
        return f"%llguidance {{}}\n{many}\nmarked: {marked}\n{self.grammar(functions)}"

    def call_grammar(self, functions: Functions) -> str:
        """The grammar of what follows the opening mark."""
        end = _quoted(self._gap + self.close_mark)
        return f"%llguidance {{}}\nstart: {_quoted(self._gap)} call {end}\n{self.grammar(functions)}"

    @property
    def _gap(self) -> str:
        return "\n" if self.open_mark else ""


def tool_syntax(template: ChatTemplate, functions: Functions) -> ToolSyntax | None:
    """How a model with this template writes calls; None when its template does it in a way that is not read here.

    A template that knows no tools gets them described in the system message, in the way of the Hermes models.
    """
    source = "\n".join(template.templates.values())
    described = re.search(r"\btools\b", source) is not None
    if "<function=" in source:
        return ToolSyntax("<tool_call>", "</tool_call>", lambda: TaggedCallReader(functions), _tagged_grammar)
    if "<tool_call>" in source or not described:
        grammar = _json_grammar("arguments")
        return ToolSyntax("<tool_call>", "</tool_call>", JsonCallReader, grammar, described)
    if "[TOOL_CALLS]" in source:
        return ToolSyntax("", "", JsonCallReader, _json_grammar("arguments"))
    if '"parameters"' in source:
        return ToolSyntax("", "", JsonCallReader, _json_grammar("parameters"))
    return None


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: described in the system message, calls and results as text."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = (
        "You can call functions. These are their signatures:\n<tools>\n" + lines + "\n</tools>\n"
        "To call one, write its name and its arguments as a JSON object between these tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
    plain = [_as_text(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{description}"}, *plain[1:]]
    return [{"role": "system", "content": description}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = str(message.get("content") or "")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls", ()):
        written = json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False
        )
        content += f"\n<tool_call>\n{written}\n</tool_call>"
    return {"role": message["role"], "content": content.strip()}


def _json_grammar(arguments: str) -> Callable[[Functions], str]:
    def grammar(functions: Functions) -> str:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, arguments: schema},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for name, schema in functions.items()
        ]
        return "call: %json " + json.dumps({"x-guidance": JSON_LAYOUT, "anyOf": calls}) + "\n"

    return grammar


def _tagged_grammar(functions: Functions) -> str:
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, (name, schema) in enumerate(functions.items()):
        properties = schema.get("properties", {})
        keys = [_quoted(key) for key in properties] if isinstance(properties, dict) else []
        parameters = f"parameter_{index}*" if keys else ""
        rules.append(f"call_{index}: {_quoted(f'<function={name}>' + chr(10))} {parameters} {_quoted('</function>')}")
        if keys:
            rules.append(f'parameter_{index}: "<parameter=" ({" | ".join(keys)}) ">\\n" value')
    rules.append('value[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)
