"""The gate on config.json: every field is implemented, known to be without effect, or refused by name and value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_transformer.errors import UnsupportedModelError
from edge_transformer.formats.weight import WeightFormat, packed_layout
from edge_transformer.models.config import LayerSpec, ModelConfig, ModelSpec, Rope, SegmentSpec, TensorSpec
from edge_transformer.models.hf_config import IGNORED
from edge_transformer.models.read import HF_FAMILIES, read_model
from edge_transformer.models.rope import inverse_frequencies
from tiny.memory import checkpoint
from tiny.models import MISSING, MODELS, with_fields
from tiny.weights import make_weights, tensor_shapes

BASE = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"}
BASE |= {"gemma3_text": "gemma3", "qwen3_5_text": "qwen3_5", "qwen3_next": "qwen3_next"}
ALL = list(BASE)
HYBRIDS = ["qwen3_5_text", "qwen3_next"]
WHOLE_HEADS = [name for name in ALL if name not in HYBRIDS]  # families that rotate all of a head

Changes = dict[str, Any]


def read(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a configuration with tensors that fit it."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    return read_model(checkpoint("safetensors", config, arrays))


def base(model_type: str) -> dict[str, object]:
    config = dict(MODELS[BASE[model_type]].config)
    if model_type == "qwen3_5_text":  # the older spelling, so that rope_scaling can be added
        del config["rope_parameters"]
        config |= {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    return config


def refusal(config: Mapping[str, object]) -> str:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(MODELS["llama"].config).items()}
    with pytest.raises(UnsupportedModelError) as caught:
        read_model(checkpoint("safetensors", config, arrays))
    return str(caught.value)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# (families, changes to config.json, field named in the refusal, text of its value in the refusal)
REFUSED: list[tuple[list[str], Changes, str, str]] = [
    (ALL, {"an_unknown_field": 3}, "an_unknown_field", "3"),
    (ALL, {"an_unknown_field": None}, "an_unknown_field", "None"),
    (ALL, {"model_type": "phi3"}, "model_type", "phi3"),
    (ALL, {"model_type": MISSING}, "model_type", "missing"),
    (ALL, {"architectures": ["LlamaForSequenceClassification"]}, "architectures", "SequenceClassification"),
    (ALL, {"architectures": ["LlamaModel"]}, "architectures", "LlamaModel"),
    (ALL, {"quantization_config": {"bits": 4}}, "quantization_config", "bits"),
    (ALL, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map", "AutoModel"),
    (ALL, {"text_config": {"hidden_size": 4}}, "text_config", "hidden_size"),
    (WHOLE_HEADS, {"num_experts": 8}, "num_experts", "8"),
    (HYBRIDS, {"num_experts": 8, "mlp_only_layers": []}, "", "mixture-of-experts"),
    (["qwen3_next"], {"mlp_only_layers": [0, 1, 2]}, "num_experts", "4"),
    (["qwen3_next"], {"mlp_only_layers": MISSING}, "num_experts", "4"),
    (["qwen3_next"], {"mlp_only_layers": [0, 1, 3], "decoder_sparse_step": 3}, "num_experts", "4"),
    (["qwen3_next"], {"num_experts": MISSING, "mlp_only_layers": []}, "num_experts", "missing"),
    (["qwen3_next"], {"mamba_ssm_dtype": "float32"}, "mamba_ssm_dtype", "float32"),
    (ALL, {"num_local_experts": 8}, "num_local_experts", "8"),
    (ALL, {"is_encoder_decoder": True}, "is_encoder_decoder", "True"),
    (ALL, {"add_cross_attention": True}, "add_cross_attention", "True"),
    (ALL, {"pruned_heads": {"0": [1]}}, "pruned_heads", "[1]"),
    (ALL, {"per_layer_config": {"0": {}}}, "per_layer_config", "0"),
    (ALL, {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
    (ALL, {"use_mrope": True}, "use_mrope", "True"),
    (ALL, {"rope_interleaved": True}, "rope_interleaved", "True"),
    (ALL, {"hidden_size": MISSING}, "hidden_size", "missing"),
    (ALL, {"hidden_size": 64.0}, "hidden_size", "64.0"),
    (ALL, {"hidden_size": True}, "hidden_size", "True"),
    (ALL, {"num_hidden_layers": 0}, "num_hidden_layers", "0"),
    (ALL, {"num_hidden_layers": -1}, "num_hidden_layers", "-1"),
    (ALL, {"vocab_size": "131"}, "vocab_size", "131"),
    (ALL, {"num_key_value_heads": 3}, "num_key_value_heads", "3"),
    (ALL, {"head_dim": 15}, "head_dim", "15"),
    (ALL, {"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    (ALL, {"rms_norm_eps": -1e-6}, "rms_norm_eps", "-1e-06"),
    (ALL, {"rms_norm_eps": "1e-6"}, "rms_norm_eps", "1e-6"),
    (ALL, {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "yes"),
    (ALL, {"tie_word_embeddings": None}, "tie_word_embeddings", "None"),
    (ALL, {"eos_token_id": [1, "a"]}, "eos_token_id", "'a'"),
    (WHOLE_HEADS, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    (ALL, {"rope_theta": 0}, "rope_theta", "0"),
    (ALL, {"rope_scaling": [1]}, "rope_scaling", "[1]"),
    (ALL, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "dynamic"),
    (ALL, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "dynamic"),
    (ALL, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type", "longrope"),
    (ALL, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "missing"),
    (ALL, {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type", "yarn"),
    (ALL, {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor", "-1"),
    (ALL, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "rope_scaling.odd", "1"),
    (ALL, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor", "2.0"),
    (ALL, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "rope_scaling.beta_fast", "32"),
    (
        WHOLE_HEADS,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor",
        "0.5",
    ),
    (ALL, {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor", "1.0"),
    (ALL, {"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "rope_scaling.low_freq_factor", "None"),
    (ALL, {"rope_scaling": YARN | {"attention_factor": -1}}, "rope_scaling.attention_factor", "-1"),
    (ALL, {"rope_scaling": YARN | {"beta_fast": "32"}}, "rope_scaling.beta_fast", "32"),
    (ALL, {"rope_scaling": YARN | {"truncate": None}}, "rope_scaling.truncate", "None"),
    (ALL, {"rope_scaling": YARN, "original_max_position_embeddings": 32}, "original_max_position_embeddings", "32"),
    (ALL, {"rope_theta": 500.0, "rope_scaling": YARN | {"rope_theta": 600.0}}, "rope_scaling.rope_theta", "600.0"),
    (["llama", "mistral", "qwen2", "qwen3", *HYBRIDS], {"hidden_act": "gelu"}, "hidden_act", "gelu"),
    (HYBRIDS, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act", "gelu_pytorch_tanh"),
    (HYBRIDS, {"attn_output_gate": False}, "attn_output_gate", "False"),
    (HYBRIDS, {"output_gate_type": "sigmoid"}, "output_gate_type", "sigmoid"),
    (["qwen3_5_text"], {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype", "bfloat16"),
    (["qwen3_5_text"], {"mlp_only_layers": [0]}, "mlp_only_layers", "[0]"),
    (HYBRIDS, {"layer_types": ["sliding_attention"] * 4}, "layer_types", "sliding_attention"),
    (HYBRIDS, {"layer_types": ["full_attention"] * 3}, "layer_types", "full_attention"),
    (HYBRIDS, {"full_attention_interval": 0}, "full_attention_interval", "0"),
    (["qwen3_5_text"], {"linear_num_value_heads": 3}, "linear_num_value_heads", "3"),
    (HYBRIDS, {"linear_num_key_heads": 0}, "linear_num_key_heads", "0"),
    (HYBRIDS, {"linear_key_head_dim": "16"}, "linear_key_head_dim", "16"),
    (HYBRIDS, {"linear_value_head_dim": None}, "linear_value_head_dim", "None"),
    (HYBRIDS, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim", "1"),
    (HYBRIDS, {"sliding_window": 16}, "sliding_window", "16"),
    (["qwen3_5_text"], {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rot", "0.5"),
    (
        ["qwen3_5_text"],
        {"partial_rotary_factor": MISSING, "rope_parameters": {"partial_rotary_factor": 1.5}},
        "rope_parameters.partial_rotary_factor",
        "1.5",
    ),
    (["qwen3_5_text"], {"partial_rotary_factor": 0.01}, "partial_rotary_factor", "0.01"),
    (["qwen3_5_text"], {"partial_rotary_factor": 0.1}, "partial_rotary_factor", "0.1"),
    (["qwen3_5_text"], {"rope_parameters": {"mrope_sections": [1]}}, "rope_parameters.mrope_sections", "[1]"),
    (
        ["qwen3_5_text"],
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
        "linear",
    ),
    (["llama", "mistral", "qwen2", "qwen3"], {"hidden_activation": "silu"}, "hidden_activation", "silu"),
    (["llama"], {"sliding_window": 16}, "sliding_window", "16"),
    (["llama", "mistral"], {"layer_types": ["full_attention"] * 3}, "layer_types", "full_attention"),
    (["llama", "mistral", "qwen2", "qwen3"], {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
    (["llama", "mistral", "qwen2", "qwen3"], {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
    (["llama", "mistral", "qwen2", "qwen3"], {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar", "16"),
    (["llama", "mistral"], {"use_sliding_window": True}, "use_sliding_window", "True"),
    (["mistral"], {"attention_bias": True}, "attention_bias", "True"),
    (["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"], {"mlp_bias": True}, "mlp_bias", "True"),
    (["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"], {"sliding_window": 0}, "sliding_window", "0"),
    (["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"], {"sliding_window": 8.5}, "sliding_window", "8.5"),
    (["qwen2"], {"attention_bias": False}, "attention_bias", "False"),
    (["qwen2", "qwen3"], {"layer_types": ["full_attention"]}, "layer_types", "['full_attention']"),
    (["qwen2", "qwen3"], {"layer_types": ["sliding_attention"] * 3}, "layer_types", "sliding_attention"),
    (["qwen2", "qwen3"], {"use_sliding_window": 1}, "use_sliding_window", "1"),
    (["qwen2", "qwen3"], {"max_window_layers": -1}, "max_window_layers", "-1"),
    (["qwen3", "gemma2"], {"layer_types": ["linear_attention"] * 3}, "layer_types", "linear_attention"),
    (["gemma2", "gemma3_text"], {"hidden_activation": "gelu"}, "hidden_activation", "'gelu'"),
    (["gemma2", "gemma3_text"], {"hidden_act": "silu"}, "hidden_act", "silu"),
    (["gemma2", "gemma3_text"], {"sliding_window": None}, "sliding_window", "None"),
    (["gemma2", "gemma3_text"], {"sliding_window_size": 77}, "sliding_window_size", "77"),
    (["gemma2", "gemma3_text"], {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "0"),
    (["gemma2"], {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping", "0.0"),
    (["gemma2", "gemma3_text"], {"final_logit_softcapping": -1.0}, "final_logit_softcapping", "-1.0"),
    (["gemma2"], {"sliding_window_pattern": 3}, "sliding_window_pattern", "3"),
    (["gemma3_text"], {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type", "linear"),
    (["gemma3_text"], {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate", "False"),
    (["gemma3_text"], {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
    (["gemma3_text"], {"sliding_window_pattern": 3, "_sliding_window_pattern": 6}, "sliding_window_pattern", "3"),
    (["gemma3_text"], {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters.rope", "de"),
    (["llama", "qwen3", "gemma2"], {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "rope_parameters.full_attention", "default"),
    (["llama", "mistral", "qwen2", "qwen3", "gemma2"], {"rope_local_base_freq": 10.5}, "rope_local_base_freq", "10.5"),
    (
        ["llama", "mistral", "qwen2", "qwen3", "gemma2"],
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope_parameters.rope_theta",
        "1000000.0",
    ),
    (
        ["llama", "mistral", "qwen2", "qwen3", "gemma2"],
        {"rope_theta": MISSING, "rope_parameters": YARN, "rope_scaling": YARN | {"factor": 3.0}},
        "rope_scaling",
        "3.0",
    ),
    (
        ["gemma3_text"],
        {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 30000.0}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "rope_scaling",
        "8.0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "field", "value"),
    [
        pytest.param(family, changes, field, value, id=f"{family}-{index}-{field}")
        for index, (families, changes, field, value) in enumerate(REFUSED)
        for family in families
    ],
)
def test_refused_with_field_and_value(model_type: str, changes: Changes, field: str, value: str) -> None:
    message = refusal(with_fields(base(model_type), changes))
    assert f"'{field}" in message
    assert value in message


@pytest.mark.parametrize("model_type", ALL)
@given(name=st.text(min_size=1, max_size=12), value=st.none() | st.booleans() | st.integers() | st.text(max_size=5))
def test_no_unknown_field_passes(model_type: str, name: str, value: object) -> None:
    assert repr("x" + name) in refusal(base(model_type) | {"x" + name: value})


@pytest.mark.parametrize("model_type", ALL)
def test_fields_without_effect_change_nothing(model_type: str) -> None:
    names = [name for name in IGNORED if name not in ("architectures", "model_type")]
    assert read(base(model_type) | dict.fromkeys(names, "anything")).config == read(base(model_type)).config


NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 10**30, 10**400, "", "yarn", [], {}, [1], {"a": 1}]),
    st.floats(),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(sorted(LLAMA3 | YARN)), st.integers() | st.floats() | st.text(max_size=3)),
)
FIELDS = sorted(
    {field for _, changes, _, _ in REFUSED for field in changes}
    | {name for model in MODELS.values() for name in model.config}
)


@pytest.mark.parametrize("model_type", ALL)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), NASTY, min_size=1, max_size=3))
def test_any_value_is_understood_or_refused(model_type: str, changes: dict[str, object]) -> None:
    """No value of a known field ends in another error, or in frequencies that are no numbers."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(base(model_type)).items()}
    try:
        config = read_model(checkpoint("safetensors", base(model_type) | changes, arrays)).config
    except UnsupportedModelError:
        return
    for rope in config.ropes:
        frequencies = inverse_frequencies(rope)
        assert np.isfinite(frequencies).all()
        assert (frequencies >= 0).all()


ACCEPTED: list[tuple[str, Changes, dict[str, object]]] = [
    ("llama", {"architectures": MISSING}, {}),
    ("llama", {"num_key_value_heads": MISSING}, {"num_kv_heads": 4}),
    ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
    ("llama", {"head_dim": None}, {"head_dim": 16}),
    ("llama", {"rms_norm_eps": MISSING}, {"norm_eps": 1e-6}),
    ("llama", {"rope_theta": MISSING}, {"ropes": (Rope("default", 10000.0, 16),)}),
    ("llama", {"rope_scaling": None}, {}),
    ("llama", {"rope_scaling": {}}, {}),
    ("llama", {"rope_scaling": {"type": "default", "rope_type": "default"}}, {}),
    ("llama", {"partial_rotary_factor": 1.0}, {}),
    ("llama", {"rope_theta": MISSING, "rope_parameters": {"rope_theta": 500.0}}, {}),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, {}),
    ("llama", {"rope_interleaved": False, "is_llama_config": True}, {}),
    ("llama", {"eos_token_id": [2, 7]}, {}),
    ("llama", {"eos_token_id": None, "bos_token_id": None}, {}),
    ("mistral", {"sliding_window": MISSING}, {"layer_windows": (4096,) * 3}),
    ("mistral", {"sliding_window": None}, {"layer_windows": (None,) * 3}),
    ("qwen2", {"use_sliding_window": True}, {"layer_windows": (None,) * 3}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, {"layer_windows": (None, None, 4096)}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, {"layer_windows": (None,) * 3}),
    ("qwen2", {"attention_bias": True}, {}),
    ("qwen3_5_text", {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []}, {}),
    ("qwen3_5_text", {"output_gate_type": "swish", "unsloth_fixed_mtp": True}, {}),
    ("qwen3_5_text", {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}, {}),
    ("qwen3_5_text", {"full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, {}),
    ("qwen3_next", {"num_experts": 0, "mlp_only_layers": MISSING}, {}),
    ("qwen3_next", {"mlp_only_layers": [0, 1, 3], "decoder_sparse_step": 4}, {}),
    ("qwen3_next", {"mlp_only_layers": MISSING, "decoder_sparse_step": 5}, {}),
    ("qwen3_next", {"num_experts_per_tok": 9, "moe_intermediate_size": 5, "norm_topk_prob": True}, {}),
    ("qwen3_5_text", {"rope_theta": MISSING}, {"ropes": (Rope("default", 10000.0, 8),)}),
    ("qwen3_5_text", {"partial_rotary_factor": MISSING}, {}),
    ("qwen3_5_text", {"partial_rotary_factor": 0.5}, {"ropes": (Rope("default", 500.0, 16),)}),
    ("qwen3_5_text", {"rope_parameters": {"mrope_section": [1, 1, 2], "mrope_interleaved": True}}, {}),
    (
        "qwen3_5_text",
        {"partial_rotary_factor": MISSING, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"ropes": (Rope("default", 500.0, 16),)},
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "expected"), ACCEPTED)
def test_accepted_means(model_type: str, changes: Changes, expected: dict[str, Any]) -> None:
    assert read(with_fields(base(model_type), changes)).config == replace(read(base(model_type)).config, **expected)


def test_every_field_of_the_configuration_is_read_by_something() -> None:
    """A field that nothing reads would be one that is believed to be honoured and is not."""
    source = Path(__file__).parents[2] / "src/edge_transformer"
    program = "".join(path.read_text() for path in source.rglob("*.py"))
    for part in (ModelConfig, LayerSpec, SegmentSpec, TensorSpec, ModelSpec):
        for name in (entry.name for entry in fields(part)):
            assert re.search(rf"\.{name}\b(?!\()", program), f"{part.__name__}.{name}"


def test_missing_tensor_is_named() -> None:
    arrays = make_weights(MODELS["qwen3"])
    del arrays["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight.*missing"):
        read_model(checkpoint("safetensors", MODELS["qwen3"].config, arrays))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "lm_head.bias", "adapter"]
)
def test_leftover_tensor_is_named(name: str) -> None:
    arrays = make_weights(MODELS["llama"]) | {name: np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedModelError, match=name):
        read_model(checkpoint("safetensors", MODELS["llama"].config, arrays))


def test_misshapen_tensor_is_named_with_both_shapes() -> None:
    arrays = make_weights(MODELS["llama"]) | {"model.norm.weight": np.zeros(63, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        read_model(checkpoint("safetensors", MODELS["llama"].config, arrays))


def test_saved_rope_frequencies_are_reported() -> None:
    name = "model.layers.2.self_attn.rotary_emb.inv_freq"
    arrays = make_weights(MODELS["llama"]) | {name: np.zeros(8, np.float32)}
    spec = read_model(checkpoint("safetensors", MODELS["llama"].config, arrays))
    assert spec.ignored_tensors == (name,)


def test_untied_without_a_head_is_refused() -> None:
    arrays = make_weights(MODELS["llama"])
    del arrays["lm_head.weight"]
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight.*tie_word_embeddings is false"):
        read_model(checkpoint("safetensors", MODELS["llama"].config, arrays))


def test_tied_with_another_head_is_refused() -> None:
    arrays = make_weights(MODELS["qwen2"])
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    spec = read_model(checkpoint("safetensors", MODELS["qwen2"].config, arrays))
    assert spec.ignored_tensors == ("lm_head.weight",)
    assert spec.head is spec.embedding
    arrays["lm_head.weight"][-1, -1] += 1
    with pytest.raises(UnsupportedModelError, match=r"tie_word_embeddings is true.*lm_head\.weight"):
        read_model(checkpoint("safetensors", MODELS["qwen2"].config, arrays))


def with_vision(**changes: object) -> dict[str, object]:
    text = {key: value for key, value in base("qwen3_5_text").items() if key != "architectures"}
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 27},
        "image_token_id": 248056,
        "video_token_id": 248057,
    } | changes


def _vision_spec(config: Mapping[str, object], tied: bool = False) -> ModelSpec:
    arrays = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: np.zeros(
            shape, np.float32
        )
        for name, shape in tensor_shapes(base("qwen3_5_text") | {"tie_word_embeddings": tied}).items()
    }
    return read_model(checkpoint("safetensors", config, arrays))


def test_text_of_a_model_with_vision() -> None:
    assert _vision_spec(with_vision()).config == read(base("qwen3_5_text")).config
    text = with_vision()["text_config"]
    assert isinstance(text, dict)
    outer = with_vision(
        tie_word_embeddings=True, text_config={key: text[key] for key in text if key != "tie_word_embeddings"}
    )
    assert _vision_spec(outer, tied=True).config.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"audio_config": {}}, "audio_config"),
        ({"text_config": MISSING}, "text_config"),
        ({"text_config": {"hidden_size": 64}}, "text_config.num_attention_heads"),
        ({"text_config": base("qwen3_5_text") | {"unknown": 1}}, "text_config.unknown"),
        ({"text_config": base("qwen3_5_text") | {"model_type": "qwen3_vl_text"}}, "text_config.model_type"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_a_model_with_vision_is_gated_too(changes: Changes, field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{field}'"):
        _vision_spec(with_fields(with_vision(), changes))


def test_parts_besides_the_text_are_reported() -> None:
    names = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.merger.norm.weight")
    arrays = make_weights(MODELS["qwen3_5"]) | dict.fromkeys(names, np.zeros(3, np.float32))
    assert set(read_model(checkpoint("safetensors", MODELS["qwen3_5"].config, arrays)).ignored_tensors) == set(names)
    with pytest.raises(UnsupportedModelError, match=r"mtp\.fc\.weight.*not known"):
        read_model(
            checkpoint("safetensors", base("llama"), make_weights(MODELS["llama"]) | {names[0]: arrays[names[0]]})
        )


def test_rows_of_fused_tensors() -> None:
    """Every row of a fused tensor belongs to one matrix, and the stored shape is asked for."""
    layer = read(base("qwen3_next")).layers[0]
    matrices = {matrix.role: matrix for matrix in layer.segments[0].matrices}
    for first, second in (("qkv", "z"), ("b", "a")):
        assert matrices[first].stored_shape == matrices[second].stored_shape
        rows = [row for role in (first, second) for part in matrices[role].parts for row in part]
        assert sorted(rows) == list(range(matrices[first].stored_shape[0]))
        assert [sum(map(len, matrices[role].parts)) for role in (first, second)] == [
            matrices[first].shape[0],
            matrices[second].shape[0],
        ]
    arrays = make_weights(MODELS["qwen3_next"])
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    with pytest.raises(UnsupportedModelError, match=r"in_proj_ba.*\[11, 64\].*\[12, 64\]"):
        read_model(checkpoint("safetensors", base("qwen3_next"), arrays | {name: arrays[name][:-1]}))


def _transformers_config(folder: Path, config: Mapping[str, object]) -> Any:
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def _our_reading_of(theirs: Any, ours: ModelConfig) -> None:
    """Compare what transformers made of a configuration with what the gate made of it."""
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    types = getattr(theirs, "layer_types", None)
    sliding = [kind == "sliding_attention" for kind in types] if types else [theirs.model_type == "mistral"] * 3
    window = getattr(theirs, "sliding_window", None)
    assert ours.layer_windows == tuple(window if flag else None for flag in sliding)
    parameters = theirs.rope_parameters
    nested = [parameters["full_attention"], parameters["sliding_attention"]] if "full_attention" in parameters else None
    assert [(rope.type, rope.theta) for rope in ours.ropes] == [
        (section["rope_type"], section["rope_theta"]) for section in nested or [parameters]
    ]


SHAPES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.golden
@pytest.mark.parametrize("model_type", ALL)
def test_absent_fields_mean_what_transformers_means(tmp_path: Path, model_type: str) -> None:
    config = {name: base(model_type)[name] for name in SHAPES} | {"num_attention_heads": 32, "hidden_size": 64}
    if model_type == "qwen3_next":
        config["num_experts"] = 0
    theirs = _transformers_config(tmp_path, config)
    full = config | {"num_key_value_heads": theirs.num_key_value_heads, "head_dim": getattr(theirs, "head_dim", 2)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(full).items()}
    _our_reading_of(theirs, read_model(checkpoint("safetensors", config, arrays)).config)


@pytest.mark.golden
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama_yarn_mscale",)])
def test_what_transformers_saves_reads_as_the_original(tmp_path: Path, name: str) -> None:
    """transformers rewrites old spellings into new ones; both mean the same, and no field it saves is unknown."""
    theirs = _transformers_config(tmp_path, MODELS[name].config)
    theirs.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert read(saved).config == read(MODELS[name].config).config
    _our_reading_of(theirs, read(saved).config)


@pytest.mark.golden
@pytest.mark.parametrize("model_type", ALL)
def test_every_field_transformers_knows_is_explained(model_type: str) -> None:
    """No field of the configuration class is unknown to the gate."""
    import dataclasses

    from transformers import AutoConfig

    known = {item.name for item in dataclasses.fields(type(AutoConfig.for_model(model_type)))}
    for field in known - set(base(model_type)) - set(IGNORED):
        arrays = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(base(model_type)).items()}
        with pytest.raises(UnsupportedModelError, match=f"{field}'.*(expected|supported|disagrees|does not apply)"):
            read_model(checkpoint("safetensors", base(model_type) | {field: "?"}, arrays))
    assert model_type in HF_FAMILIES


@pytest.mark.parametrize("changes", [{"head_dim": 2**31 - 8}, {"num_attention_heads": 2**30, "num_key_value_heads": 1}])
def test_sizes_of_attention_that_no_layer_has_take_no_memory(changes: dict[str, object]) -> None:
    """No tensor confirms them: rope tables and activations of these sizes would be gigabytes."""
    recurrent = MODELS["qwen3_5"].config | {"layer_types": ["linear_attention"] * 4}
    config = read(recurrent | changes).config
    assert config == read(recurrent).config
    assert config.ropes == ()
    assert config.num_heads * config.head_dim <= config.hidden_size


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("qwen3_5", "model.layers.0.linear_attn.conv1d.weight"),
    ],
)
def test_planes_of_what_is_no_whole_matrix_are_refused(name: str, tensor: str) -> None:
    file = checkpoint("safetensors", MODELS[name].config, make_weights(MODELS[name]))
    info = file.tensors[tensor]
    layout = packed_layout(WeightFormat.F32, info.shape[0], info.shape[-1])
    tensors = dict(file.tensors) | {tensor: replace(info, layout=layout)}
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(tensor)}' is quantized into planes"):
        read_model(replace(file, tensors=tensors))
