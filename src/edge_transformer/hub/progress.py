"""The one way in which long work on files tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, bytes done, bytes in all or 0 when unknown); called from the thread that does the work
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """A Progress that says nothing."""
