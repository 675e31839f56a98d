"""Quantized models on the emulated GPU: the same bits wherever weights lie, and a layer reaches a slot in one copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import MODES, open_on_gpu, pieces, tokens_of
from edge_transformer.cuda.weights import GpuWeights
from edge_transformer.engine.core import Engine
from edge_transformer.engine.quantize import quantize_model
from edge_transformer.engine.quantize_plan import Quantization
from tiny.models import MODELS
from tiny.run import open_engine
from tiny.weights import make_weights
from tiny.write import write_hf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(MODELS["qwen3"], config=MODELS["qwen3"].config | {"hidden_size": 128, "intermediate_size": 256})
    return write_hf(tmp_path_factory.mktemp("source") / "qwen3", model.config, make_weights(model), "BF16")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)], ids=["sm_75", "sm_80"])
@pytest.mark.parametrize(
    "choice",
    [Quantization("int8-row"), Quantization("int4")],
    ids=lambda choice: choice.description,
)
def test_every_mode_gives_the_same_bits(
    source: Path, tmp_path: Path, closing: list[Engine], choice: Quantization, capability: tuple[int, int]
) -> None:
    quantize_model(source, tmp_path / "out", choice, threads=1)
    oracle = open_engine(tmp_path / "out", "reference")
    closing.append(oracle)
    tokens = tokens_of(20)
    expected = pieces(oracle, tokens, 17, 2)
    results = []
    modes = ("all resident", "all streamed, output projection too")
    for seed, mode in enumerate(modes):
        opened = open_on_gpu(tmp_path / "out", MODES[mode], seed, capability)
        closing.append(opened.engine)
        results.append(pieces(opened.engine, tokens, 17, 2))
        weights = opened.engine._weights
        assert isinstance(weights, GpuWeights)
        if weights._slots is not None:
            layers = weights._slots._units[:3]
            assert [len(unit) for unit in layers] == [1, 1, 1]
    assert np.abs(results[0] - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))
    assert all(np.array_equal(results[0], other) for other in results[1:])
