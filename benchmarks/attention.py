"""Speed of attention and norms: microseconds, GB/s of what the op must move, GFLOP/s.

    python benchmarks/attention.py [--threads 1 2] [--isa avx512 ...] [--kv bf16 f32] [--heads 9 3 64] [--layers 4]

Every call takes another layer's tiles in turn, as in a model; few layers and a short context stay in the cache. Median
and best of the rounds are given, since other work on a machine only ever slows a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch, PromptSpan
from edge_transformer.ops.contracts import add_norm_bytes, attention_decode_bytes, attention_flops
from edge_transformer.ops.tensor import DType, tensor_of

DECODE_CONTEXTS = (128, 2048, 32768)
PROMPT_ROWS = 512


def make_pass(layers: int, shape: AttentionShape, position: int, rows: int) -> tuple[Batch, object]:
    """One sequence with random keys and values in every layer: `rows` prompt rows, or one decode row when it is 0."""
    tiles = -(-(position + max(rows, 1)) // KV_TILE_POSITIONS)
    size = (layers, tiles, 2, shape.kv_heads, KV_TILE_POSITIONS, shape.head_dim)
    numbers = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    memory = numbers if shape.kv_dtype == DType.F32 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    live = max(rows, 1)
    batch = Batch(
        token_ids=np.zeros(live, np.int32),
        positions=np.arange(position, position + live, dtype=np.int32),
        row_sequence=np.zeros(live, np.int32),
        prompt_rows=rows,
        prompt_spans=(PromptSpan(0, rows, position, 0),) if rows else (),
        rope_cos=(),
        rope_sin=(),
        tile_tables=tuple(
            layer.ctypes.data + np.arange(tiles, dtype=np.int64)[None] * layer[0].nbytes for layer in memory
        ),
        logit_rows=np.zeros(0, np.int32),
    )
    return batch, memory


def microseconds(run: Callable[[AttentionShape], None], shapes: list[AttentionShape], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for shape in shapes:
            run(shape)
        times.append((time.perf_counter() - start) / len(shapes) * 1e6)
    return times


def report(label: str, times: list[float], moved: int, flops: int) -> None:
    best = min(times)
    print(
        f"{label}{statistics.median(times):10.1f}{best:10.1f}{moved / 1e6:8.2f}{flops / 1e6:9.1f}  "
        f"{moved / best / 1e3:.1f} GB/s, {flops / best / 1e3:.1f} GFLOP/s"
    )


def measure(
    backend: CpuBackend, shapes: list[AttentionShape], name: str, batch: Batch, label: str, rounds: int
) -> None:
    shape, rows, cols = shapes[0], batch.rows, shapes[0].heads * shapes[0].head_dim
    backend.reserve(rows, 32, shapes)
    rng = np.random.default_rng(1)
    q, out = (tensor_of(rng.standard_normal((rows, cols), dtype=np.float32)) for _ in range(2))
    times = microseconds(lambda shape: backend.attention(q, shape, out, batch), shapes, rounds)
    first, last = int(batch.positions[0]), int(batch.positions[-1])
    flops = attention_flops(shape, first, rows)
    report(f"{label}{name:16}", times, attention_decode_bytes(shape, last), flops)
    if first == 0 or last == DECODE_CONTEXTS[0] - 1:
        weight = tensor_of(np.ones(cols, np.float32))
        times = microseconds(lambda _: backend.add_norm(q, None, None, weight, 1e-6, out, batch), shapes, rounds)
        report(f"{label}{f'norm, {rows} rows':16}", times, add_norm_bytes(rows, cols, has_delta=False), 4 * rows * cols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=_native.available_instruction_sets()[-1:])
    parser.add_argument("--kv", nargs="+", choices=["bf16", "f32"], default=["bf16"])
    parser.add_argument("--heads", type=int, nargs=3, metavar=("HEADS", "KV_HEADS", "HEAD_DIM"), default=[9, 3, 64])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    heads, kv_heads, head_dim = options.heads
    print(f"{'isa':8}{'kv':6}{'threads':>8}  {'rows':16}{'median us':>10}{'best us':>10}{'MB':>8}{'MFLOP':>9}  at best")
    for kv in options.kv:
        shapes = [
            AttentionShape(layer, heads, kv_heads, head_dim, 0, None, head_dim**-0.5, None, None, DType(kv))
            for layer in range(options.layers)
        ]
        passes = [(f"decode at {n}", *make_pass(len(shapes), shapes[0], n - 1, 0)) for n in DECODE_CONTEXTS]
        passes.append((f"prompt of {PROMPT_ROWS}", *make_pass(len(shapes), shapes[0], 0, PROMPT_ROWS)))
        passes.append(("prompt at 2048", *make_pass(len(shapes), shapes[0], 2048, PROMPT_ROWS)))
        for isa in options.isa:
            for threads in options.threads:
                backend = CpuBackend(threads, isa)
                for name, batch, _memory in passes:
                    measure(backend, shapes, name, batch, f"{isa:8}{kv:6}{threads:8}  ", options.rounds)
                backend.close()


if __name__ == "__main__":
    main()
