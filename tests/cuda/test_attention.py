"""Attention on the emulated GPU: against numpy fp64, and bit for bit against itself in other passes and runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cpu.attention_cases import F32, Piece, assert_right, make_batch, make_cache, make_shape
from cuda.attention_device import attend_resident
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.tensor import DType
from emulator.gpu import EmulatedGpu

# The path of a card without tensor cores, keys and values in either dtype, and the tensor cores' with bf16.
PATHS = [((7, 5), DType.F32), ((7, 5), DType.BF16), ((8, 0), DType.BF16)]
path = pytest.mark.parametrize(("capability", "kv_dtype"), PATHS, ids=["plain-f32", "plain-bf16", "tensor-bf16"])


def queries(shape: AttentionShape, rows: int, rng: np.random.Generator) -> F32:
    return rng.standard_normal((rows, shape.heads * shape.head_dim), dtype=np.float32)


def first_visible(shape: AttentionShape, position: int) -> int:
    return 0 if shape.window is None else max(0, position - shape.window + 1)


def check_pieces(gpu: EmulatedGpu, shape: AttentionShape, pieces: Sequence[Piece], seed: int) -> None:
    """Each piece is a sequence of its own, whose positions out of sight are NaN."""
    rng = np.random.default_rng(seed)
    caches = [make_cache(shape, p.position + p.rows, rng, first_visible(shape, p.position)) for p in pieces]
    batch = make_batch(pieces, caches)
    q = queries(shape, batch.rows, rng)
    assert_right(attend_resident(gpu, shape, batch, q, caches), q, shape, batch, caches)


@path
@pytest.mark.parametrize("context", [1, 2, 127, 128, 129, 512, 513, 1100])
def test_decode(capability: tuple[int, int], kv_dtype: DType, context: int) -> None:
    gpu = EmulatedGpu(context, capability=capability)
    check_pieces(gpu, make_shape(4, 2, 16, kv_dtype=kv_dtype), [Piece(0, context - 1, decode=True)], context)


@path
@pytest.mark.parametrize("rows", [1, 2, 17, 65])
def test_prompt_of_any_length(capability: tuple[int, int], kv_dtype: DType, rows: int) -> None:
    gpu = EmulatedGpu(rows, capability=capability)
    shape = make_shape(6, 2, 24, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 0, rows), Piece(1, 505, rows), Piece(2, 512 - rows, rows)], rows)


@path
@pytest.mark.parametrize("window", [1, 5, 511, 512, 513])
def test_windows(capability: tuple[int, int], kv_dtype: DType, window: int) -> None:
    gpu = EmulatedGpu(window, capability=capability)
    shape = make_shape(4, 2, 16, window=window, kv_dtype=kv_dtype)
    prompts = [Piece(0, 0, 18), Piece(1, 500, 33), Piece(2, 1020, 17)]
    decodes = [Piece(3 + i, context - 1, decode=True) for i, context in enumerate((1, 7, 512, 513, 1030))]
    check_pieces(gpu, shape, prompts + decodes, window)


@path
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 4), (9, 3), (8, 1), (7, 1), (18, 2), (12, 2)])
def test_head_groups(capability: tuple[int, int], kv_dtype: DType, heads: int, kv_heads: int) -> None:
    gpu = EmulatedGpu(heads, capability=capability)
    shape = make_shape(heads, kv_heads, 16, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 490, 33), Piece(1, 530, decode=True), Piece(2, 3, decode=True)], heads)


@path
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 128, 136, 248, 256])
def test_head_dims(capability: tuple[int, int], kv_dtype: DType, head_dim: int) -> None:
    gpu = EmulatedGpu(head_dim, capability=capability)
    shape = make_shape(3, 1, head_dim, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 508, 9), Piece(1, 520, decode=True), Piece(2, 0, decode=True)], head_dim)


@path
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(capability: tuple[int, int], kv_dtype: DType, softcap: float) -> None:
    gpu = EmulatedGpu(0, capability=capability)
    shape = make_shape(4, 2, 16, softcap=softcap, window=600, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 700, 20), Piece(1, 0, 5), Piece(2, 800, decode=True)], 1)


@path
def test_large_scores(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Weights far apart: e^(s - m) underflows for nearly all positions, and the largest score keeps moving."""
    rng = np.random.default_rng(2)
    shape = make_shape(2, 1, 16, kv_dtype=kv_dtype)
    cache = make_cache(shape, 1100, rng)
    batch = make_batch([Piece(0, 1050, 40), Piece(0, 1099, decode=True)], [cache])
    q = 300 * queries(shape, batch.rows, rng)
    gpu = EmulatedGpu(2, capability=capability)
    assert_right(attend_resident(gpu, shape, batch, q, [cache]), q, shape, batch, [cache])
