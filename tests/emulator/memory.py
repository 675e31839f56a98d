"""The emulated GPU's memory: allocations in host memory, poisoned and fenced, with the blocks declared in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge_transformer.errors import GpuError
from edge_transformer.memory import bytes_at

ALIGNMENT = 256
FENCE = 4096
POISON = 0xFF  # NaN as f32, f16 and bf16
FENCE_BYTE = 0xA5


@dataclass(eq=False)
class Region:
    """Memory that work may touch: allocated here, or the host's own that was registered."""

    address: int
    nbytes: int
    what: str
    device: bool
    read_only: bool = False
    blocks: list[tuple[int, int, str]] = field(default_factory=list)  # (start, end, label)

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def block(self, address: int) -> tuple[int, int, str]:
        """The smallest declared block around `address`, else all of the region."""
        around = [block for block in self.blocks if block[0] <= address < block[1]]
        return min(around, key=lambda block: block[1] - block[0], default=(self.address, self.end, self.what))

    def data(self) -> npt.NDArray[np.uint8]:
        return bytes_at(self.address, self.nbytes)


class EmulatedMemory:
    """What `allocate` gives out: Memory of the seam."""

    def __init__(self, nbytes: int, what: str, device: bool, on_close: Callable[[EmulatedMemory], None]) -> None:
        self._store = np.full(nbytes + 2 * FENCE + ALIGNMENT, FENCE_BYTE, np.uint8)
        start = self._store.ctypes.data + FENCE
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        self.nbytes = nbytes
        self.region = Region(self.address, nbytes, what, device)
        self._on_close = on_close
        self._open = True
        poison(self.address, nbytes)

    def check_fences(self) -> str | None:
        """What was overwritten around the memory, or None."""
        inside = self.address - self._store.ctypes.data
        before, after = self._store[:inside], self._store[inside + self.nbytes :]
        for side, name in ((before, "before"), (after, "after")):
            if (side != FENCE_BYTE).any():
                return f"bytes {name} {self.region.what!r} ({self.nbytes} bytes) were overwritten"
        return None

    def close(self) -> None:
        if self._open:
            self._open = False
            self._on_close(self)


def poison(address: int, nbytes: int) -> None:
    ctypes.memset(address, POISON, nbytes)


class MemoryMap:
    """All regions, found by address."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def find(self, address: int, nbytes: int, doing: str) -> Region:
        """The region that holds all of the bytes. Raises GpuError naming what was being done."""
        for region in self.regions:
            if region.address <= address < region.end or (nbytes == 0 and address == region.end):
                if address + nbytes > region.end:
                    raise GpuError(
                        f"{doing}: {nbytes} bytes at {address:#x} go past the end of {region.what!r} "
                        f"({region.nbytes} bytes at {region.address:#x})"
                    )
                return region
        raise GpuError(
            f"{doing}: {address:#x} lies in no memory of the GPU, nor in page-locked or registered host memory"
        )
