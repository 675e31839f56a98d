"""Qwen3.5 models whose weights any language can make, against a plain fp64 program and what transformers said of them.

The program and its record (qwen35_ref.py, qwen35_tiny.json) are shared reference data. Bounds: logits 2e-5 and states
1e-6 of the oracle, logits 1e-5 * max(1, max |logit|) of the CPU; greedy ids are equal.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.ops.reference.gated_delta import block_views
from paths import shared_folder
from tiny.models import TinyModel
from tiny.run import open_engine
from tiny.write import write_gguf, write_hf

NAMES = ["A_tied_k16v16", "C_head128"]
RUNS = ["short", "len150"]


@pytest.fixture(scope="module")
def program() -> Any:
    path = shared_folder() / "golden" / "qwen35_ref.py"
    if not path.is_file():
        pytest.skip("qwen35_ref.py is not in the folder of shared reference data")
    spec = importlib.util.spec_from_file_location("qwen35_ref", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(program: Any) -> dict[str, Any]:
    records: dict[str, Any] = json.loads(Path(program.__file__).with_name("qwen35_tiny.json").read_text())
    return records


def model_path(folder: Path, program: Any, name: str, config: dict[str, Any], container: str) -> Path:
    own = {key: value for key, value in config.items() if key not in ("rope_theta", "partial_rotary_factor")}
    own |= {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": config["partial_rotary_factor"],
            "mrope_section": [1, 1, 0],
        },
    }
    weights = program.weights(config)
    if container == "hf":
        return write_hf(folder / name, own, weights)
    text = {key: values for key, values in weights.items() if not key.startswith("mtp.")}
    return write_gguf(folder / f"{name}.gguf", TinyModel(name, own, {}), text)


def processed(engine: Engine, ids: list[int], kind: str) -> tuple[Sequence, npt.NDArray[np.float32]]:
    sequence = engine.new_sequence()
    if kind == "prompt":
        logits = engine.prefill(sequence, ids)
        assert logits is not None
        return sequence, logits
    for token in ids:
        logits = next_logits(engine, sequence, token)
    return sequence, logits


def next_logits(engine: Engine, sequence: Sequence, token: int) -> npt.NDArray[np.float32]:
    result = engine.step([Chunk(sequence, [token], "decode", "last")])
    assert result is not None
    first: npt.NDArray[np.float32] = result.logits()[0]
    return first


@pytest.mark.parametrize("kind", ["prompt", "decode"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("container", ["hf", "gguf"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_states_and_greedy_ids(
    tmp_path: Path, program: Any, records: dict[str, Any], backend: str, name: str, container: str, run: str, kind: str
) -> None:
    config, record = records[name]["config"], records[name]["runs"][run]
    engine = open_engine(model_path(tmp_path, program, name, config, container), backend)
    sequence, logits = processed(engine, record["prompt_ids"], kind)
    expected = np.array(record["last_logits"])
    bound = 2e-5 if backend == "reference" else 1e-5 * max(1.0, float(np.abs(expected).max()))
    assert np.abs(logits - expected).max() <= bound
    if backend == "reference":
        exact = program.Ref(config, program.weights(config))
        for token in record["prompt_ids"]:
            exact.step(token)
        assert_states_close(engine, sequence, exact, config, container)
    ids = []
    for _ in record["greedy_ids"]:
        ids.append(int(np.argmax(logits)))
        logits = next_logits(engine, sequence, ids[-1])
    assert ids == record["greedy_ids"]
    engine.close()


def assert_states_close(engine: Engine, sequence: Sequence, exact: Any, config: dict[str, Any], container: str) -> None:
    assert sequence.recurrent is not None
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = [head % keys * (heads // keys) + head // keys for head in range(heads)]  # of tiled value heads
    for shape, address in zip(engine._deltas, sequence.recurrent.addresses(), strict=True):
        state, window = block_views(int(address), shape)
        theirs, kept = exact.st[shape.layer]["S"], exact.st[shape.layer]["conv"]
        if container == "gguf":
            theirs = theirs[order]
            first = len(kept) - heads * shape.value_dim
            tail = kept[first:].reshape(heads, shape.value_dim, -1)[order]
            kept = np.concatenate([kept[:first], tail.reshape(kept[first:].shape)])
        assert np.abs(state - theirs).max() <= 1e-6 * max(1.0, float(np.abs(theirs).max()))
        # These are sums of products over the hidden size, rounded as such.
        assert np.abs(window - kept).max() <= 1e-6 * max(1.0, float(np.abs(kept).max()))
