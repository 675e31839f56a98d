"""Gemma 3, text: Gemma 2 without the cap on scores, norms on q and k, five sliding layers to one, two rope bases."""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models import gguf_config, hf_config
from edge_transformer.models.config import ModelConfig, Rope
from edge_transformer.models.family import GgufFamily, HfFamily
from edge_transformer.models.gate import FieldReader, agree
from edge_transformer.models.gemma2 import read_gguf_common, read_hf_common
from edge_transformer.models.gguf_config import GgufFields

_PERIOD = 6
_LOCAL_THETA = 10000.0
_LAYERS_OF_27B = 62


def _read_hf(fields: FieldReader) -> ModelConfig:
    saved = fields.optional_integer("_sliding_window_pattern")
    period = agree(
        fields, "sliding_window_pattern", fields.optional_integer("sliding_window_pattern"),
        "_sliding_window_pattern", saved,
    )  # fmt: skip
    base = read_hf_common(fields, "gemma3", context_length=131072, period=int(period or _PERIOD))
    fields.only("attn_logit_softcapping", None, reason="transformers does not apply it in this family")
    full, sliding = hf_config.read_two_ropes(fields, base.head_dim, base.context_length)
    return replace(
        base,
        ropes=(full, sliding),
        layer_ropes=tuple(0 if window is None else 1 for window in base.layer_windows),
        final_softcap=fields.optional_number("final_logit_softcapping"),
        qk_norm=True,
    )


def _read_gguf(fields: GgufFields) -> ModelConfig:
    """The local rope base and the pattern of layers are not in older files; the scaling of rope is for full layers."""
    model = fields.model
    if "rope.freq_base" not in model:
        model.refuse("rope.freq_base", "it is needed")
    model.ignore_prefixes("mm.", "vision.")  # how images would be fed in; the text alone does not use it
    base = read_gguf_common(fields, "gemma3", layers_of_27b=_LAYERS_OF_27B)
    window = model.optional_integer("attention.sliding_window")
    sliding = gguf_config.read_sliding_layers(fields, base.num_layers, _PERIOD)
    local = Rope("default", model.rope_base("rope.freq_base_swa") or _LOCAL_THETA, base.head_dim)
    windows = tuple(window if flag else None for flag in sliding)
    return replace(
        base,
        ropes=(*base.ropes, local),
        layer_windows=windows,
        layer_ropes=tuple(0 if size is None else 1 for size in windows),
        final_softcap=model.optional_number("final_logit_softcapping"),
        qk_norm=True,
    )


HF = HfFamily("gemma3_text", "Gemma3ForCausalLM", _read_hf)
GGUF = GgufFamily("gemma3", permuted_rope=False, read=_read_gguf)
