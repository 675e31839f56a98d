"""No op reads or writes outside its arrays: every array lies against a page that may not be touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.attention_cases import Cache, Piece, assert_right, make_batch, make_cache, make_shape
from cpu.fenced import fenced
from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.ops.tensor import DType, Tensor, tensor_of


def place(values: np.ndarray, at_end: bool) -> Tensor:
    return tensor_of(fenced(np.ascontiguousarray(values), at_end))


@pytest.mark.parametrize("isa", _native.available_instruction_sets())
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(3, 1, 8, 6), (2, 2, 72, 72), (5, 1, 24, 10)]
)
def test_attention_and_append(
    isa: str, at_end: bool, kv_dtype: DType, heads: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    rng = np.random.default_rng(head_dim)
    shape = make_shape(heads, kv_heads, head_dim, kv_dtype=kv_dtype, rotary_dim=rotary_dim)
    caches = []
    for length in (512, 37):
        cache = make_cache(shape, length, rng)
        tiles = fenced(cache.tiles, at_end)
        caches.append(Cache(tiles, np.array([tiles.ctypes.data], np.int64)))
    batch = make_batch([Piece(0, 495, 17), Piece(1, 36, decode=True)], caches, rotary_dim // 2)
    batch = replace(
        batch,
        positions=fenced(batch.positions, at_end),
        row_sequence=fenced(batch.row_sequence, at_end),
        rope_cos=(fenced(batch.rope_cos[0], at_end),),
        rope_sin=(fenced(batch.rope_sin[0], at_end),),
        tile_tables=(fenced(batch.tile_tables[0], at_end),),
    )
    backend = CpuBackend(2, isa)
    backend.reserve(batch.rows, 32, [shape])
    q, out = (place(rng.standard_normal((batch.rows, heads * head_dim), np.float32), at_end) for _ in range(2))
    k, v = (place(rng.standard_normal((batch.rows, kv_heads * head_dim), np.float32), at_end) for _ in range(2))
    norm = place(1 + rng.standard_normal(head_dim).astype(np.float32), at_end)
    backend.qk_norm_rope_append(q, k, v, norm, norm, 1e-6, shape, batch)
    backend.attention(q, shape, out, batch)
    assert_right(out.numpy(), q.numpy(), shape, batch, caches)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", _native.available_instruction_sets())
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("cols", [1, 7, 33, 61])
def test_norms_and_rows(isa: str, at_end: bool, cols: int) -> None:
    rng = np.random.default_rng(cols)
    backend = CpuBackend(1, isa)
    batch = make_batch([Piece(0, 0, 3)], [make_cache(make_shape(), 3, rng)])
    residual, delta, out = (place(rng.standard_normal((3, cols), np.float32), at_end) for _ in range(3))
    delta_norm, weight = (place(rng.standard_normal(cols, np.float32), at_end) for _ in range(2))
    backend.add_norm(residual, delta, delta_norm, weight, 1e-6, out, batch)
    backend.select_rows(residual, place(np.array([2, 0], np.int32), at_end), 2, out)
    np.testing.assert_array_equal(out.numpy()[:2], residual.numpy()[[2, 0]])
