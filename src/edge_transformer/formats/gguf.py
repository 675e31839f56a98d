"""GGUF models of one file or several (`-00001-of-0000N.gguf`): opening any part opens all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from edge_transformer.errors import FormatError, UnsupportedModelError
from edge_transformer.formats.checkpoint import MappedCheckpoint, TensorInfo
from edge_transformer.formats.file_names import gguf_part_names, split_name
from edge_transformer.formats.gguf_reader import GgufPart, read_part
from edge_transformer.formats.mapping import MappedModelFile


def open_gguf(path: Path) -> MappedCheckpoint:
    """Open a GGUF file, version 2 or 3, or all parts of a split one; `metadata` is that of the first part.

    Raises FormatError for files that are corrupt, incomplete or of an unread kind, UnsupportedModelError for adapters.
    """
    part_paths = split_paths(path)
    files: list[MappedModelFile] = []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, object] = {}
    try:
        for index, part_path in enumerate(part_paths):
            file = MappedModelFile(part_path)
            files.append(file)
            part = read_part(file)
            _check_part(part_path, part, index, len(part_paths))
            for name, info in part.tensors.items():
                if name in tensors:
                    raise FormatError(part_path, f"is also in {tensors[name].file.path.name}", tensor=name)
                tensors[name] = info
            if index == 0:
                metadata = part.metadata
        _check_total(path, metadata, len(tensors))
        _refuse_adapter(path, metadata)
    except BaseException:
        for file in files:
            file.close()
        raise
    return MappedCheckpoint("gguf", path, files, tensors, metadata)


def split_paths(path: Path) -> list[Path]:
    """All parts of the model that file `path` belongs to, in order. Raises FormatError when one is missing."""
    part = split_name(path.name)
    if part is None or not path.name.endswith(".gguf"):
        return [path]
    stem, number, count = part
    if not 1 <= number <= count:
        raise FormatError(path, f"is named as part {number} of {count}")
    paths = [path.with_name(name) for name in gguf_part_names(stem, count)]
    for part_path in paths:
        if not os.path.exists(part_path):
            raise FormatError(part_path, "this part of a split model is missing; download it to the same folder")
    return paths


def _check_part(path: Path, part: GgufPart, index: int, count: int) -> None:
    """What the part says of itself agrees with its name."""
    said_count = part.metadata.get("split.count", 1 if count == 1 else None)
    said_index = part.metadata.get("split.no", 0 if count == 1 else None)
    if said_count in (0, 1) and count == 1:
        return
    if said_count != count:
        raise FormatError(
            path,
            f"has split.count {str(said_count)[:40]} where its name says {count}; parts of a split model keep their "
            "names (-00001-of-0000N.gguf)",
        )
    if said_index != index:
        raise FormatError(
            path, f"has split.no {str(said_index)[:40]} where its name says {index}; are the parts mixed up?"
        )


def _check_total(path: Path, metadata: Mapping[str, object], found: int) -> None:
    total = metadata.get("split.tensors.count", found)
    if total != found:
        raise FormatError(path, f"says that all parts hold {str(total)[:40]} tensors, but {found} were found")


def _refuse_adapter(path: Path, metadata: Mapping[str, object]) -> None:
    if metadata.get("general.type") == "adapter":
        raise UnsupportedModelError(
            f"{path}: general.type is 'adapter': an adapter (LoRA) is not a model by itself; merge it into its "
            "base model and convert the result to GGUF"
        )
