"""Qwen3.5, text: gated-delta layers with, as a rule, every fourth one full attention behind an output gate.

Norms multiply by 1 + w, but for the norm inside gated-delta layers; heads rotate in part. Images and the heads that
predict further tokens are other parts of these models: their tensors are left out, and reported.
"""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ATTENTION, GATED_DELTA, DeltaConfig, ModelConfig
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields
from edge_transformer.models.names import GGUF_NAMES, HF_NAMES, with_prefix

_INTERVAL = 4
_ROTATED = 0.25
_LEFT_OUT = (r"mtp\..*", r"model\.visual\..*")


def _read_hf(fields: FieldReader) -> ModelConfig:
    fields.only("mamba_ssm_dtype", "float32", reason="recurrent state is float32")
    fields.only("mlp_only_layers", None, [], reason="mixture-of-experts models are not supported")
    fields.ignore_prefixes("mtp_")
    return read_hf_hybrid(fields, "qwen3_5", num_kv_heads=4)


def read_hf_hybrid(fields: FieldReader, family: str, num_kv_heads: int) -> ModelConfig:
    """What Qwen3-Next and Qwen3.5 have in common in config.json. `num_kv_heads`: of a file that does not say."""
    base = hf_config.read_base(fields, family, context_length=32768, num_kv_heads=num_kv_heads, head_dim=256)
    if base.activation != "silu":
        fields.refuse("hidden_act", "only 'silu' is supported in this family")
    fields.only("attn_output_gate", True, reason="attention without an output gate is not known in this family")
    fields.only("output_gate_type", None, "silu", "swish", reason="gated-delta layers are gated by SiLU in this family")
    fields.ignore(["unsloth_fixed_mtp"])
    interval = fields.integer("full_attention_interval", _INTERVAL)
    types = hf_config.read_layer_types(
        fields,
        base.num_layers,
        [hf_config.LINEAR if (layer + 1) % interval else hf_config.FULL for layer in range(base.num_layers)],
        (hf_config.FULL, hf_config.LINEAR),
    )
    delta = DeltaConfig(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        tiled_values=False,
    )
    if delta.value_heads % delta.key_heads:
        fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {delta.key_heads} is expected")
    bias = fields.boolean("attention_bias", False)
    rope = hf_config.read_partial_rope(fields, base.head_dim, base.context_length, _ROTATED)
    config = replace(base, ropes=(rope,), qkv_bias=bias, o_bias=bias, norm_plus_one=True)
    return _hybrid(config, [kind == hf_config.LINEAR for kind in types], delta)


def _read_hf_with_vision(fields: FieldReader) -> ModelConfig:
    """The text part of a model that sees images."""
    fields.ignore(hf_config.IGNORED)
    fields.ignore(["vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"])
    text = fields.section("text_config")
    if text is None:
        fields.refuse("text_config", "it is needed")
    text.only("model_type", "qwen3_5_text")
    outer = fields.boolean("tie_word_embeddings", False) if "tie_word_embeddings" in fields else None
    config = _read_hf(text)
    if outer is not None and "tie_word_embeddings" in text and outer != config.tied_embeddings:
        fields.refuse("tie_word_embeddings", "it disagrees with text_config.tie_word_embeddings")
    return config if outer is None else replace(config, tied_embeddings=outer)


def _read_gguf(fields: GgufFields) -> ModelConfig:
    """Norms hold 1 + w there, and ssm_a -exp(A_log). Value heads are tiled. Blocks after the model's layers predict
    further tokens.
    """
    model = fields.model
    model.ignore(["rope.dimension_sections"])  # for images: the positions of text are the same in all sections
    base = gguf_config.read_base(fields, "qwen3_5", partial_rope=True)
    extra = model.integer("nextn_predict_layers", 0, minimum=0, maximum=base.num_layers - 1)
    layers = base.num_layers - extra
    if extra:  # one pattern, however many blocks: each tensor's name is compared with each pattern
        fields.left_out.append(rf"blk\.(?:{'|'.join(map(str, range(layers, base.num_layers)))})\..*")
    interval = model.integer("full_attention_interval", _INTERVAL)
    recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    if "attention.recurrent_layers" in model:
        recurrent = model.flags("attention.recurrent_layers", base.num_layers)[:layers]
    heads, inner = model.integer("ssm.time_step_rank"), model.integer("ssm.inner_size")
    if inner % heads:
        model.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads} is expected")
    delta = DeltaConfig(
        key_heads=model.integer("ssm.group_count"),
        value_heads=heads,
        key_dim=model.integer("ssm.state_size"),
        value_dim=inner // heads,
        conv_width=model.integer("ssm.conv_kernel", minimum=2),
        tiled_values=True,
    )
    if heads % delta.key_heads:
        model.refuse("ssm.time_step_rank", f"a multiple of ssm.group_count = {delta.key_heads} is expected")
    config = replace(base, num_layers=layers, layer_windows=(None,) * layers, layer_ropes=(0,) * layers)
    return _hybrid(config, recurrent, delta)


def _hybrid(base: ModelConfig, recurrent: list[bool], delta: DeltaConfig) -> ModelConfig:
    if all(recurrent):
        # No tensor has these sizes, so whatever the file says is unchecked: nothing may take memory by them.
        base = replace(base, num_heads=1, num_kv_heads=1, head_dim=2, attention_scale=2**-0.5, ropes=())
    return replace(
        base,
        layer_kinds=tuple(GATED_DELTA if flag else ATTENTION for flag in recurrent),
        layer_ropes=tuple(None if flag else 0 for flag in recurrent),
        delta=delta if any(recurrent) else None,
        qk_norm=True,
        output_gate=True,
    )


HF = HfFamily("qwen3_5_text", "Qwen3_5ForCausalLM", _read_hf, left_out=_LEFT_OUT)
HF_WITH_VISION = HfFamily(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    _read_hf_with_vision,
    names=with_prefix(HF_NAMES, "model.", "model.language_model."),
    left_out=_LEFT_OUT,
)
GGUF = GgufFamily(
    "qwen35",
    permuted_rope=False,
    read=_read_gguf,
    names=replace(GGUF_NAMES, names=GGUF_NAMES.names | {"mlp_norm": "blk.{i}.post_attention_norm.weight"}),
)
