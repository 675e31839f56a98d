"""The numbers of the GGUF format: tensor types by id, metadata value types, and arrays of strings.

Source: the GGUF specification and ggml's type list (github.com/ggml-org/ggml, docs/gguf.md, include/ggml.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.errors import FormatError
from edge_transformer.formats.weight import WeightFormat

TENSOR_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Every tensor type that has had a number, read or not, so that a refusal can name it."""

READ_TENSOR_TYPES: dict[int, WeightFormat] = {
    number: WeightFormat(name) for number, name in TENSOR_TYPE_NAMES.items() if name in set(WeightFormat)
}


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NUMBER_DTYPES: dict[ValueType, np.dtype[np.generic]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


class StringArray(Sequence[str]):
    """An array of strings of a GGUF file, decoded when looked at: a vocabulary of 10^5 strings opens in no time.

    `data` holds the strings as in the file (u64 length, bytes); starts[i] is where the bytes of string i begin, int64
    [count + 1]. Reading a string that is not UTF-8 raises FormatError.
    """

    __slots__ = ("_key", "_path", "data", "starts")

    def __init__(self, data: bytes, starts: npt.NDArray[np.int64], path: Path, key: str) -> None:
        self.data = data
        self.starts = starts
        self._path = path
        self._key = key

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        try:
            return self.data[self.starts[i] : self.starts[i + 1] - 8].decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(self._path, f"metadata {self._key}[{i}] is not UTF-8: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings, decoded at once."""
        try:
            return _native.decode_strings(self.data, len(self), self.starts.ctypes.data)
        except UnicodeDecodeError as error:
            raise FormatError(self._path, f"metadata {self._key} has a string that is not UTF-8: {error}") from error

    def __repr__(self) -> str:
        return f"StringArray({self._key}, {len(self)} strings)"
