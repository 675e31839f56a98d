"""One door for model files: decides by what lies at a path which reader opens it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge_transformer.errors import FormatError
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.file_names import INDEX_FILE, SINGLE_FILE
from edge_transformer.formats.folder import list_folder
from edge_transformer.formats.gguf import open_gguf, split_paths
from edge_transformer.formats.gguf_reader import MAGIC

_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")  # torch.save: a zip archive, or a bare pickle


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file (any part of a split one), a .safetensors file, or a folder that holds either.

    A folder with safetensors is read as such, whatever else it holds. Raises FormatError when the files are corrupt,
    missing or of an unread kind; UnsupportedModelError for adapters, quantization_config and auto_map in config.json.
    """
    if not os.path.isdir(path) and _first_bytes(path) == MAGIC:  # os.path: False for names that no file can have
        return open_gguf(path)
    # Imported here, so that a GGUF file opens without the other reader.
    from edge_transformer.formats.safetensors import open_safetensors

    if os.path.isdir(path):
        if not os.path.exists(path / SINGLE_FILE) and not os.path.exists(path / INDEX_FILE):
            gguf = _only_gguf(path)
            if gguf is not None:
                return open_gguf(gguf)
        return open_safetensors(path)
    start = _first_bytes(path)
    if path.name.endswith(".safetensors"):
        return open_safetensors(path)
    if start.startswith(_PICKLE_STARTS):
        raise FormatError(
            path,
            "holds pickled weights, which can run code when they are loaded and are not read; convert them to "
            "safetensors (transformers: save_pretrained) or use a GGUF file",
        )
    raise FormatError(path, "is neither a GGUF nor a .safetensors file, nor a model folder")


def _first_bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise FormatError(path, "is not a regular file")
        with path.open("rb") as file:
            return file.read(4)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FormatError(path, f"cannot be opened: {error}") from error


def _only_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder, None without one. Raises FormatError when there are several."""
    found = [folder / name for name in list_folder(folder) if name.endswith(".gguf")]
    if not found:
        return None
    if set(split_paths(found[0])) < set(found):
        names = ", ".join(entry.name for entry in found[:5])
        raise FormatError(
            folder, f"holds several GGUF files ({names}{', ...' if len(found) > 5 else ''}); give one of them"
        )
    return found[0]
