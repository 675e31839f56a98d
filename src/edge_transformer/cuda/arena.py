"""All device memory of an engine: one allocation, handed out in blocks once, before anything runs.

The size is the promise `--vram` makes. Knows nothing of what the blocks are for.
"""

from __future__ import annotations

from edge_transformer.cuda.runtime import Gpu
from edge_transformer.errors import CapacityError

ALIGNMENT = 256


def padded(nbytes: int) -> int:
    """The bytes that a block of `nbytes` takes in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """`nbytes` of device memory. `ledger` lists (label, bytes taken) in the order of the calls.

    Raises CapacityError when the GPU has less.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self._memory = gpu.allocate(nbytes, "arena")
        self.nbytes = nbytes
        self.used = 0
        self.ledger: list[tuple[str, int]] = []

    @property
    def address(self) -> int:
        return self._memory.address

    def take(self, nbytes: int, label: str) -> int:
        """Address of `nbytes` bytes, a multiple of 256, declared as block `label`; undefined at first.

        Raises CapacityError when they do not fit, ValueError when nbytes < 1.
        """
        if nbytes < 1:
            raise ValueError(f"{label}: {nbytes} bytes cannot be taken from the arena")
        left = self.nbytes - self.used
        if padded(nbytes) > left:
            raise CapacityError(
                f"{label}: {nbytes} bytes of GPU memory asked for, {left} left of the {self.nbytes} "
                f"({self.nbytes / 2**20:.1f} MiB) that --vram allows; taken are {self._largest()}"
            )
        address = self._memory.address + self.used
        self.used += padded(nbytes)
        self.ledger.append((label, padded(nbytes)))
        self._gpu.declare_block(address, nbytes, label)
        return address

    def close(self) -> None:
        """Give the memory back. Closing twice is harmless."""
        self._memory.close()

    def _largest(self) -> str:
        largest = sorted(self.ledger, key=lambda entry: -entry[1])[:3]
        return ", ".join(f"{label} ({taken} bytes)" for label, taken in largest) or "none"
