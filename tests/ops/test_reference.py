"""The oracle against fp64 arithmetic written another way, and its functions against PyTorch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from cpu.attention_cases import Piece, assert_right, make_batch, make_cache, make_shape
from cpu.delta_cases import (
    assert_delta_right,
    delta_in_fp64,
    delta_shape,
    make_blocks,
    make_delta_batch,
    make_inputs,
    run_delta,
)
from cpu.guarded import Guarded
from cpu.made_weights import make_weight
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.reference.activation import gelu_tanh, silu, softcap
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.reference.bf16 import bf16_to_float, round_to_bf16
from edge_transformer.ops.reference.rope import rotate
from edge_transformer.ops.tensor import DType, tensor_of

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def floats(shape: tuple[int, ...], seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def prompt_batch(rows: int) -> Batch:
    shape = make_shape()
    return make_batch([Piece(0, 0, rows)], [make_cache(shape, rows, np.random.default_rng(0))])


def product(x: F32, values: F32) -> tuple[F64, F64]:
    """x @ values.T in fp64, and the sums of the magnitudes of its terms."""
    x64, values64 = x.astype(np.float64), values.astype(np.float64)
    return x64 @ values64.T, np.abs(x64) @ np.abs(values64).T


def assert_within(op: str, got: F32, exact: F64, magnitude: F64) -> None:
    assert (np.abs(got - exact) <= CONTRACTS[op].eps * magnitude).all()


def test_every_bf16_is_its_own_rounding() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bf16_to_float(bits)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(round_to_bf16(values)[~is_nan], bits[~is_nan])
    assert np.isnan(bf16_to_float(round_to_bf16(values[is_nan]))).all()


def test_bf16_ties_go_to_even_and_neighbours_to_the_nearest() -> None:
    lower = np.arange(0x3F00, 0x4100, dtype=np.uint32)
    tie = (lower << 16) + 0x8000
    even = np.where(lower % 2 == 0, lower, lower + 1)
    np.testing.assert_array_equal(round_to_bf16(tie.view(np.float32)), even)
    np.testing.assert_array_equal(round_to_bf16((tie - 1).view(np.float32)), lower)
    np.testing.assert_array_equal(round_to_bf16((tie + 1).view(np.float32)), lower + 1)
    assert round_to_bf16(np.array([3.4e38], np.float32))[0] == 0x7F80


def test_rotation_turns_pairs_like_complex_numbers_and_keeps_the_rest() -> None:
    x, angles = floats((3, 2, 10), 1), np.random.default_rng(2).uniform(-3, 3, (3, 3))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = rotate(x, cos, sin)
    exact = (x[..., :3] + 1j * x[..., 3:6].astype(np.float64)) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got[..., :3], exact.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 3:6], exact.imag, atol=1e-6)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])


def test_add_norm_by_hand() -> None:
    backend = ReferenceBackend()
    residual, delta = np.array([[1, 2]], np.float32), np.array([[2, 2]], np.float32)
    delta_norm, weight, out = np.array([1, 3], np.float32), np.array([10, 1], np.float32), Guarded(1, 2)
    arguments = [tensor_of(a) for a in (residual, delta, delta_norm, weight)]
    backend.add_norm(*arguments, 0.0, out.tensor, prompt_batch(1))
    # rmsnorm(2, 2) = (1, 1): the residual is (2, 5), whose mean square is 14.5.
    np.testing.assert_array_equal(residual, [[2, 5]])
    np.testing.assert_allclose(out.array, [[20 / math.sqrt(14.5), 5 / math.sqrt(14.5)]], rtol=2e-7)
    out.check()


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_products_and_embedding_rows(weight_format: WeightFormat) -> None:
    rng = np.random.default_rng(3)
    backend = ReferenceBackend()
    made, up = (make_weight(weight_format, 11, 256, rng) for _ in range(2))
    x, bias = floats((4, 256), 4), floats((11,), 5)
    batch = prompt_batch(4)
    exact, magnitude = product(x, made.values)
    out = Guarded(4, 11)
    backend.linear_group([made.weight], [tensor_of(bias)], tensor_of(x), [out.tensor], batch)
    assert_within("linear_group", out.array, exact + bias, magnitude + np.abs(bias))
    out.check()

    residual = floats((4, 11), 6)
    before = residual.copy()
    backend.linear_add(made.weight, None, tensor_of(x), tensor_of(residual), batch)
    assert_within("linear_add", residual, before + exact, magnitude + np.abs(before))

    gated = Guarded(4, 11)
    backend.gated_mlp(made.weight, up.weight, None, tensor_of(bias), "silu", tensor_of(x), gated.tensor, batch)
    up_exact, up_magnitude = product(x, up.values)
    with np.errstate(over="ignore"):
        gate = exact / (1 + np.exp(-exact))
    assert_within(
        "gated_mlp", gated.array, gate * (up_exact + bias), (magnitude + 1) * (up_magnitude + np.abs(bias) + 1)
    )

    logits = Guarded(2, 11)
    backend.lm_head(made.weight, tensor_of(x), 2, 5.0, logits.tensor)
    assert_within("lm_head", logits.array, 5 * np.tanh(exact[:2] / 5), magnitude[:2])

    batch.token_ids[:] = [3, 10, 0, 3]
    rows = Guarded(4, 256)
    backend.gather_rows(made.weight, batch, 1.5, rows.tensor)
    np.testing.assert_array_equal(rows.array, np.float32(1.5) * made.values[[3, 10, 0, 3]])


def test_select_rows() -> None:
    x, out = floats((5, 3), 7), Guarded(2, 3)
    ReferenceBackend().select_rows(tensor_of(x), tensor_of(np.array([4, 1, 0], np.int32)), 2, out.tensor)
    np.testing.assert_array_equal(out.array, x[[4, 1]])


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (5, 2.0), (513, None)])
def test_attention_of_a_mixed_pass(window: int | None, cap: float | None, kv_dtype: DType) -> None:
    """Keys and values out of every row's sight are NaN, and tiles before them are freed."""
    rng = np.random.default_rng(8)
    shape = make_shape(6, 2, 24, window=window, softcap=cap, kv_dtype=kv_dtype)
    pieces = [Piece(0, 0, 7), Piece(1, 505, 20), Piece(2, 1029, decode=True), Piece(3, 0, decode=True)]
    sight = [0 if window is None else max(0, piece.position - window + 1) for piece in pieces]
    caches = [make_cache(shape, p.position + p.rows, rng, first) for p, first in zip(pieces, sight, strict=True)]
    batch = make_batch(pieces, caches)
    q, out = floats((batch.rows, 6 * 24), 9), Guarded(batch.rows, 6 * 24)
    ReferenceBackend().attention(tensor_of(q), shape, out.tensor, batch)
    assert_right(out.array, q, shape, batch, caches)
    out.check()


def test_append_writes_its_positions_and_nothing_else() -> None:
    rng = np.random.default_rng(10)
    shape = make_shape(2, 1, 8, kv_dtype=DType.BF16)
    caches = [make_cache(shape, 600, rng), make_cache(shape, 3, rng)]
    before = [cache.tiles.copy() for cache in caches]
    batch = make_batch([Piece(0, 511, 2), Piece(1, 2, decode=True)], caches, half=4)
    k, v = floats((3, 8), 11), floats((3, 8), 12)
    q = floats((3, 16), 13)
    ReferenceBackend().qk_norm_rope_append(tensor_of(q), tensor_of(k), tensor_of(v), None, None, 1e-6, shape, batch)
    for row, (sequence, tile, slot) in enumerate([(0, 0, 511), (0, 1, 0), (1, 0, 2)]):
        before[sequence][tile, 0, 0, slot], before[sequence][tile, 1, 0, slot] = (
            round_to_bf16(k[row]),
            round_to_bf16(v[row]),
        )
    for cache, expected in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache.tiles, expected)


@pytest.mark.golden
def test_functions_equal_those_of_pytorch() -> None:
    import torch
    from torch.nn import functional

    x = np.concatenate([floats((10_000,), 14) * 5, np.array([0, -100, 100, -1000], np.float32)])
    tensor = torch.from_numpy(x).double()
    np.testing.assert_allclose(silu(x), functional.silu(tensor).numpy(), rtol=4e-7, atol=1e-40)
    np.testing.assert_allclose(gelu_tanh(x), functional.gelu(tensor, approximate="tanh").numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(softcap(x, 30.0), (30 * torch.tanh(tensor / 30)).numpy(), rtol=4e-7)
    np.testing.assert_array_equal(
        round_to_bf16(x), torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )


@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta(tiled: bool) -> None:
    rng = np.random.default_rng()
    shape = delta_shape(3, 6, key_dim=7, value_dim=10, conv_width=3, tiled=tiled)
    pieces = [Piece(0, 0, 70), Piece(1, 33, 20), Piece(2, 5, decode=True), Piece(2, 6, decode=True)]
    inputs, before = make_inputs(shape, 92, rng), make_blocks(shape, 3, rng)
    blocks = before.copy()
    batch = make_delta_batch(pieces, blocks)
    got = run_delta(ReferenceBackend(), shape, inputs, batch)
    assert_delta_right(got, blocks, shape, delta_in_fp64(shape, inputs, batch, before))


def test_output_gates() -> None:
    shape = make_shape(3, 1, 8)
    batch, joined = prompt_batch(5), floats((5, 3 * 2 * 8), 1)
    q, gate = Guarded(5, 24), Guarded(5, 24)
    backend = ReferenceBackend()
    backend.split_query_gate(tensor_of(joined), shape, q.tensor, gate.tensor, batch)
    heads = joined.reshape(5, 3, 2, 8)
    np.testing.assert_array_equal(q.array, heads[:, :, 0].reshape(5, 24))
    np.testing.assert_array_equal(gate.array, heads[:, :, 1].reshape(5, 24))
    before = q.array.astype(np.float64)
    backend.apply_gate(q.tensor, gate.tensor, batch)
    q.check()
    exact = before / (1 + np.exp(-gate.array.astype(np.float64)))
    assert_within("apply_gate", q.array, exact, np.abs(before))
