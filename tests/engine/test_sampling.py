"""Sampling against arithmetic by hand, transformers' definitions, and counted frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_transformer.engine.sampling import (
    GenerationConfig,
    adjust_logits,
    sample,
    token_logprobs,
    truncated_distribution,
    uniform,
)
from edge_transformer.errors import UsageError

LOGITS = np.log(np.array([0.05, 0.4, 0.3, 0.05, 0.2], np.float32))


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert sample(np.array([1, 3, 3, 2], np.float32), GenerationConfig(), 7, [0], []) == 1


@pytest.mark.parametrize(
    ("settings_", "kept"),
    [
        ({}, [1, 2, 4, 0, 3]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [1, 2, 4, 0]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_p": 0.7}, [1, 2]),
        ({"top_p": 0.75}, [1, 2, 4]),
        ({"min_p": 0.49}, [1, 2, 4]),
        ({"min_p": 0.51}, [1, 2]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.5}, [1, 2]),
    ],
)
def test_truncation_by_hand(settings_: dict[str, float], kept: list[int]) -> None:
    tokens, _ = truncated_distribution(LOGITS, GenerationConfig(temperature=1.0, **settings_))
    assert tokens.tolist() == kept


def test_temperature_divides_logits() -> None:
    _, probabilities = truncated_distribution(LOGITS, GenerationConfig(temperature=0.5))
    expected = np.sort(np.array([0.05, 0.4, 0.3, 0.05, 0.2]) ** 2)[::-1]
    np.testing.assert_allclose(probabilities, expected / expected.sum(), rtol=1e-6)


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.0, 3.0], np.float32)
    config = GenerationConfig(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 1.5, 4: -math.inf}
    )
    adjusted = adjust_logits(logits, config, prompt=[0, 1], answer=[2, 2, 0])
    # seen in prompt or answer: 0, 1, 2; in the answer: 2 twice, 0 once
    np.testing.assert_allclose(adjusted, [2 / 2 - 0.75, -2 * 2, 1 / 2 - 0.5 - 0.5, 1.5, -np.inf])
    assert logits[0] == 2.0


@pytest.mark.golden
def test_repetition_penalty_and_truncation_equal_transformers() -> None:
    import torch
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    random = np.random.default_rng(3)
    for _ in range(50):
        logits = random.normal(0, 3, 200).astype(np.float32)
        seen = random.integers(0, 200, 20)
        top_k, top_p, min_p = (
            int(random.integers(1, 60)),
            float(random.uniform(0.05, 0.99)),
            float(random.uniform(0, 0.3)),
        )
        config = GenerationConfig(temperature=0.8, repetition_penalty=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
        ids, scores = torch.tensor(seen)[None], torch.tensor(logits)[None]
        for warper in (
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ):
            scores = warper(ids, scores)
        expected_p = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
        ours = adjust_logits(logits, config, seen.tolist(), [])
        without_min_p = GenerationConfig(temperature=0.8, top_k=top_k, top_p=top_p)
        assert set(truncated_distribution(ours, without_min_p)[0].tolist()) == expected_p
        only_min_p = GenerationConfig(temperature=0.8, min_p=min_p)
        scores = MinPLogitsWarper(min_p)(ids, TemperatureLogitsWarper(0.8)(ids, torch.tensor(ours)[None]))
        expected = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
        assert set(truncated_distribution(ours, only_min_p)[0].tolist()) == expected


def test_draws_follow_the_distribution() -> None:
    config = GenerationConfig(temperature=1.0)
    counts = np.bincount([sample(LOGITS, config, seed, [0] * 3, []) for seed in range(20000)], minlength=5)
    expected = np.array([0.05, 0.4, 0.3, 0.05, 0.2]) * 20000
    # five standard deviations of a binomial count
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


@pytest.mark.parametrize("settings_", [{}, {"top_p": 0.97}, {"min_p": 1e-4}, {"top_k": 700}, {"top_k": 9999}])
def test_a_draw_is_where_its_point_falls_among_all_candidates(settings_: dict[str, float]) -> None:
    """Flat and peaked distributions: the token lies among the few that are sorted first, or far behind them."""
    generator = np.random.default_rng(8)
    for scale in (0.1, 1.0, 4.0):
        logits = np.round(generator.normal(size=5000) * scale, 2).astype(np.float32)
        config = GenerationConfig(temperature=0.9, **settings_)
        tokens, probabilities = truncated_distribution(logits, config)
        cumulative = np.cumsum(probabilities)
        for seed in range(40):
            point = uniform(seed, 3) * cumulative[-1]
            assert sample(logits, config, seed, [1, 2], [3]) == tokens[np.searchsorted(cumulative, point, "right")]


def test_draw_depends_on_seed_and_position_only() -> None:
    values = {uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in (0, 1, 2, 10**6)}
    assert len(values) == 12
    assert uniform(5, 9) == uniform(5, 9)
    config = GenerationConfig(temperature=1.0)
    assert sample(LOGITS, config, 11, [1, 2], [3]) == sample(LOGITS, config, 11, [4, 4, 4], [])


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.integers(0, 70),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.05, 5),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_sampled_token_is_always_a_candidate(
    values: list[float], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, probabilities = truncated_distribution(logits, config)
    assert len(tokens) >= 1
    assert tokens[0] == logits.argmax()
    assert np.all(np.diff(probabilities) <= 0)
    assert sample(logits, config, seed, [0], []) in tokens


def test_logprobs_are_those_of_the_model() -> None:
    result = token_logprobs(LOGITS + np.float32(17), 2, 3)
    assert result.logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert [token for token, _ in result.top] == [1, 2, 4]
    assert result.top[0][1] == pytest.approx(math.log(0.4), abs=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": "text"},
        {"logprobs": 101},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: math.inf}},
        {"logit_bias": {3: 1e39}},
        {"logit_bias": {3.5: 1.0}},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": [3]},
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": 1e300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"frequency_penalty": 10**400},
        {"max_tokens": 2.5},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"logprobs": "2"},
        {"stop": b"text"},
        {"stop": ("a", 1)},
    ],
    ids=lambda bad: str(bad),
)
def test_values_out_of_range_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        GenerationConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30])
def test_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    logits = np.array([-30, 20.5, 20.4, -3e38], np.float32)
    for seed in range(20):
        assert sample(logits, GenerationConfig(temperature=temperature), seed, [0], []) == 1


@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=20),
    st.sampled_from([1e-30, 1.0, 1e30]),
    st.sampled_from([-1e30, 0, 1e30]),
    st.sampled_from([-1e30, 0, 1e30]),
    st.sampled_from([-math.inf, -1e30, 0, 1e30]),
    st.sampled_from([0, 5e-324, 1, 1e30]),
)
@settings(max_examples=200, deadline=None)
def test_extreme_settings_leave_numbers_that_can_be_compared(
    values: list[float], repetition: float, presence: float, frequency: float, bias: float, temperature: float
) -> None:
    logits = np.array(values, np.float32)
    config = GenerationConfig(
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={0: bias},
    )
    with np.errstate(all="raise", under="ignore"):
        adjusted = adjust_logits(logits, config, [0, 1], [1] * 50)
        assert np.isfinite(adjusted[1:]).all()
        assert 0 <= sample(logits, config, 3, [0, 1], [1] * 50) < len(logits)


def test_banning_every_token_is_an_error() -> None:
    for temperature in (0.0, 1.0):
        config = GenerationConfig(logit_bias=dict.fromkeys(range(5), -math.inf), temperature=temperature)
        with pytest.raises(UsageError, match="bans every token"):
            sample(LOGITS, config, 0, [0], [])


def test_bias_for_a_token_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="token 99"):
        sample(LOGITS, GenerationConfig(logit_bias={99: 1.0}), 0, [0], [])
