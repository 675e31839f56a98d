"""Where each tensor of a model is called what: one table for Hugging Face files, one for GGUF files.

Roles are those of config.LayerSpec plus embedding, final_norm and head; `{i}` is the layer. What differs between
families is the presence of a role (a field of ModelConfig), not the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edge_transformer.models.config import (
    GATED_DELTA,
    DeltaConfig,
    LayerSpec,
    ModelConfig,
    ModelSpec,
    SegmentSpec,
    TensorSpec,
    Transform,
)


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names by role; `sandwich` replaces entries in models with norms before and after each half of a layer.

    decay_is_log: "decay" holds the logarithm A_log of gated-delta layers, not -exp(A_log). conv_middle: dimensions of
    "conv" between channels and width. fused_delta: one tensor holds qkv and z, one b and a, key head by key head.
    """

    names: dict[str, str]
    sandwich: dict[str, str]
    ignorable: tuple[re.Pattern[str], ...]
    decay_is_log: bool
    conv_middle: tuple[int, ...]
    fused_delta: bool = False

    def name(self, role: str, layer: int, post_norms: bool) -> str:
        pattern = self.sandwich.get(role) if post_norms else None
        return (pattern or self.names[role]).replace("{i}", str(layer))


_HF_LAYER = "model.layers.{i}."
HF_NAMES = NameTable(
    names={
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attn_norm": _HF_LAYER + "input_layernorm.weight",
        "mlp_norm": _HF_LAYER + "post_attention_layernorm.weight",
        "q": _HF_LAYER + "self_attn.q_proj.weight",
        "k": _HF_LAYER + "self_attn.k_proj.weight",
        "v": _HF_LAYER + "self_attn.v_proj.weight",
        "o": _HF_LAYER + "self_attn.o_proj.weight",
        "qkv": _HF_LAYER + "linear_attn.in_proj_qkv.weight",
        "z": _HF_LAYER + "linear_attn.in_proj_z.weight",
        "a": _HF_LAYER + "linear_attn.in_proj_a.weight",
        "b": _HF_LAYER + "linear_attn.in_proj_b.weight",
        "out": _HF_LAYER + "linear_attn.out_proj.weight",
        "conv": _HF_LAYER + "linear_attn.conv1d.weight",
        "decay": _HF_LAYER + "linear_attn.A_log",
        "dt_bias": _HF_LAYER + "linear_attn.dt_bias",
        "delta_norm": _HF_LAYER + "linear_attn.norm.weight",
        "q_bias": _HF_LAYER + "self_attn.q_proj.bias",
        "k_bias": _HF_LAYER + "self_attn.k_proj.bias",
        "v_bias": _HF_LAYER + "self_attn.v_proj.bias",
        "o_bias": _HF_LAYER + "self_attn.o_proj.bias",
        "q_norm": _HF_LAYER + "self_attn.q_norm.weight",
        "k_norm": _HF_LAYER + "self_attn.k_norm.weight",
        "gate": _HF_LAYER + "mlp.gate_proj.weight",
        "up": _HF_LAYER + "mlp.up_proj.weight",
        "down": _HF_LAYER + "mlp.down_proj.weight",
        "gate_bias": _HF_LAYER + "mlp.gate_proj.bias",
        "up_bias": _HF_LAYER + "mlp.up_proj.bias",
        "down_bias": _HF_LAYER + "mlp.down_proj.bias",
    },
    sandwich={
        "post_attn_norm": _HF_LAYER + "post_attention_layernorm.weight",
        "mlp_norm": _HF_LAYER + "pre_feedforward_layernorm.weight",
        "post_mlp_norm": _HF_LAYER + "post_feedforward_layernorm.weight",
    },
    # Rope frequencies that older versions of transformers saved; they follow from the configuration.
    ignorable=(re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),),
    decay_is_log=True,
    conv_middle=(1,),
)

_GGUF_LAYER = "blk.{i}."
GGUF_NAMES = NameTable(
    names={
        "embedding": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
        "attn_norm": _GGUF_LAYER + "attn_norm.weight",
        "mlp_norm": _GGUF_LAYER + "ffn_norm.weight",
        "q": _GGUF_LAYER + "attn_q.weight",
        "k": _GGUF_LAYER + "attn_k.weight",
        "v": _GGUF_LAYER + "attn_v.weight",
        "o": _GGUF_LAYER + "attn_output.weight",
        "qkv": _GGUF_LAYER + "attn_qkv.weight",
        "z": _GGUF_LAYER + "attn_gate.weight",
        "a": _GGUF_LAYER + "ssm_alpha.weight",
        "b": _GGUF_LAYER + "ssm_beta.weight",
        "out": _GGUF_LAYER + "ssm_out.weight",
        "conv": _GGUF_LAYER + "ssm_conv1d.weight",
        "decay": _GGUF_LAYER + "ssm_a",
        "dt_bias": _GGUF_LAYER + "ssm_dt.bias",
        "delta_norm": _GGUF_LAYER + "ssm_norm.weight",
        "q_bias": _GGUF_LAYER + "attn_q.bias",
        "k_bias": _GGUF_LAYER + "attn_k.bias",
        "v_bias": _GGUF_LAYER + "attn_v.bias",
        "o_bias": _GGUF_LAYER + "attn_output.bias",
        "q_norm": _GGUF_LAYER + "attn_q_norm.weight",
        "k_norm": _GGUF_LAYER + "attn_k_norm.weight",
        "gate": _GGUF_LAYER + "ffn_gate.weight",
        "up": _GGUF_LAYER + "ffn_up.weight",
        "down": _GGUF_LAYER + "ffn_down.weight",
        "gate_bias": _GGUF_LAYER + "ffn_gate.bias",
        "up_bias": _GGUF_LAYER + "ffn_up.bias",
        "down_bias": _GGUF_LAYER + "ffn_down.bias",
    },
    sandwich={
        "post_attn_norm": _GGUF_LAYER + "post_attention_norm.weight",
        "post_mlp_norm": _GGUF_LAYER + "post_ffw_norm.weight",
    },
    ignorable=(),
    decay_is_log=False,
    conv_middle=(),
)


def with_prefix(table: NameTable, old: str, new: str) -> NameTable:
    """`table` with `new` in place of `old` before the names that begin with it."""
    names = {role: new + name.removeprefix(old) if name.startswith(old) else name for role, name in table.names.items()}
    return replace(table, names=names)


ROPE_FREQS = "rope_freqs.weight"
"""GGUF tensor with the divisors of the rope frequencies; read into Rope.divisors, not a weight of its own."""


def model_spec(config: ModelConfig, table: NameTable, *, permuted_rope: bool = False) -> ModelSpec:
    """Every tensor the model needs, by the names of `table`. `permuted_rope`: q and k rows in adjacent-pair order."""
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = TensorSpec("embedding", table.names["embedding"], vocabulary)
    return ModelSpec(
        config=config,
        embedding=embedding,
        layers=tuple(_layer_spec(config, table, layer, permuted_rope) for layer in range(config.num_layers)),
        final_norm=_norm_spec(config, table, "final_norm", 0, config.hidden_size),
        head=embedding if config.tied_embeddings else TensorSpec("head", table.names["head"], vocabulary),
    )


def tensor_specs(spec: ModelSpec) -> Iterator[TensorSpec]:
    """All tensors of a model, each once, in order of use."""
    yield spec.embedding
    for layer in spec.layers:
        yield from layer.vectors
        for segment in layer.segments:
            yield from segment.matrices
    yield spec.final_norm
    if spec.head is not spec.embedding:
        yield spec.head


def _layer_spec(config: ModelConfig, table: NameTable, layer: int, permuted_rope: bool) -> LayerSpec:
    hidden, inner = config.hidden_size, config.intermediate_size
    mixer, vectors = (
        _delta_parts(config, table, layer)
        if config.layer_kinds[layer] == GATED_DELTA
        else _attention_parts(config, table, layer, permuted_rope)
    )

    def tensor(role: str, *shape: int) -> TensorSpec:
        return TensorSpec(role, table.name(role, layer, config.post_norms), shape)

    norms = [("attn_norm", hidden), ("mlp_norm", hidden)]
    if config.post_norms:
        norms += [("post_attn_norm", hidden), ("post_mlp_norm", hidden)]
    biases = [("gate_bias", inner), ("up_bias", inner), ("down_bias", hidden)] if config.mlp_bias else []
    return LayerSpec(
        segments=(
            mixer,
            SegmentSpec("gate_up", (tensor("gate", inner, hidden), tensor("up", inner, hidden))),
            SegmentSpec("down", (tensor("down", hidden, inner),)),
        ),
        vectors=(
            *(_norm_spec(config, table, role, layer, size) for role, size in norms),
            *vectors,
            *(tensor(role, size) for role, size in biases),
        ),
    )


def _attention_parts(
    config: ModelConfig, table: NameTable, layer: int, permuted_rope: bool
) -> tuple[SegmentSpec, tuple[TensorSpec, ...]]:
    """Segment and vectors of a layer's attention."""
    hidden, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rope_heads = {"q": config.num_heads, "k": config.num_kv_heads} if permuted_rope else {}

    def tensor(role: str, *shape: int) -> TensorSpec:
        name = table.name(role, layer, config.post_norms)
        heads = rope_heads.get(role.removesuffix("_bias"), 0)
        return TensorSpec(role, name, shape, Transform.UNPERMUTE_ROPE if heads else Transform.NONE, heads)

    queries = 2 * query if config.output_gate else query
    vectors: list[TensorSpec] = []
    if config.qk_norm:
        vectors += [_norm_spec(config, table, role, layer, config.head_dim) for role in ("q_norm", "k_norm")]
    if config.qkv_bias:
        vectors += [tensor("q_bias", queries), tensor("k_bias", key), tensor("v_bias", key)]
    if config.o_bias:
        vectors.append(tensor("o_bias", hidden))
    matrices = (
        tensor("q", queries, hidden),
        tensor("k", key, hidden),
        tensor("v", key, hidden),
        tensor("o", hidden, query),
    )
    return SegmentSpec("mixer", matrices), tuple(vectors)


def _delta_parts(config: ModelConfig, table: NameTable, layer: int) -> tuple[SegmentSpec, tuple[TensorSpec, ...]]:
    """Segment and vectors of a gated-delta layer."""
    delta = config.delta
    if delta is None:
        raise ValueError(f"layer {layer} is of kind {GATED_DELTA}, but the configuration has no sizes for it")
    hidden, heads, inner = config.hidden_size, delta.value_heads, delta.value_heads * delta.value_dim
    channels = 2 * delta.key_heads * delta.key_dim + inner

    fused = _fused_rows(delta) if table.fused_delta else {}

    def tensor(role: str, *shape: int, transform: Transform = Transform.NONE) -> TensorSpec:
        parts, stored_rows = fused.get(role, ((), 0))
        return TensorSpec(role, table.name(role, layer, config.post_norms), shape, transform, 0, parts, stored_rows)

    matrices = (
        tensor("qkv", channels, hidden),
        tensor("z", inner, hidden),
        tensor("a", heads, hidden),
        tensor("b", heads, hidden),
        tensor("out", hidden, inner),
    )
    decay = Transform.NEGATIVE_EXP if table.decay_is_log else Transform.NONE
    vectors = (
        tensor("conv", channels, *table.conv_middle, delta.conv_width),
        tensor("decay", heads, transform=decay),
        tensor("dt_bias", heads),
        tensor("delta_norm", delta.value_dim),
    )
    return SegmentSpec("delta_mixer", matrices), vectors


def _fused_rows(delta: DeltaConfig) -> dict[str, tuple[tuple[range, ...], int]]:
    """For qkv, z, b and a their rows of the tensor they lie in, and its number of rows: for each key head its query,
    its key, and values and gates of its value heads; in the other b and a of its value heads.
    """
    each = delta.value_heads // delta.key_heads
    values = each * delta.value_dim
    sizes = {"q": delta.key_dim, "k": delta.key_dim, "v": values, "z": values}
    group = sum(sizes.values())
    rows: dict[str, tuple[range, ...]] = {}
    offset = 0
    for part, size in sizes.items():
        rows[part] = tuple(range(g * group + offset, g * group + offset + size) for g in range(delta.key_heads))
        offset += size
    pairs = [range(start, start + each) for start in range(0, 2 * delta.value_heads, each)]
    return {
        "qkv": (rows["q"] + rows["k"] + rows["v"], group * delta.key_heads),
        "z": (rows["z"], group * delta.key_heads),
        "b": (tuple(pairs[0::2]), 2 * delta.value_heads),
        "a": (tuple(pairs[1::2]), 2 * delta.value_heads),
    }


def _norm_spec(config: ModelConfig, table: NameTable, role: str, layer: int, size: int) -> TensorSpec:
    transform = Transform.PLUS_ONE if config.norm_plus_one else Transform.NONE
    return TensorSpec(role, table.name(role, layer, config.post_norms), (size,), transform)
