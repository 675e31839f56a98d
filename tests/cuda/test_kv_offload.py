"""Runs of KV tiles on their way from host memory to the buffers of an emulated GPU: every byte that rows of the pass
can see is there, run after run, whatever the tiles' sizes and the passes' positions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.host_reads import HostReads
from edge_transformer.cuda.kv_offload import KvOffload
from edge_transformer.cuda.tile_memory import LockedTileMemory
from edge_transformer.engine.kv import LayerTiles, TileGeometry
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.tensor import ITEM_BYTES, DType, array_at
from emulator.gpu import EmulatedGpu


def attention_shape(kv_heads: int, head_dim: int, kv_dtype: DType, window: int | None) -> AttentionShape:
    return AttentionShape(
        layer=0,
        heads=kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=0,
        window=window,
        softcap=None,
        scale=1.0,
        rope=None,
        kv_dtype=kv_dtype,
    )


def spans(*sequences: tuple[int, int]) -> Any:
    """A pass whose sequences have rows at positions first to last."""
    rows = [(index, position) for index, (first, last) in enumerate(sequences) for position in range(first, last + 1)]
    sequence, positions = np.array(rows).T
    return SimpleNamespace(row_sequence=sequence, positions=positions)


PASSES = {
    "the first token": spans((0, 0)),
    "a whole tile": spans((0, 511)),
    "the last of a tile": spans((511, 511)),
    "the first of a later tile": spans((1024, 1024)),
    "a chunk over a border": spans((700, 1300)),
    "sequences together": spans((37, 40), (1535, 1536), (900, 900)),
}


@pytest.mark.parametrize("batch", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "kv_dtype", "window"),
    [(1, 64, DType.BF16, None), (3, 72, DType.F32, None), (2, 128, DType.BF16, 600)],
)
def test_every_position_that_is_seen_arrives(
    batch: Any, kv_heads: int, head_dim: int, kv_dtype: DType, window: int | None
) -> None:
    random = np.random.default_rng()
    shape = attention_shape(kv_heads, head_dim, kv_dtype, window)
    gpu = EmulatedGpu(int(random.integers(1 << 30)))
    compute = gpu.stream("compute")
    geometry = TileGeometry(kv_heads, head_dim, kv_dtype, None)
    nbytes = geometry.tile_bytes
    landing = gpu.allocate_host(nbytes, "a tile as it arrived")
    offload = KvOffload(gpu, Arena(gpu, 4 * nbytes + 1024), 2 * nbytes, compute, HostReads(gpu))
    memory, tables, contents = LockedTileMemory(gpu, compute), [], []
    for sequence in range(int(batch.row_sequence.max()) + 1):
        tiles = LayerTiles(geometry, memory)
        tiles.prepare(0, int(batch.positions[batch.row_sequence == sequence].max()) + 1)
        data = [random.integers(0, 256, nbytes, np.uint8) for _ in range(len(tiles.addresses()))]
        for index, tile in enumerate(data):
            tiles.write(index, tile)
        tables.append(tiles.addresses())
        contents.append(data)
    longest = max(map(len, tables))
    table = np.stack([np.pad(addresses, (0, longest - len(addresses))) for addresses in tables])
    batch.tile_tables = (table,)

    seen: dict[int, list[int]] = {}
    for run, begin, end in offload.runs(shape, batch):
        tiles_before = seen.setdefault(run.sequence, [])
        assert begin == (not tiles_before)
        positions = batch.positions[batch.row_sequence == run.sequence]
        for index in range(run.tiles):
            tile = run.first_tile + index
            live = min(int(positions.max()) + 1 - tile * KV_TILE_POSITIONS, KV_TILE_POSITIONS)
            row = head_dim * ITEM_BYTES[kv_dtype]
            gpu.copy(landing.address, run.address + index * nbytes, nbytes, compute)
            gpu.synchronize()
            got = array_at(landing.address, (nbytes,), np.uint8).reshape(-1, KV_TILE_POSITIONS * row)
            expected = contents[run.sequence][tile].reshape(got.shape)
            assert np.array_equal(got[:, : live * row], expected[:, : live * row])
            tiles_before.append(tile)
        assert end == (tiles_before[-1] == int(positions.max()) // KV_TILE_POSITIONS)
    for sequence, tiles_of_it in seen.items():
        positions = batch.positions[batch.row_sequence == sequence]
        oldest = 0 if window is None else max(0, int(positions.min()) - window + 1)
        last = int(positions.max()) // KV_TILE_POSITIONS
        assert tiles_of_it == list(range(oldest // KV_TILE_POSITIONS, last + 1))
