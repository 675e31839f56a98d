"""Speed of the gated delta rule on the CPU: microseconds for a layer, GB/s of what a step must move, GFLOP/s.

    python benchmarks/gated_delta.py [--threads 1 2] [--isa avx512 ...] [--heads 16 32 128 128] [--layers 4]

--heads: key heads, value heads, and their dimensions (the default is Qwen3.5-9B's). Every call takes another layer's
states in turn, as in a model. Operations are those of the steps, whichever form computes them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from edge_transformer import _native
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import Batch, PromptSpan
from edge_transformer.ops.contracts import gated_delta_decode_bytes, gated_delta_step_flops
from edge_transformer.ops.tensor import tensor_of

PROMPT_ROWS = 512


def make_pass(blocks: np.ndarray, position: int, prompt_rows: int) -> Batch:
    """One sequence with a block in every layer: `prompt_rows` prompt rows, or one decode row when it is 0."""
    rows = max(prompt_rows, 1)
    return Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.arange(position, position + rows, dtype=np.int32),
        row_sequence=np.zeros(rows, np.int32),
        prompt_rows=prompt_rows,
        prompt_spans=(PromptSpan(0, prompt_rows, position, 0),) if prompt_rows else (),
        rope_cos=(),
        rope_sin=(),
        tile_tables=tuple(np.empty((1, 0), np.int64) for _ in blocks),
        logit_rows=np.zeros(0, np.int32),
        state_tables=tuple(np.array([layer.ctypes.data], np.int64) for layer in blocks),
    )


def measure(backend: CpuBackend, shapes: list[DeltaShape], batch: Batch, rounds: int) -> list[float]:
    """Microseconds of a layer, round by round."""
    shape, rng = shapes[0], np.random.default_rng(0)
    inner = shape.value_heads * shape.value_dim

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32)

    z, a, b = normal(batch.rows, inner), normal(batch.rows, shape.value_heads), normal(batch.rows, shape.value_heads)
    vectors = (
        normal(shape.channels, shape.conv_width),
        -np.exp(normal(shape.value_heads)),
        normal(shape.value_heads),
        np.ones(shape.value_dim, np.float32),
    )
    qkv, out = normal(batch.rows, shape.channels), normal(batch.rows, inner)
    times = []
    for _ in range(rounds):
        fresh = [qkv.copy() for _ in shapes]
        start = time.perf_counter()
        for layer, values in zip(shapes, fresh, strict=True):
            backend.gated_delta(tensor_of(values), *map(tensor_of, (z, a, b, *vectors)), layer, tensor_of(out), batch)
        times.append((time.perf_counter() - start) / len(shapes) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=_native.available_instruction_sets()[-1:])
    parser.add_argument(
        "--heads", type=int, nargs=4, metavar=("KEY", "VALUE", "KEY_DIM", "VALUE_DIM"), default=[16, 32, 128, 128]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shapes = [DeltaShape(layer, *options.heads, 4, False, 1e-6) for layer in range(options.layers)]
    blocks = np.zeros((len(shapes), shapes[0].block_bytes // 4), np.float32)
    print(f"{'isa':8}{'threads':>8}  {'rows':16}{'median us':>10}{'best us':>10}  at best")
    for isa in options.isa:
        for threads in options.threads:
            backend = CpuBackend(threads, isa)
            backend.reserve(PROMPT_ROWS, 32, (), shapes)
            for name, prompt_rows in (("decode", 0), (f"prompt of {PROMPT_ROWS}", PROMPT_ROWS)):
                times = measure(backend, shapes, make_pass(blocks, 64, prompt_rows), options.rounds)
                best, rows = min(times), max(prompt_rows, 1)
                moved, flops = gated_delta_decode_bytes(shapes[0]), rows * gated_delta_step_flops(shapes[0])
                speed = f"{flops / best / 1e3:.1f} GFLOP/s" + (f", {moved / best / 1e3:.1f} GB/s" if rows == 1 else "")
                print(f"{isa:8}{threads:8}  {name:16}{statistics.median(times):10.1f}{best:10.1f}  {speed}")


if __name__ == "__main__":
    main()
