"""Qwen3.5 models whose weights any language can make, and what transformers said of them.

The program that makes the weights and computes in fp64 (golden/qwen35_ref.py) and its record (golden/qwen35_tiny.json)
are reference data, kept as they came.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from paths import REPOSITORY
from tiny.models import TinyModel
from tiny.write import write_gguf, write_hf

NAMES = ["A_tied_k16v16", "C_head128"]
RUNS = ["short", "len150"]
CONTAINERS = ["hf", "gguf"]
"""Value heads grouped by key head, and in tiled order."""


def load_program() -> Any:
    path = REPOSITORY / "tests" / "golden" / "qwen35_ref.py"
    spec = importlib.util.spec_from_file_location("qwen35_ref", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_records(program: Any) -> dict[str, Any]:
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


def bound(expected: npt.NDArray[np.float64]) -> float:
    """Of the error of a CPU's or GPU's logits."""
    return 1e-5 * max(1.0, float(np.abs(expected).max()))
