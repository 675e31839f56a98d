"""Gemma 2: norms before and after each half of a layer, caps on scores and logits, a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields

_LAYERS_OF_27B = 46


def read_hf_common(fields: FieldReader, family: str, *, context_length: int, period: int) -> ModelConfig:
    """What Gemma 2 and Gemma 3 share in config.json; the last of every `period` layers has no window."""
    base = hf_config.read_base(
        fields, family, context_length=context_length, num_kv_heads=4, head_dim=256, tied=True,
        activation_field="hidden_activation", activation="gelu_pytorch_tanh",
    )  # fmt: skip
    # Older files name the activation twice; transformers reads only hidden_activation.
    fields.only("hidden_act", "gelu_pytorch_tanh" if base.activation == "gelu_tanh" else "silu")
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    window = fields.optional_integer("sliding_window", 4096)
    fields.only("sliding_window_size", window, reason=f"it disagrees with sliding_window = {window}")
    by_period = [hf_config.SLIDING if (layer + 1) % period else hf_config.FULL for layer in range(base.num_layers)]
    types = hf_config.read_layer_types(fields, base.num_layers, by_period)
    if window is None and hf_config.SLIDING in types:
        fields.refuse("sliding_window", "the model has sliding layers, so it must be a number")
    return replace(
        base,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        layer_windows=tuple(window if kind == hf_config.SLIDING else None for kind in types),
        embedding_scale=base.hidden_size**0.5,
        qkv_bias=bias,
        o_bias=bias,
        post_norms=True,
        norm_plus_one=True,
    )


def read_gguf_common(fields: GgufFields, family: str, *, layers_of_27b: int) -> ModelConfig:
    """What Gemma 2 and Gemma 3 share in GGUF files. The norms' 1 is folded in there.

    The query scale is not in the file: llama.cpp takes 1 / sqrt(head_dim), but in the 27B models, known by their number
    of layers, 1 / sqrt(hidden_size / heads).
    """
    base = gguf_config.read_base(fields, family, "gelu_tanh")
    if base.num_layers == layers_of_27b:
        scale = (base.hidden_size / base.num_heads) ** -0.5
    else:
        scale = base.head_dim**-0.5
    return replace(base, attention_scale=scale, embedding_scale=base.hidden_size**0.5, post_norms=True)


def _read_hf(fields: FieldReader) -> ModelConfig:
    base = read_hf_common(fields, "gemma2", context_length=8192, period=2)
    return replace(
        base,
        ropes=(hf_config.read_rope(fields, base.head_dim, base.context_length),),
        layer_ropes=(0,) * base.num_layers,
        attention_softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        final_softcap=fields.optional_number("final_logit_softcapping", 30.0),
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    base = read_gguf_common(fields, "gemma2", layers_of_27b=_LAYERS_OF_27B)
    model = fields.model
    window = model.integer("attention.sliding_window", 4096)
    sliding = gguf_config.read_sliding_layers(fields, base.num_layers, 2)
    return replace(
        base,
        layer_windows=tuple(window if flag else None for flag in sliding),
        attention_softcap=model.number("attn_logit_softcapping", 50.0),
        final_softcap=model.number("final_logit_softcapping", 30.0),
    )


HF = HfFamily("gemma2", "Gemma2ForCausalLM", _read_hf)
GGUF = GgufFamily("gemma2", permuted_rope=False, read=_read_gguf)
