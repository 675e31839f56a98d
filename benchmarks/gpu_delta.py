"""Speed of the gated delta rule on a GPU, for the layers of the Qwen3.5-9B shape (or --shape).

    python benchmarks/gpu_delta.py decode     microseconds a layer and GB/s of state, beside the copy ceiling
    python benchmarks/gpu_delta.py prompt     microseconds a layer, kernel by kernel, and TFLOP/s of the chunked form
    options: --plain (the sm_75 path)  --shape KEY_HEADS VALUE_HEADS KEY_DIM VALUE_DIM

Every layer has a state of its own, together larger than the caches. Times are of replayed graphs, between two events;
the median of the rounds. Kernels of a prompt are timed by leaving the others out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from gpu_linear import Bench, copy_ceiling

from edge_transformer.cuda.delta import (
    DeltaArrays,
    DeltaParameters,
    DeltaStage,
    GatedDelta,
    decode_order,
    piece_entries,
    pieces,
    workspace_bytes,
)
from edge_transformer.cuda.runtime import Gpu, Kernel
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import PromptSpan
from edge_transformer.ops.contracts import gated_delta_decode_bytes
from edge_transformer.ops.tensor import DType, Tensor

STATE_BYTES = 400 << 20  # of all layers together
PROMPT_KERNELS = ("delta_borders", "delta_conv_prompt", "delta_prepare", "delta_chunk", "gated_norm")
DECODE_KERNELS = ("delta_conv_decode", "delta_step")


class Selected:
    """`gpu`, which launches the kernels of `entries` alone."""

    def __init__(self, gpu: Gpu, entries: Sequence[str]) -> None:
        self._gpu = gpu
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def launch(self, kernel: Kernel, *arguments: Any, **more: Any) -> None:
        if kernel.source.entry in self._entries:
            self._gpu.launch(kernel, *arguments, **more)


class Pass:
    """A prompt of `prompt` rows, or a decode row of each of `sequences` sequences, through several layers."""

    def __init__(
        self,
        bench: Bench,
        shape: DeltaShape,
        prompt: int,
        sequences: int,
        position: int = 64,
        copied_after: int | None = None,
    ) -> None:
        """copied_after: rows of the prompt after which each layer's block is copied to the host."""
        self.bench, self.shape, self.rows, self.sequences = bench, shape, prompt or sequences, sequences
        self.layers = max(2, min(64, STATE_BYTES // (sequences * shape.block_bytes)))
        inner = shape.value_heads * shape.value_dim
        self.qkv, self.z = bench.tensor(self.rows, shape.channels), bench.tensor(self.rows, inner)
        self.a, self.b = bench.tensor(self.rows, shape.value_heads), bench.tensor(self.rows, shape.value_heads)
        self.out = bench.output(self.rows, inner)
        self.parameters = DeltaParameters(
            bench.tensor(shape.channels, shape.conv_width),
            self.vector(-np.exp(bench.rng.uniform(-3, 1, shape.value_heads))),
            self.vector(bench.rng.standard_normal(shape.value_heads)),
            self.vector(np.ones(shape.value_dim)),
        )
        states = bench.put(np.zeros(self.layers * sequences * shape.block_bytes // 4, np.float32), "states")
        table = states + np.arange(self.layers * sequences, dtype=np.int64) * shape.block_bytes
        tables = bench.put(table, "tables")
        row_sequence = np.arange(sequences, dtype=np.int32) if not prompt else np.zeros(prompt, np.int32)
        cut = prompt if copied_after is None else copied_after
        spans = [PromptSpan(0, cut, position, 0)] if prompt else []
        spans += [PromptSpan(cut, prompt - cut, position + cut, 0)] if cut < prompt else []
        listed, bounds = pieces([[span] for span in spans], piece_entries(self.rows, sequences))
        host = 0 if copied_after is None else bench.gpu.allocate_host(shape.block_bytes, "a copy").address
        positions = np.full(self.rows, position, np.int32)
        starts, following = decode_order(positions, row_sequence, prompt, self.rows)
        counts = bench.put(np.array([prompt, self.rows, sequences, 0], np.int32), "counts")
        listed_at = bench.put(listed, "pieces")
        decodes = bench.put(starts, "starts"), bench.put(following, "next"), 0 if prompt else sequences
        self.arrays = []
        for layer in range(self.layers):
            stages = [DeltaStage(first, count) for first, count in bounds]
            if copied_after is not None:
                stages[0] = replace(stages[0], copies=((host, int(table[layer * sequences])),))
            states = tables + layer * sequences * 8
            self.arrays.append(DeltaArrays(counts, listed_at, stages, *decodes, states, sequences, prompt))
        self.workspace = bench.empty(workspace_bytes(shape, self.rows, sequences), "workspace")

    def vector(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor:
        return Tensor(self.bench.put(values.astype(np.float32), "vector"), values.shape, DType.F32, None)

    def seconds(self, entries: Sequence[str] = (*PROMPT_KERNELS, *DECODE_KERNELS)) -> float:
        """Of one layer, by these kernels alone."""
        gpu = cast(Gpu, Selected(self.bench.gpu, entries))
        op = GatedDelta(gpu, self.shape, self.rows, self.sequences)

        def launch() -> None:
            for arrays in self.arrays:
                tensors = self.qkv, self.z, self.a, self.b
                op.run(*tensors, self.parameters, self.out, arrays, self.workspace, self.bench.stream)

        return self.bench.seconds(launch, 2) / self.layers


def decode(bench: Bench, shape: DeltaShape) -> None:
    ceiling = copy_ceiling(bench)
    print(f"copies within device memory: {ceiling / 1e12:.2f} TB/s")
    for sequences in (1, 8, 16):
        work = Pass(bench, shape, 0, sequences)
        took = work.seconds()
        parts = ", ".join(f"{entry} {1e6 * work.seconds([entry]):.2f}" for entry in DECODE_KERNELS)
        speed = sequences * gated_delta_decode_bytes(shape) / took
        print(
            f"{sequences:2d} sequences, a row each, {work.layers} layers: {1e6 * took:7.2f} us a layer ({parts}), "
            f"{speed / 1e9:6.0f} GB/s {100 * speed / ceiling:4.0f} %"
        )
        bench.free()


def prompt(bench: Bench, shape: DeltaShape) -> None:
    for rows in (64, 512, 2048):
        work = Pass(bench, shape, rows, 1)
        took = work.seconds()
        parts = ", ".join(f"{entry} {1e6 * work.seconds([entry]):.1f}" for entry in PROMPT_KERNELS)
        speed = rows * flops_of_row(shape) / took
        print(f"{rows:4d} rows: {1e6 * took:7.1f} us a layer ({parts}), {speed / 1e12:.1f} TFLOP/s")
        bench.free()
        for after in {rows - 64, rows} - {0}:
            took = Pass(bench, shape, rows, 1, copied_after=after).seconds()
            print(f"          {1e6 * took:7.1f} us a layer with a copy to the host after {after} rows")
            bench.free()


def flops_of_row(shape: DeltaShape) -> float:
    """Floating-point operations of the chunked form for a row of a full piece (a multiply-add is two)."""
    own = 80 * shape.key_dim + 31.5 * (shape.key_dim + shape.value_dim)
    through_state = shape.value_dim * (3 * shape.key_dim + 48)
    return 2 * shape.value_heads * (own + through_state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["decode", "prompt"])
    parser.add_argument("--shape", nargs=4, type=int, default=(16, 32, 128, 128))
    parser.add_argument("--plain", action="store_true", help="take the path of cards without tensor cores")
    options = parser.parse_args()
    bench = Bench(options.plain)
    shape = DeltaShape(0, *options.shape, conv_width=4, tiled=False, norm_eps=1e-6)
    print(bench.gpu.properties.name, bench.gpu.properties.capability, shape)
    for what in options.what:
        {"decode": decode, "prompt": prompt}[what](bench, shape)
    bench.staging.close()
    bench.gpu.close()


if __name__ == "__main__":
    main()
