"""A model file mapped read-only into memory, guarded against files that change or shrink under the mapping."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.errors import FileChangedError, FormatError


class MappedModelFile:
    """The bytes of one file at `address`, for as long as this object is open (implements checkpoint.MappedFile).

    Reading past the end of a file that was truncated after opening gives zeros, and `check_unchanged` then raises.
    Raises FormatError when the file cannot be opened, is empty or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FormatError(path, f"cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(path, "is not a regular file")
            if status.st_size == 0:
                raise FormatError(path, "is empty")
            try:
                mapping = mmap.mmap(self._descriptor, status.st_size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise FormatError(path, f"cannot be mapped into memory: {error}") from error
            self._size_and_mtime = (status.st_size, status.st_mtime_ns)
            self._mapping: mmap.mmap | None = mapping
            self.nbytes = status.st_size
            self.address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
            self._guard = _native.guard_range(self.address, self.nbytes)
            if self._guard < 0:
                raise FormatError(path, "too many files are mapped at once (4096); close some models first")
        except FormatError:
            os.close(self._descriptor)
            raise
        # The guard goes when the memory does, which is later than `close` while views are alive.
        self._unguard = weakref.finalize(mapping, _native.unguard_range, self._guard)
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)

    def check_unchanged(self) -> None:
        """Raise FileChangedError when size or mtime differ from those at opening, or a read of it has faulted."""
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != self._size_and_mtime:
            size = self._size_and_mtime[0]
            how = (
                f"from {size} to {status.st_size} bytes" if status.st_size != size else "(its modification time moved)"
            )
            raise FileChangedError(self.path, f"the file changed {how} while it was in use; load the model again")
        if _native.guard_faulted(self._guard):
            raise FileChangedError(
                self.path, "a part of the file could not be read while it was in use (truncated, or a failing disk)"
            )

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + nbytes) as a read-only array that shares, and keeps alive, the mapping."""
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + nbytes} of {self.nbytes}")
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def release(self, offset: int, nbytes: int) -> None:
        """Tell the kernel that the whole pages inside these bytes are not needed any more; they can be read again."""
        if self._mapping is None:
            return
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        count = (offset + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if count > 0:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, count)

    def close(self) -> None:
        """Unmap the file; while views of it are alive, the memory goes with the last one. Closing twice is harmless."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        self._close_descriptor()
        try:
            mapping.close()
        except BufferError:
            return  # a view holds the mapping, and with it the guard
        self._unguard()
