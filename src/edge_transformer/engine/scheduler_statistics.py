"""What the scheduler counts. Written by its thread alone; others read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram:
    """Counts of values at most each bound, and above all of them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class SchedulerStatistics:
    """Counts since the start, and distributions. Seconds are wall time; first_token_seconds from the arrival on."""

    passes: int = 0
    passes_given_up: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(SIZES))
    pass_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def count_pass(self, prompt_rows: int, decode_rows: int, sequences: int) -> None:
        """A pass has been made."""
        del decode_rows  # each is a token of an answer, or one computed again
        self.passes += 1
        self.prompt_tokens += prompt_rows
        self.batch_sequences.add(sequences)
