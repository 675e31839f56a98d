"""Products, embedding rows and their epilogues against numpy fp64 on values from the gguf package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cpu.made_weights import MadeWeight, make_weight
from edge_transformer import _native
from edge_transformer.cpu.linear import LinearOps, linear_workspace
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import Tensor, tensor_of

F32 = npt.NDArray[np.float32]
ISAS = _native.available_instruction_sets()
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 70)
GUARD = 24


def make_ops(isa: str, threads: int = 1) -> LinearOps:
    pool = _native.ThreadPool(threads)
    pool.reserve(*linear_workspace(1200, 2048))
    return LinearOps(pool, _native.instruction_set_index(isa))


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> LinearOps:
    return make_ops(request.param)


class Guarded:
    """A poisoned output [rows, cols] between two rows of guard values, not aligned to anything but a float."""

    def __init__(self, rows: int, cols: int) -> None:
        self.memory = np.full(rows * cols + 2 * GUARD + 1, np.nan, dtype=np.float32)
        self.memory[: GUARD + 1] = self.memory[-GUARD:] = 1234.5
        self.array = self.memory[GUARD + 1 : -GUARD].reshape(rows, cols)
        self.tensor = Tensor(
            self.array.ctypes.data, (rows, cols), tensor_of(np.empty(0, np.float32)).dtype, self.memory
        )

    def check(self) -> None:
        assert (self.memory[: GUARD + 1] == 1234.5).all()
        assert (self.memory[-GUARD:] == 1234.5).all()


def product(ops: LinearOps, weight: Weight, x: F32, prompt_rows: int) -> F32:
    out = Guarded(len(x), weight.layout.rows)
    ops.linear_group([weight], [None], tensor_of(x), [out.tensor], prompt_rows, len(x))
    out.check()
    return out.array


def assert_close(got: F32, made: MadeWeight, x: F32) -> None:
    exact = x.astype(np.float64) @ made.values.astype(np.float64).T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(made.values).astype(np.float64).T
    error = np.abs(got - exact) / magnitude
    assert (error <= CONTRACTS["linear_group"].eps).all(), error.max()


def columns_of(weight_format: WeightFormat) -> tuple[int, ...]:
    block = FORMATS[weight_format].block_cols
    if block == 1:
        return (1, 7, 31, 33, 96, 255, 1000)
    if block in (32, 64, 128):
        return (block, 2 * block, 3 * block, 9 * block, 2048 + 3 * block)
    return (256, 768, 1280, 2048 + 256)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
@pytest.mark.parametrize("kind", ["prompt", "decode"])
def test_products(ops: LinearOps, weight_format: WeightFormat, kind: str) -> None:
    rng = np.random.default_rng()
    for rows, cols in zip((1, 2, 3, 5, 17, 97, 49), columns_of(weight_format), strict=False):
        made = make_weight(weight_format, rows, cols, rng)
        for tokens in TOKENS:
            x = rng.standard_normal((tokens, cols), dtype=np.float32)
            got = product(ops, made.weight, x, tokens if kind == "prompt" else 0)
            assert_close(got, made, x)


@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16, WeightFormat.Q4_1])
def test_unaligned_base(ops: LinearOps, weight_format: WeightFormat) -> None:
    """A matrix in a mapped file begins where the file has it."""
    rng = np.random.default_rng()
    for shift in (2, 8, 20, 61):
        made = make_weight(weight_format, 19, 224, rng, shift=shift)
        x = rng.standard_normal((5, 224), dtype=np.float32)
        assert_close(product(ops, made.weight, x, 2), made, x)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
@pytest.mark.parametrize("isa", ISAS)
def test_rows_do_not_depend_on_their_company(isa: str, weight_format: WeightFormat) -> None:
    """Number of rows, mix of kinds, fused weights, number of threads and place in the pass change not one bit."""
    rng = np.random.default_rng()
    cols = 512
    first, second = (make_weight(weight_format, rows, cols, rng).weight for rows in (150, 37))
    x = rng.standard_normal((70, cols), dtype=np.float32)
    alone = make_ops(isa)
    prompt = np.concatenate([product(alone, first, x[i : i + 1], 1) for i in range(70)])
    decode = np.concatenate([product(alone, first, x[i : i + 1], 0) for i in range(70)])
    for threads in (1, 2, 3):
        ops = make_ops(isa, threads)
        for rows, prompt_rows in ((2, 0), (3, 3), (7, 2), (9, 0), (16, 16), (17, 17), (33, 20), (70, 70), (70, 0)):
            start = int(rng.integers(0, 70 - rows + 1))
            part = np.ascontiguousarray(x[start : start + rows])
            outs = [Guarded(rows, 37), Guarded(rows, 150), Guarded(rows, 37)]
            ops.linear_group(
                [second, first, second], [None] * 3, tensor_of(part), [out.tensor for out in outs], prompt_rows, rows
            )
            middle = start + prompt_rows
            expected = np.concatenate([prompt[start:middle], decode[middle : start + rows]])
            assert np.array_equal(outs[1].array, expected)
            assert np.array_equal(outs[0].array, outs[2].array)
            for out in outs:
                out.check()


def group_columns(weight_format: WeightFormat) -> tuple[int, ...]:
    """Whole vectors of groups and every rest of one, for codes (4 groups at most) and minimums (16); more activations
    than fit into the first-level cache; more groups than are converted at once.
    """
    block = FORMATS[weight_format].block_cols
    if block == 1:
        return (1, 31, 33, 64, 576, 1100)
    if block == 32:
        return (32, 64, 96, 128, 416, 512, 544, 576, 608, 800, 1056, 2048 + 64)
    return tuple(block * count for count in (1, 3, 5, 2048 // block + 1))


@pytest.mark.parametrize("weight_format", list(WeightFormat))
@pytest.mark.parametrize("isa", ISAS)
def test_decode_groups_of_every_size(isa: str, weight_format: WeightFormat) -> None:
    """Right, and to the bit what each row gives alone; numbers of weight rows around those worked on together."""
    rng = np.random.default_rng()
    ops = make_ops(isa)
    for cols, rows in zip(group_columns(weight_format), (1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 66, 3), strict=False):
        made = make_weight(weight_format, rows, cols, rng)
        x = rng.standard_normal((17, cols), dtype=np.float32)
        alone = np.concatenate([product(ops, made.weight, x[i : i + 1], 0) for i in range(17)])
        assert_close(alone, made, x)
        for count in range(1, 18):
            start = int(rng.integers(0, 18 - count))
            got = product(ops, made.weight, np.ascontiguousarray(x[start : start + count]), 0)
            assert np.array_equal(got, alone[start : start + count]), (cols, rows, count)


@pytest.mark.parametrize("isa", ISAS)
def test_a_decode_row_of_nan_spoils_no_other(isa: str) -> None:
    rng = np.random.default_rng()
    ops = make_ops(isa)
    for weight_format in (WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.Q6_K, WeightFormat.BF16):
        made = make_weight(weight_format, 21, 768, rng)
        x = rng.standard_normal((7, 768), dtype=np.float32)
        clean = product(ops, made.weight, x, 0).copy()
        x[3, 700] = np.nan
        got = product(ops, made.weight, x, 0)
        assert np.isnan(got[3]).all()
        others = [0, 1, 2, 4, 5, 6]
        assert np.array_equal(got[others], clean[others])


def test_more_tokens_than_one_pass(ops: LinearOps) -> None:
    rng = np.random.default_rng()
    made = make_weight(WeightFormat.Q4_1, 50, 96, rng)
    x = rng.standard_normal((1100, 96), dtype=np.float32)
    got = product(ops, made.weight, x, 1037)
    assert_close(got, made, x)
    assert np.array_equal(got[600:640], product(ops, made.weight, np.ascontiguousarray(x[600:640]), 40))


@pytest.mark.parametrize("prompt_rows", [0, 5, 21])
def test_bias_and_residual(ops: LinearOps, prompt_rows: int) -> None:
    rng = np.random.default_rng()
    rows, cols, tokens = 53, 96, 21
    made = make_weight(WeightFormat.Q8_0, rows, cols, rng)
    x = rng.standard_normal((tokens, cols), dtype=np.float32)
    bias = rng.standard_normal(rows, dtype=np.float32)
    plain = product(ops, made.weight, x, prompt_rows).copy()

    out = Guarded(tokens, rows)
    ops.linear_group([made.weight], [tensor_of(bias)], tensor_of(x), [out.tensor], prompt_rows, tokens)
    out.check()
    assert np.array_equal(out.array, plain + bias)

    residual = Guarded(tokens, rows)
    start = rng.standard_normal((tokens, rows), dtype=np.float32)
    residual.array[:] = start
    ops.linear_add(made.weight, tensor_of(bias), tensor_of(x), residual.tensor, prompt_rows, tokens)
    residual.check()
    assert np.array_equal(residual.array, start + (plain + bias))


def activation_exact(name: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("prompt_rows", [0, 5, 19])
def test_gated_mlp(ops: LinearOps, activation: str, biased: bool, prompt_rows: int) -> None:
    rng = np.random.default_rng()
    rows, cols, tokens = 101, 64, 19
    gate, up = make_weight(WeightFormat.Q5_0, rows, cols, rng), make_weight(WeightFormat.F16, rows, cols, rng)
    x = rng.standard_normal((tokens, cols), dtype=np.float32)
    biases = [rng.standard_normal(rows, dtype=np.float32) if biased else np.zeros(rows, np.float32) for _ in range(2)]
    out = Guarded(tokens, rows)
    ops.gated_mlp(
        gate.weight,
        up.weight,
        tensor_of(biases[0]) if biased else None,
        tensor_of(biases[1]) if biased else None,
        activation,
        tensor_of(x),
        out.tensor,
        prompt_rows,
        tokens,
    )
    out.check()
    left = product(ops, gate.weight, x, prompt_rows).astype(np.float64) + biases[0]
    right = product(ops, up.weight, x, prompt_rows).astype(np.float64) + biases[1]
    exact = activation_exact(activation, left) * right
    assert np.abs(out.array - exact).max() <= 2e-6 * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
def test_lm_head(ops: LinearOps, softcap: float | None) -> None:
    rng = np.random.default_rng()
    made = make_weight(WeightFormat.Q6_K, 211, 256, rng)
    x = rng.standard_normal((4, 256), dtype=np.float32)
    out = Guarded(4, 211)
    ops.lm_head(made.weight, tensor_of(x), 3, softcap, out.tensor)
    out.check()
    assert np.isnan(out.array[3]).all()
    raw = product(ops, made.weight, np.ascontiguousarray(x[:3]), 0)
    if softcap is None:
        assert np.array_equal(out.array[:3], raw)
    else:
        exact = softcap * np.tanh(raw.astype(np.float64) / softcap)
        assert np.abs(out.array[:3] - exact).max() <= 4e-7 * softcap


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_embedding_rows(ops: LinearOps, weight_format: WeightFormat) -> None:
    rng = np.random.default_rng()
    cols = 37 if FORMATS[weight_format].block_cols == 1 else 768
    made = make_weight(weight_format, 40, cols, rng)
    ids = rng.integers(0, 40, 29, dtype=np.int32)
    for scale in (1.0, np.float32(33.94112549695428)):
        out = Guarded(29, cols)
        ops.gather_rows(made.weight, ids, scale, out.tensor)
        out.check()
        assert np.array_equal(out.array, made.values[ids] * np.float32(scale))


def test_wrong_arguments_are_refused() -> None:
    rng = np.random.default_rng()
    ops = make_ops("plain")
    made = make_weight(WeightFormat.F32, 4, 8, rng).weight
    x, out = tensor_of(np.zeros((2, 8), np.float32)), tensor_of(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="8 columns"):
        ops.linear_group([made], [None], tensor_of(np.zeros((2, 9), np.float32)), [out], 0, 2)
    with pytest.raises(ValueError, match="prompt rows"):
        ops.linear_group([made], [None], x, [out], 0, 3)
    with pytest.raises(ValueError, match="output is"):
        ops.linear_add(made, None, x, tensor_of(np.zeros((2, 5), np.float32)), 0, 2)
    with pytest.raises(ValueError, match="bias is"):
        ops.linear_add(made, tensor_of(np.zeros(3, np.float32)), x, out, 0, 2)
    with pytest.raises(ValueError, match="activation"):
        ops.gated_mlp(made, made, None, None, "relu", x, out, 0, 2)
    with pytest.raises(ValueError, match="token id 4 in row 1"):
        ops.gather_rows(made, np.array([0, 4], np.int32), 1.0, x)
    small = LinearOps(_native.ThreadPool(1), _native.instruction_set_index("plain"))
    with pytest.raises((ValueError, RuntimeError), match="reserve"):
        small.linear_group([made], [None], x, [out], 0, 2)


def test_scratch_reserved_for_the_widest_matrix_does_for_all_others() -> None:
    """What is reserved at load is never less than what a narrower matrix or fewer rows need."""
    for rows in (1, 7, 40, 64, 513):
        needed = [linear_workspace(rows, cols) for cols in range(1, 400)]
        assert needed == sorted(needed)
        assert all(np.diff([shared for shared, _ in needed]) >= 0)
        assert all(
            fewer[0] <= more[0]
            for fewer, more in zip(needed, (linear_workspace(rows + 1, c) for c in range(1, 400)), strict=True)
        )
