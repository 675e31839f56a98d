"""Cases of the gated delta rule and their truth: fp64, one position after another, with the contract's magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import PromptSpan

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def make_shape(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int = 4,
    tiled: bool = False,
    norm_eps: float = 1e-6,
) -> DeltaShape:
    return DeltaShape(0, key_heads, value_heads, key_dim, value_dim, conv_width, tiled, norm_eps)


@dataclass
class Case:
    """Inputs of a pass. spans: (position, rows) of sequences with prompt rows; decodes: (position, rows) of those with
    decode rows, whose sequences follow. States are those before the pass, NaN where the first position is 0.
    """

    shape: DeltaShape
    qkv: F32
    z: F32
    a: F32
    b: F32
    conv: F32
    decay: F32
    dt_bias: F32
    norm: F32
    states: F32  # [sequences, block_bytes / 4]
    positions: npt.NDArray[np.int32]
    row_sequence: npt.NDArray[np.int32]
    prompt_rows: int
    spans: tuple[PromptSpan, ...]

    @property
    def rows(self) -> int:
        return len(self.positions)


def make_case(
    shape: DeltaShape,
    spans: Sequence[tuple[int, int]] = (),
    decodes: Sequence[tuple[int, int]] = (),
    strong_decay: bool = False,
    mixed: bool = False,
) -> Case:
    """A case with fresh random numbers. strong_decay: some positions forget nearly all, others nothing. mixed: decode
    rows of several sequences alternate.
    """
    rng = np.random.default_rng()

    def normal(*size: int) -> F32:
        return rng.standard_normal(size, dtype=np.float32)

    listed = [*spans, *decodes]
    prompt_rows = sum(count for _, count in spans)
    sequence = np.concatenate([np.full(count, index) for index, (_, count) in enumerate(listed)])
    position = np.concatenate([start + np.arange(count) for start, count in listed])
    if mixed:  # each sequence's rows stay in order
        order = rng.permutation(sequence[prompt_rows:])
        taken = {index: iter(range(start, start + count)) for index, (start, count) in enumerate(listed)}
        sequence[prompt_rows:] = order
        position[prompt_rows:] = [next(taken[index]) for index in order]
    rows, inner = len(position), shape.value_heads * shape.value_dim
    a, dt_bias = normal(rows, shape.value_heads), normal(shape.value_heads)
    decay = -np.exp(rng.uniform(-3, 1, shape.value_heads)).astype(np.float32)
    if strong_decay:
        a += np.where(rng.random(a.shape) < 0.3, 40, -8).astype(np.float32)
        decay = -np.exp(rng.uniform(0, 2, shape.value_heads)).astype(np.float32)
    states = np.zeros((len(listed), shape.block_bytes // 4), np.float32)
    kept = shape.channels * (shape.conv_width - 1)
    states[:, : shape.state_values] = normal(len(listed), shape.state_values) * np.float32(0.3)
    states[:, shape.state_values : shape.state_values + kept] = normal(len(listed), kept)
    for index, (start, _) in enumerate(listed):
        if start == 0:
            states[index] = np.nan
    starts = np.cumsum([0, *(count for _, count in spans)])
    return Case(
        shape,
        normal(rows, shape.channels),
        normal(rows, inner),
        a,
        normal(rows, shape.value_heads) * 2,
        normal(shape.channels, shape.conv_width) * np.float32(shape.conv_width**-0.5),
        decay,
        dt_bias,
        1 + np.float32(0.2) * normal(shape.value_dim),
        states,
        position.astype(np.int32),
        sequence.astype(np.int32),
        prompt_rows,
        tuple(
            PromptSpan(int(starts[index]), count, start, index) for index, (start, count) in enumerate(spans)
        ),
    )  # fmt: skip


@dataclass
class Truth:
    """out [rows, .], states as in Case; the magnitudes of ops.contracts for each."""

    out: F64
    states: F64
    out_magnitude: F64
    state_magnitude: F64


def sigmoid(x: F64) -> F64:
    return np.exp(-np.logaddexp(0, -x))


def truth(case: Case) -> Truth:
    shape = case.shape
    keys = shape.key_heads * shape.key_dim
    heads = np.arange(shape.value_heads)
    key_head = heads % shape.key_heads if shape.tiled else heads // (shape.value_heads // shape.key_heads)
    conv = case.conv.astype(np.float64)
    states = case.states.astype(np.float64)
    bounds = np.abs(states)
    inner = shape.value_heads * shape.value_dim
    out, out_magnitude = np.zeros((2, case.rows, shape.value_heads, shape.value_dim))
    seen: set[int] = set()
    for row in range(case.rows):
        index = int(case.row_sequence[row])
        if index not in seen and case.positions[row] == 0:
            states[index] = bounds[index] = 0
        seen.add(index)
        end = shape.state_values + shape.channels * (shape.conv_width - 1)
        history = states[index][shape.state_values : end].reshape(shape.channels, -1)
        s = states[index][: shape.state_values].reshape(shape.value_heads, shape.key_dim, shape.value_dim)
        e = bounds[index][: shape.state_values].reshape(s.shape)
        window = np.concatenate([history, case.qkv[row].astype(np.float64)[:, None]], axis=1)
        history[:] = window[:, 1:]
        total = (window * conv).sum(axis=1)
        x, largest = total * sigmoid(total), np.abs(window * conv).sum(axis=1)

        def split(values: F64) -> list[F64]:
            q, k, v = np.split(values, [keys, 2 * keys])
            by_head = q.reshape(shape.key_heads, -1)[key_head], k.reshape(shape.key_heads, -1)[key_head]
            return [*by_head, v.reshape(shape.value_heads, -1)]

        (q, k, v), (q_bound, k_bound, v_bound) = split(x), split(largest)
        q_norm = np.sqrt((q**2).sum(axis=1, keepdims=True) + 1e-6) * shape.key_dim**0.5
        k_norm = np.sqrt((k**2).sum(axis=1, keepdims=True) + 1e-6)
        q, k, q_bound, k_bound = q / q_norm, k / k_norm, q_bound / q_norm, k_bound / k_norm
        beta = sigmoid(case.b[row].astype(np.float64))[:, None]
        step = np.logaddexp(0, case.a[row].astype(np.float64) + case.dt_bias)
        kept = np.exp(case.decay * step)[:, None, None]

        s *= kept
        m = beta * (v_bound + np.einsum("hkv,hk->hv", np.abs(s), k_bound))
        s += np.einsum("hk,hv->hkv", k, beta * (v - np.einsum("hkv,hk->hv", s, k)))
        e *= kept
        e += np.einsum("hk,hv->hkv", k_bound, m)
        o, p = np.einsum("hkv,hk->hv", s, q), np.einsum("hkv,hk->hv", e, q_bound)
        rms = np.sqrt((o**2).mean(axis=1, keepdims=True) + shape.norm_eps)
        z = case.z[row].astype(np.float64).reshape(o.shape)
        factor = case.norm * z * sigmoid(z)
        out[row] = o / rms * factor
        out_magnitude[row] = (p + np.abs(o) * p.max(axis=1, keepdims=True) / rms) / rms * np.abs(factor)
    for magnitude in bounds:
        magnitude[shape.state_values :] = 0
    return Truth(out.reshape(case.rows, inner), states, out_magnitude.reshape(case.rows, inner), bounds)
