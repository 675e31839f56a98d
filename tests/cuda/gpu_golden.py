"""Real models in every placement on a real GPU, against transformers in fp32 on the same weights:

    python tests/cuda/gpu_golden.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --gemma3 gemma-3-270m-q4_k_m.gguf

    --plain   the path of cards without tensor cores

All resident, with an f32 KV cache: greedy ids of the golden prompts, the ten likeliest tokens after each of them, the
negative log-likelihood of a long prompt. Every other placement, for half as many ids and the last rows of the long
prompt: the same bits, or with the output projection on the CPU the same ids and logits within rounding. One line per
placement; a process for each model. Run by hand on a machine with a GPU. Ends with status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda.placements import Placement, open_within
from cuda.real_gpu import KeptGpu, run_side_by_side
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Plan, Wishes

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("smollm2", "gemma3", "hybrid24m", "hybrid24m_q8_0")

# The bounds of tests/engine/test_real_models.py, and for an output projection on the CPU that of the correctness chain.
NEAR_TIE = 1e-3
TOP10_BOUND = 1e-4
NLL_BOUND = 1e-3
HEAD_BOUND = 1e-5

BUDGET = 8 << 30
GPU, STREAMED, SPLIT, CPU = HeadPlace.GPU, HeadPlace.STREAMED, HeadPlace.SPLIT, HeadPlace.CPU
PLACEMENTS = {
    "all resident": Placement(Wishes(BUDGET, -1, kv_offload=False, head=GPU)),
    "all streamed": Placement(Wishes(BUDGET, 0, slots=2, kv_offload=False, head=GPU)),
    "KV on the host": Placement(Wishes(BUDGET, -1, kv_offload=True, head=GPU)),
    "lm_head streamed": Placement(Wishes(BUDGET, -1, kv_offload=False, head=STREAMED)),
    "all on the host": Placement(Wishes(BUDGET, 0, slots=2, kv_offload=True, head=STREAMED), least=True),
    "page-locking refused": Placement(Wishes(BUDGET, 0, slots=3, kv_offload=False, head=STREAMED), locked=False),
    "the least": Placement(Wishes(BUDGET, 0, slots=2, kv_offload=True, head=CPU), least=True),
    "lm_head split": Placement(Wishes(BUDGET, 0, slots=2, kv_offload=False, head=SPLIT)),
    "lm_head on the CPU": Placement(Wishes(BUDGET, -1, kv_offload=False, head=CPU)),
}

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class Measured:
    """ids, and logits f32 [V] before each, of every golden prompt; of the long prompt logits f32 [N, V] and where."""

    ids: list[list[int]]
    steps: list[list[Logits]]
    long: Logits
    long_positions: list[int]


def measure(engine: Engine, cases: Sequence[dict[str, Any]], long_ids: list[int], first: bool) -> Measured:
    """All of it in the first placement. Of a vocabulary of 262144 tokens, the long prompt's logits are 1.8 GB."""
    measured = Measured([], [], np.empty((0, engine.config.vocab_size), np.float32), [])
    for case in cases:
        ids, steps = greedy(engine, case["prompt_ids"], len(case["greedy_ids"]) // (1 if first else 2))
        measured.ids.append(ids)
        measured.steps.append(steps)
    sequence = engine.new_sequence()
    blocks: list[Logits] = []
    while (done := len(sequence)) < len(long_ids):
        count = engine.chunk_length(done, len(long_ids) - done)
        every = first or done + count == len(long_ids)
        result = engine.step([Chunk(sequence, long_ids[done : done + count], "prompt", "all" if every else "last")])
        assert result is not None
        for rows, logits in result.blocks():
            measured.long_positions += [done + row for _, row in rows]
            blocks.append(logits)
    measured.long = np.concatenate(blocks)
    sequence.close()
    return measured


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> tuple[list[int], list[Logits]]:
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, prompt)
    ids: list[int] = []
    steps: list[Logits] = []
    while True:
        assert logits is not None
        steps.append(logits)
        ids.append(int(logits.argmax()))
        if len(ids) == count:
            sequence.close()
            return ids, steps
        result = engine.step([Chunk(sequence, ids[-1:], "decode", "last")])
        assert result is not None
        logits = result.logits()[0]


def against_golden(measured: Measured, cases: Sequence[dict[str, Any]], long: dict[str, Any]) -> tuple[str, bool]:
    """What to say of the first placement, and whether it is good."""
    wrong = [case["name"] for case, ids in zip(cases, measured.ids, strict=True) if not same_ids(ids, case)]
    tops = [top10_error(steps[0], case) for case, steps in zip(cases, measured.steps, strict=True)]
    nll = [
        -log_probabilities(measured.long[row])[following]
        for row, following in enumerate(long["ids"][1 : len(long["nll"]) + 1])
    ]
    nll_error = float(np.abs(np.array(nll) - long["nll"]).max())
    text = (
        f"ids of {len(cases) - len(wrong)}/{len(cases)} prompts {wrong or ''}; top-10 log-probabilities "
        f"{max(tops):.1e} (bound {TOP10_BOUND:.0e}); "
        f"NLL of {len(nll)} positions {nll_error:.1e} (bound {NLL_BOUND:.0e})"
    )
    return text, not wrong and max(tops) < TOP10_BOUND and nll_error < NLL_BOUND


def against_first(measured: Measured, first: Measured, exact: bool) -> tuple[str, bool]:
    """What to say of another placement, and whether it is good."""
    pairs = [pair for a, b in zip(measured.steps, first.steps, strict=True) for pair in zip(a, b, strict=False)]
    pairs.append((measured.long, first.long[measured.long_positions]))
    error = max(float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())) for a, b in pairs)
    same = all(a == b[: len(a)] for a, b in zip(measured.ids, first.ids, strict=True))
    if exact:
        equal = same and all(np.array_equal(a, b) for a, b in pairs)
        return f"bits equal: {'yes' if equal else f'NO, {error:.1e}'}", equal
    return f"ids equal: {'yes' if same else 'NO'}; logits {error:.1e} (bound {HEAD_BOUND:.0e})", same and (
        error <= HEAD_BOUND
    )


def same_ids(ids: Sequence[int], case: dict[str, Any]) -> bool:
    """A first difference counts only where the reference's margin is NEAR_TIE or more."""
    different = (step for step, pair in enumerate(zip(ids, case["greedy_ids"], strict=True)) if pair[0] != pair[1])
    first = next(different, None)
    return first is None or case["margins"][first] < NEAR_TIE


def top10_error(logits: Logits, case: dict[str, Any]) -> float:
    ours = log_probabilities(logits)
    return max(abs(float(ours[token]) - logprob) for token, logprob in case["top10_logprobs_last_prompt_pos"])


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def check(name: str, path: Path, capability: tuple[int, int] | None, threads: int) -> bool:
    cases = json.loads((GOLDEN / f"{name}_hf_fp32.json").read_text(encoding="utf-8"))["cases"]
    long = json.loads((GOLDEN / f"{name}_nll_long.json").read_text(encoding="utf-8"))
    gpu = KeptGpu(forced_capability=capability)
    first: Measured | None = None
    good = True
    for label, placement in PLACEMENTS.items():
        gpu.refuses = not placement.locked

        def open_engine(wishes: Wishes) -> tuple[Engine, Plan]:
            checkpoint = open_checkpoint(path)
            spec = read_model(checkpoint)
            weights = HostWeights(checkpoint, spec, threads)
            return open_gpu_engine(
                gpu, checkpoint, spec, weights, CpuBackend(threads), DType.F32, GpuOptions(wishes, 2048)
            )

        started = time.perf_counter()
        engine, plan = open_within(open_engine, placement)
        loaded = time.perf_counter()
        measured = measure(engine, cases, long["ids"], first is None)
        took = time.perf_counter() - loaded
        engine.close()
        if first is None:
            first = measured
            text, fine = against_golden(measured, cases, long)
        else:
            text, fine = against_first(measured, first, placement.exact)
        good = good and fine
        print(
            f"{'ok' if fine else 'FAILED':7} {name} {label}: {text}; arena {plan.arena_bytes / 2**20:.1f} MiB, "
            f"load {loaded - started:.1f} s, run {took:.1f} s",
            flush=True,
        )
    gpu.end()
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in NAMES:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    capability = (7, 5) if arguments.plain else None
    threads = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    if arguments.one:
        return 0 if check(arguments.one, getattr(arguments, arguments.one), capability, threads) else 1
    given = [name for name in NAMES if getattr(arguments, name)]
    if not given:
        parser.error("no model file was given")
    more = ["--plain"] * arguments.plain
    checks = [["--one", name, f"--{name}", str(getattr(arguments, name)), *more] for name in given]
    return 0 if run_side_by_side(__file__, checks, limit_s=170) else 1


if __name__ == "__main__":
    sys.exit(main())
