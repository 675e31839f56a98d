"""Ctrl-C while an answer is made: the first ends the answer, the second the program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def first_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """While the block runs, the first SIGINT calls `cancel` and later ones raise KeyboardInterrupt.

    Only in the main thread, as signal handlers are.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
