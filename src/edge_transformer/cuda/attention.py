"""Attention on a GPU: decode rows and prompt rows, over tiles found through a table or over a run of tiles in a buffer.

Results are made by one or more calls over the tiles of a row in ascending order: the first with begin=True, the last
with end=True. Between calls a row's state (m, l, acc) is kept in `out` (acc) and in the workspace (m, l), so that tiles
may be resident, or come from the host run by run, or both, without a bit of difference. Nothing here is sized by the
context: decode rows take their positions in waves of units (kernels/attention_units.cuh), each wave merged into the
running state before the next. The width of a wave, the cut into launches and the rows of a block change no bit either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.runtime import Argument, Gpu, KernelSource, Stream
from edge_transformer.errors import ON_THE_CPU, UnsupportedModelError
from edge_transformer.formats.weight import round_up
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, PromptSpan
from edge_transformer.ops.tensor import ITEM_BYTES, DType, Tensor

QUERY_BLOCK_ROWS = 64
"""Rows that an entry of the list of query blocks stands for at most (kernels/attention_rows.cuh)."""

LARGEST_HEAD_DIM = 256
_MOST_UNITS = 64  # of a decode row's positions, unless they are more tiles (kernels/attention_units.cuh)
_SMALLEST_UNIT = 128
_GROUP_ROWS = 8  # decode rows of a launch
_WAVE_STATES = 128  # units of a wave, over the rows of a launch
_STATE_COLUMNS = 64  # columns of acc that a block of the merge holds
_DECODE_HEADS = 8  # query heads of a block
_MERGE_THREADS = 128
_PROMPT_WARPS = 4  # of a block of the tensor-core path: its shared memory fits every card that has tensor cores
_LAUNCH_PRODUCTS = 7 << 29  # multiply-adds of a launch for each multiprocessor: 0.15 s on the slowest in mind (sm_75)
_BEGIN, _END = 1, 2


@dataclass(frozen=True, slots=True)
class PassArrays:
    """Device addresses of what a pass's rows are: int32 positions [R], row_sequence [R], counts [>= 2] (prompt rows,
    all rows), query_blocks [n, 4] as `query_blocks` makes them.
    """

    positions: int
    row_sequence: int
    counts: int
    query_blocks: int


@dataclass(frozen=True, slots=True)
class KvTable:
    """Tiles by address: int64 [sequences, columns] on the device. A call takes tiles [first_tile, first_tile + tiles).

    `memory`: (address, nbytes) of the memory the table points into, for what a launch reads.
    """

    address: int
    columns: int
    first_tile: int = 0
    tiles: int | None = None  # None: to the last column
    memory: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KvRun:
    """`tiles` consecutive tiles of one sequence in a buffer on the device, the first being tile `first_tile`."""

    address: int
    first_tile: int
    tiles: int
    sequence: int


def query_blocks(spans: Iterable[PromptSpan], entries: int) -> npt.NDArray[np.int32]:
    """int32 [entries, 4]: {first row, rows <= 64, position of the first, sequence}, zeros after the last.

    Raises ValueError when the spans need more entries.
    """
    blocks = [
        (span.row_start + done, min(QUERY_BLOCK_ROWS, span.row_count - done), span.position + done, span.sequence)
        for span in spans
        for done in range(0, span.row_count, QUERY_BLOCK_ROWS)
    ]
    if len(blocks) > entries:
        raise ValueError(f"{len(blocks)} query blocks; the list holds {entries}")
    listed = np.zeros((entries, 4), np.int32)
    if blocks:
        listed[: len(blocks)] = blocks
    return listed


def query_block_entries(rows: int, sequences: int) -> int:
    """Entries that spans of `rows` rows in all, of up to `sequences` sequences, can need."""
    return min(rows, rows // QUERY_BLOCK_ROWS + sequences)


def workspace_bytes(shape: AttentionShape, rows: int) -> int:
    """Bytes of workspace for passes of up to `rows` rows; layers share one workspace."""
    return _state_bytes(shape, rows) + _WAVE_STATES * shape.heads * ITEM_BYTES[DType.F32] * (shape.head_dim + 2)


class Attention:
    """The kernels of one layer's attention (layers of one shape share compiled code). `rows`: of a pass at most.

    fast: prompt rows take one bf16 term of q and of the weights (about 1e-3 of error instead of 1e-6).
    Raises UnsupportedModelError for a shape that there is no kernel for.
    """

    def __init__(self, gpu: Gpu, shape: AttentionShape, rows: int, fast: bool = False) -> None:
        check_shape(shape)
        self._gpu = gpu
        self._shape = shape
        self._rows = rows
        self._prompt_plan = _prompt_plan(shape, _uses_tensor_cores(shape, gpu.properties.capability), fast)
        decode, merge, prompt = sources(shape, gpu.properties.capability, fast)
        self._decode, self._merge, self._prompt = gpu.kernel(decode), gpu.kernel(merge), gpu.kernel(prompt)

    def decode(
        self,
        q: Tensor,
        out: Tensor,
        arrays: PassArrays,
        rows: int,
        kv: KvTable | KvRun,
        workspace: int,
        stream: Stream,
        begin: bool = True,
        end: bool = True,
    ) -> None:
        """Take the tiles of `kv` into the states of the pass's decode rows, of which there are at most `rows`.

        q, out f32 [R, heads * head_dim]; R counts prompt rows too. workspace: 256-aligned, workspace_bytes.
        """
        self._check(q, out)
        for first in range(0, rows, _GROUP_ROWS):
            self._decode_group(q, out, arrays, first, min(_GROUP_ROWS, rows - first), kv, workspace, stream, begin, end)

    def prompt(
        self,
        q: Tensor,
        out: Tensor,
        arrays: PassArrays,
        entries: int,
        kv: KvTable | KvRun,
        workspace: int,
        stream: Stream,
        begin: bool = True,
        end: bool = True,
    ) -> None:
        """Take the tiles of `kv` into the states of the rows in the first `entries` query blocks."""
        self._check(q, out)
        shape, plan = self._shape, self._prompt_plan
        where = _tiles(kv)
        per_tile = 2 * entries * QUERY_BLOCK_ROWS * shape.heads * shape.head_dim * KV_TILE_POSITIONS
        at_once = max(1, _LAUNCH_PRODUCTS * self._gpu.properties.multiprocessors // per_tile)
        for start in range(0, where.count, at_once):
            count = min(at_once, where.count - start)
            flags = _flags(begin and start == 0, end and start + count == where.count)
            self._gpu.launch(
                self._prompt,
                (entries * (QUERY_BLOCK_ROWS // plan.rows), shape.kv_heads * _chunks(shape, plan.heads), 1),
                plan.shared_bytes,
                stream,
                [
                    q.address, arrays.query_blocks, where.table, where.run, workspace, out.address,
                    np.int32(where.columns), np.int32(shape.kv_heads), np.int32(where.first),
                    np.int32(where.first + start), np.int32(count), np.int32(where.sequence), *_scores(shape),
                    np.int32(flags),
                ],
                reads=where.memory,
            )  # fmt: skip

    def _decode_group(
        self,
        q: Tensor,
        out: Tensor,
        arrays: PassArrays,
        first_row: int,
        rows: int,
        kv: KvTable | KvRun,
        workspace: int,
        stream: Stream,
        begin: bool,
        end: bool,
    ) -> None:
        shape, where = self._shape, _tiles(kv)
        visible = where.count if shape.window is None else min(where.count, _window_tiles(shape.window))
        most = min(visible * (KV_TILE_POSITIONS // _SMALLEST_UNIT), max(_MOST_UNITS, visible))
        width = min(_wave_units(rows), most)
        # Blocks take units by turns: as many as run at once, those with units of a short context first.
        head_blocks = shape.kv_heads * _chunks(shape, _decode_heads(shape))
        unit_acc = workspace + _state_bytes(shape, self._rows)
        unit_state = unit_acc + 4 * rows * shape.heads * width * shape.head_dim
        common: list[Argument] = [np.int32(where.first), np.int32(where.count), np.int32(where.sequence)]
        for first_unit in range(0, most, width):
            flags = _flags(begin and first_unit == 0, end and first_unit + width >= most)
            self._gpu.launch(
                self._decode,
                (head_blocks, rows, min(width, max(1, self._gpu.properties.multiprocessors // (head_blocks * rows)))),
                0,
                stream,
                [
                    q.address, arrays.positions, arrays.row_sequence, arrays.counts, where.table, where.run, unit_acc,
                    unit_state, np.int32(where.columns), np.int32(shape.kv_heads), *common, np.int32(first_row),
                    np.int32(first_unit), np.int32(width), *_scores(shape),
                ],
                reads=where.memory,
            )  # fmt: skip
            self._gpu.launch(
                self._merge,
                (_state_copies(shape), shape.heads, rows),
                0,
                stream,
                [
                    unit_acc, unit_state, arrays.positions, arrays.row_sequence, arrays.counts, workspace, out.address,
                    np.int32(shape.heads), *common, np.int32(first_row), np.int32(first_unit), np.int32(width),
                    np.int32(shape.window or 0), np.int32(flags),
                ],
            )  # fmt: skip

    def _check(self, q: Tensor, out: Tensor) -> None:
        cols = self._shape.heads * self._shape.head_dim
        for tensor in (q, out):
            if tensor.dtype != DType.F32 or tensor.shape[1] != cols or tensor.shape[0] > self._rows:
                raise ValueError(
                    f"attention: a tensor is {tensor.dtype} {tensor.shape}; needed: f32, {cols} columns, "
                    f"at most {self._rows} rows"
                )


def check_shape(shape: AttentionShape) -> None:
    """Raises UnsupportedModelError when the kernels cannot have this shape."""
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= LARGEST_HEAD_DIM:
        raise UnsupportedModelError(
            f"head_dim is {shape.head_dim}; the GPU's attention takes multiples of 8 up to {LARGEST_HEAD_DIM}: "
            f"{ON_THE_CPU}"
        )
    if shape.heads % shape.kv_heads:
        raise UnsupportedModelError(f"{shape.heads} query heads do not divide among {shape.kv_heads} KV heads")
    if shape.kv_dtype not in (DType.F32, DType.BF16):
        raise UnsupportedModelError(f"KV in {shape.kv_dtype}; supported: f32, bf16")


def sources(
    shape: AttentionShape, capability: tuple[int, int], fast: bool = False
) -> tuple[KernelSource, KernelSource, KernelSource]:
    """The kernels of a shape: decode, merge, prompt."""
    tensor = _uses_tensor_cores(shape, capability)
    plan = _prompt_plan(shape, tensor, fast)
    decode_heads = _decode_heads(shape)
    prompt_defines = [*_defines(shape, plan.heads), ("ETE_ROWS", str(plan.rows))]
    if tensor:
        prompt_defines.append(("ETE_TERMS", "1" if fast else "3"))
    suffix = "_tensor" if tensor else ""
    return (
        KernelSource(
            f"attention_decode{suffix}.cu", "attention_decode", 256 if tensor else 128,
            tuple(_defines(shape, decode_heads)), early_start=True,
        ),
        KernelSource(
            "attention_merge.cu", "attention_merge", _MERGE_THREADS, tuple(_merge_defines(shape)), early_start=True
        ),
        KernelSource(f"attention_prompt{suffix}.cu", "attention_prompt", plan.threads, tuple(prompt_defines)),
    )  # fmt: skip


# Heads, KV heads and head_dim of models in use, and what is odd: head_dims that fill no vector, groups of many heads.
_MATRIX = (
    (9, 3, 64), (8, 8, 72), (32, 32, 80), (32, 8, 96), (12, 2, 128), (28, 4, 128), (32, 8, 128), (16, 16, 128),
    (16, 1, 160), (12, 4, 192), (16, 4, 256), (4, 1, 256), (8, 1, 256), (8, 8, 256),
)  # fmt: skip


def all_sources(capability: tuple[int, int]) -> Iterator[KernelSource]:
    """What the compile matrix covers: every kernel, for shapes of models in use and odd ones."""
    seen = set()
    for heads, kv_heads, head_dim in _MATRIX:
        for kv_dtype in (DType.BF16, DType.F32):
            for softcap, fast in ((None, False), (50.0, False), (None, True)):
                shape = AttentionShape(0, heads, kv_heads, head_dim, 0, None, 1.0, softcap, None, kv_dtype)
                for source in sources(shape, capability, fast):
                    if source not in seen:
                        seen.add(source)
                        yield source


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    """What a block of the prompt kernel takes: query heads of a KV head, rows; its threads and shared memory."""

    heads: int
    rows: int
    threads: int
    shared_bytes: int


def _prompt_plan(shape: AttentionShape, tensor: bool, fast: bool) -> _PromptPlan:
    group, dim = shape.heads // shape.kv_heads, shape.head_dim
    if not tensor:
        heads = min(group, 2)
        keys = 32 if dim <= 128 else 16
        return _PromptPlan(heads, 32 // heads, 128, 4 * (32 * dim + keys * dim + 32 * keys))
    # The constants of kernels/attention_prompt_tensor.cu: 16 rows of a head are a tile, a warp takes one or two.
    warp_tiles = 2 if fast and dim <= 128 else 1
    keys = 64 if fast or dim <= 128 else 32
    steps = -(-dim // 16)
    query_bytes = steps * 512 * (1 if fast else 3 if dim <= 128 else 2)  # of a tile
    most = _PROMPT_WARPS * warp_tiles
    choices = [(heads, parts) for parts in (4, 2) for heads in range(1, group + 1) if heads * parts <= most]
    # As many tiles as can be that are of a head; of equals, one with few tiles of none.
    heads, parts = max(choices, key=lambda choice: (choice[0] * choice[1] * _share_in_use(group, choice[0]), choice[1]))
    shared = 2 * keys * (32 * steps + 16) + heads * parts * query_bytes
    return _PromptPlan(heads, 16 * parts, 32 * heads * parts // warp_tiles, shared)


def _share_in_use(group: int, heads: int) -> float:
    """Of the places for heads in blocks that take `heads` each, those that have one."""
    return group / (-(-group // heads) * heads)


def _uses_tensor_cores(shape: AttentionShape, capability: tuple[int, int]) -> bool:
    """f32 keys and values would need three terms too: they take plain multiply-adds."""
    return capability >= (8, 0) and shape.kv_dtype == DType.BF16


def _defines(shape: AttentionShape, heads: int) -> list[tuple[str, str]]:
    return [
        ("ETE_HEAD_DIM", str(shape.head_dim)),
        ("ETE_GROUP", str(shape.heads // shape.kv_heads)),
        ("ETE_HEADS", str(heads)),
        ("ETE_KV_BF16", str(int(shape.kv_dtype == DType.BF16))),
        ("ETE_SOFTCAP", str(int(shape.softcap is not None))),
    ]


def _merge_defines(shape: AttentionShape) -> list[tuple[str, str]]:
    """Of all that a shape is, merging knows head_dim alone: one kernel for all shapes that have it."""
    return _defines(replace(shape, heads=1, kv_heads=1, softcap=None, kv_dtype=DType.F32), 1)


def _decode_heads(shape: AttentionShape) -> int:
    """Query heads of a KV head that a block of the decode kernel takes: as even as at most eight allow."""
    group = shape.heads // shape.kv_heads
    return -(-group // -(-group // _DECODE_HEADS))


def _chunks(shape: AttentionShape, heads: int) -> int:
    return -(-(shape.heads // shape.kv_heads) // heads)


def _state_copies(shape: AttentionShape) -> int:
    return -(-shape.head_dim // _STATE_COLUMNS)


def _state_bytes(shape: AttentionShape, rows: int) -> int:
    return round_up(rows * shape.heads * _state_copies(shape) * 2 * ITEM_BYTES[DType.F32], 256)


def _wave_units(rows: int) -> int:
    """Units of a decode row in a wave: fewer when more rows fill the GPU."""
    return min(_MOST_UNITS, _WAVE_STATES >> (rows - 1).bit_length())


def _window_tiles(window: int) -> int:
    """Tiles that a row with this window can see."""
    return (window + KV_TILE_POSITIONS - 2) // KV_TILE_POSITIONS + 1


def _flags(begin: bool, end: bool) -> int:
    return (_BEGIN if begin else 0) | (_END if end else 0)


def _scores(shape: AttentionShape) -> tuple[Argument, Argument, Argument]:
    return np.int32(shape.window or 0), np.float32(shape.scale), np.float32(shape.softcap or 0.0)


@dataclass(frozen=True, slots=True)
class _Where:
    """A call's tiles as the kernels take them."""

    table: int
    run: int
    columns: int
    first: int
    count: int
    sequence: int
    memory: Sequence[tuple[int, int]]


def _tiles(kv: KvTable | KvRun) -> _Where:
    if isinstance(kv, KvRun):
        return _Where(0, kv.address, 0, kv.first_tile, kv.tiles, kv.sequence, ())
    count = kv.columns - kv.first_tile if kv.tiles is None else kv.tiles
    return _Where(kv.address, 0, kv.columns, kv.first_tile, count, -1, kv.memory)
