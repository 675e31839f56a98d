"""KV tiles read and written by address: per tile K [kv_heads][512][head_dim], then V the same."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.reference.bf16 import bf16_to_float, round_to_bf16
from edge_transformer.ops.tensor import DType, array_at

Floats = npt.NDArray[np.float32]


def tile_view(address: int, shape: AttentionShape) -> npt.NDArray[np.generic]:
    """The tile at `address` as [2 (K, V)][kv_heads][512][head_dim], float32 or bf16 bits in uint16."""
    element = np.float32 if shape.kv_dtype == DType.F32 else np.uint16
    return array_at(address, (2, shape.kv_heads, KV_TILE_POSITIONS, shape.head_dim), element)


def write_position(tile: npt.NDArray[np.generic], slot: int, key: Floats, value: Floats) -> None:
    """Store key and value [kv_heads, head_dim] at position `slot` of a tile, rounded to its dtype."""
    is_float = tile.dtype == np.float32
    tile[0, :, slot] = key if is_float else round_to_bf16(key)
    tile[1, :, slot] = value if is_float else round_to_bf16(value)


def read_positions(table: npt.NDArray[np.int64], shape: AttentionShape, start: int, stop: int) -> tuple[Floats, Floats]:
    """Keys and values [kv_heads, stop - start, head_dim] of positions [start, stop) of one sequence's tile table."""
    parts = []
    for tile_index in range(start // KV_TILE_POSITIONS, -(-stop // KV_TILE_POSITIONS)):
        first = tile_index * KV_TILE_POSITIONS
        tile = tile_view(int(table[tile_index]), shape)
        parts.append(tile[:, :, max(start - first, 0) : min(stop - first, KV_TILE_POSITIONS)])
    both = np.concatenate(parts, axis=2)
    if both.dtype == np.uint16:
        both = bf16_to_float(cast("npt.NDArray[np.uint16]", both))
    keys, values = cast("npt.NDArray[np.float32]", both)
    return keys, values
