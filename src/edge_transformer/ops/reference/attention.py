"""Attention with grouped heads, causal and window mask, softcap: a full softmax per row over all it can see."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.reference.activation import softcap
from edge_transformer.ops.reference.kv_tiles import read_positions

Floats = npt.NDArray[np.float32]


def attend(q: Floats, shape: AttentionShape, batch: Batch) -> Floats:
    """q [R, heads, head_dim] against the KV tiles of each row's sequence; the result has q's shape."""
    out = np.empty_like(q)
    for sequence in np.unique(batch.row_sequence):
        rows = np.flatnonzero(batch.row_sequence == sequence)
        table = batch.tile_tables[shape.layer][sequence]
        out[rows] = _attend_sequence(q[rows], batch.positions[rows], table, shape)
    return out


def _attend_sequence(
    q: Floats, positions: npt.NDArray[np.int32], table: npt.NDArray[np.int64], shape: AttentionShape
) -> Floats:
    first_visible = np.zeros_like(positions) if shape.window is None else np.maximum(positions - shape.window + 1, 0)
    start, stop = int(first_visible.min()), int(positions.max()) + 1
    keys, values = read_positions(table, shape, start, stop)
    key_positions = np.arange(start, stop)
    visible = (key_positions >= first_visible[:, None]) & (key_positions <= positions[:, None])
    out = np.empty_like(q)
    for head in range(shape.heads):
        kv_head = head // (shape.heads // shape.kv_heads)
        scores = softcap(np.float32(shape.scale) * (q[:, head] @ keys[kv_head].T), shape.softcap)
        scores = np.where(visible, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ values[kv_head] / weights.sum(axis=-1, keepdims=True)
    return out
