"""Tiny models opened on the emulated GPU, for tests of the whole engine in every mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Plan, Wishes
from emulator import EmulatedGpu
from tiny.models import MODELS
from tiny.weights import make_weights
from tiny.write import write_hf

BUDGET = 1 << 28
ROWS = 64

MODES = {
    "all resident": Wishes(BUDGET, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU),
    "streamed by layers": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=False, head=HeadPlace.GPU),
    "one resident, three slots": Wishes(BUDGET, resident_layers=1, slots=3, kv_offload=False, head=HeadPlace.GPU),
    "output projection streamed alone": Wishes(BUDGET, resident_layers=-1, kv_offload=False, head=HeadPlace.STREAMED),
    "all streamed, output projection too": Wishes(
        BUDGET, resident_layers=0, slots=3, kv_offload=True, head=HeadPlace.STREAMED
    ),
    "KV cache on the host": Wishes(BUDGET, resident_layers=-1, kv_offload=True, head=HeadPlace.GPU),
    "all streamed, KV cache on the host": Wishes(
        BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.GPU
    ),
}


@dataclass
class Opened:
    engine: Engine
    gpu: EmulatedGpu
    plan: Plan

    @property
    def arena_bytes(self) -> int:
        return self.plan.arena_bytes


def open_on_gpu(
    path: Path,
    wishes: Wishes,
    seed: int = 0,
    capability: tuple[int, int] = (7, 5),
    context: int = 1024,
    gpu: EmulatedGpu | None = None,
    kv_dtype: DType = DType.F32,
    sequences: int = 2,
    rows: int = ROWS,
    measure: bool = False,
) -> Opened:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    gpu = gpu or EmulatedGpu(seed, capability=capability)
    engine, plan = open_gpu_engine(
        gpu,
        checkpoint,
        spec,
        HostWeights(checkpoint, spec),
        CpuBackend(1),
        kv_dtype,
        GpuOptions(wishes, context, sequences=sequences, measure=measure),
        max_rows=rows,
    )
    return Opened(engine, gpu, plan)


def pieces(engine: Engine, tokens: list[int], chunk: int, decoded: int) -> np.ndarray:
    """Logits [len(tokens), V]: all but the last `decoded` tokens in prompt chunks, those one by one."""
    sequence = engine.new_sequence()
    logits = []
    split = len(tokens) - decoded
    for start in range(0, split, chunk):
        result = engine.step([Chunk(sequence, tokens[start : min(start + chunk, split)], "prompt", "all")])
        assert result is not None
        logits.append(result.logits())
    for token in tokens[split:]:
        result = engine.step([Chunk(sequence, [token], "decode", "all")])
        assert result is not None
        logits.append(result.logits())
    sequence.close()
    return np.concatenate(logits)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 131, count).tolist()
    return ids


def model_path(folder: Path, name: str) -> Path:
    path = folder / name
    return path if path.exists() else write_hf(path, MODELS[name].config, make_weights(MODELS[name]))


class ForgetfulGpu(EmulatedGpu):
    """Leaves out the waits of one stream, or the host's for it."""

    forgotten = ""
    forgotten_by_host = ""

    def wait(self, stream, event) -> None:  # type: ignore[no-untyped-def]
        if not self.forgotten or not stream.name.startswith(self.forgotten):
            super().wait(stream, event)

    def synchronize(self, stream=None) -> None:  # type: ignore[no-untyped-def]
        if stream is None or not self.forgotten_by_host or not stream.name.startswith(self.forgotten_by_host):
            super().synchronize(stream)
