"""The emulated GPU: each fault that it is there to find is found, and work without fault is right in every order."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cuda.kernel_sources import basic
from edge_transformer.cuda.runtime import Stream
from edge_transformer.errors import CapacityError, GpuError
from edge_transformer.memory import HostMemory
from emulator import DeviceArrays, EmulatedGpu, RaceError

SEEDS = range(20)


@pytest.fixture
def gpu() -> EmulatedGpu:
    return EmulatedGpu(seed=1, order="both", capability=(8, 0))


# ---- faults of kernels


def test_a_removed_barrier_is_found() -> None:
    gpu = EmulatedGpu(seed=1, order="both")
    arrays = DeviceArrays(gpu)
    x, out = arrays.put(np.ones(256, np.float32), "x"), arrays.empty(2, np.float32, "out")
    gpu.launch(gpu.kernel(basic("block_sum", 128, ETE_WITHOUT_BARRIER=1)), (2, 1, 1), 0, arrays.stream, (x, out))
    with pytest.raises(GpuError, match=r"block_sum: 8 bytes depend on the order .* byte 0 of 'out'"):
        gpu.synchronize()


def test_a_removed_wait_for_an_asynchronous_copy_shows_nan() -> None:
    gpu = EmulatedGpu(seed=1, order="both", capability=(8, 0))
    arrays = DeviceArrays(gpu)
    x, out = arrays.put(np.ones((64, 4), np.uint32), "x"), arrays.empty((64, 4), np.uint32, "out")
    gpu.launch(gpu.kernel(basic("reverse_async", 64, ETE_WITHOUT_WAIT=1)), (1, 1, 1), 0, arrays.stream, (x, out))
    assert (arrays.get(out) == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("entry", "threads", "message"),
    [
        ("barrier_for_half", 64, r"block \(0, 0, 0\), thread 0: waits at __syncthreads for ever: 32 .* 64 .* 32 have"),
        ("lanes_apart", 32, r"waits at warp_shuffle_xor for ever: 16 .* 16 have ended"),
        ("shared_overrun", 32, r"wrote past the ends of a shared array of 128 bytes"),
        ("last_writer", 32, r"bytes depend on the order of its threads, the first at byte \d of 'out'"),
    ],
)
def test_faults_within_a_launch(gpu: EmulatedGpu, entry: str, threads: int, message: str) -> None:
    arrays = DeviceArrays(gpu)
    out = arrays.empty(256, np.float32, "out")
    gpu.launch(gpu.kernel(basic(entry, threads)), (1, 1, 1), 0, arrays.stream, (out,))
    with pytest.raises(GpuError, match=message):
        gpu.synchronize()


def test_an_unaligned_load_is_found(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    x, out = arrays.put(np.ones(64, np.float32), "x"), arrays.empty(32, np.float32, "out")
    gpu.launch(gpu.kernel(basic("unaligned", 32)), (1, 1, 1), 0, arrays.stream, (x, out))
    with pytest.raises(GpuError, match=r"16 bytes accessed at .*, which is not aligned"):
        gpu.synchronize()


def test_a_write_past_a_block_is_found(gpu: EmulatedGpu) -> None:
    pool = gpu.allocate(1024, "pool")
    gpu.declare_block(pool.address, 128, "first")
    gpu.declare_block(pool.address + 256, 128, "second")
    kernel, stream = gpu.kernel(basic("overrun", 32, ETE_STEP=33)), gpu.stream("s")
    gpu.launch(kernel, (1, 1, 1), 0, stream, (pool.address,))
    with pytest.raises(GpuError, match="wrote 4 bytes outside of what it may write, the first at byte 0 of 'second'"):
        gpu.synchronize()


def test_a_write_past_memory_is_found() -> None:
    gpu = EmulatedGpu(seed=1, order="ascending")
    pool, stream = gpu.allocate(128, "pool"), gpu.stream("s")
    gpu.launch(gpu.kernel(basic("overrun", 32, ETE_STEP=0)), (1, 1, 1), 0, stream, (pool.address,))
    gpu.synchronize()
    gpu.launch(gpu.kernel(basic("overrun", 32, ETE_STEP=1)), (1, 1, 1), 0, stream, (pool.address,))
    with pytest.raises(GpuError, match=r"bytes after 'pool' .* overwritten"):
        gpu.synchronize()


def test_arguments_are_checked(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    kernel, x = gpu.kernel(basic("scale_add")), arrays.put(np.ones(8, np.float32), "x")

    def launch(*arguments: object, grid: tuple[int, int, int] = (1, 1, 1), shared: int = 0) -> None:
        gpu.launch(kernel, grid, shared, arrays.stream, arguments)  # type: ignore[arg-type]

    for arguments, message in (
        ((x, x, x), "3 arguments given, it has 5"),
        ((x, x, x, 1, np.int64(8)), "argument 3: the parameter is f4"),
        ((x, x, x, np.float32(1), np.int32(8)), "argument 4: the parameter is i8"),
        ((x, np.int64(x), x, np.float32(1), np.int64(8)), "argument 1: a pointer is an int"),
        ((x, 4096, x, np.float32(1), np.int64(8)), "argument 1: 0x1000 lies in no memory"),
    ):
        with pytest.raises(GpuError, match=message):
            launch(*arguments)
    good = x, x, x, np.float32(1), np.int64(8)
    with pytest.raises(GpuError, match="grid"):
        launch(*good, grid=(0, 1, 1))
    with pytest.raises(GpuError, match="shared memory; a block has 166912"):
        launch(*good, shared=166913)
    with pytest.raises(GpuError, match="whole warps"):
        gpu.kernel(basic("scale_add", 48))


# ---- the order of queued work


class Pipeline:
    """Values 1..n through one slot: a copy stream fills it, a compute stream adds it up. Each wait can be left out."""

    def __init__(self, gpu: EmulatedGpu, without: str = "") -> None:
        self.gpu = gpu
        self.without = without
        self.arrays = DeviceArrays(gpu)
        self.copy, self.compute = gpu.stream("copy"), gpu.stream("compute")
        self.slot = self.arrays.empty(8, np.float32, "slot")
        self.sums = self.arrays.put(np.zeros(8, np.float32), "sums")
        self.filled, self.freed = gpu.event(), gpu.event()
        self.add = gpu.kernel(basic("scale_add", 32))

    def run(self, values: np.ndarray) -> np.ndarray:
        host = self.gpu.allocate_host(values.nbytes, "host weights")
        ctypes.memmove(host.address, values.ctypes.data, values.nbytes)
        for row in range(len(values)):
            self.step(host.address + row * values[row].nbytes)
        return self.arrays.get(self.sums)

    def step(self, source: int) -> None:
        self._wait(self.copy, "freed")
        self.gpu.copy(self.slot, source, 32, self.copy)
        self.gpu.record(self.filled, self.copy)
        self._wait(self.compute, "filled")
        arguments = self.slot, self.sums, self.sums, np.float32(1), np.int64(8)
        self.gpu.launch(self.add, (1, 1, 1), 0, self.compute, arguments)
        self.gpu.record(self.freed, self.compute)

    def _wait(self, stream: Stream, event: str) -> None:
        if event != self.without:
            self.gpu.wait(stream, getattr(self, event))


VALUES = np.arange(1, 6, dtype=np.float32)[:, None] * np.ones(8, np.float32)


@pytest.mark.parametrize("seed", SEEDS)
def test_ordered_work_is_right_in_every_order(seed: int) -> None:
    np.testing.assert_array_equal(Pipeline(EmulatedGpu(seed)).run(VALUES), VALUES.sum(0))


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("filled", r"kernel scale_add on stream 'compute#\d' reads 'slot', which copy of 32 bytes .* 'copy#\d' writes"),
        (
            "freed",
            r"copy of 32 bytes .* on stream 'copy#\d' writes 'slot', which kernel scale_add .* reads, .* wait for",
        ),
    ],
)
def test_a_removed_wait_is_found_by_clocks(without: str, message: str) -> None:
    with pytest.raises(RaceError, match=message):
        Pipeline(EmulatedGpu(seed=1), without).run(VALUES)


@pytest.mark.parametrize("without", ["filled", "freed"])
def test_a_removed_wait_is_found_by_value(without: str) -> None:
    wrong = 0
    for seed in SEEDS:
        got = Pipeline(EmulatedGpu(seed, check_order=False), without).run(VALUES)
        wrong += not np.array_equal(got, VALUES.sum(0))
    assert wrong >= 18


def test_host_memory_that_changes_too_early_is_seen() -> None:
    gpu = EmulatedGpu(seed=1)
    arrays = DeviceArrays(gpu)
    host, out = gpu.allocate_host(4, "staging"), arrays.empty(1, np.float32, "out")
    ctypes.c_float.from_address(host.address).value = 1.0
    gpu.copy(out, host.address, 4, arrays.stream)
    ctypes.c_float.from_address(host.address).value = 2.0
    assert arrays.get(out)[0] == 2.0


def test_a_host_wait_orders() -> None:
    gpu = EmulatedGpu(seed=1)
    block, one, other = gpu.allocate(64, "block"), gpu.stream("one"), gpu.stream("other")
    gpu.fill(block.address, 64, 1, one)
    gpu.synchronize(one)
    gpu.fill(block.address, 64, 2, other)
    with pytest.raises(RaceError, match="fill of 'block'"):
        gpu.fill(block.address + 60, 4, 3, one)
    gpu.fill(block.address, 0, 3, one)


def test_reads_and_writes_behind_pointer_tables_are_checked() -> None:
    gpu = EmulatedGpu(seed=1)
    arrays = DeviceArrays(gpu)
    x, tile = arrays.put(np.ones(32, np.float32), "x"), arrays.empty(32, np.float32, "tile")
    kernel = gpu.kernel(basic("count_up", 32))
    gpu.launch(kernel, (1, 1, 1), 0, gpu.stream("one"), (x,), writes=[(tile, 64)])
    gpu.copy(tile + 64, tile + 96, 32, gpu.stream("two"))  # beside what was written
    with pytest.raises(RaceError, match="reads 'tile'"):
        gpu.launch(kernel, (1, 1, 1), 0, gpu.stream("two"), (arrays.empty(1, np.int32, "y"),), reads=[(tile, 4)])


# ---- memory


def test_memory_is_counted_and_poisoned() -> None:
    gpu = EmulatedGpu(seed=1, total_bytes=1000)
    first = gpu.allocate(600, "first")
    assert first.address % 256 == 0
    assert gpu.memory_info() == (400, 1000)
    assert np.isnan(np.frombuffer((ctypes.c_char * 600).from_address(first.address), np.float32)).all()
    with pytest.raises(CapacityError, match=r"second: 401 bytes .* 400 of 1000 are free"):
        gpu.allocate(401, "second")
    assert gpu.open_memory() == ["first"]
    first.close()
    first.close()
    assert gpu.memory_info() == (1000, 1000)
    with pytest.raises(GpuError, match="lies in no memory"):
        gpu.fill(first.address, 1, 0, gpu.stream("s"))


def test_copies_need_memory_the_gpu_knows() -> None:
    gpu, other = EmulatedGpu(seed=1), EmulatedGpu(seed=1, refuse_registration=True)
    device, stream, host = gpu.allocate(8192, "device"), gpu.stream("s"), HostMemory(8192)
    with pytest.raises(GpuError, match="page-locked or registered"):
        gpu.copy(device.address, host.address, 8, stream)
    registered = gpu.register_host(host.address + 100, 10, read_only=True)
    assert registered is not None
    with registered:
        gpu.copy(device.address, host.address, 4096, stream)  # whole pages are registered
        with pytest.raises(GpuError, match="for reading only"):
            gpu.copy(host.address, device.address, 8, stream)
        with pytest.raises(GpuError, match="past the end"):
            gpu.copy(device.address, host.address, 4097, stream)
        gpu.synchronize()
    with pytest.raises(GpuError, match="page-locked or registered"):
        gpu.copy(device.address, host.address, 8, stream)
    assert other.register_host(host.address, 10, read_only=True) is None


# ---- graphs


def test_a_graph_is_replayed_on_two_streams() -> None:
    gpu = EmulatedGpu(seed=3)
    pipeline = Pipeline(gpu)
    host = gpu.allocate_host(VALUES.nbytes, "host weights")
    gpu.begin_capture(pipeline.compute)
    gpu.record(pipeline.freed, pipeline.compute)
    for row in range(5):
        pipeline.step(host.address + row * 32)
    graph = gpu.end_capture(pipeline.compute)
    ctypes.memmove(host.address, VALUES.ctypes.data, VALUES.nbytes)
    for _ in range(3):
        graph.launch(pipeline.compute)
    np.testing.assert_array_equal(pipeline.arrays.get(pipeline.sums), 3 * VALUES.sum(0))
    graph.close()
    with pytest.raises(GpuError, match="closed"):
        graph.launch(pipeline.compute)


def test_a_replay_is_ordered_like_other_work() -> None:
    gpu = EmulatedGpu(seed=3)
    block, one, other = gpu.allocate(64, "block"), gpu.stream("one"), gpu.stream("other")
    gpu.begin_capture(one)
    gpu.fill(block.address, 64, 1, one)
    graph = gpu.end_capture(one)
    gpu.fill(block.address, 64, 2, other)
    with pytest.raises(RaceError):
        graph.launch(one)


def test_a_graph_keeps_no_memory_alive() -> None:
    gpu = EmulatedGpu(seed=3)
    block, stream = gpu.allocate(64, "block"), gpu.stream("one")
    gpu.begin_capture(stream)
    gpu.fill(block.address, 64, 1, stream)
    graph = gpu.end_capture(stream)
    graph.launch(stream)
    block.close()
    with pytest.raises(GpuError, match=r"fill of 'block', in a graph: .* lies in no memory"):
        graph.launch(stream)


def test_what_cannot_be_captured_is_refused() -> None:
    gpu = EmulatedGpu(seed=3)
    one, other, outside, inside = gpu.stream("one"), gpu.stream("other"), gpu.event(), gpu.event()
    block = gpu.allocate(64, "block")
    gpu.fill(block.address, 64, 2, other)
    gpu.record(outside, other)
    gpu.begin_capture(one)
    with pytest.raises(GpuError, match="outside of the capture"):
        gpu.wait(one, outside)
    with pytest.raises(GpuError, match="synchronize"):
        gpu.synchronize()
    gpu.record(inside, one)
    gpu.wait(other, inside)
    gpu.fill(block.address, 64, 2, other)
    with pytest.raises(GpuError, match="'other#1' was not joined to 'one'"):
        gpu.end_capture(one)


def test_a_recording_in_which_a_call_failed_gives_no_graph_and_can_be_dropped() -> None:
    gpu = EmulatedGpu(seed=3)
    block, stream = gpu.allocate(64, "block"), gpu.stream("s")
    for drop in (False, True):
        gpu.begin_capture(stream)
        gpu.fill(block.address, 64, 2, stream)
        gpu.spoil_capture()
        if drop:
            gpu.drop_capture(stream)
            continue
        with pytest.raises(GpuError, match="INVALIDATED"):
            gpu.end_capture(stream)
    gpu.drop_capture(stream)
    gpu.fill(block.address, 64, 3, stream)
    gpu.synchronize(stream)
    assert ctypes.string_at(block.address, 64) == bytes([3]) * 64


def test_elapsed_time_needs_events_that_happened() -> None:
    gpu = EmulatedGpu(seed=3)
    stream, start, end = gpu.stream("s"), gpu.event(timing=True), gpu.event(timing=True)
    gpu.record(start, stream)
    gpu.record(end, stream)
    with pytest.raises(GpuError, match="happened"):
        end.elapsed_ms(start)
    gpu.synchronize()
    assert end.elapsed_ms(start) >= 0
