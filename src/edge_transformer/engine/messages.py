"""The messages of a prompt, checked: what is none is refused by its place and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from edge_transformer.errors import UsageError
from edge_transformer.text.roles import ASSISTANT, ROLES, USER, template_role

_MESSAGE = '{"role": "user", "content": "..."}'
_SHOWN_CHARS = 100


def chat_messages(prompt: object) -> list[Mapping[str, object]]:
    """The messages of `prompt`: a text is one of a user. Raises UsageError for what is neither text nor messages."""
    if isinstance(prompt, str):
        return [{"role": USER, "content": prompt}]
    if not _is_list(prompt):
        raise _refused("prompt", prompt, f"a text, or a list of messages such as {_MESSAGE}")
    return [_checked(message, f"prompt[{index}]") for index, message in enumerate(prompt)]


def _checked(message: object, where: str) -> Mapping[str, object]:
    if not isinstance(message, Mapping):
        raise _refused(where, message, f"a message such as {_MESSAGE}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise _refused(f"{where}['role']", role, ", ".join(ROLES))
    # An assistant that only calls tools says nothing. Where others do, many templates would leave out the turn unsaid.
    unsaid = content is None and role == ASSISTANT
    if not unsaid and not isinstance(content, str) and not _is_list(content):
        raise _refused(f"{where}['content']", content, "a text")
    return {**message, "role": template_role(role)}


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _refused(name: str, value: object, allowed: str) -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return UsageError(f"{name} is {shown}; allowed: {allowed}")
