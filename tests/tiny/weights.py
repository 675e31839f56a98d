"""Weights of a tiny model from its seed, the same bits on every machine.

Recipe: matrices std 0.7 / sqrt(fan in), q and k twice that, norms 1 + 0.2 N (minus the 1 that Gemma and Qwen3.5 add),
embeddings and biases N(0, 1), resp. 0.5 N(0, 1), A_log N - 1.5, so that states last for tens of tokens. N is a sum of
twelve uniform numbers of the frozen Mersenne generator, minus 6: normal enough, and free of any library's logarithm.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tiny.models import TinyModel

Array = npt.NDArray[np.float32]


def normal(shape: tuple[int, ...], *seeds: int) -> npt.NDArray[np.float64]:
    """Nearly N(0, 1) numbers, float64."""
    generator = np.random.RandomState(list(seeds))
    return np.asarray(generator.random_sample((12, *shape)).sum(axis=0) - 6.0)


def make_weights(model: TinyModel) -> dict[str, Array]:
    """All tensors by their Hugging Face names."""
    adds_one = str(model.config["model_type"]).startswith(("gemma", "qwen3_5", "qwen3_next"))
    weights: dict[str, Array] = {}
    for name, shape in tensor_shapes(model.config).items():
        values = normal(shape, model.seed, zlib.crc32(name.encode()))
        if name.endswith("norm.weight"):
            values = 0.2 * values + (0.0 if adds_one and not name.endswith("linear_attn.norm.weight") else 1.0)
        elif name.endswith((".bias", ".dt_bias")):
            values = 0.5 * values
        elif name.endswith(".A_log"):
            values = values - 1.5
        elif not name.startswith("model.embed_tokens"):
            values = values * 0.7 / np.sqrt(shape[1])
            if "q_proj" in name or "k_proj" in name:
                values = values * 2
        weights[name] = values.astype(np.float32)
    return weights


def tensor_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them."""

    def number(name: str, default: int = 0) -> int:
        value = config.get(name)
        return default if value is None else int(str(value))

    family = str(config["model_type"])
    gemma, hybrid = family.startswith("gemma"), family.startswith(("qwen3_5", "qwen3_next"))
    hidden, inner = number("hidden_size"), number("intermediate_size")
    heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads", number("num_attention_heads"))
    head_dim = number("head_dim", hidden // heads)
    attention_bias = bool(config.get("attention_bias", False))
    projections = {
        "self_attn.q_proj": (heads * head_dim, hidden, attention_bias or family == "qwen2"),
        "self_attn.k_proj": (kv_heads * head_dim, hidden, attention_bias or family == "qwen2"),
        "self_attn.v_proj": (kv_heads * head_dim, hidden, attention_bias or family == "qwen2"),
        "self_attn.o_proj": (hidden, heads * head_dim, attention_bias and family != "qwen2"),
        "mlp.gate_proj": (inner, hidden, bool(config.get("mlp_bias", False))),
        "mlp.up_proj": (inner, hidden, bool(config.get("mlp_bias", False))),
        "mlp.down_proj": (hidden, inner, bool(config.get("mlp_bias", False))),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if gemma:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if hybrid:
        projections["self_attn.q_proj"] = (2 * heads * head_dim, hidden, attention_bias)
    if family in ("qwen3", "gemma3_text") or hybrid:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (number("vocab_size"), hidden)}
    for layer in range(number("num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        linear = hybrid and not _is_full_layer(config, layer)
        if linear:
            shapes |= {prefix + name: shape for name, shape in _linear_attention_shapes(config).items()}
        for name, size in norms.items():
            if not (linear and name.startswith("self_attn.")):
                shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, cols, bias) in projections.items():
            if linear and name.startswith("self_attn."):
                continue
            shapes[f"{prefix}{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (number("vocab_size"), hidden)
    return shapes


def _is_full_layer(config: Mapping[str, object], layer: int) -> bool:
    types = config.get("layer_types")
    if isinstance(types, list):
        return bool(types[layer] == "full_attention")
    return (layer + 1) % int(str(config.get("full_attention_interval", 4))) == 0


def _linear_attention_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Those of a gated-delta layer of Qwen3.5 or Qwen3-Next."""

    def number(name: str, default: int) -> int:
        return int(str(config.get(name, default)))

    hidden, heads = number("hidden_size", 0), number("linear_num_value_heads", 32)
    inner, value_dim = heads * number("linear_value_head_dim", 128), number("linear_value_head_dim", 128)
    channels = 2 * number("linear_num_key_heads", 16) * number("linear_key_head_dim", 128) + inner
    projections = {"qkv": channels, "z": inner, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":
        projections = {"qkvz": channels + inner, "ba": 2 * heads}
    return {
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.conv1d.weight": (channels, 1, number("linear_conv_kernel_dim", 4)),
        "linear_attn.norm.weight": (value_dim,),
        "linear_attn.out_proj.weight": (hidden, inner),
        **{f"linear_attn.in_proj_{name}.weight": (rows, hidden) for name, rows in projections.items()},
    }


def digest(weights: Mapping[str, Array]) -> str:
    """sha256 of all names and values."""
    state = hashlib.sha256()
    for name, values in weights.items():
        state.update(name.encode())
        state.update(values.tobytes())
    return state.hexdigest()


def prompts(model: TinyModel) -> list[list[int]]:
    """Two prompts of random ids."""
    vocab = model.config["vocab_size"]
    assert isinstance(vocab, int)
    generator = np.random.RandomState([model.seed, zlib.crc32(model.name.encode())])
    return [[int(value) for value in generator.random_sample(length) * vocab] for length in model.lengths]


def positions(model: TinyModel) -> list[list[int]]:
    """The positions of each prompt whose logits are kept: the first, some inside, the last ones."""
    return [sorted({0, 1, length // 3, length // 2, length - 7, length - 2, length - 1}) for length in model.lengths]


def beyond_half_precision(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Weights of a model without norms behind its matrices that give the same logits, to the bit where norm_eps is
    lost beside numbers of usual size: residual stream, values and products inside the MLP are 2 ** 20 times as large.
    """
    larger = ("embed_tokens.weight", "v_proj.weight", "v_proj.bias", "o_proj.bias", "linear_attn.out_proj.weight")
    larger += ("up_proj.weight", "up_proj.bias", "down_proj.bias")
    return {name: values * np.float32(2**20 if name.endswith(larger) else 1) for name, values in weights.items()}
