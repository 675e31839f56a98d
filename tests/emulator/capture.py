"""Captured work of the emulated GPU, and graphs that queue it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from edge_transformer.cuda.runtime import Stream
from edge_transformer.errors import GpuError
from emulator.clocks import Clock, merge
from emulator.work import EmulatedStream, Work

if TYPE_CHECKING:
    from emulator.gpu import EmulatedEvent, EmulatedGpu


@dataclass(eq=False)
class Entry:
    """On `stream`: work, or (work is None) a record when `waits_for` is None, else a wait for that record."""

    stream: str
    work: Work | None = None
    waits_for: Entry | None = None


class Capture:
    """From begin to end. Streams join by waiting for an event recorded in the capture, and have to be joined again.

    spoiled: a call failed in it, so that no graph comes of it.
    """

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self._entries: list[Entry] = []
        self._clocks: dict[str, Clock] = {origin.key: {}}
        self._recorded: dict[int, Clock] = {}
        self.spoiled = False

    def holds(self, stream: EmulatedStream) -> bool:
        return stream.key in self._clocks

    def add(self, stream: EmulatedStream, work: Work) -> None:
        clock = self._clocks[stream.key]
        clock[stream.key] = clock.get(stream.key, 0) + 1
        self._entries.append(Entry(stream.key, work))

    def record(self, stream: EmulatedStream) -> Entry:
        entry = Entry(stream.key)
        self._recorded[id(entry)] = dict(self._clocks[stream.key])
        self._entries.append(entry)
        return entry

    def wait(self, stream: EmulatedStream, recorded: object) -> None:
        entry = cast(Entry, recorded)
        if id(entry) not in self._recorded:
            raise GpuError("wait: the event was recorded in another capture")
        merge(self._clocks.setdefault(stream.key, {}), self._recorded[id(entry)])
        self._entries.append(Entry(stream.key, waits_for=entry))

    def finish(self) -> list[Entry]:
        if self.spoiled:
            raise GpuError("end_capture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: a call has failed in it")
        end = self._clocks[self.origin.key]
        for stream, clock in self._clocks.items():
            if end.get(stream, 0) < clock.get(stream, 0):
                raise GpuError(f"end_capture: work on stream {stream!r} was not joined to {self.origin.name!r}")
        return [Entry(self.origin.key), *self._entries]


class EmulatedGraph:
    """Queues its work anew at each launch, under the same checks as work queued directly."""

    def __init__(self, gpu: EmulatedGpu, entries: list[Entry]) -> None:
        self._gpu = gpu
        self._entries: list[Entry] | None = entries

    def launch(self, stream: Stream) -> None:
        if self._entries is None:
            raise GpuError("launch: the graph is closed")
        origin = self._entries[0].stream
        streams = {origin: cast(EmulatedStream, stream)}
        events: dict[int, EmulatedEvent] = {}
        for entry in self._entries:
            if entry.stream not in streams:
                streams[entry.stream] = self._gpu.stream(entry.stream)
            target = streams[entry.stream]
            if entry.work is not None:
                self._gpu.queue_again(target, replace(entry.work))
            elif entry.waits_for is None:
                events[id(entry)] = self._gpu.event()
                self._gpu.record(events[id(entry)], target)
            else:
                self._gpu.wait(target, events[id(entry.waits_for)])

    def close(self) -> None:
        self._entries = None
