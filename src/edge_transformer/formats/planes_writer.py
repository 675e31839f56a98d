"""Where everything lies in a file of weight planes that is to be written, and its header (formats/planes_file.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_transformer.formats.planes_file import (
    DIGEST_KEY,
    LAYOUT_KEY,
    LAYOUT_VERSION,
    PADDING_PREFIX,
    WEIGHT_PREFIX,
    header_digest,
    plane_name,
    weight_entry,
)
from edge_transformer.formats.weight import FORMATS, PLANE_ALIGNMENT, WeightFormat, WeightLayout, round_up

DATA_ALIGNMENT = 4096
"""Data begins at a multiple of this, so that a mapping of the file has it on a page of its own."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor that stays what safetensors knows: F32, F16 or BF16 of any shape."""

    format: WeightFormat
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FORMATS[self.format].file_block_bytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The first bytes of a file, where each tensor or matrix begins, and the bytes of the whole."""

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def plan_file(items: Sequence[tuple[str, WeightLayout | PlainTensor]], metadata: Mapping[str, str]) -> FilePlan:
    """A file of these, in this order, each from a multiple of 256 bytes on, with `metadata` in its header.

    Raises ValueError when two would have the same name.
    """
    strings = {LAYOUT_KEY: str(LAYOUT_VERSION), **metadata}
    tensors: dict[str, tuple[str, Sequence[int], int]] = {}
    entries: dict[str, object] = {"__metadata__": strings}
    starts: dict[str, int] = {}
    position = paddings = 0

    def add(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        nonlocal position
        if name in entries:
            raise ValueError(f"two tensors are called {name!r}")
        tensors[name] = dtype, shape, position
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes

    def pad() -> None:
        nonlocal paddings
        if gap := -position % PLANE_ALIGNMENT:
            add(f"{PADDING_PREFIX}{paddings}", "U8", [gap], gap)
            paddings += 1

    for name, item in items:
        if name in starts:
            raise ValueError(f"two tensors are called {name!r}")
        starts[name] = position
        if isinstance(item, PlainTensor):
            add(name, item.format.value, item.shape, item.nbytes)
            pad()
            continue
        strings[WEIGHT_PREFIX + name] = weight_entry(item)
        for spec, plane in zip(FORMATS[item.format].planes, item.planes, strict=True):
            add(plane_name(name, spec.name), "U8", [item.rows, plane.row_pitch], item.rows * plane.row_pitch)
            pad()
    strings[DIGEST_KEY] = header_digest(strings, tensors)
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    data_start = round_up(8 + len(text), DATA_ALIGNMENT)
    header = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
    return FilePlan(header, {name: data_start + start for name, start in starts.items()}, data_start + position)
