"""How fast the bus is, and the CPU at an output projection: measured at load where a plan depends on it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from edge_transformer.cuda.runtime import Gpu
from edge_transformer.formats.weight import Weight
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.tensor import tensor_of
from edge_transformer.placement.plan import Rates

COPY_BYTES = 32 << 20
COPIES = 6
"""The first ones wake the link up."""

HEAD_BYTES = 128 << 20
"""Of the output projection at most: more than caches hold, read in some milliseconds."""

ROUNDS = 2


def measured_rates(gpu: Gpu, host: Backend, head: Weight) -> Rates:
    """Some 20 ms, and 32 MiB on either side meanwhile. Raises CapacityError when they cannot be had."""
    return Rates(_bus_rate(gpu), _host_head_rate(host, head))


def _bus_rate(gpu: Gpu) -> float:
    source = gpu.allocate_host(COPY_BYTES, "a copy that measures the bus")
    try:
        target = gpu.allocate(COPY_BYTES, "a copy that measures the bus")
        try:
            stream = gpu.stream("bus")
            seconds = []
            for _ in range(COPIES):
                started = time.perf_counter()
                gpu.copy(target.address, source.address, COPY_BYTES, stream)
                gpu.synchronize(stream)
                seconds.append(time.perf_counter() - started)
        finally:
            target.close()
    finally:
        source.close()
    return COPY_BYTES / min(seconds)


def _host_head_rate(host: Backend, head: Weight) -> float:
    """The first rows of the projection, with one row of activations; the first round brings the pages in."""
    layout = head.layout
    rows = min(layout.rows, max(1, HEAD_BYTES // sum(plane.row_pitch for plane in layout.planes)))
    part = Weight(replace(layout, rows=rows), head.address, head.owner)
    x, logits = tensor_of(np.ones((1, layout.cols), np.float32)), tensor_of(np.empty((1, rows), np.float32))
    host.reserve(1, layout.cols, ())
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        host.lm_head(part, x, 1, None, logits)
        seconds.append(time.perf_counter() - started)
    return rows * sum(plane.row_pitch for plane in layout.planes) / min(seconds[1:])
