"""Rotary embedding on the host: the inverse frequencies of a Rope, and the cosines and sines of a pass.

inv_freq is one float32 vector per Rope, computed operation by operation in the order transformers uses, in float32
where it uses float32, because one ulp of a frequency is 8e-3 rad at position 131 071. cos and sin are evaluated in
float64 of the float32 angle and rounded once: the nearest float32 to the cosine that transformers approximates.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_transformer.models.config import Rope

FloatVector = npt.NDArray[np.float32]


def inverse_frequencies(rope: Rope) -> FloatVector:
    """inv_freq of a rope, float32 [rotary_dim / 2].

    Formulas: linear scaling divides all frequencies by the factor; "llama3" is Llama 3.1's wavelength-dependent
    division with a smooth band between the two context borders; "yarn" is the NTK-by-parts interpolation of YaRN
    (https://arxiv.org/abs/2309.00071, section 3.2); "divisors" is what a GGUF file states number by number.
    """
    periods = _periods(rope)
    frequencies: FloatVector = np.float32(1.0) / periods
    match rope.type:
        case "default":
            return frequencies
        case "linear":
            return np.divide(frequencies, np.float32(rope.factor), dtype=np.float32)
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, periods)
        case "divisors":
            return np.divide(frequencies, np.array(rope.divisors, np.float32), dtype=np.float32)
    raise ValueError(f"unknown rope type {rope.type!r}")


def cos_sin(rope: Rope, frequencies: FloatVector, positions: npt.NDArray[np.int32]) -> tuple[FloatVector, FloatVector]:
    """cos and sin of a pass, each float32 [R, rotary_dim / 2], attention factor included.

    `frequencies` is inverse_frequencies(rope), positions int32 [R]. The angle is float32 position * float32 frequency.
    """
    angles = (positions.astype(np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
    cosines: FloatVector = np.cos(angles).astype(np.float32)
    sines: FloatVector = np.sin(angles).astype(np.float32)
    factor = np.float32(rope.attention_factor)
    return np.multiply(cosines, factor, dtype=np.float32), np.multiply(sines, factor, dtype=np.float32)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What yarn multiplies cos and sin by when the configuration gives no attention_factor."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _periods(rope: Rope) -> FloatVector:
    """theta ** (2 i / rotary_dim): exponent rounded to float32, power taken in float64 and rounded once."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.power(np.float64(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: Rope, frequencies: FloatVector) -> FloatVector:
    factor = np.float32(rope.factor)
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    one = np.float32(1)  # transformers' scalar / tensor is reciprocal times scalar; so it is here, to the same rounding
    wavelengths = one / frequencies * np.float32(2 * math.pi)
    scaled = np.where(wavelengths > low_wavelength, frequencies / factor, frequencies)
    turns = one / wavelengths * np.float32(rope.original_context)
    smooth = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (one - smooth) * scaled / factor + smooth * scaled
    between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(rope: Rope, periods: FloatVector) -> FloatVector:
    def correction_dim(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp of one point, as transformers and llama.cpp have it
    indices = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((indices - np.float32(low)) / np.float32(high - low), 0, 1)
    extrapolated = np.float32(1) - ramp
    interpolation = np.float32(1) / (np.float32(rope.factor) * periods)
    extrapolation = np.float32(1) / periods
    blended: FloatVector = interpolation * (np.float32(1) - extrapolated) + extrapolation * extrapolated
    return blended
