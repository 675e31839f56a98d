"""Recurrent state of sequences in the arena, and copies of it on the host that a prompt leaves behind as it goes.

A copy of tens of megabytes into fresh memory costs ten times what the bus takes: most of it is the kernel's clearing of
pages. So copies lie in page-locked memory that is used again when nobody holds the copy any more. It is ordinary memory
that was registered, not the driver's: a copy outlives the GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.runtime import Gpu, Memory, Stream
from edge_transformer.cuda.tile_memory import ArenaSlots
from edge_transformer.memory import HostMemory
from edge_transformer.ops.tensor import array_at

IDLE_BYTES = 256 << 20
"""Page-locked memory that is kept for copies to come."""


class _Locked:
    """Registered host memory. The registration ends before the memory does."""

    __slots__ = ("_registration", "memory")

    def __init__(self, registration: AbstractContextManager[None], memory: HostMemory) -> None:
        self._registration = registration
        self.memory = memory
        registration.__enter__()

    def close(self) -> None:
        self._registration.__exit__(None, None, None)
        self.memory.close()


class _LockedLanding:
    """Room for a copy (engine.kv.Landing) in registered memory. What `take` gives lies there too."""

    __slots__ = ("_home", "_room", "address")

    def __init__(self, home: ArenaStateMemory, room: npt.NDArray[np.uint8]) -> None:
        self._home = home
        self._room = room
        self.address = room.ctypes.data

    def take(self) -> npt.NDArray[np.uint8]:
        self._home.wait()
        return self._room


class _DriversLanding:
    """Room for a copy in the driver's page-locked memory, which ends with the GPU: `take` gives ordinary memory."""

    __slots__ = ("__weakref__", "_home", "_memory", "address")

    def __init__(self, home: ArenaStateMemory, memory: Memory) -> None:
        self._home = home
        self._memory = memory
        self.address = memory.address

    def take(self) -> npt.NDArray[np.uint8]:
        self._home.wait()
        return array_at(self.address, (self._memory.nbytes,), np.uint8).view(np.uint8).copy()


class ArenaStateMemory(ArenaSlots):
    """Recurrent state of sequences, `state_bytes` each, in `nbytes` bytes of the arena at `address`."""

    def __init__(self, gpu: Gpu, stream: Stream, address: int, nbytes: int, state_bytes: int) -> None:
        full = (
            "the recurrent state on the GPU is full: it has room for {count} sequences of {nbytes} bytes, all in use; "
            "close a sequence, or open the model for more of them"
        )
        super().__init__(gpu, stream, address, nbytes, state_bytes, full)
        self._idle: list[_Locked] = []
        self._idle_drivers: list[Memory] = []  # where registration is refused
        self.have_landings(state_bytes, 1)

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        landing = self.landing(nbytes)
        self._gpu.copy(landing.address, address, nbytes, self._stream)
        return landing.take()

    def landing(self, nbytes: int) -> _LockedLanding | _DriversLanding:
        """Page-locked memory, used again when nobody holds what it gave. Nothing but a list may be touched then: the
        garbage collector comes at any time, in any thread. Copies that are still on their way there are of the same
        stream as those to come.
        """
        locked = self._take(nbytes)
        if locked is not None:
            bare = (ctypes.c_uint8 * nbytes).from_address(locked.memory.address)
            # The array and all its views hold `bare`.
            weakref.finalize(bare, self._idle.append, locked).atexit = False
            return _LockedLanding(self, np.frombuffer(memoryview(bare), np.uint8))
        idle = next((memory for memory in self._idle_drivers if memory.nbytes == nbytes), None)
        if idle is None:
            idle = self._gpu.allocate_host(nbytes, "a checkpoint of recurrent state")
        else:
            self._idle_drivers.remove(idle)
        landing = _DriversLanding(self, idle)
        weakref.finalize(landing, self._idle_drivers.append, idle).atexit = False
        return landing

    def have_landings(self, nbytes: int, count: int) -> None:
        """Locking takes as long as copying several times."""
        while sum(locked.memory.nbytes == nbytes for locked in self._idle) < count:
            locked = self._lock(nbytes)
            if locked is None:
                return
            self._idle.append(locked)

    def wait(self) -> None:
        """Until all that was queued has run."""
        self._gpu.synchronize(self._stream)

    def _take(self, nbytes: int) -> _Locked | None:
        """Page-locked memory that nobody uses; None where the host or the GPU refuses to lock it."""
        while sum(locked.memory.nbytes for locked in self._idle) > IDLE_BYTES:
            self.wait()  # copies nobody waited for
            self._idle.pop().close()
        for index, locked in enumerate(self._idle):
            if locked.memory.nbytes == nbytes:
                return self._idle.pop(index)
        return self._lock(nbytes)

    def _lock(self, nbytes: int) -> _Locked | None:
        memory = HostMemory(nbytes, huge_pages=True, what="copies of recurrent state")
        registration = self._gpu.register_host(memory.address, nbytes, read_only=False)
        if registration is None:
            memory.close()
            return None
        return _Locked(registration, memory)
