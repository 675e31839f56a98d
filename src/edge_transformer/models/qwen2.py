"""Qwen2 and 2.5: a Llama with biases on q, k and v, and an optional window on the layers from max_window_layers on."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields


def _read_hf(fields: FieldReader) -> ModelConfig:
    base = hf_config.read_base(fields, "qwen2", context_length=32768, num_kv_heads=32)
    fields.only("attention_bias", True, reason="q, k and v always have a bias in this family and o never has")
    fields.only("mlp_bias", False)
    return replace(
        base,
        ropes=(hf_config.read_rope(fields, base.head_dim, base.context_length),),
        layer_ropes=(0,) * base.num_layers,
        layer_windows=read_upper_windows(fields, base.num_layers),
        qkv_bias=True,
    )


def read_upper_windows(fields: FieldReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: none unless use_sliding_window; then of the layers that layer_types names, or of
    those from max_window_layers on."""
    window = fields.optional_integer("sliding_window", 4096)
    if not fields.boolean("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28, minimum=0)
    by_count = [
        hf_config.SLIDING if window is not None and layer >= first else hf_config.FULL for layer in range(num_layers)
    ]
    types = hf_config.read_layer_types(fields, num_layers, by_count)
    if window is None and hf_config.SLIDING in types:
        fields.refuse(
            "layer_types", "it names sliding layers, but use_sliding_window and sliding_window give no window"
        )
    return tuple(window if kind == hf_config.SLIDING else None for kind in types)


def _read_gguf(fields: GgufFields) -> ModelConfig:
    return replace(gguf_config.read_base(fields, "qwen2"), qkv_bias=True)


HF = HfFamily("qwen2", "Qwen2ForCausalLM", _read_hf)
GGUF = GgufFamily("qwen2", permuted_rope=False, read=_read_gguf)
