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

from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.cuda.tile_memory import ArenaSlots
from edge_transformer.memory import HostMemory

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


class ArenaStateMemory(ArenaSlots):
    """Recurrent state of sequences, `state_bytes` each, in `nbytes` bytes of the arena at `address`."""

    def __init__(self, gpu: Gpu, stream: Stream, address: int, nbytes: int, state_bytes: int) -> None:
        full = (
            "the recurrent state on the GPU is full: it has room for {count} sequences of {nbytes} bytes, all in use; "
            "close a sequence, or open the model for more of them"
        )
        super().__init__(gpu, stream, address, nbytes, state_bytes, full)
        self._idle: list[_Locked] = []

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        locked = self._take(nbytes)
        if locked is None:
            return super().read(address, nbytes)
        self._gpu.copy(locked.memory.address, address, nbytes, self._stream)
        self._gpu.synchronize(self._stream)
        bare = (ctypes.c_uint8 * nbytes).from_address(locked.memory.address)
        # The array and all its views hold `bare`. Nothing but this list may be touched when they go: the garbage
        # collector comes at any time, in any thread.
        weakref.finalize(bare, self._idle.append, locked).atexit = False
        return np.frombuffer(memoryview(bare), np.uint8)

    def _take(self, nbytes: int) -> _Locked | None:
        """Page-locked memory that nobody uses; None where the host or the GPU refuses to lock it."""
        while sum(locked.memory.nbytes for locked in self._idle) > IDLE_BYTES:
            self._idle.pop().close()
        for index, locked in enumerate(self._idle):
            if locked.memory.nbytes == nbytes:
                return self._idle.pop(index)
        memory = HostMemory(nbytes, huge_pages=True)
        registration = self._gpu.register_host(memory.address, nbytes, read_only=False)
        if registration is None:
            memory.close()
            return None
        return _Locked(registration, memory)
