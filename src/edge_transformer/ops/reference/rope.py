"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) on half-split pairs (i, i + rotary_dim / 2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """x [R, heads, head_dim] turned by the angles of its rows, cos and sin [R, rotary_dim / 2]; the rest is kept."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
