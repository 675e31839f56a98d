"""Where weights come from: segments taken by acquire and given back by release, small vectors resident from the start.

On a host without a GPU a segment's matrices lie either in the mapped file (used in place) or, re-arranged into planes,
in one slab of anonymous memory. No executor reads a weight's bytes beyond its release (it may keep the Weight object to
know it again), so that the same calls can later be served from page-locked memory, a ring of slots, or a disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_transformer.errors import CapacityError
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.repack import read_vector, repack
from edge_transformer.formats.weight import (
    PLANE_ALIGNMENT,
    Weight,
    WeightLayout,
    in_place_layout,
    packed_layout,
    round_up,
)
from edge_transformer.hub.progress import Progress
from edge_transformer.memory import HostMemory, available_memory, free_swap
from edge_transformer.models.config import ModelSpec, TensorSpec, Transform
from edge_transformer.ops.tensor import Tensor, tensor_of


class WeightSource(Protocol):
    """What a pass takes weights from. `vectors[layer]` and `final_norm` stay valid; segments from `acquire` to
    `release`.
    """

    embedding: Weight
    head: Weight
    vectors: list[Mapping[str, Tensor]]
    final_norm: Tensor

    def acquire(self, layer: int, segment: str) -> Mapping[str, Weight]: ...

    def release(self, layer: int, segment: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Placement:
    """One matrix on its way into memory. `slab_offset` is None when it is used in place."""

    spec: TensorSpec
    info: TensorInfo
    layout: WeightLayout
    slab_offset: int | None


class HostWeights:
    """All weights of a model in host memory.

    `vectors[layer]` are the small f32 vectors by role. threads: how many re-arrange matrices at once. progress: called
    from these threads, one at a time; what it raises ends the loading. Raises CapacityError where the weights that are
    to be re-arranged are more than memory and swap hold.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, threads: int = 1, progress: Progress | None = None
    ) -> None:
        placements, slab_bytes = _place(checkpoint, spec)
        self._slab = _slab(checkpoint, slab_bytes) if slab_bytes else None
        self.slab_bytes = slab_bytes
        self.mapped_bytes = sum(item.layout.nbytes for item in placements.values() if item.slab_offset is None)
        self._mapped_files = [item.info.file for item in placements.values() if item.slab_offset is None]
        weights = self._fill(placements, threads, progress)
        self.embedding = weights[spec.embedding.name]
        self.head = weights[spec.head.name]
        self._segments: list[dict[str, Mapping[str, Weight]]] = [
            {
                segment.name: {matrix.role: weights[_key(matrix)] for matrix in segment.matrices}
                for segment in layer.segments
            }
            for layer in spec.layers
        ]
        self.vectors: list[Mapping[str, Tensor]] = [
            {vector.role: _read_vector(checkpoint, vector) for vector in layer.vectors} for layer in spec.layers
        ]
        self.final_norm = _read_vector(checkpoint, spec.final_norm)

    def acquire(self, layer: int, segment: str) -> Mapping[str, Weight]:
        """The matrices of a layer's segment by role, valid until `release`."""
        return self._segments[layer][segment]

    def release(self, layer: int, segment: str) -> None:
        """The segment taken by `acquire` is no longer read. Host memory has nothing to recycle."""

    def layer(self, index: int) -> Mapping[str, Mapping[str, Weight]]:
        """All matrices of a layer: by segment in order of use, then by role."""
        return self._segments[index]

    def locked_ranges(self) -> list[tuple[int, int, bool]]:
        """(address, bytes, read only) of the memory that matrices lie in: what a GPU's copies need page-locked."""
        ranges = {(file.address, file.nbytes, True) for file in self._mapped_files}
        if self._slab is not None:
            ranges.add((self._slab.address, self._slab.nbytes, False))
        return sorted(ranges)

    def close(self) -> None:
        """Give the re-arranged weights back. None of the weights may be read afterwards."""
        if self._slab is not None:
            self._slab.close()

    def _fill(self, placements: Mapping[str, _Placement], threads: int, progress: Progress | None) -> dict[str, Weight]:
        """All weights by key. Threads take a matrix each: matrices are many, and no thread waits for
        another.
        """
        weights: dict[str, Weight] = {}
        todo: list[_Placement] = []
        for key, item in placements.items():
            if item.slab_offset is None or self._slab is None:
                weights[key] = Weight(item.layout, item.info.file.address + item.info.offset, item.info.file)
            else:
                weights[key] = Weight(item.layout, self._slab.address + item.slab_offset, self._slab)
                todo.append(item)
        done, total = 0, sum(item.info.nbytes for item in todo)
        todo.reverse()
        failures: list[BaseException] = []
        lock = threading.Lock()

        def work() -> None:
            nonlocal done
            try:
                while not failures:
                    with lock:
                        if not todo:
                            return
                        item = todo.pop()
                    repack(item.info, item.layout, weights[_key(item.spec)].address, row_order(item.spec))
                    with lock:
                        done += item.info.nbytes
                        if progress is not None:
                            progress("loading weights", done, total)
            except BaseException as error:  # noqa: BLE001 - raised below, by the thread that waits
                failures.append(error)

        helpers = [threading.Thread(target=work, name="ete-weights") for _ in range(min(threads, len(todo)) - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if failures:
            raise failures[0]
        return weights


def _slab(checkpoint: Checkpoint, nbytes: int) -> HostMemory:
    """Memory for re-arranged weights. The system gives out more than it has, and ends a program when it is used."""
    available = available_memory() + free_swap()
    if nbytes > available:
        raise CapacityError(
            f"{checkpoint.path.name}: weights: {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of memory are needed, as they "
            f"are re-arranged when they are loaded; {available / 2**30:.2f} GiB are available: free memory or take a "
            "smaller model; a folder that ete quantize wrote needs none, as its weights are used where the file lies"
        )
    return HostMemory(nbytes, huge_pages=True, what="weights")


def _place(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[dict[str, _Placement], int]:
    """Every matrix of the model by key, in order of use, and the bytes of the slab for those not used in place."""
    matrices = [spec.embedding]
    matrices += [matrix for layer in spec.layers for segment in layer.segments for matrix in segment.matrices]
    matrices.append(spec.head)
    placements: dict[str, _Placement] = {}
    slab_bytes = 0
    for matrix in matrices:
        if _key(matrix) in placements:
            continue
        info = checkpoint.tensors[matrix.name]
        rows, cols = matrix.shape
        in_place = info.layout
        if in_place is None and matrix.transform is Transform.NONE and not matrix.parts:
            in_place = in_place_layout(info.format, rows, cols)
        if in_place is not None:
            placements[_key(matrix)] = _Placement(matrix, info, in_place, None)
            continue
        layout = packed_layout(info.format, rows, cols)
        placements[_key(matrix)] = _Placement(matrix, info, layout, slab_bytes)
        slab_bytes += round_up(layout.nbytes, PLANE_ALIGNMENT)
    return placements, slab_bytes


def _key(spec: TensorSpec) -> str:
    """Tells matrices apart: the name of the tensor, which the embedding and a tied head share; with the role where a
    tensor holds several.
    """
    return f"{spec.name} {spec.role}" if spec.parts else spec.name


def row_order(spec: TensorSpec) -> npt.NDArray[np.int64] | None:
    """Source row of each output row, None for the same order: GGUF stores rotary pairs next to each other, the engine
    rotates half-split pairs; some tensors hold the rows of several matrices.
    """
    if spec.parts:
        return np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in spec.parts])
    if spec.transform is not Transform.UNPERMUTE_ROPE:
        return None
    pairs = np.arange(spec.shape[0], dtype=np.int64).reshape(spec.heads, -1, 2)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _read_vector(checkpoint: Checkpoint, spec: TensorSpec) -> Tensor:
    values = read_vector(checkpoint.tensors[spec.name])
    if spec.transform is Transform.PLUS_ONE:
        values = np.float32(1) + values
    if spec.transform is Transform.NEGATIVE_EXP:
        values = -np.exp(values)
    order = row_order(spec)
    if order is not None:
        values = values[order]
    if values.ndim > 1:  # a convolution: [channels, width], whatever lies between in the file
        values = values.reshape(values.shape[0], values.shape[-1])
    return tensor_of(np.ascontiguousarray(values))
