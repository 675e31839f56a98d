"""Where the bus stood still while a model decoded: a traced run, its summary, and its idle time by what went on."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_measure import open_model, past_of

from edge_transformer.cuda.chrome_trace import chrome_trace
from edge_transformer.cuda.timeline import COMPUTE_TRACK, DECODE_PASS, Kind, Span, Timeline
from edge_transformer.cuda.timeline_summary import Interval, Summary, summarize, union
from edge_transformer.engine.chunk import Chunk
from edge_transformer.placement.plan import Wishes

WARM_PASSES = 3
SHOWN_CAUSES = 6


@dataclass(frozen=True, slots=True)
class Decoded:
    """A traced run: its summary, tokens per second, and both with the idle time in words."""

    summary: Summary
    rate: float
    text: str


def traced_decode(path: Path, wishes: Wishes, threads: int, depth: int, tokens: int, keep: Path | None) -> Decoded:
    """Decode `tokens` tokens on from `depth`, traced, the likeliest each time; the timeline goes to the file `keep` for
    ui.perfetto.dev.
    """
    timeline = Timeline()
    with open_model(path, wishes, depth + tokens + WARM_PASSES, threads, timeline=timeline) as opened:
        sequence = past_of(opened.engine, depth)
        token = 1
        for _ in range(tokens + WARM_PASSES):
            result = opened.engine.step([Chunk(sequence, [token], "decode", "last")])
            if result is None:
                raise AssertionError("a pass was given up")
            token = result.likeliest()[0]
        spans = timeline.finish()
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_text(json.dumps(chrome_trace(spans, opened.gpu.properties.name)))
    spans = without_first_passes(spans, WARM_PASSES)
    summary = summarize(spans)
    if summary is None:
        raise AssertionError("no decode pass was traced")
    per_pass = 1e3 / summary.passes
    causes = [f"{seconds * per_pass:.3f} ms {cause}" for cause, seconds in idle_time(spans)[:SHOWN_CAUSES]]
    lengths = [end - start for start, end in idle_intervals(spans)]
    rate = summary.bus_bytes / summary.bus_seconds / 1e9
    text = (
        f"{summary.bus_bytes / summary.passes / 1e6:.0f} MB a token at {rate:.1f} GB/s; "
        f"a token took {summary.seconds * per_pass:.2f} ms, {summary.exposed_share:.1%} compute not under a copy, "
        f"{summary.waited_share:.1%} compute waiting; the bus idle {len(lengths) / summary.passes:.0f} times a token, "
        f"median {statistics.median(lengths or [0]) * 1e6:.0f} us: {', '.join(causes)}"
    )
    return Decoded(summary, summary.passes / summary.seconds, text)


def without_first_passes(spans: Sequence[Span], count: int) -> list[Span]:
    """Spans from the start of decode pass `count` on."""
    starts = sorted(span.start for span in spans if span.kind is Kind.HOST and span.name == DECODE_PASS)
    return [span for span in spans if span.end > starts[count]] if count < len(starts) else []


def idle_intervals(spans: Sequence[Span]) -> list[Interval]:
    """When nothing was copied to the GPU, within the time from the first decode pass to the end of the last."""
    passes = [span for span in spans if span.kind is Kind.HOST and span.name == DECODE_PASS]
    if not passes:
        return []
    window = (min(span.start for span in passes), max(span.end for span in passes))
    return _gaps(union((span.start, span.end) for span in spans if span.kind is Kind.TO_GPU), window)


def idle_time(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Seconds of `idle_intervals` by what the GPU's compute stream and the CPU did meanwhile; the most first. The CPU's
    layers count as one.
    """
    causes: dict[str, float] = defaultdict(float)
    compute = [span for span in spans if span.track == COMPUTE_TRACK]
    host = [span for span in spans if span.kind is Kind.HOST]
    for gap in idle_intervals(spans):
        for start, end, gpu_span, host_span in _pieces(gap, compute, host):
            causes[f"(GPU {_gpu_words(gpu_span)}; CPU {_host_words(host_span)})"] += end - start
    return sorted(causes.items(), key=lambda item: -item[1])


def _gaps(busy: Sequence[Interval], window: Interval) -> list[Interval]:
    """What `busy`, ascending, leaves free of the window."""
    gaps, position = [], window[0]
    for start, end in busy:
        if start > position:
            gaps.append((position, min(start, window[1])))
        position = max(position, end)
        if position >= window[1]:
            return [gap for gap in gaps if gap[0] < gap[1]]
    return [gap for gap in (*gaps, (position, window[1])) if gap[0] < gap[1]]


def _pieces(
    gap: Interval, compute: Sequence[Span], host: Sequence[Span]
) -> list[tuple[float, float, Span | None, Span | None]]:
    """The gap cut where a span begins or ends, each piece with the compute stream's and the CPU's innermost span."""
    near_compute = [span for span in compute if span.start < gap[1] and span.end > gap[0]]
    near_host = [span for span in host if span.start < gap[1] and span.end > gap[0]]
    cuts = {gap[0], gap[1]}
    cuts.update(t for span in (*near_compute, *near_host) for t in (span.start, span.end) if gap[0] < t < gap[1])
    ordered = sorted(cuts)
    pieces = []
    for start, end in itertools.pairwise(ordered):
        inside = [
            min((s for s in near if s.start <= start and s.end >= end), key=lambda s: s.seconds, default=None)
            for near in (near_compute, near_host)
        ]
        pieces.append((start, end, inside[0], inside[1]))
    return pieces


def _gpu_words(span: Span | None) -> str:
    if span is None:
        return "idle"
    if span.kind is Kind.KERNELS:
        return f"in {span.name.split()[-1]}" if span.name.startswith("layer ") else f"in {span.name}"
    return span.name if span.kind is Kind.WAIT else str(span.kind)


def _host_words(span: Span | None) -> str:
    if span is None:
        return "between passes"
    return "queues a layer" if span.name.startswith("layer ") else f"in {span.name}"
