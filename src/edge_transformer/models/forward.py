"""A transformer layer, written once against the Backend protocol, cut where its segments of weights are acquired.

One pass: `embed`; for each layer `run_segment` for "mixer", "gate_up", "down" in order; then Backend.lm_head for the
rows whose logits are asked. Between two segments everything lives in `Activations`, so that the weights of one segment
can be released before those of the next are acquired. Shapes as in ops.backend: R rows, H hidden, F feed-forward,
Q = heads * head_dim, K = kv_heads * head_dim.

A norm is computed where its input becomes complete: the mixer ends with the norm before the MLP, and "down" ends with
the norm that follows the layer (the next layer's first norm, or the final norm after the last layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_transformer.formats.weight import Weight, round_up
from edge_transformer.models.config import ModelConfig
from edge_transformer.ops.backend import AttentionShape, Backend
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import ITEM_BYTES, DType, Tensor

ACTIVATION_ALIGNMENT = 256

Weights = Mapping[str, Weight]
"""The matrices of one acquired segment, by role (q, k, v, o; gate, up; down)."""

Vectors = Mapping[str, Tensor]
"""The small f32 vectors of a layer, by role, ready for use (1 folded into norms); roles as in config.LayerSpec."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Workspace of a pass, all f32; the first `batch.rows` rows are live.

    residual [R, H] the residual stream; normed [R, H] input of the next segment, and after the last layer the hidden
    state after the final norm; q, attention_out [R, Q]; k, v [R, K]; mlp [R, F]; delta [R, H], only where the
    model has post-norms. mlp shares memory with q, k, v, attention_out: they are never live together.
    """

    residual: Tensor
    normed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attention_out: Tensor
    mlp: Tensor
    delta: Tensor | None


@dataclass(frozen=True, slots=True)
class ResidentLayer:
    """What a layer keeps for the whole run: its attention's static facts, its vectors, and the norm that follows it."""

    shape: AttentionShape
    vectors: Vectors
    next_norm: Tensor


def attention_shapes(config: ModelConfig, kv_dtype: DType) -> tuple[AttentionShape, ...]:
    """The AttentionShape of every layer, in order. `kv_dtype` is F32 or BF16."""
    return tuple(
        AttentionShape(
            layer=layer,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=0 if rope is None else config.ropes[rope].rotary_dim,
            rope=rope,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            window=window,
            kv_dtype=kv_dtype,
        )
        for layer, (rope, window) in enumerate(zip(config.layer_ropes, config.layer_windows, strict=True))
    )


def activation_offsets(config: ModelConfig, rows: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Byte offset and columns of each activation for passes of up to `rows` rows, and the bytes of them all."""
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    offsets: dict[str, tuple[int, int]] = {}

    def place(names_cols: tuple[tuple[str, int], ...], offset: int) -> int:
        for name, cols in names_cols:
            offsets[name] = (offset, cols)
            offset += round_up(rows * cols * ITEM_BYTES[DType.F32], ACTIVATION_ALIGNMENT)
        return offset

    hidden = ("residual", "normed", "delta") if config.post_norms else ("residual", "normed")
    shared = place(tuple((name, config.hidden_size) for name in hidden), 0)
    mixer_end = place((("q", query), ("k", key), ("v", key), ("attention_out", query)), shared)
    mlp_end = place((("mlp", config.intermediate_size),), shared)
    return offsets, max(mixer_end, mlp_end)


def activation_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of workspace for passes of up to `rows` rows."""
    return activation_offsets(config, rows)[1]


def make_activations(config: ModelConfig, rows: int, address: int, owner: object) -> Activations:
    """Activations for up to `rows` rows in `activation_bytes(config, rows)` bytes at `address` (256-aligned)."""
    offsets, _ = activation_offsets(config, rows)
    tensors = {
        name: Tensor(address + offset, (rows, cols), DType.F32, owner) for name, (offset, cols) in offsets.items()
    }
    delta = tensors.pop("delta", None)
    return Activations(**tensors, delta=delta)


def embed(
    backend: Backend, config: ModelConfig, table: Weight, first_norm: Tensor, activations: Activations, batch: Batch
) -> None:
    """Residual stream from token ids, and the first layer's norm of it."""
    backend.gather_rows(table, batch, config.embedding_scale, activations.residual)
    backend.add_norm(activations.residual, None, None, first_norm, config.norm_eps, activations.normed, batch)


def mixer(
    backend: Backend,
    config: ModelConfig,
    layer: ResidentLayer,
    weights: Weights,
    activations: Activations,
    batch: Batch,
) -> None:
    """Attention: normed -> q, k, v -> KV tiles -> o -> residual, then the norm before the MLP."""
    vectors, shape, a = layer.vectors, layer.shape, activations
    biases = [vectors.get("q_bias"), vectors.get("k_bias"), vectors.get("v_bias")]
    backend.linear_group([weights["q"], weights["k"], weights["v"]], biases, a.normed, [a.q, a.k, a.v], batch)
    backend.qk_norm_rope_append(
        a.q, a.k, a.v, vectors.get("q_norm"), vectors.get("k_norm"), config.norm_eps, shape, batch
    )
    backend.attention(a.q, shape, a.attention_out, batch)
    _project_add_norm(
        backend, config, weights["o"], vectors.get("o_bias"), a.attention_out, vectors.get("post_attn_norm"),
        vectors["mlp_norm"], a, batch,
    )  # fmt: skip


def gate_up(
    backend: Backend,
    config: ModelConfig,
    layer: ResidentLayer,
    weights: Weights,
    activations: Activations,
    batch: Batch,
) -> None:
    """First half of the MLP: normed -> activation(gate) * up."""
    vectors = layer.vectors
    backend.gated_mlp(
        weights["gate"], weights["up"], vectors.get("gate_bias"), vectors.get("up_bias"), config.activation,
        activations.normed, activations.mlp, batch,
    )  # fmt: skip


def down(
    backend: Backend,
    config: ModelConfig,
    layer: ResidentLayer,
    weights: Weights,
    activations: Activations,
    batch: Batch,
) -> None:
    """Second half of the MLP: down projection -> residual, then the norm that follows the layer."""
    vectors = layer.vectors
    _project_add_norm(
        backend, config, weights["down"], vectors.get("down_bias"), activations.mlp, vectors.get("post_mlp_norm"),
        layer.next_norm, activations, batch,
    )  # fmt: skip


def _project_add_norm(
    backend: Backend,
    config: ModelConfig,
    weight: Weight,
    bias: Tensor | None,
    x: Tensor,
    post_norm: Tensor | None,
    next_norm: Tensor,
    a: Activations,
    batch: Batch,
) -> None:
    """residual += post_norm(x @ weight.T + bias), then normed = rmsnorm(residual) * next_norm."""
    if a.delta is None:
        backend.linear_add(weight, bias, x, a.residual, batch)
        backend.add_norm(a.residual, None, None, next_norm, config.norm_eps, a.normed, batch)
    else:
        backend.linear_group([weight], [bias], x, [a.delta], batch)
        backend.add_norm(a.residual, a.delta, post_norm, next_norm, config.norm_eps, a.normed, batch)


SegmentFunction = Callable[[Backend, ModelConfig, ResidentLayer, Weights, Activations, Batch], None]

SEGMENTS: dict[str, SegmentFunction] = {"mixer": mixer, "gate_up": gate_up, "down": down}
"""What each segment named in config.LayerSpec computes."""


def run_segment(
    name: str,
    backend: Backend,
    config: ModelConfig,
    layer: ResidentLayer,
    weights: Weights,
    activations: Activations,
    batch: Batch,
) -> None:
    """Compute one segment of a layer, with exactly that segment's matrices in `weights`."""
    SEGMENTS[name](backend, config, layer, weights, activations, batch)
