"""Qwen3-Next without experts: the mathematics of Qwen3.5, with the projections of gated-delta layers in fused
tensors.
"""

from __future__ import annotations

from dataclasses import replace

from edge_transformer.models.config import ModelConfig
from edge_transformer.models.family import HfFamily
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.names import HF_NAMES
from edge_transformer.models.qwen3_5 import read_hf_hybrid

_DEFAULT_EXPERTS = 512
_FUSED_QKVZ = "model.layers.{i}.linear_attn.in_proj_qkvz.weight"
_FUSED_BA = "model.layers.{i}.linear_attn.in_proj_ba.weight"


def _read_hf(fields: FieldReader) -> ModelConfig:
    """What is said of experts is read, so that it has been understood, and has no effect where there are none."""
    config = read_hf_hybrid(fields, "qwen3_next", num_kv_heads=2)
    experts = fields.integer("num_experts", _DEFAULT_EXPERTS, minimum=0)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.token_ids("mlp_only_layers")
    sparse = [layer for layer in range(config.num_layers) if layer not in dense and (layer + 1) % step == 0]
    if experts and sparse:
        fields.refuse("num_experts", "mixture-of-experts models are not supported")
    for name, default in (("moe_intermediate_size", 512), ("shared_expert_intermediate_size", 512)):
        fields.integer(name, default, minimum=0)
    fields.integer("num_experts_per_tok", 10, minimum=0)
    fields.boolean("norm_topk_prob", True)
    fields.boolean("output_router_logits", False)
    fields.ignore(["router_aux_loss_coef"])
    return config


HF = HfFamily(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read_hf,
    names=replace(
        HF_NAMES,
        names=HF_NAMES.names | {"qkv": _FUSED_QKVZ, "z": _FUSED_QKVZ, "a": _FUSED_BA, "b": _FUSED_BA},
        fused_delta=True,
    ),
    left_out=(r"mtp\..*",),
)
