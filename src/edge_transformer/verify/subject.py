"""The model that is verified: all of it or its first layers, on any executor, from one copy of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.core import Engine
from edge_transformer.engine.llm import ModelParts
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError
from edge_transformer.formats.weight import Weight
from edge_transformer.memory import available_memory
from edge_transformer.models.config import ModelSpec
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import Wishes
from edge_transformer.verify.oracle_backend import FrugalReference

if TYPE_CHECKING:
    from edge_transformer.cuda.runtime import Gpu

SPARE_BYTES = 512 << 20
"""Memory that the oracle leaves to everything else."""


class LentWeights:
    """The first layers of a model's weights, for an engine that must not close them; as HostWeights to an engine."""

    def __init__(self, weights: HostWeights, layers: int, released: Callable[[], None] = lambda: None) -> None:
        """`released` is called when a segment is given back."""
        self.embedding, self.head, self.final_norm = weights.embedding, weights.head, weights.final_norm
        self.vectors = weights.vectors[:layers]
        self._weights = weights
        self._released = released

    def layer(self, index: int) -> Mapping[str, Mapping[str, Weight]]:
        return self._weights.layer(index)

    def locked_ranges(self) -> list[tuple[int, int, bool]]:
        return self._weights.locked_ranges()

    def acquire(self, layer: int, segment: str) -> Mapping[str, Weight]:
        return self._weights.acquire(layer, segment)

    def release(self, layer: int, segment: str) -> None:
        self._weights.release(layer, segment)
        self._released()

    def close(self) -> None:
        """The weights stay with whom they belong to."""


class Subject:
    """The first `layers` layers of a model, then its last norm and output projection: itself, where they are all."""

    def __init__(self, parts: ModelParts, threads: int, layers: int | None = None) -> None:
        whole = parts.spec
        count = whole.config.num_layers if layers is None else layers
        self.threads = threads
        self.whole = count == whole.config.num_layers
        self.parts = parts
        self.spec = whole if self.whole else _first_layers(whole, count)

    @property
    def layers(self) -> int:
        return self.spec.config.num_layers

    @property
    def description(self) -> str:
        """How much of the model this is."""
        return f"first {self.layers} of {self.parts.spec.config.num_layers} layers"

    @property
    def parameters(self) -> int:
        """Of the layers' matrices."""
        return sum(
            _parameters(matrix.shape) for layer in self.spec.layers for s in layer.segments for matrix in s.matrices
        )

    @property
    def all_parameters(self) -> int:
        """With those of the embedding and the output projection."""
        vocabulary = {matrix.name: _parameters(matrix.shape) for matrix in (self.spec.embedding, self.spec.head)}
        return self.parameters + sum(vocabulary.values())

    def first(self, layers: int) -> Subject:
        """Only so many of its layers."""
        return Subject(self.parts, self.threads, min(layers, self.layers))

    @contextmanager
    def on_cpu(self, kv_dtype: DType = DType.F32, threads: int | None = None) -> Iterator[Engine]:
        """An engine on the CPU."""
        yield from self._open(CpuBackend(threads or self.threads), kv_dtype)

    @contextmanager
    def on_oracle(self) -> Iterator[Engine]:
        """An engine on numpy. Raises CapacityError where not even a segment's matrices fit in memory in fp32."""
        available = available_memory() - SPARE_BYTES
        if 6 * self.all_parameters < available:  # values, and some codes beside them while they are read
            yield from self._open(ReferenceBackend(), DType.F32)
            return
        segments = [sum(_parameters(m.shape) for m in s.matrices) for layer in self.spec.layers for s in layer.segments]
        needed = 8 * max(segments)
        if needed > available:
            raise CapacityError(
                f"numpy needs {needed / 2**30:.1f} GiB for a part of a layer in fp32, {available / 2**30:.1f} are free"
            )
        frugal = FrugalReference()
        yield from self._open(frugal, DType.F32, frugal.forget)

    @contextmanager
    def on_gpu(
        self, gpu: Gpu, wishes: Wishes, context: int, sequences: int, kv_dtype: DType, rows: int | None
    ) -> Iterator[Engine]:
        """An engine on a GPU, which it closes, with room for so many sequences and rows of a pass (None: its choice).

        Raises CapacityError where the wishes do not fit.
        """
        from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine

        weights = cast("HostWeights", LentWeights(self.parts.weights, self.layers))
        options = GpuOptions(wishes, context, sequences=sequences)
        host = CpuBackend(self.threads)
        more = {} if rows is None else {"max_rows": rows}
        try:
            engine, _ = open_gpu_engine(gpu, self.parts.checkpoint, self.spec, weights, host, kv_dtype, options, **more)
        except BaseException:
            host.close()
            gpu.close()
            raise
        try:
            yield engine
        finally:
            engine.close()

    def _open(self, backend: Backend, kv_dtype: DType, released: Callable[[], None] = lambda: None) -> Iterator[Engine]:
        weights = LentWeights(self.parts.weights, self.layers, released)
        try:
            engine = Engine(self.parts.checkpoint, self.spec, backend, weights, kv_dtype)
        except BaseException:
            backend.close()
            raise
        try:
            yield engine
        finally:
            engine.close()


def _parameters(shape: tuple[int, ...]) -> int:
    rows, cols = shape
    return rows * cols


def _first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    config = spec.config
    fewer = replace(
        config,
        num_layers=count,
        layer_windows=config.layer_windows[:count],
        layer_ropes=config.layer_ropes[:count],
        layer_kinds=config.layer_kinds[:count],
    )
    return replace(spec, config=fewer, layers=spec.layers[:count])
