"""Who speaks in a conversation: the roles that a message may have, of the Python API and of the server alike."""

from __future__ import annotations

ROLES = SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = ("system", "developer", "user", "assistant", "tool")


def template_role(role: str) -> str:
    """As chat templates know it: a developer's message is a system message under its newer name."""
    return SYSTEM if role == DEVELOPER else role
