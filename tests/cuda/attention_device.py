"""Attention of a pass on a Gpu: arrays to the device, keys and values resident or streamed in runs, the result back."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from cpu.attention_cases import F32, Cache
from edge_transformer.cuda.attention import (
    Attention,
    KvRun,
    KvTable,
    PassArrays,
    query_block_entries,
    query_blocks,
    workspace_bytes,
)
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType, Tensor
from emulator.arrays import DeviceArrays
from emulator.gpu import EmulatedGpu


def make_gpu(seed: int, capability: tuple[int, int], order: str = "random") -> Gpu:
    """The emulator; with ETE_TEST_GPU=1 in the environment the machine's own GPU, on the path of `capability`."""
    if os.environ.get("ETE_TEST_GPU") == "1":
        return _real_gpu(capability < (8, 0))
    return EmulatedGpu(seed, order=order, capability=capability)


@functools.cache
def _real_gpu(plain: bool) -> Gpu:
    from edge_transformer.cuda.driver import CudaGpu

    return CudaGpu(forced_capability=(7, 5) if plain else None)


class DevicePass:
    """One pass of rows over caches, for one shape. `spare_rows`: rows of the bucket that are not in use."""

    def __init__(
        self,
        gpu: Gpu,
        shape: AttentionShape,
        batch: Batch,
        q: F32,
        caches: Sequence[Cache],
        fast: bool = False,
        spare_rows: int = 3,
    ) -> None:
        self.gpu, self.shape, self.batch = gpu, shape, batch
        self.arrays = DeviceArrays(gpu)
        self.stream = gpu.stream("compute")
        rows = batch.rows + spare_rows
        self.decode_rows = batch.rows - batch.prompt_rows + (spare_rows if batch.rows > batch.prompt_rows else 0)
        self.entries = query_block_entries(batch.prompt_rows, len(batch.prompt_spans)) + (1 if spare_rows else 0)
        padded = np.full((rows, q.shape[1]), np.nan, np.float32)
        padded[: batch.rows] = q
        put = self.arrays.put
        self.q = Tensor(put(padded, "q"), padded.shape, DType.F32, None)
        self.out = Tensor(self.arrays.empty(padded.shape, np.float32, "out"), padded.shape, DType.F32, None)
        blocks = query_blocks(batch.prompt_spans, self.entries)
        counts = np.array([batch.prompt_rows, batch.rows, len(caches), 0], np.int32)
        self.pass_arrays = PassArrays(
            put(batch.positions, "positions"), put(batch.row_sequence, "row_sequence"), put(counts, "counts"),
            put(blocks, "query_blocks"),
        )  # fmt: skip
        self.workspace = self.arrays.empty(workspace_bytes(shape, rows), np.uint8, "workspace")
        self.tiles = [put(cache.tiles, f"tiles of sequence {index}") for index, cache in enumerate(caches)]
        self.tile_bytes = [cache.tiles[0].nbytes for cache in caches]
        self.attention = Attention(gpu, shape, rows, fast)
        self.columns = max(len(cache.table) for cache in caches)
        table = np.zeros((len(caches), self.columns), np.int64)
        for index, cache in enumerate(caches):
            held = np.flatnonzero(cache.table)
            table[index, held] = self.tiles[index] + held * self.tile_bytes[index]
        self.table = put(table, "table")
        self.memory = tuple((address, cache.tiles.nbytes) for address, cache in zip(self.tiles, caches, strict=True))

    def attend(self, kv: KvTable | KvRun, begin: bool = True, end: bool = True) -> None:
        common = kv, self.workspace, self.stream, begin, end
        if self.batch.prompt_rows:
            self.attention.prompt(self.q, self.out, self.pass_arrays, self.entries, *common)
        if self.decode_rows:
            self.attention.decode(self.q, self.out, self.pass_arrays, self.decode_rows, *common)

    def resident(self, first_tile: int = 0, tiles: int | None = None) -> KvTable:
        return KvTable(self.table, self.columns, first_tile, tiles, self.memory)

    def stream_runs(self, sequence: int, run_tiles: int, resident_from: int | None = None) -> None:
        """The sequence's tiles in runs through one device buffer; those from `resident_from` on through the table."""
        cache_tiles = self.columns if resident_from is None else resident_from
        nbytes = self.tile_bytes[sequence]
        buffer = self.arrays.empty(run_tiles * nbytes, np.uint8, "run buffer")
        ends = [min(first + run_tiles, cache_tiles) for first in range(0, cache_tiles, run_tiles)]
        for first, stop in zip(range(0, cache_tiles, run_tiles), ends, strict=True):
            self.gpu.copy(buffer, self.tiles[sequence] + first * nbytes, (stop - first) * nbytes, self.stream)
            run = KvRun(buffer, first, stop - first, sequence)
            self.attend(run, begin=first == 0, end=stop == cache_tiles and resident_from is None)
        if resident_from is not None:
            self.attend(self.resident(resident_from), begin=resident_from == 0)

    def result(self) -> F32:
        """The live rows. The others must be as they were."""
        whole: F32 = self.arrays.get(self.out.address).astype(np.float32)
        assert np.isnan(whole[self.batch.rows :]).all(), "rows not in use were written"
        return whole[: self.batch.rows]

    def close(self) -> None:
        self.arrays.close()


def attend_resident(
    gpu: Gpu, shape: AttentionShape, batch: Batch, q: F32, caches: Sequence[Cache], fast: bool = False
) -> F32:
    device = DevicePass(gpu, shape, batch, q, caches, fast)
    device.attend(device.resident())
    result = device.result()
    device.close()
    return result
