"""A timeline as the JSON that chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format" of the Chromium project; complete events ("X"), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_transformer.cuda.timeline import COMPUTE_TRACK, CPU_TRACK, Span

PROCESS = 1


def chrome_trace(spans: Sequence[Span], device: str) -> dict[str, Any]:
    """The object to write as JSON. Tracks in the order CPU, compute, then the copy streams by name."""
    names = {span.track for span in spans}
    tracks = [name for name in (CPU_TRACK, COMPUTE_TRACK) if name in names]
    tracks += sorted(names.difference(tracks))
    numbers = {name: number for number, name in enumerate(tracks, start=1)}
    events = [_metadata("process_name", 0, {"name": f"edge_transformer on {device}"})]
    for name, number in numbers.items():
        events.append(_metadata("thread_name", number, {"name": name}))
        events.append(_metadata("thread_sort_index", number, {"sort_index": number}))
    events += [_complete(span, numbers[span.track]) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "args": arguments}


def _complete(span: Span, thread: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if span.nbytes:
        arguments["bytes"] = span.nbytes
        if span.seconds > 0:
            arguments["GB/s"] = round(span.nbytes / span.seconds / 1e9, 2)
    if span.kernels:
        arguments["kernels"] = list(span.kernels)
    return {
        "ph": "X",
        "name": span.name,
        "cat": str(span.kind),
        "ts": round(span.start * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "pid": PROCESS,
        "tid": thread,
        "args": arguments,
    }
