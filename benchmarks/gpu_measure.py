"""Measuring an engine on a GPU: opening a model, decode and prefill rates, and what the buses allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.cuda.runtime import Memory
from edge_transformer.cuda.timeline import Timeline
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import Weight
from edge_transformer.models.read import read_model
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.tensor import DType, Tensor
from edge_transformer.placement.plan import HeadPlace, KvPlace, Plan, Wishes

PLAIN = (7, 5)
"""The path of cards without tensor cores."""

WARM_TOKENS = 3
WINDOWS = 3
COPY_BYTES = 256 << 20

NO_WEIGHTS = ("KV cache", "recurrent state", "workspace")
"""Lines of a plan's ledger."""


class CountedMemory:
    """Device memory that is on its GPU's list until it is closed."""

    def __init__(self, memory: Memory, live: dict[int, tuple[str, int]], what: str) -> None:
        self.address, self.nbytes = memory.address, memory.nbytes
        self._memory, self._live = memory, live
        live[self.address] = (what, self.nbytes)

    def close(self) -> None:
        self._live.pop(self.address, None)
        self._memory.close()


class CountingGpu(CudaGpu):
    """A GPU that knows what device memory it was asked for and has not got back."""

    def __init__(self, forced_capability: tuple[int, int] | None = None) -> None:
        super().__init__(forced_capability=forced_capability)
        self.live: dict[int, tuple[str, int]] = {}

    def allocate(self, nbytes: int, what: str) -> Memory:
        return CountedMemory(super().allocate(nbytes, what), self.live, what)


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine on a GPU. head: the output projection in host memory. load_seconds: what opening it took."""

    engine: Engine
    plan: Plan
    gpu: CountingGpu
    head: Weight
    host: CpuBackend
    load_seconds: float

    @property
    def head_bytes(self) -> int:
        return self.head.layout.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the GPU has room for: resident ones, slots, small vectors."""
        return sum(nbytes for label, nbytes in self.plan.ledger if label not in NO_WEIGHTS)

    @property
    def arena_bytes(self) -> int:
        """All device memory that was really allocated; the plan's arena, or the engine does not keep to it."""
        allocated = sum(nbytes for _, nbytes in self.gpu.live.values())
        if allocated != self.plan.arena_bytes:
            raise AssertionError(f"the plan says {self.plan.arena_bytes} bytes, there are {self.gpu.live}")
        return allocated

    def kv_bytes(self, depth: int) -> int:
        """KV bytes of `depth` positions, all layers."""
        return depth * sum(layer.tile_bytes for layer in self.engine.state_shape.layers) // KV_TILE_POSITIONS


@contextmanager
def open_model(
    path: Path,
    wishes: Wishes,
    context: int,
    threads: int,
    plain: bool = False,
    fast_prefill: bool = False,
    timeline: Timeline | None = None,
) -> Iterator[Opened]:
    """The model at `path` on a GPU, KV cache in bf16; closed at the end."""
    started = time.perf_counter()
    checkpoint = open_checkpoint(path)
    try:
        spec = read_model(checkpoint)
        gpu = CountingGpu(PLAIN if plain else None)
        try:
            weights = HostWeights(checkpoint, spec, threads)
            options = GpuOptions(wishes, context, fast_prefill=fast_prefill, timeline=timeline, measure=True)
            host = CpuBackend(threads)
            engine, plan = open_gpu_engine(gpu, checkpoint, spec, weights, host, DType.BF16, options)
        except BaseException:
            gpu.close()
            raise
        try:
            yield Opened(engine, plan, gpu, weights.head, host, time.perf_counter() - started)
        finally:
            engine.close()
    finally:
        checkpoint.close()


def random_tokens(engine: Engine, count: int, seed: int = 2) -> list[int]:
    return np.random.default_rng(seed).integers(0, engine.config.vocab_size, count).tolist()


def past_of(engine: Engine, length: int) -> Sequence:
    """A sequence of `length` tokens whose state nobody computed: its numbers are random. For measuring at a depth that
    would take long to reach.
    """
    sequence = engine.new_sequence()
    sequence.prepare(length)
    numbers = np.random.default_rng(3).standard_normal(1 << 20, np.float32).view(np.uint32) >> 16
    data = numbers.astype(np.uint16).view(np.uint8)
    for layer in sequence.layers:
        tile = np.resize(data, layer.geometry.tile_bytes)
        for index in range(layer.tile_count):
            layer.write(index, tile)
    if sequence.recurrent is not None:
        state = np.random.default_rng(4).standard_normal(1 << 20, np.float32) * np.float32(0.05)
        sequence.recurrent.write(np.resize(state, sequence.recurrent.shape.nbytes // 4).view(np.uint8))
    sequence.commit(random_tokens(engine, length))
    return sequence


def prefill_rate(engine: Engine, tokens: int, rounds: int = 2) -> float:
    """Tokens per second of a prompt, logits for its last token; the best of `rounds`, after a shorter one."""
    ids = random_tokens(engine, tokens)
    rates = []
    for count in (min(tokens, engine.max_rows + 88), *(tokens,) * rounds):
        sequence = engine.new_sequence()
        started = time.perf_counter()
        engine.prefill(sequence, ids[:count])
        rates.append(count / (time.perf_counter() - started))
        sequence.close()
    return max(rates[1:])


def decode_rate(engine: Engine, sequence: Sequence, tokens: int, read_logits: bool = False) -> float:
    """Tokens per second of decoding on from `sequence`, the likeliest token each time: the median of three windows of
    `tokens` tokens, all time counted. read_logits: all logits of each token are brought to the host, as sampling needs.
    """
    rates = []
    token = 1
    for window in range(-1, WINDOWS):
        count = WARM_TOKENS if window < 0 else tokens
        started = time.perf_counter()
        for _ in range(count):
            result = engine.step([Chunk(sequence, [token], "decode", "last")])
            if result is None:
                raise AssertionError("a pass was given up")
            token = int(result.logits()[0].argmax()) if read_logits else result.likeliest()[0]
        rates.append(count / (time.perf_counter() - started))
    return statistics.median(rates[1:])


# ---- ceilings


def copy_rates(megabytes: tuple[int, ...] = (256, 16, 4, 1)) -> dict[str, float]:
    """Bytes per second: to the GPU and back from page-locked memory, in copies of 256 MiB and of the sizes given, and
    on the GPU (read and write counted).
    """
    gpu = CudaGpu()
    host, device = gpu.allocate_host(COPY_BYTES, "host"), gpu.allocate(2 * COPY_BYTES, "device")
    try:
        rates = {
            "from the GPU": _copy_rate(gpu, host.address, device.address, COPY_BYTES),
            "on the GPU": 2 * _copy_rate(gpu, device.address + COPY_BYTES, device.address, COPY_BYTES),
        }
        for size in megabytes:
            rates[f"to the GPU, {size} MiB"] = _copy_rate(
                gpu, device.address, host.address, min(size << 20, COPY_BYTES)
            )
        return rates
    finally:
        gpu.synchronize()
        host.close()
        device.close()
        gpu.close()


def bus_rate() -> float:
    """Bytes per second from page-locked host memory to the GPU, in large copies."""
    return copy_rates((256,))["to the GPU, 256 MiB"]


def _copy_rate(gpu: CudaGpu, destination: int, source: int, nbytes: int) -> float:
    stream = gpu.stream("rate")
    start, end = gpu.event(timing=True), gpu.event(timing=True)
    count = max(4, COPY_BYTES // nbytes)
    for _ in range(2):
        gpu.record(start, stream)
        for index in range(count):
            offset = index * nbytes % COPY_BYTES
            gpu.copy(destination + offset, source + offset, nbytes, stream)
        gpu.record(end, stream)
        gpu.synchronize(stream)
    return count * nbytes / end.elapsed_ms(start) * 1e3


@dataclass(frozen=True, slots=True)
class HeadRates:
    """Bytes per second of the output projection on the CPU: alone, and while the bus is kept busy (with the rate of the
    bus meanwhile).
    """

    alone: float
    beside_copies: float
    bus_meanwhile: float


def host_head_rates(opened: Opened) -> HeadRates:
    """How fast the CPU reads this model's output projection while it computes logits."""
    hidden, vocabulary = opened.engine.config.hidden_size, opened.engine.config.vocab_size
    x, logits = (np.ones((1, cols), np.float32) for cols in (hidden, vocabulary))

    def heads(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            opened.host.lm_head(opened.head, _tensor(x), 1, None, _tensor(logits))
        return count * opened.head_bytes / (time.perf_counter() - started)

    heads(2)
    alone = heads(10)
    gpu = CudaGpu()
    source, target = gpu.allocate_host(COPY_BYTES, "host"), gpu.allocate(COPY_BYTES, "device")
    try:
        stream, start, end = gpu.stream("copies"), gpu.event(timing=True), gpu.event(timing=True)
        gpu.record(start, stream)
        for _ in range(40):  # about 0.2 s at 55 GB/s
            gpu.copy(target.address, source.address, COPY_BYTES, stream)
        gpu.record(end, stream)
        beside = heads(10)
        gpu.synchronize(stream)
        return HeadRates(alone, beside, 40 * COPY_BYTES / end.elapsed_ms(start) * 1e3)
    finally:
        gpu.synchronize()
        source.close()
        target.close()
        gpu.close()


def _tensor(values: npt.NDArray[np.float32]) -> Tensor:
    return Tensor(values.ctypes.data, values.shape, DType.F32, values)


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time of a decoded token that the buses allow, and the terms it is made of."""

    seconds: float
    terms: str


def decode_limit(opened: Opened, depth: int, bus: float) -> Limit:
    """What crosses the bus in a token, over the bus's rate. The CPU's part of an output projection adds the time in
    which its bytes are read there (at the rate without other work, measured now), less the time in which meanwhile the
    bus brings the rest of it and the slots can be filled with the next token's first weights.
    """
    plan = opened.plan
    kv = opened.kv_bytes(depth) if plan.kv is KvPlace.HOST else 0
    seconds = (plan.streamed_bytes + kv) / bus
    head_streamed = opened.head_bytes * plan.head_streamed_rows // opened.head.layout.rows
    parts = [f"{(plan.streamed_bytes - head_streamed) / 1e6:.0f} MB of layers"]
    parts += [f"{head_streamed / 1e6:.0f} MB of lm_head"] * bool(head_streamed)
    parts += [f"{kv / 1e6:.0f} MB of KV cache"] * bool(kv)
    terms = f"({' + '.join(parts)}) / {bus / 1e9:.1f} GB/s = {seconds * 1e3:.2f} ms"
    if plan.head in (HeadPlace.CPU, HeadPlace.SPLIT):
        rates, head_bytes = host_head_rates(opened), opened.head_bytes - head_streamed
        ahead = min(plan.slots * plan.slot_bytes, plan.streamed_bytes)
        head_seconds, ahead_seconds = head_bytes / rates.alone, (head_streamed + ahead) / bus
        seconds += max(0.0, head_seconds - ahead_seconds)
        terms += (
            f"; lm_head {head_bytes / 1e6:.0f} MB / {rates.alone / 1e9:.1f} GB/s on the CPU = "
            f"{head_seconds * 1e3:.2f} ms; {(head_streamed + ahead) / 1e6:.0f} MB of lm_head and slots hide "
            f"{ahead_seconds * 1e3:.2f} ms of that (beside each other: {rates.beside_copies / 1e9:.1f} GB/s, the bus "
            f"{rates.bus_meanwhile / 1e9:.1f})"
        )
    return Limit(seconds, terms)
