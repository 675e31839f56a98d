"""How the prompts that are being read share the prompt rows of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_transformer.engine.chunk import CHUNK_BORDER


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt of `total` tokens of which `done` are processed."""

    done: int
    total: int

    def piece(self, share: int) -> int:
        """Tokens that come next: `share` at most, cut at an absolute border, or the rest."""
        count = self.total - self.done
        if count > share:
            border = (self.done + share) // CHUNK_BORDER * CHUNK_BORDER
            count = border - self.done if border > self.done else share
        return count


def share_budget(prompts: Sequence[Reading], budget: int) -> list[tuple[int, int]]:
    """(index, tokens) of the prompts that take part in a pass with `budget` prompt rows; `prompts`: the oldest first.

    Half of the budget is for the oldest prompt, so that it gets on; the other half for the shortest ones, so that they
    do not wait for it.
    """
    if not prompts or budget < CHUNK_BORDER:
        return []
    left = budget - max(CHUNK_BORDER, budget // 2)
    shares = []
    for index in sorted(range(1, len(prompts)), key=lambda other: prompts[other].total - prompts[other].done):
        if left < CHUNK_BORDER:
            break
        count = prompts[index].piece(left)
        shares.append((index, count))
        left -= count
        budget -= count
    return [(0, prompts[0].piece(budget)), *shares]
