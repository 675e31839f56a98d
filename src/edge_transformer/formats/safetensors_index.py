"""The index of a sharded safetensors model: which file holds which tensors."""

from __future__ import annotations

from pathlib import Path

from edge_transformer.errors import FormatError
from edge_transformer.formats.json_file import read_bounded
from edge_transformer.formats.json_scan import JsonScanner

MAX_INDEX_BYTES = 32 << 20  # far above what models have; it bounds what a hostile file can cost


def read_index(path: Path) -> dict[str, set[str]]:
    """The index's weight_map turned around: file name -> its tensors. Whether the files are there is not looked at.

    Raises FormatError when it is no index or names a file outside its folder.
    """
    scanner = JsonScanner(path, read_bounded(path, MAX_INDEX_BYTES), "the index")
    weight_map: dict[str, str] = {}
    for key in scanner.members():
        if key == "weight_map":
            weight_map = scanner.string_map()
        elif key == "metadata":
            scanner.flat_object()
        else:
            raise FormatError(path, f"has the unknown key {key[:200]!r} beside weight_map and metadata")
    scanner.end()
    if not weight_map:
        raise FormatError(path, "has no weight_map")
    by_file: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        # A shard lies in the folder itself; where a symlink there leads (a hub cache has them) is the user's business.
        if file_name != Path(file_name).name or not file_name.endswith(".safetensors") or "\0" in file_name:
            raise FormatError(path, f"is placed in {file_name[:200]!r}, which is no file of this folder", tensor=name)
        by_file.setdefault(file_name, set()).add(name)
    return by_file
