"""Products on a GPU (emulated) against numpy fp64 on values from the gguf package.

Every launch runs with its threads in ascending and in descending order: results are equal bit for bit, and nothing but
the outputs changes (EmulatedGpu, order "both").
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.made_weights import MadeWeight, make_weight
from cuda.device_pass import F32, DevicePass
from edge_transformer.cuda import linear
from edge_transformer.cuda.gemm_shape import GemmShape, gemm_workspace_bytes
from edge_transformer.cuda.gemv_shape import GemvShape, gemv_cut, unit_columns
from edge_transformer.cuda.linear import LinearOps
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, packed_layout
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import Tensor
from emulator.gpu import EmulatedGpu

FORMATS_ALL = list(WeightFormat)
TENSOR_CORES, PLAIN = (8, 0), (7, 5)
PATHS = [pytest.param(TENSOR_CORES, id="sm_80"), pytest.param(PLAIN, id="sm_75")]


class Ops:
    """LinearOps on an emulated GPU, with a product as a function of host arrays."""

    def __init__(self, capability: tuple[int, int] = TENSOR_CORES, fast_prefill: bool = False) -> None:
        self.gpu = EmulatedGpu(int(np.random.default_rng().integers(1 << 30)), order="both", capability=capability)
        self.linear = LinearOps(self.gpu, fast_prefill)
        self.at = DevicePass(self.gpu)
        nbytes = max(256, gemm_workspace_bytes(136, 3072, capability, fast_prefill))
        self.linear.reserve(self.at.arrays.empty((nbytes,), np.uint8, "workspace"), nbytes)

    def product(self, weight: Weight, x: F32, prompt: int, spare: int = 0) -> F32:
        """x @ weight.T of a pass whose first `prompt` rows are prompt rows; launches for `spare` more rows."""
        x = np.concatenate([x, np.full((2 * spare, x.shape[1]), np.nan, np.float32)])
        out = self.at.output((len(x), weight.layout.rows))
        rows = self.at.rows(prompt, len(x) - 2 * spare, spare=spare)
        self.linear.linear_group([weight], [None], self.at.tensor(x), [out], rows, self.at.stream)
        got = self.at.read(out)
        assert np.isnan(got[len(x) - 2 * spare :]).all()
        return got[: len(x) - 2 * spare]


def cols_of(weight_format: WeightFormat) -> tuple[int, ...]:
    block = FORMATS[weight_format].block_cols
    return {1: (1, 7, 33, 137, 264), 32: (32, 96, 544), 64: (64, 576), 128: (128, 640), 256: (256, 768)}[block]


def assert_close(got: F32, made: MadeWeight, x: F32) -> None:
    exact = x.astype(np.float64) @ made.values.astype(np.float64).T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(made.values).astype(np.float64).T
    error = np.abs(got - exact) / magnitude
    assert (error <= CONTRACTS["linear_group"].eps).all(), error.max()


def random(rows: int, cols: int) -> F32:
    return np.random.default_rng().standard_normal((rows, cols), dtype=np.float32)


@pytest.mark.parametrize("weight_format", FORMATS_ALL)
@pytest.mark.parametrize("capability", PATHS)
def test_prompt_rows(capability: tuple[int, int], weight_format: WeightFormat) -> None:
    ops, rng = Ops(capability), np.random.default_rng()
    shapes = zip((1, 9, 70, 131, 3), (3, 67, 5, 1, 2), cols_of(weight_format), strict=False)
    for rows, tokens, cols in shapes:
        made = make_weight(weight_format, rows, cols, rng)
        x = random(tokens, cols)
        assert_close(ops.product(ops.at.weight(made.weight), x, prompt=tokens, spare=2), made, x)


@pytest.mark.parametrize("weight_format", FORMATS_ALL)
def test_decode_rows(weight_format: WeightFormat) -> None:
    ops, rng = Ops(), np.random.default_rng()
    shapes = zip((1, 9, 70, 5, 3), (3, 1, 2, 8, 11), cols_of(weight_format), strict=False)
    for rows, tokens, cols in shapes:
        made = make_weight(weight_format, rows, cols, rng)
        x = random(tokens, cols)
        assert_close(ops.product(ops.at.weight(made.weight), x, prompt=0), made, x)


@pytest.mark.parametrize("weight_format", FORMATS_ALL)
@pytest.mark.parametrize("capability", PATHS)
def test_rows_do_not_depend_on_their_company(capability: tuple[int, int], weight_format: WeightFormat) -> None:
    """Number of rows, mix of kinds, place in the pass and spare rows change not one bit."""
    ops, rng = Ops(capability), np.random.default_rng()
    cols = max(64, FORMATS[weight_format].block_cols)
    weight = ops.at.weight(make_weight(weight_format, 19, cols, rng).weight)
    x = random(71, cols)
    prompt = ops.product(weight, x, prompt=71)
    decode = ops.product(weight, x[:20], prompt=0)
    for start, rows, of_prompt in ((0, 1, 1), (70, 1, 1), (13, 17, 17), (3, 1, 0), (5, 2, 0), (7, 4, 0), (2, 14, 5)):
        spare = 0 if 0 < of_prompt < rows else int(rng.integers(0, 4))
        got = ops.product(weight, x[start : start + rows], of_prompt, spare)
        middle = start + of_prompt
        assert np.array_equal(got, np.concatenate([prompt[start:middle], decode[middle : start + rows]]))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.Q4_0, WeightFormat.Q8_0])
def test_more_columns_than_shared_memory_takes(weight_format: WeightFormat, tokens: int) -> None:
    ops, rng = Ops(PLAIN), np.random.default_rng()
    cut = gemv_cut(weight_format, PLAIN, tokens, 1 << 20)
    cols = (cut.chunk_rounds << cut.slice_bits) * 32 * unit_columns(weight_format) + 96
    made = make_weight(weight_format, 3, cols, rng)
    x = random(tokens, cols)
    assert_close(ops.product(ops.at.weight(made.weight), x, prompt=0), made, x)


@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.Q4_0])
def test_decode_rows_of_any_number_of_columns_agree_between_batches(weight_format: WeightFormat) -> None:
    ops, rng = Ops(), np.random.default_rng()
    cols = 1124 if weight_format is not WeightFormat.Q4_0 else 1120
    weight = ops.at.weight(make_weight(weight_format, 5, cols, rng).weight)
    x = random(8, cols)
    together = ops.product(weight, x, prompt=0)
    for rows in (1, 2, 3):
        assert np.array_equal(ops.product(weight, x[:rows], prompt=0), together[:rows])


@pytest.mark.parametrize("capability", PATHS)
@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16, WeightFormat.Q4_1])
def test_numbers_of_one_sign_over_many_columns(weight_format: WeightFormat, capability: tuple[int, int]) -> None:
    """Where rounding errors add up most: nothing cancels, and the sum is far above its terms."""
    ops, rng = Ops(capability), np.random.default_rng()
    made = make_weight(weight_format, 9, 3072, rng)
    x = np.abs(random(2, 3072)) * np.sign(made.values[:2])
    assert_close(ops.product(ops.at.weight(made.weight), x, prompt=2), made, x)
    assert_close(ops.product(ops.at.weight(made.weight), x, prompt=0), made, x)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.Q5_1])
def test_more_weight_rows_than_blocks_take_at_once(weight_format: WeightFormat, tokens: int) -> None:
    """Blocks take several tiles, of several matrices; x goes to shared memory once, or again for every tile."""
    ops, rng = Ops(), np.random.default_rng()
    for cols in (64, 6144 + 96) if tokens == 8 else (64,):
        sizes = (301, 7, 150) if cols == 64 else (130, 7, 50)
        made = [make_weight(weight_format, size, cols, rng) for size in sizes]
        x = random(tokens, cols)
        outs = [ops.at.output((tokens, size)) for size in sizes]
        weights = [ops.at.weight(one.weight) for one in made]
        rows = ops.at.rows(0, tokens)
        ops.linear.linear_group(weights, [None] * 3, ops.at.tensor(x), outs, rows, ops.at.stream)
        for one, weight, out in zip(made, weights, outs, strict=True):
            got = ops.at.read(out)
            assert_close(got, one, x)
            part = one.weight.layout.rows // 2
            assert np.array_equal(got[:part], ops.product(weight, x, prompt=0)[:part])


@pytest.mark.parametrize("cols", [3072, 4096 + 256])
@pytest.mark.parametrize(
    "weight_format", [WeightFormat.BF16, WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.I4_G64, WeightFormat.Q6_K]
)
def test_slices_of_the_columns(weight_format: WeightFormat, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several warps share a row: whatever their blocks, rows and company, the same bits."""
    ops, rng = Ops((9, 0)), np.random.default_rng()
    slice_bits = gemv_cut(weight_format, (9, 0), 1, cols).slice_bits
    assert slice_bits == gemv_cut(weight_format, (9, 0), 8, cols).slice_bits == 2 or cols > 4096
    made = make_weight(weight_format, 37, cols, rng)
    weight, x = ops.at.weight(made.weight), random(8, cols)
    usual = ops.product(weight, x, prompt=0)
    assert_close(usual, made, x)
    for tokens, shape in (
        (1, GemvShape(4, 1, 128, 1, 1)),
        (2, GemvShape(2, 4, 256, 1, 1)),
        (8, GemvShape(1, 2, 256, 2, 2)),
    ):
        monkeypatch.setattr(linear, "gemv_shape", lambda *_, shape=shape: shape)
        assert np.array_equal(ops.product(weight, x[:tokens], prompt=0), usual[:tokens])
    assert np.array_equal(ops.product(ops.at.weight(made.weight), x[3:4], prompt=0), usual[3:4])


FORMATS_OF_TILES = [WeightFormat.BF16, WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q5_K, WeightFormat.Q6_K]


@pytest.mark.parametrize("fast_prefill", [False, True], ids=["three_terms", "one_term"])
@pytest.mark.parametrize("weight_format", FORMATS_OF_TILES)
def test_tiles_change_no_bit(weight_format: WeightFormat, fast_prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and large ones, more and fewer stages, and matrices in one launch or each in its own."""
    ops, rng = Ops((9, 0), fast_prefill), np.random.default_rng()
    cols = {1: 216, 32: 160, 256: 256}[FORMATS[weight_format].block_cols]
    sizes, tokens = (133, 5, 20), 131
    made = [make_weight(weight_format, size, cols, rng) for size in sizes]
    weights = [ops.at.weight(one.weight) for one in made]
    x = random(tokens, cols)
    shapes = linear.gemm_shapes(weight_format, (9, 0), 1 if fast_prefill else 3)
    assert len(shapes) == (1 if weight_format is WeightFormat.Q6_K and not fast_prefill else 2)
    results = []
    for shape in (*shapes, replace(shapes[0], stages=2)):
        monkeypatch.setattr(linear, "gemm_shape", lambda *_, shape=shape: shape)
        outs = [ops.at.output((tokens, size)) for size in sizes]
        rows, device_x = ops.at.rows(tokens, tokens), ops.at.tensor(x)
        ops.linear.linear_group(weights, [None] * 3, device_x, outs, rows, ops.at.stream)
        results.append([ops.at.read(out) for out in outs])
    results.append([ops.product(weight, x[:7], prompt=7) for weight in weights])
    assert np.array_equal(added_to(ops, weights[0], x, shapes[0], monkeypatch), results[0][0] + np.float32(1))
    for one, first, *others in zip(made, *results, strict=True):
        if not fast_prefill:
            assert_close(first, one, x)
        for other in others:
            assert np.array_equal(other, first[: len(other)])


def added_to(ops: Ops, weight: Weight, x: F32, shape: GemmShape, monkeypatch: pytest.MonkeyPatch) -> F32:
    """The product added to ones: every output is added once, whatever threads a tile leaves over."""
    monkeypatch.setattr(linear, "gemm_shape", lambda *_: shape)
    tokens = len(x)
    residual = ops.at.tensor(np.ones((tokens, weight.layout.rows), np.float32))
    ops.linear.linear_add(weight, None, ops.at.tensor(x), residual, ops.at.rows(tokens, tokens), ops.at.stream)
    return ops.at.read(residual)


def bf16(values: F32) -> F32:
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("weight_format", FORMATS_ALL)
def test_fast_prefill_rounds_to_bf16(weight_format: WeightFormat) -> None:
    """Activations, and the values of weights: each to half a bf16 ulp, sums with a minimum to one more."""
    ops, exact_ops, rng = Ops(fast_prefill=True), Ops(), np.random.default_rng()
    made = make_weight(weight_format, 33, 256, rng)
    x = random(5, 256)
    got = ops.product(ops.at.weight(made.weight), x, prompt=5)
    exact = bf16(x).astype(np.float64) @ made.values.astype(np.float64).T
    largest = np.abs(exact).max()
    if weight_format is WeightFormat.BF16:
        assert_close(got, made, bf16(x))
    else:
        assert 1e-5 * largest < np.abs(got - exact).max() < 1e-2 * largest
    minimum_free = weight_format not in {WeightFormat.Q4_1, WeightFormat.Q5_1, WeightFormat.Q4_K, WeightFormat.Q5_K}
    if minimum_free:
        rounded = bf16(x).astype(np.float64) @ bf16(made.values).astype(np.float64).T
        assert np.median(np.abs(got - rounded)) < 1e-6 * largest
        # A value in the middle between two bf16 may round the other way: two of them in a sum, by one ulp each.
        ulps = np.exp2(np.floor(np.log2(np.abs(made.values) + 1e-30)) - 7)
        largest_flip = (np.abs(bf16(x))[:, None, :] * ulps).max(axis=2)
        assert (np.abs(got - rounded) <= 2 * largest_flip + 1e-6 * largest).all()
    decode = ops.product(ops.at.weight(made.weight), x, prompt=0)
    assert np.array_equal(decode, exact_ops.product(exact_ops.at.weight(made.weight), x, prompt=0))


def test_prompt_rows_beyond_the_workspace_are_refused() -> None:
    ops = Ops()
    weight = ops.at.weight(make_weight(WeightFormat.BF16, 4, 8, np.random.default_rng()).weight)
    ops.linear.reserve(0, 0)
    with pytest.raises(ValueError, match="bytes of workspace"):
        ops.product(weight, random(3, 8), prompt=3)


@pytest.mark.parametrize("capability", PATHS)
def test_groups_biases_and_residuals(capability: tuple[int, int]) -> None:
    """Matrices of several formats, more than a launch takes, with and without bias; then added to what there is."""
    ops, rng = Ops(capability), np.random.default_rng()
    cols, tokens, prompt = 64, 5, 3
    formats = [WeightFormat.Q8_0] * 4 + [WeightFormat.Q4_1, WeightFormat.Q8_0]
    sizes = (70, 3, 17, 9, 33, 5)
    made = [make_weight(known, size, cols, rng) for known, size in zip(formats, sizes, strict=True)]
    weights = [ops.at.weight(one.weight) for one in made]
    x = random(tokens, cols)
    plain = [ops.product(weight, x, prompt) for weight in weights]
    biases = [rng.standard_normal(size, dtype=np.float32) if index % 2 else None for index, size in enumerate(sizes)]
    on_device = [None if bias is None else ops.at.tensor(bias, "bias") for bias in biases]
    outs = [ops.at.output((tokens, size)) for size in sizes]
    ops.linear.linear_group(weights, on_device, ops.at.tensor(x), outs, ops.at.rows(prompt, tokens), ops.at.stream)
    for out, product, bias in zip(outs, plain, biases, strict=True):
        assert np.array_equal(ops.at.read(out), product if bias is None else product + bias)

    start = random(tokens, 3)
    residual = ops.at.tensor(start, "residual")
    ops.linear.linear_add(
        weights[1], on_device[1], ops.at.tensor(x), residual, ops.at.rows(prompt, tokens), ops.at.stream
    )
    assert np.array_equal(ops.at.read(residual), start + (plain[1] + biases[1]))


def activation_exact(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("formats", [(WeightFormat.Q5_0, WeightFormat.Q5_0), (WeightFormat.Q8_0, WeightFormat.F16)])
@pytest.mark.parametrize("capability", PATHS)
def test_gated_mlp(capability: tuple[int, int], formats: tuple[WeightFormat, WeightFormat], activation: str) -> None:
    ops, rng = Ops(capability), np.random.default_rng()
    rows, cols, tokens = 37, 64, 6
    gate, up = (make_weight(known, rows, cols, rng) for known in formats)
    weights = [ops.at.weight(one.weight) for one in (gate, up)]
    x = random(tokens, cols)
    for prompt, biased in ((0, True), (4, False), (6, True)):
        biases = [rng.standard_normal(rows, dtype=np.float32) for _ in range(2)] if biased else [np.float32(0)] * 2
        on_device = [ops.at.tensor(bias, "bias") if biased else None for bias in biases]
        out = ops.at.output((tokens, rows))
        ops.linear.gated_mlp(
            *weights, *on_device, activation, ops.at.tensor(x), out, ops.at.rows(prompt, tokens), ops.at.stream
        )
        left, right = (
            x.astype(np.float64) @ one.values.astype(np.float64).T + bias
            for one, bias in zip((gate, up), biases, strict=True)
        )
        sums = [np.abs(x) @ np.abs(one.values).T + np.abs(bias) for one, bias in zip((gate, up), biases, strict=True)]
        error = np.abs(ops.at.read(out) - activation_exact(activation, left) * right)
        assert (error <= CONTRACTS["gated_mlp"].eps * (sums[0] + 1) * (sums[1] + 1)).all()


def test_gated_mlp_in_one_kernel_equals_two() -> None:
    """Decode rows of gate and up: one launch when the formats are the same, two otherwise; the same numbers."""
    ops, rng = Ops(), np.random.default_rng()
    rows, cols = 21, 96
    gate, up = (make_weight(WeightFormat.Q4_1, rows, cols, rng) for _ in range(2))
    weights = [ops.at.weight(one.weight) for one in (gate, up)]
    x = random(3, cols)
    out = ops.at.output((3, rows))
    ops.linear.gated_mlp(*weights, None, None, "silu", ops.at.tensor(x), out, ops.at.rows(0, 3), ops.at.stream)
    left, right = (ops.product(weight, x, prompt=0) for weight in weights)
    exact = activation_exact("silu", left.astype(np.float64)) * right
    assert np.abs(ops.at.read(out) / exact - 1).max() < 5e-7


@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
def test_lm_head(softcap: float | None) -> None:
    """Whole, and in blocks of rows: the same logits, each within its columns."""
    ops, rng = Ops(), np.random.default_rng()
    made = make_weight(WeightFormat.Q6_K, 41, 256, rng)
    x = random(4, 256)
    on_device = ops.at.tensor(x)
    whole, rows = ops.at.output((4, 41)), ops.at.rows(2, 3, logits=3, spare=1)
    ops.linear.lm_head(ops.at.weight(made.weight), on_device, softcap, whole, rows, ops.at.stream)
    got = ops.at.read(whole)
    assert np.isnan(got[3]).all()
    raw = ops.product(ops.at.weight(made.weight), x[:3], prompt=0)
    if softcap is None:
        assert np.array_equal(got[:3], raw)
    else:
        assert np.abs(got[:3] - softcap * np.tanh(raw.astype(np.float64) / softcap)).max() <= 4e-7 * softcap

    bf16 = make_weight(WeightFormat.BF16, 41, 256, rng)
    blocked, expected = ops.at.output((4, 41)), ops.at.output((4, 41))
    ops.linear.lm_head(ops.at.weight(bf16.weight), on_device, softcap, expected, rows, ops.at.stream)
    for first, last in ((0, 16), (16, 40), (40, 41)):
        part = make_rows(bf16, first, last)
        ops.linear.lm_head(ops.at.weight(part), on_device, softcap, blocked, rows, ops.at.stream, first_row=first)
    assert np.array_equal(ops.at.read(blocked), ops.at.read(expected), equal_nan=True)


def make_rows(made: MadeWeight, first: int, last: int) -> Weight:
    """Rows of a BF16 matrix as a matrix of their own."""
    bits = (made.values[first:last].view(np.uint32) >> 16).astype(np.uint16)
    return Weight(packed_layout(WeightFormat.BF16, last - first, bits.shape[1]), bits.ctypes.data, bits)


def test_wrong_arguments_are_refused() -> None:
    ops, rng = Ops(), np.random.default_rng()
    weight = ops.at.weight(make_weight(WeightFormat.F32, 4, 8, rng).weight)
    x, out, rows = ops.at.tensor(random(2, 8)), ops.at.output((2, 4)), ops.at.rows(0, 2, logits=2)
    linear, stream = ops.linear, ops.at.stream
    with pytest.raises(ValueError, match="rows of 8"):
        linear.linear_group([weight], [None], ops.at.tensor(random(2, 9)), [out], rows, stream)
    with pytest.raises(ValueError, match="output is"):
        linear.linear_add(weight, None, x, ops.at.output((2, 5)), rows, stream)
    with pytest.raises(ValueError, match="bias is"):
        linear.linear_add(weight, ops.at.tensor(random(1, 3)[0]), x, out, rows, stream)
    with pytest.raises(ValueError, match="activation"):
        linear.gated_mlp(weight, weight, None, None, "relu", x, out, rows, stream)
    with pytest.raises(ValueError, match="of 4 logits"):
        linear.lm_head(weight, x, None, out, rows, stream, first_row=1)
    with pytest.raises(ValueError, match="multiple of 16"):
        linear.linear_add(weight, None, Tensor(x.address + 4, (2, 8), x.dtype, None), out, rows, stream)
    with pytest.raises(ValueError, match="plane"):
        linear.linear_add(Weight(weight.layout, weight.address + 8, None), None, x, out, rows, stream)


@pytest.mark.parametrize("weight_format", [WeightFormat.Q4_0, WeightFormat.Q5_1, WeightFormat.Q4_K, WeightFormat.Q6_K])
@pytest.mark.parametrize("magnitude", [1e-18, 1e-6, 1e6, 1e9])
def test_decode_rows_of_any_magnitude(weight_format: WeightFormat, magnitude: float) -> None:
    """The GEMV multiplies codes of few bits as numbers below the normal ones: x is scaled, and must stay in range."""
    ops, rng = Ops(), np.random.default_rng()
    made = make_weight(weight_format, 3, 256, rng)
    x = random(2, 256) * np.float32(magnitude)
    assert_close(ops.product(ops.at.weight(made.weight), x, prompt=0), made, x)
