"""Qwen3.5 models whose weights any language can make, on the emulated GPU, against what transformers said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from cuda.opened import MODES, open_on_gpu
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from tiny.qwen35 import bound, load_program, load_records, model_path

# With the one key head of C_head128 both orders of value heads are the same.
MODELS = [("A_tied_k16v16", "hf"), ("A_tied_k16v16", "gguf"), ("C_head128", "hf")]
FED: list[tuple[str, Literal["prompt", "decode"], int]] = [
    ("short", "prompt", 24),
    ("short", "decode", 24),
    ("len150", "prompt", 5),
]
"""Run, kind of its prompt's rows, tokens of the answer."""


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
@pytest.mark.parametrize(("name", "container"), MODELS)
def test_logits_and_greedy_ids(
    folder: Path, closing: list[Engine], name: str, container: str, capability: tuple[int, int]
) -> None:
    """The recorded answer is fed as decode rows of one pass: its tokens are greedy if each is the likeliest there."""
    program = load_program()
    recorded = load_records(program)[name]
    path = model_path(folder, program, name, recorded["config"], container)
    mode = MODES["all streamed, KV cache on the host"]
    engine = open_on_gpu(path, mode, capability=capability, context=256, rows=192).engine
    closing.append(engine)
    for run, kind, count in FED:
        record = recorded["runs"][run]
        sequence = engine.new_sequence()
        last = engine.step([Chunk(sequence, record["prompt_ids"], kind, "last")])
        assert last is not None
        logits, expected = last.logits(), np.array(record["last_logits"])
        assert np.abs(logits[0] - expected).max() <= bound(expected), (run, kind)
        answer = engine.step([Chunk(sequence, record["greedy_ids"][: count - 1], "decode", "all")])
        assert answer is not None
        ids = np.concatenate([logits, answer.logits()]).argmax(axis=1).tolist()
        assert ids == record["greedy_ids"][:count], (run, kind)
        sequence.close()
