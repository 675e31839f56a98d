"""Page-locked host memory read by a kernel: what a pass cannot wait for in the queue of the copy engine.

That engine takes copies in the order in which they were queued, whatever their streams, and weights of layers to come
are queued early: a small copy behind them comes some milliseconds late on a slow bus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_transformer.cuda.runtime import Gpu, Kernel, KernelSource, Stream

THREADS = 256
LOADS_OF_A_THREAD = 4
WORDS = (16, 4)
"""Bytes that a thread loads at once, the first that divides all there is."""


def host_reads_sources() -> list[KernelSource]:
    return [_source(word) for word in WORDS]


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `nbytes` bytes each, `source_pitch` bytes from one to the next in host memory and
    `destination_pitch` on the GPU.
    """

    count: int
    nbytes: int
    source_pitch: int
    destination_pitch: int


class HostReads:
    """Reads of one GPU. Kernels are loaded at their first use, unless they were prepared before."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels: dict[int, Kernel] = {}

    def read(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue bringing `nbytes` bytes of page-locked memory to the GPU. ValueError where something is no multiple of
        4.
        """
        self.read_rows(destination, source, Rows(1, nbytes, nbytes, nbytes), stream)

    def read_rows(self, destination: int, source: int, rows: Rows, stream: Stream) -> None:
        """As `read`, for rows that do not lie one behind the other. Between them nothing is written."""
        numbers = (destination, source, rows.nbytes, rows.source_pitch, rows.destination_pitch)
        word = next((word for word in WORDS if not any(number % word for number in numbers)), None)
        if word is None:
            raise ValueError(f"reading {rows} from {source:#x} to {destination:#x}: not all are multiples of 4")
        if word not in self._kernels:
            self._kernels[word] = self._gpu.kernel(_source(word))
        before_the_last = rows.count - 1
        read = (source, before_the_last * rows.source_pitch + rows.nbytes)
        written = (destination, before_the_last * rows.destination_pitch + rows.nbytes)
        self._gpu.launch(
            self._kernels[word],
            (-(-rows.nbytes // (word * THREADS * LOADS_OF_A_THREAD)), rows.count, 1),
            0,
            stream,
            (
                source,
                destination,
                np.int64(rows.source_pitch),
                np.int64(rows.destination_pitch),
                np.int64(rows.nbytes),
            ),
            reads=[read],
            writes=[written],
        )


def _source(word: int) -> KernelSource:
    return KernelSource("host_reads.cu", "read_host_rows", THREADS, (("ETE_WORD_BYTES", str(word)),))
