"""The timeline: spans of the whole engine on the emulated GPU, and the summary's arithmetic by hand."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import MODES, model_path, open_on_gpu, tokens_of
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.chrome_trace import chrome_trace
from edge_transformer.cuda.timeline import Kind, Span, Timeline
from edge_transformer.cuda.timeline_summary import Summary, intersection, summarize, summary_text, union
from edge_transformer.cuda.tracing_gpu import TracingGpu
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import GpuError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Wishes
from emulator import EmulatedGpu

LEAST = Wishes(1 << 28, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU)
HEAD_STREAMED = Wishes(1 << 28, resident_layers=0, slots=2, kv_offload=False, head=HeadPlace.STREAMED)
DECODED = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_path(tmp_path_factory.mktemp("models"), "llama")


def logits_of(engine: Engine, prompt: int = 20) -> np.ndarray:
    """Of a prompt and DECODED tokens more, one by one."""
    tokens = tokens_of(prompt + DECODED)
    sequence = engine.new_sequence()
    logits = [engine.prefill(sequence, tokens[:prompt])]
    for token in tokens[prompt:]:
        result = engine.step([Chunk(sequence, [token], "decode", "last")])
        assert result is not None
        logits.append(result.logits()[0])
    sequence.close()
    return np.array(logits)


def traced(path: Path, wishes: Wishes, seed: int = 0, prompt: int = 20) -> tuple[np.ndarray, list[Span]]:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    timeline = Timeline()
    engine, _ = open_gpu_engine(
        EmulatedGpu(seed),
        checkpoint,
        spec,
        HostWeights(checkpoint, spec),
        CpuBackend(1),
        DType.F32,
        GpuOptions(wishes, 1024, timeline=timeline),
        max_rows=64,
    )
    logits = logits_of(engine, prompt)
    spans = timeline.finish()
    engine.close()
    return logits, spans


@pytest.mark.parametrize("mode", ["all resident", "streamed by layers", "head streamed", "least"])
def test_a_traced_run_has_the_same_logits_and_orderly_spans(path: Path, mode: str) -> None:
    wishes = {"least": LEAST, "head streamed": HEAD_STREAMED}.get(mode) or MODES[mode]
    prompt = 513 if mode == "least" else 20  # a tile that is full is copied
    logits, spans = traced(path, wishes, prompt=prompt)
    plain = open_on_gpu(path, wishes).engine
    assert np.array_equal(logits, logits_of(plain, prompt))
    plain.close()
    tracks = {name: [s for s in spans if s.track == name] for name in {span.track for span in spans}}
    expected = {"CPU", "compute"}
    expected |= {"weight copies"} if wishes.resident_layers == 0 else set()
    expected |= {"KV copies"} if wishes.kv_offload else set()
    assert set(tracks) == expected
    for name in expected - {"CPU"}:
        for before, after in itertools.pairwise(tracks[name]):
            assert before.start <= before.end <= after.start
    for outer, inner in itertools.pairwise(tracks["CPU"]):  # nested, or one after the other
        assert inner.start >= outer.end or inner.end <= outer.end
    names = [span.name for span in tracks["CPU"]]
    assert names.count("decode pass") == DECODED
    assert names.count("prompt pass") == -(-prompt // 64)
    assert names.count("logits") == DECODED + 1
    assert names.count("embedding rows") == DECODED + -(-prompt // 64)
    assert names.count("output projection on the CPU") == (DECODED + 1 if mode == "least" else 0)
    # Copies that compute has to wait for would come after the weights that were queued ahead.
    assert not [span for span in tracks["compute"] if span.kind is Kind.TO_GPU]
    kernels = {span.name for span in tracks["compute"] if span.kind is Kind.KERNELS}
    assert {"layer 0 mixer", "layer 0 gate_up", "layer 0 down"} <= kernels


def test_the_garbage_collector_leaves_out_what_was_there_while_it_records() -> None:
    timeline = Timeline()
    timeline.attach(EmulatedGpu(0))
    gc.unfreeze()
    timeline.start()
    assert gc.get_freeze_count() > 10_000
    timeline.finish()
    assert gc.get_freeze_count() == 0


def test_the_garbage_collector_sees_everything_again_when_the_gpu_is_closed_before_the_end() -> None:
    """As where a pass has failed: `finish` is not called, or fails too."""
    timeline = Timeline()
    gpu = TracingGpu(EmulatedGpu(0), timeline)
    timeline.start()
    assert gc.get_freeze_count() > 0
    gpu.close()
    assert gc.get_freeze_count() == 0


def test_streamed_weights_arrive_while_layers_are_computed(path: Path) -> None:
    _, spans = traced(path, MODES["streamed by layers"], seed=1)
    fills = [span for span in spans if span.track == "weight copies" and span.kind is Kind.TO_GPU]
    assert {span.name for span in fills} == {"weight slot 0", "weight slot 1"}
    layers = [span for span in spans if span.kind is Kind.KERNELS and span.name.startswith("layer")]
    assert any(f.start < k.end and k.start < f.end for f in fills for k in layers)
    waits = {(span.track, span.name) for span in spans if span.kind is Kind.WAIT}
    assert waits == {("compute", "waits for weight copies"), ("weight copies", "waits for compute")}
    # Every segment once a pass, and the two that were fetched ahead of the next one.
    host = HostWeights(checkpoint := open_checkpoint(path), spec := read_model(checkpoint))
    segments = [sum(weight.layout.nbytes for weight in matrices.values()) for matrices in host.layer(0).values()]
    host.close()
    passes = (DECODED + 1) * spec.config.num_layers * sum(segments)
    assert sum(span.nbytes for span in fills) == passes + sum(segments[:2])


def test_tiles_of_the_kv_cache_arrive_while_the_gpu_computes(path: Path) -> None:
    """With all weights resident, a full tile of each layer crosses the bus in every pass after that which filled it."""
    wishes = MODES["KV cache on the host"]
    prompt = 600
    _, spans = traced(path, wishes, seed=4, prompt=prompt)
    copies = [span for span in spans if span.track == "KV copies" and span.kind is Kind.TO_GPU]
    kernels = [span for span in spans if span.track == "compute" and span.kind is Kind.KERNELS]
    assert any(c.start < k.end and k.start < c.end for c in copies for k in kernels)
    tile_bytes = 2 * 2 * 512 * 16 * 4
    passes = -(-(prompt - 512) // 64) + DECODED
    assert [span.nbytes for span in copies] == [tile_bytes] * 3 * passes


def test_the_summary_of_a_traced_run_is_within_its_time(path: Path) -> None:
    _, spans = traced(path, LEAST, seed=2)
    summary = summarize(spans)
    assert summary is not None
    assert summary.passes == DECODED
    for share in (summary.bus_share, summary.exposed_share, summary.waited_share):
        assert 0 <= share <= 1
    assert summary.bus_bytes > 0
    assert summary.exposed_seconds <= summary.compute_seconds <= summary.seconds


def span(track: str, kind: Kind, start: float, end: float, name: str = "", nbytes: int = 0) -> Span:
    return Span(track, kind, name, start, end, nbytes)


def test_the_summary_by_hand() -> None:
    spans = [
        span("weight copies", Kind.TO_GPU, 0, 2, nbytes=800),  # half of it before decode time
        span("CPU", Kind.HOST, 0, 1, "prompt pass"),
        span("CPU", Kind.HOST, 0.5, 0.9, "logits"),
        span("CPU", Kind.HOST, 1, 2, "decode pass"),
        span("compute", Kind.WAIT, 1, 2),
        span("weight copies", Kind.WAIT, 2, 2.5),  # of the copy stream: not compute's
        span("compute", Kind.KERNELS, 2, 4),
        span("KV copies", Kind.TO_GPU, 3, 5, nbytes=100),
        span("weight copies", Kind.TO_GPU, 4, 6, nbytes=300),  # one second of it beside the KV copy
        span("compute", Kind.FROM_GPU, 7, 8, nbytes=5),
        span("compute", Kind.KERNELS, 8, 10),
        span("CPU", Kind.HOST, 5, 6, "decode pass"),
        span("CPU", Kind.HOST, 6, 9, "logits"),
    ]
    # Decode time is 1 to 9: copies 1-2 and 3-6; compute 2-4 and 8-9, of which 3-4 lies under a copy.
    assert summarize(spans) == Summary(
        passes=2, seconds=8, bus_seconds=4, bus_bytes=800, compute_seconds=3, exposed_seconds=2, waited_seconds=1
    )
    text = summary_text(summarize(spans) or pytest.fail("no summary"))
    assert text.splitlines()[0] == "decode: 2 passes in 8000.0 ms"
    assert "bus busy                    50.0%" in text
    assert "compute not under a copy    25.0%" in text
    assert "compute waited for copies   12.5%" in text


class _ClockEvent:
    def __init__(self) -> None:
        self.time = 0.0

    def elapsed_ms(self, earlier: _ClockEvent) -> float:
        return (self.time - earlier.time) * 1e3


class _ClockStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.time = 0.0


class _ClockGpu:
    """Streams with clocks: a copy takes a second a byte, a launch as many as its grid is wide, the host no time."""

    properties = EmulatedGpu(0).properties

    def allocate(self, nbytes: int, what: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(address=1 << 20, nbytes=nbytes)

    def declare_block(self, address: int, nbytes: int, label: str) -> None:
        pass

    def stream(self, name: str) -> _ClockStream:
        return _ClockStream(name)

    def event(self, timing: bool = False) -> _ClockEvent:
        return _ClockEvent()

    def record(self, event: _ClockEvent, stream: _ClockStream) -> None:
        event.time = stream.time

    def wait(self, stream: _ClockStream, event: _ClockEvent) -> None:
        stream.time = max(stream.time, event.time)

    def copy(self, destination: int, source: int, nbytes: int, stream: _ClockStream) -> None:
        stream.time += nbytes

    def launch(self, kernel: object, grid: tuple[int, int, int], shared: int, stream: _ClockStream, *_: object) -> None:
        stream.time += grid[0]

    def synchronize(self, stream: _ClockStream | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("copy_seconds", "compute_seconds", "bus", "exposed", "waited"),
    # Four units through two slots. Copies back to back from 0 on, compute 3 seconds after each: all of 0-43.
    # Or compute back to back from 3 on; of its 40 seconds 12 lie under the copies 3-6, 13-16, 23-26, 33-36.
    [(10, 3, 43, 0, 10 + 7 + 7 + 7), (3, 10, 15, 28, 3)],
    ids=["bus bound", "compute bound"],
)
def test_streams_with_known_times(copy_seconds: int, compute_seconds: int, bus: int, exposed: int, waited: int) -> None:
    timeline = Timeline()
    gpu = TracingGpu(_ClockGpu(), timeline)  # type: ignore[arg-type]
    slots = [gpu.allocate(200, "arena").address + 100 * number for number in range(2)]
    for number, slot in enumerate(slots):
        gpu.declare_block(slot, 100, f"slot {number}")
    compute, copies = gpu.stream("compute"), gpu.stream("weight copies")
    filled, freed = ([gpu.event(), gpu.event()] for _ in "ab")
    kernel = types.SimpleNamespace(source=types.SimpleNamespace(entry="gemv"))

    def fill(unit: int) -> None:
        gpu.wait(copies, freed[unit % 2])
        gpu.copy(slots[unit % 2], 7, copy_seconds - 1, copies)  # in two parts: one span
        gpu.copy(slots[unit % 2] + copy_seconds - 1, 90, 1, copies)
        gpu.record(filled[unit % 2], copies)

    timeline.start()
    for event in freed:
        gpu.record(event, compute)
    fill(0)
    fill(1)
    for unit in range(4):
        gpu.wait(compute, filled[unit % 2])
        timeline.label = f"layer {unit}"
        gpu.launch(kernel, (compute_seconds - 2, 1, 1), 0, compute, ())  # type: ignore[arg-type]
        gpu.launch(kernel, (2, 1, 1), 0, compute, ())  # type: ignore[arg-type]
        timeline.label = None
        gpu.record(freed[unit % 2], compute)
        fill(unit + 2)
    spans = timeline.finish()
    summary = summarize([*spans, span("CPU", Kind.HOST, 0, 43, "decode pass")])
    assert summary is not None
    assert (summary.bus_seconds, summary.compute_seconds) == (bus, 4 * compute_seconds)
    assert (summary.exposed_seconds, summary.waited_seconds) == (exposed, waited)
    assert summary.bus_bytes == bus
    assert [(s.name, s.kernels) for s in spans if s.kind is Kind.KERNELS] == [
        (f"layer {unit}", ("gemv", "gemv")) for unit in range(4)
    ]
    copied = [(s.name, s.nbytes) for s in spans if s.kind is Kind.TO_GPU]
    assert copied == [(f"slot {unit % 2}", copy_seconds) for unit in range(6)]


def test_no_decode_pass_no_summary() -> None:
    assert summarize([span("CPU", Kind.HOST, 0, 1, "prompt pass")]) is None
    assert summarize([]) is None


def test_intervals_against_points() -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        lists = [[(int(a), int(a + n)) for a, n in random.integers(1, 9, (random.integers(0, 6), 2))] for _ in "ab"]
        points = [{p for start, end in intervals for p in range(start, end)} for intervals in lists]
        joined = [union(intervals) for intervals in lists]
        for intervals, expected in zip(joined, points, strict=True):
            assert sum(end - start for start, end in intervals) == len(expected)
        common = intersection(*joined)
        assert {p for start, end in common for p in range(start, end)} == points[0] & points[1]


def test_the_trace_is_what_viewers_read(path: Path) -> None:
    _, spans = traced(path, MODES["streamed by layers"], seed=3)
    trace = json.loads(json.dumps(chrome_trace(spans, "emulated GPU")))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {1: "CPU", 2: "compute", 3: "weight copies"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(spans)
    assert all(e["dur"] >= 0 and e["tid"] in names and e["pid"] == 1 for e in complete)
    assert {e["cat"] for e in complete} >= {"kernels", "copy to the GPU", "copy from the GPU", "wait", "CPU"}
    assert all(e["args"]["bytes"] > 0 for e in complete if e["cat"].startswith("copy"))
    first = next(e for e in complete if e["cat"] == "kernels")
    assert first["args"]["kernels"]
    micro = chrome_trace([span("compute", Kind.KERNELS, 1.5, 1.75)], "x")["traceEvents"][-1]
    assert (micro["ts"], micro["dur"]) == (1.5e6, 0.25e6)


def test_graphs_are_refused_while_tracing() -> None:
    gpu = TracingGpu(EmulatedGpu(0), Timeline())
    stream = gpu.stream("compute")
    for call in (gpu.begin_capture, gpu.end_capture):
        with pytest.raises(GpuError, match="while a timeline is recorded"):
            call(stream)


def test_nvtx_ranges_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module = types.SimpleNamespace(push_range=calls.append, pop_range=lambda: calls.append("pop"))
    monkeypatch.setitem(sys.modules, "nvtx", module)  # type: ignore[arg-type]
    timeline = Timeline()
    with timeline.host("outer"), timeline.host("inner"):
        pass
    assert calls == ["outer", "inner", "pop", "pop"]
    assert timeline.finish() == []  # not started: nothing is kept
