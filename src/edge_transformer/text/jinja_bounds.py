"""Jinja's immutable sandbox with an end: a template gets so much time, and makes no value beyond reason.

Time is looked at wherever a template can repeat itself: in the body of each loop and macro.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_LENGTH = 1 << 26
MAX_EXPONENT = 64
RENDER_SECONDS = 10.0
"""Published templates take milliseconds for long conversations."""

_WIDE_FIELD = re.compile(r"\d{7}|\*|\{[^{}]*\{")

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Templates of a BoundedEnvironment raise OverflowError when the block has run for longer."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises OverflowError where a template takes too long, or wants a value that is too long or too large."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def check_time(self) -> str:
        """Called from the bodies of loops and macros."""
        if time.monotonic() > _deadline.get():
            raise OverflowError("it takes too long")
        return ""

    def join_text(self, *values: object) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > MAX_LENGTH or abs(right) > MAX_EXPONENT):
            raise OverflowError(f"{left} ** {right} is refused")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    _check_length(len(sequence) * count)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_fields(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  names of Jinja's
        if isinstance(getattr(__obj, "__self__", None), str):  # center, ljust, zfill, expandtabs ...
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check_length(value)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_text = super().wrap_str_format(value)
        if format_text is not None:
            _check_fields(value.__self__)
        return format_text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _AddChecks().visit(super()._parse(source, name, filename))
        return template


class _AddChecks(NodeTransformer):
    """Puts the calls of the environment's checks into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  named by Jinja
        self.generic_visit(node)
        node.body.insert(0, _check_time(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _check_time(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("join_text", node.nodes, node.lineno)


def _check_time(line: int) -> nodes.Node:
    return nodes.ExprStmt(_call("check_time", [], line), lineno=line)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise OverflowError(f"a value of length {length} is refused")


def _check_fields(pattern: str) -> None:
    """Refuse a format that widens its fields beyond reason."""
    if _WIDE_FIELD.search(pattern):
        raise OverflowError(f"the format {pattern[:80]!r} is refused")
