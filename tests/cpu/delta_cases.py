"""Passes over random recurrent states, and the gated delta rule in numpy fp64 on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpu.attention_cases import Piece
from edge_transformer.ops.backend import Backend, DeltaShape
from edge_transformer.ops.batch import Batch, PromptSpan
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import tensor_of

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

EPS = CONTRACTS["gated_delta"].eps


def delta_shape(
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    conv_width: int = 4,
    tiled: bool = False,
) -> DeltaShape:
    """The shape of layer 0."""
    return DeltaShape(0, key_heads, value_heads, key_dim, value_dim, conv_width, tiled, norm_eps=1e-6)


@dataclass
class DeltaInputs:
    """What the op takes, all f32: rows first, then the layer's vectors."""

    qkv: F32
    z: F32
    a: F32
    b: F32
    conv: F32
    decay: F32
    dt_bias: F32
    norm: F32


@dataclass
class DeltaTruth:
    """out [R, I] and, for each sequence, S [value_heads, key_dim, value_dim] and the kept values [C, conv_width - 1],
    each with the magnitude that the contract's eps is multiplied with.
    """

    out: F64
    out_magnitude: F64
    states: list[F64]
    state_magnitudes: list[F64]
    kept: list[F64]


def make_inputs(shape: DeltaShape, rows: int, rng: np.random.Generator, forgetful: float = 0.0) -> DeltaInputs:
    """Random inputs. Heads forget within about 5 to 500 tokens; `forgetful` is added to the logarithm of their
    decay.
    """
    inner = shape.value_heads * shape.value_dim

    def normal(*size: int) -> F32:
        return rng.standard_normal(size, dtype=np.float32)

    return DeltaInputs(
        qkv=normal(rows, shape.channels),
        z=normal(rows, inner),
        a=normal(rows, shape.value_heads),
        b=normal(rows, shape.value_heads),
        conv=normal(shape.channels, shape.conv_width) * np.float32(0.6),
        decay=-np.exp(normal(shape.value_heads) * np.float32(1.5) + np.float32(forgetful - 3)),
        dt_bias=normal(shape.value_heads),
        norm=np.float32(1) + np.float32(0.2) * normal(shape.value_dim),
    )


def make_blocks(shape: DeltaShape, sequences: int, rng: np.random.Generator) -> F32:
    """Blocks of state [sequences, block floats] of sequences that are under way; NaN in the padding."""
    blocks = np.full((sequences, shape.block_bytes // 4), np.nan, np.float32)
    used = shape.state_values + shape.channels * (shape.conv_width - 1)
    blocks[:, :used] = rng.standard_normal((sequences, used), dtype=np.float32)
    blocks[:, : shape.state_values] *= np.float32(shape.key_dim**-0.5)
    return blocks


def make_delta_batch(pieces: Sequence[Piece], blocks: F32) -> Batch:
    """A pass of the pieces in order, prompts first. The caller keeps the blocks alive."""
    positions = [piece.position + i for piece in pieces for i in range(piece.rows)]
    sequences = [piece.sequence for piece in pieces for _ in range(piece.rows)]
    spans: list[PromptSpan] = []
    row = 0
    for piece in pieces:
        if not piece.decode:
            spans.append(PromptSpan(row, piece.rows, piece.position, piece.sequence))
            row += piece.rows
    addresses = blocks.ctypes.data + np.arange(len(blocks), dtype=np.int64) * blocks[0].nbytes
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        row_sequence=np.array(sequences, np.int32),
        prompt_rows=row,
        prompt_spans=tuple(spans),
        rope_cos=(),
        rope_sin=(),
        tile_tables=(np.empty((len(blocks), 0), np.int64),),
        logit_rows=np.zeros(0, np.int32),
        state_tables=(addresses,),
    )


def run_delta(backend: Backend, shape: DeltaShape, inputs: DeltaInputs, batch: Batch) -> F32:
    """The op on copies of the inputs; blocks of state are updated where they lie."""
    out = np.full((batch.rows, shape.value_heads * shape.value_dim), np.nan, np.float32)
    qkv, z = inputs.qkv.copy(), inputs.z.copy()
    others = (inputs.a, inputs.b, inputs.conv, inputs.decay, inputs.dt_bias, inputs.norm)
    backend.gated_delta(tensor_of(qkv), tensor_of(z), *map(tensor_of, others), shape, tensor_of(out), batch)
    return out


def delta_in_fp64(shape: DeltaShape, inputs: DeltaInputs, batch: Batch, blocks: F32) -> DeltaTruth:
    """Row after row from `blocks` as they were before the pass."""
    rows, inner = batch.rows, shape.value_heads * shape.value_dim
    wide = {name: values.astype(np.float64) for name, values in vars(inputs).items()}
    heads = np.arange(shape.value_heads)
    key_head = heads % shape.key_heads if shape.tiled else heads // (shape.value_heads // shape.key_heads)
    states, errors, kept = [], [], []
    for block in blocks.astype(np.float64):
        end = shape.state_values + shape.channels * (shape.conv_width - 1)
        states.append(block[: shape.state_values].reshape(shape.value_heads, shape.key_dim, shape.value_dim))
        errors.append(np.abs(states[-1]))
        kept.append(block[shape.state_values : end].reshape(shape.channels, shape.conv_width - 1))
    truth = DeltaTruth(np.empty((rows, inner)), np.empty((rows, inner)), states, errors, kept)
    for row in range(rows):
        sequence = int(batch.row_sequence[row])
        if batch.positions[row] == 0:
            for parts in (states, errors, kept):
                parts[sequence] = np.zeros_like(parts[sequence])
        window = np.concatenate([kept[sequence], wide["qkv"][row][:, None]], axis=1)
        kept[sequence] = window[:, 1:]
        convolved, terms = (window * wide["conv"]).sum(axis=1), np.abs(window * wide["conv"]).sum(axis=1)
        q, k, v = _split(convolved / (1 + np.exp(-convolved)), shape)
        q_terms, k_terms, v_terms = _split(terms, shape)
        q_length = np.sqrt((q * q).sum(axis=1, keepdims=True) + 1e-6) * shape.key_dim**0.5
        k_length = np.sqrt((k * k).sum(axis=1, keepdims=True) + 1e-6)
        q, q_terms = (q / q_length)[key_head], (q_terms / q_length)[key_head]
        k, k_terms = (k / k_length)[key_head], (k_terms / k_length)[key_head]
        beta = 1 / (1 + np.exp(-wide["b"][row]))
        faded = np.exp(wide["decay"] * np.logaddexp(0, wide["a"][row] + wide["dt_bias"]))[:, None, None]
        state = states[sequence] * faded
        size = beta[:, None] * (v_terms + np.einsum("hkv,hk->hv", np.abs(state), k_terms))
        correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        states[sequence] = state + k[:, :, None] * correction[:, None, :]
        errors[sequence] = errors[sequence] * faded + k_terms[:, :, None] * size[:, None, :]
        o = np.einsum("hkv,hk->hv", states[sequence], q)
        p = np.einsum("hkv,hk->hv", errors[sequence], q_terms)
        z = wide["z"][row].reshape(o.shape)
        gate = wide["norm"] * z / (1 + np.exp(-z))
        rms = np.sqrt((o * o).mean(axis=1, keepdims=True) + shape.norm_eps)
        truth.out[row] = (o / rms * gate).reshape(-1)
        spread = p + np.abs(o) * p.max(axis=1, keepdims=True) / rms
        truth.out_magnitude[row] = (spread / rms * np.abs(gate)).reshape(-1)
    return truth


def assert_delta_right(got: F32, after: F32, shape: DeltaShape, truth: DeltaTruth) -> None:
    """`got` and the blocks `after` the pass lie within the contract; padding is untouched."""
    assert np.isfinite(got).all()
    _assert_close(got, truth.out, truth.out_magnitude, "output")
    for block, state, size, kept in zip(after, truth.states, truth.state_magnitudes, truth.kept, strict=True):
        end = shape.state_values + kept.size
        _assert_close(block[: shape.state_values], state.reshape(-1), size.reshape(-1), "state")
        np.testing.assert_array_equal(block[shape.state_values : end], kept.reshape(-1).astype(np.float32))
        assert np.isnan(block[end:]).all()


def _assert_close(got: F32, exact: F64, magnitude: F64, what: str) -> None:
    error = np.abs(got - exact)  # 0 where the magnitude is 0
    worst = float((error / np.maximum(magnitude, 1e-30)).max())
    assert (error <= EPS * magnitude).all(), f"{what}: error {worst:.2e} of the magnitude"


def _split(channels: F64, shape: DeltaShape) -> tuple[Any, Any, Any]:
    keys = shape.key_heads * shape.key_dim
    q, k, v = np.split(channels, [keys, 2 * keys])
    return q.reshape(-1, shape.key_dim), k.reshape(-1, shape.key_dim), v.reshape(-1, shape.value_dim)
