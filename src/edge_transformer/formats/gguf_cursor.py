"""Reading GGUF's primitive values one after another, never past the end and never more than the file can hold."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from edge_transformer.errors import FormatError
from edge_transformer.formats.mapping import MappedModelFile

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

MAX_NAME_BYTES = 65535  # keys, by the specification; tensor names are shorter still


class Cursor:
    """A position in a mapped file, moved on by each read. All reads raise FormatError at the end of the file."""

    def __init__(self, file: MappedModelFile) -> None:
        self.file = file
        self.position = 0
        self._bytes = file.view(0, file.nbytes).data

    @property
    def remaining(self) -> int:
        return len(self._bytes) - self.position

    def fail(self, reason: str) -> FormatError:
        """The error to raise for something wrong at this place."""
        return FormatError(self.file.path, f"{reason} (at byte {self.position})")

    def take(self, nbytes: int, what: str) -> memoryview:
        """The next `nbytes` bytes, shared with the mapping."""
        start = self._pass(nbytes, what)
        return self._bytes[start : self.position]

    def unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """The next values, as `form` (little-endian) lays them out."""
        return form.unpack_from(self._bytes, self._pass(form.size, what))

    def u32(self, what: str) -> int:
        (value,) = self.unpack(_U32, what)
        return int(value)

    def u64(self, what: str) -> int:
        (value,) = self.unpack(_U64, what)
        return int(value)

    def number(self, dtype: np.dtype[np.generic], what: str) -> int | float | bool:
        """One value of a numeric type or a bool, as a Python number."""
        data = self.take(dtype.itemsize, what)
        if dtype.kind == "b" and data[0] > 1:
            raise self.fail(f"{what} is a bool with the value {data[0]}")
        value: int | float | bool = np.frombuffer(data, dtype)[0].item()
        return value

    def string(self, what: str, limit: int) -> str:
        """A string of at most `limit` bytes."""
        nbytes = self.u64(what)
        if nbytes > limit:
            raise self.fail(f"{what} claims {nbytes} bytes, more than the {limit} that are accepted")
        try:
            return str(self.take(nbytes, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from error

    def _pass(self, nbytes: int, what: str) -> int:
        """Where the next `nbytes` bytes begin; the position is after them."""
        start = self.position
        if nbytes > len(self._bytes) - start:
            raise self.fail(f"ends inside {what}, which needs {nbytes} bytes where {self.remaining} are left")
        self.position = start + nbytes
        return start
