"""CudaGpu: the seam of runtime.py on a real GPU, through the driver's own calls.

Every status is checked. A failed call raises GpuError with the call, its arguments and the driver's reason; what a
kernel did wrong is reported by a later call, so the error then names what was queued since the last wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

from edge_transformer.cuda.compiler import OLDEST, CompiledKernel, compile_all
from edge_transformer.cuda.cubin_cache import KernelCache
from edge_transformer.cuda.driver_library import load_driver
from edge_transformer.cuda.driver_objects import CudaEvent, CudaGraph, CudaKernel, CudaMemory, CudaStream
from edge_transformer.cuda.runtime import Argument, Event, Gpu, GpuProperties, Kernel, KernelSource, Stream
from edge_transformer.errors import CapacityError, GpuError, UsageError
from edge_transformer.hub.progress import Progress, silent

PAGE_BYTES = 4096
QUEUED_NAMES = 8
EARLY_START_CAPABILITY = (9, 0)  # of the kernels' path: their code waits from there on

# After these nothing works any more in this process: the driver answers every call with the same error.
_CONTEXT_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *(
            "ILLEGAL_ADDRESS",
            "LAUNCH_FAILED",
            "LAUNCH_TIMEOUT",
            "ASSERT",
            "HARDWARE_STACK_ERROR",
            "ILLEGAL_INSTRUCTION",
        ),
        *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),
        *("CONTAINED", "EXTERNAL_DEVICE", "CONTEXT_IS_DESTROYED", "DEINITIALIZED"),
    )
)
# The host or the device does not page-lock this memory: the caller has another way.
_REGISTRATION_REFUSED = frozenset(
    f"CUDA_ERROR_{name}"
    for name in ("NOT_SUPPORTED", "NOT_PERMITTED", "OUT_OF_MEMORY", "INVALID_VALUE", "OPERATING_SYSTEM")
)
# Answers to the end of a recording in which a call failed, or that was left in the middle: it has ended all the same.
_CAPTURE_SPOILED = frozenset(f"CUDA_ERROR_STREAM_CAPTURE_{name}" for name in ("INVALIDATED", "UNJOINED"))


_current = threading.local()
"""`gpu`: the CudaGpu whose context is this thread's current one, as the driver keeps it, for all CudaGpus together."""


class CudaGpu:
    """The GPU number `ordinal` of this machine, in the process's primary context. Used by one thread at a time.

    forced_capability: take the kernels' path for an older card, such as (7, 5); the code is still made for this card.
    cache: where compiled kernels are kept. progress: told of kernels that have to be compiled.
    Raises GpuError when packages, driver or GPU are missing or too old, UsageError for an ordinal or path there is not.
    """

    def __init__(
        self,
        ordinal: int = 0,
        forced_capability: tuple[int, int] | None = None,
        cache: KernelCache | None = None,
        progress: Progress = silent,
    ) -> None:
        self._driver = load_driver()
        self._cache = KernelCache() if cache is None else cache
        self._progress = progress
        self._queued: deque[str] = deque(maxlen=QUEUED_NAMES)
        self._memories: set[CudaMemory] = set()
        self._registered: set[int] = set()  # addresses of registered host memory
        self._blocks: list[tuple[int, int, str]] = []
        self._streams: list[CudaStream] = []
        self._events: list[CudaEvent] = []
        self._kernels: dict[KernelSource, CudaKernel] = {}
        self._lost = False
        self._closed = False
        self._open(ordinal)
        self._native = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        if self._native[0] * 10 + self._native[1] < OLDEST:
            raise GpuError(
                f"{self._name()} has compute capability {self._native[0]}.{self._native[1]}; {OLDEST / 10} or later is "
                "needed (Turing, 2018): use --device of another GPU, or the CPU"
            )
        if forced_capability is not None and not (7, 5) <= forced_capability <= self._native:
            raise UsageError(
                f"forced capability (--gpu-arch) {forced_capability}: between (7, 5) and this card's {self._native} "
                f"({self._name()})"
            )
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self._enter()
        self.properties = GpuProperties(
            name=self._name(),
            capability=forced_capability or self._native,
            multiprocessors=self._attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes_per_block=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            total_bytes=int(self.call("cuDeviceTotalMem", self._device)),
            can_register_read_only=self._can_register(read_only=True),
        )

    # ---- memory

    def memory_info(self) -> tuple[int, int]:
        self._enter()
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int, what: str) -> CudaMemory:
        self._enter()
        if nbytes < 1:
            raise GpuError(f"{what}: {nbytes} bytes cannot be allocated")
        status, address = self._driver.cuMemAlloc(nbytes)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory_info()
            raise CapacityError(
                f"{what}: {nbytes} bytes ({_mib(nbytes)}) of GPU memory asked for; {_mib(free)} of {_mib(total)} are "
                f"free on {self.properties.name}: lower --vram, or end what else uses the GPU"
            )
        self._check(status, "cuMemAlloc", (nbytes, what))
        return self._remember(CudaMemory(self, int(address), nbytes, what, "cuMemFree"))

    def allocate_host(self, nbytes: int, what: str) -> CudaMemory:
        self._enter()
        if nbytes < 1:
            raise GpuError(f"{what}: {nbytes} bytes cannot be allocated")
        status, address = self._driver.cuMemHostAlloc(nbytes, self._driver.CU_MEMHOSTALLOC_PORTABLE)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise CapacityError(
                f"{what}: the host refuses to page-lock {nbytes} bytes ({_mib(nbytes)}): free memory, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._check(status, "cuMemHostAlloc", (nbytes, what))
        return self._remember(CudaMemory(self, int(address), nbytes, what, "cuMemFreeHost"))

    def register_host(self, address: int, nbytes: int, read_only: bool) -> AbstractContextManager[None] | None:
        self._enter()
        if not self._can_register(read_only):
            return None
        start = address // PAGE_BYTES * PAGE_BYTES
        size = -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES - start
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE
        if read_only:
            flags |= self._driver.CU_MEMHOSTREGISTER_READ_ONLY
        (status,) = self._driver.cuMemHostRegister(start, size, flags)
        if status and status.name in _REGISTRATION_REFUSED:
            return None
        self._check(status, "cuMemHostRegister", (hex(start), size, flags))
        self._registered.add(start)
        return self._registration(start)

    @contextlib.contextmanager
    def _registration(self, start: int) -> Iterator[None]:
        try:
            yield
        finally:
            if start in self._registered:  # the GPU, closed first, has ended it
                self._registered.discard(start)
                self._wait_for_all()  # a copy may still read there
                self.release("cuMemHostUnregister", start)

    def declare_block(self, address: int, nbytes: int, label: str) -> None:
        self._blocks.append((address, address + nbytes, label))

    # ---- streams and events

    def stream(self, name: str) -> CudaStream:
        self._enter()
        handle = self.call("cuStreamCreate", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._streams.append(CudaStream(name, handle))
        return self._streams[-1]

    def event(self, timing: bool = False) -> CudaEvent:
        self._enter()
        flags = self._driver.CUevent_flags
        handle = self.call("cuEventCreate", (flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value)
        self._events.append(CudaEvent(self, handle, timing))
        return self._events[-1]

    def record(self, event: Event, stream: Stream) -> None:
        self._enter()
        (status,) = self._driver.cuEventRecord(cast(CudaEvent, event).handle, cast(CudaStream, stream).handle)
        if status:
            self._fail(status, "cuEventRecord", (stream.name,))

    def wait(self, stream: Stream, event: Event) -> None:
        self._enter()
        (status,) = self._driver.cuStreamWaitEvent(cast(CudaStream, stream).handle, cast(CudaEvent, event).handle, 0)
        if status:
            self._fail(status, "cuStreamWaitEvent", (stream.name,))

    def synchronize(self, stream: Stream | None = None) -> None:
        self._enter()
        if stream is None:
            for each in self._streams:
                self.synchronize(each)
            self._queued.clear()
        else:
            (status,) = self._driver.cuStreamSynchronize(cast(CudaStream, stream).handle)
            if status:
                self._fail(status, "cuStreamSynchronize", (stream.name,))

    # ---- work

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        self._enter()
        (status,) = self._driver.cuMemcpyAsync(destination, source, nbytes, cast(CudaStream, stream).handle)
        if status:
            ends = f"to {self._where(destination)}", f"from {self._where(source)}"
            self._fail(status, "cuMemcpyAsync", (*ends, f"{nbytes} bytes", stream.name))
        self._queued.append("a copy")

    def fill(self, destination: int, nbytes: int, value: int, stream: Stream) -> None:
        self._enter()
        self.call("cuMemsetD8Async", destination, value, nbytes, cast(CudaStream, stream).handle)
        self._queued.append("a fill")

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        self._enter()
        missing = [source for source in dict.fromkeys(sources) if source not in self._kernels]
        major, minor = self.properties.capability
        for compiled in compile_all(missing, major * 10 + minor, self._native, self._cache, progress=self._progress):
            self._kernels[compiled.source] = self._load(compiled)

    def kernel(self, source: KernelSource) -> CudaKernel:
        if source not in self._kernels:
            self.prepare([source])
        return self._kernels[source]

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        stream: Stream,
        arguments: Sequence[Argument],
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._enter()
        loaded = cast(CudaKernel, kernel)
        if shared_bytes > loaded.dynamic_limit:
            self._raise_dynamic_limit(loaded, shared_bytes)
        buffer = loaded.arguments
        buffer.pack(arguments)
        handle = cast(CudaStream, stream).handle
        early = loaded.early_launch
        if early is None:
            (status,) = self._driver.cuLaunchKernel(
                loaded.function, *grid, loaded.source.threads, 1, 1, shared_bytes, handle, buffer.pointers, 0
            )
        else:
            early.gridDimX, early.gridDimY, early.gridDimZ = grid
            early.sharedMemBytes = shared_bytes
            early.hStream = handle
            (status,) = self._driver.cuLaunchKernelEx(early, loaded.function, buffer.pointers, 0)
        if status:
            details = f"grid {grid}", f"{loaded.source.threads} threads", f"{shared_bytes} bytes of shared memory"
            call = "cuLaunchKernel" if early is None else "cuLaunchKernelEx"
            self._fail(status, call, (loaded.label, dict(loaded.source.defines), *details, stream.name))
        self._queued.append(loaded.label)

    # ---- graphs

    def begin_capture(self, stream: Stream) -> None:
        self._enter()
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", cast(CudaStream, stream).handle, mode)

    def end_capture(self, stream: Stream) -> CudaGraph:
        self._enter()
        graph = self.call("cuStreamEndCapture", cast(CudaStream, stream).handle)
        try:
            return CudaGraph(self, self.call("cuGraphInstantiate", graph, 0))
        finally:
            self.release("cuGraphDestroy", graph)

    def drop_capture(self, stream: Stream) -> None:
        self._enter()
        if self._lost:
            return
        handle = cast(CudaStream, stream).handle
        if self.call("cuStreamIsCapturing", handle) == self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return
        status, graph = self._driver.cuStreamEndCapture(handle)
        if status:
            if status.name not in _CAPTURE_SPOILED:
                self._fail(status, "cuStreamEndCapture", (stream.name,))
        else:
            self.release("cuGraphDestroy", graph)

    def close(self) -> None:
        """Wait for what is queued, then give back everything. Closing twice is harmless."""
        if self._closed:
            return
        entered = getattr(_current, "gpu", None)
        self._enter()
        self._wait_for_all()
        for memory in list(self._memories):
            memory.close()
        # Others of this process share the context and keep it alive, and registrations with it: of memory that is given
        # back meanwhile, too, whose addresses could then not be registered again.
        while self._registered:
            self.release("cuMemHostUnregister", self._registered.pop())
        for kernel in self._kernels.values():
            self.release("cuModuleUnload", kernel.module)
        for event in self._events:
            self.release("cuEventDestroy", event.handle)
        for stream in self._streams:
            self.release("cuStreamDestroy", stream.handle)
        self._closed = True
        _current.gpu = None  # others of this process, on the same GPU or another, set theirs when they come
        self.release("cuCtxSetCurrent", None)
        self.release("cuDevicePrimaryCtxRelease", self._device)
        # The garbage collector can come here in the middle of another's call, which needs its context to go on.
        if entered is not None and entered is not self and not entered._closed:
            entered._enter()

    # ---- for the objects given out

    def call(self, name: str, *arguments: Any) -> Any:
        """The driver's answer to `name`, without the status: one value, a tuple of them, or None."""
        status, *answer = getattr(self._driver, name)(*arguments)
        self._check(status, name, arguments)
        return answer[0] if len(answer) == 1 else tuple(answer) or None

    def release(self, name: str, *arguments: Any) -> None:
        """Call what gives something back. Once the context is lost there is nothing left to give back."""
        if not self._closed:
            self._enter()
        if not self._lost:
            self.call(name, *arguments)

    def note(self, work: str) -> None:
        self._enter()
        self._queued.append(work)

    def forget(self, memory: CudaMemory) -> bool:
        """Whether the memory was still open; it no longer is."""
        if memory not in self._memories:
            return False
        self._memories.discard(memory)
        end = memory.address + memory.nbytes
        self._blocks = [block for block in self._blocks if not memory.address <= block[0] < end]
        return True

    # ---- inside

    def _wait_for_all(self) -> None:
        """Wait for this GPU's streams, unless it is lost. Not for the whole context: where another of this process
        records a graph meanwhile that fails, and spoils the recording.
        """
        for stream in self._streams:
            self.release("cuStreamSynchronize", stream.handle)

    def _open(self, ordinal: int) -> None:
        count = int(self.call("cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise UsageError(f"device {ordinal}: this machine has {count} GPU(s), numbered from 0")
        self._device = self.call("cuDeviceGet", ordinal)

    def _name(self) -> str:
        return bytes(self.call("cuDeviceGetName", 256, self._device)).split(b"\0")[0].decode(errors="replace")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self._device))

    def _can_register(self, read_only: bool) -> bool:
        if not self._attribute("HOST_REGISTER_SUPPORTED"):
            return False
        return not read_only or bool(self._attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))

    def _enter(self) -> None:
        """Make the context current, unless it is this thread's already."""
        if getattr(_current, "gpu", None) is not self:
            if self._closed:
                raise GpuError("the GPU was closed")
            self.call("cuCtxSetCurrent", self._context)
            _current.gpu = self

    def _remember(self, memory: CudaMemory) -> CudaMemory:
        self._memories.add(memory)
        self.declare_block(memory.address, memory.nbytes, memory.what)
        return memory

    def _load(self, compiled: CompiledKernel) -> CudaKernel:
        source = compiled.source
        status, module = self._driver.cuModuleLoadData(compiled.code)
        self._check(status, "cuModuleLoadData", (source.file, source.entry, compiled.target))
        status, function = self._driver.cuModuleGetFunction(module, source.entry.encode())
        self._check(status, "cuModuleGetFunction", (source.file, source.entry))
        kernel = CudaKernel(compiled, module, function, self._parameter_sizes(function))
        if source.early_start and self.properties.capability >= EARLY_START_CAPABILITY:
            kernel.early_launch = self._early_launch(source.threads)
        return kernel

    def _early_launch(self, threads: int) -> Any:
        """A launch configuration with which a kernel may start before the one ahead of it has ended."""
        names = self._driver
        attribute = names.CUlaunchAttribute()
        attribute.id = names.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        configuration = names.CUlaunchConfig()
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = threads, 1, 1
        configuration.attrs = [attribute]
        configuration.numAttrs = 1
        return configuration

    def _parameter_sizes(self, function: Any) -> list[int] | None:
        sizes: list[int] = []
        while True:
            try:
                status, _, size = self._driver.cuFuncGetParamInfo(function, len(sizes))
            except RuntimeError:  # a driver before 12.4 has no such call
                return None
            if status == self._driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last
                return sizes
            self._check(status, "cuFuncGetParamInfo", (len(sizes),))
            sizes.append(int(size))

    def _raise_dynamic_limit(self, kernel: CudaKernel, nbytes: int) -> None:
        most = self.properties.shared_bytes_per_block
        if nbytes > most:
            raise GpuError(
                f"{kernel.label}: {nbytes} bytes of dynamic shared memory; a block of {self.properties.name} has {most}"
            )
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", kernel.function, attribute, nbytes)
        kernel.dynamic_limit = nbytes

    def _where(self, address: int) -> str:
        around = [block for block in self._blocks if block[0] <= address < block[1]]
        if not around:
            return hex(address)
        start, _, label = min(around, key=lambda block: block[1] - block[0])
        return f"{label!r} + {address - start}"

    def _check(self, status: Any, call: str, arguments: Sequence[Any]) -> None:
        if status:
            self._fail(status, call, arguments)

    def _fail(self, status: Any, call: str, arguments: Sequence[Any]) -> NoReturn:
        _, text = self._driver.cuGetErrorString(status)
        reason = f"{status.name} ({text.decode() if text else 'no description'})"
        message = f"{call}({', '.join(map(str, arguments))}): {reason}"
        if status.name in _CONTEXT_LOST:
            self._lost = True
            queued = ", ".join(self._queued) or "nothing"
            message += (
                f"; queued since the last wait, latest last: {queued}. The GPU cannot be used again in this process"
            )
        raise GpuError(message)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _satisfies_the_seam(gpu: CudaGpu) -> Gpu:
    return gpu
