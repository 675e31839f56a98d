"""Rope frequencies and angles against transformers, and against float64 arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_transformer.models.config import Rope
from edge_transformer.models.rope import cos_sin, inverse_frequencies, yarn_attention_factor

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CASES = {
    "default": ({"rope_type": "default"}, Rope("default", 1e4, 128)),
    "linear": ({"rope_type": "linear", "factor": 3.7}, Rope("linear", 1e4, 128, factor=3.7)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Rope("llama3", 1e4, 128, factor=32.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (YARN, Rope("yarn", 1e4, 128, factor=4.0, original_context=4096)),
    "yarn_betas": (
        YARN | {"beta_fast": 17.0, "beta_slow": 2.5},
        Rope("yarn", 1e4, 128, factor=4.0, original_context=4096, beta_fast=17.0, beta_slow=2.5),
    ),
    "yarn_not_truncated": (
        YARN | {"truncate": False},
        Rope("yarn", 1e4, 128, factor=4.0, original_context=4096, truncate=False),
    ),
}


def _ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32).astype(np.int64))


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 128), (5e5, 64), (1e6, 96), (123456.0, 34)])
def test_inverse_frequencies_equal_transformers(name: str, theta: float, head_dim: int) -> None:
    from dataclasses import replace

    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, rope = CASES[name]
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    reference = LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(replace(rope, theta=theta, rotary_dim=head_dim))
    assert ours.dtype == np.float32
    assert _ulps(ours, reference.inv_freq.numpy()).max() <= 2


@pytest.mark.golden
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, yarn_attention_factor(4.0)),
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 0.707, "mscale_all_dim": 0.4}, yarn_attention_factor(4.0, 0.707, 0.4)),
    ],
)
def test_cos_sin_equal_transformers(fields: dict[str, float], expected: float) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=131072,
        rope_parameters=YARN | {"rope_theta": 1e6} | fields,
    )  # fmt: skip
    reference = LlamaRotaryEmbedding(config)
    positions = np.array([0, 1, 5, 511, 512, 4095, 4096, 70001, 131071], np.int32)
    rope = Rope("yarn", 1e6, 128, factor=4.0, original_context=4096, attention_factor=expected)
    cos, sin = cos_sin(rope, reference.inv_freq.numpy(), positions)
    ref_cos, ref_sin = reference(torch.zeros(1), torch.from_numpy(positions)[None])
    for ours, theirs in ((cos, ref_cos), (sin, ref_sin)):
        assert ours.shape == (len(positions), 64)
        theirs = theirs[0, :, :64].numpy()
        assert np.abs(ours - theirs).max() <= 2 * np.spacing(np.float32(expected))


def test_default_frequencies_are_the_formula() -> None:
    frequencies = inverse_frequencies(Rope("default", 10000.0, 8))
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=2e-7)


def test_divisors_divide_one_by_one() -> None:
    divisors = (1.0, 2.0, 7.0, 32.0)
    plain = inverse_frequencies(Rope("default", 500000.0, 8))
    ours = inverse_frequencies(Rope("divisors", 500000.0, 8, divisors=divisors))
    np.testing.assert_array_equal(ours, plain / np.array(divisors, np.float32))


def test_rope_of_part_of_the_head() -> None:
    """The exponent counts rotated dimensions, not the head's."""
    frequencies = inverse_frequencies(Rope("default", 10000.0, 4))
    np.testing.assert_allclose(frequencies, [1.0, 0.01], rtol=2e-7)


def test_angles_are_rounded_to_float32_before_the_cosine() -> None:
    rope = Rope("default", 10000.0, 8)
    frequencies = inverse_frequencies(rope)
    positions = np.array([0, 3, 131071], np.int32)
    cos, sin = cos_sin(rope, frequencies, positions)
    for row, position in enumerate(positions):
        for column, frequency in enumerate(frequencies):
            angle = float(np.float32(np.float32(position) * frequency))
            assert cos[row, column] == np.float32(math.cos(angle))
            assert sin[row, column] == np.float32(math.sin(angle))
