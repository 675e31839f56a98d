"""Page-locked memory of KV tiles: what is copied at once lies in one allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from edge_transformer.cuda.kv_offload import contiguous_runs
from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.cuda.tile_memory import LockedTileMemory
from edge_transformer.engine.kv import LayerTiles, TileGeometry
from edge_transformer.ops.tensor import DType


@dataclass
class Block:
    address: int
    nbytes: int

    def close(self) -> None:
        """Nothing to give back."""


class OneBehindTheOther:
    """Page-locks blocks of which each begins where the one before has ended, as a driver may."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.end = 1 << 20

    def allocate_host(self, nbytes: int, what: str) -> Block:
        block = Block(self.end, nbytes)
        self.end += nbytes
        self.blocks.append(block)
        return block


def test_no_copy_crosses_from_one_allocation_into_the_next() -> None:
    gpu = OneBehindTheOther()
    geometry = TileGeometry(kv_heads=2, head_dim=128, dtype=DType.BF16, window=None)
    tiles = LayerTiles(geometry, LockedTileMemory(cast(Gpu, gpu), cast(Stream, None)))
    tiles.prepare(0, 64 * 512)
    assert len(gpu.blocks) > 2
    for start, count in contiguous_runs(tiles.addresses(), 0, geometry.tile_bytes, 64):
        first = int(tiles.addresses()[start])
        assert any(
            block.address <= first and first + count * geometry.tile_bytes <= block.address + block.nbytes
            for block in gpu.blocks
        )
