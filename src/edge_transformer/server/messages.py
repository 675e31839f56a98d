"""Messages of a request as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edge_transformer.server.errors import invalid
from edge_transformer.server.schema import AssistantMessage, Content, Message, ToolCall, ToolMessage
from edge_transformer.text.roles import template_role


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain mappings. A developer's message is a system message; parts of a content become one text; arguments of tool
    calls become objects. Raises ApiError naming the message at fault.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": template_role(str(message.__struct_config__.tag))}
    if message.content is not None:
        plain["content"] = _text(message.content)
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        plain.setdefault("content", message.refusal or "")
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls)]
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where}.function.arguments is no JSON: {error}", f"{where}.function.arguments") from error
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
