"""Memory of KV caches: counted to the byte, used again, refused without a trace; sequences that wait on the host."""

from __future__ import annotations

import numpy as np
import pytest

from edge_transformer.cuda.tile_memory import LockedTileMemory
from edge_transformer.engine.kv import HostTileMemory, LayerTiles, TileGeometry
from edge_transformer.engine.kv_budget import BudgetedTileMemory
from edge_transformer.engine.sequence import Sequence, StateShape
from edge_transformer.errors import CapacityError
from edge_transformer.ops.tensor import DType
from emulator.gpu import EmulatedGpu
from emulator.memory import EmulatedMemory

GEOMETRY = TileGeometry(1, 8, DType.F32, None)
WINDOWED = TileGeometry(1, 8, DType.F32, 600)
TILE = GEOMETRY.tile_bytes


def test_the_budget_is_kept_and_what_is_given_back_is_used_again() -> None:
    memory = BudgetedTileMemory(HostTileMemory(), 3 * TILE)
    held = [memory.allocate(TILE) for _ in range(3)]
    assert len({allocation.address for allocation in held}) == 3
    with pytest.raises(CapacityError, match="--kv-budget"):
        memory.allocate(1)
    held[1].close()
    held[1].close()
    assert memory.used_bytes == 2 * TILE
    assert memory.allocate(TILE).address == held[1].address
    assert memory.peak_bytes == 3 * TILE


class CountingGpu(EmulatedGpu):
    """Counts how often host memory is page-locked, which takes long."""

    locked = 0

    def allocate_host(self, nbytes: int, what: str) -> EmulatedMemory:
        self.locked += 1
        return super().allocate_host(nbytes, what)


def test_runs_are_kept_for_the_next_within_the_budget() -> None:
    gpu = CountingGpu(0)
    runs = LockedTileMemory(gpu, gpu.stream("compute"))
    memory = BudgetedTileMemory(runs, 10 * TILE)
    assert memory.on_host
    first = memory.allocate(4 * TILE)
    first.close()
    again = memory.allocate(4 * TILE)
    assert (gpu.locked, again.address) == (1, first.address)
    again.close()
    memory.allocate(8 * TILE)  # would not fit beside what is kept
    assert gpu.locked == 2
    assert memory.used_bytes == 8 * TILE
    assert 8 * TILE <= runs.locked_bytes <= 10 * TILE


def test_a_tile_whose_copy_is_refused_stays_shared() -> None:
    memory = BudgetedTileMemory(HostTileMemory(), TILE)
    tiles = LayerTiles(GEOMETRY, memory)
    tiles.prepare(0, 100)
    tiles.write(0, np.full(TILE, 7, np.uint8))
    other = tiles.fork()
    with pytest.raises(CapacityError):
        other.prepare(100, 101)
    with pytest.raises(CapacityError):
        other.prepare(100, 101)
    tiles.close()
    other.prepare(100, 101)  # nobody else holds it now: no copy is needed
    assert (other.read(0) == 7).all()


def test_a_sequence_moves_to_the_host_and_back() -> None:
    memory = BudgetedTileMemory(HostTileMemory(), 100 * TILE)
    shape = StateShape((GEOMETRY, WINDOWED), lambda: "test", memory)
    sequence = Sequence(shape)
    for start in range(0, 1500, 100):
        sequence.prepare(100)
        sequence.commit(range(start, start + 100))
    first = sequence.layers[1].first_tile
    assert first > 0
    contents = {}
    for index, layer in enumerate(sequence.layers):
        for tile in range(layer.first_tile, layer.tile_count):
            contents[index, tile] = np.random.default_rng(tile).integers(0, 256, TILE, np.uint8)
            layer.write(tile, contents[index, tile])
    assert sequence.move_to_host() == len(contents) * TILE
    assert memory.used_bytes == 0
    memory.budget_bytes = 2 * TILE
    with pytest.raises(CapacityError):
        sequence.move_back()
    assert memory.used_bytes == 0
    memory.budget_bytes = 100 * TILE
    sequence.move_back()
    assert len(sequence) == 1500
    assert sequence.layers[1].first_tile == first
    for (index, tile), data in contents.items():
        assert (sequence.layers[index].read(tile) == data).all()
        assert sequence.tile_table(index)[tile] != 0
    sequence.close()
    assert memory.used_bytes == 0
