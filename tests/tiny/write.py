"""Tiny models as files: a Hugging Face folder, or a GGUF file by the conventions of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tiny.models import TinyModel
from tiny.weights import Array

_GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_GGUF_ARCHITECTURES |= {"gemma2": "gemma2", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35"}

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_QWEN35_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def write_hf(folder: Path, config: Mapping[str, object], weights: Mapping[str, Array], dtype: str = "F32") -> Path:
    """config.json and model.safetensors; `dtype` F32, F16 (rounded) or BF16 (cut off)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        stored = _stored(values, dtype)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def _stored(values: Array, dtype: str) -> bytes:
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()


def write_gguf(path: Path, model: TinyModel, weights: Mapping[str, Array]) -> Path:
    """One GGUF file: q and k permuted in llama files, 1 added to Gemma's and Qwen3.5's norms, value heads tiled and
    -exp(A_log) in place of A_log in Qwen3.5's, llama3's factors as a tensor.
    """
    import gguf

    architecture = _GGUF_ARCHITECTURES[str(model.config["model_type"])]
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, architecture, dict(model.config))
    for name, values in weights.items():
        writer.add_tensor(gguf_name(name, architecture), _convert(name, values, architecture, dict(model.config)))
    if (factors := llama3_factors(dict(model.config))) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    names = _GGUF_NAMES | (_GGUF_GEMMA_NAMES if architecture.startswith("gemma") else {})
    if architecture == "qwen35":
        names = names | _GGUF_QWEN35_NAMES
        for theirs, ours in (("linear_attn.A_log", "ssm_a"), ("linear_attn.dt_bias", "ssm_dt.bias")):
            if name.endswith(theirs):
                return f"blk.{name.split('.')[2]}.{ours}"
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def permute(values: Array, heads: int) -> Array:
    """Rows from half-split to adjacent pairs, as the converter does for llama files."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def llama3_factors(config: Mapping[str, object]) -> Array | None:
    """What the converter computes from a llama3 rope scaling: a divisor per frequency."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type") != "llama3":
        return None
    theta, dim = (
        float(str(config["rope_theta"])),
        int(str(config["hidden_size"])) // int(str(config["num_attention_heads"])),
    )
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (index / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _convert(name: str, values: Array, architecture: str, config: Mapping[str, object]) -> Array:
    if architecture == "llama" and "q_proj" in name:
        return permute(values, int(str(config["num_attention_heads"])))
    if architecture == "llama" and "k_proj" in name:
        return permute(values, int(str(config["num_key_value_heads"])))
    if architecture == "qwen35":
        values = tile_value_heads(name, values, config)
        if name.endswith("A_log"):
            return -np.exp(values)
        if name.endswith("conv1d.weight"):
            return values[:, 0]
    adds_one = architecture.startswith("gemma") or (architecture == "qwen35" and "linear_attn.norm" not in name)
    if adds_one and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def tile_value_heads(name: str, values: Array, config: Mapping[str, object]) -> Array:
    """Value heads of a Qwen3.5 tensor from grouped order (those of a key head together) to tiled order."""
    keys, heads = int(str(config["linear_num_key_heads"])), int(str(config["linear_num_value_heads"]))
    size = int(str(config["linear_value_head_dim"]))
    grouped = [head % keys * (heads // keys) + head // keys for head in range(heads)]
    part = name.partition("linear_attn.")[2]
    if part in ("in_proj_z.weight", "in_proj_qkv.weight", "conv1d.weight"):
        first = values.shape[0] - heads * size
        tail = values[first:].reshape(heads, size, *values.shape[1:])[grouped]
        return np.concatenate([values[:first], tail.reshape(values[first:].shape)])
    if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return values[grouped]
    if part == "out_proj.weight":
        return np.ascontiguousarray(values.reshape(-1, heads, size)[:, grouped].reshape(values.shape))
    return values


def _write_qwen35_keys(writer: object, config: Mapping[str, object], head_dim: int) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    rope, heads = config["rope_parameters"], int(str(config["linear_num_value_heads"]))
    assert isinstance(rope, dict)
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * int(str(config["linear_value_head_dim"])))
    if "full_attention_interval" in config:
        writer.add_full_attention_interval(config["full_attention_interval"])


def _write_keys(writer: object, architecture: str, config: Mapping[str, object]) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    heads, hidden = int(str(config["num_attention_heads"])), int(str(config["hidden_size"]))
    head_dim = int(str(config.get("head_dim", hidden // heads)))
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_file_type(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if architecture == "qwen35":
        _write_qwen35_keys(writer, config, head_dim)
    parameters = config.get("rope_parameters") or {}
    assert isinstance(parameters, dict)
    theta = config.get("rope_theta", parameters.get("rope_theta"))
    if theta is not None:
        writer.add_rope_freq_base(theta)
    _write_rope_scaling(writer, config.get("rope_scaling"))
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping") is not None:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _write_rope_scaling(writer: object, scaling: object) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    if not isinstance(scaling, dict):
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
