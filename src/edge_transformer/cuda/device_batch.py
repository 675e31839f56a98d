"""A pass's batch on the GPU: flat arrays of bounded size in one block, which a kernel reads from the host.

Kernels read positions, lengths and counts from device memory and leave early beyond the live rows, so a captured graph
is replayed unpatched: the addresses never change, and grids depend on the buckets only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.attention import query_block_entries, query_blocks
from edge_transformer.cuda.delta import PIECE_INTS, START_INTS, decode_order, piece_entries, pieces
from edge_transformer.cuda.host_reads import HostReads
from edge_transformer.cuda.runtime import Memory, Stream
from edge_transformer.formats.weight import round_up
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch, PromptStage, prompt_stages
from edge_transformer.ops.tensor import array_at

PROMPT_BUCKET_STEP = 64

MAX_LOGIT_ROWS = 64
"""Rows whose logits are made at once."""


def bucket(rows: int) -> int:
    """Rows a grid is made for: 0, 1, 2, 4, 8, 16, 32, then multiples of 64."""
    if rows <= 32:
        return 0 if rows == 0 else 1 << (rows - 1).bit_length()
    return round_up(rows, PROMPT_BUCKET_STEP)


@dataclass(frozen=True, slots=True)
class BatchCapacity:
    """What the block is made for. tiles: KV tiles of the longest sequence the model can have. recurrent: the model has
    gated-delta layers.
    """

    rows: int
    sequences: int
    tiles: int
    layers: int
    rotary_dims: tuple[int, ...]  # of each rope
    recurrent: bool = False


class DeviceBatch:
    """Device addresses of a batch's arrays, and the host's facts that choose grids.

    counts        int32 [4]: prompt rows, rows, sequences, logit rows
    counts_of_logits(rows)   the same for `rows` logit rows alone
    token_ids, positions, row_sequence, logit_rows   int32 [rows]
    query_blocks  int32 [entries, 4] as attention.query_blocks makes them, zeros after the last
    cos, sin      per rope f32 [rows, rotary_dim / 2]
    tile_table(layer)   int64 [sequences, tile_stride]: addresses of KV tiles, 0 where freed

    Where the model is recurrent also:
    pieces        int32 [entries, 8] as delta.pieces makes them of `prompt_stages`, (first, count) in `piece_stages`
    decode_starts, decode_next   int32 [rows, 4], [rows] as delta.decode_order makes them
    state_table(layer)  int64 [sequences]: addresses of blocks of recurrent state
    """

    def __init__(self, host_reads: HostReads, address: int, staging: Memory, capacity: BatchCapacity) -> None:
        """`address`: block_bytes(capacity) bytes of device memory; `staging`: as many page-locked host bytes."""
        self._host_reads = host_reads
        self._staging = staging
        self._offsets, self.nbytes = _offsets(capacity)
        self._ropes_at = self._offsets.get("cos.0", self.nbytes)
        self._capacity = capacity
        self._address = address
        self.tile_stride = capacity.tiles
        self.prompt_rows = self.rows = self.sequences = self.logit_rows_count = self.query_block_count = 0
        self.prompt_stages: tuple[PromptStage, ...] = ()
        self.piece_stages: list[tuple[int, int]] = []
        self.last_position = 0
        logit_counts = np.zeros((MAX_LOGIT_ROWS, 4), np.int32)
        logit_counts[:, 3] = range(1, MAX_LOGIT_ROWS + 1)
        self._put("logit_counts", logit_counts)

    @staticmethod
    def block_bytes(capacity: BatchCapacity) -> int:
        """Bytes of the block, on the device and in page-locked memory."""
        return _offsets(capacity)[1]

    @property
    def decode_rows(self) -> int:
        return self.rows - self.prompt_rows

    @property
    def prompt_bucket(self) -> int:
        """Prompt rows that grids are made for."""
        return bucket(self.prompt_rows)

    @property
    def decode_bucket(self) -> int:
        return bucket(self.decode_rows)

    @property
    def query_block_bucket(self) -> int:
        return bucket(self.query_block_count)

    @property
    def counts(self) -> int:
        return self._at("counts")

    def counts_of_logits(self, rows: int) -> int:
        """Counts that tell `rows` logit rows, MAX_LOGIT_ROWS at most, whatever the newest pass had."""
        if not 1 <= rows <= MAX_LOGIT_ROWS:
            raise ValueError(f"{rows} rows of logits at once; 1 to {MAX_LOGIT_ROWS} can be made")
        return self._at("logit_counts") + 16 * (rows - 1)

    @property
    def token_ids(self) -> int:
        return self._at("token_ids")

    @property
    def positions(self) -> int:
        return self._at("positions")

    @property
    def row_sequence(self) -> int:
        return self._at("row_sequence")

    @property
    def logit_rows(self) -> int:
        return self._at("logit_rows")

    @property
    def query_blocks(self) -> int:
        return self._at("query_blocks")

    def cos(self, rope: int) -> int:
        return self._at(f"cos.{rope}")

    def sin(self, rope: int) -> int:
        return self._at(f"sin.{rope}")

    def tile_table(self, layer: int) -> int:
        return self._at("tile_tables") + layer * self._capacity.sequences * self.tile_stride * 8

    @property
    def pieces(self) -> int:
        return self._at("pieces")

    @property
    def decode_starts(self) -> int:
        return self._at("decode_starts")

    @property
    def decode_next(self) -> int:
        return self._at("decode_next")

    def state_table(self, layer: int) -> int:
        return self._at("state_tables") + layer * self._capacity.sequences * 8

    def stage(self, batch: Batch) -> None:
        """Write a batch into the staging memory, which the pass before must have read; `upload` brings it to the
        device.

        Raises ValueError when it exceeds the capacity.
        """
        capacity, entries = self._capacity, _query_block_entries(self._capacity)
        blocks = query_blocks(batch.prompt_spans, entries)
        sequences = len(batch.tile_tables[0])
        if batch.rows > capacity.rows or sequences > capacity.sequences:
            raise ValueError(f"{batch.rows} rows of {sequences} sequences exceed {capacity}")
        self.prompt_rows, self.rows, self.sequences = batch.prompt_rows, batch.rows, sequences
        self.logit_rows_count, self.query_block_count = len(batch.logit_rows), int(np.count_nonzero(blocks[:, 1]))
        self.last_position = int(batch.positions.max())
        self._put("counts", np.array([batch.prompt_rows, batch.rows, sequences, len(batch.logit_rows)], np.int32))
        self._put("token_ids", batch.token_ids)
        self._put("positions", batch.positions)
        self._put("row_sequence", batch.row_sequence)
        self._put("logit_rows", batch.logit_rows)
        self._put("query_blocks", blocks)
        for rope, (cos, sin) in enumerate(zip(batch.rope_cos, batch.rope_sin, strict=True)):
            self._put(f"cos.{rope}", cos)
            self._put(f"sin.{rope}", sin)
        tables = array_at(
            self._staging.address + self._offsets["tile_tables"],
            (capacity.layers, capacity.sequences, capacity.tiles),
            np.int64,
        )
        for layer, table in enumerate(batch.tile_tables):
            tables[layer, : table.shape[0], : table.shape[1]] = table
        if capacity.recurrent:
            self._stage_recurrent(batch)

    def upload(self, rows: int, stream: Stream) -> None:
        """Queue bringing what is staged, for launches of up to `rows` rows. Of the ropes, which are most of the bytes,
        only those rows are read.
        """
        self._host_reads.read(self._address, self._staging.address, self._ropes_at, stream)
        for rope, rotary_dim in enumerate(self._capacity.rotary_dims):
            for name in (f"cos.{rope}", f"sin.{rope}"):
                offset = self._offsets[name]
                nbytes = min(rows, self._capacity.rows) * rotary_dim // 2 * 4
                self._host_reads.read(self._address + offset, self._staging.address + offset, nbytes, stream)

    def _stage_recurrent(self, batch: Batch) -> None:
        capacity = self._capacity
        self.prompt_stages = prompt_stages(batch)
        spans = [stage.spans for stage in self.prompt_stages]
        listed, self.piece_stages = pieces(spans, piece_entries(capacity.rows, capacity.sequences))
        starts, following = decode_order(batch.positions, batch.row_sequence, batch.prompt_rows, capacity.rows)
        self._put("pieces", listed)
        self._put("decode_starts", starts)
        self._put("decode_next", following)
        tables = array_at(
            self._staging.address + self._offsets["state_tables"], (capacity.layers, capacity.sequences), np.int64
        )
        for layer, table in enumerate(batch.state_tables):
            tables[layer, : len(table)] = table

    def _at(self, name: str) -> int:
        return self._address + self._offsets[name]

    def _put(self, name: str, values: npt.NDArray[np.generic]) -> None:
        array_at(self._staging.address + self._offsets[name], values.shape, values.dtype)[...] = values


def tiles_of_context(context_length: int) -> int:
    """KV tiles of a sequence that fills the context."""
    return -(-context_length // KV_TILE_POSITIONS)


def _query_block_entries(capacity: BatchCapacity) -> int:
    return query_block_entries(capacity.rows, capacity.sequences)


def _offsets(capacity: BatchCapacity) -> tuple[dict[str, int], int]:
    """Byte offset of each array, and the bytes of them all."""
    rows = capacity.rows
    sizes = {
        "counts": 16,
        "logit_counts": 16 * MAX_LOGIT_ROWS,
        "token_ids": rows * 4,
        "positions": rows * 4,
        "row_sequence": rows * 4,
        "logit_rows": rows * 4,
        "query_blocks": _query_block_entries(capacity) * 16,
    }
    sizes["tile_tables"] = capacity.layers * capacity.sequences * capacity.tiles * 8
    if capacity.recurrent:
        sizes["pieces"] = piece_entries(rows, capacity.sequences) * PIECE_INTS * 4
        sizes["decode_starts"] = rows * START_INTS * 4
        sizes["decode_next"] = rows * 4
        sizes["state_tables"] = capacity.layers * capacity.sequences * 8
    for rope, rotary_dim in enumerate(capacity.rotary_dims):  # last: `upload` reads them apart
        sizes[f"cos.{rope}"] = sizes[f"sin.{rope}"] = rows * rotary_dim // 2 * 4
    offsets: dict[str, int] = {}
    total = 0
    for name, nbytes in sizes.items():
        offsets[name] = total
        total = round_up(total + nbytes, 256)
    return offsets, total
