"""Tiny models in every placement on a real GPU, one line per model and path: python tests/cuda/gpu_modes.py

    --only NAME     one model, in this process; --tokens N of its longest prompt
    --every N       one of N placements (default 5: each check its own fifth, of which 22 checks see every placement)
    --at-once N     processes, which take turns on the GPU (default 8)
    --short         five placements, one way of feeding each (for compute-sanitizer, which is slow)
    --plain         the path of cards without tensor cores only; --tensor the card's own only (default: both)

Every placement gives the bits of the first (all resident), whatever the chunks and the batch mates; an output
projection on the CPU gives them to rounding. The first is close to the numpy oracle. Run by hand on a machine with a
GPU. Ends with status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda.placements import (
    ALL_RESIDENT,
    Findings,
    Logits,
    Placement,
    Prompt,
    Way,
    feed,
    open_within,
    placements,
    random_prompts,
    relative_error,
    short_placements,
)
from cuda.real_gpu import KeptGpu, run_side_by_side
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import UsageError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import round_up
from edge_transformer.models.read import read_model
from edge_transformer.ops.batch import DELTA_CHUNK_POSITIONS
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import Wishes
from tiny.models import MODELS
from tiny.run import open_engine
from tiny.weights import make_weights
from tiny.write import write_hf

CHECKED = (
    "llama",
    "llama_tied_wide_heads",
    "mistral_long",
    "qwen2_windows",
    "qwen3",
    "gemma2_long",
    "gemma2_query_scale",
    "gemma3_linear",
    "qwen3_5",
    "qwen3_5_odd_heads",
    "qwen3_5_wide_heads",
)
BOUND = 1e-5
"""Of |difference of logits| over max(1, largest |logit|), on a GPU as on the CPU."""

WAYS = (
    Way(512),
    Way(37, every_row=False),
    Way(64, every_row=False),
    Way(128),
    Way(64, 2, every_row=False),
    Way(37, 3, 2),
    Way(128, 3, every_row=False),
)
RECURRENT_WAYS = tuple(replace(way, chunk=round_up(way.chunk, DELTA_CHUNK_POSITIONS)) for way in WAYS)
"""Of models with recurrent state: their bits depend on where prompts are cut, and the engine cuts on these borders."""

CONTEXT = 1024
EVERY = 5
"""No divisor of the number of choices of anything in a placement: each choice comes up in each part of them."""
AT_ONCE = 8
LIMIT_S = 85


@dataclass(frozen=True, slots=True)
class Variant:
    """Placements of a variant are compared with each other, every `every`-th of those that the check has; and ways of
    feeding the first, every `every_way`-th.
    """

    name: str
    kv_dtype: DType = DType.F32
    fast_prefill: bool = False
    every: int = 1
    every_way: int = 1


VARIANTS = (
    Variant("f32 KV"),
    Variant("bf16 KV", DType.BF16, every=5, every_way=2),
    Variant("fast prefill", fast_prefill=True, every=5, every_way=2),
)


class TinyOnGpu:
    """A tiny model that is opened again and again on one GPU."""

    def __init__(self, gpu: KeptGpu, path: Path) -> None:
        self._gpu = gpu
        self._path = path

    def open(self, wishes: Wishes, variant: Variant) -> Engine:
        checkpoint = open_checkpoint(self._path)
        spec = read_model(checkpoint)
        options = GpuOptions(wishes, CONTEXT, sequences=3, fast_prefill=variant.fast_prefill)
        weights = HostWeights(checkpoint, spec)
        return open_gpu_engine(self._gpu, checkpoint, spec, weights, CpuBackend(1), variant.kv_dtype, options)[0]

    def logits(self, placement: Placement, variant: Variant, prompts: Sequence[Prompt], way: Way) -> list[Logits]:
        self._gpu.refuses = not placement.locked
        engine = open_within(lambda wishes: self.open(wishes, variant), placement)
        try:
            return feed(engine, prompts, way)
        finally:
            engine.close()


def check(name: str, capability: tuple[int, int] | None, tokens: int, every: int, short: bool) -> bool:
    lengths = [(max(tokens // 8, 8), max(tokens // 70, 4)), (tokens, 5), (max(tokens // 12, 6), max(tokens // 80, 3))]
    prompts = random_prompts(lengths, 131)
    gpu = KeptGpu(forced_capability=capability)
    part = CHECKED.index(name) + (0 if capability is None else len(CHECKED))
    findings, exact = Findings(), list[Logits]()
    ways = RECURRENT_WAYS if "linear_num_value_heads" in MODELS[name].config else WAYS
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = write_hf(Path(folder) / name, MODELS[name].config, make_weights(MODELS[name]))
        model = TinyOnGpu(gpu, path)
        layers = int(str(MODELS[name].config["num_hidden_layers"]))
        first = Placement(ALL_RESIDENT)
        for variant in VARIANTS[:1] if short else VARIANTS:
            reference = model.logits(first, variant, prompts, ways[0])
            if variant is VARIANTS[0]:
                exact = reference
            for way in () if short else ways[1 :: variant.every_way]:
                findings.compare(
                    f"{variant.name}: {way}", True, reference, model.logits(first, variant, prompts, way), BOUND
                )
            some = placements(layers, first.wishes.budget_bytes)[part % every :: every * variant.every]
            for number, placement in enumerate(short_placements(first.wishes.budget_bytes) if short else some):
                way = ways[number % len(ways)]
                logits = model.logits(placement, variant, prompts, way)
                findings.compare(f"{variant.name}: {placement}; {way}", placement.exact, reference, logits, BOUND)
        try:
            model.open(Wishes(ALL_RESIDENT.budget_bytes, 0, slots=1), VARIANTS[0])
            findings.faults.append("one slot was accepted")
        except UsageError:
            pass
        oracle = open_engine(path, "reference")
        error = relative_error(feed(oracle, prompts, Way(1024)), exact)
        oracle.close()
    if not error <= BOUND:
        findings.faults.append(f"{error:.1e} from the oracle")
    path_name = ".".join(map(str, gpu.properties.capability))
    gpu.end()
    for fault in findings.faults[:5]:
        print(f"        {fault}")
    print(
        f"{'FAILED' if findings.faults else 'ok':7} {name:22} path {path_name:4} {findings.compared} placements, "
        f"{len(findings.faults)} faults; lm_head on the CPU or split {findings.largest_head_error:.1e}, "
        f"oracle {error:.1e} (bounds {BOUND:.0e}); {time.perf_counter() - started:.1f} s"
    )
    return not findings.faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--tensor", action="store_true")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    if arguments.only:
        capability = (7, 5) if arguments.plain else None
        return 0 if check(arguments.only, capability, arguments.tokens, arguments.every, arguments.short) else 1
    more = [["--plain"]] if arguments.plain else [["--tensor"]] if arguments.tensor else [["--tensor"], ["--plain"]]
    size = ["--tokens", str(arguments.tokens), "--every", str(arguments.every)]
    size += ["--short"] * arguments.short
    checks = [["--only", name, *path, *size] for path in more for name in CHECKED]
    return 0 if run_side_by_side(__file__, checks, LIMIT_S, min(arguments.at_once, len(os.sched_getaffinity(0)))) else 1


if __name__ == "__main__":
    sys.exit(main())
