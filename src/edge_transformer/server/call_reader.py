"""One call of a tool, read from text that comes in pieces. Three ways of writing calls are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class CallPart:
    """name: with the first part of a call. arguments: JSON text to append."""

    name: str | None
    arguments: str


class BrokenCallError(Exception):
    """The text is no call."""


class CallReader(Protocol):
    """Reads one call. `done`: it is complete, and what follows is not part of it."""

    done: bool

    def push(self, text: str) -> tuple[list[CallPart], str]:
        """What is certain now, and the rest of `text` that lies behind the call. Raises BrokenCallError."""
        ...


class JsonCallReader:
    """{"name": NAME, "arguments": {...}}; "parameters" is as good as "arguments". Arguments are passed on as they come,
    once the name is known.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._token = ""  # of the present key or value at depth 1
        self._in_value = False
        self._name: str | None = None
        self._held = ""  # arguments that came before the name
        self._has_arguments = False

    def push(self, text: str) -> tuple[list[CallPart], str]:
        parts: list[CallPart] = []
        for index, character in enumerate(text):
            self._step(character, parts)
            if self.done:
                return _joined(parts), text[index + 1 :]
        return _joined(parts), ""

    def _step(self, character: str, parts: list[CallPart]) -> None:
        if self._depth == 0:
            if character.isspace():
                return
            if character != "{":
                raise BrokenCallError
            self._depth = 1
            return
        if self._in_string:
            self._take(character, parts)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return
        if character == "<":  # outside a string it begins the end mark: the JSON is incomplete
            raise BrokenCallError
        if self._depth == 1 and character in ":,}":
            self._at_border(character, parts)
            return
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        self._take(character, parts)

    def _at_border(self, character: str, parts: list[CallPart]) -> None:
        if character == ":":
            self._key = _parsed(self._token)
            self._token, self._in_value = "", True
            return
        if self._in_value:
            self._end_value(parts)
        self._token, self._key, self._in_value = "", None, False
        if character == "}":
            self._depth = 0
            if self._name is None:
                raise BrokenCallError
            if not self._has_arguments:
                parts.append(CallPart(None, "{}"))
            self.done = True

    def _take(self, character: str, parts: list[CallPart]) -> None:
        if self._in_value and self._key in ("arguments", "parameters"):
            begun = bool(self._token)
            if not begun and character.isspace():
                return
            self._token += character
            # Arguments written as a string hold JSON themselves: they are passed on when they are whole.
            if not self._token.startswith('"') and not (self._depth == 1 and character.isspace()):
                self._has_arguments = True
                self._give(character, parts)
            return
        self._token += character

    def _give(self, text: str, parts: list[CallPart]) -> None:
        if self._name is None:
            self._held += text
        else:
            parts.append(CallPart(None, text))

    def _end_value(self, parts: list[CallPart]) -> None:
        if self._key == "name":
            name = _parsed(self._token)
            if not isinstance(name, str) or self._name is not None:
                raise BrokenCallError
            self._name = name
            parts.append(CallPart(name, self._held))
            self._held = ""
        elif self._key in ("arguments", "parameters") and self._token.startswith('"'):
            self._has_arguments = True
            self._give(str(_parsed(self._token)), parts)


class TaggedCallReader:
    """<function=NAME> <parameter=KEY>VALUE</parameter> ... </function>, as newer Qwen models write calls. What type a
    value has is known from the function's schema.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """functions: name to JSON schema of the parameters."""
        self.done = False
        self._functions = functions
        self._text = ""
        self._name: str | None = None
        self._count = 0

    def push(self, text: str) -> tuple[list[CallPart], str]:
        self._text += text
        parts: list[CallPart] = []
        while self._next(parts):
            pass
        return _joined(parts), self._text if self.done else ""

    def _next(self, parts: list[CallPart]) -> bool:
        """Take one tag and what it holds off the text; False when that is not all there yet."""
        if self.done:
            return False
        self._text = self._text.lstrip()
        if self._name is None:
            name = self._between("<function=", ">")
            if name is None:
                return False
            self._name = name.strip()
            parts.append(CallPart(self._name, ""))
            return True
        if self._text.startswith("</function>"):
            self._text = self._text.removeprefix("</function>")
            parts.append(CallPart(None, "}" if self._count else "{}"))
            self.done = True
            return True
        parameter = self._between("<parameter=", "</parameter>")
        if parameter is None:
            return False
        key, mark, value = parameter.partition(">")
        if not mark:
            raise BrokenCallError
        member = f"{json.dumps(key.strip(), ensure_ascii=False)}: {self._typed(key.strip(), value)}"
        parts.append(CallPart(None, (", " if self._count else "{") + member))
        self._count += 1
        return True

    def _between(self, start: str, end: str) -> str | None:
        """The text between two marks at the beginning of what there is, taken off it; None when more must come."""
        if not self._text.startswith(start[: len(self._text)]):
            if self._name is not None and self._text.startswith("</function>"[: len(self._text)]):
                return None
            raise BrokenCallError
        place = self._text.find(end)
        if place < 0:
            return None
        found = self._text[len(start) : place]
        self._text = self._text[place + len(end) :]
        return found

    def _typed(self, key: str, value: str) -> str:
        value = value.removeprefix("\n").removesuffix("\n")
        properties = self._functions.get(self._name or "", {}).get("properties", {})
        schema = properties.get(key, {}) if isinstance(properties, dict) else {}
        if not isinstance(schema, dict) or schema.get("type") != "string":
            try:
                return json.dumps(json.loads(value), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(value, ensure_ascii=False)


def _parsed(token: str) -> Any:
    try:
        return json.loads(token)
    except (ValueError, RecursionError) as error:
        raise BrokenCallError from error


def _joined(parts: list[CallPart]) -> list[CallPart]:
    """Parts of one push as few parts: characters that came together are told together."""
    joined: list[CallPart] = []
    for part in parts:
        if joined and part.name is None:
            joined[-1] = CallPart(joined[-1].name, joined[-1].arguments + part.arguments)
        else:
            joined.append(part)
    return joined
