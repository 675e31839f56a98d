"""Make hybrid24m_q8_0_{hf_fp32,nll_long}.json: what transformers in fp32 says with the weights of the GGUF file.

The file's Q8_0 weights are not those of the checkpoint it was made from (bf16), so they have reference data of their
own. Run in the folder tests, with the golden group installed: `python golden/make_hybrid24m_q8_0.py`. Prompts are those
of hybrid24m_{hf_fp32,nll_long}.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from paths import hybrid_gguf_path, hybrid_path

HERE = Path(__file__).parent
GREEDY_TOKENS = 64
Array = npt.NDArray[np.float32]

OWN = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def grouped(values: Array, config: dict[str, Any], axis: int) -> Array:
    """Value heads along `axis` (whole heads or single numbers) from tiled to grouped order."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = heads // keys
    order = [head % each * keys + head // each for head in range(heads)]
    split = values.reshape(*values.shape[:axis], heads, -1, *values.shape[axis + 1 :])
    return split.take(order, axis=axis).reshape(values.shape)


def weights(config: dict[str, Any]) -> dict[str, Array]:
    """The tensors of the file by their names in a checkpoint, dequantized; without those of the MTP block."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    result: dict[str, Array] = {}
    for tensor in gguf.GGUFReader(hybrid_gguf_path()).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, layer = tensor.name, ""
        if name.startswith("blk."):
            _, number, name = name.split(".", 2)
            if int(number) >= config["num_hidden_layers"]:
                continue
            layer = f"model.layers.{number}."
        if name == "ssm_a":
            result[f"{layer}linear_attn.A_log"] = grouped(np.log(-values.reshape(-1)), config, 0)
            continue
        if name == "ssm_dt.bias":
            result[f"{layer}linear_attn.dt_bias"] = grouped(values.reshape(-1), config, 0)
            continue
        part = name.removesuffix(".weight")
        if part in ("attn_gate", "ssm_alpha", "ssm_beta"):
            values = grouped(values, config, 0)
        elif part == "ssm_out":
            values = grouped(values, config, 1)
        elif part in ("attn_qkv", "ssm_conv1d"):
            values = np.concatenate([values[:keys], grouped(values[keys:], config, 0)])
        if part == "ssm_conv1d":
            values = values[:, None, :]
        if part.endswith("norm") and part != "ssm_norm":
            values = values - np.float32(1)
        result[f"{layer}{OWN[part]}.weight"] = values
    return result


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hybrid_path()), dtype=torch.float32).eval()
    tensors = weights(json.loads((hybrid_path() / "config.json").read_text()))
    model.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in tensors.items()}, strict=True)

    def log_probabilities(ids: list[int]) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        return np.asarray(torch.log_softmax(logits, -1).numpy())

    source = json.loads((HERE / "hybrid24m_hf_fp32.json").read_text(encoding="utf-8"))
    cases = []
    for case in source["cases"]:
        ids, margins = list(case["prompt_ids"]), []
        with torch.no_grad():
            out = model(torch.tensor([ids]), use_cache=True)
            top = torch.log_softmax(out.logits[0, -1].double(), -1).topk(10)
            greedy: list[int] = []
            while len(greedy) < GREEDY_TOKENS:
                best = out.logits[0, -1].double().topk(2)
                greedy.append(int(best.indices[0]))
                margins.append(round(float(best.values[0] - best.values[1]), 6))
                out = model(torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        likeliest = [[int(t), round(float(p), 6)] for p, t in zip(top.values, top.indices, strict=True)]
        cases.append(
            {
                "name": case["name"],
                "prompt": case["prompt"],
                "prompt_ids": ids,
                "greedy_ids": greedy,
                "margins": margins,
                "top10_logprobs_last_prompt_pos": likeliest,
            }
        )
    ids = json.loads((HERE / "hybrid24m_nll_long.json").read_text(encoding="utf-8"))["ids"]
    logprobs = log_probabilities(ids)
    nll = [round(float(-logprobs[at, token]), 6) for at, token in enumerate(ids[1:])]
    reference = "transformers fp32 on the dequantized Q8_0 weights, greedy with a cache"
    (HERE / "hybrid24m_q8_0_hf_fp32.json").write_text(json.dumps({"reference": reference, "cases": cases}) + "\n")
    (HERE / "hybrid24m_q8_0_nll_long.json").write_text(
        json.dumps({"reference": reference, "ids": ids, "nll": nll}) + "\n"
    )


if __name__ == "__main__":
    main()
