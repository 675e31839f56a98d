"""Checkpoints in memory, to try configurations and tensors that no file was written for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.formats.weight import WeightFormat


@dataclass
class MemoryFile:
    """Stands for a mapped file: the bytes of one array."""

    array: npt.NDArray[np.generic]
    path: Path = Path("memory")

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class MemoryCheckpoint:
    """A Checkpoint made of arrays and a metadata mapping."""

    container: str
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, object]
    path: Path = Path("memory")

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


def tensor_info(
    name: str, array: npt.NDArray[np.generic], weight_format: WeightFormat = WeightFormat.F32
) -> TensorInfo:
    return TensorInfo(name, array.shape, weight_format, MemoryFile(array), 0, array.nbytes)


def checkpoint(
    container: str, metadata: Mapping[str, object], arrays: Mapping[str, npt.NDArray[np.generic]]
) -> MemoryCheckpoint:
    return MemoryCheckpoint(container, {name: tensor_info(name, array) for name, array in arrays.items()}, metadata)
