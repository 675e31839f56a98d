"""Every placement of a tiny model on the emulated GPU, fed in several ways: bits equal; gpu_modes.py for real GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuda.opened import BUDGET, Opened, model_path, open_on_gpu
from cuda.placements import ALL_RESIDENT, Findings, Placement, Way, feed, open_within, placements, random_prompts
from edge_transformer.errors import UsageError
from edge_transformer.placement.plan import Wishes
from emulator import EmulatedGpu
from tiny.models import MODELS

WAYS = (Way(64), Way(5), Way(11, 2), Way(7, 3, 2))
LENGTHS = ((7, 3), (13, 2), (4, 2))
BOUND = 1e-5


def logits_of(path: Path, placement: Placement, way: Way, seed: int, capability: tuple[int, int]) -> list:  # type: ignore[type-arg]
    def open_engine(wishes: Wishes) -> Opened:
        gpu = EmulatedGpu(seed, capability=capability, refuse_registration=not placement.locked)
        return open_on_gpu(path, wishes, gpu=gpu, sequences=3)

    opened = open_within(open_engine, placement)
    try:
        return feed(opened.engine, random_prompts(LENGTHS, 131), way)
    finally:
        opened.engine.close()
        assert "arena" not in opened.gpu.open_memory()


@pytest.mark.parametrize(("name", "capability"), [("llama_tied_wide_heads", (7, 5)), ("gemma2_query_scale", (8, 0))])
def test_placements_chunks_and_batch_mates_change_no_bit(folder: Path, name: str, capability: tuple[int, int]) -> None:
    path = model_path(folder, name)
    findings = Findings()
    first = logits_of(path, Placement(ALL_RESIDENT), WAYS[0], 0, capability)
    layers = int(str(MODELS[name].config["num_hidden_layers"]))
    some = placements(layers, BUDGET)[::11]
    for seed, placement in enumerate([Placement(ALL_RESIDENT)] * len(WAYS) + some):
        way = WAYS[seed % len(WAYS)]
        findings.compare(
            f"{placement}; {way}", placement.exact, first, logits_of(path, placement, way, seed, capability), BOUND
        )
    assert not findings.faults
    assert findings.compared > 12


def test_one_slot_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="2 or more"):
        open_on_gpu(model_path(folder, "llama_tied_wide_heads"), Wishes(BUDGET, 0, slots=1))
