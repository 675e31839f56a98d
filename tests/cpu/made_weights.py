"""Random weights in every format, as planes packed here with numpy, and their values.

Formats of GGUF are made as its blocks, whose values the gguf package tells; the values of our own follow from their
definition: code times scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, packed_layout

Bytes = npt.NDArray[np.uint8]

# Byte ranges of a GGUF block that hold f16 numbers, by format.
_HALVES = {
    WeightFormat.Q8_0: (0,),
    WeightFormat.Q4_0: (0,),
    WeightFormat.Q4_1: (0, 2),
    WeightFormat.Q5_0: (0,),
    WeightFormat.Q5_1: (0, 2),
    WeightFormat.Q4_K: (0, 2),
    WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
}


@dataclass(frozen=True)
class MadeWeight:
    """A weight for the executor and its values [rows, cols] in fp32."""

    weight: Weight
    values: npt.NDArray[np.float32]


def make_weight(
    weight_format: WeightFormat, rows: int, cols: int, rng: np.random.Generator, shift: int = 0
) -> MadeWeight:
    """Random weight of about unit variance. The base address is `shift` bytes past a multiple of 256."""
    if weight_format is WeightFormat.F32:
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        return MadeWeight(_place(weight_format, rows, cols, [values.view(np.uint8)], shift), values)
    if weight_format is WeightFormat.F16:
        half = rng.standard_normal((rows, cols), dtype=np.float32).astype(np.float16)
        return MadeWeight(_place(weight_format, rows, cols, [half.view(np.uint8)], shift), half.astype(np.float32))
    if weight_format is WeightFormat.BF16:
        values = (rng.standard_normal((rows, cols), dtype=np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return MadeWeight(_place(weight_format, rows, cols, [bits.view(np.uint8)], shift), values)
    if FORMATS[weight_format].file_block_bytes == 0:
        return _make_own(weight_format, rows, cols, rng, shift)
    blocks = _random_blocks(weight_format, rows, cols, rng)
    values = dequantize(blocks.reshape(rows, -1), GGMLQuantizationType[weight_format.name])
    return MadeWeight(_place(weight_format, rows, cols, _planes(weight_format, blocks), shift), values)


def _make_own(weight_format: WeightFormat, rows: int, cols: int, rng: np.random.Generator, shift: int) -> MadeWeight:
    if weight_format is WeightFormat.I8_ROW:
        codes = rng.integers(-128, 128, (rows, cols), dtype=np.int8)
        scales = rng.normal(0, 0.01, (rows, 1)).astype(np.float32)
        planes = [codes.view(np.uint8), scales.view(np.uint8)]
        return MadeWeight(_place(weight_format, rows, cols, planes, shift), scales * codes.astype(np.float32))
    group = {WeightFormat.I4_G64: 64, WeightFormat.I4_G128: 128}[weight_format]
    nibbles = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    half = rng.normal(0, 0.05, (rows, cols // group)).astype(np.float16)
    values = np.repeat(half.astype(np.float32), group, axis=1) * (nibbles.astype(np.float32) - 8)
    planes = [_nibbles(nibbles[:, None]).reshape(rows, -1), half.view(np.uint8)]
    return MadeWeight(_place(weight_format, rows, cols, planes, shift), values)


def _random_blocks(weight_format: WeightFormat, rows: int, cols: int, rng: np.random.Generator) -> Bytes:
    """[rows, blocks, bytes of a block], all codes and 6-bit scales at random."""
    spec = FORMATS[weight_format]
    blocks = rng.integers(0, 256, (rows, cols // spec.block_cols, spec.file_block_bytes), dtype=np.uint8)
    for offset in _HALVES[weight_format]:
        half = rng.normal(0, 0.05, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = half[..., None].view(np.uint8)
    return blocks


def _planes(weight_format: WeightFormat, blocks: Bytes) -> list[Bytes]:
    """Planes in the order of FORMATS, each [rows, bytes of a row], by the text of formats/weight.py."""
    b = blocks
    match weight_format:
        case WeightFormat.Q8_0:
            parts = [b[..., 2:], b[..., :2]]
        case WeightFormat.Q4_0:
            parts = [b[..., 2:], b[..., :2]]
        case WeightFormat.Q4_1:
            parts = [b[..., 4:], b[..., :2], b[..., 2:4]]
        case WeightFormat.Q5_0:
            parts = [b[..., 6:], b[..., 2:6], b[..., :2]]
        case WeightFormat.Q5_1:
            parts = [b[..., 8:], b[..., 4:8], b[..., :2], b[..., 2:4]]
        case WeightFormat.Q4_K:
            parts = [_nibbles(_codes_k(b[..., 16:])), b[..., :16]]
        case WeightFormat.Q5_K:
            high = (b[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [., 8 groups, 32]
            parts = [_nibbles(_codes_k(b[..., 48:])), _bits(high.reshape(*b.shape[:2], 256)), b[..., :16]]
        case WeightFormat.Q6_K:
            codes = _codes_6k(b)
            words = np.stack([_bits(codes >> 4 & 1), _bits(codes >> 5 & 1)], axis=-2)  # [., ., 2, 32 bytes]
            by_group = words.reshape(*b.shape[:2], 2, 8, 4).swapaxes(-3, -2)
            parts = [_nibbles(codes & 15), by_group.reshape(*b.shape[:2], 64), b[..., 192:208], b[..., 208:]]
        case _:
            raise AssertionError(weight_format)
    return [np.ascontiguousarray(part).reshape(b.shape[0], -1) for part in parts]


def _codes_k(quants: Bytes) -> Bytes:
    """Low four bits of a superblock in column order: GGUF keeps columns 64 j + i and 64 j + 32 + i in byte 32 j + i."""
    chunks = quants.reshape(*quants.shape[:2], 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=-2).reshape(*quants.shape[:2], 256)


def _codes_6k(b: Bytes) -> Bytes:
    """Six-bit codes in column order; per 128 columns 64 bytes of low nibbles and 32 bytes of high bit pairs."""
    low = b[..., :128].reshape(*b.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*b.shape[:2], 2, 4, 32)
    high = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    return (low | high << 4).reshape(*b.shape[:2], 256)


def _nibbles(codes: Bytes) -> Bytes:
    groups = codes.reshape(*codes.shape[:2], -1, 2, 16)
    return (groups[..., 0, :] | groups[..., 1, :] << 4).reshape(*codes.shape[:2], -1)


def _bits(bits: Bytes) -> Bytes:
    return np.packbits(bits, axis=-1, bitorder="little")


def _place(weight_format: WeightFormat, rows: int, cols: int, planes: list[Bytes], shift: int) -> Weight:
    """Copy planes to memory whose padding is 0xff (NaN as f16 and f32): a kernel that uses padding shows it."""
    layout = packed_layout(weight_format, rows, cols)
    memory = np.full(layout.nbytes + 512, 0xFF, dtype=np.uint8)
    start = -memory.ctypes.data % 256 + shift
    for plane, where in zip(planes, layout.planes, strict=True):
        for row in range(rows):
            offset = start + where.offset + row * where.row_pitch
            memory[offset : offset + plane.shape[1]] = plane[row]
    return Weight(layout, memory.ctypes.data + start, memory)
