"""Activations of the gated feed-forward, and the logit softcap."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit
        result: Floats = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Floats) -> Floats:
    """log(1 + exp(x)), without overflow."""
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def gelu_tanh(x: Floats) -> Floats:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    half_tail: Floats = np.float32(0.5) * (np.float32(1) + np.tanh(inner))
    return x * half_tail


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def softcap(x: Floats, cap: float | None) -> Floats:
    """cap * tanh(x / cap); x itself when cap is None."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))
