"""Arrays that end, or begin, at a page nobody may touch: a read or write past them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_PROT_NONE = 0
_LIBC = ctypes.CDLL(None, use_errno=True)


def fenced(values: npt.NDArray[np.generic], at_end: bool) -> npt.NDArray[np.generic]:
    """A copy of `values` whose last byte is followed (or first byte preceded) by a forbidden page."""
    pages = -(-values.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for forbidden in (start, start + (pages + 1) * mmap.PAGESIZE):
        if _LIBC.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(mmap.PAGESIZE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = mmap.PAGESIZE + (pages * mmap.PAGESIZE - values.nbytes if at_end else 0)
    copy = np.frombuffer(memory, values.dtype, values.size, offset).reshape(values.shape)
    copy[...] = values
    return copy
