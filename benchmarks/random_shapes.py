"""The shapes of random_model.py: sizes as a ModelConfig, and how config.json and GGUF metadata say them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gguf import GGUFWriter

from edge_transformer.models import llama, qwen3_5
from edge_transformer.models.config import ATTENTION, GATED_DELTA, DeltaConfig, ModelConfig, ModelSpec, Rope
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.names import model_spec

INTERVAL = 4
"""Every so manieth layer of a Qwen3.5 is full attention."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes and its family. `config` is that of a Hugging Face folder. sections: numbers of rotary pairs that
    images would rotate by positions of three kinds; empty where a family has none.
    """

    config: ModelConfig
    hf: HfFamily
    gguf: GgufFamily
    sections: tuple[int, ...] = ()

    def hf_spec(self) -> ModelSpec:
        """All tensors of a Hugging Face folder."""
        return model_spec(self.config, self.hf.names)

    def gguf_spec(self) -> ModelSpec:
        """All tensors of a GGUF file. Rows of q and k are random in any order, so none are said to be permuted."""
        delta = self.config.delta
        tiled = None if delta is None else replace(delta, tiled_values=True)
        return model_spec(replace(self.config, norm_plus_one=False, delta=tiled), self.gguf.names)


def llama_shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> Shape:
    """A Llama with untied embeddings."""
    head_dim = 128
    config = ModelConfig(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        activation="silu",
        attention_scale=head_dim**-0.5,
        context_length=131072,
        ropes=(Rope("default", 500000.0, head_dim),),
        layer_kinds=(ATTENTION,) * layers,
        layer_windows=(None,) * layers,
        layer_ropes=(0,) * layers,
    )
    return Shape(config, llama.HF, llama.GGUF)


def qwen3_5_shape(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    delta: DeltaConfig,
    vocabulary: int,
    sections: tuple[int, ...],
) -> Shape:
    """A Qwen3.5, text, with untied embeddings: every fourth layer is full attention, a quarter of its heads rotates."""
    kinds = tuple(GATED_DELTA if (layer + 1) % INTERVAL else ATTENTION for layer in range(layers))
    config = ModelConfig(
        family="qwen3_5",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        activation="silu",
        attention_scale=head_dim**-0.5,
        context_length=262144,
        ropes=(Rope("default", 1e7, head_dim // 4),),
        layer_kinds=kinds,
        layer_windows=(None,) * layers,
        layer_ropes=tuple(None if kind == GATED_DELTA else 0 for kind in kinds),
        qk_norm=True,
        output_gate=True,
        delta=delta,
        norm_plus_one=True,
    )
    return Shape(config, qwen3_5.HF, qwen3_5.GGUF, sections)


SHAPES: dict[str, Shape] = {
    "1b": llama_shape(24, 1536, 4608, 12, 2, 130560),
    "8b": llama_shape(32, 4096, 14336, 32, 8, 128256),
    "qwen35-9b": qwen3_5_shape(
        32, 4096, 12288, 16, 4, 256, DeltaConfig(16, 32, 128, 128, 4, tiled_values=False), 248320, (11, 11, 10)
    ),
    "tiny": llama_shape(3, 256, 512, 2, 1, 1000),
    "tiny-qwen35": qwen3_5_shape(
        4, 256, 512, 4, 2, 64, DeltaConfig(2, 4, 64, 64, 4, tiled_values=False), 1000, (3, 3, 2)
    ),
}


def huggingface_config(shape: Shape) -> dict[str, object]:
    """What config.json says."""
    config = shape.config
    fields: dict[str, object] = {
        "architectures": [shape.hf.architecture],
        "model_type": shape.hf.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": config.activation,
        "torch_dtype": "bfloat16",
    }
    delta, rope = config.delta, config.ropes[0]
    if delta is None:
        return fields | {"rope_theta": rope.theta}
    return fields | {
        "full_attention_interval": INTERVAL,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.rotary_dim / config.head_dim,
            "mrope_section": list(shape.sections),
            "mrope_interleaved": True,
        },
    }


def write_gguf_keys(writer: GGUFWriter, shape: Shape) -> None:
    """All metadata but the architecture. There is no vocabulary."""
    config = shape.config
    writer.add_name("random")
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.ropes[0].rotary_dim)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if shape.sections:
        writer.add_rope_dimension_sections([*shape.sections, *(0,) * (4 - len(shape.sections))])
    delta = config.delta
    if delta is not None:
        writer.add_full_attention_interval(INTERVAL)
        writer.add_ssm_conv_kernel(delta.conv_width)
        writer.add_ssm_state_size(delta.key_dim)
        writer.add_ssm_group_count(delta.key_heads)
        writer.add_ssm_time_step_rank(delta.value_heads)
        writer.add_ssm_inner_size(delta.value_heads * delta.value_dim)
