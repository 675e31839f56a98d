"""How the products of decode rows are cut for a GPU: kernels (gemv.cu), slices of the columns, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.formats.weight import FORMATS, WeightFormat, round_up

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
GEMV_BATCHES = (1, 2, 4, 8)

_WARP = 32
_KEPT_SHARED = 4 << 10  # static shared memory of a block, and what the driver keeps
_MOST_COLUMNS = 16384  # of x in shared memory
_MOST_SLICE_BITS = 2
_MOST_REGISTERS = {WeightFormat.Q5_1, WeightFormat.Q5_K, WeightFormat.Q6_K}
_HIGH_BITS = {WeightFormat.Q5_0, WeightFormat.Q5_1, WeightFormat.Q5_K, WeightFormat.Q6_K}
_MANY_REGISTERS = {WeightFormat.Q4_1, WeightFormat.Q4_K, *_HIGH_BITS}
_FEW_ROWS_GAIN = 1.2  # in evenness, from which on a warp takes few rows


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How the GEMV is spread; no result depends on it. rows: weight rows of a warp (of each matrix, where there are
    gate and up); ahead: steps under way; blocks: of `threads` threads on a multiprocessor; room: blocks that there is
    room for, so that those of the next kernel ask for their first weights while these work.
    """

    rows: int
    ahead: int
    threads: int
    blocks: int
    room: int

    def tile_rows(self, slice_bits: int) -> int:
        return self.threads // _WARP * self.rows >> slice_bits


@dataclass(frozen=True, slots=True)
class GemvCut:
    """How the columns are cut. 2**slice_bits warps share a row, which results depend on; chunk_rounds: steps of each
    that fit in shared memory.
    """

    slice_bits: int
    chunk_rounds: int


def gemv_shapes(weight_format: WeightFormat, batch: int, gated: bool, tail: bool) -> tuple[GemvShape, ...]:
    """The shape for few rows, then the one for many (where there is one)."""
    ahead = 4 if batch == 1 and unit_columns(weight_format) < _WARP and not gated else 2
    if batch <= 2:
        few, many = (1, 2) if gated else (1, 4)
        # Where registers allow: three blocks for gate and up, which have columns enough for them; elsewhere two steps
        # under way.
        if batch == 1 and gated and weight_format not in _MANY_REGISTERS:
            most = GemvShape(many, 1, 256, 3, 3)
        else:
            most = GemvShape(many, 2 if batch == 1 and weight_format not in _MOST_REGISTERS else 1, 256, 2, 2)
        shapes = GemvShape(few, ahead, 256, 2, 2), most
    else:
        few, many = (1, 2) if gated else (2, 4)
        blocks = 2 if batch == 4 and weight_format not in _HIGH_BITS else 1
        shapes = GemvShape(few, ahead, 256, blocks, blocks), GemvShape(many, 1, 256, blocks, blocks)
    return tuple(shapes[:1] if tail else shapes)


def gemv_shape(shapes: Sequence[GemvShape], tiled: Sequence[int], slice_bits: int, multiprocessors: int) -> GemvShape:
    """The shape for matrices of these rows: many rows of a warp, unless too many of its blocks would be idle."""

    def evenness(shape: GemvShape) -> float:
        tiles, blocks = gemv_tiles(shape, tiled, slice_bits), shape.blocks * multiprocessors
        return tiles / (-(-tiles // blocks) * blocks)

    few, many = shapes[0], shapes[-1]
    return few if evenness(few) > _FEW_ROWS_GAIN * evenness(many) else many


def gemv_tiles(shape: GemvShape, tiled: Sequence[int], slice_bits: int) -> int:
    return sum(-(-size // shape.tile_rows(slice_bits)) for size in tiled)


def gemv_cut(weight_format: WeightFormat, capability: tuple[int, int], batch: int, cols: int) -> GemvCut:
    """As many slices as leave at most a quarter of their steps empty, and as fit in shared memory for any batch."""
    step = _WARP * unit_columns(weight_format)
    steps = -(-cols // step)
    slice_bits = _MOST_SLICE_BITS
    least = _columns_of_x(capability, GEMV_BATCHES[-1])
    while slice_bits and (3 * round_up(steps, 1 << slice_bits) > 4 * steps or step << slice_bits > least):
        slice_bits -= 1
    return GemvCut(slice_bits, _columns_of_x(capability, batch) // (step << slice_bits))


def _columns_of_x(capability: tuple[int, int], batch: int) -> int:
    """That shared memory holds, with a sum for 16 of them."""
    available = SHARED_BYTES[capability[0] * 10 + capability[1]] - _KEPT_SHARED
    return min(_MOST_COLUMNS, available * 16 // (batch * 4 * 17))


def gemv_shared_bytes(weight_format: WeightFormat, cut: GemvCut, batch: int, cols: int) -> int:
    """x of `batch` rows: whole steps of a warp, and a sum for 16 or 32 numbers (gemv.cu)."""
    step = _WARP * unit_columns(weight_format)
    numbers = min(round_up(cols, step), cut.chunk_rounds * step << cut.slice_bits)
    return batch * 4 * (numbers + numbers // 16)


def gemv_source(weight_format: WeightFormat, shape: GemvShape, batch: int, gated: bool, tail: bool) -> KernelSource:
    """The kernel for `batch` (1, 2, 4, 8) rows of x. tail: the columns do not fill the last 16 bytes of a row."""
    return KernelSource(
        "gemv.cu",
        "gemv",
        shape.threads,
        (
            ("ETE_FORMAT", weight_format.value),
            ("ETE_BATCH", str(batch)),
            ("ETE_ROWS_PER_WARP", str(shape.rows)),
            ("ETE_AHEAD", str(shape.ahead)),
            ("ETE_BLOCKS", str(shape.room)),
            ("ETE_GATED", str(int(gated))),
            ("ETE_TAIL", str(int(tail))),
        ),
        early_start=True,
    )


def gemv_sources(weight_format: WeightFormat, tail: bool) -> list[KernelSource]:
    """Every GEMV that weights of a format may need."""
    return [
        gemv_source(weight_format, shape, batch, gated, tail)
        for batch in GEMV_BATCHES
        for gated in (False, True)
        for shape in gemv_shapes(weight_format, batch, gated, tail)
    ]


def unit_columns(weight_format: WeightFormat) -> int:
    """Columns whose codes fill 16 bytes."""
    codes = FORMATS[weight_format].planes[0]
    return 16 * codes.block_cols // codes.block_bytes


def has_tail(weight_format: WeightFormat, cols: int) -> bool:
    return cols % unit_columns(weight_format) != 0
