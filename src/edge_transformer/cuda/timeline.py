"""What happened when on the GPU's streams and on the CPU: a recorder that TracingGpu and the engine report to.

Streams are timed by pairs of events, read out at the end only, so that a traced run is disturbed little; the CPU by
perf_counter. One base event, recorded while nothing else is queued, ties the two clocks together.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edge_transformer.cuda.runtime import Event, Gpu

CPU_TRACK = "CPU"
COMPUTE_TRACK = "compute"
PROMPT_PASS = "prompt pass"
DECODE_PASS = "decode pass"
LOGITS = "logits"

EVENTS_AT_START = 1 << 14
EVENTS_MORE = 1 << 6
"""Few, so that a run longer than planned is not held up for milliseconds."""


class Kind(StrEnum):
    """What a span is. A wait is the time in which a stream stood still until an event of another one."""

    KERNELS = "kernels"
    TO_GPU = "copy to the GPU"
    FROM_GPU = "copy from the GPU"
    ON_GPU = "copy on the GPU"
    WAIT = "wait"
    HOST = "CPU"


@dataclass(frozen=True, slots=True)
class Span:
    """`start` and `end` in seconds since the timeline's base; `nbytes` of copies, entry names of `kernels`."""

    track: str
    kind: Kind
    name: str
    start: float
    end: float
    nbytes: int = 0
    kernels: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class StreamSpan:
    """A span of a stream while it is recorded: the events around it instead of times."""

    kind: Kind
    name: str
    start: Event
    nbytes: int
    kernels: list[str]


class Timeline:
    """Records from `start` to `finish`, or until the GPU is closed. Used by the thread that uses the GPU.

    label: what is being queued, a segment of a layer say; kernels are told apart by it. NVTX ranges go along with the
    CPU's spans where the package `nvtx` is installed.
    """

    def __init__(self) -> None:
        self.running = False
        self.label: str | None = None
        self._gpu: Gpu | None = None
        self._base: Event | None = None
        self._base_host = 0.0
        self._free: list[Event] = []
        self._recorded: list[tuple[str, StreamSpan, Event]] = []
        self._open: list[tuple[str, float]] = []
        self._spans: list[Span] = []
        self._nvtx = _nvtx()

    @property
    def device(self) -> str:
        """Name of the GPU. Raises ValueError without one."""
        return self._attached().properties.name

    def attach(self, gpu: Gpu) -> None:
        """Time the work of `gpu` from `start` on."""
        self._gpu = gpu

    def start(self) -> None:
        """Begin, with the GPU idle; does nothing when it has begun. Raises ValueError without a GPU.

        Until `stop` Python's garbage collector leaves out what there is now: with the many spans that are kept it
        would come often, and looking through all objects of the process takes as long as a token or two.
        """
        if self._base is not None:
            return
        gpu = self._attached()
        gc.collect()
        stream = gpu.stream("timeline")
        self._free = [gpu.event(timing=True) for _ in range(EVENTS_AT_START)]
        base = gpu.event(timing=True)
        gpu.synchronize()
        for _ in range(2):  # the first record is slower than those that follow
            before = time.perf_counter()
            gpu.record(base, stream)
            gpu.synchronize(stream)
            self._base_host = (before + time.perf_counter()) / 2
        self._base = base
        gc.freeze()
        self.running = True

    def stop(self) -> None:
        """Record no more. Does nothing where nothing is recorded."""
        if self.running:
            self.running = False
            gc.unfreeze()

    def event(self) -> Event:
        """An event to record once. They are made many at a time: making one takes longer than recording it."""
        if not self._free:
            gpu = self._attached()
            self._free = [gpu.event(timing=True) for _ in range(EVENTS_MORE)]
        return self._free.pop()

    def add(self, track: str, span: StreamSpan, end: Event) -> None:
        """A span of a stream that is queued completely."""
        self._recorded.append((track, span, end))

    def begin(self, name: str) -> None:
        """A span of the CPU, inside of those that have begun and not ended."""
        self._open.append((name, time.perf_counter()))
        if self._nvtx is not None:
            self._nvtx.push_range(name)

    def end(self) -> None:
        """End the CPU's span that began last."""
        name, started = self._open.pop()
        if self._nvtx is not None:
            self._nvtx.pop_range()
        if self.running:
            offset = self._base_host
            self._spans.append(Span(CPU_TRACK, Kind.HOST, name, started - offset, time.perf_counter() - offset))

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[None]:
        """The block is a span of the CPU."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def finish(self) -> list[Span]:
        """Wait for the GPU, stop recording, and give all spans by start. To be called before the GPU is closed.

        Raises GpuError when the GPU has failed.
        """
        if self._base is not None and self.running:
            self._attached().synchronize()
            self.stop()
            for track, span, end in self._recorded:
                first, last = (event.elapsed_ms(self._base) * 1e-3 for event in (span.start, end))
                self._spans.append(Span(track, span.kind, span.name, first, last, span.nbytes, tuple(span.kernels)))
            self._recorded.clear()
            self._spans.sort(key=lambda span: (span.start, -span.end))
        return list(self._spans)

    def _attached(self) -> Gpu:
        if self._gpu is None:
            raise ValueError("the timeline is attached to no GPU")
        return self._gpu


def _nvtx() -> Any:
    """The package `nvtx`, None where it is not installed."""
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None
