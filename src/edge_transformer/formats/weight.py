"""Weight formats as planes: what a weight matrix looks like in memory, on the CPU and on the GPU alike.

A weight is (format, rows, cols, planes). A plane holds one kind of number (codes, high bits, scales, minimums) for all
rows; it has an offset from the weight's base address and a row pitch. Nothing is requantized: the planes hold the very
bits of the file, re-arranged. GGUF does not have I8_ROW, I4_G64 and I4_G128: files made by `ete quantize` hold their
planes as they are.

Order of codes inside a group, fixed after counting instructions for AVX-512 and for CUDA (docs/weight-layout.md):
- 4-bit codes: per 32 columns 16 bytes; byte j holds column j in its low nibble and column j + 16 in its high nibble.
- high bits ("high" plane): per 32 columns one little-endian 32-bit word per bit, bit i belongs to column i. 5-bit
  formats have one word (bit 4), Q6_K two (bit 4, then bit 5).
- 8-bit codes: column order. F32, F16 and BF16: column order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PLANE_ALIGNMENT = 256
ROW_PITCH_ALIGNMENT = 16


class WeightFormat(StrEnum):
    """Formats a weight matrix can have. The value is the name shown to users."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    I8_ROW = "I8_ROW"
    I4_G64 = "I4_G64"
    I4_G128 = "I4_G128"


WHOLE_ROW = 0
"""`block_cols` of a plane that has one number for a whole row."""


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One plane of a format: `block_bytes` bytes for every `block_cols` columns of a row, or for all (WHOLE_ROW)."""

    name: str
    block_cols: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` columns, without padding."""
        return self.block_bytes if self.block_cols == WHOLE_ROW else cols // self.block_cols * self.block_bytes


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A format: its planes in order, and the block of the GGUF file it is stored in.

    `block_cols` divides the column count of every weight of the format; `file_block_bytes` is the size of a GGUF block,
    0 for a format that GGUF does not have.
    """

    format: WeightFormat
    block_cols: int
    file_block_bytes: int
    planes: tuple[PlaneSpec, ...]


_NIBBLES = PlaneSpec("codes", 32, 16)
_HIGH1 = PlaneSpec("high", 32, 4)
_HIGH2 = PlaneSpec("high", 32, 8)
_SCALES = PlaneSpec("scales", 32, 2)  # f16, one per group of 32
_MINIMUMS = PlaneSpec("minimums", 32, 2)  # f16, one per group of 32
# d (f16), dmin (f16), then the 12 bytes of eight 6-bit scales and eight 6-bit minimums exactly as in the GGUF block
_K_SCALES = PlaneSpec("scales", 256, 16)

FORMATS: dict[WeightFormat, FormatSpec] = {
    spec.format: spec
    for spec in (
        FormatSpec(WeightFormat.F32, 1, 4, (PlaneSpec("codes", 1, 4),)),
        FormatSpec(WeightFormat.F16, 1, 2, (PlaneSpec("codes", 1, 2),)),
        FormatSpec(WeightFormat.BF16, 1, 2, (PlaneSpec("codes", 1, 2),)),
        FormatSpec(WeightFormat.Q8_0, 32, 34, (PlaneSpec("codes", 32, 32), _SCALES)),
        FormatSpec(WeightFormat.Q4_0, 32, 18, (_NIBBLES, _SCALES)),
        FormatSpec(WeightFormat.Q4_1, 32, 20, (_NIBBLES, _SCALES, _MINIMUMS)),
        FormatSpec(WeightFormat.Q5_0, 32, 22, (_NIBBLES, _HIGH1, _SCALES)),
        FormatSpec(WeightFormat.Q5_1, 32, 24, (_NIBBLES, _HIGH1, _SCALES, _MINIMUMS)),
        FormatSpec(WeightFormat.Q4_K, 256, 144, (_NIBBLES, _K_SCALES)),
        FormatSpec(WeightFormat.Q5_K, 256, 176, (_NIBBLES, _HIGH1, _K_SCALES)),
        # scales: 16 int8, one per 16 columns; superscales: d (f16)
        FormatSpec(
            WeightFormat.Q6_K,
            256,
            210,
            (_NIBBLES, _HIGH2, PlaneSpec("scales", 256, 16), PlaneSpec("superscales", 256, 2)),
        ),
        # scales: one f32 a row
        FormatSpec(WeightFormat.I8_ROW, 32, 0, (PlaneSpec("codes", 32, 32), PlaneSpec("scales", WHOLE_ROW, 4))),
        FormatSpec(WeightFormat.I4_G64, 64, 0, (_NIBBLES, PlaneSpec("scales", 64, 2))),
        FormatSpec(WeightFormat.I4_G128, 128, 0, (_NIBBLES, PlaneSpec("scales", 128, 2))),
    )
}


@dataclass(frozen=True, slots=True)
class Plane:
    """Where a plane lies: bytes from the weight's base address, and bytes from one row to the next."""

    offset: int
    row_pitch: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Shape and planes of a weight, without an address. `nbytes` spans all planes, padding included."""

    format: WeightFormat
    rows: int
    cols: int
    planes: tuple[Plane, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight matrix [rows, cols] in memory: a layout and the address its plane offsets count from.

    `owner` keeps the memory (mapping, anonymous or page-locked buffer) alive; executors read only layout and address.
    """

    layout: WeightLayout
    address: int
    owner: object


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def packed_layout(weight_format: WeightFormat, rows: int, cols: int) -> WeightLayout:
    """Layout used when a weight is re-arranged or copied: planes one after another, each 256-aligned.

    Raises ValueError when `cols` is not a multiple of the format's block.
    """
    spec = FORMATS[weight_format]
    if cols % spec.block_cols:
        raise ValueError(f"{weight_format} needs columns in multiples of {spec.block_cols}, got {cols}")
    offset = 0
    planes = []
    for plane in spec.planes:
        row_pitch = round_up(plane.row_bytes(cols), ROW_PITCH_ALIGNMENT)
        planes.append(Plane(offset, row_pitch))
        offset = round_up(offset + rows * row_pitch, PLANE_ALIGNMENT)
    return WeightLayout(weight_format, rows, cols, tuple(planes), offset)


def in_place_layout(weight_format: WeightFormat, rows: int, cols: int) -> WeightLayout | None:
    """Layout of a row-major F32/F16/BF16 matrix used where it lies in a file; None when its rows cannot be used so."""
    spec = FORMATS[weight_format]
    if spec.block_cols != 1:
        return None
    row_pitch = cols * spec.file_block_bytes
    if row_pitch % ROW_PITCH_ALIGNMENT:
        return None
    return WeightLayout(weight_format, rows, cols, (Plane(0, row_pitch),), rows * row_pitch)
