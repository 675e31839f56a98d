"""Tiny models of every family and field against the logits of transformers in float32.

Bounds on |difference of a logit| / max(1, max |logit|): oracle 2e-6, CPU 1e-5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_transformer._native import available_instruction_sets
from edge_transformer.engine.core import Engine
from edge_transformer.models.config import ModelConfig, Rope
from tiny.models import MODELS
from tiny.run import SCHEDULES, open_engine, run
from tiny.weights import beyond_half_precision, digest, make_weights, prompts
from tiny.write import write_gguf, write_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
BOUNDS = {"reference": 2e-6, "cpu": 1e-5}
BACKENDS = list(BOUNDS)
GGUF_MODELS = [name for name, model in MODELS.items() if model.gguf]


@dataclass
class Golden:
    prompts: list[list[int]]
    positions: list[list[int]]
    logits: list[npt.NDArray[np.float64]]

    def error(self, logits: list[npt.NDArray[np.float32]]) -> float:
        """Largest |difference| / max(1, max |logit|) over the kept positions."""
        errors = [
            float(np.abs(ours[rows] - theirs).max() / max(1.0, np.abs(theirs).max()))
            for ours, rows, theirs in zip(logits, self.positions, self.logits, strict=True)
        ]
        return max(errors)


def golden(name: str) -> Golden:
    record: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    assert record["config"] == json.loads(json.dumps(MODELS[name].config)), "run tiny.make_golden again"
    assert record["weights_sha256"] == digest(make_weights(MODELS[name])), "run tiny.make_golden again"
    prompts = record["prompts"]
    return Golden(
        [prompt["ids"] for prompt in prompts],
        [prompt["positions"] for prompt in prompts],
        [np.array(prompt["logits"]) for prompt in prompts],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def hf_path(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        write_hf(folder / name, MODELS[name].config, make_weights(MODELS[name]))
    return folder / name


def gguf_path(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_gguf(path, MODELS[name], make_weights(MODELS[name]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(folder: Path, name: str, backend: str) -> None:
    truth = golden(name)
    engine = open_engine(hf_path(folder, name), backend)
    errors = {schedule: truth.error(run(engine, truth.prompts, schedule)) for schedule in SCHEDULES}
    engine.close()
    assert max(errors.values()) <= BOUNDS[backend], errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_odd_heads"])
def test_models_with_vision_have_the_same_text(folder: Path, name: str, backend: str) -> None:
    """Text in `text_config` and under `model.language_model`, beside tensors of other parts, which are left out."""
    text = MODELS[name].config
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"depth": 2, "model_type": "qwen3_5_vision"},
        "image_token_id": 5,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    weights = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: values
        for key, values in make_weights(MODELS[name]).items()
    }
    left_out = ("model.visual.blocks.0.norm1.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight")
    weights |= dict.fromkeys(left_out, np.ones((3, 4), np.float32))
    path = write_hf(folder / f"{name}_vision", config, weights)
    prompts = golden(name).prompts
    engine, plain = open_engine(path, backend), open_engine(hf_path(folder, name), backend)
    assert set(engine.spec.ignored_tensors) == set(left_out)
    for ours, theirs in zip(run(engine, prompts, "one_piece"), run(plain, prompts, "one_piece"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    engine.close()
    plain.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GGUF_MODELS)
def test_gguf_logits_equal_transformers(folder: Path, name: str, backend: str) -> None:
    truth = golden(name)
    engine = open_engine(gguf_path(folder, name), backend)
    errors = {schedule: truth.error(run(engine, truth.prompts, schedule)) for schedule in ("one_piece", "interleaved")}
    engine.close()
    assert max(errors.values()) <= BOUNDS[backend], errors


@pytest.mark.parametrize("isa", available_instruction_sets())
@pytest.mark.parametrize(
    "name",
    [
        "llama_biases", "mistral", "qwen3_windows_bias", "gemma2", "gemma3_linear", "qwen3_5", "qwen3_5_odd_heads",
        "qwen3_5_equal_heads", "qwen3_next",
    ],
)  # fmt: skip
def test_every_instruction_set_equals_transformers(folder: Path, name: str, isa: str) -> None:
    truth = golden(name)
    engine = open_engine(hf_path(folder, name), isa)
    errors = {schedule: truth.error(run(engine, truth.prompts, schedule)) for schedule in ("one_piece", "interleaved")}
    engine.close()
    assert max(errors.values()) <= BOUNDS["cpu"], errors


@pytest.mark.parametrize(
    "name", ["llama_biases", "mistral", "mistral_long", "qwen2_windows", "qwen3", "gemma2_long", "gemma3_linear"]
)
def test_chunks_batch_mates_and_threads_change_no_bit(folder: Path, name: str) -> None:
    """Which kernel a row takes depends on its kind only, so all prompt rows are equal bit for bit on the CPU."""
    prompts = golden(name).prompts
    engine = open_engine(hf_path(folder, name), "cpu", threads=1)
    whole = run(engine, prompts, "one_piece")
    chunks = run(engine, prompts, "odd_chunks")
    mates = run(engine, prompts, "interleaved")
    alone = run(engine, prompts[:1], "token_by_token")
    engine.close()
    engine = open_engine(hf_path(folder, name), "cpu", threads=3)
    threads = run(engine, prompts, "one_piece")
    tokens = run(engine, prompts, "token_by_token")
    engine.close()
    for index in range(2):
        np.testing.assert_array_equal(chunks[index], whole[index])
        np.testing.assert_array_equal(threads[index], whole[index])
    np.testing.assert_array_equal(mates[0], whole[0])
    np.testing.assert_array_equal(tokens[0], alone[0])


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("qwen3_5", "qwen3_next"))])
def test_chunks_mates_and_threads_change_no_bit_of_a_hybrid(folder: Path, name: str) -> None:
    """As above for chunks that end on borders of 64, where the pieces of the gated delta rule do."""
    prompts = golden(name).prompts
    engine = open_engine(hf_path(folder, name), "cpu", threads=1)
    whole = run(engine, prompts, "one_piece")
    alone = run(engine, prompts[:1], "token_by_token")
    engine.close()
    engine = open_engine(hf_path(folder, name), "cpu", threads=3)
    for schedule in ("one_piece", "border_chunks", "border_mates"):
        for ours, theirs in zip(run(engine, prompts, schedule), whole, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(run(engine, prompts, "token_by_token")[0], alone[0])
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("name", ["llama_biases", "gemma3", "qwen3_5"])
def test_half_precision_files_are_read_exactly(tmp_path: Path, name: str, dtype: str, backend: str) -> None:
    """A file of 16-bit weights gives the logits of the same weights stored in 32 bits."""
    weights = make_weights(MODELS[name])
    if dtype == "F16":
        same = {key: values.astype(np.float16).astype(np.float32) for key, values in weights.items()}
    else:
        same = {key: (values.view(np.uint32) & 0xFFFF0000).view(np.float32) for key, values in weights.items()}
    prompts = golden(name).prompts
    half = open_engine(write_hf(tmp_path / "half", MODELS[name].config, weights, dtype), backend)
    full = open_engine(write_hf(tmp_path / "full", MODELS[name].config, same), "reference")
    for ours, theirs in zip(run(half, prompts, "interleaved"), run(full, prompts, "interleaved"), strict=True):
        assert np.abs(ours - theirs).max() <= BOUNDS[backend] * max(1.0, float(np.abs(theirs).max()))
    half.close()
    full.close()


@pytest.mark.parametrize("backend", ["reference", *available_instruction_sets()])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "qwen3_5"])
def test_numbers_beyond_the_range_of_half_precision_change_no_bit(tmp_path: Path, name: str, backend: str) -> None:
    """Deep models have them in bf16; what anywhere was a 16-bit float of IEEE would be infinite."""
    weights = make_weights(MODELS[name])
    config = MODELS[name].config | {"rms_norm_eps": 1e-15}
    some = [prompt[:60] for prompt in prompts(MODELS[name])]
    for dtype in ("F32", "BF16"):
        usual = open_engine(write_hf(tmp_path / f"usual {dtype}", config, weights, dtype), backend)
        large = open_engine(
            write_hf(tmp_path / f"large {dtype}", config, beyond_half_precision(weights), dtype), backend
        )
        for theirs, ours in zip(run(usual, some, "interleaved"), run(large, some, "interleaved"), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        usual.close()
        large.close()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith("_long")])
def test_every_property_of_the_model_matters(folder: Path, name: str) -> None:
    """Setting a property that is not the default back to it moves the logits by at least 100 bounds of the CPU."""
    truth = golden(name)
    path = hf_path(folder, name)
    right = _config(path)
    for field, wrong in _mistakes(right).items():
        engine = open_engine(path, config=wrong)
        error = truth.error(run(engine, truth.prompts, "one_piece"))
        engine.close()
        assert error >= 100 * BOUNDS["cpu"], f"{field} moves the logits by {error:.1e} only"


PARTS_OF_A_HYBRID: dict[str, tuple[str, Any]] = {
    "decay": ("gated_delta.softplus", np.zeros_like),
    "write strength": ("gated_delta.sigmoid", np.ones_like),
    "length of q and k": ("gated_delta.unit", lambda x: x),
    "activations": ("gated_delta.silu", lambda x: x),
    "norm of the output": ("gated_delta.rmsnorm", lambda x, weight, eps: x),
    "output gate": ("backend.sigmoid", np.ones_like),
}


@pytest.mark.parametrize("part", PARTS_OF_A_HYBRID)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_odd_heads", "qwen3_5_equal_heads"])
def test_every_part_of_a_hybrid_matters(folder: Path, name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out a step of the gated delta rule, or the gate of attention, moves the logits by 100 bounds or more."""
    function, without = PARTS_OF_A_HYBRID[part]
    monkeypatch.setattr(f"edge_transformer.ops.reference.{function}", without)
    truth = golden(name)
    engine = open_engine(hf_path(folder, name))
    error = truth.error(run(engine, truth.prompts, "one_piece"))
    engine.close()
    assert error >= 100 * BOUNDS["cpu"], f"{part} moves the logits by {error:.1e} only"


@pytest.mark.parametrize("part", ["conv", "dt_bias", "decay", "delta_norm"])
def test_every_vector_of_a_hybrid_matters(folder: Path, part: str) -> None:
    truth = golden("qwen3_5")
    engine = open_engine(hf_path(folder, "qwen3_5"))
    for layer in engine._layers:
        if part in layer.vectors:
            values = layer.vectors[part].numpy()
            values[...] = np.roll(values, 1, axis=-1)
    error = truth.error(run(engine, truth.prompts, "one_piece"))
    engine.close()
    assert error >= 100 * BOUNDS["cpu"], f"{part} moves the logits by {error:.1e} only"


def test_every_type_of_rope_is_compared_at_every_position(folder: Path) -> None:
    types = {rope.type for name in ROPES for rope in _config(hf_path(folder, name)).ropes}
    assert types == {"default", "linear", "llama3", "yarn"}


def _config(path: Path) -> ModelConfig:
    engine: Engine = open_engine(path)
    config = engine.config
    engine.close()
    return config


def _mistakes(right: ModelConfig) -> dict[str, ModelConfig]:
    """The configuration with one property forgotten, for each that this model has."""
    mistakes: dict[str, ModelConfig] = {}
    if right.norm_eps > 1e-4:
        mistakes["norm_eps"] = replace(right, norm_eps=1e-6)
    if right.embedding_scale != 1.0:
        mistakes["embedding_scale"] = replace(right, embedding_scale=1.0)
    if right.attention_softcap is not None:
        mistakes["attention_softcap"] = replace(right, attention_softcap=None)
    if right.final_softcap is not None:
        mistakes["final_softcap"] = replace(right, final_softcap=None)
    if any(window is not None for window in right.layer_windows):
        mistakes["layer_windows"] = replace(right, layer_windows=(None,) * right.num_layers)
    if any(rope.type != "default" for rope in right.ropes):
        plain = tuple(Rope("default", rope.theta, rope.rotary_dim) for rope in right.ropes)
        mistakes["rope type"] = replace(right, ropes=plain)
    if len(right.ropes) == 2:
        mistakes["second rope"] = replace(right, layer_ropes=(0,) * right.num_layers)
    if right.delta is not None and 1 < right.delta.key_heads < right.delta.value_heads:
        mistakes["tiled_values"] = replace(right, delta=replace(right.delta, tiled_values=True))
    mistakes["attention_scale"] = replace(right, attention_scale=right.attention_scale * 1.1)
    other = {"silu": "gelu_tanh", "gelu_tanh": "silu"}
    mistakes["activation"] = replace(right, activation=other[right.activation])
    return mistakes


@pytest.mark.golden
@pytest.mark.parametrize("name", MODELS)
def test_golden_files_equal_transformers_live(name: str) -> None:
    """The kept logits are what transformers gives here and now."""
    from tiny.make_golden import transformers_logits

    truth = golden(name)
    weights = make_weights(MODELS[name])
    logits = [transformers_logits(MODELS[name].config, weights, prompt).astype(np.float32) for prompt in truth.prompts]
    assert truth.error(logits) <= 6e-7


ROPES = {
    "llama_linear": 400, "llama_llama3": 150, "llama_yarn": 150, "llama_yarn_betas": 150, "llama_yarn_mscale": 150,
    "gemma3_linear": 150, "qwen3_5_wide_heads": 400,
}  # fmt: skip
"""Models of every type of rope scaling, and a length far past the context that was scaled: 24 or 32 tokens by their
fields, a third or an eighth of 1024 by their factor.
"""


@pytest.mark.golden
@pytest.mark.parametrize("name", ROPES)
def test_every_position_equals_transformers_live(folder: Path, name: str) -> None:
    """As the golden test, at every position of a fresh random prompt."""
    from tiny.make_golden import transformers_logits

    weights = make_weights(MODELS[name])
    prompt = [int(token) for token in np.random.default_rng().integers(0, 131, ROPES[name])]
    expected = transformers_logits(MODELS[name].config, weights, prompt)
    engine = open_engine(hf_path(folder, name))
    for schedule in ("one_piece", "token_by_token"):
        ours = run(engine, [prompt], schedule)[0]
        assert np.abs(ours - expected).max() <= BOUNDS["reference"] * max(1.0, np.abs(expected).max())
    engine.close()
