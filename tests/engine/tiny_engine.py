"""Tiny models written to a folder and opened, for tests of the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from tiny.models import MODELS, TinyModel
from tiny.weights import make_weights
from tiny.write import write_hf

Logits = npt.NDArray[np.float32]

VOCABULARY = 131


def long_context_model(name: str, window: int | None = None) -> TinyModel:
    """A tiny model for contexts over several KV tiles."""
    changes: dict[str, object] = {"max_position_embeddings": 4096}
    if window is not None:
        changes["sliding_window"] = window
    return TinyModel(name, MODELS[name].config | changes, {})


def write_model(folder: Path, model: TinyModel) -> Path:
    return write_hf(folder / model.name, model.config, make_weights(model))


def open_cpu_engine(path: Path, threads: int = 2, kv_dtype: DType = DType.BF16, max_rows: int = 512) -> Engine:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    backend = CpuBackend(threads)
    return Engine(checkpoint, spec, backend, HostWeights(checkpoint, spec), kv_dtype, max_rows)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return tokens


def append(engine: Engine, sequence: Sequence, tokens: list[int], kind: str = "prompt") -> Logits:
    """Logits f32 [len(tokens), V] after each token, in one pass."""
    result = engine.step([Chunk(sequence, tokens, kind, "all")])  # type: ignore[arg-type]
    assert result is not None
    return result.logits()


def in_chunks(engine: Engine, tokens: list[int], rows: int) -> Logits:
    """Logits f32 [len(tokens), V] of a fresh sequence fed in prompt chunks of `rows`."""
    sequence = engine.new_sequence()
    logits = [append(engine, sequence, tokens[start : start + rows]) for start in range(0, len(tokens), rows)]
    sequence.close()
    return np.concatenate(logits)
