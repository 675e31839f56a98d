"""Passes over random KV tiles, and attention in numpy fp64 on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch, PromptSpan
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import DType

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def make_shape(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    kv_dtype: DType = DType.F32,
    rotary_dim: int | None = None,
) -> AttentionShape:
    """The shape of layer 0. Scores come out at a standard deviation of about 1.5, so that softmax is neither flat
    nor one-hot.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    rope = 0 if rotary_dim else None
    return AttentionShape(
        0, heads, kv_heads, head_dim, rotary_dim, rope, 1.5 * head_dim**-0.5, softcap, window, kv_dtype
    )


@dataclass
class Cache:
    """KV of one sequence: `tiles` [T][2][kv_heads][512][head_dim] as stored (bf16 as uint16), NaN beyond `length`."""

    tiles: npt.NDArray[np.generic]
    table: npt.NDArray[np.int64]

    def values(self) -> F64:
        """[2][kv_heads][positions][head_dim] in fp64."""
        numbers = self.tiles
        if numbers.dtype == np.uint16:
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        whole: F64 = np.concatenate(list(numbers.astype(np.float64)), axis=2)
        return whole


def make_cache(shape: AttentionShape, length: int, rng: np.random.Generator, visible_from: int = 0) -> Cache:
    """Random keys and values at positions [visible_from, length), NaN elsewhere; tiles before them are freed."""
    count = -(-length // KV_TILE_POSITIONS)
    size = (count, 2, shape.kv_heads, KV_TILE_POSITIONS, shape.head_dim)
    numbers = rng.standard_normal(size, dtype=np.float32)
    absolute = np.arange(count * KV_TILE_POSITIONS).reshape(count, 1, 1, KV_TILE_POSITIONS, 1)
    numbers = np.where((absolute >= visible_from) & (absolute < length), numbers, np.float32(np.nan))
    tiles = numbers if shape.kv_dtype == DType.F32 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    table = tiles.ctypes.data + np.arange(count, dtype=np.int64) * tiles[0].nbytes
    table[: visible_from // KV_TILE_POSITIONS] = 0
    return Cache(tiles, table)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one sequence in a pass. Decode pieces have one row."""

    sequence: int
    position: int
    rows: int = 1
    decode: bool = False


def make_batch(pieces: Sequence[Piece], caches: Sequence[Cache], half: int = 0) -> Batch:
    """A pass of the pieces in order, prompts first; every sequence has its row in the tile table. cos = 1, sin = 0."""
    assert not any(a.decode and not b.decode for a, b in pairwise(pieces))
    positions = [piece.position + i for piece in pieces for i in range(piece.rows)]
    sequences = [piece.sequence for piece in pieces for _ in range(piece.rows)]
    spans, row = [], 0
    for piece in pieces:
        if not piece.decode:
            spans.append(PromptSpan(row, piece.rows, piece.position, piece.sequence))
            row += piece.rows
    table = np.zeros((len(caches), max(len(cache.table) for cache in caches)), np.int64)
    for sequence, cache in enumerate(caches):
        table[sequence, : len(cache.table)] = cache.table
    rows = len(positions)
    return Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.array(positions, np.int32),
        row_sequence=np.array(sequences, np.int32),
        prompt_rows=row,
        prompt_spans=tuple(spans),
        rope_cos=(np.ones((rows, half), np.float32),),
        rope_sin=(np.zeros((rows, half), np.float32),),
        tile_tables=(table,),
        logit_rows=np.zeros(0, np.int32),
    )


def attention_in_fp64(q: F32, shape: AttentionShape, batch: Batch, caches: Sequence[Cache]) -> tuple[F64, F64]:
    """The exact result [R, heads * head_dim], and the magnitude that the contract's eps is multiplied with."""
    queries = q.reshape(batch.rows, shape.heads, shape.head_dim).astype(np.float64)
    out, magnitude = np.empty_like(queries), np.empty_like(queries)
    for row in range(batch.rows):
        position = int(batch.positions[row])
        start = 0 if shape.window is None else max(0, position - shape.window + 1)
        keys, values = caches[batch.row_sequence[row]].values()[:, :, start : position + 1]
        for head in range(shape.heads):
            k, v = keys[head // (shape.heads // shape.kv_heads)], values[head // (shape.heads // shape.kv_heads)]
            scores = shape.scale * (k @ queries[row, head])
            terms = shape.scale * (np.abs(k) @ np.abs(queries[row, head]))
            if shape.softcap is not None:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
            magnitude[row, head] = (1 + terms.max()) * np.abs(v).max(axis=0)
    return out.reshape(q.shape), magnitude.reshape(q.shape)


def assert_right(got: F32, q: F32, shape: AttentionShape, batch: Batch, caches: Sequence[Cache]) -> None:
    exact, magnitude = attention_in_fp64(q, shape, batch, caches)
    ratio = np.abs(got - exact) / magnitude
    assert np.isfinite(got).all()
    assert (ratio <= CONTRACTS["attention"].eps).all(), f"error {ratio.max():.2e} of the magnitude"
