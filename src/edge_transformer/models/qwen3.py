"""Qwen3: as Qwen2, with norms on the heads of q and k in place of the biases."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields
from edge_transformer.models.qwen2 import read_upper_windows


def _read_hf(fields: FieldReader) -> ModelConfig:
    base = hf_config.read_base(fields, "qwen3", context_length=32768, num_kv_heads=32, head_dim=128)
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    return replace(
        base,
        ropes=(hf_config.read_rope(fields, base.head_dim, base.context_length),),
        layer_ropes=(0,) * base.num_layers,
        layer_windows=read_upper_windows(fields, base.num_layers),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    return replace(gguf_config.read_base(fields, "qwen3"), qk_norm=True)


HF = HfFamily("qwen3", "Qwen3ForCausalLM", _read_hf)
GGUF = GgufFamily("qwen3", permuted_rope=False, read=_read_gguf)
