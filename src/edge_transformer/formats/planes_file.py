"""safetensors files whose matrices are weight planes as the executors use them (docs/weight-layout.md).

Such a file is marked by its metadata: a layout version, and for each matrix an entry weight:NAME = "FORMAT ROWS COLS".
The planes of matrix NAME are the tensors NAME.codes, NAME.scales and so on, U8 [rows, row pitch], placed as
packed_layout says from an offset on that is a multiple of 256. So a matrix is used, and copied to a GPU, where it lies.
Rows are in the order in which they are used. Other tensors are as in any safetensors file. A digest of the header is in
its metadata: an entry that names another format of as many bytes would be noticed by nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_transformer.errors import FormatError
from edge_transformer.formats.weight import FORMATS, PLANE_ALIGNMENT, WeightFormat, WeightLayout, packed_layout

LAYOUT_VERSION = 1
LAYOUT_KEY = "edge_transformer.layout"
NAMES_KEY = "edge_transformer.names"
QUANTIZATION_KEY = "edge_transformer.quantization"
"""How the weights were quantized, in words for people."""

DIGEST_KEY = "edge_transformer.header_sha256"
"""Of header_digest. Files of the first days have none."""

WEIGHT_PREFIX = "weight:"
PADDING_PREFIX = "padding."
METADATA_FILE = "metadata.gguf"
"""Beside the file, where names are those of GGUF: the metadata of the GGUF file it was made from."""

QUANTIZATION_METHOD = "edge_transformer"
"""quant_method of the quantization_config in config.json."""

_WEIGHT = re.compile(r"(\w{1,20}) (\d{1,10}) (\d{1,10})")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of a header: dtype and shape as they stand there, and where it lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanarMatrix:
    """Where a matrix begins, and its planes from there."""

    offset: int
    layout: WeightLayout


def is_planes_file(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata of a safetensors header is that of such a file, of any version."""
    return LAYOUT_KEY in metadata


def plane_name(matrix: str, plane: str) -> str:
    """Name of the tensor that holds a plane of a matrix."""
    return f"{matrix}.{plane}"


def weight_entry(layout: WeightLayout) -> str:
    """What the metadata says of a matrix."""
    return f"{layout.format} {layout.rows} {layout.cols}"


def header_digest(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> str:
    """sha256 of what a header says, in hexadecimal. tensors: by name dtype, shape, and where it begins in the data."""
    strings = {key: value for key, value in metadata.items() if key != DIGEST_KEY}
    entries = {name: [dtype, list(shape), begin] for name, (dtype, shape, begin) in tensors.items()}
    text = json.dumps([strings, entries], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_header(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, RawTensor], data_start: int) -> None:
    """Raises FormatError where the header is not that which the digest in it was made of."""
    digest = metadata.get(DIGEST_KEY)
    entries = {name: (tensor.dtype, tensor.shape, tensor.offset - data_start) for name, tensor in tensors.items()}
    if digest is not None and digest != header_digest(metadata, entries):
        raise FormatError(
            path,
            "its header was changed after it was written: what it says of formats and places may be wrong. Copy the "
            "file again from where it came, or quantize the model again (ete quantize)",
        )


def planar_matrices(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, RawTensor]
) -> tuple[dict[str, PlanarMatrix], set[str]]:
    """The matrices of a file by name, and the names of all tensors they and the padding are made of.

    Raises FormatError for a layout version that is not read, and where a plane is missing or does not lie where the
    layout has it.
    """
    version = metadata[LAYOUT_KEY]
    if version != str(LAYOUT_VERSION):
        raise FormatError(
            path,
            f"has layout version {version[:40]!r} of quantized files; this program reads version {LAYOUT_VERSION}. "
            "Quantize the model again (ete quantize), or use the program's version that made the file",
        )
    taken = {name for name in tensors if name.startswith(PADDING_PREFIX)}
    matrices: dict[str, PlanarMatrix] = {}
    for key, entry in metadata.items():
        if not key.startswith(WEIGHT_PREFIX):
            continue
        name = key.removeprefix(WEIGHT_PREFIX)
        layout = _read_entry(path, name, entry)
        names = [plane_name(name, spec.name) for spec in FORMATS[layout.format].planes]
        matrices[name] = _locate(path, name, layout, [tensors.get(plane) for plane in names], names)
        taken.update(names)
    return matrices, taken


def _read_entry(path: Path, name: str, entry: str) -> WeightLayout:
    match = _WEIGHT.fullmatch(entry)
    if match is None or match[1] not in set(WeightFormat):
        raise FormatError(path, f"is described as {entry[:80]!r}, not as FORMAT ROWS COLUMNS", tensor=name)
    try:
        return packed_layout(WeightFormat(match[1]), int(match[2]), int(match[3]))
    except ValueError as error:
        raise FormatError(path, f"is described as {entry!r}: {error}", tensor=name) from error


def _locate(
    path: Path, name: str, layout: WeightLayout, planes: list[RawTensor | None], names: list[str]
) -> PlanarMatrix:
    first = planes[0]
    start = 0 if first is None else first.offset
    if start % PLANE_ALIGNMENT:
        raise FormatError(path, f"begins at byte {start}, no multiple of {PLANE_ALIGNMENT}", tensor=name)
    for tensor, plane, of_plane in zip(planes, layout.planes, names, strict=True):
        if tensor is None:
            raise FormatError(path, f"its plane {of_plane!r} is missing", tensor=name)
        expected = RawTensor("U8", (layout.rows, plane.row_pitch), start + plane.offset, layout.rows * plane.row_pitch)
        if tensor != expected:
            raise FormatError(
                path,
                f"its plane {of_plane!r} is {tensor.dtype} {list(tensor.shape)} at byte {tensor.offset}; layout "
                f"{LAYOUT_VERSION} has {expected.dtype} {list(expected.shape)} at {expected.offset}",
                tensor=name,
            )
    return PlanarMatrix(start, layout)
