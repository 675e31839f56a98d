"""What is in an answer's text besides content: reasoning, and calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_transformer.engine.answer import Constraint
from edge_transformer.server.call_reader import BrokenCallError, CallPart, CallReader
from edge_transformer.server.tool_syntax import ToolSyntax

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text adds to a message. calls: entries of `tool_calls` as chunks have them."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """As a chunk says it."""
        fields: dict[str, Any] = {}
        if self.content is not None:
            fields["content"] = self.content
        if self.reasoning is not None:
            fields["reasoning_content"] = self.reasoning
        if self.calls:
            fields["tool_calls"] = self.calls
        return fields


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one request are to be read, and what they may hold.

    reasons: the model's family writes its reasoning between <think> and </think>. in_reasoning: the prompt ends inside.
    tools: how calls are written, where tools may be called. constraints: one per choice, or none.
    """

    reasons: bool = False
    in_reasoning: bool = False
    tools: ToolSyntax | None = None
    constraints: Sequence[Constraint] = ()

    def parser(self) -> Parser:
        """For one choice."""
        return Parser(self)


class Parser:
    """Takes the text of one choice apart, piece by piece. What may be the beginning of a mark is kept back."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._mode = "reasoning" if answer_format.in_reasoning else "content"
        self._text = ""
        self._at_start = True  # nothing but blanks so far, in this mode
        self._blanks = ""  # kept back: they count only when something follows
        self._reader: CallReader | None = None
        self._raw = ""  # of a call that may turn out to be none
        self._told = False
        self._calls = 0

    def push(self, text: str) -> list[Delta]:
        """What is certain now."""
        if not self._format.reasons and self._format.tools is None:
            return [Delta(content=text)]
        self._text += text
        deltas: list[Delta] = []
        while self._text and self._next(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What was kept back, when the text has ended."""
        deltas: list[Delta] = []
        rest, self._text = self._text, ""
        if self._mode == "call":
            if not self._told:
                deltas += self._content(self._raw)
        elif rest:
            deltas += self._reasoning(rest) if self._mode == "reasoning" else self._content(rest)
        if self._mode == "content" and self._blanks and not self._at_start and not self._calls:
            deltas.append(Delta(content=self._blanks))
        return deltas

    def finish_reason(self, reason: str) -> str:
        """`reason`, or "tool_calls" where the text called a tool and then ended by itself."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _next(self, deltas: list[Delta]) -> bool:
        """Work on what there is; False when more must come."""
        if self._mode == "reasoning":
            before, mark, after = self._text.partition(THINK_END)
            keep = 0 if mark else _possible_beginning(before, [THINK_END])
            deltas += self._reasoning(before[: len(before) - keep])
            self._text = after if mark else before[len(before) - keep :]
            if mark:
                self._enter("content")
            return bool(mark)
        if self._mode == "call":
            return self._read_call(deltas)
        return self._read_content(deltas)

    def _read_content(self, deltas: list[Delta]) -> bool:
        syntax = self._format.tools
        if self._at_start:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            if self._format.reasons and not self._calls:
                if self._text.startswith(THINK):
                    self._text = self._text.removeprefix(THINK)
                    self._enter("reasoning")
                    return True
                if THINK.startswith(self._text):
                    return False
            if syntax is not None and not syntax.open_mark and (self._text[0] in "{[" or self._calls):
                self._text = self._text.lstrip("[,;] \n")
                if not self._text:
                    return False
                self._begin_call(syntax)
                return True
        marks = [syntax.open_mark] if syntax is not None and syntax.open_mark else []
        place = self._text.find(marks[0]) if marks else -1
        if place >= 0 and syntax is not None:
            deltas += self._content(self._text[:place])
            self._text = self._text[place + len(marks[0]) :]
            self._begin_call(syntax)
            return True
        keep = _possible_beginning(self._text, marks)
        deltas += self._content(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _begin_call(self, syntax: ToolSyntax) -> None:
        self._reader, self._raw, self._told = syntax.reader(), syntax.open_mark, False
        self._mode = "call"

    def _read_call(self, deltas: list[Delta]) -> bool:
        syntax, reader = self._format.tools, self._reader
        assert syntax is not None
        assert reader is not None
        text, self._text = self._text, ""
        if not reader.done:
            self._raw += text
            try:
                parts, text = reader.push(text)
            except BrokenCallError:
                self._mode, self._at_start = "content", False
                if not self._told:
                    deltas += self._content(self._raw)
                return False
            deltas += [self._call(part) for part in parts]
            if not reader.done:
                return False
        text = text.lstrip()
        if syntax.close_mark.startswith(text) and text != syntax.close_mark:
            self._text = text
            return False
        self._text = text.removeprefix(syntax.close_mark)
        self._enter("content")
        return True

    def _call(self, part: CallPart) -> Delta:
        function = {"arguments": part.arguments}
        if part.name is None:
            return Delta(calls=[{"index": self._calls - 1, "function": function}])
        self._told = True
        self._calls += 1
        head = {"index": self._calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return Delta(calls=[{**head, "function": {"name": part.name, **function}}])

    def _enter(self, mode: str) -> None:
        self._mode, self._at_start, self._blanks = mode, True, ""

    def _reasoning(self, text: str) -> list[Delta]:
        text = self._without_border_blanks(text)
        return [Delta(reasoning=text)] if text else []

    def _content(self, text: str) -> list[Delta]:
        text = self._without_border_blanks(text)
        return [Delta(content=text)] if text else []

    def _without_border_blanks(self, text: str) -> str:
        """`text` without blanks at the start of its part, and without those at its end, kept for what follows."""
        text = self._blanks + text
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :] if not self._at_start else ""
        return stripped


def _possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that a mark begins with."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[len(text) - length :]) for mark in marks):
            return length
    return 0
