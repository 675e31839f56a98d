"""What CudaGpu gives out: streams, events, kernels, memory, graphs. Handles of the driver with their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from edge_transformer.cuda.arguments import ArgumentBuffer
from edge_transformer.cuda.compiler import CompiledKernel
from edge_transformer.cuda.runtime import Event, Stream
from edge_transformer.errors import GpuError

if TYPE_CHECKING:
    from edge_transformer.cuda.driver import CudaGpu

DEFAULT_DYNAMIC_SHARED_BYTES = 48 << 10  # more has to be asked for, kernel by kernel


class CudaStream:
    __slots__ = ("handle", "name")

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle


class CudaEvent:
    __slots__ = ("_gpu", "handle", "timing")

    def __init__(self, gpu: CudaGpu, handle: Any, timing: bool) -> None:
        self._gpu = gpu
        self.handle = handle
        self.timing = timing

    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds since `earlier`. Both have happened, and were made with timing."""
        other = cast(CudaEvent, earlier)
        if not (self.timing and other.timing):
            raise GpuError("elapsed_ms: both events need timing=True")
        return float(self._gpu.call("cuEventElapsedTime", other.handle, self.handle))


class CudaKernel:
    """A loaded entry point. `compiled` has its resource report."""

    __slots__ = ("arguments", "compiled", "dynamic_limit", "early_launch", "function", "label", "module", "source")

    def __init__(self, compiled: CompiledKernel, module: Any, function: Any, sizes: Sequence[int] | None) -> None:
        self.compiled = compiled
        self.source = compiled.source
        self.module = module
        self.function = function
        self.dynamic_limit = DEFAULT_DYNAMIC_SHARED_BYTES
        self.early_launch: Any = None  # a launch configuration, where the kernel may start early
        self.label = f"kernel {self.source.entry}"
        self.arguments = ArgumentBuffer(self.label, sizes)


class CudaMemory:
    """Device or page-locked memory."""

    def __init__(self, gpu: CudaGpu, address: int, nbytes: int, what: str, free: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self.what = what
        self._gpu = gpu
        self._free = free

    def close(self) -> None:
        """Give it back. Closing twice is harmless."""
        if self._gpu.forget(self):
            self._gpu.release(self._free, self.address)


class CudaGraph:
    def __init__(self, gpu: CudaGpu, executable: Any) -> None:
        self._gpu = gpu
        self._executable = executable

    def launch(self, stream: Stream) -> None:
        if self._executable is None:
            raise GpuError("launch: the graph is closed")
        self._gpu.note("a graph")
        self._gpu.call("cuGraphLaunch", self._executable, cast(CudaStream, stream).handle)

    def close(self) -> None:
        if self._executable is not None:
            self._gpu.release("cuGraphExecDestroy", self._executable)
            self._executable = None
