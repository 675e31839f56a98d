"""numpy arrays to a GPU's memory and back, for tests: on the emulator and on a real one alike."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.runtime import Gpu, Memory


class DeviceArrays:
    """Puts arrays into device memory of their own and reads them back. `stream` is where its copies are queued."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream = gpu.stream("arrays")
        self._kept: dict[int, tuple[Memory, tuple[int, ...], np.dtype]] = {}

    def empty(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike, label: str) -> int:
        """Address of undefined device memory (0xff bytes on the emulator) for an array, declared as a block."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        memory = self.gpu.allocate(nbytes, label)
        self.gpu.declare_block(memory.address, nbytes, label)
        self.gpu.fill(memory.address, nbytes, 0xFF, self.stream)
        self.gpu.synchronize(self.stream)
        self._kept[memory.address] = memory, shape, np.dtype(dtype)
        return memory.address

    def put(self, array: npt.NDArray, label: str) -> int:
        """Address of a copy of `array` in device memory."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.shape, array.dtype, label)
        if array.nbytes:
            staging = self.gpu.allocate_host(array.nbytes, f"staging of {label}")
            ctypes.memmove(staging.address, array.ctypes.data, array.nbytes)
            self.gpu.copy(address, staging.address, array.nbytes, self.stream)
            self.gpu.synchronize(self.stream)
            staging.close()
        return address

    def get(self, address: int) -> npt.NDArray:
        """The array at `address` (as `put` or `empty` gave it), after everything queued has run."""
        _, shape, dtype = self._kept[address]
        array = np.empty(shape, dtype)
        self.gpu.synchronize()
        if array.nbytes:
            staging = self.gpu.allocate_host(array.nbytes, "staging")
            self.gpu.copy(staging.address, address, array.nbytes, self.stream)
            self.gpu.synchronize(self.stream)
            ctypes.memmove(array.ctypes.data, staging.address, array.nbytes)
            staging.close()
        return array

    def close(self) -> None:
        for memory, _, _ in self._kept.values():
            memory.close()
        self._kept.clear()
