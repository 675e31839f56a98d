"""What goes wrong ends with an error that says so, or cleanly: no hang, the arena freed, the engine usable again."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import BUDGET, MODES, model_path, open_on_gpu, pieces, tokens_of
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import CapacityError, FileChangedError, GpuError, UsageError
from edge_transformer.placement.plan import Wishes
from emulator import EmulatedGpu
from emulator.memory import EmulatedMemory

CALLS = ("launch", "copy", "record", "wait", "synchronize", "begin_capture", "end_capture", "fill")


class FaultyGpu(EmulatedGpu):
    """Once armed, the n-th call among `CALLS` raises: an error instead of the call, an interrupt when it is done."""

    left = 0
    fault: BaseException = GpuError("cuLaunchKernel(gemv): CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    among: tuple[str, ...] = CALLS

    def arm(self, call: int, fault: BaseException, among: tuple[str, ...] = CALLS) -> None:
        self.left, self.fault, self.among = call, fault, among


def _faulty(name: str) -> Callable[..., object]:
    original = getattr(EmulatedGpu, name)

    def call(self: FaultyGpu, *arguments: object, **more: object) -> object:
        if name in self.among and self.left:
            self.left -= 1
            if not self.left:
                if isinstance(self.fault, KeyboardInterrupt):
                    original(self, *arguments, **more)
                else:
                    self.spoil_capture()
                raise self.fault
        return original(self, *arguments, **more)

    return call


for _name in CALLS:
    setattr(FaultyGpu, _name, _faulty(_name))


class RefusingGpu(EmulatedGpu):
    """Refuses page-locked memory from the n-th call on."""

    allowed = 1 << 30

    def allocate_host(self, nbytes: int, what: str) -> EmulatedMemory:
        self.allowed -= 1
        if self.allowed < 0:
            raise CapacityError(f"{what}: the host refuses to page-lock {nbytes} bytes")
        return super().allocate_host(nbytes, what)


def logits_with_repeats(
    engine: Engine, sequence: Sequence, tokens: list[int], fault: type[BaseException]
) -> np.ndarray:
    """A prompt and two decode passes; one that meets the fault is made again."""
    split = len(tokens) - 2
    logits: list[np.ndarray] = []
    for part, kind in ((tokens[:split], "prompt"), ([tokens[split]], "decode"), ([tokens[split + 1]], "decode")):
        before = len(sequence)
        for again in (False, True):
            try:
                result = engine.step([Chunk(sequence, part, kind, "all")])  # type: ignore[arg-type]
                assert result is not None
                logits.append(result.logits())
                break
            except fault:
                if again:
                    raise
                sequence.truncate(before)
    return np.concatenate(logits)


@pytest.mark.parametrize("kind", ["launch fails", "interrupt"])
@pytest.mark.parametrize("mode", ["all resident", "all streamed, output projection too"])
def test_after_a_fault_anywhere_in_a_pass_the_engine_gives_the_right_bits(folder: Path, mode: str, kind: str) -> None:
    """Where nothing is streamed a graph is being recorded in some of these passes; the others have slots, KV buffers
    and, since the host refuses page-locking, a ring.
    """
    path, tokens = model_path(folder, "llama"), tokens_of(12, 3)
    fault: BaseException = KeyboardInterrupt() if kind == "interrupt" else GpuError("cuLaunchKernel: refused")
    among = CALLS if kind == "interrupt" else ("launch",)

    def run(call: int) -> tuple[np.ndarray, int]:
        """Logits, and calls that were left to go."""
        gpu = FaultyGpu(call % 1000, refuse_registration=mode != "all resident")
        opened = open_on_gpu(path, MODES[mode], gpu=gpu)
        gpu.arm(call, fault, among)
        sequence = opened.engine.new_sequence()
        logits, left = logits_with_repeats(opened.engine, sequence, tokens, type(fault)), gpu.left
        gpu.left = 0
        sequence.close()
        opened.engine.close()
        assert "arena" not in gpu.open_memory()
        return logits, left

    many = 10**6
    expected, left = run(many)
    for call in np.random.default_rng(5).choice(many - left, 15, replace=False):
        logits, left = run(int(call) + 1)
        assert left == 0
        assert np.array_equal(logits, expected), call


def test_an_interrupt_in_a_pass_that_is_recorded_leaves_no_recording_open(folder: Path) -> None:
    """What is queued before the next pass (here: a copy of a shared tile) must run, not be recorded."""
    opened = open_on_gpu(model_path(folder, "llama"), MODES["all resident"], seed=4)
    tokens = tokens_of(20, 9)
    sequence = opened.engine.new_sequence()
    prompt = Chunk(sequence, tokens, "prompt", "last")
    opened.engine.step([prompt])
    fork = sequence.fork()
    answers = iter([False, True])
    assert opened.engine.step([Chunk(sequence, [7], "decode", "last")], answers.__next__) is None
    first = opened.engine.step([Chunk(fork, [7], "decode", "last")])
    assert first is not None
    ours = first.logits()
    second = opened.engine.step([Chunk(sequence, [7], "decode", "last")])
    assert second is not None
    assert np.array_equal(ours, second.logits())
    assert np.array_equal(ours, pieces(opened.engine, [*tokens, 7], 64, 1)[-1:])
    opened.engine.close()


def test_an_engine_can_be_closed_after_a_fault(folder: Path) -> None:
    for call in (3, 20):
        gpu = FaultyGpu(call)
        opened = open_on_gpu(model_path(folder, "llama"), MODES["all resident"], gpu=gpu)
        gpu.arm(call, GpuError("cuLaunchKernel: refused"), ("launch",))
        with pytest.raises(GpuError, match="refused"):
            opened.engine.step([Chunk(opened.engine.new_sequence(), [1], "decode", "last")])
        opened.engine.close()
        assert "arena" not in gpu.open_memory()


def test_a_gpu_that_is_lost_at_close_still_gives_everything_back(folder: Path) -> None:
    """The wait for queued work is what reports a lost context."""
    gpu = FaultyGpu(2)
    opened = open_on_gpu(model_path(folder, "llama"), MODES["streamed by layers"], gpu=gpu)
    gpu.arm(1, GpuError("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"), ("synchronize",))
    with pytest.raises(GpuError, match="ILLEGAL_ADDRESS"):
        opened.engine.close()
    assert "arena" not in gpu.open_memory()
    opened.engine.close()


def test_a_gpu_without_room_for_the_arena_is_named(folder: Path) -> None:
    gpu = EmulatedGpu(1, total_bytes=1 << 16)
    with pytest.raises(CapacityError, match=r"arena: [0-9]+ bytes of GPU memory asked for, 65536 of 65536 are free"):
        open_on_gpu(model_path(folder, "llama"), Wishes(BUDGET), gpu=gpu)
    assert gpu.open_memory() == []


def test_page_locked_memory_refused_at_load_frees_the_arena(folder: Path) -> None:
    """Every one of the allocations at load refused, one after the other."""
    for allowed in range(200):
        gpu = RefusingGpu(1)
        gpu.allowed = allowed
        try:
            opened = open_on_gpu(model_path(folder, "llama"), MODES["all streamed, KV cache on the host"], gpu=gpu)
        except CapacityError as error:
            assert re.search(r".+: the host refuses to page-lock [0-9]+ bytes", str(error))  # noqa: PT017
            assert "arena" not in gpu.open_memory()
        else:
            opened.engine.close()
            assert allowed > 5
            return
    pytest.fail("the engine never opened")


def test_host_memory_refused_to_the_kv_cache_leaves_the_engine_usable(folder: Path, closing: list[Engine]) -> None:
    gpu = RefusingGpu(3)
    opened = open_on_gpu(model_path(folder, "llama"), MODES["KV cache on the host"], gpu=gpu)
    closing.append(opened.engine)
    gpu.allowed = 0
    other, sequence = opened.engine.new_sequence(), opened.engine.new_sequence()
    assert opened.engine.step([Chunk(other, [1, 2, 3], "prompt")]) is not None  # for the first there is memory already
    with pytest.raises(CapacityError, match="KV tiles on the host: the host refuses"):
        opened.engine.step([Chunk(sequence, [1, 2, 3], "prompt", "all")])
    gpu.allowed = 1 << 30
    result = opened.engine.step([Chunk(sequence, [1, 2, 3], "prompt", "all")])
    assert result is not None
    assert np.array_equal(result.logits(), pieces(opened.engine, [1, 2, 3], 64, 0))


def test_host_memory_refused_to_logits_leaves_the_engine_usable(folder: Path, closing: list[Engine]) -> None:
    """Eight rows of logits need more memory on their way to the host than the rows of a pass."""
    opened = open_on_gpu(model_path(folder, "llama"), MODES["all resident"], gpu=(gpu := RefusingGpu(4)), rows=8)
    closing.append(opened.engine)
    tokens, sequence = tokens_of(8, 3), opened.engine.new_sequence()
    result = opened.engine.step([Chunk(sequence, tokens, "prompt", "all")])
    assert result is not None
    gpu.allowed = 0
    with pytest.raises(CapacityError, match="staging memory: the host refuses"):
        result.logits()
    gpu.allowed = 1 << 30
    result.keep()  # takes less, and must not find memory that has been given back
    expected = pieces(open_on_gpu(model_path(folder, "llama"), MODES["all resident"], rows=8).engine, tokens, 8, 0)
    assert np.array_equal(result.logits(), expected)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "through the ring"])
def test_a_file_truncated_under_the_mapping_is_named(folder: Path, tmp_path: Path, locked: bool) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_path(folder, "llama"), path)
    opened = open_on_gpu(path, MODES["streamed by layers"], gpu=EmulatedGpu(1, refuse_registration=not locked))
    sequence = opened.engine.new_sequence()
    assert opened.engine.step([Chunk(sequence, [1, 2], "prompt")]) is not None
    os.truncate(next(path.glob("*.safetensors")), 5000)
    with pytest.raises(FileChangedError, match="to 5000 bytes"):
        opened.engine.step([Chunk(sequence, [3], "decode", "last")])
    assert len(sequence) == 2
    opened.engine.close()
    assert "arena" not in opened.gpu.open_memory()


@pytest.mark.parametrize("mode", ["all resident", "all streamed, KV cache on the host"])
def test_close_while_a_pass_runs_in_another_thread(folder: Path, mode: str) -> None:
    opened = open_on_gpu(model_path(folder, "llama"), MODES[mode], seed=8)
    engine, running = opened.engine, threading.Event()
    ended: list[BaseException] = []

    def passes() -> None:
        sequence = engine.new_sequence()
        try:
            while True:
                with engine.lock:
                    running.set()
                    result = engine.step([Chunk(sequence, [1], "decode", "last")])
                    assert result is not None
                    result.logits()
        except UsageError as error:
            ended.append(error)

    thread = threading.Thread(target=passes, daemon=True)
    thread.start()
    assert running.wait(60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "has been closed" in str(ended[0])
    assert "arena" not in opened.gpu.open_memory()
