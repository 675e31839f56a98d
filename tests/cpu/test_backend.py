"""CpuBackend as a whole: a layer against the oracle in every instruction set, what it refuses, how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from cpu.attention_cases import Piece, make_batch, make_cache, make_shape
from cpu.guarded import Guarded
from cpu.made_weights import make_weight
from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.errors import UnsupportedModelError, UsageError
from edge_transformer.formats.weight import Weight, WeightFormat
from edge_transformer.ops.backend import AttentionShape, Backend
from edge_transformer.ops.batch import Batch, PromptSpan
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import DType, Tensor, array_at, tensor_of

F32 = npt.NDArray[np.float32]

ISAS = _native.available_instruction_sets()
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 256, 4, 2, 64, 512, 97


def scaled(rows: int, cols: int, rng: np.random.Generator) -> Weight:
    """A weight whose products with rows of order one are of order one."""
    weight = make_weight(WeightFormat.F32, rows, cols, rng).weight
    values = array_at(weight.address, (rows, cols), np.float32) * np.float32(cols**-0.5)
    return replace(weight, address=values.ctypes.data, owner=values)


def run_layer(backend: Backend, softcap: float | None, kv_dtype: DType) -> tuple[F32, F32]:
    """Embedding, one layer and logits of a mixed pass; the same numbers for every backend. (residual, logits)"""
    rng = np.random.default_rng(1)
    shape = make_shape(HEADS, KV_HEADS, HEAD_DIM, window=300, softcap=softcap, kv_dtype=kv_dtype)
    caches = [make_cache(shape, 600, rng) for _ in range(3)]
    batch = make_batch([Piece(0, 500, 37), Piece(1, 0, 5), Piece(2, 599, decode=True)], caches, HEAD_DIM // 2)
    angles = rng.uniform(-np.pi, np.pi, (batch.rows, HEAD_DIM // 2))
    batch.rope_cos[0][:], batch.rope_sin[0][:] = np.cos(angles), np.sin(angles)
    batch.token_ids[:] = rng.integers(0, VOCABULARY, batch.rows)
    table, *matrices = (
        scaled(rows, cols, rng)
        for rows, cols in (
            (VOCABULARY, HIDDEN),
            (HEADS * HEAD_DIM, HIDDEN),
            (KV_HEADS * HEAD_DIM, HIDDEN),
            (KV_HEADS * HEAD_DIM, HIDDEN),
            (HIDDEN, HEADS * HEAD_DIM),
            (FEED_FORWARD, HIDDEN),
            (FEED_FORWARD, HIDDEN),
            (HIDDEN, FEED_FORWARD),
        )
    )
    w_q, w_k, w_v, w_o, w_gate, w_up, w_down = matrices
    norms = [tensor_of(1 + 0.2 * rng.standard_normal(HIDDEN).astype(np.float32)) for _ in range(4)]
    head_norms = [tensor_of(1 + 0.2 * rng.standard_normal(HEAD_DIM).astype(np.float32)) for _ in range(2)]
    rows = batch.rows
    residual, normed, delta = (Guarded(rows, HIDDEN) for _ in range(3))
    q, attended = (Guarded(rows, HEADS * HEAD_DIM) for _ in range(2))
    k, v = (Guarded(rows, KV_HEADS * HEAD_DIM) for _ in range(2))
    mlp, selected, logits = Guarded(rows, FEED_FORWARD), Guarded(3, HIDDEN), Guarded(3, VOCABULARY)

    backend.reserve(rows, FEED_FORWARD, [shape])
    backend.gather_rows(table, batch, 16.0, residual.tensor)
    backend.add_norm(residual.tensor, None, None, norms[0], 1e-6, normed.tensor, batch)
    outs = [q.tensor, k.tensor, v.tensor]
    backend.linear_group([w_q, w_k, w_v], [None] * 3, normed.tensor, outs, batch)
    backend.qk_norm_rope_append(*outs, *head_norms, 1e-6, shape, batch)
    backend.attention(q.tensor, shape, attended.tensor, batch)
    backend.linear_group([w_o], [None], attended.tensor, [delta.tensor], batch)
    backend.add_norm(residual.tensor, delta.tensor, norms[1], norms[2], 1e-6, normed.tensor, batch)
    backend.gated_mlp(w_gate, w_up, None, None, "gelu_tanh", normed.tensor, mlp.tensor, batch)
    backend.linear_add(w_down, None, mlp.tensor, residual.tensor, batch)
    backend.add_norm(residual.tensor, None, None, norms[3], 1e-6, normed.tensor, batch)
    backend.select_rows(normed.tensor, tensor_of(np.array([42, 0, 36], np.int32)), 3, selected.tensor)
    backend.lm_head(table, selected.tensor, 3, 30.0, logits.tensor)
    for guarded in (residual, normed, delta, q, attended, k, v, mlp, selected, logits):
        guarded.check()
    return residual.array, logits.array


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_layer_equals_the_oracle(isa: str, softcap: float | None) -> None:
    """The bound of the design: 1e-5 of the largest logit."""
    residual, logits = run_layer(ReferenceBackend(), softcap, DType.F32)
    for threads in (1, 3):
        got_residual, got_logits = run_layer(CpuBackend(threads, isa), softcap, DType.F32)
        assert np.abs(got_residual - residual).max() <= 1e-5 * np.abs(residual).max()
        assert np.abs(got_logits - logits).max() <= 1e-5 * max(1.0, np.abs(logits).max())


@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_with_bf16_cache_is_near_the_oracle(isa: str) -> None:
    """A key on the border between two bf16 may round to either."""
    residual, _ = run_layer(ReferenceBackend(), None, DType.BF16)
    got, _ = run_layer(CpuBackend(2, isa), None, DType.BF16)
    assert np.abs(got - residual).max() <= 1e-3 * np.abs(residual).max()


@pytest.mark.parametrize("isa", ISAS)
def test_threads_change_no_bit(isa: str) -> None:
    expected = run_layer(CpuBackend(1, isa), 2.0, DType.BF16)
    for threads in (2, 3):
        for got, want in zip(run_layer(CpuBackend(threads, isa), 2.0, DType.BF16), expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_threads_and_instruction_set_are_checked() -> None:
    assert CpuBackend(3, "plain").pool.threads == 3
    assert CpuBackend(1).isa == ISAS[-1]
    with pytest.raises(UsageError, match="avx1024"):
        CpuBackend(1, "avx1024")
    with pytest.raises(UsageError, match="threads"):
        CpuBackend(0)


def test_heads_that_the_kernels_do_not_handle_refuse_the_model() -> None:
    for head_dim in (4, 20, 264, 320):
        with pytest.raises(UnsupportedModelError, match=f"head_dim is {head_dim}; supported: multiples of 8 up to 256"):
            CpuBackend(1).reserve(8, 32, [make_shape(4, 2, head_dim)])


def test_threads_that_the_system_refuses_are_a_capacity_error() -> None:
    code = (
        "import resource\n"
        "from edge_transformer.cpu.backend import CpuBackend\n"
        "from edge_transformer.errors import CapacityError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try: CpuBackend(1000)\n"
        "except CapacityError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "refused to start 1000 threads" in result.stdout
    assert "--threads" in result.stdout


def test_numbers_of_instruction_sets_are_checked() -> None:
    pool = _native.ThreadPool(1)
    for isa in (-1, 3):
        with pytest.raises(IndexError):
            _native.ElementwiseOps(pool, isa)
        with pytest.raises(IndexError):
            _native.AttentionOp(pool, isa, 0, 4, 2, 64, 64, 0, 1.0, 0.0, 0, True)


def test_allocated_memory_is_aligned() -> None:
    for nbytes in (1, 1000, 5 << 20):
        address, owner = CpuBackend(1).allocate(nbytes)
        assert address % 256 == 0
        assert owner is not None


def attend(shape: AttentionShape, batch: Batch, cols: int) -> None:
    backend = CpuBackend(1)
    backend.reserve(batch.rows, 32, [shape])
    q, out = np.zeros((batch.rows, cols), np.float32), np.zeros((batch.rows, cols), np.float32)
    backend.attention(tensor_of(q), shape, tensor_of(out), batch)


def refuse(message: str, shape: AttentionShape, batch: Batch, cols: int | None = None) -> None:
    with pytest.raises((ValueError, UnsupportedModelError), match=message):
        attend(shape, batch, shape.heads * shape.head_dim if cols is None else cols)


def test_attention_that_does_not_fit_is_refused() -> None:
    shape = make_shape(4, 2, 16)
    cache = make_cache(shape, 40, np.random.default_rng(1))
    batch = make_batch([Piece(0, 30, 3), Piece(0, 39, decode=True)], [cache])
    refuse("at least 4 rows of 64", shape, batch, cols=60)
    refuse("4 heads and 3 KV heads", replace(shape, kv_heads=3), batch)
    refuse("head_dim is 20", replace(shape, head_dim=20), batch)
    refuse("head_dim is 264", replace(shape, head_dim=264), batch)
    refuse("no tile table of layer 1", replace(shape, layer=1), batch)
    refuse(
        "position 600; a tile table of the pass has 1 tiles",
        shape,
        replace(batch, positions=np.array([30, 31, 32, 600], np.int32)),
    )
    refuse("row 1 does not have the position", shape, replace(batch, positions=np.array([30, 32, 33, 39], np.int32)))
    refuse("cover the prompt rows", shape, replace(batch, prompt_spans=(PromptSpan(0, 2, 30, 0),)))
    refuse(
        "fewer rows than the pass has sequences", shape, replace(batch, row_sequence=np.array([0, 0, 0, 1], np.int32))
    )


def test_rope_that_does_not_fit_is_refused() -> None:
    shape = make_shape(4, 2, 16)
    batch = make_batch([Piece(0, 0, 1)], [make_cache(shape, 1, np.random.default_rng(2))], half=7)
    q, k = np.zeros((1, 64), np.float32), np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="no cos and sin of rope 0 for 16 rotated columns"):
        CpuBackend(1).qk_norm_rope_append(
            tensor_of(q), tensor_of(k), tensor_of(k.copy()), None, None, 1e-6, shape, batch
        )


def test_arrays_of_another_type_are_refused_not_converted() -> None:
    """A converted copy would be gone when the kernel reads it."""
    shape = make_shape(4, 2, 16)
    batch = make_batch([Piece(0, 0, 1)], [make_cache(shape, 1, np.random.default_rng(2))])
    q = tensor_of(np.zeros((1, 64), np.float32))
    for changed in (
        replace(batch, positions=np.zeros(1, np.int64)),  # type: ignore[arg-type]
        replace(batch, tile_tables=(np.zeros((2, 4), np.int64)[:, ::2],)),
    ):
        with pytest.raises(TypeError):
            CpuBackend(1).attention(q, shape, tensor_of(np.zeros((1, 64), np.float32)), changed)


def test_every_tensor_of_an_op_must_be_f32() -> None:
    """Each in turn as i32 of the same shape, whose bits would be read as floats."""
    rng = np.random.default_rng(3)
    shape = make_shape(4, 2, 16)
    batch = make_batch([Piece(0, 2, decode=True)], [make_cache(shape, 3, rng)], half=8)
    square = make_weight(WeightFormat.F32, 64, 64, rng).weight
    backend = CpuBackend(1)
    backend.reserve(1, 64, [shape])

    def wide(count: int) -> list[Tensor]:
        return [tensor_of(np.ones((1, 64), np.float32)) for _ in range(count)]

    def vector(cols: int) -> Tensor:
        return tensor_of(np.ones(cols, np.float32))

    keys, values = (tensor_of(np.ones((1, 32), np.float32)) for _ in range(2))
    row = tensor_of(np.zeros(1, np.int32))
    ops: list[tuple[Callable[..., None], list[Tensor]]] = [
        (lambda out: backend.gather_rows(square, batch, 1.0, out), wide(1)),
        (
            lambda x, delta, delta_norm, weight, out: backend.add_norm(x, delta, delta_norm, weight, 1e-6, out, batch),
            [*wide(2), vector(64), vector(64), *wide(1)],
        ),
        (lambda bias, x, out: backend.linear_group([square], [bias], x, [out], batch), [vector(64), *wide(2)]),
        (lambda bias, x, out: backend.linear_add(square, bias, x, out, batch), [vector(64), *wide(2)]),
        (
            lambda q, k, v, q_norm, k_norm: backend.qk_norm_rope_append(q, k, v, q_norm, k_norm, 1e-6, shape, batch),
            [*wide(1), keys, values, vector(16), vector(16)],
        ),
        (lambda q, out: backend.attention(q, shape, out, batch), wide(2)),
        (
            lambda gate, up, x, out: backend.gated_mlp(square, square, gate, up, "silu", x, out, batch),
            [vector(64), vector(64), *wide(2)],
        ),
        (lambda x, out: backend.lm_head(square, x, 1, None, out), wide(2)),
        (lambda x, out: backend.select_rows(x, row, 1, out), wide(2)),
    ]
    for op, tensors in ops:
        op(*tensors)
        for index, tensor in enumerate(tensors):
            wrong = Tensor(tensor.address, tensor.shape, DType.I32, tensor.owner)
            with pytest.raises(ValueError, match="is i32"):
                op(*tensors[:index], wrong, *tensors[index + 1 :])


def test_scratch_must_be_reserved() -> None:
    shape = make_shape(4, 2, 16)
    batch = make_batch([Piece(0, 0, 1)], [make_cache(shape, 1, np.random.default_rng(2))])
    q = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="reserve"):
        CpuBackend(1).attention(tensor_of(q), shape, tensor_of(q.copy()), batch)
