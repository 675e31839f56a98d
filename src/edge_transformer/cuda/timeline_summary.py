"""What a timeline says about decoding: how busy the bus was, what the copies did not hide, what compute waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_transformer.cuda.timeline import COMPUTE_TRACK, DECODE_PASS, LOGITS, Kind, Span

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds and bytes within decode time: from the start of the first decode pass to the last logits.

    bus: copies to the GPU on any stream. compute: kernels. exposed: kernels while nothing was copied to the GPU.
    waited: the compute stream stood still until an event of a copy stream.
    """

    passes: int
    seconds: float
    bus_seconds: float
    bus_bytes: float
    compute_seconds: float
    exposed_seconds: float
    waited_seconds: float

    @property
    def bus_share(self) -> float:
        return self.bus_seconds / self.seconds

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.seconds

    @property
    def waited_share(self) -> float:
        return self.waited_seconds / self.seconds


def summarize(spans: Sequence[Span]) -> Summary | None:
    """The summary, or None when no decode pass was traced."""
    passes = [span for span in spans if span.kind is Kind.HOST and span.name == DECODE_PASS]
    if not passes:
        return None
    start = min(span.start for span in passes)
    ends = [span.end for span in spans if span.kind is Kind.HOST and span.name == LOGITS and span.start >= start]
    end = max([span.end for span in passes] + ends)
    window = (start, end)
    copies = [span for span in spans if span.kind is Kind.TO_GPU]
    bus = union(_clipped(copies, window))
    compute = union(_clipped((span for span in spans if span.kind is Kind.KERNELS), window))
    waits = union(_clipped((s for s in spans if s.kind is Kind.WAIT and s.track == COMPUTE_TRACK), window))
    compute_seconds = _total(compute)
    return Summary(
        passes=len(passes),
        seconds=end - start,
        bus_seconds=_total(bus),
        bus_bytes=sum(span.nbytes * _share_inside(span, window) for span in copies),
        compute_seconds=compute_seconds,
        exposed_seconds=compute_seconds - _total(intersection(compute, bus)),
        waited_seconds=_total(waits),
    )


def summary_text(summary: Summary) -> str:
    """Four lines for people."""
    rate = summary.bus_bytes / summary.bus_seconds / 1e9 if summary.bus_seconds else 0.0
    lines = (
        ("bus busy", summary.bus_share, f"{summary.bus_bytes / 2**20:.0f} MiB to the GPU at {rate:.1f} GB/s"),
        ("compute not under a copy", summary.exposed_share, f"of {summary.compute_seconds * 1e3:.1f} ms of compute"),
        ("compute waited for copies", summary.waited_share, ""),
    )
    seconds = (summary.bus_seconds, summary.exposed_seconds, summary.waited_seconds)
    text = [f"decode: {summary.passes} passes in {summary.seconds * 1e3:.1f} ms"]
    for (name, share, more), part in zip(lines, seconds, strict=True):
        text.append(f"  {name:26}{share:7.1%}  {part * 1e3:9.1f} ms  {more}".rstrip())
    return "\n".join(text)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as ascending intervals that do not touch."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Points in both; each given as `union` gives it."""
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _clipped(spans: Iterable[Span], window: Interval) -> list[Interval]:
    parts = ((max(span.start, window[0]), min(span.end, window[1])) for span in spans)
    return [(start, end) for start, end in parts if start < end]


def _share_inside(span: Span, window: Interval) -> float:
    if span.seconds <= 0:
        return float(window[0] <= span.start <= window[1])
    return max(0.0, min(span.end, window[1]) - max(span.start, window[0])) / span.seconds


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
