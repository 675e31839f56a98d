"""Random weights as bytes: whole blocks of a GGUF format, planes of the engine's own layout, and small vectors.

Numbers of a block have mean 0 and the standard deviation that is asked, whatever the format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.weight import FORMATS, WeightFormat
from edge_transformer.models.config import TensorSpec, Transform

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 16 << 20

GAIN = 0.7
"""Standard deviation of a matrix, times the root of its columns."""

HEAD_GAIN = 3.0
"""The same of the output projection: logits of a standard deviation of 3, whose likeliest token has some 10 % among
250 000.
"""

INT8_DEVIATION = 42
NIBBLE_DEVIATION = 2.7


def deviation(tensor: TensorSpec) -> float:
    """Standard deviation of a matrix's numbers. Embeddings are of the size of what the layers add to them, or more."""
    if tensor.role == "embedding":
        return 1.0
    return float((HEAD_GAIN if tensor.role == "head" else GAIN) / tensor.shape[-1] ** 0.5)


def blocks_of(weight_format: WeightFormat, deviation: float, nbytes: int = BLOCK_BYTES) -> Bytes:
    """About `nbytes` bytes of whole blocks, of a file's layout. Their number is odd: where they are repeated in a
    matrix, rows begin elsewhere in them each time, and no two rows are the same.
    """
    count = nbytes // FORMATS[weight_format].file_block_bytes | 1
    return _BLOCKS[weight_format](np.random.default_rng(0), count, deviation).reshape(-1).view(np.uint8)


def plane_of(weight_format: WeightFormat, plane: str, deviation: float, nbytes: int = BLOCK_BYTES) -> Bytes:
    """About `nbytes` bytes of a plane of Q8_0, I8_ROW, Q4_0, I4_G64 or I4_G128, an odd number of cells of 16."""
    rng = np.random.default_rng(0)
    cells = nbytes // 16 | 1
    eight_bits = weight_format in (WeightFormat.Q8_0, WeightFormat.I8_ROW)
    if plane == "codes":
        return (_int8_codes(rng, cells, 16) if eight_bits else _nibbles(rng, cells, 16)).reshape(-1)
    size = deviation / (INT8_DEVIATION if eight_bits else NIBBLE_DEVIATION)
    if weight_format is WeightFormat.I8_ROW:
        scales = np.zeros((cells, 4), np.float32)  # one a row, rows being 16 bytes apart
        scales[:, 0] = rng.uniform(0.8, 1.2, cells) * size
        return scales.reshape(-1).view(np.uint8)
    return _half(rng, cells * 8, size).reshape(-1)


def vector_of(tensor: TensorSpec, index: int) -> npt.NDArray[np.float32]:
    """A small tensor as a file stores it. Norms multiply by 1, convolutions are random, a recurrent state forgets
    within some tokens or 1000 of them.
    """
    rng = np.random.default_rng(index)
    if tensor.role == "conv":
        return (rng.standard_normal(tensor.shape) * tensor.shape[-1] ** -0.5).astype(np.float32)
    if tensor.role == "decay":
        rate = rng.uniform(1, 16, tensor.shape)
        return (np.log(rate) if tensor.transform is Transform.NEGATIVE_EXP else -rate).astype(np.float32)
    if tensor.role == "dt_bias":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), tensor.shape))
        return np.log(np.expm1(step)).astype(np.float32)  # softplus makes it the step again
    return np.full(tensor.shape, 0 if tensor.transform is Transform.PLUS_ONE else 1, np.float32)


# ---- the numbers of each format; GGUF's block layouts


def bf16(values: npt.NDArray[np.float32]) -> Bytes:
    """Cut off to bf16."""
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).reshape(-1).view(np.uint8)


def _bf16(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    return bf16(rng.standard_normal(count, np.float32) * np.float32(deviation))


def _f16(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    return (rng.standard_normal(count, np.float32) * np.float32(deviation)).astype(np.float16).view(np.uint8)


def _q8_0(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    return np.hstack([_half(rng, count, deviation / INT8_DEVIATION), _int8_codes(rng, count, 32)])


def _q4_0(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    return np.hstack([_half(rng, count, deviation / NIBBLE_DEVIATION), _nibbles(rng, count, 16)])


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    bits = rng.integers(0, 256, (count, 192), np.uint8)  # all codes alike: 32 +- 18.5
    scales = rng.integers(6, 11, (count, 16), np.int8).view(np.uint8)
    return np.hstack([bits, scales, _half(rng, count, deviation / (18.5 * 8))])


def _int8_codes(rng: np.random.Generator, count: int, size: int) -> Bytes:
    codes = rng.standard_normal((count, size), np.float32) * INT8_DEVIATION
    return np.clip(np.rint(codes), -127, 127).astype(np.int8).view(np.uint8)


def _nibbles(rng: np.random.Generator, count: int, size: int) -> Bytes:
    """Two codes in each of `size` bytes: 8 and what is above or below it."""
    codes = rng.standard_normal((count, 2 * size), np.float32) * NIBBLE_DEVIATION + 8
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    return np.asarray(codes[:, :size] | codes[:, size:] << 4)


def _half(rng: np.random.Generator, count: int, size: float) -> Bytes:
    """Scales, uint8 [count, 2]: f16, from 0.8 to 1.2 times `size`."""
    return (rng.uniform(0.8, 1.2, (count, 1)) * size).astype(np.float16).view(np.uint8)


_BLOCKS: dict[WeightFormat, Callable[[np.random.Generator, int, float], Bytes]] = {
    WeightFormat.BF16: _bf16,
    WeightFormat.F16: _f16,
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q6_K: _q6_k,
}
