"""Matrices to quantized formats: scales of small squared error, found natively (native/kernels/quantize.cpp).

Which format a matrix of a model gets is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.errors import NumericError
from edge_transformer.formats.weight import PLANE_ALIGNMENT, Weight, WeightFormat, packed_layout, round_up

TARGETS = (
    WeightFormat.Q8_0,
    WeightFormat.I8_ROW,
    WeightFormat.Q4_0,
    WeightFormat.Q4_1,
    WeightFormat.I4_G64,
    WeightFormat.I4_G128,
)
"""Formats that matrices can be quantized to."""

_BLOCK_BYTES = 4 << 20  # of fp32 values: what one call takes, small beside a model and large beside a call

_FORMAT_INDEX = {weight_format: index for index, weight_format in enumerate(WeightFormat)}


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """What quantizing did to values: sums over all of them, and the largest difference of one."""

    squared_error: float = 0.0
    squared_sum: float = 0.0
    largest: float = 0.0

    @property
    def relative_rms(self) -> float:
        """Root of the mean squared error over that of the mean square; 0 for a matrix of zeros."""
        return float(np.sqrt(self.squared_error / self.squared_sum)) if self.squared_sum else 0.0

    def __add__(self, other: QuantizationError) -> QuantizationError:
        return QuantizationError(
            self.squared_error + other.squared_error,
            self.squared_sum + other.squared_sum,
            max(self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a quantized matrix: for each plane its offset in the packed layout and the bytes from there on."""

    rows: int
    parts: tuple[tuple[int, npt.NDArray[np.uint8]], ...]
    error: QuantizationError


def row_blocks(source: Weight, target: WeightFormat, isa: int, name: str) -> Iterator[Callable[[], RowBlock]]:
    """The work of quantizing a matrix, in pieces that may run in any order and in several threads (without the GIL).

    Planes lie as packed_layout(target, rows, cols) says. isa: number of an instruction set. name: for errors.
    A piece raises NumericError for values that are NaN, infinite or beyond what an f16 can hold. Raises ValueError for
    a target that is not one of TARGETS, or whose blocks do not divide the columns.
    """
    if target not in TARGETS:
        raise ValueError(f"{target} is not among {', '.join(TARGETS)}")
    layout = source.layout
    packed_layout(target, layout.rows, layout.cols)
    view = weight_view(source)
    rows = max(1, _BLOCK_BYTES // (4 * layout.cols))
    for first in range(0, layout.rows, rows):
        count = min(rows, layout.rows - first)
        yield partial(_quantize_rows, source, view, first, count, target, isa, name)


def quantize(source: Weight, target: WeightFormat, isa: int) -> tuple[Weight, QuantizationError]:
    """A whole matrix in new memory. Raises as `row_blocks` does."""
    layout = packed_layout(target, source.layout.rows, source.layout.cols)
    memory = np.zeros(layout.nbytes + PLANE_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % PLANE_ALIGNMENT
    error = QuantizationError()
    for work in row_blocks(source, target, isa, "matrix"):
        block = work()
        for offset, values in block.parts:
            memory[start + offset : start + offset + len(values)] = values
        error += block.error
    return Weight(layout, memory.ctypes.data + start, memory), error


def weight_view(weight: Weight) -> _native.WeightView:
    """A weight as native code sees it. The caller keeps the weight."""
    layout = weight.layout
    offsets = [plane.offset for plane in layout.planes]
    pitches = [plane.row_pitch for plane in layout.planes]
    return _native.WeightView(_FORMAT_INDEX[layout.format], layout.rows, layout.cols, weight.address, offsets, pitches)


def _quantize_rows(
    source: Weight, view: _native.WeightView, first: int, count: int, target: WeightFormat, isa: int, name: str
) -> RowBlock:
    """`source` is what `view` sees: held here, its memory stays."""
    planes = packed_layout(target, source.layout.rows, source.layout.cols).planes
    offsets, end = [], 0
    for plane in planes:
        offsets.append(end)
        end = round_up(end + count * plane.row_pitch, PLANE_ALIGNMENT)
    memory = np.zeros(end, np.uint8)
    squared_error, squared_sum, largest, fits = _native.quantize_rows(
        view,
        isa,
        first,
        count,
        _FORMAT_INDEX[target],
        memory.ctypes.data,
        offsets,
        [plane.row_pitch for plane in planes],
    )
    if not fits:
        raise NumericError(
            f"{name}: rows {first} to {first + count - 1} have values that are NaN, infinite or above 65504, which "
            f"{target} cannot hold; the weights are damaged, or the model needs them in a float format"
        )
    parts = tuple(
        (plane.offset + first * plane.row_pitch, memory[offset : offset + count * plane.row_pitch])
        for plane, offset in zip(planes, offsets, strict=True)
    )
    return RowBlock(count, parts, QuantizationError(squared_error, squared_sum, largest))
