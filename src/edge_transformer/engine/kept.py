"""The sequence that a model keeps of its last call, for what the next one's prompt has in common with it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_transformer.engine.sequence import Sequence


class KeptSequence:
    """At most one sequence, the newest that was kept.

    Streams that were dropped in the middle end when the garbage collector finds them, at any time and in any thread:
    so there is no lock that one of them could wait for, and nothing but a deque is touched.
    """

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self._closed = False

    def keep(self, sequence: Sequence) -> None:
        """Close the one before. The sequence itself is closed after `close`."""
        self._sequences.append(sequence)
        while len(self._sequences) > (0 if self._closed else 1) and self.give_up():
            pass

    def take(self) -> Sequence | None:
        """The sequence, which is the caller's now."""
        try:
            return self._sequences.pop()
        except IndexError:
            return None

    def give_up(self) -> bool:
        """Close the sequence (the oldest, where there are two for a moment); False when there is none."""
        try:
            sequence = self._sequences.popleft()
        except IndexError:
            return False
        sequence.close()
        return True

    def close(self) -> None:
        """Give up what is kept, and all that comes."""
        self._closed = True
        while self.give_up():
            pass
