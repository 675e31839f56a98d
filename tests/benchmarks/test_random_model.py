"""Random models of true shapes: files that independent readers open, numbers of a sane size, finite logits."""

import sys
from pathlib import Path

import numpy as np
import pytest

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from random_model import FORMATS_OF_FILES, GAIN, GGUF_FORMATS, SHAPES, blocks_of, write_model

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.core import Engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import FORMATS, WeightFormat
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType

TINY = SHAPES["tiny"]


@pytest.mark.parametrize("file_format", FORMATS_OF_FILES)
def test_the_engine_opens_it_and_its_logits_are_of_a_sane_size(file_format: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / ("model" if file_format == "hf" else "model.gguf"), "tiny", file_format, 2)
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    engine = Engine(checkpoint, spec, CpuBackend(1), HostWeights(checkpoint, spec), DType.F32)
    logits = engine.prefill(engine.new_sequence(), [1, 2, 3, 999])
    engine.close()
    checkpoint.close()
    assert logits is not None
    assert logits.shape == (TINY.vocab_size,)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 1.0  # a normed state times rows of standard deviation GAIN / sqrt(hidden)


@pytest.mark.parametrize("file_format", GGUF_FORMATS)
def test_the_gguf_package_reads_formats_shapes_and_numbers(file_format: str, tmp_path: Path) -> None:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(write_model(tmp_path / "model.gguf", "tiny", file_format, 2))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 3 + 9 * TINY.num_layers
    expected_head = "Q6_K" if file_format == "Q4_0" else file_format
    assert tensors["output.weight"].tensor_type.name == expected_head
    for name, tensor in tensors.items():
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            assert tensor.tensor_type.name == "F32", name
            assert (values == 1).all(), name
            continue
        assert tensor.tensor_type.name == (expected_head if name == "output.weight" else file_format), name
        columns = int(tensor.shape[0])
        assert abs(values.std() * columns**0.5 / GAIN - 1) < 0.1, name
        assert abs(values.mean()) < 0.1 * values.std(), name
    assert reader.fields["tokenizer.ggml.model"].contents() == "no_vocab"
    assert reader.fields["llama.vocab_size"].contents() == TINY.vocab_size


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = write_model(tmp_path / "model", "tiny", "hf", 2)
    with safe_open(path / "model.safetensors", "numpy") as file:
        names = list(file.keys())
        assert len(names) == 3 + 9 * TINY.num_layers
        shape = file.get_slice("model.layers.2.mlp.down_proj.weight").get_shape()
    assert shape == [TINY.hidden_size, TINY.intermediate_size]


def test_tensors_of_one_shape_differ(tmp_path: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(write_model(tmp_path / "model.gguf", "tiny", "Q8_0", 2))
    gate, up = (next(t.data for t in reader.tensors if t.name == f"blk.0.ffn_{part}.weight") for part in ("gate", "up"))
    assert not np.array_equal(gate, up)


@pytest.mark.parametrize("weight_format", ["BF16", "F16", "Q8_0", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("deviation", [0.7 / 14336**0.5, 0.05])
def test_blocks_have_the_deviation_that_was_asked(weight_format: str, deviation: float) -> None:
    from gguf import GGMLQuantizationType, dequantize

    data = blocks_of(WeightFormat(weight_format), deviation, 1 << 16)
    assert len(data) % FORMATS[WeightFormat(weight_format)].file_block_bytes == 0
    values = dequantize(data, GGMLQuantizationType[weight_format])
    assert abs(values.std() / deviation - 1) < 0.05


def test_a_full_file_system_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import random_model

    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 0  # f_bavail
    monkeypatch.setattr(random_model.os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(OSError, match=r"0 bytes left; \d+ are needed"):
        write_model(tmp_path / "model.gguf", "tiny", "Q8_0", 1)
    assert not (tmp_path / "model.gguf").exists()
