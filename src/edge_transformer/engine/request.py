"""What a scheduler is asked: requests, who hears of them, and how many there may be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_transformer.engine.answer import Constraint, Piece
from edge_transformer.engine.chunk import CHUNK_BORDER
from edge_transformer.engine.sampling import GenerationConfig
from edge_transformer.errors import EdgeTransformerError, UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """sequences: answers in the making at once. pass_tokens: prompt tokens in a pass while others' answers are in the
    making (a multiple of CHUNK_BORDER); it bounds by how much a prompt delays them. queue: requests that wait at most.
    """

    sequences: int = 16
    pass_tokens: int = 256
    queue: int = 256

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.queue < 1:
            raise UsageError(f"limits of {self.sequences} sequences and {self.queue} waiting; each must be 1 or more")
        if self.pass_tokens < CHUNK_BORDER:
            raise UsageError(f"pass_tokens is {self.pass_tokens}; allowed: {CHUNK_BORDER} or more")


class QueueFullError(EdgeTransformerError):
    """As many requests wait as may."""


class StoppedError(EdgeTransformerError):
    """The scheduler has been stopped, or its engine has failed."""


class Listener(Protocol):
    """Hears what becomes of a request, in the scheduler's thread; must return soon. After `failed`, or `piece` with a
    finish reason for every choice, it hears no more; nor after a cancellation.
    """

    def progress(self, done: int, cached: int, total: int) -> None:
        """`done` of `total` prompt tokens are processed, `cached` of them were found from an earlier request."""
        ...

    def piece(self, choice: int, piece: Piece) -> None: ...

    def failed(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """seeds: one per choice (answer). constraints: for each choice what may come next, or nothing."""

    prompt_ids: Sequence[int]
    config: GenerationConfig
    seeds: Sequence[int]
    listener: Listener
    constraints: Sequence[Constraint] = ()
    submitted: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
