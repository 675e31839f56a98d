"""The gated delta rule, one position after another: convolution, decay, correction, and the gated norm of the output.

State and arithmetic are those of ops.backend.Backend.gated_delta. The chunked form that other executors take for prompt
rows is the same function; here every row is a step, so that there is nothing to get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.reference.activation import sigmoid, silu, softplus
from edge_transformer.ops.reference.norm import rmsnorm
from edge_transformer.ops.tensor import array_at

Floats = npt.NDArray[np.float32]

L2_EPS = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """conv [C, conv_width], decay and dt_bias [value_heads], norm [value_dim]."""

    conv: Floats
    decay: Floats
    dt_bias: Floats
    norm: Floats


def gated_delta(
    qkv: Floats, z: Floats, a: Floats, b: Floats, parameters: DeltaParameters, shape: DeltaShape, batch: Batch
) -> Floats:
    """The op for all rows [R, ...]; updates the blocks of state, and makes the copies of them that the batch asks for.
    The result is [R, value_heads * value_dim].
    """
    copies = {(copy.sequence, copy.position): int(copy.addresses[shape.layer]) for copy in batch.state_checkpoints}
    out = np.empty((batch.rows, shape.value_heads, shape.value_dim), np.float32)
    gates = z.reshape(out.shape)
    beta = sigmoid(b)
    log_decay = parameters.decay * softplus(a + parameters.dt_bias)
    for row in range(batch.rows):
        block = int(batch.state_tables[shape.layer][batch.row_sequence[row]])
        state, window = block_views(block, shape)
        if batch.positions[row] == 0:
            state[:] = 0
            window[:] = 0
        channels = np.concatenate([window, qkv[row][:, None]], axis=1)
        window[:] = channels[:, 1:]
        q, k, v = split_channels(silu((channels * parameters.conv).sum(axis=1, dtype=np.float32)), shape)
        q = unit(q) * np.float32(shape.key_dim**-0.5)
        k = unit(k)
        out[row] = step(state, *spread(q, k, shape), v, log_decay[row], beta[row])
        copy = copies.get((int(batch.row_sequence[row]), int(batch.positions[row]) + 1))
        if copy is not None:
            size = (shape.block_bytes,)
            array_at(copy, size, np.uint8)[:] = array_at(block, size, np.uint8)
    normalized: Floats = rmsnorm(out, parameters.norm, shape.norm_eps) * silu(gates)
    return normalized.reshape(batch.rows, -1)


def step(state: Floats, q: Floats, k: Floats, v: Floats, log_decay: Floats, beta: Floats) -> Floats:
    """One position of all value heads: q, k [heads, key_dim], v [heads, value_dim]; updates state, returns S^T q."""
    state *= np.exp(log_decay)[:, None, None]
    correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state += k[:, :, None] * correction[:, None, :]
    read: Floats = np.einsum("hkv,hk->hv", state, q)
    return read


def block_views(address: int, shape: DeltaShape) -> tuple[Floats, Floats]:
    """S [value_heads, key_dim, value_dim] and the last values before the convolution [C, conv_width - 1] of a block."""
    kept = shape.channels * (shape.conv_width - 1)
    values = cast("Floats", array_at(address, (shape.state_values + kept,), np.float32))
    state = values[: shape.state_values].reshape(shape.value_heads, shape.key_dim, shape.value_dim)
    return state, values[shape.state_values :].reshape(shape.channels, shape.conv_width - 1)


def split_channels(channels: Floats, shape: DeltaShape) -> tuple[Floats, Floats, Floats]:
    """q, k [key_heads, key_dim] and v [value_heads, value_dim] of one position's channels."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = np.split(channels, [keys, 2 * keys])
    return (
        q.reshape(shape.key_heads, shape.key_dim),
        k.reshape(shape.key_heads, shape.key_dim),
        v.reshape(shape.value_heads, shape.value_dim),
    )


def unit(x: Floats) -> Floats:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    squares: Floats = np.sum(x * x, axis=-1, keepdims=True, dtype=np.float32)
    length: Floats = np.sqrt(squares + L2_EPS)
    return x / length


def spread(q: Floats, k: Floats, shape: DeltaShape) -> tuple[Floats, Floats]:
    """q and k [key_heads, key_dim] of the key head that each value head uses."""
    heads = key_head_of_value_head(shape)
    return q[heads], k[heads]


def key_head_of_value_head(shape: DeltaShape) -> npt.NDArray[np.int64]:
    """int64 [value_heads]."""
    heads = np.arange(shape.value_heads)
    return heads % shape.key_heads if shape.tiled else heads // (shape.value_heads // shape.key_heads)
