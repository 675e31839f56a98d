"""The whole engine on a real GPU, one line per check: python tests/cuda/gpu_modes.py [MODEL.gguf GOLDEN.json]

    --only NAME    one tiny model; --tokens N of its prompt (for compute-sanitizer, which is slow)

Tiny models of every family in every residency mode: bits equal between modes (but for the output projection on the CPU,
which has to be within 1e-5), logits close to the oracle. With the demo
model's file and its reference ids: greedy ids in every mode. --plain takes the path of cards without tensor cores.
Run by hand on a machine with a GPU. Ends with status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.engine.core import MAX_ROWS, Chunk, Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Wishes
from tiny.models import MODELS
from tiny.run import open_engine
from tiny.weights import make_weights
from tiny.write import write_hf

BUDGET = 4 << 30
MODES = {
    "all resident": Wishes(BUDGET, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU),
    "all streamed": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=False, head=HeadPlace.GPU),
    "one resident, three slots": Wishes(BUDGET, resident_layers=1, slots=3, kv_offload=False, head=HeadPlace.GPU),
    "KV cache on the host": Wishes(BUDGET, resident_layers=-1, kv_offload=True, head=HeadPlace.GPU),
    "streamed, KV on the host": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.GPU),
    "output projection streamed": Wishes(BUDGET, resident_layers=-1, kv_offload=False, head=HeadPlace.STREAMED),
    "everything streamed": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.STREAMED),
    "all streamed, page-locking refused": Wishes(
        BUDGET, resident_layers=0, slots=2, kv_offload=False, head=HeadPlace.STREAMED
    ),
    "the least": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU),
}


PLAIN = False


class RefusingGpu(CudaGpu):
    """On a host that page-locks nothing that is there already."""

    def register_host(self, address: int, nbytes: int, read_only: bool) -> None:
        return None


def open_on_gpu(path: Path, mode: str, kv_dtype: DType, rows: int = MAX_ROWS) -> tuple[Engine, int]:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    gpu = (RefusingGpu if "refused" in mode else CudaGpu)(forced_capability=(7, 5) if PLAIN else None)
    options = GpuOptions(MODES[mode], min(4096, spec.config.context_length))
    weights = HostWeights(checkpoint, spec, 2)
    engine, plan = open_gpu_engine(gpu, checkpoint, spec, weights, CpuBackend(4), kv_dtype, options, rows)
    return engine, plan.arena_bytes


def logits_of(engine: Engine, tokens: list[int], chunk: int, decoded: int) -> np.ndarray:
    """[len(tokens), V]: prompt chunks, then `decoded` tokens one by one."""
    sequence = engine.new_sequence()
    split = len(tokens) - decoded
    steps = [(tokens[start : min(start + chunk, split)], "prompt") for start in range(0, split, chunk)]
    steps += [([token], "decode") for token in tokens[split:]]
    parts = []
    for part, kind in steps:
        result = engine.step([Chunk(sequence, part, kind, "all")])  # type: ignore[arg-type]
        assert result is not None
        parts.append(result.logits())
    sequence.close()
    return np.concatenate(parts)


def check_tiny(name: str, folder: Path, count: int) -> bool:
    path = write_hf(folder / name, MODELS[name].config, make_weights(MODELS[name]))
    tokens = np.random.default_rng(1).integers(0, 131, count).tolist()
    first, good = None, True
    for number, (mode, wishes) in enumerate(MODES.items()):
        engine, _ = open_on_gpu(path, mode, DType.F32)
        logits = logits_of(engine, tokens, (512, 64, 200)[number % 3], 5)
        engine.close()
        if first is None:
            first = logits
        elif wishes.head is HeadPlace.CPU:
            if np.abs(first - logits).max() > 1e-5 * max(1.0, np.abs(first).max()):
                print(f"FAILED  {name}: {mode}: {np.abs(first - logits).max():.1e} from all resident")
                good = False
        elif not np.array_equal(first, logits):
            print(f"FAILED  {name}: {mode}: {np.abs(first - logits).max():.1e} from all resident")
            good = False
    assert first is not None
    oracle = open_engine(path, "reference")
    truth = logits_of(oracle, tokens, 512, 0)
    oracle.close()
    error = np.abs(first - truth).max() / max(1.0, np.abs(truth).max())
    print(
        f"{'ok' if good and error < 1e-5 else 'FAILED':7} {name}: {len(MODES)} modes agree; {error:.1e} from the oracle"
    )
    return good and error < 1e-5


def check_golden(model: Path, golden: Path) -> bool:
    cases = json.loads(golden.read_text())["cases"]
    good = True
    for mode in MODES:
        started = time.perf_counter()
        engine, arena_bytes = open_on_gpu(model, mode, DType.F32)
        loaded = time.perf_counter()
        wrong = [case["name"] for case in cases if not same_ids(engine, case)]
        took = time.perf_counter() - loaded
        engine.close()
        good = good and not wrong
        print(
            f"{'FAILED' if wrong else 'ok':7} {model.name}: {mode}: {len(cases) - len(wrong)} of {len(cases)} prompts; "
            f"arena {arena_bytes / 2**20:.1f} MiB, load {loaded - started:.2f} s, run {took:.1f} s {wrong or ''}"
        )
    return good


def same_ids(engine: Engine, case: dict[str, list[int]]) -> bool:
    """Greedy ids equal the reference; a first difference counts only where the reference's margin is 1e-3 or more."""
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, case["prompt_ids"])
    for expected, margin in zip(case["greedy_ids"], case["margins"], strict=True):
        assert logits is not None
        token = int(logits.argmax())
        if token != expected:
            sequence.close()
            return margin < 1e-3
        result = engine.step([Chunk(sequence, [token], "decode", "last")])
        assert result is not None
        logits = result.logits()[0]
    sequence.close()
    return True


def main() -> int:
    global PLAIN
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--tokens", type=int, default=700)
    arguments = parser.parse_args()
    PLAIN = arguments.plain
    names = [arguments.only] if arguments.only else ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
    with tempfile.TemporaryDirectory() as folder:
        results = [check_tiny(name, Path(folder), arguments.tokens) for name in names]
    if arguments.files:
        model, golden = arguments.files
        results.append(check_golden(model, golden))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
