"""Speed of attention on a GPU: decode rows over deep contexts, prompt chunks, runs of tiles from the host.

    python benchmarks/gpu_attention.py decode       microseconds and GB/s of keys and values, beside the copy ceiling
    python benchmarks/gpu_attention.py prompt       TFLOP/s of chunks (4 * heads * head_dim per row and position seen),
                                                    and of a whole prompt in such chunks
    python benchmarks/gpu_attention.py offload      a decode row over host tiles: GB/s of the bus with compute under it
    options: --plain (the sm_75 path)  --kv f32  --rows 512 2048 (of a chunk)

Every layer has keys and values of its own, larger together than the caches. Times are of replayed graphs, between two
events; the median of the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from gpu_linear import Bench, copy_ceiling

from edge_transformer.cuda.attention import (
    Attention,
    KvRun,
    KvTable,
    PassArrays,
    query_block_entries,
    query_blocks,
    workspace_bytes,
)
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, PromptSpan
from edge_transformer.ops.contracts import attention_decode_bytes, attention_flops
from edge_transformer.ops.tensor import ITEM_BYTES, DType, array_at

SHAPES = ((12, 2, 128), (16, 4, 256), (32, 8, 128))
DEPTHS = (512, 4096, 32768)
PROMPT_ROWS = (512, 2048, 8192)
PROMPT_POSITIONS = (0, 8192, 32768)
WHOLE_PROMPT = 8192
LAYERS = 4  # that prompts are timed with
KV_BYTES = 512 << 20  # of all layers, or one layer where it is larger
KV_BLOCK_BYTES = 4 << 20  # of random numbers, repeated
RUN_BYTES = 4 << 20


def make_shape(heads: int, kv_heads: int, head_dim: int, kv_dtype: DType) -> AttentionShape:
    return AttentionShape(0, heads, kv_heads, head_dim, 0, None, head_dim**-0.5, None, None, kv_dtype)


def tile_bytes(shape: AttentionShape) -> int:
    return 2 * shape.kv_heads * KV_TILE_POSITIONS * shape.head_dim * ITEM_BYTES[shape.kv_dtype]


class Pass:
    """Rows over one sequence in several layers: prompt rows from `position` on, or decode rows at it."""

    def __init__(self, bench: Bench, shape: AttentionShape, position: int, prompt: int, decode: int) -> None:
        rows = prompt + decode
        self.bench, self.shape, self.prompt_rows, self.decode_rows = bench, shape, prompt, decode
        self.tiles = -(-(position + max(prompt, 1)) // KV_TILE_POSITIONS)
        layer_bytes = self.tiles * tile_bytes(shape)
        self.layers = max(1, min(64, KV_BYTES // layer_bytes))
        memory = self.random_tiles(self.layers * layer_bytes)
        tables = memory + np.arange(self.layers * self.tiles, dtype=np.int64) * tile_bytes(shape)
        table = bench.put(tables, "tables")
        self.kv = [KvTable(table + layer * self.tiles * 8, self.tiles) for layer in range(self.layers)]
        positions = np.arange(position, position + prompt) if prompt else np.full(decode, position)
        spans = [PromptSpan(0, prompt, position, 0)] if prompt else []
        self.entries = query_block_entries(prompt, len(spans)) if prompt else 0
        self.arrays = PassArrays(
            bench.put(positions.astype(np.int32), "positions"),
            bench.put(np.zeros(rows, np.int32), "row_sequence"),
            bench.put(np.array([prompt, rows, 1, 0], np.int32), "counts"),
            bench.put(query_blocks(spans, max(1, self.entries)), "query_blocks"),
        )
        cols = shape.heads * shape.head_dim
        self.q, self.out = bench.tensor(rows, cols), bench.output(rows, cols)
        self.workspace = bench.empty(workspace_bytes(shape, rows), "workspace")

    def random_tiles(self, nbytes: int) -> int:
        """Keys and values made on the device by repeating a block."""
        bench = self.bench
        address, block = bench.empty(nbytes, "KV"), min(nbytes, KV_BLOCK_BYTES)
        numbers = bench.rng.standard_normal(block // 4, dtype=np.float32).view(np.uint32)
        if self.shape.kv_dtype == DType.BF16:
            numbers = (numbers & 0xFFFF0000) | (numbers[::-1] >> 16)
        array_at(bench.staging.address, numbers.shape, np.uint32)[:] = numbers
        for start in range(0, nbytes, block):
            bench.gpu.copy(address + start, bench.staging.address, min(block, nbytes - start), bench.stream)
        bench.gpu.synchronize()
        return address

    def launch(self, op: Attention) -> None:
        for kv in self.kv:
            common = kv, self.workspace, self.bench.stream
            if self.prompt_rows:
                op.prompt(self.q, self.out, self.arrays, self.entries, *common)
            else:
                op.decode(self.q, self.out, self.arrays, self.decode_rows, *common)

    def seconds(self, fast: bool = False) -> float:
        """Of one layer."""
        op = Attention(self.bench.gpu, self.shape, self.prompt_rows + self.decode_rows, fast)
        return self.bench.seconds(lambda: self.launch(op), 1 if self.prompt_rows else 3) / self.layers


def decode(bench: Bench, kv_dtype: DType) -> None:
    ceiling = copy_ceiling(bench)
    print(f"copies within device memory: {ceiling / 1e12:.2f} TB/s")
    for heads in SHAPES:
        shape = make_shape(*heads, kv_dtype)
        for depth in DEPTHS:
            for rows in (1, 8):
                took = Pass(bench, shape, depth - 1, 0, rows).seconds()
                speed = attention_decode_bytes(shape, depth - 1) / took
                print(
                    f"{heads!s:14} depth {depth:6d}, {rows} rows: {1e6 * took:8.1f} us, "
                    f"{speed / 1e9:7.0f} GB/s {100 * speed / ceiling:4.0f} % (of one row's keys and values)"
                )
                bench.free()


def prompt(bench: Bench, kv_dtype: DType, chunks: Sequence[int]) -> None:
    for heads in SHAPES:
        shape = make_shape(*heads, kv_dtype)
        for rows in chunks:
            figures = ""
            whole = {False: 0.0, True: 0.0}  # seconds of a prompt, by `fast`
            starts = set(range(0, WHOLE_PROMPT, rows))
            for position in sorted(starts | set(PROMPT_POSITIONS)):
                work = Pass(bench, shape, position, rows, 0)
                work.kv = work.kv[:LAYERS]
                work.layers = len(work.kv)
                speeds = []
                for fast in (False, True):
                    took = work.seconds(fast)
                    whole[fast] += took if position in starts else 0
                    speeds.append(attention_flops(shape, position, rows) / took / 1e12)
                if position in PROMPT_POSITIONS:
                    figures += f"  at {position}: {speeds[0]:5.1f} {speeds[1]:6.1f}"
                bench.free()
            flops = attention_flops(shape, 0, WHOLE_PROMPT)
            total = "  ".join(f"{1e3 * took:6.2f} ms {flops / took / 1e12:6.1f}" for took in whole.values())
            print(
                f"{heads!s:14} {rows:5d} rows, TFLOP/s of three terms and one:{figures}  {WHOLE_PROMPT} tokens: {total}"
            )


def offload(bench: Bench, kv_dtype: DType) -> None:
    """The host's tiles through two buffers, the copy of the next run under the compute of this one."""
    for heads in SHAPES:
        shape = make_shape(*heads, kv_dtype)
        speeds = [offload_speed(bench, shape, compute) / 1e9 for compute in (False, True)]
        print(f"{heads!s:14} depth {DEPTHS[-1]}: {speeds[0]:.1f} GB/s of the bus, with compute {speeds[1]:.1f}")


def offload_speed(bench: Bench, shape: AttentionShape, compute: bool) -> float:
    """Bytes per second of eight layers' host tiles, for one decode row."""
    gpu, copies = bench.gpu, bench.gpu.stream("copies")
    work, op = Pass(bench, shape, DEPTHS[-1] - 1, 0, 1), Attention(bench.gpu, shape, 1)
    run = max(1, RUN_BYTES // tile_bytes(shape))
    run_bytes, runs = run * tile_bytes(shape), 8 * work.tiles // run
    host = gpu.allocate_host(runs * run_bytes, "host KV")
    buffers = [bench.empty(run_bytes, "KV buffer") for _ in range(2)]
    filled, freed = [gpu.event() for _ in range(2)], [gpu.event() for _ in range(2)]

    def queue() -> None:
        for number in range(runs):
            first, buffer = number * run % work.tiles, number % 2
            gpu.wait(copies, freed[buffer])
            gpu.copy(buffers[buffer], host.address + number * run_bytes, run_bytes, copies)
            gpu.record(filled[buffer], copies)
            gpu.wait(bench.stream, filled[buffer])
            if compute:
                kv, last = KvRun(buffers[buffer], first, run, 0), first + run == work.tiles
                op.decode(work.q, work.out, work.arrays, 1, kv, work.workspace, bench.stream, first == 0, last)
            gpu.record(freed[buffer], bench.stream)

    took = seconds(bench, queue)
    host.close()
    bench.free()
    return runs * run_bytes / took


def seconds(bench: Bench, queue: Callable[[], None]) -> float:
    """Best seconds of three, queued from Python."""
    begin, end = bench.gpu.event(timing=True), bench.gpu.event(timing=True)
    times = []
    for _ in range(3):
        bench.gpu.synchronize()
        bench.gpu.record(begin, bench.stream)
        queue()
        bench.gpu.record(end, bench.stream)
        bench.gpu.synchronize()
        times.append(end.elapsed_ms(begin) / 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["decode", "prompt", "offload"])
    parser.add_argument("--kv", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=PROMPT_ROWS, help="rows of a prompt's chunk")
    parser.add_argument("--plain", action="store_true", help="take the path of cards without tensor cores")
    options = parser.parse_args()
    bench = Bench(options.plain)
    print(bench.gpu.properties.name, bench.gpu.properties.capability, options.kv)
    kv_dtype = DType(options.kv)
    for what in options.what:
        if what == "decode":
            decode(bench, kv_dtype)
        elif what == "prompt":
            prompt(bench, kv_dtype, options.rows)
        else:
            offload(bench, kv_dtype)
    bench.staging.close()
    bench.gpu.close()


if __name__ == "__main__":
    main()
