"""What a pass is asked: chunks of tokens, one for each sequence that takes part, and where those of a prompt end."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Literal

from edge_transformer.engine.recurrent import CHECKPOINT_BORDER
from edge_transformer.engine.sequence import Sequence
from edge_transformer.ops.batch import DELTA_CHUNK_POSITIONS

CHUNK_BORDER = DELTA_CHUNK_POSITIONS
"""Prompt chunks end on absolute multiples of this (or at the end of the prompt)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to one sequence in a pass.

    kind: "prompt" or "decode" (decode rows take the decode kernels). logits: which rows' logits are asked. checkpoint:
    position at which recurrent state becomes a checkpoint, where it is a multiple of CHECKPOINT_BORDER that the prompt
    tokens reach; every so many prompt tokens one is made unasked.
    """

    sequence: Sequence
    tokens: AbstractSequence[int]
    kind: Literal["prompt", "decode"]
    logits: Literal["none", "last", "all"] = "none"
    checkpoint: int | None = None


def last_border(length: int) -> int:
    """Where recurrent state of a prompt of `length` tokens becomes a checkpoint that a longer prompt can go on from."""
    return length // CHECKPOINT_BORDER * CHECKPOINT_BORDER
