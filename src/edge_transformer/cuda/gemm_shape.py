"""How the products of prompt rows are cut for a GPU: kernels (gemm_mma.cu, gemm_terms.cu, gemm.cu), tiles, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from edge_transformer.cuda.gemv_shape import SHARED_BYTES
from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.formats.weight import FORMATS, WeightFormat, round_up

TENSOR_CORES = (8, 0)
GEMM_GROUP = 32  # columns
TERM_ROWS, TERM_GROUPS = 16, 8  # of a block of gemm_terms.cu
FMA_TILE = 64  # rows of x, and of the weight

_GEMM_THREADS = 256
_MOST_STAGES = 4
_SMALL_TILE = 64  # rows of x, and of the weight
_KEPT_SHARED = 1 << 10  # static shared memory of a block, and what the driver keeps
_SMALL_TILE_COST = 0.35  # time of a small tile, two of which share a multiprocessor, beside a large one's
_MINIMUMS = {WeightFormat.Q4_1, WeightFormat.Q5_1, WeightFormat.Q4_K, WeightFormat.Q5_K}
# Three terms of these take too many registers for large tiles, or for two small ones on a multiprocessor.
_SMALL_TILES_ONLY = {WeightFormat.F32, WeightFormat.F16, WeightFormat.Q6_K}
_SMALL_TILES_ALONE = {WeightFormat.F32, WeightFormat.Q5_0, WeightFormat.Q5_1, WeightFormat.Q5_K}


@dataclass(frozen=True, slots=True)
class GemmShape:
    """How the tensor-core GEMM is cut; no result depends on it. tile_weights, tile_x: rows of a block; stages: of 64
    columns in shared memory; blocks: that share a multiprocessor.
    """

    tile_weights: int
    tile_x: int
    stages: int
    blocks: int


def gemm_shapes(weight_format: WeightFormat, capability: tuple[int, int], terms: int) -> tuple[GemmShape, ...]:
    """The shapes for a GPU, the one of large tiles (where there is one) before the one of small tiles."""
    available = SHARED_BYTES[capability[0] * 10 + capability[1]]
    alone = terms == 3 and weight_format in _SMALL_TILES_ALONE
    tiles = [(_SMALL_TILE, _SMALL_TILE, 1 if alone else 2)]
    if terms == 1:
        tiles.insert(0, (128, 128, 1))
    elif weight_format not in _SMALL_TILES_ONLY:
        tiles.insert(0, (96, 128, 1))
    shapes = []
    for tile_weights, tile_x, most_blocks in tiles:
        cuts = [(blocks, stages) for blocks in range(most_blocks, 0, -1) for stages in range(_MOST_STAGES, 1, -1)]
        candidates = (GemmShape(tile_weights, tile_x, stages, blocks) for blocks, stages in cuts)
        fitting = (
            shape
            for shape in candidates
            if shape.blocks * (gemm_shared_bytes(weight_format, terms, shape) + _KEPT_SHARED) <= available
        )
        shapes += list(islice(fitting, 1))
    return tuple(shapes)


def gemm_source(weight_format: WeightFormat, terms: int, shape: GemmShape) -> KernelSource:
    """The GEMM on tensor cores. terms: bf16 terms of an activation, 3 or 1."""
    defines: tuple[tuple[str, str], ...] = (
        ("ETE_FORMAT", weight_format.value),
        ("ETE_TERMS", str(terms)),
        ("ETE_TILE_WEIGHTS", str(shape.tile_weights)),
        ("ETE_TILE_X", str(shape.tile_x)),
        ("ETE_STAGES", str(shape.stages)),
    )
    if shape.tile_x == _SMALL_TILE:  # for large tiles such a bound makes the compiler use all registers, and more
        defines += (("ETE_MIN_BLOCKS", str(shape.blocks)),)
    return KernelSource("gemm_mma.cu", "gemm_mma", _GEMM_THREADS, defines, early_start=True)


def terms_source(terms: int) -> KernelSource:
    return KernelSource("gemm_terms.cu", "gemm_terms", _GEMM_THREADS, (("ETE_TERMS", str(terms)),), early_start=True)


def fma_source(weight_format: WeightFormat) -> KernelSource:
    """The GEMM without tensor cores."""
    return KernelSource("gemm.cu", "gemm", _GEMM_THREADS, (("ETE_FORMAT", weight_format.value),))


def gemm_sources(weight_format: WeightFormat, capability: tuple[int, int], terms: int) -> list[KernelSource]:
    """Every kernel that prompt rows may need for weights of a format."""
    if capability < TENSOR_CORES:
        return [fma_source(weight_format)]
    shapes = gemm_shapes(weight_format, capability, terms)
    return [terms_source(terms), *(gemm_source(weight_format, terms, shape) for shape in shapes)]


def gemm_workspace_bytes(rows: int, cols: int, capability: tuple[int, int], fast_prefill: bool) -> int:
    """Bytes of the activations of `rows` prompt rows, `cols` columns at most, as the GEMM takes them: bf16 terms, and a
    sum for 32 columns.
    """
    if capability < TENSOR_CORES:
        return 0
    terms = 1 if fast_prefill else 3
    return -(-cols // GEMM_GROUP) * round_up(rows, 8) * (2 * terms * GEMM_GROUP + 4)


def gemm_shape(
    shapes: Sequence[GemmShape], tiled: Sequence[int], rows: int, gated: bool, multiprocessors: int
) -> GemmShape:
    """The shape that is likely to be done first with matrices of these rows, and `rows` prompt rows."""
    costs = []
    for shape in shapes:
        across, along, _ = gemm_grid(shape, tiled, rows, gated)
        waves = -(-across * along // (shape.blocks * multiprocessors))
        costs.append(waves * (1.0 if shape.tile_x > _SMALL_TILE else shape.blocks * _SMALL_TILE_COST))
    return shapes[costs.index(min(costs))]


def gemm_grid(shape: GemmShape, tiled: Sequence[int], rows: int, gated: bool) -> tuple[int, int, int]:
    """tiled: rows of each matrix; gated: half a tile of each of two matrices."""
    of_matrix = shape.tile_weights // 2 if gated else shape.tile_weights
    return -(-rows // shape.tile_x), sum(-(-size // of_matrix) for size in tiled), 1


def gemm_shared_bytes(weight_format: WeightFormat, terms: int, shape: GemmShape) -> int:
    """Stages and what is beside them, or the results of a tile (gemm_mma.cu)."""
    spec = FORMATS[weight_format]
    codes = 2 * GEMM_GROUP * spec.planes[0].block_bytes // spec.planes[0].block_cols
    minimums = weight_format in _MINIMUMS
    planes = len(spec.planes) - 1
    stage = shape.tile_weights * (codes + 16 * planes) + shape.tile_x * 2 * 2 * terms * GEMM_GROUP
    if terms == 3 and minimums:
        stage += shape.tile_x * 2 * 4
    words = 0
    if planes:
        scales = (2 if weight_format is WeightFormat.Q6_K else 1) + int(minimums)
        high = sum(plane.block_bytes // 4 for plane in spec.planes if plane.name == "high")
        words = scales * (2 if terms == 1 else 1) + high
    beside = shape.tile_weights * (2 * 2 * 4 * words + 8 * (planes + 1))
    return max(shape.stages * stage + beside, 4 * shape.tile_x * (shape.tile_weights + 4))
