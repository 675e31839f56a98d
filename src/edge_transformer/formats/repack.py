"""From the bytes of a file to what the executors use: weight planes in anonymous memory, and small float32 vectors."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.formats.dequantize import dequantize, values_to_float32
from edge_transformer.formats.weight import FORMATS, Weight, WeightLayout, packed_layout
from edge_transformer.memory import bytes_at


def repack(
    info: TensorInfo,
    layout: WeightLayout,
    destination: int,
    row_order: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write the planes of matrix `info` at address `destination`, bit for bit.

    destination: layout.nbytes writable bytes, 256-aligned. Padding of rows and planes is not written.
    row_order: int64 [layout.rows]; output row r comes from source row row_order[r] (None: all rows in their order).
    The source's whole pages are released on the way. The GIL is released, so that threads can take a matrix each.
    Raises FileChangedError when the file changed before all was read, ValueError when an argument does not fit.
    """
    cols = info.shape[-1] if info.shape else 1
    rows = math.prod(info.shape) // cols if cols else 0
    expected = (info.format, rows if row_order is None else len(row_order), cols)
    if (layout.format, layout.rows, layout.cols) != expected or info.layout is not None:
        raise ValueError(f"layout of {layout.format} [{layout.rows}, {layout.cols}] for {info}")
    order_address = 0
    if row_order is not None:
        row_order = np.ascontiguousarray(row_order, np.int64)
        if row_order.ndim != 1 or (len(row_order) and not 0 <= row_order.min() <= row_order.max() < rows):
            raise ValueError(f"row_order must hold rows of {info}")
        order_address = row_order.ctypes.data
    _native.repack_weight(
        info.format,
        info.file.address + info.offset,
        layout.rows,
        cols // FORMATS[info.format].block_cols,
        order_address,
        destination,
        [plane.offset for plane in layout.planes],
        [plane.row_pitch for plane in layout.planes],
    )
    info.file.check_unchanged()


def read_vector(info: TensorInfo) -> npt.NDArray[np.float32]:
    """All values of a tensor of any format as a fresh float32 array of its shape. Raises FileChangedError."""
    count = math.prod(info.shape)
    if count == 0:
        return np.zeros(info.shape, np.float32)
    if info.layout is not None:
        values = dequantize(Weight(info.layout, info.file.address + info.offset, info.file))
        info.file.check_unchanged()
        return values
    if FORMATS[info.format].block_cols > 1:
        return _read_quantized(info)
    data = bytes_at(info.file.address + info.offset, info.nbytes).copy()
    info.file.check_unchanged()
    return values_to_float32(data, info.format).reshape(info.shape)


def _read_quantized(info: TensorInfo) -> npt.NDArray[np.float32]:
    cols = info.shape[-1]
    layout = packed_layout(info.format, math.prod(info.shape) // cols, cols)
    planes = np.zeros(layout.nbytes, np.uint8)
    repack(info, layout, planes.ctypes.data)
    return dequantize(Weight(layout, planes.ctypes.data, planes)).reshape(info.shape)
