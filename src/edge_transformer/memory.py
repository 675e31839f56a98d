"""Host memory: how much is free, and the anonymous memory that KV tiles, workspaces and re-arranged weights live in.

Knows nothing of what is stored. Pages are zero, and take room only once they are touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer.control_groups import limiting_groups, read_text
from edge_transformer.errors import CapacityError

HUGE_PAGE_BYTES = 2 << 20


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` bytes of raw memory as an array that shares it. The caller keeps the memory alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), np.uint8)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still have without swapping: as the kernel estimates, and no more than its control
    groups leave it. `root` holds proc/ and sys/ (another folder in tests).
    """
    left = [_left_in_group(folder, version) for folder, version in limiting_groups("memory", root)]
    return min([_memory_line("MemAvailable", root), *(nbytes for nbytes in left if nbytes is not None)])


def free_swap(root: Path = Path("/")) -> int:
    """Bytes of swap that nobody uses."""
    return _memory_line("SwapFree", root)


def _memory_line(name: str, root: Path) -> int:
    with open(root / "proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def _left_in_group(folder: Path, version: int) -> int | None:
    """Bytes below a group's limit, pages of files not counted, as the kernel gives these up first; None: no limit."""
    limit_file, usage_file, pages = _GROUP_FILES[version]
    limit, usage = read_text(folder / limit_file), read_text(folder / usage_file)
    if limit is None or usage is None or limit.strip() == "max":
        return None
    try:
        counts = dict(line.split(maxsplit=1) for line in (read_text(folder / "memory.stat") or "").splitlines())
        of_files = sum(int(counts.get(name, 0)) for name in pages)
        return max(0, int(limit) - max(0, int(usage) - of_files))
    except ValueError:  # a kernel that writes them otherwise
        return None


def _address_space() -> str:
    """What a refusal may come from while memory is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if limit == resource.RLIM_INFINITY else f", and {limit / 2**20:.1f} MiB of address space (ulimit -v)"


class HostMemory:
    """`nbytes` bytes of private anonymous memory at `address`, zero at first, aligned to 4096 or more.

    huge_pages: ask the kernel for 2 MiB pages (the address is then aligned to 2 MiB); it may decline, costing speed.
    Views made from the address do not keep the memory alive: hold this object (as a Tensor's or Weight's `owner`).
    what: it is for, in errors. Raises CapacityError when the system refuses, ValueError when nbytes < 1.
    """

    def __init__(self, nbytes: int, huge_pages: bool = False, *, what: str = "memory") -> None:
        if nbytes < 1:
            raise ValueError(f"{what}: HostMemory needs at least 1 byte, got {nbytes}")
        alignment = HUGE_PAGE_BYTES if huge_pages and nbytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, nbytes + alignment - mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"{what}: the system refused {nbytes} bytes ({nbytes / 2**20:.1f} MiB) of host memory ({error}); "
                f"{available_memory() / 2**20:.1f} MiB are available{_address_space()}: "
                "use a smaller model or a shorter context (--ctx)"
            ) from error
        if alignment == HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        # The exported buffer pins the mapping: closing it needs this reference gone first.
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(mapping)
        self._mapping = mapping
        self.address = -(-ctypes.addressof(self._anchor) // alignment) * alignment
        self.nbytes = nbytes

    def close(self) -> None:
        """Give the memory back. Addresses into it are invalid afterwards. Closing twice is harmless."""
        self._anchor = None
        self._mapping.close()
