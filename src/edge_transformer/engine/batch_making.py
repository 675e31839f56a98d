"""The chunks of a pass become its batch: flat arrays of rows, and the addresses of each sequence's state."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.sequence import Sequence
from edge_transformer.models.config import Rope
from edge_transformer.models.rope import FloatVector, cos_sin
from edge_transformer.ops.backend import AttentionShape, DeltaShape
from edge_transformer.ops.batch import Batch, PromptSpan, StateCheckpoint


def make_batch(
    chunks: AbstractSequence[Chunk],
    ropes: AbstractSequence[tuple[Rope, FloatVector]],
    attentions: AbstractSequence[AttentionShape],
    deltas: AbstractSequence[DeltaShape],
) -> tuple[Batch, list[tuple[int, int]]]:
    """The batch of a pass, prompt rows first, and (index of the chunk, index of the token in it) of each row whose
    logits are asked.

    The chunks' sequences must have been prepared for their tokens; they get room for the checkpoints that are due.
    ropes: the model's, with their inverse frequencies. attentions, deltas: the layers of each kind, in order.
    """
    order = [index for index, chunk in enumerate(chunks) if chunk.kind == "prompt"]
    order += [index for index, chunk in enumerate(chunks) if chunk.kind == "decode"]
    token_ids: list[int] = []
    positions: list[int] = []
    row_sequence: list[int] = []
    spans: list[PromptSpan] = []
    logit_rows: list[int] = []
    asked: list[tuple[int, int]] = []
    for slot, index in enumerate(order):
        chunk = chunks[index]
        start, count, position = len(token_ids), len(chunk.tokens), len(chunk.sequence)
        token_ids.extend(chunk.tokens)
        positions.extend(range(position, position + count))
        row_sequence.extend([slot] * count)
        if chunk.kind == "prompt":
            spans.append(PromptSpan(start, count, position, slot))
        wanted = {"none": range(0), "last": range(count - 1, count), "all": range(count)}[chunk.logits]
        logit_rows.extend(start + token for token in wanted)
        asked.extend((index, token) for token in wanted)
    position_array = np.array(positions, np.int32)
    ordered = [chunks[index] for index in order]
    sequences = [chunk.sequence for chunk in ordered]
    rotations = [cos_sin(rope, frequencies, position_array) for rope, frequencies in ropes]
    num_layers = len(attentions) + len(deltas)
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=position_array,
        row_sequence=np.array(row_sequence, np.int32),
        prompt_rows=sum(span.row_count for span in spans),
        prompt_spans=tuple(spans),
        rope_cos=tuple(cos for cos, _ in rotations),
        rope_sin=tuple(sin for _, sin in rotations),
        tile_tables=_tile_tables(sequences, attentions, num_layers),
        logit_rows=np.array(logit_rows, np.int32),
        state_tables=_state_tables(sequences, deltas, num_layers),
        state_checkpoints=_state_checkpoints(ordered, deltas, num_layers),
    )
    return batch, asked


def _tile_tables(
    sequences: AbstractSequence[Sequence], attentions: AbstractSequence[AttentionShape], num_layers: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """Per layer int64 [S, T]: addresses of the KV tiles of each sequence, padded with 0."""
    tables = [np.empty((len(sequences), 0), np.int64)] * num_layers
    for index, shape in enumerate(attentions):
        rows = [sequence.tile_table(index) for sequence in sequences]
        if len(rows) == 1:
            tables[shape.layer] = rows[0][None, :]
            continue
        table = np.zeros((len(rows), max(len(row) for row in rows)), np.int64)
        for slot, row in enumerate(rows):
            table[slot, : len(row)] = row
        tables[shape.layer] = table
    return tuple(tables)


def _state_tables(
    sequences: AbstractSequence[Sequence], deltas: AbstractSequence[DeltaShape], num_layers: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """Per layer int64 [S]: addresses of the blocks of recurrent state; () for a model without."""
    if not deltas:
        return ()
    states = [sequence.recurrent.addresses() for sequence in sequences if sequence.recurrent is not None]
    tables = [np.empty(0, np.int64)] * num_layers
    for shape, column in zip(deltas, np.array(states).T, strict=True):
        tables[shape.layer] = np.ascontiguousarray(column)
    return tuple(tables)


def _state_checkpoints(
    chunks: AbstractSequence[Chunk], deltas: AbstractSequence[DeltaShape], num_layers: int
) -> tuple[StateCheckpoint, ...]:
    """What the chunks' sequences, in the order of the batch, want to be copied on the way."""
    checkpoints: list[StateCheckpoint] = []
    for slot, chunk in enumerate(chunks):
        recurrent, start = chunk.sequence.recurrent, len(chunk.sequence)
        if recurrent is None or chunk.kind != "prompt":
            continue
        for position, blocks in recurrent.expect(start, start + len(chunk.tokens), chunk.checkpoint):
            addresses = np.zeros(num_layers, np.int64)
            addresses[[shape.layer for shape in deltas]] = blocks
            checkpoints.append(StateCheckpoint(slot, position, addresses))
    return tuple(checkpoints)
