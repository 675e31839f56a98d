"""CudaGpu without a GPU: the driver's functions replaced by ones that answer as told and note what they were asked."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda.kernel_sources import basic
from edge_transformer.cuda import driver, driver_library
from edge_transformer.cuda.arguments import ArgumentBuffer
from edge_transformer.cuda.cubin_cache import KernelCache
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.errors import CapacityError, GpuError, UsageError

MIB = 1 << 20
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
    "HOST_REGISTER_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
}


STATUS_ONLY = {
    *("cuCtxSetCurrent", "cuEventRecord", "cuEventDestroy", "cuFuncSetAttribute", "cuLaunchKernel"),
    *("cuDevicePrimaryCtxRelease", "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphLaunch", "cuMemFree"),
    *("cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyAsync", "cuMemsetD8Async"),
    *("cuModuleUnload", "cuStreamBeginCapture", "cuStreamDestroy", "cuStreamSynchronize", "cuStreamWaitEvent"),
}


class FakeDriver:
    """Constants and types of the real bindings; every call answers `answers[name]`, else success and 4096."""

    def __init__(self) -> None:
        self.real = pytest.importorskip("cuda.bindings.driver")
        self.calls: list[tuple[Any, ...]] = []
        self.attributes = dict(ATTRIBUTES)
        ok = self.real.CUresult.CUDA_SUCCESS
        self.answers: dict[str, Any] = {
            "cuDeviceGetCount": (ok, 2),
            "cuDeviceGetName": (ok, b"Fake Card\0\0"),
            "cuDeviceTotalMem": (ok, 4096 * MIB),
            "cuMemGetInfo": (ok, 100 * MIB, 4096 * MIB),
            "cuFuncGetParamInfo": self.parameter,
            "cuGetErrorString": (ok, b"what it means"),
            "cuDeviceGetAttribute": lambda attribute, device: (ok, self.attributes[attribute.name[20:]]),
        }
        for name in STATUS_ONLY:
            self.answers[name] = (ok,)

    def parameter(self, function: Any, index: int) -> tuple[Any, ...]:
        """scale_add's parameters."""
        if index < 5:
            return self.real.CUresult.CUDA_SUCCESS, 8 * index, [8, 8, 8, 4, 8][index]
        return self.real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0

    def fail(self, name: str, error: str) -> None:
        result = getattr(self.real.CUresult, f"CUDA_ERROR_{error}")
        self.answers[name] = (result,) if name in STATUS_ONLY else (result, None)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, *arguments in self.calls if called == name]  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)
        answer = self.answers.get(name, (self.real.CUresult.CUDA_SUCCESS, 4096))

        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return answer(*arguments) if callable(answer) else answer

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(driver, "load_driver", lambda: made)
    return made


@pytest.fixture
def gpu(fake: FakeDriver, tmp_path: Path) -> CudaGpu:
    return CudaGpu(cache=KernelCache(tmp_path))


def test_properties(gpu: CudaGpu) -> None:
    assert gpu.properties.name == "Fake Card"
    assert gpu.properties.capability == (9, 0)
    assert gpu.properties.multiprocessors == 132
    assert gpu.properties.total_bytes == 4096 * MIB
    assert gpu.memory_info() == (100 * MIB, 4096 * MIB)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: CudaGpu(2), UsageError, r"device 2: this machine has 2 GPU"),
        (lambda: CudaGpu(forced_capability=(12, 0)), UsageError, r"\(7, 5\) and this card's \(9, 0\)"),
        (lambda: CudaGpu(forced_capability=(7, 0)), UsageError, r"between \(7, 5\)"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_cannot_be_opened(action: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action()


def test_a_card_that_is_too_old(fake: FakeDriver) -> None:
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 6
    with pytest.raises(GpuError, match=r"Fake Card has compute capability 6.0; 7.5 or later"):
        CudaGpu()


def test_out_of_memory_names_what_and_how_much(gpu: CudaGpu, fake: FakeDriver) -> None:
    fake.fail("cuMemAlloc", "OUT_OF_MEMORY")
    with pytest.raises(CapacityError, match=r"arena: .* \(200.0 MiB\) .*; 100.0 MiB of 4,096.0 MiB are free .*--vram"):
        gpu.allocate(200 * MIB, "arena")
    fake.fail("cuMemHostAlloc", "OUT_OF_MEMORY")
    with pytest.raises(CapacityError, match=r"ring: the host refuses to page-lock 1048576 bytes"):
        gpu.allocate_host(MIB, "ring")


def test_errors_name_the_call_and_its_arguments(gpu: CudaGpu, fake: FakeDriver) -> None:
    stream, memory = gpu.stream("copies"), gpu.allocate(1000, "slot 1")
    fake.fail("cuMemcpyAsync", "INVALID_VALUE")
    with pytest.raises(GpuError) as raised:
        gpu.copy(memory.address + 16, 123, 999, stream)
    text = str(raised.value)
    assert text.startswith("cuMemcpyAsync(to 'slot 1' + 16, from 0x7b, 999 bytes, copies): CUDA_ERROR_INVALID_VALUE")
    assert "what it means" in text


def test_a_lost_context_says_what_was_queued_and_closes(gpu: CudaGpu, fake: FakeDriver) -> None:
    stream, memory = gpu.stream("s"), gpu.allocate(1000, "block")
    kernel = gpu.kernel(basic("scale_add"))
    gpu.launch(kernel, (1, 1, 1), 0, stream, (1, 2, 3, np.float32(4), np.int64(5)))
    fake.fail("cuStreamSynchronize", "ILLEGAL_ADDRESS")
    with pytest.raises(GpuError, match=r"ILLEGAL_ADDRESS .* latest last: kernel scale_add\. .*in this process"):
        gpu.synchronize(stream)
    fake.fail("cuMemFree", "ILLEGAL_ADDRESS")
    memory.close()
    gpu.close()
    gpu.close()


def test_a_launch_packs_its_arguments(gpu: CudaGpu, fake: FakeDriver) -> None:
    kernel, stream = gpu.kernel(basic("scale_add")), gpu.stream("s")
    gpu.launch(kernel, (7, 2, 1), 0, stream, (2**40 + 1, 2, 2**63 + 3, np.float32(1.5), np.int64(-5)))
    ((_, *grid_block, shared, _, pointers, extra),) = fake.called("cuLaunchKernel")
    assert grid_block == [7, 2, 1, 128, 1, 1]
    assert (shared, extra) == (0, 0)
    slots = (ctypes.c_void_p * 5).from_address(pointers)
    assert [ctypes.c_uint64.from_address(slots[i]).value for i in range(3)] == [2**40 + 1, 2, 2**63 + 3]
    assert ctypes.c_float.from_address(slots[3]).value == 1.5
    assert ctypes.c_int64.from_address(slots[4]).value == -5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2, 3, 4, np.int64(5)), r"parameters have \[8, 8, 8, 4, 8\] bytes, the arguments given \[8, 8, 8, 8, 8\]"),
        ((1, 2, 3, np.float32(4)), r"given \[8, 8, 8, 4\]"),
        ((1, 2, 3, 4.0, np.int64(5)), r"kernel scale_add, argument 3: .* not float"),
        ((1, 2, True, np.float32(4), np.int64(5)), r"argument 2: .* not bool"),
    ],
)
def test_wrong_arguments_are_refused(gpu: CudaGpu, arguments: tuple[Any, ...], message: str) -> None:
    kernel, stream = gpu.kernel(basic("scale_add")), gpu.stream("s")
    with pytest.raises(GpuError, match=message):
        gpu.launch(kernel, (1, 1, 1), 0, stream, arguments)


def test_arguments_of_a_kernel_whose_sizes_are_unknown() -> None:
    buffer = ArgumentBuffer("kernel x", None)
    buffer.pack((7, np.int32(-3)))
    slots = (ctypes.c_void_p * 2).from_address(buffer.pointers)
    assert ctypes.c_uint64.from_address(slots[0]).value == 7
    assert ctypes.c_int32.from_address(slots[1]).value == -3


def test_an_old_driver_cannot_tell_sizes(gpu: CudaGpu, fake: FakeDriver) -> None:
    def absent(*_: Any) -> Any:
        raise RuntimeError("Function cuFuncGetParamInfo not found")

    fake.answers["cuFuncGetParamInfo"] = absent
    kernel = gpu.kernel(basic("count_up", 32))
    gpu.launch(kernel, (1, 1, 1), 0, gpu.stream("s"), (1, 2))
    assert fake.called("cuLaunchKernel")


def test_much_dynamic_shared_memory_is_asked_for_once(gpu: CudaGpu, fake: FakeDriver) -> None:
    kernel, stream = gpu.kernel(basic("scale_add")), gpu.stream("s")
    arguments = 1, 2, 3, np.float32(4), np.int64(5)
    for shared in (48 << 10, 49 << 10, 49 << 10, 100 << 10, 50 << 10):
        gpu.launch(kernel, (1, 1, 1), shared, stream, arguments)
    assert [value for _, _, value in fake.called("cuFuncSetAttribute")] == [49 << 10, 100 << 10]
    with pytest.raises(GpuError, match=r"kernel scale_add: 232449 bytes .* Fake Card has 232448"):
        gpu.launch(kernel, (1, 1, 1), (227 << 10) + 1, stream, arguments)


def test_registration_covers_whole_pages(gpu: CudaGpu, fake: FakeDriver) -> None:
    registered = gpu.register_host(4096 * 5 + 100, 5000, read_only=True)
    assert registered is not None
    with registered:
        ((start, nbytes, flags),) = fake.called("cuMemHostRegister")
        assert (start, nbytes) == (4096 * 5, 8192)
        assert flags & fake.real.CU_MEMHOSTREGISTER_READ_ONLY
        assert not fake.called("cuMemHostUnregister")
    assert fake.called("cuMemHostUnregister") == [[4096 * 5]]


def test_closing_ends_registrations_as_others_may_keep_the_context_alive(gpu: CudaGpu, fake: FakeDriver) -> None:
    registered, ended = gpu.register_host(4096 * 5, 10, read_only=False), gpu.register_host(0, 10, read_only=False)
    assert registered is not None
    assert ended is not None
    with registered:
        with ended:
            pass
        gpu.close()
    calls = [call[0] for call in fake.calls]
    assert fake.called("cuMemHostUnregister") == [[0], [4096 * 5]]
    assert calls.index("cuDevicePrimaryCtxRelease") == len(calls) - 1


def test_registration_is_refused_in_peace(gpu: CudaGpu, fake: FakeDriver) -> None:
    for error in ("NOT_SUPPORTED", "OUT_OF_MEMORY", "NOT_PERMITTED"):
        fake.fail("cuMemHostRegister", error)
        assert gpu.register_host(4096, 10, read_only=False) is None
    fake.fail("cuMemHostRegister", "HOST_MEMORY_ALREADY_REGISTERED")
    with pytest.raises(GpuError, match="ALREADY_REGISTERED"):
        gpu.register_host(4096, 10, read_only=False)
    fake.attributes["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
    assert gpu.register_host(4096, 10, read_only=True) is None


def test_everything_is_given_back(gpu: CudaGpu, fake: FakeDriver) -> None:
    kept, closed, host = gpu.allocate(10, "a"), gpu.allocate(10, "b"), gpu.allocate_host(10, "c")
    gpu.stream("s")
    gpu.event()
    gpu.kernel(basic("scale_add"))
    closed.close()
    closed.close()
    gpu.close()
    kept.close()
    host.close()
    for call, times in (
        *(("cuMemFree", 2), ("cuMemFreeHost", 1), ("cuStreamDestroy", 1), ("cuEventDestroy", 1)),
        *(("cuModuleUnload", 1), ("cuDevicePrimaryCtxRelease", 1)),
    ):
        assert len(fake.called(call)) == times, call
    with pytest.raises(GpuError, match="closed"):
        gpu.allocate(10, "a")


def test_a_kernel_is_loaded_once(gpu: CudaGpu, fake: FakeDriver) -> None:
    gpu.prepare([basic("scale_add"), basic("count_up", 32), basic("scale_add")])
    assert gpu.kernel(basic("scale_add")) is gpu.kernel(basic("scale_add"))
    assert len(fake.called("cuModuleLoadData")) == 2


@pytest.mark.parametrize("error", [None, "STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_UNJOINED"])
def test_a_recording_is_dropped_also_where_a_failed_call_has_spoiled_it(
    gpu: CudaGpu, fake: FakeDriver, error: str | None
) -> None:
    stream = gpu.stream("s")
    if error is not None:
        fake.fail("cuStreamEndCapture", error)
    gpu.begin_capture(stream)
    gpu.drop_capture(stream)
    assert len(fake.called("cuStreamEndCapture")) == 1
    assert len(fake.called("cuGraphDestroy")) == (error is None)
    assert not fake.called("cuGraphInstantiate")


def test_where_nothing_is_recorded_nothing_is_dropped(gpu: CudaGpu, fake: FakeDriver) -> None:
    none = fake.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    fake.answers["cuStreamIsCapturing"] = (fake.real.CUresult.CUDA_SUCCESS, none)
    gpu.drop_capture(gpu.stream("s"))
    assert not fake.called("cuStreamEndCapture")


def test_dropping_a_recording_reports_other_errors(gpu: CudaGpu, fake: FakeDriver) -> None:
    stream = gpu.stream("s")
    fake.fail("cuStreamEndCapture", "STREAM_CAPTURE_WRONG_THREAD")
    with pytest.raises(GpuError, match=r"cuStreamEndCapture\(s\): CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"):
        gpu.drop_capture(stream)


def test_on_a_lost_gpu_there_is_nothing_to_drop(gpu: CudaGpu, fake: FakeDriver) -> None:
    """The error that says so must not be covered by another."""
    stream = gpu.stream("s")
    fake.fail("cuStreamSynchronize", "ILLEGAL_ADDRESS")
    with pytest.raises(GpuError, match="ILLEGAL_ADDRESS"):
        gpu.synchronize(stream)
    gpu.drop_capture(stream)
    assert not fake.called("cuStreamIsCapturing")


@pytest.mark.usefixtures("gpu")
def test_waiting_for_all_is_waiting_for_ones_own_streams(fake: FakeDriver, tmp_path: Path) -> None:
    """A wait for the context that all of a process share would spoil what another is recording."""
    streams = iter(range(100, 200))
    fake.answers["cuStreamCreate"] = lambda _: (fake.real.CUresult.CUDA_SUCCESS, next(streams))
    one, other = (CudaGpu(cache=KernelCache(tmp_path)) for _ in range(2))
    one.begin_capture(one.stream("recorded"))
    own = [other.stream(name).handle for name in "ab"]
    memory = np.zeros(8192, np.uint8)
    registration = other.register_host(memory.ctypes.data, 8192, read_only=False)
    assert registration is not None
    fake.calls.clear()
    other.synchronize()
    with registration:
        pass
    other.close()
    assert fake.called("cuStreamSynchronize") == [[handle] for handle in own * 3]
    assert not fake.called("cuCtxSynchronize")


# ---- what is said when something is missing


class Library:
    """What `import cuda.bindings.driver` finds, to be told what to answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import cuda.bindings

        self.real = pytest.importorskip("cuda.bindings.driver")
        self._patch = monkeypatch
        self._patch.setattr(cuda.bindings, "__version__", "13.5.0")
        self.answer("cuInit", (self.real.CUresult.CUDA_SUCCESS,))
        self.answer("cuDriverGetVersion", (self.real.CUresult.CUDA_SUCCESS, 13000))

    def answer(self, name: str, value: Any) -> None:
        self._patch.setattr(self.real, name, lambda *arguments: value)

    def load(self) -> Any:
        return driver_library.load_driver.__wrapped__()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    pytest.importorskip("cuda.bindings.driver")
    return Library(monkeypatch)


def test_a_driver_that_fits(library: Library) -> None:
    assert library.load() is library.real


def test_a_driver_that_is_too_old(library: Library) -> None:
    library.answer("cuDriverGetVersion", (library.real.CUresult.CUDA_SUCCESS, 12080))
    with pytest.raises(GpuError, match=r"supports CUDA 12.8, the installed packages need 13.0: .*\[cuda12\]"):
        library.load()


def test_no_gpu(library: Library) -> None:
    library.answer("cuInit", (library.real.CUresult.CUDA_ERROR_NO_DEVICE,))
    with pytest.raises(GpuError, match="no NVIDIA GPU that it may use"):
        library.load()


def test_a_broken_driver(library: Library) -> None:
    library.answer("cuInit", (library.real.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,))
    with pytest.raises(GpuError, match=r"cuInit\(0\): CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        library.load()


def test_no_driver(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> Any:
        raise RuntimeError("libcuda.so.1 is not here")

    monkeypatch.setattr(library.real, "cuInit", absent)
    with pytest.raises(GpuError, match="no NVIDIA driver was found: install it"):
        library.load()


@pytest.mark.parametrize("there", [True, False])
def test_no_package(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Nobody installs packages only to hear that the driver is missing too."""

    def library(name: str) -> None:
        assert name == "libcuda.so.1"
        if not there:
            raise OSError(name)

    monkeypatch.setattr(driver_library.ctypes, "CDLL", library)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    expected = r"^the packages .* not installed " if there else r"^no NVIDIA driver was found, nor the packages "
    with pytest.raises(GpuError, match=expected + r".*edge-transformer-engine\[cuda\]"):
        driver_library.load_driver.__wrapped__()


def test_kernels_that_wait_themselves_are_launched_early(fake: FakeDriver, tmp_path: Path) -> None:
    """On the path of sm_90, and never below, where their code does not wait."""
    source = replace(basic("scale_add"), early_start=True)
    fake.answers["cuLaunchKernelEx"] = (fake.real.CUresult.CUDA_SUCCESS,)
    arguments = (1, 2, 3, np.float32(1.5), np.int64(-5))
    gpu = CudaGpu(cache=KernelCache(tmp_path))
    gpu.launch(gpu.kernel(source), (7, 2, 1), 16, gpu.stream("s"), arguments)
    ((configuration, function, _, _),) = fake.called("cuLaunchKernelEx")
    sizes = [getattr(configuration, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"]
    assert (sizes, configuration.sharedMemBytes, function) == ([7, 2, 1, 128, 1, 1], 16, 4096)
    (attribute,) = configuration.attrs
    assert attribute.id.name.endswith("PROGRAMMATIC_STREAM_SERIALIZATION")
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert not fake.called("cuLaunchKernel")

    older = CudaGpu(forced_capability=(8, 0), cache=KernelCache(tmp_path))
    older.launch(older.kernel(source), (7, 2, 1), 16, older.stream("s"), arguments)
    assert len(fake.called("cuLaunchKernelEx")) == 1
    assert len(fake.called("cuLaunchKernel")) == 1


def test_closing_one_leaves_another_of_the_same_process_usable(gpu: CudaGpu, fake: FakeDriver, tmp_path: Path) -> None:
    """They share the card's primary context and the thread's current one."""
    gpu.memory_info()
    other = CudaGpu(cache=KernelCache(tmp_path))
    other.close()
    fake.calls.clear()
    gpu.memory_info()
    assert [call[0] for call in fake.calls][:2] == ["cuCtxSetCurrent", "cuMemGetInfo"]
    gpu.memory_info()
    assert [call[0] for call in fake.calls][2:] == ["cuMemGetInfo"]


def test_closing_one_in_the_middle_of_anothers_call_leaves_its_context_current(
    gpu: CudaGpu, fake: FakeDriver, tmp_path: Path
) -> None:
    """As the garbage collector may do between entering the context and the driver's call."""
    other = CudaGpu(cache=KernelCache(tmp_path))
    gpu.memory_info()
    fake.calls.clear()
    other.close()
    contexts = [call[1:] for call in fake.calls if call[0] == "cuCtxSetCurrent"]
    assert len(contexts) == 3
    assert contexts[1] == (None,)
    assert contexts[2] != (None,)
    assert [call[0] for call in fake.calls][-1] == "cuCtxSetCurrent"
    fake.calls.clear()
    gpu.memory_info()
    assert [call[0] for call in fake.calls] == ["cuMemGetInfo"]
