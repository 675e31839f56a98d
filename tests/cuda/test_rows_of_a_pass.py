"""How many rows a pass has on a GPU: enough to occupy it where all is resident and memory is ample, else 512."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import model_path, pieces, tokens_of
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Plan, Wishes
from emulator import EmulatedGpu

RESIDENT = Wishes(1 << 30, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU)


def opened(path: Path, multiprocessors: int, wishes: Wishes, max_rows: int | None = None) -> tuple[Engine, Plan]:
    gpu = EmulatedGpu(0)
    gpu.properties = replace(gpu.properties, multiprocessors=multiprocessors)
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    weights = HostWeights(checkpoint, spec)
    return open_gpu_engine(gpu, checkpoint, spec, weights, CpuBackend(1), DType.F32, GpuOptions(wishes, 1024), max_rows)


@pytest.mark.parametrize(
    ("multiprocessors", "rows"), [(14, 512), (28, 512), (46, 1024), (82, 2048), (132, 4096), (512, 4096)]
)
def test_rows_follow_the_multiprocessors(folder: Path, closing: list[Engine], multiprocessors: int, rows: int) -> None:
    engine, plan = opened(model_path(folder, "llama"), multiprocessors, RESIDENT)
    closing.append(engine)
    assert engine.max_rows == rows
    assert plan.arena_bytes <= RESIDENT.budget_bytes


def test_rows_take_a_small_part_of_the_budget(folder: Path, closing: list[Engine]) -> None:
    """With 512 rows it needs `least`; of sixteen times what 4096 take more, these are one part."""
    path = model_path(folder, "gemma2")
    few, least = opened(path, 132, RESIDENT, max_rows=512)
    many, most = opened(path, 132, RESIDENT, max_rows=4096)
    closing += [few, many]
    enough = 16 * (most.arena_bytes - least.arena_bytes)
    for budget, rows in ((enough, 4096), (enough - 1, 2048), (least.arena_bytes, 512)):
        engine, plan = opened(path, 132, replace(RESIDENT, budget_bytes=budget))
        closing.append(engine)
        assert engine.max_rows == rows
        assert plan.arena_bytes <= budget


@pytest.mark.parametrize(
    "wishes",
    [
        replace(RESIDENT, resident_layers=0),
        replace(RESIDENT, kv_offload=True),
        replace(RESIDENT, head=HeadPlace.STREAMED),
    ],
)
def test_what_is_streamed_keeps_the_smallest_arena(folder: Path, closing: list[Engine], wishes: Wishes) -> None:
    engine, _ = opened(model_path(folder, "llama"), 132, wishes)
    closing.append(engine)
    assert engine.max_rows == 512


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_change_no_bit(folder: Path, closing: list[Engine], name: str) -> None:
    """A prompt in one pass of 600 rows, and in two."""
    path, tokens = model_path(folder, name), tokens_of(603, 4)
    many, _ = opened(path, 132, RESIDENT)
    few, _ = opened(path, 132, RESIDENT, max_rows=512)
    closing += [many, few]
    assert np.array_equal(pieces(many, tokens, 600, 3), pieces(few, tokens, 512, 3))
