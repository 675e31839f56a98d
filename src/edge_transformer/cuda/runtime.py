"""What the CUDA backend asks of a GPU: memory, streams, events, copies, launches. A protocol with two implementations:
`driver.py` (the only importer of `cuda.*`) and, for tests without a GPU, an emulator that runs the same kernel sources.

Addresses are plain ints, device and host alike. Nothing here returns before its effect is ordered: work is queued on a
stream; `synchronize` waits. Every failure is a GpuError that names the call, its arguments and what was being done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One entry point, specialised: `file` in cuda/kernels, `entry` its extern "C" name, `defines` as (name, value).

    `threads` is the block size it is launched with (also given to the compiler as launch bound). early_start: it may
    start before the kernel ahead of it in its stream has ended, and waits itself (wait_for_kernels_ahead).
    """

    file: str
    entry: str
    threads: int
    defines: tuple[tuple[str, str], ...] = ()
    early_start: bool = False


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """`capability` is (major, minor) as the kernels are chosen for: a forced architecture shows here."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block: int
    total_bytes: int
    can_register_read_only: bool


class Stream(Protocol):
    name: str


class Event(Protocol):
    """Recorded on one stream, waited for on others. With timing, `elapsed_ms` is the time since an earlier event."""

    def elapsed_ms(self, earlier: Event) -> float: ...


class Kernel(Protocol):
    source: KernelSource


class Memory(Protocol):
    """Device or page-locked host memory; `close` gives it back."""

    address: int
    nbytes: int

    def close(self) -> None: ...


Argument = int | np.int32 | np.int64 | np.float32
"""Kernel argument: int is a pointer (8 bytes); numbers are numpy scalars of the parameter's exact type."""


class Gpu(Protocol):
    """One GPU, one context."""

    properties: GpuProperties

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        ...

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Device memory aligned to 256. Raises CapacityError naming `what`, bytes asked and bytes free."""
        ...

    def allocate_host(self, nbytes: int, what: str) -> Memory:
        """Page-locked host memory. Raises CapacityError when the host refuses."""
        ...

    def register_host(self, address: int, nbytes: int, read_only: bool) -> AbstractContextManager[None] | None:
        """Page-lock existing host memory (whole pages around it); None when the host or device refuses.

        Mapped files must be mapped shared: the driver hangs on a private read-only mapping.
        """
        ...

    def declare_block(self, address: int, nbytes: int, label: str) -> None:
        """Name a part of allocated memory: errors and the emulator's happens-before check speak of these parts."""
        ...

    def stream(self, name: str) -> Stream: ...

    def event(self, timing: bool = False) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on `stream` from now on starts after `event` (its last record) has happened."""
        ...

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy; both addresses may be device or page-locked (or registered) host memory."""
        ...

    def fill(self, destination: int, nbytes: int, value: int, stream: Stream) -> None:
        """Queue filling with a byte."""
        ...

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        """Compile, several at once, and load what `kernel` will be asked for: a wait at load instead of many."""
        ...

    def kernel(self, source: KernelSource) -> Kernel:
        """Compile (or take from the disk cache) and load. Called at load time, never in a pass."""
        ...

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
        """Queue a launch with the source's block size.

        `reads`/`writes`: (address, nbytes) reached through pointer tables; what pointer arguments reach is derived from
        the kernel's signature (`const T*` is read only) and the declared block each pointer lies in.
        """
        ...

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for all streams of this Gpu; others of the process may go on."""
        ...

    def begin_capture(self, stream: Stream) -> None:
        """Work queued on `stream` from now on is recorded, not run."""
        ...

    def end_capture(self, stream: Stream) -> Graph: ...

    def drop_capture(self, stream: Stream) -> None:
        """End recording on `stream` and forget what was recorded, also where a call that failed has spoiled it. Where
        nothing is being recorded, nothing happens.
        """
        ...

    def close(self) -> None: ...


class Graph(Protocol):
    """Captured work. It keeps no buffer alive."""

    def launch(self, stream: Stream) -> None: ...

    def close(self) -> None: ...
