"""Quantizing matrices: what comes out against numpy, by errors computed from the planes and by a finer search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cpu.made_weights import make_weight
from edge_transformer import _native
from edge_transformer.errors import NumericError
from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.quantize import TARGETS, quantize, row_blocks
from edge_transformer.formats.weight import FORMATS, Plane, Weight, WeightFormat, WeightLayout

F32 = npt.NDArray[np.float32]
ISAS = _native.available_instruction_sets()
BEST = _native.instruction_set_index(ISAS[-1])
# Of the finer search's error. A row's largest value is cut off only where that lowers the error by a tenth.
ALLOWED = {WeightFormat.Q4_1: 1.1, WeightFormat.I8_ROW: 1.13}
GROUP = {WeightFormat.I4_G64: 64, WeightFormat.I4_G128: 128}


def weight_of(values: F32) -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    rows, cols = values.shape
    layout = WeightLayout(WeightFormat.F32, rows, cols, (Plane(0, 4 * cols),), values.nbytes)
    return Weight(layout, values.ctypes.data, values)


def shapes(target: WeightFormat) -> list[tuple[int, int]]:
    block = FORMATS[target].block_cols
    return [(1, block), (3, 3 * block), (37, 9 * block), (5, 21 * block)]


def group_errors(values: F32, approximation: F32, target: WeightFormat) -> npt.NDArray[np.float64]:
    size = values.shape[1] if target is WeightFormat.I8_ROW else GROUP.get(target, 32)
    difference = (values.astype(np.float64) - approximation).reshape(-1, size)
    return np.asarray((difference**2).sum(axis=1))


def searched_errors(values: F32, target: WeightFormat) -> npt.NDArray[np.float64]:
    """The least squared error of each group over 400 scales (and, with minimums, 20 x 40 lines), none refined."""
    size = values.shape[1] if target is WeightFormat.I8_ROW else GROUP.get(target, 32)
    groups = values.reshape(-1, size).astype(np.float64)
    best = np.full(len(groups), np.inf)
    if target is WeightFormat.Q4_1:
        low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
        for reach in np.linspace(0.5, 1.1, 40):
            for shift in np.linspace(-0.2, 0.2, 20):
                middle, half = (low + high) / 2 + shift * (high - low), (high - low) / 2 * reach
                scale = np.maximum(2 * half / 15, 1e-30)
                codes = np.clip(np.rint((groups - middle + half) / scale), 0, 15)
                best = np.minimum(best, ((groups - middle + half - scale * codes) ** 2).sum(axis=1))
        return best
    lowest, highest = (-127, 127) if FORMATS[target].planes[0].block_bytes == 32 else (-8, 7)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    for factor in np.concatenate([np.linspace(0.3, 1.4, 200), -np.linspace(0.3, 1.4, 200)]):
        scale = extreme / lowest * factor
        scale[scale == 0] = 1e-30
        codes = np.clip(np.rint(groups / scale), lowest, highest)
        best = np.minimum(best, ((groups - scale * codes) ** 2).sum(axis=1))
    return best


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", TARGETS)
def test_errors_are_as_reported_and_as_small_as_a_finer_search_makes_them(target: WeightFormat, isa: str) -> None:
    rng = np.random.default_rng()
    for rows, cols in shapes(target):
        values = (rng.standard_normal((rows, cols)) * rng.uniform(0.001, 3, (rows, 1))).astype(np.float32)
        made, error = quantize(weight_of(values), target, _native.instruction_set_index(isa))
        result = dequantize(made)
        exact = values.astype(np.float64) - result
        assert error.squared_error == pytest.approx((exact**2).sum(), rel=1e-4)
        assert error.squared_sum == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-5)
        assert error.largest == pytest.approx(np.abs(exact).max(), rel=1e-4)
        if rows == 37:  # of a few groups the search may find a lucky scale
            ours, finer = group_errors(values, result, target), searched_errors(values, target)
            assert ours.sum() <= ALLOWED.get(target, 1.04) * finer.sum()


@pytest.mark.parametrize("target", TARGETS)
def test_long_tails_are_cut_off_where_that_helps(target: WeightFormat) -> None:
    rng = np.random.default_rng()
    values = rng.standard_t(3, (16, 1024)).astype(np.float32)
    made, _ = quantize(weight_of(values), target, BEST)
    ours, finer = group_errors(values, dequantize(made), target), searched_errors(values, target)
    assert ours.sum() <= ALLOWED.get(target, 1.04) * finer.sum()


@pytest.mark.parametrize("target", TARGETS)
def test_values_that_the_format_has_stay_what_they_are(target: WeightFormat) -> None:
    """Quantizing what was quantized changes nothing, where every group uses its outermost codes."""
    rng = np.random.default_rng()
    rows, cols = 7, 1280
    size = cols if target is WeightFormat.I8_ROW else GROUP.get(target, 32)
    scale = np.float32(rng.uniform(0.01, 0.02, (rows, cols // size, 1)).astype(np.float16))
    low, high = (-127, 127) if FORMATS[target].planes[0].block_bytes == 32 else (-8, 7)
    codes = rng.integers(low, high + 1, (rows, cols // size, size)).astype(np.float32)
    codes[..., 3], codes[..., 11] = low, high
    minimum = np.float32(0.25) if target is WeightFormat.Q4_1 else np.float32(0)
    values = (scale * codes + minimum).reshape(rows, cols)
    if target is WeightFormat.Q4_1:
        values = (scale * (codes + 8) + np.float32(-0.25)).reshape(rows, cols)
    made, error = quantize(weight_of(values), target, BEST)
    tolerance = 1e-6 if target in (WeightFormat.I8_ROW, WeightFormat.Q4_1) else 0
    assert np.abs(dequantize(made) - values).max() <= tolerance * np.abs(values).max()
    assert error.relative_rms <= tolerance


@pytest.mark.parametrize("source", [known for known in WeightFormat if known is not WeightFormat.F32])
@pytest.mark.parametrize("target", [WeightFormat.I8_ROW, WeightFormat.I4_G64])
def test_any_format_is_read_as_its_values(source: WeightFormat, target: WeightFormat) -> None:
    rng = np.random.default_rng()
    made = make_weight(source, 9, 768, rng, shift=2 if FORMATS[source].block_cols == 1 else 0)
    ours, error = quantize(made.weight, target, BEST)
    expected, _ = quantize(weight_of(made.values), target, BEST)
    assert np.array_equal(dequantize(ours), dequantize(expected))
    assert error.largest == pytest.approx(np.abs(made.values - dequantize(ours)).max(), rel=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", TARGETS)
def test_rows_do_not_depend_on_their_company(target: WeightFormat, isa: str) -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal((29, 640), dtype=np.float32)
    index = _native.instruction_set_index(isa)
    together = dequantize(quantize(weight_of(values), target, index)[0])
    for first, last in ((0, 1), (7, 8), (3, 20), (28, 29)):
        assert np.array_equal(
            dequantize(quantize(weight_of(values[first:last]), target, index)[0]), together[first:last]
        )


@pytest.mark.parametrize("target", TARGETS)
def test_zeros_constants_and_very_small_values(target: WeightFormat) -> None:
    cols = 256
    values = np.zeros((5, cols), np.float32)
    values[1] = 0.75
    values[2] = -1e-30
    values[3, ::2] = 1e-6  # scales among the smallest f16
    values[4, 7] = 60000
    made, error = quantize(weight_of(values), target, BEST)
    result = dequantize(made)
    assert np.isfinite(result).all()
    assert (result[0] == 0).all()
    assert np.abs(result[1] - 0.75).max() <= 0.75 * 2**-10
    assert (np.abs(result[2]) <= 1e-30).all()
    assert np.abs(result[3] - values[3]).max() <= 1e-6
    assert abs(result[4, 7] - 60000) <= 60000 * 2**-10
    assert error.largest <= 60000 * 2**-10
    assert quantize(weight_of(values[:1]), target, BEST)[1].relative_rms == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 70000.0])
def test_what_cannot_be_quantized_is_refused(target: WeightFormat, bad: float) -> None:
    values = np.ones((300, 128), np.float32)
    values[217, 31] = bad
    (work,) = row_blocks(weight_of(values), target, BEST, "wrong.weight")
    with pytest.raises(NumericError, match=r"wrong\.weight: rows .* NaN, infinite or above 65504"):
        work()


def test_wrong_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="Q6_K is not among"):
        list(row_blocks(weight_of(np.ones((2, 256), np.float32)), WeightFormat.Q6_K, BEST, "w"))
    with pytest.raises(ValueError, match="multiples of 128"):
        list(row_blocks(weight_of(np.ones((2, 64), np.float32)), WeightFormat.I4_G128, BEST, "w"))


def test_padding_is_zero_and_blocks_cover_the_rows_in_order() -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal((40000, 32), dtype=np.float32)
    blocks = [work() for work in row_blocks(weight_of(values), WeightFormat.Q8_0, BEST, "w")]
    assert len(blocks) > 1
    assert sum(block.rows for block in blocks) == 40000
    ends = [0, 0]
    starts = [blocks[0].parts[0][0], blocks[0].parts[1][0]]
    for block in blocks:
        for index, (offset, data) in enumerate(block.parts):
            assert offset == starts[index] + ends[index]
            ends[index] += len(data)
        scales = block.parts[1][1].reshape(block.rows, 16)  # a scale of two bytes, and the padding of the row
        assert (scales[:, 2:] == 0).all()
    assert ends == [40000 * 32, 40000 * 16]
