"""The gated delta rule on a GPU: prompt rows in pieces between absolute borders, decode rows step by step.

Prompt rows take five kernels: values before each piece, convolution, what a piece needs of itself (side by side), the
pieces through the state (one after another), the gated norm. What the third makes for the fourth is large, so both work
on a wave of pieces at a time; where waves are cut changes no bit. Where copies of the state are wanted in the middle of
the rows, all but the norm run once for each stage up to such copies. Decode rows take two kernels: convolution, step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.runtime import Gpu, Kernel, KernelSource, Stream
from edge_transformer.errors import ON_THE_CPU, UnsupportedModelError
from edge_transformer.formats.weight import round_up
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import DELTA_CHUNK_POSITIONS, PromptSpan
from edge_transformer.ops.tensor import Tensor

LARGEST_DIM = 256
PIECE_INTS = 8
START_INTS = 4
_ROWS = DELTA_CHUNK_POSITIONS
_WAVE_BYTES = 16 << 20  # of what pieces need of themselves; eight pieces of 32 heads of 128 x 128 are 13 MB
_BORDER_THREADS = 128
_THREADS = 256
_SLICE = 32  # columns of q and k that the kernels stage at a time (kernels/delta_chunk.cu)
_ASYNCHRONOUS_COPIES = (8, 0)  # from this capability on delta_chunk keeps three stages, not two


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """f32 on the device: conv [channels, conv_width], decay and dt_bias [value_heads], norm [value_dim]."""

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class DeltaStage:
    """Prompt rows up to copies of the state: pieces [first, first + count), then (destination, source) of each block to
    copy.
    """

    first: int
    count: int
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DeltaArrays:
    """Device addresses of what a pass's rows are, and bounds of the grids.

    counts int32 [4] as in LaunchRows; pieces int32 [entries, 8] as `pieces` makes them, which are launched stage by
    stage; starts int32 [., 4] and next int32 [.] as `decode_order` makes them, for `start_count` sequences with
    decode rows at most; states int64 [sequences]: the layer's blocks. memory: (address, nbytes) they lie in.
    """

    counts: int
    pieces: int
    stages: Sequence[DeltaStage]
    starts: int
    next: int
    start_count: int
    states: int
    sequences: int
    prompt_rows: int
    memory: Sequence[tuple[int, int]] = ()


def pieces(stages: Iterable[Iterable[PromptSpan]], entries: int) -> tuple[npt.NDArray[np.int32], list[tuple[int, int]]]:
    """int32 [entries, 8]: {first row, rows, position of the first, sequence, rows of the sequence in this stage before
    it, 1 for the sequence's last of the stage, 0, 0}, zeros after the last; and (first, count) of each stage's. Spans
    are cut at absolute borders.

    Raises ValueError when the spans need more entries, or a sequence has two in one stage.
    """
    listed: list[tuple[int, ...]] = []
    bounds: list[tuple[int, int]] = []
    for spans in stages:
        made = _pieces_of_stage(spans)
        bounds.append((len(listed), len(made)))
        listed += made
    if len(listed) > entries:
        raise ValueError(f"{len(listed)} pieces; the list holds {entries}")
    table = np.zeros((entries, PIECE_INTS), np.int32)
    if listed:
        table[: len(listed)] = listed
    return table, bounds


def _pieces_of_stage(spans: Iterable[PromptSpan]) -> list[tuple[int, ...]]:
    listed: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for span in spans:
        if span.sequence in seen:
            raise ValueError(f"sequence {span.sequence} has two spans of prompt rows")
        seen.add(span.sequence)
        done = 0
        while done < span.row_count:
            position = span.position + done
            count = min(span.row_count - done, _ROWS - position % _ROWS)
            last = done + count == span.row_count
            listed.append((span.row_start + done, count, position, span.sequence, done, int(last), 0, 0))
            done += count
    return listed


def piece_entries(rows: int, sequences: int) -> int:
    """Pieces that spans of `rows` rows in all, of up to `sequences` sequences, can need."""
    return min(rows, rows // _ROWS + 2 * sequences)


def decode_order(
    positions: npt.NDArray[np.int32], row_sequence: npt.NDArray[np.int32], prompt_rows: int, rows: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """starts int32 [rows, 4]: {first decode row, its position, sequence, 0} of each sequence that has one, first row -1
    after the last; next int32 [rows]: the sequence's next decode row, -1 after its last.
    """
    starts = np.full((rows, START_INTS), -1, np.int32)
    following = np.full(rows, -1, np.int32)
    newest: dict[int, int] = {}
    for row in range(prompt_rows, len(positions)):
        sequence = int(row_sequence[row])
        if sequence in newest:
            following[newest[sequence]] = row
        else:
            starts[len(newest)] = row, positions[row], sequence, 0
        newest[sequence] = row
    return starts, following


def check_shape(shape: DeltaShape) -> None:
    """Raises UnsupportedModelError for a layer that there are no kernels for."""
    for name, dim in (("key_dim", shape.key_dim), ("value_dim", shape.value_dim)):
        if dim % 4 or not 4 <= dim <= LARGEST_DIM:
            raise UnsupportedModelError(
                f"layer {shape.layer}: the GPU kernels of the gated delta rule take a {name} that is a multiple of 4 "
                f"up to {LARGEST_DIM}, not {dim}; {ON_THE_CPU}"
            )
    if not 2 <= shape.conv_width <= 4:
        raise UnsupportedModelError(
            f"layer {shape.layer}: the GPU kernels take a convolution of 2 to 4 values, not {shape.conv_width}; "
            f"{ON_THE_CPU}"
        )
    if shape.value_heads % shape.key_heads:
        raise UnsupportedModelError(
            f"layer {shape.layer}: {shape.value_heads} value heads are no multiple of {shape.key_heads} key heads"
        )


def workspace_bytes(shape: DeltaShape, rows: int, sequences: int) -> int:
    """Bytes of workspace for passes of up to `rows` rows of `sequences` sequences; layers share one workspace."""
    entries = piece_entries(rows, sequences)
    return _border_bytes(shape, entries) + _wave_pieces(shape, entries) * _piece_bytes(shape)


def sources(shape: DeltaShape) -> list[KernelSource]:
    """The kernels of a shape, in the order of GatedDelta's kernels."""
    dims = (("ETE_KEY_DIM", str(shape.key_dim)), ("ETE_VALUE_DIM", str(shape.value_dim)))
    wide = (*dims, ("ETE_CONV", str(shape.conv_width)))

    def of(file: str, entry: str, threads: int, defines: tuple[tuple[str, str], ...]) -> KernelSource:
        return KernelSource(file, entry, threads, defines, early_start=True)

    return [
        of("delta_conv.cu", "delta_borders", _BORDER_THREADS, wide),
        of("delta_conv.cu", "delta_conv_prompt", _THREADS, wide),
        of("delta_prepare.cu", "delta_prepare", _THREADS, dims),
        of("delta_chunk.cu", "delta_chunk", _THREADS, dims),
        of("gate.cu", "gated_norm", _BORDER_THREADS, ()),
        of("delta_conv.cu", "delta_conv_decode", _BORDER_THREADS, wide),
        of("delta_step.cu", "delta_step", _step_threads(shape), dims),
    ]


def all_sources() -> list[KernelSource]:
    """Kernels of a selection of shapes, for the tests that compile everything."""
    dims = [(128, 128, 4), (64, 64, 4), (16, 16, 2), (8, 24, 3), (256, 256, 4), (200, 136, 4)]
    shapes = [DeltaShape(0, 1, 1, key_dim, value_dim, width, False, 1e-6) for key_dim, value_dim, width in dims]
    return list(dict.fromkeys(source for shape in shapes for source in sources(shape)))


class GatedDelta:
    """The op for layers of one shape. `rows`, `sequences`: of a pass at most.

    Raises UnsupportedModelError for a shape that there are no kernels for.
    """

    def __init__(self, gpu: Gpu, shape: DeltaShape, rows: int, sequences: int) -> None:
        check_shape(shape)
        self._gpu = gpu
        self._shape = shape
        self._entries = piece_entries(rows, sequences)
        self._wave = _wave_pieces(shape, self._entries)
        self._kernels: list[Kernel] = [gpu.kernel(source) for source in sources(shape)]
        self._chunk_shared_bytes = _chunk_shared_bytes(shape, gpu.properties.capability)

    def run(
        self,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        parameters: DeltaParameters,
        out: Tensor,
        arrays: DeltaArrays,
        workspace: int,
        stream: Stream,
    ) -> None:
        """All rows of a pass; shapes as in ops.backend.Backend.gated_delta. workspace: 256-aligned, workspace_bytes."""
        self._check(qkv, z, a, b, parameters, out, arrays)
        if arrays.stages:
            for stage in arrays.stages:
                self._stage(qkv, a, b, parameters, out, arrays, stage, workspace, stream)
                for destination, source in stage.copies:
                    self._gpu.copy(destination, source, self._shape.block_bytes, stream)
            self._norm(z, parameters, out, arrays, stream)
        if arrays.start_count:
            self._decode(qkv, z, a, b, parameters, out, arrays, stream)

    def _stage(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        parameters: DeltaParameters,
        out: Tensor,
        arrays: DeltaArrays,
        stage: DeltaStage,
        workspace: int,
        stream: Stream,
    ) -> None:
        """The pieces of a stage, from the blocks of state and back to them."""
        shape, launch = self._shape, self._gpu.launch
        borders, convolution, prepare, chunk = self._kernels[:4]
        keys, values, tiled = np.int32(shape.key_heads), np.int32(shape.value_heads), np.int32(shape.tiled)
        count, made = stage.count, workspace + _border_bytes(shape, self._entries)
        pieces = arrays.pieces + stage.first * PIECE_INTS * 4
        launch(
            borders,
            (-(-shape.channels // (4 * _BORDER_THREADS)), count, 1),
            0,
            stream,
            (qkv.address, arrays.states, pieces, workspace, keys, values),
            reads=arrays.memory,
        )
        launch(
            convolution,
            (2 * shape.key_heads + shape.value_heads, count, 1),
            0,
            stream,
            (
                qkv.address, parameters.conv.address, workspace, arrays.states, pieces, keys, values,
                np.float32(shape.key_dim**-0.5),
            ),
            writes=arrays.memory,
        )  # fmt: skip
        for first in range(0, count, self._wave):
            wave = min(self._wave, count - first)
            launch(
                prepare,
                (shape.value_heads, wave, 1),
                0,
                stream,
                (
                    qkv.address, a.address, b.address, parameters.decay.address, parameters.dt_bias.address,
                    pieces, made, np.int32(first), keys, values, tiled,
                ),
            )  # fmt: skip
            launch(
                chunk,
                (-(-shape.value_dim // _part(shape)), shape.value_heads, arrays.sequences),
                self._chunk_shared_bytes,
                stream,
                (
                    qkv.address, made, arrays.states, pieces, out.address, np.int32(first), np.int32(wave), keys,
                    values, tiled,
                ),
                writes=arrays.memory,
            )  # fmt: skip

    def _norm(self, z: Tensor, parameters: DeltaParameters, out: Tensor, arrays: DeltaArrays, stream: Stream) -> None:
        """The gated norm of all prompt rows."""
        shape = self._shape
        values = np.int32(shape.value_heads)
        self._gpu.launch(
            self._kernels[4],
            (-(-shape.value_heads * 32 // _BORDER_THREADS), arrays.prompt_rows, 1),
            0,
            stream,
            (
                out.address, z.address, parameters.norm.address, np.float32(shape.norm_eps), arrays.counts, values,
                np.int32(shape.value_dim),
            ),
        )  # fmt: skip

    def _decode(
        self,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        parameters: DeltaParameters,
        out: Tensor,
        arrays: DeltaArrays,
        stream: Stream,
    ) -> None:
        shape = self._shape
        convolution, step = self._kernels[5:]
        keys, values = np.int32(shape.key_heads), np.int32(shape.value_heads)
        self._gpu.launch(
            convolution,
            (-(-(2 * shape.key_heads + shape.value_heads) * 32 // _BORDER_THREADS), arrays.start_count, 1),
            0,
            stream,
            (
                qkv.address, parameters.conv.address, arrays.states, arrays.starts, arrays.next, keys, values,
                np.float32(shape.key_dim**-0.5),
            ),
            writes=arrays.memory,
        )  # fmt: skip
        self._gpu.launch(
            step,
            (shape.value_heads, arrays.start_count, 1),
            0,
            stream,
            (
                qkv.address, z.address, a.address, b.address, parameters.decay.address, parameters.dt_bias.address,
                parameters.norm.address, arrays.states, arrays.starts, arrays.next, out.address, keys, values,
                np.int32(shape.tiled), np.float32(shape.norm_eps),
            ),
            writes=arrays.memory,
        )  # fmt: skip

    def _check(
        self,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        parameters: DeltaParameters,
        out: Tensor,
        arrays: DeltaArrays,
    ) -> None:
        shape = self._shape
        inner = shape.value_heads * shape.value_dim
        columns = ((qkv, shape.channels), (z, inner), (a, shape.value_heads), (b, shape.value_heads), (out, inner))
        for tensor, cols in columns:
            if tensor.shape[1] != cols:
                raise ValueError(f"a tensor is {tensor.shape}; needed: rows of {cols}")
        wanted = (
            (parameters.conv, (shape.channels, shape.conv_width)),
            (parameters.decay, (shape.value_heads,)),
            (parameters.dt_bias, (shape.value_heads,)),
            (parameters.norm, (shape.value_dim,)),
        )
        for tensor, size in wanted:
            if tensor.shape != size:
                raise ValueError(f"a parameter is {tensor.shape}; needed: {size}")
        last = max((stage.first + stage.count for stage in arrays.stages), default=0)
        if last > self._entries:
            raise ValueError(f"{last} pieces; the workspace is for {self._entries}")


def _part(shape: DeltaShape) -> int:
    """Columns of value_dim that a block of delta_chunk takes."""
    return 32 if shape.key_dim <= 128 else 16


def _chunk_shared_bytes(shape: DeltaShape, capability: tuple[int, int]) -> int:
    buffers = 3 if capability >= _ASYNCHRONOUS_COPIES else 2
    state = (round_up(shape.key_dim, _SLICE) + _ROWS) * _part(shape)
    return 4 * (state + buffers * 2 * _ROWS * (_SLICE + 4))


def _step_threads(shape: DeltaShape) -> int:
    """About 32 numbers of S for a thread."""
    least = round_up(shape.value_dim, 32)
    return max(least, min(512, round_up(shape.key_dim * shape.value_dim // 32, 32)))


def _border_bytes(shape: DeltaShape, entries: int) -> int:
    return round_up(entries * shape.channels * (shape.conv_width - 1) * 4, 256)


def _piece_bytes(shape: DeltaShape) -> int:
    """What delta_prepare makes of a piece: W, scores, factors."""
    return shape.value_heads * 4 * (_ROWS * (shape.key_dim + _ROWS) + 2 * _ROWS)


def _wave_pieces(shape: DeltaShape, entries: int) -> int:
    return max(1, min(entries, _WAVE_BYTES // _piece_bytes(shape)))
