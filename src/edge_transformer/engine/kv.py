"""The KV cache as tiles: 512 positions of one layer, allocated in runs, shared between forks, freed behind a window.

A tile holds K [kv_heads][512][head_dim], then V the same, in the cache's dtype; the same bytes on every executor. Tiles
of a layer are allocated in runs of at least RUN_BYTES (the unit in which they will be moved); a windowed layer takes
one tile at a time, so that each can be freed as soon as no later query can see it. Pages of a run cost nothing until
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_transformer.memory import HostMemory
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.tensor import ITEM_BYTES, DType, array_at

RUN_BYTES = 4 << 20
LARGEST_RUN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TileGeometry:
    """What a layer's KV tiles look like. `window`: how many positions a query sees, itself included (None: all)."""

    kv_heads: int
    head_dim: int
    dtype: DType
    window: int | None

    @property
    def tile_bytes(self) -> int:
        return 2 * self.kv_heads * KV_TILE_POSITIONS * self.head_dim * ITEM_BYTES[self.dtype]

    def run_tiles(self, run_bytes: int, held_tiles: int = 0) -> int:
        """Tiles of the next run of a list of `held_tiles`: as many as there are already, so that long sequences are
        moved in few large pieces and short ones take little; at least `run_bytes`, at most LARGEST_RUN_BYTES. 1 for a
        windowed layer.
        """
        if self.window is not None:
            return 1
        least = max(1, -(-run_bytes // self.tile_bytes))
        return max(least, min(held_tiles, LARGEST_RUN_BYTES // self.tile_bytes))

    def first_visible_tile(self, position: int) -> int:
        """Index of the first tile that a query at `position` (or a later one) can see."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // KV_TILE_POSITIONS

    def held_tiles(self, tokens: int, max_rows: int) -> int:
        """Tiles that a sequence of `tokens` tokens holds at most, where passes have up to `max_rows` rows."""
        whole = -(-tokens // KV_TILE_POSITIONS)
        if self.window is None:
            return whole
        # A pass needs what its first row sees and what its last row writes; both ends may lie inside a tile.
        return min(whole, (self.window + max_rows - 2) // KV_TILE_POSITIONS + 2)


class Allocation(Protocol):
    """`nbytes` bytes at `address`, given back by `close`."""

    address: int

    def close(self) -> None: ...


class StateMemory(Protocol):
    """Where the state of sequences lies: host memory, page-locked host memory, or the memory of a GPU. Addresses mean
    what the executor takes them for.
    """

    def allocate(self, nbytes: int) -> Allocation:
        """Raises CapacityError when there is not so much."""
        ...

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between allocations; done when later work of the executor looks."""
        ...

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A copy on the host."""
        ...

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """`data` may be changed once this returns."""
        ...


class Landing(Protocol):
    """Room on the host at `address` for a copy that a pass makes. It is given back when neither it nor what `take` gave
    is held any more.
    """

    address: int

    def take(self) -> npt.NDArray[np.uint8]:
        """The copy, once the pass has ended: waits for that."""
        ...


class RecurrentMemory(StateMemory, Protocol):
    """Memory of recurrent state, of which passes make copies as they go."""

    def landing(self, nbytes: int) -> Landing:
        """Room for a copy. Raises CapacityError when the host refuses it."""
        ...

    def have_landings(self, nbytes: int, count: int) -> None:
        """Make room for as many copies to come, where that takes long and is better done now than later."""
        ...


class TileMemory(StateMemory, Protocol):
    """Memory of KV tiles. run_bytes: they are allocated in runs of at least so many bytes."""

    run_bytes: int


class _HostLanding:
    __slots__ = ("_room", "address")

    def __init__(self, nbytes: int) -> None:
        self._room = np.empty(nbytes, np.uint8)
        self.address = self._room.ctypes.data

    def take(self) -> npt.NDArray[np.uint8]:
        return self._room


class HostTileMemory:
    """Ordinary host memory. Pages cost nothing until they are written. what: it is for, in errors."""

    run_bytes = RUN_BYTES

    def __init__(self, what: str = "KV cache") -> None:
        self._what = what

    def allocate(self, nbytes: int) -> Allocation:
        return HostMemory(nbytes, what=self._what)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        array_at(destination, (nbytes,), np.uint8)[:] = array_at(source, (nbytes,), np.uint8)

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return array_at(address, (nbytes,), np.uint8).view(np.uint8).copy()

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        array_at(address, (len(data),), np.uint8)[:] = data

    def landing(self, nbytes: int) -> Landing:
        return _HostLanding(nbytes)

    def have_landings(self, nbytes: int, count: int) -> None:
        """Nothing: ordinary memory is had at once."""


class Run:
    """Consecutive tiles in one allocation, counted by the tile lists that point into it."""

    __slots__ = ("memory", "references")

    def __init__(self, memory: Allocation) -> None:
        self.memory = memory
        self.references = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    run: Run
    address: int


class LayerTiles:
    """KV tiles of one layer of one sequence; tile t holds positions [512 t, 512 t + 512).

    Tiles may be shared with forks: full tiles stay shared, a tile about to be written is copied first.
    """

    def __init__(self, geometry: TileGeometry, memory: TileMemory) -> None:
        self.geometry = geometry
        self.memory = memory
        self._slots: list[_Slot | None] = []
        self._spare: list[_Slot] = []  # tiles of the newest run that are not yet in use
        self._shared: set[int] = set()

    @property
    def tile_count(self) -> int:
        return len(self._slots)

    @property
    def first_tile(self) -> int:
        """Index of the first tile that is still held."""
        return next((index for index, slot in enumerate(self._slots) if slot is not None), len(self._slots))

    @property
    def held_bytes(self) -> int:
        """Bytes of the tiles held by this list (shared ones included)."""
        return sum(slot is not None for slot in self._slots) * self.geometry.tile_bytes

    def addresses(self) -> npt.NDArray[np.int64]:
        """int64 [tile_count]: address of each tile, 0 where it has been freed."""
        return np.array([0 if slot is None else slot.address for slot in self._slots], np.int64)

    def prepare(self, start: int, stop: int) -> bool:
        """Make positions [start, stop) writable; frees what no query from `start` on can see. True when a tile moved.

        Raises CapacityError when the host refuses the memory.
        """
        changed = False
        for index in range(min(self.geometry.first_visible_tile(start), len(self._slots))):
            if self._slots[index] is not None:
                self._recycle(index)
                changed = True
        for index in range(start // KV_TILE_POSITIONS, len(self._slots)):
            if index in self._shared:
                self._unshare(index)
                changed = True
        while len(self._slots) * KV_TILE_POSITIONS < stop:
            self._slots.append(self._take())
            changed = True
        return changed

    def can_truncate(self, length: int) -> bool:
        """Whether every tile that a query at position `length` needs is still held."""
        if length == 0:
            return True
        first = self.geometry.first_visible_tile(length)
        last = (length - 1) // KV_TILE_POSITIONS
        return all(self._slots[index] is not None for index in range(first, last + 1))

    def truncate(self, length: int) -> None:
        """Drop the tiles that hold only positions >= length."""
        keep = -(-length // KV_TILE_POSITIONS)
        for index in reversed(range(keep, len(self._slots))):
            self._recycle(index)
        del self._slots[keep:]

    def fork(self) -> LayerTiles:
        """A second list over the same tiles; whichever writes into a shared tile first copies it."""
        other = LayerTiles(self.geometry, self.memory)
        other._slots = list(self._slots)
        for index, slot in enumerate(self._slots):
            if slot is not None:
                slot.run.references += 1
                self._shared.add(index)
                other._shared.add(index)
        return other

    def read(self, index: int) -> npt.NDArray[np.uint8]:
        """A copy of a held tile's bytes. Raises KeyError when it has been freed."""
        return self.memory.read(self._held(index).address, self.geometry.tile_bytes)

    def write(self, index: int, data: npt.NDArray[np.uint8]) -> None:
        """Replace a held tile's bytes. Raises KeyError when it has been freed."""
        self.memory.write(self._held(index).address, data)

    def skip(self, tiles: int) -> None:
        """Leave out the first `tiles` tiles of an empty list, as a window had freed them (used when loading)."""
        self._slots = [None] * tiles

    def close(self) -> None:
        """Give all tiles back."""
        for slot in (*self._slots, *self._spare):
            if slot is not None:
                _release(slot.run)
        self._slots, self._spare = [], []
        self._shared.clear()

    def _held(self, index: int) -> _Slot:
        slot = self._slots[index]
        if slot is None:
            raise KeyError(f"KV tile {index} has been freed")
        return slot

    def _take(self) -> _Slot:
        if not self._spare:
            nbytes = self.geometry.tile_bytes
            # Memory that is handed out tile by tile is no run.
            held = len(self._slots) if self.memory.run_bytes > 1 else 0
            tiles = self.geometry.run_tiles(self.memory.run_bytes, held)
            run = Run(self.memory.allocate(tiles * nbytes))
            run.references = tiles
            self._spare = [_Slot(run, run.memory.address + index * nbytes) for index in reversed(range(tiles))]
        return self._spare.pop()

    def _unshare(self, index: int) -> None:
        old = self._slots[index]
        if old is None or old.run.references == 1:
            self._shared.discard(index)
            return
        new = self._take()  # where this is refused the tile stays shared
        self._shared.discard(index)
        self.memory.copy(new.address, old.address, self.geometry.tile_bytes)
        self._slots[index] = new
        _release(old.run)

    def _recycle(self, index: int) -> None:
        slot = self._slots[index]
        self._slots[index] = None
        if slot is None:
            return
        if index in self._shared:
            self._shared.discard(index)
            _release(slot.run)
        else:
            self._spare.append(slot)


def _release(run: Run) -> None:
    run.references -= 1
    if run.references == 0:
        run.memory.close()
