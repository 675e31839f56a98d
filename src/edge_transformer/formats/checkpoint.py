"""What both file readers give: named tensors lying in mapped files, and the file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_transformer.formats.weight import WeightFormat


class MappedFile(Protocol):
    """A read-only mapping of one file, kept for as long as a weight points into it."""

    path: Path
    nbytes: int
    address: int

    def check_unchanged(self) -> None:
        """Raise FileChangedError when size or mtime differ from when the file was opened, or a read of it faulted."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint. `shape` is outermost first (a matrix is (rows, cols), as in Hugging Face files)."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    file: MappedFile
    offset: int
    nbytes: int


class Checkpoint(Protocol):
    """A model's files. `container` is "safetensors" or "gguf"."""

    container: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, object]  # GGUF key/values; for safetensors the parsed config.json

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...
