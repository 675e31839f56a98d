"""What `ete quantize` does to a model's predictions: KL divergence and more, against the same model in fp32.

    python benchmarks/quantization_error.py MODEL PROMPT.txt [--format int8 int8-row int4-32 int4-64 ...] [--tokens N]
        [--beside OTHER.gguf ...]

The first tokens of the text are predicted one by one, given those before them, by MODEL as it is (its weights in fp32
arithmetic) and by each quantized version of it. PROMPT may also be a .json file with token ids under "ids". With
--greedy FILE.json, a list of {"prompt_ids": ...} under "cases", greedy answers of 64 tokens are compared as well.

    mean KL    mean over all positions of KL(fp32 || quantized), in nats
    top-1      share of positions where both think the same token the likeliest
    margin     the largest lead of fp32's first token over its second, in nats, where they do not
    dNLL       mean of the quantized model's negative log-likelihood, less fp32's
    greedy     answers that are the same to the last token; mean number of tokens that are
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.quantize import quantize_model
from edge_transformer.engine.quantize_plan import Quantization
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import DType

CHOICES = {
    "int8": Quantization("int8"),
    "int8-row": Quantization("int8-row"),
    "int4-32": Quantization("int4", 32),
    "int4-32-minimums": Quantization("int4", 32, minimums=True),
    "int4-64": Quantization("int4", 64),
    "int4-128": Quantization("int4", 128),
}
CHUNK = 256
ANSWER = 64


@dataclass
class Tally:
    """Sums over positions."""

    positions: int = 0
    divergence: float = 0.0
    largest: float = 0.0
    agreed: int = 0
    margin: float = 0.0
    nll: float = 0.0

    def add(self, right: npt.NDArray[np.float64], ours: npt.NDArray[np.float64], targets: list[int | None]) -> None:
        """Log-probabilities [rows, vocabulary] of both, and the tokens that did follow."""
        divergence = (np.exp(right) * (right - ours)).sum(axis=1)
        self.positions += len(right)
        self.divergence += float(divergence.sum())
        self.largest = max(self.largest, float(divergence.max()))
        for row, target in enumerate(targets):
            second, first = np.partition(right[row], -2)[-2:]
            if right[row].argmax() == ours[row].argmax():
                self.agreed += 1
            else:
                self.margin = max(self.margin, float(first - second))
            if target is not None:
                self.nll += float(right[row, target] - ours[row, target])


def open_engine(path: Path, backend: str) -> Engine:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    executor: Backend = ReferenceBackend() if backend == "reference" else CpuBackend(None)
    return Engine(checkpoint, spec, executor, HostWeights(checkpoint, spec), DType.F32, max_rows=CHUNK)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    return np.asarray(values - np.log(np.exp(values).sum(axis=1, keepdims=True)))


def compare(reference: Engine, engines: dict[str, Engine], ids: list[int]) -> dict[str, Tally]:
    tallies = {name: Tally() for name in engines}
    sequences = [engine.new_sequence() for engine in (reference, *engines.values())]
    for start in range(0, len(ids), CHUNK):
        tokens = ids[start : start + CHUNK]
        results = []
        for engine, sequence in zip((reference, *engines.values()), sequences, strict=True):
            result = engine.step([Chunk(sequence, tokens, "prompt", "all")])
            assert result is not None
            results.append(result.blocks())
        for (rows, right), *ours in zip(*results, strict=True):
            positions = [start + token for _, token in rows]
            targets = [ids[position + 1] if position + 1 < len(ids) else None for position in positions]
            expected = log_softmax(right)
            for tally, (_, logits) in zip(tallies.values(), ours, strict=True):
                tally.add(expected, log_softmax(logits), targets)
    for sequence in sequences:
        sequence.close()
    return tallies


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    """Greedy tokens."""
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, prompt)
    tokens = []
    for _ in range(ANSWER):
        assert logits is not None
        tokens.append(int(logits.argmax()))
        result = engine.step([Chunk(sequence, tokens[-1:], "decode", "last")])
        assert result is not None
        logits = result.logits()[0]
    sequence.close()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--greedy", type=Path)
    parser.add_argument("--format", nargs="+", choices=[*CHOICES, "none"], default=list(CHOICES))
    parser.add_argument("--beside", nargs="*", type=Path, default=[], help="other files of the same model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--backend", choices=["cpu", "reference"], default="cpu")
    options = parser.parse_args()
    if options.prompt.suffix == ".json":
        ids = json.loads(options.prompt.read_text(encoding="utf-8"))["ids"][: options.tokens]
    else:
        from edge_transformer.text.load import load_text

        checkpoint = open_checkpoint(options.model)
        ids = load_text(checkpoint).tokenizer.encode(options.prompt.read_text(encoding="utf-8"))[: options.tokens]
        checkpoint.close()
    cases = json.loads(options.greedy.read_text(encoding="utf-8"))["cases"] if options.greedy else []
    with tempfile.TemporaryDirectory() as folder:
        sizes, engines = {}, {}
        for path in options.beside:
            sizes[path.name] = path.stat().st_size
            engines[path.name] = open_engine(path, options.backend)
        for name in [name for name in options.format if name != "none"]:
            report = quantize_model(options.model, Path(folder) / name, CHOICES[name])
            sizes[name] = report.nbytes
            engines[name] = open_engine(Path(folder) / name, options.backend)
        reference = open_engine(options.model, options.backend)
        tallies = compare(reference, engines, ids)
        print(f"{options.model}: {len(ids)} positions")
        print(f"{'format':<24} {'MB':>8} {'mean KL':>9} {'max KL':>9} {'top-1':>7} {'margin':>7} {'dNLL':>9}  greedy")
        rights = [answer(reference, case["prompt_ids"]) for case in cases]
        for name, tally in tallies.items():
            greedy = ""
            if cases:
                ours = [answer(engines[name], case["prompt_ids"]) for case in cases]
                same = [
                    next((i for i in range(ANSWER) if a[i] != b[i]), ANSWER) for a, b in zip(ours, rights, strict=True)
                ]
                greedy = f"{sum(count == ANSWER for count in same)} of {len(same)}; {np.mean(same):.0f}"
            n = tally.positions
            print(
                f"{name:<24} {sizes[name] / 1e6:8.1f} {tally.divergence / n:9.2e} {tally.largest:9.2e} "
                f"{tally.agreed / n:7.4f} {tally.margin:7.3f} {tally.nll / n:+9.2e}  {greedy}",
                flush=True,
            )


if __name__ == "__main__":
    main()
