"""What the families share when they are read from GGUF metadata (keys as llama.cpp's converter writes them)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field

import numpy as np

from edge_transformer.errors import UnsupportedModelError
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.models.config import ATTENTION, ModelConfig, Rope
from edge_transformer.models.gate import MAX_LAYERS, FieldReader
from edge_transformer.models.names import GGUF_NAMES, ROPE_FREQS
from edge_transformer.models.rope import yarn_attention_factor
from edge_transformer.ops.tensor import array_at

DEFAULT_ROPE_THETA = 10000.0  # llama.cpp's, when the file has no rope.freq_base

# Namespaces that describe the file, its origin or its tokenizer (which the text package reads), not the forward pass.
_DESCRIPTIVE_PREFIXES = ("general.", "tokenizer.", "split.", "quantize.", "mradermacher.")


@dataclass(frozen=True, slots=True)
class GgufFields:
    """A GGUF file as a family reads it: the keys of its architecture (without the architecture's name), and the rest.

    `general` holds the keys outside the architecture; what they may be is checked before the family reads. `left_out`:
    patterns of tensors of other parts of the model, which the family names as it reads.
    """

    model: FieldReader
    general: FieldReader
    tensors: Mapping[str, TensorInfo]
    left_out: list[str] = field(default_factory=list)

    def has(self, role: str) -> bool:
        """Whether the first layer (or the model) has the tensor of this role; the others are checked against it."""
        return GGUF_NAMES.name(role, 0, post_norms=False) in self.tensors


def gguf_fields(checkpoint: Checkpoint, architecture: str) -> GgufFields:
    """Split the metadata; refuses keys that belong to neither the architecture nor a descriptive namespace."""
    own = f"{architecture}."
    where = str(checkpoint.path)
    model = {key.removeprefix(own): value for key, value in checkpoint.metadata.items() if key.startswith(own)}
    rest = {key: value for key, value in checkpoint.metadata.items() if not key.startswith(own)}
    general = FieldReader(rest, where)
    general.ignore_prefixes(*_DESCRIPTIVE_PREFIXES)
    general.only("general.type", "model")
    return GgufFields(FieldReader(model, where, own), general, checkpoint.tensors)


def read_base(fields: GgufFields, family: str, activation: str = "silu", *, partial_rope: bool = False) -> ModelConfig:
    """What every family has, as a ModelConfig of full attention with one rope; the caller replaces what differs.

    `partial_rope`: the family may rotate part of a head only.
    """
    model = fields.model
    model.only("expert_count", 0, reason="mixture-of-experts models are not supported")
    model.only("expert_used_count", 0, reason="mixture-of-experts models are not supported")
    model.only("attention.causal", True)
    model.only("pooling_type", 0, reason="embedding and ranking models are not supported")
    hidden_size = model.integer("embedding_length")
    num_layers = model.integer("block_count", maximum=MAX_LAYERS)
    num_heads = model.uniform_integer("attention.head_count")
    kv_heads = model.uniform_integer("attention.head_count_kv", num_heads)
    if num_heads % kv_heads:
        model.refuse("attention.head_count_kv", f"it must divide attention.head_count = {num_heads}")
    head_dim = model.optional_integer("attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            model.refuse("embedding_length", f"it must be a multiple of attention.head_count = {num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        model.refuse("attention.key_length", f"heads of {head_dim} dimensions cannot be rotated in pairs")
    model.only("attention.value_length", head_dim, reason=f"it must equal the key length, {head_dim}")
    context_length = model.integer("context_length")
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(fields),
        hidden_size=hidden_size,
        intermediate_size=model.uniform_integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=model.number("attention.layer_norm_rms_epsilon"),
        activation=activation,
        attention_scale=head_dim**-0.5,
        context_length=context_length,
        ropes=(_read_rope(fields, _rotary_dim(model, head_dim, partial_rope)),),
        layer_windows=(None,) * num_layers,
        layer_ropes=(0,) * num_layers,
        layer_kinds=(ATTENTION,) * num_layers,
        qkv_bias=fields.has("q_bias"),
        o_bias=fields.has("o_bias"),
        mlp_bias=fields.has("gate_bias"),
        tied_embeddings=not fields.has("head"),
    )


def read_sliding_layers(fields: GgufFields, num_layers: int, period: int) -> list[bool]:
    """Which layers have a window: all but the last of each `period` (the family's, unless the file says otherwise)."""
    model = fields.model
    pattern = model.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray | list | tuple):
        return model.flags("attention.sliding_window_pattern", num_layers)
    period = model.integer("attention.sliding_window_pattern", period)
    return [layer % period < period - 1 for layer in range(num_layers)]


def _vocab_size(fields: GgufFields) -> int:
    """Rows of the embedding; the file's count, where it has one, must agree."""
    embedding = fields.tensors.get(GGUF_NAMES.names["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        fields.model.refuse("vocab_size", f"the file has no matrix {GGUF_NAMES.names['embedding']!r}")
    rows = embedding.shape[0]
    fields.model.only("vocab_size", rows, reason=f"the embedding has {rows} rows")
    tokens = fields.general.raw("tokenizer.ggml.tokens")
    if isinstance(tokens, Sized) and len(tokens) > rows:
        raise UnsupportedModelError(
            f"{embedding.file.path}: field 'tokenizer.ggml.tokens' has {len(tokens)} tokens, but "
            f"{embedding.name!r} only {rows} rows: the tokenizer is that of another model"
        )
    return rows


def _rotary_dim(model: FieldReader, head_dim: int, partial: bool) -> int:
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not partial:
        model.refuse("rope.dimension_count", f"rotating part of a head (of {head_dim}) is not supported in this family")
    if rotary_dim > head_dim or rotary_dim % 2:
        model.refuse("rope.dimension_count", f"an even number up to {head_dim}, the size of a head, is expected")
    return rotary_dim


def _read_rope(fields: GgufFields, rotary_dim: int) -> Rope:
    model = fields.model
    theta = model.rope_base("rope.freq_base") or DEFAULT_ROPE_THETA
    model.only("rope.scale_linear", 1.0, reason="this old spelling of rope scaling is not read")
    model.ignore(["rope.scaling.finetuned"])  # says how the model was trained, not how it is run
    kind = model.string("rope.scaling.type", "none")
    divisors = fields.tensors.get(ROPE_FREQS)
    if divisors is not None:
        if kind != "none":
            model.refuse("rope.scaling.type", f"it is given together with the tensor {ROPE_FREQS!r}")
        return Rope("divisors", theta, rotary_dim, divisors=_read_divisors(divisors, rotary_dim // 2))
    if kind not in ("none", "linear", "yarn"):
        model.refuse("rope.scaling.type", "only none, linear and yarn are supported")
    if kind == "yarn":
        return _read_yarn(model, theta, rotary_dim)
    if kind == "linear":
        return Rope("linear", theta, rotary_dim, factor=model.number("rope.scaling.factor"))
    model.only("rope.scaling.factor", 1.0)
    return Rope("default", theta, rotary_dim)


def _read_yarn(model: FieldReader, theta: float, rotary_dim: int) -> Rope:
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        model.only(name, 1.0)
    factor = model.number("rope.scaling.factor")
    return Rope(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_context=model.integer("rope.scaling.original_context_length"),
        beta_fast=model.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=model.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor),
    )


def _read_divisors(info: TensorInfo, count: int) -> tuple[float, ...]:
    if info.format is not WeightFormat.F32 or info.shape != (count,):
        raise UnsupportedModelError(
            f"{info.file.path}: tensor {info.name!r} is {info.format} of shape {list(info.shape)}; "
            f"F32 of shape [{count}] is expected"
        )
    values = tuple(float(value) for value in array_at(info.file.address + info.offset, info.shape, np.float32))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise UnsupportedModelError(
            f"{info.file.path}: tensor {info.name!r} has values that are not finite and above 0"
        )
    return values
