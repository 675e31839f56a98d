"""A model as data: every property that changes the mathematics of the text forward pass, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding. `type` is "default", "linear", "llama3", "yarn" or "divisors"; the gate refuses all others.

    theta, rotary_dim: inv_freq[i] = theta ** (-2 i / rotary_dim), i < rotary_dim / 2, then scaled by type. "divisors"
    divides inv_freq[i] by divisors[i] (rotary_dim / 2 numbers: what a GGUF file's rope_freqs tensor holds).
    """

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    divisors: tuple[float, ...] = ()


ATTENTION, GATED_DELTA = "attention", "gated_delta"
"""Kinds of layers: what mixes positions in them."""


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated-delta layers. tiled_values: value head j uses key head j % key_heads (as GGUF files store them), else
    j // (value_heads / key_heads).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    tiled_values: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know, read from config.json or from GGUF metadata by the family's file.

    Per-layer tuples have num_layers entries. layer_windows: sliding window or None; layer_ropes: index into ropes or
    None; layer_kinds: ATTENTION or GATED_DELTA (windows and ropes of the latter are None). `delta` is there when a
    layer is of that kind. output_gate: the query projection has a gate beside each head's query, whose sigmoid
    multiplies the output of attention.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str  # "silu" | "gelu_tanh"
    attention_scale: float
    context_length: int
    ropes: tuple[Rope, ...]
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[int | None, ...]
    layer_kinds: tuple[str, ...]
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    delta: DeltaConfig | None = None
    post_norms: bool = False
    norm_plus_one: bool = False  # the checkpoint stores w where the norm multiplies by 1 + w
    tied_embeddings: bool = False


class Transform(Enum):
    """How a stored tensor becomes the one the forward pass uses."""

    NONE = "none"
    PLUS_ONE = "plus_one"  # vector: 1 + w, in f32
    NEGATIVE_EXP = "negative_exp"  # vector: -exp(w), in f32
    UNPERMUTE_ROPE = "unpermute_rope"  # matrix or bias rows: GGUF's adjacent-pair order back to half-split pairs


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor the model needs: its role in the layer, its exact name in the checkpoint, its shape.

    `heads` is the head count of UNPERMUTE_ROPE (rows are heads * head_dim). `parts`: the stored tensor has
    `stored_rows` rows, of several matrices; this one consists of these, in this order.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    transform: Transform = Transform.NONE
    heads: int = 0
    parts: tuple[range, ...] = ()
    stored_rows: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """That of the tensor in the checkpoint."""
        return (self.stored_rows, *self.shape[1:]) if self.parts else self.shape


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """Matrices that are used together, in order of use: the unit in which weights are acquired and moved."""

    name: str
    matrices: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of a mixer and an MLP: its segments in order of use, and its small vectors (f32, always resident).

    There are the segments "mixer" (roles q, k, v, o; the rows of q hold each head's query and gate where the model has
    output gates) or "delta_mixer" (qkv, z, a, b, out), then "gate_up" (gate, up) and "down" (down), and vectors with
    roles attn_norm, mlp_norm, for gated-delta layers conv [C, conv_width], decay, dt_bias, delta_norm, and where the
    config says so q_norm, k_norm, post_attn_norm, post_mlp_norm, q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias,
    down_bias.
    """

    segments: tuple[SegmentSpec, ...]
    vectors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A gated, complete description of a model in one checkpoint: config and where every tensor is.

    `head` equals `embedding` when the embeddings are tied. `ignored_tensors`: names known not to matter for text
    (reported, never dropped silently).
    """

    config: ModelConfig
    embedding: TensorSpec
    layers: tuple[LayerSpec, ...]
    final_norm: TensorSpec
    head: TensorSpec
    ignored_tensors: tuple[str, ...] = ()
