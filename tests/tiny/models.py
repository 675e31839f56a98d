"""The tiny models: one per family and per field that changes the forward pass, each with what ignoring the field means.

`ignoring` maps a name to the configuration fields that a program ignoring it would see instead (MISSING: not there);
make_golden.py asserts that each of them moves the logits by at least 100 times the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class _Missing:
    """Marks a field to be taken out of the configuration."""


MISSING = _Missing()
Fields = Mapping[str, object]


@dataclass(frozen=True)
class TinyModel:
    """`config` is config.json; `lengths` are those of the two prompts; `gguf`: also written as a GGUF file."""

    name: str
    config: dict[str, object]
    ignoring: Mapping[str, Fields]
    seed: int = 1
    lengths: tuple[int, int] = (72, 41)
    gguf: bool = False


def _config(model_type: str, architecture: str, **changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | changes


def _llama(**changes: object) -> dict[str, object]:
    return _config("llama", "LlamaForCausalLM", **changes)


def _mistral(**changes: object) -> dict[str, object]:
    return _config("mistral", "MistralForCausalLM", **{"sliding_window": None} | changes)


def _qwen2(**changes: object) -> dict[str, object]:
    return _config("qwen2", "Qwen2ForCausalLM", **changes)


def _qwen3(**changes: object) -> dict[str, object]:
    return _config("qwen3", "Qwen3ForCausalLM", **{"head_dim": 32} | changes)


def _gemma2(**changes: object) -> dict[str, object]:
    defaults = {
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 40.0,
    }
    return _config("gemma2", "Gemma2ForCausalLM", **defaults | changes)


def _gemma3(**changes: object) -> dict[str, object]:
    defaults = {
        "num_hidden_layers": 7,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "rope_theta": 30000.0,
        "rope_local_base_freq": 10000.0,
    }
    return _config("gemma3_text", "Gemma3ForCausalLM", **defaults | changes)


def _qwen3_5(**changes: object) -> dict[str, object]:
    defaults = {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "rope_parameters": _MROPE,
    }
    return _config("qwen3_5_text", "Qwen3_5ForCausalLM", **defaults | changes)


def _qwen3_next(**changes: object) -> dict[str, object]:
    config = _without(_qwen3_5(), "rope_parameters") | {"rope_theta": 500.0, "num_experts": 0}
    return config | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]} | changes


_MROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_HALF_ROTATED = _MROPE | {"partial_rotary_factor": 0.5}
_MIXED_LAYERS = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_BETAS = _YARN | {"beta_fast": 0.5, "beta_slow": 0.1, "attention_factor": 0.8}
_YARN_MSCALE = _YARN | {"mscale": 1.3, "mscale_all_dim": 0.4, "truncate": False}
_FULL_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 30000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def _without(mapping: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in mapping.items() if name not in names}


MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in (
        TinyModel(
            "llama",
            _llama(rope_theta=500.0, rms_norm_eps=0.03),
            {"rope_theta": {"rope_theta": MISSING}, "rms_norm_eps": {"rms_norm_eps": MISSING}},
            gguf=True,
        ),
        TinyModel(
            "llama_tied_wide_heads",
            _llama(
                head_dim=24, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
            ),
            {"rope_parameters": {"rope_parameters": MISSING}},
            gguf=True,
        ),
        TinyModel(
            "llama_biases",
            _llama(attention_bias=True, mlp_bias=True),
            {"attention_bias": {"attention_bias": False}, "mlp_bias": {"mlp_bias": False}},
            gguf=True,
        ),
        TinyModel(
            "llama_gelu",
            _llama(hidden_act="gelu_pytorch_tanh", num_key_value_heads=4),
            {"hidden_act": {"hidden_act": MISSING}},
        ),
        TinyModel(
            "llama_linear",
            _llama(rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 3.0}),
            {"rope_scaling": {"rope_scaling": None}},
            gguf=True,
        ),
        TinyModel(
            "llama_llama3",
            _llama(rope_theta=500.0, rope_scaling=_LLAMA3),
            {
                "rope_scaling": {"rope_scaling": None},
                "factor": {"rope_scaling": _LLAMA3 | {"factor": 4.0}},
                "low_freq_factor": {"rope_scaling": _LLAMA3 | {"low_freq_factor": 2.0}},
                "high_freq_factor": {"rope_scaling": _LLAMA3 | {"high_freq_factor": 2.0}},
                "original": {"rope_scaling": _without(_LLAMA3, "original_max_position_embeddings")},
            },
            gguf=True,
        ),
        TinyModel(
            "llama_yarn",
            _llama(rope_theta=500.0, rope_scaling=_YARN),
            {
                "rope_scaling": {"rope_scaling": None},
                "factor": {"rope_scaling": _YARN | {"factor": 2.0}},
                "original": {"rope_scaling": _without(_YARN, "original_max_position_embeddings")},
                "attention_factor": {"rope_scaling": _YARN | {"attention_factor": 1.0}},
            },
            gguf=True,
        ),
        TinyModel(
            "llama_yarn_betas",
            _llama(rope_parameters=_YARN_BETAS | {"rope_theta": 500.0}),
            {
                "beta_fast": {"rope_parameters": _without(_YARN_BETAS, "beta_fast") | {"rope_theta": 500.0}},
                "beta_slow": {"rope_parameters": _without(_YARN_BETAS, "beta_slow") | {"rope_theta": 500.0}},
                "attention_factor": {
                    "rope_parameters": _without(_YARN_BETAS, "attention_factor") | {"rope_theta": 500.0}
                },
            },
        ),
        TinyModel(
            "llama_yarn_mscale",
            _llama(rope_theta=500.0, rope_scaling=_YARN_MSCALE),
            {
                "truncate": {"rope_scaling": _without(_YARN_MSCALE, "truncate")},
                "mscale": {"rope_scaling": _without(_YARN_MSCALE, "mscale")},
            },
        ),
        TinyModel(
            "mistral",
            _mistral(head_dim=24, sliding_window=11),
            {"sliding_window": {"sliding_window": None}, "one_off": {"sliding_window": 12}},
            gguf=True,
        ),
        TinyModel(
            "mistral_long",
            _mistral(sliding_window=130),
            {"sliding_window": {"sliding_window": None}, "one_off": {"sliding_window": 129}},
            lengths=(700, 530),
        ),
        TinyModel("qwen2", _qwen2(tie_word_embeddings=True), {}, gguf=True),
        TinyModel(
            "qwen2_windows",
            _qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1),
            {
                "use_sliding_window": {"use_sliding_window": False},
                "sliding_window": {"sliding_window": 10},
                "max_window_layers": {"max_window_layers": 2},
            },
        ),
        TinyModel("qwen3", _qwen3(), {}, gguf=True),
        TinyModel(
            "qwen3_windows_bias",
            _qwen3(
                attention_bias=True,
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                max_window_layers=0,
            ),
            {"attention_bias": {"attention_bias": False}, "layer_types": {"layer_types": MISSING}},
        ),
        TinyModel(
            "gemma2",
            _gemma2(),
            {
                "attn_logit_softcapping": {"attn_logit_softcapping": None},
                "final_logit_softcapping": {"final_logit_softcapping": None},
                "sliding_window": {"sliding_window": 4096},
                "hidden_activation": {"hidden_activation": "silu"},
            },
            gguf=True,
        ),
        TinyModel(
            "gemma2_query_scale",
            _gemma2(
                query_pre_attn_scalar=7,
                attention_bias=True,
                tie_word_embeddings=False,
                attn_logit_softcapping=None,
                final_logit_softcapping=2.0,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            ),
            {
                "query_pre_attn_scalar": {"query_pre_attn_scalar": 24},
                "attention_bias": {"attention_bias": False},
                "layer_types": {"layer_types": MISSING},
            },
        ),
        TinyModel(
            "gemma2_long",
            _gemma2(sliding_window=70),
            {"attn_logit_softcapping": {"attn_logit_softcapping": None}, "sliding_window": {"sliding_window": 71}},
            lengths=(600, 515),
        ),
        TinyModel(
            "gemma3",
            _gemma3(),
            {
                "rope_theta": {"rope_theta": 10000.0},
                "rope_local_base_freq": {"rope_local_base_freq": 30000.0},
                "sliding_window": {"sliding_window": 8},
            },
            gguf=True,
        ),
        TinyModel(
            "gemma3_linear",
            _without(_gemma3(), "rope_theta", "rope_local_base_freq")
            | {
                "rope_parameters": _FULL_LINEAR,
                "final_logit_softcapping": 40.0,
                "query_pre_attn_scalar": 7,
                "sliding_window_pattern": 3,
            },
            {
                "full_factor": {
                    "rope_parameters": _FULL_LINEAR
                    | {"full_attention": {"rope_type": "default", "rope_theta": 30000.0}}
                },
                "sliding_theta": {"rope_parameters": _without(_FULL_LINEAR, "sliding_attention")},
                "final_logit_softcapping": {"final_logit_softcapping": None},
                "query_pre_attn_scalar": {"query_pre_attn_scalar": 24},
                "sliding_window_pattern": {"sliding_window_pattern": MISSING},
            },
        ),
        TinyModel(
            "qwen3_5",
            _qwen3_5(),
            {
                "rope_theta": {"rope_parameters": _without(_MROPE, "rope_theta")},
                "partial_rotary_factor": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
            },
            lengths=(200, 131),
            gguf=True,
        ),
        TinyModel(
            "qwen3_5_odd_heads",
            _qwen3_5(
                num_hidden_layers=5,
                layer_types=_MIXED_LAYERS,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=24,
                attention_bias=True,
                linear_num_key_heads=3,
                linear_num_value_heads=9,
                linear_key_head_dim=8,
                linear_value_head_dim=12,
                linear_conv_kernel_dim=3,
                tie_word_embeddings=True,
                rope_parameters=_HALF_ROTATED,
                rms_norm_eps=0.03,
            ),
            {
                "attention_bias": {"attention_bias": False},
                "rms_norm_eps": {"rms_norm_eps": MISSING},
                "partial_rotary_factor": {"rope_parameters": _without(_HALF_ROTATED, "partial_rotary_factor")},
            },
        ),
        TinyModel(
            "qwen3_5_equal_heads",
            _qwen3_5(
                num_hidden_layers=3,
                full_attention_interval=2,
                linear_num_key_heads=5,
                linear_num_value_heads=5,
                linear_key_head_dim=20,
                linear_value_head_dim=8,
                linear_conv_kernel_dim=2,
            ),
            {},
            gguf=True,
        ),
        TinyModel(
            "qwen3_5_wide_heads",
            _qwen3_5(
                num_hidden_layers=2,
                full_attention_interval=2,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_num_value_heads=6,
                rope_parameters=_MROPE | {"rope_type": "linear", "factor": 3.0},
            ),
            {"factor": {"rope_parameters": _MROPE}},
            lengths=(150, 70),
        ),
        TinyModel(
            "qwen3_next",
            _qwen3_next(
                linear_num_key_heads=3,
                linear_num_value_heads=6,
                linear_key_head_dim=8,
                linear_value_head_dim=12,
                partial_rotary_factor=0.5,
                num_experts=4,
                num_experts_per_tok=2,
                router_aux_loss_coef=0.001,
                mlp_only_layers=[0, 1, 2, 3],
            ),
            {"rope_theta": {"rope_theta": MISSING}, "partial_rotary_factor": {"partial_rotary_factor": MISSING}},
        ),
    )
}


def with_fields(config: Mapping[str, object], changes: Fields) -> dict[str, object]:
    """`config` with fields replaced, or taken out where MISSING."""
    return {name: value for name, value in (dict(config) | dict(changes)).items() if value is not MISSING}
