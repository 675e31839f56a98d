"""One GGUF file, version 2 or 3: metadata and tensor index. Every count is bounded by what the file can hold."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from edge_transformer import _native
from edge_transformer.errors import FormatError
from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.formats.gguf_cursor import MAX_NAME_BYTES, Cursor
from edge_transformer.formats.gguf_types import (
    NUMBER_DTYPES,
    READ_TENSOR_TYPES,
    TENSOR_TYPE_NAMES,
    StringArray,
    ValueType,
)
from edge_transformer.formats.mapping import MappedModelFile
from edge_transformer.formats.weight import FORMATS, WeightFormat

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Far above what models have; they bound what a hostile file can make us build out of few bytes.
MAX_KEYS = 16_384
MAX_TENSORS = 32_768
MAX_ARRAY_DEPTH = 4
MAX_NESTED_ARRAYS = 4_096
MAX_DIMENSIONS = 4
# Of an entry of the tensor index, by its dimensions: the sizes, the type, the offset.
_ENTRIES = tuple(struct.Struct(f"<{dimensions}QIQ") for dimensions in range(MAX_DIMENSIONS + 1))
MAX_ALIGNMENT = 1 << 20
SMALL_STRING_BYTES = 1 << 20  # strings outside arrays may take this much in all, or a quarter of the file


@dataclass(frozen=True, slots=True)
class GgufPart:
    """What one file holds. Metadata values: int, float, bool, str, numpy array, StringArray, list (nested arrays)."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_part(file: MappedModelFile) -> GgufPart:
    """Parse one mapped file. Raises FormatError, FileChangedError."""
    try:
        part = _Reader(file).read()
    except FormatError:
        file.check_unchanged()  # a file that shrank is not a corrupt one
        raise
    file.check_unchanged()
    return part


def metadata_section(file: MappedModelFile) -> bytes:
    """The file's metadata as a GGUF file of its own, without tensors. Raises FormatError, FileChangedError."""
    reader = _Reader(file)
    _, key_count = reader._read_counts()
    start = reader.cursor.position
    reader._read_metadata(key_count)
    section = file.view(start, reader.cursor.position - start).tobytes()
    version = file.view(4, 4).tobytes()
    file.check_unchanged()
    return MAGIC + version + struct.pack("<QQ", 0, key_count) + section


class _Reader:
    """The parse of one file: a cursor and the budgets that bound it."""

    def __init__(self, file: MappedModelFile) -> None:
        self.file = file
        self.cursor = Cursor(file)
        self.string_budget = max(SMALL_STRING_BYTES, file.nbytes // 4)
        self.nested_arrays = 0

    def read(self) -> GgufPart:
        tensor_count, key_count = self._read_counts()
        metadata = self._read_metadata(key_count)
        tensors = self._read_tensors(tensor_count, self._alignment(metadata))
        return GgufPart(metadata, tensors)

    def _read_counts(self) -> tuple[int, int]:
        cursor = self.cursor
        if bytes(cursor.take(4, "the magic number")) != MAGIC:
            raise FormatError(self.file.path, "is not a GGUF file (it does not begin with GGUF)")
        version = cursor.u32("the version")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                raise FormatError(self.file.path, "is a big-endian GGUF file; only little-endian ones are read")
            raise FormatError(self.file.path, f"is GGUF version {version}; versions 2 and 3 are read")
        tensor_count = cursor.u64("the tensor count")
        key_count = cursor.u64("the metadata count")
        if tensor_count > MAX_TENSORS:
            raise cursor.fail(f"claims {tensor_count} tensors; at most {MAX_TENSORS} are accepted")
        if key_count > MAX_KEYS:
            raise cursor.fail(f"claims {key_count} metadata keys; at most {MAX_KEYS} are accepted")
        return tensor_count, key_count

    def _read_metadata(self, count: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for index in range(count):
            key = self.cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
            if not key or key in metadata:
                raise self.cursor.fail(f"metadata key {key[:200]!r} is {'there twice' if key else 'empty'}")
            metadata[key] = self._read_value(self._value_type(key), key, 0)
        return metadata

    def _value_type(self, key: str) -> ValueType:
        number = self.cursor.u32(f"the type of metadata {key[:200]!r}")
        try:
            return ValueType(number)
        except ValueError:
            raise self.cursor.fail(f"metadata {key[:200]!r} has the unknown value type {number}") from None

    def _read_value(self, value_type: ValueType, key: str, depth: int) -> object:
        what = f"metadata {key[:200]!r}"
        if value_type is ValueType.ARRAY:
            return self._read_array(key, depth)
        if value_type is ValueType.STRING:
            text = self.cursor.string(what, self.string_budget)
            self.string_budget -= len(text)
            return text
        return self.cursor.number(NUMBER_DTYPES[value_type], what)

    def _read_array(self, key: str, depth: int) -> object:
        if depth == MAX_ARRAY_DEPTH:
            raise self.cursor.fail(f"metadata {key[:200]!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        what = f"metadata {key[:200]!r}"
        element = self._value_type(key)
        count = self.cursor.u64(what)
        if element is ValueType.STRING:
            return self._read_strings(key, count)
        if element is ValueType.ARRAY:
            self.nested_arrays += count
            if self.nested_arrays > MAX_NESTED_ARRAYS:
                raise self.cursor.fail(f"{what} brings the nested arrays above the {MAX_NESTED_ARRAYS} accepted")
            return [self._read_value(element, key, depth + 1) for _ in range(count)]
        dtype = NUMBER_DTYPES[element]
        data = self.cursor.take(count * dtype.itemsize, what)
        if element is ValueType.BOOL and count and int(np.frombuffer(data, np.uint8).max()) > 1:
            raise self.cursor.fail(f"{what} has a bool that is neither 0 nor 1")
        return np.frombuffer(data, dtype).copy()

    def _read_strings(self, key: str, count: int) -> StringArray:
        cursor = self.cursor
        if count > cursor.remaining // 8:
            raise cursor.fail(f"metadata {key[:200]!r} claims {count} strings, more than the rest of the file can hold")
        starts = np.empty(count + 1, np.int64)
        address = self.file.address + cursor.position
        consumed = _native.scan_strings(address, cursor.remaining, count, starts.ctypes.data)
        if consumed < 0:
            raise cursor.fail(
                f"metadata {key[:200]!r}: string {-1 - consumed} of {count} reaches past the end of the file"
            )
        return StringArray(bytes(cursor.take(consumed, "an array of strings")), starts, self.file.path, key)

    def _alignment(self, metadata: dict[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            reason = f"has general.alignment {str(alignment)[:40]}, not a power of two from 8 to {MAX_ALIGNMENT}"
            raise FormatError(self.file.path, reason)
        return alignment

    def _read_tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        # The index says where tensors lie from the start of the data, which is known at the index's end.
        entries = [self._read_tensor(index, alignment) for index in range(count)]
        data_start = -(-self.cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, nbytes in entries:
            if name in tensors:
                raise FormatError(self.file.path, "is there twice", tensor=name)
            start = data_start + offset
            if start + nbytes > self.file.nbytes:
                reason = f"lies at bytes {start} to {start + nbytes} of a file of {self.file.nbytes}"
                raise FormatError(self.file.path, reason, tensor=name)
            tensors[name] = TensorInfo(name, shape, kind, self.file, start, nbytes)
        self._check_overlaps(tensors)
        return tensors

    def _read_tensor(self, index: int, alignment: int) -> tuple[str, tuple[int, ...], WeightFormat, int, int]:
        """One entry of the index: name, shape, format, offset from the start of the data, bytes."""
        cursor = self.cursor
        name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        if not name:
            raise cursor.fail(f"tensor {index} has an empty name")
        what = f"tensor {name[:200]!r}"
        dimensions = cursor.u32(what)
        if dimensions > MAX_DIMENSIONS:
            reason = f"has {dimensions} dimensions; at most {MAX_DIMENSIONS} are possible"
            raise FormatError(self.file.path, reason, tensor=name)
        *sizes, number, offset = cursor.unpack(_ENTRIES[dimensions], what)
        if number not in READ_TENSOR_TYPES:
            known = TENSOR_TYPE_NAMES.get(number, f"number {number}, which is unknown")
            readable = ", ".join(READ_TENSOR_TYPES.values())
            reason = f"has type {known}; {readable} are read (use a file of the model in one of these)"
            raise FormatError(self.file.path, reason, tensor=name)
        spec = FORMATS[READ_TENSOR_TYPES[number]]
        values = math.prod(sizes)
        if not 0 < values < 1 << 63:
            raise FormatError(self.file.path, f"has the impossible shape {sizes[::-1]}", tensor=name)
        row = sizes[0] if sizes else 1
        if row % spec.block_cols:
            reason = f"has rows of {row} values; {spec.format} needs multiples of {spec.block_cols}"
            raise FormatError(self.file.path, reason, tensor=name)
        if offset % alignment:
            raise FormatError(self.file.path, f"has offset {offset}, no multiple of {alignment}", tensor=name)
        nbytes = values // spec.block_cols * spec.file_block_bytes
        return name, tuple(reversed(sizes)), spec.format, offset, nbytes

    def _check_overlaps(self, tensors: dict[str, TensorInfo]) -> None:
        position = 0
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < position:
                raise FormatError(self.file.path, "overlaps the tensor before it", tensor=info.name)
            position = info.offset + info.nbytes
