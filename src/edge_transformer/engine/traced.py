"""The parts of an engine that tell a timeline what the CPU does: passes, segments, and the ops computed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.timeline import DECODE_PASS, LOGITS, PROMPT_PASS, Timeline
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine, PassResult
from edge_transformer.engine.kv import RecurrentMemory, TileMemory
from edge_transformer.engine.weights import WeightSource
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.weight import Weight
from edge_transformer.models.config import ModelSpec
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType, Tensor


class TracedEngine(Engine):
    """An engine whose passes are spans of `timeline`, which starts with the first of them."""

    def __init__(
        self,
        timeline: Timeline,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        backend: Backend,
        weights: WeightSource,
        kv_dtype: DType,
        max_rows: int,
        tile_memory: TileMemory,
        state_memory: RecurrentMemory | None,
        logit_rows: int,
    ) -> None:
        self._timeline = timeline
        traced = TracedWeights(weights, timeline)
        super().__init__(checkpoint, spec, backend, traced, kv_dtype, max_rows, tile_memory, state_memory, logit_rows)

    def step(self, chunks: AbstractSequence[Chunk], cancelled: Callable[[], bool] | None = None) -> PassResult | None:
        self._timeline.start()
        decodes = all(chunk.kind == "decode" for chunk in chunks)
        with self._timeline.host(DECODE_PASS if decodes else PROMPT_PASS):
            return super().step(chunks, cancelled)

    def _logits(self, batch: Batch, selected: Tensor) -> npt.NDArray[np.float32]:
        with self._timeline.host(LOGITS):
            return super()._logits(batch, selected)

    def _likeliest(self, batch: Batch, selected: Tensor) -> list[int]:
        with self._timeline.host(LOGITS):
            return super()._likeliest(batch, selected)


class TracedWeights:
    """`weights`; from `acquire` to `release` the timeline's label is the segment."""

    def __init__(self, weights: WeightSource, timeline: Timeline) -> None:
        self.embedding = weights.embedding
        self.head = weights.head
        self.vectors = weights.vectors
        self.final_norm = weights.final_norm
        self._weights = weights
        self._timeline = timeline

    def acquire(self, layer: int, segment: str) -> Mapping[str, Weight]:
        matrices = self._weights.acquire(layer, segment)
        self._timeline.label = f"layer {layer} {segment}"
        self._timeline.begin(self._timeline.label)
        return matrices

    def release(self, layer: int, segment: str) -> None:
        try:
            self._weights.release(layer, segment)
        finally:
            self._timeline.label = None
            self._timeline.end()

    def close(self) -> None:
        self._weights.close()


def traced_host(host: Backend, timeline: Timeline) -> Backend:
    """`host`, whose ops that a GPU's backend leaves to the CPU are spans of `timeline`."""
    return cast(Backend, _TracedHost(host, timeline))


class _TracedHost:
    """All but two ops are those of `host`."""

    def __init__(self, host: Backend, timeline: Timeline) -> None:
        self._host = host
        self._timeline = timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        with self._timeline.host("embedding rows"):
            self._host.gather_rows(table, batch, scale, out)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        with self._timeline.host("output projection on the CPU"):
            self._host.lm_head(weight, x, rows, softcap, out)
