"""How fast the bus is, and the CPU at an output projection beside it: measured at load where a plan depends on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.formats.weight import Weight
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.tensor import tensor_of
from edge_transformer.placement.plan import Rates

COPY_BYTES = 32 << 20
COPIES = 6
"""The first ones wake the link up."""

HEAD_BYTES = 512 << 20
"""Of the output projection at most: more than the caches of large CPUs hold, read in some milliseconds."""

ROUNDS = 3
"""The slowest counts: where the CPU is late at its part the bus stands still; where it is early some bytes too many
were brought.
"""

MOST_COPIES = 200
"""Queued beside a round of the CPU's at most."""


def measured_rates(gpu: Gpu, host: Backend, head: Weight, rows: int) -> Rates:
    """Some 30 ms, on small machines 150, and 32 MiB on either side meanwhile. `rows`: whose logits the CPU makes at a
    time. Raises CapacityError when the memory cannot be had.
    """
    source = gpu.allocate_host(COPY_BYTES, "a copy that measures the bus")
    try:
        target = gpu.allocate(COPY_BYTES, "a copy that measures the bus")
        try:
            stream = gpu.stream("bus")

            def copy(count: int) -> None:
                for _ in range(count):
                    gpu.copy(target.address, source.address, COPY_BYTES, stream)

            bus = _bus_rate(gpu, stream, copy)
            return Rates(bus, _host_head_rate(host, head, rows, lambda: gpu.synchronize(stream), copy, bus))
        finally:
            target.close()
    finally:
        source.close()


def _bus_rate(gpu: Gpu, stream: Stream, copy: Callable[[int], None]) -> float:
    seconds = []
    for _ in range(COPIES):
        started = time.perf_counter()
        copy(1)
        gpu.synchronize(stream)
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / min(seconds)


def _host_head_rate(
    host: Backend, head: Weight, rows: int, wait: Callable[[], None], copy: Callable[[int], None], bus: float
) -> float:
    """The first rows of the projection, with `rows` rows of activations; the slowest of the rounds but the first. That
    one brings the pages in and says how many copies keep the bus busy during the others: both read the same memory.
    """
    layout = head.layout
    pitch = sum(plane.row_pitch for plane in layout.planes)
    part_rows = min(layout.rows, max(1, HEAD_BYTES // pitch))
    part = Weight(replace(layout, rows=part_rows), head.address, head.owner)
    x = tensor_of(np.ones((rows, layout.cols), np.float32))
    logits = tensor_of(np.empty((rows, part_rows), np.float32))
    host.reserve(rows, layout.cols, ())
    seconds: list[float] = []
    for _ in range(1 + ROUNDS):
        if seconds:
            copy(min(math.ceil(1.5 * seconds[-1] * bus / COPY_BYTES), MOST_COPIES))
        started = time.perf_counter()
        host.lm_head(part, x, rows, None, logits)
        seconds.append(time.perf_counter() - started)
        wait()
    return part_rows * pitch / max(seconds[1:])
