"""What one pass over the weights works on: flat arrays of bounded size, the same for every layer.

Rows of prompt chunks come first, decode rows after them. Which kernel a row takes depends on its kind only, never on
how many rows share the pass (row invariance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KV_TILE_POSITIONS = 512
"""Positions in a KV tile: the unit in which attention states (m, l, acc) are made and merged, on absolute borders."""

DELTA_CHUNK_POSITIONS = 64
"""Positions that the chunked form of the gated delta rule takes at once at most, on absolute borders."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive prompt rows of one sequence: rows [row_start, row_start + row_count), positions from `position`."""

    row_start: int
    row_count: int
    position: int
    sequence: int


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """A copy of a sequence's recurrent state to be made inside of a pass: as it is when all prompt rows before
    `position` have gone through it. That is a multiple of DELTA_CHUNK_POSITIONS behind the span's first position, at
    most the span's end.

    addresses int64 [layers]: where each layer's block goes on the host (page-locked for a GPU); 0 for layers without.
    """

    sequence: int
    position: int
    addresses: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass. R = rows of the pass, S = sequences in the pass, all arrays C-contiguous.

    token_ids        int32 [R]
    positions        int32 [R]   absolute position of each row in its sequence
    row_sequence     int32 [R]   index 0..S-1 into the tile tables
    prompt_rows      rows [0, prompt_rows) are of kind prompt, the rest of kind decode
    prompt_spans     the prompt rows, grouped by sequence, in row order
    rope_cos/sin     per rope of the model: float32 [R, rotary_dim / 2], attention factor included
    tile_tables      per layer: int64 [S, T] addresses of KV tiles (T >= tiles any row of the pass can see);
                     0 where a tile has been freed because no window sees it; T = 0 where a layer has no attention
    state_tables     per layer: int64 [S] addresses of the blocks of recurrent state (ops.backend.DeltaShape), int64 [0]
                     for layers without; () where no layer has any
    logit_rows       int32 [L]   rows whose logits are asked
    state_checkpoints   copies of recurrent state; those of a sequence in the order of their positions
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    row_sequence: npt.NDArray[np.int32]
    prompt_rows: int
    prompt_spans: tuple[PromptSpan, ...]
    rope_cos: tuple[npt.NDArray[np.float32], ...]
    rope_sin: tuple[npt.NDArray[np.float32], ...]
    tile_tables: tuple[npt.NDArray[np.int64], ...]
    logit_rows: npt.NDArray[np.int32]
    state_tables: tuple[npt.NDArray[np.int64], ...] = ()
    state_checkpoints: tuple[StateCheckpoint, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PromptStage:
    """Prompt rows that go through the recurrent state before copies of it are made."""

    spans: tuple[PromptSpan, ...]
    checkpoints: tuple[StateCheckpoint, ...]


def prompt_stages(batch: Batch) -> tuple[PromptStage, ...]:
    """The prompt rows cut at the checkpoints, one stage after the other: the n-th of every sequence ends its n-th
    stage. One stage where there are no checkpoints, none without prompt rows.

    Raises ValueError for a checkpoint that lies on no border inside of its sequence's span, or before the one ahead.
    """
    spans: list[list[PromptSpan]] = []
    checkpoints: list[list[StateCheckpoint]] = []
    known = {span.sequence for span in batch.prompt_spans}
    for checkpoint in batch.state_checkpoints:
        if checkpoint.sequence not in known:
            raise ValueError(f"a checkpoint of sequence {checkpoint.sequence}, which has no prompt rows")

    def add(stage: int, span: PromptSpan, start: int, stop: int, checkpoint: StateCheckpoint | None) -> None:
        """Positions [start, stop) of a span, and what is copied after them."""
        if stage == len(spans):
            spans.append([])
            checkpoints.append([])
        spans[stage].append(PromptSpan(span.row_start + start - span.position, stop - start, start, span.sequence))
        if checkpoint is not None:
            checkpoints[stage].append(checkpoint)

    for span in batch.prompt_spans:
        start, stop = span.position, span.position + span.row_count
        stage = 0
        for checkpoint in batch.state_checkpoints:
            if checkpoint.sequence != span.sequence:
                continue
            if checkpoint.position % DELTA_CHUNK_POSITIONS or not start < checkpoint.position <= stop:
                raise ValueError(
                    f"a checkpoint of sequence {span.sequence} at {checkpoint.position}; a multiple of "
                    f"{DELTA_CHUNK_POSITIONS} above {start}, up to {stop}, was expected"
                )
            add(stage, span, start, checkpoint.position, checkpoint)
            start, stage = checkpoint.position, stage + 1
        if start < stop:
            add(stage, span, start, stop, None)
    return tuple(PromptStage(tuple(rows), tuple(copies)) for rows, copies in zip(spans, checkpoints, strict=True))
