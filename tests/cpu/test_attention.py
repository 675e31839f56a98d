"""Attention of prompt and decode rows against numpy fp64, for every instruction set; and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from cpu.attention_cases import Cache, Piece, assert_right, make_batch, make_cache, make_shape
from cpu.guarded import Guarded
from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType, tensor_of

F32 = npt.NDArray[np.float32]

ISAS = _native.available_instruction_sets()
CONTEXTS = (1, 2, 7, 511, 512, 513, 1030)
ROWS = (1, 2, 3, 7, 16, 17, 33, 65)
WINDOWS = (1, 5, 511, 512, 513)
GROUPS = ((1, 1), (3, 1), (9, 3), (4, 4), (8, 1), (7, 1), (12, 2))
HEAD_DIMS = (8, 24, 64, 72, 128, 256)


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2, isa=request.param)
    yield backend
    backend.close()


def attend(backend: CpuBackend, shape: AttentionShape, batch: Batch, q: F32) -> F32:
    backend.reserve(batch.rows, 32, [shape])
    out = Guarded(*q.shape)
    before = q.copy()
    backend.attention(tensor_of(q), shape, out.tensor, batch)
    out.check()
    np.testing.assert_array_equal(q, before)
    return out.array


def queries(shape: AttentionShape, rows: int, rng: np.random.Generator) -> F32:
    return rng.standard_normal((rows, shape.heads * shape.head_dim), dtype=np.float32)


def first_visible(shape: AttentionShape, position: int) -> int:
    return 0 if shape.window is None else max(0, position - shape.window + 1)


def check_pieces(backend: CpuBackend, shape: AttentionShape, pieces: Sequence[Piece], seed: int) -> None:
    """Each piece is a sequence of its own, whose positions out of sight are NaN."""
    rng = np.random.default_rng(seed)
    caches = [make_cache(shape, p.position + p.rows, rng, first_visible(shape, p.position)) for p in pieces]
    batch = make_batch(pieces, caches)
    q = queries(shape, batch.rows, rng)
    assert_right(attend(backend, shape, batch, q), q, shape, batch, caches)


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_at_tile_borders(backend: CpuBackend, context: int, kv_dtype: DType) -> None:
    check_pieces(backend, make_shape(9, 3, 64, kv_dtype=kv_dtype), [Piece(0, context - 1, decode=True)], context)


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("rows", ROWS)
def test_prompt_of_any_length(backend: CpuBackend, rows: int, kv_dtype: DType) -> None:
    shape = make_shape(6, 2, 24, kv_dtype=kv_dtype)
    check_pieces(backend, shape, [Piece(0, 0, rows), Piece(1, 505, rows), Piece(2, 512 - rows, rows)], rows)


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(backend: CpuBackend, window: int) -> None:
    shape = make_shape(4, 2, 16, window=window)
    prompts = [Piece(0, 0, 33), Piece(1, 500, 33), Piece(2, 1020, 17)]
    decodes = [Piece(3 + i, context - 1, decode=True) for i, context in enumerate(CONTEXTS)]
    check_pieces(backend, shape, prompts + decodes, window)


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_head_groups(backend: CpuBackend, heads: int, kv_heads: int) -> None:
    shape = make_shape(heads, kv_heads, 16, kv_dtype=DType.BF16)
    check_pieces(backend, shape, [Piece(0, 490, 40), Piece(1, 530, decode=True), Piece(2, 3, decode=True)], heads)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
def test_head_dims(backend: CpuBackend, head_dim: int, kv_dtype: DType) -> None:
    pieces = [Piece(0, 508, 9), Piece(1, 520, decode=True), Piece(2, 0, decode=True)]
    for heads, kv_heads in ((2, 2), (2, 1), (3, 1), (4, 1)):
        check_pieces(backend, make_shape(heads, kv_heads, head_dim, kv_dtype=kv_dtype), pieces, head_dim)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(backend: CpuBackend, softcap: float, kv_dtype: DType, window: int | None) -> None:
    """Of prompt and decode rows, in one tile and over several."""
    shape = make_shape(4, 2, 16, softcap=softcap, window=window, kv_dtype=kv_dtype)
    check_pieces(backend, shape, [Piece(0, 500, 33), Piece(1, 0, 5), Piece(2, 700, decode=True)], 1)


def test_large_scores_do_not_overflow(backend: CpuBackend) -> None:
    """Scores of several hundred, negative for whole tiles: e^s alone would be infinite or nothing but zeros."""
    shape = make_shape(2, 1, 8)
    rng = np.random.default_rng(2)
    cache = make_cache(shape, 1100, rng)
    batch = make_batch([Piece(0, 1050, 40), Piece(0, 1099, decode=True)], [cache])
    q = 300 * queries(shape, batch.rows, rng)
    assert_right(attend(backend, shape, batch, q), q, shape, batch, [cache])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_does_not_depend_on_its_company(isa: str, kv_dtype: DType, window: int | None) -> None:
    """Whole prompt, chunks of 64, odd chunks, other sequences, 1 to 3 threads: the same bits."""
    rng = np.random.default_rng(3)
    shape = make_shape(6, 2, 24, window=window, kv_dtype=kv_dtype)
    start, rows = 400, 300
    cache, other = make_cache(shape, start + rows, rng), make_cache(shape, 1200, rng)
    q = queries(shape, rows, rng)
    alone = CpuBackend(1, isa)
    expected = attend(alone, shape, make_batch([Piece(0, start, rows)], [cache]), q)
    for threads, cuts in ((1, [64] * 5), (2, [rows]), (2, [1, 2, 3, 5, 7, 11, 90, 181]), (3, [17] * 18), (3, [299, 1])):
        backend = CpuBackend(threads, isa)
        done = 0
        for cut in cuts:
            count = min(cut, rows - done)
            mates = [Piece(1, 1000, 13), Piece(1, 1100, decode=True)]
            pieces = [mates[0], Piece(0, start + done, count), mates[1]]
            batch = make_batch(pieces, [cache, other])
            padded = np.concatenate([queries(shape, 13, rng), q[done : done + count], queries(shape, 1, rng)])
            got = attend(backend, shape, batch, padded)[13 : 13 + count]
            np.testing.assert_array_equal(got.view(np.uint32), expected[done : done + count].view(np.uint32))
            done += count
        assert done == rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
def test_a_decode_row_does_not_depend_on_its_company(isa: str, kv_dtype: DType) -> None:
    rng = np.random.default_rng(4)
    shape = make_shape(6, 2, 24, kv_dtype=kv_dtype)
    lengths = (1, 3, 40, 512, 513, 700, 1030, 1700, 2, 900, 2600)
    caches = [make_cache(shape, length, rng) for length in lengths]
    q = queries(shape, len(lengths), rng)

    def piece(index: int) -> Piece:
        return Piece(index, lengths[index] - 1, decode=True)

    expected = np.concatenate(
        [attend(CpuBackend(1, isa), shape, make_batch([piece(i)], caches), q[i : i + 1]) for i in range(len(lengths))]
    )
    for threads in (1, 2, 3):
        for order in (list(range(len(lengths))), list(rng.permutation(len(lengths)))):
            batch = make_batch([piece(int(i)) for i in order], caches)
            got = attend(CpuBackend(threads, isa), shape, batch, np.ascontiguousarray(q[order]))
            np.testing.assert_array_equal(got.view(np.uint32), expected[order].view(np.uint32))


def test_a_nan_in_the_query_is_not_hidden(backend: CpuBackend) -> None:
    rng = np.random.default_rng(5)
    shape = make_shape(2, 1, 16)
    cache: Cache = make_cache(shape, 600, rng)
    batch = make_batch([Piece(0, 590, 2), Piece(0, 599, decode=True)], [cache])
    q = queries(shape, 3, rng)
    q[0, 3] = q[2, 3] = np.nan
    out = attend(backend, shape, batch, q)
    assert np.isnan(out[0, :16]).all()
    assert np.isnan(out[2, :16]).all()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(out[[0, 2], 16:]).all()


def test_a_freed_tile_in_sight_is_refused(backend: CpuBackend) -> None:
    shape = make_shape(window=5)
    cache = make_cache(shape, 1024, np.random.default_rng(6), visible_from=512)
    q = queries(shape, 1, np.random.default_rng(7))
    for piece in (Piece(0, 515, decode=True), Piece(0, 515)):
        with pytest.raises(ValueError, match="layer 0, sequence 0: KV tile 0 is needed but freed"):
            attend(backend, shape, make_batch([piece], [cache]), q)
