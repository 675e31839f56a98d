"""Sequences kept after their requests have ended, found again by content.

Only what was processed as a prompt is kept, so that an answer has the same bits whether its beginning was found here or
computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.sequence import Sequence as EngineSequence
from edge_transformer.errors import CapacityError

MAX_ENTRIES = 64


@dataclass(slots=True)
class _Entry:
    sequence: EngineSequence
    tokens: npt.NDArray[np.int64]


class PrefixCache:
    """Kept sequences, the least recently used first. Not safe for use by two threads at once."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_state_bytes: int = 0) -> None:
        """max_state_bytes: what checkpoints of recurrent state may take together."""
        self._entries: list[_Entry] = []
        self._max_entries = max_entries
        self._max_state_bytes = max_state_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, sequence: EngineSequence) -> None:
        """Take a sequence over, cut to its prompt tokens; what another one covers is closed."""
        sequence.reuse(sequence.prompt_length)
        if sequence.recurrent is not None:
            sequence.recurrent.release()
        tokens = np.array(sequence.tokens, np.int64)
        if any(_common(entry.tokens, tokens) == len(tokens) for entry in self._entries):
            sequence.close()  # nothing to keep, or held already
            return
        covered = [entry for entry in self._entries if _common(entry.tokens, tokens) == len(entry.tokens)]
        for entry in covered:
            self._drop(entry)
        self._entries.append(_Entry(sequence, tokens))
        while len(self._entries) > self._max_entries or self._state_bytes > self._max_state_bytes:
            self.evict()

    def take(self, prompt: Sequence[int], running: Iterable[EngineSequence] = ()) -> EngineSequence | None:
        """A new sequence that holds as many of the first tokens of `prompt`, its last one excepted, as some kept or
        `running` sequence does; None where none does.
        """
        wanted = np.array(prompt[:-1], np.int64)
        found: list[tuple[int, EngineSequence, _Entry | None]] = [
            (_common(entry.tokens, wanted), entry.sequence, entry) for entry in self._entries
        ]
        for sequence in running:
            length = min(sequence.prompt_length, len(wanted))
            held = np.array(sequence.tokens[:length], np.int64)
            found.append((_common(held, wanted), sequence, None))
        found.sort(key=lambda match: -match[0])
        best: EngineSequence | None = None
        for common, sequence, entry in found:
            if common <= (0 if best is None else len(best)):
                break
            try:
                fork = sequence.fork()
            except CapacityError:  # no room for a copy of its recurrent state
                continue
            fork.reuse(common)
            if len(fork) <= (0 if best is None else len(best)):
                fork.close()
                continue
            if best is not None:
                best.close()
            best = fork
            if entry is not None:
                self._entries.remove(entry)
                self._entries.append(entry)
        return best

    def evict(self) -> bool:
        """Give the least recently used entry's memory back; False when there is none."""
        if not self._entries:
            return False
        self._drop(self._entries[0])
        return True

    def clear(self) -> None:
        """Give everything back."""
        while self.evict():
            pass

    @property
    def _state_bytes(self) -> int:
        return sum(entry.sequence.recurrent.held_bytes for entry in self._entries if entry.sequence.recurrent)

    def _drop(self, entry: _Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]
        entry.sequence.close()


def _common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Length of the beginning that both have in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
