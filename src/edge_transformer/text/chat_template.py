"""A conversation rendered to the text a chat model was trained on, as transformers renders it.

The template is a Jinja program that comes with the model, so it is untrusted: it runs in Jinja's immutable sandbox,
sees plain data only, and its size and the size of what it writes are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edge_transformer.errors import TextError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 26
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one model: usually one, named "default"."""

    def __init__(self, templates: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        """`templates`: name to Jinja source, at least one. `named_tokens`: bos_token, eos_token, ... as templates see
        them.

        Raises TextError when a source is longer than MAX_TEMPLATE_CHARS. Nothing is compiled before the first
        rendering.
        """
        for name, source in templates.items():
            if len(source) > MAX_TEMPLATE_CHARS:
                raise TextError(
                    f"the chat template {name!r} has {len(source)} characters, "
                    f"more than the {MAX_TEMPLATE_CHARS} accepted"
                )
        self.templates = dict(templates)
        self.named_tokens = dict(named_tokens)
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation. Encode it with `add_bos=False`: the template writes the BOS itself.

        `messages`: each with "role" and, mostly, "content". `add_generation_prompt`: end with the start of the
        assistant's turn. `variables`: more names the template may read (enable_thinking, ...). Raises TextError when
        there is no message, when the template fails (with its own message) or writes more than MAX_OUTPUT_CHARS
        characters.
        """
        if not messages:
            raise TextError("a chat needs at least one message")
        name = self._choose(tools is not None)
        chosen = {
            **self.named_tokens,
            **_plain_mapping(variables or {}),
            "messages": [_message(message) for message in messages],
            "tools": None if tools is None else [_plain_mapping(tool) for tool in tools],
            "documents": None if documents is None else [_plain_mapping(document) for document in documents],
            "add_generation_prompt": add_generation_prompt,
        }
        from edge_transformer.text.jinja_sandbox import render_bounded

        return render_bounded(self._template(name), chosen, MAX_OUTPUT_CHARS)

    def prepare(self) -> None:
        """Compile the usual template now; a fault in it is left for the first rendering to report."""
        with suppress(TextError):
            self._template(self._choose(with_tools=False))

    def _choose(self, with_tools: bool) -> str:
        """With tools "tool_use" where there is one, else "default"; a single template whatever its name."""
        if with_tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        if len(self.templates) == 1:
            return next(iter(self.templates))
        raise TextError(f"the model has chat templates named {sorted(self.templates)}, none of them 'default'")

    def _template(self, name: str) -> Template:
        compiled = self._compiled.get(name)
        if compiled is None:
            from edge_transformer.text.jinja_sandbox import compile_template

            compiled = self._compiled[name] = compile_template(self.templates[name])
        return compiled


def missing_chat_template(model: object) -> TextError:
    """The error for a chat with a model that has no template."""
    return TextError(
        f"{model} has no chat template (it may be a base model), so it is not known how to write a conversation "
        "for it: use --raw to give it plain text to continue"
    )


def _message(message: Mapping[str, object]) -> dict[str, object]:
    """Plain copy of a message, without keys whose value is None; reasoning under each name that templates read."""
    plain = {key: value for key, value in _plain_mapping(message).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_mapping(value: Mapping[str, object]) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise TextError(f"messages, tools and documents must be mappings, got {type(value).__name__}")
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: object) -> object:
    """`value` out of exact JSON types only, so that a template finds no method that could do harm."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    raise TextError(
        f"chat data must be text, numbers, true, false, null, lists and mappings, got {type(value).__name__}"
    )
