"""Kernel arguments as the driver takes them: values in one buffer, and an array of pointers to them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from edge_transformer.cuda.runtime import Argument
from edge_transformer.errors import GpuError

SLOT_BYTES = 8
# How a value is packed, and its size as a parameter.
_FORMATS: dict[type, tuple[str, int]] = {
    int: ("Q", 8),
    np.int32: ("i4x", 4),
    np.int64: ("q", 8),
    np.float32: ("f4x", 4),
}


class ArgumentBuffer:
    """Arguments of one kernel, packed anew for each launch (the driver copies them before the launch call returns).

    sizes: bytes of each parameter, None where the driver cannot tell. `pointers` is the address the driver is given.
    """

    def __init__(self, kernel: str, sizes: Sequence[int] | None) -> None:
        self._kernel = kernel
        self._sizes = sizes
        self._packers: dict[tuple[type, ...], struct.Struct] = {}
        self._values = ctypes.create_string_buffer(SLOT_BYTES)
        self._pointers = (ctypes.c_void_p * 1)()
        if sizes is not None:
            self._make_room(len(sizes))

    @property
    def pointers(self) -> int:
        return ctypes.addressof(self._pointers)

    def pack(self, arguments: Sequence[Argument]) -> None:
        """Put the values of a launch in place. Raises GpuError when their number or types are not the kernel's."""
        types = tuple(map(type, arguments))
        packer = self._packers.get(types)
        if packer is None:
            packer = self._packers[types] = self._packer(types)
        packer.pack_into(self._values, 0, *arguments)

    def _make_room(self, count: int) -> None:
        self._values = ctypes.create_string_buffer(max(1, count) * SLOT_BYTES)
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * max(1, count))(*(base + SLOT_BYTES * i for i in range(max(1, count))))

    def _packer(self, types: tuple[type, ...]) -> struct.Struct:
        for index, given in enumerate(types):
            if given not in _FORMATS:
                raise GpuError(
                    f"{self._kernel}, argument {index}: a pointer is an int, a number an np.int32, np.int64 or "
                    f"np.float32, not {given.__name__}"
                )
        if self._sizes is None:
            self._make_room(len(types))
        else:
            given_sizes = [_FORMATS[given][1] for given in types]
            if given_sizes != list(self._sizes):
                raise GpuError(
                    f"{self._kernel}: its parameters have {list(self._sizes)} bytes, the arguments given {given_sizes}"
                )
        return struct.Struct("<" + "".join(_FORMATS[given][0] for given in types))
