"""What the families share when they are read from a Hugging Face config.json.

Defaults are those of transformers' configuration classes, which apply when a field is absent from the file.
"""

from __future__ import annotations

from edge_transformer.models.config import ATTENTION, ModelConfig, Rope
from edge_transformer.models.gate import MAX_LAYERS, FieldReader, agree
from edge_transformer.models.rope import yarn_attention_factor

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Fields that do not touch the text forward pass: training, bookkeeping, how transformers is to run or to generate.
IGNORED = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "early_stopping",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_p",
    "model_type",
    "name_or_path",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
)


def read_base(
    fields: FieldReader,
    family: str,
    *,
    context_length: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
) -> ModelConfig:
    """The fields every family has, as a ModelConfig of full attention without rope; the caller replaces what differs.

    The keywords are the family's class defaults (None: num_kv_heads as many as heads, head_dim hidden / heads).
    """
    fields.ignore(IGNORED)
    _refuse_variants(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kv_heads = fields.optional_integer("num_key_value_heads", num_kv_heads) or num_heads
    if num_heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads = {num_heads}")
    dim = fields.optional_integer("head_dim", head_dim)
    if dim is None:
        if hidden_size % num_heads:
            fields.refuse("hidden_size", f"without head_dim it must be a multiple of num_attention_heads = {num_heads}")
        dim = hidden_size // num_heads
    if dim % 2:
        fields.refuse("head_dim", f"heads of {dim} dimensions cannot be rotated in pairs")
    act = fields.string(activation_field, activation)
    if act not in ACTIVATIONS:
        fields.refuse(activation_field, f"only {' and '.join(ACTIVATIONS)} are supported")
    # The text package uses these; here they are checked only, so that all of the file has been understood.
    fields.optional_integer("bos_token_id", minimum=0)
    fields.token_ids("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[act],
        attention_scale=dim**-0.5,
        context_length=fields.integer("max_position_embeddings", context_length),
        ropes=(),
        layer_windows=(None,) * num_layers,
        layer_ropes=(None,) * num_layers,
        layer_kinds=(ATTENTION,) * num_layers,
        tied_embeddings=fields.boolean("tie_word_embeddings", tied),
    )


def read_layer_types(
    fields: FieldReader, num_layers: int, default: list[str], allowed: tuple[str, str] = (FULL, SLIDING)
) -> list[str]:
    """One of `allowed` for each layer."""
    types = fields.optional_strings("layer_types")
    if types is None:
        return default
    if len(types) != num_layers:
        fields.refuse("layer_types", f"one entry for each of the {num_layers} layers is expected")
    if not set(types) <= set(allowed):
        fields.refuse("layer_types", f"only {allowed[0]!r} and {allowed[1]!r} are supported")
    return types


def read_rope(fields: FieldReader, head_dim: int, context_length: int) -> Rope:
    """The one rope of a model, from `rope_parameters` or from `rope_theta` and `rope_scaling`; both must agree."""
    theta = fields.rope_base("rope_theta")
    _refuse_partial(fields)
    sections = [fields.section("rope_parameters"), fields.section("rope_scaling")]
    ropes = [_rope(section, theta, 10000.0, head_dim, context_length) for section in sections if section is not None]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        fields.refuse("rope_scaling", "it disagrees with rope_parameters")
    return ropes[0] if ropes else Rope("default", theta or 10000.0, head_dim)


def read_partial_rope(fields: FieldReader, head_dim: int, context_length: int, default: float) -> Rope:
    """As read_rope, where the first `partial_rotary_factor` of a head is rotated. `default`: the factor of a file that
    says nothing. The sections of multimodal ropes are for images: the positions of text are the same in all of them.
    """
    theta = fields.rope_base("rope_theta")
    factor = fields.optional_number("partial_rotary_factor")
    sections = [fields.section("rope_parameters"), fields.section("rope_scaling")]
    ropes = [
        _partial_rope(section, theta, factor, default, head_dim, context_length)
        for section in sections
        if section is not None
    ]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        fields.refuse("rope_scaling", "it disagrees with rope_parameters")
    if ropes:
        return ropes[0]
    return Rope("default", theta or 10000.0, _rotary_dim(fields, factor or default, head_dim))


def _partial_rope(
    section: FieldReader, theta: float | None, factor: float | None, default: float, head_dim: int, context_length: int
) -> Rope:
    section.ignore(["mrope_section", "mrope_interleaved"])
    own = section.optional_number("partial_rotary_factor")
    chosen = agree(section, "partial_rotary_factor", own, "the factor outside this section", factor) or default
    rotary_dim = _rotary_dim(section, chosen, head_dim)
    return _rope(section, theta, 10000.0, rotary_dim, context_length, partial=True)


def _rotary_dim(fields: FieldReader, factor: float, head_dim: int) -> int:
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        fields.refuse(
            "partial_rotary_factor", f"of a head of {head_dim} dimensions it would rotate {rotary_dim}, not whole pairs"
        )
    return rotary_dim


def read_two_ropes(fields: FieldReader, head_dim: int, context_length: int) -> tuple[Rope, Rope]:
    """Gemma 3's ropes of full and of sliding layers. Older files scale only the full ones, through `rope_scaling`."""
    full_theta = fields.rope_base("rope_theta")
    sliding_theta = fields.rope_base("rope_local_base_freq")
    _refuse_partial(fields)
    both = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    full_section = None if both is None else both.section(FULL)
    sliding_section = None if both is None else both.section(SLIDING)
    full = _rope(full_section, full_theta, 1e6, head_dim, context_length)
    sliding = _rope(sliding_section, sliding_theta, 1e4, head_dim, context_length)
    if scaling is not None:
        if "type" in scaling and "rope_type" not in scaling:
            scaling.refuse("type", "transformers reads only the spelling rope_type in this family")
        scaled = _rope(scaling, full_theta, 1e6, head_dim, context_length)
        if full_section is not None and scaled != full:
            fields.refuse("rope_scaling", "it disagrees with rope_parameters.full_attention")
        full = scaled
    for section in (full_section, sliding_section, scaling):
        if section is not None:
            section.only("truncate", True, reason="transformers does not read it in this family")
    return full, sliding


def _rope(
    section: FieldReader | None,
    outer_theta: float | None,
    default_theta: float,
    rotary_dim: int,
    context_length: int,
    partial: bool = False,
) -> Rope:
    """One rope from its section; `outer_theta` is the base given outside the section. `partial`: the section's
    partial_rotary_factor has been read.
    """
    if section is None:
        return Rope("default", outer_theta or default_theta, rotary_dim)
    theta = section.rope_base("rope_theta")
    theta = agree(section, "rope_theta", theta, "the base outside this section", outer_theta) or default_theta
    if not partial:
        _refuse_partial(section)
    kind = section.optional_string("rope_type")
    old_kind = section.optional_string("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        section.refuse("rope_type", f"it disagrees with 'type', which says {old_kind!r}")
    chosen = kind or old_kind or "default"
    if chosen not in ("default", "linear", "llama3", "yarn"):
        section.refuse("rope_type" if kind else "type", "only default, linear, llama3 and yarn are supported")
    if chosen == "llama3":
        return _llama3(section, theta, rotary_dim, context_length)
    if chosen == "yarn":
        return _yarn(section, theta, rotary_dim, context_length)
    if chosen == "linear":
        return Rope("linear", theta, rotary_dim, factor=section.number("factor"))
    return Rope("default", theta, rotary_dim)


def _llama3(section: FieldReader, theta: float, rotary_dim: int, context_length: int) -> Rope:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.refuse("high_freq_factor", f"it must be above low_freq_factor = {low}")
    return Rope(
        "llama3",
        theta,
        rotary_dim,
        factor=section.number("factor"),
        original_context=section.integer("original_max_position_embeddings", context_length),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(section: FieldReader, theta: float, rotary_dim: int, context_length: int) -> Rope:
    original = section.integer("original_max_position_embeddings", context_length)
    factor = section.optional_number("factor") or context_length / original
    mscale, mscale_all_dim = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return Rope(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_context=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=section.boolean("truncate", True),
    )


def _refuse_partial(fields: FieldReader) -> None:
    fields.only(
        "partial_rotary_factor", None, 1.0, 1,
        reason="transformers ignores a partial rotation in this family where other runtimes apply it",
    )  # fmt: skip


def _refuse_variants(fields: FieldReader) -> None:
    """Fields whose harmless value is common in files and whose other values change the model."""
    fields.only("is_encoder_decoder", False)
    fields.only("is_decoder", False, True)
    fields.only("add_cross_attention", False)
    fields.only("cross_attention_hidden_size", None)
    fields.only("tie_encoder_decoder", False)
    fields.only("pruned_heads", None, {})
    fields.only("per_layer_config", None)
    fields.only("use_bidirectional_attention", None, False)
    fields.only("use_mrope", False)
    fields.only("rope_interleaved", False)
    fields.only("is_llama_config", True)
