"""A transformer layer, written once against the Backend protocol, cut where its segments of weights are acquired.

One pass: `embed`; for each layer `run_segment` for its mixer ("mixer" or "delta_mixer"), "gate_up", "down" in order;
then Backend.lm_head for the rows whose logits are asked. Between two segments everything lives in `Activations`, so
that the weights of one segment can be released before those of the next are acquired. Shapes as in ops.backend: R rows,
H hidden, F feed-forward, Q = heads * head_dim, K = kv_heads * head_dim; C and I of gated-delta layers.

A norm is computed where its input becomes complete: the mixer ends with the norm before the MLP, and "down" ends with
the norm that follows the layer (the next layer's first norm, or the final norm after the last layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_transformer.formats.weight import Weight, round_up
from edge_transformer.models.config import GATED_DELTA, ModelConfig
from edge_transformer.ops.backend import AttentionShape, Backend, DeltaShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import ITEM_BYTES, DType, Tensor

ACTIVATION_ALIGNMENT = 256

Weights = Mapping[str, Weight]
"""The matrices of one acquired segment, by role (q, k, v, o; qkv, z, a, b, out; gate, up; down)."""

Vectors = Mapping[str, Tensor]
"""The small f32 vectors of a layer, by role, ready for use (1 folded into norms); roles as in config.LayerSpec."""


@dataclass(frozen=True, slots=True)
class AttentionActivations:
    """q, out [R, Q]; k, v [R, K]. With an output gate also joined [R, 2 Q], which shares its first half with out, and
    gate [R, Q].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    joined: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True, slots=True)
class DeltaActivations:
    """qkv [R, C]; z, out [R, I]; a, b [R, value heads]."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """Workspace of a pass, all f32; the first `batch.rows` rows are live.

    residual [R, H] the residual stream; normed [R, H] input of the next segment, and after the last layer the hidden
    state after the final norm; mlp [R, F]; post [R, H], only where the model has post-norms: what is normed before
    it is added. attention, delta and mlp share memory: they are never live together.
    """

    residual: Tensor
    normed: Tensor
    attention: AttentionActivations
    delta: DeltaActivations | None
    mlp: Tensor
    post: Tensor | None


@dataclass(frozen=True, slots=True)
class ResidentLayer:
    """What a layer keeps for the whole run: the static facts of its mixer, its vectors, and the norm that follows
    it.
    """

    shape: AttentionShape | DeltaShape
    vectors: Vectors
    next_norm: Tensor


def layer_shapes(config: ModelConfig, kv_dtype: DType) -> tuple[AttentionShape | DeltaShape, ...]:
    """The static facts of every layer's mixer, in order. `kv_dtype` is F32 or BF16."""
    return tuple(
        _delta_shape(config, layer) if kind == GATED_DELTA else _attention_shape(config, layer, kv_dtype)
        for layer, kind in enumerate(config.layer_kinds)
    )


def attention_shapes(config: ModelConfig, kv_dtype: DType) -> tuple[AttentionShape, ...]:
    """Those of the layers with attention. `kv_dtype` is F32 or BF16."""
    return tuple(shape for shape in layer_shapes(config, kv_dtype) if isinstance(shape, AttentionShape))


def delta_shapes(config: ModelConfig) -> tuple[DeltaShape, ...]:
    """Those of the gated-delta layers."""
    return tuple(shape for shape in layer_shapes(config, DType.F32) if isinstance(shape, DeltaShape))


def _attention_shape(config: ModelConfig, layer: int, kv_dtype: DType) -> AttentionShape:
    rope = config.layer_ropes[layer]
    return AttentionShape(
        layer=layer,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0 if rope is None else config.ropes[rope].rotary_dim,
        rope=rope,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        window=config.layer_windows[layer],
        kv_dtype=kv_dtype,
    )


def _delta_shape(config: ModelConfig, layer: int) -> DeltaShape:
    delta = config.delta
    if delta is None:
        raise ValueError(f"layer {layer} is of kind {GATED_DELTA}, but the configuration has no sizes for it")
    return DeltaShape(
        layer=layer,
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        conv_width=delta.conv_width,
        tiled=delta.tiled_values,
        norm_eps=config.norm_eps,
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

    hidden = ("residual", "normed", "post") if config.post_norms else ("residual", "normed")
    shared = place(tuple((name, config.hidden_size) for name in hidden), 0)
    ends = [place((("mlp", config.intermediate_size),), shared)]
    attention = (("attention.q", query), ("attention.k", key), ("attention.v", key))
    if config.output_gate:
        ends.append(place((*attention, ("attention.gate", query), ("attention.joined", 2 * query)), shared))
        offsets["attention.out"] = (offsets["attention.joined"][0], query)
    else:
        ends.append(place((*attention, ("attention.out", query)), shared))
    if config.delta is not None:
        shape = _delta_shape(config, 0)
        inner, heads = shape.value_heads * shape.value_dim, shape.value_heads
        columns = {"qkv": shape.channels, "z": inner, "a": heads, "b": heads, "out": inner}
        ends.append(place(tuple((f"delta.{name}", cols) for name, cols in columns.items()), shared))
    return offsets, max(ends)


def activation_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of workspace for passes of up to `rows` rows."""
    return activation_offsets(config, rows)[1]


def make_activations(config: ModelConfig, rows: int, address: int, owner: object) -> Activations:
    """Activations for up to `rows` rows in `activation_bytes(config, rows)` bytes at `address` (256-aligned)."""
    offsets, _ = activation_offsets(config, rows)
    tensors = {
        name: Tensor(address + offset, (rows, cols), DType.F32, owner) for name, (offset, cols) in offsets.items()
    }
    return Activations(
        residual=tensors["residual"],
        normed=tensors["normed"],
        attention=AttentionActivations(
            q=tensors["attention.q"],
            k=tensors["attention.k"],
            v=tensors["attention.v"],
            out=tensors["attention.out"],
            joined=tensors.get("attention.joined"),
            gate=tensors.get("attention.gate"),
        ),
        delta=None
        if config.delta is None
        else DeltaActivations(*(tensors[f"delta.{name}"] for name in ("qkv", "z", "a", "b", "out"))),
        mlp=tensors["mlp"],
        post=tensors.get("post"),
    )


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
    vectors, shape, a = layer.vectors, layer.shape, activations.attention
    if not isinstance(shape, AttentionShape):
        raise TypeError(f"layer {shape.layer} has no attention")
    biases = [vectors.get("q_bias"), vectors.get("k_bias"), vectors.get("v_bias")]
    matrices = [weights["q"], weights["k"], weights["v"]]
    if a.joined is not None and a.gate is not None:
        backend.linear_group(matrices, biases, activations.normed, [a.joined, a.k, a.v], batch)
        backend.split_query_gate(a.joined, shape, a.q, a.gate, batch)
    else:
        backend.linear_group(matrices, biases, activations.normed, [a.q, a.k, a.v], batch)
    backend.qk_norm_rope_append(
        a.q, a.k, a.v, vectors.get("q_norm"), vectors.get("k_norm"), config.norm_eps, shape, batch
    )
    backend.attention(a.q, shape, a.out, batch)
    if a.gate is not None:
        backend.apply_gate(a.out, a.gate, batch)
    _project_add_norm(
        backend, config, weights["o"], vectors.get("o_bias"), a.out, vectors.get("post_attn_norm"),
        vectors["mlp_norm"], activations, batch,
    )  # fmt: skip


def delta_mixer(
    backend: Backend,
    config: ModelConfig,
    layer: ResidentLayer,
    weights: Weights,
    activations: Activations,
    batch: Batch,
) -> None:
    """Gated delta rule: normed -> q, k, v, z, a, b -> state -> out -> residual, then the norm before the MLP."""
    vectors, shape, d = layer.vectors, layer.shape, activations.delta
    if not isinstance(shape, DeltaShape) or d is None:
        raise TypeError(f"layer {shape.layer} has no recurrent state")
    backend.linear_group([weights["qkv"], weights["z"]], [None, None], activations.normed, [d.qkv, d.z], batch)
    backend.linear_group([weights["a"], weights["b"]], [None, None], activations.normed, [d.a, d.b], batch)
    backend.gated_delta(
        d.qkv, d.z, d.a, d.b, vectors["conv"], vectors["decay"], vectors["dt_bias"], vectors["delta_norm"],
        shape, d.out, batch,
    )  # fmt: skip
    _project_add_norm(
        backend, config, weights["out"], None, d.out, vectors.get("post_attn_norm"), vectors["mlp_norm"],
        activations, batch,
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
    if a.post is None:
        backend.linear_add(weight, bias, x, a.residual, batch)
        backend.add_norm(a.residual, None, None, next_norm, config.norm_eps, a.normed, batch)
    else:
        backend.linear_group([weight], [bias], x, [a.post], batch)
        backend.add_norm(a.residual, a.post, post_norm, next_norm, config.norm_eps, a.normed, batch)


SegmentFunction = Callable[[Backend, ModelConfig, ResidentLayer, Weights, Activations, Batch], None]

SEGMENTS: dict[str, SegmentFunction] = {"mixer": mixer, "delta_mixer": delta_mixer, "gate_up": gate_up, "down": down}
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
