"""Mistral: a Llama without biases whose layers all have the same window, or none. In GGUF files it is a llama."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import hf_config
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import HfFamily
from edge_transformer.models.gate import FieldReader


def _read_hf(fields: FieldReader) -> ModelConfig:
    base = hf_config.read_base(fields, "mistral", context_length=131072, num_kv_heads=8)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    window = fields.optional_integer("sliding_window", 4096)
    return replace(
        base,
        ropes=(hf_config.read_rope(fields, base.head_dim, base.context_length),),
        layer_ropes=(0,) * base.num_layers,
        layer_windows=(window,) * base.num_layers,
    )


HF = HfFamily("mistral", "MistralForCausalLM", _read_hf)
