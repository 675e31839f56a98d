"""Weights of a tiny model from its seed, the same bits on every machine.

Recipe: matrices std 0.7 / sqrt(fan in), q and k twice that, norms 1 + 0.2 N (minus the 1 that Gemma adds), embeddings
and biases N(0, 1), resp. 0.5 N(0, 1). N is a sum of twelve uniform numbers of the frozen Mersenne generator, minus 6:
normal enough, and free of any library's logarithm.
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
    gemma = str(model.config["model_type"]).startswith("gemma")
    weights: dict[str, Array] = {}
    for name, shape in tensor_shapes(model.config).items():
        values = normal(shape, model.seed, zlib.crc32(name.encode()))
        if name.endswith("norm.weight"):
            values = 0.2 * values + (0.0 if gemma else 1.0)
        elif name.endswith(".bias"):
            values = 0.5 * values
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
    gemma = family.startswith("gemma")
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
    if family in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (number("vocab_size"), hidden)}
    for layer in range(number("num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
        for name, (rows, cols, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (number("vocab_size"), hidden)
    return shapes


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
