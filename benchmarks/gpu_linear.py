"""Speed and accuracy of the products with weights on a GPU.

    python benchmarks/gpu_linear.py table           a short table of all, less than 90 seconds
    python benchmarks/gpu_linear.py tiles           GEMM: every tile, beside the one that is chosen
    python benchmarks/gpu_linear.py gemv            GB/s of the GEMV per format, beside the copy ceiling
    python benchmarks/gpu_linear.py gemm            useful TFLOP/s of the GEMM per format (2 * rows * cols * tokens)
    python benchmarks/gpu_linear.py error           largest error over the largest |y|, against fp64
    python benchmarks/gpu_linear.py layers          the linear ops and norms of a 1.04 B Llama shape, one decode row
    python benchmarks/gpu_linear.py sweep           GEMV: rows per warp, steps loaded ahead, threads, blocks, slices
    options: --format Q8_0 ...  --tokens 512  --plain (the sm_75 path)

Weights are random, larger than the caches and different from launch to launch. Times are of replayed graphs, between
two events; the median of the rounds. GB/s counts the bytes of the planes without padding.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda import gemv_shape, linear
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.cuda.elementwise import ElementwiseOps
from edge_transformer.cuda.gemm_shape import gemm_workspace_bytes
from edge_transformer.cuda.gemv_shape import GEMV_BATCHES, GemvCut, GemvShape
from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.linear import LinearOps
from edge_transformer.cuda.runtime import Memory
from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, packed_layout
from edge_transformer.ops.contracts import weight_bytes
from edge_transformer.ops.tensor import DType, Tensor, array_at

ROUNDS = 7
BLOCK_BYTES = 32 << 20  # of random bytes, repeated to fill a weight


class Bench:
    """A GPU with random arrays on it."""

    def __init__(self, plain: bool) -> None:
        self.gpu = CudaGpu(forced_capability=(7, 5) if plain else None)
        self.stream = self.gpu.stream("compute")
        self.rng = np.random.default_rng(1)
        self.staging = self.gpu.allocate_host(BLOCK_BYTES, "staging")
        self.kept: list[Memory] = []
        self.blocks: dict[WeightFormat, npt.NDArray[np.uint8]] = {}

    def empty(self, nbytes: int, what: str) -> int:
        memory = self.gpu.allocate(nbytes, what)
        self.kept.append(memory)
        return memory.address

    def put(self, array: npt.NDArray[np.generic], what: str) -> int:
        """A copy of `array`, in pieces."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address = self.empty(data.nbytes, what)
        for start in range(0, data.nbytes, BLOCK_BYTES):
            part = data[start : start + BLOCK_BYTES]
            array_at(self.staging.address, (part.nbytes,), np.uint8)[:] = part
            self.gpu.copy(address + start, self.staging.address, part.nbytes, self.stream)
            self.gpu.synchronize()
        return address

    def get(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        if tensor.nbytes > BLOCK_BYTES:
            raise ValueError(f"{tensor.nbytes} bytes to read; the staging memory holds {BLOCK_BYTES}")
        self.gpu.copy(self.staging.address, tensor.address, tensor.nbytes, self.stream)
        self.gpu.synchronize()
        return array_at(self.staging.address, tensor.shape, np.float32).copy()

    def tensor(self, rows: int, cols: int) -> Tensor:
        values = self.rng.standard_normal(min(rows * cols, BLOCK_BYTES // 4), dtype=np.float32)
        values = np.resize(values, (rows, cols))
        return Tensor(self.put(values, "x"), (rows, cols), DType.F32, None)

    def output(self, rows: int, cols: int) -> Tensor:
        return Tensor(self.empty(rows * cols * 4, "out"), (rows, cols), DType.F32, None)

    def rows(self, prompt: int, decode: int, logits: int = 0) -> LaunchRows:
        counts = np.array([prompt, prompt + decode, 1, logits], np.int32)
        return LaunchRows(prompt, decode, logits, self.put(counts, "counts"))

    def weight(self, weight_format: WeightFormat, rows: int, cols: int) -> Weight:
        """Random weight made on the device by repeating a block: for speed only."""
        layout = packed_layout(weight_format, rows, cols)
        address = self.empty(layout.nbytes, f"{weight_format} weight")
        if weight_format not in self.blocks:
            self.blocks[weight_format] = random_bytes(weight_format, BLOCK_BYTES, self.rng)
        bits = self.blocks[weight_format][: min(BLOCK_BYTES, layout.nbytes)]
        array_at(self.staging.address, bits.shape, np.uint8)[:] = bits
        for start in range(0, layout.nbytes, len(bits)):
            size = min(len(bits), layout.nbytes - start)
            self.gpu.copy(address + start, self.staging.address, size, self.stream)
        self.gpu.synchronize()
        return Weight(layout, address, None)

    def products(self, fast_prefill: bool = False, rows: int = 0, cols: int = 0) -> LinearOps:
        """With workspace for `rows` prompt rows of `cols` columns."""
        ops = LinearOps(self.gpu, fast_prefill)
        nbytes = gemm_workspace_bytes(rows, cols, self.gpu.properties.capability, fast_prefill)
        if nbytes:
            ops.reserve(self.empty(nbytes, "workspace"), nbytes)
        return ops

    def true_weight(self, weight_format: WeightFormat, rows: int, cols: int) -> tuple[Weight, npt.NDArray[np.float32]]:
        """Random weight, and its values."""
        layout = packed_layout(weight_format, rows, cols)
        memory = np.zeros(layout.nbytes + 256, np.uint8)
        start = -memory.ctypes.data % 256
        for plane, spec in zip(layout.planes, FORMATS[weight_format].planes, strict=True):
            part = memory[start + plane.offset : start + plane.offset + rows * plane.row_pitch]
            whole = spec.name in ("codes", "high") and FORMATS[weight_format].block_cols > 1
            kind = WeightFormat.Q8_0 if whole else weight_format
            part[:] = plane_bytes(kind, spec.name, len(part), self.rng)
        host = Weight(layout, memory.ctypes.data + start, memory)
        return Weight(layout, self.put(memory[start : start + layout.nbytes], "weight"), None), dequantize(host)

    def seconds(self, launch: Callable[[], None], repeats: int, rounds: int = ROUNDS) -> float:
        """Median seconds of what `launch` queues, from a graph that holds it once."""
        launch()
        self.gpu.synchronize()
        self.gpu.begin_capture(self.stream)
        launch()
        graph = self.gpu.end_capture(self.stream)
        begin, end = self.gpu.event(timing=True), self.gpu.event(timing=True)
        times = []
        for _ in range(rounds):
            self.gpu.record(begin, self.stream)
            for _ in range(repeats):
                graph.launch(self.stream)
            self.gpu.record(end, self.stream)
            self.gpu.synchronize()
            times.append(end.elapsed_ms(begin) / 1e3 / repeats)
        graph.close()
        return statistics.median(times)

    def free(self) -> None:
        self.gpu.synchronize()
        for memory in self.kept:
            memory.close()
        self.kept.clear()


def plane_bytes(
    weight_format: WeightFormat, plane: str, nbytes: int, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Random bytes of a plane whose floats are finite: about 1 for float formats, small for scales."""
    if weight_format is WeightFormat.F32:
        return rng.standard_normal(nbytes // 4, dtype=np.float32).view(np.uint8)
    if weight_format is WeightFormat.F16:
        return rng.standard_normal(nbytes // 2, dtype=np.float32).astype(np.float16).view(np.uint8)
    data = np.frombuffer(rng.bytes(nbytes), np.uint8).copy()
    if weight_format is WeightFormat.BF16:
        data[1::2] = data[1::2] & 0x80 | 0x3F
    elif plane not in ("codes", "high"):
        data[1::2] &= 0x2F
    return data


def random_bytes(weight_format: WeightFormat, nbytes: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    return plane_bytes(weight_format, "scales", nbytes // 16 * 16, rng)


def copy_ceiling(bench: Bench) -> float:
    """Bytes per second, read and written, of copies within device memory."""
    nbytes = 1 << 30
    source, target = bench.empty(nbytes, "source"), bench.empty(nbytes, "target")
    took = bench.seconds(lambda: bench.gpu.copy(target, source, nbytes, bench.stream), 3)
    bench.free()
    return 2 * nbytes / took


def gemv(bench: Bench, formats: Sequence[WeightFormat]) -> None:
    ceiling = copy_ceiling(bench)
    print(f"copies within device memory: {ceiling / 1e12:.2f} TB/s")
    print(f"{'GB/s of weights, by rows of x':32s}" + "".join(f"{batch:>16d}" for batch in GEMV_BATCHES))
    for weight_format in formats:
        for rows, cols in ((65536, 4096), (16384, 12288), (1536, 1536)):
            count = max(1, (512 << 20) // packed_layout(weight_format, rows, cols).nbytes)
            weights = [bench.weight(weight_format, rows, cols) for _ in range(min(count, 256))]
            figures = ""
            for batch in GEMV_BATCHES:
                x, out, live = bench.tensor(batch, cols), bench.output(batch, rows), bench.rows(0, batch)
                speed = gemv_speed(bench, weights, x, out, live)
                figures += f"{speed / 1e9:10.0f} {100 * speed / ceiling:4.0f}%"
            print(f"{weight_format.value:8s} {rows:6d} x {cols:6d}, {len(weights):3d} of" + figures)
            bench.free()


def gemv_speed(bench: Bench, weights: list[Weight], x: Tensor, out: Tensor, live: LaunchRows) -> float:
    ops = LinearOps(bench.gpu)

    def launch() -> None:
        for weight in weights:
            ops.linear_group([weight], [None], x, [out], live, bench.stream)

    return sum(weight_bytes(weight.layout) for weight in weights) / bench.seconds(launch, 2)


SWEEP_SHAPES = ((1536, 1536), (4096, 4096), (14336, 4096), (4096, 14336))
SWEEP_CUTS = {  # by rows of x: weight rows of a warp, ahead, threads, blocks, room for blocks
    1: ((4, 2, 256, 2, 2), (4, 1, 256, 3, 3), (2, 2, 256, 3, 3), (2, 1, 256, 4, 4), (1, 4, 256, 3, 3)),
    8: ((4, 1, 256, 1, 1), (4, 2, 256, 1, 1), (2, 2, 256, 1, 1), (2, 1, 512, 1, 1)),
}
SWEEP_SLICE_BITS = (2, 1, 3)


def sweep(bench: Bench, formats: Sequence[WeightFormat]) -> None:
    """GB/s of each shape of the GEMV, with the usual slices; then of the first with fewer slices and more."""
    shapes = {batch: [GemvShape(*cut) for cut in cuts] for batch, cuts in SWEEP_CUTS.items()}
    bench.gpu.prepare(
        [
            gemv_shape.gemv_source(weight_format, shape, batch, False, False)
            for weight_format in formats
            for batch, of_batch in shapes.items()
            for shape in of_batch
        ]
    )
    for weight_format in formats:
        for rows, cols in SWEEP_SHAPES:
            count = max(1, TABLE_WEIGHTS // packed_layout(weight_format, rows, cols).nbytes)
            weights = [bench.weight(weight_format, rows, cols) for _ in range(min(count, 24))]
            for batch, of_batch in shapes.items():
                figures = ""
                for shape in of_batch:
                    figures += f"  {shape.rows}/{shape.ahead}/{shape.threads}x{shape.blocks}/{shape.room}"
                    figures += f" {sweep_speed(bench, weights, batch, shape, None):4.0f}"
                for slice_bits in SWEEP_SLICE_BITS:
                    figures += f"  slices {1 << slice_bits}"
                    figures += f" {sweep_speed(bench, weights, batch, of_batch[0], slice_bits):4.0f}"
                print(f"{weight_format.value:6s} {rows:5d} x {cols:5d}, {batch}:{figures}", flush=True)
            bench.free()


def sweep_speed(bench: Bench, weights: list[Weight], batch: int, shape: GemvShape, slice_bits: int | None) -> float:
    """GB/s with one shape, and with so many slices where the shared memory has room for them."""
    rows, cols = weights[0].layout.rows, weights[0].layout.cols
    x, out, live = bench.tensor(batch, cols), bench.output(batch, rows), bench.rows(0, batch)
    usual_shape, usual_cut = linear.gemv_shape, linear.gemv_cut

    def cut_of(*facts: Any) -> GemvCut:
        cut = usual_cut(*facts)
        if slice_bits is None:
            return cut
        return GemvCut(slice_bits, cut.chunk_rounds << cut.slice_bits >> slice_bits)

    if cut_of(weights[0].layout.format, bench.gpu.properties.capability, batch, cols).chunk_rounds == 0:
        return 0.0
    linear.gemv_shape, linear.gemv_cut = lambda *_: shape, cut_of
    try:
        return gemv_speed(bench, weights, x, out, live) / 1e9
    finally:
        linear.gemv_shape, linear.gemv_cut = usual_shape, usual_cut


def gemm(bench: Bench, formats: Sequence[WeightFormat], tokens: int) -> None:
    for weight_format in formats:
        for rows, cols in ((12288, 4096), (4096, 12288), (4608, 1536), (1536, 1536)):
            weights = [bench.weight(weight_format, rows, cols) for _ in range(8)]
            x, out, live = bench.tensor(tokens, cols), bench.output(tokens, rows), bench.rows(tokens, 0)
            speeds = [gemm_speed(bench, weights, x, out, live, fast) for fast in (False, True)]
            figures = "".join(f"{2 * rows * cols * tokens / seconds / 1e12:9.1f}" for seconds in speeds)
            print(f"{weight_format.value:6s} {rows:6d} x {cols:6d} x {tokens}: TFLOP/s, three terms and one:{figures}")
            bench.free()


def gemm_speed(bench: Bench, weights: list[Weight], x: Tensor, out: Tensor, live: LaunchRows, fast: bool) -> float:
    """Seconds of one product."""
    ops = bench.products(fast, *x.shape)

    def launch() -> None:
        for weight in weights:
            ops.linear_group([weight], [None], x, [out], live, bench.stream)

    return bench.seconds(launch, 2) / len(weights)


def error(bench: Bench, formats: Sequence[WeightFormat]) -> None:
    print("largest error over largest |y|, 64 rows of x, 256 of the weight")
    for weight_format in formats:
        for cols in (4096, 12288):
            weight, values = bench.true_weight(weight_format, 256, cols)
            x, out = bench.tensor(64, cols), bench.output(64, 256)
            exact = bench.get(x).astype(np.float64) @ values.astype(np.float64).T
            figures = ""
            for fast, live in ((False, bench.rows(64, 0)), (True, bench.rows(64, 0)), (False, bench.rows(0, 64))):
                bench.products(fast, 64, cols).linear_group([weight], [None], x, [out], live, bench.stream)
                figures += f"{np.abs(bench.get(out) - exact).max() / np.abs(exact).max():10.1e}"
            print(f"{weight_format.value:6s} {cols:6d}: GEMM, --fast-prefill, GEMV:{figures}")
            bench.free()


# Layers of a 1.04 B and of an 8 B Llama shape and of a 9 B hybrid: rows, columns, gated (gate and up, rows each).
TABLE_SHAPES = (
    (1536, 1536, False),
    (4608, 1536, True),
    (1536, 4608, False),
    (4096, 4096, False),
    (14336, 4096, True),
    (4096, 14336, False),
    (12288, 4096, False),
)
TABLE_TOKENS = (512, 2048)
TABLE_WEIGHTS = 192 << 20  # bytes of different weights in a launch: three times the L2 cache


def table(bench: Bench, formats: Sequence[WeightFormat]) -> None:
    """GB/s of the GEMV for 1 and 8 rows, TFLOP/s of the GEMM with three terms and one; then errors."""
    bench.gpu.prepare(linear.all_sources(formats, bench.gpu.properties.capability))
    columns = "".join(f"{f'{tokens} x3':>9s}{f'{tokens} x1':>9s}" for tokens in TABLE_TOKENS)
    print(
        f"GB/s of the GEMV for 1 and 8 rows; TFLOP/s of the GEMM by prompt rows and terms\n{'':28s}    1    8{columns}"
    )
    for weight_format in formats:
        for rows, cols, gated in TABLE_SHAPES:
            if cols % FORMATS[weight_format].block_cols == 0:
                table_line(bench, weight_format, rows, cols, gated)
    error(bench, formats)


def table_line(bench: Bench, weight_format: WeightFormat, rows: int, cols: int, gated: bool) -> None:
    matrices = 2 if gated else 1
    nbytes = weight_bytes(packed_layout(weight_format, rows, cols)) * matrices
    count = max(1, min(24, TABLE_WEIGHTS // nbytes))
    weights = [[bench.weight(weight_format, rows, cols) for _ in range(matrices)] for _ in range(count)]
    most = max(TABLE_TOKENS)
    x, out = bench.tensor(most, cols), bench.output(most, rows)

    def seconds(ops: LinearOps, live: LaunchRows, launches: int) -> float:
        def launch() -> None:
            for of_launch in weights[:launches]:
                if gated:
                    ops.gated_mlp(*of_launch, None, None, "silu", x, out, live, bench.stream)
                else:
                    ops.linear_group(of_launch, [None], x, [out], live, bench.stream)

        return bench.seconds(launch, 1, rounds=3) / min(launches, count)

    line = f"{weight_format.value:8s}{rows:6d} x {cols:5d}{' gated' if gated else '':6s}"
    decode = bench.products()
    for batch in (1, 8):
        line += f" {nbytes / seconds(decode, bench.rows(0, batch), count) / 1e9:4.0f}"
    for tokens in TABLE_TOKENS:
        flops = 2.0 * rows * matrices * cols * tokens
        launches = max(1, int(1.5e12 // flops))
        for fast in (False, True):
            took = seconds(bench.products(fast, tokens, cols), bench.rows(tokens, 0), launches)
            line += f"{flops / took / 1e12:9.1f}"
    print(line, flush=True)
    bench.free()


TILE_SHAPES = ((1536, 1536), (4608, 1536), (4096, 4096), (12288, 4096), (4096, 14336))


def tiles(bench: Bench, formats: Sequence[WeightFormat], tokens: int) -> None:
    usual = linear.gemm_shape
    for weight_format in formats:
        for rows, cols in TILE_SHAPES:
            weights = [bench.weight(weight_format, rows, cols) for _ in range(4)]
            x, out, live = bench.tensor(tokens, cols), bench.output(tokens, rows), bench.rows(tokens, 0)
            for fast in (False, True):
                shapes = linear.gemm_shapes(weight_format, bench.gpu.properties.capability, 1 if fast else 3)
                multiprocessors = bench.gpu.properties.multiprocessors
                chosen = usual(shapes, [rows], tokens, False, multiprocessors)
                figures = ""
                for shape in shapes:
                    linear.gemm_shape = lambda *_, shape=shape: shape
                    speed = 2 * rows * cols * tokens / gemm_speed(bench, weights, x, out, live, fast) / 1e12
                    mark = "*" if shape == chosen else " "
                    figures += f"  {shape.tile_weights} x {shape.tile_x} x {shape.stages}{mark} {speed:6.1f}"
                linear.gemm_shape = usual
                print(f"{weight_format.value:6s} {rows:6d} x {cols:5d} x {tokens}, {1 if fast else 3} terms:{figures}")
            bench.free()


def layers(bench: Bench, weight_format: WeightFormat) -> None:
    """24 layers of hidden 1536, feed-forward 4608, 12 heads and 2 KV heads of 128, then lm_head of 130 560 rows."""
    hidden, feed_forward, query, key, vocabulary, count = 1536, 4608, 1536, 256, 130560, 24
    shapes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    shapes |= {"gate": (feed_forward, hidden), "up": (feed_forward, hidden), "down": (hidden, feed_forward)}
    if any(cols % FORMATS[weight_format].block_cols for _, cols in shapes.values()):
        return
    weights = [{name: bench.weight(weight_format, *shape) for name, shape in shapes.items()} for _ in range(count)]
    head = bench.weight(weight_format, vocabulary, hidden)
    residual, normed, mlp = bench.tensor(1, hidden), bench.tensor(1, hidden), bench.output(1, feed_forward)
    q, k, v, logits = (bench.output(1, cols) for cols in (query, key, key, vocabulary))
    norm = Tensor(bench.put(np.ones(hidden, np.float32), "norm"), (hidden,), DType.F32, None)
    live = bench.rows(0, 1, logits=1)
    products, elementwise, stream = LinearOps(bench.gpu), ElementwiseOps(bench.gpu), bench.stream

    def launch() -> None:
        for w in weights:
            products.linear_group([w["q"], w["k"], w["v"]], [None] * 3, normed, [q, k, v], live, stream)
            products.linear_add(w["o"], None, q, residual, live, stream)
            elementwise.add_norm(residual, None, None, norm, 1e-6, normed, live, stream)
            products.gated_mlp(w["gate"], w["up"], None, None, "silu", normed, mlp, live, stream)
            products.linear_add(w["down"], None, mlp, residual, live, stream)
            elementwise.add_norm(residual, None, None, norm, 1e-6, normed, live, stream)
        products.lm_head(head, normed, None, logits, live, stream)

    took = bench.seconds(launch, 5)
    moved = sum(weight_bytes(one.layout) for w in weights for one in w.values()) + weight_bytes(head.layout)
    print(f"{weight_format.value:6s} {1e6 * took:7.0f} us a token without attention, {moved / took / 1e9:.0f} GB/s")
    bench.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["table", "tiles", "gemv", "gemm", "error", "layers", "sweep"])
    parser.add_argument("--format", nargs="+", type=WeightFormat, default=list(WeightFormat))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--plain", action="store_true", help="take the path of cards without tensor cores")
    options = parser.parse_args()
    bench = Bench(options.plain)
    print(bench.gpu.properties.name, bench.gpu.properties.capability)
    for what in options.what:
        {
            "table": lambda: table(bench, options.format),
            "tiles": lambda: tiles(bench, options.format, options.tokens),
            "gemv": lambda: gemv(bench, options.format),
            "gemm": lambda: gemm(bench, options.format, options.tokens),
            "error": lambda: error(bench, options.format),
            "layers": lambda: [layers(bench, one) for one in options.format],
            "sweep": lambda: sweep(bench, options.format),
        }[what]()
    bench.staging.close()
    bench.gpu.close()


if __name__ == "__main__":
    main()
