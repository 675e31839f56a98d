"""The gate on GGUF metadata: every key is implemented, descriptive, or refused with its name and value."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_transformer.errors import UnsupportedModelError
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.models.config import ModelSpec, Rope, Transform
from edge_transformer.models.read import read_model
from edge_transformer.models.rope import inverse_frequencies, yarn_attention_factor
from tiny.memory import MemoryCheckpoint, tensor_info
from tiny.models import MISSING, MODELS, with_fields
from tiny.weights import make_weights
from tiny.write import write_gguf

BASE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3"}
BASE |= {"qwen35": "qwen3_5"}
ALL = list(BASE)
WHOLE_HEADS = [name for name in ALL if name != "qwen35"]  # families that rotate all of a head


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("gguf")
    names = [*BASE.values(), "llama_llama3"]
    return {
        name: open_checkpoint(write_gguf(folder / f"{name}.gguf", MODELS[name], make_weights(MODELS[name])))
        for name in names
    }


def changed(checkpoint: Checkpoint, changes: Mapping[str, object], tensors: Mapping[str, Any] | None = None) -> Any:
    """The checkpoint with metadata replaced ("{arch}" stands for the architecture) and tensors added."""
    architecture = str(checkpoint.metadata["general.architecture"])
    named = {name.replace("{arch}", architecture): value for name, value in changes.items()}
    metadata = with_fields(checkpoint.metadata, named)
    return MemoryCheckpoint("gguf", {**checkpoint.tensors, **(tensors or {})}, metadata)


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_model(checkpoint)
    return str(caught.value)


YARN = {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0}
YARN |= {"{arch}.rope.scaling.original_context_length": 64}

REFUSED: list[tuple[list[str], dict[str, object], str, str]] = [
    (ALL, {"general.architecture": "mamba"}, "general.architecture", "mamba"),
    (ALL, {"general.architecture": MISSING}, "general.architecture", "missing"),
    (ALL, {"general.type": "adapter"}, "general.type", "adapter"),
    (ALL, {"{arch}.unknown": 1}, "unknown", "1"),
    (ALL, {"clip.vision.block_count": 1}, "clip.vision.block_count", "1"),
    (ALL, {"adapter.type": "lora"}, "adapter.type", "lora"),
    (ALL, {"{arch}.expert_count": 8}, "expert_count", "8"),
    (ALL, {"{arch}.expert_used_count": 2}, "expert_used_count", "2"),
    (ALL, {"{arch}.attention.causal": False}, "attention.causal", "False"),
    (ALL, {"{arch}.pooling_type": 1}, "pooling_type", "1"),
    (ALL, {"{arch}.block_count": MISSING}, "block_count", "missing"),
    (ALL, {"{arch}.embedding_length": 0}, "embedding_length", "0"),
    (ALL, {"{arch}.context_length": MISSING}, "context_length", "missing"),
    (ALL, {"{arch}.attention.layer_norm_rms_epsilon": MISSING}, "attention.layer_norm_rms_epsilon", "missing"),
    (ALL, {"{arch}.attention.layer_norm_epsilon": 1e-5}, "attention.layer_norm_epsilon", "1e-05"),
    (ALL, {"{arch}.attention.head_count_kv": 3}, "attention.head_count_kv", "3"),
    (ALL, {"{arch}.attention.head_count_kv": [1, 2, 4]}, "attention.head_count_kv", "[1, 2, 4]"),
    (ALL, {"{arch}.feed_forward_length": np.array([112, 96])}, "feed_forward_length", "112"),
    (ALL, {"{arch}.attention.key_length": 15}, "attention.key_length", "15"),
    (ALL, {"{arch}.attention.value_length": 8}, "attention.value_length", "8"),
    (ALL, {"{arch}.vocab_size": 130}, "vocab_size", "130"),
    (WHOLE_HEADS, {"{arch}.rope.dimension_count": 8}, "rope.dimension_count", "8"),
    (WHOLE_HEADS, {"{arch}.rope.dimension_sections": [1, 1]}, "rope.dimension_sections", "[1, 1]"),
    (["qwen35"], {"{arch}.rope.dimension_count": 7}, "rope.dimension_count", "7"),
    (["qwen35"], {"{arch}.rope.dimension_count": 34}, "rope.dimension_count", "34"),
    (["qwen35"], {"{arch}.ssm.conv_kernel": 1}, "ssm.conv_kernel", "1"),
    (["qwen35"], {"{arch}.ssm.conv_kernel": MISSING}, "ssm.conv_kernel", "missing"),
    (["qwen35"], {"{arch}.ssm.state_size": 0}, "ssm.state_size", "0"),
    (["qwen35"], {"{arch}.ssm.group_count": 3}, "ssm.time_step_rank", "4"),
    (["qwen35"], {"{arch}.ssm.time_step_rank": 5}, "ssm.inner_size", "64"),
    (["qwen35"], {"{arch}.ssm.inner_size": MISSING}, "ssm.inner_size", "missing"),
    (["qwen35"], {"{arch}.ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms", "True"),
    (["qwen35"], {"{arch}.full_attention_interval": 0}, "full_attention_interval", "0"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": [True]}, "attention.recurrent_layers", "[True]"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": True}, "attention.recurrent_layers", "True"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": ["a", "b", "c", ""]}, "attention.recurrent_layers", "'a'"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": [1, 1, 2, 0]}, "attention.recurrent_layers", "2"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": np.array([1, np.nan, 1, 0])}, "recurrent_layers", "nan"),
    (["qwen35"], {"{arch}.attention.recurrent_layers": [np.array([1, 0])] * 4}, "recurrent_layers", "array"),
    (["qwen35"], {"{arch}.nextn_predict_layers": 4}, "nextn_predict_layers", "4"),
    (["qwen35"], {"{arch}.nextn_predict_layers": -1}, "nextn_predict_layers", "-1"),
    (ALL, {"{arch}.rope.scale_linear": 2.0}, "rope.scale_linear", "2.0"),
    (ALL, {"{arch}.rope.scaling.factor": 2.0}, "rope.scaling.factor", "2.0"),
    (ALL, {"{arch}.rope.scaling.type": "longrope"}, "rope.scaling.type", "longrope"),
    (ALL, {"{arch}.rope.scaling.type": "linear"}, "rope.scaling.factor", "missing"),
    (
        ALL,
        {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 4.0},
        "original_context_length",
        "missing",
    ),
    (ALL, YARN | {"{arch}.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor", "1.2"),
    (ALL, YARN | {"{arch}.rope.scaling.yarn_attn_factor": 1.0}, "rope.scaling.yarn_attn_factor", "1.0"),
    (ALL, YARN | {"{arch}.rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor", "0.5"),
    (ALL, YARN | {"{arch}.rope.scaling.yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier", "0.1"),
    (ALL, {"{arch}.attention.scale": 0.1}, "attention.scale", "0.1"),
    (ALL, {"{arch}.logit_scale": 0.1}, "logit_scale", "0.1"),
    (["llama", "qwen2", "qwen3"], {"{arch}.attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
    (["llama", "qwen2", "qwen3"], {"{arch}.final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
    (["qwen2", "qwen3", "qwen35"], {"{arch}.attention.sliding_window": 16}, "attention.sliding_window", "16"),
    (["gemma2"], {"{arch}.attention.sliding_window": 0}, "attention.sliding_window", "0"),
    (["gemma2", "gemma3"], {"{arch}.attention.sliding_window_pattern": [True]}, "sliding_window_pattern", "[True]"),
    (["gemma2"], {"{arch}.attention.sliding_window_pattern": [[1], [0], [1]]}, "sliding_window_pattern", "[[1]"),
    (["gemma2"], {"{arch}.attention.sliding_window_pattern": [[np.array([1, 0])]] * 3}, "window_pattern", "array"),
    (["gemma3"], {"{arch}.rope.freq_base": MISSING}, "rope.freq_base", "missing"),
    (["gemma3"], {"{arch}.attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
]


@pytest.mark.parametrize(
    ("architecture", "changes", "field", "value"),
    [
        pytest.param(architecture, changes, field, value, id=f"{architecture}-{index}-{field}")
        for index, (architectures, changes, field, value) in enumerate(REFUSED)
        for architecture in architectures
    ],
)
def test_refused_with_field_and_value(
    files: dict[str, Checkpoint], architecture: str, changes: dict[str, object], field: str, value: str
) -> None:
    message = refusal(changed(files[BASE[architecture]], changes))
    assert f"{field}'" in message
    assert value in message


@given(name=st.text(min_size=1, max_size=12), value=st.booleans() | st.integers() | st.text(max_size=5))
def test_no_unknown_key_passes(files: dict[str, Checkpoint], name: str, value: object) -> None:
    for key in (f"x{name}", f"llama.x{name}"):
        assert repr(key) in refusal(changed(files["llama"], {key: value}))


def test_descriptive_keys_change_nothing(files: dict[str, Checkpoint]) -> None:
    keys = ("general.license", "tokenizer.ggml.pre", "split.count", "quantize.imatrix.file", "general.file_type")
    assert read_model(changed(files["llama"], dict.fromkeys(keys, "x"))) == read_model(changed(files["llama"], {}))


ACCEPTED: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("llama", {"{arch}.expert_count": 0, "{arch}.expert_used_count": 0}, {}),
    ("llama", {"{arch}.rope.freq_base": MISSING}, {"ropes": (Rope("default", 10000.0, 16),)}),
    ("llama", {"{arch}.attention.head_count_kv": MISSING}, {"num_kv_heads": 4}),
    ("llama", {"{arch}.attention.head_count_kv": np.array([2, 2, 2])}, {}),
    ("llama", {"{arch}.attention.sliding_window": 16}, {"layer_windows": (16,) * 3}),
    ("llama", {"{arch}.attention.sliding_window": 0}, {}),
    ("llama", {"{arch}.rope.scaling.type": "none", "{arch}.rope.scaling.finetuned": True}, {}),
    ("llama", {"tokenizer.ggml.eot_token_id": 9}, {}),
    (
        "llama",
        YARN | {"{arch}.rope.scaling.yarn_beta_fast": 16.0, "{arch}.rope.scaling.yarn_beta_slow": 2.0},
        {
            "ropes": (
                Rope(
                    "yarn", 500.0, 16, factor=4.0, original_context=64, beta_fast=16.0, beta_slow=2.0,
                    attention_factor=yarn_attention_factor(4.0),
                ),
            )
        },
    ),
    ("gemma2", {"{arch}.attention.sliding_window": MISSING}, {"layer_windows": (4096, None, 4096)}),
    ("gemma2", {"{arch}.attn_logit_softcapping": MISSING}, {"attention_softcap": 50.0}),
    ("gemma2", {"{arch}.final_logit_softcapping": MISSING}, {"final_softcap": 30.0}),
    ("gemma3", {"{arch}.mm.tokens_per_image": 256, "{arch}.vision.block_count": 27}, {}),
    ("gemma3", {"{arch}.attention.sliding_window": MISSING}, {"layer_windows": (None,) * 7, "layer_ropes": (0,) * 7}),
    (
        "gemma3",
        {"{arch}.attention.sliding_window_pattern": 2},
        {"layer_windows": (9, None, 9, None, 9, None, 9), "layer_ropes": (1, 0, 1, 0, 1, 0, 1)},
    ),
    (
        "gemma3",
        {"{arch}.attention.sliding_window_pattern": np.array([1, 1, 0, 1, 1, 1, 0], bool)},
        {"layer_windows": (9, 9, None, 9, 9, 9, None), "layer_ropes": (1, 1, 0, 1, 1, 1, 0)},
    ),
    (
        "gemma3",
        {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 8.0},
        {"ropes": (Rope("linear", 30000.0, 24, factor=8.0), Rope("default", 10000.0, 24))},
    ),
    ("qwen35", {"{arch}.full_attention_interval": 4, "{arch}.nextn_predict_layers": 0}, {}),
    ("qwen35", {"{arch}.attention.recurrent_layers": np.array([1, 1, 1, 0], bool)}, {}),
    ("qwen35", {"{arch}.rope.dimension_sections": MISSING}, {}),
    ("qwen35", {"{arch}.rope.dimension_count": 16}, {"ropes": (Rope("default", 500.0, 16),)}),
    (
        "gemma3",
        {"{arch}.rope.freq_base_swa": 500.0},
        {"ropes": (Rope("default", 30000.0, 24), Rope("default", 500.0, 24))},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes", "expected"), ACCEPTED)
def test_accepted_means(
    files: dict[str, Checkpoint], architecture: str, changes: dict[str, object], expected: dict[str, Any]
) -> None:
    file = files[BASE[architecture]]
    if "num_kv_heads" in expected:  # the tensors would not fit: only the reading of the key is looked at
        assert "attn_k.weight" in refusal(changed(file, changes))
        return
    assert read_model(changed(file, changes)).config == replace(read_model(file).config, **expected)


@pytest.mark.parametrize(("layers", "scaled"), [(45, False), (46, True)])
def test_query_scale_of_gemma2_27b_follows_its_number_of_layers(
    files: dict[str, Checkpoint], layers: int, scaled: bool
) -> None:
    """llama.cpp tells the 27B by its 46 layers: hidden_size / heads in place of head_dim."""
    file = files["gemma2"]
    tensors = {
        name.replace("blk.0.", f"blk.{layer}."): replace(info, name=name.replace("blk.0.", f"blk.{layer}."))
        for layer in range(layers)
        for name, info in file.tensors.items()
        if name.startswith("blk.0.")
    }
    spec = read_model(changed(file, {"{arch}.block_count": layers}, tensors))
    assert spec.config.attention_scale == pytest.approx((64 / 4 if scaled else 24) ** -0.5)


def test_q_and_k_of_llama_files_are_permuted_and_only_they(files: dict[str, Checkpoint]) -> None:
    assert _permuted(read_model(files["llama"])) == {("q", 4), ("k", 2)}
    assert _permuted(read_model(files["qwen2"])) == set()


def _permuted(spec: ModelSpec) -> set[tuple[str, int]]:
    specs = [tensor for layer in spec.layers for segment in layer.segments for tensor in segment.matrices]
    specs += [tensor for layer in spec.layers for tensor in layer.vectors]
    return {(tensor.role, tensor.heads) for tensor in specs if tensor.transform is Transform.UNPERMUTE_ROPE}


def test_rope_freqs_become_divisors(files: dict[str, Checkpoint]) -> None:
    """The divisors in the file give the frequencies that the llama3 fields give."""
    rope = read_model(files["llama_llama3"]).config.ropes[0]
    assert rope.type == "divisors"
    fields = Rope("llama3", 500.0, 16, factor=8.0, original_context=32, low_freq_factor=1.0, high_freq_factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(rope), inverse_frequencies(fields), rtol=3e-7)


@pytest.mark.parametrize(
    "info",
    [
        tensor_info("rope_freqs.weight", np.ones(7, np.float32)),
        tensor_info("rope_freqs.weight", np.ones(8, np.uint16), WeightFormat.F16),
        tensor_info("rope_freqs.weight", np.zeros(8, np.float32)),
        tensor_info("rope_freqs.weight", np.full(8, np.nan, np.float32)),
    ],
)
def test_odd_rope_freqs_are_refused(files: dict[str, Checkpoint], info: Any) -> None:
    assert "'rope_freqs.weight'" in refusal(changed(files["llama"], {}, {info.name: info}))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gemma3", "qwen35"])
def test_rope_freqs_of_another_family_are_refused(files: dict[str, Checkpoint], architecture: str) -> None:
    file = files[BASE[architecture]]
    size = read_model(file).config.head_dim // 2
    info = tensor_info("rope_freqs.weight", np.ones(size, np.float32))
    assert "'rope_freqs.weight'" in refusal(changed(file, {}, {info.name: info}))


def test_rope_freqs_beside_a_scaling_are_refused(files: dict[str, Checkpoint]) -> None:
    scaling = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0}
    assert "rope.scaling.type" in refusal(changed(files["llama_llama3"], scaling))


@pytest.mark.parametrize(
    "name", ["rope_factors_long.weight", "blk.0.attn_q.bias", "blk.1.ffn_gate_inp.weight", "blk.3.attn_q.weight"]
)
def test_leftover_tensor_is_named(files: dict[str, Checkpoint], name: str) -> None:
    info = tensor_info(name, np.zeros(64, np.float32))
    assert name.removesuffix("q.bias") in refusal(changed(files["llama"], {}, {name: info}))


def test_layers_that_predict_further_tokens_are_left_out(files: dict[str, Checkpoint]) -> None:
    """They are blocks after the model's own, and counted among them."""
    file = files["qwen3_5"]
    names = ("blk.4.nextn.eh_proj.weight", "blk.4.attn_q.weight", "blk.4.attn_norm.weight")
    tensors = {name: tensor_info(name, np.zeros((3, 3), np.float32)) for name in names}
    counts = {"{arch}.block_count": 5, "{arch}.nextn_predict_layers": 1}
    spec = read_model(changed(file, counts | {"{arch}.attention.recurrent_layers": [1, 1, 1, 0, 0]}, tensors))
    assert spec.ignored_tensors == names
    assert spec.config == read_model(file).config
    assert "'blk.4.nextn.eh_proj.weight'" in refusal(changed(file, {}, tensors))
    assert "'blk.40.attn_q.weight'" in refusal(
        changed(file, counts, tensors | {"blk.40.attn_q.weight": tensor_info("blk.40.attn_q.weight", np.zeros(3))})
    )


def test_many_layers_that_predict_further_tokens_take_no_time(files: dict[str, Checkpoint]) -> None:
    """A pattern for each of them, against each tensor, took a minute and a half."""
    file = files["qwen3_5"]
    info = tensor_info("any", np.zeros(1, np.float32))
    tensors = {f"blk.{4000 + number % 90}.x{number}": info for number in range(40_000)}
    counts = {"{arch}.block_count": 4096, "{arch}.nextn_predict_layers": 4092}
    start = time.process_time()
    assert len(read_model(changed(file, counts, tensors)).ignored_tensors) == len(tensors)
    assert time.process_time() - start < 5


def test_layers_may_be_in_any_order(files: dict[str, Checkpoint]) -> None:
    """What recurrent_layers says counts, whatever the interval."""
    file = files["qwen3_5"]
    order = {"{arch}.attention.recurrent_layers": [True, False, True, True], "{arch}.full_attention_interval": 4}
    assert "'blk.1.attn_q_norm.weight' is missing" in refusal(changed(file, order))


def test_value_heads_of_qwen35_files_are_tiled(files: dict[str, Checkpoint]) -> None:
    config = read_model(files["qwen3_5"]).config
    assert config.delta is not None
    assert config.delta.tiled_values
    assert not config.norm_plus_one


def test_qwen2_without_biases_is_refused(files: dict[str, Checkpoint]) -> None:
    file = files["qwen2"]
    tensors = {name: info for name, info in file.tensors.items() if not name.endswith(".bias")}
    assert "'blk.0.attn_q.bias' is missing" in refusal(MemoryCheckpoint("gguf", tensors, file.metadata))


def test_missing_tensor_is_named(files: dict[str, Checkpoint]) -> None:
    file = files["gemma3"]
    tensors = {name: info for name, info in file.tensors.items() if name != "blk.4.attn_k_norm.weight"}
    assert "'blk.4.attn_k_norm.weight' is missing" in refusal(MemoryCheckpoint("gguf", tensors, file.metadata))


def test_quantized_vector_is_refused(files: dict[str, Checkpoint]) -> None:
    info = replace(files["llama"].tensors["output_norm.weight"], format=WeightFormat.Q8_0)
    assert "'output_norm.weight' is Q8_0" in refusal(changed(files["llama"], {}, {"output_norm.weight": info}))


@pytest.mark.real_model
def test_real_models_pass(tmp_path: Path) -> None:
    from paths import gemma3_path, smollm2_path

    llama = read_model(open_checkpoint(smollm2_path())).config
    assert (llama.num_layers, llama.hidden_size, llama.num_heads, llama.num_kv_heads) == (30, 576, 9, 3)
    assert llama.tied_embeddings
    assert llama.ropes[0].theta == 100000.0
    gemma = read_model(open_checkpoint(gemma3_path())).config
    assert [layer for layer, window in enumerate(gemma.layer_windows) if window is None] == [5, 11, 17]
    assert [rope.theta for rope in gemma.ropes] == [1e6, 1e4]


def test_more_tokens_than_rows_of_the_embedding_are_refused(files: dict[str, Checkpoint]) -> None:
    rows = files["llama"].tensors["token_embd.weight"].shape[0]
    names = [f"<{index}>" for index in range(rows + 1)]
    read_model(changed(files["llama"], {"tokenizer.ggml.tokens": names[:rows]}))
    text = refusal(changed(files["llama"], {"tokenizer.ggml.tokens": names}))
    assert f"{rows + 1} tokens" in text
    assert f"{rows} rows" in text
