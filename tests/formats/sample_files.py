"""Model files made byte by byte, so that a test can put any wrong number where it wants."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GGUF_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
}  # fmt: skip
"""name -> (type number, values of a block, bytes of a block), written down from ggml's documentation."""

VALUE_TYPES = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
    "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: object) -> bytes:
    """A metadata value of a numeric type, with its type number before it."""
    number, code = VALUE_TYPES[kind]
    return struct.pack("<I", number) + struct.pack(code, value)


def text_value(text: str | bytes) -> bytes:
    return struct.pack("<I", STRING) + gguf_string(text)


def string_array(texts: Sequence[str | bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(texts)) + b"".join(map(gguf_string, texts))


def number_array(kind: str, values: Sequence[object]) -> bytes:
    number, code = VALUE_TYPES[kind]
    return struct.pack("<IIQ", ARRAY, number, len(values)) + b"".join(struct.pack(code, value) for value in values)


@dataclass
class GgufTensor:
    """A tensor of a sample file. `shape` outermost first; offset None: the next free place."""

    name: str | bytes
    shape: tuple[int, ...]
    type_number: int
    data: bytes
    offset: int | None = None


def random_blocks(rng: np.random.Generator, name: str, rows: int, cols: int) -> bytes:
    _, block_values, block_bytes = GGUF_TYPES[name]
    return rng.integers(0, 256, rows * cols // block_values * block_bytes, np.uint8).tobytes()


def gguf_tensor(rng: np.random.Generator, name: str, type_name: str, *shape: int) -> GgufTensor:
    """A tensor of random bits."""
    data = random_blocks(rng, type_name, int(np.prod(shape[:-1])), shape[-1])
    return GgufTensor(name, shape, GGUF_TYPES[type_name][0], data)


def gguf_bytes(
    metadata: Sequence[tuple[str | bytes, bytes]] = (),
    tensors: Sequence[GgufTensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    magic: bytes = b"GGUF",
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """A whole GGUF file; the counts can be made to lie."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if key_count is None else key_count,
    )
    for key, value in metadata:
        head += gguf_string(key) + value
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        data += tensor.data
        head += gguf_string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.type_number, offset)
    return head + bytes(-len(head) % alignment) + data


def safetensors_bytes(header: Mapping[str, object] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A whole safetensors file; the header length can be made to lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
