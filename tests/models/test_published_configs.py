"""Configurations with the fields that widely used models are published with: none of them may be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_transformer.models.config import ModelConfig
from edge_transformer.models.forward import delta_shapes
from edge_transformer.models.read import read_model
from tiny.memory import checkpoint
from tiny.weights import tensor_shapes

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_sliding_window": False,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA | {
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "vocab_size": 128256,
    },
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "smollm2-135m": _LLAMA | {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "mistral-nemo-12b": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 131072,
    },
    "qwen2.5-7b": _QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen3-8b": _QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
        "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.45.2", "use_cache": True,
        "vocab_size": 256000,
    },
    "gemma-3-270m": {
        "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640, "initializer_range": 0.02, "intermediate_size": 2048,
        "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(18)],
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0",
        "use_bidirectional_attention": False, "use_cache": True, "vocab_size": 262144,
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_output_gate": True, "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288,
        "layer_types": [("full" if layer % 4 == 3 else "linear") + "_attention" for layer in range(32)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "pad_token_id": None, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    },
}  # fmt: skip


def read(name: str) -> ModelConfig:
    zero = np.zeros((), np.float32)
    shapes = tensor_shapes(CONFIGS[name])
    arrays = {tensor: np.broadcast_to(zero, shape) for tensor, shape in shapes.items()}
    return read_model(checkpoint("safetensors", CONFIGS[name], arrays)).config


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configuration_is_understood(name: str) -> None:
    config = read(name)
    assert config.context_length == CONFIGS[name]["max_position_embeddings"]


def test_what_they_mean() -> None:
    assert read("llama-3.2-1b").ropes[0].type == "llama3"
    assert read("llama-2-7b").ropes[0].theta == 10000.0
    assert set(read("mistral-7b-v0.1").layer_windows) == {4096}
    assert read("mistral-nemo-12b").attention_scale == 128**-0.5
    assert set(read("qwen2.5-7b").layer_windows) == {None}
    assert read("qwen2.5-7b").ropes[0].attention_factor == pytest.approx(1.1386294361119891)
    assert read("gemma-2-9b").layer_windows[:2] == (4096, None)
    assert [layer for layer, rope in enumerate(read("gemma-3-270m").layer_ropes) if rope == 0] == [5, 11, 17]
    hybrid = read("qwen3.5-9b")
    assert [layer for layer, kind in enumerate(hybrid.layer_kinds) if kind == "attention"] == list(range(3, 32, 4))
    assert hybrid.ropes[0].rotary_dim == 64
    # 2 MiB of state and 96 KiB of the convolution's window for each of 24 layers.
    assert sum(shape.block_bytes for shape in delta_shapes(hybrid)) == 24 * ((2 << 20) + (96 << 10))
