"""Norms, rope with KV append, row selection and the vector functions against numpy fp64, for every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from cpu.attention_cases import Piece, make_batch, make_cache, make_shape
from cpu.guarded import Guarded
from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import DType, tensor_of

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

ISAS = _native.available_instruction_sets()
ROWS = (1, 2, 9, 33)
COLS = (1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 576, 640, 1153)


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=2, isa=request.param)
    yield backend
    backend.close()


def rms(x: npt.NDArray[np.floating], eps: float) -> F64:
    exact = x.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + eps)


def rows_batch(rows: int, rng: np.random.Generator):
    shape = make_shape()
    return make_batch([Piece(0, 0, rows)], [make_cache(shape, rows, rng)])


# ---- add_norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("form", ["norm", "delta", "delta_norm"])
def test_add_norm(backend: CpuBackend, cols: int, form: str) -> None:
    rng = np.random.default_rng(cols)
    limit = CONTRACTS["add_norm"].eps
    for rows in ROWS:
        residual, out = Guarded(rows, cols), Guarded(rows, cols)
        before = 3 * rng.standard_normal((rows, cols), dtype=np.float32)
        residual.array[:] = before
        delta = rng.standard_normal((rows, cols), dtype=np.float32) if form != "norm" else None
        delta_norm = 1 + rng.standard_normal(cols, dtype=np.float32) if form == "delta_norm" else None
        weight = rng.standard_normal(cols, dtype=np.float32)
        backend.add_norm(
            residual.tensor,
            None if delta is None else tensor_of(delta),
            None if delta_norm is None else tensor_of(delta_norm),
            tensor_of(weight),
            1e-5,
            out.tensor,
            rows_batch(rows, rng),
        )
        change = np.zeros((rows, cols))
        if delta is not None:
            change = delta.astype(np.float64) if delta_norm is None else rms(delta, 1e-5) * delta_norm
        stream = before + change
        parts = np.abs(before) + np.abs(change)
        scale = np.sqrt((stream**2).mean(axis=-1, keepdims=True) + 1e-5)
        assert (np.abs(residual.array - stream) <= limit * parts).all()
        if delta is None:
            np.testing.assert_array_equal(residual.array, before)
        # A column's own error, and that of the row's scale.
        magnitude = (parts + np.abs(stream) * (parts.max(axis=-1, keepdims=True) / scale)) / scale * np.abs(weight)
        assert (np.abs(out.array - rms(stream, 1e-5) * weight) <= limit * magnitude).all()
        residual.check()
        out.check()


def test_norm_of_zeros_and_of_a_row_alone(backend: CpuBackend) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((33, 100), dtype=np.float32)
    x[4] = 0
    weight = np.ones(100, np.float32)
    together, alone = Guarded(33, 100), Guarded(1, 100)
    residual = x.copy()
    backend.add_norm(tensor_of(residual), None, None, tensor_of(weight), 1e-6, together.tensor, rows_batch(33, rng))
    assert (together.array[4] == 0).all()
    for row in range(33):
        one = x[row : row + 1].copy()
        backend.add_norm(tensor_of(one), None, None, tensor_of(weight), 1e-6, alone.tensor, rows_batch(1, rng))
        np.testing.assert_array_equal(alone.array[0].view(np.uint32), together.array[row].view(np.uint32))


# ---- qk_norm_rope_append --------------------------------------------------------------------------------------------


def bf16_value(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: F64) -> npt.NDArray[np.uint16]:
    """Nearest bf16, ties to even, by the distance to both neighbours."""
    low = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    low_distance = np.abs(values - low.view(np.float32))
    high_distance = np.abs(values - (low + 0x10000).view(np.float32))
    takes_low = (low_distance < high_distance) | ((low_distance == high_distance) & ((low >> 16) % 2 == 0))
    return (np.where(takes_low, low, low + 0x10000) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (24, 0), (64, 64), (64, 18), (72, 72), (256, 64)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
def test_qk_norm_rope_append(backend: CpuBackend, head_dim: int, rotary_dim: int, norms: bool, kv_dtype: DType) -> None:
    rng = np.random.default_rng(head_dim + rotary_dim)
    shape = make_shape(4, 2, head_dim, kv_dtype=kv_dtype, rotary_dim=rotary_dim)
    caches = [make_cache(shape, 1024, rng), make_cache(shape, 1024, rng), make_cache(shape, 600, rng)]
    stored = [cache.tiles.copy() for cache in caches]
    batch = make_batch([Piece(0, 500, 30), Piece(1, 0, 3), Piece(2, 599, decode=True)], caches, rotary_dim // 2)
    rows = batch.rows
    angles = rng.uniform(-np.pi, np.pi, (rows, rotary_dim // 2))
    batch.rope_cos[0][:], batch.rope_sin[0][:] = np.cos(angles), np.sin(angles)
    q = Guarded(rows, 4 * head_dim)
    q.array[:] = rng.standard_normal((rows, 4 * head_dim))
    k = rng.standard_normal((rows, 2 * head_dim), dtype=np.float32)
    v = rng.standard_normal((rows, 2 * head_dim), dtype=np.float32)
    q_norm = rng.standard_normal(head_dim, dtype=np.float32) if norms else None
    k_norm = rng.standard_normal(head_dim, dtype=np.float32) if norms else None
    exact_q, bound_q = turned(q.array, q_norm, batch.rope_cos[0], batch.rope_sin[0], head_dim)
    exact_k, bound_k = turned(k, k_norm, batch.rope_cos[0], batch.rope_sin[0], head_dim)
    limit = CONTRACTS["qk_norm_rope_append"].eps

    norm_tensors = [None if norm is None else tensor_of(norm) for norm in (q_norm, k_norm)]
    backend.qk_norm_rope_append(q.tensor, tensor_of(k.copy()), tensor_of(v), *norm_tensors, 1e-6, shape, batch)

    q.check()
    assert (np.abs(q.array - exact_q.reshape(rows, -1)) <= limit * bound_q.reshape(rows, -1)).all()
    for row in range(rows):
        sequence, position = int(batch.row_sequence[row]), int(batch.positions[row])
        tile, slot = divmod(position, 512)
        got = caches[sequence].tiles[tile, :, :, slot].copy()
        stored[sequence][tile, :, :, slot] = got
        values = v[row].reshape(2, head_dim)
        if kv_dtype == DType.F32:
            assert (np.abs(got[0] - exact_k[row]) <= limit * bound_k[row]).all()
            np.testing.assert_array_equal(got[1], values)
        else:
            np.testing.assert_array_equal(got[1], to_bf16(values.astype(np.float64)))
            # Rounding is monotone: the nearest bf16 of something within the bound lies between those of its ends.
            low, high = (to_bf16(exact_k[row] + sign * limit * bound_k[row]) for sign in (-1, 1))
            assert ((bf16_value(low) <= bf16_value(got[0])) & (bf16_value(got[0]) <= bf16_value(high))).all()
    for cache, before in zip(caches, stored, strict=True):  # nothing else was written
        np.testing.assert_array_equal(cache.tiles, before)


def turned(x: F32, norm: F32 | None, cos: F32, sin: F32, head_dim: int) -> tuple[F64, F64]:
    """Heads [R, heads, head_dim] after norm and rotation, and |a| + |b| of each pair."""
    heads: F64 = x.reshape(len(x), -1, head_dim).astype(np.float64)
    if norm is not None:
        heads = rms(heads, 1e-6) * norm
    half = cos.shape[1]
    pairs = heads[..., :half] + 1j * heads[..., half : 2 * half]
    rotated = pairs * (cos + 1j * sin.astype(np.float64))[:, None]
    bound = np.abs(pairs.real) + np.abs(pairs.imag)
    rest = heads[..., 2 * half :]
    return (
        np.concatenate([rotated.real, rotated.imag, rest], axis=-1),
        np.concatenate([bound, bound, np.abs(rest)], axis=-1),
    )


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_rounding_of_every_kind_of_float(isa: str) -> None:
    """Ties, subnormals, the largest floats, infinities and NaN, through the values of an append."""
    backend = CpuBackend(1, isa)
    shape = make_shape(1, 1, 64, kv_dtype=DType.BF16, rotary_dim=0)
    rng = np.random.default_rng(3)
    special = [0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF]
    special += [0x7F800000, 0x7F7F8000, 0x7F7F7FFF, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0x00000000]
    bits = rng.integers(0, 2**32, (9, 64), dtype=np.uint32)
    bits[0, : len(special)] = special
    bits[1, : len(special)] = np.array(special, np.uint32) ^ np.uint32(0x80000000)
    cache = make_cache(shape, 9, rng)
    batch = make_batch([Piece(0, 0, 9)], [cache])
    zeros = np.zeros((9, 64), np.float32)
    backend.qk_norm_rope_append(
        tensor_of(zeros), tensor_of(zeros.copy()), tensor_of(bits.view(np.float32)), None, None, 1e-6, shape, batch
    )
    got = cache.tiles[0, 1, 0, :9]
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(got[~is_nan], rounded[~is_nan])
    assert np.isnan((got[is_nan].astype(np.uint32) << 16).view(np.float32)).all()


# ---- select_rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [1, 17, 576])
def test_select_rows(backend: CpuBackend, cols: int) -> None:
    rng = np.random.default_rng(cols)
    x = rng.standard_normal((40, cols), dtype=np.float32)
    for count in (1, 2, 33):
        rows = rng.integers(0, 40, 35, dtype=np.int32)
        out = Guarded(count, cols)
        backend.select_rows(tensor_of(x), tensor_of(rows), count, out.tensor)
        np.testing.assert_array_equal(out.array, x[rows[:count]])
        out.check()


def test_select_rows_refuses_rows_that_do_not_exist(backend: CpuBackend) -> None:
    x, out = np.zeros((4, 8), np.float32), Guarded(2, 8)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=f"row {bad} was asked; there are 4"):
            backend.select_rows(tensor_of(x), tensor_of(np.array([0, bad], np.int32)), 2, out.tensor)


# ---- Vector functions -----------------------------------------------------------------------------------------------


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def ulps(got: F32, exact: F64) -> F64:
    """Distance in units of the last place of the exact value, subnormals included."""
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    with np.errstate(invalid="ignore"):
        return np.where(got == exact.astype(np.float32), 0, np.abs(got - exact) / unit)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("function", "exact", "limit"), [(0, np.exp, 1.0), (1, np.tanh, 1.5)])
def test_exp_and_tanh_over_all_floats(isa: str, function: int, exact: Callable[[F64], F64], limit: float) -> None:
    """A million floats of every exponent and sign, in an odd count; infinities and NaN among them."""
    ops = _native.ElementwiseOps(_native.ThreadPool(1), _native.instruction_set_index(isa))
    x = np.random.default_rng(1).integers(0, 2**32, 1_000_003, dtype=np.uint32).view(np.float32)
    dense = np.random.default_rng(2).uniform(-110, 95, 1_000_003).astype(np.float32)
    special = np.array(
        [0, -0.0, np.inf, -np.inf, 88.72283, 88.72284, -87.33655, -103.97208, -103.98, 0.625], np.float32
    )
    for values in (x, dense, dense / 64, special):
        out = np.empty_like(values)
        ops.apply(function, values.ctypes.data, len(values), out.ctypes.data)
        is_nan = np.isnan(values)
        assert np.isnan(out[is_nan]).all()
        with np.errstate(over="ignore"):
            truth = exact(values[~is_nan].astype(np.float64))
            assert ulps(out[~is_nan], truth).max() <= limit


@pytest.mark.parametrize("isa", ISAS)
def test_activations(isa: str) -> None:
    ops = _native.ElementwiseOps(_native.ThreadPool(1), _native.instruction_set_index(isa))
    x = np.random.default_rng(3).uniform(-30, 30, 100_003).astype(np.float32)
    out = np.empty_like(x)
    exact = x.astype(np.float64)
    ops.apply(2, x.ctypes.data, len(x), out.ctypes.data)
    assert (np.abs(out - exact / (1 + np.exp(-exact))) <= 3e-7 * np.abs(exact / (1 + np.exp(-exact)))).all()
    ops.apply(3, x.ctypes.data, len(x), out.ctypes.data)
    # 1 + tanh cancels on the negative side, here as in PyTorch: the error is relative to x.
    assert (np.abs(out - gelu_tanh(exact)) <= 1.5e-7 * np.abs(exact)).all()
