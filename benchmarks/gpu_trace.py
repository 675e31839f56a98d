"""The timeline of a model's decoding on a GPU: python benchmarks/gpu_trace.py SHAPE [MODE ...]

Shapes, modes and random weights as in gpu_decode.py. Prints how busy the bus was, the compute that no copy covered, and
how long compute waited for copies; -o FOLDER keeps the traces for ui.perfetto.dev. A streamed run is to keep the bus
busy for 95 % of decode time or more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gpu_decode import MODES, SHAPES, write_model

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.chrome_trace import chrome_trace
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.cuda.timeline import Span, Timeline
from edge_transformer.cuda.timeline_summary import summarize, summary_text
from edge_transformer.engine.core import Chunk, Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType


def decode(engine: Engine, tokens: Sequence[int], depth: int) -> None:
    """A prompt of `depth` tokens and as many decode passes as are left, the likeliest token looked for after each."""
    sequence = engine.new_sequence()
    engine.prefill(sequence, tokens[:depth])
    for token in tokens[depth:]:
        result = engine.step([Chunk(sequence, [token], "decode", "last")])
        if result is not None:
            result.logits()[0].argmax()
    sequence.close()


def trace(path: Path, mode: str, depth: int, tokens: int, threads: int) -> tuple[list[Span], str]:
    """Spans of a run, and the GPU's name."""
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    gpu, timeline = CudaGpu(), Timeline()
    options = GpuOptions(MODES[mode], depth + tokens, timeline=timeline)
    weights = HostWeights(checkpoint, spec, threads)
    engine, _ = open_gpu_engine(gpu, checkpoint, spec, weights, CpuBackend(threads), DType.BF16, options)
    try:
        ids = np.random.default_rng(2).integers(0, engine.config.vocab_size, depth + tokens).tolist()
        decode(engine, ids, depth)
        return timeline.finish(), gpu.properties.name
    finally:
        engine.close()
        checkpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--depth", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path, help="folder for the traces")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = write_model(Path(folder) / arguments.shape, SHAPES[arguments.shape])
        for mode in arguments.modes or ["streamed"]:
            spans, device = trace(path, mode, arguments.depth, arguments.tokens, arguments.threads)
            summary = summarize(spans)
            if summary is None:
                raise SystemExit("no decode pass was traced")
            print(f"{arguments.shape} {mode} at depth {arguments.depth}, {summary.passes / summary.seconds:.2f} tok/s")
            print(summary_text(summary), flush=True)
            if arguments.output is not None:
                arguments.output.mkdir(parents=True, exist_ok=True)
                file = arguments.output / f"{arguments.shape}-{mode}.json"
                file.write_text(json.dumps(chrome_trace(spans, device)))


if __name__ == "__main__":
    main()
