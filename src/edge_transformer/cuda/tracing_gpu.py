"""TracingGpu: a Gpu that passes everything on to another, and reports to a timeline what is queued on which stream.

Neighbouring launches of one label, and neighbouring copies of one direction, make one span: an event between any two of
them would keep kernels from starting early and copies from following each other closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from edge_transformer.cuda.runtime import Argument, Event, Gpu, Graph, Kernel, KernelSource, Memory, Stream
from edge_transformer.cuda.timeline import Kind, StreamSpan, Timeline
from edge_transformer.errors import GpuError


@dataclass(slots=True)
class _Track:
    """A stream, and its span that goes on."""

    stream: Stream
    span: StreamSpan | None = None


class TracingGpu:
    """`gpu`, traced. Graphs are refused: what is inside of one has no times."""

    def __init__(self, gpu: Gpu, timeline: Timeline) -> None:
        self.properties = gpu.properties
        self._gpu = gpu
        self._timeline = timeline
        self._tracks: dict[str, _Track] = {}
        self._recorded_on: dict[Event, str] = {}
        self._device: list[tuple[int, int]] = []
        self._blocks: dict[int, str] = {}
        timeline.attach(gpu)

    # ---- passed on

    def memory_info(self) -> tuple[int, int]:
        return self._gpu.memory_info()

    def allocate(self, nbytes: int, what: str) -> Memory:
        memory = self._gpu.allocate(nbytes, what)
        self._device.append((memory.address, memory.address + nbytes))
        return memory

    def allocate_host(self, nbytes: int, what: str) -> Memory:
        return self._gpu.allocate_host(nbytes, what)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> AbstractContextManager[None] | None:
        return self._gpu.register_host(address, nbytes, read_only)

    def declare_block(self, address: int, nbytes: int, label: str) -> None:
        self._blocks[address] = label
        self._gpu.declare_block(address, nbytes, label)

    def stream(self, name: str) -> Stream:
        stream = self._gpu.stream(name)
        self._tracks[name] = _Track(stream)
        return stream

    def event(self, timing: bool = False) -> Event:
        return self._gpu.event(timing)

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        self._gpu.prepare(sources)

    def kernel(self, source: KernelSource) -> Kernel:
        return self._gpu.kernel(source)

    def close(self) -> None:
        self._timeline.stop()
        self._gpu.close()

    def begin_capture(self, stream: Stream) -> None:
        raise GpuError(f"begin_capture({stream.name}): graphs cannot be used while a timeline is recorded")

    def end_capture(self, stream: Stream) -> Graph:
        raise GpuError(f"end_capture({stream.name}): graphs cannot be used while a timeline is recorded")

    def drop_capture(self, stream: Stream) -> None:
        self._gpu.drop_capture(stream)

    # ---- reported

    def record(self, event: Event, stream: Stream) -> None:
        self._close(stream.name)
        self._recorded_on[event] = stream.name
        self._gpu.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        if not self._timeline.running:
            self._gpu.wait(stream, event)
            return
        self._close(stream.name)
        self._span(stream, Kind.WAIT, f"waits for {self._recorded_on.get(event, 'nothing')}")
        self._gpu.wait(stream, event)
        self._close(stream.name)

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        if self._timeline.running:
            to, of = self._on_device(destination), self._on_device(source)
            kind = Kind.FROM_GPU if not to else Kind.ON_GPU if of else Kind.TO_GPU
            span = self._span(stream, kind, self._label(destination if to else source))
            span.nbytes += nbytes
        self._gpu.copy(destination, source, nbytes, stream)

    def fill(self, destination: int, nbytes: int, value: int, stream: Stream) -> None:
        if self._timeline.running:
            self._span(stream, Kind.KERNELS, self._timeline.label or "fill").kernels.append("fill")
        self._gpu.fill(destination, nbytes, value, stream)

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
        if self._timeline.running:
            entry = kernel.source.entry
            self._span(stream, Kind.KERNELS, self._timeline.label or entry).kernels.append(entry)
        self._gpu.launch(kernel, grid, shared_bytes, stream, arguments, reads, writes)

    def synchronize(self, stream: Stream | None = None) -> None:
        for name in self._tracks if stream is None else (stream.name,):
            self._close(name)
        with self._timeline.host("waits for the GPU"):
            self._gpu.synchronize(stream)

    # ---- parts

    def _span(self, stream: Stream, kind: Kind, name: str) -> StreamSpan:
        """The span of this kind and name that goes on, or one that starts with what is queued next."""
        track = self._tracks[stream.name]
        span = track.span
        # Copies into one slot lie at several addresses; they are one fill, whatever block the later ones lie in.
        if span is not None and span.kind is kind and (span.name == name or kind is Kind.TO_GPU):
            return span
        self._close(stream.name)
        start = self._timeline.event()
        self._gpu.record(start, stream)
        track.span = StreamSpan(kind, name, start, 0, [])
        return track.span

    def _close(self, name: str) -> None:
        """What has been queued on the stream is the end of its span."""
        track = self._tracks[name]
        if track.span is None:
            return
        end = self._timeline.event()
        self._gpu.record(end, track.stream)
        self._timeline.add(name, track.span, end)
        track.span = None

    def _on_device(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._device)

    def _label(self, address: int) -> str:
        """The block that `address` lies in."""
        known = self._blocks.get(address)
        if known is None:
            before = [start for start in self._blocks if start <= address]
            self._blocks[address] = known = self._blocks[max(before)] if before else "device memory"
        return known


def _satisfies_the_seam(gpu: TracingGpu) -> Gpu:
    return gpu
