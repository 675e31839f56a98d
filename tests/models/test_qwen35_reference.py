"""Qwen3.5 models whose weights any language can make, against a plain fp64 program and what transformers said of them.

Bounds: logits 2e-5 and states 1e-6 of the oracle, logits 1e-5 * max(1, max |logit|) of the CPU; greedy ids are equal.
The GPU's are in tests/cuda.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.ops.reference.gated_delta import block_views
from tiny.qwen35 import CONTAINERS, NAMES, RUNS, bound, load_program, load_records, model_path, next_logits, processed
from tiny.run import open_engine


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program()


@pytest.fixture(scope="module")
def records(program: Any) -> dict[str, Any]:
    return load_records(program)


@pytest.mark.parametrize("kind", ["prompt", "decode"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_states_and_greedy_ids(
    tmp_path: Path, program: Any, records: dict[str, Any], backend: str, name: str, container: str, run: str, kind: str
) -> None:
    config, record = records[name]["config"], records[name]["runs"][run]
    engine = open_engine(model_path(tmp_path, program, name, config, container), backend)
    sequence, logits = processed(engine, record["prompt_ids"], kind)
    expected = np.array(record["last_logits"])
    assert np.abs(logits - expected).max() <= (2e-5 if backend == "reference" else bound(expected))
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
