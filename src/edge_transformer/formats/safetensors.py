"""safetensors, a single file or shards with an index: header and index to named tensors in mapped files.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data; the
tensors cover the data exactly (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from edge_transformer.errors import FormatError, UnsupportedModelError
from edge_transformer.formats.checkpoint import MappedCheckpoint, TensorInfo
from edge_transformer.formats.file_names import INDEX_FILE, PICKLED_SUFFIXES, SINGLE_FILE, split_name
from edge_transformer.formats.folder import list_folder
from edge_transformer.formats.json_file import read_settings
from edge_transformer.formats.json_scan import JsonScanner
from edge_transformer.formats.mapping import MappedModelFile
from edge_transformer.formats.planes_file import (
    METADATA_FILE,
    NAMES_KEY,
    QUANTIZATION_KEY,
    QUANTIZATION_METHOD,
    RawTensor,
    check_header,
    is_planes_file,
    planar_matrices,
)
from edge_transformer.formats.safetensors_index import read_index
from edge_transformer.formats.weight import FORMATS, WeightFormat

# Far above what models have; they bound what a hostile file can cost.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 65_536
SMALL_HEADER_BYTES = 1 << 20  # up to here a header may be any part of its file, beyond it only a 16th
MAX_DIMENSIONS = 8

_READ_DTYPES = {"F32": WeightFormat.F32, "F16": WeightFormat.F16, "BF16": WeightFormat.BF16}
_ITEM_BYTES = {dtype: FORMATS[known].file_block_bytes for dtype, known in _READ_DTYPES.items()} | {"U8": 1}


def open_safetensors(path: Path) -> MappedCheckpoint:
    """Open a model folder (model.safetensors, or model.safetensors.index.json and its shards) or one file.

    `metadata` is the parsed config.json beside them ({} without one).

    Raises FormatError for files that are corrupt, missing, or hold a dtype other than F32, F16, BF16;
    UnsupportedModelError for adapters, quantization_config and auto_map.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or path.name.startswith("adapter_"):
        _refuse_adapter(folder)
    metadata = _read_config(folder)
    if not path.is_dir():
        shard = split_name(path.name)
        if shard is not None and shard[2] > 1:
            raise FormatError(path, f"is one of {shard[2]} shards; give the folder {folder} instead")
        return _open_files(path, {path.name: None}, folder, metadata)
    if os.path.exists(folder / SINGLE_FILE):
        return _open_files(path, {SINGLE_FILE: None}, folder, metadata)
    if os.path.exists(folder / INDEX_FILE):
        return _open_files(path, _read_index(folder / INDEX_FILE), folder, metadata)
    raise _no_weights(folder)


def _open_files(
    path: Path, expected: Mapping[str, set[str] | None], folder: Path, metadata: dict[str, object]
) -> MappedCheckpoint:
    """Open the named files; `expected` has the tensors that the index places in each (None: no index)."""
    files: list[MappedModelFile] = []
    headers: list[Header] = []
    tensors: dict[str, TensorInfo] = {}
    container = "safetensors"
    try:
        for file_name, names in expected.items():
            file = MappedModelFile(folder / file_name)
            files.append(file)
            header = read_header(file)
            headers.append(header)
            for name, info in header.tensors.items():
                if name in tensors:
                    raise FormatError(file.path, f"is also in {tensors[name].file.path.name}", tensor=name)
                if names is not None and name not in names:
                    raise FormatError(file.path, f"is not placed in this file by {INDEX_FILE}", tensor=name)
                tensors[name] = info
            if names is not None and (missing := names - tensors.keys()):
                raise FormatError(
                    file.path, f"is placed in this file by {INDEX_FILE}, but not there", tensor=min(missing)
                )
        if _claims_planes(metadata) and not any(is_planes_file(header.metadata) for header in headers):
            raise FormatError(
                folder / "config.json",
                "says that the model was quantized by ete quantize, but its weights were not; restore the original "
                "config.json",
            )
        if _claims_planes(metadata):
            del metadata["quantization_config"]
        if any(header.metadata.get(NAMES_KEY) == "gguf" for header in headers):
            container, metadata = "gguf", _read_gguf_metadata(folder / METADATA_FILE, files)
    except BaseException:
        for file in files:
            file.close()
        raise
    quantization = next((_quantization(header.metadata) for header in headers if is_planes_file(header.metadata)), None)
    return MappedCheckpoint(container, path, files, tensors, metadata, quantization)


def _quantization(metadata: Mapping[str, str]) -> str:
    """What the file says, fit to be shown at a terminal."""
    text = metadata.get(QUANTIZATION_KEY, "")[:80]
    return text if text and text.isprintable() else "unknown"


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a file says: its tensors, and the strings of its __metadata__."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(file: MappedModelFile) -> Header:
    """The header of one file, tensors in its order. Raises FormatError, FileChangedError."""
    try:
        header = _parse_header(file)
    except FormatError:
        file.check_unchanged()  # a file that shrank is not a corrupt one
        raise
    file.check_unchanged()
    return header


def _parse_header(file: MappedModelFile) -> Header:
    path = file.path
    if file.nbytes < 8:
        raise FormatError(path, f"is {file.nbytes} bytes long, too short for a safetensors file")
    length = int.from_bytes(file.view(0, 8).tobytes(), "little")
    # Real headers are a thousandth of their file. The bound keeps what parsing takes below the size of the file.
    limit = min(file.nbytes - 8, MAX_HEADER_BYTES, max(SMALL_HEADER_BYTES, file.nbytes // 16))
    if length > limit:
        raise FormatError(path, f"its header claims {length} bytes, of which a file of {file.nbytes} can have {limit}")
    scanner = JsonScanner(path, file.view(8, length).tobytes(), "the header")
    data_start = 8 + length
    metadata: dict[str, str] = {}
    tensors: dict[str, RawTensor] = {}
    for name in scanner.members():
        if name == "__metadata__":
            metadata = scanner.string_map()
            continue
        if len(tensors) == MAX_TENSORS:
            raise FormatError(path, f"has more than the {MAX_TENSORS} tensors that are accepted in one file")
        tensors[name] = _read_entry(file, data_start, name, scanner.flat_object())
    scanner.end()
    _check_coverage(path, data_start, file.nbytes, tensors)
    found: dict[str, TensorInfo] = {}
    planes: set[str] = set()
    if is_planes_file(metadata):
        matrices, planes = planar_matrices(path, metadata, tensors)
        for name, matrix in matrices.items():
            layout = matrix.layout
            shape = (layout.rows, layout.cols)
            found[name] = TensorInfo(name, shape, layout.format, file, matrix.offset, layout.nbytes, layout)
    for name, raw in tensors.items():
        if name in planes:
            continue
        if raw.dtype not in _READ_DTYPES:
            reason = f"has dtype {raw.dtype[:40]}; F32, F16 and BF16 are read (convert the checkpoint to one of these)"
            raise FormatError(path, reason, tensor=name)
        if name in found:
            raise FormatError(path, "is there as a tensor and as planes", tensor=name)
        found[name] = TensorInfo(name, raw.shape, _READ_DTYPES[raw.dtype], file, raw.offset, raw.nbytes)
    if is_planes_file(metadata):
        check_header(path, metadata, tensors, data_start)
    return Header(found, metadata)


def _read_entry(file: MappedModelFile, data_start: int, name: str, entry: dict[str, object]) -> RawTensor:
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(file.path, "its header entry does not have exactly dtype, shape, data_offsets", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        reason = f"has dtype {str(dtype)[:40]}; F32, F16 and BF16 are read (convert the checkpoint to one of these)"
        raise FormatError(file.path, reason, tensor=name)
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise FormatError(file.path, f"has the shape {str(shape)[:80]}, not up to {MAX_DIMENSIONS} sizes", tensor=name)
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(file.path, f"has data_offsets {str(offsets)[:80]}, not a begin and an end", tensor=name)
    begin, end = offsets
    if not begin <= end <= file.nbytes - data_start:
        reason = f"lies at bytes {begin} to {end} of the data, of which there are {file.nbytes - data_start}"
        raise FormatError(file.path, reason, tensor=name)
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if nbytes != end - begin:
        reason = f"shape {shape} of {dtype} needs {nbytes} bytes, the header gives it {end - begin}"
        raise FormatError(file.path, reason, tensor=name)
    return RawTensor(dtype, tuple(shape), data_start + begin, nbytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _check_coverage(path: Path, data_start: int, data_end: int, tensors: dict[str, RawTensor]) -> None:
    """The tensors follow one another from data_start to data_end, without overlap or hole."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < position:
            raise FormatError(path, "overlaps the tensor before it", tensor=name)
        if info.offset > position:
            raise FormatError(path, f"there are {info.offset - position} unexplained bytes before it", tensor=name)
        position += info.nbytes
    if position != data_end:
        raise FormatError(path, f"{data_end - position} bytes at the end belong to no tensor")


def _read_index(path: Path) -> dict[str, set[str]]:
    """The shards that the index names, all of which are there, and their tensors."""
    by_file = read_index(path)
    for file_name in by_file:
        if not os.path.isfile(path.parent / file_name):  # unlike Path.is_file, False for names no file can have
            raise FormatError(path, f"names the shard {file_name[:200]!r}, which is missing; download the model again")
    return by_file


def _read_config(folder: Path) -> dict[str, object]:
    """config.json of a folder ({} when there is none), without the settings that nothing here can honour."""
    path = folder / "config.json"
    if not os.path.exists(path):
        return {}
    config = read_settings(path)
    parts = {"": config, "text_config.": config.get("text_config")}
    for prefix, part in parts.items():
        if not isinstance(part, dict):
            continue
        if (quantization := part.get("quantization_config")) and (prefix or not _claims_planes(part)):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise UnsupportedModelError(
                f"{path}: {prefix}quantization_config (method {str(method)[:40]!r}) is not supported; use the model's "
                "unquantized weights, or a GGUF file of it"
            )
        if part.get("auto_map"):
            raise UnsupportedModelError(
                f"{path}: {prefix}auto_map asks for Python code that comes with the model, which is never run; use a "
                "version of the model that transformers loads without trust_remote_code, or a GGUF file of it"
            )
    return config


def _claims_planes(config: Mapping[str, object]) -> bool:
    """Whether config.json says that `ete quantize` made the weights beside it (which say the rest)."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANTIZATION_METHOD


def _read_gguf_metadata(path: Path, files: list[MappedModelFile]) -> dict[str, object]:
    """The metadata of a model whose tensors have GGUF's names. The file joins `files`, to be watched with them."""
    from edge_transformer.formats.gguf_reader import read_part

    file = MappedModelFile(path)
    files.append(file)
    part = read_part(file)
    if part.tensors:
        raise FormatError(path, f"holds {len(part.tensors)} tensors, where the metadata of a quantized model belongs")
    return part.metadata


def _refuse_adapter(folder: Path) -> None:
    if os.path.exists(folder / "adapter_config.json"):
        raise UnsupportedModelError(
            f"{folder}: adapter_config.json: an adapter (LoRA) is not a model by itself; merge it into its base model "
            "(peft: merge_and_unload, then save_pretrained) and give that folder"
        )


def _no_weights(folder: Path) -> FormatError:
    names = list_folder(folder)
    if pickled := [name for name in names if name.endswith(PICKLED_SUFFIXES)]:
        return FormatError(
            folder,
            f"has only pickled weights ({pickled[0]}), which can run code when they are loaded and are not read; "
            "convert them to safetensors (transformers: save_pretrained) or use a GGUF file",
        )
    if others := [name for name in names if name.endswith(".safetensors")]:
        return FormatError(
            folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}, but {others[0]}: give that file's path"
        )
    return FormatError(folder, f"has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} nor a .gguf file")
