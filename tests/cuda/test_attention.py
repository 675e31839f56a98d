"""Attention on the emulated GPU: against numpy fp64, and bit for bit against itself in other passes and runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cpu.attention_cases import F32, Piece, assert_right, attention_in_fp64, make_batch, make_cache, make_shape
from cuda.attention_device import DevicePass, attend_resident, make_gpu
from edge_transformer.cuda import attention
from edge_transformer.cuda.attention import KvRun, check_shape, query_block_entries, query_blocks, workspace_bytes
from edge_transformer.cuda.runtime import Gpu, Kernel
from edge_transformer.errors import UnsupportedModelError
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import PromptSpan
from edge_transformer.ops.tensor import DType
from emulator.gpu import EmulatedGpu

# The path of a card without tensor cores, keys and values in either dtype, and the tensor cores' with bf16.
PATHS = [((7, 5), DType.F32), ((7, 5), DType.BF16), ((8, 0), DType.BF16)]
path = pytest.mark.parametrize(("capability", "kv_dtype"), PATHS, ids=["plain-f32", "plain-bf16", "tensor-bf16"])


def queries(shape: AttentionShape, rows: int, rng: np.random.Generator) -> F32:
    return rng.standard_normal((rows, shape.heads * shape.head_dim), dtype=np.float32)


def first_visible(shape: AttentionShape, position: int) -> int:
    return 0 if shape.window is None else max(0, position - shape.window + 1)


def check_pieces(gpu: Gpu, shape: AttentionShape, pieces: Sequence[Piece], seed: int) -> None:
    """Each piece is a sequence of its own, whose positions out of sight are NaN."""
    rng = np.random.default_rng(seed)
    caches = [make_cache(shape, p.position + p.rows, rng, first_visible(shape, p.position)) for p in pieces]
    batch = make_batch(pieces, caches)
    q = queries(shape, batch.rows, rng)
    assert_right(attend_resident(gpu, shape, batch, q, caches), q, shape, batch, caches)


@path
@pytest.mark.parametrize("context", [1, 2, 127, 128, 129, 512, 513, 1100])
def test_decode(capability: tuple[int, int], kv_dtype: DType, context: int) -> None:
    gpu = make_gpu(context, capability)
    check_pieces(gpu, make_shape(4, 2, 16, kv_dtype=kv_dtype), [Piece(0, context - 1, decode=True)], context)


@path
@pytest.mark.parametrize("rows", [1, 2, 17, 65])
def test_prompt_of_any_length(capability: tuple[int, int], kv_dtype: DType, rows: int) -> None:
    gpu = make_gpu(rows, capability)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 0, rows), Piece(1, 505, rows), Piece(2, 512 - rows, rows)], rows)


@path
@pytest.mark.parametrize("window", [1, 5, 511, 512, 513])
def test_windows(capability: tuple[int, int], kv_dtype: DType, window: int) -> None:
    gpu = make_gpu(window, capability)
    shape = make_shape(4, 2, 16, window=window, kv_dtype=kv_dtype)
    prompts = [Piece(0, 0, 18), Piece(1, 500, 33), Piece(2, 1020, 17)]
    decodes = [Piece(3 + i, context - 1, decode=True) for i, context in enumerate((1, 7, 512, 513, 1030))]
    check_pieces(gpu, shape, prompts + decodes, window)


@path
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (7, 1), (18, 2)])
def test_head_groups(capability: tuple[int, int], kv_dtype: DType, heads: int, kv_heads: int) -> None:
    gpu = make_gpu(heads, capability)
    shape = make_shape(heads, kv_heads, 16, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 490, 33), Piece(1, 530, decode=True), Piece(2, 3, decode=True)], heads)


@path
@pytest.mark.parametrize("head_dim", [8, 72, 128, 136, 256])
def test_head_dims(capability: tuple[int, int], kv_dtype: DType, head_dim: int) -> None:
    gpu = make_gpu(head_dim, capability)
    shape = make_shape(3, 1, head_dim, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 508, 9), Piece(1, 520, decode=True), Piece(2, 0, decode=True)], head_dim)


@path
@pytest.mark.parametrize("head_dim", [64, 128, 136, 256])
def test_decode_with_as_many_heads_as_a_block_takes(
    capability: tuple[int, int], kv_dtype: DType, head_dim: int
) -> None:
    gpu = make_gpu(head_dim, capability)
    shape = make_shape(8, 1, head_dim, window=400, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 530, decode=True), Piece(1, 77, decode=True)], head_dim)


@path
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(capability: tuple[int, int], kv_dtype: DType, softcap: float) -> None:
    gpu = make_gpu(0, capability)
    shape = make_shape(4, 2, 16, softcap=softcap, window=600, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 700, 20), Piece(1, 0, 5), Piece(2, 800, decode=True)], 1)


@path
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_of_runs_from_the_host(capability: tuple[int, int], kv_dtype: DType, softcap: float) -> None:
    """Each run is capped as resident tiles are, for prompt and decode rows, and so are partial results of waves."""
    rng = np.random.default_rng(12)
    shape = make_shape(4, 2, 16, softcap=softcap, kv_dtype=kv_dtype)
    cache = make_cache(shape, 1600, rng)
    batch = make_batch([Piece(0, 1540, 20), Piece(0, 1599, decode=True)], [cache])
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(12, capability)
    for run_tiles, resident_from in ((1, None), (2, 3)):
        device = DevicePass(gpu, shape, batch, q, [cache])
        device.stream_runs(0, run_tiles, resident_from)
        assert_right(device.result(), q, shape, batch, [cache])
        device.close()


@path
def test_large_scores(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Weights far apart: e^(s - m) underflows for nearly all positions, and the largest score keeps moving."""
    rng = np.random.default_rng(2)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    cache = make_cache(shape, 1100, rng)
    batch = make_batch([Piece(0, 1050, 40), Piece(0, 1099, decode=True)], [cache])
    q = 300 * queries(shape, batch.rows, rng)
    gpu = make_gpu(2, capability)
    assert_right(attend_resident(gpu, shape, batch, q, [cache]), q, shape, batch, [cache])


@path
def test_runs_from_the_host_equal_resident_tiles(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Tiles through a buffer, run by run, then the recent ones resident: the same bits, for prompt and decode rows."""
    rng = np.random.default_rng(3)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    cache = make_cache(shape, 2600, rng)
    batch = make_batch([Piece(0, 2540, 20), Piece(0, 2599, decode=True)], [cache])
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(3, capability)
    expected = attend_resident(gpu, shape, batch, q, [cache])
    assert_right(expected, q, shape, batch, [cache])
    for run_tiles, resident_from in ((1, None), (2, None), (4, 4), (3, 5)):
        device = DevicePass(gpu, shape, batch, q, [cache])
        device.stream_runs(0, run_tiles, resident_from)
        np.testing.assert_array_equal(device.result().view(np.uint32), expected.view(np.uint32))
        device.close()


@path
def test_runs_that_a_window_sees(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Only the visible tiles are moved, and those out of sight are freed."""
    rng = np.random.default_rng(4)
    shape = make_shape(4, 2, 16, window=700, kv_dtype=kv_dtype)
    cache = make_cache(shape, 2600, rng, visible_from=2540 - 699)
    batch = make_batch([Piece(0, 2540, 20), Piece(0, 2599, decode=True)], [cache])
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(4, capability)
    expected = attend_resident(gpu, shape, batch, q, [cache])
    assert_right(expected, q, shape, batch, [cache])
    device = DevicePass(gpu, shape, batch, q, [cache])
    first = (2540 - 699) // 512
    for tile in range(first, 6):
        run = KvRun(device.tiles[0] + tile * device.tile_bytes[0], tile, 1, 0)
        device.attend(run, begin=tile == first, end=tile == 5)
    np.testing.assert_array_equal(device.result().view(np.uint32), expected.view(np.uint32))
    device.close()


@path
def test_a_run_leaves_other_sequences_alone(capability: tuple[int, int], kv_dtype: DType) -> None:
    rng = np.random.default_rng(5)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    caches = [make_cache(shape, length, rng) for length in (1100, 700)]
    pieces = [Piece(0, 1000, 5), Piece(1, 600, 18), Piece(0, 1099, decode=True), Piece(1, 699, decode=True)]
    batch = make_batch(pieces, caches)
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(5, capability)
    expected = attend_resident(gpu, shape, batch, q, caches)
    device = DevicePass(gpu, shape, batch, q, caches)
    for sequence, tiles in ((1, 2), (0, 3)):
        for tile in range(tiles):
            run = KvRun(device.tiles[sequence] + tile * device.tile_bytes[sequence], tile, 1, sequence)
            device.attend(run, begin=tile == 0, end=tile == tiles - 1)
    np.testing.assert_array_equal(device.result().view(np.uint32), expected.view(np.uint32))
    device.close()


@path
@pytest.mark.parametrize("window", [None, 100])
def test_a_prompt_row_does_not_depend_on_its_company(
    capability: tuple[int, int], kv_dtype: DType, window: int | None
) -> None:
    """Whole prompt, odd chunks, other sequences: the same bits."""
    rng = np.random.default_rng(6)
    shape = make_shape(4, 2, 16, window=window, kv_dtype=kv_dtype)
    start, rows = 430, 150
    cache, other = make_cache(shape, start + rows, rng), make_cache(shape, 800, rng)
    q = queries(shape, rows, rng)
    gpu = make_gpu(6, capability)
    expected = attend_resident(gpu, shape, make_batch([Piece(0, start, rows)], [cache]), q, [cache])
    for cuts in ([64, 86], [1, 2, 3, 5, 139], [17, 83, 50], [149, 1]):
        done = 0
        for cut in cuts:
            batch = make_batch([Piece(1, 700, 13), Piece(0, start + done, cut), Piece(1, 750, 1, True)], [cache, other])
            padded = np.concatenate([queries(shape, 13, rng), q[done : done + cut], queries(shape, 1, rng)])
            got = attend_resident(gpu, shape, batch, padded, [cache, other])[13 : 13 + cut]
            np.testing.assert_array_equal(got.view(np.uint32), expected[done : done + cut].view(np.uint32))
            done += cut
        assert done == rows


@path
def test_a_decode_row_does_not_depend_on_its_company(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Alone, and among up to eleven rows in any order: waves of another width, another group, the same bits."""
    rng = np.random.default_rng(7)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    lengths = (1, 3, 40, 512, 513, 700, 1030, 1700, 2, 900, 2600)
    caches = [make_cache(shape, length, rng) for length in lengths]
    q = queries(shape, len(lengths), rng)
    gpu = make_gpu(7, capability)

    def rows(indices: Sequence[int]) -> F32:
        batch = make_batch([Piece(i, lengths[i] - 1, decode=True) for i in indices], caches)
        return attend_resident(gpu, shape, batch, np.ascontiguousarray(q[list(indices)]), caches)

    expected = np.concatenate([rows([i]) for i in range(len(lengths))])
    for chosen in (range(11), rng.permutation(11), (10, 7, 3), (6, 10)):
        order = [int(i) for i in chosen]
        np.testing.assert_array_equal(rows(order).view(np.uint32), expected[order].view(np.uint32))


@path
def test_a_context_of_several_waves(capability: tuple[int, int], kv_dtype: DType) -> None:
    """More positions than a wave has units: 70 tiles."""
    rng = np.random.default_rng(8)
    shape = make_shape(3, 1, 8, kv_dtype=kv_dtype)
    lengths = (35_840, 9_000, 17_000, 32_768)
    caches = [make_cache(shape, length, rng) for length in lengths]
    batch = make_batch([Piece(i, length - 1, decode=True) for i, length in enumerate(lengths)], caches)
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(8, capability, "ascending")
    assert_right(attend_resident(gpu, shape, batch, q, caches), q, shape, batch, caches)


@path
def test_threads_and_blocks_in_any_order(capability: tuple[int, int], kv_dtype: DType) -> None:
    """Ascending and descending give the same bits, and nothing else is written."""
    gpu = make_gpu(9, capability, "both")
    shape = make_shape(3, 1, 72, window=300, kv_dtype=kv_dtype)
    check_pieces(gpu, shape, [Piece(0, 505, 18), Piece(1, 700, decode=True)], 9)


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_fast_takes_one_term(softcap: float | None) -> None:
    rng = np.random.default_rng(10)
    shape = make_shape(4, 2, 16, softcap=softcap, kv_dtype=DType.BF16)
    cache = make_cache(shape, 600, rng)
    batch = make_batch([Piece(0, 560, 40)], [cache])
    q = queries(shape, batch.rows, rng)
    gpu = make_gpu(10, (8, 0))
    exact, magnitude = attention_in_fp64(q, shape, batch, [cache])
    errors = [
        float((np.abs(attend_resident(gpu, shape, batch, q, [cache], fast) - exact) / magnitude).max())
        for fast in (False, True)
    ]
    assert errors[0] < 1e-6 < errors[1] < 5e-3


@path
def test_a_nan_in_the_query_is_not_hidden(capability: tuple[int, int], kv_dtype: DType) -> None:
    rng = np.random.default_rng(11)
    shape = make_shape(4, 2, 16, kv_dtype=kv_dtype)
    cache = make_cache(shape, 600, rng)
    batch = make_batch([Piece(0, 590, 2), Piece(0, 599, decode=True)], [cache])
    q = queries(shape, 3, rng)
    q[0, 3] = q[2, 3] = np.nan
    out = attend_resident(make_gpu(11, capability), shape, batch, q, [cache])
    assert np.isnan(out[0, :16]).all()
    assert np.isnan(out[2, :16]).all()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(out[[0, 2], 16:]).all()


def test_launches_are_cut_to_a_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt block over many tiles takes several launches, to the same bits."""
    rng = np.random.default_rng(12)
    shape = make_shape(4, 2, 16)
    cache = make_cache(shape, 1600, rng)
    batch = make_batch([Piece(0, 1590, 10)], [cache])
    q = queries(shape, batch.rows, rng)
    gpu = EmulatedGpu(12)
    expected = attend_resident(gpu, shape, batch, q, [cache])
    launches: list[str] = []
    launch = gpu.launch

    def counted(kernel: Kernel, *rest: Any, **named: Any) -> None:
        launches.append(kernel.source.entry)
        launch(kernel, *rest, **named)

    monkeypatch.setattr(gpu, "launch", counted)
    monkeypatch.setattr(attention, "_LAUNCH_PRODUCTS", 1)
    got = attend_resident(gpu, shape, batch, q, [cache])
    assert len(launches) == 4
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_query_blocks_list_the_spans() -> None:
    spans = [PromptSpan(0, 130, 7, 0), PromptSpan(130, 1, 500, 1)]
    listed = query_blocks(spans, 5)
    assert listed.tolist() == [[0, 64, 7, 0], [64, 64, 71, 0], [128, 2, 135, 0], [130, 1, 500, 1], [0, 0, 0, 0]]
    assert query_block_entries(131, 2) == 4
    with pytest.raises(ValueError, match="4 query blocks; the list holds 3"):
        query_blocks(spans, 3)


def test_memory_does_not_grow_with_the_context() -> None:
    shape = make_shape(12, 2, 128)
    assert workspace_bytes(shape, 8) == 8 * 12 * 2 * 2 * 4 + 128 * 12 * 4 * 130


@pytest.mark.parametrize("head_dim", [4, 20, 264, 512])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"head_dim is {head_dim}"):
        check_shape(make_shape(2, 1, head_dim, rotary_dim=0))
