"""Real models against transformers in fp32 on the same (dequantized) weights.

tests/golden/*_hf_fp32.json: greedy ids, their margins, and the ten likeliest tokens after each prompt.
tests/golden/*_nll_long.json: teacher-forced negative log-likelihood at every position of a long prompt; it passes
Gemma's window of 512 and the border of three KV tiles.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_transformer import LLM
from paths import REPOSITORY, gemma3_path, hybrid_gguf_path, hybrid_path, smollm2_path

pytestmark = pytest.mark.real_model

NEAR_TIE_NATS = 1e-3
TOP10_LOGPROB_BOUND = 1e-4
NLL_BOUND = 1e-3
BF16_KV_MEAN_KL_BOUND = 5e-5

MODELS = {
    "smollm2": smollm2_path,
    "gemma3": gemma3_path,
    "hybrid24m": hybrid_path,
    "hybrid24m_q8_0": hybrid_gguf_path,
}


@dataclass
class Real:
    """A real model with an f32 KV cache, and what transformers computes with it."""

    path: Path
    llm: LLM
    cases: list[dict[str, Any]]
    long: dict[str, Any]


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    name = request.param
    path = MODELS[name]()
    golden = REPOSITORY / "tests" / "golden"
    cases = json.loads((golden / f"{name}_hf_fp32.json").read_text(encoding="utf-8"))["cases"]
    long = json.loads((golden / f"{name}_nll_long.json").read_text(encoding="utf-8"))
    with LLM(path, kv_dtype="f32", context_length=4096) as llm:
        yield Real(path, llm, cases, long)


def test_prompt_ids_equal_the_reference(real: Real) -> None:
    for case in real.cases:
        assert real.llm.encode(case["prompt"], raw=True) == case["prompt_ids"], case["name"]


def test_greedy_ids_equal_the_reference(real: Real) -> None:
    for case in real.cases:
        expected = case["greedy_ids"]
        ids = real.llm.generate(case["prompt"], raw=True, max_tokens=len(expected), ignore_eos=True).ids
        assert len(ids) == len(expected), case["name"]
        first = next((step for step, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            assert case["margins"][first] < NEAR_TIE_NATS, f"{case['name']}: first difference at step {first}"


def test_ten_likeliest_tokens_have_the_reference_logprobs(real: Real) -> None:
    for case in real.cases:
        answer = real.llm.generate(case["prompt"], raw=True, max_tokens=1, logprobs=20, ignore_eos=True)
        assert answer.logprobs is not None
        ours = dict(answer.logprobs[0].top)
        errors = [abs(ours[token] - logprob) for token, logprob in case["top10_logprobs_last_prompt_pos"]]
        assert max(errors) < TOP10_LOGPROB_BOUND, case["name"]


def test_nll_of_every_position_of_a_long_prompt(real: Real) -> None:
    ids = real.long["ids"]
    nll = [
        -logprobs[row, ids[start + row + 1]]
        for start, logprobs in log_probabilities(real.llm, ids)
        for row in range(len(logprobs))
        if start + row + 1 < len(ids)
    ]
    errors = np.abs(np.array(nll) - real.long["nll"])
    assert errors.max() < NLL_BOUND, f"at position {errors.argmax()}"


def test_bf16_kv_cache_stays_close_to_f32(real: Real) -> None:
    ids = real.long["ids"]
    divergence: list[float] = []
    with LLM(real.path, kv_dtype="bf16", context_length=4096) as llm:
        blocks = zip(log_probabilities(real.llm, ids), log_probabilities(llm, ids), strict=True)
        for (start, exact), (other_start, rounded) in blocks:
            assert start == other_start
            divergence.extend((np.exp(exact) * (exact - rounded)).sum(axis=1))
    assert len(divergence) == len(ids)
    assert np.mean(divergence) <= BF16_KV_MEAN_KL_BOUND


def log_probabilities(llm: LLM, ids: list[int]) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.float64]]]]:
    """(start, log-probabilities f64 [n, V]) for consecutive positions."""
    for start, logits in llm.score_blocks(ids):
        wide = logits.astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        yield start, wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
