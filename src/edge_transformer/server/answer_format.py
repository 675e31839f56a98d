"""What is in an answer's text besides content: reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edge_transformer.engine.answer import Constraint


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


class Parser(Protocol):
    """Takes the text of one choice apart, piece by piece."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was kept back, when the text has ended."""
        ...

    def finish_reason(self, reason: str) -> str:
        """`reason`, or "tool_calls" where the text called a tool."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Delta]:
        return [Delta(content=text)]

    def finish(self) -> list[Delta]:
        return []

    def finish_reason(self, reason: str) -> str:
        return reason


class AnswerFormat:
    """How the answers of one request are to be read, and what they may hold."""

    def parser(self) -> Parser:
        return PlainParser()

    def constraints(self, choices: int) -> Sequence[Constraint]:
        """One per choice, or none at all."""
        return ()
