"""EmulatedGpu: the seam of cuda/runtime.py without a GPU.

Memory is poisoned with NaN when allocated, and while a copy into it is under way. The order of reads and writes is
checked by clocks when work is queued (clocks.py) and shown by value when it is run (work.py: a random order by seed).
Kernels are the product's own, compiled by g++ (build.py), with their blocks, warps and lanes in either order.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import numpy as np

from edge_transformer.cuda.runtime import Argument, Event, Gpu, GpuProperties, Kernel, KernelSource, Stream
from edge_transformer.errors import CapacityError, GpuError
from emulator.build import EmulatedKernel, emulated_kernel
from emulator.capture import Capture, EmulatedGraph
from emulator.clocks import Access, Clock, Clocks
from emulator.memory import EmulatedMemory, MemoryMap, Region, poison
from emulator.work import EmulatedStream, Queues, Work

# Dynamic shared memory that a block may ask for.
SHARED_LIMITS = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
ORDERS = ("ascending", "descending", "random", "both")
PAGE = 4096

_launching = threading.Lock()  # a kernel's shared object keeps its state in globals


class EmulatedEvent:
    """Recorded: `work` to be done and `clock` of what has happened by then."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.work: Work | None = None
        self.clock: Clock = {}
        self.captured: object | None = None  # in a capture: the recording entry

    def elapsed_ms(self, earlier: Event) -> float:
        other = cast(EmulatedEvent, earlier)
        for event in (self, other):
            if not event.timing or event.work is None or not event.work.done:
                raise GpuError("elapsed_ms: both events need timing=True and to have happened")
        return (self.work.done_at - other.work.done_at) * 1e3  # type: ignore[union-attr]


class EmulatedGpu:
    """A Gpu for tests.

    order: of the blocks, warps and lanes of a launch: "ascending", "descending", "random" (one of the two for each
    launch), or "both": every launch is run in both, results have to be equal bit for bit, and nothing else than what
    it may write may have changed.
    capability: what kernels are compiled for. check_order=False leaves the order of work to be found by value.
    """

    def __init__(
        self,
        seed: int,
        order: str = "random",
        capability: tuple[int, int] = (7, 5),
        total_bytes: int = 1 << 30,
        refuse_registration: bool = False,
        check_order: bool = True,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is one of {ORDERS}, not {order!r}")
        self._arch = capability[0] * 10 + capability[1]
        self.properties = GpuProperties(
            name="emulated GPU",
            capability=capability,
            multiprocessors=4,
            shared_bytes_per_block=SHARED_LIMITS[self._arch],
            total_bytes=total_bytes,
            can_register_read_only=not refuse_registration,
        )
        self._order = order
        self._check_order = check_order
        self._queues = Queues(seed)
        self._clocks = Clocks()
        self._map = MemoryMap()
        self._memories: list[EmulatedMemory] = []
        self._capture: Capture | None = None
        self._used = 0
        self._closed = False
        self.launches = 0

    # ---- memory

    def memory_info(self) -> tuple[int, int]:
        return self.properties.total_bytes - self._used, self.properties.total_bytes

    def allocate(self, nbytes: int, what: str) -> EmulatedMemory:
        free, total = self.memory_info()
        if nbytes > free:
            raise CapacityError(f"{what}: {nbytes} bytes of GPU memory asked for, {free} of {total} are free")
        self._used += nbytes
        return self._allocate(nbytes, what, device=True)

    def allocate_host(self, nbytes: int, what: str) -> EmulatedMemory:
        return self._allocate(nbytes, what, device=False)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> AbstractContextManager[None] | None:
        if not self.properties.can_register_read_only:
            return None
        start = address // PAGE * PAGE
        end = -(-(address + nbytes) // PAGE) * PAGE
        region = Region(start, end - start, "registered host memory", device=False, read_only=read_only)
        self._map.regions.append(region)
        return self._registration(region)

    @contextlib.contextmanager
    def _registration(self, region: Region) -> Iterator[None]:
        try:
            yield
        finally:
            self._map.regions.remove(region)
            self._clocks.forget(region.address, region.end)

    def declare_block(self, address: int, nbytes: int, label: str) -> None:
        region = self._map.find(address, nbytes, f"declare_block({label!r})")
        region.blocks.append((address, address + nbytes, label))

    def open_memory(self) -> list[str]:
        """What has been allocated and not been closed."""
        return [memory.region.what for memory in self._memories]

    # ---- streams and events

    def stream(self, name: str) -> EmulatedStream:
        return self._queues.stream(name)

    def event(self, timing: bool = False) -> EmulatedEvent:
        return EmulatedEvent(timing)

    def record(self, event: Event, stream: Stream) -> None:
        emulated, queue = cast(EmulatedEvent, event), cast(EmulatedStream, stream)
        if self._capture is not None and self._capture.holds(queue):
            emulated.captured = self._capture.record(queue)
            return
        emulated.captured = None
        emulated.work = Work("record", lambda: None)
        emulated.clock = self._queue(queue, emulated.work)

    def wait(self, stream: Stream, event: Event) -> None:
        emulated, queue = cast(EmulatedEvent, event), cast(EmulatedStream, stream)
        if emulated.captured is not None:
            if self._capture is None:
                raise GpuError("wait: the event was recorded in a capture that has ended")
            self._capture.wait(queue, emulated.captured)
            return
        if emulated.work is None:  # never recorded: CUDA does not wait
            return
        if self._capture is not None and self._capture.holds(queue):
            raise GpuError("wait: a captured stream cannot wait for an event recorded outside of the capture")
        self._clocks.wait(queue.key, emulated.clock)
        queue.queue.append(Work("wait", lambda: None, after=emulated.work))

    def synchronize(self, stream: Stream | None = None) -> None:
        queue = cast(EmulatedStream | None, stream)
        if self._closed:
            raise GpuError("the GPU was closed")
        if self._capture is not None and (queue is None or self._capture.holds(queue)):
            raise GpuError("synchronize: not while work is captured")
        self._queues.run(queue)
        self._clocks.host_wait(None if queue is None else queue.key)
        for memory in self._memories:
            if damage := memory.check_fences():
                raise GpuError(f"synchronize: {damage}")

    # ---- work

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        name = f"copy of {nbytes} bytes"
        accesses = (
            self._access(source, nbytes, False, name),
            self._access(destination, nbytes, True, name),
        )
        self._submit(
            cast(EmulatedStream, stream),
            Work(
                f"{name} from {accesses[0].label!r} to {accesses[1].label!r}",
                lambda: _move(destination, source, nbytes),
                accesses,
                start=lambda: poison(destination, nbytes),
            ),
        )

    def fill(self, destination: int, nbytes: int, value: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise GpuError(f"fill: a byte is 0 to 255, not {value}")
        access = self._access(destination, nbytes, True, f"fill of {nbytes} bytes")
        work = Work(f"fill of {access.label!r}", lambda: _fill(destination, value, nbytes), (access,))
        self._submit(cast(EmulatedStream, stream), work)

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        """Compiles nothing: a test launches a few of an engine's kernels, g++ would take seconds for all."""
        for source in sources:
            self._check_threads(source)

    def kernel(self, source: KernelSource) -> EmulatedKernel:
        self._check_threads(source)
        return emulated_kernel(source, self._arch)

    def _check_threads(self, source: KernelSource) -> None:
        if source.threads % 32 or not 32 <= source.threads <= 1024:
            raise GpuError(f"{source.file}: {source.entry}: {source.threads} threads are not whole warps up to 1024")

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
        emulated = cast(EmulatedKernel, kernel)
        name = f"kernel {emulated.source.entry}"
        limits = (2**31 - 1, 65535, 65535)
        if any(not 1 <= size <= limit for size, limit in zip(grid, limits, strict=True)):
            raise GpuError(f"{name}: grid {grid} is outside of 1..{limits}")
        if not 0 <= shared_bytes <= self.properties.shared_bytes_per_block:
            raise GpuError(
                f"{name}: {shared_bytes} bytes of dynamic shared memory; a block has "
                f"{self.properties.shared_bytes_per_block}"
            )
        packed, accesses = self._arguments(emulated, name, arguments)
        accesses += [self._access(address, nbytes, False, name) for address, nbytes in reads]
        accesses += [self._access(address, nbytes, True, name) for address, nbytes in writes]

        def run() -> None:
            self._run_kernel(emulated, name, grid, shared_bytes, packed, accesses)

        self._submit(cast(EmulatedStream, stream), Work(name, run, tuple(accesses)))

    # ---- graphs

    def begin_capture(self, stream: Stream) -> None:
        if self._capture is not None:
            raise GpuError("begin_capture: a capture is under way")
        self._capture = Capture(cast(EmulatedStream, stream))

    def end_capture(self, stream: Stream) -> EmulatedGraph:
        if self._capture is None or self._capture.origin is not stream:
            raise GpuError("end_capture: this stream did not begin a capture")
        capture, self._capture = self._capture, None
        return EmulatedGraph(self, capture.finish())

    def drop_capture(self, stream: Stream) -> None:
        if self._capture is not None and self._capture.origin is stream:
            self._capture = None

    def spoil_capture(self) -> None:
        """As a call that fails does to the driver's recording."""
        if self._capture is not None:
            self._capture.spoiled = True

    def close(self) -> None:
        """Run what is queued. Memory that was not closed stays in open_memory(). Closing twice is harmless."""
        if self._closed:
            return
        self._capture = None
        self.synchronize()
        self._closed = True

    # ---- inside

    def queue_again(self, stream: EmulatedStream, work: Work) -> None:
        """Queue work of a graph, whose memory may have been given back since it was captured."""
        for access in work.accesses:
            self._map.find(access.start, access.end - access.start, f"{work.name}, in a graph")
        self._queue(stream, work)

    def _submit(self, stream: EmulatedStream, work: Work) -> None:
        if self._capture is not None and self._capture.holds(stream):
            self._capture.add(stream, work)
        else:
            self._queue(stream, work)

    def _queue(self, stream: EmulatedStream, work: Work) -> Clock:
        clock = self._clocks.queue(stream.key, work.name, work.accesses if self._check_order else ())
        stream.queue.append(work)
        return clock

    def _allocate(self, nbytes: int, what: str, device: bool) -> EmulatedMemory:
        if nbytes < 1:
            raise GpuError(f"{what}: {nbytes} bytes cannot be allocated")
        memory = EmulatedMemory(nbytes, what, device, self._free)
        self._map.regions.append(memory.region)
        self._memories.append(memory)
        return memory

    def _free(self, memory: EmulatedMemory) -> None:
        if self._capture is None:
            self.synchronize()  # as the driver does
        self._map.regions.remove(memory.region)
        self._memories.remove(memory)
        self._clocks.forget(memory.address, memory.address + memory.nbytes)
        if memory.region.device:
            self._used -= memory.nbytes
        poison(memory.address, memory.nbytes)

    def _access(self, address: int, nbytes: int, writes: bool, doing: str) -> Access:
        region = self._map.find(address, nbytes, doing)
        if writes and region.read_only:
            raise GpuError(f"{doing}: {address:#x} lies in host memory registered for reading only")
        return Access(address, address + nbytes, writes, region.block(address)[2])

    def _arguments(
        self, kernel: EmulatedKernel, name: str, arguments: Sequence[Argument]
    ) -> tuple[list[ctypes._SimpleCData], list[Access]]:
        if len(arguments) != len(kernel.parameters):
            raise GpuError(f"{name}: {len(arguments)} arguments given, it has {len(kernel.parameters)} parameters")
        packed: list[ctypes._SimpleCData] = []
        accesses: list[Access] = []
        for index, (value, parameter) in enumerate(zip(arguments, kernel.parameters, strict=True)):
            doing = f"{name}, argument {index}"
            if parameter.letter in "rw":
                if type(value) is not int:
                    raise GpuError(f"{doing}: a pointer is an int, not {value!r}")
                packed.append(ctypes.c_uint64(value))
                if value:
                    region = self._map.find(value, 0, doing)
                    if parameter.letter == "w" and region.read_only:
                        raise GpuError(f"{doing}: {value:#x} lies in host memory registered for reading only")
                    start, end, label = region.block(value)
                    accesses.append(Access(start, end, parameter.letter == "w", label))
                continue
            accepted: dict[tuple[str, int], type[np.generic]]
            accepted = {("i", 4): np.int32, ("i", 8): np.int64, ("f", 4): np.float32}
            wanted = accepted.get((parameter.letter, parameter.nbytes))
            if wanted is None or type(value) is not wanted:
                raise GpuError(
                    f"{doing}: the parameter is {parameter.letter}{parameter.nbytes}, given is {value!r} "
                    f"({type(value).__name__})"
                )
            kind = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}[wanted]
            packed.append(kind(value.item()))  # type: ignore[union-attr]
        return packed, accesses

    def _run_kernel(
        self,
        kernel: EmulatedKernel,
        name: str,
        grid: tuple[int, int, int],
        shared_bytes: int,
        arguments: list[ctypes._SimpleCData],
        accesses: list[Access],
    ) -> None:
        def run(descending: bool) -> None:
            with _launching:
                problem = kernel.run(grid, shared_bytes, self.properties.shared_bytes_per_block, arguments, descending)
            if problem is not None:
                raise GpuError(f"{name}: {problem}")

        self.launches += 1
        if self._order == "both":
            self._run_both_ways(name, run, accesses)
        else:
            run(self._order == "descending" or (self._order == "random" and self._queues.random.random() < 0.5))

    def _run_both_ways(self, name: str, run: Callable[[bool], None], accesses: list[Access]) -> None:
        regions = [region for region in self._map.regions if not region.read_only]
        before = [region.data().copy() for region in regions]
        run(False)
        after = [region.data().copy() for region in regions]
        for region, old in zip(regions, before, strict=True):
            region.data()[:] = old
        run(True)
        for region, old, ascending in zip(regions, before, after, strict=True):
            differing = np.flatnonzero(region.data() != ascending)
            if differing.size:
                at = region.address + int(differing[0])
                raise GpuError(
                    f"{name}: {differing.size} bytes depend on the order of its threads, the first at byte "
                    f"{at - region.block(at)[0]} of {region.block(at)[2]!r}"
                )
            changed = old != ascending
            for access in accesses:
                if access.writes and access.start < region.end and region.address < access.end:
                    changed[max(0, access.start - region.address) : access.end - region.address] = False
            strays = np.flatnonzero(changed)
            if strays.size:
                at = region.address + int(strays[0])
                raise GpuError(
                    f"{name}: wrote {strays.size} bytes outside of what it may write, the first at byte "
                    f"{at - region.block(at)[0]} of {region.block(at)[2]!r}"
                )


def _move(destination: int, source: int, nbytes: int) -> None:
    ctypes.memmove(destination, source, nbytes)


def _fill(destination: int, value: int, nbytes: int) -> None:
    ctypes.memset(destination, value, nbytes)


def _satisfies_the_seam(gpu: EmulatedGpu) -> Gpu:
    return gpu
