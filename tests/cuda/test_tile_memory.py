"""Page-locked memory of KV tiles: what is copied at once lies in one allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from edge_transformer.cuda import tile_memory
from edge_transformer.cuda.kv_offload import contiguous_runs
from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.cuda.tile_memory import LockedTileMemory
from edge_transformer.engine.kv import LayerTiles, TileGeometry
from edge_transformer.errors import CapacityError
from edge_transformer.ops.tensor import DType


@dataclass
class Block:
    address: int
    nbytes: int
    closed: bool = False

    def close(self) -> None:
        self.closed = True


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


def test_memory_of_a_run_is_locked_before_and_used_again() -> None:
    gpu = OneBehindTheOther()
    memory = LockedTileMemory(cast(Gpu, gpu), cast(Stream, None))
    memory.have_ready([4096, 4096, 8192])
    assert len(gpu.blocks) == 3
    runs = [memory.allocate(nbytes) for nbytes in (4096, 8192, 4096)]
    assert len({run.address for run in runs}) == len(gpu.blocks) == 3
    assert memory.allocate(4096).address not in {run.address for run in runs}
    runs[0].close()
    runs[0].close()
    assert memory.allocate(4096).address == runs[0].address
    assert memory.allocate(4096).address != runs[0].address
    assert len(gpu.blocks) == 5


def test_not_all_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = OneBehindTheOther()
    monkeypatch.setattr(tile_memory, "IDLE_RUN_BYTES", 10_000)
    memory = LockedTileMemory(cast(Gpu, gpu), cast(Stream, None))
    for run in [memory.allocate(4096) for _ in range(3)]:
        run.close()
    assert [block.closed for block in gpu.blocks] == [False, False, True]


def test_memory_kept_for_other_runs_gives_way_where_more_is_refused() -> None:
    class Full(OneBehindTheOther):
        def allocate_host(self, nbytes: int, what: str) -> Block:
            if sum(block.nbytes for block in self.blocks if not block.closed) + nbytes > 20_000:
                raise CapacityError(what)
            return super().allocate_host(nbytes, what)

    memory = LockedTileMemory(cast(Gpu, Full()), cast(Stream, None))
    used = memory.allocate(4096)
    for run in [memory.allocate(4096) for _ in range(2)]:
        run.close()
    assert memory.allocate(8192).address != used.address
    with pytest.raises(CapacityError):
        memory.allocate(8192)


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
