"""What a plan promises is what is there: each line of its ledger to the byte, its resident layers, and nothing else."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import edge_transformer.engine.gpu as engine_on_gpu
from cuda.opened import MODES, model_path, open_on_gpu, pieces, tokens_of
from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.engine.core import Engine
from edge_transformer.errors import CapacityError
from edge_transformer.placement.plan import Wishes
from emulator import EmulatedGpu

LINES = {
    "layer": "weights of",
    "weight slot": "slots for",
    "output projection": "output projection",
    "KV": "KV cache",
    "recurrent state": "recurrent state",
    "batch arrays": "workspace",
    "activations and logits": "workspace",
    "workspace of ops": "workspace",
}
"""The line of the plan's ledger that a block of the arena belongs to, by how its name begins; the rest are vectors."""


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    made: list[Arena] = []

    class Seen(Arena):
        def __init__(self, gpu: Gpu, nbytes: int) -> None:
            super().__init__(gpu, nbytes)
            made.append(self)

    monkeypatch.setattr(engine_on_gpu, "Arena", Seen)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gemma2", "qwen3_5"])
def test_every_line_of_the_plan_is_taken_to_the_byte(
    folder: Path, closing: list[Engine], arenas: list[Arena], name: str, mode: str
) -> None:
    gpu = EmulatedGpu(3)
    total = gpu.memory_info()[1]
    opened = open_on_gpu(model_path(folder, name), MODES[mode], gpu=gpu)
    closing.append(opened.engine)
    (arena,) = arenas
    taken: Counter[str] = Counter()
    for label, nbytes in arena.ledger:
        taken[next((line for begin, line in LINES.items() if label.startswith(begin)), "norms and biases")] += nbytes
    for label, nbytes in opened.plan.ledger:
        line = next(line for line in (*LINES.values(), "norms and biases") if line in label.split(" for ")[0] + " for")
        assert taken.pop(line, 0) == nbytes, label
    assert not taken
    assert arena.used == arena.nbytes == opened.plan.arena_bytes
    resident = {int(label.split()[1]) for label, _ in arena.ledger if label.startswith("layer")}
    assert resident == {layer for layer, stays in enumerate(opened.plan.resident) if stays}
    pieces(opened.engine, tokens_of(70, 1), 64, 3)
    if not os.environ.get("ETE_TEST_GPU"):  # a real one has others' memory too, and its context
        assert total - gpu.memory_info()[0] == arena.nbytes


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_least_budget_runs_and_one_byte_less_is_refused(folder: Path, closing: list[Engine], name: str) -> None:
    path, tokens = model_path(folder, name), tokens_of(30, 2)
    with pytest.raises(CapacityError, match="least that would do is") as refused:
        open_on_gpu(path, Wishes(1))
    named = float(str(refused.value).split("least that would do is ")[1].split()[0])
    budget = int(named * 2**20)
    while True:  # the number named is rounded up: other plans may lie between
        try:
            least = open_on_gpu(path, Wishes(budget), seed=1)
        except CapacityError:
            break
        closing.append(least.engine)
        assert budget - 2**20 // 100 < least.arena_bytes <= budget
        budget = least.arena_bytes - 1
    ample = open_on_gpu(path, MODES["all resident"], seed=2)
    closing.append(ample.engine)
    ours, theirs = pieces(least.engine, tokens, 64, 2), pieces(ample.engine, tokens, 64, 2)
    assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
