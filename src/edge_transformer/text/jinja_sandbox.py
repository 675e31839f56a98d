"""The Jinja environment of chat templates, with the names and filters that transformers gives them.

Imported at the first rendering only: Jinja takes tens of milliseconds to load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from edge_transformer.errors import TextError
from edge_transformer.text.jinja_bounds import RENDER_SECONDS, BoundedEnvironment, time_limit

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # RecursionError too
    SyntaxError,  # Python's, for loops nested deeper than it compiles
    TypeError,
    ValueError,
)


def compile_template(source: str) -> jinja2.Template:
    """A chat template ready to render; TextError when it is no valid Jinja."""
    try:
        return _environment().from_string(source)
    except _TEMPLATE_FAULTS as error:
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TextError(f"the model's chat template is not valid Jinja{line}: {error}") from error


def render_bounded(template: jinja2.Template, variables: Mapping[str, object], max_chars: int) -> str:
    """What `template` writes; TextError with its own message when it fails, takes longer than RENDER_SECONDS, or
    writes more than `max_chars`.
    """
    pieces = []
    total = 0
    try:
        with time_limit(RENDER_SECONDS):
            for piece in template.generate(variables):
                total += len(piece)
                if total > max_chars:
                    raise TextError(f"the model's chat template writes more than {max_chars} characters")
                pieces.append(piece)
    except _TEMPLATE_FAULTS as error:
        reason = str(error) or type(error).__name__
        raise TextError(f"the model's chat template refuses this conversation: {reason}") from error
    return "".join(pieces)


class _GenerationTag(Extension):
    """{% generation %} marks what the assistant wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """Jinja's namespace() without names that begin with an underscore, which would reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works, as in Jinja
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """dict(...) for templates, without the attributes of Python's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escaping of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}, which begins with an underscore")
