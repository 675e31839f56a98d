"""From the bytes of a file to what the executors use: weight planes in anonymous memory, and small float32 vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer._native import ThreadPool
from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.formats.weight import WeightLayout


def repack(
    info: TensorInfo,
    layout: WeightLayout,
    destination: int,
    pool: ThreadPool | None = None,
    row_order: npt.NDArray[np.int64] | None = None,
) -> None:
    """Write the planes of matrix `info` ([rows, cols] as in `layout`) at address `destination`, bit for bit.

    destination: layout.nbytes writable bytes, 256-aligned. Padding of rows and planes is not written.
    row_order: int64 [rows]; output row r comes from source row row_order[r] (None: same order).
    The source's whole pages are released afterwards. The GIL is released meanwhile.
    """
    raise NotImplementedError


def read_vector(info: TensorInfo) -> npt.NDArray[np.float32]:
    """All values of a tensor of any format as a fresh float32 array of its shape."""
    raise NotImplementedError
