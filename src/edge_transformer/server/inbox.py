"""From the scheduler's thread to the event loop: what becomes of one request, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from edge_transformer.engine.answer import Piece


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` prompt tokens are processed, `cached` of them were found from an earlier request. choice: the
    first of the request's.
    """

    choice: int
    done: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """What a token added to one choice."""

    choice: int
    piece: Piece


Event = Progress | ChoicePiece | Exception


class Inbox:
    """It holds what the reader has not taken yet: an answer at most, however slow it reads."""

    def __init__(self) -> None:
        """To be made in the loop that reads."""
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()

    async def read(self, timeout_s: float | None) -> list[Event]:
        """All events there are, when there are any; none after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return []
        self._ready.clear()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def put(self, event: Event) -> None:
        """May be called from any thread."""
        first = not self._events
        self._events.append(event)
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)
