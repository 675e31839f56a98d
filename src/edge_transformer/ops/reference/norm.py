"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def rmsnorm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    mean_square: Floats = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    normalized: Floats = x / np.sqrt(mean_square + np.float32(eps), dtype=np.float32)
    return normalized * weight
