"""Where the state of sequences lies when a GPU computes: in the arena, or, KV tiles, in page-locked host memory that
copies and kernels reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.runtime import Gpu, Memory, Stream
from edge_transformer.errors import CapacityError
from edge_transformer.ops.tensor import array_at

HOST_RUN_BYTES = 4 << 20
"""Runs of tiles are moved at once: smaller copies do not fill the bus."""


class _Slot:
    """A slot in the arena; closing it makes room for another."""

    __slots__ = ("_home", "address")

    def __init__(self, home: ArenaSlots, address: int) -> None:
        self._home = home
        self.address = address

    def close(self) -> None:
        self._home.give_back(self.address)


class ArenaSlots:
    """Slots of `slot_bytes` in `nbytes` bytes of the arena at `address`. `full`: what is said when all are in use."""

    def __init__(self, gpu: Gpu, stream: Stream, address: int, nbytes: int, slot_bytes: int, full: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self._gpu = gpu
        self._stream = stream
        self._full = full
        self._count = nbytes // slot_bytes
        self._free = [address + index * slot_bytes for index in reversed(range(self._count))]

    def allocate(self, nbytes: int) -> _Slot:
        if not self._free:
            raise CapacityError(self._full.format(count=self._count, nbytes=nbytes))
        return _Slot(self, self._free.pop())

    def give_back(self, address: int) -> None:
        self._free.append(address)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._gpu.copy(destination, source, nbytes, self._stream)

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        with self._staging(nbytes) as staging:
            self._gpu.copy(staging.address, address, nbytes, self._stream)
            self._gpu.synchronize(self._stream)
            return array_at(staging.address, (nbytes,), np.uint8).view(np.uint8).copy()

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        with self._staging(len(data)) as staging:
            array_at(staging.address, (len(data),), np.uint8)[:] = data
            self._gpu.copy(address, staging.address, len(data), self._stream)
            self._gpu.synchronize(self._stream)

    @contextlib.contextmanager
    def _staging(self, nbytes: int) -> Iterator[Memory]:
        """Page-locked memory on the way between host and GPU."""
        staging = self._gpu.allocate_host(nbytes, "state of a sequence on its way between host and GPU")
        try:
            yield staging
        finally:
            staging.close()


class ArenaTileMemory(ArenaSlots):
    """KV tiles of `tile_bytes` in the arena. One tile is a run."""

    run_bytes = 1

    def __init__(self, gpu: Gpu, stream: Stream, address: int, nbytes: int, tile_bytes: int) -> None:
        full = (
            "the KV cache on the GPU is full: all its {count} tiles of {nbytes} bytes are in use; "
            "use --kv-offload, a longer --ctx at load, or fewer sequences"
        )
        super().__init__(gpu, stream, address, nbytes, tile_bytes, full)


RUN_GAP_BYTES = 256
"""Left unused behind every run: a copy must not cross from one page-locked allocation into another, and tiles that lie
one behind the other are copied at once."""


IDLE_RUN_BYTES = 256 << 20
"""Page-locked memory that is kept for runs to come, where nobody has said how much all runs may take."""


class _LockedRun:
    """Page-locked memory of a run; closing it leaves it to another."""

    __slots__ = ("_home", "_memory", "address")

    def __init__(self, home: LockedTileMemory, memory: Memory) -> None:
        self._home = home
        self._memory: Memory | None = memory
        self.address = memory.address

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._home.give_back(memory)


class LockedTileMemory:
    """Tiles in page-locked host memory: kernels append to them over the bus, copies bring runs of them to the GPU.

    Locking a run takes several times as long as copying it, so that runs are locked before a prompt waits for them, and
    kept when they are given back. within_bytes: what all runs may take, those included that wait for use (None:
    IDLE_RUN_BYTES for the latter). locked_bytes: what they take now.
    """

    run_bytes = HOST_RUN_BYTES

    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self.within_bytes: int | None = None
        self._gpu = gpu
        self._stream = stream
        self._idle: list[Memory] = []
        self._lent_bytes = 0

    @property
    def locked_bytes(self) -> int:
        return self._lent_bytes + self._idle_bytes

    def have_ready(self, sizes: Iterable[int]) -> None:
        """Lock memory for runs of so many bytes each. Raises CapacityError when the host refuses."""
        self._idle += [self._lock(nbytes) for nbytes in sizes]

    def allocate(self, nbytes: int) -> _LockedRun:
        index = next((i for i, idle in enumerate(self._idle) if idle.nbytes == nbytes + RUN_GAP_BYTES), None)
        memory = self._lock_in_place_of_idle(nbytes) if index is None else self._idle.pop(index)
        self._lent_bytes += memory.nbytes
        return _LockedRun(self, memory)

    def give_back(self, memory: Memory) -> None:
        """Called by what `allocate` gave."""
        self._lent_bytes -= memory.nbytes
        room = IDLE_RUN_BYTES if self.within_bytes is None else self.within_bytes - self._lent_bytes
        if self._idle_bytes + memory.nbytes > room:
            memory.close()
        else:
            self._idle.append(memory)

    @property
    def _idle_bytes(self) -> int:
        return sum(idle.nbytes for idle in self._idle)

    def _lock_in_place_of_idle(self, nbytes: int) -> Memory:
        """Idle runs, which are of other sizes, give way where all may not take so much, or the host refuses."""
        if self.within_bytes is not None and self.locked_bytes + nbytes > self.within_bytes:
            self._unlock_idle()
        try:
            return self._lock(nbytes)
        except CapacityError:
            if not self._idle:
                raise
        self._unlock_idle()
        return self._lock(nbytes)

    def _unlock_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _lock(self, nbytes: int) -> Memory:
        return self._gpu.allocate_host(nbytes + RUN_GAP_BYTES, "KV tiles on the host")

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._gpu.synchronize(self._stream)  # kernels may still be appending to the source
        array_at(destination, (nbytes,), np.uint8)[:] = array_at(source, (nbytes,), np.uint8)

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        self._gpu.synchronize(self._stream)
        return array_at(address, (nbytes,), np.uint8).view(np.uint8).copy()

    def write(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        self._gpu.synchronize(self._stream)
        array_at(address, (len(data),), np.uint8)[:] = data
