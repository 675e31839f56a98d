"""Matrix products on a GPU, straight from the planes of the weights. Contracts: ops/contracts.py.

Prompt rows take a GEMM: on tensor cores from sm_80 on, else by plain multiply-adds. Decode rows take the GEMV, eight at
most to a block; lm_head always does. Which kernel, tile or batch a row meets never changes its result.

Every method queues launches on `stream` and returns. Tensors and weights have device addresses. ValueError for shapes
that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.runtime import Argument, Gpu, Kernel, KernelSource, Stream
from edge_transformer.formats.weight import FORMATS, ROW_PITCH_ALIGNMENT, Weight, WeightFormat, WeightLayout, round_up
from edge_transformer.ops.tensor import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")
GEMV_BATCHES = (1, 2, 4, 8)

_WARP = 32
_CHUNK_STEP, _LARGEST_CHUNK = 1024, 15360  # columns of x
_SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
_THREADS_OF_MULTIPROCESSOR = 1024  # that GEMV blocks are launched for
_KEPT_LAUNCHES = 8192
_MANY_ROWS = 32  # weight rows for each multiprocessor from which a warp takes two at a time
_GEMM_THREADS = 256
_MATRICES = 3  # a launch works on up to three matrices of one format
_GEMM_GROUP = 32  # columns
_TERM_ROWS, _TERM_GROUPS = 16, 8  # of a block of gemm_terms.cu
_FMA_TILE = 64  # rows of x, and of the weight
_MOST_STAGES = 4
_SMALL_TILE = 64  # rows of x, and of the weight
_KEPT_SHARED = 1 << 10  # static shared memory of a block, and what the driver keeps
_SMALL_TILE_COST = 0.35  # time of a small tile, two of which share a multiprocessor, beside a large one's
_TENSOR_CORES = (8, 0)
_DECODE_KIND, _LOGIT_KIND, _ALL_KIND = 1, 2, 3  # rows.cuh
_STORE, _ADD, _GATE, _SOFTCAP = range(4)  # linear.cuh
_NO_MATRIX: tuple[Argument, ...] = (0, np.int64(0), np.int64(0), np.int64(0), 0, 0, np.int32(0))
_MINIMUMS = {WeightFormat.Q4_1, WeightFormat.Q5_1, WeightFormat.Q4_K, WeightFormat.Q5_K}
_FLOAT_BYTES = {WeightFormat.F32: 4, WeightFormat.F16: 2, WeightFormat.BF16: 2}
# Three terms of these take too many registers for large tiles, or for two small ones on a multiprocessor.
_SMALL_TILES_ONLY = {WeightFormat.F32, WeightFormat.F16, WeightFormat.Q6_K}
_SMALL_TILES_ALONE = {WeightFormat.F32, WeightFormat.Q5_0, WeightFormat.Q5_1, WeightFormat.Q5_K}


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How the GEMV is cut; no result depends on it. rows: weight rows of a warp; ahead: steps under way; chunk: columns
    of x in shared memory.
    """

    rows: int
    ahead: int
    threads: int
    chunk: int

    @property
    def tile_rows(self) -> int:
        return self.threads // _WARP * self.rows


def gemv_shape(
    weight_format: WeightFormat, capability: tuple[int, int], batch: int, gated: bool, many_rows: bool
) -> GemvShape:
    """many_rows: there are enough rows for every warp of the GPU to take several."""
    rows = 2 if many_rows and not (gated and batch > 1) else 1
    threads = {1: 128, 2: 128, 4: 256, 8: 512}[batch]
    ahead = 1
    if batch <= 2:
        ahead = 4 if _unit_columns(weight_format) < _WARP and batch == 1 and rows == 1 else 2
    largest = _SHARED_BYTES[capability[0] * 10 + capability[1]] * 16 // (batch * 4 * 17)  # a sum for 16 numbers
    chunk = max(_CHUNK_STEP, min(_LARGEST_CHUNK, largest // _CHUNK_STEP * _CHUNK_STEP))
    return GemvShape(rows, ahead, threads, chunk)


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
            ("ETE_CHUNK", str(shape.chunk)),
            ("ETE_GATED", str(int(gated))),
            ("ETE_TAIL", str(int(tail))),
        ),
        early_start=True,
    )


def _gemv_sources(weight_format: WeightFormat, capability: tuple[int, int], tail: bool) -> list[KernelSource]:
    """Every GEMV that weights of a format may need."""
    sources = [
        gemv_source(weight_format, gemv_shape(weight_format, capability, batch, gated, many_rows), batch, gated, tail)
        for batch in GEMV_BATCHES
        for gated in (False, True)
        for many_rows in ((False,) if tail else (False, True))
    ]
    return list(dict.fromkeys(sources))


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
    available = _SHARED_BYTES[capability[0] * 10 + capability[1]]
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
            if shape.blocks * (_gemm_shared_bytes(weight_format, terms, shape) + _KEPT_SHARED) <= available
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


def _terms_source(terms: int) -> KernelSource:
    return KernelSource("gemm_terms.cu", "gemm_terms", _GEMM_THREADS, (("ETE_TERMS", str(terms)),), early_start=True)


def _fma_source(weight_format: WeightFormat) -> KernelSource:
    """The GEMM without tensor cores."""
    return KernelSource("gemm.cu", "gemm", _GEMM_THREADS, (("ETE_FORMAT", weight_format.value),))


def _gemm_sources(weight_format: WeightFormat, capability: tuple[int, int], terms: int) -> list[KernelSource]:
    """Every kernel that prompt rows may need for weights of a format."""
    if capability < _TENSOR_CORES:
        return [_fma_source(weight_format)]
    shapes = gemm_shapes(weight_format, capability, terms)
    return [_terms_source(terms), *(gemm_source(weight_format, terms, shape) for shape in shapes)]


def gemm_workspace_bytes(rows: int, cols: int, capability: tuple[int, int], fast_prefill: bool) -> int:
    """Bytes of the activations of `rows` prompt rows, `cols` columns at most, as the GEMM takes them: bf16 terms, and a
    sum for 32 columns.
    """
    if capability < _TENSOR_CORES:
        return 0
    terms = 1 if fast_prefill else 3
    return -(-cols // _GEMM_GROUP) * round_up(rows, 8) * (2 * terms * _GEMM_GROUP + 4)


def all_sources(formats: Iterable[WeightFormat], capability: tuple[int, int]) -> list[KernelSource]:
    """Every kernel of this file that weights of `formats` may need on a GPU of this capability."""
    sources = []
    for weight_format in formats:
        tails = (False, True) if weight_format in _FLOAT_BYTES else (False,)
        for tail in tails:
            sources += _gemv_sources(weight_format, capability, tail)
        for terms in (3, 1):
            sources += _gemm_sources(weight_format, capability, terms)
    return list(dict.fromkeys(sources))


Matrices = Sequence[tuple[Weight, Tensor | None, Tensor]]
"""Weights of one format and one number of columns, each with its bias and its output; three at most."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a launch is made of."""

    kernel: Kernel
    grid: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class _Launches:
    """What a product is made of, in order. `layouts` are kept so that their ids stay theirs."""

    launches: tuple[_Launch, ...]
    layouts: tuple[WeightLayout, ...]


class LinearOps:
    """The products of one GPU. Kernels are loaded at their first use, unless `sources` were prepared before.

    Launches are made once for the same addresses and shapes and kept, since making one costs Python ten times as much
    as finding it.

    fast_prefill: on tensor cores, activations of prompt rows and the values of their weights are rounded to bf16.
    """

    def __init__(self, gpu: Gpu, fast_prefill: bool = False) -> None:
        self._gpu = gpu
        self._terms = 1 if fast_prefill else 3
        self._kernels: dict[KernelSource, Kernel] = {}
        self._launches: dict[tuple[object, ...], _Launches] = {}
        self._workspace = (0, 0)

    def reserve(self, address: int, nbytes: int) -> None:
        """Device memory for the activations of prompt rows (gemm_workspace_bytes), used only while a product runs.
        `address` is a multiple of 256.
        """
        self._workspace = (address, nbytes)
        self._launches.clear()

    def sources(self, formats_cols: Iterable[tuple[WeightFormat, int]]) -> list[KernelSource]:
        """All kernels that weights of these formats and column counts may need, to be compiled before a pass."""
        capability = self._gpu.properties.capability
        sources: list[KernelSource] = []
        for weight_format, tail in sorted({(known, _has_tail(known, cols)) for known, cols in formats_cols}):
            sources += _gemv_sources(weight_format, capability, tail)
            sources += _gemm_sources(weight_format, capability, self._terms)
        return list(dict.fromkeys(sources))

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        rows: LaunchRows,
        stream: Stream,
    ) -> None:
        """outs[i] = x @ weights[i].T + biases[i]; x f32 [rows, cols], outs[i] f32 [rows, weight rows]."""
        matrices = list(zip(weights, biases, outs, strict=True))
        for _, same in groupby(matrices, key=lambda matrix: matrix[0].layout.format):
            run = list(same)
            for start in range(0, len(run), _MATRICES):
                self._products(run[start : start + _MATRICES], x, rows, stream, _STORE)

    def linear_add(
        self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, rows: LaunchRows, stream: Stream
    ) -> None:
        """residual += x @ weight.T + bias; residual f32 [rows, weight rows]."""
        self._products([(weight, bias, residual)], x, rows, stream, _ADD)

    def gated_mlp(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
        x: Tensor,
        out: Tensor,
        rows: LaunchRows,
        stream: Stream,
    ) -> None:
        """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias); activation "silu" or "gelu_tanh"."""
        if gate.layout.rows != up.layout.rows:
            raise ValueError(f"gate has {gate.layout.rows} rows, up {up.layout.rows}; they must be as many")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; there are {', '.join(ACTIVATIONS)}")
        number = ACTIVATIONS.index(activation)
        together = gate.layout.format is up.layout.format
        matrices = [(gate, gate_bias, out), (up, up_bias, out)]
        in_two = LaunchRows(rows.prompt, 0 if together else rows.decode, 0, rows.counts)
        if together and rows.prompt and self._gpu.properties.capability >= _TENSOR_CORES:
            self._queue(self._gemm_mma, matrices, x, (rows.prompt, rows.counts, _STORE, number, True), stream)
            in_two = LaunchRows(0, 0, 0, rows.counts)
        if together and rows.decode:
            facts = rows.decode, _decode_kind(rows), rows.counts, _STORE, number, 1.0, 0, True
            self._queue(self._gemv, matrices, x, facts, stream)
        self._products(matrices[:1], x, in_two, stream, _STORE)
        self._products(matrices[1:], x, in_two, stream, _GATE, number)

    def lm_head(
        self,
        weight: Weight,
        x: Tensor,
        softcap: float | None,
        out: Tensor,
        rows: LaunchRows,
        stream: Stream,
        first_row: int = 0,
    ) -> None:
        """out[:, first_row : first_row + weight rows] = softcap(x @ weight.T) for the logit rows; out f32 [rows, V].

        `weight` may be a block of the matrix's rows, from `first_row` on.
        """
        vocabulary = out.shape[1]
        if first_row < 0 or first_row + weight.layout.rows > vocabulary:
            raise ValueError(f"rows {first_row} to {first_row + weight.layout.rows} of {vocabulary} logits")
        part = Tensor(out.address + 4 * first_row, (out.shape[0], weight.layout.rows), out.dtype, out.owner)
        epilogue = _STORE if softcap is None else _SOFTCAP
        facts = rows.logits, _LOGIT_KIND, rows.counts, epilogue, 0, softcap or 1.0, vocabulary, False
        self._queue(self._gemv, [(weight, None, part)], x, facts, stream)

    def _products(
        self, matrices: Matrices, x: Tensor, rows: LaunchRows, stream: Stream, epilogue: int, activation: int = 0
    ) -> None:
        """One launch for the prompt rows and one for the decode rows."""
        if rows.prompt:
            facts_of_prompt = rows.prompt, rows.counts, epilogue, activation
            if self._gpu.properties.capability >= _TENSOR_CORES:
                self._queue(self._gemm_mma, matrices, x, (*facts_of_prompt, False), stream)
            else:
                self._queue(self._gemm_fma, matrices, x, facts_of_prompt, stream)
        if rows.decode:
            facts = rows.decode, _decode_kind(rows), rows.counts, epilogue, activation, 1.0, 0, False
            self._queue(self._gemv, matrices, x, facts, stream)

    def _queue(
        self,
        make: Callable[..., tuple[_Launch, ...]],
        matrices: Matrices,
        x: Tensor,
        facts: tuple[object, ...],
        stream: Stream,
    ) -> None:
        """Queue what `make` makes of matrices, x and facts, or what it made of them before."""
        key: tuple[object, ...] = make.__name__, x.address, x.shape, facts
        for weight, bias, out in matrices:
            key += weight.address, id(weight.layout), None if bias is None else bias.address, out.address, out.shape
        known = self._launches.get(key)
        if known is None:
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            layouts = tuple(weight.layout for weight, _, _ in matrices)
            known = self._launches[key] = _Launches(make(matrices, x, *facts), layouts)
        for launch in known.launches:
            self._gpu.launch(launch.kernel, launch.grid, launch.shared_bytes, stream, launch.arguments)

    def _gemm_mma(
        self, matrices: Matrices, x: Tensor, rows: int, counts: int, epilogue: int, activation: int, gated: bool
    ) -> tuple[_Launch, ...]:
        """The activations' terms, then the products on tensor cores."""
        layout = matrices[0][0].layout
        properties = self._gpu.properties
        arguments = _matrix_arguments(matrices, x, rows)
        address, available = self._workspace
        needed = gemm_workspace_bytes(rows, layout.cols, properties.capability, self._terms == 1)
        if needed > available:
            raise ValueError(
                f"a product of {rows} prompt rows needs {needed} bytes of workspace; {available} are reserved"
            )
        pitch, groups = round_up(rows, 8), -(-layout.cols // _GEMM_GROUP)
        sums = address + groups * pitch * 2 * self._terms * _GEMM_GROUP
        cols, coded = np.int32(layout.cols), np.int32(layout.format is not WeightFormat.BF16)
        terms = _Launch(
            self._kernel(_terms_source(self._terms)),
            (-(-groups // _TERM_GROUPS), -(-rows // _TERM_ROWS), 1),
            0,
            (x.address, counts, address, sums, cols, np.int32(pitch), coded),
        )
        tiled = [weight.layout.rows for weight, _, _ in (matrices[:1] if gated else matrices)]
        shapes = gemm_shapes(layout.format, properties.capability, self._terms)
        shape = gemm_shape(shapes, tiled, rows, gated, properties.multiprocessors)
        numbers = pitch, layout.cols, epilogue, activation, int(gated)
        products = _Launch(
            self._kernel(gemm_source(layout.format, self._terms, shape)),
            _gemm_grid(shape, tiled, rows, gated),
            _gemm_shared_bytes(layout.format, self._terms, shape),
            (address, sums, counts, *map(np.int32, numbers), *arguments),
        )
        return terms, products

    def _gemm_fma(
        self, matrices: Matrices, x: Tensor, rows: int, counts: int, epilogue: int, activation: int
    ) -> tuple[_Launch, ...]:
        layout = matrices[0][0].layout
        tiles = sum(-(-weight.layout.rows // _FMA_TILE) for weight, _, _ in matrices)
        numbers = layout.cols, epilogue, activation
        launch = _Launch(
            self._kernel(_fma_source(layout.format)),
            (-(-rows // _FMA_TILE), tiles, 1),
            0,
            (x.address, counts, *map(np.int32, numbers), *_matrix_arguments(matrices, x, rows)),
        )
        return (launch,)

    def _gemv(
        self,
        matrices: Matrices,
        x: Tensor,
        rows: int,
        row_kind: int,
        counts: int,
        epilogue: int,
        activation: int,
        softcap: float,
        out_pitch: int,
        gated: bool,
    ) -> tuple[_Launch, ...]:
        layout = matrices[0][0].layout
        batch = next((size for size in GEMV_BATCHES if size >= rows), GEMV_BATCHES[-1])
        properties = self._gpu.properties
        tiled = [weight.layout.rows for weight, _, _ in (matrices[:1] if gated else matrices)]
        tail = _has_tail(layout.format, layout.cols)
        many_rows = not tail and sum(tiled) >= _MANY_ROWS * properties.multiprocessors
        shape = gemv_shape(layout.format, properties.capability, batch, gated, many_rows)
        source = gemv_source(layout.format, shape, batch, gated, tail)
        arguments = _matrix_arguments(matrices, x, rows)
        tiles = sum(-(-size // shape.tile_rows) for size in tiled)
        blocks = properties.multiprocessors * (_THREADS_OF_MULTIPROCESSOR // shape.threads)
        numbers = row_kind, rows, layout.cols, epilogue, activation
        launch = _Launch(
            self._kernel(source),
            (min(tiles, blocks), -(-rows // GEMV_BATCHES[-1]), 1),
            _gemv_shared_bytes(layout.format, shape.chunk, batch, layout.cols),
            (x.address, counts, *map(np.int32, numbers), np.float32(softcap), np.int32(out_pitch), *arguments),
        )
        return (launch,)

    def _kernel(self, source: KernelSource) -> Kernel:
        kernel = self._kernels.get(source)
        if kernel is None:
            kernel = self._kernels[source] = self._gpu.kernel(source)
        return kernel


def _decode_kind(rows: LaunchRows) -> int:
    """Without prompt rows the decode rows are all rows, and the kernel need not wait to learn where they begin."""
    return _DECODE_KIND if rows.prompt else _ALL_KIND


def _unit_columns(weight_format: WeightFormat) -> int:
    """Columns whose codes fill 16 bytes."""
    codes = FORMATS[weight_format].planes[0]
    return 16 * codes.block_cols // codes.block_bytes


def _has_tail(weight_format: WeightFormat, cols: int) -> bool:
    return cols % _unit_columns(weight_format) != 0


def _gemv_shared_bytes(weight_format: WeightFormat, chunk: int, batch: int, cols: int) -> int:
    """x of `batch` rows: whole steps of a warp, `chunk` columns at most, and a sum for 16 or 32 of them (gemv.cu)."""
    numbers = min(chunk, round_up(cols, _WARP * _unit_columns(weight_format)))
    return batch * 4 * (numbers + numbers // 16)


def gemm_shape(
    shapes: Sequence[GemmShape], tiled: Sequence[int], rows: int, gated: bool, multiprocessors: int
) -> GemmShape:
    """The shape that is likely to be done first with matrices of these rows, and `rows` prompt rows."""
    costs = []
    for shape in shapes:
        across, along, _ = _gemm_grid(shape, tiled, rows, gated)
        waves = -(-across * along // (shape.blocks * multiprocessors))
        costs.append(waves * (1.0 if shape.tile_x > _SMALL_TILE else shape.blocks * _SMALL_TILE_COST))
    return shapes[costs.index(min(costs))]


def _gemm_grid(shape: GemmShape, tiled: Sequence[int], rows: int, gated: bool) -> tuple[int, int, int]:
    """tiled: rows of each matrix; gated: half a tile of each of two matrices."""
    of_matrix = shape.tile_weights // 2 if gated else shape.tile_weights
    return -(-rows // shape.tile_x), sum(-(-size // of_matrix) for size in tiled), 1


def _gemm_shared_bytes(weight_format: WeightFormat, terms: int, shape: GemmShape) -> int:
    """Stages and what is beside them, or the results of a tile (gemm_mma.cu)."""
    spec = FORMATS[weight_format]
    codes = 2 * _GEMM_GROUP * spec.planes[0].block_bytes // spec.planes[0].block_cols
    minimums = weight_format in _MINIMUMS
    planes = len(spec.planes) - 1
    stage = shape.tile_weights * (codes + 16 * planes) + shape.tile_x * 2 * 2 * terms * _GEMM_GROUP
    if terms == 3 and minimums:
        stage += shape.tile_x * 2 * 4
    words = 0
    if planes:
        scales = (2 if weight_format is WeightFormat.Q6_K else 1) + int(minimums)
        high = sum(plane.block_bytes // 4 for plane in spec.planes if plane.name == "high")
        words = scales * (2 if terms == 1 else 1) + high
    beside = shape.tile_weights * (2 * 2 * 4 * words + 8 * (planes + 1))
    return max(shape.stages * stage + beside, 4 * shape.tile_x * (shape.tile_weights + 4))


def _matrix_arguments(matrices: Matrices, x: Tensor, rows: int) -> tuple[Argument, ...]:
    """The kernels' parameters of three matrices."""
    cols = matrices[0][0].layout.cols
    if x.shape[1] != cols or x.shape[0] < rows:
        raise ValueError(f"x is {x.shape}; needed: at least {rows} rows of {cols}")
    if cols % 4 == 0 and x.address % 16:
        raise ValueError(f"x lies at {x.address:#x}; needed: a multiple of 16")
    arguments: list[Argument] = []
    for weight, bias, out in matrices:
        layout = weight.layout
        if layout.cols != cols:
            raise ValueError(f"weights of one group have one number of columns, got {cols} and {layout.cols}")
        if out.shape[1] != layout.rows or out.shape[0] < rows:
            raise ValueError(f"output is {out.shape}; needed: at least {rows} rows of {layout.rows}")
        if bias is not None and bias.shape != (layout.rows,):
            raise ValueError(f"bias is {bias.shape}; the weight has {layout.rows} rows")
        arguments += [weight.address, *_plane_offsets(weight), 0 if bias is None else bias.address, out.address]
        arguments.append(np.int32(layout.rows))
    return (*arguments, *_NO_MATRIX * (_MATRICES - len(matrices)))


def _plane_offsets(weight: Weight) -> list[np.int64]:
    """Offsets of the planes after the first; the kernels derive row pitches from the columns."""
    layout = weight.layout
    for spec, plane in zip(FORMATS[layout.format].planes, layout.planes, strict=True):
        pitch = round_up(spec.row_bytes(layout.cols), ROW_PITCH_ALIGNMENT)
        if plane.row_pitch != pitch or (weight.address + plane.offset) % ROW_PITCH_ALIGNMENT:
            raise ValueError(
                f"{layout.format} plane {spec.name!r} at {weight.address:#x} + {plane.offset}, "
                f"pitch {plane.row_pitch}; needed: a multiple of {ROW_PITCH_ALIGNMENT}, pitch {pitch}"
            )
    offsets = [np.int64(plane.offset) for plane in layout.planes[1:]]
    return offsets + [np.int64(0)] * (3 - len(offsets))
