"""The KV cache in page-locked host memory: attention takes its tiles in runs, through buffers in the arena.

Two buffers take runs by turns, so that the copy of the next runs under the compute of this one. The kernels that append
keys and values write to the host's tiles themselves. Tiles that a pass appends to are read by a kernel: a copy would
wait behind those of weights of layers to come, while these fill slots that only this layer's end makes free.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.attention import KvRun
from edge_transformer.cuda.host_reads import HostReads, Rows
from edge_transformer.cuda.runtime import Event, Gpu, Stream
from edge_transformer.formats.weight import round_up
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch
from edge_transformer.ops.tensor import ITEM_BYTES

KV_BUFFERS = 2

LIVE_STEP = 128
"""Positions of the newest tile are read in such steps: kernels load some that they leave out."""


class KvOffload:
    """Two buffers of `nbytes` bytes each, with the events that keep copy and use apart.

    A copy of older tiles needs no wait for those who appended to them: a pass begins when the one before has ended.
    """

    def __init__(self, gpu: Gpu, arena: Arena, nbytes: int, compute: Stream, host_reads: HostReads) -> None:
        self._gpu = gpu
        self._host_reads = host_reads
        self._nbytes = nbytes
        self._compute = compute
        self._copies = gpu.stream("KV copies")
        self._addresses = [arena.take(nbytes, f"KV buffer {index}") for index in range(KV_BUFFERS)]
        self._filled: list[Event] = [gpu.event() for _ in range(KV_BUFFERS)]
        self._freed: list[Event] = [gpu.event() for _ in range(KV_BUFFERS)]
        self._turn = 0
        for event in self._freed:
            gpu.record(event, compute)

    def written_tiles(self, shape: AttentionShape, batch: Batch) -> list[tuple[int, int]]:
        """(address, bytes) of the tiles that the pass appends to."""
        tile_bytes = _tile_bytes(shape)
        tiles = {
            (int(sequence), int(position) // KV_TILE_POSITIONS)
            for sequence, position in zip(batch.row_sequence, batch.positions, strict=True)
        }
        return [(int(batch.tile_tables[shape.layer][sequence, tile]), tile_bytes) for sequence, tile in sorted(tiles)]

    def runs(self, shape: AttentionShape, batch: Batch) -> Iterator[tuple[KvRun, bool, bool]]:
        """All tiles of the layer that rows of the pass see, run by run: (run, whether it is its sequence's first,
        whether it is its last). Its buffer is for what is queued on the compute stream until the next is asked for.
        """
        tile_bytes = _tile_bytes(shape)
        at_once = max(1, self._nbytes // tile_bytes)
        for sequence, table in enumerate(batch.tile_tables[shape.layer]):
            positions = batch.positions[batch.row_sequence == sequence]
            oldest, newest = int(positions.min()), int(positions.max())
            first = 0 if shape.window is None else max(0, oldest - shape.window + 1) // KV_TILE_POSITIONS
            appended, end = oldest // KV_TILE_POSITIONS, newest // KV_TILE_POSITIONS + 1
            stretches = contiguous_runs(table[first:appended], first, tile_bytes, at_once)
            stretches += contiguous_runs(table[appended:end], appended, tile_bytes, at_once)
            for number, (start, count) in enumerate(stretches):
                buffer = self._turn
                self._turn = (self._turn + 1) % KV_BUFFERS
                address = self._addresses[buffer]
                if start < appended:
                    self._gpu.wait(self._copies, self._freed[buffer])
                    self._gpu.copy(address, int(table[start]), count * tile_bytes, self._copies)
                    self._gpu.record(self._filled[buffer], self._copies)
                    self._gpu.wait(self._compute, self._filled[buffer])
                else:
                    self._read_appended(address, int(table[start]), start, count, newest, shape)
                yield KvRun(address, start, count, sequence), number == 0, number == len(stretches) - 1
                self._gpu.record(self._freed[buffer], self._compute)

    def _read_appended(
        self, buffer: int, tiles: int, start: int, count: int, newest: int, shape: AttentionShape
    ) -> None:
        """Tiles start to start + count on the compute stream: after the kernel that has appended to them."""
        tile_bytes = _tile_bytes(shape)
        full_bytes = (count - 1) * tile_bytes
        if full_bytes:
            self._host_reads.read(buffer, tiles, full_bytes, self._compute)
        planes = 2 * shape.kv_heads
        plane_bytes = tile_bytes // planes
        positions = min(newest + 1 - (start + count - 1) * KV_TILE_POSITIONS, KV_TILE_POSITIONS)
        live_bytes = round_up(positions, LIVE_STEP) * (plane_bytes // KV_TILE_POSITIONS)
        last = Rows(planes, live_bytes, plane_bytes, plane_bytes)
        self._host_reads.read_rows(buffer + full_bytes, tiles + full_bytes, last, self._compute)

    def settle(self) -> None:
        """Wait for copies that no kernel has waited for: those of a pass that was given up."""
        self._gpu.synchronize(self._copies)


def contiguous_runs(table: npt.NDArray[np.int64], first: int, tile_bytes: int, at_once: int) -> list[tuple[int, int]]:
    """(first tile, tiles) of stretches that lie one behind the other in host memory, each at most `at_once` tiles.
    `table`: the tiles' addresses, from tile `first` on.
    """
    runs: list[tuple[int, int]] = [(first, 1)] if len(table) else []
    for index, (before, address) in enumerate(pairwise(int(value) for value in table), start=first + 1):
        start, count = runs[-1]
        if address == before + tile_bytes and count < at_once:
            runs[-1] = (start, count + 1)
        else:
            runs.append((index, 1))
    return runs


def _tile_bytes(shape: AttentionShape) -> int:
    return 2 * shape.kv_heads * KV_TILE_POSITIONS * shape.head_dim * ITEM_BYTES[shape.kv_dtype]
