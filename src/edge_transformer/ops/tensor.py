"""Opaque handles to memory that an executor works on. Nothing here allocates or copies."""

from __future__ import annotations

import math
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from edge_transformer.memory import bytes_at


class DType(StrEnum):
    """Element types of tensors (weights have formats instead, see formats.weight)."""

    F32 = "f32"
    BF16 = "bf16"
    I32 = "i32"


ITEM_BYTES = {DType.F32: 4, DType.BF16: 2, DType.I32: 4}
_NUMPY_DTYPE: dict[DType, type[np.generic]] = {DType.F32: np.float32, DType.BF16: np.uint16, DType.I32: np.int32}


class Tensor:
    """A row-major array at `address`: shape, dtype, and the `owner` that keeps the memory alive."""

    __slots__ = ("address", "dtype", "owner", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.owner = owner

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows [start, stop) along the first dimension, sharing memory."""
        row_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        return Tensor(self.address + start * row_bytes, (stop - start, *self.shape[1:]), self.dtype, self.owner)

    def numpy(self) -> npt.NDArray[np.generic]:
        """A numpy view of host memory (bf16 as uint16). The view does not keep the owner alive."""
        return array_at(self.address, self.shape, _NUMPY_DTYPE[self.dtype])


def array_at(address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """A writable numpy view of raw host memory. The caller keeps the memory alive."""
    element = np.dtype(dtype)
    return bytes_at(address, math.prod(shape) * element.itemsize).view(element).reshape(shape)


def host_rows(tensor: Tensor, rows: int) -> npt.NDArray[np.float32]:
    """A view of the first `rows` rows of an f32 tensor in host memory."""
    return tensor.numpy()[:rows].view(np.float32)


def first_largest(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Of each row the index of its largest value, of equals the first; -1 where a value is NaN or infinite."""
    finite = np.isfinite(values).all(axis=1)
    return np.where(finite, values.argmax(axis=1), -1).astype(np.int32)


def tensor_of(array: npt.NDArray[np.generic]) -> Tensor:
    """A handle to a C-contiguous numpy array of float32, uint16 (bf16) or int32."""
    by_dtype = {np.dtype(np.float32): DType.F32, np.dtype(np.uint16): DType.BF16, np.dtype(np.int32): DType.I32}
    if not array.flags.c_contiguous:
        raise ValueError("tensor_of needs a C-contiguous array")
    return Tensor(array.ctypes.data, array.shape, by_dtype[array.dtype], array)
