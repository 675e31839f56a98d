"""Poisoned outputs between guard values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.tensor import DType, Tensor

GUARD_FLOATS = 33
GUARD_VALUE = np.float32(1234.5)


class Guarded:
    """A float32 output [rows, cols] full of NaN, aligned to a float only, between guards that `check` looks at."""

    def __init__(self, rows: int, cols: int) -> None:
        self._memory = np.full(rows * cols + 2 * GUARD_FLOATS, GUARD_VALUE)
        self.array: npt.NDArray[np.float32] = self._memory[GUARD_FLOATS:-GUARD_FLOATS].reshape(rows, cols)
        self.array[:] = np.nan
        self.tensor = Tensor(self.array.ctypes.data, (rows, cols), DType.F32, self._memory)

    def check(self) -> None:
        assert (self._memory[:GUARD_FLOATS] == GUARD_VALUE).all()
        assert (self._memory[-GUARD_FLOATS:] == GUARD_VALUE).all()
