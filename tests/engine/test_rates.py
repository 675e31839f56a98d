"""Rates that choose the output projection's place: measured only where they matter, and nothing of it stays."""

from pathlib import Path

import numpy as np
import pytest

import edge_transformer.engine.gpu as engine_on_gpu
import edge_transformer.engine.rates as rates_module
from edge_transformer.cli.ledger import ledger
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.rates import COPY_BYTES, measured_rates
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import Weight, WeightFormat, packed_layout
from edge_transformer.memory import HostMemory
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Plan, Rates, Wishes
from emulator import EmulatedGpu
from tiny.models import MODELS
from tiny.weights import make_weights
from tiny.write import write_hf


def head(rows: int, cols: int) -> Weight:
    layout = packed_layout(WeightFormat.Q8_0, rows, cols)
    memory = HostMemory(layout.nbytes)
    return Weight(layout, memory.address, memory)


@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (1000, 1), (1000, 11)])
def test_rates_are_measured_and_the_memory_is_given_back(rows: int, sequences: int) -> None:
    gpu = EmulatedGpu(0)
    free = gpu.memory_info()[0]
    rates = measured_rates(gpu, CpuBackend(1), head(rows, 64), sequences)
    assert gpu.memory_info()[0] == free >= COPY_BYTES
    assert all(np.isfinite(rate) and rate > 1e5 for rate in (rates.bus, rates.host_head))


COPY_SECONDS = 1 / 512  # sums of it are exact


class Clocked:
    """A clock, the GPU and the CPU that it is set by: a copy takes COPY_SECONDS, and the rounds of an output
    projection `seconds` each. `copied`: how many copies were queued before each of these.
    """

    def __init__(self, seconds: list[float]) -> None:
        self.now = 0.0
        self.left = list(seconds)
        self.copied: list[int] = []
        self._copies = self._queued = 0

    def perf_counter(self) -> float:
        return self.now

    def copy(self, *_: object) -> None:
        self._copies += 1
        self._queued += 1

    def synchronize(self, _: object) -> None:
        self.now += COPY_SECONDS * self._queued
        self._queued = 0

    def allocate(self, nbytes: int, what: str) -> HostMemory:
        return HostMemory(4096)

    allocate_host = allocate

    def stream(self, name: str) -> str:
        return name

    def reserve(self, *_: object) -> None:
        pass

    def lm_head(self, *_: object) -> None:
        self.copied.append(self._copies)
        self._copies = 0
        self.now += self.left.pop(0)


def test_the_slowest_round_beside_copies_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: copies go on for one and a half times as long as the round before took, each COPY_SECONDS; the first
    round, in which pages may be read from a disk, is without any and does not count.
    """
    clocked = Clocked([copies * COPY_SECONDS for copies in (50, 2, 4, 3)])
    monkeypatch.setattr(rates_module, "time", clocked)
    weight = head(1000, 64)
    rates = measured_rates(clocked, clocked, weight, 1)  # type: ignore[arg-type]
    assert rates.bus == COPY_BYTES / COPY_SECONDS
    assert rates.host_head == 1000 * (64 + 16) / (4 * COPY_SECONDS)  # codes, and scales padded to 16 bytes
    assert clocked.copied == [6, 75, 3, 6]


def opened_plan(folder: Path, wishes: Wishes, gpu: EmulatedGpu) -> Plan:
    """Of a tiny model, its rates measured."""
    model = MODELS["llama"]
    checkpoint = open_checkpoint(write_hf(folder / "llama", model.config, make_weights(model)))
    spec = read_model(checkpoint)
    weights, options = HostWeights(checkpoint, spec), GpuOptions(wishes, 512, measure=True)
    engine, plan = open_gpu_engine(gpu, checkpoint, spec, weights, CpuBackend(1), DType.F32, options, max_rows=16)
    engine.close()
    return plan


def plan_of(folder: Path, wishes: Wishes, monkeypatch: pytest.MonkeyPatch, host_head: float) -> tuple[Plan, int]:
    """The plan of a tiny model when these rates are measured, and how often they were."""
    calls = []

    def measured(*_: object) -> Rates:
        calls.append(1)
        return Rates(1e6, host_head)

    monkeypatch.setattr(engine_on_gpu, "measured_rates", measured)
    return opened_plan(folder, wishes, EmulatedGpu(0)), len(calls)


def test_nothing_is_measured_where_the_place_is_given_or_all_is_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Wishes(1 << 28, resident_layers=0, head=HeadPlace.STREAMED)
    for wishes in (given, Wishes(1 << 28, kv_offload=False)):
        plan, calls = plan_of(tmp_path, wishes, monkeypatch, 1e9)
        assert (plan.rates, calls) == (None, 0)


def test_where_nothing_can_be_measured_the_model_opens_all_the_same_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Rates:
        raise CapacityError("a copy that measures the bus: 5 bytes are free")

    monkeypatch.setattr(engine_on_gpu, "measured_rates", refused)
    plan = opened_plan(tmp_path, Wishes(1 << 28, resident_layers=0, kv_offload=True), EmulatedGpu(0))
    assert plan.rates is None
    assert "without measuring the bus and the CPU: a copy that measures the bus: 5 bytes are free" in ledger(plan)


def test_rates_that_a_ring_would_not_keep_choose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Wishes(1 << 28, resident_layers=0, kv_offload=True, head=HeadPlace.GPU)
    budget = plan_of(tmp_path, everything, monkeypatch, 1.0)[0].arena_bytes - 256
    wishes = Wishes(budget, resident_layers=0, kv_offload=True)
    assert plan_of(tmp_path, wishes, monkeypatch, 1e9)[0].head is HeadPlace.CPU
    plan = opened_plan(tmp_path, wishes, EmulatedGpu(0, refuse_registration=True))
    assert plan.head is HeadPlace.STREAMED
    assert plan.rates is None
    assert "without measuring the bus and the CPU: the host refuses to page-lock weights" in ledger(plan)


@pytest.mark.parametrize(("host_head", "place"), [(1e9, HeadPlace.CPU), (1e3, HeadPlace.STREAMED)])
def test_what_was_measured_chooses_the_place(
    host_head: float, place: HeadPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = Wishes(1 << 28, resident_layers=0, kv_offload=True, head=HeadPlace.GPU)
    budget = plan_of(tmp_path, everything, monkeypatch, 1.0)[0].arena_bytes - 256
    plan, calls = plan_of(tmp_path, Wishes(budget, resident_layers=0, kv_offload=True), monkeypatch, host_head)
    assert (plan.head, plan.rates, calls) == (place, Rates(1e6, host_head), 1)
