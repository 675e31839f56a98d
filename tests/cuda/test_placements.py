"""Every placement of a tiny model on the emulated GPU, fed in several ways: bits equal; gpu_modes.py for real GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cuda.opened import BUDGET, Opened, model_path, open_on_gpu
from cuda.placements import (
    ALL_RESIDENT,
    Findings,
    Logits,
    Placement,
    Way,
    feed,
    open_within,
    placements,
    random_prompts,
)
from edge_transformer.errors import UsageError
from edge_transformer.placement.plan import Wishes
from emulator import EmulatedGpu
from tiny.models import MODELS

WAYS = (Way(64), Way(5), Way(11, 2), Way(7, 3, 2))
LENGTHS = ((7, 3), (13, 2), (4, 2))
RECURRENT_WAYS = (Way(64), Way(64, 2), Way(64, 3, 2))
RECURRENT_LENGTHS = ((7, 3), (67, 2), (4, 2))
ROWS = 128
BOUND = 1e-5


def logits_of(
    path: Path,
    placement: Placement,
    way: Way,
    seed: int,
    capability: tuple[int, int],
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> list[Logits]:
    def open_engine(wishes: Wishes) -> Opened:
        gpu = EmulatedGpu(seed, capability=capability, refuse_registration=not placement.locked)
        return open_on_gpu(path, wishes, gpu=gpu, sequences=3, rows=ROWS)

    opened = open_within(open_engine, placement)
    try:
        return feed(opened.engine, random_prompts(lengths, 131), way)
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


def test_placements_and_batch_mates_change_no_bit_of_a_hybrid(folder: Path) -> None:
    """Cut where the engine cuts prompts of models with recurrent state: its bits depend on that."""
    path = model_path(folder, "qwen3_5")
    findings = Findings()
    whole = placements(int(str(MODELS["qwen3_5"].config["num_hidden_layers"])), BUDGET)
    first = Placement(ALL_RESIDENT)
    expected = logits_of(path, first, RECURRENT_WAYS[0], 0, (8, 0), RECURRENT_LENGTHS)
    for seed, placement in enumerate([first, *whole[3::29]], start=1):
        way = RECURRENT_WAYS[seed % len(RECURRENT_WAYS)]
        logits = logits_of(path, placement, way, seed, (8, 0), RECURRENT_LENGTHS)
        findings.compare(f"{placement}; {way}", placement.exact, expected, logits, BOUND)
    assert not findings.faults


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 7])
def test_a_fifth_of_the_placements_has_every_choice(layers: int) -> None:
    """gpu_modes.py gives each of its checks a fifth."""
    whole = placements(layers, BUDGET)
    parts = [whole[part::5] for part in range(5)]
    for part in parts:
        for choices in (
            lambda p: (p.wishes.resident_layers, p.wishes.kv_offload),
            lambda p: p.wishes.head,
            lambda p: p.wishes.slots,
            lambda p: p.least,
            lambda p: p.locked,
        ):
            assert {choices(p) for p in part} == {choices(p) for p in whole}


def test_one_slot_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="2 or more"):
        open_on_gpu(model_path(folder, "llama_tied_wide_heads"), Wishes(BUDGET, 0, slots=1))
