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
import numpy.typing as npt
import pytest

from edge_transformer import LLM
from paths import REPOSITORY, gemma3_path, hybrid_gguf_path, hybrid_path, smollm2_path

F64 = npt.NDArray[np.float64]

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


@dataclass
class Scores:
    """Of the long prompt: -log P of each next token with an f32 KV cache, KL divergence of bf16 from it."""

    nll: F64
    divergence: F64


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


@pytest.fixture(scope="module")
def scores(real: Real) -> Scores:
    """Both figures from one pass with each KV cache: the vocabulary is too large to keep the logits."""
    ids = real.long["ids"]
    nll: list[float] = []
    divergence: list[float] = []
    with LLM(real.path, kv_dtype="bf16", context_length=4096) as llm:
        rows = zip(log_probabilities(real.llm, ids), log_probabilities(llm, ids), strict=True)
        for (position, exact), (other_position, rounded) in rows:
            assert position == other_position == len(divergence)
            if position + 1 < len(ids):
                nll.append(-exact[ids[position + 1]])
            divergence.append(float((np.exp(exact) * (exact - rounded)).sum()))
    return Scores(np.array(nll), np.array(divergence))


def test_nll_of_every_position_of_a_long_prompt(real: Real, scores: Scores) -> None:
    errors = np.abs(scores.nll - real.long["nll"])
    assert errors.max() < NLL_BOUND, f"at position {errors.argmax()}"


def test_bf16_kv_cache_stays_close_to_f32(real: Real, scores: Scores) -> None:
    assert len(scores.divergence) == len(real.long["ids"])
    assert np.mean(scores.divergence) <= BF16_KV_MEAN_KL_BOUND


def log_probabilities(llm: LLM, ids: list[int]) -> Iterator[tuple[int, F64]]:
    """(position, log-probabilities f64 [V]) one position after another: a row fits the CPU's cache."""
    for start, logits in llm.score_blocks(ids):
        for position, row in enumerate(logits, start):
            wide = row.astype(np.float64)
            wide -= wide.max()
            wide -= np.log(np.exp(wide).sum())
            yield position, wide
