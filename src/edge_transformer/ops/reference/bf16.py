"""bf16 as the upper half of a float32, in uint16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Nearest bf16, ties to even; overflow rounds to infinity; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, nearest).astype(np.uint16)


def bf16_to_float(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The exact float32 value of each bf16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
