"""What the KV caches of all sequences together may take, counted to the byte, with memory that is used again.

A scheduler asks for a sequence's next tiles before a pass; what does not fit raises CapacityError there, between two
passes, where others can still give way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.tile_memory import LockedTileMemory
from edge_transformer.engine.kv import Allocation, HostTileMemory, TileMemory
from edge_transformer.errors import CapacityError
from edge_transformer.memory import HostMemory

SLAB_BYTES = 16 << 20


class BudgetedTileMemory:
    """A TileMemory that refuses what would exceed `budget_bytes`. `used_bytes`: what is allocated now. Page-locked runs
    that are given back are kept for the next within the same budget.
    """

    def __init__(self, inner: TileMemory, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._inner: TileMemory = PooledHostMemory() if isinstance(inner, HostTileMemory) else inner
        self.on_host = isinstance(inner, HostTileMemory | LockedTileMemory)
        if isinstance(inner, LockedTileMemory):
            inner.within_bytes = budget_bytes
        self.run_bytes = self._inner.run_bytes

    def allocate(self, nbytes: int) -> Allocation:
        """Raises CapacityError beyond the budget, or when the memory itself is refused."""
        if self.used_bytes + nbytes > self.budget_bytes:
            raise CapacityError(
                f"KV caches hold {self.used_bytes} bytes; {nbytes} more exceed their budget of {self.budget_bytes} "
                "(--kv-budget)"
            )
        allocation = self._inner.allocate(nbytes)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return _Counted(self, allocation, nbytes)

    def give_back(self, allocation: Allocation, nbytes: int) -> None:
        """Called by what `allocate` gave."""
        self.used_bytes -= nbytes
        allocation.close()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._inner.copy(destination, source, nbytes)

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._inner.read(address, nbytes)

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        self._inner.write(address, data)


class _Counted:
    """An allocation that is taken off the count when it is closed."""

    def __init__(self, memory: BudgetedTileMemory, allocation: Allocation, nbytes: int) -> None:
        self.address = allocation.address
        self._memory = memory
        self._allocation: Allocation | None = allocation
        self._nbytes = nbytes

    def close(self) -> None:
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self._memory.give_back(allocation, self._nbytes)


class PooledHostMemory(HostTileMemory):
    """Host memory handed out in pieces of few sizes, kept and used again: pages are faulted in once.

    It grows in slabs, and takes as much as was ever used at once.
    """

    run_bytes = 1

    def __init__(self) -> None:
        super().__init__()
        self._slabs: list[HostMemory] = []
        self._free: dict[int, list[int]] = {}

    def allocate(self, nbytes: int) -> Allocation:
        free = self._free.setdefault(nbytes, [])
        if not free:
            pieces = max(1, SLAB_BYTES // nbytes)
            slab = HostMemory(pieces * nbytes, what=self._what)
            self._slabs.append(slab)
            free.extend(slab.address + index * nbytes for index in reversed(range(pieces)))
        return _Piece(free.pop(), free)


class _Piece:
    """Goes back to the list of free pieces of its size when it is closed."""

    def __init__(self, address: int, free: list[int]) -> None:
        self.address = address
        self._free: list[int] | None = free

    def close(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free.append(self.address)
