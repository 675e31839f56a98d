"""Llama: pre-norm, SwiGLU, grouped queries, rope plain or scaled. Most fine-tunes and many small models are Llamas."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields
from edge_transformer.models.names import ROPE_FREQS


def _read_hf(fields: FieldReader) -> ModelConfig:
    base = hf_config.read_base(fields, "llama", context_length=2048)
    fields.only("sliding_window", None, reason="transformers does not apply a window to this family")
    bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        ropes=(hf_config.read_rope(fields, base.head_dim, base.context_length),),
        layer_ropes=(0,) * base.num_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    base = gguf_config.read_base(fields, "llama")
    window = fields.model.optional_integer("attention.sliding_window", minimum=0) or None
    return replace(base, layer_windows=(window,) * base.num_layers)


HF = HfFamily("llama", "LlamaForCausalLM", _read_hf)
GGUF = GgufFamily("llama", permuted_rope=True, read=_read_gguf, read_apart=(ROPE_FREQS,))
"""GGUF files call Mistral models llama too; one with a window says so in attention.sliding_window."""
