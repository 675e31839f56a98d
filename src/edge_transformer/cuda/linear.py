"""Matrix products on a GPU, straight from the planes of the weights. Contracts: ops/contracts.py.

Prompt rows take a GEMM: on tensor cores from sm_80 on, else by plain multiply-adds. Decode rows take the GEMV, eight at
most to a block; lm_head always does. Which kernel, tile or batch a row meets never changes its result.

Every method queues launches on `stream` and returns. Tensors and weights have device addresses. ValueError for shapes
that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from edge_transformer.cuda.gemm_shape import (
    FMA_TILE,
    GEMM_GROUP,
    TENSOR_CORES,
    TERM_GROUPS,
    TERM_ROWS,
    fma_source,
    gemm_grid,
    gemm_shape,
    gemm_shapes,
    gemm_shared_bytes,
    gemm_source,
    gemm_sources,
    gemm_workspace_bytes,
    terms_source,
)
from edge_transformer.cuda.gemv_shape import (
    GEMV_BATCHES,
    gemv_cut,
    gemv_shape,
    gemv_shapes,
    gemv_shared_bytes,
    gemv_source,
    gemv_sources,
    gemv_tiles,
    has_tail,
)
from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.runtime import Argument, Gpu, Kernel, KernelSource, Stream
from edge_transformer.formats.weight import FORMATS, ROW_PITCH_ALIGNMENT, Weight, WeightFormat, WeightLayout, round_up
from edge_transformer.ops.tensor import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")

_KEPT_LAUNCHES = 8192
_MATRICES = 3  # a launch works on up to three matrices of one format
_DECODE_KIND, _LOGIT_KIND, _ALL_KIND = 1, 2, 3  # rows.cuh
_STORE, _ADD, _GATE, _SOFTCAP = range(4)  # linear.cuh
_NO_MATRIX: tuple[Argument, ...] = (0, np.int64(0), np.int64(0), np.int64(0), 0, 0, np.int32(0))
_FLOAT_FORMATS = {WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16}


def all_sources(formats: Iterable[WeightFormat], capability: tuple[int, int]) -> list[KernelSource]:
    """Every kernel of this file that weights of `formats` may need on a GPU of this capability."""
    sources = []
    for weight_format in formats:
        tails = (False, True) if weight_format in _FLOAT_FORMATS else (False,)
        for tail in tails:
            sources += gemv_sources(weight_format, tail)
        for terms in (3, 1):
            sources += gemm_sources(weight_format, capability, terms)
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
        for weight_format, tail in sorted({(known, has_tail(known, cols)) for known, cols in formats_cols}):
            sources += gemv_sources(weight_format, tail)
            sources += gemm_sources(weight_format, capability, self._terms)
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
        if together and rows.prompt and self._gpu.properties.capability >= TENSOR_CORES:
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
            if self._gpu.properties.capability >= TENSOR_CORES:
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
        pitch, groups = round_up(rows, 8), -(-layout.cols // GEMM_GROUP)
        sums = address + groups * pitch * 2 * self._terms * GEMM_GROUP
        cols, coded = np.int32(layout.cols), np.int32(layout.format is not WeightFormat.BF16)
        terms = _Launch(
            self._kernel(terms_source(self._terms)),
            (-(-groups // TERM_GROUPS), -(-rows // TERM_ROWS), 1),
            0,
            (x.address, counts, address, sums, cols, np.int32(pitch), coded),
        )
        tiled = [weight.layout.rows for weight, _, _ in (matrices[:1] if gated else matrices)]
        shapes = gemm_shapes(layout.format, properties.capability, self._terms)
        shape = gemm_shape(shapes, tiled, rows, gated, properties.multiprocessors)
        numbers = pitch, layout.cols, epilogue, activation, int(gated)
        products = _Launch(
            self._kernel(gemm_source(layout.format, self._terms, shape)),
            gemm_grid(shape, tiled, rows, gated),
            gemm_shared_bytes(layout.format, self._terms, shape),
            (address, sums, counts, *map(np.int32, numbers), *arguments),
        )
        return terms, products

    def _gemm_fma(
        self, matrices: Matrices, x: Tensor, rows: int, counts: int, epilogue: int, activation: int
    ) -> tuple[_Launch, ...]:
        layout = matrices[0][0].layout
        tiles = sum(-(-weight.layout.rows // FMA_TILE) for weight, _, _ in matrices)
        numbers = layout.cols, epilogue, activation
        launch = _Launch(
            self._kernel(fma_source(layout.format)),
            (-(-rows // FMA_TILE), tiles, 1),
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
        tail = has_tail(layout.format, layout.cols)
        cut = gemv_cut(layout.format, properties.capability, batch, layout.cols)
        shapes = gemv_shapes(layout.format, batch, gated, tail)
        shape = gemv_shape(shapes, tiled, cut.slice_bits, properties.multiprocessors)
        tiles = gemv_tiles(shape, tiled, cut.slice_bits)
        arguments = _matrix_arguments(matrices, x, rows)
        numbers = row_kind, rows, layout.cols, cut.slice_bits, cut.chunk_rounds, epilogue, activation
        launch = _Launch(
            self._kernel(gemv_source(layout.format, shape, batch, gated, tail)),
            (min(tiles, shape.blocks * properties.multiprocessors), -(-rows // GEMV_BATCHES[-1]), 1),
            gemv_shared_bytes(layout.format, cut, batch, layout.cols),
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
