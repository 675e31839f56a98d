"""Queued work of the emulated GPU: streams as queues whose ready work runs in a random order.

Nothing runs when it is queued. When the host waits, one piece of work after another is taken from the head of a stream
chosen at random among those that are ready; a copy takes two such steps, a start that poisons its target and a landing.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from emulator.clocks import Access


@dataclass(eq=False)
class Work:
    """One entry of a stream's queue. `after`: work on other streams that has to be done first."""

    name: str
    finish: Callable[[], None]
    accesses: tuple[Access, ...] = ()
    start: Callable[[], None] | None = None
    after: Work | None = None
    started: bool = False
    done: bool = False
    done_at: float = 0.0


@dataclass(eq=False)
class EmulatedStream:
    """`key` tells streams of the same name apart."""

    name: str
    key: str
    queue: deque[Work] = field(default_factory=deque)


class Queues:
    """All streams, and how their work is run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._numbers = itertools.count()
        self._streams: list[EmulatedStream] = []

    def stream(self, name: str) -> EmulatedStream:
        stream = EmulatedStream(name, f"{name}#{next(self._numbers)}")
        self._streams.append(stream)
        return stream

    def run(self, stream: EmulatedStream | None) -> None:
        """Run until `stream` (or everything) is done; work of other streams may run or not."""
        while any(s.queue for s in self._streams) if stream is None else stream.queue:
            ready = [s for s in self._streams if s.queue and (s.queue[0].after is None or s.queue[0].after.done)]
            self._step(self.random.choice(ready))

    def _step(self, stream: EmulatedStream) -> None:
        work = stream.queue[0]
        if work.start is not None and not work.started:
            work.started = True
            work.start()
            return
        # Taken off first: work that fails is not tried again.
        stream.queue.popleft()
        work.finish()
        work.done = True
        work.done_at = time.perf_counter()
