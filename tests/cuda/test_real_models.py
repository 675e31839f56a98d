"""Real models on the emulated GPU, streamed and with the KV cache on the host, against transformers in fp32.

A few tokens of one prompt: the emulator takes seconds for each. gpu_golden.py is the whole of it for a real GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Wishes
from emulator import EmulatedGpu
from paths import REPOSITORY, gemma3_path, smollm2_path

pytestmark = pytest.mark.real_model

TOP10_LOGPROB_BOUND = 1e-4
WISHES = Wishes(1 << 30, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.GPU)


def golden_case(name: str, prompt: str) -> dict[str, Any]:
    path = REPOSITORY / "tests" / "golden" / f"{name}_hf_fp32.json"
    case: dict[str, Any] = next(
        case for case in json.loads(path.read_text(encoding="utf-8"))["cases"] if case["name"] == prompt
    )
    return case


def check(path: Path, case: dict[str, Any], generated: int) -> None:
    """Ids equal the reference; the ten likeliest tokens after the prompt have its log-probabilities."""
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    gpu = EmulatedGpu(1)
    options = GpuOptions(WISHES, 512)
    weights = HostWeights(checkpoint, spec)
    engine, _ = open_gpu_engine(gpu, checkpoint, spec, weights, CpuBackend(1), DType.F32, options, max_rows=64)
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, case["prompt_ids"])
    assert logits is not None
    wide = logits.astype(np.float64) - logits.max()
    logprobs = wide - np.log(np.exp(wide).sum())
    for token, logprob in case["top10_logprobs_last_prompt_pos"]:
        assert abs(logprobs[token] - logprob) < TOP10_LOGPROB_BOUND
    ids = [int(logits.argmax())]
    while len(ids) < generated:
        result = engine.step([Chunk(sequence, ids[-1:], "decode", "last")])
        assert result is not None
        ids += result.likeliest()
    assert ids == case["greedy_ids"][:generated]
    engine.close()


def test_smollm2() -> None:
    check(smollm2_path(), golden_case("smollm2", "english"), 3)


def test_gemma3() -> None:
    check(gemma3_path(), golden_case("gemma3", "english"), 2)
