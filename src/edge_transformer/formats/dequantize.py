"""Weight planes to float32, in numpy: the oracle's reading of every format, bit for bit as GGUF defines it.

The order of operations is part of the definition (each product and sum rounds once to float32):
Q*_0, I8_ROW, I4_*: d * q; Q*_1: d * q + m; Q4_K, Q5_K: (d * scale) * q - (dmin * minimum); Q6_K: (d * scale) * q.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat
from edge_transformer.memory import bytes_at

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# What is taken off a code to make it signed.
_CODE_OFFSET = {
    WeightFormat.Q4_0: 8,
    WeightFormat.Q5_0: 16,
    WeightFormat.Q6_K: 32,
    WeightFormat.I4_G64: 8,
    WeightFormat.I4_G128: 8,
}


def dequantize(weight: Weight, rows: npt.NDArray[np.int64] | None = None) -> Floats:
    """The values of a weight as a fresh float32 array [rows, cols], or of the rows asked as [len(rows), cols]."""
    planes = {spec.name: _plane(weight, index, rows) for index, spec in enumerate(FORMATS[weight.layout.format].planes)}
    weight_format = weight.layout.format
    with np.errstate(over="ignore", invalid="ignore"):  # scales of inf and NaN have the results they have
        if weight_format in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16):
            return values_to_float32(planes["codes"], weight_format)
        if weight_format is WeightFormat.Q8_0:
            values = _f16(planes["scales"])[:, :, None] * _groups(planes["codes"], 32).view(np.int8).astype(np.float32)
        elif weight_format is WeightFormat.I8_ROW:
            values = planes["scales"].view("<f4") * planes["codes"].view(np.int8).astype(np.float32)
        elif weight_format in (WeightFormat.Q4_K, WeightFormat.Q5_K):
            scales, minimums = _k_scales(planes["scales"])
            values = scales[:, :, None] * _codes(planes, weight_format) - minimums[:, :, None]
        elif weight_format is WeightFormat.Q6_K:
            per_16 = _groups(planes["scales"], 16).view(np.int8).astype(np.float32)
            scales = (_f16(planes["superscales"])[:, :, None] * per_16).reshape(len(per_16), -1)
            codes = _codes(planes, weight_format)
            values = scales[:, :, None] * codes.reshape(len(codes), -1, 16)
        else:
            scales = np.repeat(_f16(planes["scales"]), FORMATS[weight_format].block_cols // 32, axis=1)
            values = scales[:, :, None] * _codes(planes, weight_format)
            if "minimums" in planes:
                values = values + _f16(planes["minimums"])[:, :, None]
    return np.ascontiguousarray(values.reshape(len(values), weight.layout.cols))


def values_to_float32(data: Bytes, weight_format: WeightFormat) -> Floats:
    """Bytes [..., n * item] of F32, F16 or BF16 values as a fresh float32 array [..., n]; exact."""
    if weight_format is WeightFormat.F32:
        return data.view("<f4").astype(np.float32)
    if weight_format is WeightFormat.F16:
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _plane(weight: Weight, index: int, rows: npt.NDArray[np.int64] | None) -> Bytes:
    """The used bytes of one plane, uint8 [rows, bytes], copied."""
    layout = weight.layout
    spec, plane = FORMATS[layout.format].planes[index], layout.planes[index]
    used = spec.row_bytes(layout.cols)
    selected = np.arange(layout.rows) if rows is None else np.asarray(rows, np.int64)
    if layout.rows == 0 or layout.cols == 0:
        return np.zeros((len(selected), used), np.uint8)
    extent = (layout.rows - 1) * plane.row_pitch + used
    flat = bytes_at(weight.address + plane.offset, extent)
    matrix = np.lib.stride_tricks.as_strided(flat, (layout.rows, used), (plane.row_pitch, 1))
    return np.ascontiguousarray(matrix[selected])


def _groups(plane: Bytes, size: int) -> Bytes:
    return plane.reshape(len(plane), -1, size)


def _f16(plane: Bytes) -> Floats:
    return plane.view("<f2").astype(np.float32)


def _codes(planes: dict[str, Bytes], weight_format: WeightFormat) -> Floats:
    """Codes from nibbles and high bits, offset taken off: float32 [rows, groups, 32]."""
    nibbles = _groups(planes["codes"], 16)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    if "high" in planes:
        high_bits = 2 if weight_format is WeightFormat.Q6_K else 1
        words = _groups(planes["high"], 4 * high_bits)
        for bit in range(high_bits):
            word = np.unpackbits(words[:, :, 4 * bit : 4 * bit + 4], axis=2, bitorder="little")
            codes |= word << (4 + bit)
    return codes.astype(np.float32) - np.float32(_CODE_OFFSET.get(weight_format, 0))


def _k_scales(plane: Bytes) -> tuple[Floats, Floats]:
    """d * scale and dmin * minimum of each group of 32: float32 [rows, groups] each.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minimums: bytes 0-3 and 4-7 the first four of each in their
    low six bits; bytes 8-11 the low four bits of the others (scale low, minimum high), whose top two bits are the top
    two of bytes 0-7.
    """
    blocks = _groups(plane, 16)
    d = np.ascontiguousarray(blocks[:, :, 0:2]).view("<f2").astype(np.float32)
    dmin = np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2").astype(np.float32)
    low_scales, low_minimums, mixed = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = np.concatenate([low_scales & 63, (mixed & 15) | (low_scales >> 6 << 4)], axis=2)
    minimums = np.concatenate([low_minimums & 63, (mixed >> 4) | (low_minimums >> 6 << 4)], axis=2)
    shape = (len(plane), -1)
    return (d * scales.astype(np.float32)).reshape(shape), (dmin * minimums.astype(np.float32)).reshape(shape)
