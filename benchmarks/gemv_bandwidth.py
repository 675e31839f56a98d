"""Speed of the products with weights: GB/s of the GEMV beside the machine's read bandwidth, GFLOP/s of the GEMM.

    python benchmarks/gemv_bandwidth.py [--threads 1 2] [--isa avx512] [--format Q4_1 Q8_0] [--size 96] [--tokens 512]

Weights are random bytes with sane scales, in memory as the loader leaves them; --size MiB of each format are read
matrix by matrix, as a model's layers are. Rounds of all formats are interleaved; the median and the best are given,
since other work on a machine only ever slows a run. GB/s counts the bytes of the planes. The read bandwidth is that of
reading one buffer of the same size, in memory of the same kind.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.cpu.linear import LinearOps, linear_workspace
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, packed_layout
from edge_transformer.memory import HostMemory, bytes_at
from edge_transformer.ops.tensor import tensor_of

ROWS, COLS = 1536, 768


def random_weights(weight_format: WeightFormat, nbytes: int, rng: np.random.Generator) -> list[Weight]:
    """Matrices [ROWS, COLS] that together take about `nbytes`. Every float in them is finite and small."""
    layout = packed_layout(weight_format, ROWS, COLS)
    count = max(1, nbytes // layout.nbytes)
    memory = HostMemory(count * layout.nbytes, huge_pages=True)
    weights = []
    for i in range(count):
        address = memory.address + i * layout.nbytes
        for plane, spec in zip(layout.planes, FORMATS[weight_format].planes, strict=True):
            part = bytes_at(address + plane.offset, ROWS * plane.row_pitch)
            if weight_format is WeightFormat.F32:
                part.view(np.float32)[:] = rng.standard_normal(len(part) // 4, dtype=np.float32)
                continue
            part[:] = np.frombuffer(rng.bytes(len(part)), np.uint8)
            if spec.name not in ("codes", "high"):
                part[1::2] &= 0x2F  # exponents of f16 well below infinity
            elif FORMATS[weight_format].block_cols == 1:
                part[1::2] = part[1::2] & 0x80 | (0x3F if weight_format is WeightFormat.BF16 else 0x3B)  # about 1
        weights.append(Weight(layout, address, memory))
    return weights


def read_speed(pool: _native.ThreadPool, buffer: HostMemory) -> float:
    """Bytes per second of one reading."""
    return buffer.nbytes / seconds(lambda: _native.read_memory(pool, buffer.address, buffer.nbytes))


def gemv_round(
    ops: LinearOps, weights: list[Weight], x: npt.NDArray[np.float32], prompt_rows: int
) -> Callable[[], None]:
    rows = len(x)
    out = tensor_of(np.empty((rows, ROWS), np.float32))
    tensor = tensor_of(x)

    def run() -> None:
        for weight in weights:
            ops.linear_group([weight], [None], tensor, [out], prompt_rows, rows)

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=_native.available_instruction_sets())
    parser.add_argument("--format", nargs="+", default=[str(name) for name in WeightFormat])
    parser.add_argument("--size", type=int, default=96, help="MiB of weights per format")
    parser.add_argument("--tokens", type=int, default=512, help="prompt rows of the GEMM")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    rng = np.random.default_rng(0)
    buffer = HostMemory(arguments.size * 2**20, huge_pages=True)
    bytes_at(buffer.address, buffer.nbytes)[:] = 1
    sets = {name: random_weights(WeightFormat(name), arguments.size * 2**20, rng) for name in arguments.format}
    x = rng.standard_normal((1, COLS), dtype=np.float32)
    prompt = rng.standard_normal((arguments.tokens, COLS), dtype=np.float32)

    for threads in arguments.threads:
        pool = _native.ThreadPool(threads)
        pool.reserve(*linear_workspace(max(1, arguments.tokens), COLS))
        read = [read_speed(pool, buffer) for _ in range(9)]
        print(
            f"{threads} thread(s): read bandwidth {statistics.median(read) / 1e9:.1f} GB/s, best {max(read) / 1e9:.1f}"
        )
        for isa in arguments.isa:
            ops = LinearOps(pool, _native.instruction_set_index(isa))
            rounds: dict[str, list[float]] = {name: [] for name in sets}
            gemm: dict[str, list[float]] = {name: [] for name in sets}
            for _ in range(arguments.rounds):
                for name, weights in sets.items():
                    rounds[name].append(seconds(gemv_round(ops, weights, x, 0)))
                    gemm[name].append(seconds(gemv_round(ops, weights[:1], prompt, arguments.tokens)))
            for name, weights in sets.items():
                nbytes = sum(weight.layout.nbytes for weight in weights)
                flops = 2 * ROWS * COLS * arguments.tokens
                print(
                    f"  {isa:7} {name:5} GEMV {nbytes / statistics.median(rounds[name]) / 1e9:6.1f} GB/s"
                    f" best {nbytes / min(rounds[name]) / 1e9:6.1f}"
                    f"   GEMM {flops / statistics.median(gemm[name]) / 1e9:6.1f} GFLOP/s"
                    f" best {flops / min(gemm[name]) / 1e9:6.1f}"
                )


if __name__ == "__main__":
    main()
