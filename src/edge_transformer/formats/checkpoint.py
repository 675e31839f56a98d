"""What both file readers give: named tensors lying in mapped files, and the file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from edge_transformer.formats.weight import WeightFormat, WeightLayout


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
    """One tensor of a checkpoint. `shape` is outermost first (a matrix is (rows, cols), as in Hugging Face files).

    layout: of a matrix that lies in the file as weight planes, its rows in the order of use; None: as the container
    stores the format.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    file: MappedFile
    offset: int
    nbytes: int
    layout: WeightLayout | None = None


class Checkpoint(Protocol):
    """A model's files. `container` is "safetensors" or "gguf": whose names and metadata they have.

    quantization: of what `ete quantize` made (safetensors, whatever its names are), in words; None of other files.
    """

    container: str
    quantization: str | None
    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, object]  # GGUF key/values; for safetensors the parsed config.json

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


class MappedCheckpoint:
    """What both readers open: one file or more, and the tensors that lie in them. `metadata` as in Checkpoint."""

    def __init__(
        self,
        container: str,
        path: Path,
        files: Sequence[MappedFile],
        tensors: dict[str, TensorInfo],
        metadata: dict[str, object],
        quantization: str | None = None,
    ) -> None:
        self.container = container
        self.quantization = quantization
        self.path = path
        self._files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)

    def check_unchanged(self) -> None:
        """Raise FileChangedError when one of the files changed since it was opened."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Unmap all files. Addresses of tensors are invalid afterwards; metadata stays."""
        for file in self._files:
            file.close()
