"""What a client waits for: one request of the scheduler, or one for each of several prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from edge_transformer.engine.answer import Piece
from edge_transformer.engine.request import Request
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.server.delivery import FIRST_BYTES_S, KEEP_ALIVE_S
from edge_transformer.server.inbox import ChoicePiece, Event, Inbox, Progress


class Job:
    """Requests whose events come in one order. Choices are numbered through all of them."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request], inbox: Inbox) -> None:
        """Submits the requests; raises as Scheduler.submit, having cancelled those that were taken."""
        self.choices = sum(len(request.seeds) for request in requests)
        self.prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.answer_tokens = 0
        self.cached_tokens = 0
        self._scheduler = scheduler
        self._requests = list(requests)
        self._inbox = inbox
        try:
            for request in self._requests:
                scheduler.submit(request)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Nobody waits any more; harmless after the end."""
        for request in self._requests:
            self._scheduler.cancel(request)

    async def events(self, wait_s: float | None = None) -> AsyncIterator[Event | None]:
        """Pieces and progress up to the last piece; with `wait_s`, None when nothing came for a while. Raises what the
        requests failed with.
        """
        left = self.choices
        cached: dict[int, int] = {}
        while left:
            events = await self._inbox.read(wait_s)
            if wait_s is not None:
                wait_s = KEEP_ALIVE_S
                if not events:
                    yield None
            for event in events:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Progress):
                    cached[event.choice] = event.cached
                    self.cached_tokens = sum(cached.values())
                else:
                    self.answer_tokens += 1
                    left -= event.piece.finish_reason is not None
                yield event

    @property
    def usage(self) -> dict[str, object]:
        """Tokens, in the shape of OpenAI's."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class NumberedListener:
    """Puts events of one request into an inbox, its choices counted from `first` on."""

    def __init__(self, inbox: Inbox, first: int) -> None:
        self._inbox = inbox
        self._first = first

    def progress(self, done: int, cached: int, total: int) -> None:
        self._inbox.put(Progress(self._first, done, cached, total))

    def piece(self, choice: int, piece: Piece) -> None:
        self._inbox.put(ChoicePiece(self._first + choice, piece))

    def failed(self, error: Exception) -> None:
        self._inbox.put(error)


STREAM_WAIT_S = FIRST_BYTES_S
